"""Splitting a batch into groups of requests that run as one call, and those into tiles.

Requests with few query rows are grouped where query lengths are equal and lengths so close
that padding costs less than another call; longer ones run alone, in tiles of rows that read
only the keys their rows may see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnplat.backends.batch import Batch, HostLengths, PageTable
from attnplat.backends.checks import to_device
from attnplat.backends.form import AttentionForm
from attnplat.backends.portable.dense import TileMask
from attnplat.backends.portable.gather import look_up
from attnplat.backends.portable.masks import HostMasks, Queries, queries_of, visible_keys

FOLDED_ROWS = 16
"""Longest query whose group's heads become rows of one head. Folding reads each key once for
all heads (half the time at 4 rows, equal at 16 on the machine tried), and copies the mask."""

TILE_ROWS = 512
"""Query rows of a tile. Smaller tiles skip more hidden keys, larger ones run fewer calls."""

PADDED_ELEMENTS = 1 << 17
"""Key and value elements that may be padded for a request to join a group. Copying and
multiplying so many in vain takes about as long as the fixed cost of one more call does, some
150 us on the machine tried."""

KEPT_MASK = 1 << 18
"""Largest mask that a plan keeps; larger ones are made when needed, at little of the cost of
the scores they apply to."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Query rows `first` to `last` against dense keys `start` to `stop`.

    `square`: the kernel's own causal mask is right. `complete`: every row sees every key.
    `mask`: kept by the plan, or None: to be made when it is needed.
    """

    first: int
    last: int
    start: int
    stop: int
    square: bool = False
    complete: bool = False
    mask: TileMask | None = None


@dataclass(frozen=True, eq=False)
class Group:
    """Requests with equally many query rows, run as one.

    Attributes:
        size, query_len: requests, and query rows of each.
        first_request: number of the first in the batch.
        rows: their query rows: a slice for one request, int64 [size * query_len] for more.
        blocks: pages to copy, int64 [size, pages].
        start, num_keys: which of the pages' keys are used, front to back.
        dead: (request, key) of used places that hold no live key and are to be zeroed, or
            None. Whole pages of padding are copies of a live page instead.
        folded: heads of a group are run as rows.
        tiles: the work.
        reader: the rows and key positions for masks and biases; None where nothing asks.
    """

    size: int
    query_len: int
    first_request: int
    rows: slice | torch.Tensor
    blocks: torch.Tensor
    start: int
    num_keys: int
    dead: tuple[torch.Tensor, torch.Tensor] | None
    folded: bool
    tiles: tuple[Tile, ...]
    reader: Reader | None


@dataclass(frozen=True, eq=False)
class Reader:
    """The query rows of a group and its key positions, int64 [size, keys]; seq_len where
    there is no key."""

    queries: Queries
    positions: torch.Tensor

    def of(self, tile: Tile) -> Reader:
        """Only a tile's rows and keys."""
        return Reader(
            self.queries.rows(tile.first, tile.last), self.positions[:, tile.start : tile.stop]
        )


