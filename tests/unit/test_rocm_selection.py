"""What AMD's devices choose, and why: switches, generations, runs, packed caches, formats."""

from __future__ import annotations

import pytest

from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import (
    BlockSparseConfig,
    IndexerConfig,
    MhaConfig,
    MlaConfig,
    MlaPrefillConfig,
    SparseMlaConfig,
    StateConfig,
)
from attnplat.config.run import RunContext
from attnplat.errors import ConfigError
from attnplat.platforms import platform_for
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.profiles import PROFILES

DENSE = MhaConfig(head_size=128, num_heads=32, num_kv_heads=8)
VISION = MhaConfig(head_size=72, attn_type="encoder_only", role="vision", kv_cache_dtype=None)
LATENT = MlaConfig(
    head_size=576, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, v_head_size=128
)
PREFILL = MlaPrefillConfig(
    head_size=192, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_size=128
)
SPARSE = SparseMlaConfig(head_size=576, index_topk=2048, model_type="deepseek_v32")
V4 = SparseMlaConfig(head_size=512, kv_cache_dtype="fp8", sinks=True, model_type="deepseek_v4")
V41 = V4.replace(model_type="deepseek_v41")
BLOCKS = BlockSparseConfig(head_size=128, model="minimax_m3", topk_blocks=16)
INDEX = IndexerConfig(head_size=128, model_type="deepseek_v32")
BLOCK_INDEX = IndexerConfig(head_size=128, model_type="minimax_m3", topk=16)


def with_switches(**on):
    full = PROFILES["rocm"]["full"]
    works = {name: found.usable for name, found in full.features.items() if found.how == "assumed"}
    switches = {name: switch.on for name, switch in full.switches.items()}
    return Inventory.assume(full.packages, works, switches | on)


def chosen(arch, config, *, packages=None, inventory=None, run=None, **wishes):
    platform = platform_for(f"rocm:{arch}", assume=packages, inventory=inventory)
    selection = platform.select(config, AttentionConfig(**wishes), run=run)
    return selection.accepted[0].name if selection.accepted else None


