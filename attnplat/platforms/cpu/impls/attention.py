"""CPU_ATTN: attention by the C++ kernels, in place over pages of any layout and block size.

Heads of a group are rows beside each other, so that every key is read once for all of them. A
request's bits depend on nothing but itself: not on threads, on the batch or on how its work was
cut.

A key that is hidden from some rows but live must be finite, as its value is multiplied by a
weight of 0 there; slots that no row sees may hold anything.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch

from attnplat.backends.batch import Batch, BatchBounds, HostLengths, PageTable
from attnplat.backends.call_checks import NewKV
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.formats.facts import ScalePlace, format_of
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache, KVCacheLayout, KVCacheSpec, Slots
from attnplat.backends.plan import Call, Plan, Schedule
from attnplat.backends.workspace import ALIGNMENT, Workspace
from attnplat.config.layer import LayerConfig
from attnplat.config.names import Operation
from attnplat.errors import ConfigError, PlanMismatchError
from attnplat.platforms.cpu.impls.features import CPU_FEATURES
from attnplat.platforms.cpu.impls.opening import open_library, require_cpu
from attnplat.platforms.cpu.kernels.library import (
    ABI,
    ENCODINGS,
    BlockError,
    KernelError,
    PlanStruct,
    Tasks,
    Tensors,
    pack_front,
    with_partials,
)
from attnplat.platforms.cpu.kernels.writing import Writer

_AXES: dict[KVCacheLayout, tuple[int, int, int]] = {
    layout: (order.index("B"), order.index("H"), order.index("N"))
    for layout in KVCacheLayout
    for order in [layout.of_one_layer]
}
"""Where block, head and token are among the dimensions of one layer's view."""

_NOTHING_GIVEN = {type(None)}

