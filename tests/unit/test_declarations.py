"""What every declaration promises, tested from the declaration itself, on every platform.

A layer that fits is made from the limits; one step beyond a limit must be refused for that
and for nothing else. Nothing here knows a backend by name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

import attnplat
from attnplat.backends.backend import Backend, Package, Rule
from attnplat.config.attention import AttentionConfig
from attnplat.config.backend_names import BackendName
from attnplat.config.layer import LayerConfig, config_class
from attnplat.config.names import Feature, Operation
from attnplat.config.run import RunContext
from attnplat.errors import ConfigError
from attnplat.platforms import PLATFORMS, elsewhere, simulate, tables_for
from attnplat.platforms.cpu.arch import SIMULATED
from attnplat.platforms.cuda.arch import ARCHES as CUDA_ARCHES
from attnplat.platforms.cuda.arch import arch_name
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.planning import LAYOUT_ORDER
from attnplat.platforms.profiles import PROFILES
from attnplat.platforms.rocm.arch import ARCHES as ROCM_ARCHES
from attnplat.platforms.selection import Preference, Ranked, Tables, judge, select
from attnplat.platforms.world import World

SOURCE = Path(attnplat.__file__).parent
ARCHS = {
    "cuda": tuple(arch_name(capability) for capability in CUDA_ARCHES),
    "rocm": tuple(ROCM_ARCHES),
    "cpu": tuple(SIMULATED),
}
# What a run rather than a layer wants.
RUNS = {
    Feature.BATCH_INVARIANCE: RunContext(batch_invariant=True),
    Feature.KV_CONNECTOR: RunContext(kv_connector=True),
    Feature.DCP: RunContext(dcp_size=2),
    Feature.PCP: RunContext(pcp_size=2),
    Feature.ADAPTIVE_VERIFICATION: RunContext(adaptive_verification=True),
}
# Sizes that make a layer of an operation, where a declaration says nothing of them.
BASE: dict[Operation, dict[str, Any]] = {
    Operation.STATE: {"head_size": 64},
    Operation.INDEXER: {"head_size": 128, "indexer_kv_dtype": "fp8"},
}
FIELDS_OF_ANY = {name for operation in Operation for name in dir(config_class(operation))}
FIELDS_OF_ANY |= {f.name for o in Operation for f in fields(config_class(o))}
MOST_TRIES = 400


@dataclass(frozen=True)
class Entry:
    """One declaration of one platform."""

    platform: str
    backend: Backend

    def __str__(self) -> str:
        return f"{self.platform}:{self.backend.name}:{'+'.join(sorted(self.backend.serves))}"

    @property
    def operations(self) -> list[Operation]:
        return sorted(self.backend.serves)


ENTRIES = [Entry(p, backend) for p in PLATFORMS for backend in tables_for(p).catalog]
ROWS = [(p, row) for p in PLATFORMS for row in tables_for(p).preferences]
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=str)


@cache
def worlds(platform: str) -> tuple[World, ...]:
    """Every device of a platform, with everything installed and switched on."""
    devices = [simulate(platform, arch) for arch in ARCHS[platform]]
    return tuple(World(device, Inventory.assumed("full", device)) for device in devices)


@cache
def devices(platform: str) -> tuple[DeviceInfo, ...]:
    """One device of each sort."""
    sorts: dict[Any, DeviceInfo] = {}
    for world in worlds(platform):
        sorts.setdefault((world.device.capability, world.device.traits), world.device)
    return tuple(sorts.values())


def various_worlds(platform: str, backend: Backend) -> Iterator[World]:
    """Each sort of device, with various things installed and switched on."""
    for inventory in various_inventories(platform, backend.requires):
        yield from (World(device, inventory) for device in devices(platform))


@cache
def various_inventories(platform: str, requires: tuple[Package, ...]) -> tuple[Inventory, ...]:
    """The named profiles, what is required alone, and each switch turned."""
    full, least = (PROFILES[platform][name] for name in ("full", "minimal"))
    works = {name: found.usable for name, found in full.features.items() if found.how == "assumed"}
    on = {name: switch.on for name, switch in full.switches.items()}
    turned = (Inventory.assume(full.packages, works, {**on, n: not v}) for n, v in on.items())
    return (full, *PROFILES[platform].values(), _with(least, requires), *turned)


def stocked(backend: Backend, world: World) -> World:
    """`world` with what the backend requires added to its packages."""
    return world.replace(inventory=_with(world.inventory, backend.requires))


KNOWN_VERSIONS = {
    name: version
    for profiles in PROFILES.values()
    for inventory in profiles.values()
    for name, version in inventory.packages.items()
}
"""For a backend that knows its package in one version only."""


@cache
def _with(inventory: Inventory, requires: tuple[Package, ...]) -> Inventory:
    needed = {p.distribution: KNOWN_VERSIONS.get(p.distribution, "1.0") for p in requires}
    works = {name: found.usable for name, found in inventory.features.items()}
    works |= {p.feature: True for p in requires if p.feature is not None}
    on = dict.fromkeys(inventory.switches, True)
    return Inventory.assume({**needed, **inventory.packages}, works, on)


def home_worlds(entry: Entry) -> Iterator[World]:
    """The devices that a backend is for, with everything installed; then with what its rules'
    examples assume, since some kernels run beside one version only."""
    home = [
        world
        for world in worlds(entry.platform)
        if all(limit.accepts(getattr(world.device, n)) for n, limit in entry.backend.on.items())
    ]
    yield from (stocked(entry.backend, world) for world in home)
    assumed = [rule.example_world.get("inventory") for rule in entry.backend.forbids]
    for inventory in filter(None, assumed):
        yield from (stocked(entry.backend, world.replace(inventory=inventory)) for world in home)


def made(operation: Operation, **values: Any) -> LayerConfig | None:
    """A layer of those values; None where they contradict each other."""
    if "dims" in values:
        nope, rope, v = values.pop("dims")
        values |= {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_size": v}
        values["head_size"] = nope + rope
    try:
        return config_class(operation)(**{"head_size": 128, **BASE.get(operation, {}), **values})
    except ConfigError:
        return None


def fitting(backend: Backend, operation: Operation) -> Iterator[LayerConfig]:
    """Layers within every limit of a resolved backend, the ordinary first."""
    known = {*config_class(operation).__dataclass_fields__, "dims"}
    inside = {n: _inside(limit) for n, limit in backend.takes.items() if n in known}
    for chosen in islice(_combinations(inside), MOST_TRIES):
        config = made(operation, **{n: v for n, v in chosen.items() if v is not None})
        if config is not None:
            yield config


def _inside(limit: Any) -> list[Any]:
    return [value for value in limit.inside() if value is not None] or [None]


def _combinations(inside: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """One value of each field: the first of all, then one other at a time, then all."""
    first = {name: values[0] for name, values in inside.items()}
    yield first
    for name, values in inside.items():
        yield from ({**first, name: value} for value in values[1:])
    for values in product(*inside.values()):
        yield dict(zip(inside, values, strict=True))


FITS: dict[tuple[str, Operation], tuple[Backend, LayerConfig, World]] = {}


def first_fit(entry: Entry, operation: Operation) -> tuple[Backend, LayerConfig, World]:
    """A resolved backend, a layer that it takes, and the world in which it does."""
    key = (str(entry), operation)
    if key not in FITS:
        FITS[key] = _first_fit(entry, operation)
    return FITS[key]


def _first_fit(entry: Entry, operation: Operation) -> tuple[Backend, LayerConfig, World]:
    for world in home_worlds(entry):
        backend = entry.backend.resolve(world)
        for config in fitting(backend, operation):
            if not backend.refuse(config, world):
                return backend, config, world
    raise AssertionError(f"no layer within the limits of {entry} is taken on any device")


def refusals(backend: Backend, config: LayerConfig, world: World) -> set[tuple[str, str]]:
    """What a layer is refused for, rules apart: those are about combinations."""
    return {(r.kind, r.subject) for r in backend.refuse(config, world) if r.kind != "rule"}


# The limits ----------------------------------------------------------------------------------


@each_entry
def test_a_layer_within_all_limits_is_taken(entry):
    for operation in entry.operations:
        first_fit(entry, operation)


@each_entry
def test_one_step_beyond_a_limit_is_refused_for_that_alone(entry):
    for operation in entry.operations:
        backend, config, world = first_fit(entry, operation)
        for name, limit in backend.takes.items():
            if name not in config.__dataclass_fields__:
                continue
            for value in limit.outside():
                beyond = made(operation, **{**_values(config), name: value})
                if beyond is not None:
                    assert refusals(backend, beyond, world) == {("field", name)}, (name, value)


def _values(config: LayerConfig) -> dict[str, Any]:
    skipped = {"provenance", "label"}
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in skipped}


@each_entry
def test_a_feature_is_taken_if_and_only_if_it_is_named(entry):
    for operation in entry.operations:
        backend, config, world = first_fit(entry, operation)
        for feature in Feature:
            wanting = config.replace(also_needs=frozenset({feature}))
            refused = ("feature", feature.value) in refusals(backend, wanting, world)
            assert refused == (feature not in backend.features), feature


@each_entry
def test_what_a_run_wants_is_asked_of_layers_with_a_cache(entry):
    for operation in entry.operations:
        backend, config, world = first_fit(entry, operation)
        for feature, run in RUNS.items():
            refused = ("feature", feature.value) in refusals(
                backend, config, world.replace(run=run)
            )
            asked = config.has_kv_cache or feature == Feature.BATCH_INVARIANCE
            assert refused == (asked and feature not in backend.features), feature


@each_entry
def test_a_device_beyond_a_limit_is_refused_for_that_alone(entry):
    for operation in entry.operations:
        backend, config, _ = first_fit(entry, operation)
        for world in worlds(entry.platform):
            named = {
                ("device", name)
                for name, limit in backend.on.items()
                if not limit.accepts(getattr(world.device, name))
            }
            found = refusals(backend, config, stocked(backend, world))
            assert {r for r in found if r[0] == "device"} == named, world.device


@each_entry
def test_nothing_installed_is_refused_for_each_package(entry):
    bare = Inventory.assume({})
    for operation in entry.operations:
        backend, config, world = first_fit(entry, operation)
        wanted = {("package", p.feature or p.distribution) for p in backend.requires}
        assert refusals(backend, config, world.replace(inventory=bare)) == wanted


# The rules -----------------------------------------------------------------------------------

RULES = [(entry, rule) for entry in ENTRIES for rule in entry.backend.forbids]
each_rule = pytest.mark.parametrize(
    ("entry", "rule"), RULES, ids=[f"{entry}:{rule.code}" for entry, rule in RULES]
)


WISHES = (
    AttentionConfig(),
    *(AttentionConfig(flash_attn_version=version) for version in (2, 3, 4)),
    AttentionConfig(minimax_m3_indexer_cp=True),
    AttentionConfig(minimax_m3_msa_decode_backend="cutlass"),
    AttentionConfig(indexer_sparse_logits=True),
    AttentionConfig(use_trtllm_attention=False),
)
# The wishes that a row may ask for.
MSA_WISHES = (AttentionConfig(), AttentionConfig(minimax_m3_msa_decode_backend="cutlass"))
MANY_RANKS = RunContext(dcp_size=2, pcp_size=2)
PACKED = RunContext(run_kv_cache_dtype="turboquant_4bit_nc")


def _example_worlds(entry: Entry, rule: Rule) -> Iterator[World]:
    """The worlds that the rule's example names; all sorts of worlds where it names none."""
    given = dict(rule.example_world)
    arch, profile = given.pop("arch", None), given.pop("profile", None)
    for world in various_worlds(entry.platform, entry.backend):
        if arch is not None:
            world = world.replace(device=simulate(entry.platform, arch))
        if profile not in (None, world.inventory.profile):
            continue
        yield world.replace(**given)
        if not rule.example_world:
            yield from (world.replace(wishes=wishes) for wishes in WISHES)
            yield from (world.replace(run=run) for run in (MANY_RANKS, PACKED))


