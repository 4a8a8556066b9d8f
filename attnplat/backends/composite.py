"""Backends made of two others: one for steps that hold image spans, one for all the rest.

A composite is an ordinary declaration. What it takes is what both halves take; which half
runs a step is decided by the batch, so both must fit the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from attnplat.backends.backend import Backend, GraphSupport, Package, Rule
from attnplat.backends.limits import Anything, Both, Cases, Limit, OneOf
from attnplat.config.layer import MhaConfig
from attnplat.config.names import Feature

if TYPE_CHECKING:
    from attnplat.platforms.world import World

# What the router of steps does not carry over from its halves.
NOT_ROUTED = frozenset(
    {
        Feature.SINKS,
        Feature.NON_CAUSAL,
        Feature.BATCH_INVARIANCE,
        Feature.PER_HEAD_QUANT_SCALES,
        Feature.DCP,
        Feature.PCP,
        Feature.ADAPTIVE_VERIFICATION,
        Feature.LSE,
    }
)


def composite(
    name: str,
    summary: str,
    *,
    spans: Backend,
    causal: Backend,
    takes: Mapping[str, Limit],
    on: Mapping[str, Limit | Cases],
    forbids: tuple[Rule, ...] = (),
    preferred_block_size: int,
) -> Backend:
    """The backend that routes steps with image spans to `spans` and the others to `causal`.

    Args:
        takes: further limits, met together with those of both halves.
        on: the devices it is for.
        forbids: further rules, asked before those of the halves.
    """
    fields = dict.fromkeys((*takes, *spans.takes, *causal.takes))
    composed = Backend(
        name=name,
        summary=summary,
        serves=spans.serves & causal.serves,
        takes={f: _limit(takes.get(f), spans.takes.get(f), causal.takes.get(f)) for f in fields},
        features=_join(_features, spans.features, causal.features),
        on=on,
        requires=_united(spans.requires, causal.requires),
        forbids=forbids,
        reads=spans.reads | causal.reads,
        kv_layouts=_join(_layouts, spans.kv_layouts, causal.kv_layouts),
        preferred_block_size=preferred_block_size,
        # A step with spans runs outside a graph, so only the other steps can be captured.
        graphs=GraphSupport.SINGLE_TOKEN_DECODE,
        half_of=(spans.name, causal.name),
    )
    asked = [rule_of_half(composed, spans.name, rule) for rule in spans.forbids]
    asked += [rule_of_half(composed, causal.name, r) for r in causal.forbids if not is_of_spans(r)]
    return replace(composed, forbids=(*forbids, *asked))


class Joined(Cases):
    """Two declarations joined into one, each settled for the world first."""

    def __init__(self, join: Callable[[Any, Any], Any], first: Any, second: Any) -> None:
        # Halves settle to few values each, so every pair is joined once.
        self._join, self._first, self._second = cache(join), first, second
        rest_of_first, rest_of_second = _rest(first), _rest(second)
        super().__init__(
            *((p, join(value, rest_of_second)) for p, value in _cases(first)),
            *((p, join(rest_of_first, value)) for p, value in _cases(second)),
            otherwise=join(rest_of_first, rest_of_second),
        )

    def resolve(self, world: World) -> Any:
        """The join of what the two are in `world`."""
        return self._join(_settled(self._first, world), _settled(self._second, world))


def _join(join: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    if isinstance(first, Cases) or isinstance(second, Cases):
        return Joined(join, first, second)
    return join(first, second)


def _cases(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.cases if isinstance(value, Cases) else ()


def _rest(value: Any) -> Any:
    return value.otherwise if isinstance(value, Cases) else value


def _settled(value: Any, world: World) -> Any:
    return value.resolve(world) if isinstance(value, Cases) else value


def _limit(*limits: Limit | Cases | None) -> Limit | Cases:
    joined: Any = Anything()
    for limit in limits:
        if limit is not None:
            joined = _join(both, joined, limit)
    return joined  # type: ignore[no-any-return]


def both(first: Limit, second: Limit) -> Limit:
    """What two limits both accept, in the plainest form."""
    if first == second or isinstance(second, Anything):
        return first
    if isinstance(first, Anything):
        return second
    for listed, other in ((first, second), (second, first)):
        if isinstance(listed, OneOf):
            shared = [value for value in listed.values if other.accepts(value)]
            return OneOf(*shared) if shared else Both(first, second)
    return Both(first, second)


def _features(spans: frozenset[Feature], causal: frozenset[Feature]) -> frozenset[Feature]:
    return ((spans & causal) - NOT_ROUTED) | {Feature.MM_PREFIX}


def _layouts(
    first: tuple[str, ...] | None, second: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    if first is None or second is None:
        return second if first is None else first
    return tuple(layout for layout in first if layout in second)


def _united(first: tuple[Package, ...], second: tuple[Package, ...]) -> tuple[Package, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def via(half: str, code: str) -> str:
    """The code under which a composite asks a rule of one of its halves."""
    return f"via_{half}/{code}"


def is_of_spans(rule: Rule) -> bool:
    """Whether a rule speaks of layers with image spans only, by its example."""
    return rule.example is not None and Feature.MM_PREFIX in rule.example.needs


def rule_of_half(composed: Backend, half: str, rule: Rule) -> Rule:
    """`rule` of a half as the composite asks it; the second half never sees a span."""
    asked = replace(rule, code=via(half, rule.code))
    if half != composed.half_of[1]:
        return asked
    return replace(asked, when=WithoutSpans(rule.when))


class WithoutSpans:
    """A rule's predicate, asked of the layer as steps without image spans see it."""

    def __init__(self, when: Callable[[Any, World], bool]) -> None:
        self._when = when
        self.__name__ = getattr(when, "__name__", "rule")

    def __call__(self, config: Any, world: World) -> bool:
        if isinstance(config, MhaConfig):
            config = config.without_spans
        return self._when(config, world)
