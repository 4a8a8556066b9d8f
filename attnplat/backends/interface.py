"""What every attention implementation is and does, and the checks that all of them share.

An engine brings plain tensors: a `Batch` and a `PageTable` a step, a `KVCache` a layer. An
implementation turns the first two into a `Plan` that all layers of equal `plan_key` share,
and runs each layer with it. Implementations hold no state between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from attnplat.backends.batch import Batch, BatchBounds, HostLengths, PageTable
from attnplat.backends.checks import FLOATS, at_least, check_tensor, same_device, torch_dtype
from attnplat.backends.form import AttentionForm, MaskRules, form_of
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding, resolve_encoding
from attnplat.backends.kv_cache import KVCache, KVCacheLayout, KVCacheSpec, Slots
from attnplat.backends.workspace import Workspace
from attnplat.config.layer import LayerConfig
from attnplat.config.names import Feature, Operation
from attnplat.errors import (
    ConfigError,
    HostLengthsNeededError,
    PlanMismatchError,
    UnsupportedCallError,
)


@dataclass(frozen=True, kw_only=True)
class PlanKey:
    """All that a schedule depends on besides batch and pages. Equal keys share a plan."""

    name: str
    device: str
    mask: MaskRules
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: str
    encoding: Encoding
    traits: frozenset[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A backend's private part of a plan; each subclasses it.

    `highest_block` is the largest block id the schedule reads, where the host knows it.
    """

    highest_block: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How one step's batch runs through every layer of one plan key.

    Read-only: it may run on many layers, many times, in any order, but not on two threads or
    streams at once, as its runs share a workspace. The device tensors of its batch and pages
    must stay alive and unchanged until the last run has been enqueued.

    Attributes:
        key: the `plan_key` of the layers it is for.
        batch, pages: what it was made from; no pages means keys and values come with the call.
        lengths: the exact lengths, where the host has them.
        slots: where new tokens are written; None when this step writes none.
        bounds: the limits that `update` must keep, or None.
        validate: whether values are looked at, too.
        workspace: the caller's, or None.
        schedule: the backend's own part.
    """

    key: PlanKey
    batch: Batch
    pages: PageTable | None
    lengths: HostLengths | None
    slots: Slots | None
    bounds: BatchBounds | None
    validate: bool
    workspace: Workspace | None
    schedule: Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The checked tensors of one `forward`, as a backend receives them.

    Attributes:
        q: [num_tokens or more, num_heads, head_size].
        cache: the layer's cache, or None: then `k` and `v` hold the keys and values.
        k, v: [rows, num_kv_heads, head_size | v_head_size]; None when a cache has them.
        sinks, alibi_slopes: float32 [num_heads], or None.
        position_bias, topk_indices: as given to `forward`, or None.
        out: [num_tokens or more, num_heads, v_head_size], to be written.
        lse: float32 [num_tokens or more, num_heads], to be written, or None.
    """

    q: torch.Tensor
    cache: KVCache | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    position_bias: torch.Tensor | None
    topk_indices: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None


