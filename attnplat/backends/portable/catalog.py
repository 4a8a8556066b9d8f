"""Backends that run on several vendors' devices: facts, shared by the platforms' catalogs.

`PORTABLE` runs wherever torch runs. `PORTABLE_GPU` needs Triton; where its limits differ
between vendors the difference is a trait of the device, asked by a named predicate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnplat.backends.backend import Backend, GraphSupport, Package, Rule
from attnplat.backends.limits import AtLeast, Cases, MultipleOf, MultipleOfAny, OneOf, Required
from attnplat.backends.portable.features import (
    PORTABLE_OPERATIONS,
    REFERENCE_FEATURES,
    TORCH_SDPA_FEATURES,
)
from attnplat.backends.portable.predicates import (
    cannot_store_rows,
    lacks_bf16,
    triton_lacks_e4m3,
    wants_split_indexer,
)
from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import IndexerConfig, MhaConfig
from attnplat.config.names import AttnType, Dtype, Feature, KVCacheDtype, Operation, StateKind

FP16, BF16, FP32 = Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT32
HALF_DTYPES = OneOf(FP16, BF16)
PLAIN_KV = (KVCacheDtype.AUTO, KVCacheDtype.FLOAT16, KVCacheDtype.BFLOAT16)
FP8_KV = (KVCacheDtype.FP8, KVCacheDtype.FP8_E4M3)
TURBOQUANT_KV = (
    KVCacheDtype.TURBOQUANT_K8V4,
    KVCacheDtype.TURBOQUANT_4BIT_NC,
    KVCacheDtype.TURBOQUANT_K3V4_NC,
    KVCacheDtype.TURBOQUANT_3BIT_NC,
)

# What every paged backend takes unless it says otherwise: its pages are plain and named, and
# query lengths may differ from step to step.
PAGED = frozenset({Feature.KV_CONNECTOR, Feature.ADAPTIVE_VERIFICATION})

DECODER = OneOf(AttnType.DECODER)

MHA = frozenset({Operation.MHA})
MLA = frozenset({Operation.MLA})
SPARSE_MLA = frozenset({Operation.SPARSE_MLA})
BLOCK_SPARSE = frozenset({Operation.BLOCK_SPARSE})
MLA_PREFILL = frozenset({Operation.MLA_PREFILL})
INDEXER = frozenset({Operation.INDEXER})
STATE = frozenset({Operation.STATE})

TRITON = Package("triton", why="it compiles the kernels")

# Torch ------------------------------------------------------------------------------------

_TORCH_KV = (
    *PLAIN_KV,
    KVCacheDtype.FLOAT32,
    *FP8_KV,
    KVCacheDtype.FP8_E5M2,
    KVCacheDtype.INT8_PER_TOKEN_HEAD,
    KVCacheDtype.FP8_PER_TOKEN_HEAD,
    KVCacheDtype.INT4_PER_TOKEN_HEAD,
)

# Formats of rows of certain sizes only.
_SIZED_KV = (
    KVCacheDtype.NVFP4,
    KVCacheDtype.MXFP4,
    KVCacheDtype.MXFP8,
    KVCacheDtype.FP8_DS_MLA,
    KVCacheDtype.NVFP4_DS_MLA,
)

REFERENCE = Backend(
    name="REFERENCE",
    summary="float64 loop over requests, every feature",
    serves=PORTABLE_OPERATIONS,
    takes={"dtype": OneOf(*Dtype), "kv_cache_dtype": OneOf(*_TORCH_KV, *_SIZED_KV)},
    features=REFERENCE_FEATURES,
    forbids=(
        Rule(
            "row_size",
            cannot_store_rows,
            "the cache's format does not store rows of this operation and size",
            MhaConfig(head_size=72, kv_cache_dtype=KVCacheDtype.NVFP4),
        ),
    ),
    loads="attnplat.backends.portable.reference:ReferenceImpl",
    last_resort=True,
)

TORCH_SDPA = Backend(
    name="TORCH_SDPA",
    summary="torch scaled_dot_product_attention over live pages, heads folded",
    serves=PORTABLE_OPERATIONS,
    takes={"dtype": OneOf(BF16, FP16, FP32), "kv_cache_dtype": OneOf(*_TORCH_KV)},
    features=TORCH_SDPA_FEATURES,
    loads="attnplat.backends.portable.torch_sdpa:TorchSdpaImpl",
    graphs=GraphSupport.ALWAYS,
)

# Triton -----------------------------------------------------------------------------------


def triton_dtypes(*dtypes: Dtype) -> Cases:
    """The activation dtypes of Triton kernels: bfloat16 only where the device multiplies it."""
    rest = [dtype for dtype in dtypes if dtype != BF16]
    return Cases((lacks_bf16, OneOf(*rest)), otherwise=OneOf(*dtypes))


_E4M3 = frozenset({*FP8_KV, KVCacheDtype.FP8_PER_TOKEN_HEAD})


def triton_kv(*dtypes: KVCacheDtype) -> Cases:
    """The cache dtypes of Triton kernels: fp8_e4m3 only where Triton converts it."""
    rest = [dtype for dtype in dtypes if dtype not in _E4M3]
    return Cases((triton_lacks_e4m3, OneOf(*rest)), otherwise=OneOf(*dtypes))


_TRITON_MASKS = frozenset(
    {
        Feature.SLIDING_WINDOW,
        Feature.CHUNKED_LOCAL,
        Feature.LOGITS_SOFT_CAP,
        Feature.SINKS,
        Feature.ALIBI,
        Feature.NON_CAUSAL,
        Feature.MM_PREFIX,
        Feature.RSWA,
        Feature.DETERMINISTIC,
        Feature.BATCH_INVARIANCE,
    }
)

TRITON_ATTN = Backend(
    name="TRITON_ATTN",
    summary="Triton's unified paged attention: any mask, any vendor",
    serves=MHA,
    takes={
        "head_size": AtLeast(32),
        "dtype": triton_dtypes(FP16, BF16, FP32),
        "kv_cache_dtype": triton_kv(
            *PLAIN_KV,
            *FP8_KV,
            KVCacheDtype.FP8_E5M2,
            KVCacheDtype.INT4_PER_TOKEN_HEAD,
            KVCacheDtype.INT8_PER_TOKEN_HEAD,
            KVCacheDtype.FP8_PER_TOKEN_HEAD,
        ),
        "block_size": MultipleOf(16),
    },
    features=PAGED | _TRITON_MASKS,
    requires=(TRITON,),
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=16,
)

TRITON_ATTN_DIFFKV = Backend(
    name="TRITON_ATTN_DIFFKV",
    summary="Triton's paged attention for value heads narrower than key heads",
    serves=MHA,
    takes={
        "head_size": AtLeast(32),
        "attn_type": DECODER,
        "dtype": triton_dtypes(FP16, BF16, FP32),
        "kv_cache_dtype": triton_kv(KVCacheDtype.AUTO, KVCacheDtype.BFLOAT16, *FP8_KV),
        "block_size": MultipleOf(16),
    },
    features=PAGED | _TRITON_MASKS | {Feature.V_HEAD_SIZE},
    requires=(TRITON,),
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=16,
)

TRITON_MLA = Backend(
    name="TRITON_MLA",
    summary="Triton's decode of absorbed latent attention: any head size, any vendor",
    serves=MLA,
    takes={
        "attn_type": DECODER,
        "dtype": triton_dtypes(FP16, BF16),
        "kv_cache_dtype": triton_kv(*PLAIN_KV, *FP8_KV),
        "block_size": MultipleOf(16),
    },
    features=PAGED
    | {Feature.NON_CAUSAL, Feature.DETERMINISTIC, Feature.BATCH_INVARIANCE}
    | {Feature.DCP, Feature.LSE},
    requires=(TRITON,),
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=16,
)

FLEX_ATTENTION = Backend(
    name="FLEX_ATTENTION",
    summary="torch FlexAttention: masks compiled from Python, any head size",
    serves=MHA,
    takes={
        "attn_type": OneOf(AttnType.DECODER, AttnType.ENCODER_ONLY),
        "dtype": triton_dtypes(FP16, BF16, FP32),
        "kv_cache_dtype": OneOf(*PLAIN_KV),
        "block_size": MultipleOf(16),
    },
    features=PAGED
    | {Feature.SLIDING_WINDOW, Feature.CHUNKED_LOCAL, Feature.LOGITS_SOFT_CAP, Feature.ALIBI}
    | {Feature.NON_CAUSAL, Feature.TREE_MASK, Feature.MM_PREFIX, Feature.RSWA}
    | {Feature.V_HEAD_SIZE, Feature.LSE, Feature.DETERMINISTIC, Feature.BATCH_INVARIANCE},
    requires=(Package("torch", why="torch.nn.attention.flex_attention"), TRITON),
    reads=frozenset(
        {
            "flex_attn_block_m",
            "flex_attn_block_n",
            "flex_attn_q_block_size",
            "flex_attn_kv_block_size",
        }
    ),
    kv_layouts=("LBNHC",),
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=16,
)

TURBOQUANT = Backend(
    name="TURBOQUANT",
    summary="Triton decode over TurboQuant's rotated 3 to 8-bit codes; prefill on raw keys",
    serves=MHA,
    takes={
        "attn_type": DECODER,
        "dtype": triton_dtypes(FP16, BF16),
        "kv_cache_dtype": Required(OneOf(*TURBOQUANT_KV)),
        "block_size": MultipleOfAny(16, 32, 64, 128),
    },
    features=PAGED,
    requires=(TRITON,),
    reads=frozenset({"tq_max_kv_splits_for_cuda_graph"}),
    kv_layouts=("LBNHC",),
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=16,
)

MINIMAX_M3_SPARSE = Backend(
    name="MINIMAX_M3_SPARSE",
    summary="Triton attention over the blocks that MiniMax-M3's indexer chose",
    serves=BLOCK_SPARSE,
    takes={
        "model": OneOf("minimax_m3"),
        "head_size": OneOf(128),
        "dtype": HALF_DTYPES,
        "kv_cache_dtype": triton_kv(
            KVCacheDtype.AUTO, KVCacheDtype.BFLOAT16, *FP8_KV, KVCacheDtype.FP8_E5M2
        ),
        "block_size": MultipleOf(128),
    },
    features=PAGED,
    requires=(TRITON,),
    graphs=GraphSupport.UNIFORM_BATCH,
    preferred_block_size=128,
)

# Indexers ---------------------------------------------------------------------------------

TRITON_INDEXER = Backend(
    name="TRITON_INDEXER",
    summary="Triton scores of DeepSeek's sparse indexer, from a bf16 or fp8 cache",
    serves=INDEXER,
    takes={
        "model_type": OneOf("deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41"),
        "indexer_kv_dtype": Cases(
            (triton_lacks_e4m3, OneOf("bf16")), otherwise=OneOf("bf16", "fp8")
        ),
        "sparse_logits": OneOf(False),
    },
    features=PAGED | {Feature.DCP, Feature.PCP, Feature.BATCH_INVARIANCE},
    requires=(TRITON,),
    reads=frozenset({"indexer_kv_dtype"}),
    graphs=GraphSupport.ALWAYS,
)

TRITON_BLOCK_INDEXER = Backend(
    name="TRITON_BLOCK_INDEXER",
    summary="Triton scores of MiniMax-M3's blocks, from a bf16 or fp8 cache",
    serves=INDEXER,
    takes={
        "model_type": OneOf("minimax_m3"),
        "indexer_kv_dtype": Cases(
            (triton_lacks_e4m3, OneOf("bf16")), otherwise=OneOf("bf16", "fp8")
        ),
        "sparse_logits": OneOf(False),
    },
    features=PAGED | {Feature.BATCH_INVARIANCE},
    requires=(TRITON,),
    forbids=(
        Rule(
            "minimax_m3_indexer_cp",
            wants_split_indexer,
            "minimax_m3_indexer_cp is set, and this indexer is not split over ranks",
            IndexerConfig(head_size=128, model_type="minimax_m3", indexer_kv_dtype="bf16"),
            {"wishes": AttentionConfig(minimax_m3_indexer_cp=True)},
        ),
    ),
    reads=frozenset({"indexer_kv_dtype", "minimax_m3_indexer_cp"}),
    graphs=GraphSupport.ALWAYS,
    preferred_block_size=128,
)

# State ------------------------------------------------------------------------------------


def _state(
    name: str, kind: StateKind, summary: str, graphs: GraphSupport, also: Iterable[Feature] = ()
) -> Backend:
    return Backend(
        name=name,
        summary=summary,
        serves=STATE,
        takes={"state_kind": OneOf(kind), "dtype": OneOf(FP16, BF16, FP32)},
        features=frozenset({Feature.KV_CONNECTOR, *also}),
        requires=(TRITON,),
        graphs=graphs,
    )


STATE_BACKENDS = (
    _state(
        "MAMBA1_ATTN",
        StateKind.MAMBA1,
        "Mamba's selective scan",
        GraphSupport.UNIFORM_BATCH,
    ),
    _state(
        "MAMBA2_ATTN",
        StateKind.MAMBA2,
        "Mamba-2's chunked state-space scan",
        GraphSupport.UNIFORM_BATCH,
        also={Feature.ADAPTIVE_VERIFICATION},
    ),
    _state(
        "SHORT_CONV_ATTN",
        StateKind.SHORT_CONV,
        "short causal convolution with a rolling state",
        GraphSupport.UNIFORM_BATCH,
    ),
    _state(
        "LINEAR_ATTN",
        StateKind.LINEAR,
        "linear attention with decay",
        GraphSupport.SINGLE_TOKEN_DECODE,
    ),
    _state(
        "GDN_ATTN",
        StateKind.GDN,
        "gated delta net",
        GraphSupport.UNIFORM_BATCH,
    ),
)


def _portable(*backends: Backend) -> tuple[Backend, ...]:
    """The same backends, trusted with architectures that nobody knows yet."""
    return tuple(replace(backend, portable=True) for backend in backends)


PORTABLE = _portable(TORCH_SDPA, REFERENCE)
PORTABLE_GPU = _portable(
    TRITON_ATTN,
    TRITON_ATTN_DIFFKV,
    TRITON_MLA,
    FLEX_ATTENTION,
    TURBOQUANT,
    MINIMAX_M3_SPARSE,
    TRITON_INDEXER,
    TRITON_BLOCK_INDEXER,
    *STATE_BACKENDS,
)
