"""What the ROCM platform knows of each backend: facts.

Devices are told by traits (`cdna4`, `rdna3`), never by comparing gfx digits.
"""

from __future__ import annotations

from attnplat.backends.backend import Backend, GraphSupport, Package
from attnplat.backends.limits import (
    AtLeast,
    AtMost,
    Both,
    Cases,
    Either,
    FeaturesWhen,
    Includes,
    MultipleOf,
    MultipleOfAny,
    OneOf,
    Required,
)
from attnplat.backends.portable.catalog import (
    BF16,
    DECODER,
    FP8_KV,
    FP16,
    FP32,
    HALF_DTYPES,
    INDEXER,
    MHA,
    MLA,
    MLA_PREFILL,
    PAGED,
    PLAIN_KV,
    PORTABLE,
    PORTABLE_GPU,
    SPARSE_MLA,
    TRITON,
)
from attnplat.config.names import AttnType, Feature, KVCacheDtype
from attnplat.platforms.rocm import rules

FP8_KV_AND_E5M2 = (*FP8_KV, KVCacheDtype.FP8_E5M2)
OCTAVE_KV = (
    KVCacheDtype.OCTAVE_K3V4,
    KVCacheDtype.OCTAVE_K3V3,
    KVCacheDtype.OCTAVE_K3V3_COMPACT,
)

CDNA3_OR_LATER = Either(Includes("cdna3"), Includes("cdna4"), Includes("cdna5"))
MI3XX = Includes("mi3xx")

AITER = Package("amd-aiter", feature="aiter", why="its kernels")
FLASH_ATTN_PACKAGE = Package("flash-attn", why="its AMD kernels")

# Multi-head attention ------------------------------------------------------------------------

_PAGED_LAYOUTS = ("LHBNC", "LBHNC")

ROCM_ATTN = Backend(
    name="ROCM_ATTN",
    summary="HIP paged decode with a Triton prefill; keys split into lanes of 16 bytes",
    serves=MHA,
    takes={
        "head_size": OneOf(32, 64, 80, 96, 128, 160, 192, 224, 256),
        "attn_type": OneOf(AttnType.DECODER, AttnType.ENCODER, AttnType.ENCODER_ONLY),
        "dtype": OneOf(FP16, BF16, FP32),
        "kv_cache_dtype": OneOf(*PLAIN_KV, *FP8_KV_AND_E5M2),
        "block_size": MultipleOf(16),
    },
    # Its pages are no plain [block, token] rows, so no connector may move them.
    features=frozenset(
        {
            Feature.SLIDING_WINDOW,
            Feature.ALIBI,
            Feature.NON_CAUSAL,
            Feature.ADAPTIVE_VERIFICATION,
        }
    ),
    requires=(TRITON,),
    forbids=rules.ONE_LAYOUT,
    kv_layouts=_PAGED_LAYOUTS,
    preferred_block_size=16,
    graphs=GraphSupport.ALWAYS,
)

ROCM_SEGMENTED_ATTN = Backend(
    name="ROCM_SEGMENTED_ATTN",
    summary="HIP paged decode in segments of the context, for RDNA",
    serves=MHA,
    takes={
        "head_size": OneOf(64, 128, 256),
        "attn_type": DECODER,
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": OneOf(*PLAIN_KV, *FP8_KV),
        "block_size": MultipleOf(16),
    },
    features=frozenset(
        {
            Feature.SLIDING_WINDOW,
            Feature.SINKS,
            Feature.NON_CAUSAL,
            Feature.ADAPTIVE_VERIFICATION,
        }
    ),
    requires=(TRITON,),
    forbids=(rules.SEGMENTED_RDNA_ONLY, rules.SEGMENTED_FP8_GFX12, *rules.ONE_LAYOUT),
    kv_layouts=_PAGED_LAYOUTS,
    preferred_block_size=16,
    graphs=GraphSupport.ALWAYS,
)

