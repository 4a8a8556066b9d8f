"""The exact formats a KV cache can be stored in, and the one bridge from the user's word.

A user says `fp8`; what is stored depends on the operation and on the device. An encoding
names the stored bits and nothing else, so that decoding depends on the format and never on
the platform. No torch here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from attnplat.config.names import Dtype, KVCacheDtype, Operation, parse_dtype, parse_kv_cache_dtype
from attnplat.errors import ConfigError


class Encoding(StrEnum):
    """How the numbers of a KV cache are stored."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FP8_E4M3FN = "fp8_e4m3fn"
    FP8_E4M3FNUZ = "fp8_e4m3fnuz"
    FP8_E5M2 = "fp8_e5m2"
    INT8_TH = "int8_th"
    FP8_TH = "fp8_th"
    FP8_TH_FNUZ = "fp8_th_fnuz"
    INT4_TH = "int4_th"
    NVFP4 = "nvfp4"
    NVFP4_4OVER6 = "nvfp4_4over6"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    TURBO_K8V4 = "turbo_k8v4"
    TURBO_4BIT_NC = "turbo_4bit_nc"
    TURBO_K3V4_NC = "turbo_k3v4_nc"
    TURBO_3BIT_NC = "turbo_3bit_nc"
    OCTAVE_K3V4 = "octave_k3v4"
    OCTAVE_K3V3 = "octave_k3v3"
    OCTAVE_K3V3_COMPACT = "octave_k3v3_compact"
    ULTRA_4BIT = "ultra_4bit"
    MLA_FP8_656 = "mla_fp8_656"
    MLA_FP8_584 = "mla_fp8_584"
    MLA_FP8_528 = "mla_fp8_528"
    MLA_NVFP4_352 = "mla_nvfp4_352"
    INDEX_FP8_132 = "index_fp8_132"
    INDEX_FP8_132_FNUZ = "index_fp8_132_fnuz"
    INDEX_FP8_132_E8M0 = "index_fp8_132_e8m0"
    INDEX_MXFP4_68 = "index_mxfp4_68"


PLAIN_ENCODINGS = frozenset(
    {Encoding.FLOAT16, Encoding.BFLOAT16, Encoding.FLOAT32, Encoding.FLOAT64}
)
"""One number per element in a torch dtype of the same name: nothing to decode."""


class HasArch(Protocol):
    """What the bridge asks of a device; `DeviceInfo` is one."""

    @property
    def arch(self) -> str: ...


FNUZ_ARCHS = frozenset({"gfx940", "gfx941", "gfx942"})
"""Architectures whose matrix units read the fnuz form of fp8 e4m3 (CDNA3)."""

# What the word means where e4m3 is the OCP form, and where it is the fnuz form.
_E4M3 = {
    KVCacheDtype.FP8: (Encoding.FP8_E4M3FN, Encoding.FP8_E4M3FNUZ),
    KVCacheDtype.FP8_E4M3: (Encoding.FP8_E4M3FN, Encoding.FP8_E4M3FNUZ),
    KVCacheDtype.FP8_INC: (Encoding.FP8_E4M3FN, Encoding.FP8_E4M3FNUZ),
    KVCacheDtype.FP8_PER_TOKEN_HEAD: (Encoding.FP8_TH, Encoding.FP8_TH_FNUZ),
}

_LATENT = {
    KVCacheDtype.FP8_DS_MLA: Encoding.MLA_FP8_656,
    KVCacheDtype.NVFP4_DS_MLA: Encoding.MLA_NVFP4_352,
}

_DIRECT = {
    KVCacheDtype.FLOAT16: Encoding.FLOAT16,
    KVCacheDtype.BFLOAT16: Encoding.BFLOAT16,
    KVCacheDtype.FLOAT32: Encoding.FLOAT32,
    KVCacheDtype.FP8_E5M2: Encoding.FP8_E5M2,
    KVCacheDtype.INT8_PER_TOKEN_HEAD: Encoding.INT8_TH,
    KVCacheDtype.INT4_PER_TOKEN_HEAD: Encoding.INT4_TH,
    KVCacheDtype.NVFP4: Encoding.NVFP4,
    KVCacheDtype.NVFP4_4OVER6: Encoding.NVFP4_4OVER6,
    KVCacheDtype.MXFP4: Encoding.MXFP4,
    KVCacheDtype.MXFP8: Encoding.MXFP8,
    KVCacheDtype.TURBOQUANT_K8V4: Encoding.TURBO_K8V4,
    KVCacheDtype.TURBOQUANT_4BIT_NC: Encoding.TURBO_4BIT_NC,
    KVCacheDtype.TURBOQUANT_K3V4_NC: Encoding.TURBO_K3V4_NC,
    KVCacheDtype.TURBOQUANT_3BIT_NC: Encoding.TURBO_3BIT_NC,
    KVCacheDtype.OCTAVE_K3V4: Encoding.OCTAVE_K3V4,
    KVCacheDtype.OCTAVE_K3V3: Encoding.OCTAVE_K3V3,
    KVCacheDtype.OCTAVE_K3V3_COMPACT: Encoding.OCTAVE_K3V3_COMPACT,
    KVCacheDtype.ULTRAQUANT_4BIT: Encoding.ULTRA_4BIT,
}


def resolve_encoding(
    kv_cache_dtype: KVCacheDtype | str | None,
    operation: Operation,
    device: HasArch | None = None,
    *,
    dtype: Dtype | str = Dtype.BFLOAT16,
) -> Encoding:
    """The stored format that the user's `kv_cache_dtype` means here.

    `auto` and None are the activation dtype. `fp8` and `fp8_per_token_head` are e4m3: its fnuz
    form on CDNA3 and the OCP form everywhere else. `device` may be None for words that no
    device changes.

    Raises:
        ConfigError: a latent format for an operation without a latent cache, an operation
            without keys and values, or e4m3 without a device.
    """
    if operation in (Operation.INDEXER, Operation.STATE):
        raise ConfigError(
            f"operation {operation.value!r} caches no keys and values, so kv_cache_dtype "
            f"{str(kv_cache_dtype)!r} has no encoding for it; an indexer takes indexer_kv_dtype"
        )
    word = KVCacheDtype.AUTO if kv_cache_dtype is None else parse_kv_cache_dtype(kv_cache_dtype)
    if word == KVCacheDtype.AUTO:
        return Encoding(parse_dtype(dtype).value)
    if word in _LATENT:
        if operation not in (Operation.MLA, Operation.SPARSE_MLA):
            raise ConfigError(
                f"kv_cache_dtype {word.value!r} stores latent rows; operation "
                f"{operation.value!r} has none (mla and sparse_mla have); use 'fp8' or 'auto'"
            )
        return _LATENT[word]
    if word in _E4M3:
        ocp, fnuz = _E4M3[word]
        if device is None:
            raise ConfigError(
                f"kv_cache_dtype {word.value!r} means different bits on different devices; "
                f"pass the device, or the encoding itself ({ocp.value}, {fnuz.value})"
            )
        return fnuz if device.arch in FNUZ_ARCHS else ocp
    return _DIRECT[word]
