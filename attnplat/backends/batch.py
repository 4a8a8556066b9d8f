"""One step's lengths, as plain tensors that an engine has anyway.

A `Batch` is shared by every layer and every cache group of a step; a `PageTable` belongs to
one cache group. Both are frozen; the helpers return new values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch

from attnplat.backends.checks import at_least, check_tensor, demand, to_device
from attnplat.backends.pages import PageCsr, PageTable, grown
from attnplat.errors import ConfigError, HostLengthsNeededError, UnsupportedCallError

__all__ = [
    "Batch",
    "BatchBounds",
    "HostLengths",
    "PageCsr",
    "PageTable",
    "pack_tree_mask",
]

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
            query_start_loc=to_device(start, device),
            seq_lens=to_device(lens, device),
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
            changes[name] = grown(getattr(self, name), more_reqs, repeat_last=True)
        for name in ("seq_lens", "seq_lens_host", "causal", "prefix_lens", "kv_start_loc"):
            changes[name] = grown(getattr(self, name), more_reqs)
        changes["tree_mask"] = grown(self.tree_mask, more_rows)
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
        themselves give them; ConfigError when they cannot be.
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
        found = HostLengths(tuple(start.tolist()), tuple(lens.tolist()))
        self._demand_order(found)
        return found

    @staticmethod
    def _demand_order(found: HostLengths) -> None:
        starts, lens = found.query_start, found.seq_lens
        demand(starts[0] == 0, f"batch.query_start_loc starts at {starts[0]}; expected 0")
        if list(starts) != sorted(starts):
            r = next(r for r, (a, b) in enumerate(pairwise(starts)) if b < a)
            raise ConfigError(
                f"batch.query_start_loc decreases at request {r}, from {starts[r]} to "
                f"{starts[r + 1]}"
            )
        if min(lens, default=0) < 0:
            r = next(r for r, n in enumerate(lens) if n < 0)
            raise ConfigError(f"request {r} has seq_len {lens[r]}; it takes at least 0")

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
        starts = tuple(self.kv_start_loc.tolist())
        demand(min(starts, default=0) >= 0, f"batch.kv_start_loc {starts} has a negative row")
        return starts

    def validate(self, *, self_attention: bool = True) -> None:
        """Look at the values, which nothing else does; waits for the device.

        `self_attention` also asks that no sequence be shorter than its query.
        Raises ConfigError naming the request.
        """
        start, lens = self.query_start_loc.tolist(), self.seq_lens.tolist()
        demand(start[0] == 0, f"batch.query_start_loc starts at {start[0]}; expected 0")
        demand(
            start[-1] <= self.num_tokens,
            f"batch.query_start_loc ends at {start[-1]}; num_tokens is {self.num_tokens}",
        )
        for r, length in enumerate(lens):
            rows = start[r + 1] - start[r]
            at = f"request {r}"
            demand(
                rows >= 0,
                f"batch.query_start_loc decreases at {at}, from {start[r]} to {start[r + 1]}",
            )
            demand(
                rows <= self.max_query_len,
                f"{at} has {rows} query rows; max_query_len is {self.max_query_len}",
            )
            demand(
                0 <= length <= self.max_seq_len,
                f"{at} has seq_len {length}; it takes 0 to max_seq_len ({self.max_seq_len})",
            )
            demand(
                not self_attention or length >= rows,
                f"{at} has seq_len {length}, fewer than its {rows} query rows",
            )
        self._validate_mirrors(start, lens)
        self._validate_masks()

    def _validate_mirrors(self, start: list[int], lens: list[int]) -> None:
        for name, values in (("query_start_loc", start), ("seq_lens", lens)):
            mirror = getattr(self, f"{name}_host")
            if mirror is None or self.host_lens != "exact":
                continue
            demand(
                mirror.tolist() == values,
                f"batch.{name}_host differs from batch.{name}; "
                "give equal values, or host_lens='upper'",
            )

    def _validate_masks(self) -> None:
        for name in ("prefix_lens", "kv_start_loc"):
            tensor = getattr(self, name)
            for r, value in enumerate([] if tensor is None else tensor.tolist()):
                demand(value >= 0, f"request {r} has batch.{name} {value}; it takes at least 0")
        promised = self.num_decode_reqs
        demand(
            promised is None or 0 <= promised <= self.num_reqs,
            f"batch.num_decode_reqs is {promised}; it takes 0 to num_reqs ({self.num_reqs})",
        )
        for request, begin, end in [] if self.ranges is None else self.ranges.tolist():
            demand(
                0 <= request < self.num_reqs and 0 <= begin <= end,
                f"batch.ranges has ({request}, {begin}, {end}); expected a request below "
                f"{self.num_reqs} and 0 <= begin <= end",
            )

    def csr(self, pages: PageTable) -> PageCsr:
        """The page table as compressed rows. Needs exact host lengths."""
        return pages.csr(self.host_lengths().seq_lens)


def pack_tree_mask(visible: torch.Tensor) -> torch.Tensor:
    """`Batch.tree_mask` from bool [num_tokens, max_query_len]: uint8, lowest bit first."""
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
            moved[name] = to_device(torch.tensor(moved[name], dtype=dtype), device)
    if isinstance(moved.get("ranges"), torch.Tensor):
        moved["ranges"] = moved["ranges"].reshape(-1, 3)
    return moved
