"""The checks that every implementation makes of a call before it does any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from attnplat.backends.batch import Batch, HostLengths, PageTable
from attnplat.backends.checks import (
    FLOATS,
    Size,
    at_least,
    check_apart,
    check_kind,
    check_tensor,
)
from attnplat.backends.form import AttentionForm
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.formats.facts import format_of
from attnplat.backends.kv_cache import KVCache, KVCacheLayout, KVCacheSpec, Slots
from attnplat.backends.plan import Plan, PlanKey
from attnplat.backends.quantised_calls import FP8
from attnplat.backends.workspace import Workspace
from attnplat.config.layer import LayerConfig
from attnplat.errors import (
    ConfigError,
    HostLengthsNeededError,
    PlanMismatchError,
    TensorError,
    UnsupportedCallError,
)

FP8_DTYPES = tuple(FP8)

NewKV = tuple[torch.Tensor, torch.Tensor | None]
"""(k, v) of a call; v is None where values are inside keys."""


def check_new_tensors(k: object, v: object) -> None:
    """Refuse new keys or values that are no tensors; only values may be None.

    Operators of torch would refuse them in torch's words. Raises TensorError.
    """
    for name, value in (("k", k), ("v", v)):
        if not isinstance(value, torch.Tensor) and (name == "k" or value is not None):
            raise TensorError(name, f"{name} is a {type(value).__name__}; expected a tensor")


class CallChecks:
    """What `AttentionImpl` refuses, by looking at headers and at what the config declared.

    Nothing here looks at values on a device, except where `Plan.validate` asks for it.
    """

    name: ClassVar[str]
    needs_host_lengths: ClassVar[bool]
    config: LayerConfig
    device: torch.device
    form: AttentionForm
    dtype: torch.dtype
    encoding: Encoding
    plan_key: PlanKey
    _expected_specs: dict[tuple[int, KVCacheLayout], KVCacheSpec]

    if TYPE_CHECKING:

        def kv_cache_spec(
            self, block_size: int | None = None, layout: KVCacheLayout | str | None = None
        ) -> KVCacheSpec: ...

    def _check(
        self,
        name: str,
        tensor: torch.Tensor | None,
        shape: tuple[Size, ...],
        dtype: torch.dtype | tuple[torch.dtype, ...],
        *,
        rows_matter: bool = False,
        written: bool = False,
    ) -> None:
        check_tensor(
            name,
            tensor,
            shape=shape,
            dtype=dtype,
            device=self.device,
            contiguous_rows=rows_matter,
            written=written,
        )

    def _check_pair(self, kv: NewKV | None) -> None:
        """New keys and values come as a pair of tensors; asked before either is looked at."""
        if kv is None:
            return
        if not isinstance(kv, tuple) or len(kv) != 2:
            raise TensorError("kv", f"kv is {self._no_pair(kv)}")
        check_new_tensors(*kv)

    def _no_pair(self, kv: object) -> str:
        """What was given for (k, v), what is expected, and how to make it of that."""
        form = self.form
        pair = "(k, None), as values are inside k" if form.values_in_keys else "(k, v)"
        expected = f"expected a tuple {pair}"
        if isinstance(kv, torch.Tensor):
            shape, row = list(kv.shape), [form.num_kv_heads, form.head_size]
            told = f"one tensor of shape {shape}; {expected}"
            rests = [shape[:at] + shape[at + 1 :] for at in range(len(shape))]
            fits = [
                at
                for at, rest in enumerate(rests)
                if shape[at] == 2 and len(rest) == 3 and rest[1:] == row
            ]
            told_apart = len(fits) == 1 and not form.values_in_keys
            return f"{told} (kv.unbind({fits[0]}) is one)" if told_apart else told
        if isinstance(kv, list | tuple):
            fix = " (tuple(kv) is one)" if len(kv) == 2 else ""
            return f"a {type(kv).__name__} of {len(kv)}; {expected}{fix}"
        return f"a {type(kv).__name__}; {expected}"

    def _check_key(self, plan: Plan) -> None:
        check_kind("plan", plan, Plan)
        if plan.key == self.plan_key:
            return
        mine, theirs = self.plan_key, plan.key
        names = [n for n in mine.__dataclass_fields__ if getattr(mine, n) != getattr(theirs, n)]
        told = "; ".join(f"{n} {getattr(theirs, n)} against {getattr(mine, n)}" for n in names)
        raise PlanMismatchError(f"the plan was made for another kind of layer: {told}")

    def _check_batch(self, batch: Batch) -> None:
        check_kind("batch", batch, Batch)
        if batch.device != self.device:
            raise PlanMismatchError(f"the batch is on {batch.device}; expected {self.device}")
        for name in ("causal", "ranges", "prefix_lens", "tree_mask"):
            if getattr(batch, name) is not None and name not in self.form.batch_masks:
                raise UnsupportedCallError(
                    f"batch.{name} is given and the layer's config does not declare it; declare "
                    f"its feature, or plan with batch.replace({name}=None)"
                )
        if self.form.needs_prefix_lens and batch.prefix_lens is None:
            raise UnsupportedCallError(
                "the layer's config declares rswa; the batch must carry prefix_lens (0 for none)"
            )

    def _lengths(self, batch: Batch, *, needed: bool) -> HostLengths | None:
        try:
            return batch.host_lengths()
        except HostLengthsNeededError:
            if needed:
                raise
            return None

    def _check_pages(self, batch: Batch, pages: PageTable, lengths: HostLengths | None) -> None:
        if not self.config.has_kv_cache:
            raise UnsupportedCallError(
                f"a {self.config.kind.value} layer keeps no KV cache; plan without pages and "
                "call forward(..., kv=(k, v))"
            )
        check_kind("pages", pages, PageTable)
        self._check("pages.block_table", pages.block_table, (batch.num_reqs, None), torch.int32)
        if lengths is not None and pages.first_block is None:
            room = pages.block_table.shape[1] * pages.block_size
            if (longest := max(lengths.seq_lens, default=0)) > room:
                raise PlanMismatchError(
                    f"pages.block_table has room for {room} tokens a request; seq_lens go up to "
                    f"{longest}"
                )
        if pages.slot_mapping is not None:
            # Cross attention writes encoder tokens, whose rows are not the batch's query rows.
            rows = batch.num_tokens if self.form.self_attention else None
            self._check("pages.slot_mapping", pages.slot_mapping, (rows,), torch.int64)

    def _slots(self, batch: Batch, pages: PageTable) -> Slots | None:
        """Where the step's new tokens go."""
        if pages.slot_mapping is None:
            return None
        own = self.form.self_attention
        return Slots.of(pages.slot_mapping, batch.query_start_loc[-1] if own else None)

    def _plan_slots(self, plan: Plan, k: torch.Tensor) -> Slots | None:
        """The same of a plan, for the rows of `k`: found when planning, or now where updates
        change it in place."""
        if not plan.in_place or plan.pages is None or plan.pages.slot_mapping is None:
            return plan.slots
        # A call may bring fewer rows than the bounds allow.
        rows = len(k) if isinstance(k, torch.Tensor) and k.dim() else 0
        return self._slots(
            plan.batch, replace(plan.pages, slot_mapping=plan.pages.slot_mapping[:rows])
        )

    def _refuse_boundless(self, pages: PageTable | None) -> None:
        if pages is not None and pages.slot_mapping is not None and not self.form.self_attention:
            raise UnsupportedCallError(
                "pages.slot_mapping is for an encoder's tokens, whose number has no bound, and the "
                "plan has bounds; write them with write_kv(cache, k, v, pages) and plan without"
            )

    def _first_keys(self, batch: Batch) -> list[int]:
        start, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        rules = self.form.mask
        open_mask = not self.form.batch_masks and not rules.static_sink_tokens
        return [
            rules.first_key(n - (start[r + 1] - start[r])) if open_mask else 0
            for r, n in enumerate(lens)
        ]

    def _check_source(
        self,
        plan: Plan,
        cache: KVCache | None,
        kv: NewKV | None,
        slots: Slots | None,
    ) -> None:
        if plan.pages is not None:
            if cache is None:
                raise UnsupportedCallError("the plan has pages; forward needs the cache they index")
            self._check_cache(cache, plan.pages)
            self._check_blocks(plan, cache)
            if kv is not None:
                self._check_new_kv(cache, plan.pages, slots, kv, plan)
            return
        if cache is not None:
            raise UnsupportedCallError("the plan was made without pages; plan(batch, pages) for it")
        if kv is None:
            raise UnsupportedCallError("the plan has no pages; forward needs kv=(k, v)")
        rows: int | range | None = None
        if plan.lengths is not None:
            starts = plan.batch.kv_starts(plan.lengths)
            ends = [a + n for a, n in zip(starts, plan.lengths.seq_lens, strict=True)]
            rows = at_least(max(ends, default=0))
        self._check_kv(kv, rows)

    def _check_cache(self, cache: KVCache, pages: PageTable | None) -> None:
        if pages is None:
            raise UnsupportedCallError("the plan was made without pages; plan(batch, pages) for it")
        check_kind("cache", cache, KVCache)
        have, want = cache.spec, self._expected_spec(pages.block_size, cache.spec.layout)
        if have is not want and have != want:
            names = [n for n in want.__dataclass_fields__ if getattr(have, n) != getattr(want, n)]
            told = ", ".join(f"{n} {getattr(have, n)}, not {getattr(want, n)}" for n in names)
            raise PlanMismatchError(f"the cache's spec does not fit layer and pages: it has {told}")
        if cache.device != self.device:
            raise PlanMismatchError(f"the cache is on {cache.device}; expected {self.device}")

    def _expected_spec(self, block_size: int, layout: KVCacheLayout) -> KVCacheSpec:
        """`kv_cache_spec`, remembered: every call asks for the same one or two."""
        found = self._expected_specs.get((block_size, layout))
        if found is None:
            found = self._expected_specs[block_size, layout] = self.kv_cache_spec(
                block_size, layout
            )
        return found

    def _check_blocks(self, plan: Plan, cache: KVCache) -> None:
        highest = plan.schedule.highest_block
        if highest is not None and highest >= cache.num_blocks:
            raise PlanMismatchError(
                f"pages.block_table names block {highest}; the cache has {cache.num_blocks}"
            )
        if plan.validate and plan.pages is not None:
            plan.pages.validate(
                plan.batch, num_blocks=cache.num_blocks, first_keys=self._first_keys(plan.batch)
            )

    def _check_new_kv(
        self,
        cache: KVCache,
        pages: PageTable,
        slots: Slots | None,
        kv: NewKV,
        plan: Plan | None,
    ) -> None:
        if pages.slot_mapping is None:
            raise UnsupportedCallError(
                "new keys and values were given and pages.slot_mapping is None; give each its slot"
            )
        room = cache.num_blocks * pages.block_size
        if slots is not None and slots.highest is not None and slots.highest >= room:
            raise PlanMismatchError(
                f"pages.slot_mapping names slot {slots.highest}; the cache has {room}"
            )
        count = len(pages.slot_mapping)
        in_place = plan is not None and plan.in_place
        self._check_kv(kv, range(plan.num_rows, count + 1) if plan and in_place else count)

    def _check_kv(self, kv: NewKV, rows: Size) -> None:
        k, v = kv
        form = self.form
        shape = (rows, form.num_kv_heads, form.head_size)
        self._check("k", k, shape, self.dtype, rows_matter=True)
        if form.values_in_keys:
            if v is not None:
                raise UnsupportedCallError(
                    "v is given; this layer's values are inside k: pass None"
                )
            return
        shape = (k.shape[0], form.num_kv_heads, form.v_head_size)
        self._check("v", v, shape, self.dtype, rows_matter=True)

    def _check_options(self, plan: Plan, given: dict[str, torch.Tensor | None]) -> None:
        """Each optional tensor is given if and only if declared, and its header is right."""
        form = self.form
        declared = {
            "sinks": form.sinks,
            "alibi_slopes": form.alibi,
            "position_bias": form.position_bias,
            "topk_indices": form.mask.topk is not None,
        }
        for name, tensor in given.items():
            if tensor is not None and not declared[name]:
                raise UnsupportedCallError(
                    f"{name} is given and the layer's config does not declare it; declare it, so "
                    "that selection can ask the backend for it"
                )
            if tensor is None and declared[name]:
                raise UnsupportedCallError(f"the layer's config declares {name}, and none is given")
        for name in ("sinks", "alibi_slopes"):
            if given[name] is not None:
                self._check(name, given[name], (form.num_heads,), FLOATS)
        if given["topk_indices"] is not None:
            shape = (at_least(plan.num_rows), None)
            self._check("topk_indices", given["topk_indices"], shape, torch.int32)
        if (bias := given["position_bias"]) is not None:
            self._check("position_bias", bias, self._bias_shape(plan, bias), FLOATS)

    def _bias_shape(self, plan: Plan, bias: torch.Tensor) -> tuple[Size, ...]:
        sizes = plan.batch if plan.fixed is None else plan.fixed.sizes
        queries, keys = sizes.max_query_len, sizes.max_seq_len
        if (lengths := plan.lengths) is not None:
            queries = max(map(lengths.query_len, range(len(lengths.seq_lens))), default=0)
            keys = max(lengths.seq_lens, default=0)
        shape = (self.form.num_heads, at_least(queries), at_least(keys))
        per_request = isinstance(bias, torch.Tensor) and bias.dim() == 4
        return (plan.batch.num_reqs, *shape) if per_request else shape

    def _check_scales(self, paged: bool, given: dict[str, torch.Tensor | None]) -> None:
        """The cache's scales are given only where its format takes them, and fit."""
        form, format = self.form, format_of(self.encoding)
        for name, scale in given.items():
            if scale is None:
                continue
            if name == "v_scale" and form.values_in_keys:
                raise UnsupportedCallError(
                    "v_scale is given; this layer's values are inside k: k_scale is theirs"
                )
            if not paged or name not in format.needs:
                stores = f"{self.encoding.value} takes none" if paged else "the plan has no pages"
                raise UnsupportedCallError(f"{name} is given and {stores}; leave it out")
            self._check(name, scale, (None,), torch.float32)
            heads = form.num_kv_heads
            if len(scale) not in (1, heads):
                raise TensorError(
                    name,
                    f"{name} has shape [{len(scale)}]; expected [1] or [{heads}], one per KV head",
                )
            if len(scale) > 1 and not form.per_head_quant_scales:
                raise UnsupportedCallError(
                    f"{name} has a value per head and the layer's config does not declare "
                    "per_head_quant_scales; declare it, so that selection can ask the backend"
                )

    def _check_rows(
        self,
        plan: Plan,
        q: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
    ) -> None:
        """The tensors with a row per query."""
        self._check_rows_of(plan, q, out, lse, return_lse, (self.dtype,), (self.dtype,))

    def _check_fp8_rows(
        self,
        plan: Plan,
        q: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        q_scale: torch.Tensor | None,
        out_scale: torch.Tensor | None,
    ) -> None:
        """The same where scales say that queries or results are codes."""
        heads = self.form.num_kv_heads
        if q_scale is not None:
            self._check("q_scale", q_scale, (None,), torch.float32)
            if len(q_scale) not in (1, heads):
                raise TensorError(
                    "q_scale",
                    f"q_scale has shape [{len(q_scale)}]; expected [1] or [{heads}], one per KV "
                    "head",
                )
        if out_scale is not None:
            self._check("out_scale", out_scale, (1,), torch.float32)
        plain = (self.dtype,)
        self._check_rows_of(
            *(plan, q, out, lse, return_lse),
            plain if q_scale is None else FP8_DTYPES,
            plain if out_scale is None else FP8_DTYPES,
        )

    def _check_rows_of(
        self,
        plan: Plan,
        q: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        q_dtypes: tuple[torch.dtype, ...],
        out_dtypes: tuple[torch.dtype, ...],
    ) -> None:
        form, rows = self.form, at_least(plan.num_rows)
        shape = (rows, form.num_heads, form.head_size)
        self._check("q", q, shape, q_dtypes, rows_matter=True)
        if out is not None:
            shape = (rows, form.num_heads, form.v_head_size)
            self._check("out", out, shape, out_dtypes, rows_matter=True, written=True)
        if lse is not None:
            self._check("lse", lse, (rows, form.num_heads), torch.float32, written=True)
        if (return_lse or lse is not None) and not form.lse:
            raise UnsupportedCallError(
                "the log-sum-exp is asked for and the layer's config does not declare it; add "
                "Feature.LSE to also_needs"
            )

    def _check_results_apart(
        self,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        cache: KVCache | None,
        others: dict[str, torch.Tensor | None],
    ) -> None:
        """What is written shares no memory with what is read, nor with each other."""
        if cache is not None:
            names = ("cache.k", "cache.v", "cache.k_scales", "cache.v_scales")
            others = {**others, **dict(zip(names, cache.views, strict=True))}
        if out is not None:
            check_apart("out", out, others)
        if lse is not None:
            check_apart("lse", lse, {"out": out, **others})

    def _check_workspace(self, workspace: Workspace | None) -> None:
        if workspace is None:
            return
        check_kind("workspace", workspace, Workspace)
        if workspace.device != self.device:
            raise PlanMismatchError(
                f"the workspace is on {workspace.device}; expected {self.device}"
            )

    def _check_spans(
        self, cache: KVCache, pages: PageTable, spans: Sequence[tuple[int, int, int]]
    ) -> None:
        """Each (request, begin, end) is inside the table's rows; its blocks, where the host sees
        them, inside the cache."""
        rows, width = pages.block_table.shape
        firsts = pages.host_first_blocks(rows)
        for request, begin, end in spans:
            if not 0 <= request < rows:
                raise ConfigError(f"spans names request {request}; pages.block_table has {rows}")
            first = firsts[request] * pages.block_size
            room = first + width * pages.block_size
            if not first <= begin <= end <= room:
                raise ConfigError(
                    f"spans asks for keys {begin} to {end} of request {request}; its row of "
                    f"pages.block_table holds {first} to {room}"
                )
            if pages.block_table.device.type == "cpu" and begin < end:
                columns = slice(
                    (begin - first) // pages.block_size, -(-(end - first) // pages.block_size)
                )
                blocks = pages.block_table[request, columns]
                low, high = int(blocks.min()), int(blocks.max())
                if low < 0 or high >= cache.num_blocks:
                    raise ConfigError(
                        f"pages.block_table names block {low if low < 0 else high} in the row of "
                        f"request {request}; it takes 0 to {cache.num_blocks - 1}"
                    )

    def _refuse_gradients(self, *tensors: torch.Tensor | None) -> None:
        """Asked before anything else, of whatever was given: a compiler that cannot make a graph
        of a call that is refused runs the call, and would try its luck with all that comes
        before."""
        if not torch.is_grad_enabled():
            return
        if any(getattr(tensor, "requires_grad", False) for tensor in tensors):
            raise UnsupportedCallError(
                f"{self.name} computes no gradients and an input requires them; call it under "
                "torch.inference_mode() or torch.no_grad()"
            )
