"""Everything a choice may depend on, passed in as one frozen value. Nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from attnplat.backends.backend import Backend, Rejection
from attnplat.config.attention import AttentionConfig
from attnplat.config.names import Feature
from attnplat.config.run import RunContext
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.inventory import Inventory


class Settled(NamedTuple):
    """A backend in a world.

    Attributes:
        backend: with all that depends on the world settled.
        standing: what speaks against every layer there: the device, missing packages.
        declared: as its platform's catalog declares it.
    """

    backend: Backend
    standing: tuple[Rejection, ...]
    declared: Backend


@dataclass(frozen=True)
class World:
    """A device, what is installed beside it, the run, and the user's wishes.

    Attributes:
        device: the device the layer would run on, real or simulated.
        inventory: packages, their usable features, and switches.
        run: what is true of the whole run.
        wishes: the user's attention config.
    """

    device: DeviceInfo
    inventory: Inventory
    run: RunContext = field(default_factory=RunContext)
    wishes: AttentionConfig = field(default_factory=AttentionConfig)
    run_needs: frozenset[Feature] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Derived once: every backend of every layer is asked against it.
        object.__setattr__(self, "run_needs", self.run.needs)
        object.__setattr__(self, "_answers", {})
        object.__setattr__(self, "_settled", {})

    def holds(self, predicate: Callable[[World], bool]) -> bool:
        """Whether a pure predicate of the world holds; each is asked once of a world."""
        answers: dict[Any, bool] = self._answers  # type: ignore[attr-defined]
        answer = answers.get(predicate)
        if answer is None:
            answer = answers[predicate] = bool(predicate(self))
        return answer

    def settle(self, backend: Backend) -> Settled:
        """The backend with all that depends on the world settled; once per world."""
        known: dict[int, Settled] = self._settled  # type: ignore[attr-defined]
        # By identity: hashing a declaration takes longer than asking it. Nobody else gets the
        # id while the declaration is kept.
        found = known.get(id(backend))
        if found is None:
            resolved = backend.resolve(self)
            found = Settled(resolved, resolved.standing_reasons(self), backend)
            known[id(backend)] = found
        return found

    def replace(self, **changes: Any) -> Self:
        """A copy with the given parts changed."""
        return replace(self, **changes)