ROCM_AITER_FA = Backend(
    name="ROCM_AITER_FA",
    summary="aiter's assembly decode and Composable-Kernel prefill",
    serves=MHA,
    takes={
        "head_size": Both(MultipleOf(8), AtMost(256)),
        "attn_type": OneOf(AttnType.DECODER, AttnType.ENCODER, AttnType.ENCODER_ONLY),
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": OneOf(*PLAIN_KV, *FP8_KV_AND_E5M2),
        "block_size": MultipleOfAny(16, 32),
    },
    features=PAGED
    | {Feature.SLIDING_WINDOW, Feature.SINKS, Feature.ALIBI, Feature.NON_CAUSAL}
    | {Feature.V_HEAD_SIZE},
    on={"traits": CDNA3_OR_LATER},
    requires=(AITER,),
    forbids=(rules.PAGED_HEAD_SIZE, rules.PAGED_VALUE_SIZE, *rules.ONE_LAYOUT),
    kv_layouts=Cases((rules.shuffles_pages, ("LHBNC", "LBHNC")), otherwise=("LBHNC", "LHBNC")),
    preferred_block_size=16,
    graphs=GraphSupport.UNIFORM_BATCH,
)

ROCM_AITER_UNIFIED_ATTN = Backend(
    name="ROCM_AITER_UNIFIED_ATTN",
    summary="aiter's Triton unified paged attention",
    serves=MHA,
    takes={
        "head_size": AtLeast(32),
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": OneOf(*PLAIN_KV, *FP8_KV_AND_E5M2),
        "block_size": MultipleOf(16),
    },
    features=PAGED
    | {Feature.SLIDING_WINDOW, Feature.SINKS, Feature.ALIBI, Feature.LOGITS_SOFT_CAP},
    on={"traits": Either(*CDNA3_OR_LATER.limits, Includes("rdna4"))},
    requires=(AITER, TRITON),
    forbids=rules.ONE_LAYOUT,
    kv_layouts=Cases((rules.uses_kv_connector, ("LBHNC",)), otherwise=("LBHNC", "LHBNC")),
    preferred_block_size=64,
    graphs=GraphSupport.ALWAYS,
)

FLASH_ATTN = Backend(
    name="FLASH_ATTN",
    summary="the flash-attn package: Composable Kernels on CDNA, Triton on RDNA",
    serves=MHA,
    takes={
        "head_size": Both(MultipleOf(8), AtMost(256)),
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": OneOf(*PLAIN_KV),
        "block_size": MultipleOf(16),
    },
    features=PAGED
    | {Feature.SLIDING_WINDOW, Feature.ALIBI, Feature.LOGITS_SOFT_CAP, Feature.NON_CAUSAL}
    | {Feature.LSE, Feature.DCP, Feature.DETERMINISTIC, Feature.BATCH_INVARIANCE},
    requires=(FLASH_ATTN_PACKAGE,),
    forbids=(rules.FLASH_ATTN_FP8, rules.FLASH_ATTN_IMAGE_SPANS, rules.FLASH_ATTN_RDNA),
    preferred_block_size=16,
    graphs=GraphSupport.UNIFORM_BATCH,
)

ROCM_OCTAVE = Backend(
    name="ROCM_OCTAVE",
    summary="Triton and HIP decode over 3 and 4-bit codes of rotated keys and values",
    serves=MHA,
    takes={
        "head_size": OneOf(256),
        "attn_type": DECODER,
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": OneOf(*OCTAVE_KV),
        "block_size": MultipleOf(16),
    },
    features=PAGED,
    on={"traits": Either(Includes("rdna3"), Includes("cdna3"))},
    requires=(TRITON,),
    kv_layouts=Cases((rules.is_cdna3, ("LBHNC",)), otherwise=("LBHNC", "LBNHC")),
    preferred_block_size=16,
    graphs=GraphSupport.UNIFORM_BATCH,
)

