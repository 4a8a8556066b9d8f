"""Derived layer configs against what transformers' own modelling code computes.

Small random models run with an attention function that records what each layer passes, so
heads, sizes, scale, soft cap, sinks and the whole mask are compared, layer by layer.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, AutoModel  # noqa: E402
from transformers.masking_utils import eager_mask  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from attnplat.config.layer import (  # noqa: E402
    LayerConfig,
    MhaConfig,
    MlaConfig,
    StateConfig,
)
from attnplat.models import LayerGroup, known_types, layer_groups  # noqa: E402
from attnplat.models.defaults import DEFAULTS  # noqa: E402
from attnplat.models.towers import FAMILIES as TOWERS  # noqa: E402

TOKENS = 14
RECORDER = "attnplat_test_recorder"

# Sizes for any config class that has the field with a default of its own.
SMALL = {
    "num_hidden_layers": 7,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 3,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "hidden_size": 128,
    "d_model": 128,
    "n_embd": 128,
    "dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "n_head": 8,
    "n_heads": 8,
    "num_heads": 8,
    "num_kv_heads": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 4,
    "head_dim": 16,
    "d_kv": 12,
    "vocab_size": 96,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_ff": 32,
    "hidden_dim": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 5,
    "max_window_layers": 3,
    "attention_chunk_size": 4,
    "local_attention": 6,
    "window_size": 5,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "query_pre_attn_scalar": 9,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "rotary_dim": 8,
    "num_mel_bins": 16,
    "embedding_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

YARN = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
V4_LAYERS = [
    *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
    *("compressed_sparse_attention", "sliding_attention", "heavily_compressed_attention"),
    "compressed_sparse_attention",
]
MSA = {
    "sparse_attention_freq": [0, 0, 1, 1, 1, 1, 1],
    "sparse_topk_blocks": 2,
    "sparse_block_size": 4,
    "sparse_num_index_heads": 2,
    "sparse_index_dim": 16,
    "sparse_local_block": 1,
}

# model type -> what differs from SMALL, so that the family's own rule is exercised
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "phi3": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True},
    "qwen2_moe": {"use_sliding_window": True},
    "smollm3": {"use_sliding_window": True, "sliding_window": 5},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss": {},
    "granite": {"attention_multiplier": 0.3},
    "cohere2": {},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 1, 0, 1, 1]},
    "mimo_v2_flash": {},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {},
    "deepseek_v3": {"rope_scaling": {**YARN, "original_max_position_embeddings": 32}},
    "deepseek_v32": {},
    "deepseek_v4": {
        "head_dim": 32,
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
        "partial_rotary_factor": 0.25,
        "layer_types": V4_LAYERS,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "minimax_m3_vl_text": {"sparse_attention_config": MSA},
    "jamba": {"num_hidden_layers": 10},
    "bamba": {"attn_layer_indices": [1, 4]},
    "nemotron_h": {"hybrid_override_pattern": "M-*EM*-"},
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba", "mamba"],
    },
    "qwen3_next": {},
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3 + ["conv"]},
    "bert": {},
    "modernbert": {},
    "t5": {},
    "bart": {},
    "whisper": {},
}
# Checked by `make test-full` only: their rules are like those of others above.
SLOW = ("phi3", "qwen2_moe", "smollm3", "cohere2", "bamba", "zamba2", "kimi_linear")
# These multiply the queries by the scale themselves and pass 1.0.
SCALES_QUERIES = ("whisper",)
# Here the mask holds what data chose (indexers), a bias (T5), or another sequence's length.
MASK_NOT_COMPARED = ("deepseek_v32", "deepseek_v4", "minimax_m3_vl_text", "t5", "bart", "whisper")


@contextmanager
def recording() -> Iterator[list[dict[str, Any]]]:
    """What every layer passes to its attention function, in order."""
    calls: list[dict[str, Any]] = []

    def record(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **more: Any
    ) -> tuple[Any, None]:
        calls.append(
            {
                "num_heads": query.shape[1],
                "num_kv_heads": key.shape[1],
                "head_size": query.shape[-1],
                "value_size": value.shape[-1],
                "scale": more.get("scaling"),
                "logits_soft_cap": more.get("softcap"),
                "sinks": more.get("s_aux") is not None,
                "mask": attention_mask,
            }
        )
        batch, heads, tokens, _ = query.shape
        return query.new_zeros(batch, tokens, heads, value.shape[-1]), None

    AttentionInterface.register(RECORDER, record)
    AttentionMaskInterface.register(RECORDER, eager_mask)
    yield calls


def small_config(model_type: str, changes: dict[str, Any]) -> Any:
    """The config class of a model type, made small."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this release of transformers has no such type")
    cls = CONFIG_MAPPING[model_type]
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
    sizes = {
        name: value
        for name, value in SMALL.items()
        if name in defaults and (defaults[name] is not None or name in tokens)
    }
    return cls(**{**sizes, **changes})