MOST_PARTIALS = 4 << 20
"""Floats of partial results that a schedule makes at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CpuSchedule(Schedule):
    """The library's tasks, and what their pointers point to.

    Attributes:
        struct: the plan as the library reads it.
        tasks: the work, in pieces.
        rows: query rows that are written.
        empty: there is no task.
        kept: the tensors that `struct` points into.
        scratch: room for partial results, or None where there are none.
    """

    struct: PlanStruct
    tasks: Tasks
    rows: int
    empty: bool
    kept: tuple[torch.Tensor, ...]
    scratch: Workspace | None


class CpuAttnImpl(AttentionImpl):
    """Multi-head attention of one layer by the C++ kernels.

    `isa` is the instruction set to use; left out, the one of ATTNPLAT_CPU_ISA, or the highest
    that this machine has.
    """

    name = "CPU_ATTN"
    operations = frozenset({Operation.MHA})
    features = CPU_FEATURES
    encodings: ClassVar[frozenset[Encoding]] = frozenset(
        {
            Encoding.FLOAT32,
            Encoding.BFLOAT16,
            Encoding.FLOAT16,
            Encoding.FP8_E4M3FN,
            Encoding.FP8_E5M2,
            Encoding.FP8_TH,
            Encoding.INT8_TH,
        }
    )
    block_size = 128
    needs_host_lengths = True
    ignores_threads = True

    def __init__(
        self,
        config: LayerConfig,
        device: torch.device | str,
        encoding: Encoding | str | None,
        isa: str | None = None,
    ) -> None:
        super().__init__(config, device, encoding)
        require_cpu(self.name, self.device)
        if self.form.dtype.value not in ENCODINGS:
            raise ConfigError(
                f"{self.name} computes in float32, bfloat16 and float16; the layer's dtype is "
                f"{self.form.dtype.value}"
            )
        self.library, self._isa = open_library(isa)
        self._base = self._plan_base()
        self._scales_at = self._scale_offsets()
        self._writer = Writer(self.library)
        form = self.form
        self._takes_options = (
            form.sinks or form.alibi or form.position_bias or form.mask.topk is not None
        )
        self._specs: dict[tuple[int | None, KVCacheLayout | str | None], KVCacheSpec] = {}

    @classmethod
    def create(
        cls,
        config: LayerConfig,
        device: torch.device | str,
        *,
        encoding: Encoding | str | None = None,
        isa: str | None = None,
    ) -> Self:
        """The implementation for layers of `config`; `isa` as the class says.

        Raises PackageError where the kernels were not built, ConfigError as the base does and
        for an instruction set that this machine does not run.
        """
        return cls(config, device, encoding, isa)

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self.library.isas[self._isa]

    def workspace_bytes(self, bounds: BatchBounds) -> int:
        """Room for partial results: 16 MiB, less where rows are few and short."""
        rows = min(bounds.max_query_len * self.form.group_size, 512)
        slots = (bounds.max_seq_len // 512 + 2) * bounds.max_reqs * self.form.num_kv_heads
        floats = slots * (rows * (self.form.v_head_size + 2) + 15)
        return 4 * min(floats, MOST_PARTIALS) + ALIGNMENT

    def kv_cache_spec(
        self, block_size: int | None = None, layout: KVCacheLayout | str | None = None
    ) -> KVCacheSpec:
        """As the base has it; what was answered once is remembered, as every call asks."""
        known = self._specs.get((block_size, layout))
        if known is None:
            known = self._specs[block_size, layout] = super().kv_cache_spec(block_size, layout)
        return known

    # A step ---------------------------------------------------------------------------------

    def _scale_offsets(self) -> tuple[int, int]:
        """Where in a row of keys and of values its scale is; 0 for formats that have none."""
        format, form = format_of(self.encoding), self.form
        if format.scale is None or format.scale.place is not ScalePlace.CODES:
            return 0, 0
        k = format.code_bytes(form.head_size)
        return k, k if form.values_in_keys else format.code_bytes(form.v_head_size)

    def _plan_base(self) -> dict[str, Any]:
        """What every plan of the layer has in common."""
        form, mask = self.form, self.form.mask
        left, right = mask.sliding_window
        return {
            "version": ABI,
            "isa": self._isa,
            "num_heads": form.num_heads,
            "num_kv_heads": form.num_kv_heads,
            "head_size": form.head_size,
            "v_head_size": form.v_head_size,
            "dtype": ENCODINGS[form.dtype.value],
            "kv_encoding": ENCODINGS[self.encoding.value],
            "values_in_keys": form.values_in_keys,
            "causal": mask.causal,
            "window_left": left,
            "window_right": right,
            "chunk_size": mask.chunk_size or 0,
            "static_sink_tokens": mask.static_sink_tokens,
            "topk": mask.topk or 0,
        }

    def _schedule(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths | None,
        workspace: Workspace | None,
    ) -> CpuSchedule:
        assert lengths is not None
        struct = PlanStruct(size=ctypes.sizeof(PlanStruct), **self._base)
        kept: list[torch.Tensor] = []

        def point(name: str, tensor: torch.Tensor | None) -> None:
            if tensor is not None:
                kept.append(tensor.contiguous())
                setattr(struct, name, kept[-1].data_ptr())

        struct.num_reqs, struct.num_tokens = batch.num_reqs, batch.num_tokens
        point("query_start", batch.query_start_loc)
        point("seq_lens", batch.seq_lens)
        if pages is None:
            point("kv_start", torch.tensor(batch.kv_starts(lengths), dtype=torch.int64))
        else:
            _point_pages(struct, pages, kept, point)
        _point_masks(struct, batch, kept, point)
        tasks = self._tasks(struct, pages)
        floats = tasks.summary.partial_floats
        highest = tasks.summary.highest_block
        return CpuSchedule(
            highest_block=highest if pages is not None else None,
            struct=struct,
            tasks=tasks,
            rows=lengths.num_tokens,
            empty=tasks.summary.num_tasks == 0,
            kept=tuple(kept),
            scratch=Workspace.of_size(workspace, self.device, 4 * floats + ALIGNMENT)
            if floats
            else None,
        )

    def _tasks(self, struct: PlanStruct, pages: PageTable | None) -> Tasks:
        try:
            return self.library.schedule(struct)
        except BlockError as error:
            assert pages is not None
            raise ConfigError(_block_message(error, pages)) from error
        except KernelError as error:
            raise PlanMismatchError(
                f"the batch's lengths do not fit together ({error}); query_start_loc must not "
                "decrease or pass num_tokens, nor seq_lens be negative"
            ) from error

    # A layer --------------------------------------------------------------------------------

    def forward(
        self,
        plan: Plan,
        q: torch.Tensor,
        cache: KVCache | None = None,
        *,
        kv: NewKV | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """As the base has it. The checks of an ordinary call are made here once more, in few
        steps: a small model's decode takes less time than checking it at length."""
        nothing = not options or set(map(type, options.values())) == _NOTHING_GIVEN
        ordinary = nothing and not return_lse
        if not ordinary or not self._is_ordinary(plan, q, cache, kv, out):
            return super().forward(plan, q, cache, kv=kv, out=out, return_lse=return_lse, **options)
        assert cache is not None and isinstance(plan.schedule, CpuSchedule)
        if kv is not None:
            assert plan.slots is not None
            self._write_new(cache, kv, plan.slots)
        if out is None:
            rows, heads = q.shape[0], self.form.num_heads
            empty = q.new_empty if rows == plan.schedule.rows else q.new_zeros
            out = empty(rows, heads, self.form.v_head_size)
        self._compute(plan.schedule, self._front(q, cache, out) + self._ordinary_rest)
        return out

    def _write_new(
        self, cache: KVCache, kv: NewKV, slots: Slots, **scales: torch.Tensor | None
    ) -> None:
        if cache.k.dtype is self.dtype:
            k, v = kv
            values = None if v is None or cache.v is None else (v, cache.v)
            axes = _AXES[cache.spec.layout]
            self._writer.write((k, cache.k), values, axes, slots.rows, slots.slots)
        else:
            super()._write_new(cache, kv, slots, **scales)

    def _is_ordinary(
        self,
        plan: Plan,
        q: torch.Tensor,
        cache: KVCache | None,
        kv: NewKV | None,
        out: torch.Tensor | None,
    ) -> bool:
        """Whether a call passes the base's checks without any of what is seldom given."""
        if not isinstance(plan, Plan) or not isinstance(cache, KVCache):
            return False
        if plan.key is not self.plan_key and plan.key != self.plan_key:
            return False
        if torch.compiler.is_compiling() or plan.pages is None or plan.validate:
            return False
        if self._takes_options or cache.k_scales is not None:
            return False
        form, spec, tokens = self.form, cache.spec, plan.batch.num_tokens
        known = self._specs.get((plan.pages.block_size, spec.layout))
        if known is not spec and known != spec:
            return False
        highest = plan.schedule.highest_block
        if highest is None or highest >= cache.num_blocks or cache.k.device != self.device:
            return False
        if _plain_rows(q, self.dtype, form.num_heads, form.head_size) < tokens:
            return False
        if kv is not None and not self._takes(plan, cache, kv):
            return False
        return out is None or self._is_ordinary_out(plan, q, cache, kv, out)

    def _is_ordinary_out(
        self, plan: Plan, q: torch.Tensor, cache: KVCache, kv: NewKV | None, out: torch.Tensor
    ) -> bool:
        """Whether `out` is packed, in memory of its own."""
        form = self.form
        rows = _plain_rows(out, self.dtype, form.num_heads, form.v_head_size)
        if rows < plan.batch.num_tokens or not out.is_contiguous():
            return False
        own = out.untyped_storage().data_ptr()
        others = (q, cache.k, cache.v, *(kv or ()))
        return all(t is None or t.untyped_storage().data_ptr() != own for t in others)

    def _takes(self, plan: Plan, cache: KVCache, kv: NewKV) -> bool:
        if not isinstance(kv, tuple) or len(kv) != 2:
            return False
        (k, v), form, slots = kv, self.form, plan.slots
        if slots is None or plan.pages is None or plan.pages.slot_mapping is None:
            return False
        rows = len(plan.pages.slot_mapping)
        if slots.highest is None:
            return False
        if slots.highest >= cache.num_blocks * plan.pages.block_size:
            return False
        if _plain_rows(k, self.dtype, form.num_kv_heads, form.head_size) != rows:
            return False
        if form.values_in_keys or v is None:
            return form.values_in_keys and v is None
        return _plain_rows(v, self.dtype, form.num_kv_heads, form.v_head_size) == rows

    def _front(self, q: torch.Tensor, cache: KVCache, out: torch.Tensor) -> bytes:
        q_token, q_head, _ = q.stride()
        out_token, out_head, _ = out.stride()
        return pack_front(
            *(q.data_ptr(), q_token, q_head),
            *self._pages(cache),
            *(out.data_ptr(), out_token, out_head),
        )

    @cached_property
    def _ordinary_rest(self) -> bytes:
        """What all ordinary calls have in common."""
        k_at, v_at = self._scales_at
        tensors = Tensors(**dict.fromkeys(Tensors._fields, 0))._replace(
            k_scale_at=k_at,
            v_scale_at=v_at,
            scale=self.form.scale,
            logits_soft_cap=self.form.logits_soft_cap or 0.0,
        )
        return tensors.rest()

    def _attend(self, plan: Plan, call: Call) -> None:
        assert isinstance(plan.schedule, CpuSchedule)
        kept: list[torch.Tensor] = []
        self._compute(plan.schedule, self._tensors(call, kept).packed())

    def _compute(self, schedule: CpuSchedule, tensors: bytes) -> None:
        if schedule.scratch is None:
            self._run(schedule, tensors)
            return
        with schedule.scratch.borrowed():
            piece = schedule.scratch.take(4 * schedule.tasks.summary.partial_floats)
            self._run(schedule, with_partials(tensors, piece.data_ptr()))

    def _run(self, schedule: CpuSchedule, tensors: bytes) -> None:
        if schedule.empty:
            return
        try:
            self.library.attend(schedule.struct, tensors, schedule.tasks, torch.get_num_threads())
        except KernelError as error:
            raise MemoryError(f"{self.name} could not run: {error}") from error

    def _tensors(self, call: Call, kept: list[torch.Tensor]) -> Tensors:
        """The call as the library reads it; tensors made for it are put into `kept`."""
        q, out, lse, form = call.q, call.out, call.lse, self.form
        q_token, q_head, _ = q.stride()
        out_token, out_head, _ = out.stride()
        lse_token, lse_head = (0, 0) if lse is None else lse.stride()
        bias, bias_strides = _position_bias(call.position_bias, kept)
        topk, topk_stride, topk_count = _topk(call.topk_indices, self.form.mask.topk, kept)
        v_scale = call.k_scale if form.values_in_keys else call.v_scale
        return Tensors(
            *(q.data_ptr(), q_token, q_head),
            *self._planes(call),
            *(out.data_ptr(), out_token, out_head),
            *(0 if lse is None else lse.data_ptr(), lse_token, lse_head),
            _address(call.sinks, kept),
            _address(call.alibi_slopes, kept),
            *(bias, *bias_strides),
            *(topk, topk_stride, topk_count),
            _address(call.k_scale, kept),
            _address(v_scale, kept),
            _head_stride(call.k_scale),
            _head_stride(v_scale),
            *self._scales_at,
            form.scale,
            form.logits_soft_cap or 0.0,
            0,
        )

    def _planes(self, call: Call) -> tuple[int, int, int, int, int, int, int, int]:
        """Address and strides (block, head, token) of keys, then of values."""
        if call.cache is not None:
            return self._pages(call.cache)
        k, v = call.k, call.v
        assert k is not None and v is not None
        of_k, of_v = k.stride(), v.stride()
        return k.data_ptr(), of_k[0], of_k[1], 0, v.data_ptr(), of_v[0], of_v[1], 0

    def _pages(self, cache: KVCache) -> tuple[int, int, int, int, int, int, int, int]:
        k, v = cache.k, cache.v
        v = k if v is None else v
        block, head, token = _AXES[cache.spec.layout]
        of_k, of_v = k.stride(), v.stride()
        return (
            *(k.data_ptr(), of_k[block], of_k[head], of_k[token]),
            *(v.data_ptr(), of_v[block], of_v[head], of_v[token]),
        )