class AttentionImpl(ABC):
    """One layer's attention on one device.

    Subclasses set the class attributes and implement `_schedule` and `_attend`.

    Attributes:
        name: the backend's canonical name.
        operations, features, encodings: what it runs. Silence means no.
        block_size, layout: what `kv_cache_spec` answers when not asked for anything.
        needs_host_lengths: it plans on the host with exact lengths.
        config, device: what it was created for.
        form: the config as numbers.
        encoding: the stored format of the layer's cache.
    """

    name: ClassVar[str]
    operations: ClassVar[frozenset[Operation]]
    features: ClassVar[frozenset[Feature]]
    encodings: ClassVar[frozenset[Encoding]] = PLAIN_ENCODINGS
    block_size: ClassVar[int] = 16
    layout: ClassVar[KVCacheLayout] = KVCacheLayout.LBHNC
    needs_host_lengths: ClassVar[bool] = False

    def __init__(
        self, config: LayerConfig, device: torch.device | str, encoding: Encoding | str | None
    ) -> None:
        self.config = config
        self.device = same_device(device)
        self._refuse_unserved()
        self.form: AttentionForm = form_of(config)
        self.encoding = self._encoding(encoding)
        self.dtype = torch_dtype(self.form.dtype.value)

    @classmethod
    def create(
        cls,
        config: LayerConfig,
        device: torch.device | str,
        *,
        encoding: Encoding | str | None = None,
    ) -> Self:
        """The implementation for layers of `config` on `device`.

        `encoding` is the cache's stored format; it may be left out where `kv_cache_dtype`
        alone says it (see `resolve_encoding`).

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
            found = resolve_encoding(word, config.operation, dtype=config.dtype)
        else:
            found = Encoding(encoding)
        if found not in self.encodings:
            stores = ", ".join(sorted(self.encodings))
            raise ConfigError(f"{self.name} stores {stores}; the cache's encoding is {found.value}")
        return found

    # What it asks of memory -------------------------------------------------------------

    @property
    def plan_key(self) -> PlanKey:
        """Layers whose keys are equal share one plan (per cache group)."""
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
        `bounds` are the limits later updates will keep. `validate` looks at values on the
        device, too, and waits for it.

        Raises:
            UnsupportedCallError: masks in the batch that the layer did not declare, or missing
                ones it did; pages for a layer without a cache.
            PlanMismatchError: a device or size that does not fit; a batch past its bounds.
            HostLengthsNeededError: exact lengths needed, and the batch carries none.
            WorkspaceTooSmallError: a workspace with less room left than the plan needs.
            ConfigError: with validate, a value that cannot be.
        """
        self._check_batch(batch)
        lengths = self._lengths(batch)
        slots = None
        if pages is not None:
            slots = self._check_pages(batch, pages, lengths)
        if bounds is not None and (excess := bounds.exceeded_by(batch)):
            raise PlanMismatchError(excess)
        if validate:
            batch.validate(self_attention=self.form.self_attention)
        if validate and pages is not None:
            pages.validate(batch, first_keys=self._first_keys(batch))
        return Plan(
            key=self.plan_key,
            batch=batch,
            pages=pages,
            lengths=lengths,
            slots=slots,
            bounds=bounds,
            validate=validate,
            workspace=workspace,
            schedule=self._schedule(batch, pages, lengths, workspace),
        )

    def update(self, plan: Plan, batch: Batch, pages: PageTable | None = None) -> Plan:
        """The plan for the next step within the same bounds.

        A backend with a graph contract writes into the plan's own tensors and returns the
        same plan; others return a new one. The old plan must not be used again.

        Raises as `plan` does; PlanMismatchError also for a plan of another key.
        """
        self._check_key(plan)
        return self.plan(
            batch,
            pages,
            workspace=plan.workspace,
            bounds=plan.bounds,
            validate=plan.validate,
        )

    def write_kv(
        self, cache: KVCache, k: torch.Tensor, v: torch.Tensor | None, where: PageTable | Plan
    ) -> None:
        """Store new keys and values at their slots; nothing else in the cache is touched.

        `k` [tokens, num_kv_heads, head_size] and `v` alike, one row per entry of
        `slot_mapping`; `v` is None for a cache that keeps values in keys. Given a plan,
        padding rows are skipped whatever their slot.

        Raises as `forward` does.
        """
        if isinstance(where, Plan):
            self._check_key(where)
            pages, slots = where.pages, where.slots
        else:
            pages = where
            slots = None if where.slot_mapping is None else Slots.of(where.slot_mapping)
        self._check_cache(cache, pages)
        assert pages is not None
        self._check_new_kv(cache, pages, slots, (k, v))
        assert slots is not None
        with torch.no_grad():
            cache.write(k, v, slots)

    def forward(
        self,
        plan: Plan,
        q: torch.Tensor,
        cache: KVCache | None = None,
        *,
        kv: tuple[torch.Tensor, torch.Tensor | None] | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
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
            kv: (k, v), [rows, num_kv_heads, head_size | v_head_size], the layer's dtype.
            sinks: extra logits in the denominator, neither scaled nor capped, [num_heads].
            alibi_slopes: [num_heads]; adds -slope * |p - j|.
            position_bias: added after the soft cap, [num_heads, max_query_len, max_seq_len]
                or with num_reqs in front: query index in the request, key position.
            topk_indices: key positions each query may see, -1 none, int32 [num_tokens, topk].
            out: where to write, [num_tokens or more, num_heads, v_head_size]; its padding rows
                stay as they are. Default: allocated, padding rows zero.
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
        self._check_key(plan)
        self._check_source(plan, cache, kv)
        self._check_features(
            {
                "sinks": sinks,
                "alibi_slopes": alibi_slopes,
                "position_bias": position_bias,
                "topk_indices": topk_indices,
            },
            lse is not None or return_lse,
        )
        rows = at_least(plan.batch.num_tokens)
        self._check(
            "q", q, (rows, self.form.num_heads, self.form.head_size), self.dtype, rows_matter=True
        )
        self._check_options(plan, sinks, alibi_slopes, position_bias, topk_indices)
        self._check_outputs(plan, out, lse)
        self._refuse_gradients(q, *(kv or ()), sinks, position_bias)
        if out is None:
            out = q.new_zeros(q.shape[0], self.form.num_heads, self.form.v_head_size)
        if lse is None and return_lse:
            lse = torch.zeros(q.shape[0], self.form.num_heads, device=q.device)
        k, v = kv if kv is not None and cache is None else (None, None)
        # Autocast would turn the fp32 products of scores into bf16 ones.
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            if cache is not None and kv is not None:
                assert plan.slots is not None
                cache.write(*kv, plan.slots)
            call = Call(
                q=q,
                cache=cache,
                k=k,
                v=k[..., : self.form.v_head_size] if k is not None and v is None else v,
                sinks=None if sinks is None else sinks.float(),
                alibi_slopes=None if alibi_slopes is None else alibi_slopes.float(),
                position_bias=position_bias,
                topk_indices=topk_indices,
                out=out,
                lse=lse,
            )
            self._attend(plan, call)
        if return_lse:
            assert lse is not None
            return out, lse
        return out

    def gather_kv(
        self,
        cache: KVCache,
        pages: PageTable,
        spans: Sequence[tuple[int, int, int]],
        *,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A dense copy of cached tokens, decoded.

        `spans` are (request, begin, end) positions; k comes as [tokens, num_kv_heads,
        head_size] and v alike, spans one after the other, in `dtype` (default the layer's).
        """
        self._check_cache(cache, pages)
        return cache.gather(pages, spans, dtype=dtype or self.dtype)

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

    @abstractmethod
    def _attend(self, plan: Plan, call: Call) -> None:
        """Write `call.out` and `call.lse`; headers have been checked, new tokens written."""

    # Checks that all share -----------------------------------------------------------------

    def _check(
        self,
        name: str,
        tensor: torch.Tensor | None,
        shape: tuple[int | None | range, ...],
        dtype: torch.dtype | tuple[torch.dtype, ...],
        *,
        rows_matter: bool = False,
    ) -> None:
        check_tensor(
            name,
            tensor,
            shape=shape,
            dtype=dtype,
            device=self.device,
            contiguous_rows=rows_matter,
        )

    def _check_key(self, plan: Plan) -> None:
        if plan.key == self.plan_key:
            return
        mine, theirs = self.plan_key, plan.key
        names = [n for n in mine.__dataclass_fields__ if getattr(mine, n) != getattr(theirs, n)]
        told = "; ".join(f"{n} {getattr(theirs, n)} against {getattr(mine, n)}" for n in names)
        raise PlanMismatchError(f"the plan was made for another kind of layer: {told}")

    def _check_batch(self, batch: Batch) -> None:
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

    def _lengths(self, batch: Batch) -> HostLengths | None:
        try:
            return batch.host_lengths()
        except HostLengthsNeededError:
            if self.needs_host_lengths:
                raise
            return None

    def _check_pages(
        self, batch: Batch, pages: PageTable, lengths: HostLengths | None
    ) -> Slots | None:
        if not self.config.has_kv_cache:
            raise UnsupportedCallError(
                f"a {self.config.kind.value} layer keeps no KV cache; plan without pages and "
                "call forward(..., kv=(k, v))"
            )
        self._check("pages.block_table", pages.block_table, (batch.num_reqs, None), torch.int32)
        if lengths is not None and pages.first_block is None:
            room = pages.block_table.shape[1] * pages.block_size
            if (longest := max(lengths.seq_lens, default=0)) > room:
                raise PlanMismatchError(
                    f"pages.block_table has room for {room} tokens a request; seq_lens go up to "
                    f"{longest}"
                )
        slots = pages.slot_mapping
        if slots is None:
            return None
        # Cross attention writes encoder tokens, whose rows are not the batch's query rows.
        own = self.form.self_attention
        self._check("pages.slot_mapping", slots, (batch.num_tokens if own else None,), torch.int64)
        return Slots.of(slots, batch.query_start_loc[-1] if own else None)

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
        kv: tuple[torch.Tensor, torch.Tensor | None] | None,
    ) -> None:
        if plan.pages is not None:
            if cache is None:
                raise UnsupportedCallError("the plan has pages; forward needs the cache they index")
            self._check_cache(cache, plan.pages)
            self._check_blocks(plan, cache)
            if kv is not None:
                self._check_new_kv(cache, plan.pages, plan.slots, kv)
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
        have, want = cache.spec, self.kv_cache_spec(pages.block_size, cache.spec.layout)
        if have != want:
            names = [n for n in want.__dataclass_fields__ if getattr(have, n) != getattr(want, n)]
            told = ", ".join(f"{n} {getattr(have, n)}, not {getattr(want, n)}" for n in names)
            raise PlanMismatchError(f"the cache's spec does not fit layer and pages: it has {told}")
        if cache.device != self.device:
            raise PlanMismatchError(f"the cache is on {cache.device}; expected {self.device}")

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
        kv: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        if slots is None or pages.slot_mapping is None:
            raise UnsupportedCallError(
                "new keys and values were given and pages.slot_mapping is None; give each its slot"
            )
        room = cache.num_blocks * pages.block_size
        if slots.highest is not None and slots.highest >= room:
            raise PlanMismatchError(
                f"pages.slot_mapping names slot {slots.highest}; the cache has {room}"
            )
        self._check_kv(kv, len(pages.slot_mapping))

    def _check_kv(
        self, kv: tuple[torch.Tensor, torch.Tensor | None], rows: int | range | None
    ) -> None:
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

    def _check_features(self, given: dict[str, torch.Tensor | None], lse: bool) -> None:
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
        if lse and not form.lse:
            raise UnsupportedCallError(
                "the log-sum-exp is asked for and the layer's config does not declare it; add "
                "Feature.LSE to also_needs"
            )

    def _check_options(
        self,
        plan: Plan,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        position_bias: torch.Tensor | None,
        topk_indices: torch.Tensor | None,
    ) -> None:
        heads = self.form.num_heads
        if sinks is not None:
            self._check("sinks", sinks, (heads,), FLOATS)
        if alibi_slopes is not None:
            self._check("alibi_slopes", alibi_slopes, (heads,), FLOATS)
        if topk_indices is not None:
            shape = (at_least(plan.batch.num_tokens), None)
            self._check("topk_indices", topk_indices, shape, torch.int32)
        if position_bias is not None:
            queries, keys = plan.batch.max_query_len, plan.batch.max_seq_len
            if (lengths := plan.lengths) is not None:
                queries = max(map(lengths.query_len, range(len(lengths.seq_lens))), default=0)
                keys = max(lengths.seq_lens, default=0)
            per_head = (heads, at_least(queries), at_least(keys))
            per_request = (plan.batch.num_reqs, *per_head)
            shape = per_request if position_bias.dim() == 4 else per_head
            self._check("position_bias", position_bias, shape, FLOATS)

    def _check_outputs(
        self, plan: Plan, out: torch.Tensor | None, lse: torch.Tensor | None
    ) -> None:
        rows, heads = at_least(plan.batch.num_tokens), self.form.num_heads
        if out is not None:
            shape = (rows, heads, self.form.v_head_size)
            self._check("out", out, shape, self.dtype, rows_matter=True)
        if lse is not None:
            self._check("lse", lse, (rows, heads), torch.float32)

    def _refuse_gradients(self, *tensors: torch.Tensor | None) -> None:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            raise UnsupportedCallError(
                f"{self.name} computes no gradients and an input requires them; call it under "
                "torch.inference_mode() or torch.no_grad()"
            )
