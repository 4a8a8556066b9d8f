"""Decoders that attend over latents, or over keys that an indexer chose."""

from __future__ import annotations

from typing import Any

from attnplat.models.builders import block_chosen, compressed, latent
from attnplat.models.decoders import Values
from attnplat.models.fields import HEADS, HIDDEN, Fields
from attnplat.models.parts import Family, Part
from attnplat.models.patterns import (
    COMPRESSED,
    FULL,
    HEAVILY_COMPRESSED,
    INDEXED,
    MINIMAX,
    SLIDING,
    Kinds,
    check_length,
    count,
    listed_or,
    marked,
    uniform,
)


def indexed_if_topk(fields: Fields) -> Kinds:
    """Every layer, over the indexer's keys where the config has an `index_topk`."""
    kind = FULL if fields.get("index_topk") is None else INDEXED
    return (kind,) * count(fields)


def shared_choices(fields: Fields) -> tuple[str, ...]:
    """GLM-5: layers marked `shared` reuse the keys that an earlier layer's indexer chose."""
    shared = [t for t in fields.listed("indexer_types") or () if t == "shared"]
    if not shared:
        return ()
    return (f"{len(shared)} layers reuse the keys that an earlier layer's indexer chose",)


def minicpm3(fields: Fields, kind: str) -> Values:
    """MiniCPM3: a value head without a size of its own has hidden size / heads elements."""
    size = fields.size("v_head_dim")
    return {"v_head_size": fields.split(HIDDEN, HEADS) if size is None else size}


def longcat_kinds(fields: Fields) -> Kinds:
    """LongCat-Flash: `num_layers` blocks of two attention layers each."""
    return (FULL,) * (2 * count(fields, "num_layers"))


def v4_kinds(fields: Fields) -> Kinds:
    """DeepSeek-V4: `compress_ratios` has 0 or 1 for the window only, 4 and 128 for compression."""
    return _by_ratio(fields, {0: SLIDING, 1: SLIDING, 4: COMPRESSED, 128: HEAVILY_COMPRESSED})


def v41_kinds(fields: Fields) -> Kinds:
    """DeepSeek-V4.1: ratio 0 is the window only; 1 and 2 have chosen entries besides."""
    return _by_ratio(fields, {0: SLIDING, 1: COMPRESSED, 2: COMPRESSED})


def _by_ratio(fields: Fields, meaning: dict[int, str]) -> Kinds:
    ratios = fields.integers("compress_ratios")
    if ratios is None:
        raise fields.missing("layer_types", "compress_ratios")
    layers = count(fields)
    check_length(fields, "compress_ratios", ratios, layers)
    for ratio in ratios[:layers]:
        if ratio not in meaning:
            known = ", ".join(map(str, meaning))
            raise fields.refusal("compress_ratios", f"ratios among {known}", ratio)
    return tuple(meaning[ratio] for ratio in ratios[:layers])


def one_softmax(fields: Fields) -> tuple[str, ...]:
    """DeepSeek-V4: what the configs cannot say."""
    window = fields.need("sliding_window")
    return (
        f"compressed layers put the {window} newest keys and the compressed entries under one "
        "softmax",
    )


def minimax_m3_kinds(fields: Fields) -> Kinds:
    """MiniMax-M3: `sparse_attention_config.sparse_attention_freq` marks the sparse layers."""
    layers = count(fields)
    own = fields.sub("sparse_attention_config")
    kinds = marked(own, "sparse_attention_freq", layers, MINIMAX, FULL)
    return kinds or (FULL,) * layers


def _latent(*types: str, **rule: Any) -> Family:
    return Family(types, (Part(attend=latent, **rule),))


FAMILIES = (
    # transformers modeling_deepseek_v2 and its kin: kv_lora_rank + qk_rope_head_dim a row,
    # scale of the width before absorption, times mscale squared under YaRN.
    _latent(
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "mistral4"),
        *("youtu", "axk1", "axk2", "glm_moe_dsa"),
        kinds=listed_or(indexed_if_topk),
        notes=shared_choices,
    ),
    _latent("minicpm3", kinds=uniform, extras=minicpm3),
    _latent("longcat_flash", kinds=longcat_kinds),
    # What is known of DeepSeek-V4 stands at `builders.compressed`.
    Family(
        ("deepseek_v4",),
        (Part(attend=compressed, kinds=listed_or(v4_kinds), notes=one_softmax),),
    ),
    Family(
        ("deepseek_v41",),
        (Part(attend=compressed, kinds=listed_or(v41_kinds), notes=one_softmax),),
    ),
    # transformers modeling_minimax_m3_vl: blocks of 128 keys, chosen per kv head.
    Family(
        ("minimax_m3", "minimax_m3_vl_text", "minimax_m3_vl"),
        (Part(attend=block_chosen, kinds=listed_or(minimax_m3_kinds)),),
    ),
)
