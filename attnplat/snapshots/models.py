"""Tables of what a model's own code chooses: MiniMax-M3, DeepSeek-V4, values of another width.

Compared by implementation family: one word for the recorded class names and attnplat's
backends alike.
"""

from __future__ import annotations

from collections.abc import Callable

from attnplat.config.layer import BlockSparseConfig, IndexerConfig, MhaConfig, SparseMlaConfig
from attnplat.config.names import Feature
from attnplat.config.run import RunContext
from attnplat.platforms.platform import Platform
from attnplat.snapshots.fields import FLAG, SIZE, TEXT, Fields, optional
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

_MINIMAX = "minimax_m3"
_MINIMAX_HEAD_SIZE = 128
_V4_ROW, _V4_ROPE = 512, 64
# Sizes of a row that gives none: those of the published model with narrow values.
_KEY_SIZE, _VALUE_SIZE = 192, 128


def minimax_family(name: str) -> str:
    """The family of a recorded class or of a backend: triton, triton_cp, msa ..."""
    folded = name.upper().replace("_", "")
    if "NVFP4" in folded:
        return "msa_nvfp4"
    if "AITER" in folded:
        return "aiter"
    if folded.endswith("MSA"):
        return "msa"  # TRITON_MSA names only the decode kernel beside MSA's own
    if "TRITON" in folded:
        return "triton_cp" if folded.removesuffix("IMPL").endswith("CP") else "triton"
    return "msa" if "MSA" in folded else "triton"


def decide_minimax(row: Row, platform: Platform) -> Outcome:
    """Which kernels MiniMax-M3's indexer, or its block-sparse attention, uses."""
    main = row["rule"] == "minimax_m3_main"
    return _minimax_main(row, platform) if main else _minimax_indexer(row, platform)


def _minimax_indexer(row: Row, platform: Platform) -> Outcome:
    wanted = "fp8" if row["indexer_kv_dtype"] == "fp8_e4m3" else row["indexer_kv_dtype"]
    config = IndexerConfig(
        head_size=_MINIMAX_HEAD_SIZE, model_type=_MINIMAX, topk=row["topk_blocks"]
    )
    selection = ask(
        platform,
        config,
        RunContext(tp_size=row["tp"]),
        indexer_kv_dtype=wanted,
        minimax_m3_indexer_cp=row["indexer_cp"],
    )
    name = chosen_name(selection)
    family = name and minimax_family(name)
    return {
        "selected": "triton_cp" if family == "triton" and row["indexer_cp"] else family,
        "backend": name,
        "error": error_of(selection, None),
    }


def _minimax_main(row: Row, platform: Platform) -> Outcome:
    # The model turns `auto` into its own dtype before it asks.
    kv_cache_dtype = "bfloat16" if row["kv_cache_dtype"] == "auto" else row["kv_cache_dtype"]
    config = BlockSparseConfig(
        head_size=_MINIMAX_HEAD_SIZE,
        kv_cache_dtype=kv_cache_dtype,
        num_kv_heads=row["num_kv_heads"],
        model=_MINIMAX,
        topk_blocks=row["topk_blocks"],
    )
    selection = ask(platform, config)
    name = chosen_name(selection)
    family = name and minimax_family(name)
    if family == "msa" and kv_cache_dtype == "nvfp4":
        family = "msa_nvfp4"
    return {
        "selected": family,
        "impl": family,
        "backend": name,
        "error": error_of(selection, None),
    }


def v4_family(name: str) -> str:
    """The family of a recorded layer class of DeepSeek-V4: flashmla, flashinfer, aiter ..."""
    for part, family in _V4_FAMILIES:
        if part in name:
            return family
    return name


_V4_FAMILIES = (
    ("MegaAttn", "flashmla_mega"),
    ("FlashMLA", "flashmla"),
    ("FlashInferSM120", "flashinfer_sm120"),
    ("FlashInfer", "flashinfer"),
    ("ROCMAiter", "aiter"),
)


