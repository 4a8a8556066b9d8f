"""The vision and audio encoders of multimodal models."""

from __future__ import annotations

from typing import Any

from attnplat.config.names import AttnType, Role
from attnplat.models.builders import grouped
from attnplat.models.decoders import fixed
from attnplat.models.encoders import layers_of
from attnplat.models.fields import LAYERS, Fields
from attnplat.models.parts import Family, Part
from attnplat.models.patterns import FULL, WINDOWS, Kinds, count, explicit

VISION_LAYERS = ("depth", *LAYERS, "layers")
VISION_HEADS = ("num_heads", "num_attention_heads", "attention_heads", "heads")
VISION_HIDDEN = ("hidden_size", "embed_dim", "width")


def windows_between(fields: Fields) -> Kinds:
    """Qwen2.5-VL: only the layers at `fullatt_block_indexes` see beyond their window."""
    whole = fields.integers("fullatt_block_indexes") or ()
    return tuple(FULL if i in whole else WINDOWS for i in range(count(fields, *VISION_LAYERS)))


def windowed_as_sequences(fields: Fields) -> tuple[str, ...]:
    """Qwen2.5-VL: how a window reaches a kernel."""
    return ("window_attention layers get each window as a sequence of its own, not as a mask",)


def vision_layers(fields: Fields) -> Kinds:
    """As `layer_types` says, else full layers."""
    given = explicit(fields)
    return (FULL,) * count(fields, *VISION_LAYERS) if given is None else given


def mllama_layers(fields: Fields) -> Kinds:
    """Llama 3.2 Vision: local layers, then global ones with the same heads."""
    more = fields.size("num_global_layers", least=0) or 0
    return (FULL,) * (count(fields, *VISION_LAYERS) + more)


def _vision(*types: str, **rule: Any) -> Family:
    part = {
        "name": "vision",
        "attend": grouped,
        "kinds": vision_layers,
        "heads": VISION_HEADS,
        "hidden": VISION_HIDDEN,
        "attn_type": AttnType.ENCODER_ONLY,
        "role": Role.VISION,
    }
    return Family(types, (Part(**{**part, **rule}),))


def _audio(*types: str) -> Family:
    return Family(
        types,
        (
            Part(
                name="audio",
                attend=grouped,
                kinds=layers_of("encoder_layers", *LAYERS),
                heads=("encoder_attention_heads", "num_attention_heads"),
                attn_type=AttnType.ENCODER_ONLY,
            ),
        ),
    )


GENERIC_VISION = _vision()

FAMILIES = (
    _vision(
        *("clip_vision_model", "siglip_vision_model", "siglip2_vision_model", "pixtral"),
        *("internvl_vision", "intern_vit_6b", "idefics2_vision", "idefics3_vision"),
        *("smolvlm_vision", "llama4_vision_model", "qwen3_vl_vision", "qwen3_vl_moe_vision"),
        *("qwen3_5_vision", "qwen3_5_moe_vision", "minimax_m3_vl_vision", "kimi_k25_vision"),
        *("qwen3_omni_moe_vision_encoder", "step3p5_vision", "glm4v_vision", "vit"),
        *("glm4v_moe_vision", "dinov2", "molmo2_vision", "aimv2_vision_model"),
    ),
    # transformers modeling_qwen2_vl: embed_dim is the width, hidden_size that of the output.
    _vision("qwen2_vl_vision", hidden=("embed_dim",)),
    _vision(
        *("qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder", "exaone4_5_vision"),
        kinds=windows_between,
        notes=windowed_as_sequences,
    ),
    _vision("gemma4_vision", extras=fixed(scale=1.0)),
    _vision("mllama_vision_model", kinds=mllama_layers),
    # transformers modeling_whisper and the encoders copied from it.
    _audio(
        *("qwen2_audio_encoder", "qwen2_5_omni_audio_encoder", "qwen3_omni_moe_audio_encoder"),
        *("voxtral_encoder", "audioflamingo3_encoder", "glmasr_encoder"),
    ),
)
