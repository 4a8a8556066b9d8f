"""NVIDIA's backends for sparse attention: latent, block-sparse, and their indexers: facts."""

from __future__ import annotations

from collections.abc import Mapping

from attnplat.backends.backend import Backend, GraphSupport, Package, Rule
from attnplat.backends.limits import (
    Anything,
    Between,
    Cases,
    Either,
    Limit,
    MultipleOf,
    OneOf,
    Required,
)
from attnplat.backends.portable.catalog import (
    BF16,
    BLOCK_SPARSE,
    DECODER,
    FP8_KV,
    HALF_DTYPES,
    INDEXER,
    PAGED,
    PLAIN_KV,
    SPARSE_MLA,
)
from attnplat.backends.portable.predicates import wants_split_indexer
from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import IndexerConfig, SparseMlaConfig
from attnplat.config.names import Feature, KVCacheDtype
from attnplat.config.run import RunContext
from attnplat.platforms.cuda import rules
from attnplat.platforms.cuda.flashinfer import (
    is_consumer_blackwell,
    is_datacenter_blackwell,
    is_hopper,
)
from attnplat.platforms.cuda.latent import FLASHMLA_PACKAGE
from attnplat.platforms.cuda.multi_head import FA3, FA4, FLASHINFER_PACKAGE, majors
from attnplat.platforms.inventory import Inventory

ENGINE_KERNELS = Package(
    "an engine's build", feature="engine_kernels", why="its kernels are compiled into engines"
)

BLACKWELLS = Required(Either(Between((10, 0), (10, 9)), Between((12, 0), (12, 9))))
NO_SPLIT_INDEXER = Rule(
    "minimax_m3_indexer_cp",
    wants_split_indexer,
    "minimax_m3_indexer_cp is set, and only AMD's kernels split the indexer over ranks",
    IndexerConfig(head_size=128, model_type="minimax_m3", indexer_kv_dtype="bf16"),
    {"wishes": AttentionConfig(minimax_m3_indexer_cp=True)},
)

_AUTO_BF16 = (KVCacheDtype.AUTO, KVCacheDtype.BFLOAT16)
_SPARSE = PAGED | {Feature.PCP, Feature.LSE}
_SPARSE_READS = frozenset({"sparse_mla_force_mqa"})
_ROWS = OneOf(512, 576)

# DeepSeek-V3.2 and its like ----------------------------------------------------------------

FLASHMLA_SPARSE = Backend(
    name="FLASHMLA_SPARSE",
    summary="FlashMLA's sparse latent attention, bf16 or packed fp8 and nvfp4 rows",
    serves=SPARSE_MLA,
    takes={
        "head_size": _ROWS,
        "attn_type": DECODER,
        "dtype": OneOf(BF16),
        "kv_cache_dtype": OneOf(
            *_AUTO_BF16, *FP8_KV, KVCacheDtype.FP8_DS_MLA, KVCacheDtype.NVFP4_DS_MLA
        ),
        "block_size": MultipleOf(64),
    },
    features=_SPARSE | {Feature.DCP},
    on={"capability": majors(9, 10)},
    requires=(FLASHMLA_PACKAGE,),
    forbids=(
        Rule(
            "flashmla_sparse_512_kv_or_device",
            rules.is_512_off_hopper_or_quantised,
            "rows of 512 are taken on Hopper only, plain or as fp8_ds_mla",
            SparseMlaConfig(head_size=512, kv_cache_dtype="fp8"),
        ),
        Rule(
            "flashmla_sparse_512_rope_free",
            rules.is_512_with_rope,
            "rows of 512 are taken without a rotated part only",
            SparseMlaConfig(head_size=512, qk_rope_head_dim=64, kv_lora_rank=448),
        ),
        Rule(
            "flashmla_sparse_nvfp4_sm100",
            rules.is_nvfp4_rows_off_blackwell,
            "nvfp4 rows are read on compute capability 10 only",
            SparseMlaConfig(head_size=576, kv_cache_dtype="nvfp4_ds_mla"),
            {"arch": "sm90"},
        ),
    ),
    reads=_SPARSE_READS | {"hisparse_config"},
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=64,
)

