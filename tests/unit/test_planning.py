"""A model's layers share one KV layout and block size, and the plan says what that cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from attnplat.backends.backend import Backend
from attnplat.backends.limits import AtLeast, MultipleOf, OneOf
from attnplat.config.layer import MhaConfig, StateConfig
from attnplat.config.names import Feature, Operation
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.planning import changes_since, plan_model
from attnplat.platforms.selection import Preference, Tables, select
from attnplat.platforms.world import World

MHA = frozenset({Operation.MHA})
WINDOW = frozenset({Feature.SLIDING_WINDOW})
WORLD = World(
    DeviceInfo(platform="cuda", arch="sm90", capability=(9, 0), simulated=True), Inventory.assume()
)
FULL = MhaConfig(head_size=512, label="full")
SLIDING = MhaConfig(head_size=256, sliding_window=(1023, -1), label="sliding")


def backend(name, *, layouts=None, blocks=None, features=WINDOW, preferred=None, **takes):
    limits = {"block_size": blocks} if blocks else {}
    return Backend(
        name=name,
        summary="for the test",
        serves=MHA,
        takes={**limits, **takes},
        features=features,
        kv_layouts=layouts,
        preferred_block_size=preferred,
        loads="attnplat.errors:AttnplatError",
    )


def plan(*backends, layers=(FULL, SLIDING)):
    row = Preference(serves=MHA, order=tuple(b.name for b in backends), because="of the test")
    tables = Tables(catalog=backends, preferences=(row,))
    return plan_model([select(tables, layer, WORLD) for layer in layers])


def names(found):
    return [layer.backend.name if layer.backend else None for layer in found.layers]


def test_layers_that_agree_keep_their_first_choices():
    found = plan(backend("FLASH_ATTN", blocks=MultipleOf(16)), backend("TRITON_ATTN"))
    assert names(found) == ["FLASH_ATTN", "FLASH_ATTN"]
    assert (found.layout, found.block_size, found.notes) == ("LBNHC", 16, ())


def test_layouts_that_share_nothing_move_the_layer_that_loses_least():
    found = plan(
        backend("FLASHINFER", layouts=("LBHNC",), head_size=OneOf(256)),
        backend("FLEX_ATTENTION", layouts=("LBNHC",)),
    )
    assert names(found) == ["FLEX_ATTENTION", "FLEX_ATTENTION"]
    assert found.layout == "LBNHC"
    assert found.notes == (
        "sliding: FLASHINFER was passed over for FLEX_ATTENTION: it takes the layouts LBHNC, "
        "and the other layers share LBNHC",
    )


def test_the_layout_that_most_backends_put_first_wins():
    found = plan(
        backend("FLASHINFER", layouts=("LBHNC", "LBNHC"), head_size=OneOf(256)),
        backend("FLEX_ATTENTION", layouts=("LBNHC", "LBHNC")),
        layers=(FULL, FULL.replace(label="again"), SLIDING),
    )
    assert found.layout == "LBNHC"


BLOCKS = [
    # limits of the two layers' only backends, the shared size
    (MultipleOf(16), MultipleOf(16), 16),
    (OneOf(64), MultipleOf(16), 64),
    (OneOf(48), MultipleOf(16), 48),
    (MultipleOf(64), OneOf(64, 128), 64),
    (MultipleOf(48), MultipleOf(32), 96),
    (OneOf(16), OneOf(64), None),
]


@pytest.mark.parametrize(("wide", "narrow", "shared"), BLOCKS)
def test_the_block_size_is_one_that_all_take(wide, narrow, shared):
    found = plan(
        backend("FLASH_ATTN", blocks=wide, head_size=AtLeast(512)),
        backend("TRITON_ATTN", blocks=narrow, head_size=OneOf(256)),
    )
    assert found.block_size == shared
    assert found.ok is (shared is not None)


def test_a_preferred_block_size_is_taken_where_all_take_it():
    found = plan(backend("B12X", blocks=MultipleOf(16), preferred=128))
    assert found.block_size == 128


def test_a_block_size_that_the_user_gave_stands():
    found = plan(
        backend("FLASH_ATTN", blocks=MultipleOf(16), preferred=128),
        layers=(FULL.replace(block_size=32), SLIDING.replace(block_size=32)),
    )
    assert found.block_size == 32


def test_a_plan_that_cannot_be_made_lists_what_each_layer_needs():
    found = plan(
        backend("FLASH_ATTN", layouts=("LBHNC",), head_size=AtLeast(512)),
        backend("TRITON_ATTN", layouts=("LBNHC",), head_size=OneOf(256)),
    )
    assert not found.ok
    assert "full: FLASH_ATTN (LBHNC" in found.explain()
    assert "sliding: TRITON_ATTN (LBNHC" in found.explain()


def test_a_layer_that_nothing_serves_fails_the_plan_with_its_reasons():
    found = plan(backend("FLASH_ATTN", head_size=OneOf(256)))
    assert not found.ok
    assert "config.head_size is 512, takes 256" in found.explain()


def test_layers_without_pages_do_not_bind_the_layout():
    row = Preference(serves=frozenset({Operation.STATE}), order=("MAMBA",), because="of the test")
    state = replace(backend("MAMBA"), serves=frozenset({Operation.STATE}))
    tables = Tables(catalog=(state,), preferences=(row,))
    found = plan_model([select(tables, StateConfig(head_size=64), WORLD)])
    assert (found.ok, found.layout, found.block_size) == (True, None, None)


def test_a_diff_says_what_moved_and_why():
    before = plan(backend("FLASH_ATTN"), backend("TRITON_ATTN")).to_dict()
    after = plan(backend("FLASH_ATTN", head_size=OneOf(256)), backend("TRITON_ATTN")).to_dict()
    stored = json.loads(json.dumps(before))
    assert changes_since(stored, after) == [
        "full: FLASH_ATTN -> TRITON_ATTN: FLASH_ATTN is refused for head_size (takes 256)"
    ]
    assert changes_since(stored, before) == []
    assert changes_since({}, before)[0] == "full: new, FLASH_ATTN"
