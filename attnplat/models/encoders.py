"""Encoders, and models of an encoder and a decoder."""

from __future__ import annotations

from typing import Any

from attnplat.config.names import AttnType
from attnplat.models.builders import grouped
from attnplat.models.decoders import Values, fixed
from attnplat.models.fields import HEADS, HIDDEN, KV_HEADS, Fields
from attnplat.models.parts import Extras, Family, Part
from attnplat.models.patterns import FULL, SLIDING, Kinds, Pattern, count, every_from_first, uniform

ENCODER_ONLY = AttnType.ENCODER_ONLY


def bert(fields: Fields, kind: str) -> Values:
    """BERT: a decoder if `is_decoder` is set."""
    return {"attn_type": AttnType.DECODER} if fields.flag("is_decoder") else {}


def modernbert(fields: Fields, kind: str) -> Values:
    """ModernBERT: `local_attention` is the whole window, half of it on each side."""
    if kind != SLIDING:
        return {}
    half = fields.need("local_attention") // 2
    return {"sliding_window": (half, half)}


def modernbert_decoder(fields: Fields, kind: str) -> Values:
    """ModernBERT as a decoder: half of `local_attention`, the token itself included."""
    if kind != SLIDING:
        return {}
    return {"sliding_window": (max(fields.need("local_attention") // 2, 1) - 1, -1)}


def deberta(fields: Fields, kind: str) -> Values:
    """DeBERTa: relative terms are added to the logits; all share one scale (arXiv 2006.03654)."""
    if not fields.flag("relative_attention"):
        return {}
    given = fields.get("pos_att_type")
    names = given.split("|") if isinstance(given, str) else fields.listed("pos_att_type") or ()
    parts = 1 + sum(term in names for term in ("c2p", "p2c"))
    size = fields.split(HIDDEN, HEADS)
    return {"position_bias": True, "scale": (size * parts) ** -0.5}


def layers_of(*names: str) -> Pattern:
    """As many full layers as the first given of the fields says."""

    def pattern(fields: Fields) -> Kinds:
        return (FULL,) * count(fields, *names)

    return pattern


def _encoder(*types: str, **rule: Any) -> Family:
    part = {"name": "encoder", "attend": grouped, "attn_type": ENCODER_ONLY, "kinds": uniform}
    return Family(types, (Part(**{**part, **rule}),))


def _seq2seq(
    *types: str, encoder: tuple[str, ...], decoder: tuple[str, ...],
    encoder_heads: tuple[str, ...], decoder_heads: tuple[str, ...],
    kv_heads: tuple[str, ...] = (), self_extras: Extras | None = None,
    cross_extras: Extras | None = None, **names: Any,
) -> Family:  # fmt: skip
    """An encoder, a decoder, and the decoder's attention to the encoder's output."""
    rules = (
        ("encoder", encoder, encoder_heads, AttnType.ENCODER, self_extras),
        ("decoder", decoder, decoder_heads, AttnType.DECODER, self_extras),
        ("cross", decoder, decoder_heads, AttnType.ENCODER_DECODER, cross_extras),
    )
    none = fixed()
    return Family(
        types,
        tuple(
            Part(
                name=name,
                attend=grouped,
                kinds=layers_of(*layers),
                heads=heads,
                kv_heads=kv_heads,
                attn_type=attn_type,
                extras=extras or none,
                **names,
            )
            for name, layers, heads, attn_type, extras in rules
        ),
    )


FAMILIES = (
    _encoder(
        *("bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "electra", "albert"),
        *("ernie", "nomic_bert", "data2vec-text", "megatron-bert", "layoutlm", "roformer"),
        extras=bert,
    ),
    _encoder("distilbert", hidden=("dim",)),
    _encoder("esm"),
    # transformers modeling_mpnet, _deberta_v2: a bias per head, query and key.
    _encoder("mpnet", extras=fixed(position_bias=True)),
    _encoder("deberta", "deberta-v2", extras=deberta),
    # transformers configuration_modernbert: sliding_window = local_attention // 2.
    _encoder(
        "modernbert",
        kinds=every_from_first(3, field="global_attn_every_n_layers"),
        extras=modernbert,
    ),
    Family(
        ("modernbert-decoder",),
        (
            Part(
                attend=grouped,
                kinds=every_from_first(3, field="global_attn_every_n_layers"),
                extras=modernbert_decoder,
            ),
        ),
    ),
    _seq2seq(
        *("bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "blenderbot-small"),
        *("plbart", "whisper", "speech_to_text", "florence2_language"),
        encoder=("encoder_layers",),
        decoder=("decoder_layers",),
        encoder_heads=("encoder_attention_heads",),
        decoder_heads=("decoder_attention_heads",),
        hidden=("d_model",),
    ),
    # transformers modeling_t5: no scaling, a learned bias in self-attention only.
    _seq2seq(
        *("t5", "mt5", "umt5", "switch_transformers"),
        encoder=("num_layers",),
        decoder=("num_decoder_layers", "num_layers"),
        encoder_heads=("num_heads",),
        decoder_heads=("num_heads",),
        head_size=("d_kv",),
        self_extras=fixed(scale=1.0, position_bias=True),
        cross_extras=fixed(scale=1.0),
    ),
    # transformers modeling_clip, _siglip: CLIP's text encoder is causal, SigLIP's is not.
    _encoder("clip_text_model", extras=fixed(causal=True)),
    _encoder("siglip_text_model", "siglip2_text_model"),
)

GENERIC = _seq2seq(
    encoder=("encoder_layers", "num_encoder_layers", "num_layers"),
    decoder=("decoder_layers", "num_decoder_layers", "num_layers"),
    encoder_heads=("encoder_attention_heads", *HEADS),
    decoder_heads=("decoder_attention_heads", *HEADS),
    kv_heads=KV_HEADS,
)