_NOT_BOTH_RANKS = Rule(
    "fi_sparse_pcp_dcp",
    rules.is_context_parallel_both_ways,
    "prefill and decode context parallelism cannot be combined",
    SparseMlaConfig(head_size=576),
    {"arch": "sm100", "run": RunContext(pcp_size=2, dcp_size=2)},
)
_NO_ROPE_SIZES = Rule(
    "fi_sparse_norope_dims",
    rules.is_no_rope_of_other_sizes,
    "without a rotated part it takes an un-rotated part of 256 and a latent of 512",
    SparseMlaConfig(head_size=512, qk_nope_head_dim=128, qk_rope_head_dim=0, kv_lora_rank=512),
    {"arch": "sm100"},
)
_NOPE_SIZES = Rule(
    "fi_sparse_nope_dim",
    rules.is_rope_of_other_sizes,
    "beside a rotated part it takes an un-rotated part of 128 or 192",
    SparseMlaConfig(head_size=576, qk_nope_head_dim=64, qk_rope_head_dim=64, kv_lora_rank=512),
    {"arch": "sm100"},
)

FLASHINFER_MLA_SPARSE = Backend(
    name="FLASHINFER_MLA_SPARSE",
    summary="FlashInfer's TRT-LLM sparse latent attention on datacenter Blackwell",
    serves=SPARSE_MLA,
    takes={
        "head_size": _ROWS,
        "attn_type": DECODER,
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": OneOf(*PLAIN_KV, *FP8_KV),
        "block_size": MultipleOf(32),
    },
    features=_SPARSE | {Feature.DCP},
    on={"capability": majors(10)},
    requires=(FLASHINFER_PACKAGE,),
    forbids=(_NOT_BOTH_RANKS, _NO_ROPE_SIZES, _NOPE_SIZES),
    reads=_SPARSE_READS,
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=32,
)

FLASH_ATTN_MLA_SPARSE_FA4 = Backend(
    name="FLASH_ATTN_MLA_SPARSE_FA4",
    summary="FlashAttention 4's sparse latent attention, for few heads",
    serves=SPARSE_MLA,
    takes={
        "head_size": OneOf(576),
        "attn_type": DECODER,
        "dtype": OneOf(BF16),
        "kv_cache_dtype": OneOf(*_AUTO_BF16),
        "block_size": MultipleOf(64),
        "index_topk": MultipleOf(128),
        "kv_lora_rank": OneOf(512),
        "qk_rope_head_dim": OneOf(64),
    },
    features=_SPARSE | {Feature.DCP},
    on={"capability": majors(10)},
    requires=(FLASHINFER_PACKAGE, FA4),
    forbids=(
        Rule(
            "fa4_sparse_head_count",
            rules.is_odd_head_count,
            "over all decode-context ranks it takes 8, 16, 32 or 64 heads, or 128 on one rank",
            SparseMlaConfig(head_size=576, num_heads=24),
            {"arch": "sm100"},
        ),
        _NOT_BOTH_RANKS,
        _NOPE_SIZES,
    ),
    reads=_SPARSE_READS,
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=64,
)

FLASHINFER_MLA_SPARSE_SM90 = Backend(
    name="FLASHINFER_MLA_SPARSE_SM90",
    summary="FlashInfer's sparse latent attention on Hopper",
    serves=SPARSE_MLA,
    takes={
        "head_size": _ROWS,
        "attn_type": DECODER,
        "dtype": OneOf(BF16),
        "kv_cache_dtype": OneOf(*_AUTO_BF16, *FP8_KV),
        "block_size": MultipleOf(64),
        "kv_lora_rank": OneOf(512),
        "qk_rope_head_dim": OneOf(0, 64),
    },
    features=_SPARSE,
    on={"capability": majors(9)},
    requires=(Package("flashinfer-python", feature="flashinfer_sparse_sm90", why="its kernels"),),
    reads=_SPARSE_READS,
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=64,
)

