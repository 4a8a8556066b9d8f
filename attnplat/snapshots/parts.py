"""Tables of what is chosen beside a layer's attention: prefill, vision, state, indexer."""

from __future__ import annotations

from typing import Any

from attnplat.config.layer import IndexerConfig, MhaConfig, MlaPrefillConfig, StateConfig
from attnplat.config.names import AttnType, Role
from attnplat.config.run import RunContext
from attnplat.platforms.platform import Platform
from attnplat.snapshots.fields import (
    FLAG,
    OBJECT,
    SIZE,
    SIZE_OR_ZERO,
    TEXT,
    Fields,
    check_fields,
    optional,
)
from attnplat.snapshots.kind import (
    Kind,
    Outcome,
    Row,
    agree_on_choice,
    ask,
    chosen_name,
    error_of,
    refused,
    with_fields,
)

# The recorded names of the state-space kinds; CUSTOM is none of ours.
_STATE_KINDS = {
    "MAMBA1": "mamba1",
    "MAMBA2": "mamba2",
    "SHORT_CONV": "short_conv",
    "LINEAR": "linear",
    "GDN_ATTN": "gdn",
}
_INDEX_HEAD_SIZE = 128


def decide_prefill(row: Row, platform: Platform) -> Outcome:
    """Which backend prefills an MLA layer of the given dimensions."""
    dims, requested = row["mla_dims"], row["requested"]
    config = MlaPrefillConfig(
        head_size=dims["qk_nope_head_dim"] + dims["qk_rope_head_dim"],
        dtype=row["dtype"],
        qk_nope_head_dim=dims["qk_nope_head_dim"],
        qk_rope_head_dim=dims["qk_rope_head_dim"],
        v_head_size=dims["v_head_dim"],
    )
    run = RunContext(batch_invariant=row["batch_invariant"])
    selection = ask(platform, config, run, mla_prefill_backend=requested)
    return {"selected": chosen_name(selection), "error": error_of(selection, requested)}


def decide_vision(row: Row, platform: Platform) -> Outcome:
    """Which backend a vision tower's layer uses."""
    requested = row["requested"]
    config = MhaConfig(
        head_size=row["head_size"],
        dtype=row["dtype"],
        kv_cache_dtype=None,
        attn_type=AttnType.ENCODER_ONLY,
        role=Role.VISION,
    )
    selection = ask(platform, config, backend=requested)
    return {"selected": chosen_name(selection), "error": error_of(selection, requested)}


def decide_state(row: Row, platform: Platform) -> Outcome:
    """Which backend a recurrent layer uses."""
    kind = _STATE_KINDS.get(row["mamba_type"])
    if kind is None:
        return {"selected": None, "error": "no_class"}
    config = StateConfig(head_size=1, state_kind=kind)
    run = RunContext(batch_invariant=row["batch_invariant"])
    selection = ask(platform, config, run)
    return {"selected": chosen_name(selection), "error": error_of(selection, None)}


def decide_indexer(row: Row, platform: Platform) -> Outcome:
    """Which format the cache of DeepSeek's sparse indexer has."""
    config = IndexerConfig(
        head_size=_INDEX_HEAD_SIZE,
        model_type=row["model_type"],
        sparse_logits=row["indexer_sparse_logits"],
    )
    run = RunContext(dcp_size=2 if row["dcp"] else 1, pcp_size=2 if row["pcp"] else 1)
    selection = ask(platform, config, run, indexer_kv_dtype=row["requested"])
    resolved: Any = selection.config if selection is not None and selection.ok else None
    return {
        "resolved": resolved and resolved.indexer_kv_dtype,
        "backend": chosen_name(selection),
        "error": error_of(selection, None),
    }


def agree_on_format(outcome: Outcome, recorded: Row) -> bool:
    """Whether two outcomes refuse together or resolve to the same format."""
    same = outcome["resolved"] == recorded["resolved"]
    return bool(same) and refused(outcome) == refused(recorded)


def _is_vision(row: Row) -> bool:
    return "rule" not in row and {"head_size", "dtype", "requested"} <= row.keys()


def check_prefill(row: Row) -> None:
    """Raise ConfigError unless the row tells the three sizes of a latent head."""
    fields = {"mla_dims": OBJECT, "dtype": TEXT, "batch_invariant": FLAG, **_REQUEST}
    with_fields(fields)(row)
    sizes = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), SIZE_OR_ZERO)
    check_fields(row["mla_dims"], sizes, "mla_dims of a case")


_REQUEST: Fields = {"requested": optional(TEXT)}
PREFILL = Kind(
    "prefill", lambda row: "mla_dims" in row, decide_prefill, agree_on_choice, check_prefill
)
VISION = Kind(
    "vit",
    _is_vision,
    decide_vision,
    agree_on_choice,
    with_fields({"head_size": SIZE, "dtype": TEXT, **_REQUEST}),
)
STATE = Kind(
    "mamba",
    lambda row: "mamba_type" in row,
    decide_state,
    agree_on_choice,
    with_fields({"mamba_type": TEXT, "batch_invariant": FLAG}),
)
INDEXER = Kind(
    "indexer",
    lambda row: row.get("rule") == "dsa",
    decide_indexer,
    agree_on_format,
    with_fields(
        {
            "model_type": TEXT,
            "requested": optional(TEXT),
            "dcp": FLAG,
            "pcp": FLAG,
            "indexer_sparse_logits": FLAG,
        }
    ),
)
