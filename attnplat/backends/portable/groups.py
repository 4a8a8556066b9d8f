"""Splitting a batch into groups of requests that run as one call, and those into tiles.

Requests with few query rows are grouped where query length and page count are equal, so
that no group pads a request by a whole page; longer ones run alone, in tiles of rows that
read only the keys their rows may see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnplat.backends.batch import Batch, HostLengths, PageTable
from attnplat.backends.form import AttentionForm
from attnplat.backends.portable.dense import TileMask
from attnplat.backends.portable.gather import look_up
from attnplat.backends.portable.masks import HostMasks, Queries, queries_of, visible_keys

FOLDED_ROWS = 16
"""Longest query whose group's heads become rows of one head. Folding reads each key once for
all heads (half the time at 4 rows, equal at 16 on the machine tried), and copies the mask."""

TILE_ROWS = 512
"""Query rows of a tile. Smaller tiles skip more hidden keys, larger ones run fewer calls."""

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
    """Requests with equally many query rows and pages, run as one.

    Attributes:
        size, query_len: requests, and query rows of each.
        first_request: number of the first in the batch.
        rows: their query rows: a slice for one request, int64 [size * query_len] for more.
        queries: the same rows for the mask algebra.
        blocks: pages to copy, int64 [size, pages].
        start: keys at the front of the first page that are left out.
        positions: key positions, int64 [size, keys]; seq_len where there is no key.
        dead: (request, key) of the places without a key, which must not be read, or None.
        folded: heads of a group are run as rows.
        tiles: the work.
    """

    size: int
    query_len: int
    first_request: int
    rows: slice | torch.Tensor
    queries: Queries
    blocks: torch.Tensor
    start: int
    positions: torch.Tensor
    dead: tuple[torch.Tensor, torch.Tensor] | None
    folded: bool
    tiles: tuple[Tile, ...]

    @property
    def num_keys(self) -> int:
        """Dense keys of each request, padding included."""
        return self.positions.shape[1]


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
        open_groups: dict[tuple[int, int], list[int]] = {}
        for r, pages in reach.items():
            rows = self.lengths.query_len(r)
            group = open_groups.get((rows, pages.count))
            keys = pages.count * self.page * self.form.num_kv_heads
            if group is not None and (len(group) + 1) * keys <= self.most_keys:
                group.append(r)
                continue
            groups.append([r])
            if not self.alone and rows <= FOLDED_ROWS and pages.count:
                open_groups[rows, pages.count] = groups[-1]
        return groups

    def _group(self, members: list[int], reach: dict[int, Reach]) -> Group:
        device, size = self.batch.device, len(members)
        query_len, lone = self.lengths.query_len(members[0]), size == 1
        start = reach[members[0]].begin if lone else 0
        stop = max(reach[r].end for r in members)
        logical, positions, dead = self._keys(members, reach, start, stop)
        first = [self.lengths.query_start[r] for r in members]
        index = torch.tensor(first)[:, None] + torch.arange(query_len)
        group = Group(
            size=size,
            query_len=query_len,
            first_request=members[0],
            rows=slice(first[0], first[0] + query_len) if lone else index.flatten().to(device),
            queries=queries_of(self.form.mask, self.batch, self.lengths, members),
            blocks=self._blocks(members, logical),
            start=start,
            positions=positions.to(device),
            dead=None if dead is None else (dead[0].to(device), dead[1].to(device)),
            # A causal mask of the kernel's own would take the heads of a group for more rows.
            folded=not lone or (query_len <= FOLDED_ROWS and not self._square(members[0])),
            tiles=(),
        )
        return replace(group, tiles=self._tiles(members, reach, group))

    def _keys(
        self, members: list[int], reach: dict[int, Reach], start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Logical pages, key positions, and the places that hold no key; all on the host."""
        one = reach[members[0]]
        facts = [
            (reach[r].head, reach[r].second, reach[r].end, self.lengths.seq_lens[r])
            for r in members
        ]
        head, second, end, seq_len = torch.tensor(facts)[:, :, None].unbind(1)
        slot = torch.arange(one.count)[None]
        logical = torch.where(slot < head, slot, second + slot - head)
        positions = (logical[:, :, None] * self.page + torch.arange(self.page)).flatten(1)
        positions = positions[:, start:stop]
        empty = torch.arange(start, stop)[None] >= end
        if not bool(empty.any()):
            return logical, positions, None
        request, key = empty.nonzero(as_tuple=True)
        return logical, torch.where(empty, seq_len, positions), (request, key)

    def _blocks(self, members: list[int], logical: torch.Tensor) -> torch.Tensor:
        """Physical blocks of logical pages; without pages, rows of k and v."""
        if self.pages is not None:
            return look_up(self.pages, members, logical)
        starts = self.batch.kv_starts(self.lengths)
        rows = torch.tensor([starts[r] for r in members])[:, None] + logical
        return rows.to(self.batch.device)

    # Tiles ---------------------------------------------------------------------------------

    def _tiles(
        self, members: list[int], reach: dict[int, Reach], group: Group
    ) -> tuple[Tile, ...]:
        keys, rows, r = group.num_keys, group.query_len, members[0]
        if keys == 0:
            return (Tile(0, rows, 0, 0),)
        if group.size > 1:
            return (self._masked(group, Tile(0, rows, 0, keys)),)
        if self._square(r):
            return (Tile(0, rows, 0, keys, square=True),)
        if self._open(r) and self.fused:
            return (Tile(0, rows, 0, keys, complete=True),)
        complete = self._open(r) or self._exact(r)
        tiles = []
        for first in range(0, rows, TILE_ROWS):
            last = min(first + TILE_ROWS, rows)
            start, stop = self._tile_keys(r, reach[r], first, last, keys)
            tiles.append(self._masked(group, Tile(first, last, start, stop, complete=complete)))
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
    queries = group.queries.rows(tile.first, tile.last)
    keys = group.positions[:, tile.start : tile.stop]
    return TileMask.of(
        visible_keys(queries, keys, topk_indices),
        dtype,
        group_size=form.group_size,
        folded=group.folded,
        fused=fused,
    )