def decide_v4(row: Row, platform: Platform) -> Outcome:
    """Which kernels a layer of DeepSeek-V4 or V4.1 uses."""
    config = SparseMlaConfig(
        head_size=_V4_ROW,
        kv_cache_dtype="fp8",
        num_heads=max(row["num_heads"] // row["tp"], 1),
        qk_nope_head_dim=_V4_ROW - _V4_ROPE,
        qk_rope_head_dim=_V4_ROPE,
        kv_lora_rank=_V4_ROW - _V4_ROPE,
        sinks=True,
        model_type=row["model"],
        o_groups=row["o_groups"],
    )
    run = RunContext(tp_size=row["tp"], pcp_size=2 if row["pcp"] else 1)
    selection = ask(platform, config, run, backend=row["requested"])
    name = chosen_name(selection)
    return {
        "layer": name and _v4_layer(name, platform.device.major),
        "backend": name,
        "error": error_of(selection, row["requested"]),
    }


def _v4_layer(name: str, major: int | None) -> str:
    if name.startswith("ROCM"):
        return "aiter"
    if name.startswith("FLASHMLA_MEGA"):
        return "flashmla_mega"
    if name.startswith("FLASHMLA"):
        return "flashmla"
    return "flashinfer_sm120" if major == 12 else "flashinfer"


def decide_diffkv(row: Row, platform: Platform) -> Outcome:
    """Which backend a layer uses whose values are of another width than its keys."""
    config = MhaConfig(
        head_size=row.get("head_size", _KEY_SIZE),
        v_head_size=row.get("head_size_v", _VALUE_SIZE),
        sinks=row.get("has_sink", False),
        # The model's code asks so even where the two happen to be equal.
        also_needs=frozenset({Feature.V_HEAD_SIZE}),
    )
    selection = ask(platform, config)
    return {"selected": chosen_name(selection), "error": error_of(selection, None)}


def _agree_on_family(field: str, family: Callable[[str], str]) -> Callable[[Outcome, Row], bool]:
    def agree(outcome: Outcome, recorded: Row) -> bool:
        if refused(outcome) or refused(recorded):
            return refused(outcome) and refused(recorded)
        return bool(outcome[field] == family(recorded[field]))

    return agree


def _agree_on_v4(outcome: Outcome, recorded: Row) -> bool:
    same_name = outcome["backend"] == recorded["backend"]
    return same_name and _agree_on_family("layer", v4_family)(outcome, recorded)


def check_minimax(row: Row) -> None:
    """Raise ConfigError unless the row tells what its half of the model depends on."""
    main = row["rule"] == "minimax_m3_main"
    with_fields(_MINIMAX_MAIN if main else _MINIMAX_INDEXER)(row)


_MINIMAX_MAIN: Fields = {"kv_cache_dtype": TEXT, "topk_blocks": SIZE, "num_kv_heads": SIZE}
_MINIMAX_INDEXER: Fields = {
    "indexer_kv_dtype": TEXT,
    "topk_blocks": SIZE,
    "indexer_cp": FLAG,
    "tp": SIZE,
}
MINIMAX = Kind(
    "minimax",
    lambda row: row.get("rule") in ("minimax_m3_main", "minimax_m3_indexer"),
    decide_minimax,
    _agree_on_family("selected", minimax_family),
    check_minimax,
)
DEEPSEEK_V4 = Kind(
    "dsv4",
    lambda row: "o_groups" in row,
    decide_v4,
    _agree_on_v4,
    with_fields(
        {
            "model": TEXT,
            "requested": optional(TEXT),
            "pcp": FLAG,
            "num_heads": SIZE,
            "o_groups": optional(SIZE),
            "tp": SIZE,
        }
    ),
)
DIFFKV = Kind(
    "diffkv",
    lambda row: row.get("rule") == "diffkv",
    decide_diffkv,
    agree_on_choice,
    with_fields({}),
)
