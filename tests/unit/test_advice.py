"""Advice: what would make a better choice, decided again before it is given."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial

import pytest

from attnplat import MhaConfig, MlaConfig, SparseMlaConfig, platform_for
from attnplat.backends.backend import Backend, Package, Rule
from attnplat.backends.limits import MultipleOf, OneOf
from attnplat.config.attention import AttentionConfig
from attnplat.config.names import Feature, Operation
from attnplat.config.run import RunContext
from attnplat.errors import ConfigError
from attnplat.platforms.advice import in_words
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.distributions import DISTRIBUTIONS
from attnplat.platforms.inventory import SWITCHES, Inventory, Switch
from attnplat.platforms.nearest import Change
from attnplat.platforms.selection import Preference, Selection, Tables, select
from attnplat.platforms.world import World

LAYER = MhaConfig(head_size=128, num_heads=32, num_kv_heads=8)
LATENT = {"head_size": 576, "num_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
LATENT |= {"kv_lora_rank": 512, "v_head_size": 128}
TOWER = MhaConfig(
    head_size=72, attn_type="encoder_only", role="vision", kv_cache_dtype=None, dtype="float16"
)
USER_BLOCK = RunContext(user_block_size=24)


def wish(**fields):
    return AttentionConfig.from_dict(fields, source="command line")


def ask(device, config=LAYER, *, assume=None, run=None, attention=None):
    return platform_for(device, assume=assume).select(config, attention, run=run)


def ask_for(*args, **kwargs):
    return partial(ask, *args, **kwargs)


def said(selection):
    return [(c.kind, c.subject, c.value, c.backend) for c in selection.advice]


GIVEN = {
    # What is asked -> kind, subject, value, backend
    "a block size that only torch takes": (
        ask_for("sm90", LAYER.replace(block_size=24)),
        ("field", "block_size", 16, "FLASH_ATTN"),
    ),
    "the same from the run": (
        ask_for("sm90", run=USER_BLOCK),
        ("field", "block_size", 16, "FLASH_ATTN"),
    ),
    "a block size that a rule refuses": (
        ask_for("sm100", LAYER.replace(head_size=256, causal=False, block_size=16)),
        ("field", "block_size", 128, "FLASH_ATTN"),
    ),
    "a cache format": (
        ask_for("sm90", LAYER.replace(kv_cache_dtype="fp8_e5m2")),
        ("field", "kv_cache_dtype", "fp8", "FLASH_ATTN"),
    ),
    "kernels that were switched off": (
        ask_for("sm100", LAYER.replace(sinks=True), attention=wish(use_trtllm_attention=False)),
        ("wish", "use_trtllm_attention", None, "FLASHINFER"),
    ),
    "a version that does not run here": (
        ask_for("sm80", attention=wish(flash_attn_version=3)),
        ("wish", "flash_attn_version", None, "FLASH_ATTN"),
    ),
    "aiter on a data-centre device": (
        ask_for("gfx950", assume="default"),
        ("switch", "aiter", True, "ROCM_AITER_FA"),
    ),
    "aiter on a consumer device": (
        ask_for("gfx1201", assume="default"),
        ("switch", "aiter", True, "ROCM_AITER_UNIFIED_ATTN"),
    ),
    "a driver's own variable": (
        ask_for("gfx1100", TOWER, assume="default"),
        ("switch", "flash_attn_triton", True, "FLASH_ATTN"),
    ),
    "a package": (
        ask_for("sm90", assume="minimal"),
        ("package", "flash-attn", "installed", "FLASH_ATTN"),
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_advice_given(case):
    asked, expected = GIVEN[case]
    assert said(asked())[:1] == [expected]


SILENT = {
    "the best is chosen": ask_for("sm90"),
    "the block size fits the best": ask_for("sm90", LAYER.replace(block_size=48)),
    "aiter is on": ask_for("gfx950"),
    "aiter is not installed": ask_for("gfx950", assume="minimal"),
    "aiter has no kernels for the device": ask_for("gfx90a", assume="default"),
    "nor for this one": ask_for("gfx1100", assume="default"),
    "a request is a request": ask_for(
        "gfx950", assume="default", attention=wish(backend="TRITON_ATTN")
    ),
    "whatever was given besides": ask_for(
        "sm90", LAYER.replace(block_size=24), attention=wish(backend="TORCH_SDPA")
    ),
    "the better ones are refused for more than the block size": ask_for(
        "sm90", LAYER.replace(block_size=24, position_bias=True)
    ),
    "nothing is chosen": ask_for("sm90", LAYER.replace(dtype="float64")),
}


@pytest.mark.parametrize("case", SILENT)
def test_no_advice_where(case):
    assert SILENT[case]().advice == ()


def test_a_switch_that_helps_several_parts_is_one_piece_of_advice():
    for config in (MlaConfig(**LATENT), SparseMlaConfig(**LATENT, index_topk=2048)):
        (change,) = ask("gfx950", config, assume="default").advice
        assert (change.subject, dict(change.parts)["prefill"]) == ("aiter", "ROCM_AITER_FA")
    assert change.backend == "ROCM_AITER_MLA_SPARSE"
    assert dict(change.parts)["indexer"] == "ROCM_AITER_INDEXER"


def test_the_fewest_switches_are_named():
    platform = platform_for("gfx950")
    off = {name: Switch(False, "environment") for name in ("aiter", "aiter_mha")}
    switches = {**platform.inventory.switches, **off}
    inventory = replace(platform.inventory, switches=switches)
    (change,) = platform.replace(inventory=inventory).select(LAYER).advice
    assert change.subject == "aiter and aiter_mha"
    assert change.to_do == "set ATTNPLAT_AITER=1 and set ATTNPLAT_AITER_MHA=1"
    assert in_words(change).endswith("with aiter and aiter_mha switched off (by the environment)")


def test_advice_is_printed_and_serialised():
    selection = ask("gfx950", assume="default")
    (change,) = selection.advice
    line = (
        "set ATTNPLAT_AITER=1: ROCM_AITER_FA is then chosen; "
        "it is installed, with aiter switched off"
    )
    assert in_words(change) == line
    assert f"advice: {line}" in selection.explain()
    told = json.loads(json.dumps(selection.to_dict()))["advice"]
    assert told == [change.to_dict()]
    assert told[0]["to_do"] == "set ATTNPLAT_AITER=1"
    plan = platform_for("gfx950", assume="default").plan_model([LAYER.replace(label="layers")])
    assert f"advice: {line} (layers)" in plan.explain()


# Each piece of advice, followed ------------------------------------------------------------------


def followed(selection: Selection, change: Change) -> Selection:
    """What is decided once the advice has been followed, by the means that it names."""
    asked, world = selection.asked, selection.world
    match change.kind:
        case "field":
            asked = asked.replace(**{change.subject: change.value})
            if change.subject == "block_size" and change.value is None:
                world = world.replace(run=replace(world.run, user_block_size=None))
        case "wish":
            default = getattr(AttentionConfig(), change.subject)
            value = default if change.value is None else change.value
            world = world.replace(wishes=replace(world.wishes, **{change.subject: value}))
        case "switch":
            names = change.subject.split(" and ")
            assert all(not world.inventory.on(name) and name in SWITCHES for name in names)
            turned = {**world.inventory.switches, **{n: Switch(True, "x") for n in names}}
            world = world.replace(inventory=replace(world.inventory, switches=turned))
        case "package":
            names = change.subject.split(" and ")
            assert not any(name in world.inventory.packages for name in names)
            assert set(names) <= {d.name for d in DISTRIBUTIONS}
            packages = {**world.inventory.packages, **dict.fromkeys(names, "99")}
            usable = {n: f.usable for n, f in world.inventory.features.items() if f.usable}
            switches = {n: s.on for n, s in world.inventory.switches.items()}
            tools = {tool: tool for tool in ("nvcc", "ninja") if usable.get(tool)}
            assumed = Inventory.assume(packages, usable, switches, tools=tools)
            world = world.replace(inventory=assumed)
        case kind:
            raise AssertionError(f"{kind} is no advice")
    return select(selection.tables, asked, world, allow_reference=selection.allow_reference)


DEVICES = ("sm80", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950", "gfx1201", "cpu:amx")
PROFILES = ("all", "minimal", "default", "full_no_trtllm", "bundled")
VALUES = {
    "head_size": (64, 72, 128, 192, 256, 512),
    "dtype": ("bfloat16", "float16", "float32"),
    "kv_cache_dtype": (None, "auto", "fp8", "fp8_e5m2", "nvfp4", "int8_per_token_head"),
    "block_size": (None, None, 8, 16, 24, 64, 128),
    "sinks": (False, False, True),
    "causal": (None, None, False),
    "attn_type": ("decoder", "decoder", "encoder_only"),
}
WISHES = ({}, {}, {"use_trtllm_attention": False}, {"flash_attn_version": 3})


def some_selections(count: int):
    choose = random.Random(20261129).choice
    while count:
        device, profile = choose(DEVICES), choose(PROFILES)
        try:
            platform = platform_for(device, assume=profile)
            layer = MhaConfig(**{name: choose(values) for name, values in VALUES.items()})
            run = choose((None, None, RunContext(user_block_size=24), RunContext(dcp_size=2)))
            selection = platform.select(layer, wish(**choose(WISHES)), run=run)
        except ConfigError:
            continue  # a profile of another platform, or a wish that nothing there reads
        count -= 1
        yield selection


def test_whatever_is_advised_leads_to_what_it_says():
    given = 0
    for selection in some_selections(300):
        for change in selection.advice:
            given += 1
            new = followed(selection, change)
            assert new.ok and new.chosen.name == change.backend, (selection.explain(), change)
            names = new.candidates
            assert names.index(new.chosen.name) < names.index(selection.chosen.name)
    assert given > 50


# A better backend that nothing would help --------------------------------------------------------

MHA = frozenset({Operation.MHA})


def is_small_block_with_sinks(config, world):
    return config.sinks and config.block_size in (None, 16, 32)


def tables(first: Backend) -> Tables:
    second = Backend(
        name="TRITON_ATTN", summary="", serves=MHA, features={Feature.SINKS}, loads="x:y"
    )
    row = Preference(serves=MHA, order=(first.name, second.name), because="of the test")
    return Tables((first, second), (row,))


FIRST = Backend(
    name="FLASH_ATTN",
    summary="",
    serves=MHA,
    takes={"block_size": OneOf(16, 32)},
    features=frozenset({Feature.SINKS}),
    forbids=(Rule("small_block_with_sinks", is_small_block_with_sinks, "they do not fit"),),
    loads="x:y",
)
HERE = World(
    DeviceInfo(platform="cuda", arch="sm90", capability=(9, 0)), Inventory.assume({"torch": "2.13"})
)


def test_advice_that_does_not_hold_when_decided_again_is_not_given():
    layer = LAYER.replace(block_size=24)
    assert said(select(tables(FIRST), layer, HERE)) == [("field", "block_size", 32, "FLASH_ATTN")]
    # The block size is all that the first refuses, and no other makes it take the layer.
    with_sinks = select(tables(FIRST), layer.replace(sinks=True), HERE)
    assert [r.subject for r in with_sinks.rejections["FLASH_ATTN"]] == ["block_size"]
    assert said(with_sinks) == []


def test_a_package_that_is_not_known_or_brings_no_feature_is_not_advised():
    for package, advised in (
        (Package("triton"), True),
        (Package("no-such-package"), False),
        (Package("flash-attn", feature="engine_kernels"), False),
        (Package("flash-attn", feature="fa2"), True),
    ):
        first = replace(FIRST, requires=(package,), forbids=(), takes={"block_size": MultipleOf(1)})
        assert bool(said(select(tables(first), LAYER, HERE))) is advised
