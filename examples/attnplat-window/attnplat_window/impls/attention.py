"""WINDOW_ATTN: each tile of query rows copies the tokens in its window and attends to them.

A request is cut into tiles of rows, and a tile reads the keys that its first to its last row may
see: about as many as the window is wide, however long the sequence. Every request is computed
from its own tensors in tiles that begin at its own first row, so it does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnplat.backends.batch import Batch, HostLengths, PageTable
from attnplat.backends.checks import to_device
from attnplat.backends.interface import AttentionImpl, Call, Plan, Schedule
from attnplat.backends.portable.gather import highest_block, look_up
from attnplat.backends.workspace import Workspace
from attnplat.config.names import Operation
from attnplat_window.catalog import FEATURES

TILE_ROWS = 64
CHUNK_KEYS = 512
"""Values are summed over so many keys at a time, which keeps float32 sums exact enough."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Query rows of one request, and the keys they may see.

    Attributes:
        rows: of q and out.
        position: of the first row in its sequence.
        keys: positions of the first key and of the one after the last.
        blocks, offsets: where the keys are, int64 [keys] each; without a cache, rows of k and
            v and 0.
    """

    rows: slice
    position: int
    keys: tuple[int, int]
    blocks: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowSchedule(Schedule):
    """The tiles of a batch."""

    tiles: tuple[Tile, ...]


class WindowAttnImpl(AttentionImpl):
    """Causal attention, within a sliding window where there is one, on any torch device."""

    name = "WINDOW_ATTN"
    operations = frozenset({Operation.MHA})
    features = FEATURES
    needs_host_lengths = True

    def _schedule(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths | None,
        workspace: Workspace | None,
    ) -> WindowSchedule:
        assert lengths is not None
        tiles = tuple(
            tile
            for request in range(batch.num_reqs)
            for tile in self._tiles(batch, pages, lengths, request)
        )
        return WindowSchedule(tiles=tiles, highest_block=highest_block(t.blocks for t in tiles))

    def _tiles(
        self, batch: Batch, pages: PageTable | None, lengths: HostLengths, request: int
    ) -> Iterator[Tile]:
        begin, end = lengths.query_start[request], lengths.query_start[request + 1]
        # The queries are the last tokens of the sequence.
        first_position = lengths.seq_lens[request] - (end - begin)
        for first in range(begin, end, TILE_ROWS):
            last = min(first + TILE_ROWS, end)
            position = first_position + first - begin
            keys = self.form.mask.first_key(position), position + last - first
            positions = torch.arange(*keys)
            if pages is None:
                blocks = to_device(positions + batch.kv_starts(lengths)[request], self.device)
                offsets = torch.zeros_like(blocks)
            else:
                blocks = look_up(pages, [request], positions[None] // pages.block_size)[0]
                offsets = to_device(positions % pages.block_size, self.device)
            yield Tile(slice(first, last), position, keys, blocks, offsets)

    def _attend(self, plan: Plan, call: Call) -> None:
        assert isinstance(plan.schedule, WindowSchedule)
        for tile in plan.schedule.tiles:
            k, v = _keys_and_values(tile, call)
            out, lse = self._attend_tile(tile, call, k, v)
            call.out[tile.rows] = out.to(call.out.dtype)
            if call.lse is not None:
                call.lse[tile.rows] = lse

    def _attend_tile(
        self, tile: Tile, call: Call, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [rows, num_heads, v_head_size] and the log-sum-exp [rows, num_heads]."""
        form, rows = self.form, tile.rows.stop - tile.rows.start
        q = _heads_first(call.q[tile.rows]).unflatten(0, (form.num_kv_heads, form.group_size))
        scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)) * form.scale
        scores = scores.view(form.num_heads, rows, -1)
        if form.logits_soft_cap is not None:
            scores = form.logits_soft_cap * torch.tanh(scores / form.logits_soft_cap)
        scores = torch.where(self._visible(tile), scores, float("-inf"))
        sinks = None if call.sinks is None else call.sinks.float()[:, None]
        weights, lse = _softmax(scores, sinks)
        weights = weights.view(form.num_kv_heads, form.group_size * rows, -1)
        chunks = zip(weights.split(CHUNK_KEYS, 2), v.split(CHUNK_KEYS, 1), strict=True)
        parts = [torch.bmm(some_weights, some_v) for some_weights, some_v in chunks]
        out = torch.stack(parts).sum(0).view(form.num_heads, rows, -1)
        return out.transpose(0, 1), lse.transpose(0, 1)

    def _visible(self, tile: Tile) -> torch.Tensor:
        """bool [rows, keys]: p - left <= j <= p; everything up to p where the window is open."""
        rows = tile.rows.stop - tile.rows.start
        query = torch.arange(tile.position, tile.position + rows, device=self.device)[:, None]
        key = torch.arange(*tile.keys, device=self.device)
        left = self.form.mask.sliding_window[0]
        return (key <= query) & ((key >= query - left) | (left < 0))


def _keys_and_values(tile: Tile, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [num_kv_heads, keys, head_size] and values alike."""
    if call.cache is not None:
        k, v = call.cache.read(tile.blocks, tile.offsets, dtype=torch.float32)
    else:
        assert call.k is not None
        assert call.v is not None
        k, v = call.k[tile.blocks], call.v[tile.blocks]
    return _heads_first(k), _heads_first(v)


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, size] as a new float32 tensor [heads, tokens, size].

    New whatever it was: results must not depend on strides or alignment.
    """
    return rows.transpose(0, 1).to(torch.float32, copy=True).contiguous()


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and log-sum-exp of scores [heads, rows, keys] with -inf for hidden keys.

    `sinks` [heads, 1] are in the denominator only. Every query sees at least itself.
    """
    high = scores.amax(-1)
    if sinks is not None:
        high = torch.maximum(high, sinks)
    weights = torch.exp(scores - high[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks - high)
    return weights / total[..., None], high + torch.log(total)
