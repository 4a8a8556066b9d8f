"""The mask algebra, once: which keys each query sees, and where those keys can lie at all.

    allowed(p, j) = j < seq_len  and  j in topk(row)  and
        ( (causal => j <= p) and window and chunk and tree
          or p and j in one bidirectional range
          or (j < prefix_len or j < static_sink_tokens) and (causal => j <= p) )

with p = seq_len - query_len + i the position of query row i (bottom-right), j the position
of a key. `visible_keys` evaluates it on any device; `key_spans` bounds it on the host, so
that blocks outside are never read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnplat.backends.batch import Batch, HostLengths
from attnplat.backends.checks import to_device
from attnplat.backends.form import MaskRules

OPEN = 1 << 40
"""Stands for a window so wide that it hides nothing; keeps sums inside int64."""


@dataclass(frozen=True, eq=False)
class Queries:
    """The query rows of several requests with equally many each.

    Shapes are [requests, rows, 1] or broadcast to it: the last dimension is the keys'.

    Attributes:
        rules: the layer's own mask.
        position: position of each query row.
        index: index of each query row within its request, [rows].
        context: position of the request's first query row.
        seq_len: keys of the request.
        request: the request's number in the batch.
        causal: per request, or None for `rules.causal`.
        prefix_len: per request, or None.
        ranges: [num_ranges, 3], or None; those of other requests do no harm.
        longest: host bound on `seq_len`.
        tree: bits as in `Batch.tree_mask`, [requests, rows, bytes], or None.
    """

    rules: MaskRules
    position: torch.Tensor
    index: torch.Tensor
    context: torch.Tensor
    seq_len: torch.Tensor
    request: torch.Tensor
    causal: torch.Tensor | None
    prefix_len: torch.Tensor | None
    ranges: torch.Tensor | None
    tree: torch.Tensor | None
    longest: int

    def rows(self, first: int, last: int) -> Queries:
        """Only query rows `first` to `last` of each request."""
        return replace(
            self,
            position=self.position[:, first:last],
            index=self.index[first:last],
            tree=None if self.tree is None else self.tree[:, first:last],
        )


def queries_of(
    rules: MaskRules, batch: Batch, lengths: HostLengths, requests: list[int]
) -> Queries:
    """All query rows of `requests`, which have equally many each."""
    device = batch.device
    count = lengths.query_len(requests[0])
    seq_len = _column([lengths.seq_lens[r] for r in requests], device)
    number = _column(requests, device)
    index = torch.arange(count, device=device)
    rows = _column([lengths.query_start[r] for r in requests], device) + index[None, :, None]
    context = seq_len - count
    chosen = number.flatten()
    return Queries(
        rules=rules,
        position=context + index[None, :, None],
        index=index,
        context=context,
        seq_len=seq_len,
        request=number,
        causal=None if batch.causal is None else batch.causal[chosen][:, None, None],
        prefix_len=None if batch.prefix_lens is None else batch.prefix_lens[chosen][:, None, None],
        ranges=batch.ranges,
        tree=None if batch.tree_mask is None else batch.tree_mask[rows.squeeze(-1)],
        longest=max(lengths.seq_lens[r] for r in requests),
    )


def visible_keys(
    queries: Queries, keys: torch.Tensor, topk_indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Which key each query row sees: bool [requests, rows, keys].

    `keys` are key positions, int64 [requests, keys]; one that is no key of the request has a
    position of `seq_len` or more. `topk_indices` [requests, rows, topk] names positions in
    any order, negative for none.
    """
    j = keys[:, None, :]
    p = queries.position
    rules = queries.rules
    seen = _window(rules, p, j)
    if queries.tree is not None:
        seen = seen & _tree(queries.tree, j - queries.context)
    shielded = _shielded(queries, j)
    if shielded is not None:
        seen = seen | shielded
    not_future = j <= p
    if queries.causal is not None:
        seen = seen & (not_future | ~queries.causal)
    elif rules.causal:
        seen = seen & not_future
    for request, begin, end in () if queries.ranges is None else queries.ranges:
        inside = (begin <= p) & (p < end) & (begin <= j) & (j < end)
        seen = seen | (inside & (queries.request == request))
    seen = seen & (j < queries.seq_len)
    if topk_indices is not None:
        seen = seen & _named(topk_indices, keys, queries.longest)
    return seen.expand(keys.shape[0], p.shape[1], keys.shape[1])


