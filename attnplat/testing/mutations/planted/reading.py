"""Bugs in finding keys, values and heads, and in writing results."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.plan import Call, Plan, Schedule
from attnplat.testing.mutations.bug import BugList
from attnplat.testing.mutations.specimen import Lengths, Rows, Specimen

BUGS = BugList("GFCHDR")
Tensor = torch.Tensor
Two = tuple[Tensor, Tensor]


@BUGS.impl
class HeadsInterleaved(Specimen):
    """Query head h reads key-value head h % num_kv_heads."""

    def kv_head(self, heads: Tensor) -> Tensor:
        return heads % self.form.num_kv_heads


@BUGS.impl
class HeadsAllFirst(Specimen):
    """All query heads read key-value head 0."""

    def kv_head(self, heads: Tensor) -> Tensor:
        return torch.zeros_like(heads)


@BUGS.impl
class GroupsOf16(Specimen):
    """A group of more than 16 heads reads the next key-value head for the rest."""

    def kv_head(self, heads: Tensor) -> Tensor:
        size = self.form.group_size
        own = heads // size
        beyond = heads % size >= 16
        return torch.where(beyond, (own + 1) % self.form.num_kv_heads, own) - beyond * (
            self.form.num_kv_heads == 1
        )


@BUGS.impl
class GroupsPowerOfTwo(Specimen):
    """Group sizes are rounded down to a power of two."""

    def kv_head(self, heads: Tensor) -> Tensor:
        size = 1 << (self.form.group_size.bit_length() - 1)
        return (heads // size).clamp(max=self.form.num_kv_heads - 1)


@BUGS.impl
class BlocksConsecutive(Specimen):
    """A sequence's blocks are taken to lie one behind the other."""

    def where(self, pages: PageTable, request: int, j: Tensor) -> Two:
        first = super().where(pages, request, j[:1])[0] - j[:1] // pages.block_size
        return first + j // pages.block_size, j % pages.block_size


@BUGS.impl
class BlocksOf16(Specimen):
    """Blocks are taken to hold 16 tokens."""

    def where(self, pages: PageTable, request: int, j: Tensor) -> Two:
        return super().where(replace(pages, block_size=16), request, j)


@BUGS.impl
class TableOfFirstRequest(Specimen):
    """All requests read the first one's table row."""

    def where(self, pages: PageTable, request: int, j: Tensor) -> Two:
        return super().where(pages, 0, j)


@BUGS.impl
class TableRowsAdjacent(Specimen):
    """Table rows are taken to be as far apart as they are long."""

    def where(self, pages: PageTable, request: int, j: Tensor) -> Two:
        table = pages.block_table
        flat = table.as_strided(table.shape, (table.shape[1], 1))
        return super().where(replace(pages, block_table=flat), request, j)


@BUGS.impl
class FirstBlockIgnored(Specimen):
    """A rolling table's first block is ignored."""

    def where(self, pages: PageTable, request: int, j: Tensor) -> Two:
        return super().where(replace(pages, first_block=None), request, j)


@BUGS.impl
class BlockZeroIsNull(Specimen):
    """Block 0 is taken for no block at all."""

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        k, v = super().read(plan, call, rows, j)
        if plan.pages is None:
            return k, v
        live = (self.where(plan.pages, rows.number, j)[0] != 0)[:, None, None]
        return torch.where(live, k, 0.0), torch.where(live, v, 0.0)


