"""The table of model types: which family reads a config, and which none can read."""

from __future__ import annotations

from collections.abc import Mapping

from attnplat.models import decoders, encoders, hybrids, latents, states, towers
from attnplat.models.builders import grouped, latent
from attnplat.models.decoders import Values
from attnplat.models.fields import Fields
from attnplat.models.parts import Family, Part
from attnplat.models.patterns import Kinds, every, listed, listed_or

FAMILIES: Mapping[str, Family] = {
    model_type: family
    for module in (decoders, latents, hybrids, encoders, towers)
    for family in module.FAMILIES
    for model_type in family.types
}

# Types whose attention no layer config can express, or whose files are not documented.
REFUSED: Mapping[str, str] = {
    "recurrent_gemma": "its RG-LRU layers are no state operation of attnplat",
    "rwkv": "its layers are no state operation of attnplat",
    "xlstm": "its layers are no state operation of attnplat",
    "zaya": "its convolutional attention is not described by any layer config",
    "inkling_text": "its relative bias and convolutions are not described by any layer config",
    "qwen4_exp_text": "its indexer over grouped-query attention is not described by any config",
    "step5": "its block-sparse layers are known, the fields of its config file are not",
    "longformer": "its sparse encoder attention is not described by any layer config",
    "big_bird": "its sparse encoder attention is not described by any layer config",
    "led": "its sparse encoder attention is not described by any layer config",
    "longt5": "its block-local encoder attention is not described by any layer config",
    "reformer": "its hashed attention is not described by any layer config",
}

# What an unknown type's config may hold that the plain rule does not read.
UNREAD = (
    *("sparse_attention_config", "compress_ratios", "indexer_types", "attention_multiplier"),
    *("query_pre_attn_scalar", "attention_other_setting", "hybrid_layer_pattern", "attn_config"),
    *("local_attention", "attention_window_size", "window_size", "relative_attention"),
)


def known_types() -> tuple[str, ...]:
    """The model types that have a rule, sorted."""
    return tuple(sorted(FAMILIES))


def generic(fields: Fields) -> Family:
    """The family of a type that has no rule: what its fields say, read the usual way."""
    if fields.flag("is_encoder_decoder"):
        return encoders.GENERIC
    attend = latent if fields.has("kv_lora_rank") else grouped
    part = Part(
        attend=attend,
        kinds=listed_or(_guessed_kinds),
        state=states.told_by_fields,
        extras=_guessed_extras if attend is grouped else decoders.fixed(),
    )
    return Family((), (part,))


def _guessed_kinds(fields: Fields) -> Kinds:
    if fields.get("index_topk") is not None:
        return latents.indexed_if_topk(fields)
    if fields.has("sliding_window_pattern") and fields.has("sliding_window"):
        return every(1, field="sliding_window_pattern")(fields)
    return listed(fields)


def _guessed_extras(fields: Fields, kind: str) -> Values:
    return {
        "logits_soft_cap": fields.number("attn_logit_softcapping"),
        "alibi": fields.flag("alibi"),
        "v_head_size": fields.size("v_head_dim"),
    }