@each_rule
def test_a_rules_example_is_refused_by_that_rule(entry, rule):
    for world in _example_worlds(entry, rule):
        examples = [rule.example] if rule.example else _examples(entry.backend.resolve(world))
        if any(rule.when(config, world) for config in examples):
            return
    pytest.fail("the rule refuses its example nowhere")


def _examples(backend: Backend) -> Iterator[LayerConfig]:
    for operation in sorted(backend.serves):
        yield from islice(_wants(backend, operation), 200)


@each_rule
def test_a_rule_answers_for_every_operation(entry, rule):
    """A backend may be asked for by name for a layer that it does not serve."""
    for operation in Operation:
        config = made(operation)
        for world in worlds(entry.platform)[:2]:
            assert rule.when(config, world) in (True, False)


# Names, code, fields -------------------------------------------------------------------------


def test_names_are_those_of_the_catalogs():
    declared = {entry.backend.name for entry in ENTRIES}
    declared |= {backend.name for backend in elsewhere.CATALOG}
    assert declared == set(BackendName)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_name_stands_once_for_each_operation(platform):
    names = [(b.name, o) for b in tables_for(platform).catalog for o in b.serves]
    assert len(names) == len(set(names))


@each_entry
def test_an_adapter_is_where_the_declaration_says(entry):
    if entry.backend.loads is None:
        assert entry.backend.mark == "K"
        return
    module, _, name = entry.backend.loads.partition(":")
    path = SOURCE.parent.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


