"""The table of layer kinds: which kind a layer is of, and what a wish per kind does."""

from __future__ import annotations

from typing import Any

from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import LayerConfig, MhaConfig, MlaConfig
from attnplat.config.names import LayerKind
from attnplat.errors import ConfigError
from attnplat.platforms.platform import Platform
from attnplat.snapshots.fields import FLAG, NAMES, TEXT, Field, Fields, optional
from attnplat.snapshots.kind import (
    RECORDED_ONLY,
    Kind,
    Outcome,
    Row,
    ask,
    chosen_name,
    error_of,
    refused,
    with_fields,
)

_WINDOW, _OPEN = (127, -1), (-1, -1)
_DENSE: dict[str, Any] = {"head_size": 128, "num_heads": 32, "num_kv_heads": 8}
_LATENT: dict[str, Any] = {
    "head_size": 576,
    "num_heads": 16,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "v_head_size": 128,
}
# The layers that the recorded rows name.
_LAYERS: dict[str, LayerConfig] = {
    "full": MhaConfig(**_DENSE),
    "swa": MhaConfig(**_DENSE, sliding_window=_WINDOW),
    "enc_only": MhaConfig(**_DENSE, attn_type="encoder_only"),
    "cross": MhaConfig(**_DENSE, attn_type="encoder_decoder"),
    "mla": MlaConfig(**_LATENT),
}


def decide_kinds(row: Row, platform: Platform) -> Outcome:
    """The outcome fields of one rule of the table."""
    return _RULES[row["rule"]](row, platform)


def _spec_kind(row: Row, platform: Platform) -> Outcome:
    window = _WINDOW if row["has_sliding_window"] else _OPEN
    common: dict[str, Any] = {"attn_type": row["attn_type"], "sliding_window": window}
    latent = row["use_mla"]
    config = MlaConfig(head_size=576, **common) if latent else MhaConfig(head_size=128, **common)
    return {"kind": str(config.kind)}


def _all_kinds(row: Row, platform: Platform) -> Outcome:
    field = next((name for name, value in row.items() if isinstance(value, list)), "kinds")
    return {field: [str(kind) for kind in LayerKind]}


def _backend_parse(row: Row, platform: Platform) -> Outcome:
    value = row["value"]
    if value in RECORDED_ONLY:
        return {"parsed": None, "error": "unknown_backend"}
    try:
        wishes = AttentionConfig(backend=value)
    except ConfigError:
        return {"parsed": None, "error": "unknown_backend"}
    return {
        "parsed": wishes.backend and str(wishes.backend),
        "minimax_m3_msa_decode_backend": wishes.minimax_m3_msa_decode_backend,
        "error": None,
    }


def _per_kind_parse(row: Row, platform: Platform) -> Outcome:
    try:
        wishes = AttentionConfig(backend_per_kind=row["value"])
    except ConfigError:
        return {"parsed": None, "error": "unknown_backend"}
    parsed = {str(kind): str(name) for kind, name in wishes.backend_per_kind.items()}
    return {"parsed": parsed, "error": None}


def _per_kind_select(row: Row, platform: Platform) -> Outcome:
    wanted, per_kind = row["global_backend"], row["backend_per_kind"]
    selection = ask(
        platform,
        _LAYERS[row["layer"]],
        backend=wanted,
        backend_per_kind=per_kind,
    )
    asked = wanted or (str(per_kind) if per_kind else None)
    return {"selected": chosen_name(selection), "error": error_of(selection, asked)}


_RULES = {
    "spec_kind": _spec_kind,
    "all_kinds": _all_kinds,
    "backend_parse": _backend_parse,
    "backend_per_kind_parse": _per_kind_parse,
    "backend_per_kind_select": _per_kind_select,
}


def agree_on_kinds(outcome: Outcome, recorded: Row) -> bool:
    """Whether kind, parsed value and choice are the same, whichever the rule has."""
    if refused(outcome) or refused(recorded):
        return refused(outcome) and refused(recorded)
    compared = (field for field in outcome if field != "error")
    return all(_same(outcome[field], recorded.get(field)) for field in compared)


def _same(value: Any, recorded: Any) -> bool:
    """Whether two values are the same; the kinds there are have no order."""
    if isinstance(value, list) and isinstance(recorded, list):
        return sorted(map(str, value)) == sorted(map(str, recorded))
    return bool(value == recorded)


_FIELDS: dict[str, Fields] = {
    "spec_kind": {"attn_type": TEXT, "use_mla": FLAG, "has_sliding_window": FLAG},
    "all_kinds": {},
    "backend_parse": {"value": optional(TEXT)},
    "backend_per_kind_parse": {"value": NAMES},
    "backend_per_kind_select": {
        "layer": Field(" or ".join(_LAYERS), lambda v: isinstance(v, str) and v in _LAYERS),
        "global_backend": optional(TEXT),
        "backend_per_kind": NAMES,
    },
}


def check_kinds(row: Row) -> None:
    """Raise ConfigError unless the row holds what its rule is about."""
    with_fields(_FIELDS[row["rule"]])(row)


KINDS = Kind(
    "kinds",
    lambda row: isinstance(row.get("rule"), str) and row["rule"] in _RULES,
    decide_kinds,
    agree_on_kinds,
    check_kinds,
)
