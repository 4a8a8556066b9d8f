"""Multi-head latent attention, whole: projections, both forms, and context in chunks.

Two forms of one result (DeepSeek-V2, arXiv 2405.04434, section 2.1). Absorbed: the query is
carried into the latent space (q W_UK) and attends latent rows as they are cached, one head for
all. Expanded: latent rows become ordinary keys (latent W_UK and the shared rope part) and
values (latent W_UV). The absorbed form reads less, the expanded one multiplies less, so short
queries run absorbed and long ones expanded: their new tokens causally, the context before them
from the cache in chunks without a mask, all joined by log-sum-exp.

The scale is that of the width before absorption in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attnplat.backends.batch import Batch, HostLengths, PageTable
from attnplat.backends.checks import FLOATS, Size, at_least, check_tensor, to_device
from attnplat.backends.interface import AttentionImpl, Plan
from attnplat.backends.kv_cache import KVCache
from attnplat.config.layer import OPEN_WINDOW, MlaConfig, SparseMlaConfig
from attnplat.config.names import AttnType
from attnplat.errors import ConfigError, UnsupportedCallError
from attnplat.ops.merge import apply_sinks, merge_states

Rows = slice | torch.Tensor
"""Query rows of some requests: a slice where they lie in one run, else int64."""

Span = tuple[int, int, int]
"""(request, begin, end): key positions of a request."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextChunk:
    """Cached tokens that are expanded together.

    Attributes:
        spans: which, by request of the step.
        rows: the query rows of their requests, among those that run expanded.
        plan: those rows against these tokens, without a mask.
    """

    spans: tuple[Span, ...]
    rows: Rows
    plan: Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class MlaPlan:
    """How one step's batch runs through every MLA layer of equal plan keys.

    Attributes:
        num_tokens: query rows, padding included; rows to write.
        pages: the step's table, slots of padding rows skipping.
        absorbed, absorbed_rows: the requests of short queries, and their rows; None for none.
        expanded, expanded_rows: the new tokens of the others; None for none.
        chunks: the context of the others.
    """

    num_tokens: int
    pages: PageTable
    absorbed: Plan | None
    absorbed_rows: Rows
    expanded: Plan | None
    expanded_rows: Rows
    chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class MlaLayer:
    """One MLA layer on one device.

    Attributes:
        absorbed: runs the absorbed form, and owns the cache: `absorbed.kv_cache_spec`.
        expanded: runs the expanded form; None where only the absorbed one is right.
        decode_query_len: longest query that runs absorbed where there is a choice.
        context_chunk: most cached tokens that are expanded at once.
    """

    absorbed: AttentionImpl
    expanded: AttentionImpl | None
    decode_query_len: int = 1
    context_chunk: int = 8192

    @classmethod
    def create(
        cls,
        kind: type[AttentionImpl],
        config: MlaConfig,
        device: torch.device | str,
        *,
        prefill_kind: type[AttentionImpl] | None = None,
        encoding: str | None = None,
        decode_query_len: int = 1,
        context_chunk: int = 8192,
    ) -> MlaLayer:
        """The layer with `kind` for the absorbed form and `prefill_kind` for the expanded.

        Without `prefill_kind` every query runs absorbed. So do all queries of layers whose
        mask depends on more than causality (windows, chosen keys).

        Raises:
            ConfigError: what a backend does not run, or limits below their least.
        """
        if decode_query_len < 0 or context_chunk < 1:
            raise ConfigError(
                f"decode_query_len is {decode_query_len} and context_chunk {context_chunk}; they "
                "take at least 0 and 1"
            )
        plain = not isinstance(config, SparseMlaConfig) and config.sliding_window == OPEN_WINDOW
        plain = plain and config.causal and config.attn_type == AttnType.DECODER
        expanded = None
        if prefill_kind is not None and plain:
            expanded = prefill_kind.create(config.prefill(), device)
        return cls(
            absorbed=kind.create(config, device, encoding=encoding),
            expanded=expanded,
            decode_query_len=decode_query_len,
            context_chunk=context_chunk,
        )

    def plan(self, batch: Batch, pages: PageTable) -> MlaPlan:
        """How this batch runs, made once a step.

        Requests are told apart by their query length alone. All run absorbed where the batch
        has masks of its own or a rolling table.

        Raises:
            HostLengthsNeededError: there is a choice, and the batch carries no exact lengths.
            UnsupportedCallError: a table without slots for the step's tokens.
        """
        if pages.slot_mapping is None:
            raise UnsupportedCallError(
                "pages.slot_mapping is None; mla_attend writes the step's tokens, give each a slot"
            )
        row = torch.arange(len(pages.slot_mapping), device=batch.device)
        slots = pages.slot_mapping.masked_fill(row >= batch.query_start_loc[-1], -1)
        pages = replace(pages, slot_mapping=slots)
        reading = replace(pages, slot_mapping=None)
        masks = (batch.causal, batch.ranges, batch.prefix_lens, batch.tree_mask)
        own = any(mask is not None for mask in masks) or pages.first_block is not None
        if self.expanded is None or own:
            return MlaPlan(
                num_tokens=batch.num_tokens,
                pages=pages,
                absorbed=self.absorbed.plan(batch, reading),
                absorbed_rows=slice(0, batch.num_tokens),
                expanded=None,
                expanded_rows=slice(0, 0),
                chunks=(),
            )
        lengths = batch.host_lengths()
        live = [r for r in range(batch.num_reqs) if lengths.query_len(r)]
        short = [r for r in live if lengths.query_len(r) <= self.decode_query_len]
        long = [r for r in live if lengths.query_len(r) > self.decode_query_len]
        device = batch.device
        return MlaPlan(
            num_tokens=batch.num_tokens,
            pages=pages,
            absorbed=self._absorbed_plan(reading, lengths, short, device) if short else None,
            absorbed_rows=_rows_of(lengths, short, device),
            expanded=self._new_plan(lengths, long, device) if long else None,
            expanded_rows=_rows_of(lengths, long, device),
            chunks=tuple(self._chunks(lengths, long, device)),
        )

    def _absorbed_plan(
        self, pages: PageTable, lengths: HostLengths, requests: list[int], device: torch.device
    ) -> Plan:
        batch = Batch.from_lengths(
            [lengths.query_len(r) for r in requests],
            [lengths.seq_lens[r] for r in requests],
            device=device,
        )
        chosen = to_device(torch.tensor(requests, dtype=torch.int64), device)
        return self.absorbed.plan(batch, pages.take_requests(chosen))

    def _new_plan(self, lengths: HostLengths, requests: list[int], device: torch.device) -> Plan:
        assert self.expanded is not None
        lens = [lengths.query_len(r) for r in requests]
        return self.expanded.plan(Batch.from_lengths(lens, device=device))

    def _chunks(
        self, lengths: HostLengths, requests: list[int], device: torch.device
    ) -> Iterator[ContextChunk]:
        """The context of `requests` in chunks, in order of request and position."""
        assert self.expanded is not None
        query_lens = [lengths.query_len(r) for r in requests]
        among = Batch.from_lengths(query_lens).host_lengths()
        context = {r: lengths.seq_lens[r] - lengths.query_len(r) for r in requests}
        for spans in _cut(context, self.context_chunk):
            members = [requests.index(r) for r, _, _ in spans]
            batch = Batch.from_lengths(
                [query_lens[m] for m in members],
                [end - begin for _, begin, end in spans],
                device=device,
                causal=[False] * len(members),
            )
            yield ContextChunk(
                spans=spans,
                rows=_rows_of(among, members, device),
                plan=self.expanded.plan(batch),
            )


