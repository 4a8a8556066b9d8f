"""A Selection in words: the choice, why, why not the others, and the nearest fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplat.backends.backend import Backend, Mark, Rejection
from attnplat.config.layer import LayerConfig
from attnplat.platforms.advice import in_words

if TYPE_CHECKING:
    from attnplat.platforms.planning import ModelPlan, PlannedLayer
    from attnplat.platforms.selection import Selection

# A backend that fails on one of these has nothing more to say that would help.
_DECISIVE = ("operation", "platform")


def describe(config: LayerConfig) -> str:
    """One line on what the layer asks for: `mha, head_size 128, bfloat16, 32/8 heads, sinks`."""
    words = [str(config.operation)]
    attn_type = getattr(config, "attn_type", None)
    if attn_type not in (None, "decoder"):
        words.append(str(attn_type))
    if getattr(config, "role", None) == "vision":
        words.append("vision")
    words += [f"head_size {config.head_size}", str(config.dtype)]
    if config.num_heads is not None:
        kv = f"/{config.num_kv_heads}" if config.num_kv_heads is not None else ""
        words.append(f"{config.num_heads}{kv} heads")
    if config.has_kv_cache and config.kv_cache_dtype not in (None, "auto"):
        words.append(f"kv_cache_dtype {config.kv_cache_dtype}")
    if config.block_size is not None:
        words.append(f"block_size {config.block_size}")
    words += sorted(config.needs)
    prefix = f"{config.label}: " if config.label else ""
    return prefix + ", ".join(words)


def explain(selection: Selection) -> str:
    """The decision and every reason, several lines."""
    lines = [f"{describe(selection.config)}", f"  on {describe_device(selection)}"]
    lines += [f"     note: {note}" for note in selection.world.device.notes]
    chosen = selection.chosen
    if chosen is None:
        return "\n".join([*lines, *("  " + line for line in failure(selection).splitlines())])
    lines.append(f"  -> {_marked(chosen, selection)} {chosen.summary}")
    lines.append(f"     because {_why(selection)}")
    lines += _ranks_below(selection)
    lines += [f"     {part}: {_part_line(sel)}" for part, sel in selection.parts.items()]
    for name in sorted(selection.unread):
        lines.append(f"     note: {name} is set and {chosen.name} does not read it")
    if selection.rejections:
        lines.append("  refused:")
        lines += [f"    {line}" for line in _reasons(selection)]
    lines += [f"  advice: {in_words(change)}" for change in selection.advice]
    return "\n".join(lines)


def explain_plan(plan: ModelPlan) -> str:
    """A model's plan: one line per kind of layer, what they share, what was given up."""
    lines = []
    for layer in plan.layers:
        lines.append(describe(layer.config))
        if layer.backend is not None:
            lines.append(f"  -> {_planned_line(layer)}")
    if plan.layout is not None:
        lines.append(f"KV cache: layout {plan.layout}, {plan.block_size} tokens per block")
    return "\n".join([*lines, *_proofs(plan), *plan_remarks(plan)])


def _proofs(plan: ModelPlan) -> list[str]:
    """What is behind the mark of each backend that layers and their parts would use."""
    found: dict[str, None] = {}
    for layer in plan.layers:
        parts = layer.selection.parts.values()
        chosen = [(layer.backend, layer.selection), *((part.chosen, part) for part in parts)]
        for backend, selection in chosen if layer.backend is not None else ():
            if backend is not None:
                found[f"{_marked(backend, selection)} {selection.proof(backend).because}"] = None
    return list(found)


def plan_remarks(plan: ModelPlan) -> list[str]:
    """What is to be said of a plan: of its device, of what was given up, what failed, advice."""
    noted = [note for layer in plan.layers[:1] for note in layer.selection.world.device.notes]
    notes = [f"note: {note}" for note in (*noted, *plan.notes)]
    return [*notes, *plan.failures, *plan_advice(plan)]


def plan_advice(plan: ModelPlan) -> list[str]:
    """Lines of advice on a model's layers, each said once, with the layers it is for."""
    layers: dict[str, list[str]] = {}
    for layer in plan.layers:
        for change in layer.selection.advice:
            name = layer.config.label or str(layer.config.kind)
            layers.setdefault(in_words(change), []).append(name)
    return [f"advice: {text} ({', '.join(names)})" for text, names in layers.items()]