FLASH_ATTN_MLA_SPARSE = Backend(
    name="FLASH_ATTN_MLA_SPARSE",
    summary="FlashAttention 3's sparse latent attention on Hopper",
    serves=SPARSE_MLA,
    takes={
        "attn_type": DECODER,
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": OneOf(*PLAIN_KV),
        "block_size": MultipleOf(64),
    },
    features=_SPARSE,
    on={"capability": majors(9)},
    requires=(FA3,),
    reads=_SPARSE_READS | {"flash_attn_max_num_splits_for_cuda_graph"},
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=64,
)

FLASHINFER_MLA_SPARSE_SM120 = Backend(
    name="FLASHINFER_MLA_SPARSE_SM120",
    summary="FlashInfer's packed sparse latent decode on consumer Blackwell, fp8 rows only",
    serves=SPARSE_MLA,
    takes={
        "head_size": _ROWS,
        "attn_type": DECODER,
        "dtype": OneOf(BF16),
        "kv_cache_dtype": OneOf(*FP8_KV, KVCacheDtype.FP8_DS_MLA),
        "block_size": MultipleOf(64),
        "index_topk": OneOf(2048),
    },
    features=_SPARSE,
    on={"capability": majors(12)},
    requires=(Package("flashinfer-python", feature="flashinfer_sparse_sm120", why="its kernels"),),
    reads=_SPARSE_READS,
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=64,
)

# DeepSeek-V4 and V4.1 ----------------------------------------------------------------------

# Beside the chosen rows each layer reads the newest ones, and some layers those alone.
_V4_FEATURES = PAGED | {Feature.SINKS, Feature.SLIDING_WINDOW}
_FLASHMLA_V4_KV = (KVCacheDtype.AUTO, KVCacheDtype.FP8, KVCacheDtype.FP8_DS_MLA)
_ANY_V4 = {"head_size": OneOf(512), "attn_type": DECODER, "dtype": OneOf(BF16)}
_V4_LAYER: Mapping[str, Limit] = {"model_type": OneOf("deepseek_v4"), **_ANY_V4}
_V41_LAYER: Mapping[str, Limit] = {"model_type": OneOf("deepseek_v41"), **_ANY_V4}

_FLASHINFER_BEFORE_PACKED = {"flashinfer-python": "0.6.0", "flashinfer-cubin": "0.6.0"}
_FI_V4_RULES = (
    Rule(
        "dsv4_fi_sm10x_fp8_ds_mla",
        rules.is_fp8_rows_on_datacenter_blackwell,
        "on compute capability 10 it takes plain or fp8 rows, not fp8_ds_mla",
        SparseMlaConfig(head_size=512, kv_cache_dtype="fp8_ds_mla", model_type="deepseek_v4"),
        {"arch": "sm100"},
    ),
    Rule(
        "fi_sm120_api",
        rules.lacks_packed_decode,
        "on compute capability 12 it needs a FlashInfer with packed sparse decode",
        SparseMlaConfig(head_size=512, kv_cache_dtype="fp8", model_type="deepseek_v4"),
        {"arch": "sm120", "inventory": Inventory.assume(_FLASHINFER_BEFORE_PACKED)},
    ),
)

FLASHMLA_SPARSE_DSV4 = Backend(
    name="FLASHMLA_SPARSE_DSV4",
    summary="FlashMLA's attention of DeepSeek-V4: sparse, windowed and compressed keys",
    serves=SPARSE_MLA,
    takes={
        **_V4_LAYER,
        "kv_cache_dtype": OneOf(*_FLASHMLA_V4_KV),
        "block_size": MultipleOf(256),
    },
    features=_V4_FEATURES,
    on={"capability": majors(9, 10)},
    requires=(FLASHMLA_PACKAGE,),
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=256,
)

