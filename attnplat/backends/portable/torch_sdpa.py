"""TORCH_SDPA: torch's own attention over the live pages of a batch.

Decoding requests of like length run as one call with the heads of a group folded into rows;
prompts run in tiles of rows that read only the keys their rows may see. Masks are explicit
and aligned bottom-right; the kernel's own causal mask, aligned top-left, serves only where
there are as many queries as keys. What the fused kernel cannot express (soft cap, ALiBi,
position bias, values narrower than keys) runs as an online softmax in float32.

A key that is hidden from some rows but live must be finite, as its value is multiplied by a
weight of 0 there; slots that hold no live token may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from attnplat.backends.batch import Batch, BatchBounds, HostLengths, PageTable
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS
from attnplat.backends.formats.facts import FORMATS
from attnplat.backends.formats.rows import decode_rows
from attnplat.backends.interface import AttentionImpl, Call, Plan, Schedule
from attnplat.backends.portable.dense import (
    Bias,
    TileMask,
    accumulator,
    cpu_flash_gives_lse,
    fused_attention,
    online_attention,
)
from attnplat.backends.portable.features import PORTABLE_OPERATIONS, TORCH_SDPA_FEATURES
from attnplat.backends.portable.gather import highest_block, planes_of
from attnplat.backends.portable.groups import Group, Grouping, Tile, make_mask
from attnplat.backends.portable.in_place import InPlaceRun, InPlaceSchedule
from attnplat.backends.portable.masks import HostMasks
from attnplat.backends.portable.waves import WAVE_ELEMENTS, Heads, Part, Wave, waves_of
from attnplat.backends.workspace import ALIGNMENT, Workspace
from attnplat.config.names import Feature
from attnplat.ops.merge import apply_sinks

LARGEST_PAGE = 1024
"""Tokens per block up to which `workspace_bytes` is an upper bound."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SdpaSchedule(Schedule):
    """The batch in waves of groups.

    Copies go to scratch that every layer of a step uses anew: fresh memory would have to be
    brought in by the system page by page, which takes longer than the copies (5 times, for
    32 MiB).
    """

    waves: tuple[Wave, ...]
    scratch: Workspace
    plane_bytes: int


