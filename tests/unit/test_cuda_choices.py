"""What NVIDIA's devices get for the layers that models have: tables of decisions."""

from __future__ import annotations

from typing import Any

import pytest

from attnplat.backends.composite import NOT_ROUTED
from attnplat.backends.limits import Cases
from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import (
    IndexerConfig,
    MhaConfig,
    MlaConfig,
    MlaPrefillConfig,
    SparseMlaConfig,
)
from attnplat.config.names import Feature, Operation
from attnplat.config.run import RunContext
from attnplat.platforms import platform_for
from attnplat.platforms.cuda.multi_head import TRITON_FLASH_ATTN, TRITON_FLASHINFER
from attnplat.platforms.rules import platform_under

DEVICES = ("sm75", "sm80", "sm90", "sm100", "sm120")
HEADS: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8}
WINDOW = (4095, -1)

FP16 = MhaConfig(head_size=128, dtype="float16", **HEADS)
MULTI_HEAD = {
    # layer: what sm75, sm80, sm90, sm100, sm120 use
    "float16": (FP16, "TRITON_ATTN FLASH_ATTN FLASH_ATTN FLASHINFER FLASH_ATTN"),
    "bfloat16": (
        FP16.replace(dtype="bfloat16"),
        "TORCH_SDPA FLASH_ATTN FLASH_ATTN FLASHINFER FLASH_ATTN",
    ),
    "float32": (
        FP16.replace(dtype="float32"),
        "TRITON_ATTN TRITON_ATTN TRITON_ATTN TRITON_ATTN TRITON_ATTN",
    ),
    "fp8 cache": (
        FP16.replace(kv_cache_dtype="fp8"),
        "TORCH_SDPA FLASHINFER FLASH_ATTN FLASHINFER FLASHINFER",
    ),
    "sinks and window": (
        FP16.replace(head_size=64, sinks=True, sliding_window=WINDOW),
        "TRITON_ATTN TRITON_ATTN FLASH_ATTN FLASHINFER FLASHINFER",
    ),
    "soft cap": (
        FP16.replace(head_size=256, logits_soft_cap=50.0),
        "TRITON_ATTN FLASH_ATTN FLASH_ATTN FLASHINFER FLASH_ATTN",
    ),
    "linear biases": (
        FP16.replace(alibi=True),
        "TRITON_ATTN FLASH_ATTN FLASH_ATTN FLASH_ATTN FLASH_ATTN",
    ),
    "position bias": (
        FP16.replace(position_bias=True),
        "TORCH_SDPA TORCH_SDPA TORCH_SDPA TORCH_SDPA TORCH_SDPA",
    ),
    "image spans": (
        FP16.replace(mm_prefix=True),
        "TRITON_ATTN TRITON_ATTN TRITON_ATTN FLASH_ATTN TRITON_ATTN",
    ),
    "image spans, wide heads": (
        FP16.replace(head_size=256, mm_prefix=True),
        "TRITON_ATTN TRITON_ATTN TRITON_FLASH_ATTN TRITON_FLASHINFER TRITON_ATTN",
    ),
    "non-causal": (
        FP16.replace(causal=False),
        "TRITON_ATTN FLASH_ATTN FLASH_ATTN FLASH_ATTN FLASH_ATTN",
    ),
    "windows reset after a prefix": (
        FP16.replace(rswa=True),
        "TRITON_ATTN TRITON_ATTN FLASH_ATTN FLASH_ATTN TRITON_ATTN",
    ),
    "cross attention": (
        FP16.replace(attn_type="encoder_decoder", causal=None),
        "TRITON_ATTN FLASH_ATTN FLASH_ATTN FLASH_ATTN FLASH_ATTN",
    ),
    "narrow values": (
        FP16.replace(head_size=192, v_head_size=128),
        "TRITON_ATTN_DIFFKV TRITON_ATTN_DIFFKV FLASH_ATTN_DIFFKV FLASH_ATTN_DIFFKV "
        "TRITON_ATTN_DIFFKV",
    ),
    "packed cache": (
        FP16.replace(kv_cache_dtype="turboquant_4bit_nc"),
        "TURBOQUANT TURBOQUANT TURBOQUANT TURBOQUANT TURBOQUANT",
    ),
    "vision, head size 72": (
        FP16.replace(
            head_size=72, role="vision", attn_type="encoder_only", causal=None, kv_cache_dtype=None
        ),
        "TRITON_ATTN FLASH_ATTN FLASH_ATTN FLASH_ATTN FLASH_ATTN",
    ),
    "vision, head size 100": (
        FP16.replace(
            head_size=100, role="vision", attn_type="encoder_only", causal=None, kv_cache_dtype=None
        ),
        "TRITON_ATTN TRITON_ATTN TRITON_ATTN TRITON_ATTN TRITON_ATTN",
    ),
}
DEEPSEEK: dict[str, Any] = {
    "head_size": 576,
    "num_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "v_head_size": 128,
}
LATENT = {
    "DeepSeek-V3": (
        MlaConfig(**DEEPSEEK),
        "TORCH_SDPA TRITON_MLA FLASH_ATTN_MLA FLASHINFER_MLA TRITON_MLA",
    ),
    "DeepSeek-V3, fp8 cache": (
        MlaConfig(**DEEPSEEK, kv_cache_dtype="fp8"),
        "TORCH_SDPA TORCH_SDPA FLASHMLA FLASHINFER_MLA TRITON_MLA",
    ),
    "sizes that only Triton takes": (
        MlaConfig(
            head_size=608,
            qk_nope_head_dim=96,
            qk_rope_head_dim=96,
            kv_lora_rank=512,
            v_head_size=96,
        ),
        "TORCH_SDPA TRITON_MLA TRITON_MLA TRITON_MLA TRITON_MLA",
    ),
}
SPARSE = {
    "DeepSeek-V3.2": (
        SparseMlaConfig(**DEEPSEEK, index_topk=2048),
        "FLASH_ATTN_MLA_SPARSE FLASHMLA_SPARSE TORCH_SDPA",
    ),
    "DeepSeek-V3.2, fp8 rows": (
        SparseMlaConfig(**DEEPSEEK, index_topk=2048, kv_cache_dtype="fp8"),
        "FLASHMLA_SPARSE FLASHINFER_MLA_SPARSE FLASHINFER_MLA_SPARSE_SM120",
    ),
    "DeepSeek-V3.2, 16 heads a rank": (
        SparseMlaConfig(**{**DEEPSEEK, "num_heads": 16}, index_topk=2048),
        "FLASH_ATTN_MLA_SPARSE FLASH_ATTN_MLA_SPARSE_FA4 TORCH_SDPA",
    ),
    "rows of 512 without a rotated part": (
        SparseMlaConfig(
            head_size=512, num_heads=64, qk_nope_head_dim=256, qk_rope_head_dim=0, kv_lora_rank=512
        ),
        "FLASHINFER_MLA_SPARSE_SM90 FLASHINFER_MLA_SPARSE TORCH_SDPA",
    ),
    "DeepSeek-V4": (
        SparseMlaConfig(
            head_size=512, num_heads=64, kv_cache_dtype="fp8", sinks=True, model_type="deepseek_v4"
        ),
        "FLASHMLA_SPARSE_DSV4 FLASHMLA_SPARSE_DSV4 FLASHINFER_MLA_SPARSE_DSV4",
    ),
    "DeepSeek-V4.1": (
        SparseMlaConfig(
            head_size=512, num_heads=64, kv_cache_dtype="fp8", sinks=True, model_type="deepseek_v41"
        ),
        "FLASHMLA_SPARSE_DSV41 FLASHMLA_MEGA_ATTN_DSV41 FLASHINFER_MLA_SPARSE_DSV41",
    ),
}