def _planned_line(layer: PlannedLayer) -> str:
    assert layer.backend is not None
    parts = [f"{name} {_part_line(part)}" for name, part in layer.selection.parts.items()]
    tail = f"; {', '.join(parts)}" if parts else ""
    why = "of what the layers share" if layer.moved else _why(layer.selection)
    return f"{_marked(layer.backend, layer.selection)}{tail}, because {why}"


def failure(selection: Selection) -> str:
    """Why nothing fits: the one constraint first, every reason, and the nearest fix."""
    where = describe_device(selection)
    what = describe(selection.config)
    if selection.requested is not None and not selection.accepted:
        by = selection.requested_by
        head = f"{selection.requested} (asked for by the {by}) does not fit {what} on {where}"
    elif selection.accepted:
        broken = [p for p, sel in selection.parts.items() if not sel.ok]
        head = f"no backend for the {', '.join(broken)} part of {what} on {where}"
    elif not selection.candidates:
        head = f"no backend on {where} serves {what}"
    else:
        head = f"no backend fits {what} on {where}"
    lines = [head + _killer(selection)]
    lines += [f"  {line}" for line in _reasons(selection)]
    for part, sel in selection.parts.items():
        if not sel.ok:
            lines += [f"  {part}: {line}" for line in _reasons(sel) or ["no candidate"]]
    lines += [f"  nearest: {line}" for line in selection.fixes]
    return "\n".join(lines)


def why_all_refused(selection: Selection) -> str | None:
    """The one subject that every candidate was refused for, or None."""
    if not selection.rejections or selection.accepted:
        return None
    subjects = [{(r.kind, r.subject) for r in rs} for rs in selection.rejections.values()]
    common = set.intersection(*subjects)
    return min(subject for _, subject in common) if common else None


def _killer(selection: Selection) -> str:
    subject = why_all_refused(selection)
    if subject is None or selection.requested is not None or len(selection.rejections) < 2:
        return ""
    return f": {subject} rules out every candidate"


def describe_device(selection: Selection) -> str:
    """The device decided for: `rocm:gfx950 (simulated, packages assumed: full)`."""
    device, inventory = selection.world.device, selection.world.inventory
    assumed = f", packages assumed: {inventory.profile}" if inventory.profile else ""
    return f"{device.platform}:{device.arch}" + (
        f" (simulated{assumed})" if device.simulated else ""
    )


def _why(selection: Selection) -> str:
    if selection.requested is not None:
        return f"the {selection.requested_by} asked for it"
    assert selection.row is not None
    because = selection.row.because
    chosen = selection.chosen
    if chosen is not None and chosen.name != selection.candidates[0]:
        return f"it is the first that fits, in this order: {because}"
    return because


def _ranks_below(selection: Selection) -> list[str]:
    others = [_marked(backend, selection) for backend in selection.accepted[1:]]
    lines = [f"     then {', '.join(others)}"] if others else []
    mark, because = selection.proof(selection.accepted[0])
    if mark == Mark.KNOWN:
        usable = _first_with_adapter(selection)
        would = f"until then attnplat runs {usable.name}" if usable else "nothing runs it yet"
        because = f"{because}; {would}"
    return [*lines, f"     [{mark}] {because}"]


def _first_with_adapter(selection: Selection) -> Backend | None:
    return next((b for b in selection.accepted if b.loads is not None), None)


def _part_line(part: Selection) -> str:
    chosen = part.chosen
    return _marked(chosen, part) if chosen else "none"


def _marked(backend: Backend, selection: Selection) -> str:
    """Its name with the mark that it has where the selection was made."""
    return f"{backend.name} [{selection.proof(backend).mark}]"


def _reasons(selection: Selection) -> list[str]:
    lines = []
    for reasons in selection.rejections.values():
        decisive: tuple[Rejection, ...] = tuple(r for r in reasons if r.kind in _DECISIVE)[:1]
        lines += [str(reason) for reason in decisive or reasons]
    return lines
