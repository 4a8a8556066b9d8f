"""The choice: one pure function over declared backends, with every reason kept.

`select(tables, config, world)` reads nothing but its arguments, imports no kernel and
works for devices that are not here. The same inputs always give the same Selection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from attnplat.backends.backend import Backend, Rejection, wanted_features
from attnplat.config.frozen import FrozenMap
from attnplat.config.layer import (
    IndexerConfig,
    LayerConfig,
    MhaConfig,
    MlaConfig,
    SparseMlaConfig,
)
from attnplat.config.names import AttnType, Feature, Operation
from attnplat.errors import ConfigError, UnknownNameError
from attnplat.platforms.acceptance import is_unvalidated, may_replace, with_shared_numbers
from attnplat.platforms.indexer import effective_indexer
from attnplat.platforms.tables import ByName as ByName
from attnplat.platforms.tables import Preference as Preference
from attnplat.platforms.tables import Ranked as Ranked
from attnplat.platforms.tables import Tables as Tables
from attnplat.platforms.world import World

if TYPE_CHECKING:
    from attnplat.platforms.earned import Proof
    from attnplat.platforms.nearest import Change


@dataclass(frozen=True)
class Selection:
    """What was decided for one layer in one world, and every reason.

    Attributes:
        tables, asked, world, allow_reference: what was asked: see `select`.
        config: the layer's config as judged, after the run's and the user's wishes.
        requested: the backend asked for by name, or None for automatic.
        requested_by: who asked: caller, user, environment ... ("" for automatic).
        row: the preference row that gave the order; None for a request or when none fits.
        candidates: the names judged, in rank order.
        accepted: the backends that fit, in rank order; the first is the choice.
        rejections: name -> its reasons, for the candidates that do not fit.
        parts: part -> its own Selection (an MLA layer's prefill, a sparse layer's indexer).
        unread: attention-config fields that were set and the chosen backend does not read.
        replaced: the request that an acceptance rule of another rule set dropped.
    """

    tables: Tables = field(repr=False)
    asked: LayerConfig
    world: World
    allow_reference: bool
    config: LayerConfig
    requested: str | None
    requested_by: str
    row: Preference | None
    candidates: tuple[str, ...]
    accepted: tuple[Backend, ...]
    rejections: Mapping[str, tuple[Rejection, ...]]
    parts: Mapping[str, Selection] = FrozenMap()
    unread: frozenset[str] = frozenset()
    replaced: str | None = None

    @cached_property
    def fixes(self) -> tuple[Change, ...]:
        """For a refusal, changes that would be accepted, the nearest first.

        Found when asked for: it takes many times as long as the refusal itself.
        """
        from attnplat.platforms.nearest import MOST_CHANGES, fixes

        return tuple(islice(fixes(self), MOST_CHANGES))

    @cached_property
    def advice(self) -> tuple[Change, ...]:
        """For an automatic choice, changes after which a better one would be made.

        Found when asked for, as `fixes` are.
        """
        from attnplat.platforms.advice import advice
        from attnplat.platforms.nearest import MOST_CHANGES

        return tuple(islice(advice(self), MOST_CHANGES))

    def again(
        self,
        asked: LayerConfig | None = None,
        world: World | None = None,
        *,
        allow_reference: bool | None = None,
    ) -> Selection:
        """The same question with some of it changed, decided anew."""
        return select(
            self.tables,
            self.asked if asked is None else asked,
            self.world if world is None else world,
            allow_reference=self.allow_reference if allow_reference is None else allow_reference,
        )

    @property
    def chosen(self) -> Backend | None:
        """The first accepted backend, unless a part of the layer has none."""
        complete = all(part.chosen is not None for part in self.parts.values())
        return self.accepted[0] if self.accepted and complete else None

    @property
    def ok(self) -> bool:
        """Whether the layer and every part of it can be served."""
        return self.chosen is not None

    def proof(self, backend: Backend) -> Proof:
        """How far the claims of an accepted backend have been proven for this layer's operation
        on this device: its mark, and what is behind it."""
        from attnplat.platforms.earned import earned

        config = self.config
        wants = frozenset(map(str, (config.dtype, *config.needs)))
        return earned().proof(backend, config.operation, self.world.device, wants)

    def explain(self) -> str:
        """The decision and every reason, as text."""
        from attnplat.platforms.explain import explain

        return explain(self)

    def failure(self) -> str:
        """Why no backend fits, the constraint that rules out all first, and the nearest fix."""
        from attnplat.platforms.explain import failure

        return failure(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; equal inputs give equal dicts, so two can be compared."""
        return {
            "layer": self.config.to_dict(),
            "device": self.world.device.to_dict(),
            "requested": self.requested,
            "requested_by": self.requested_by,
            "chosen": self.chosen.name if self.chosen else None,
            "mark": str(self.proof(self.chosen).mark) if self.chosen else None,
            "mark_because": self.proof(self.chosen).because if self.chosen else None,
            "because": self.row.because if self.row else None,
            "accepted": [b.name for b in self.accepted],
            "rejected": {
                name: [r.to_dict() for r in reasons] for name, reasons in self.rejections.items()
            },
            "parts": {name: part.to_dict() for name, part in self.parts.items()},
            "unread": sorted(self.unread),
            "fixes": [change.to_dict() for change in self.fixes],
            "advice": [change.to_dict() for change in self.advice],
        }