@each_entry
def test_what_is_declared_exists(entry):
    backend = entry.backend
    assert backend.summary and "\n" not in backend.summary
    assert backend.reads <= {f.name for f in fields(AttentionConfig)}
    for operation in entry.operations:
        resolved, _, _ = first_fit(entry, operation)
        assert set(resolved.takes) <= FIELDS_OF_ANY
        assert resolved.layouts is None or set(resolved.layouts) <= set(LAYOUT_ORDER)
        limit = resolved.takes.get("block_size")
        assert resolved.block_size is None or limit is None or limit.accepts(resolved.block_size)


# The rows ------------------------------------------------------------------------------------


def _row_label(platform: str, row: Preference) -> str:
    when = f":{row.when.__name__}" if row.when else ""
    return f"{platform}:{'+'.join(sorted(row.serves))}{when}"


MEMBERS = [
    (platform, row, name)
    for platform, row in ROWS
    for name in sorted(row.members)
    if name not in row.never_first
]


@pytest.mark.parametrize(
    ("platform", "row", "name"), MEMBERS, ids=[f"{_row_label(p, r)}:{n}" for p, r, n in MEMBERS]
)
def test_every_member_of_a_row_is_first_for_something(platform, row, name):
    tables = tables_for(platform)
    for operation in sorted(row.serves):
        backend = tables.find(name, operation)
        if backend is None or operation not in backend.serves:
            continue
        for world, wishes in product(various_worlds(platform, backend), MSA_WISHES):
            if all(limit.accepts(getattr(world.device, n)) for n, limit in row.on.items()):
                world = world.replace(wishes=wishes)
                wants = _wants(backend.resolve(world), operation)
                if any(_is_first(tables, row, name, config, world) for config in wants):
                    return
    pytest.fail("it is first for nothing: leave it out, or say why in never_first")


