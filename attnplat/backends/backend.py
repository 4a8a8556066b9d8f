"""A backend as a frozen value: what it serves, takes, requires and forbids, and where it is.

Nothing here runs a kernel or imports torch. `Backend.refuse(config, world)` compares a
layer's config with the declaration and answers every reason against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from attnplat.backends.limits import Anything, Cases, Limit
from attnplat.config.frozen import FrozenMap
from attnplat.config.layer import LayerConfig
from attnplat.config.names import Feature, Operation

if TYPE_CHECKING:
    from attnplat.platforms.world import World

LayerPredicate = Callable[[Any, "World"], bool]


class Mark(StrEnum):
    """How far a backend's claims have been proven. Docs and command line use these four."""

    VERIFIED = "V"
    INTERPRETED = "I"
    DECLARED = "D"
    KNOWN = "K"


MARK_MEANINGS = {
    Mark.VERIFIED: "verified by a conformance record of the device's class",
    Mark.INTERPRETED: "compiled and interpreted, not yet run on hardware",
    Mark.DECLARED: "adapter present, verified by no conformance record of the device's class",
    Mark.KNOWN: "facts known, no adapter yet",
}


class GraphSupport(IntEnum):
    """Which batches a backend may run inside a device graph, the least first."""

    NEVER = 0
    SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True)
class Package:
    """Something that must be installed, or a feature of it that must work.

    Attributes:
        distribution: the name on the package index (AMD's aiter is `amd-aiter`).
        feature: the inventory feature that must be usable. It tells by itself whether the
            package, or another that offers the same, is installed.
        why: what the backend uses it for.
    """

    distribution: str
    feature: str | None = None
    why: str = ""


@dataclass(frozen=True)
class Rule:
    """A combination of values that is refused though each value alone is fine.

    Attributes:
        code: the rule's stable name.
        when: named pure function of config and world; True refuses.
        because: completes "refused because ...".
        example: a config that the rule refuses, for the generated tests.
        example_world: the World the example needs where the platform's first device with
            everything installed does not do: `arch`, `profile`, or parts of the World by name
            (`run`, `wishes`, `device`, `inventory`).
        last: asked only of a layer that nothing else refuses, because it says more of the
            run than of the layer.
    """

    code: str
    when: LayerPredicate
    because: str
    example: LayerConfig | None = None
    example_world: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False