def cells(table: dict[str, tuple[Any, str]], devices: tuple[str, ...]) -> list[Any]:
    found = []
    for label, (config, expected) in table.items():
        for arch, name in zip(devices, expected.split(), strict=True):
            found.append(pytest.param(arch, config, name, id=f"{label}:{arch}"))
    return found


@pytest.mark.parametrize(
    ("arch", "config", "expected"),
    [
        *cells(MULTI_HEAD, DEVICES),
        *cells(LATENT, DEVICES),
        *cells(SPARSE, ("sm90", "sm100", "sm120")),
    ],
)
def test_each_layer_gets_the_first_that_fits(arch, config, expected):
    accepted = platform_for(arch).select(config).accepted
    assert (accepted[0].name if accepted else "none") == expected


@pytest.mark.parametrize(
    ("arch", "dims", "expected"),
    [
        ("sm90", (128, 64, 128), "FLASH_ATTN"),
        ("sm100", (128, 64, 128), "FLASH_ATTN"),
        ("sm100", (192, 64, 256), "TRTLLM_RAGGED"),
        ("sm90", (192, 64, 256), "FLASH_ATTN"),
        ("sm90", (64, 32, 64), "TORCH_SDPA"),
        ("sm75", (128, 64, 128), "TORCH_SDPA"),
    ],
)
def test_prefill_of_expanded_heads(arch, dims, expected):
    nope, rope, value = dims
    config = MlaPrefillConfig(
        head_size=nope + rope, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_size=value
    )
    assert platform_for(arch).select(config).chosen.name == expected


@pytest.mark.parametrize(
    ("arch", "topk", "dtype", "expected"),
    [
        ("sm100", 16, "bf16", "MSA_INDEXER"),
        ("sm100", 32, "bf16", "TRITON_BLOCK_INDEXER"),
        ("sm90", 16, "fp8", "TRITON_BLOCK_INDEXER"),
        ("sm80", 16, "bf16", "TRITON_BLOCK_INDEXER"),
        ("sm80", 16, "fp8", None),
        ("sm100", 16, "mxfp4", None),
    ],
)
def test_the_scorer_of_minimax_m3(arch, topk, dtype, expected):
    config = IndexerConfig(head_size=128, model_type="minimax_m3", topk=topk)
    chosen = platform_for(arch).select(config, AttentionConfig(indexer_kv_dtype=dtype)).chosen
    assert (chosen.name if chosen else None) == expected