class CpuMlaImpl(CpuAttnImpl):
    """Absorbed latent attention, dense or over chosen keys: one key head, values in its keys."""

    name = "CPU_MLA"
    operations = frozenset({Operation.MLA, Operation.SPARSE_MLA})


class AmxMlaImpl(CpuMlaImpl):
    """The same with AMX tiles, under the name that asks for them."""

    name = "AMX_MLA"

    def __init__(
        self,
        config: LayerConfig,
        device: torch.device | str,
        encoding: Encoding | str | None,
        isa: str | None = None,
    ) -> None:
        super().__init__(config, device, encoding, isa)
        if self.isa != "amx":
            raise ConfigError(
                f"AMX_MLA needs AMX; the instruction set in use here is {self.isa} (CPU_MLA runs "
                "on any)"
            )


class CpuPrefillImpl(CpuAttnImpl):
    """Latent attention with its keys and values expanded, without a cache."""

    name = "CPU"
    operations = frozenset({Operation.MLA_PREFILL})


def _plain_rows(tensor: torch.Tensor, dtype: torch.dtype, heads: int, size: int) -> int:
    """Rows of a tensor of the host, [rows, heads, size], whose last dimension is packed and of
    which nobody wants the gradient; -1 for any other."""
    if type(tensor) is not torch.Tensor or tensor.dtype is not dtype or tensor.dim() != 3:
        return -1
    if tensor.layout is not torch.strided or tensor.is_neg() or not tensor.is_cpu:
        return -1
    rows, own_heads, own_size = tensor.shape
    if own_heads != heads or own_size != size or (size > 1 and tensor.stride(2) != 1):
        return -1
    if tensor.requires_grad and torch.is_grad_enabled():
        return -1
    return rows