class Rejection(NamedTuple):
    """One reason why a backend does not fit: an object first, a sentence last.

    Attributes:
        backend: the backend's name.
        kind: operation, field, feature, device, package, rule or adapter.
        subject: what was compared: a field (`head_size`), a feature (`sinks`), a device
            attribute (`capability`), a distribution, a rule's code.
        got: the value found.
        takes: what would have been accepted: a limit, or words. `str(takes)` is for people.
        source: who set the value: caller, user, environment, model, run, default, device.
    """

    backend: str
    kind: str
    subject: str
    got: Any
    takes: Limit | str
    source: str = "caller"

    def __str__(self) -> str:
        got = _plain(self.got)
        unsaid = ("caller", "device", "default")
        by = f" (set by the {self.source})" if self.source not in unsaid else ""
        match self.kind:
            case "operation":
                text = f"the layer is {got}, it serves {self.takes}"
            case "field":
                value = "not given" if got is None else got
                text = f"config.{self.subject} is {value}{by}, takes {self.takes}"
            case "feature":
                text = f"the layer wants {self.subject}{by}, {self.takes}"
            case "device":
                value = "unknown" if got is None else got
                text = f"device.{self.subject} is {value}, takes {self.takes}"
            case _:
                text = str(self.takes)
        return f"{self.backend}: {text}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "subject": self.subject,
            "got": _plain(self.got),
            "takes": str(self.takes),
            "source": self.source,
        }


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A declared backend.

    Attributes:
        name: the canonical name (`FLASH_ATTN`).
        summary: one line: what it is and whose kernels it calls.
        serves: the operations it implements.
        takes: config field -> limit. A field not named here is not limited.
        features: the features it takes. Silence means no.
        on: device attribute (`capability`, `arch`, `traits`) -> limit.
        requires: packages and features of packages.
        forbids: rules over combinations, asked in order.
        loads: `module:Class` of its implementation, or None: the facts are known and
            there is no adapter yet, so it is explained and never chosen on a real device.
        reads: attention-config fields that its kernels honour.
        kv_layouts: KV-cache layouts, most preferred first; None is any.
        preferred_block_size: tokens per block it is fastest with, or None.
        graphs: device-graph support.
        last_resort: chosen automatically only where the platform's tables allow it.
        mark: how far its claims have been proven where no record verifies them (see
            `platforms.earned`); derived from `loads` unless given.
        half_of: names of the backends a composite routes between.
        portable: its kernels are compiled for the device when they are used, or torch's own, so
            that it is trusted with an architecture that attnplat does not know.

    `takes`, `features`, `on`, `kv_layouts`, `preferred_block_size` and `graphs` may be, or
    hold, `Cases` that depend on the world; `resolve(world)` settles them.
    """

    name: str
    summary: str
    serves: frozenset[Operation]
    takes: Mapping[str, Limit | Cases] = FrozenMap()
    features: frozenset[Feature] | Cases = frozenset()
    on: Mapping[str, Limit | Cases] = FrozenMap()
    requires: tuple[Package, ...] = ()
    forbids: tuple[Rule, ...] = ()
    loads: str | None = None
    reads: frozenset[str] = frozenset()
    kv_layouts: tuple[str, ...] | Cases | None = None
    preferred_block_size: int | Cases | None = None
    graphs: GraphSupport | Cases = GraphSupport.NEVER
    last_resort: bool = False
    mark: Mark = Mark.KNOWN
    half_of: tuple[str, ...] = ()
    portable: bool = False
    _cases: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())
    _last_rules: tuple[Rule, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "serves", frozenset(self.serves))
        object.__setattr__(self, "takes", FrozenMap(self.takes))
        object.__setattr__(self, "on", FrozenMap(self.on))
        if self.mark == Mark.KNOWN and self.loads is not None:
            object.__setattr__(self, "mark", Mark.DECLARED)
        held = dict.fromkeys(name.partition(".")[0] for name in self.case_fields())
        object.__setattr__(self, "_cases", tuple(held))
        object.__setattr__(self, "_last_rules", tuple(r for r in self.forbids if r.last))

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def limit(self, name: str) -> Limit:
        """The limit on a config field; `Anything` where none is declared (after resolve)."""
        found = self.takes.get(name, _ANYTHING)
        assert isinstance(found, Limit), f"{self.name}.takes[{name}] has not been resolved"
        return found

    @property
    def layouts(self) -> tuple[str, ...] | None:
        """`kv_layouts` (after resolve)."""
        assert not isinstance(self.kv_layouts, Cases), f"{self.name} has not been resolved"
        return self.kv_layouts

    @property
    def block_size(self) -> int | None:
        """`preferred_block_size` (after resolve)."""
        assert not isinstance(self.preferred_block_size, Cases), f"{self.name} is not resolved"
        return self.preferred_block_size

    def resolve(self, world: World) -> Backend:
        """This backend with every `Cases` settled for `world`."""
        if not self._cases:
            return self
        settled = object.__new__(type(self))
        settled.__dict__.update(self.__dict__)
        for name in self._cases:
            value = getattr(self, name)
            if isinstance(value, Cases):
                value = value.resolve(world)
            else:
                value = FrozenMap({k: _settle(v, world) for k, v in value.items()})
            object.__setattr__(settled, name, value)
        object.__setattr__(settled, "_cases", ())
        return settled

    def refuse(
        self, config: LayerConfig, world: World, *, cached: bool | None = None
    ) -> tuple[Rejection, ...]:
        """Every reason against serving `config` in `world`; empty when it fits.

        Call it on a resolved backend. `cached` says whether what concerns the KV cache is
        asked; by default it is asked of layers that have one.
        """
        cached = config.has_kv_cache if cached is None else cached
        wanted = sorted(wanted_features(config, world, cached))
        return self.reasons_against(config, world, cached, wanted, self.standing_reasons(world))

    def standing_reasons(self, world: World) -> tuple[Rejection, ...]:
        """What speaks against every layer in `world`: its device and its packages."""
        reasons: list[Rejection] = []
        if not (self.portable or world.device.known or _is_asked_for(self.name, world)):
            known = "architectures that attnplat knows, unless it is asked for by name"
            arch = world.device.arch
            reasons.append(Rejection(self.name, "device", "arch", arch, known, "device"))
        limits: Mapping[str, Any] = self.on
        for name, limit in limits.items():
            value = getattr(world.device, name)
            if not limit.accepts(value):
                reasons.append(Rejection(self.name, "device", name, value, limit, "device"))
        for package in self.requires:
            missing = missing_package(package, world)
            if missing is not None:
                subject = package.feature or package.distribution
                reasons.append(Rejection(self.name, "package", subject, None, missing, "device"))
        return tuple(reasons)

    def reasons_against(
        self,
        config: LayerConfig,
        world: World,
        cached: bool,
        wanted: Iterable[Feature],
        standing: tuple[Rejection, ...],
    ) -> tuple[Rejection, ...]:
        """As `refuse`, for who asks many backends and has settled what is the same for all.

        Args:
            wanted: `wanted_features(config, world, cached)`, sorted.
            standing: this backend's `standing_reasons(world)`.
        """
        assert not self._cases, f"{self.name} has not been resolved"
        reasons: list[Rejection] = []
        if config.operation not in self.serves:
            serves = ", ".join(sorted(self.serves))
            reasons.append(Rejection(self.name, "operation", "operation", config.operation, serves))
        limits: Any = self.takes
        for name, limit in limits.items():
            value = getattr(config, name, None)
            if not (limit.accepts(value) or (name == "kv_cache_dtype" and not cached)):
                source = config.source_of(name)
                reasons.append(Rejection(self.name, "field", name, value, limit, source))
        features: Any = self.features
        for feature in wanted:
            if feature not in features:
                source = "caller" if feature in config.needs else "run"
                takes = "which it does not take"
                reasons.append(
                    Rejection(self.name, "feature", _NAMED[feature], True, takes, source)
                )
        reasons += standing
        for rule in self.forbids:
            if not rule.last and rule.when(config, world):
                reasons.append(Rejection(self.name, "rule", rule.code, None, rule.because))
        if not reasons:
            for rule in self._last_rules:
                if rule.when(config, world):
                    reasons.append(Rejection(self.name, "rule", rule.code, None, rule.because))
        return tuple(reasons)

    def load(self) -> type[Any]:
        """The implementation's class; imports its module, and with it its kernels."""
        if self.loads is None:
            raise LookupError(f"{self.name} has no adapter")
        module, _, attribute = self.loads.partition(":")
        loaded: type[Any] = getattr(import_module(module), attribute)
        return loaded

    def case_fields(self) -> tuple[str, ...]:
        """Names of the fields whose value depends on the world."""
        own = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Cases)]
        tables = [
            f"{t}.{k}"
            for t in ("takes", "on")
            for k, v in getattr(self, t).items()
            if isinstance(v, Cases)
        ]
        return (*own, *tables)


