"""Backends that run wherever torch runs. Every platform's catalog includes them."""

from __future__ import annotations

from attnplat.backends.backend import Backend
from attnplat.backends.limits import OneOf
from attnplat.backends.portable.features import (
    PORTABLE_OPERATIONS,
    REFERENCE_FEATURES,
    TORCH_SDPA_FEATURES,
)
from attnplat.config.names import Dtype, KVCacheDtype

_PLAIN = OneOf(
    KVCacheDtype.AUTO, KVCacheDtype.FLOAT16, KVCacheDtype.BFLOAT16, KVCacheDtype.FLOAT32
)

REFERENCE = Backend(
    name="REFERENCE",
    summary="float64 loop over requests, every feature",
    serves=PORTABLE_OPERATIONS,
    takes={
        "dtype": OneOf(*Dtype),
        "kv_cache_dtype": _PLAIN,
    },
    features=REFERENCE_FEATURES,
    loads="attnplat.backends.portable.reference:ReferenceImpl",
    last_resort=True,
)

TORCH_SDPA = Backend(
    name="TORCH_SDPA",
    summary="torch scaled_dot_product_attention over live pages, heads folded",
    serves=PORTABLE_OPERATIONS,
    takes={
        "dtype": OneOf(Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32),
        "kv_cache_dtype": _PLAIN,
    },
    features=TORCH_SDPA_FEATURES,
    loads="attnplat.backends.portable.torch_sdpa:TorchSdpaImpl",
)

PORTABLE = (TORCH_SDPA, REFERENCE)