CHOICES = [
    # aiter, where it is on and has kernels
    ("gfx942", DENSE, "full", "ROCM_AITER_FA"),
    ("gfx950", DENSE, "full", "ROCM_AITER_FA"),
    ("gfx942", DENSE, "default", "ROCM_ATTN"),
    ("gfx942", DENSE, "minimal", "ROCM_ATTN"),
    ("gfx90a", DENSE, "full", "ROCM_ATTN"),
    ("gfx1100", DENSE, "full", "ROCM_ATTN"),
    ("gfx1201", DENSE, "full", "ROCM_AITER_UNIFIED_ATTN"),
    ("gfx1201", DENSE, "default", "ROCM_ATTN"),
    ("gfx942", DENSE.replace(head_size=96), "full", "ROCM_AITER_UNIFIED_ATTN"),
    ("gfx90a", DENSE.replace(head_size=72), "full", "TRITON_ATTN"),
    ("gfx90a", DENSE.replace(head_size=16), "full", "FLEX_ATTENTION"),
    # features
    ("gfx90a", DENSE.replace(sinks=True), "full", "TRITON_ATTN"),
    ("gfx942", DENSE.replace(sinks=True), "full", "ROCM_AITER_FA"),
    ("gfx942", DENSE.replace(logits_soft_cap=50.0), "full", "ROCM_AITER_UNIFIED_ATTN"),
    ("gfx942", DENSE.replace(mm_prefix=True), "full", "TRITON_ATTN"),
    ("gfx942", DENSE.replace(attn_type="encoder_decoder"), "full", "ROCM_AITER_UNIFIED_ATTN"),
    ("gfx90a", DENSE.replace(attn_type="encoder_decoder"), "full", "TRITON_ATTN"),
    ("gfx942", DENSE.replace(v_head_size=64), "full", "TRITON_ATTN_DIFFKV"),
    ("gfx942", DENSE.replace(position_bias=True), "full", "TORCH_SDPA"),
    # packed caches have one backend each
    ("gfx942", DENSE.replace(kv_cache_dtype="turboquant_4bit_nc"), "full", "TURBOQUANT"),
    ("gfx942", DENSE.replace(kv_cache_dtype="ultraquant_4bit"), "full", "ULTRAQUANT"),
    ("gfx1100", DENSE.replace(kv_cache_dtype="octave_k3v3", head_size=256), "full", "ROCM_OCTAVE"),
    ("gfx950", DENSE.replace(kv_cache_dtype="octave_k3v3", head_size=256), "full", None),
    ("gfx942", DENSE.replace(kv_cache_dtype="int8_per_token_head"), "full", "TRITON_ATTN"),
    # latent attention and its parts
    ("gfx942", LATENT, "full", "ROCM_AITER_MLA"),
    ("gfx942", LATENT, "default", "TRITON_MLA"),
    ("gfx1100", LATENT, "full", "TRITON_MLA"),
    ("gfx942", MlaConfig(head_size=320), "full", "TRITON_MLA"),
    ("gfx942", LATENT.replace(dtype="float32"), "full", "TORCH_SDPA"),
    ("gfx942", PREFILL, "full", "ROCM_AITER_FA"),
    ("gfx942", PREFILL, "default", "FLASH_ATTN"),
    ("gfx942", PREFILL, "minimal", "TORCH_SDPA"),
    ("gfx1250", PREFILL, "full", "FLASH_ATTN"),
    ("gfx942", SPARSE, "full", "ROCM_AITER_MLA_SPARSE"),
    ("gfx942", SPARSE.replace(sinks=True), "full", "ROCM_AITER_MLA_SPARSE"),
    ("gfx950", V4, "full", "ROCM_FLASHMLA_SPARSE_DSV4"),
    ("gfx950", V41, "full", "ROCM_FLASHMLA_SPARSE_DSV41"),
    # vision
    ("gfx950", VISION, "full", "ROCM_AITER_FA"),
    ("gfx950", VISION, "default", "FLASH_ATTN"),
    ("gfx950", VISION, "minimal", "TRITON_ATTN"),
    ("gfx1100", VISION, "full", "FLASH_ATTN"),
    ("gfx1100", VISION, "default", "TRITON_ATTN"),
    ("gfx950", VISION.replace(dtype="float32"), "full", "TRITON_ATTN"),
    # models' own, state
    ("gfx1201", BLOCKS, "minimal", "MINIMAX_M3_SPARSE"),
    ("gfx950", StateConfig(head_size=64, state_kind="gdn"), "full", "GDN_ATTN"),
]


@pytest.mark.parametrize(("arch", "config", "packages", "name"), CHOICES)
def test_the_first_choice(arch, config, packages, name):
    assert chosen(arch, config, packages=packages) == name


RUNS = [
    ("gfx90a", DENSE, {"kv_connector": True}, "TRITON_ATTN"),
    ("gfx942", DENSE, {"kv_connector": True}, "ROCM_AITER_FA"),
    ("gfx90a", DENSE, {"run_kv_cache_dtype": "turboquant_4bit_nc"}, "TRITON_ATTN"),
    ("gfx950", DENSE, {"batch_invariant": True}, "TRITON_ATTN"),
    ("gfx950", LATENT, {"dcp_size": 2}, "ROCM_AITER_MLA"),
    ("gfx950", LATENT, {"batch_invariant": True}, "TRITON_MLA"),
    ("gfx950", PREFILL, {"batch_invariant": True}, "FLASH_ATTN"),
    ("gfx950", SPARSE, {"pcp_size": 2}, "ROCM_AITER_MLA_SPARSE"),
    ("gfx950", SPARSE, {"dcp_size": 2}, None),
    ("gfx950", StateConfig(head_size=64), {"batch_invariant": True}, None),
]


@pytest.mark.parametrize(("arch", "config", "run", "name"), RUNS)
def test_what_the_run_wants_is_asked(arch, config, run, name):
    assert chosen(arch, config, run=RunContext(**run)) == name


