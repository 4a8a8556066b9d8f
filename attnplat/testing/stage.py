"""Scenes laid out in memory: a batch, a page table, a cache and tensors, full of poison.

Everything that must not be read holds the arrangement's poison; everything is remembered, so
that `Stage.damage` can tell what a call wrote that it must not write. Nothing here uses the
library's own helpers for making batches, tables or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache
from attnplat.testing.bits import differing
from attnplat.testing.paging import PagedMemory, new_positions, paging_of
from attnplat.testing.scenes import Arrangement, Scene

INT = torch.int32
FAR = 1 << 30
"""What integer inputs hold where they must not be read."""


@dataclass(frozen=True, eq=False)
class Watch:
    """Memory whose contents are known before and after a call.

    `free` marks elements that the call may write as it likes.
    """

    name: str
    memory: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    free: torch.Tensor | None = None

    @classmethod
    def on(cls, name: str, memory: torch.Tensor, free: torch.Tensor | None = None) -> Watch:
        """A watch on memory that must stay as it is now."""
        now = memory.clone()
        return cls(name, memory, now, now, free)

    def damage(self) -> int:
        """How many elements are not as they must be after the call."""
        if self.free is None:
            return differing(self.memory, self.after)
        return differing(self.memory[~self.free], self.after[~self.free])

    def touched(self) -> int:
        """How many elements are not as they were before."""
        return differing(self.memory, self.before)


@dataclass(frozen=True, eq=False)
class Placed:
    """A tensor inside memory that may hold poison around it."""

    memory: torch.Tensor
    view: torch.Tensor


@dataclass(eq=False)
class Stage:
    """One scene in memory.

    Attributes:
        scene, how: what it is of.
        batch, pages: the step's lengths and tables; no pages where keys come with the call.
        cache: the layer's cache, or None.
        q: queries, padding included.
        kv: new keys and values of the call, or None.
        options: the other tensors of `forward`.
        out, lse: given outputs, or None.
        watches: memory that the call must leave alone, or write in a known way.
    """

    scene: Scene
    how: Arrangement
    batch: Batch
    pages: PageTable | None
    cache: KVCache | None
    q: torch.Tensor
    kv: tuple[torch.Tensor, torch.Tensor | None] | None
    options: dict[str, torch.Tensor]
    out: torch.Tensor | None
    lse: torch.Tensor | None
    watches: list[Watch]

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        """The cache's scales, which writing takes, too."""
        return {name: self.options[name] for name in ("k_scale", "v_scale") if name in self.options}

    def damage(self) -> str | None:
        """What a call has changed that it must not change, as a sentence."""
        for watch in self.watches:
            if count := watch.damage():
                return f"{count} elements of {watch.name} are not as they must be"
        return None

    def touched(self) -> str | None:
        """What is not as it was laid out, outputs included: a refused call changes nothing."""
        for watch in self.watches:
            if count := watch.touched():
                return f"{count} elements of {watch.name} have changed"
        return None


def lay_out(
    scene: Scene,
    how: Arrangement,
    impl: AttentionImpl,
    device: torch.device | str,
    memory: PagedMemory | None = None,
) -> Stage:
    """The scene on `device`, arranged as asked, in the cache format that `impl` wants.

    `memory` is where the cache is to be instead of freshly allocated memory.
    """
    device = torch.device(device)
    batch = _batch(scene, how, device)
    pages, cache, watches = None, None, []
    paged = how.paged and scene.config.has_kv_cache
    if paged:
        paging = paging_of(scene, how)
        memory = memory or PagedMemory.allocate(paging, impl, device)
        pages, cache = paging.table(device), memory.cache
        watches += [
            Watch(f"the cache's {name}", own, own.clone(), after)
            for name, own, after in memory.fill(paging)
        ]
    inputs, fused = _inputs(scene, how, device, paged)
    q, kv = inputs["q"].view, None
    if "k" in inputs:
        kv = (inputs["k"].view, inputs["v"].view if "v" in inputs else None)
    named = {name: placed.memory for name, placed in inputs.items()}
    watches += [Watch.on("q, k and v", fused)] if fused is not None else []
    watches += [Watch.on(name, own) for name, own in named.items() if fused is None]
    options = _options(scene, how, device)
    watches += [Watch.on(name, own) for name, own in options.items()]
    watches += [Watch.on(f"batch.{n}", t) for n, t in tensors_of(batch)]
    watches += [] if pages is None else [Watch.on(f"pages.{n}", t) for n, t in tensors_of(pages)]
    out, lse = _outputs(scene, how, device, watches)
    return Stage(scene, how, batch, pages, cache, q, kv, options, out, lse, watches)