# Attention-config fields that selection itself honours, whatever backend is chosen.
SELECTION_READS = frozenset({"backend", "backend_per_kind", "use_non_causal"})
# Those that it honours for latent layers alone.
LATENT_READS = SELECTION_READS | {"mla_prefill_backend"}


def select(
    tables: Tables, config: LayerConfig, world: World, *, allow_reference: bool = False
) -> Selection:
    """Choose backends for `config` in `world` from a platform's `tables`.

    Pure: reads nothing but its arguments. `allow_reference` lets last-resort backends be
    chosen automatically where the platform's tables do not.

    Raises:
        UnknownNameError: a requested backend that this platform's operations do not know.
        ConfigError: what is asked about is no layer config, or an attention-config field is set
            that no backend usable here reads.
    """
    if not isinstance(config, LayerConfig):
        raise ConfigError(
            f"{config!r} is no layer config; give one such as MhaConfig(head_size=128)"
        )
    return _decide(tables, config, world, allow_reference)


def _decide(tables: Tables, asked: LayerConfig, world: World, allow_reference: bool) -> Selection:
    config = effective_config(asked, world)
    requested, requested_by = _requested(config, world)
    question = _Question(tables, asked, config, world, allow_reference)
    if requested is None:
        return _rank(question)
    if tables.allows("request_ignored", config, world):
        return replace(_rank(question), replaced=requested)
    selection = _rank(question, requested, requested_by)
    if selection.accepted or not may_replace(tables, selection):
        return selection
    wishes = replace(world.wishes, backend=None, backend_per_kind=(), mla_prefill_backend=None)
    automatic = _rank(question._replace(world=world.replace(wishes=wishes)))
    told = FrozenMap({**selection.rejections, **automatic.rejections})
    return replace(automatic, world=world, replaced=requested, rejections=told)


class _Question(NamedTuple):
    """What is to be decided: the tables, the layer as asked and as judged, the world."""

    tables: Tables
    asked: LayerConfig
    config: LayerConfig
    world: World
    allow_reference: bool


def _rank(question: _Question, requested: str | None = None, requested_by: str = "") -> Selection:
    tables, asked, config, world, allow_reference = question
    row = tables.row_for(config, world) if requested is None else None
    names: tuple[str, ...] = () if requested is None else (requested,)
    if row is not None:
        last_resorts = allow_reference or tables.last_resort_automatic
        names = tables.candidates(row, config, world, last_resorts)
    accepted, rejections = _judge_all(tables, names, config, world, requested)
    parts: dict[str, Selection] = {}
    if isinstance(config, MlaConfig) and not tables.allows("parts_apart", config, world):
        for part, part_config in parts_of(config):
            parts[part] = _decide(tables, part_config, world, allow_reference)
    return Selection(
        tables=tables,
        asked=asked,
        world=world,
        allow_reference=allow_reference,
        config=config,
        requested=requested,
        requested_by=requested_by,
        row=row,
        candidates=names,
        accepted=accepted,
        rejections=FrozenMap(rejections),
        parts=FrozenMap(parts),
        unread=_unread(tables, config, world, accepted[0] if accepted else None, parts.values()),
    )


def _judge_all(
    tables: Tables, names: Iterable[str], config: LayerConfig, world: World, requested: str | None
) -> tuple[tuple[Backend, ...], dict[str, tuple[Rejection, ...]]]:
    accepted: list[Backend] = []
    rejections: dict[str, tuple[Rejection, ...]] = {}
    if is_unvalidated(tables, config, world, requested):
        declared = (_declared(tables, name, config, world) for name in names)
        return tuple(backend for backend in declared if backend is not None), rejections
    terms = _terms(tables, config, world)
    for name in names:
        backend, reasons = _judge(tables, name, config, terms)
        if reasons:
            rejections[name] = reasons
        elif backend is not None:
            accepted.append(backend)
    return tuple(accepted), rejections


def effective_config(config: LayerConfig, world: World) -> LayerConfig:
    """`config` after what the run and the user's wishes change in it."""
    if isinstance(config, IndexerConfig):
        return effective_indexer(config, world)
    changes: dict[str, Any] = {}
    sources: list[tuple[str, str]] = []
    if config.block_size is None and world.run.user_block_size and config.has_kv_cache:
        changes["block_size"] = world.run.user_block_size
        sources.append(("block_size", "user"))
    non_causal = world.wishes.use_non_causal and isinstance(config, MhaConfig | MlaConfig)
    if non_causal and config.causal and config.attn_type == AttnType.DECODER:  # type: ignore[attr-defined]
        changes["causal"] = False
        sources.append(("causal", world.wishes.source_of("use_non_causal")))
    if not changes:
        return config
    return config.replace(**changes, provenance=(*config.provenance, *sources))


