"""The closed vocabularies of a configuration: operations, features, dtypes, kinds, names.

Standard library only. Every parser here takes what users really pass (any case, a
`torch.dtype`, an enum member) and answers one canonical spelling, or raises
`UnknownNameError` with the known names and the closest.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

from attnplat.errors import UnknownNameError

E = TypeVar("E", bound=StrEnum)


class Name(StrEnum):
    """A name of a closed vocabulary. Hashes as its text does, since sets of them are asked
    thousands of times in a decision and an enum's own hash is a Python call."""

    __hash__ = str.__hash__


class Operation(Name):
    """What a layer computes. Each has its own config class and its own rows of preferences."""

    MHA = "mha"
    MLA = "mla"
    MLA_PREFILL = "mla_prefill"
    SPARSE_MLA = "sparse_mla"
    BLOCK_SPARSE = "block_sparse"
    INDEXER = "indexer"
    STATE = "state"


class AttnType(Name):
    """Where queries and keys come from.

    decoder: self-attention over a KV cache; encoder: the encoder of an encoder-decoder
    model; encoder_only: a model without a decoder; encoder_decoder: cross attention.
    """

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class Role(Name):
    """Which tower of a model the layer belongs to."""

    TEXT = "text"
    VISION = "vision"


class Feature(Name):
    """A want that a layer or a run may have and a backend must opt in to.

    Silence means no: a backend takes a feature only when its declaration names it.
    """

    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    LOGITS_SOFT_CAP = "logits_soft_cap"
    SINKS = "sinks"
    STATIC_SINK_TOKENS = "static_sink_tokens"
    ALIBI = "alibi"
    POSITION_BIAS = "position_bias"
    NON_CAUSAL = "non_causal"
    NON_CAUSAL_DCP = "non_causal_dcp"
    PER_REQUEST_CAUSAL = "per_request_causal"
    TREE_MASK = "tree_mask"
    MM_PREFIX = "mm_prefix"
    PREFIX_LENGTHS = "prefix_lengths"
    RSWA = "rswa"
    TOPK = "topk"
    V_HEAD_SIZE = "v_head_size"
    PER_HEAD_QUANT_SCALES = "per_head_quant_scales"
    LSE = "lse"
    DETERMINISTIC = "deterministic"
    BATCH_INVARIANCE = "batch_invariance"
    ADAPTIVE_VERIFICATION = "adaptive_verification"
    KV_CONNECTOR = "kv_connector"
    DCP = "dcp"
    PCP = "pcp"


class LayerKind(Name):
    """KV-cache kind of a layer: the keys of `AttentionConfig.backend_per_kind`."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


class StateKind(Name):
    """Recurrent-state operations that take the place of attention."""

    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    SHORT_CONV = "short_conv"
    LINEAR = "linear"
    GDN = "gdn"


class Dtype(Name):
    """Activation dtypes, by the name torch gives them."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


class KVCacheDtype(Name):
    """The user's word for the format of the KV cache (vLLM's strings, mxfp4 and mxfp8)."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FP8 = "fp8"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP8_INC = "fp8_inc"
    FP8_DS_MLA = "fp8_ds_mla"
    NVFP4_DS_MLA = "nvfp4_ds_mla"
    TURBOQUANT_K8V4 = "turboquant_k8v4"
    TURBOQUANT_4BIT_NC = "turboquant_4bit_nc"
    TURBOQUANT_K3V4_NC = "turboquant_k3v4_nc"
    TURBOQUANT_3BIT_NC = "turboquant_3bit_nc"
    OCTAVE_K3V4 = "octave_k3v4"
    OCTAVE_K3V3 = "octave_k3v3"
    OCTAVE_K3V3_COMPACT = "octave_k3v3_compact"
    ULTRAQUANT_4BIT = "ultraquant_4bit"
    INT4_PER_TOKEN_HEAD = "int4_per_token_head"
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"
    FP8_PER_TOKEN_HEAD = "fp8_per_token_head"
    NVFP4 = "nvfp4"
    NVFP4_4OVER6 = "nvfp4_4over6"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"


PLAIN_KV_CACHE_DTYPES = frozenset(
    {KVCacheDtype.AUTO, KVCacheDtype.FLOAT16, KVCacheDtype.BFLOAT16, KVCacheDtype.FLOAT32}
)

INDEXER_KV_DTYPES = ("auto", "bf16", "fp8", "mxfp4", "nvfp4")

_DTYPE_SHORT = {
    "half": Dtype.FLOAT16,
    "fp16": Dtype.FLOAT16,
    "bf16": Dtype.BFLOAT16,
    "float": Dtype.FLOAT32,
    "fp32": Dtype.FLOAT32,
    "double": Dtype.FLOAT64,
    "fp64": Dtype.FLOAT64,
}


def parse_name(kind: type[E], value: Any, what: str) -> E:
    """The member of `kind` that `value` names, in any case.

    Raises UnknownNameError listing the members and the closest one.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            pass
        folded = value.strip().lower().replace("-", "_")
        for member in kind:
            if member.value.lower() == folded:
                return member
    raise UnknownNameError(what, value, kind)


def parse_dtype(value: Any) -> Dtype:
    """The activation dtype that `value` names: `"bfloat16"`, `"bf16"`, `torch.bfloat16` ..."""
    text = value if isinstance(value, str) else str(value)
    folded = text.strip().lower().removeprefix("torch.")
    if folded in _DTYPE_SHORT:
        return _DTYPE_SHORT[folded]
    try:
        return Dtype(folded)
    except ValueError:
        raise UnknownNameError("dtype", text, Dtype) from None


def parse_kv_cache_dtype(value: Any) -> KVCacheDtype:
    """The KV-cache dtype that `value` names; torch dtypes of the plain formats are taken too."""
    text = value if isinstance(value, str) else str(value)
    folded = text.strip().lower().removeprefix("torch.")
    short = _DTYPE_SHORT.get(folded)
    return parse_name(KVCacheDtype, short.value if short else folded, "kv_cache_dtype")
