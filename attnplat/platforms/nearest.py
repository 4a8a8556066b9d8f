"""The nearest change that would be accepted, always judged again before it is offered.

`fixes` is handed the deciding and judging functions, so that it asks the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnplat.backends.backend import Backend, Rejection
from attnplat.config.layer import LayerConfig
from attnplat.platforms.world import World

if TYPE_CHECKING:
    from attnplat.platforms.selection import Selection

Decide = Callable[[LayerConfig, World, bool], "Selection"]
Judge = Callable[[str, LayerConfig, World], tuple[Backend | None, tuple[Rejection, ...]]]

# Fields a user can change without changing what the model computes, cheapest first.
# A head can be padded with zeros to a larger size, never cut.
CHANGEABLE = ("block_size", "kv_cache_dtype", "head_size", "dtype")


@dataclass(frozen=True)
class Change:
    """One change of one field after which `backend` takes the layer."""

    backend: str
    subject: str
    value: Any

    def __str__(self) -> str:
        if self.subject == "head_size":
            return f"pad head_size to {self.value}: {self.backend} takes it"
        if self.subject == "block_size" and self.value is None:
            return f"leave block_size open: {self.backend} takes it"
        return f"{self.subject} {self.value}: {self.backend} takes it"


def fixes(selection: Selection, decide: Decide, judge: Judge) -> Iterator[str]:
    """Changes after which the refused layer would be served, the nearest first."""
    config, world = selection.config, selection.world
    automatic = selection
    if selection.requested is not None:
        wishes = replace(world.wishes, backend=None, backend_per_kind=(), mla_prefill_backend=None)
        world = world.replace(wishes=wishes)
        automatic = decide(config, world, False)
        if automatic.chosen is not None:
            yield f"leave the backend open: {automatic.chosen.name} takes it"
    names = tuple(dict.fromkeys((*selection.candidates, *automatic.candidates)))
    for change in changes_for(names, config, world, judge):
        yield str(change)
    if not automatic.ok:
        allowed = decide(config, world, True).chosen
        if allowed is not None:
            yield f"allow_reference=True: {allowed.name} takes it, slowly"


def changes_for(
    names: tuple[str, ...], config: LayerConfig, world: World, judge: Judge
) -> Iterator[Change]:
    """Accepted one-field changes, in rank order of the backends that would take them."""
    for name in names:
        backend, reasons = judge(name, config, world)
        if backend is None or not reasons:
            continue
        subjects = {r.subject for r in reasons if r.kind == "field"}
        if len(subjects) != 1:
            continue
        subject = subjects.pop()
        if subject not in CHANGEABLE:
            continue
        value = getattr(config, subject)
        for candidate in _values(backend, subject, value):
            changed = config.replace(**{subject: candidate})
            if not judge(name, changed, world)[1]:
                yield Change(name, subject, candidate)
                break


def _values(backend: Backend, subject: str, value: Any) -> Iterator[Any]:
    if subject == "block_size":
        yield None
    for candidate in backend.limit(subject).nearest(value):
        if subject != "head_size" or value < candidate <= 2 * value:
            yield candidate