ULTRAQUANT = Backend(
    name="ULTRAQUANT",
    summary="Triton or FlyDSL decode over FP4 codes that share an exponent per 32",
    serves=MHA,
    takes={
        "attn_type": DECODER,
        "dtype": OneOf(BF16),
        "kv_cache_dtype": Required(OneOf(KVCacheDtype.ULTRAQUANT_4BIT)),
        "block_size": MultipleOfAny(16, 32, 64, 128),
    },
    features=PAGED,
    requires=(TRITON,),
    kv_layouts=("LBNHC",),
    preferred_block_size=64,
    graphs=GraphSupport.UNIFORM_BATCH,
)

# Latent attention ----------------------------------------------------------------------------

_LATENT = {
    "head_size": OneOf(576),
    "attn_type": DECODER,
    "dtype": HALF_DTYPES,
    "kv_cache_dtype": OneOf(*PLAIN_KV, *FP8_KV_AND_E5M2),
}
_LATENT_FEATURES = FeaturesWhen(
    PAGED | {Feature.DCP, Feature.NON_CAUSAL_DCP, Feature.LSE},
    {Feature.NON_CAUSAL: rules.decodes_latent_without_causality},
)

ROCM_AITER_MLA = Backend(
    name="ROCM_AITER_MLA",
    summary="aiter's assembly decode of absorbed latent attention",
    serves=MLA,
    takes=_LATENT,
    features=_LATENT_FEATURES,
    on={"traits": CDNA3_OR_LATER},
    requires=(AITER,),
    forbids=(rules.NON_CAUSAL_FP16_MLA,),
    preferred_block_size=1,
    graphs=GraphSupport.UNIFORM_BATCH,
)

ROCM_AITER_TRITON_MLA = Backend(
    name="ROCM_AITER_TRITON_MLA",
    summary="aiter's assembly decode with its Triton prefill of latent attention",
    serves=MLA,
    takes=_LATENT,
    features=_LATENT_FEATURES,
    on={"traits": CDNA3_OR_LATER},
    requires=(AITER, TRITON),
    preferred_block_size=1,
    graphs=GraphSupport.UNIFORM_BATCH,
)

ROCM_AITER_MLA_SPARSE = Backend(
    name="ROCM_AITER_MLA_SPARSE",
    summary="aiter's decode of latent attention over chosen rows",
    serves=SPARSE_MLA,
    takes={
        "head_size": OneOf(576),
        "attn_type": DECODER,
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": OneOf(*PLAIN_KV, *FP8_KV),
    },
    features=FeaturesWhen(PAGED | {Feature.PCP}, {Feature.SINKS: rules.takes_latent_sinks}),
    on={"traits": MI3XX},
    requires=(AITER,),
    kv_layouts=("LBNHC", "LBHNC", "BLHNC"),
    preferred_block_size=16,
    graphs=GraphSupport.UNIFORM_BATCH,
)

_V4_GRAPHS = Cases(
    (rules.verifies_adaptively, GraphSupport.ALWAYS), otherwise=GraphSupport.UNIFORM_BATCH
)


def _deepseek_v4(name: str, model: str, model_type: str, *block_sizes: int) -> Backend:
    return Backend(
        name=name,
        summary=f"aiter and Triton kernels for {model}'s window and compressed rows",
        serves=SPARSE_MLA,
        takes={
            "model_type": OneOf(model_type),
            "head_size": OneOf(512),
            "attn_type": DECODER,
            "dtype": OneOf(BF16),
            "kv_cache_dtype": OneOf(KVCacheDtype.AUTO, KVCacheDtype.FP8, KVCacheDtype.FP8_DS_MLA),
            "block_size": MultipleOfAny(*block_sizes),
        },
        features=PAGED | {Feature.SINKS, Feature.SLIDING_WINDOW},
        on={"traits": MI3XX},
        requires=(AITER, TRITON),
        preferred_block_size=block_sizes[0],
        graphs=_V4_GRAPHS,
    )