def _is_first(
    tables: Tables, row: Preference, name: str, config: LayerConfig, world: World
) -> bool:
    if tables.row_for(config, world) is not row or judge(tables, name, config, world)[1]:
        return False
    try:
        accepted = select(tables, config, world).accepted
    except ConfigError:  # a wish that nothing here reads
        return False
    return bool(accepted) and accepted[0].name == name


def _wants(backend: Backend, operation: Operation) -> Iterator[LayerConfig]:
    """Layers that a backend takes, plain and with some wants each."""
    known = config_class(operation).__dataclass_fields__
    for config in islice(fitting(backend, operation), 40):
        for values, heads in product(_VARIATIONS, ({}, {"num_heads": 8})):
            if values.keys() <= known.keys():
                varied = made(operation, **{**_values(config), **values, **heads})
                if varied is not None:
                    yield varied


_WIDE = {"head_size": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_size": 256}
_VARIATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"role": "vision", "attn_type": "encoder_only", "kv_cache_dtype": None},
    {"role": "vision", "attn_type": "encoder_only", "kv_cache_dtype": None, "head_size": 72},
    {"role": "vision", "attn_type": "encoder_only", "kv_cache_dtype": None, "head_size": 16},
    {"role": "vision", "attn_type": "encoder_only", "kv_cache_dtype": None, "dtype": "float64"},
    {"dtype": "float32"},
    {"dtype": "float64"},
    {"v_head_size": 64},
    {"v_head_size": 64, "attn_type": "encoder_only"},
    {"v_head_size": 64, "alibi": True},
    {"v_head_size": 64, "position_bias": True},
    {"position_bias": True},
    {"head_size": 16},
    {"head_size": 72},
    {"sinks": True},
    {"mm_prefix": True},
    {"causal": False},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "fp8", "sinks": True},
    {"head_size": 512},
    {"head_size": 512, "dtype": "float32"},
    _WIDE,
    {**_WIDE, "dtype": "float32"},
    {"model": "minimax_m3"},
    {"model": None},
    *({"model_type": m} for m in ("deepseek_v4", "deepseek_v41", "minimax_m3")),
    {"model_type": "deepseek_v4", "sinks": True, "sliding_window": (127, -1)},
)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_backend_stands_in_a_row_or_by_name_with_a_reason(platform):
    tables = tables_for(platform)
    by_name = {entry.name for entry in tables.by_name}
    assert all(entry.because for entry in tables.by_name)
    for backend in tables.catalog:
        rows = [row for row in tables.preferences if row.serves & backend.serves]
        ranked = any(backend.name in row.members for row in rows)
        assert ranked != (backend.name in by_name), backend.name


