"""The mask function: a padding mask becomes lengths, and no other mask loses anything.

Transformers asks the mask function once per forward and kind of layer, with a rule over
positions and a two-dimensional padding mask, and hands the result to every layer. The result
here is the boolean mask itself, so that a model may cut or combine it, and it remembers the
rule and the lengths it was made of. A layer that receives it untouched runs ragged; what a
model has changed is an ordinary tensor again, honoured entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from attnplat.backends.batch import Batch
from attnplat.backends.form import MaskRules
from attnplat.backends.plan import Plan, PlanKey
from attnplat.errors import UnsupportedCallError

MaskFunction = Callable[..., torch.Tensor]
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Layout:
    """Which rows of a dense call are requests, and which keys are theirs.

    Attributes:
        rules: the mask within a request.
        rows: (first, end) of each request in the queries, batch and sequence flattened;
            ascending and apart. Rows in none of them are padding.
        keys: (first, end) of each request in the flattened keys.
        num_rows: all rows, padding included.
        starts: query index within its batch row, and key index, that each request begins at.
        plans: the plans made for it, shared by the layers that bring it.
    """

    rules: MaskRules
    rows: tuple[Span, ...]
    keys: tuple[Span, ...]
    num_rows: int
    starts: tuple[Span, ...]
    plans: dict[PlanKey, Plan] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        rules: MaskRules,
        rows: Sequence[Span],
        keys: Sequence[Span],
        num_queries: int,
        num_keys: int,
    ) -> Layout:
        """One request per batch row; spans count within the row."""
        return cls(
            rules=rules,
            rows=tuple((b * num_queries + a, b * num_queries + e) for b, (a, e) in enumerate(rows)),
            keys=tuple((b * num_keys + a, b * num_keys + e) for b, (a, e) in enumerate(keys)),
            num_rows=len(rows) * num_queries,
            starts=tuple((r[0], k[0]) for r, k in zip(rows, keys, strict=True)),
        )

    @classmethod
    def full(cls, rules: MaskRules, batch_size: int, num_queries: int, num_keys: int) -> Layout:
        """One request per batch row, of all its queries and keys."""
        rows, keys = [(0, num_queries)] * batch_size, [(0, num_keys)] * batch_size
        return cls.of(rules, rows, keys, num_queries, num_keys)

    @classmethod
    def packed(cls, rules: MaskRules, query_starts: list[int], key_starts: list[int]) -> Layout:
        """Sequences packed one after the other in a single batch row."""
        rows, keys = tuple(pairwise(query_starts)), tuple(pairwise(key_starts))
        starts = tuple((row[0], key[0]) for row, key in zip(rows, keys, strict=True))
        return cls(rules, rows, keys, query_starts[-1], starts)

    @property
    def longest(self) -> int:
        """Keys of the longest request."""
        return max((end - first for first, end in self.keys), default=0)

    @property
    def crosses(self) -> bool:
        """Whether some request has not as many keys as queries."""
        pairs = zip(self.rows, self.keys, strict=True)
        return any(row[1] - row[0] != key[1] - key[0] for row, key in pairs)

    def row_index(self, device: torch.device) -> torch.Tensor | None:
        """The query rows that belong to requests, int64, in order; None for all."""
        return _index(self.rows, self.num_rows, device)

    def key_index(self, num_keys: int, device: torch.device) -> torch.Tensor | None:
        """The keys that belong to requests out of `num_keys`, int64, in order; None for all."""
        return _index(self.keys, num_keys, device)

    def per_row(self, values: Sequence[int], device: torch.device) -> torch.Tensor:
        """One of `values` (per request) for each row that belongs to one, int64."""
        counts = torch.tensor([end - first for first, end in self.rows])
        return torch.tensor(values).repeat_interleave(counts).to(device)

    def batch(self, device: torch.device) -> Batch:
        """The lengths of this call, for queries and keys without padding."""
        return Batch.from_lengths(
            [end - first for first, end in self.rows],
            [end - first for first, end in self.keys],
            device=device,
        )


def _index(spans: Sequence[Span], total: int, device: torch.device) -> torch.Tensor | None:
    if sum(end - first for first, end in spans) == total:
        return None
    return torch.cat([torch.arange(first, end) for first, end in spans]).to(device)


class StructuredMask(torch.Tensor):
    """A boolean mask [batch, 1, queries, keys] that remembers how it was made.

    Attributes:
        rules: the mask within a sequence; None where no simple rule says it.
        ragged: the call's requests; None where the mask is not only rule and padding.
    """

    rules: MaskRules | None
    ragged: Layout | None

    @classmethod
    def wrap(
        cls, visible: torch.Tensor, rules: MaskRules | None, layout: Layout | None
    ) -> StructuredMask:
        """`visible` with what is known of it."""
        mask: StructuredMask = visible.as_subclass(cls)
        mask.rules, mask.ragged = rules, layout
        return mask

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Results are plain tensors; a mask that is written to forgets what it was."""
        written = args[0] if args and _writes(func) else (kwargs or {}).get("out")
        if isinstance(written, cls):
            written.rules = written.ragged = None
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _writes(func: Callable[..., Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    if not name.startswith("__"):
        return name.endswith("_")
    in_place = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return in_place or name in ("__setitem__", "__set__")


@torch.compiler.disable(reason="a mask with a structure is made on the host")  # type: ignore[untyped-decorator]
def attention_mask(**kwargs: Any) -> torch.Tensor:
    """The mask of one forward, for transformers' `AttentionMaskInterface`.

    Takes what `transformers.masking_utils.sdpa_mask` takes and never leaves a mask out: what
    a layer does not get it cannot honour.
    """
    call = _MaskCall.read(kwargs)
    if call.num_keys == 0:
        return _paged_mask(call)
    kwargs = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    visible: torch.Tensor = sdpa_mask(**kwargs)
    return StructuredMask.wrap(visible, *_structure(call))


@dataclass(frozen=True, kw_only=True, eq=False)
class _MaskCall:
    """What the mask function was asked for.

    `first_query` is the key index of query 0; `padding` bool [batch, keys] or None.
    """

    batch_size: int
    num_queries: int
    num_keys: int
    first_query: int
    key_offset: int
    mask_function: MaskFunction
    padding: torch.Tensor | None
    local_size: int | None
    traced: bool
    device: torch.device

    @classmethod
    def read(cls, keywords: dict[str, Any]) -> _MaskCall:
        given = dict(keywords)
        query_offset = given.get("q_offset", 0)
        if "cache_position" in given:  # the name before transformers counted queries
            positions = given["cache_position"]
            given["q_length"], query_offset = len(positions), positions[0]
        offset = int(given.get("kv_offset", 0))
        return cls(
            batch_size=given["batch_size"],
            num_queries=given["q_length"],
            num_keys=given["kv_length"],
            first_query=int(query_offset) - offset,
            key_offset=offset,
            mask_function=given.get("mask_function", causal_mask_function),
            padding=_padding(given.get("attention_mask"), given["kv_length"], offset),
            local_size=given.get("local_size"),
            traced=bool(given.get("use_vmap", False)),
            device=torch.device(given.get("device", "cpu")),
        )


def _padding(mask: torch.Tensor | None, num_keys: int, offset: int) -> torch.Tensor | None:
    """The columns of a two-dimensional padding mask that the keys have; absent ones hide."""
    if mask is None:
        return None
    missing = max(num_keys + offset - mask.shape[-1], 0)
    return torch.nn.functional.pad(mask, (0, missing))[:, offset : offset + num_keys].bool()


def _paged_mask(call: _MaskCall) -> torch.Tensor:
    """No entries: the step of a paged cache has the lengths, and this only brings the rule."""
    if call.padding is not None:
        raise UnsupportedCallError(
            "a packed batch has no padding, and its lengths are in the paged step; leave "
            "attention_mask out"
        )
    shape = (call.batch_size, 1, call.num_queries, 0)
    empty = torch.empty(shape, dtype=torch.bool, device=call.device)
    return StructuredMask.wrap(empty, _rules_of(call, [0] * call.batch_size), None)


def _structure(call: _MaskCall) -> tuple[MaskRules | None, Layout | None]:
    spans = _key_spans(call)
    if spans is None:
        return None, None
    rules = _rules_of(call, [first + call.key_offset for first, _ in spans])
    if rules is None:
        return None, None
    if rules.causal:
        return rules, _causal_layout(call, rules, spans)
    return rules, _bidirectional_layout(call, rules, spans)


def _key_spans(call: _MaskCall) -> list[Span] | None:
    """(first, end) of the keys that padding leaves, per batch row; None where it has holes."""
    padding = call.padding
    if padding is None or padding.is_meta:
        return [(0, call.num_keys)] * call.batch_size
    padding = padding.cpu()
    count = padding.sum(-1)
    first = padding.int().argmax(-1)
    index = torch.arange(call.num_keys)
    filled = (index >= first[:, None]) & (index < (first + count)[:, None])
    if not torch.equal(filled, padding):
        return None
    spans = list(zip(first.tolist(), (first + count).tolist(), strict=True))
    return spans if len(spans) == call.batch_size else spans * call.batch_size


def _causal_layout(call: _MaskCall, rules: MaskRules, spans: list[Span]) -> Layout:
    """Queries at the places of padding are left out, as in transformers' flash attention."""
    rows, keys = [], []
    for first, end in spans:
        row = min(max(first - call.first_query, 0), call.num_queries)
        last = max(min(end - call.first_query, call.num_queries), row)
        rows.append((row, last))
        keys.append((first, call.first_query + last if last > row else first))
    return Layout.of(rules, rows, keys, call.num_queries, call.num_keys)


def _bidirectional_layout(call: _MaskCall, rules: MaskRules, spans: list[Span]) -> Layout | None:
    """Without a window all queries stay: the padding may be the keys' alone (cross attention)."""
    if rules.sliding_window == MaskRules().sliding_window:
        rows = [(0, call.num_queries)] * call.batch_size
        return Layout.of(rules, rows, spans, call.num_queries, call.num_keys)
    if call.num_queries != call.num_keys or call.first_query:
        return None
    return Layout.of(rules, spans, spans, call.num_queries, call.num_keys)


# Recognising a rule -------------------------------------------------------------------------


def _rules_of(call: _MaskCall, starts: list[int]) -> MaskRules | None:
    """The rule that a mask function follows, or None where it is none of those known.

    `starts` are the absolute positions of the first keys. A layer counts chunks from there, so
    a rule of chunks is followed only where the model counts them from there, too.
    """
    function = call.mask_function
    if call.traced or call.device.type == "meta" or _reads_tables(function):
        return None
    if function is causal_mask_function:
        return MaskRules(causal=True)
    if function is bidirectional_mask_function:
        return MaskRules(causal=False)
    size = call.local_size or 1
    query, key = _probes(size, call.device)
    index = torch.arange(len(starts), device=call.device)[:, None, None, None]
    start = torch.tensor(starts, device=call.device)[:, None, None, None]
    found = function(index, torch.zeros_like(index), query, key)
    for rules in _candidates(call.local_size):
        expected = _follows(rules, query - start, key - start)
        if bool((found == expected).all()):
            return rules
    return None


def _candidates(size: int | None) -> list[MaskRules]:
    plain = [MaskRules(causal=True), MaskRules(causal=False)]
    if size is None:
        return plain
    return [
        MaskRules(causal=True, sliding_window=(size - 1, -1)),
        MaskRules(causal=True, chunk_size=size),
        MaskRules(causal=False, sliding_window=(size, size)),
        MaskRules(causal=False, sliding_window=(size - 1, size - 1)),
        *plain,
    ]


def _probes(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [1, 1, rows, 1] and keys [1, 1, rows, points] on both sides of every edge.

    All lie past any real padding, which the rule is not about.
    """
    base = 64 * size * max(1, (1 << 20) // (64 * size))
    query = base + torch.tensor([0, 1, size // 2, size - 1, size, 3 * size + 2])
    steps = torch.arange(-3, 4)
    edges = torch.tensor([-2 * size, -size, 0, size, 2 * size])
    around = (edges[:, None] + steps).flatten()
    spread = torch.arange(-3 * size, 3 * size + 1, max(1, size // 16))
    key = torch.cat(
        [
            query[:, None] + torch.cat([around, spread]),
            (base + torch.cat([around, around + 3 * size])).expand(len(query), -1),
        ],
        dim=1,
    )
    return query[None, None, :, None].to(device), key[None, None].to(device)


def _follows(rules: MaskRules, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    left, right = rules.sliding_window
    seen = key <= query if rules.causal else torch.ones_like(key <= query)
    if left >= 0:
        seen = seen & (query - key <= left)
    if right >= 0:
        seen = seen & (key - query <= right)
    if rules.chunk_size is not None:
        chunks = (torch.div(t, rules.chunk_size, rounding_mode="floor") for t in (query, key))
        seen = seen & (next(chunks) == next(chunks))
    return seen


def _reads_tables(function: Any) -> bool:
    """Whether a mask function looks positions up in a table, or cannot be looked into.

    Packed sequences and image blocks are told apart by a table over positions; no rule of
    few numbers says what they do.
    """
    if isinstance(function, tuple | list):
        return any(_reads_tables(f) for f in function)
    if isinstance(function, torch.Tensor):
        return function.dim() > 1
    if not isinstance(function, FunctionType):
        return callable(function)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return any(_reads_tables(content) for content in cells)


def packed_starts(offsets: torch.Tensor, name: str, length: int) -> list[int]:
    """Host offsets of packed sequences.

    Raises UnsupportedCallError unless they ascend from 0 to `length`.
    """
    starts: list[int] = offsets.tolist()
    if not starts or starts != sorted(starts) or (starts[0], starts[-1]) != (0, length):
        raise UnsupportedCallError(
            f"attention keyword {name} is {starts}; it takes offsets that ascend from 0 to {length}"
        )
    return starts
