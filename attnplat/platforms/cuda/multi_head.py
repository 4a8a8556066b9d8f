"""NVIDIA's backends for ordinary multi-head attention: facts."""

from __future__ import annotations

from attnplat.backends.backend import Backend, GraphSupport, Package, Rule
from attnplat.backends.composite import composite
from attnplat.backends.limits import (
    AtMost,
    Between,
    Both,
    Cases,
    FeaturesWhen,
    Limit,
    MultipleOf,
    MultipleOfAny,
    OneOf,
    Required,
)
from attnplat.backends.portable.catalog import (
    BF16,
    DECODER,
    FP8_KV,
    HALF_DTYPES,
    MHA,
    PAGED,
    PLAIN_KV,
    TRITON_ATTN,
)
from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import MhaConfig
from attnplat.config.names import Feature, KVCacheDtype
from attnplat.config.run import RunContext
from attnplat.platforms.cuda import flash_attention as fa
from attnplat.platforms.cuda import flashinfer as fi
from attnplat.platforms.inventory import Inventory


def capabilities(least: tuple[int, int], most: tuple[int, int]) -> Required:
    """Devices of these compute capabilities; a device that does not tell its own is refused."""
    return Required(Between(least, most))


def majors(least: int, most: int | None = None) -> Required:
    """Devices whose compute capability has one of these major numbers."""
    return capabilities((least, 0), (least if most is None else most, 9))


AMPERE_ON = capabilities((8, 0), (12, 9))

FLASH_ATTENTION = Package(
    "flash-attn", feature="flash_attention", why="FlashAttention 2, 3 or 4 runs the layer"
)
FA3 = Package("flash-attn-3", feature="fa3", why="FlashAttention 3's Hopper kernels")
FA4 = Package("flash-attn-4", feature="fa4", why="FlashAttention 4's Blackwell kernels")
FLASHINFER_PACKAGE = Package("flashinfer-python", feature="flashinfer", why="its kernels")

# FlashAttention ----------------------------------------------------------------------------

FA_RULES = (
    Rule(
        "fa_version_forced",
        fa.forced_version_is_not_used,
        "flash_attn_version asks for a version that cannot serve this layer on this device",
        MhaConfig(head_size=128),
        {"arch": "sm80", "wishes": AttentionConfig(flash_attn_version=3)},
    ),
    Rule(
        "fa_version_missing",
        fa.no_version_runs,
        "the version of FlashAttention that this layer needs is not installed or does not run here",
        MhaConfig(head_size=128),
        {"arch": "sm80", "inventory": Inventory.assume({"flash-attn-4": "4.0.0"})},
    ),
    Rule(
        "fa_version_head_size",
        fa.head_is_beyond_version,
        "FlashAttention 2 and 3 stop at heads of 256, and 4 has no kernel for this one here",
        MhaConfig(head_size=264),
        {"arch": "sm100"},
    ),
    Rule(
        "fa_version_sinks",
        fa.sinks_are_beyond_version,
        "with sinks this layer falls to FlashAttention 2, which has none",
        MhaConfig(head_size=192, sinks=True),
        {"arch": "sm100"},
    ),
    Rule(
        "fa_version_rswa",
        fa.reset_windows_are_beyond_version,
        "windows that are reset after a prefix need FlashAttention 4, which cannot serve the layer",
        MhaConfig(head_size=128, rswa=True),
        {"arch": "sm80"},
    ),
    Rule(
        "fa_sm90_fp8_mm_prefix",
        fa.is_hopper_fp8_with_spans,
        "image spans over an fp8 cache have no kernel on Hopper",
        MhaConfig(head_size=512, kv_cache_dtype="fp8", mm_prefix=True),
        {"arch": "sm90"},
    ),
    Rule(
        "fa_fp8_kv_version",
        fa.fp8_is_beyond_version,
        "the version of FlashAttention that serves this layer does not read fp8 caches",
        MhaConfig(head_size=192, kv_cache_dtype="fp8"),
        {"arch": "sm100"},
    ),
    Rule(
        "fa_mm_prefix_needs_fa4",
        fa.spans_are_beyond_version,
        "image spans need FlashAttention 4, and another version serves this layer",
        MhaConfig(head_size=128, mm_prefix=True),
        {"arch": "sm90"},
    ),
    Rule(
        "fa4_block_size",
        fa.block_is_not_own_kernels,
        "FlashAttention 4's kernel for this head and cache takes other block sizes",
        MhaConfig(head_size=256, block_size=16),
        {"arch": "sm100"},
    ),
)

