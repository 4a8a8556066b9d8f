"""TORCH_SDPA's plans that are updated in place: one sequence of kernels for every step.

A plan made for its step runs only what the step needs. Here nothing may depend on a step's
values, so everything is as large as the bounds: each request has `max_query_len` query rows and
all columns of the table, and what is no row or no key is masked. That costs
max_reqs * max_query_len * max_seq_len whatever the step, which is what a device graph of a decode
costs anyway, and too much for prompts.

Keys come in pieces of some pages, so that memory is bounded; the pieces are joined by their
log-sum-exp, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnplat.backends.batch import Batch
from attnplat.backends.form import AttentionForm
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding
from attnplat.backends.formats.facts import FORMATS
from attnplat.backends.formats.rows import decode_rows
from attnplat.backends.pages import PageTable
from attnplat.backends.plan import Call, Schedule
from attnplat.backends.portable.dense import Bias, accumulator, online_attention
from attnplat.backends.portable.gather import planes_of
from attnplat.backends.portable.masks import OPEN, Queries, visible_keys
from attnplat.errors import ConfigError
from attnplat.ops.merge import apply_sinks, merge_states

PIECE_ELEMENTS = 1 << 24
"""Key elements of all requests and heads that are copied at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InPlaceSchedule(Schedule):
    """The step's tensors, read anew by every run.

    `batch` and `pages` are those of the plan; their tensors change, their sizes do not.
    """

    batch: Batch
    pages: PageTable | None


@dataclass(frozen=True, eq=False)
class Rows:
    """The query rows of all requests, `max_query_len` each.

    Attributes:
        queries: for the mask algebra.
        source: the row of `q` that each is, int64 [requests, rows]; where it is none, any.
    """

    queries: Queries
    source: torch.Tensor

    @classmethod
    def of(cls, form: AttentionForm, batch: Batch, most: int) -> Rows:
        """The rows of the step that `batch` holds now, which are `most` at most."""
        device, count = batch.device, batch.max_query_len
        start = batch.query_start_loc.long()
        first, query_len = start[:-1, None], start.diff()[:, None]
        seq_len = batch.seq_lens.long()[:, None]
        index = torch.arange(count, device=device)
        source = (first + index).clamp(max=most - 1)
        context = seq_len - query_len
        causal, prefix, tree = batch.causal, batch.prefix_lens, batch.tree_mask
        queries = Queries(
            rules=form.mask,
            position=(context + index)[..., None],
            index=index,
            context=context[..., None],
            seq_len=seq_len[..., None],
            request=torch.arange(batch.num_reqs, device=device)[:, None, None],
            causal=None if causal is None else causal[:, None, None],
            prefix_len=None if prefix is None else prefix.long()[:, None, None],
            ranges=None,
            tree=None if tree is None else tree[source],
            longest=batch.max_seq_len,
        )
        return cls(queries, source)


@dataclass(frozen=True, eq=False)
class Piece:
    """Some keys of every request: `positions` int64 [requests, keys], seq_len where there is no
    key; k and v [requests, kv heads, keys, size] in the layer's dtype."""

    positions: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, eq=False)
