"""Tiny models of many families with random weights, and what they give without attnplat.

Weights are drawn wide (initializer_range 0.5): with transformers' default of 0.02 attention
is near uniform, and a dropped window, sink or soft cap does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from attnplat.platforms.inventory import find_libraries

VOCABULARY = 97
INITIALIZER_RANGE = 0.5
LENGTHS = (8, 13, 11)
CHOSEN = "CPU_ATTN" if find_libraries() else "TORCH_SDPA"
"""What runs these models on a processor."""

_DECODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_MIXED = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=4)
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
_LATENT = dict(
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_shared_experts=1,
    num_key_value_heads=4,
)


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        config, model: class names in transformers.
        options: keyword arguments of the config.
        features: what its layers use besides mask and scale; a test drops each.
        sides: sides of padding that it can take.
        paged: whether it decodes through a paged cache.
        crosses: encoder-decoder.
    """

    config: str
    model: str
    options: Mapping[str, Any]
    features: tuple[str, ...] = ()
    sides: tuple[str, ...] = ("left", "right")
    paged: bool = True
    crosses: bool = False


def _decoder(name: str, *features: str, paged: bool = True, **options: Any) -> Family:
    model = name.removesuffix("Text") + "ForCausalLM"
    return Family(f"{name}Config", model, _DECODER | options, features, paged=paged)


FAMILIES: dict[str, Family] = {
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", "window", sliding_window=4),
    "qwen2": _decoder("Qwen2", "window", use_sliding_window=True, **_MIXED),
    "qwen3": _decoder("Qwen3", "window", use_sliding_window=True, head_dim=16, **_MIXED),
    "phi3": _decoder("Phi3", "window", sliding_window=4, original_max_position_embeddings=512),
    "gemma2": _decoder(
        "Gemma2",
        "window",
        "soft_cap",
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        **_MIXED,
    ),
    "gemma3": _decoder("Gemma3Text", "window", head_dim=16, query_pre_attn_scalar=24, **_MIXED),
    "gpt_oss": _decoder("GptOss", "window", "sinks", head_dim=16, **_EXPERTS, **_MIXED),
    "deepseek_v3": _decoder("DeepseekV3", **_LATENT),
    "deepseek_v32": _decoder(
        "DeepseekV32",
        "topk",
        paged=False,  # its indexer keeps keys of its own
        index_topk=4,
        index_n_heads=4,
        index_head_dim=32,
        **_LATENT,
    ),
    "gpt_neox": _decoder("GPTNeoX"),
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        dict(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512),
    ),
    "opt": Family(
        "OPTConfig",
        "OPTForCausalLM",
        _DECODER | dict(ffn_dim=64, word_embed_proj_dim=64),
    ),
    "bert": Family("BertConfig", "BertForMaskedLM", _DECODER, paged=False),
    "modernbert": Family(
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        _DECODER | dict(local_attention=8, global_attn_every_n_layers=2, cls_token_id=1),
        ("window",),
        paged=False,
    ),
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        dict(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            initializer_factor=5.0,
        ),
        ("position_bias",),
        paged=False,
        crosses=True,
    ),
    "bart": Family(
        "BartConfig",
        "BartForConditionalGeneration",
        dict(
            vocab_size=VOCABULARY,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=512,
            init_std=INITIALIZER_RANGE,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        sides=("right",),  # its learned positions count from the first column
        paged=False,
        crosses=True,
    ),
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A model of the family, the same weights at every call, in evaluation mode."""
    family = FAMILIES[name]
    options = {"initializer_range": INITIALIZER_RANGE, **family.options, **changes}
    config = getattr(transformers, family.config)(**options)
    torch.manual_seed(20)
    model: PreTrainedModel = getattr(transformers, family.model)(config).eval()
    # The grouped matrix product of the other implementations has no float64.
    model.set_experts_implementation("eager")
    return model


@dataclass(frozen=True)
class Sequences:
    """Token sequences of different lengths; `decoder` ids for encoder-decoder models."""

    ids: tuple[torch.Tensor, ...]
    decoder: tuple[torch.Tensor, ...] | None = None


def sequences(name: str, lengths: tuple[int, ...] = LENGTHS) -> Sequences:
    """Random token sequences, the same at every call."""
    generator = torch.Generator().manual_seed(3)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (length,), generator=generator)

    ids = tuple(draw(n) for n in lengths)
    if not FAMILIES[name].crosses:
        return Sequences(ids)
    return Sequences(ids, tuple(draw(9) for _ in lengths))


def alone(model: PreTrainedModel, given: Sequences, implementation: str) -> torch.Tensor:
    """Logits of each sequence by itself, one after the other, float64."""
    model.set_attn_implementation(implementation)
    found = []
    for number, ids in enumerate(given.ids):
        inputs = {"input_ids": ids[None]}
        if given.decoder is not None:
            inputs["decoder_input_ids"] = given.decoder[number][None]
        with torch.inference_mode():
            found.append(model(**inputs, use_cache=False).logits[0].double())
    return torch.cat(found)


def together(
    model: PreTrainedModel, given: Sequences, implementation: str, side: str
) -> torch.Tensor:
    """The same logits from one batch that is padded on one side."""
    model.set_attn_implementation(implementation)
    longest = max(map(len, given.ids))
    ids = torch.zeros(len(given.ids), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(given.ids):
        place = slice(len(sequence)) if side == "right" else slice(longest - len(sequence), None)
        ids[row, place], mask[row, place] = sequence, 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    if given.decoder is not None:
        inputs["decoder_input_ids"] = torch.stack(given.decoder)
    elif side == "left":
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        found = model(**inputs, use_cache=False).logits.double()
    return found.flatten(0, 1) if given.decoder is not None else found[mask.bool()]


@dataclass(frozen=True)
class Yardstick:
    """A float32 model, its logits in float64, and how far its own eager attention is from them."""

    model: PreTrainedModel
    given: Sequences
    expected: torch.Tensor
    own_error: float

    @property
    def bound(self) -> float:
        """How far any right implementation may be."""
        return 4 * self.own_error + 1e-6


@cache
def yardstick(name: str) -> Yardstick:
    """The yardstick of a family: eager, sequence by sequence, so that no padding has a part."""
    model, given = build(name), sequences(name)
    expected = alone(build(name).double(), given, "eager")
    return Yardstick(model, given, expected, difference(alone(model, given, "eager"), expected))


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, over the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())