def mla_attend(
    layer: MlaLayer,
    plan: MlaPlan,
    cache: KVCache,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one MLA layer: writes the step's latent rows, then attends.

    New tokens of queries that run expanded are taken as given, all others as the cache's
    format stores them.

    Args:
        cache: the layer's cache, of `layer.absorbed.kv_cache_spec`.
        q_nope: the query's part without rotation, [num_tokens or more, num_heads, nope].
        q_rope: its rotated part, [num_tokens or more, num_heads, rope].
        latent: the normalised latent of each new token, [num_tokens or more, kv_lora_rank].
        k_rope: the rotated key part that all heads share, [num_tokens or more, rope].
        w_uk: expands latents to keys, [num_heads, nope, kv_lora_rank].
        w_uv: expands latents to values, [num_heads, kv_lora_rank, v_head_size].
        sinks, topk_indices, k_scale: as in `AttentionImpl.forward`.
        lse: where to write the natural log-sum-exp, sinks included, of a layer that declares it:
            float32 [num_tokens or more, num_heads]; padding rows stay as they are.

    Returns:
        [rows of q_nope, num_heads, v_head_size]; padding rows are zero.

    Raises as `AttentionImpl.forward` does.
    """
    tensors = {"q_nope": q_nope, "q_rope": q_rope, "latent": latent, "k_rope": k_rope}
    _check_tensors(layer, plan, {**tensors, "w_uk": w_uk, "w_uv": w_uv})
    _check_options(layer, plan, sinks, topk_indices, lse)
    rows = torch.cat((latent, k_rope), dim=-1)[: plan.num_tokens, None]
    layer.absorbed.write_kv(cache, rows, None, plan.pages, k_scale=k_scale)
    out = q_nope.new_zeros(*q_nope.shape[:2], w_uv.shape[-1])
    if plan.absorbed is not None:
        at = plan.absorbed_rows
        q = torch.cat((_per_head(q_nope[at], w_uk), q_rope[at]), dim=-1)
        topk = None if topk_indices is None else topk_indices[at]
        own = None if lse is None else lse[at].contiguous()
        attended = layer.absorbed.forward(
            plan.absorbed, q, cache, sinks=sinks, topk_indices=topk, k_scale=k_scale, lse=own
        )
        out[at] = _per_head(attended, w_uv)
        if lse is not None and own is not None:
            lse[at] = own
    if plan.expanded is not None:
        at = plan.expanded_rows
        q = torch.cat((q_nope[at], q_rope[at]), dim=-1)
        kv = _expand(latent[at], k_rope[at], w_uk, w_uv)
        assert layer.expanded is not None
        new = layer.expanded.forward(plan.expanded, q, kv=kv, return_lse=True)
        merged = _with_context(layer, plan, cache, q, new, (w_uk, w_uv), k_scale)
        if sinks is not None:
            merged = apply_sinks(*merged, sinks)
        out[at] = merged[0].to(out.dtype)
        if lse is not None:
            lse[at] = merged[1]
    return out


def _check_tensors(layer: MlaLayer, plan: MlaPlan, given: dict[str, torch.Tensor]) -> None:
    """Before anything is written: each tensor's header, the nope size being that of `q_nope`."""
    form, rows = layer.absorbed.form, at_least(plan.num_tokens)
    heads, lora = form.num_heads, form.v_head_size
    rope, q_nope = form.head_size - lora, given["q_nope"]
    known = getattr(layer.absorbed.config, "qk_nope_head_dim", None)
    nope = known or (q_nope.shape[-1] if isinstance(q_nope, torch.Tensor) and q_nope.dim() else 0)
    shapes: dict[str, tuple[Size, ...]] = {
        "q_nope": (rows, heads, nope),
        "q_rope": (rows, heads, rope),
        "latent": (rows, lora),
        "k_rope": (rows, rope),
        "w_uk": (heads, nope, lora),
        "w_uv": (heads, lora, None),
    }
    for name, shape in shapes.items():
        check_tensor(
            name,
            given[name],
            shape=shape,
            dtype=layer.absorbed.dtype,
            device=layer.absorbed.device,
        )


def _check_options(
    layer: MlaLayer,
    plan: MlaPlan,
    sinks: torch.Tensor | None,
    topk_indices: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """The same of what is optional, whichever form will run."""
    form, device = layer.absorbed.form, layer.absorbed.device
    topk = form.mask.topk is not None
    for name, tensor, declared in (
        ("sinks", sinks, form.sinks),
        ("topk_indices", topk_indices, topk),
    ):
        if (tensor is not None) != declared:
            raise UnsupportedCallError(
                f"{name} must be given if and only if the layer's config declares it"
            )
    heads, rows = form.num_heads, at_least(plan.num_tokens)
    if sinks is not None:
        check_tensor("sinks", sinks, shape=(heads,), dtype=FLOATS, device=device)
    if topk_indices is not None:
        check_tensor(
            "topk_indices", topk_indices, shape=(rows, None), dtype=torch.int32, device=device
        )
    if lse is None:
        return
    if not form.lse:
        raise UnsupportedCallError(
            "the log-sum-exp is asked for and the layer's config does not declare it; add "
            "Feature.LSE to also_needs"
        )
    check_tensor("lse", lse, shape=(rows, heads), dtype=torch.float32, device=device, written=True)


def _with_context(
    layer: MlaLayer,
    plan: MlaPlan,
    cache: KVCache,
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    k_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over new tokens and context, summed in float32 or wider."""
    assert layer.expanded is not None
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = new[0].to(wide), new[1]
    pages = replace(plan.pages, slot_mapping=None)
    rope = q.shape[-1] - weights[0].shape[1]
    for chunk in plan.chunks:
        cached, _ = layer.absorbed.gather_kv(cache, pages, chunk.spans, k_scale=k_scale)
        split = cached.shape[-1] - rope
        kv = _expand(cached[:, 0, :split], cached[:, 0, split:], *weights)
        part = layer.expanded.forward(chunk.plan, q[chunk.rows], kv=kv, return_lse=True)
        both = (out[chunk.rows], part[0].to(wide)), (lse[chunk.rows], part[1])
        out[chunk.rows], lse[chunk.rows] = merge_states(*both)
    return out, lse


def _expand(
    latent: torch.Tensor, k_rope: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [tokens, num_heads, nope + rope] and values of latent rows [tokens, kv_lora_rank]."""
    shared = latent[:, None].expand(-1, w_uk.shape[0], -1)
    rope = k_rope[:, None].expand(-1, w_uk.shape[0], -1)
    k = torch.cat((_per_head(shared, w_uk.transpose(1, 2)), rope), dim=-1)
    return k, _per_head(shared, w_uv).contiguous()


def _per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, num_heads, a] times weight [num_heads, a, b], head by head."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def _cut(lens: dict[int, int], most: int) -> Iterator[tuple[Span, ...]]:
    """The first tokens of each request, `most` at a time."""
    spans: list[Span] = []
    room = most
    for request, count in lens.items():
        begin = 0
        while begin < count:
            end = min(begin + room, count)
            spans.append((request, begin, end))
            room -= end - begin
            begin = end
            if room == 0:
                yield tuple(spans)
                spans, room = [], most
    if spans:
        yield tuple(spans)


def _rows_of(lengths: HostLengths, requests: list[int], device: torch.device) -> Rows:
    """The query rows of `requests`, which are in order."""
    start = lengths.query_start
    rows = [t for r in requests for t in range(start[r], start[r + 1])]
    if not rows or rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1) if rows else slice(0, 0)
    return to_device(torch.tensor(rows, dtype=torch.int64), device)
