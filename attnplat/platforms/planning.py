"""A whole model's choice: one KV layout and block size that all its layers can share.

Layers are selected one by one first; then the layouts and block sizes that the accepted
backends take are brought together. Where the best backends of two layers share none, the
plan moves the layer that loses least, and says which better backend was passed over and why.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from attnplat.backends.backend import Backend
from attnplat.backends.limits import Limit
from attnplat.config.layer import LayerConfig
from attnplat.config.names import Operation
from attnplat.platforms.selection import Selection

# Layouts in the order that decides between equals: layers outermost, tokens before heads
# first (the order in which most kernels read).
LAYOUT_ORDER = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
DEFAULT_BLOCK_SIZE = 16
DEFAULT_BLOCK_SIZE_CPU = 128
LARGEST_BLOCK = 1 << 16
# Combinations tried, best first, before a plan is given up. A model has a handful of kinds.
MOST_COMBINATIONS = 20_000


@dataclass(frozen=True)
class PlannedLayer:
    """One kind of layer in a plan: its selection, and the backend the plan gave it."""

    selection: Selection
    backend: Backend | None

    @property
    def config(self) -> LayerConfig:
        """The layer's config as selected for."""
        return self.selection.config

    @property
    def moved(self) -> bool:
        """Whether the plan passed over the layer's first choice."""
        return self.backend is not self.selection.chosen