def _window(rules: MaskRules, p: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    left, right = rules.sliding_window
    seen = torch.ones((1, 1, 1), dtype=torch.bool, device=j.device)
    if left >= 0:
        seen = seen & (p - j <= min(left, OPEN))
    if right >= 0:
        seen = seen & (j - p <= min(right, OPEN))
    if rules.chunk_size is not None:
        same = torch.div(j, rules.chunk_size, rounding_mode="floor") == torch.div(
            p, rules.chunk_size, rounding_mode="floor"
        )
        seen = seen & same
    return seen


def _shielded(queries: Queries, j: torch.Tensor) -> torch.Tensor | None:
    """Leading keys that neither window nor chunk nor tree hides."""
    static = queries.rules.static_sink_tokens
    if queries.prefix_len is not None:
        return j < queries.prefix_len.clamp(min=static)
    return j < static if static else None


def _tree(bits: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Bit `offset` of each row; keys before the query part (negative offset) are seen."""
    last = bits.shape[-1] * 8 - 1
    inside = offset.clamp(0, last).expand(-1, bits.shape[1], -1)
    byte = bits.gather(2, inside // 8)
    return (offset < 0) | (((byte >> (inside % 8)) & 1).bool() & (offset <= last))


def _named(topk_indices: torch.Tensor, keys: torch.Tensor, longest: int) -> torch.Tensor:
    """Whether each key position is among its row's indices."""
    named = topk_indices.long()
    # One column more than there are positions, for the indices that name no key.
    shape = (*named.shape[:2], longest + 1)
    table = torch.zeros(shape, dtype=torch.bool, device=keys.device)
    table.scatter_(2, torch.where((named >= 0) & (named < longest), named, longest), True)
    return table.gather(2, keys.clamp(max=longest)[:, None, :].expand(-1, named.shape[1], -1))


@dataclass(frozen=True)
class HostMasks:
    """What the host knows of a batch's own masks.

    Attributes:
        causal: per request.
        prefix_lens: per request, static sink tokens included.
        ranges: (begin, end) by request.
        unknown: some of it is on a device only, so any key may be visible.
    """

    causal: tuple[bool, ...]
    prefix_lens: tuple[int, ...]
    ranges: dict[int, list[tuple[int, int]]]
    unknown: bool

    @classmethod
    def of(cls, rules: MaskRules, batch: Batch) -> HostMasks:
        """The masks of `batch` for a layer with `rules`, without waiting for a device."""
        given = [batch.causal, batch.prefix_lens, batch.ranges]
        unknown = any(t is not None and t.device.type != "cpu" for t in given)
        causal: list[bool] = [rules.causal] * batch.num_reqs
        prefix = [0] * batch.num_reqs
        ranges: dict[int, list[tuple[int, int]]] = {}
        if not unknown:
            causal = causal if batch.causal is None else batch.causal.tolist()
            prefix = prefix if batch.prefix_lens is None else batch.prefix_lens.tolist()
            for request, begin, end in [] if batch.ranges is None else batch.ranges.tolist():
                ranges.setdefault(request, []).append((begin, end))
        static = rules.static_sink_tokens
        return cls(tuple(causal), tuple(max(p, static) for p in prefix), ranges, unknown)

    def key_spans(
        self, rules: MaskRules, request: int, first: int, last: int, seq_len: int
    ) -> tuple[tuple[int, int], ...]:
        """Where the keys lie that queries at positions `first` to `last` may see.

        At most two spans (begin, end), in order and not touching; every visible key is
        inside, and blocks outside are not to be read.
        """
        if self.unknown:
            return ((0, seq_len),) if seq_len else ()
        causal = self.causal[request]
        low, high = _base_span(rules, first, last, causal)
        for begin, end in self.ranges.get(request, ()):
            if begin <= last and first < end:
                low, high = (min(low, begin), max(high, end)) if high > low else (begin, end)
        low, high = max(low, 0), min(high, seq_len)
        head = min(self.prefix_lens[request], seq_len, last + 1 if causal else seq_len)
        if head <= 0:
            return ((low, high),) if high > low else ()
        if high <= low:
            return ((0, head),)
        return ((0, max(head, high)),) if low <= head else ((0, head), (low, high))


def _base_span(rules: MaskRules, first: int, last: int, causal: bool) -> tuple[int, int]:
    right = rules.sliding_window[1]
    low, high = rules.first_key(first), OPEN
    if causal:
        high = last + 1
    if right >= 0:
        high = min(high, last + right + 1)
    if rules.chunk_size is not None:
        high = min(high, (last // rules.chunk_size + 1) * rules.chunk_size)
    return low, high


def _column(values: list[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=torch.int64), device)[:, None, None]