def recorded(config: Any) -> list[dict[str, Any]]:
    """The calls of one forward pass of a random model over TOKENS tokens."""
    torch.manual_seed(0)
    ids = torch.randint(3, 90, (1, TOKENS))
    inputs: dict[str, Any] = {"input_ids": ids}
    if config.model_type == "whisper":
        frames = 2 * config.max_source_positions
        inputs = {"input_features": torch.randn(1, config.num_mel_bins, frames)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    with recording() as calls, torch.no_grad():
        model = AutoModel.from_config(config, attn_implementation=RECORDER).eval()
        model(**inputs, use_cache=False)
    return calls


def in_order(config: dict[str, Any]) -> list[LayerConfig]:
    """One config for every attention call, in the order in which the model makes them."""
    order = {"encoder": (0, 0), "decoder": (1, 0), "cross": (1, 1)}
    layers = [
        (order[group.part][0], index, order[group.part][1], group.config)
        for group in layer_groups(config, dtype="float32")
        if not isinstance(group.config, StateConfig)
        for index in group.layers
    ]
    return [config for *_, config in sorted(layers, key=lambda layer: layer[:3])]


def expected(config: LayerConfig) -> dict[str, Any]:
    """What the recorder must have seen of a layer."""
    if isinstance(config, MlaConfig) and config.sinks:  # DeepSeek-V4 attends over its rows
        size = config.head_size
        return {"num_heads": config.num_heads, "head_size": size, "value_size": size, "sinks": True}
    if isinstance(config, MlaConfig):
        expanded = config.prefill()
        return {
            "num_heads": config.num_heads,
            "head_size": expanded.head_size,
            "value_size": config.v_head_size,
        }
    values = {name: getattr(config, name) for name in ("num_heads", "num_kv_heads", "head_size")}
    if isinstance(config, MhaConfig):
        values["value_size"] = config.value_size
        values |= {"logits_soft_cap": config.logits_soft_cap, "sinks": config.sinks}
    return values


def visible(config: Any) -> Any:
    """Which key each query sees, [TOKENS, TOKENS] bool, by the rules of the layer's config."""
    query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    seen = key <= query if config.causal else torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    left, right = config.sliding_window
    if left >= 0:
        seen = seen & (key >= query - left)
    if right >= 0:
        seen = seen & (key <= query + right)
    chunk = getattr(config, "chunk_size", None)
    return seen if chunk is None else seen & (query // chunk == key // chunk)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(t, marks=[pytest.mark.slow] if t in SLOW else []) for t in CASES],
)
def test_each_layer_asks_for_what_the_modelling_code_computes(model_type: str) -> None:
    config = small_config(model_type, CASES[model_type])
    layers = in_order(config.to_dict())
    calls = recorded(config)
    assert len(calls) == len(layers)
    for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        wanted = expected(layer)
        assert {name: call[name] for name in wanted} == wanted, f"layer {index}"
        scale = 1.0 if model_type in SCALES_QUERIES else layer.effective_scale
        given = call["head_size"] ** -0.5 if call["scale"] is None else call["scale"]
        assert given == pytest.approx(scale), f"layer {index}"
        if model_type not in MASK_NOT_COMPARED:
            assert torch.equal(seen_in(call["mask"]), visible(layer)), f"layer {index}"


def seen_in(mask: Any) -> Any:
    """Which key each query sees in a recorded mask: [TOKENS, TOKENS] bool; None hides nothing."""
    if mask is None:
        return torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    assert mask.shape == (1, 1, TOKENS, TOKENS)
    return mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] > -1


# Defaults ---------------------------------------------------------------------------------

TOWER_TYPES = {model_type for family in TOWERS for model_type in family.types}
# What a class computes from other fields, so that a silent file differs from a full one.
NOT_SILENT = {
    "dbrx": "kv heads stand in a nested config",
    "deepseek_v4": "its class has a layer pattern that no published file relies on",
    "glm4_moe": "the defaults do not divide",
    "mistral4": "its class has YaRN by default",
    "nemotron_h": "its class has four layers by default",
    "qwen3_omni_moe_text": "the defaults do not divide",
    "zamba2": "its class has a pattern of twelve layers by default",
}


def config_class(model_type: str) -> Any:
    """The config class of a model type, also of one that only occurs inside others."""
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    for outer in CONFIG_MAPPING:
        if outer.split("_")[0] != model_type.split("_")[0]:
            continue
        module = importlib.import_module(CONFIG_MAPPING[outer].__module__)
        for value in vars(module).values():
            if getattr(value, "model_type", None) == model_type:
                return value
    return None


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_the_config_class(model_type: str) -> None:
    cls = config_class(model_type)
    if cls is None:
        pytest.skip("this release of transformers has no such type")
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    for name, value in DEFAULTS[model_type].items():
        default = defaults.get(name)
        if default is None:  # the class computes it
            default = getattr(cls(), name)
        assert default == (tuple(value) if isinstance(default, tuple) else value), name


@pytest.mark.parametrize(
    "model_type",
    [t for t in known_types() if t in CONFIG_MAPPING and t not in TOWER_TYPES | set(NOT_SILENT)],
)
def test_a_silent_file_means_what_the_full_one_says(model_type: str) -> None:
    full = CONFIG_MAPPING[model_type]().to_dict()
    if "text_config" in full:
        pytest.skip("a composite of other types")
    silent = layer_groups({"model_type": model_type}, dtype="bfloat16")
    assert without_notes(silent) == without_notes(layer_groups(full, dtype="bfloat16"))


def without_notes(groups: tuple[LayerGroup, ...]) -> list[LayerGroup]:
    """The groups, but not what was said of them."""
    return [dataclasses.replace(group, notes=()) for group in groups]
