"""The nearest changes: whatever a refusal offers would be accepted, and nothing is forgotten."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from functools import partial

import pytest

from attnplat import AttentionConfig, MhaConfig, MlaConfig, SparseMlaConfig, platform_for
from attnplat.config.layer import IndexerConfig, config_class
from attnplat.config.names import Operation
from attnplat.config.run import RunContext
from attnplat.errors import ConfigError
from attnplat.platforms import PLATFORMS, tables_for
from attnplat.platforms.nearest import CHANGEABLE, MEANING, OF_THE_MODEL, REQUESTS, WISHES
from attnplat.platforms.selection import select

LATENT = {"head_size": 576, "num_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
LATENT |= {"kv_lora_rank": 512, "v_head_size": 128}
V32 = SparseMlaConfig(**LATENT, index_topk=2048, model_type="deepseek_v32")
LAYER = MhaConfig(head_size=128, num_heads=32, num_kv_heads=8)
USER_BLOCK = RunContext(user_block_size=24)

# Every name a refusal may have --------------------------------------------------------------


# What a config says of itself rather than of its layer; features are refused by their own names.
NO_SUBJECTS = {"label", "provenance", "also_needs"}
# What is derived from a config and limited as a whole.
DERIVED = {"dims"}


def test_every_field_is_changeable_or_part_of_the_model():
    every = {f.name for o in Operation for f in fields(config_class(o))} - NO_SUBJECTS
    assert set(CHANGEABLE) | OF_THE_MODEL == every | DERIVED
    assert not set(CHANGEABLE) & OF_THE_MODEL


def test_a_refusal_names_one_of_these_fields():
    limited = {name for p in PLATFORMS for b in tables_for(p).catalog for name in b.takes}
    assert limited <= set(CHANGEABLE) | OF_THE_MODEL


def test_wishes_stand_for_fields_of_indexers():
    wishes = {f.name for f in fields(AttentionConfig)}
    assert set(WISHES) <= set(CHANGEABLE)
    assert REQUESTS | MEANING | set(WISHES.values()) <= wishes


# What is offered ----------------------------------------------------------------------------


def refused(device, config=LAYER, run=None, **wishes):
    return partial(platform_for(device).select, config, AttentionConfig(**wishes), run=run)


V32_INDEXER = IndexerConfig(head_size=128, model_type="deepseek_v32")
OFFERED = {
    "pad head_size to 128: FLASHINFER takes it": (
        refused("sm90", LAYER.replace(head_size=80), backend="FLASHINFER")
    ),
    "leave the backend open: FLASH_ATTN takes it": (
        refused("sm90", LAYER.replace(head_size=80), backend="FLASHINFER")
    ),
    "block_size 32: FLASH_ATTN takes it": (
        refused("sm90", LAYER.replace(block_size=24), backend="FLASH_ATTN")
    ),
    "leave block_size open: FLASH_ATTN takes it": (
        refused("sm90", run=USER_BLOCK, backend="FLASH_ATTN")
    ),
    "block_size 32: TURBOQUANT takes it": (
        refused("sm90", LAYER.replace(kv_cache_dtype="turboquant_k8v4", block_size=24))
    ),
    "dtype bfloat16: FLASH_ATTN takes it": refused("sm90", LAYER.replace(dtype="float64")),
    "allow_reference=True: REFERENCE takes it, slowly": (
        refused("sm90", LAYER.replace(dtype="float64"))
    ),
    # Two changes are one too many, unless the first is to ask for nothing.
    "leave the backend open, and pad head_size to 128: FLASHINFER takes it": (
        refused("sm90", LAYER.replace(head_size=80, kv_cache_dtype="nvfp4"), backend="FLASH_ATTN")
    ),
    "leave flash_attn_version open: FLASH_ATTN takes it": (
        refused("sm80", backend="FLASH_ATTN", flash_attn_version=3)
    ),
    "leave mla_prefill_backend open: TRITON_MLA takes it": (
        refused("sm80", MlaConfig(**LATENT), mla_prefill_backend="TRTLLM_RAGGED")
    ),
    # The format of an indexer's cache: of its own config, of a wish, of the model.
    "indexer_kv_dtype fp8: DEEPGEMM_INDEXER takes it": (
        refused("sm90", V32_INDEXER.replace(indexer_kv_dtype="nvfp4"))
    ),
    # Here a rule refuses what the field's limit takes.
    "indexer_kv_dtype fp8: ROCM_AITER_INDEXER takes it": (
        refused("gfx950", V32_INDEXER.replace(indexer_kv_dtype="mxfp4"))
    ),
    "indexer_kv_dtype fp8: FLASH_ATTN_MLA_SPARSE takes it": (
        refused("sm90", V32, indexer_kv_dtype="mxfp4")
    ),
    "indexer_kv_dtype bf16: TORCH_SDPA takes it": refused("sm80", V32),
    "indexer_sparse_logits False: FLASH_ATTN_MLA_SPARSE takes it": (
        refused("sm90", V32, indexer_sparse_logits=True)
    ),
}


@pytest.mark.parametrize("fix", OFFERED)
def test_fixes_offered(fix):
    selection = OFFERED[fix]()
    assert not selection.ok
    assert fix in map(str, selection.fixes)
    assert f"nearest: {fix}" in selection.failure()
    assert all(set(f.to_dict()) >= {"kind", "subject", "value"} for f in selection.fixes)


def followed(selection, fix):
    """What is decided once a fix has been followed."""
    asked, world, reference = selection.asked, selection.world, selection.allow_reference
    if fix.unasked or fix.kind == "backend":
        wishes = replace(world.wishes, backend=None, backend_per_kind={}, mla_prefill_backend=None)
        world = world.replace(wishes=wishes)
    if fix.kind == "field":
        asked = asked.replace(**{fix.subject: fix.value})
        if fix.value is None:
            world = world.replace(run=replace(world.run, user_block_size=None))
    elif fix.kind == "wish":
        value = getattr(AttentionConfig(), fix.subject) if fix.value is None else fix.value
        world = world.replace(wishes=replace(world.wishes, **{fix.subject: value}))
    reference = reference or fix.kind == "reference"
    return select(selection.tables, asked, world, allow_reference=reference)


VALUES = {
    "head_size": (16, 40, 64, 72, 128, 576),
    "dtype": ("bfloat16", "float16", "float32", "float64"),
    "kv_cache_dtype": ("auto", "fp8", "fp8_e5m2", "nvfp4", "turboquant_k8v4", "octave_k3v4"),
    "block_size": (None, 8, 16, 24, 100),
    "sinks": (False, True),
}
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "ROCM_ATTN", "TURBOQUANT", "CPU_ATTN", "FLEX_ATTENTION")
SPARSE_WISHES = (
    {"indexer_kv_dtype": "mxfp4"},
    {"indexer_kv_dtype": "nvfp4"},
    {"indexer_sparse_logits": True},
)
DEVICES = ("sm75", "sm90", "sm100", "gfx90a", "gfx950", "gfx1201", "cpu:avx2", "cpu:amx")


def some_refusals(count):
    choose = random.Random(20261129).choice
    while count:
        platform = platform_for(choose(DEVICES))
        try:
            if choose((True, False, False)):
                config, wishes = V32.replace(dtype=choose(VALUES["dtype"])), choose(SPARSE_WISHES)
            else:
                config = MhaConfig(**{name: choose(v) for name, v in VALUES.items()})
                wishes = {"backend": choose(BACKENDS)}
            selection = platform.select(config, AttentionConfig(**wishes))
        except ConfigError:
            continue  # a wish that nothing there reads
        if not selection.ok:
            count -= 1
            yield selection


def test_whatever_is_offered_would_be_accepted():
    offered = 0
    for selection in some_refusals(200):
        for fix in selection.fixes:
            offered += 1
            after = followed(selection, fix)
            assert after.chosen is not None, (selection.failure(), fix)
            assert after.chosen.name == fix.backend
    assert offered > 200


def test_an_accepted_layer_has_nothing_to_fix():
    assert platform_for("sm90").select(LAYER).fixes == ()