@BUGS.impl
class BlockTwiceReadOnce(Specimen):
    """A block that stands twice in a sequence is read once."""

    def visible(self, batch: Batch, rows: Rows, topk: Tensor | None) -> Tensor:
        return super().visible(batch, rows, topk)

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        k, v = super().read(plan, call, rows, j)
        if plan.pages is None or plan.pages.first_block is not None:
            return k, v
        table = plan.pages.block_table[rows.number].tolist()
        seen = [table[c] in table[:c] for c in (j // plan.pages.block_size).tolist()]
        again = torch.tensor(seen, dtype=torch.bool, device=self.device)[:, None, None]
        return torch.where(again, 0.0, k), torch.where(again, 0.0, v)


class _Overreading(Specimen):
    """Base of bugs that multiply what must not be read by a weight of 0."""

    def extra(self, plan: Plan, rows: Rows) -> Tensor:
        """Positions that are read besides."""
        raise NotImplementedError

    def attend(self, plan: Plan, call: Call, rows: Rows) -> Two:
        out, lse = super().attend(plan, call, rows)
        more = self.extra(plan, rows) if plan.pages is not None else torch.empty(0)
        if len(more):
            k, v = self.read(plan, call, rows, more)
            out = out + 0.0 * v.to(self.wide).sum((0, 1)) + 0.0 * k.to(self.wide).sum()
        return out, lse


@BUGS.impl
class LastBlockReadWhole(_Overreading):
    """The last block is read to its end, with weights of 0 past the sequence."""

    def extra(self, plan: Plan, rows: Rows) -> Tensor:
        assert plan.pages is not None
        end = -(-rows.keys // plan.pages.block_size) * plan.pages.block_size
        return torch.arange(rows.keys, end, device=self.device)


@BUGS.impl
class TailRead(_Overreading):
    """The table entry after the last is followed, with weights of 0."""

    def extra(self, plan: Plan, rows: Rows) -> Tensor:
        pages = plan.pages
        assert pages is not None
        end = -(-rows.keys // pages.block_size)
        room = pages.block_table.shape[1]
        if pages.first_block is not None or end >= room:
            return torch.empty(0)
        return torch.tensor([end * pages.block_size], device=self.device)


@BUGS.impl
class HiddenBlocksRead(_Overreading):
    """Blocks before the window are read, with weights of 0."""

    def extra(self, plan: Plan, rows: Rows) -> Tensor:
        assert plan.pages is not None
        if plan.pages.first_block is not None or not rows.keys:
            return torch.empty(0)
        return torch.zeros(1, dtype=torch.int64, device=self.device)


@BUGS.impl
class PaddingTableRead(Specimen):
    """The table row of a padding request is followed."""

    def _attend(self, plan: Plan, call: Call) -> None:
        super()._attend(plan, call)
        assert isinstance(plan.schedule, Lengths)
        if plan.pages is not None and call.cache is not None:
            for r, keys in enumerate(plan.schedule.seq_lens):
                if keys == 0 and plan.pages.block_table.shape[1]:
                    block = int(plan.pages.block_table[r, 0])
                    call.out.add_(0.0 * call.cache.pages()[0][block].sum().to(call.out.dtype))


@BUGS.impl
class PaddingLanesCount(Specimen):
    """Without causality, lanes past the sequence join the denominator as zeros."""

    def divided(self, out: Tensor, total: Tensor) -> Tensor:
        if self.form.mask.causal or self.form.mask.topk is not None:
            return super().divided(out, total)
        return super().divided(out, torch.where(total == 0, total, total + self._lanes))

    def attend(self, plan: Plan, call: Call, rows: Rows) -> Two:
        self._lanes = -rows.keys % 8
        return super().attend(plan, call, rows)


@BUGS.impl
class NeighboursLeakNaN(Specimen):
    """A request without keys in the batch makes its neighbours NaN."""

    def _attend(self, plan: Plan, call: Call) -> None:
        super()._attend(plan, call)
        assert isinstance(plan.schedule, Lengths)
        start, lens = plan.schedule.query_start, plan.schedule.seq_lens
        empty = [r for r, keys in enumerate(lens) if not keys and start[r + 1] > start[r]]
        if empty and len(lens) > 1:
            call.out[: start[-1]] = float("nan")


@BUGS.impl
class OneByteTooFar(Specimen):
    """The byte behind the cache is read."""

    def attend(self, plan: Plan, call: Call, rows: Rows) -> Two:
        if call.cache is not None and self.device.type == "cpu":
            k = call.cache.k
            storage = k.untyped_storage()
            if k.is_contiguous() and k.numel() * k.element_size() == storage.nbytes():
                ctypes.string_at(storage.data_ptr() + storage.nbytes(), 1)
            elif k.is_contiguous():
                end = k.data_ptr() + k.numel() * k.element_size()
                ctypes.string_at(end, 1)
        return super().attend(plan, call, rows)


class _Offsets(Specimen):
    """Base of bugs in addresses."""

    limit = 1 << 31

    def wraps(self, plane: Tensor) -> bool:
        """Whether offsets into the plane pass the limit."""
        reach = sum((n - 1) * s for n, s in zip(plane.shape, plane.stride(), strict=True))
        return reach >= self.limit


@BUGS.impl
class OffsetsIn32Bits(_Offsets):
    """Offsets into the cache wrap at 2^31 elements."""

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        k, v = super().read(plan, call, rows, j)
        if call.cache is None or not self.wraps(call.cache.pages()[0]):
            return k, v
        assert plan.pages is not None
        block = self.where(plan.pages, rows.number, j)[0]
        far = (block * call.cache.pages()[0].stride(0) >= self.limit)[:, None, None]
        return torch.where(far, 0.0, k), torch.where(far, 0.0, v)


@BUGS.impl
class RowsIn32Bits(_Offsets):
    """Offsets into q and out wrap at 2^31 elements."""

    def store(self, call: Call, rows: Rows, out: Tensor, lse: Tensor) -> None:
        last = (rows.first + len(rows.p) - 1) * call.q.stride(0)
        if self.wraps(call.q) and last >= self.limit:
            out = out.roll(1, 0)
        super().store(call, rows, out, lse)


@BUGS.impl
class LayoutAssumed(Specimen):
    """The cache is taken to have heads before tokens."""

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        k, v = super().read(plan, call, rows, j)
        if call.cache is not None and call.cache.spec.layout.of_one_layer.startswith("BN"):
            return k.roll(1, 0), v.roll(1, 0)
        return k, v


@BUGS.impl
class KeysStridesForValues(Specimen):
    """Values are read with the strides of keys."""

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        k, v = super().read(plan, call, rows, j)
        if call.cache is None or self.form.values_in_keys:
            return k, v
        planes = call.cache.pages()
        same = planes[0].stride()[:3] == planes[1].stride()[:3]
        return k, v if same else v.roll(1, 0)


@BUGS.impl
class DenseAssumedPacked(Specimen):
    """Dense sequences are taken to be packed, wherever they start."""

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        if plan.pages is None:
            batch = plan.batch.replace(kv_start_loc=None)
            plan = replace(plan, batch=batch)
        return super().read(plan, call, rows, j)


@BUGS.impl
class QueriesAssumedPacked(Specimen):
    """q is taken to be contiguous."""

    def attend(self, plan: Plan, call: Call, rows: Rows) -> Two:
        if not call.q.is_contiguous() and call.q.shape[0] > 1:
            call = replace(call, q=call.q.roll(1, -1))
        return super().attend(plan, call, rows)


@BUGS.impl
class KeysAssumedPacked(Specimen):
    """New keys and values are taken to be contiguous."""

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        k, v = super().read(plan, call, rows, j)
        if call.k is not None and not call.k.is_contiguous():
            return k.roll(1, -1), v
        return k, v


@BUGS.impl
class HeadSizePowerOfTwo(Specimen):
    """Rows are read to the next power of two of the head size."""

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        k, v = super().read(plan, call, rows, j)
        size = k.shape[-1]
        if call.cache is None or size & (size - 1) == 0:
            return k, v
        plane = call.cache.pages()[0]
        if plane.stride(2) <= size:
            return k, v
        beyond = plane.as_strided((1,), (1,), plane.storage_offset() + size)
        return k + 0.0 * beyond, v


@BUGS.impl
class HeadSizeTailLost(Specimen):
    """Elements past the last full 32 of a head are left out of the scores."""

    def scores(self, plan: Plan, call: Call, rows: Rows, q: Tensor, k: Tensor, j: Tensor) -> Tensor:
        whole = max(k.shape[-1] // 32 * 32, 16)
        return super().scores(plan, call, rows, q[..., :whole], k[..., :whole], j)


@BUGS.impl
class ValuesCutToHalf(Specimen):
    """Values narrower or wider than keys lose their last quarter."""

    def store(self, call: Call, rows: Rows, out: Tensor, lse: Tensor) -> None:
        if self.form.v_head_size != self.form.head_size:
            out = out.clone()
            out[..., -(out.shape[-1] // 4) :] = 0
        super().store(call, rows, out, lse)


@BUGS.impl
class LatentValuesFromTail(Specimen):
    """Values inside keys are taken from the end of the row."""

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        k, v = super().read(plan, call, rows, j)
        return (k, k[..., -v.shape[-1] :]) if self.form.values_in_keys else (k, v)


@BUGS.impl
class LatentHeadsPadded(Specimen):
    """Of more than 16 absorbed heads those past the last full 16 are not written."""

    def store(self, call: Call, rows: Rows, out: Tensor, lse: Tensor) -> None:
        heads = out.shape[1]
        if self.form.values_in_keys and heads > 16 and heads % 16:
            out = out.clone()
            out[:, heads // 16 * 16 :] = 0
        super().store(call, rows, out, lse)


@BUGS.impl
class LatentRowsSeeAll(Specimen):
    """Several absorbed rows of one request see each other."""

    def past(self, p: Tensor, j: Tensor) -> Tensor:
        return super().past(p.max(), j) if self.form.values_in_keys else super().past(p, j)


@BUGS.impl
class StoredDtypeAssumed(Specimen):
    """A cache of another dtype is read as if it had the activations'."""

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        k, v = super().read(plan, call, rows, j)
        return k, v if v.dtype == self.dtype else v * 2


# Coded caches --------------------------------------------------------------------------------


class _Scaled(Specimen):
    """Base of bugs in the scales of a coded cache."""

    def scales(self, call: Call) -> dict[str, Any]:
        raise NotImplementedError

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        return super().read(plan, replace(call, **self.scales(call)), rows, j)


@BUGS.impl
class CacheScalesIgnored(_Scaled):
    """The scales of a coded cache are ignored."""

    def scales(self, call: Call) -> dict[str, Any]:
        return {"k_scale": None, "v_scale": None}


@BUGS.impl
class CacheScalesSwapped(_Scaled):
    """Keys of a coded cache are read with the values' scale, and values with the keys'."""

    def scales(self, call: Call) -> dict[str, Any]:
        return {"k_scale": call.v_scale, "v_scale": call.k_scale}


@BUGS.impl
class CacheScalesDivide(_Scaled):
    """The scales of a coded cache divide on reading."""

    def scales(self, call: Call) -> dict[str, Any]:
        both = {"k_scale": call.k_scale, "v_scale": call.v_scale}
        return {name: None if s is None else 1.0 / s for name, s in both.items()}


@BUGS.impl
class CacheScalesOfFirstHead(_Scaled):
    """All heads have the first one's scale."""

    def scales(self, call: Call) -> dict[str, Any]:
        both = {"k_scale": call.k_scale, "v_scale": call.v_scale}
        return {name: None if s is None else s[:1] for name, s in both.items()}


@BUGS.impl
class SinksDroppedWhenCoded(Specimen):
    """Sinks are dropped where the cache is coded."""

    def with_sink(
        self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.encoding.value.split("_")[0] in ("fp8", "int8", "mla"):
            return high, total, out
        return super().with_sink(sinks, high, total, out)


@BUGS.impl
class CapDroppedWhenCoded(Specimen):
    """The soft cap is dropped where the cache is coded."""

    def capped(self, s: Tensor) -> Tensor:
        return s if self.encoding.value == "int8_th" else super().capped(s)


@BUGS.impl
class CodedKeysInBfloat16(Specimen):
    """Coded keys are decoded to bfloat16, also for wider layers."""

    def read(self, plan: Plan, call: Call, rows: Rows, j: Tensor) -> Two:
        k, v = super().read(plan, call, rows, j)
        if call.cache is not None and not call.cache.spec.is_plain:
            return k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype)
        return k, v


# Results -------------------------------------------------------------------------------------


@BUGS.impl
class PaddingRowsZeroed(Specimen):
    """Padding rows of a given out are set to 0."""

    def _attend(self, plan: Plan, call: Call) -> None:
        super()._attend(plan, call)
        assert isinstance(plan.schedule, Lengths)
        call.out[plan.schedule.query_start[-1] :] = 0


@BUGS.impl
class PaddingRowsComputed(Specimen):
    """Padding rows belong to the last request."""

    def requests(self, schedule: Schedule, batch: Batch):  # type: ignore[no-untyped-def]
        found = list(super().requests(schedule, batch))
        assert isinstance(schedule, Lengths)
        if found and batch.num_tokens > schedule.query_start[-1]:
            last = found[-1]
            more = batch.num_tokens - last.first
            p = torch.arange(last.context, last.context + more, device=self.device)
            found[-1] = replace(last, p=p)
        return found


@BUGS.impl
class OutAccumulates(Specimen):
    """Results are added to what out held."""

    def store(self, call: Call, rows: Rows, out: Tensor, lse: Tensor) -> None:
        held = call.out[rows.slice].clone()
        super().store(call, rows, out, lse)
        call.out[rows.slice] += held


@BUGS.impl
class OutFirstRowTwice(Specimen):
    """A request's last row is not written when there are three or more."""

    def store(self, call: Call, rows: Rows, out: Tensor, lse: Tensor) -> None:
        kept = call.out[rows.slice][-1:].clone()
        super().store(call, rows, out, lse)
        if len(rows.p) >= 3:
            call.out[rows.slice][-1:] = kept


@BUGS.impl
class OutAssumedPacked(Specimen):
    """A given out is taken to be contiguous."""

    def store(self, call: Call, rows: Rows, out: Tensor, lse: Tensor) -> None:
        if not call.out.is_contiguous():
            out = out.roll(1, 1)
        super().store(call, rows, out, lse)


@BUGS.impl
class LseAssumedPacked(Specimen):
    """A given lse is taken to be contiguous."""

    def store(self, call: Call, rows: Rows, out: Tensor, lse: Tensor) -> None:
        if call.lse is not None and not call.lse.is_contiguous():
            lse = lse.roll(1, 1)
        super().store(call, rows, out, lse)


@BUGS.impl
class QueriesScaledInPlace(Specimen):
    """q is scaled where it lies."""

    def _attend(self, plan: Plan, call: Call) -> None:
        super()._attend(plan, call)
        call.q.mul_(self.form.scale)


@BUGS.impl
class SinksChangedInPlace(Specimen):
    """Sinks are turned to base 2 where they lie."""

    def _attend(self, plan: Plan, call: Call) -> None:
        super()._attend(plan, call)
        if call.sinks is not None:
            call.sinks.mul_(1.4426950408889634)


@BUGS.impl
class CacheScratch(Specimen):
    """The cache's last block is used for scratch."""

    def _attend(self, plan: Plan, call: Call) -> None:
        super()._attend(plan, call)
        if call.cache is not None:
            call.cache.pages()[0][-1] = 0