def tensors_of(value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensor fields of a dataclass value."""
    named = [(name, getattr(value, name)) for name in value.__dataclass_fields__]
    return [(name, tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)]


def poison_of(how: Arrangement) -> float:
    """What fills what must not be read."""
    return 0.0 if how.poison is None else how.poison


def place(tensor: torch.Tensor, how: Arrangement, device: torch.device) -> Placed:
    """A tensor [rows, heads, size], with gaps of poison and off alignment as asked."""
    rows, heads, size = tensor.shape
    wide = (rows, heads + 1, size + 3) if how.spread else (rows, heads, size)
    count = wide[0] * wide[1] * wide[2]
    flat = torch.full((count + how.offset,), poison_of(how), dtype=tensor.dtype, device=device)
    view = flat[how.offset :].view(wide)[:, :heads, :size]
    view.copy_(tensor)
    return Placed(flat, view)


# The batch -----------------------------------------------------------------------------------


def _batch(scene: Scene, how: Arrangement, device: torch.device) -> Batch:
    empty = [0] * how.padding_requests
    query_lens, seq_lens = scene.query_lens + empty, scene.seq_lens + empty
    start = torch.tensor([0, *accumulate(query_lens)], dtype=INT)
    lens = torch.tensor(seq_lens, dtype=INT)
    return Batch(
        query_start_loc=start.to(device),
        seq_lens=lens.to(device),
        num_reqs=len(seq_lens),
        num_tokens=scene.num_rows + how.padding,
        max_query_len=max(query_lens, default=0) + how.slack,
        max_seq_len=max(seq_lens, default=0) + how.slack,
        query_start_loc_host=start,
        seq_lens_host=lens,
        kv_start_loc=_kv_starts(scene, how, device),
        **{name: tensor.to(device) for name, tensor in _masks(scene, how).items()},
    )


def _masks(scene: Scene, how: Arrangement) -> dict[str, Any]:
    """The optional mask fields that the scene's requests ask for."""
    requests, found = scene.requests, {}
    pad = [0] * how.padding_requests
    if any(r.causal is not None for r in requests):
        own = [scene.rules.causal if r.causal is None else r.causal for r in requests]
        found["causal"] = torch.tensor([*own, *pad], dtype=torch.bool)
    if any(r.ranges for r in requests):
        spans = [[i, b, e] for i, r in enumerate(requests) for b, e in r.ranges]
        found["ranges"] = torch.tensor(spans, dtype=INT).reshape(-1, 3)
    if getattr(scene.config, "rswa", False) or any(r.prefix_len for r in requests):
        found["prefix_lens"] = torch.tensor([*(r.prefix_len for r in requests), *pad], dtype=INT)
    if any(r.tree is not None for r in requests):
        width = max((r.query_len for r in requests), default=0) + how.slack
        found["tree_mask"] = _tree_bits(scene, how, -(-width // 8))
    return found


def _tree_bits(scene: Scene, how: Arrangement, width: int) -> torch.Tensor:
    """One bit per query token, least significant first; what no row reads is all ones."""
    rows = []
    for request in scene.requests:
        count = request.query_len
        tree = request.tree.tolist() if request.tree is not None else None
        for i in range(count):
            seen = [tree[i][k] if tree is not None else k <= i for k in range(count)]
            seen += [True] * (width * 8 - count)
            packed = (seen[at : at + 8] for at in range(0, len(seen), 8))
            rows.append([sum(int(bit) << place for place, bit in enumerate(b)) for b in packed])
    rows += [[255] * width] * how.padding
    return torch.tensor(rows, dtype=torch.uint8).reshape(len(rows), width)


def _kv_starts(scene: Scene, how: Arrangement, device: torch.device) -> torch.Tensor | None:
    """Gaps of one row between requests, where keys come without a cache and spread."""
    if not _has_gaps(scene, how, device):
        return None
    starts = [0, *accumulate(n + 1 for n in scene.seq_lens)][: len(scene.requests)]
    starts += [0] * how.padding_requests
    return torch.tensor(starts, dtype=INT, device=device)


def _has_gaps(scene: Scene, how: Arrangement, device: torch.device) -> bool:
    dense = not (how.paged and scene.config.has_kv_cache)
    return dense and how.spread and device.type == "cpu"


# Inputs --------------------------------------------------------------------------------------


def _inputs(
    scene: Scene, how: Arrangement, device: torch.device, paged: bool
) -> tuple[dict[str, Placed], torch.Tensor | None]:
    """q, and k and v where the call brings any; and the memory they share, if they do."""
    rows = {"q": _joined([r.q for r in scene.requests], how, how.padding)}
    if not paged:
        gap = 1 if _has_gaps(scene, how, device) else 0
        rows["k"] = _joined([r.k for r in scene.requests], how, how.padding, gap)
        if not scene.rules.values_in_keys:
            rows["v"] = _joined([r.v for r in scene.requests], how, how.padding, gap)
    elif how.write != "done":
        padding = 0 if scene.cross else how.padding
        new = [new_positions(scene, r) for r in scene.requests]
        own = [r.k[list(n)] for r, n in zip(scene.requests, new, strict=True)]
        rows["k"] = _joined(own, how, padding)
        if not scene.rules.values_in_keys:
            own = [
                r.v[list(n)] for r, n in zip(scene.requests, new, strict=True) if r.v is not None
            ]
            rows["v"] = _joined(own, how, padding)
    if how.fused and len({len(t) for t in rows.values()}) == 1:
        return _fused(rows, how, device)
    return {name: place(tensor, how, device) for name, tensor in rows.items()}, None


def _joined(
    parts: Sequence[torch.Tensor | None], how: Arrangement, padding: int, gap: int = 0
) -> torch.Tensor:
    """The rows of all requests, `gap` rows of poison after each and `padding` at the end."""
    own = [part for part in parts if part is not None]
    if not own:
        raise ValueError("a scene needs a request; use one without rows")
    between = own[0].new_full((gap, *own[0].shape[1:]), poison_of(how))
    end = own[0].new_full((padding, *own[0].shape[1:]), poison_of(how))
    return torch.cat([*(part for one in own for part in (one, between)), end])


def _fused(
    rows: dict[str, torch.Tensor], how: Arrangement, device: torch.device
) -> tuple[dict[str, Placed], torch.Tensor]:
    """The tensors as slices of one [rows, elements], poison at its end."""
    widths = {name: t.shape[1] * t.shape[2] for name, t in rows.items()}
    count = len(rows["q"])
    shape = (count, sum(widths.values()) + 5)
    memory = torch.full(shape, poison_of(how), dtype=rows["q"].dtype, device=device)
    placed, at = {}, 0
    for name, tensor in rows.items():
        view = memory[:, at : at + widths[name]].unflatten(1, tensor.shape[1:])
        view.copy_(tensor)
        placed[name] = Placed(memory, view)
        at += widths[name]
    return placed, memory


def _options(scene: Scene, how: Arrangement, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors that `forward` takes besides q, k and v."""
    found = {}
    if scene.sinks is not None:
        found["sinks"] = scene.sinks.to(device)
    if scene.alibi_slopes is not None:
        found["alibi_slopes"] = scene.alibi_slopes.to(device)
    for name in ("k_scale", "v_scale"):
        if (scale := getattr(scene, name)) is not None:
            found[name] = scale.to(device)
    if any(r.bias is not None for r in scene.requests):
        found["position_bias"] = _bias(scene, how).to(device)
    if (topk := scene.rules.topk) is not None:
        rows = [r.topk for r in scene.requests if r.topk is not None]
        end = torch.full((how.padding, topk), FAR, dtype=INT)
        found["topk_indices"] = torch.cat([*rows, end]).to(device)
    return found


def _bias(scene: Scene, how: Arrangement) -> torch.Tensor:
    """[num_reqs, num_heads, queries, keys], or one for all where there is one request."""
    count = len(scene.requests) + how.padding_requests
    queries, keys = max(scene.query_lens), max(scene.seq_lens)
    bias = torch.full((count, scene.rules.num_heads, queries, keys), poison_of(how))
    for r, request in enumerate(scene.requests):
        assert request.bias is not None
        bias[r, :, : request.query_len, : request.seq_len] = request.bias
    return bias[0] if count == 1 else bias


# Outputs -------------------------------------------------------------------------------------


def _outputs(
    scene: Scene, how: Arrangement, device: torch.device, watches: list[Watch]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Given outputs, full of NaN, watched but for their live rows."""
    rules, rows, real = scene.rules, scene.num_rows + how.padding, scene.num_rows
    out = lse = None
    if how.out == "given":
        blank = torch.full((rows, rules.num_heads, rules.v_head_size), float("nan"))
        placed = place(blank.to(scene.dtype), how.replace(poison=float("nan")), device)
        out = placed.view
        watches.append(_beyond("out", placed.memory, out, real))
    if how.lse == "given":
        memory = torch.full((rows + 1, rules.num_heads), float("nan"), device=device)
        lse = memory[:rows]
        watches.append(_beyond("lse", memory, lse, real))
    if how.lse == "transposed":
        memory = torch.full((rules.num_heads + 1, rows + 3), float("nan"), device=device)
        lse = memory[1:, 2 : rows + 2].T
        watches.append(_beyond("lse", memory, lse, real))
    return out, lse


def _beyond(name: str, memory: torch.Tensor, view: torch.Tensor, real: int) -> Watch:
    """A watch on all of `memory` but the first `real` rows of `view`, which lies in it."""
    free = torch.zeros(memory.shape, dtype=torch.bool, device=memory.device)
    at = view.storage_offset() - memory.storage_offset()
    free.as_strided(view.shape, view.stride(), at)[:real] = True
    return Watch.on(f"{name} beyond its live rows", memory, free)