FLASHINFER_MLA_SPARSE_DSV4 = Backend(
    name="FLASHINFER_MLA_SPARSE_DSV4",
    summary="FlashInfer's attention of DeepSeek-V4",
    serves=SPARSE_MLA,
    takes={
        **_V4_LAYER,
        "kv_cache_dtype": Cases(
            (is_consumer_blackwell, OneOf(*FP8_KV, KVCacheDtype.FP8_DS_MLA)),
            otherwise=OneOf(*_AUTO_BF16, *FP8_KV, KVCacheDtype.FP8_DS_MLA),
        ),
        "block_size": MultipleOf(256),
    },
    features=_V4_FEATURES,
    on={"capability": BLACKWELLS},
    requires=(FLASHINFER_PACKAGE,),
    forbids=_FI_V4_RULES,
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=256,
)

FLASHMLA_SPARSE_DSV41 = Backend(
    name="FLASHMLA_SPARSE_DSV41",
    summary="FlashMLA's attention of DeepSeek-V4.1",
    serves=SPARSE_MLA,
    takes={
        **_V41_LAYER,
        "kv_cache_dtype": OneOf(*_FLASHMLA_V4_KV),
        "block_size": Cases((is_hopper, MultipleOf(64)), otherwise=MultipleOf(128)),
    },
    features=_V4_FEATURES | {Feature.PCP},
    on={"capability": majors(9, 10)},
    requires=(FLASHMLA_PACKAGE,),
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=Cases((is_hopper, 64), otherwise=128),
)

FLASHINFER_MLA_SPARSE_DSV41 = Backend(
    name="FLASHINFER_MLA_SPARSE_DSV41",
    summary="FlashInfer's attention of DeepSeek-V4.1",
    serves=SPARSE_MLA,
    takes={
        **FLASHINFER_MLA_SPARSE_DSV4.takes,
        **_V41_LAYER,
        "block_size": MultipleOf(128),
    },
    features=_V4_FEATURES,
    on={"capability": BLACKWELLS},
    requires=(FLASHINFER_PACKAGE,),
    forbids=_FI_V4_RULES,
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=128,
)

FLASHMLA_MEGA_ATTN_DSV41 = Backend(
    name="FLASHMLA_MEGA_ATTN_DSV41",
    summary="one fused kernel for DeepSeek-V4.1's whole attention on datacenter Blackwell",
    serves=SPARSE_MLA,
    takes={
        **_V41_LAYER,
        "kv_cache_dtype": OneOf(*_FLASHMLA_V4_KV, KVCacheDtype.NVFP4_DS_MLA),
        "block_size": MultipleOf(128),
    },
    features=_V4_FEATURES,
    on={"capability": majors(10)},
    requires=(ENGINE_KERNELS,),
    forbids=(
        Rule(
            "flashmla_mega_groups",
            rules.has_no_mega_groups,
            "it works on groups of 8 heads, as many as share one output projection",
            SparseMlaConfig(head_size=512, num_heads=4, model_type="deepseek_v41"),
            {"arch": "sm100"},
        ),
    ),
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=128,
)

# Block-sparse ------------------------------------------------------------------------------

_MSA_TAKES = {
    "model": OneOf("minimax_m3"),
    "head_size": OneOf(128),
    "dtype": HALF_DTYPES,
    "kv_cache_dtype": OneOf(*_AUTO_BF16, *FP8_KV, KVCacheDtype.NVFP4),
    "block_size": MultipleOf(128),
    "topk_blocks": OneOf(4, 8, 16, 32),
}


def _msa(name: str, summary: str) -> Backend:
    return Backend(
        name=name,
        summary=summary,
        serves=BLOCK_SPARSE,
        takes=_MSA_TAKES,
        features=PAGED,
        on={"capability": majors(10)},
        requires=(ENGINE_KERNELS,),
        reads=frozenset({"minimax_m3_msa_decode_backend"}),
        graphs=GraphSupport.UNIFORM_BATCH,
        preferred_block_size=128,
    )


