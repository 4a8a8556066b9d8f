"""A plain implementation to plant bugs in.

It passes the suite, and every decision that kernels have been seen to get wrong is a method
of its own, so that a bug is a subclass that overrides one. Keys are read in tiles with an
online softmax, as kernels do, so that mistakes between tiles can be planted too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attnplat.backends.batch import Batch, HostLengths, PageTable
from attnplat.backends.formats.facts import FORMATS
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.plan import Call, Plan, Schedule
from attnplat.backends.portable.features import PORTABLE_OPERATIONS, REFERENCE_FEATURES
from attnplat.backends.workspace import Workspace
from attnplat.errors import ConfigError

NEG_INF = float("-inf")
Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths(Schedule):
    """What a plan keeps: the batch as numbers, and scratch for the scores of one tile."""

    query_start: tuple[int, ...]
    seq_lens: tuple[int, ...]
    scratch: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """One request's rows at work.

    Attributes:
        number: the request.
        first: its first row in q.
        p: positions of its rows, int64 [rows].
        keys: its number of keys.
        causal: whether it is causal.
    """

    number: int
    first: int
    p: Tensor
    keys: int
    causal: bool

    @property
    def slice(self) -> slice:
        """Its rows in q and out."""
        return slice(self.first, self.first + len(self.p))

    @property
    def context(self) -> int:
        """Keys before its first row's own."""
        return self.keys - len(self.p)