def _address(tensor: torch.Tensor | None, kept: list[torch.Tensor]) -> int:
    """Where a vector of float32 is, converted where it must be; 0 for none."""
    if tensor is None:
        return 0
    kept.append(tensor.float().contiguous())
    return kept[-1].data_ptr()


def _head_stride(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or len(scale) == 1 else 1


def _position_bias(
    bias: torch.Tensor | None, kept: list[torch.Tensor]
) -> tuple[int, tuple[int, int, int]]:
    """Address, and strides of request, head and query."""
    if bias is None:
        return 0, (0, 0, 0)
    kept.append(_rows_in_one_piece(bias.float()))
    *request, head, query, _ = kept[-1].stride()
    return kept[-1].data_ptr(), (request[0] if request else 0, head, query)


def _topk(
    indices: torch.Tensor | None, most: int | None, kept: list[torch.Tensor]
) -> tuple[int, int, int]:
    """Address, stride of a row, and how many there are in one."""
    if indices is None:
        return 0, 0, 0
    if most is not None and indices.shape[1] > most:
        raise PlanMismatchError(
            f"topk_indices has {indices.shape[1]} columns; the layer's config says {most}"
        )
    kept.append(_rows_in_one_piece(indices))
    return kept[-1].data_ptr(), kept[-1].stride(0), kept[-1].shape[1]


def _rows_in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, its last dimension without gaps."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _point_pages(
    struct: PlanStruct, pages: PageTable, kept: list[torch.Tensor], point: Any
) -> None:
    table = _rows_in_one_piece(pages.block_table)
    kept.append(table)
    struct.block_table, struct.table_stride = table.data_ptr(), table.stride(0)
    struct.table_width, struct.block_size = table.shape[1], pages.block_size
    point("first_block", pages.first_block)


