"""NVIDIA's backends for dense latent attention, decode and prefill: facts."""

from __future__ import annotations

from collections.abc import Mapping

from attnplat.backends.backend import Backend, GraphSupport, Package
from attnplat.backends.limits import Limit, MultipleOf, MultipleOfAny, OneOf
from attnplat.backends.portable.catalog import (
    DECODER,
    FP8_KV,
    HALF_DTYPES,
    MLA,
    MLA_PREFILL,
    PAGED,
    PLAIN_KV,
)
from attnplat.config.names import Feature
from attnplat.platforms.cuda.multi_head import (
    AMPERE_ON,
    FA3,
    FLASH_ATTENTION,
    FLASHINFER_PACKAGE,
    majors,
)

TOKENSPEED = Package("tokenspeed-mla", why="its kernels")
FLASHMLA_PACKAGE = Package("flash-mla", feature="flashmla", why="its kernels")

_LAYER: Mapping[str, Limit] = {
    "head_size": OneOf(320, 512, 576),
    "attn_type": DECODER,
    "dtype": HALF_DTYPES,
}
_DECODE = PAGED | {Feature.DCP, Feature.LSE}

# Decode ------------------------------------------------------------------------------------

FLASHINFER_MLA = Backend(
    name="FLASHINFER_MLA",
    summary="FlashInfer's TRT-LLM decode of latent attention",
    serves=MLA,
    takes={
        **_LAYER,
        "kv_cache_dtype": OneOf(*PLAIN_KV, *FP8_KV),
        "block_size": MultipleOfAny(32, 64),
        "qk_nope_head_dim": OneOf(64, 128, 192),
    },
    features=_DECODE | {Feature.NON_CAUSAL, Feature.NON_CAUSAL_DCP},
    on={"capability": majors(10)},
    requires=(FLASHINFER_PACKAGE,),
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=32,
)

TOKENSPEED_MLA = Backend(
    name="TOKENSPEED_MLA",
    summary="tokenspeed-mla's decode of DeepSeek's latent attention from fp8 caches",
    serves=MLA,
    takes={
        **_LAYER,
        "kv_cache_dtype": OneOf(*FP8_KV),
        "block_size": MultipleOfAny(32, 64),
        "qk_nope_head_dim": OneOf(128),
        "qk_rope_head_dim": OneOf(64),
        "v_head_size": OneOf(128),
    },
    features=_DECODE | {Feature.NON_CAUSAL, Feature.NON_CAUSAL_DCP},
    on={"capability": majors(10)},
    requires=(TOKENSPEED,),
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=32,
)

CUTLASS_MLA = Backend(
    name="CUTLASS_MLA",
    summary="CUTLASS's decode of latent attention, compiled into engines",
    serves=MLA,
    takes={
        **_LAYER,
        "kv_cache_dtype": OneOf(*PLAIN_KV, *FP8_KV),
        "block_size": MultipleOf(128),
    },
    features=_DECODE,
    on={"capability": majors(10)},
    requires=(Package("nvidia-cutlass", feature="cutlass_mla", why="its kernels"),),
    graphs=GraphSupport.SINGLE_TOKEN_DECODE,
    preferred_block_size=128,
)

FLASH_ATTN_MLA = Backend(
    name="FLASH_ATTN_MLA",
    summary="FlashAttention 3's decode of latent attention, any query length",
    serves=MLA,
    takes={
        **_LAYER,
        "kv_cache_dtype": OneOf(*PLAIN_KV),
        "block_size": MultipleOf(16),
    },
    features=_DECODE | {Feature.BATCH_INVARIANCE, Feature.DETERMINISTIC},
    on={"capability": majors(9)},
    requires=(FA3,),
    reads=frozenset({"flash_attn_max_num_splits_for_cuda_graph"}),
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=16,
)

FLASHMLA = Backend(
    name="FLASHMLA",
    summary="FlashMLA's dense decode of latent attention on Hopper",
    serves=MLA,
    takes={
        **_LAYER,
        "kv_cache_dtype": OneOf(*PLAIN_KV, *FP8_KV),
        "block_size": MultipleOf(64),
    },
    features=_DECODE,
    on={"capability": majors(9)},
    requires=(FLASHMLA_PACKAGE,),
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=64,
)

# Prefill -----------------------------------------------------------------------------------

# (un-rotated, rotated, value) elements of a head.
_V3, _V2_LITE, _WIDE, _NO_ROPE = (128, 64, 128), (64, 64, 128), (192, 64, 256), (256, 0, 256)

FLASH_ATTN_PREFILL = Backend(
    name="FLASH_ATTN",
    summary="FlashAttention over expanded latent heads, values padded where it must be",
    serves=MLA_PREFILL,
    takes={"dtype": HALF_DTYPES, "dims": OneOf(_V3, _WIDE, _V2_LITE, _NO_ROPE)},
    features=frozenset({Feature.LSE, Feature.DETERMINISTIC, Feature.BATCH_INVARIANCE}),
    on={"capability": AMPERE_ON},
    requires=(FLASH_ATTENTION,),
    reads=frozenset({"flash_attn_version"}),
)

FLASHINFER_PREFILL = Backend(
    name="FLASHINFER",
    summary="FlashInfer's ragged kernels over expanded latent heads",
    serves=MLA_PREFILL,
    takes={"dtype": HALF_DTYPES, "dims": OneOf(_V3)},
    features=frozenset({Feature.LSE}),
    on={"capability": majors(10)},
    requires=(FLASHINFER_PACKAGE,),
    reads=frozenset({"use_prefill_query_quantization"}),
)

TRTLLM_RAGGED = Backend(
    name="TRTLLM_RAGGED",
    summary="FlashInfer's TRT-LLM ragged kernels over expanded latent heads",
    serves=MLA_PREFILL,
    takes={"dtype": HALF_DTYPES, "dims": OneOf(_V3, _WIDE)},
    features=frozenset({Feature.LSE}),
    on={"capability": majors(10)},
    requires=(FLASHINFER_PACKAGE,),
    reads=frozenset({"use_prefill_query_quantization"}),
)

TOKENSPEED_PREFILL = Backend(
    name="TOKENSPEED_MLA",
    summary="tokenspeed-mla's prefill of DeepSeek's expanded latent heads",
    serves=MLA_PREFILL,
    takes={"dtype": HALF_DTYPES, "dims": OneOf(_V3)},
    features=frozenset({Feature.LSE}),
    on={"capability": majors(10)},
    requires=(TOKENSPEED,),
    reads=frozenset({"use_prefill_query_quantization"}),
)

LATENT = (
    FLASHINFER_MLA,
    TOKENSPEED_MLA,
    CUTLASS_MLA,
    FLASH_ATTN_MLA,
    FLASHMLA,
    FLASH_ATTN_PREFILL,
    FLASHINFER_PREFILL,
    TRTLLM_RAGGED,
    TOKENSPEED_PREFILL,
)