SWITCHES = [
    ("gfx942", DENSE, {"aiter_mha": False}, "ROCM_ATTN"),
    ("gfx1201", DENSE, {"aiter_mha": False}, "ROCM_ATTN"),
    ("gfx942", LATENT, {"aiter_mla": False}, "TRITON_MLA"),
    ("gfx942", LATENT, {"aiter_mha": False}, "ROCM_AITER_MLA"),
    ("gfx942", PREFILL, {"aiter_mla": False}, "FLASH_ATTN"),
    ("gfx950", INDEX, {"aiter": False}, "TRITON_INDEXER"),
    ("gfx1100", VISION, {"flash_attn_triton": False}, "TRITON_ATTN"),
]


@pytest.mark.parametrize(("arch", "config", "switches", "name"), SWITCHES)
def test_a_switch_turns_its_own_kernels_off(arch, config, switches, name):
    assert chosen(arch, config, inventory=with_switches(**switches)) == name


def test_the_shuffled_layout_turns_the_order_of_layouts():
    plain, shuffled = (
        platform_for("rocm:gfx942", inventory=with_switches(aiter_shuffle_layout=on))
        .select(DENSE)
        .chosen.layouts
        for on in (False, True)
    )
    assert plain == ("LBHNC", "LHBNC") and shuffled == plain[::-1]


def test_a_connector_leaves_the_unified_kernels_one_layout():
    platform = platform_for("rocm:gfx1201")
    selection = platform.select(DENSE, run=RunContext(kv_connector=True))
    assert selection.chosen.layouts == ("LBHNC",)


def test_latent_decode_without_a_causal_mask_needs_gfx950_and_no_fp16():
    layer = LATENT.replace(causal=False)
    assert chosen("gfx950", layer) == "ROCM_AITER_MLA"
    assert chosen("gfx942", layer) == "TRITON_MLA"
    assert chosen("gfx950", layer.replace(dtype="float16")) == "TRITON_MLA"
    assert (
        chosen("gfx950", layer.replace(dtype="float16", kv_cache_dtype="fp8")) == "ROCM_AITER_MLA"
    )


SEGMENTED = [
    ("gfx1100", "auto", set()),
    ("gfx1201", "fp8", set()),
    ("gfx1100", "fp8", {"segmented_fp8_gfx12"}),
    ("gfx942", "auto", {"segmented_rdna_only"}),
]


@pytest.mark.parametrize(("arch", "kv_cache_dtype", "rules"), SEGMENTED)
def test_segmented_decode_is_for_consumer_devices(arch, kv_cache_dtype, rules):
    layer = DENSE.replace(kv_cache_dtype=kv_cache_dtype)
    wishes = AttentionConfig(backend="ROCM_SEGMENTED_ATTN")
    selection = platform_for(f"rocm:{arch}").select(layer, wishes)
    reasons = selection.rejections.get("ROCM_SEGMENTED_ATTN", ())
    assert {reason.subject for reason in reasons} == rules


# The sparse indexer's cache --------------------------------------------------------------------

