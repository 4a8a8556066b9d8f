"""What the CPU platform knows of each backend: facts.

An instruction set is a trait: `avx2`, `avx512`, `amx`, `neon` ... and so is the vendor.
"""

from __future__ import annotations

from attnplat.backends.backend import Backend, GraphSupport, Package, Rule
from attnplat.backends.limits import Either, Includes, OneOf
from attnplat.backends.portable.catalog import (
    BF16,
    FP8_KV,
    FP16,
    FP32,
    INDEXER,
    MHA,
    MLA,
    MLA_PREFILL,
    PLAIN_KV,
    PORTABLE,
    SPARSE_MLA,
)
from attnplat.backends.portable.features import REFERENCE_INDEXER_FEATURES
from attnplat.backends.portable.predicates import cannot_store_rows, scores_blocks
from attnplat.config.layer import IndexerConfig, MhaConfig, SparseMlaConfig
from attnplat.config.names import Feature, KVCacheDtype
from attnplat.platforms.cpu.impls.features import (
    CPU_FEATURES,
    CPU_INDEXER_FEATURES,
    ZENTORCH_FEATURES,
    ZENTORCH_TORCH,
    ZENTORCH_VERSION,
)
from attnplat.platforms.cpu.ipex import IPEX
from attnplat.platforms.cpu.rules import has_another_zentorch
from attnplat.platforms.inventory import Inventory

ANY_DTYPE = OneOf(FP16, BF16, FP32)
VECTORS = Either(Includes("avx2"), Includes("neon"))
AMX = Includes("amx")

ZENTORCH_PACKAGE = Package("zentorch", why="AMD's kernels for its own processors")
ON_ZEN = {"traits": Includes("amd", "avx512")}

_FIXED_ORDER = frozenset({Feature.DETERMINISTIC, Feature.BATCH_INVARIANCE})

KERNELS = (
    Package("attnplat", feature="cpu_kernels", why="its C++ kernels, compiled at installation"),
)
_LOADS = "attnplat.platforms.cpu.impls.attention"
_EIGHT_BIT_KV = (
    *FP8_KV,
    KVCacheDtype.FP8_E5M2,
    KVCacheDtype.FP8_PER_TOKEN_HEAD,
    KVCacheDtype.INT8_PER_TOKEN_HEAD,
)

CPU_ATTN = Backend(
    name="CPU_ATTN",
    summary="C++ attention in place over pages, heads of a group folded into rows",
    serves=MHA,
    takes={
        "dtype": ANY_DTYPE,
        "kv_cache_dtype": OneOf(*PLAIN_KV, KVCacheDtype.FLOAT32, *_EIGHT_BIT_KV),
    },
    features=CPU_FEATURES,
    on={"traits": VECTORS},
    requires=KERNELS,
    loads=f"{_LOADS}:CpuAttnImpl",
    preferred_block_size=128,
    graphs=GraphSupport.NEVER,
)

CPU_MLA = Backend(
    name="CPU_MLA",
    summary="C++ decode of absorbed latent attention with vector instructions",
    serves=MLA,
    takes={
        "dtype": ANY_DTYPE,
        "kv_cache_dtype": OneOf(*PLAIN_KV, KVCacheDtype.FLOAT32, *_EIGHT_BIT_KV),
    },
    features=CPU_FEATURES,
    on={"traits": VECTORS},
    requires=KERNELS,
    loads=f"{_LOADS}:CpuMlaImpl",
    preferred_block_size=16,
    graphs=GraphSupport.NEVER,
)

AMX_MLA = Backend(
    name="AMX_MLA",
    summary="C++ decode of absorbed latent attention with AMX tiles: all heads in one multiply",
    serves=MLA,
    takes={
        "dtype": OneOf(BF16),
        "kv_cache_dtype": OneOf(KVCacheDtype.AUTO, KVCacheDtype.BFLOAT16, *_EIGHT_BIT_KV),
    },
    features=CPU_FEATURES,
    on={"traits": AMX},
    requires=KERNELS,
    loads=f"{_LOADS}:AmxMlaImpl",
    preferred_block_size=64,
    graphs=GraphSupport.NEVER,
)