_FA_HEADS: Cases = Cases(
    (fa.fa4_usable, Both(MultipleOf(8), AtMost(512))), otherwise=Both(MultipleOf(8), AtMost(256))
)
_FA_READS = frozenset({"flash_attn_version", "flash_attn_max_num_splits_for_cuda_graph"})
_FA_GRAPHS = Cases((fa.fa_is_3_or_4, GraphSupport.ALWAYS), otherwise=GraphSupport.UNIFORM_BATCH)
_FA_ALWAYS = (
    PAGED
    | {Feature.SLIDING_WINDOW, Feature.LOGITS_SOFT_CAP, Feature.ALIBI, Feature.NON_CAUSAL}
    | {Feature.RSWA, Feature.LSE, Feature.DETERMINISTIC, Feature.BATCH_INVARIANCE, Feature.DCP}
)
_FA_SOMETIMES = {
    Feature.SINKS: fa.fa_is_3_or_4,
    Feature.PER_HEAD_QUANT_SCALES: fa.fa_is_3_or_4,
    Feature.MM_PREFIX: fa.fa4_usable,
}

FLASH_ATTN = Backend(
    name="FLASH_ATTN",
    summary="FlashAttention 2, 3 or 4 over paged caches, the version chosen per layer",
    serves=MHA,
    takes={
        "head_size": _FA_HEADS,
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": Cases(
            (fa.fa_takes_fp8, OneOf(*PLAIN_KV, *FP8_KV)), otherwise=OneOf(*PLAIN_KV)
        ),
        "block_size": MultipleOf(16),
    },
    features=FeaturesWhen(_FA_ALWAYS, _FA_SOMETIMES),
    on={"capability": AMPERE_ON},
    requires=(FLASH_ATTENTION,),
    forbids=FA_RULES,
    reads=_FA_READS,
    graphs=_FA_GRAPHS,
    preferred_block_size=16,
)

FLASH_ATTN_DIFFKV = Backend(
    name="FLASH_ATTN_DIFFKV",
    summary="FlashAttention 3 or 4 for value heads narrower than key heads",
    serves=MHA,
    takes=FLASH_ATTN.takes,
    features=FeaturesWhen(_FA_ALWAYS | {Feature.V_HEAD_SIZE}, _FA_SOMETIMES),
    on=FLASH_ATTN.on,
    requires=FLASH_ATTN.requires,
    forbids=(
        *FA_RULES,
        Rule(
            "fa_diffkv_version",
            fa.narrow_values_need_3_or_4,
            "values narrower than keys need FlashAttention 3 or 4, and version 2 serves this layer",
            MhaConfig(head_size=256, v_head_size=128),
            {"arch": "sm80"},
        ),
    ),
    reads=_FA_READS,
    graphs=_FA_GRAPHS,
    preferred_block_size=16,
)

# FlashInfer --------------------------------------------------------------------------------

FI_KV = (*PLAIN_KV, *FP8_KV, KVCacheDtype.FP8_E5M2)

FLASHINFER = Backend(
    name="FLASHINFER",
    summary="FlashInfer's planned paged kernels, and TRT-LLM's where the device has them",
    serves=MHA,
    takes={
        "head_size": OneOf(64, 128, 256, 512),
        "attn_type": DECODER,
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": Cases(
            (fi.takes_nvfp4, OneOf(*FI_KV, KVCacheDtype.NVFP4)),
            (
                fi.trtllm_serves_both,
                OneOf(*FI_KV, KVCacheDtype.NVFP4, KVCacheDtype.NVFP4_4OVER6),
            ),
            otherwise=OneOf(*FI_KV),
        ),
        "block_size": MultipleOfAny(16, 32, 64),
    },
    features=FeaturesWhen(
        {Feature.KV_CONNECTOR, Feature.SLIDING_WINDOW, Feature.LOGITS_SOFT_CAP}
        | {Feature.NON_CAUSAL, Feature.TREE_MASK, Feature.LSE, Feature.DCP},
        {
            Feature.SINKS: fi.takes_sinks,
            Feature.ADAPTIVE_VERIFICATION: fi.takes_adaptive_verification,
        },
    ),
    on={"capability": capabilities((8, 0), (12, 1))},
    requires=(FLASHINFER_PACKAGE,),
    forbids=(
        Rule(
            "fi_nvfp4_head64",
            fi.is_nvfp4_with_head_64,
            "FlashInfer's own kernels have no nvfp4 cache for heads of 64",
            MhaConfig(head_size=64, kv_cache_dtype="nvfp4"),
            {"arch": "sm90"},
        ),
        Rule(
            "fi_nvfp4_sink",
            fi.is_nvfp4_with_sinks,
            "FlashInfer's own kernels take no sinks with an nvfp4 cache",
            MhaConfig(head_size=128, kv_cache_dtype="nvfp4", sinks=True),
            {"arch": "sm90"},
        ),
        Rule(
            "layout_vs_turboquant",
            fi.layout_cannot_join_turboquant,
            "its KV layouts here (LBHNC, BLHNC) share none with TURBOQUANT's (LBNHC), which the "
            "other layers of this run use",
            MhaConfig(head_size=128),
            {"arch": "sm100", "run": RunContext(run_kv_cache_dtype="turboquant_k8v4")},
        ),
    ),
    reads=frozenset({"use_trtllm_attention", "disable_flashinfer_q_quantization"}),
    kv_layouts=Cases((fi.is_datacenter_blackwell, ("LBHNC", "BLHNC")), otherwise=None),
    graphs=Cases(
        (fi.is_context_parallel, GraphSupport.SINGLE_TOKEN_DECODE),
        (fi.is_before_hopper, GraphSupport.UNIFORM_BATCH),
        (fi.trtllm_decodes, GraphSupport.UNIFORM_BATCH),
        otherwise=GraphSupport.SINGLE_TOKEN_DECODE,
    ),
    preferred_block_size=16,
)

