"""Where the engine of the recorded decisions goes wrong on NVIDIA's devices, attnplat does not.

One test for each numbered oddity of the facts that concerns CUDA: attnplat's own outcome, and
where a declared difference reproduces the other engine, that outcome too.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import (
    BlockSparseConfig,
    IndexerConfig,
    LayerConfig,
    MhaConfig,
    MlaConfig,
    MlaPrefillConfig,
    SparseMlaConfig,
    StateConfig,
)
from attnplat.config.names import Feature, KVCacheDtype
from attnplat.config.run import RunContext
from attnplat.errors import UnknownNameError
from attnplat.platforms import platform_for
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.planning import plan_model
from attnplat.platforms.rules import platform_under
from attnplat.platforms.selection import Selection

OURS, THEIRS = "attnplat", "vllm-0.33"
HEADS: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8}
DEEPSEEK_V3: dict[str, Any] = {
    "head_size": 576,
    "num_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "v_head_size": 128,
}
V32 = SparseMlaConfig(**DEEPSEEK_V3, index_topk=2048)


def select(
    arch: str,
    config: LayerConfig,
    rules: str = OURS,
    *,
    profile: str = "full",
    run: RunContext | None = None,
    **wishes: Any,
) -> Selection:
    platform = platform_under(rules, "cuda", arch, profile)
    return platform.select(config, AttentionConfig(**wishes), run=run)


def chosen(*args: Any, **kwargs: Any) -> str | None:
    backend = select(*args, **kwargs).chosen
    return backend.name if backend else None


def subjects(selection: Selection, name: str) -> set[str]:
    return {reason.subject for reason in selection.rejections.get(name, ())}


# Selection accepts what cannot work -------------------------------------------------------------


@pytest.mark.parametrize("name", ["ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", "CPU_ATTN"])
def test_1_a_backend_of_another_vendor_is_refused(name):
    config = MhaConfig(head_size=128, **HEADS)
    ours = select("sm90", config, backend=name)
    assert subjects(ours, name) == {"platform"}
    assert str(ours.fixes[0]) == "leave the backend open: FLASH_ATTN takes it"
    assert chosen("sm90", config, THEIRS, backend=name) == name


@pytest.mark.parametrize("name", ["ROCM_FLASHMLA_SPARSE_DSV4", "XPU_MLA_SPARSE", "AMX_MLA"])
def test_1_latent_backends_of_others_are_refused_too(name):
    config = SparseMlaConfig(head_size=512, index_topk=2048)
    assert subjects(select("sm90", config, backend=name), name) == {"platform"}


def test_2_a_sparse_backend_without_its_package_is_not_chosen():
    ours = select("sm100", V32, profile="bundled", backend="FLASHINFER_MLA_SPARSE")
    assert subjects(ours, "FLASHINFER_MLA_SPARSE") == {"flashinfer"}
    theirs = select("sm100", V32, THEIRS, profile="bundled", backend="FLASHINFER_MLA_SPARSE")
    assert theirs.ok


def test_2_the_packages_of_by_name_backends_are_asked_for():
    assert subjects(select("sm90", MhaConfig(head_size=128), backend="HPC_ATTN"), "HPC_ATTN") == {
        "hpc-ops"
    }
    assert chosen("sm90", MhaConfig(head_size=128), THEIRS, backend="HPC_ATTN") == "HPC_ATTN"


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
@pytest.mark.parametrize("head_size", [264, 288, 320, 384, 448])
def test_3_heads_that_the_version_cannot_serve_go_to_triton(arch, head_size):
    config = MhaConfig(head_size=head_size, **HEADS)
    ours = select(arch, config)
    assert (ours.chosen.name, subjects(ours, "FLASH_ATTN")) == (
        "TRITON_ATTN",
        {"fa_version_head_size"},
    )
    assert chosen(arch, config, THEIRS) == "FLASH_ATTN"


def test_3_sinks_that_the_version_lacks_go_to_triton():
    config = MhaConfig(head_size=192, sinks=True, **HEADS)
    ours = select("sm100", config)
    assert (ours.chosen.name, subjects(ours, "FLASH_ATTN")) == ("TRITON_ATTN", {"fa_version_sinks"})
    assert chosen("sm100", config, THEIRS) == "FLASH_ATTN"


def test_3_hopper_serves_large_heads_with_version_4():
    assert chosen("sm90", MhaConfig(head_size=288, **HEADS)) == "FLASH_ATTN"


def test_4_triton_is_refused_what_the_device_cannot_compute():
    bf16 = MhaConfig(head_size=128, **HEADS)
    assert subjects(select("sm75", bf16), "TRITON_ATTN") == {"dtype"}
    assert chosen("sm75", bf16) == "TORCH_SDPA"
    assert chosen("sm75", bf16, THEIRS) == "TRITON_ATTN"
    fp16 = bf16.replace(dtype="float16")
    assert chosen("sm75", fp16) == "TRITON_ATTN"
    fp8 = fp16.replace(kv_cache_dtype="fp8")
    assert subjects(select("sm80", fp8), "TRITON_ATTN") == {"kv_cache_dtype"}
    assert not subjects(select("sm80", fp8, THEIRS), "TRITON_ATTN")
    assert not subjects(select("sm89", fp8), "TRITON_ATTN")


def test_5_an_ordinary_layer_is_not_given_a_latent_format():
    config = MhaConfig(head_size=128, kv_cache_dtype="nvfp4_ds_mla", **HEADS)
    assert chosen("sm100", config) is None
    assert chosen("sm100", config, THEIRS) == "FLASHINFER"
    assert chosen("sm100", config.replace(kv_cache_dtype="nvfp4")) == "FLASHINFER"


def test_7_a_model_with_its_own_backends_is_validated():
    config = SparseMlaConfig(
        head_size=512, kv_cache_dtype="fp8", num_heads=64, sinks=True, model_type="deepseek_v4"
    )
    on_hopper = select("sm90", config, backend="FLASHINFER_MLA_SPARSE_DSV4")
    assert subjects(on_hopper, "FLASHINFER_MLA_SPARSE_DSV4") == {"capability"}
    assert chosen("sm90", config, THEIRS, backend="FLASHINFER_MLA_SPARSE_DSV4") == (
        "FLASHINFER_MLA_SPARSE_DSV4"
    )
    unrelated = select("sm90", config, backend="TRITON_MLA")
    assert subjects(unrelated, "TRITON_MLA") >= {"operation"}
    assert unrelated.requested == "TRITON_MLA"
    assert chosen("sm90", config, THEIRS, backend="TRITON_MLA") == "FLASHMLA_SPARSE_DSV4"


def test_7_the_fused_attention_is_for_its_device():
    config = SparseMlaConfig(
        head_size=512, kv_cache_dtype="fp8", num_heads=16, sinks=True, model_type="deepseek_v41"
    )
    ours = select("sm90", config, backend="FLASHMLA_MEGA_ATTN_DSV41")
    assert subjects(ours, "FLASHMLA_MEGA_ATTN_DSV41") == {"capability"}
    assert select("sm90", config, THEIRS, backend="FLASHMLA_MEGA_ATTN_DSV41").ok


# Selection that leads to a start-up failure -----------------------------------------------------


def test_8_layers_beside_turboquant_get_a_layout_that_both_have():
    config = MhaConfig(head_size=128, **HEADS)
    run = RunContext(run_kv_cache_dtype="turboquant_k8v4")
    boundary = select("sm100", config, run=run)
    packed = select("sm100", config.replace(kv_cache_dtype="turboquant_k8v4"), run=run)
    assert subjects(boundary, "FLASHINFER") == {"layout_vs_turboquant"}
    plan = plan_model([boundary, packed])
    assert (plan.layers[0].backend.name, plan.layout) == ("FLASH_ATTN", "LBNHC")
    assert chosen("sm100", config, THEIRS, run=run) == "FLASHINFER"


def test_8_flexattention_beside_flashinfer_gets_another_neighbour():
    wide, odd = MhaConfig(head_size=128, **HEADS), MhaConfig(head_size=16, **HEADS)
    platform = platform_for("sm100")
    odd_only_flex = select("sm100", odd, backend="FLEX_ATTENTION")
    plan = plan_model([platform.select(wide), odd_only_flex])
    assert plan.layout == "LBNHC"
    assert plan.layers[0].backend.name != "FLASHINFER"


def test_10_decode_and_prefill_are_chosen_together():
    sizes = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "kv_lora_rank": 256, "v_head_size": 64}
    config = MlaConfig(head_size=288, num_heads=40, **sizes)
    ours = select("sm90", config)
    assert ours.ok
    assert ours.parts["prefill"].chosen.name == "TORCH_SDPA"
    assert select("sm90", config, THEIRS).parts == {}
    assert chosen("sm90", config.prefill(), THEIRS) is None


def test_11_a_sparse_latent_backend_asked_for_an_ordinary_layer_is_an_ordinary_refusal():
    selection = select("sm100", MhaConfig(head_size=128, **HEADS), backend="FLASHINFER_MLA_SPARSE")
    assert not selection.ok
    assert "the layer is mha, it serves sparse_mla" in selection.failure()


def test_12_choosing_imports_no_kernel_and_touches_no_device():
    code = (
        "import sys\n"
        "from attnplat.platforms import platform_for\n"
        "from attnplat.config.layer import MlaConfig\n"
        "assert platform_for('sm100').select(MlaConfig(head_size=576)).ok\n"
        "heavy = {'torch', 'triton', 'flashinfer', 'flash_attn'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_13_torch_is_a_backend_and_custom_is_an_unknown_name():
    assert chosen("sm90", MhaConfig(head_size=128), backend="TORCH_SDPA") == "TORCH_SDPA"
    assert not select("sm90", MhaConfig(head_size=128), THEIRS, backend="TORCH_SDPA").ok
    with pytest.raises(UnknownNameError, match="unknown backend 'CUSTOM'"):
        AttentionConfig(backend="CUSTOM")


# Dead or unreachable entries --------------------------------------------------------------------


def test_14_a_row_holds_only_what_can_be_first_on_its_device():
    latent = MlaConfig(**DEEPSEEK_V3)
    assert not {"FLASH_ATTN_MLA", "FLASHMLA"} & set(select("sm100", latent).candidates)
    assert "FLASHINFER_MLA" not in select("sm90", latent).candidates
    assert {"FLASH_ATTN_MLA", "FLASHMLA"} <= set(select("sm100", latent, THEIRS).candidates)
    assert "FLASHINFER_MLA" in select("sm90", latent, THEIRS).candidates
    with pytest.raises(UnknownNameError, match="NO_ATTENTION"):
        AttentionConfig(backend="NO_ATTENTION")


def test_14_flashmla_is_first_for_fp8_caches():
    assert chosen("sm90", MlaConfig(**DEEPSEEK_V3, kv_cache_dtype="fp8")) == "FLASHMLA"


def test_15_what_stands_behind_a_sibling_is_first_where_that_is_missing():
    latent = MlaConfig(**DEEPSEEK_V3, kv_cache_dtype="fp8")
    without_flashinfer = platform_for(
        "sm100", inventory=Inventory.assume({"triton": "3.9", "tokenspeed-mla": "2.0.3"})
    )
    assert without_flashinfer.select(latent).chosen.name == "TOKENSPEED_MLA"
    assert chosen("sm100", latent) == "FLASHINFER_MLA"
    small = MhaConfig(head_size=16, dtype="float32", **HEADS)
    assert chosen("sm90", small) == "FLEX_ATTENTION"


def test_16_compute_capability_11_gets_version_4_and_a_sparse_backend():
    sinks = MhaConfig(head_size=64, sinks=True, **HEADS)
    assert chosen("sm110", sinks) == "FLASH_ATTN"
    assert subjects(select("sm110", sinks, THEIRS), "FLASH_ATTN") == {"sinks"}
    assert chosen("sm110", V32) == "TORCH_SDPA"
    assert chosen("sm110", V32, THEIRS) is None


@pytest.mark.parametrize(
    ("arch", "config", "expected"),
    [
        ("sm100", BlockSparseConfig(head_size=128, model="minimax_m3"), "TRITON_MSA"),
        ("sm90", BlockSparseConfig(head_size=128, model="minimax_m3"), "MINIMAX_M3_SPARSE"),
        ("sm90", BlockSparseConfig(head_size=192, model="step5"), "STEP5_DSA"),
        ("sm90", BlockSparseConfig(head_size=192), "STEP5_DSA"),
    ],
)
def test_17_block_sparse_layers_have_automatic_backends(arch, config, expected):
    assert chosen(arch, config) == expected
    assert chosen(arch, config.replace(model=None), THEIRS) is None


def test_18_a_format_that_nobody_reads_is_refused_with_what_would_do():
    selection = select("sm90", MhaConfig(head_size=128, kv_cache_dtype="fp8_inc", **HEADS))
    assert not selection.ok
    assert "kv_cache_dtype rules out every candidate" in selection.failure()
    assert any(fix.subject == "kv_cache_dtype" for fix in selection.fixes)


# Inconsistencies --------------------------------------------------------------------------------


def test_19_no_cache_format_is_an_alias_of_another():
    assert len(KVCacheDtype.__members__) == len(list(KVCacheDtype))


def test_21_spellings_of_one_format_are_taken_alike():
    fp8, e4m3 = (V32.replace(kv_cache_dtype=dtype) for dtype in ("fp8", "fp8_e4m3"))
    name = "FLASHMLA_SPARSE"
    assert not subjects(select("sm90", fp8), name) | subjects(select("sm90", e4m3), name)
    assert subjects(select("sm90", e4m3, THEIRS), name) == {"kv_cache_dtype"}


def test_21_auto_is_taken_where_the_activations_dtype_is():
    name = "FLASHINFER_MLA_SPARSE_SM120"
    auto, bf16 = (V32.replace(kv_cache_dtype=dtype) for dtype in ("auto", "bfloat16"))
    assert subjects(select("sm120", auto), name) == subjects(select("sm120", bf16), name)
    assert not subjects(select("sm120", auto, THEIRS), name)
    minimax = BlockSparseConfig(head_size=128, model="minimax_m3")
    assert chosen("sm90", minimax, backend="MINIMAX_M3_SPARSE") == "MINIMAX_M3_SPARSE"
    unnamed = minimax.replace(model=None)
    theirs = select("sm90", unnamed, THEIRS, backend="MINIMAX_M3_SPARSE")
    assert subjects(theirs, "MINIMAX_M3_SPARSE") == {"kv_cache_dtype"}


@pytest.mark.parametrize(
    ("name", "arch", "taken", "refused"),
    [
        ("FLASHINFER", "sm90", (16, 48, 544), (8, 24)),
        ("TURBOQUANT", "sm90", (16, 48, 544), (8, 24)),
        ("B12X", "sm120", (64, 128), (48, 256)),
    ],
)
def test_22_a_block_size_is_what_the_declaration_says(name, arch, taken, refused):
    """Kernel pages may be cut out of larger blocks, except where a package reads its own."""
    limit = platform_for(arch).tables.find(name, "mha").limit("block_size")
    assert all(map(limit.accepts, taken))
    assert not any(map(limit.accepts, refused))


def test_23_a_broken_package_counts_as_missing_whatever_it_raises():
    broken = Inventory.assume(
        {"flashinfer-python": "0.7.2", "triton": "3.9"}, {"flashinfer": False}
    )
    selection = platform_for("sm90", inventory=broken).select(MhaConfig(head_size=128))
    assert subjects(selection, "FLASHINFER") == {"flashinfer"}


def test_24_non_causal_attention_reorders_only_the_layers_that_are_so():
    encoder = MhaConfig(head_size=64, attn_type="encoder", **HEADS)
    plain, wished = (select("sm100", encoder, use_non_causal=w) for w in (False, True))
    assert plain.row is wished.row
    decoder = MhaConfig(head_size=64, **HEADS)
    assert chosen("sm100", decoder) == "FLASHINFER"
    assert chosen("sm100", decoder, use_non_causal=True) == "FLASH_ATTN"


def test_25_each_layer_is_judged_by_its_own_head_size():
    narrow = MhaConfig(head_size=64, block_size=16, **HEADS)
    run = RunContext(model_head_size=256)
    assert not subjects(select("sm100", narrow, run=run), "FLASH_ATTN")
    assert subjects(select("sm100", narrow, THEIRS, run=run), "FLASH_ATTN") == {"block_size"}
    wide = narrow.replace(head_size=256)
    assert subjects(select("sm100", wide, run=run), "FLASH_ATTN") == {"fa4_block_size"}
    assert not subjects(select("sm100", wide.replace(block_size=128), run=run), "FLASH_ATTN")


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("sm100", "FLASHINFER_MLA"),
        ("sm100", "CUTLASS_MLA"),
        ("sm90", "FLASH_ATTN_MLA"),
        ("sm90", "FLASHMLA"),
        ("sm120", "TRITON_MLA"),
    ],
)
def test_27_prefill_context_parallelism_is_not_inherited(arch, name):
    latent, run = MlaConfig(**DEEPSEEK_V3), RunContext(pcp_size=2)
    assert subjects(select(arch, latent, run=run, backend=name), name) == {Feature.PCP}
    assert chosen(arch, latent, THEIRS, run=run, backend=name) == name


def test_28_an_explicit_vision_backend_is_checked():
    tower = MhaConfig(
        head_size=100, attn_type="encoder_only", role="vision", kv_cache_dtype=None, **HEADS
    )
    ours = select("sm90", tower, backend="FLASH_ATTN")
    assert subjects(ours, "FLASH_ATTN") == {"head_size"}
    assert chosen("sm90", tower, THEIRS, backend="FLASH_ATTN") == "FLASH_ATTN"
    assert subjects(select("sm90", tower, backend="FLASHINFER"), "FLASHINFER") >= {"attn_type"}


# Beside the numbered ones -----------------------------------------------------------------------


def test_what_an_expanded_layer_needs_is_asked_of_its_device():
    prefill = MlaPrefillConfig(
        head_size=192, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_size=128
    )
    assert chosen("sm75", prefill) == "TORCH_SDPA"
    assert chosen("sm75", prefill, THEIRS) == "FLASH_ATTN"


def test_an_index_format_is_refused_where_no_kernel_reads_it():
    config = IndexerConfig(head_size=128, model_type="deepseek_v32")
    assert not select("sm90", config, indexer_kv_dtype="mxfp4").ok
    assert chosen("sm100", config, indexer_kv_dtype="mxfp4") == "DEEPGEMM_INDEXER"
    assert chosen("sm80", config, indexer_kv_dtype="bf16") == "TRITON_INDEXER"


def test_a_recurrent_layer_has_no_batch_invariant_kernel():
    run = RunContext(batch_invariant=True)
    assert not select("sm90", StateConfig(head_size=1, state_kind="mamba2"), run=run).ok