@dataclass(frozen=True)
class Reach:
    """The pages that hold every key one request may see, and where among them the keys are.

    Page `i` of `count` is logical page i below `head`, else `second + i - head`. In a row of
    all those pages, keys of interest are `begin` to `end`.
    """

    head: int
    second: int
    count: int
    begin: int
    end: int

    @classmethod
    def of(cls, spans: tuple[tuple[int, int], ...], page: int) -> Reach:
        """The reach of key spans, in pages of `page` tokens (1: plain rows)."""
        if not spans:
            return cls(0, 0, 0, 0, 0)
        low, high = spans[-1]
        head, second, last = 0, low // page, -(-high // page)
        begin = low - second * page
        if len(spans) == 2:
            begin, head = 0, -(-spans[0][1] // page)
            if second <= head:
                head, second = 0, 0
        count = head + last - second
        return cls(head, second, count, begin, count * page - (last * page - high))


@dataclass(frozen=True, eq=False)
class Grouping:
    """Everything needed to turn a batch into groups.

    Attributes:
        alone: every request is a group by itself.
        fused: the fused kernel will run, not the online softmax.
        dtype: the activations' dtype.
        most_keys: keys of all kv heads and requests of a group that are not to be exceeded.
    """

    form: AttentionForm
    batch: Batch
    pages: PageTable | None
    lengths: HostLengths
    masks: HostMasks
    alone: bool
    fused: bool
    dtype: torch.dtype
    most_keys: int

    @property
    def page(self) -> int:
        """Tokens per page; 1 without pages."""
        return 1 if self.pages is None else self.pages.block_size

    def groups(self) -> tuple[Group, ...]:
        """The groups of the batch, each request with query rows in exactly one."""
        reach = {
            r: Reach.of(self.spans(r, 0, self.lengths.query_len(r)), self.page)
            for r in range(self.batch.num_reqs)
            if self.lengths.query_len(r)
        }
        return tuple(self._group(members, reach) for members in self._members(reach))

    def spans(self, request: int, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Where keys lie that rows `first` to `last` of the request may see."""
        seq_len = self.lengths.seq_lens[request]
        context = seq_len - self.lengths.query_len(request)
        return self.masks.key_spans(
            self.form.mask, request, context + first, context + last - 1, seq_len
        )

    def _members(self, reach: dict[int, Reach]) -> list[list[int]]:
        groups: list[list[int]] = []
        open_groups: dict[int, list[int]] = {}
        for r in sorted(reach, key=lambda r: (-reach[r].count, r)):
            rows = self.lengths.query_len(r)
            group = open_groups.get(rows)
            if group is not None and self._joins(reach[r], reach[group[0]], len(group)):
                group.append(r)
                continue
            groups.append([r])
            if not self.alone and rows <= FOLDED_ROWS:
                open_groups[rows] = groups[-1]
        return groups

    def _joins(self, one: Reach, longest: Reach, size: int) -> bool:
        """Whether a request is to join a group of `size` whose longest has that reach."""
        keys = longest.count * self.page * self.form.num_kv_heads
        if one.count == 0 or (size + 1) * keys > self.most_keys:
            return False
        padded = (longest.count - one.count) * self.page * self.form.num_kv_heads
        elements = padded * (self.form.head_size + self.form.v_head_size)
        # Without one full page to pad with, padding must be zeroed, which takes longer.
        return elements * (1 if one.end >= self.page else 4) <= PADDED_ELEMENTS

    def _group(self, members: list[int], reach: dict[int, Reach]) -> Group:
        device, size, r = self.batch.device, len(members), members[0]
        query_len, lone = self.lengths.query_len(r), size == 1
        start = reach[r].begin if lone else 0
        stop = reach[r].end if lone else reach[r].count * self.page
        logical, dead = self._pages(members, reach)
        first = [self.lengths.query_start[r] for r in members]
        rows = torch.tensor(first)[:, None] + torch.arange(query_len)
        group = Group(
            size=size,
            query_len=query_len,
            first_request=r,
            rows=slice(first[0], first[0] + query_len)
            if lone
            else to_device(rows.flatten(), device),
            blocks=self._blocks(members, logical),
            start=start,
            num_keys=stop - start,
            dead=dead,
            # A causal mask of the kernel's own would take the heads of a group for more rows.
            folded=not lone or (query_len <= FOLDED_ROWS and not self._square(r)),
            tiles=self._tiles(r, reach[r], query_len, stop - start)
            if lone
            else (Tile(0, query_len, 0, stop),),
            reader=None,
        )
        masked = not all(tile.complete or tile.square for tile in group.tiles)
        if not masked and not self.form.alibi and not self.form.position_bias:
            return group
        group = replace(group, reader=self._reader(members, reach, logical, start, stop))
        return replace(group, tiles=tuple(self._masked(group, tile) for tile in group.tiles))

    def _pages(
        self, members: list[int], reach: dict[int, Reach]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Logical pages, on the host, and what is dead among the keys of more than one request.

        A request with fewer pages than the first repeats its own first page, which is live
        from end to end, unless it is its last, too.
        """
        slot = torch.arange(reach[members[0]].count)[None]
        facts = [(reach[r].head, reach[r].second, reach[r].count, reach[r].end) for r in members]
        head, second, count, end = torch.tensor(facts)[:, :, None].unbind(1)
        slot = torch.where(slot < count, slot, 0)
        logical = torch.where(slot < head, slot, second + slot - head)
        if len(members) == 1:
            return logical, None
        key = torch.arange(slot.shape[1] * self.page)[None]
        dead = (key >= end) & ((key < count * self.page) | (end < self.page))
        if not bool(dead.any()):
            return logical, None
        request, place = dead.nonzero(as_tuple=True)
        return logical, (to_device(request, self.batch.device), to_device(place, self.batch.device))

    def _reader(
        self,
        members: list[int],
        reach: dict[int, Reach],
        logical: torch.Tensor,
        start: int,
        stop: int,
    ) -> Reader:
        positions = (logical[:, :, None] * self.page + torch.arange(self.page)).flatten(1)
        end = torch.tensor([reach[r].end for r in members])[:, None]
        seq_len = torch.tensor([self.lengths.seq_lens[r] for r in members])[:, None]
        empty = torch.arange(positions.shape[1])[None] >= end
        positions = torch.where(empty, seq_len, positions)[:, start:stop]
        return Reader(
            queries=queries_of(self.form.mask, self.batch, self.lengths, members),
            positions=to_device(positions, self.batch.device),
        )

    def _blocks(self, members: list[int], logical: torch.Tensor) -> torch.Tensor:
        """Physical blocks of logical pages; without pages, rows of k and v."""
        if self.pages is not None:
            return look_up(self.pages, members, logical)
        starts = self.batch.kv_starts(self.lengths)
        rows = torch.tensor([starts[r] for r in members])[:, None] + logical
        return to_device(rows, self.batch.device)

    # Tiles ---------------------------------------------------------------------------------

    def _tiles(self, r: int, reach: Reach, rows: int, keys: int) -> tuple[Tile, ...]:
        """The tiles of a request that runs alone."""
        if keys == 0:
            return (Tile(0, rows, 0, 0, complete=True),)
        if self._square(r):
            return (Tile(0, rows, 0, keys, square=True),)
        if self._open(r) and self.fused:
            return (Tile(0, rows, 0, keys, complete=True),)
        complete = self._open(r) or self._exact(r)
        tiles = []
        for first in range(0, rows, TILE_ROWS):
            last = min(first + TILE_ROWS, rows)
            start, stop = self._tile_keys(r, reach, first, last, keys)
            tiles.append(Tile(first, last, start, stop, complete=complete))
        return tuple(tiles)

    def _tile_keys(
        self, request: int, reach: Reach, first: int, last: int, keys: int
    ) -> tuple[int, int]:
        spans = self.spans(request, first, last)
        if not spans:
            return 0, 0
        if reach.head or len(spans) > 1:
            return 0, keys
        origin = reach.second * self.page + reach.begin
        return spans[0][0] - origin, spans[0][1] - origin

    def _masked(self, group: Group, tile: Tile) -> Tile:
        """The tile with its mask, where the mask is small and depends on no later tensor."""
        size = group.size * (tile.last - tile.first) * (tile.stop - tile.start)
        if tile.complete or self.form.mask.topk is not None or not 0 < size <= KEPT_MASK:
            return tile
        mask = make_mask(group, tile, self.form, self.dtype, self.fused)
        if mask.visible.device.type == "cpu" and bool(mask.visible.all()):
            return replace(tile, complete=True)
        return replace(tile, mask=mask)

    def _plain(self, request: int) -> bool:
        """Whether the request has no mask of its own but causality."""
        batch, masks = self.batch, self.masks
        own = batch.tree_mask is None and request not in masks.ranges and not masks.unknown
        return own and self.form.mask.topk is None

    def _open(self, request: int) -> bool:
        """Whether every query sees every key."""
        only = self._plain(request) and self.form.mask.only_causality
        return only and not self.masks.causal[request]

    def _square(self, request: int) -> bool:
        """Whether a causal mask aligned top-left is the mask: as many queries as keys."""
        same = self.lengths.query_len(request) == self.lengths.seq_lens[request]
        only = self._plain(request) and self.form.mask.only_causality
        return self.fused and same and only and self.masks.causal[request]

    def _exact(self, request: int) -> bool:
        """Whether a lone query row's key span holds the keys it sees and no others."""
        one = self.lengths.query_len(request) == 1 and len(self.spans(request, 0, 1)) == 1
        return one and self._plain(request)


def make_mask(
    group: Group,
    tile: Tile,
    form: AttentionForm,
    dtype: torch.dtype,
    fused: bool,
    topk_indices: torch.Tensor | None = None,
) -> TileMask:
    """The mask of a tile; `topk_indices` [requests, rows, topk] of its rows."""
    assert group.reader is not None
    reader = group.reader.of(tile)
    return TileMask.of(
        visible_keys(reader.queries, reader.positions, topk_indices),
        dtype,
        group_size=form.group_size,
        folded=group.folded,
        fused=fused,
    )