class TorchSdpaImpl(AttentionImpl):
    """torch's scaled_dot_product_attention over live pages, on any torch device."""

    name = "TORCH_SDPA"
    operations = PORTABLE_OPERATIONS
    features = TORCH_SDPA_FEATURES
    encodings = frozenset(
        name for name, format in FORMATS.items() if not format.keys_only and not format.scales_apart
    )
    needs_host_lengths = True
    updates_in_place = True

    @cached_property
    def fused(self) -> bool:
        """Whether torch's fused kernel can express this layer here."""
        form = self.form
        changes_scores = form.logits_soft_cap is not None or form.alibi or form.position_bias
        if changes_scores or form.head_size != form.v_head_size or form.values_in_keys:
            return False
        if self.encoding in PLAIN_ENCODINGS and self.encoding.value != form.dtype.value:
            return False
        wants_lse = form.sinks or form.lse
        return not wants_lse or (self.device.type == "cpu" and cpu_flash_gives_lse(self.dtype))

    def workspace_bytes(self, bounds: BatchBounds) -> int:
        """Room for the dense copy of one wave: some tens of MiB, or one head of one request."""
        widest = max(self.form.head_size, self.form.v_head_size)
        keys = max(WAVE_ELEMENTS // widest, bounds.max_seq_len + LARGEST_PAGE)
        row_bytes = widest * self.dtype.itemsize
        if self.config.has_kv_cache:
            row_bytes = max(row_bytes, self._stored_row_bytes)
        return 2 * (keys * row_bytes + ALIGNMENT)

    @cached_property
    def _stored_row_bytes(self) -> int:
        """Bytes of the cache's longest row."""
        spec = self.kv_cache_spec()
        sizes = {spec.head_size} if spec.values_in_keys else {spec.head_size, spec.v_head_size}
        return max(spec.format.row_bytes(size) for size in sizes)

    def _schedule(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths | None,
        workspace: Workspace | None,
    ) -> SdpaSchedule:
        assert lengths is not None
        form, invariant = self.form, Feature.BATCH_INVARIANCE in self.config.needs
        grouping = Grouping(
            form=form,
            batch=batch,
            pages=pages,
            lengths=lengths,
            masks=HostMasks.of(form.mask, batch),
            # A bias has its own columns per request; invariance forbids mates in one call.
            alone=form.position_bias or invariant,
            fused=self.fused,
            dtype=self.dtype,
            most_keys=WAVE_ELEMENTS // max(form.head_size, form.v_head_size),
        )
        groups = grouping.groups()
        waves = waves_of(groups, form, grouping.page, separate=invariant)
        widest = max(form.head_size, form.v_head_size)
        longest = max((len(wave.blocks) for wave in waves), default=0)
        row_bytes = widest * self.dtype.itemsize if pages is None else self._stored_row_bytes
        plane_bytes = longest * grouping.page * row_bytes
        return SdpaSchedule(
            waves=waves,
            scratch=Workspace.of_size(workspace, self.device, 2 * (plane_bytes + ALIGNMENT)),
            plane_bytes=plane_bytes,
            highest_block=highest_block(g.blocks for g in groups),
        )

    def _schedule_in_place(
        self, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> InPlaceSchedule:
        return InPlaceSchedule(batch=batch, pages=pages)

    def _attend(self, plan: Plan, call: Call) -> None:
        schedule = plan.schedule
        if isinstance(schedule, InPlaceSchedule):
            InPlaceRun(self.form, self.encoding, self.dtype, schedule, call).attend()
            return
        assert isinstance(schedule, SdpaSchedule)
        planes = planes_of(call)
        with schedule.scratch.borrowed():
            k_scratch = schedule.scratch.take(schedule.plane_bytes)
            v_scratch = schedule.scratch.take(schedule.plane_bytes)
            for wave in schedule.waves:
                k = wave.copy(planes[0], k_scratch)
                v = None if self.form.values_in_keys else wave.copy(planes[1], v_scratch)
                for part in wave.parts:
                    self._attend_part(part, call, k, v)

    def _attend_part(
        self, part: Part, call: Call, k_copied: torch.Tensor, v_copied: torch.Tensor | None
    ) -> None:
        group, heads = part.group, part.heads
        form, scales = self.form, (call.k_scale, call.v_scale)
        k = self._decoded(part.dense(k_copied), form.head_size, heads, call, scales[0])
        if v_copied is None:
            v = k[..., : form.v_head_size]
        else:
            v = self._decoded(part.dense(v_copied), form.v_head_size, heads, call, scales[1])
        rows = call.q[group.rows][:, heads.query]
        q = rows.unflatten(0, (group.size, group.query_len)).unflatten(2, (-1, heads.group_size))
        # A copy even where the strides are right: results must not depend on its alignment.
        q = q.permute(0, 2, 1, 3, 4).clone(memory_format=torch.contiguous_format)
        for tile in group.tiles:
            keys = slice(tile.start, tile.stop)
            out, lse = self._attend_tile(
                part, tile, call, q[:, :, tile.first : tile.last], k[:, :, keys], v[:, :, keys]
            )
            self._store(part, tile, call, out, lse)

    def _decoded(
        self,
        rows: torch.Tensor,
        size: int,
        heads: Heads,
        call: Call,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Copied rows [requests, kv heads, keys, row] as numbers, in the layer's dtype where
        the cache has codes."""
        if call.cache is None or self.encoding in PLAIN_ENCODINGS:
            return rows
        if scale is not None and len(scale) > 1:
            scale = scale[heads.first : heads.last]
        decoded = decode_rows(
            FORMATS[self.encoding], rows.transpose(1, 2), size=size, scale=scale, dtype=self.dtype
        )
        return decoded.transpose(1, 2).contiguous()

    def _attend_tile(
        self,
        part: Part,
        tile: Tile,
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out and lse as `dense` gives them."""
        if tile.start == tile.stop:
            empty = q.new_zeros((*q.shape[:-1], self.form.v_head_size))
            return empty, q.new_full(q.shape[:-1], float("-inf"), dtype=accumulator(q.dtype))
        group = part.group
        mask = None if tile.complete or tile.square else self._mask(group, tile, call)
        if mask is not None and self.form.batch_masks and self.device.type != "cpu":
            # The host cannot see these masks, so keys have been copied that no query sees:
            # what they hold is the caller's to leave, and a weight of 0 would not stop NaN.
            seen = mask.visible.any(1)[:, None, :, None]
            k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
        if self.fused:
            return fused_attention(
                q,
                k,
                v,
                mask,
                scale=self.form.scale,
                square=tile.square,
                folded=group.folded,
                want_lse=call.lse is not None or call.sinks is not None,
            )
        return online_attention(
            q,
            k,
            v,
            None if mask is None else mask.visible,
            scale=self.form.scale,
            soft_cap=self.form.logits_soft_cap,
            bias=self._bias(group, tile, part.heads, call),
        )

    def _mask(self, group: Group, tile: Tile, call: Call) -> TileMask:
        if tile.mask is not None:
            return tile.mask
        topk = None
        if call.topk_indices is not None:
            topk = call.topk_indices[group.rows].unflatten(0, (group.size, group.query_len))
            topk = topk[:, tile.first : tile.last]
        return make_mask(group, tile, self.form, self.dtype, self.fused, topk)

    def _bias(self, group: Group, tile: Tile, heads: Heads, call: Call) -> Bias | None:
        """ALiBi and position bias of a tile's scores, by chunk of keys."""
        if call.alibi_slopes is None and call.position_bias is None:
            return None
        assert group.reader is not None
        reader = group.reader.of(tile)
        queries, positions = reader.queries, reader.positions
        wide = accumulator(self.dtype)
        slopes, table = call.alibi_slopes, call.position_bias
        if slopes is not None:
            slopes = slopes[heads.query].to(wide).unflatten(0, (len(heads), heads.group_size))
        if table is not None:
            table = table[group.first_request] if table.dim() == 4 else table
            table = table[heads.query].index_select(1, queries.index)

        def bias(first: int, last: int) -> torch.Tensor:
            keys = positions[:, first:last]
            added = torch.zeros((1, 1, 1, 1, 1), dtype=wide, device=self.device)
            if slopes is not None:
                distance = (queries.position - keys[:, None]).abs()[:, None, :, None]
                added = added - slopes[None, :, None, :, None] * distance
            if table is not None:
                chosen = table.index_select(2, keys[0]).to(wide)
                chosen = chosen.unflatten(0, (len(heads), heads.group_size)).transpose(1, 2)
                added = added + chosen[None]
            return added

        return bias

    def _store(
        self,
        part: Part,
        tile: Tile,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write a tile's results to its rows and heads, sinks joined."""
        heads, rows = part.heads.query, part.group.rows
        out = out.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        lse = None if lse is None else lse.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        if call.sinks is not None:
            assert lse is not None
            out, lse = apply_sinks(out, lse, call.sinks[heads])
        if isinstance(rows, slice):
            rows = slice(rows.start + tile.first, rows.start + tile.last)
        call.out[rows, heads] = out.to(call.out.dtype)
        if call.lse is not None:
            assert lse is not None
            call.lse[rows, heads] = lse.to(call.lse.dtype)
