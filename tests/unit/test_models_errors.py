"""Nonsense in a model's config: one clear error that names the field and the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnplat.errors import AttnplatError, ConfigError, ModelFileError, UnknownNameError
from attnplat.models import known_shapes, known_types, layer_groups, load_config
from attnplat.models.defaults import DEFAULTS
from attnplat.models.families import REFUSED

NONSENSE = (
    ("num_attention_heads", 0, "num_attention_heads is 0; it takes an integer from 1"),
    ("num_attention_heads", -4, "num_attention_heads is -4"),
    ("num_attention_heads", "32", "num_attention_heads is '32'"),
    ("num_attention_heads", True, "num_attention_heads is True"),
    ("num_attention_heads", 2**40, "num_attention_heads is 1099511627776"),
    ("num_attention_heads", 32.0, r"num_attention_heads is 32\.0"),
    ("num_attention_heads", [32], "num_attention_heads"),
    ("num_attention_heads", {}, "num_attention_heads is {}"),
    ("num_attention_heads", 33, r"hidden_size is 4096; it takes a multiple of.*\(33\)"),
    ("num_key_value_heads", 5, r"num_attention_heads is 32; it takes a multiple of.*\(5\)"),
    ("num_key_value_heads", 0, "num_key_value_heads is 0"),
    ("head_dim", "auto", "head_dim is 'auto'"),
    ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000"),
    ("num_hidden_layers", 0, "num_hidden_layers is 0"),
    ("sliding_window", 0, "sliding_window is 0"),
    ("sliding_window", "on", "sliding_window is 'on'"),
    ("layer_types", "full_attention", "layer_types is 'full_attention'; it takes a list"),
    ("layer_types", ["full_attention"], "layer_types has 1 entries; it takes one for each of"),
    ("layer_types", ["full_attention"] * 33, "layer_types has 33 entries"),
    ("layer_types", ["full"] * 32, "unknown layer type 'full'.*did you mean 'full_attention'"),
    ("layer_types", ["indexed_attention"] * 32, "a list with indexed_attention"),
    ("layer_types", ["linear_attention"] * 32, "a list with linear_attention"),
    ("layer_types", ["moe"] * 32, "no layer attends or keeps a state"),
    ("per_layer_config", [], r"per_layer_config is \[\]; it takes an object"),
    ("per_layer_config", {"3": 4}, r"per_layer_config\.3 is 4; it takes an object"),
    ("torch_dtype", "bf17", "unknown dtype 'bf17'.*torch_dtype"),
    ("torch_dtype", 16, "torch_dtype is 16; it takes a string"),
    ("model_type", 7, "model_type is 7; it takes a string"),
    ("text_config", [], r"text_config is \[\]; it takes an object"),
    ("vision_config", "clip", "vision_config is 'clip'; it takes an object"),
)


@pytest.mark.parametrize(("field", "value", "says"), NONSENSE)
def test_a_nonsense_value_is_named_with_its_field(field: str, value: Any, says: str) -> None:
    with pytest.raises((ConfigError, ModelFileError), match=says):
        layer_groups(load_config("llama-3-8b") | {field: value})


@pytest.mark.parametrize(
    ("shape", "field", "value", "says"),
    [
        ("gemma-2-9b", "attn_logit_softcapping", 0, "attn_logit_softcapping is 0; it takes a"),
        ("gemma-2-9b", "query_pre_attn_scalar", float("nan"), "query_pre_attn_scalar is nan"),
        ("gemma-2-9b", "query_pre_attn_scalar", 10**400, "query_pre_attn_scalar is 1000"),
        ("gemma-2-9b", "sliding_window", None, "sliding_window is not given"),
        ("gpt-oss-120b", "sliding_window", -1, "sliding_window is -1"),
        ("mpt", "attn_config", {"prefix_lm": True}, r"attn_config\.prefix_lm is True"),
        ("mpt", "attn_config", {"alibi": "yes"}, r"attn_config\.alibi is 'yes'"),
        ("deepseek-v3", "kv_lora_rank", None, "kv_lora_rank is not given"),
        ("deepseek-v3", "qk_rope_head_dim", -1, "qk_rope_head_dim is -1"),
        ("deepseek-v3", "rope_scaling", {"type": "yarn", "mscale_all_dim": "1"}, "mscale_all_dim"),
        ("deepseek-v4", "compress_ratios", [3] * 43, "compress_ratios is 3; it takes ratios among"),
        ("deepseek-v4", "compress_ratios", [4] * 42, "compress_ratios has 42 entries"),
        ("deepseek-v4", "qk_rope_head_dim", 512, "less than head_dim"),
        ("nemotron-h", "hybrid_override_pattern", "M-X", "hybrid_override_pattern is 'M-X'"),
        ("nemotron-h", "hybrid_override_pattern", "M*", "has 2 entries; it takes one for each"),
        ("nemotron-h", "mamba_num_heads", 0, "mamba_num_heads is 0"),
        ("lfm2", "full_attn_idxs", [2, 16], "full_attn_idxs is 16; it takes layer indices from 0"),
        ("gemma-2-9b", "use_bidirectional_attention", "some", "use_bidirectional_attention is 'so"),
        ("jamba", "attn_layer_offset", 8, "attn_layer_offset is 8; it takes less than"),
        ("qwen3-next", "linear_num_value_heads", 17, "linear_num_value_heads is 17"),
        ("t5-base", "d_kv", None, r"num_heads \(12\)|hidden_size"),
        ("whisper-large-v3", "encoder_attention_heads", 7, r"multiple of encoder_attention_heads"),
    ],
)
def test_a_familys_own_fields_are_checked(shape: str, field: str, value: Any, says: str) -> None:
    config = load_config(shape) | {field: value}
    if (shape, field) == ("t5-base", "d_kv"):
        config["d_model"] = 770
    with pytest.raises((ConfigError, ModelFileError), match=says):
        layer_groups(config)


def test_two_names_of_one_quantity_must_agree() -> None:
    config = load_config("llama-3-8b") | {"n_layer": 32, "n_head": 16}
    with pytest.raises(ConfigError, match=r"num_attention_heads is 32; .*also given: n_head 16"):
        layer_groups(config)


def test_the_place_in_the_file_is_part_of_the_name() -> None:
    config = load_config("gemma-3-27b")
    config["vision_config"] = {**config["vision_config"], "num_attention_heads": 0}
    with pytest.raises(ConfigError, match=r"^vision_config\.num_attention_heads is 0"):
        layer_groups(config)


@pytest.mark.parametrize("config", [None, [], "llama-3-8b", 3])
def test_a_config_is_a_mapping(config: Any) -> None:
    with pytest.raises(ConfigError, match="mapping"):
        layer_groups(config)


def test_an_unknown_type_with_fields_missing_names_itself_and_the_closest() -> None:
    with pytest.raises(ModelFileError, match=r"num_hidden_layers.*not known \(closest: 'llama'\)"):
        layer_groups({"model_type": "lama", "num_attention_heads": 4})
    with pytest.raises(ModelFileError, match=r"without model_type.*not given"):
        layer_groups({})


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_that_no_config_describes_is_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(ModelFileError, match=model_type):
        layer_groups({**load_config("llama-3-8b"), "model_type": model_type})


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (3, r"tensor_parallel is 3; it takes a divisor of num_attention_heads \(32\), such as 2"),
        (64, "tensor_parallel is 64"),
        (0, "tensor_parallel is 0; it takes an integer of at least 1"),
        (True, "tensor_parallel is True"),
        ("2", "tensor_parallel is '2'"),
    ],
)
def test_ranks_must_divide_the_heads(ranks: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        layer_groups(load_config("llama-3-8b"), tensor_parallel=ranks)


def test_kv_heads_must_divide_or_be_divided_by_the_ranks() -> None:
    config = load_config("llama-3-8b") | {"num_attention_heads": 24, "num_key_value_heads": 6}
    config["hidden_size"] = 24 * 128
    assert layer_groups(config, tensor_parallel=12)[0].config.num_kv_heads == 1
    with pytest.raises(ConfigError, match=r"divisor or a multiple of the key-value heads \(6\)"):
        layer_groups(config, tensor_parallel=4)


@pytest.mark.parametrize(
    "request_", [{"dtype": "int4"}, {"kv_cache_dtype": "fp9"}, {"block_size": 0}]
)
def test_the_callers_values_are_checked_too(request_: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, UnknownNameError)):
        layer_groups(load_config("llama-3-8b"), **request_)


# mutations --------------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**70, 10**400, 1e308, float("inf"), float("nan"), 0.0, -0.5]),
    st.text(max_size=4),
    st.sampled_from(["auto", "full_attention", "sliding_attention", "mamba", "yarn", "bfloat16"]),
    st.lists(st.one_of(st.integers(-1, 200), st.sampled_from(["moe", "mamba", "x"])), max_size=4),
    st.dictionaries(
        st.sampled_from(["type", "factor", "head_dim", "0"]), st.integers(), max_size=2
    ),
)
DATA = Path(__file__).resolve().parents[1] / "data" / "models"
SOURCES = [*known_shapes(), *map(str, sorted(DATA.glob("*.json")))]
FIELDS = sorted(
    {
        field
        for source in SOURCES
        for config in (load_config(source),)
        for part in (config, *(v for v in config.values() if isinstance(v, dict)))
        for field in part
    }
    | {field for defaults in DEFAULTS.values() for field in defaults}
    | {"per_layer_config", "is_encoder_decoder", "use_bidirectional_attention", "rope_parameters"}
    | {"layers_block_type", "num_nextn_predict_layers", "thinker_config", "audio_config"}
    | {"hybrid_layer_ids", "no_rope_layers", "attention_layers", "swa_head_dim", "indexer_types"}
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    source=st.sampled_from(SOURCES),
    model_type=st.one_of(st.none(), st.sampled_from(known_types())),
    changes=st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=4),
    inside=st.booleans(),
    ranks=st.sampled_from([1, 2, 3, 8]),
)
def test_a_mutated_config_is_planned_or_refused_never_a_traceback(
    source: str, model_type: str | None, changes: dict[str, Any], inside: bool, ranks: int
) -> None:
    config = load_config(source)
    target = next((v for v in config.values() if isinstance(v, dict)), config) if inside else config
    target.update(changes)
    if model_type is not None:
        config["model_type"] = model_type
    before = json.dumps(config)
    try:
        groups = layer_groups(config, tensor_parallel=ranks)
    except AttnplatError as error:
        assert str(error)
    else:
        assert groups
        assert all(g.layers and g.config.to_dict() for g in groups)
    assert json.dumps(config) == before