def test_the_decode_kernel_of_minimax_m3_is_the_users():
    from attnplat.config.layer import BlockSparseConfig

    config = BlockSparseConfig(head_size=128, model="minimax_m3", topk_blocks=16)
    platform = platform_for("sm100")
    assert platform.select(config).chosen.name == "TRITON_MSA"
    for wish in ({"minimax_m3_msa_decode_backend": "cutlass"}, {"backend": "CUTLASS_MSA"}):
        assert platform.select(config, AttentionConfig(**wish)).chosen.name == "CUTLASS_MSA"


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (RunContext(), "FLASHINFER"),
        (RunContext(batch_invariant=True), "FLASH_ATTN"),
        (RunContext(dcp_size=2), "FLASHINFER"),
        (RunContext(pcp_size=2), None),
        (RunContext(adaptive_verification=True), "FLASHINFER"),
        (RunContext(adaptive_verification=True, dcp_size=2, model_head_size=128), "FLASH_ATTN"),
    ],
)
def test_what_the_run_wants_decides_on_blackwell(run, expected):
    chosen = platform_for("sm100").select(FP16, run=run).chosen
    assert (chosen.name if chosen else None) == expected


def test_the_users_wish_about_trtllm_acts():
    sinks = FP16.replace(head_size=64, sinks=True)
    platform = platform_for("sm90")
    assert "FLASHINFER" in [b.name for b in platform.select(sinks).accepted]
    without = platform.select(sinks, AttentionConfig(use_trtllm_attention=False))
    assert "FLASHINFER" not in [b.name for b in without.accepted]


def test_a_cache_spread_over_ranks_needs_partial_results_that_merge():
    for arch in DEVICES:
        platform = platform_for(arch)
        for declared in platform.tables.catalog:
            features = declared.resolve(platform.world()).features
            if Feature.DCP in features and Operation.INDEXER not in declared.serves:
                assert Feature.LSE in features, declared


def test_a_device_that_does_not_tell_its_capability_gets_what_runs_anywhere():
    from attnplat.platforms.cuda.arch import make_device

    platform = platform_for("sm90").replace(device=make_device(None, simulated=True))
    selection = platform.select(FP16)
    assert selection.chosen.name == "TRITON_ATTN"
    assert "device.capability is unknown, takes 8.0 to 12.9" in selection.explain()


# Composites ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("composite", "arch"), [(TRITON_FLASH_ATTN, "sm90"), (TRITON_FLASHINFER, "sm100")]
)
def test_a_composite_takes_what_both_halves_take(composite, arch):
    platform = platform_for(arch)
    world = platform.world()
    spans, causal = (platform.tables.find(name, "mha").resolve(world) for name in composite.half_of)
    whole = composite.resolve(world)
    for name in ("head_size", "dtype", "kv_cache_dtype", "block_size"):
        for value in whole.limit(name).inside():
            assert spans.limit(name).accepts(value)
            assert causal.limit(name).accepts(value)
    assert whole.features - {Feature.MM_PREFIX} <= spans.features & causal.features
    assert not whole.features & NOT_ROUTED
    assert Feature.MM_PREFIX in whole.features
    assert whole.layouts is None or set(whole.layouts) <= set(causal.layouts or whole.layouts)
    assert whole.graphs <= min(spans.graphs, causal.graphs)
    assert whole.reads == spans.reads | causal.reads


def test_the_half_without_spans_is_asked_of_the_layer_without_them():
    config = MhaConfig(head_size=256, mm_prefix=True, **HEADS)
    selection = platform_for("sm90").select(config)
    assert selection.chosen.name == "TRITON_FLASH_ATTN"
    reasons = {r.subject for r in selection.rejections["FLASH_ATTN"]}
    assert reasons == {"fa_mm_prefix_needs_fa4"}


def test_a_composite_follows_what_another_rule_set_says_of_its_halves():
    theirs = platform_under("vllm-0.33", "cuda", "sm100", "full")
    codes = {rule.code for rule in theirs.tables.find("TRITON_FLASHINFER", "mha").forbids}
    assert "via_FLASHINFER/layout_vs_turboquant" not in codes
    ours = {rule.code for rule in TRITON_FLASHINFER.forbids}
    assert ours - codes == {"via_FLASHINFER/layout_vs_turboquant"}


def test_what_depends_on_the_world_is_settled_by_halves():
    assert isinstance(TRITON_FLASH_ATTN.takes["kv_cache_dtype"], Cases)
    on_hopper = TRITON_FLASH_ATTN.resolve(platform_for("sm90").world())
    assert on_hopper.limit("kv_cache_dtype").accepts("fp8")
    before = TRITON_FLASH_ATTN.resolve(platform_for("sm80").world())
    assert not before.limit("kv_cache_dtype").accepts("fp8")