class Specimen(AttentionImpl):
    """Attention in float32 (float64 for float64), tile by tile."""

    name = "SPECIMEN"
    operations = PORTABLE_OPERATIONS
    features = REFERENCE_FEATURES
    encodings = frozenset(name for name, format in FORMATS.items() if not format.keys_only)
    needs_host_lengths = True
    ignores_threads = True
    tile = 128

    # Planning ---------------------------------------------------------------------------------

    def _schedule(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths | None,
        workspace: Workspace | None,
    ) -> Lengths:
        assert lengths is not None
        widest = max((lengths.query_len(r) for r in range(batch.num_reqs)), default=0)
        scratch = torch.empty(
            (self.form.num_heads, max(widest, 1), self.tile), dtype=self.wide, device=self.device
        )
        made = Lengths(query_start=lengths.query_start, seq_lens=lengths.seq_lens, scratch=scratch)
        highest = None if pages is None else self.highest(made, batch, pages)
        return replace(made, highest_block=highest)

    def highest(self, schedule: Lengths, batch: Batch, pages: PageTable) -> int | None:
        """The largest block id that will be read, where the host can see it."""
        found = [-1]
        for rows in self.requests(schedule, batch):
            keys = self.visible(batch, rows, None).any(0).nonzero().flatten()
            if self.device.type == "cpu" and len(keys):
                found.append(int(self.where(pages, rows.number, keys)[0].max()))
        return max(found) if self.device.type == "cpu" else None

    @property
    def wide(self) -> torch.dtype:
        """The dtype of scores and sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def requests(self, schedule: Schedule, batch: Batch) -> Iterator[Rows]:
        """The requests that have rows."""
        assert isinstance(schedule, Lengths)
        for r, keys in enumerate(schedule.seq_lens):
            first, last = schedule.query_start[r], schedule.query_start[r + 1]
            if last > first:
                p = self.positions(last - first, keys)
                yield Rows(r, first, p, keys, self.causal_of(batch, r))

    def positions(self, rows: int, keys: int) -> Tensor:
        """Positions of query rows: the last of the sequence."""
        return torch.arange(keys - rows, keys, device=self.device)

    def causal_of(self, batch: Batch, request: int) -> bool:
        """Whether a request is causal."""
        if batch.causal is None:
            return self.form.mask.causal
        return bool(batch.causal[request])

    # Masks ------------------------------------------------------------------------------------

    def visible(self, batch: Batch, rows: Rows, topk: Tensor | None) -> Tensor:
        """bool [rows, keys]; `topk` are the indices of all rows of the batch."""
        p, j = rows.p[:, None], torch.arange(rows.keys, device=self.device)[None]
        seen = self.window(p, j) & self.chunk(p, j)
        if batch.tree_mask is not None:
            bits = batch.tree_mask[rows.slice].long()
            seen = seen & self.tree(bits, j - rows.context)
        seen = seen | self.shielded(batch, rows, j)
        if rows.causal:
            seen = seen & self.past(p, j)
        seen = seen | self.in_ranges(batch, rows, p, j)
        if topk is not None:
            seen = seen & self.named(topk[rows.slice].long(), rows.keys)
        return seen

    def past(self, p: Tensor, j: Tensor) -> Tensor:
        """Keys up to a row's own position."""
        return j <= p

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        """Keys that the window leaves."""
        left, right = self.form.mask.sliding_window
        seen = torch.ones_like(p - j, dtype=torch.bool)
        if left >= 0:
            seen = seen & (p - j <= min(left, 1 << 40))
        if right >= 0:
            seen = seen & (j - p <= min(right, 1 << 40))
        return seen

    def chunk(self, p: Tensor, j: Tensor) -> Tensor:
        """Keys of a row's own chunk."""
        size = self.form.mask.chunk_size
        if size is None:
            return torch.ones_like(p - j, dtype=torch.bool)
        return torch.div(j, size, rounding_mode="floor") == torch.div(
            p, size, rounding_mode="floor"
        )

    def tree(self, bits: Tensor, offset: Tensor) -> Tensor:
        """What the tree leaves; `bits` [rows, bytes], `offset` of each key in the query part."""
        inside = offset.clamp(0, bits.shape[1] * 8 - 1)
        chosen = bits[:, inside[0] // 8] >> (inside % 8) & 1
        return (offset < 0) | (chosen == 1)

    def shielded(self, batch: Batch, rows: Rows, j: Tensor) -> Tensor:
        """Leading keys that no window hides."""
        count = self.form.mask.static_sink_tokens
        if batch.prefix_lens is not None:
            count = max(count, int(batch.prefix_lens[rows.number]))
        return j < count

    def in_ranges(self, batch: Batch, rows: Rows, p: Tensor, j: Tensor) -> Tensor:
        """Keys in one bidirectional range with a row."""
        seen = torch.zeros_like(p - j, dtype=torch.bool)
        for request, begin, end in [] if batch.ranges is None else batch.ranges.tolist():
            if request == rows.number:
                seen = seen | ((begin <= p) & (p < end) & (begin <= j) & (j < end))
        return seen

    def named(self, topk: Tensor, keys: int) -> Tensor:
        """bool [rows, keys]: the keys that indices name."""
        found = torch.zeros((len(topk), keys + 1), dtype=torch.bool, device=self.device)
        good = (topk >= 0) & (topk < keys)
        return found.scatter_(1, torch.where(good, topk, keys), True)[:, :keys]

    # Keys and values --------------------------------------------------------------------------

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [keys, kv heads, size] at positions `j`."""
        if plan.pages is None:
            assert call.k is not None and call.v is not None
            assert plan.lengths is not None
            start = plan.batch.kv_starts(plan.lengths)[rows.number]
            return call.k[start + j], call.v[start + j]
        assert call.cache is not None
        block, offset = self.where(plan.pages, rows.number, j)
        return call.cache.read(
            block,
            offset,
            dtype=None if call.cache.spec.is_plain else self.wide,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
        )

    def where(self, pages: PageTable, request: int, j: Tensor) -> tuple[Tensor, Tensor]:
        """Physical block and offset of positions."""
        size = pages.block_size
        column = j // size
        if pages.first_block is not None:
            column = column - pages.first_block[request]
        if bool(((column < 0) | (column >= pages.block_table.shape[1])).any()):
            raise ConfigError(f"the table has no block for a key of request {request}")
        block = pages.block_table[request, column].long()
        if bool((block < 0).any()):
            raise ConfigError(f"a block of request {request} is negative")
        return block, j % size

    def kv_head(self, heads: Tensor) -> Tensor:
        """The key-value head of each query head."""
        return heads // self.form.group_size

    # Scores -----------------------------------------------------------------------------------

    def scores(self, plan: Plan, call: Call, rows: Rows, q: Tensor, k: Tensor, j: Tensor) -> Tensor:
        """[heads, rows, keys] in `wide`: scale, soft cap, then biases."""
        raw = torch.einsum("hrd,khd->hrk", q.to(self.wide), k.to(self.wide))
        return self.adjusted(plan, call, rows, raw * self.form.scale, j)

    def adjusted(self, plan: Plan, call: Call, rows: Rows, s: Tensor, j: Tensor) -> Tensor:
        """Soft cap, then ALiBi, then position bias."""
        s = self.capped(s)
        if call.alibi_slopes is not None:
            s = s + self.alibi(call.alibi_slopes.to(self.wide), rows, j)
        if call.position_bias is not None:
            s = s + self.bias(call.position_bias, rows, j).to(self.wide)
        return s

    def capped(self, s: Tensor) -> Tensor:
        """c * tanh(s / c)."""
        cap = self.form.logits_soft_cap
        return s if cap is None else cap * torch.tanh(s / cap)

    def alibi(self, slopes: Tensor, rows: Rows, j: Tensor) -> Tensor:
        """-slope * |p - j|."""
        return -slopes[:, None, None] * (rows.p[:, None] - j[None]).abs()

    def bias(self, table: Tensor, rows: Rows, j: Tensor) -> Tensor:
        """[heads, rows, keys] of the position bias."""
        own = table[rows.number] if table.dim() == 4 else table
        return own[:, : len(rows.p)][:, :, j]

    # Softmax ----------------------------------------------------------------------------------

    def _attend(self, plan: Plan, call: Call) -> None:
        for rows in self.requests(plan.schedule, plan.batch):
            out, lse = self.attend(plan, call, rows)
            self.store(call, rows, out, lse)

    def attend(self, plan: Plan, call: Call, rows: Rows) -> tuple[Tensor, Tensor]:
        """out [rows, heads, v size] and lse [rows, heads] of one request, in `wide`."""
        heads = torch.arange(self.form.num_heads, device=self.device)
        # Canonical strides even where a dimension is 1: products choose their path by them.
        q = call.q[rows.slice].transpose(0, 1).clone(memory_format=torch.contiguous_format)
        seen = self.visible(plan.batch, rows, call.topk_indices)
        shape = (self.form.num_heads, len(rows.p))
        high = torch.full(shape, NEG_INF, dtype=self.wide, device=self.device)
        total = torch.zeros_like(high)
        out = high.new_zeros((*shape, self.form.v_head_size))
        for j in self.tiles(seen):
            k, v = self.read(plan, call, rows, j)
            kv = self.kv_head(heads)
            s = self.scores(plan, call, rows, q, k[:, kv], j)
            s = self.hidden(s, seen[:, j])
            high, total, out = self.step(s, v[:, kv].to(self.wide), high, total, out)
        return self.finish(call, high, total, out)

    def tiles(self, seen: Tensor) -> Iterator[Tensor]:
        """Positions of the keys that any row sees, tile by tile."""
        keys = seen.any(0).nonzero().flatten()
        yield from keys.split(self.tile) if len(keys) else ()

    def hidden(self, s: Tensor, seen: Tensor) -> Tensor:
        """Scores with -inf where a row sees no key."""
        return torch.where(seen, s, NEG_INF)

    def step(
        self, s: Tensor, v: Tensor, high: Tensor, total: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One more tile in the running maximum, sum and output."""
        higher = torch.maximum(high, s.amax(-1))
        base = torch.where(higher == NEG_INF, 0.0, higher)
        weights = self.weights(s, base)
        kept = torch.exp(high - base)
        total = total * kept + weights.sum(-1)
        out = out * kept[..., None] + torch.einsum("hrk,khd->hrd", weights, v)
        return higher, total, out

    def weights(self, s: Tensor, base: Tensor) -> Tensor:
        """exp(s - base)."""
        return torch.exp(s - base[..., None])

    def finish(self, call: Call, high: Tensor, total: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """The sink joined, the sum divided out; [rows, heads, ...]."""
        if call.sinks is not None:
            high, total, out = self.with_sink(call.sinks, high, total, out)
        divided = self.divided(out, total)
        return divided.transpose(0, 1), self.log_sum(high, total).transpose(0, 1)

    def with_sink(
        self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One more logit in the denominator."""
        sink = sinks.to(self.wide)[:, None].expand_as(high)
        higher = torch.maximum(high, sink)
        base = torch.where(higher == NEG_INF, 0.0, higher)
        kept = torch.exp(high - base)
        return higher, total * kept + torch.exp(sink - base), out * kept[..., None]

    def divided(self, out: Tensor, total: Tensor) -> Tensor:
        """out / total, 0 without a key."""
        return out / torch.where(total == 0, 1.0, total)[..., None]

    def log_sum(self, high: Tensor, total: Tensor) -> Tensor:
        """The natural log-sum-exp, -inf without a key."""
        return torch.where(high == NEG_INF, 0.0, high) + torch.log(total)

    def store(self, call: Call, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Write one request's rows."""
        call.out[rows.slice] = out.to(call.out.dtype)
        if call.lse is not None:
            call.lse[rows.slice] = lse.float()
