"""Models of which some layers keep a recurrent state, or all of them do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnplat.models import states
from attnplat.models.builders import grouped, latent
from attnplat.models.decoders import Values, scale_from
from attnplat.models.fields import HEADS, HIDDEN, Fields
from attnplat.models.parts import Family, Part
from attnplat.models.patterns import (
    CONV,
    FULL,
    HYBRID,
    INDEXED,
    LINEAR,
    SLIDING,
    Kinds,
    count,
    every,
    indices,
    letters,
    listed,
    listed_or,
    marked,
    uniform,
)


def all_linear(fields: Fields) -> Kinds:
    """Recurrent layers only."""
    return (LINEAR,) * count(fields)


def jamba_kinds(fields: Fields) -> Kinds:
    """Jamba: attention at `attn_layer_offset`, then every `attn_layer_period` layers."""
    period = fields.need("attn_layer_period")
    offset = fields.need("attn_layer_offset", least=0)
    if offset >= period:
        raise fields.refusal("attn_layer_offset", f"less than attn_layer_period ({period})", offset)
    return tuple(FULL if i % period == offset else LINEAR for i in range(count(fields)))


def zamba_kinds(fields: Fields) -> Kinds:
    """Zamba: the shared attention at layer 2, then by offset and period from layer 3 on."""
    rest = jamba_kinds(fields)
    start = (LINEAR, LINEAR, HYBRID)
    late = tuple(HYBRID if kind == FULL else LINEAR for kind in rest)
    return (start + late)[: len(rest)]


def zamba(fields: Fields, kind: str) -> Values:
    """Zamba: attention over two hidden states side by side; scale (head_size / 2) ** -0.5."""
    size = fields.size("attention_head_dim") or fields.split(HIDDEN, HEADS, times=2)
    return {"head_size": size, "scale": (size / 2) ** -0.5}


def zamba2_kinds(fields: Fields) -> Kinds:
    """Zamba2: the shared attention at `hybrid_layer_ids`."""
    if not fields.has("hybrid_layer_ids"):
        raise fields.missing("layers_block_type", "hybrid_layer_ids")
    ids = indices(fields, "hybrid_layer_ids")
    return tuple(HYBRID if i in ids else LINEAR for i in range(count(fields)))


def bamba_kinds(fields: Fields) -> Kinds:
    """Bamba: attention at `attn_layer_indices`."""
    attending = indices(fields, "attn_layer_indices")
    return tuple(FULL if i in attending else LINEAR for i in range(count(fields)))


def falcon_h1_kinds(fields: Fields) -> Kinds:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    return (HYBRID,) * count(fields)


def lfm2_kinds(fields: Fields) -> Kinds:
    """LFM2: attention at `full_attn_idxs`, everywhere without it; else a short convolution."""
    if not fields.has("full_attn_idxs"):
        return uniform(fields)
    attending = indices(fields, "full_attn_idxs")
    return tuple(FULL if i in attending else CONV for i in range(count(fields)))


def lfm3_kinds(fields: Fields) -> Kinds:
    """LFM3: of four layers two convolve, one slides (not layer 0), one sees all."""
    return tuple(
        FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(count(fields))
    )


def minimax_kinds(fields: Fields) -> Kinds:
    """MiniMax-01: `attn_type_list` marks softmax attention; else every other layer has it."""
    layers = count(fields)
    default = tuple(LINEAR if i % 2 else FULL for i in range(layers))
    for name in ("attn_type_list", "layer_types_list"):
        kinds = marked(fields, name, layers, FULL, LINEAR)
        if kinds is not None:
            return kinds
    return default


def kimi_linear_kinds(fields: Fields) -> Kinds:
    """Kimi Linear: `linear_attn_config.full_attn_layers` counts from 1; else every fourth."""
    layers = count(fields)
    own = fields.sub("linear_attn_config")
    if not own.has("full_attn_layers"):
        return tuple(FULL if i and i % 4 == 0 else LINEAR for i in range(layers))
    whole = replace(own, values={**own.values, "num_hidden_layers": layers})
    attending = indices(whole, "full_attn_layers", first=1)
    return tuple(FULL if i in attending else LINEAR for i in range(layers))


def glm5_next_kinds(fields: Fields) -> Kinds:
    """GLM-5-Next: every fourth layer attends, over the keys that the indexer chose."""
    kinds = every(4, others=LINEAR)(fields)
    return tuple(INDEXED if kind == FULL else kind for kind in kinds)


def pooled_indexer(fields: Fields) -> tuple[str, ...]:
    """GLM-5-Next: the indexer scores pools of keys rather than single ones."""
    pool = fields.size("index_kpool")
    return (f"the indexer scores pools of {pool} keys",) if pool else ()


def olmo_hybrid_kinds(fields: Fields) -> Kinds:
    """OLMo-Hybrid: every fourth layer attends, or the last where there are fewer."""
    kinds = every(4, others=LINEAR)(fields)
    return kinds if FULL in kinds else (*kinds[:-1], FULL)


def olmo_hybrid_state(fields: Fields, request: Any) -> Any:
    """OLMo-Hybrid: a gated delta net with the attention's head count where none is given."""
    heads = fields.size("linear_num_key_heads") or fields.need(*HEADS)
    given = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": fields.size("linear_num_value_heads") or heads,
        "linear_key_head_dim": fields.size("linear_key_head_dim")
        or max(1, int(0.75 * fields.need(*HIDDEN) / heads)),
    }
    return states.gdn(Fields(given, model_type=fields.model_type, path=fields.path), request)