def _point_masks(struct: PlanStruct, batch: Batch, kept: list[torch.Tensor], point: Any) -> None:
    point("causal_of", batch.causal)
    point("prefix_lens", batch.prefix_lens)
    if batch.ranges is not None:
        ranges = batch.ranges[(batch.ranges[:, 0] >= 0) & (batch.ranges[:, 0] < batch.num_reqs)]
        request = ranges[:, 0].long()
        point("ranges", ranges[request.argsort(stable=True)])
        counts = torch.bincount(request, minlength=batch.num_reqs)
        point("range_starts", torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int())
    if batch.tree_mask is not None:
        bits = _rows_in_one_piece(batch.tree_mask)
        kept.append(bits)
        struct.tree_mask, struct.tree_stride = bits.data_ptr(), bits.stride(0)
        struct.tree_bytes = bits.shape[1]


def _block_message(error: BlockError, pages: PageTable) -> str:
    if error.outside:
        first = 0 if pages.first_block is None else int(pages.first_block[error.request])
        last = first + pages.block_table.shape[1] - 1
        return (
            f"request {error.request} reads block {error.block} of its sequence; its row of "
            f"pages.block_table holds {first} to {last}"
        )
    return (
        f"pages.block_table names block {error.block} among those that request {error.request} "
        "reads; block ids start at 0"
    )
