"""What WINDOW_ATTN takes: facts. No torch here: every selection reads this file."""

from __future__ import annotations

from attnplat.backends.backend import Backend
from attnplat.backends.limits import OneOf
from attnplat.config.names import Feature, Operation

FEATURES = frozenset(
    {
        Feature.SLIDING_WINDOW,
        Feature.LOGITS_SOFT_CAP,
        Feature.SINKS,
        Feature.V_HEAD_SIZE,
        Feature.LSE,
        Feature.DETERMINISTIC,
        Feature.BATCH_INVARIANCE,
        Feature.KV_CONNECTOR,
        Feature.ADAPTIVE_VERIFICATION,
    }
)
"""Silence means no: a layer that wants anything else is refused, and told so."""


WINDOW_ATTN = Backend(
    name="WINDOW_ATTN",
    summary="plain torch over the tokens of a sliding window, float32 inside",
    serves=frozenset({Operation.MHA}),
    takes={
        "dtype": OneOf("float16", "bfloat16", "float32"),
        "kv_cache_dtype": OneOf("auto", "float16", "bfloat16", "float32"),
        "attn_type": OneOf("decoder"),
    },
    features=FEATURES,
    loads="attnplat_window.impls.attention:WindowAttnImpl",
)

CATALOG = (WINDOW_ATTN,)
