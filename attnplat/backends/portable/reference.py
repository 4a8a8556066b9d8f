"""REFERENCE: attention in float64, one request at a time. The yardstick of all others.

It is written to be read and to be right. Every product and sum is float64 on inputs exactly
as stored; each request is computed from tensors that depend on that request alone, so that a
request of a ragged batch gives bit for bit what it gives by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnplat.backends.batch import Batch, HostLengths, PageTable
from attnplat.backends.checks import to_device
from attnplat.backends.formats.facts import FORMATS
from attnplat.backends.interface import AttentionImpl, Call, Plan, Schedule
from attnplat.backends.portable.features import PORTABLE_OPERATIONS, REFERENCE_FEATURES
from attnplat.backends.portable.gather import highest_block, look_up
from attnplat.backends.portable.masks import HostMasks, Queries, queries_of, visible_keys
from attnplat.backends.workspace import Workspace

_NEG_INF = float("-inf")

SCORES = 1 << 22
"""Most scores held at once, 32 MiB of float64; a request of more is cut into row tiles."""


@dataclass(frozen=True, eq=False)
class Request:
    """One request of a plan.

    Attributes:
        number: its number in the batch.
        first_row, last_row: its query rows.
        queries: the same rows for the mask algebra.
        positions: positions of the keys that any row may see, int64 [keys].
        blocks, offsets: where they are, int64 [keys] each; without a cache, rows of k and v and
            0.
    """

    number: int
    first_row: int
    last_row: int
    queries: Queries
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceSchedule(Schedule):
    """The requests that have query rows."""

    requests: tuple[Request, ...]


class ReferenceImpl(AttentionImpl):
    """Attention in float64 on any torch device that has it; every feature, no hurry."""

    name = "REFERENCE"
    operations = PORTABLE_OPERATIONS
    features = REFERENCE_FEATURES
    encodings = frozenset(name for name, format in FORMATS.items() if not format.keys_only)
    needs_host_lengths = True

    def _schedule(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths | None,
        workspace: Workspace | None,
    ) -> ReferenceSchedule:
        assert lengths is not None
        masks = HostMasks.of(self.form.mask, batch)
        requests = tuple(
            self._request(batch, pages, lengths, masks, r)
            for r in range(batch.num_reqs)
            if lengths.query_len(r)
        )
        highest = highest_block(request.blocks for request in requests)
        return ReferenceSchedule(requests=requests, highest_block=highest)

    def _request(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths,
        masks: HostMasks,
        r: int,
    ) -> Request:
        seq_len, rows = lengths.seq_lens[r], lengths.query_len(r)
        first = seq_len - rows
        spans = masks.key_spans(self.form.mask, r, first, seq_len - 1, seq_len)
        none = torch.empty(0, dtype=torch.int64)
        positions = torch.cat([none, *(torch.arange(a, b) for a, b in spans)])
        if pages is None:
            blocks = to_device(positions + batch.kv_starts(lengths)[r], self.device)
            offsets = torch.zeros_like(blocks)
        else:
            blocks = look_up(pages, [r], positions[None] // pages.block_size)[0]
            offsets = to_device(positions % pages.block_size, self.device)
        return Request(
            number=r,
            first_row=lengths.query_start[r],
            last_row=lengths.query_start[r + 1],
            queries=queries_of(self.form.mask, batch, lengths, [r]),
            positions=to_device(positions, self.device),
            blocks=blocks,
            offsets=offsets,
        )

    def _attend(self, plan: Plan, call: Call) -> None:
        assert isinstance(plan.schedule, ReferenceSchedule)
        for request in plan.schedule.requests:
            k, v = _keys_and_values(request, call)
            keys, heads = k.shape[1], self.form.num_heads
            step = max(1, SCORES // max(keys * heads, 1))
            for first in range(request.first_row, request.last_row, step):
                rows = slice(first, min(first + step, request.last_row))
                self._attend_rows(request, call, rows, k, v)

    def _attend_rows(
        self, request: Request, call: Call, rows: slice, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """One tile of query rows against all keys of its request."""
        kv_heads, group = self.form.num_kv_heads, self.form.group_size
        queries = request.queries.rows(
            rows.start - request.first_row, rows.stop - request.first_row
        )
        count, keys = rows.stop - rows.start, k.shape[1]
        # A copy even of float64: results must not depend on strides or alignment.
        q = call.q[rows].to(torch.float64, copy=True)
        q = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2).contiguous()
        scores = torch.bmm(q, k.transpose(1, 2)) * self.form.scale
        scores = self._adjusted(scores.view(kv_heads * group, count, keys), request, queries, call)
        topk = None if call.topk_indices is None else call.topk_indices[rows][None]
        visible = visible_keys(queries, request.positions[None], topk)[0]
        scores = torch.where(visible, scores, _NEG_INF)
        sinks = None if call.sinks is None else call.sinks.double()[:, None]
        weights, lse = _softmax(scores, sinks)
        out = _weighted(weights.view(kv_heads, group * count, keys), v, visible)
        out = out.view(kv_heads * group, count, -1).transpose(0, 1)
        call.out[rows] = out.to(call.out.dtype)
        if call.lse is not None:
            call.lse[rows] = lse.transpose(0, 1).float()

    def _adjusted(
        self, scores: torch.Tensor, request: Request, queries: Queries, call: Call
    ) -> torch.Tensor:
        """Soft cap, then ALiBi, then position bias, on scaled scores [heads, rows, keys]."""
        cap = self.form.logits_soft_cap
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if call.alibi_slopes is not None:
            distance = (queries.position[0] - request.positions).abs()
            scores = scores - call.alibi_slopes.double()[:, None, None] * distance
        if call.position_bias is not None:
            bias = call.position_bias
            bias = bias[request.number] if bias.dim() == 4 else bias
            bias = bias.index_select(1, queries.index).index_select(2, request.positions)
            scores = scores + bias.double()
        return scores


def _keys_and_values(request: Request, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The request's keys and values as float64 [kv heads, keys, size]."""
    if call.cache is None:
        assert call.k is not None and call.v is not None
        rows = call.k[request.blocks], call.v[request.blocks]
    else:
        rows = call.cache.read(
            request.blocks,
            request.offsets,
            dtype=torch.float64,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
        )
    k, v = (plane.transpose(0, 1).double().contiguous() for plane in rows)
    return k, v


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [heads, rows, keys] and log-sum-exp [heads, rows] of scores with -inf for hidden.

    `sinks` [heads, 1] joins the denominator only.
    """
    high = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], _NEG_INF)
    if sinks is not None:
        high = torch.maximum(high, sinks)
    base = torch.where(high == _NEG_INF, 0.0, high)
    weights = torch.exp(scores - base[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks - base)
    lse = base + torch.log(total)
    return weights / torch.where(total == 0, 1.0, total)[..., None], lse


def _weighted(weights: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Sum of values by weight, in which a hidden value that is not finite plays no part.

    weights [kv heads, group * rows, keys], v [kv heads, keys, size], visible [rows, keys].
    """
    finite = torch.isfinite(v)
    out = torch.bmm(weights, torch.where(finite, v, 0.0))
    # Only a tensor on the host can be asked for its values without waiting.
    if v.device.type == "cpu" and bool(finite.all()):
        return out
    seen = visible.double().repeat(weights.shape[1] // visible.shape[0], 1)
    seen = seen.expand(weights.shape[0], *seen.shape)
    for value in (float("inf"), _NEG_INF, float("nan")):
        holds = torch.isnan(v) if value != value else v == value
        met = torch.bmm(seen, holds.double()) > 0
        out = torch.where(met, out + value, out)
    return out