class InPlaceRun:
    """One call with a plan that is updated in place."""

    form: AttentionForm
    encoding: Encoding
    dtype: torch.dtype
    schedule: InPlaceSchedule
    call: Call

    @property
    def num_rows(self) -> int:
        """Rows that may be real: the bound, or all that the call brought."""
        named = [self.call.q, self.call.topk_indices]
        return min(self.schedule.batch.num_tokens, *(len(t) for t in named if t is not None))

    def attend(self) -> None:
        """Write `call.out` and `call.lse`, real rows only."""
        batch, call, form = self.schedule.batch, self.call, self.form
        if self.num_rows == 0 or batch.num_reqs == 0:
            return
        rows = Rows.of(form, batch, self.num_rows)
        group = (form.num_kv_heads, form.group_size)
        q = call.q[rows.source].unflatten(2, group).transpose(1, 2).contiguous()
        topk = None if call.topk_indices is None else call.topk_indices[rows.source]
        out = lse = None
        for piece in self._pieces():
            visible = visible_keys(rows.queries, piece.positions, topk)
            part = self._attend_piece(q, piece, visible, rows.queries)
            if out is None or lse is None:
                out, lse = part
            else:
                out, lse = merge_states((out, part[0]), (lse, part[1]))
        if out is None or lse is None:
            out = q.new_zeros((*q.shape[:-1], form.v_head_size), dtype=accumulator(q.dtype))
            lse = torch.full_like(out[..., 0], float("-inf"))
        out, lse = out.transpose(1, 2).flatten(2, 3), lse.transpose(1, 2).flatten(2, 3)
        if call.sinks is not None:
            out, lse = apply_sinks(out, lse, call.sinks)
        self._store(out, lse)

    def _attend_piece(
        self, q: torch.Tensor, piece: Piece, visible: torch.Tensor, queries: Queries
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # What no row sees may be anything, and a weight of 0 does not stop NaN.
        seen = visible.any(1)[:, None, :, None]
        return online_attention(
            q,
            torch.where(seen, piece.k, 0.0),
            torch.where(seen, piece.v, 0.0),
            visible,
            scale=self.form.scale,
            soft_cap=self.form.logits_soft_cap,
            bias=self._bias(queries, piece.positions),
        )

    def _store(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Each real row from its request; what is behind the real rows stays."""
        batch, call = self.schedule.batch, self.call
        start = batch.query_start_loc.long()
        row = torch.arange(self.num_rows, device=batch.device)
        request = torch.searchsorted(start[1:], row, right=True).clamp(max=batch.num_reqs - 1)
        index = (row - start[request]).clamp(0, batch.max_query_len - 1)
        real = row < start[-1]
        kept = call.out[: self.num_rows]
        found = out[request, index].to(kept.dtype)
        kept.copy_(torch.where(real[:, None, None], found, kept))
        if call.lse is not None:
            kept = call.lse[: self.num_rows]
            kept.copy_(torch.where(real[:, None], lse[request, index].to(kept.dtype), kept))

    # Keys ------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[Piece]:
        """The keys of all requests, some columns of the table at a time."""
        batch, pages, form = self.schedule.batch, self.schedule.pages, self.form
        size = 1 if pages is None else pages.block_size
        table, first = self._table()
        per_column = batch.num_reqs * form.num_kv_heads * size
        per_column *= max(form.head_size, form.v_head_size)
        step = max(1, PIECE_ELEMENTS // max(per_column, 1))
        planes = planes_of(self.call)
        num_blocks = planes[0].shape[0]
        if num_blocks == 0:
            return
        offset = torch.arange(size, device=batch.device)
        seq_len = batch.seq_lens.long()[:, None]
        self._refuse_outside(table, first, size, num_blocks)
        for begin in range(0, table.shape[1], step):
            columns = torch.arange(begin, min(begin + step, table.shape[1]), device=batch.device)
            position = ((first[:, None] + columns)[..., None] * size + offset).flatten(1)
            live = (position >= 0) & (position < seq_len)
            blocks = table[:, begin : begin + step].clamp(0, num_blocks - 1)
            k = self._read(planes[0], blocks, form.head_size, self.call.k_scale)
            if form.values_in_keys:
                v = k[..., : form.v_head_size]
            else:
                v = self._read(planes[1], blocks, form.v_head_size, self.call.v_scale)
            yield Piece(torch.where(live, position, seq_len), k, v)

    def _table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks, int64 [requests, columns], and the logical block of column 0, [requests].

        Without pages, rows of k and v: blocks of one token.
        """
        batch, pages = self.schedule.batch, self.schedule.pages
        if pages is not None:
            first = pages.first_block
            first = torch.zeros_like(batch.seq_lens) if first is None else first
            return pages.block_table.long(), first.long()
        lens = batch.seq_lens.long()
        start = batch.kv_start_loc
        start = lens.cumsum(0) - lens if start is None else start.long()
        column = torch.arange(batch.max_seq_len, device=batch.device)
        return start[:, None] + column, torch.zeros_like(lens)

    def _refuse_outside(
        self, table: torch.Tensor, first: torch.Tensor, size: int, num_blocks: int
    ) -> None:
        """Where the host can look without waiting: live blocks that the cache has not."""
        if table.device.type != "cpu" or not table.numel():
            return
        logical = first[:, None] + torch.arange(table.shape[1])
        live = logical * size < self.schedule.batch.seq_lens.long()[:, None]
        wrong = live & ((table < 0) | (table >= num_blocks))
        wrong &= logical >= self._first_seen(size)
        if bool(wrong.any()):
            r, column = wrong.nonzero()[0].tolist()
            raise ConfigError(
                f"request {r} reads block {int(table[r, column])}; it takes 0 to {num_blocks - 1}"
            )

    def _first_seen(self, size: int) -> torch.Tensor:
        """The first logical block that a query of each request may see, [requests, 1]."""
        batch, mask = self.schedule.batch, self.form.mask
        context = (batch.seq_lens.long() - batch.query_start_loc.long().diff()).clamp(min=0)
        first, left = torch.zeros_like(context), mask.sliding_window[0]
        if mask.static_sink_tokens or batch.prefix_lens is not None:
            return first[:, None]
        if left >= 0:
            first = (context - min(left, OPEN)).clamp(min=0)
        if mask.chunk_size is not None:
            first = torch.maximum(first, context // mask.chunk_size * mask.chunk_size)
        return (first // size)[:, None]

    def _read(
        self, plane: torch.Tensor, blocks: torch.Tensor, size: int, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Pages [requests, kv heads, keys, size] of `plane`, decoded."""
        found = plane[blocks].transpose(1, 2).flatten(2, 3)
        if self.call.cache is None or self.encoding in PLAIN_ENCODINGS:
            return found
        rows = found.transpose(1, 2)
        decoded = decode_rows(
            FORMATS[self.encoding], rows, size=size, scale=scale, dtype=self.dtype
        )
        return decoded.transpose(1, 2)

    def _bias(self, queries: Queries, positions: torch.Tensor) -> Bias | None:
        """ALiBi and position bias of the scores of a piece, by chunk of keys."""
        slopes, table = self.call.alibi_slopes, self.call.position_bias
        if slopes is None and table is None:
            return None
        wide = accumulator(self.dtype)
        heads = (self.form.num_kv_heads, self.form.group_size)
        if table is not None and table.dim() == 3:
            table = table.expand(positions.shape[0], *table.shape)

        def bias(first: int, last: int) -> torch.Tensor:
            keys = positions[:, None, first:last]
            added = torch.zeros((1, 1, 1, 1, 1), dtype=wide, device=keys.device)
            if slopes is not None:
                distance = (queries.position - keys).abs()[:, None, :, None]
                own = slopes.to(wide).view(*heads)
                added = added - own[None, :, None, :, None] * distance
            if table is not None:
                request = queries.request
                row = queries.index[None, :, None].clamp(max=table.shape[2] - 1)
                column = keys.clamp(max=table.shape[3] - 1)
                chosen = table[request, :, row, column].to(wide)  # [requests, rows, keys, heads]
                added = added + chosen.permute(0, 3, 1, 2).unflatten(1, heads).transpose(2, 3)
            return added

        return bias