@pytest.mark.parametrize(("platform", "row"), ROWS, ids=[_row_label(p, r) for p, r in ROWS])
def test_a_row_names_what_is_declared_and_says_why(platform, row):
    assert row.because
    assert set(row.never_first) <= row.members
    for member in row.order:
        name = member.name if isinstance(member, Ranked) else member
        for operation in row.serves:
            backend = tables_for(platform).find(name, operation)
            assert backend is not None, name
        assert any(o in tables_for(platform).find(name, o).serves for o in row.serves)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_any_backend_may_be_asked_for_any_layer_and_answers(platform):
    """A request by name ends in a choice or in reasons, never in another exception."""
    tables, world = tables_for(platform), worlds(platform)[-1]
    for operation in Operation:
        config = made(operation)
        for name in BackendName:
            _, reasons = judge(tables, name, config, world)
            assert all(str(reason) for reason in reasons)


def test_the_last_resort_is_automatic_on_processors_only():
    automatic = {p: tables_for(p).last_resort_automatic for p in PLATFORMS}
    assert automatic == {"cuda": False, "rocm": False, "cpu": True}


def test_replacing_a_field_keeps_a_declaration_whole():
    """`Backend` derives values from its fields; a changed copy must derive them anew."""
    for entry in ENTRIES:
        copied = replace(entry.backend, summary="changed")
        for world in worlds(entry.platform)[:1]:
            assert copied.resolve(world).takes == entry.backend.resolve(world).takes