@dataclass(frozen=True)
class ModelPlan:
    """What every layer of a model would use on one device.

    Attributes:
        layers: one entry per distinct layer config, in model order.
        layout: the KV-cache layout that all cached layers share, or None without a cache.
        block_size: tokens per KV-cache block, or None without a cache.
        notes: where layers disagreed and what was given up, one sentence each.
        failures: why a layer, or the whole, cannot be served; empty when it can.
    """

    layers: tuple[PlannedLayer, ...]
    layout: str | None
    block_size: int | None
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every layer can be served together."""
        return not self.failures

    def explain(self) -> str:
        """One line per kind of layer, then what they share, then what was given up."""
        from attnplat.platforms.explain import explain_plan

        return explain_plan(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "layers": [
                {
                    **layer.selection.to_dict(),
                    "planned": layer.backend.name if layer.backend else None,
                }
                for layer in self.layers
            ],
            "layout": self.layout,
            "block_size": self.block_size,
            "notes": list(self.notes),
            "failures": list(self.failures),
        }


def plan_model(selections: Sequence[Selection]) -> ModelPlan:
    """Bring the selections of a model's layers together.

    Pure. A layer that no backend takes makes the plan fail with that layer's reasons.
    """
    broken = [s.failure() for s in selections if not s.ok]
    cached = [i for i, s in enumerate(selections) if s.ok and _shares_pages(s.config)]
    chosen: list[Backend | None] = [s.chosen for s in selections]
    if broken or not cached:
        return ModelPlan(_layers(selections, chosen), None, None, failures=tuple(broken))
    found = _agree([selections[i] for i in cached])
    if found is None:
        return ModelPlan(
            _layers(selections, chosen), None, None, failures=(_disagreement(selections, cached),)
        )
    for index, backend in zip(cached, found.backends, strict=True):
        chosen[index] = backend
    layers = _layers(selections, chosen)
    return ModelPlan(layers, found.layout, found.block_size, tuple(_notes(layers, found)))


@dataclass(frozen=True)
class _Agreement:
    backends: tuple[Backend, ...]
    layout: str
    block_size: int


def _shares_pages(config: LayerConfig) -> bool:
    return config.has_kv_cache and config.operation not in (Operation.STATE, Operation.INDEXER)


def _layers(
    selections: Sequence[Selection], backends: Sequence[Backend | None]
) -> tuple[PlannedLayer, ...]:
    return tuple(PlannedLayer(s, b) for s, b in zip(selections, backends, strict=True))


def _agree(selections: Sequence[Selection]) -> _Agreement | None:
    for backends in _by_total_rank([s.accepted for s in selections]):
        layouts = shared_layouts(backends)
        block_size = shared_block_size(
            [(s.config, b) for s, b in zip(selections, backends, strict=True)],
            _start_size(selections[0]),
        )
        if layouts and block_size is not None:
            return _Agreement(backends, layouts[0], block_size)
    return None


def _by_total_rank(options: Sequence[Sequence[Backend]]) -> Iterator[tuple[Backend, ...]]:
    """Combinations of one option each, those that give up least rank first."""
    start = (0,) * len(options)
    queue, seen = [(0, start)], {start}
    for _ in range(MOST_COMBINATIONS):
        if not queue:
            return
        _, ranks = heapq.heappop(queue)
        yield tuple(o[r] for o, r in zip(options, ranks, strict=True))
        for i, rank in enumerate(ranks):
            following = (*ranks[:i], rank + 1, *ranks[i + 1 :])
            if rank + 1 < len(options[i]) and following not in seen:
                seen.add(following)
                heapq.heappush(queue, (sum(following), following))


def shared_layouts(backends: Iterable[Backend]) -> tuple[str, ...]:
    """The layouts that every backend takes, the one most of them put first at the front."""
    declared = [b.layouts for b in backends if b.layouts is not None]
    if not declared:
        return LAYOUT_ORDER
    shared = [layout for layout in LAYOUT_ORDER if all(layout in own for own in declared)]
    firsts = Counter(own[0] for own in declared)
    return tuple(sorted(shared, key=lambda layout: -firsts[layout]))


def shared_block_size(layers: Sequence[tuple[LayerConfig, Backend]], start: int) -> int | None:
    """Tokens per block that every layer's backend takes; None when there is none.

    A size that the caller gave was judged in selection already and stands. Otherwise the
    start value or a backend's preferred size where all take it, else the smallest that is a
    common multiple of one size each backend names and that all take.
    """
    given = {config.block_size for config, _ in layers if config.block_size is not None}
    if given:
        return given.pop() if len(given) == 1 else None
    limits = [backend.limit("block_size") for _, backend in layers]
    preferred = max((b.block_size or 0 for _, b in layers), default=0)
    for size in (max(start, preferred), start):
        if all(limit.accepts(size) for limit in limits):
            return size
    return _smallest_common(limits)


def _smallest_common(limits: Sequence[Limit]) -> int | None:
    named = [limit.inside() or (1,) for limit in {repr(limit): limit for limit in limits}.values()]
    sizes = {math.lcm(*combination) for combination in product(*named)}
    fitting = (s for s in sorted(sizes) if s <= LARGEST_BLOCK)
    return next((s for s in fitting if all(limit.accepts(s) for limit in limits)), None)


def _start_size(selection: Selection) -> int:
    on_cpu = selection.world.device.platform == "cpu"
    return DEFAULT_BLOCK_SIZE_CPU if on_cpu else DEFAULT_BLOCK_SIZE


def _notes(layers: Sequence[PlannedLayer], found: _Agreement) -> Iterator[str]:
    for layer in layers:
        if not layer.moved or layer.backend is None or layer.selection.chosen is None:
            continue
        first = layer.selection.chosen
        why = _why_not_together(layer.config, first, found)
        yield (
            f"{layer.config.label or layer.config.kind}: {first} was passed over for "
            f"{layer.backend}: {why}"
        )


def _why_not_together(config: LayerConfig, first: Backend, found: _Agreement) -> str:
    if first.layouts is not None and found.layout not in first.layouts:
        own = ", ".join(first.layouts)
        return f"it takes the layouts {own}, and the other layers share {found.layout}"
    return (
        f"it takes block sizes of {first.limit('block_size')}, and the other layers share "
        f"{found.block_size}"
    )


def _disagreement(selections: Sequence[Selection], cached: Sequence[int]) -> str:
    lines = ["no KV layout and block size fits all layers together:"]
    for index in cached:
        selection = selections[index]
        options = "; ".join(_needs(backend) for backend in selection.accepted)
        lines.append(f"  {selection.config.label or selection.config.kind}: {options}")
    return "\n".join(lines)


def _needs(backend: Backend) -> str:
    layouts = "any layout" if backend.layouts is None else " or ".join(backend.layouts)
    return f"{backend} ({layouts}, block {backend.limit('block_size')})"


def changes_since(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two plans given as dicts: which layer moved, and why.

    Layers are matched by label, else by what they ask for.
    """
    before = {_identity(layer): layer for layer in old.get("layers", ())}
    lines = []
    for layer in new.get("layers", ()):
        name = _identity(layer)
        was = before.pop(name, None)
        now = layer["planned"] or layer["chosen"]
        if was is None:
            lines.append(f"{name}: new, {now}")
            continue
        then = was["planned"] or was["chosen"]
        if then != now:
            lines.append(f"{name}: {then} -> {now}: {_why_moved(layer, then)}")
    lines += [f"{name}: gone (was {layer['planned']})" for name, layer in before.items()]
    for field in ("layout", "block_size"):
        if old.get(field) != new.get(field):
            lines.append(f"{field}: {old.get(field)} -> {new.get(field)}")
    return lines


def _identity(layer: Mapping[str, Any]) -> str:
    described = layer["layer"]
    return str(described.get("label") or sorted(described.items()))


def _why_moved(layer: Mapping[str, Any], then: str | None) -> str:
    reasons = layer["rejected"].get(then)
    if reasons:
        first = reasons[0]
        return f"{then} is refused for {first['subject']} (takes {first['takes']})"
    if then in layer["accepted"]:
        return f"{then} still fits and now ranks below"
    return f"{then} is no longer a candidate" if then else "it had no backend"
