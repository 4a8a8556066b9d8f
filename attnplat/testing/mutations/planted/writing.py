"""Bugs in writing new keys and values."""

from __future__ import annotations

from typing import Any

import torch

from attnplat.backends.batch import PageTable
from attnplat.backends.kv_cache import KVCache, Slots
from attnplat.backends.plan import Plan
from attnplat.testing.mutations.bug import BugList
from attnplat.testing.mutations.specimen import Specimen

BUGS = BugList("CGAHR")
Tensor = torch.Tensor


class OwnWrite(Specimen):
    """The specimen with a write of its own, for bugs to override."""

    def write_kv(
        self,
        cache: KVCache,
        k: Tensor,
        v: Tensor | None,
        where: PageTable | Plan,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        self.target: PageTable | Plan = where
        super().write_kv(cache, k, v, where, k_scale=k_scale, v_scale=v_scale)

    def forward(self, plan: Plan, q: Tensor, cache: KVCache | None = None, **options: Any) -> Any:
        self.target = plan
        return super().forward(plan, q, cache, **options)

    def _write_new(self, cache: KVCache, kv: Any, slots: Slots, **scales: Tensor | None) -> None:
        step, self.scales = self.target, scales
        pages = step.pages if isinstance(step, Plan) else step
        assert pages is not None and pages.slot_mapping is not None
        real = len(pages.slot_mapping)
        if isinstance(step, Plan) and self.form.self_attention:
            real = int(step.batch.query_start_loc[-1])
        k, v = kv
        self.put_rows(cache, k, v, pages.slot_mapping, real)

    def put_rows(
        self, cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, real: int
    ) -> None:
        """Store the first `real` rows whose slot is not negative."""
        row = torch.arange(len(slots), device=slots.device)
        kept = (slots >= 0) & (row < real)
        if not cache.spec.is_plain:
            given = None if v is None else v[kept]
            cache.write(k[kept], given, Slots(None, slots[kept]), **self.scales)
            return
        planes = cache.pages()
        self.put(planes[0], k[kept], slots[kept], cache.spec.block_size)
        if v is not None:
            self.put(planes[1], v[kept], slots[kept], cache.spec.block_size)

    def put(self, plane: Tensor, rows: Tensor, slots: Tensor, block_size: int) -> None:
        """Store rows at slots of one plane."""
        plane[slots // block_size, :, slots % block_size] = rows.to(plane.dtype)


@BUGS.impl
class NegativeSlotWraps(OwnWrite):
    """A slot of -1 writes the last slot of the cache."""

    def put_rows(
        self, cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, real: int
    ) -> None:
        room = cache.num_blocks * cache.spec.block_size
        super().put_rows(cache, k, v, torch.where(slots < 0, room - 1, slots), len(slots))


@BUGS.impl
class OnlyMinusOneSkips(OwnWrite):
    """Negative slots other than -1 are written, from the end of the cache."""

    def put_rows(
        self, cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, real: int
    ) -> None:
        room = cache.num_blocks * cache.spec.block_size
        super().put_rows(cache, k, v, torch.where(slots < -1, slots % room, slots), len(slots))


@BUGS.impl
class PaddingRowsWritten(OwnWrite):
    """Padding rows are written wherever their slot says."""

    def put_rows(
        self, cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, real: int
    ) -> None:
        super().put_rows(cache, k, v, slots, len(slots))


@BUGS.impl
class SlotsOf16(OwnWrite):
    """Slots are decoded with blocks of 16 tokens."""

    def put(self, plane: Tensor, rows: Tensor, slots: Tensor, block_size: int) -> None:
        super().put(plane, rows, slots, min(16, block_size))


@BUGS.impl
class SlotsIn32Bits(OwnWrite):
    """Slots wrap at 2^31."""

    def put(self, plane: Tensor, rows: Tensor, slots: Tensor, block_size: int) -> None:
        super().put(plane, rows, slots & 0x7FFFFFFF, block_size)


@BUGS.impl
class WholeBlockCleared(OwnWrite):
    """A block is cleared before its first token is written."""

    def put(self, plane: Tensor, rows: Tensor, slots: Tensor, block_size: int) -> None:
        plane[slots[slots % block_size == 0] // block_size] = 0
        super().put(plane, rows, slots, block_size)


@BUGS.impl
class NextTokenCleared(OwnWrite):
    """The slot after each token is cleared."""

    def put(self, plane: Tensor, rows: Tensor, slots: Tensor, block_size: int) -> None:
        after = slots[slots % block_size < block_size - 1] + 1
        plane[after // block_size, :, after % block_size] = 0
        super().put(plane, rows, slots, block_size)


@BUGS.impl
class LastRowNotWritten(OwnWrite):
    """The last new token is not written."""

    def put(self, plane: Tensor, rows: Tensor, slots: Tensor, block_size: int) -> None:
        super().put(plane, rows[:-1], slots[:-1], block_size)


@BUGS.impl
class ValuesNotWritten(OwnWrite):
    """Only keys are written."""

    def put_rows(
        self, cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, real: int
    ) -> None:
        super().put_rows(cache, k, None, slots, real)


@BUGS.impl
class KeysDividedInPlace(OwnWrite):
    """New keys are divided by a scale where they lie."""

    def put_rows(
        self, cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, real: int
    ) -> None:
        super().put_rows(cache, k, v, slots, real)
        k.div_(2.0)


@BUGS.impl
class CrossWritesQueryRows(OwnWrite):
    """Cross attention writes as many encoder tokens as there are query rows."""

    def put_rows(
        self, cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, real: int
    ) -> None:
        super().put_rows(cache, k, v, slots, real if self.form.self_attention else min(real, 4))


@BUGS.impl
class SlotsAssumedSorted(OwnWrite):
    """New tokens are taken to come in the order of their slots."""

    def put(self, plane: Tensor, rows: Tensor, slots: Tensor, block_size: int) -> None:
        super().put(plane, rows, slots.sort().values, block_size)


@BUGS.impl
class ReadBeforeWrite(OwnWrite):
    """A call that brings new tokens attends before it writes them."""

    def forward(self, plan: Plan, q: Tensor, cache: KVCache | None = None, **options: Any) -> Any:
        kv = options.pop("kv", None)
        if cache is None or kv is None:
            return super().forward(plan, q, cache, **options, kv=kv)
        result = super().forward(plan, q, cache, **options)
        k, v = kv
        scales = {name: options.get(name) for name in ("k_scale", "v_scale")}
        self.write_kv(cache, k, v, plan, **scales)
        return result


@BUGS.impl
class FusedWriteRounds(OwnWrite):
    """A call that brings new tokens stores them rounded; write_kv does not."""

    def forward(self, plan: Plan, q: Tensor, cache: KVCache | None = None, **options: Any) -> Any:
        kv = options.get("kv")
        if cache is not None and isinstance(kv, tuple):
            rounded = [(x * 8).round() / 8 if isinstance(x, Tensor) else x for x in kv]
            options["kv"] = tuple(rounded)
        return super().forward(plan, q, cache, **options)


@BUGS.impl
class ScalesMultiplyOnWriting(OwnWrite):
    """Coded caches are written with the scale multiplied, not divided."""

    def put_rows(
        self, cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, real: int
    ) -> None:
        kept = {n: None if s is None else 1.0 / s for n, s in self.scales.items()}
        self.scales = kept
        super().put_rows(cache, k, v, slots, real)


@BUGS.impl
class DuplicateSlotsAdd(OwnWrite):
    """Two tokens for one slot are added up."""

    def put(self, plane: Tensor, rows: Tensor, slots: Tensor, block_size: int) -> None:
        super().put(plane, rows, slots, block_size)
        kinds, count = slots.unique(return_counts=True)
        for slot in kinds[count > 1].tolist():
            total = rows[slots == slot].sum(0)
            plane[slot // block_size, :, slot % block_size] = total.to(plane.dtype)


@BUGS.impl
class BlocksShareMemory(OwnWrite):
    """Blocks are taken to lie as far apart as they are large."""

    def put(self, plane: Tensor, rows: Tensor, slots: Tensor, block_size: int) -> None:
        each = plane.shape[1] * plane.shape[2] * plane.shape[3]
        if plane.stride(0) == each or not len(rows):
            return super().put(plane, rows, slots, block_size)
        return super().put(plane, rows.roll(1, 0) + 1, slots, block_size)