# Composites --------------------------------------------------------------------------------

_SPAN_HEADS: Limit = OneOf(256, 512)

TRITON_FLASH_ATTN = composite(
    "TRITON_FLASH_ATTN",
    "Triton for steps with image spans, FlashAttention for all others",
    spans=TRITON_ATTN,
    causal=FLASH_ATTN,
    takes={"head_size": _SPAN_HEADS, "attn_type": DECODER},
    on={"capability": majors(9)},
    forbids=(
        Rule(
            "via_FLASH_ATTN/fa_causal_route_version",
            fa.causal_half_is_2,
            "steps without image spans would fall to FlashAttention 2",
            MhaConfig(head_size=256, mm_prefix=True),
            {"arch": "sm90", "wishes": AttentionConfig(flash_attn_version=2)},
        ),
    ),
    preferred_block_size=16,
)

TRITON_FLASHINFER = composite(
    "TRITON_FLASHINFER",
    "Triton for steps with image spans, FlashInfer for all others",
    spans=TRITON_ATTN,
    causal=FLASHINFER,
    takes={"head_size": _SPAN_HEADS, "block_size": MultipleOf(64)},
    on={"capability": majors(10)},
    preferred_block_size=64,
)

# By name only ------------------------------------------------------------------------------

B12X = Backend(
    name="B12X",
    summary="b12x's kernels for consumer Blackwell",
    serves=MHA,
    takes={
        "head_size": OneOf(64, 128, 192, 256),
        "attn_type": DECODER,
        "dtype": OneOf(BF16),
        "kv_cache_dtype": OneOf(KVCacheDtype.AUTO, KVCacheDtype.BFLOAT16, *FP8_KV),
        "block_size": OneOf(64, 128),
    },
    features=PAGED | {Feature.SINKS, Feature.SLIDING_WINDOW},
    on={"capability": Required(OneOf((12, 0), (12, 1)))},
    requires=(Package("b12x", why="its kernels"),),
    kv_layouts=("LBHNC", "BLHNC"),
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=128,
)

HPC_ATTN = Backend(
    name="HPC_ATTN",
    summary="hpc-ops' decode and prefill for Hopper, heads of 128",
    serves=MHA,
    takes={
        "head_size": OneOf(128),
        "attn_type": DECODER,
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": OneOf(KVCacheDtype.AUTO, KVCacheDtype.BFLOAT16, KVCacheDtype.FP8_E4M3),
        "block_size": MultipleOf(64),
    },
    features=PAGED,
    on={"capability": Required(OneOf((9, 0)))},
    requires=(Package("hpc-ops", why="its kernels"),),
    kv_layouts=("LBNHC",),
    graphs=GraphSupport.SINGLE_TOKEN_DECODE,
    preferred_block_size=64,
)

MULTI_HEAD = (
    FLASH_ATTN,
    FLASH_ATTN_DIFFKV,
    FLASHINFER,
    TRITON_FLASH_ATTN,
    TRITON_FLASHINFER,
    B12X,
    HPC_ATTN,
)
