"""The version of FlashAttention that a layer gets: the table of steps, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import MhaConfig
from attnplat.config.run import RunContext
from attnplat.platforms import platform_for
from attnplat.platforms.cuda.departures import FA_STEPS
from attnplat.platforms.cuda.flash_attention import (
    NOTHING_KNOWN,
    STEPS,
    Ask,
    ask_of,
    is_usable,
    resolve_version,
    takes_fp8,
)
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.world import World


def world(arch: str, *, run: dict[str, Any] | None = None, forced: int | None = None) -> World:
    return platform_for(arch).world(
        AttentionConfig(flash_attn_version=forced), RunContext(**(run or {}))
    )


@pytest.mark.parametrize(
    ("arch", "usable"),
    [
        ("sm75", set()),
        ("sm80", {2}),
        ("sm89", {2}),
        ("sm90", {2, 3, 4}),
        ("sm100", {2, 4}),
        ("sm110", {2, 4}),
        ("sm120", {2}),
    ],
)
def test_which_versions_run_on_which_device(arch, usable):
    assert {v for v in (2, 3, 4) if is_usable(v, world(arch))} == usable


@pytest.mark.parametrize(
    ("arch", "default"),
    [
        ("sm75", None),
        ("sm80", 2),
        ("sm90", 3),
        ("sm100", 4),
        ("sm103", 4),
        ("sm110", 4),
        ("sm120", 2),
    ],
)
def test_the_default_version_of_a_device(arch, default):
    assert resolve_version(NOTHING_KNOWN, world(arch)) == default


STEP_TABLE = [
    # arch, ask, run, forced, version
    ("sm90", Ask(head_size=128), {}, 2, 2),
    ("sm80", Ask(head_size=128), {}, 3, None),
    ("sm100", Ask(head_size=128), {}, 3, 4),
    ("sm120", Ask(head_size=128), {}, 3, 2),
    ("sm90", Ask(head_size=128, alibi=True), {}, None, 2),
    ("sm100", Ask(head_size=128, alibi=True), {}, None, 2),
    ("sm90", Ask(head_size=264), {}, None, 4),
    ("sm90", Ask(head_size=256), {}, None, 3),
    ("sm90", Ask(head_size=192, v_head_size=128, sinks=True), {}, None, 4),
    ("sm90", Ask(head_size=192, v_head_size=128), {}, None, 3),
    ("sm90", Ask(head_size=128), {"is_diffusion": True}, None, 4),
    ("sm90", Ask(head_size=128, rswa=True), {}, None, 4),
    ("sm80", Ask(head_size=128, rswa=True), {}, None, 2),
    ("sm90", Ask(head_size=264), {"batch_invariant": True}, None, 2),
    ("sm100", Ask(head_size=128), {"batch_invariant": True}, None, 2),
    ("sm100", Ask(head_size=256), {}, None, 2),
    ("sm100", Ask(head_size=256, own_kernel=True), {}, None, 4),
    ("sm100", Ask(head_size=256, v_head_size=128, own_kernel=True), {}, None, 2),
    ("sm100", Ask(head_size=256, own_kernel=True, sinks=True), {}, None, 2),
    ("sm100", Ask(head_size=256, own_kernel=True, soft_cap=True), {}, None, 2),
    ("sm100", Ask(head_size=256, own_kernel=True), {"model_soft_cap": 50.0}, None, 2),
    ("sm100", Ask(head_size=256, own_kernel=True, quantised=True), {}, None, 2),
    ("sm100", Ask(head_size=256, own_kernel=True, block_size=64), {}, None, 2),
    ("sm100", Ask(head_size=256, own_kernel=True, block_size=256), {}, None, 4),
    ("sm100", Ask(head_size=256, own_kernel=True, spans=True), {}, None, 2),
    ("sm100", Ask(head_size=256, own_kernel=True, rswa=True), {}, None, 2),
    ("sm100", Ask(head_size=256, own_kernel=True), {"dcp_size": 2}, None, 2),
    ("sm90", Ask(head_size=256, sinks=True), {}, 4, 4),
    ("sm100", Ask(head_size=192), {}, None, 2),
    ("sm100", Ask(head_size=192, v_head_size=128), {}, None, 4),
    ("sm110", Ask(head_size=512), {}, None, 2),
]


@pytest.mark.parametrize(("arch", "ask", "run", "forced", "version"), STEP_TABLE)
def test_each_step_decides_where_it_holds(arch, ask, run, forced, version):
    assert resolve_version(ask, world(arch, run=run, forced=forced)) == version


def test_no_step_is_without_a_case():
    """Left out of the table in turn, each step changes some answer above."""
    cases = [(a, world(arch, run=r, forced=f), v) for arch, a, r, f, v in STEP_TABLE]
    for step in STEPS:
        rest = tuple(s for s in STEPS if s is not step)
        assert any(resolve_version(ask, w, rest) != version for ask, w, version in cases), (
            step.because
        )


@pytest.mark.parametrize(
    ("arch", "head_size", "expected"),
    [
        ("sm80", None, False),
        ("sm90", None, True),
        ("sm90", 128, True),
        ("sm90", 512, True),
        ("sm90", 264, False),
        ("sm100", 128, True),
        ("sm100", 192, False),
        ("sm110", 128, False),
        ("sm120", 128, False),
    ],
)
def test_which_layers_may_have_an_fp8_cache(arch, head_size, expected):
    assert takes_fp8(Ask(head_size=head_size), world(arch)) == expected


def test_the_recorded_engine_differs_on_compute_capability_11_alone():
    for arch in ("sm80", "sm90", "sm100", "sm103", "sm120"):
        for ask in (NOTHING_KNOWN, Ask(head_size=128), Ask(head_size=256, own_kernel=True)):
            assert resolve_version(ask, world(arch), FA_STEPS) == resolve_version(ask, world(arch))
    assert resolve_version(NOTHING_KNOWN, world("sm110"), FA_STEPS) == 2


def test_a_layer_asks_for_itself():
    config = MhaConfig(
        head_size=192,
        v_head_size=128,
        sinks=True,
        mm_prefix=True,
        logits_soft_cap=30.0,
        kv_cache_dtype="fp8",
        block_size=64,
    )
    assert ask_of(config) == Ask(
        head_size=192,
        v_head_size=128,
        sinks=True,
        soft_cap=True,
        spans=True,
        quantised=True,
        block_size=64,
        own_kernel=True,
    )


@pytest.mark.parametrize("packages", [{"flash-attn-4": "4.0.0"}, {"fa3-fwd": "0.0.3"}])
def test_a_version_that_is_not_installed_is_no_version(packages):
    platform = platform_for("sm80", inventory=Inventory.assume(packages))
    selection = platform.select(MhaConfig(head_size=128), AttentionConfig(backend="FLASH_ATTN"))
    assert "the version of FlashAttention that this layer needs" in selection.failure()


def test_a_forced_version_is_honoured_or_refused():
    config = MhaConfig(head_size=128)
    refused = platform_for("sm100").select(
        config, AttentionConfig(backend="FLASH_ATTN", flash_attn_version=3)
    )
    assert "flash_attn_version asks for a version that cannot serve" in refused.failure()
    honoured = platform_for("sm90").select(
        config, AttentionConfig(backend="FLASH_ATTN", flash_attn_version=4)
    )
    assert honoured.ok
