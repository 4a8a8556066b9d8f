"""A recorded selection case as attnplat's own values: config, run, wishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from attnplat.config.layer import (
    BlockSparseConfig,
    LayerConfig,
    MhaConfig,
    MlaConfig,
    SparseMlaConfig,
)
from attnplat.config.names import Feature, LayerKind
from attnplat.config.run import RunContext
from attnplat.snapshots.fields import FLAG, OBJECT, SIZE, TEXT, Fields, optional

# Flags of the recorded schema that only say something of ordinary attention; a latent or
# block-sparse layer that carries one asks for a feature that its own config has no field for.
_FLAG_FEATURES = {
    "use_mm_prefix": Feature.MM_PREFIX,
    "use_per_head_quant_scales": Feature.PER_HEAD_QUANT_SCALES,
    "use_rswa": Feature.RSWA,
}
LAYER_FIELDS: Fields = {
    "num_heads": optional(SIZE),
    "head_size": SIZE,
    "dtype": TEXT,
    "kv_cache_dtype": optional(TEXT),
    "block_size": optional(SIZE),
    "attn_type": TEXT,
    **dict.fromkeys(
        (
            "use_mla",
            "use_sparse",
            "has_sink",
            "has_sliding_window",
            "use_non_causal",
            "use_batch_invariant",
            "use_kv_connector",
            "use_pcp",
            "use_dcp",
            "use_adaptive_verification",
            *_FLAG_FEATURES,
        ),
        FLAG,
    ),
}
# Of a model; each may be left out.
CONTEXT_FIELDS: Fields = {
    "num_kv_heads": optional(SIZE),
    "mla": optional(OBJECT),
    "run_kv_cache_dtype": optional(TEXT),
    "model_attn_type": optional(TEXT),
    "model_head_size": optional(SIZE),
    "is_diffusion": optional(FLAG),
    "use_trtllm_attention": optional(FLAG),
}
_TRANSLATED = ("CUTLASS_MSA", "TRITON_MSA")
_DEFAULT_WINDOW = (127, -1)
_RSWA_WINDOW = 128


@dataclass(frozen=True)
class Case:
    """One layer to select for, in attnplat's values.

    `wishes` are fields of an attention config: the recorded backend may be no name of ours.
    """

    config: LayerConfig
    run: RunContext
    wishes: dict[str, Any]


def case_of(row: Mapping[str, Any]) -> Case:
    """The case of a row of the selection table."""
    return _case(json.dumps([row["config"], row.get("context"), row["requested"]]))


# The same few hundred layers are recorded on every device.
@lru_cache(maxsize=4096)
def _case(text: str) -> Case:
    recorded, context, requested = json.loads(text)
    config = _config(recorded, context or {})
    wishes = _wishes(recorded, context or {}, requested, config.kind)
    return Case(config, _run(recorded, context), wishes)


def _config(recorded: Mapping[str, Any], context: Mapping[str, Any]) -> LayerConfig:
    also = {f for flag, f in _FLAG_FEATURES.items() if recorded[flag]}
    if recorded["use_non_causal"]:
        also.add(Feature.NON_CAUSAL)
    common: dict[str, Any] = {
        "head_size": recorded["head_size"],
        "dtype": recorded["dtype"],
        "kv_cache_dtype": recorded["kv_cache_dtype"],
        "block_size": recorded["block_size"],
        "num_heads": recorded["num_heads"],
        "num_kv_heads": _kv_heads(recorded["num_heads"], context.get("num_kv_heads")),
        "sliding_window": _DEFAULT_WINDOW if recorded["has_sliding_window"] else (-1, -1),
        "sinks": recorded["has_sink"],
        "also_needs": frozenset(also),
    }
    if recorded["use_mla"]:
        cls = SparseMlaConfig if recorded["use_sparse"] else MlaConfig
        dims = _dims(recorded["head_size"], context.get("mla") or {})
        return cls(**common, **dims, attn_type=recorded["attn_type"])
    if recorded["use_sparse"]:
        return BlockSparseConfig(**common)
    return MhaConfig(**common, attn_type=recorded["attn_type"])


def _kv_heads(heads: int | None, kv_heads: int | None) -> int | None:
    """The key-value heads, or None where the two cannot be of one layer: grids vary one alone."""
    contradict = heads is not None and kv_heads is not None and heads % kv_heads
    return None if contradict else kv_heads


def _dims(head_size: int, mla: Mapping[str, Any]) -> dict[str, Any]:
    dims = {
        "qk_nope_head_dim": mla.get("qk_nope_head_dim"),
        "qk_rope_head_dim": mla.get("qk_rope_head_dim"),
        "kv_lora_rank": mla.get("kv_lora_rank"),
        "v_head_size": mla.get("v_head_dim"),
        "index_topk": mla.get("index_topk"),
    }
    lora, rope = dims["kv_lora_rank"], dims["qk_rope_head_dim"]
    if lora is not None and rope is not None and lora + rope != head_size:
        dims["kv_lora_rank"] = None  # recorded grids vary head_size alone
    return dims


def _run(recorded: Mapping[str, Any], context: Mapping[str, Any] | None) -> RunContext:
    model: dict[str, Any] = {}
    if context is not None:
        model = {
            "model_head_size": context.get("model_head_size") or recorded["head_size"],
            "model_attn_type": context.get("model_attn_type"),
            "model_soft_cap": context.get("softcap"),
            "is_diffusion": context.get("is_diffusion"),
            "uses_mm_prefix": recorded["use_mm_prefix"],
            "rswa_window": _RSWA_WINDOW if recorded["use_rswa"] else None,
        }
    return RunContext(
        **model,
        run_kv_cache_dtype=(context or {}).get("run_kv_cache_dtype") or recorded["kv_cache_dtype"],
        dcp_size=2 if recorded["use_dcp"] else 1,
        pcp_size=2 if recorded["use_pcp"] else 1,
        kv_connector=recorded["use_kv_connector"],
        batch_invariant=recorded["use_batch_invariant"],
        adaptive_verification=recorded["use_adaptive_verification"],
    )


def _wishes(
    recorded: Mapping[str, Any], context: Mapping[str, Any], requested: str | None, kind: LayerKind
) -> dict[str, Any]:
    # The recorded selector was handed names that a config given as `backend` would translate.
    handed = requested in _TRANSLATED
    return {
        "backend": None if handed else requested,
        "backend_per_kind": {kind: requested} if handed else (),
        "flash_attn_version": context.get("flash_attn_version"),
        "use_trtllm_attention": context.get("use_trtllm_attention"),
        "use_non_causal": recorded["use_non_causal"],
    }