CPU_MLA_SPARSE = Backend(
    name="CPU_MLA_SPARSE",
    summary="C++ latent attention over chosen keys: rows read one by one where they lie",
    serves=SPARSE_MLA,
    takes={
        "dtype": ANY_DTYPE,
        "kv_cache_dtype": OneOf(
            *PLAIN_KV,
            KVCacheDtype.FLOAT32,
            *_EIGHT_BIT_KV,
            KVCacheDtype.FP8_DS_MLA,
            KVCacheDtype.NVFP4_DS_MLA,
        ),
    },
    features=CPU_FEATURES,
    on={"traits": VECTORS},
    requires=KERNELS,
    forbids=(
        Rule(
            "row_size",
            cannot_store_rows,
            "the cache's format stores latent rows of 576 elements",
            SparseMlaConfig(head_size=512, kv_cache_dtype=KVCacheDtype.FP8_DS_MLA),
        ),
    ),
    loads="attnplat.platforms.cpu.impls.sparse:CpuSparseMlaImpl",
    preferred_block_size=64,
    graphs=GraphSupport.NEVER,
)

CPU_PREFILL = Backend(
    name="CPU",
    summary="C++ attention over expanded latent heads",
    serves=MLA_PREFILL,
    takes={"dtype": ANY_DTYPE},
    features=CPU_FEATURES,
    requires=KERNELS,
    loads=f"{_LOADS}:CpuPrefillImpl",
    graphs=GraphSupport.NEVER,
)

ZEN_PREFILL = Backend(
    name="ZEN_CPU",
    summary="zentorch's attention over expanded latent heads",
    serves=MLA_PREFILL,
    takes={"dtype": OneOf(FP16, BF16)},
    features=frozenset({Feature.LSE}),
    on=ON_ZEN,
    requires=(ZENTORCH_PACKAGE,),
    graphs=GraphSupport.NEVER,
)

ZENTORCH = Backend(
    name="ZENTORCH",
    summary="zentorch's fused attention without a cache",
    serves=MHA,
    takes={
        "attn_type": OneOf("encoder", "encoder_only"),
        "dtype": ANY_DTYPE,
        "causal": OneOf(False),
    },
    features=ZENTORCH_FEATURES,
    on=ON_ZEN,
    requires=(ZENTORCH_PACKAGE,),
    forbids=(
        Rule(
            "zentorch_version",
            has_another_zentorch,
            f"its operator is known in zentorch {ZENTORCH_VERSION} beside torch {ZENTORCH_TORCH}",
            MhaConfig(head_size=64, attn_type="encoder_only", causal=False),
            {
                "arch": "zen",
                "inventory": Inventory.assume({"torch": "2.14.0", "zentorch": "2.14.0.1"}),
            },
        ),
    ),
    loads="attnplat.platforms.cpu.impls.zentorch:ZentorchImpl",
    graphs=GraphSupport.NEVER,
)

_NO_BLOCK_SCORES = Rule(
    "block_scores",
    scores_blocks,
    "the model's indexer ranks blocks of keys, and this one ranks keys",
    IndexerConfig(head_size=128, model_type="minimax_m3", indexer_kv_dtype="bf16"),
)

CPU_INDEXER = Backend(
    name="CPU_INDEXER",
    summary="C++ scores of a sparse indexer, keys decoded on the way; the best without all scores",
    serves=INDEXER,
    takes={"indexer_kv_dtype": OneOf("bf16", "fp8", "mxfp4")},
    features=CPU_INDEXER_FEATURES,
    on={"traits": VECTORS},
    requires=KERNELS,
    forbids=(_NO_BLOCK_SCORES,),
    reads=frozenset({"indexer_kv_dtype", "indexer_sparse_logits"}),
    loads="attnplat.platforms.cpu.impls.indexer:CpuIndexerImpl",
    preferred_block_size=64,
    graphs=GraphSupport.NEVER,
)

REFERENCE_INDEXER = Backend(
    name="REFERENCE",
    summary="float64 scores of a sparse indexer, key by key, from every format",
    serves=INDEXER,
    takes={"indexer_kv_dtype": OneOf("bf16", "fp8", "mxfp4")},
    features=REFERENCE_INDEXER_FEATURES,
    forbids=(_NO_BLOCK_SCORES,),
    reads=frozenset({"indexer_kv_dtype", "indexer_sparse_logits"}),
    loads="attnplat.backends.portable.reference_indexer:ReferenceIndexerImpl",
    last_resort=True,
    graphs=GraphSupport.NEVER,
)

CATALOG: tuple[Backend, ...] = (
    CPU_ATTN,
    CPU_MLA,
    AMX_MLA,
    CPU_MLA_SPARSE,
    CPU_PREFILL,
    ZEN_PREFILL,
    ZENTORCH,
    IPEX,
    CPU_INDEXER,
    REFERENCE_INDEXER,
    *PORTABLE,
)