_ANYTHING = Anything()
_NAMED = {feature: feature.value for feature in Feature}
_MLA_OPERATIONS = frozenset({Operation.MLA, Operation.SPARSE_MLA})


def wanted_features(config: LayerConfig, world: World, cached: bool) -> frozenset[Feature]:
    """What the layer and the run want together of a layer's backend.

    `cached`: whether what a run wants of the KV cache is wanted of this layer.
    """
    run = world.run_needs
    if not run:
        return config.needs
    wanted = config.needs | (run if cached else run - _CACHE_FEATURES)
    both = Feature.NON_CAUSAL in wanted and Feature.DCP in wanted
    if both and config.operation in _MLA_OPERATIONS:
        wanted |= {Feature.NON_CAUSAL_DCP}
    return wanted


# What a run wants of the KV cache; layers without one are not asked for it.
_CACHE_FEATURES = frozenset(
    {Feature.KV_CONNECTOR, Feature.DCP, Feature.PCP, Feature.ADAPTIVE_VERIFICATION}
)


def _is_asked_for(name: str, world: World) -> bool:
    """Whether the user's wishes name a backend, for any layer."""
    wishes = world.wishes
    named = (wishes.backend, wishes.mla_prefill_backend, *dict(wishes.backend_per_kind).values())
    return name in named


def missing_package(package: Package, world: World) -> str | None:
    """Why `package` is not usable in `world`, as a sentence; None when it is."""
    inventory = world.inventory
    uses = f" ({package.why})" if package.why else ""
    if package.feature is not None:
        if inventory.usable(package.feature):
            return None
        return f"needs {package.distribution}{uses}: {inventory.features[package.feature].how}"
    if package.distribution not in inventory.packages:
        return f"needs the package {package.distribution}{uses}, which is not installed"
    if package.distribution in inventory.broken:
        how = inventory.broken[package.distribution]
        return f"needs the package {package.distribution}{uses}, which is {how}"
    return None


def _settle(value: Limit | Cases, world: World) -> Any:
    return value.resolve(world) if isinstance(value, Cases) else value


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(map(str, value))
    if isinstance(value, tuple):
        return ".".join(map(str, value)) if len(value) == 2 else list(value)
    return str(value) if isinstance(value, StrEnum) else value