ROCM_FLASHMLA_SPARSE_DSV4 = _deepseek_v4(
    "ROCM_FLASHMLA_SPARSE_DSV4", "DeepSeek-V4", "deepseek_v4", 256
)
ROCM_FLASHMLA_SPARSE_DSV41 = _deepseek_v4(
    "ROCM_FLASHMLA_SPARSE_DSV41", "DeepSeek-V4.1", "deepseek_v41", 64, 128
)

# Latent prefill ------------------------------------------------------------------------------

# Keys and values expanded to heads: the forward kernels stop at 256 elements.
_EXPANDED = {
    "head_size": AtMost(256),
    "v_head_size": AtMost(256),
    "dtype": HALF_DTYPES,
}

AITER_PREFILL = Backend(
    name="ROCM_AITER_FA",
    summary="aiter's forward attention over expanded latent heads",
    serves=MLA_PREFILL,
    takes=_EXPANDED,
    features=frozenset({Feature.LSE}),
    on={"traits": MI3XX},
    requires=(AITER,),
    graphs=GraphSupport.NEVER,
)

FLASH_ATTN_PREFILL = Backend(
    name="FLASH_ATTN",
    summary="the flash-attn package over expanded latent heads, values padded to keys",
    serves=MLA_PREFILL,
    takes=_EXPANDED,
    features=frozenset({Feature.LSE, Feature.BATCH_INVARIANCE}),
    requires=(FLASH_ATTN_PACKAGE,),
    forbids=(rules.FLASH_ATTN_RDNA,),
    graphs=GraphSupport.NEVER,
)

# Indexers ------------------------------------------------------------------------------------

ROCM_AITER_INDEXER = Backend(
    name="ROCM_AITER_INDEXER",
    summary="aiter's scores of DeepSeek's sparse indexer; MXFP4 pages on gfx950",
    serves=INDEXER,
    takes={
        "head_size": OneOf(128),
        "model_type": OneOf("deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41"),
        "indexer_kv_dtype": Cases((rules.is_cdna4, OneOf("fp8", "mxfp4")), otherwise=OneOf("fp8")),
    },
    features=PAGED | {Feature.DCP, Feature.PCP},
    on={"traits": MI3XX},
    requires=(AITER,),
    forbids=(rules.MXFP4_MODELS, rules.MXFP4_ONE_RANK),
    reads=frozenset({"indexer_kv_dtype", "indexer_sparse_logits"}),
    preferred_block_size=64,
    graphs=GraphSupport.ALWAYS,
)

ROCM_AITER_BLOCK_INDEXER = Backend(
    name="ROCM_AITER_BLOCK_INDEXER",
    summary="aiter's scores of MiniMax-M3's blocks from shuffled fp8 pages",
    serves=INDEXER,
    takes={
        "head_size": OneOf(128),
        "model_type": OneOf("minimax_m3"),
        "indexer_kv_dtype": OneOf("fp8"),
        "topk": OneOf(16),
        "sparse_logits": OneOf(False),
    },
    features=PAGED,
    on={"traits": Includes("cdna4")},
    requires=(AITER,),
    forbids=(rules.SHUFFLED_PAGES, rules.ONE_RANK_INDEXER),
    reads=frozenset({"indexer_kv_dtype"}),
    preferred_block_size=128,
    graphs=GraphSupport.ALWAYS,
)

CATALOG: tuple[Backend, ...] = (
    ROCM_ATTN,
    ROCM_SEGMENTED_ATTN,
    ROCM_AITER_FA,
    ROCM_AITER_UNIFIED_ATTN,
    FLASH_ATTN,
    ROCM_OCTAVE,
    ULTRAQUANT,
    ROCM_AITER_MLA,
    ROCM_AITER_TRITON_MLA,
    ROCM_AITER_MLA_SPARSE,
    ROCM_FLASHMLA_SPARSE_DSV4,
    ROCM_FLASHMLA_SPARSE_DSV41,
    AITER_PREFILL,
    FLASH_ATTN_PREFILL,
    ROCM_AITER_INDEXER,
    ROCM_AITER_BLOCK_INDEXER,
    *PORTABLE_GPU,
    *PORTABLE,
)