NEMOTRON_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def _hybrid(*types: str, **rule: Any) -> Family:
    return Family(types, (Part(**{"attend": grouped, **rule}),))


FAMILIES = (
    _hybrid("jamba", kinds=listed_or(jamba_kinds), state=states.mamba1),
    # transformers modeling_zamba, _zamba2: attention_hidden_size is twice the hidden size.
    _hybrid("zamba", kinds=listed_or(zamba_kinds), state=states.mamba1, extras=zamba),
    _hybrid("zamba2", kinds=listed_or(zamba2_kinds), state=states.mamba2, extras=zamba),
    # transformers configuration_nemotron_h: _pattern_to_list.
    _hybrid(
        *("nemotron_h", "nemotron_h_puzzle"),
        kinds=letters("hybrid_override_pattern", NEMOTRON_LETTERS, listed),
        state=states.mamba2,
        head_size=("attention_head_dim", "head_dim"),
    ),
    _hybrid("bamba", kinds=listed_or(bamba_kinds), state=states.mamba2),
    _hybrid("falcon_h1", kinds=falcon_h1_kinds, state=states.mamba2),
    _hybrid(
        "granitemoehybrid",
        kinds=listed_or(all_linear),
        state=states.mamba2,
        extras=scale_from("attention_multiplier"),
    ),
    # transformers modeling_qwen3_next: full_attention_interval, linear_* heads.
    _hybrid(
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        kinds=every(4, field="full_attention_interval", others=LINEAR),
        state=states.gdn,
    ),
    _hybrid("olmo_hybrid", kinds=listed_or(olmo_hybrid_kinds), state=olmo_hybrid_state),
    _hybrid("lfm2", "lfm2_moe", kinds=listed_or(lfm2_kinds), state=states.short_conv),
    _hybrid("lfm3", kinds=listed_or(lfm3_kinds), state=states.short_conv),
    _hybrid(
        *("minimax", "minimax_text_01"), kinds=listed_or(minimax_kinds), state=states.lightning
    ),
    # transformers modeling_kimi_linear, _bailing_hybrid: latent attention beside delta layers.
    _hybrid("kimi_linear", attend=latent, kinds=listed_or(kimi_linear_kinds), state=states.kda),
    _hybrid(
        "bailing_hybrid",
        attend=latent,
        kinds=every(6, field="layer_group_size", others=LINEAR),
        state=states.kda,
    ),
    _hybrid(
        *("glm5_next", "glm5_next_text"),
        attend=latent,
        kinds=glm5_next_kinds,
        state=states.kda,
        notes=pooled_indexer,
    ),
    _hybrid("mamba", "falcon_mamba", kinds=all_linear, state=states.mamba1),
    _hybrid("mamba2", kinds=all_linear, state=states.mamba2_alone),
)