CUTLASS_MSA = _msa("CUTLASS_MSA", "MiniMax-M3's MSA kernels, decode by CUTLASS")
TRITON_MSA = _msa("TRITON_MSA", "MiniMax-M3's MSA kernels, decode by Triton")

STEP5_DSA = Backend(
    name="STEP5_DSA",
    summary="FlashAttention over the keys that Step5's indexer chose",
    serves=BLOCK_SPARSE,
    takes={
        "model": OneOf("step5"),
        "head_size": OneOf(192),
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": OneOf(*_AUTO_BF16, *FP8_KV),
        "block_size": MultipleOf(16),
    },
    features=PAGED | {Feature.RSWA},
    on={"capability": Required(OneOf((9, 0), (10, 0), (10, 3)))},
    requires=(ENGINE_KERNELS,),
    kv_layouts=("BLNHC",),
    graphs=GraphSupport.SINGLE_TOKEN_DECODE,
    preferred_block_size=16,
)

# Indexers ----------------------------------------------------------------------------------

DEEPGEMM_INDEXER = Backend(
    name="DEEPGEMM_INDEXER",
    summary="DeepGEMM's scores of DeepSeek's sparse indexer, fp8 or MXFP4",
    serves=INDEXER,
    takes={
        "model_type": OneOf("deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41"),
        "indexer_kv_dtype": Cases(
            (is_datacenter_blackwell, OneOf("fp8", "mxfp4")), otherwise=OneOf("fp8")
        ),
        "sparse_logits": Cases(
            (rules.is_lone_datacenter_blackwell, Anything()), otherwise=OneOf(False)
        ),
    },
    features=PAGED | {Feature.DCP, Feature.PCP},
    on={"capability": majors(9, 10)},
    requires=(Package("deep-gemm", feature="deep_gemm", why="its kernels"),),
    forbids=(
        Rule(
            "indexer_sparse_logits",
            rules.is_sparse_logits_of_fp8,
            "sparse logits need an mxfp4 index cache",
            IndexerConfig(head_size=128, indexer_kv_dtype="fp8", sparse_logits=True),
            {"arch": "sm100"},
        ),
    ),
    reads=frozenset({"indexer_kv_dtype", "indexer_sparse_logits"}),
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=64,
)

MSA_INDEXER = Backend(
    name="MSA_INDEXER",
    summary="MSA's scores of MiniMax-M3's blocks on datacenter Blackwell",
    serves=INDEXER,
    takes={
        "model_type": OneOf("minimax_m3"),
        "indexer_kv_dtype": OneOf("bf16", "fp8"),
        "topk": OneOf(16),
        "sparse_logits": OneOf(False),
    },
    features=PAGED,
    on={"capability": majors(10)},
    requires=(ENGINE_KERNELS,),
    forbids=(NO_SPLIT_INDEXER,),
    reads=frozenset({"indexer_kv_dtype", "minimax_m3_indexer_cp"}),
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=128,
)

SPARSE = (
    FLASHMLA_SPARSE,
    FLASHINFER_MLA_SPARSE,
    FLASH_ATTN_MLA_SPARSE_FA4,
    FLASHINFER_MLA_SPARSE_SM90,
    FLASH_ATTN_MLA_SPARSE,
    FLASHINFER_MLA_SPARSE_SM120,
    FLASHMLA_SPARSE_DSV4,
    FLASHINFER_MLA_SPARSE_DSV4,
    FLASHMLA_SPARSE_DSV41,
    FLASHINFER_MLA_SPARSE_DSV41,
    FLASHMLA_MEGA_ATTN_DSV41,
    CUTLASS_MSA,
    TRITON_MSA,
    STEP5_DSA,
    DEEPGEMM_INDEXER,
    MSA_INDEXER,
)
