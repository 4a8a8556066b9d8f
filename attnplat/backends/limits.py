"""Limits: what one field of a config, or of a device, may be.

A limit validates (`accepts`), documents (`str`), and generates tests (`inside`, `outside`).
None means unknown and passes every limit except `Required`. Standard library only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplat.platforms.world import World

WorldPredicate = Callable[["World"], bool]


class Limit(ABC):
    """What a value may be. `str(limit)` completes the sentence "takes ..."."""

    def accepts(self, value: Any) -> bool:
        """Whether `value` is within the limit; None is unknown and passes."""
        return value is None or self.holds(value)

    @abstractmethod
    def holds(self, value: Any) -> bool:
        """Whether a known value is within the limit."""

    @abstractmethod
    def inside(self) -> tuple[Any, ...]:
        """Example values within the limit, the ordinary first."""

    @abstractmethod
    def outside(self) -> tuple[Any, ...]:
        """Example values one step beyond the limit; empty where nothing lies beyond."""

    def nearest(self, value: Any) -> tuple[Any, ...]:
        """Values within the limit closest to a refused `value`, the best first."""
        return tuple(v for v in self.inside() if v is not None)


@dataclass(frozen=True)
class Anything(Limit):
    """No limit."""

    def holds(self, value: Any) -> bool:
        return True

    def inside(self) -> tuple[Any, ...]:
        return ()

    def outside(self) -> tuple[Any, ...]:
        return ()

    def __str__(self) -> str:
        return "anything"


class OneOf(Limit):
    """One of the listed values."""

    def __init__(self, *values: Any) -> None:
        if not values:
            raise ValueError("OneOf needs at least one value")
        self.values = tuple(values)
        self._set = frozenset(values)
        # Asked of nearly every field of every backend, so it is the set's own method.
        self.accepts = frozenset((None, *values)).__contains__  # type: ignore[method-assign, assignment]

    def holds(self, value: Any) -> bool:
        return value in self._set

    def inside(self) -> tuple[Any, ...]:
        return self.values

    def outside(self) -> tuple[Any, ...]:
        if not all(isinstance(v, int) for v in self.values):
            return ()
        beyond = {v + step for v in self.values for step in (-1, 1)} - self._set
        return tuple(sorted(v for v in beyond if v > 0))

    def nearest(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, int) and all(isinstance(v, int) for v in self.values):
            larger = sorted(v for v in self.values if v > value)
            smaller = sorted((v for v in self.values if v < value), reverse=True)
            return tuple(larger + smaller)
        return self.values

    def __str__(self) -> str:
        return _listed(self.values)

    def __repr__(self) -> str:
        return f"OneOf{self.values!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneOf) and self._set == other._set

    def __hash__(self) -> int:
        return hash(self._set)


@dataclass(frozen=True)
class MultipleOf(Limit):
    """A positive multiple of `step`."""

    step: int

    def accepts(self, value: Any) -> bool:
        return value is None or (value > 0 and value % self.step == 0)

    def holds(self, value: Any) -> bool:
        return bool(value > 0 and value % self.step == 0)

    def inside(self) -> tuple[Any, ...]:
        return (self.step, 2 * self.step, 7 * self.step)

    def outside(self) -> tuple[Any, ...]:
        return () if self.step == 1 else (self.step - 1, self.step + 1)

    def nearest(self, value: Any) -> tuple[Any, ...]:
        up = max(self.step, -(-value // self.step) * self.step)
        down = value // self.step * self.step
        return (up, down) if down > 0 and down != up else (up,)

    def __str__(self) -> str:
        return f"a multiple of {self.step}"


class MultipleOfAny(Limit):
    """A positive multiple of any of the listed sizes."""

    def __init__(self, *steps: int) -> None:
        self.steps = tuple(steps)
        self._reduced = tuple(
            s for s in sorted(set(steps)) if not any(s % t == 0 for t in steps if t < s)
        )

    def holds(self, value: Any) -> bool:
        return value > 0 and any(value % step == 0 for step in self._reduced)

    def inside(self) -> tuple[Any, ...]:
        return (*self.steps, 3 * self.steps[0])

    def outside(self) -> tuple[Any, ...]:
        return tuple(
            v for s in self._reduced for v in (s - 1, s + 1) if v > 0 and not self.holds(v)
        )

    def nearest(self, value: Any) -> tuple[Any, ...]:
        ups = sorted({-(-value // s) * s for s in self._reduced})
        downs = sorted({value // s * s for s in self._reduced if value >= s}, reverse=True)
        return tuple(ups + downs)

    def __str__(self) -> str:
        if len(self._reduced) == 1:
            return f"a multiple of {self._reduced[0]}"
        return f"a multiple of {_listed(self._reduced)}"

    def __repr__(self) -> str:
        return f"MultipleOfAny{self.steps!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MultipleOfAny) and self._reduced == other._reduced

    def __hash__(self) -> int:
        return hash(self._reduced)


@dataclass(frozen=True)
class AtLeast(Limit):
    """`least` or more; tuples such as a capability compare lexicographically."""

    least: Any

    def holds(self, value: Any) -> bool:
        return bool(value >= self.least)

    def inside(self) -> tuple[Any, ...]:
        return (self.least,) if isinstance(self.least, tuple) else (self.least, self.least * 2)

    def outside(self) -> tuple[Any, ...]:
        if isinstance(self.least, tuple):
            major, minor = self.least
            return ((major, minor - 1),) if minor else ((major - 1, 9),)
        return (self.least - 1,) if self.least > 1 else ()

    def __str__(self) -> str:
        return f"{_shown(self.least)} or more"


@dataclass(frozen=True)
class AtMost(Limit):
    """`most` or less."""

    most: Any

    def holds(self, value: Any) -> bool:
        return bool(value <= self.most)

    def inside(self) -> tuple[Any, ...]:
        return (self.most,)

    def outside(self) -> tuple[Any, ...]:
        return (
            ((self.most[0], self.most[1] + 1),)
            if isinstance(self.most, tuple)
            else (self.most + 1,)
        )

    def __str__(self) -> str:
        return f"{_shown(self.most)} or less"


@dataclass(frozen=True)
class Between(Limit):
    """From `least` to `most`, both included."""

    least: Any
    most: Any

    def holds(self, value: Any) -> bool:
        return bool(self.least <= value <= self.most)

    def inside(self) -> tuple[Any, ...]:
        return (self.least, self.most)

    def outside(self) -> tuple[Any, ...]:
        return AtLeast(self.least).outside() + AtMost(self.most).outside()

    def __str__(self) -> str:
        return f"{_shown(self.least)} to {_shown(self.most)}"


class Includes(Limit):
    """A set that has every one of the listed members (a device's traits)."""

    def __init__(self, *members: str) -> None:
        self.members = frozenset(members)

    def holds(self, value: Any) -> bool:
        return self.members <= frozenset(value)

    def inside(self) -> tuple[Any, ...]:
        return (self.members,)

    def outside(self) -> tuple[Any, ...]:
        return tuple(self.members - {m} for m in sorted(self.members))

    def __str__(self) -> str:
        return "devices with " + " and ".join(sorted(self.members))

    def __repr__(self) -> str:
        return f"Includes{tuple(sorted(self.members))!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Includes) and self.members == other.members

    def __hash__(self) -> int:
        return hash(self.members)


class SubsetOf(Limit):
    """A set with no member but the listed ones (a config's features)."""

    def __init__(self, *members: str) -> None:
        self.members = frozenset(members)

    def holds(self, value: Any) -> bool:
        return frozenset(value) <= self.members

    def inside(self) -> tuple[Any, ...]:
        return (frozenset(), self.members)

    def outside(self) -> tuple[Any, ...]:
        return ()

    def __str__(self) -> str:
        return "only " + _listed(tuple(sorted(self.members))) if self.members else "nothing"

    def __repr__(self) -> str:
        return f"SubsetOf{tuple(sorted(self.members))!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubsetOf) and self.members == other.members

    def __hash__(self) -> int:
        return hash((SubsetOf, self.members))


class Both(Limit):
    """Every one of the given limits."""

    def __init__(self, *limits: Limit) -> None:
        self.limits = tuple(limits)

    def accepts(self, value: Any) -> bool:
        return all(limit.accepts(value) for limit in self.limits)

    def holds(self, value: Any) -> bool:
        return all(limit.holds(value) for limit in self.limits)

    def inside(self) -> tuple[Any, ...]:
        pool = {v: None for limit in self.limits for v in limit.inside()}
        return tuple(v for v in pool if self.accepts(v))

    def outside(self) -> tuple[Any, ...]:
        pool = {v: None for limit in self.limits for v in limit.outside()}
        return tuple(v for v in pool if not self.accepts(v))

    def nearest(self, value: Any) -> tuple[Any, ...]:
        pool = {v: None for limit in self.limits for v in limit.nearest(value)}
        return tuple(v for v in pool if self.accepts(v))

    def __str__(self) -> str:
        return ", ".join(map(str, self.limits))

    def __repr__(self) -> str:
        return f"Both{self.limits!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Both) and self.limits == other.limits

    def __hash__(self) -> int:
        return hash((Both, self.limits))


class Either(Limit):
    """Any one of the given limits."""

    def __init__(self, *limits: Limit) -> None:
        self.limits = tuple(limits)

    def holds(self, value: Any) -> bool:
        return any(limit.holds(value) for limit in self.limits)

    def inside(self) -> tuple[Any, ...]:
        return tuple({v: None for limit in self.limits for v in limit.inside()})

    def outside(self) -> tuple[Any, ...]:
        pool = {v: None for limit in self.limits for v in limit.outside()}
        return tuple(v for v in pool if not self.accepts(v))

    def nearest(self, value: Any) -> tuple[Any, ...]:
        return tuple({v: None for limit in self.limits for v in limit.nearest(value)})

    def __str__(self) -> str:
        return " or ".join(map(str, self.limits))

    def __repr__(self) -> str:
        return f"Either{self.limits!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Either) and self.limits == other.limits

    def __hash__(self) -> int:
        return hash((Either, self.limits))


@dataclass(frozen=True)
class Required(Limit):
    """As the inner limit, and the value must be known: None is refused."""

    limit: Limit

    def accepts(self, value: Any) -> bool:
        return value is not None and self.limit.holds(value)

    def holds(self, value: Any) -> bool:
        return self.limit.holds(value)

    def inside(self) -> tuple[Any, ...]:
        return self.limit.inside()

    def outside(self) -> tuple[Any, ...]:
        return (None, *self.limit.outside())

    def nearest(self, value: Any) -> tuple[Any, ...]:
        return self.limit.inside() if value is None else self.limit.nearest(value)

    def __str__(self) -> str:
        return str(self.limit)


class Nothing(Limit):
    """No value at all: the field cannot be served, for the reason given."""

    def __init__(self, because: str) -> None:
        self.because = because

    def holds(self, value: Any) -> bool:
        return False

    def inside(self) -> tuple[Any, ...]:
        return ()

    def outside(self) -> tuple[Any, ...]:
        return ()

    def __str__(self) -> str:
        return f"nothing ({self.because})"

    def __repr__(self) -> str:
        return f"Nothing({self.because!r})"


class Cases:
    """A declaration that depends on the world: the first case that holds decides.

    A predicate sees the World and never the layer, so a backend is resolved once per
    world and is from then on a product of plain limits. Any field of a Backend may hold
    one: a Limit, a set of features, a tuple of layouts.
    """

    def __init__(self, *cases: tuple[WorldPredicate, Any], otherwise: Any) -> None:
        self.cases = cases
        self.otherwise = otherwise

    def resolve(self, world: World) -> Any:
        """The value that holds in `world`."""
        for predicate, value in self.cases:
            if world.holds(predicate):
                return value
        return self.otherwise

    def values(self) -> Iterable[Any]:
        """Every value it may resolve to, `otherwise` last."""
        return (*(value for _, value in self.cases), self.otherwise)

    def __repr__(self) -> str:
        return f"Cases({', '.join(p.__name__ for p, _ in self.cases)})"


class FeaturesWhen(Cases):
    """A set of features, some of which are taken only where a predicate of the world holds."""

    def __init__(self, always: Iterable[Any], when: Mapping[Any, WorldPredicate]) -> None:
        base = frozenset(always)
        super().__init__(*((p, base | {f}) for f, p in when.items()), otherwise=base)
        self._when = tuple(when.items())

    def resolve(self, world: World) -> Any:
        """The features taken in `world`: each condition is asked for itself."""
        held = [feature for feature, predicate in self._when if world.holds(predicate)]
        return self.otherwise.union(held) if held else self.otherwise


def _shown(value: Any) -> str:
    """A pair is a version (`9.0`), a longer tuple the sizes of a head (`128/64/128`)."""
    if not isinstance(value, tuple):
        return str(value)
    return ("." if len(value) == 2 else "/").join(map(str, value))


def _listed(values: tuple[Any, ...]) -> str:
    shown = [_shown(v) for v in values]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " or " + shown[-1]
