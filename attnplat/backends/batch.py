"""One step's lengths and page tables, as plain tensors that an engine has anyway.

A `Batch` is shared by every layer and every cache group of a step; a `PageTable` belongs to
one cache group. Both are frozen; the helpers return new values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Literal

import torch

from attnplat.backends.checks import at_least, check_tensor
from attnplat.errors import ConfigError, HostLengthsNeededError, UnsupportedCallError

_INT = torch.int32


@dataclass(frozen=True, kw_only=True)
class BatchBounds:
    """The largest step a plan must be able to serve.

    Attributes:
        max_reqs, max_tokens: requests and query rows, padding included.
        max_query_len, max_seq_len: longest query and longest sequence of one request.
    """

    max_reqs: int
    max_tokens: int
    max_query_len: int
    max_seq_len: int

    def exceeded_by(self, batch: Batch) -> str | None:
        """The first bound that `batch` exceeds, as a sentence, or None."""
        for have, bound in (
            ("num_reqs", "max_reqs"),
            ("num_tokens", "max_tokens"),
            ("max_query_len", "max_query_len"),
            ("max_seq_len", "max_seq_len"),
        ):
            value, most = getattr(batch, have), getattr(self, bound)
            if value > most:
                return f"batch.{have} is {value}; bounds.{bound} is {most}"
        return None


@dataclass(frozen=True)
class HostLengths:
    """Exact lengths of a batch as Python integers."""

    query_start: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Real query rows, padding left out."""
        return self.query_start[-1]

    def query_len(self, request: int) -> int:
        """Query rows of one request."""
        return self.query_start[request + 1] - self.query_start[request]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The lengths of one step.

    Device tensors are 1-D (unless said) and on one device. Requests may come in any order;
    padding requests have no query rows and `seq_lens` 0.

    Attributes:
        query_start_loc: first query row of each request, and the end; int32 [num_reqs + 1].
            Rows from the last value on are padding: never read, never written.
        seq_lens: keys each request has after this step's write; int32 [num_reqs]. Cross
            attention: the encoder's lengths.
        num_reqs, num_tokens: sizes on the host, padding included.
        max_query_len, max_seq_len: upper bounds on the host.
        query_start_loc_host, seq_lens_host: the same on the CPU, for backends that plan there.
        host_lens: whether those are `exact` or `upper` bounds.
        causal: overrides the layer's `causal` per request; bool [num_reqs].
        ranges: (request, begin, end) spans of positions that see each other both ways;
            int32 [num_ranges, 3].
        prefix_lens: leading keys that stay visible outside the window; int32 [num_reqs].
        tree_mask: bit k of row t (least significant first) says whether query row t sees the
            k-th query token of its request; uint8 [num_tokens, ceil(max_query_len / 8)].
        kv_start_loc: first row of each request in k and v given without a cache; int32
            [num_reqs]. Default: sequences packed one after the other.
        num_decode_reqs: a promise that the first so many requests have short queries.

    Raises:
        PlanMismatchError: a tensor of the wrong shape, dtype or device.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc_host: torch.Tensor | None = None
    seq_lens_host: torch.Tensor | None = None
    host_lens: Literal["exact", "upper"] = "exact"
    causal: torch.Tensor | None = None
    ranges: torch.Tensor | None = None
    prefix_lens: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    kv_start_loc: torch.Tensor | None = None
    num_decode_reqs: int | None = None

    def __post_init__(self) -> None:
        if self.host_lens not in ("exact", "upper"):
            raise ConfigError(f"batch.host_lens is {self.host_lens!r}; it takes 'exact' or 'upper'")
        device = getattr(self.query_start_loc, "device", torch.device("cpu"))
        host = torch.device("cpu")
        n = self.num_reqs
        mask_width = at_least(-(-self.max_query_len // 8))
        for name, shape, dtype, where in (
            ("query_start_loc", (n + 1,), _INT, device),
            ("seq_lens", (n,), _INT, device),
            ("query_start_loc_host", (n + 1,), _INT, host),
            ("seq_lens_host", (n,), _INT, host),
            ("causal", (n,), torch.bool, device),
            ("ranges", (None, 3), _INT, device),
            ("prefix_lens", (n,), _INT, device),
            ("tree_mask", (self.num_tokens, mask_width), torch.uint8, device),
            ("kv_start_loc", (n,), _INT, device),
        ):
            tensor = getattr(self, name)
            if tensor is None and name not in ("query_start_loc", "seq_lens"):
                continue
            check_tensor(f"batch.{name}", tensor, shape=shape, dtype=dtype, device=where)

    # Making one -----------------------------------------------------------------------

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int] | None = None,
        *,
        device: torch.device | str = "cpu",
        **optional: Any,
    ) -> Batch:
        """A batch from host lengths, with exact host mirrors.

        `seq_lens` defaults to `query_lens` (no context). `optional` are the other fields of
        `Batch`; `causal`, `ranges`, `prefix_lens` and `kv_start_loc` may be plain lists.
        """
        keys = list(query_lens if seq_lens is None else seq_lens)
        if len(keys) != len(query_lens) or any(n < 0 for n in (*query_lens, *keys)):
            raise ConfigError(
                f"query_lens {list(query_lens)} and seq_lens {keys} must be as many, and not "
                "negative"
            )
        start = torch.tensor([0, *accumulate(query_lens)], dtype=_INT)
        lens = torch.tensor(keys, dtype=_INT)
        return cls(
            query_start_loc=start.to(device),
            seq_lens=lens.to(device),
            num_reqs=len(keys),
            num_tokens=int(start[-1]),
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(keys, default=0),
            query_start_loc_host=start,
            seq_lens_host=lens,
            **_to_device(optional, device),
        )

    def replace(self, **changes: Any) -> Batch:
        """A copy with the given fields changed, headers checked anew."""
        return replace(self, **changes)

    def padded(self, num_reqs: int, num_tokens: int) -> Batch:
        """This batch with empty requests and padding rows added at the end.

        Raises ConfigError when it is larger already.
        """
        more_reqs, more_rows = num_reqs - self.num_reqs, num_tokens - self.num_tokens
        if more_reqs < 0 or more_rows < 0:
            raise ConfigError(
                f"a batch of {self.num_reqs} requests and {self.num_tokens} rows cannot be "
                f"padded to {num_reqs} and {num_tokens}"
            )
        changes: dict[str, Any] = {"num_reqs": num_reqs, "num_tokens": num_tokens}
        for name in ("query_start_loc", "query_start_loc_host"):
            changes[name] = _grown(getattr(self, name), more_reqs, repeat_last=True)
        for name in ("seq_lens", "seq_lens_host", "causal", "prefix_lens", "kv_start_loc"):
            changes[name] = _grown(getattr(self, name), more_reqs)
        changes["tree_mask"] = _grown(self.tree_mask, more_rows)
        return replace(self, **changes)

    def slice(self, start: int, stop: int) -> Batch:
        """Requests `start` to `stop`, as a batch of their own.

        Its rows are `q[query_start_loc[start] : query_start_loc[stop]]`. Needs exact host
        lengths (HostLengthsNeededError).
        """
        lengths = self.host_lengths()
        first, last = lengths.query_start[start], lengths.query_start[stop]
        changes: dict[str, Any] = {
            "num_reqs": stop - start,
            "num_tokens": last - first,
            "max_query_len": max(map(lengths.query_len, range(start, stop)), default=0),
            "max_seq_len": max(lengths.seq_lens[start:stop], default=0),
            "num_decode_reqs": None,
        }
        if self.num_decode_reqs is not None:
            changes["num_decode_reqs"] = min(max(self.num_decode_reqs - start, 0), stop - start)
        for name in ("query_start_loc", "query_start_loc_host"):
            tensor = getattr(self, name)
            changes[name] = None if tensor is None else tensor[start : stop + 1] - first
        for name in ("seq_lens", "seq_lens_host", "causal", "prefix_lens", "kv_start_loc"):
            tensor = getattr(self, name)
            changes[name] = None if tensor is None else tensor[start:stop]
        if self.tree_mask is not None:
            changes["tree_mask"] = self.tree_mask[first:last]
        if self.ranges is not None:
            request = self.ranges[:, 0]
            kept = self.ranges[(request >= start) & (request < stop)]
            changes["ranges"] = kept - torch.tensor([start, 0, 0], dtype=_INT, device=kept.device)
        return replace(self, **changes)

    def expand_rows(self) -> tuple[Batch, torch.Tensor]:
        """Every query row as a request of one row, and each row's old request, int64 [num_tokens].

        For kernels that decode one token a request. Row i of a request gets the keys up to
        its own position, so it is right for causal layers only. Padding rows become empty
        requests that point at request 0. `pages.take_requests(old)` is their page table.

        Raises UnsupportedCallError for masks that a single row cannot express.
        """
        for name in ("causal", "ranges", "tree_mask"):
            if getattr(self, name) is not None:
                raise UnsupportedCallError(
                    f"batch.{name} depends on several query rows at once; expand_rows() takes "
                    "batches without it"
                )
        if self.num_reqs == 0:
            return self.padded(1, self.num_tokens).expand_rows()
        row = torch.arange(self.num_tokens, device=self.device)
        start, real = self.query_start_loc.long(), self.query_start_loc[-1]
        old = torch.searchsorted(start[1:], row, right=True).clamp_(max=self.num_reqs - 1)
        after = start[1:][old] - row - 1
        lens = torch.where(row < real, self.seq_lens[old] - after, 0).to(_INT)
        old = torch.where(row < real, old, 0)
        live = torch.arange(self.num_tokens + 1, device=self.device).clamp(max=real).to(_INT)
        expanded = Batch(
            query_start_loc=live,
            seq_lens=lens,
            num_reqs=self.num_tokens,
            num_tokens=self.num_tokens,
            max_query_len=min(self.max_query_len, 1),
            max_seq_len=self.max_seq_len,
            prefix_lens=None if self.prefix_lens is None else self.prefix_lens[old],
        )
        return expanded, old

    # Reading one ----------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the device tensors are."""
        return self.query_start_loc.device

    def host_lengths(self) -> HostLengths:
        """The exact lengths as integers, without waiting for a device.

        Raises HostLengthsNeededError when neither the host mirrors nor the tensors
        themselves give them.
        """
        start, lens = self.query_start_loc, self.seq_lens
        if self.device.type != "cpu":
            exact = self.host_lens == "exact"
            if not exact or self.query_start_loc_host is None or self.seq_lens_host is None:
                raise HostLengthsNeededError(
                    "this needs exact lengths on the host; give the batch query_start_loc_host "
                    "and seq_lens_host with host_lens='exact' (Batch.from_lengths does)"
                )
            start, lens = self.query_start_loc_host, self.seq_lens_host
        return HostLengths(tuple(start.tolist()), tuple(lens.tolist()))

    def kv_starts(self, lengths: HostLengths) -> tuple[int, ...]:
        """First row of each request in k and v that are given without a cache.

        Raises HostLengthsNeededError when `kv_start_loc` is on a device only.
        """
        if self.kv_start_loc is None:
            return tuple(accumulate(lengths.seq_lens, initial=0))[:-1]
        if self.kv_start_loc.device.type != "cpu":
            raise HostLengthsNeededError(
                "batch.kv_start_loc is on a device and this backend plans on the host; leave "
                "it out and pack the sequences one after the other"
            )
        return tuple(self.kv_start_loc.tolist())

    def validate(self, *, self_attention: bool = True) -> None:
        """Look at the values, which nothing else does; waits for the device.

        `self_attention` also asks that no sequence be shorter than its query.
        Raises ConfigError naming the request.
        """
        start, lens = self.query_start_loc.tolist(), self.seq_lens.tolist()
        _demand(start[0] == 0, f"batch.query_start_loc starts at {start[0]}; expected 0")
        _demand(
            start[-1] <= self.num_tokens,
            f"batch.query_start_loc ends at {start[-1]}; num_tokens is {self.num_tokens}",
        )
        for r, length in enumerate(lens):
            rows = start[r + 1] - start[r]
            at = f"request {r}"
            _demand(rows >= 0, f"batch.query_start_loc decreases at {at}")
            _demand(
                rows <= self.max_query_len,
                f"{at} has {rows} query rows; max_query_len is {self.max_query_len}",
            )
            _demand(
                0 <= length <= self.max_seq_len,
                f"{at} has seq_len {length}; it takes 0 to max_seq_len ({self.max_seq_len})",
            )
            _demand(
                not self_attention or length >= rows,
                f"{at} has seq_len {length}, fewer than its {rows} query rows",
            )
        self._validate_mirrors(start, lens)
        self._validate_ranges()

    def _validate_mirrors(self, start: list[int], lens: list[int]) -> None:
        for name, values in (("query_start_loc", start), ("seq_lens", lens)):
            mirror = getattr(self, f"{name}_host")
            if mirror is None or self.host_lens != "exact":
                continue
            _demand(
                mirror.tolist() == values,
                f"batch.{name}_host differs from batch.{name}; "
                "give equal values, or host_lens='upper'",
            )

    def _validate_ranges(self) -> None:
        for request, begin, end in [] if self.ranges is None else self.ranges.tolist():
            _demand(
                0 <= request < self.num_reqs and 0 <= begin <= end,
                f"batch.ranges has ({request}, {begin}, {end}); expected a request below "
                f"{self.num_reqs} and 0 <= begin <= end",
            )

    def csr(self, pages: PageTable) -> PageCsr:
        """The page table as compressed rows. Needs exact host lengths."""
        lengths = self.host_lengths()
        firsts = pages.host_first_blocks(self.num_reqs)
        counts = [
            max(-(-n // pages.block_size) - first, 0)
            for n, first in zip(lengths.seq_lens, firsts, strict=True)
        ]
        rows = [r for r, count in enumerate(counts) for _ in range(count)]
        columns = [column for count in counts for column in range(count)]
        last = [(n - 1) % pages.block_size + 1 if n else 0 for n in lengths.seq_lens]
        where = torch.tensor([rows, columns], dtype=torch.int64).reshape(2, -1).to(self.device)
        return PageCsr(
            indptr=torch.tensor([0, *accumulate(counts)], dtype=_INT).to(self.device),
            indices=pages.block_table[where[0], where[1]],
            last_page_len=torch.tensor(last, dtype=_INT).to(self.device),
        )


@dataclass(frozen=True, eq=False)
class PageCsr:
    """A page table as compressed rows.

    Attributes:
        indptr: first entry of each request in `indices`, and the end; int32 [num_reqs + 1].
        indices: block ids of all requests in order; int32 [entries].
        last_page_len: tokens in each request's last page, 0 for none; int32 [num_reqs].
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PageTable:
    """Where one cache group keeps each request's tokens.

    Attributes:
        block_table: blocks of each request in order; int32 [num_reqs, max_blocks], row stride
            free. Entries past ceil(seq_len / block_size) are never read, nor those of blocks
            that no query sees.
        block_size: tokens per block.
        slot_mapping: cache slot (block * block_size + offset) each new token is written to;
            any negative value skips the token; int64 [num_tokens] (cross attention: one per
            encoder token). None: this step writes nothing.
        first_block: logical block that column 0 of each row holds, for tables that roll with
            a window; int32 [num_reqs]. Default 0.

    Raises:
        PlanMismatchError: a tensor of the wrong shape, dtype or device.
        ConfigError: a block size below 1.
    """

    block_table: torch.Tensor
    block_size: int
    slot_mapping: torch.Tensor | None = None
    first_block: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ConfigError(f"pages.block_size is {self.block_size!r}; it takes at least 1")
        device = getattr(self.block_table, "device", torch.device("cpu"))
        check_tensor(
            "pages.block_table", self.block_table, shape=(None, None), dtype=_INT, device=device
        )
        if self.slot_mapping is not None:
            check_tensor(
                "pages.slot_mapping",
                self.slot_mapping,
                shape=(None,),
                dtype=torch.int64,
                device=device,
            )
        if self.first_block is not None:
            n = self.block_table.shape[0]
            check_tensor(
                "pages.first_block", self.first_block, shape=(n,), dtype=_INT, device=device
            )

    @classmethod
    def from_blocks(
        cls,
        blocks: Sequence[Sequence[int]],
        batch: Batch,
        block_size: int,
        *,
        write: Literal["new", "all", "none"] = "new",
        first_block: Sequence[int] | None = None,
    ) -> PageTable:
        """A table from each request's block ids, with slots for the tokens this step writes.

        `write`: `new` are the query tokens, the last of their sequence; `all` every token
        of every sequence (an encoder's, at the step it ran); `none` nothing. Padding rows of
        the batch get slot -1. Needs exact host lengths.

        Raises ConfigError when a request has fewer blocks than its tokens need.
        """
        lengths = batch.host_lengths()
        firsts = [0] * len(blocks) if first_block is None else list(first_block)
        slots: list[int] = []
        for r, length in enumerate(lengths.seq_lens):
            have = (firsts[r] + len(blocks[r])) * block_size
            _demand(
                length <= have,
                f"request {r} has {length} tokens and blocks for {have}; give "
                f"it {-(-length // block_size)} blocks of {block_size}",
            )
            new = {"new": lengths.query_len(r), "all": length, "none": 0}[write]
            for position in range(length - new, length):
                block = blocks[r][position // block_size - firsts[r]]
                slots.append(block * block_size + position % block_size)
        if write == "new":
            slots += [-1] * (batch.num_tokens - len(slots))
        width = max(map(len, blocks), default=0)
        rows = [[*row, *[-1] * (width - len(row))] for row in blocks]
        table = torch.tensor(rows, dtype=_INT).reshape(len(blocks), width)
        return cls(
            block_table=table.to(batch.device),
            block_size=block_size,
            slot_mapping=None
            if write == "none"
            else torch.tensor(slots, dtype=torch.int64, device=batch.device),
            first_block=None
            if first_block is None
            else torch.tensor(firsts, dtype=_INT, device=batch.device),
        )

    def padded(self, num_reqs: int, num_tokens: int) -> PageTable:
        """This table with rows for empty requests and slots that skip, added at the end."""
        slots = self.slot_mapping
        table = _grown(self.block_table, num_reqs - self.block_table.shape[0], fill=-1)
        assert table is not None
        return replace(
            self,
            block_table=table,
            slot_mapping=None if slots is None else _grown(slots, num_tokens - len(slots), fill=-1),
            first_block=_grown(self.first_block, num_reqs - self.block_table.shape[0]),
        )

    def take_requests(self, requests: torch.Tensor) -> PageTable:
        """The rows of `requests` (int64, in that order), with the slots unchanged."""
        first = self.first_block
        return replace(
            self,
            block_table=self.block_table[requests],
            first_block=None if first is None else first[requests],
        )

    def host_first_blocks(self, num_reqs: int) -> tuple[int, ...]:
        """`first_block` as integers.

        Raises HostLengthsNeededError when it is on a device only.
        """
        if self.first_block is None:
            return (0,) * num_reqs
        if self.first_block.device.type != "cpu":
            raise HostLengthsNeededError(
                "pages.first_block is on a device and this backend plans on the host; give a "
                "table whose column 0 is block 0"
            )
        return tuple(self.first_block.tolist())

    def validate(
        self,
        batch: Batch,
        *,
        num_blocks: int | None = None,
        first_keys: Sequence[int] | None = None,
    ) -> None:
        """Look at the values of live entries; waits for the device.

        `first_keys`: the first key each request can see, where a window hides earlier ones
        (their blocks may be gone). Raises ConfigError for a live block id or a slot that is
        negative or past the cache, a slot given twice, or a table too narrow for its sequence.
        """
        table, lens = self.block_table.tolist(), batch.seq_lens.tolist()
        first = [0] * len(table) if self.first_block is None else self.first_block.tolist()
        for r, length in enumerate(lens):
            need = -(-length // self.block_size) - first[r]
            oldest = (0 if first_keys is None else first_keys[r]) // self.block_size - first[r]
            _demand(
                need <= len(table[r]),
                f"request {r} needs {need} columns of pages.block_table, which has {len(table[r])}",
            )
            _demand(
                length == 0 or oldest >= 0,
                f"request {r} sees block {oldest + first[r]}; pages.first_block[{r}] is {first[r]}",
            )
            for column in range(oldest, need):
                block = table[r][column]
                good = block >= 0 and (num_blocks is None or block < num_blocks)
                most = "the cache's last" if num_blocks is None else num_blocks - 1
                _demand(good, f"pages.block_table[{r}, {column}] is {block}; it takes 0 to {most}")
        if self.slot_mapping is not None:
            slots = [s for s in self.slot_mapping.tolist() if s >= 0]
            _demand(len(slots) == len(set(slots)), "pages.slot_mapping names a slot twice")


def pack_tree_mask(visible: torch.Tensor) -> torch.Tensor:
    """`Batch.tree_mask` from bool [num_tokens, max_query_len]: uint8, least significant bit first."""
    rows, width = visible.shape
    num_bytes = -(-width // 8)
    padded = torch.zeros(rows, num_bytes * 8, dtype=torch.uint8, device=visible.device)
    padded[:, :width] = visible
    weights = torch.tensor([1 << b for b in range(8)], dtype=torch.uint8, device=visible.device)
    return (padded.view(rows, num_bytes, 8) * weights).sum(-1, dtype=torch.uint8)


_LIST_DTYPES = {
    "causal": torch.bool,
    "ranges": _INT,
    "prefix_lens": _INT,
    "kv_start_loc": _INT,
}


def _to_device(optional: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    known = {f.name for f in fields(Batch)}
    if unknown := optional.keys() - known:
        raise ConfigError(f"Batch has no field {sorted(unknown)}; it has {sorted(known)}")
    moved = dict(optional)
    for name, dtype in _LIST_DTYPES.items():
        if isinstance(moved.get(name), list | tuple):
            moved[name] = torch.tensor(moved[name], dtype=dtype, device=device)
    if isinstance(moved.get("ranges"), torch.Tensor):
        moved["ranges"] = moved["ranges"].reshape(-1, 3)
    return moved


def _grown(
    tensor: torch.Tensor | None, more: int, *, fill: int = 0, repeat_last: bool = False
) -> torch.Tensor | None:
    if tensor is None or more == 0:
        return tensor
    shape = (more, *tensor.shape[1:])
    tail = tensor[-1:].expand(shape) if repeat_last else tensor.new_full(shape, fill)
    return torch.cat([tensor, tail])


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ConfigError(otherwise)