FORMATS = [
    ("gfx950", "deepseek_v4", {}, {}, "mxfp4", "ROCM_AITER_INDEXER"),
    ("gfx942", "deepseek_v4", {}, {}, "fp8", "ROCM_AITER_INDEXER"),
    ("gfx950", "deepseek_v41", {}, {}, "fp8", "ROCM_AITER_INDEXER"),
    ("gfx950", "deepseek_v4", {"dcp_size": 2}, {}, "fp8", "ROCM_AITER_INDEXER"),
    ("gfx950", "deepseek_v4", {"pcp_size": 2}, {}, "fp8", "ROCM_AITER_INDEXER"),
    ("gfx950", "deepseek_v4", {}, {"indexer_sparse_logits": True}, "fp8", "ROCM_AITER_INDEXER"),
    ("gfx950", "deepseek_v41", {}, {"indexer_kv_dtype": "mxfp4"}, "mxfp4", "ROCM_AITER_INDEXER"),
    ("gfx950", "deepseek_v32", {}, {"indexer_kv_dtype": "mxfp4"}, "mxfp4", None),
    ("gfx942", "deepseek_v4", {}, {"indexer_kv_dtype": "mxfp4"}, "mxfp4", None),
    ("gfx950", "deepseek_v4", {"dcp_size": 2}, {"indexer_kv_dtype": "mxfp4"}, "mxfp4", None),
    ("gfx950", "deepseek_v4", {}, {"indexer_kv_dtype": "bf16"}, "bf16", "TRITON_INDEXER"),
    ("gfx950", "deepseek_v32", {}, {"indexer_kv_dtype": "nvfp4"}, "nvfp4", None),
    ("gfx1100", "deepseek_v4", {}, {}, "fp8", "TRITON_INDEXER"),
    ("gfx950", "minimax_m3", {}, {}, "bf16", "TRITON_BLOCK_INDEXER"),
    ("gfx950", "minimax_m3", {}, {"indexer_kv_dtype": "fp8"}, "fp8", "TRITON_BLOCK_INDEXER"),
]


@pytest.mark.parametrize(("arch", "model", "run", "wishes", "dtype", "name"), FORMATS)
def test_the_indexers_format_is_settled_and_read(arch, model, run, wishes, dtype, name):
    platform = platform_for(f"rocm:{arch}")
    layer = IndexerConfig(head_size=128, model_type=model)
    selection = platform.select(layer, AttentionConfig(**wishes), run=RunContext(**run))
    assert selection.config.indexer_kv_dtype == dtype
    assert (selection.chosen.name if selection.ok else None) == name


def test_mxfp4_is_the_default_only_where_aiter_is_on():
    layer = IndexerConfig(head_size=128, model_type="deepseek_v4")
    platform = platform_for("rocm:gfx950", assume="default")
    assert platform.select(layer).config.indexer_kv_dtype == "fp8"


def test_who_chose_the_indexers_format_is_told():
    platform = platform_for("rocm:gfx950")
    layer = IndexerConfig(head_size=128, model_type="deepseek_v4")
    assert platform.select(layer).config.source_of("indexer_kv_dtype") == "platform"
    other = platform.select(layer.replace(model_type="deepseek_v32"))
    assert other.config.source_of("indexer_kv_dtype") == "model"
    wished = AttentionConfig.from_dict({"indexer_kv_dtype": "bf16"}, source="user")
    assert platform.select(layer, wished).config.source_of("indexer_kv_dtype") == "user"
    own = platform.select(layer.replace(indexer_kv_dtype="fp8"), wished)
    assert own.config.indexer_kv_dtype == "fp8"


def test_a_sparse_layer_is_served_only_with_its_indexer():
    layer, wishes = V4.replace(index_topk=512), AttentionConfig(indexer_kv_dtype="mxfp4")
    selection = platform_for("rocm:gfx942").select(layer, wishes)
    assert selection.accepted and not selection.ok
    assert "indexer" in selection.failure()


def test_block_scores_of_shuffled_pages_are_aiters():
    fp8 = {"indexer_kv_dtype": "fp8"}
    shuffled = with_switches(aiter_shuffle_layout=True)
    assert chosen("gfx950", BLOCK_INDEX, inventory=shuffled, **fp8) == "ROCM_AITER_BLOCK_INDEXER"
    assert chosen("gfx950", BLOCK_INDEX, **fp8) == "TRITON_BLOCK_INDEXER"


def test_an_indexer_split_over_ranks_is_refused():
    run = RunContext(tp_size=8)
    assert chosen("gfx950", BLOCK_INDEX, run=run, minimax_m3_indexer_cp=True) is None


def test_a_wish_that_no_backend_here_reads_is_refused():
    with pytest.raises(ConfigError, match="flash_attn_version"):
        chosen("gfx942", DENSE, flash_attn_version=4)
