"""Backends of devices that attnplat has no platform for: known by name, judged, never run."""

from __future__ import annotations

from attnplat.backends.backend import Backend
from attnplat.backends.limits import OneOf
from attnplat.config.names import AttnType, Feature, KVCacheDtype, Operation

ELSEWHERE = "xpu"

CATALOG: tuple[Backend, ...] = (
    Backend(
        name="XPU_MLA_SPARSE",
        summary="Triton kernels for sparse latent attention on Intel's GPUs",
        serves=frozenset({Operation.SPARSE_MLA}),
        takes={
            "head_size": OneOf(576),
            "dtype": OneOf("float16", "bfloat16"),
            "kv_cache_dtype": OneOf(KVCacheDtype.AUTO, KVCacheDtype.FLOAT16, KVCacheDtype.BFLOAT16),
            "attn_type": OneOf(AttnType.DECODER),
        },
        features=frozenset({Feature.PCP, Feature.KV_CONNECTOR, Feature.ADAPTIVE_VERIFICATION}),
    ),
)
