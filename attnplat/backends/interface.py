"""What every attention implementation is and does, and the checks that all of them share.

An engine brings plain tensors: a `Batch` and a `PageTable` a step, a `KVCache` a layer. An
implementation turns the first two into a `Plan` that all layers of equal `plan_key` share,
and runs each layer with it. Implementations hold no state between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar, Literal, Self, TypedDict, Unpack, overload

import torch

from attnplat.backends import operators
from attnplat.backends.arch import TorchArch
from attnplat.backends.batch import Batch, BatchBounds, HostLengths, PageTable
from attnplat.backends.call_checks import CallChecks, NewKV, check_new_tensors
from attnplat.backends.checks import check_kind, same_device, torch_dtype
from attnplat.backends.fixed_step import FixedStep
from attnplat.backends.form import form_of
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding, resolve_encoding
from attnplat.backends.handle import Handle
from attnplat.backends.kv_cache import KVCache, KVCacheLayout, KVCacheSpec, Slots
from attnplat.backends.plan import Call, Plan, PlanKey, Schedule
from attnplat.backends.quantised_calls import fp8_of, read_query, write_output
from attnplat.backends.workspace import Workspace
from attnplat.config.layer import LayerConfig
from attnplat.config.names import Feature, Operation, parse_name
from attnplat.errors import ConfigError, PlanMismatchError

__all__ = ["AttentionImpl", "Call", "Plan", "PlanKey", "Schedule"]


class CallOptions(TypedDict, total=False):
    """The optional tensors of `AttentionImpl.forward`, for its type."""

    kv: NewKV | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    position_bias: torch.Tensor | None
    topk_indices: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    q_scale: torch.Tensor | None
    out_scale: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None


class AttentionImpl(CallChecks, ABC):
    """One layer's attention on one device.

    Subclasses set the class attributes and implement `_schedule` and `_attend`.

    Attributes:
        name: the backend's canonical name.
        operations, features, encodings: what it runs. Silence means no.
        block_size, layout: what `kv_cache_spec` answers when not asked for anything.
        needs_host_lengths: it plans on the host with exact lengths.
        updates_in_place: its plans with bounds keep their addresses, and may be recorded into a
            device graph.
        ignores_threads: its bits do not depend on the number of CPU threads. Kernels of torch
            and its libraries do not promise that: they cut sums by it.
        config, device: what it was created for.
        form: the config as numbers.
        encoding: the stored format of the layer's cache.
        plan_key: layers whose keys are equal share one plan (per cache group).
        handle: what stands for it in a compiled graph.
    """

    name: ClassVar[str]
    operations: ClassVar[frozenset[Operation]]
    features: ClassVar[frozenset[Feature]]
    encodings: ClassVar[frozenset[Encoding]] = PLAIN_ENCODINGS
    block_size: ClassVar[int] = 16
    layout: ClassVar[KVCacheLayout] = KVCacheLayout.LBHNC
    needs_host_lengths: ClassVar[bool] = False
    updates_in_place: ClassVar[bool] = False
    ignores_threads: ClassVar[bool] = False

    def __init__(
        self, config: LayerConfig, device: torch.device | str, encoding: Encoding | str | None
    ) -> None:
        self.config = config
        self.device = same_device(device)
        self._refuse_unserved()
        self.form = form_of(config)
        self.encoding = self._encoding(encoding)
        self.dtype = torch_dtype(self.form.dtype.value)
        self.plan_key = self._plan_key()
        self.handle = Handle(self)
        self._expected_specs = {}

    @classmethod
    def create(
        cls,
        config: LayerConfig,
        device: torch.device | str,
        *,
        encoding: Encoding | str | None = None,
    ) -> Self:
        """The implementation for layers of `config` on `device`.

        `encoding` is the cache's stored format; left out, it is what `kv_cache_dtype` means
        on `device` (see `resolve_encoding`).

        Raises:
            ConfigError: an operation, feature or encoding this backend does not run, or head
                counts that are unknown.
        """
        return cls(config, device, encoding)

    def _refuse_unserved(self) -> None:
        operation = self.config.operation
        if operation not in self.operations:
            runs = ", ".join(sorted(self.operations))
            raise ConfigError(f"{self.name} runs {runs}; the layer is {operation.value}")
        if missing := self.config.needs - self.features:
            raise ConfigError(
                f"{self.name} does not take {', '.join(sorted(missing))}, which the layer wants"
            )

    def _encoding(self, encoding: Encoding | str | None) -> Encoding:
        config = self.config
        word = config.kv_cache_dtype if config.has_kv_cache else None
        if encoding is None:
            found = resolve_encoding(
                word, config.operation, TorchArch.of(self.device), dtype=config.dtype
            )
        else:
            found = parse_name(Encoding, encoding, "encoding")
        if found not in self.encodings:
            stores = ", ".join(sorted(self.encodings))
            raise ConfigError(f"{self.name} stores {stores}; the cache's encoding is {found.value}")
        return found

    def _plan_key(self) -> PlanKey:
        form = self.form
        traits = {
            "sinks": form.sinks,
            "alibi": form.alibi,
            "position_bias": form.position_bias,
            "soft_cap": form.logits_soft_cap is not None,
            "cross": not form.self_attention,
            "lse": form.lse,
            "invariant": Feature.BATCH_INVARIANCE in self.config.needs,
            "prefix_lens": form.needs_prefix_lens,
            **{f"batch_{name}": True for name in form.batch_masks},
        }
        return PlanKey(
            name=self.name,
            device=str(self.device),
            mask=form.mask,
            num_heads=form.num_heads,
            num_kv_heads=form.num_kv_heads,
            head_size=form.head_size,
            v_head_size=form.v_head_size,
            dtype=form.dtype.value,
            encoding=self.encoding,
            traits=frozenset(name for name, has in traits.items() if has),
        )

    # What it asks of memory -------------------------------------------------------------

    def kv_cache_spec(
        self, block_size: int | None = None, layout: KVCacheLayout | str | None = None
    ) -> KVCacheSpec:
        """The format the caller must allocate the layer's cache in.

        Defaults: the config's block size, else the backend's; the backend's layout.
        Raises ConfigError for a layer that keeps no cache.
        """
        if not self.config.has_kv_cache:
            raise ConfigError(f"a {self.config.kind.value} layer keeps no KV cache")
        form = self.form
        return KVCacheSpec(
            encoding=self.encoding,
            block_size=block_size or self.config.block_size or self.block_size,
            num_kv_heads=form.num_kv_heads,
            head_size=form.head_size,
            v_head_size=form.v_head_size,
            layout=KVCacheLayout.parse(layout or self.layout),
            values_in_keys=form.values_in_keys,
        )

    def workspace_bytes(self, bounds: BatchBounds) -> int:
        """Bytes of workspace with which every plan within `bounds` can do. Default: none."""
        return 0

    # A step -------------------------------------------------------------------------------

    def plan(
        self,
        batch: Batch,
        pages: PageTable | None = None,
        *,
        workspace: Workspace | None = None,
        bounds: BatchBounds | None = None,
        validate: bool = False,
    ) -> Plan:
        """How this batch runs; made once a step and shared by layers of equal `plan_key`.

        Without `pages`, keys and values come with each call (`forward(..., kv=(k, v))`).
        `workspace` is scratch that plans used one after the other may share, and that spares
        allocating it each step; without one the plan brings its own.
        `validate` looks at values on the device, too, and waits for it.

        `bounds` are the limits that later updates will keep. A backend that `updates_in_place`
        then makes a plan for the largest step within them, in memory of its own: `plan.in_place`
        is true, `plan.batch` is the step padded to the bounds, no host lengths are needed, and
        what has been recorded into a device graph with it may be replayed after every `update`.
        A recorded call serves steps of as many rows as it brought: `max_tokens` for all. Not so
        for layers of a batch-invariant run.

        Raises:
            UnsupportedCallError: masks in the batch that the layer did not declare, or missing
                ones it did; pages for a layer without a cache; what has no bound in a plan that
                is in place.
            PlanMismatchError: a device or size that does not fit; a batch past its bounds.
            HostLengthsNeededError: exact lengths needed, and the batch carries none.
            WorkspaceTooSmallError: a workspace with less room left than the plan needs.
            ConfigError: with validate, a value that cannot be.
        """
        in_place = bounds is not None and self.updates_in_place
        if in_place and Feature.BATCH_INVARIANCE in self.config.needs:
            in_place = False
        lengths = self._check_step(batch, pages, bounds, validate, in_place)
        self._check_workspace(workspace)
        slots, fixed = None, None
        if in_place:
            assert bounds is not None
            fixed = FixedStep.of(batch, pages, bounds)
            batch, pages, lengths = fixed.batch, fixed.pages, None
            schedule = self._schedule_in_place(batch, pages, workspace)
        else:
            if pages is not None:
                slots = self._slots(batch, pages)
            schedule = self._schedule(batch, pages, lengths, workspace)
        return Plan(
            key=self.plan_key,
            batch=batch,
            pages=pages,
            lengths=lengths,
            slots=slots,
            bounds=bounds,
            validate=validate,
            workspace=workspace,
            schedule=schedule,
            fixed=fixed,
        )

    def update(self, plan: Plan, batch: Batch, pages: PageTable | None = None) -> Plan:
        """The plan for the next step within the same bounds.

        A plan that is `in_place` is filled anew and returned: every address stays, no memory is
        allocated, nothing is waited for, and what a refused update was given leaves no trace.
        Call it before a replay, on the replay's stream. Otherwise the answer is a new plan. Either
        way the old step can no longer be run.

        Raises as `plan` does; PlanMismatchError also for a plan of another key, and for a step
        with other optional masks than a plan in place was made with.
        """
        self._check_key(plan)
        if plan.fixed is not None:
            self._check_step(batch, pages, plan.bounds, plan.validate, True)
            plan.fixed.fill(batch, pages)
            return plan
        return self.plan(
            batch,
            pages,
            workspace=plan.workspace,
            bounds=plan.bounds,
            validate=plan.validate,
        )

    def _check_step(
        self,
        batch: Batch,
        pages: PageTable | None,
        bounds: BatchBounds | None,
        validate: bool,
        in_place: bool,
    ) -> HostLengths | None:
        """The step's exact lengths, where the host has them, if nothing is wrong with it."""
        self._check_batch(batch)
        if validate:
            # Before anything reads the values, as this tells best what is wrong with them.
            batch.validate(self_attention=self.form.self_attention)
        lengths = self._lengths(batch, needed=self.needs_host_lengths and not in_place)
        if pages is not None:
            self._check_pages(batch, pages, lengths)
        if bounds is not None and (excess := bounds.exceeded_by(batch)):
            raise PlanMismatchError(excess)
        if in_place:
            self._refuse_boundless(pages)
        if validate and pages is not None:
            pages.validate(batch, first_keys=self._first_keys(batch))
        return lengths

    def write_kv(
        self,
        cache: KVCache,
        k: torch.Tensor,
        v: torch.Tensor | None,
        where: PageTable | Plan,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Store new keys and values at their slots; nothing else in the cache is touched.

        `k` [tokens, num_kv_heads, head_size] and `v` alike, one row per entry of
        `slot_mapping`; `v` is None for a cache that keeps values in keys. Given a plan,
        padding rows are skipped whatever their slot. `k_scale` and `v_scale` are as in
        `forward`: what is stored is divided by them.

        Raises as `forward` does.
        """
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        check_new_tensors(k, v)
        self._refuse_gradients(k, v)
        if torch.compiler.is_compiling():
            operators.call_write_kv(self, cache, k, v, where, scales)
            return
        plan: Plan | None
        if isinstance(where, Plan):
            self._check_key(where)
            pages, slots, plan = where.pages, self._plan_slots(where, k), where
        else:
            check_kind("where", where, PageTable)
            pages, plan = where, None
            slots = None if where.slot_mapping is None else Slots.of(where.slot_mapping)
        self._check_cache(cache, pages)
        assert pages is not None
        self._check_new_kv(cache, pages, slots, (k, v), plan)
        self._check_scales(True, scales)
        assert slots is not None
        with torch.no_grad():
            self._write_new(cache, (k, v), slots, **scales)

    @overload
    def forward(
        self,
        plan: Plan,
        q: torch.Tensor,
        cache: KVCache | None = None,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> torch.Tensor: ...

    @overload
    def forward(
        self,
        plan: Plan,
        q: torch.Tensor,
        cache: KVCache | None = None,
        *,
        return_lse: Literal[True],
        **options: Unpack[CallOptions],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def forward(
        self,
        plan: Plan,
        q: torch.Tensor,
        cache: KVCache | None = None,
        *,
        return_lse: bool,
        **options: Unpack[CallOptions],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self,
        plan: Plan,
        q: torch.Tensor,
        cache: KVCache | None = None,
        *,
        kv: NewKV | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        q_scale: torch.Tensor | None = None,
        out_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer.

        With `cache`, keys and values are read from its pages; `kv` are new ones to write first
        (bit for bit `write_kv`, then `forward`). Without, `kv` holds them all: request r has
        rows `kv_start_loc[r]` to `kv_start_loc[r] + seq_lens[r]`.

        Args:
            q: queries, [num_tokens or more, num_heads, head_size], the layer's dtype; strides
                free but the last. Rows from `query_start_loc[-1]` on are never read.
            kv: a tuple (k, v), each [rows, num_kv_heads, head_size | v_head_size], the layer's
                dtype; v is None where values are inside keys.
            sinks: extra logits in the denominator, neither scaled nor capped, [num_heads].
            alibi_slopes: [num_heads]; adds -slope * |p - j|.
            position_bias: added after the soft cap, [num_heads, max_query_len, max_seq_len]
                or with num_reqs in front: query index in the request, key position.
            topk_indices: key positions each query may see, -1 none, int32 [num_tokens, topk].
            k_scale, v_scale: what stored keys and values are multiplied by, in formats that say
                so in `needs`; float32 [1], or [num_kv_heads] where the config declares
                per_head_quant_scales. Default: 1.
            q_scale: q is fp8 (float8_e4m3fn, e4m3fnuz or e5m2), and this is what its codes are
                multiplied by; float32 [1] or [num_kv_heads].
            out_scale: out is fp8, and what is written is divided by this and saturates; float32
                [1]. Default dtype: e4m3fn, on CDNA3 e4m3fnuz.
            out: where to write, [num_tokens or more, num_heads, v_head_size], the layer's dtype;
                its padding rows stay as they are. Default: allocated, padding rows zero.
            lse: where to write the natural log-sum-exp, float32 [num_tokens or more, num_heads].
            return_lse: also return it. It includes the sink iff sinks were passed.

        Returns:
            `out`, or `(out, lse)` with `return_lse`. A query that sees no key gets 0 and -inf
            (with a sink: 0 and the sink).

        Raises:
            UnsupportedCallError: a tensor the layer's config did not declare, or one it did
                that is missing.
            PlanMismatchError: a plan of another layer kind, or a tensor of the wrong shape,
                dtype, stride or device. Nothing has been written then.
        """
        options = {
            "sinks": sinks,
            "alibi_slopes": alibi_slopes,
            "position_bias": position_bias,
            "topk_indices": topk_indices,
        }
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        fp8 = {"q_scale": q_scale, "out_scale": out_scale}
        self._check_pair(kv)
        self._refuse_gradients(q, *(kv or ()), sinks, alibi_slopes, position_bias, out, lse)
        if torch.compiler.is_compiling():
            out, lse = self._results(q, out, lse, return_lse, out_scale)
            given = {**options, **scales, **fp8}
            operators.call_forward(self, plan, q, cache, kv, given, out, lse)
            return (out, lse) if return_lse else out  # type: ignore[return-value]
        self._check_key(plan)
        slots = None if kv is None else self._plan_slots(plan, kv[0])
        self._check_source(plan, cache, kv, slots)
        self._check_options(plan, options)
        self._check_scales(plan.pages is not None, scales)
        if q_scale is None and out_scale is None:
            self._check_rows(plan, q, out, lse, return_lse)
        else:
            self._check_fp8_rows(plan, q, out, lse, return_lse, **fp8)
        if out is not None or lse is not None:
            new = {} if kv is None else dict(zip(("k", "v"), kv, strict=True))
            self._check_results_apart(out, lse, cache, {"q": q, **new, **options, **scales, **fp8})
        out, lse = self._results(q, out, lse, return_lse, out_scale)
        k, v = self._dense(kv) if cache is None else (None, None)
        call = Call(q=q, cache=cache, k=k, v=v, out=out, lse=lse, **options, **scales)
        with torch.no_grad(), _no_autocast(q.device.type):
            if cache is not None and kv is not None:
                assert slots is not None
                self._write_new(cache, kv, slots, **scales)
            if q_scale is None and out_scale is None:
                self._attend(plan, call)
            else:
                self._attend_codes(plan, call, q_scale, out_scale)
        if return_lse:
            assert lse is not None
            return out, lse
        return out

    def _attend_codes(
        self,
        plan: Plan,
        call: Call,
        q_scale: torch.Tensor | None,
        out_scale: torch.Tensor | None,
    ) -> None:
        """`_attend` where queries or results are codes."""
        q, out = call.q, call.out
        if q_scale is not None:
            q = read_query(q, q_scale, self.dtype)
        if out_scale is not None:
            out = torch.zeros(out.shape, dtype=self.dtype, device=self.device)
        self._attend(plan, replace(call, q=q, out=out))
        if out_scale is not None:
            write_output(out, out_scale, call.out, plan.batch.query_start_loc[-1])

    def _results(
        self,
        q: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        out_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The caller's `out` and `lse`, or new ones, whose padding rows are zero."""
        rows, heads = q.shape[0], self.form.num_heads
        if out is None:
            dtype = self.dtype if out_scale is None else fp8_of(self.device)
            out = q.new_zeros((rows, heads, self.form.v_head_size), dtype=dtype)
        if lse is None and return_lse:
            lse = torch.zeros(rows, heads, dtype=torch.float32, device=q.device)
        return out, lse

    def _dense(self, kv: NewKV | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert kv is not None
        k, v = kv
        return k, k[..., : self.form.v_head_size] if v is None else v

    def gather_kv(
        self,
        cache: KVCache,
        pages: PageTable,
        spans: Sequence[tuple[int, int, int]],
        *,
        dtype: torch.dtype | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A dense copy of cached tokens, decoded.

        `spans` are (request, begin, end) positions; k comes as [tokens, num_kv_heads,
        head_size] and v alike, spans one after the other, in `dtype` (default the layer's).
        `k_scale` and `v_scale` are as in `forward`.
        """
        self._check_cache(cache, pages)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        self._check_scales(True, scales)
        self._check_spans(cache, pages, spans)
        return cache.gather(pages, spans, dtype=dtype or self.dtype, **scales)

    # What a backend implements ------------------------------------------------------------

    @abstractmethod
    def _schedule(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths | None,
        workspace: Workspace | None,
    ) -> Schedule:
        """The backend's part of a plan; headers have been checked."""

    def _write_new(
        self, cache: KVCache, kv: NewKV, slots: Slots, **scales: torch.Tensor | None
    ) -> None:
        """Write new tokens to their slots; all has been checked. Default: `cache.write`."""
        k, v = kv
        cache.write(k, v, slots, **scales)

    def _schedule_in_place(
        self, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        """The backend's part of a plan that is updated in place: it reads the tensors of `batch`
        and `pages` when it runs, and nothing of what they hold now. Only for a backend that says
        `updates_in_place`."""
        raise NotImplementedError(f"{self.name} has no plans that are updated in place")

    @abstractmethod
    def _attend(self, plan: Plan, call: Call) -> None:
        """Write `call.out` and `call.lse`; headers have been checked, new tokens written."""


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast would turn the fp32 products of scores into bf16 ones."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