def parts_of(config: LayerConfig) -> Iterator[tuple[str, LayerConfig]]:
    """The parts of a layer that are chosen on their own: it is served only if they all are."""
    if isinstance(config, MlaConfig):
        yield "prefill", config.prefill()
    # A sparse model's layers that choose no keys of their own have no indexer.
    if isinstance(config, SparseMlaConfig) and config.index_topk is not None:
        yield "indexer", config.indexer()


class _Terms(NamedTuple):
    """What is the same for every backend that is asked about a layer.

    Attributes:
        world: with the numbers that another rule set's acceptance rules compare.
        cached: whether what concerns the KV cache is asked.
        wanted: the features that the layer and the run want together, sorted.
    """

    world: World
    cached: bool
    wanted: list[Feature]


def _terms(tables: Tables, config: LayerConfig, world: World) -> _Terms:
    cached = config.has_kv_cache
    if tables.accepts:
        cached = cached or tables.allows("cache_asked_of_all", config, world)
        if tables.allows("shared_capability_numbers", config, world):
            world = with_shared_numbers(world)
    return _Terms(world, cached, sorted(wanted_features(config, world, cached)))


def judge(
    tables: Tables, name: str, config: LayerConfig, world: World
) -> tuple[Backend | None, tuple[Rejection, ...]]:
    """The resolved backend of that name and every reason against it (none: it fits)."""
    return _judge(tables, name, config, _terms(tables, config, world))


def _judge(
    tables: Tables, name: str, config: LayerConfig, terms: _Terms
) -> tuple[Backend | None, tuple[Rejection, ...]]:
    world, cached, wanted = terms
    declared = tables.find(name, config.operation)
    if declared is None or name in tables.exists_for:
        declared, lacking = _under_rules(tables, name, config, world)
        if declared is None:
            return None, lacking
    backend, standing, _ = world.settle(declared)
    reasons = backend.reasons_against(config, world, cached, wanted, standing)
    if backend.loads is None and not world.device.simulated:
        takes = "its facts are known and attnplat has no adapter for it yet"
        reasons = (*reasons, Rejection(name, "adapter", "adapter", None, takes, "device"))
    return backend, reasons


def _under_rules(
    tables: Tables, name: str, config: LayerConfig, world: World
) -> tuple[Backend | None, tuple[Rejection, ...]]:
    """A backend that the rules in force may lack, or add; or why there is none."""
    condition = tables.exists_for.get(name)
    if condition is not None and not condition(config, world):
        takes = "there is no such backend for this layer under the rules in force"
        return None, (Rejection(name, "absent", "backend", name, takes, "device"),)
    declared = _declared(tables, name, config, world)
    return declared, () if declared is not None else (_foreign(tables, name, world),)


def _declared(tables: Tables, name: str, config: LayerConfig, world: World) -> Backend | None:
    """The platform's backend of that name; another's where an acceptance rule admits it."""
    backend = tables.find(name, config.operation)
    if backend is not None or tables.foreign_backend is None:
        return backend
    if not tables.allows("foreign_platform", config, world):
        return None
    return tables.foreign_backend(name, config.operation)


def _foreign(tables: Tables, name: str, world: World) -> Rejection:
    platform = tables.foreign.get(name)
    if platform is None:
        raise UnknownNameError("backend", name, {b.name for b in tables.catalog})
    takes = f"it belongs to the platform {platform}; this device is {world.device}"
    return Rejection(name, "platform", "platform", world.device.platform, takes, "device")


def _requested(config: LayerConfig, world: World) -> tuple[str | None, str]:
    wishes = world.wishes
    if not wishes.set_fields():
        return None, ""
    if config.operation == Operation.MLA_PREFILL:
        name: str | None = wishes.mla_prefill_backend
        return name, wishes.source_of("mla_prefill_backend") if name else ""
    if config.operation in (Operation.INDEXER, Operation.STATE):
        return None, ""  # no wish names their kernels; their dtype fields act instead
    backend, source = wishes.backend_for(config.kind)
    return (str(backend), source) if backend else (None, "")


def _unread(
    tables: Tables,
    config: LayerConfig,
    world: World,
    chosen: Backend | None,
    parts: Iterable[Selection],
) -> frozenset[str]:
    """Wishes that were set and nothing chosen honours.

    One that nothing usable on this device could ever honour is refused, never swallowed.
    """
    given = world.wishes.set_fields()
    if not given:
        return given
    latent = config.operation in (Operation.MLA, Operation.SPARSE_MLA, Operation.MLA_PREFILL)
    unread = given - (LATENT_READS if latent else SELECTION_READS)
    unread -= chosen.reads if chosen else frozenset()
    for part in parts:
        unread -= part.chosen.reads if part.chosen else frozenset()
    usable = [b for b in tables.catalog if b.loads is not None or world.device.simulated]
    hopeless = unread - LATENT_READS.union(*(b.reads for b in usable))
    if hopeless and not tables.allows("wish_ignored", config, world):
        name = min(hopeless)
        raise ConfigError(
            f"attention config field {name} is set to {getattr(world.wishes, name)!r} (by the "
            f"{world.wishes.source_of(name)}), and no backend usable on {world.device} reads it; "
            "leave it out"
        )
    return frozenset(unread)
