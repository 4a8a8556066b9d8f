"""What the layers of known models ask for: shapes and published files against facts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from attnplat.config.layer import BlockSparseConfig, MhaConfig, MlaConfig, SparseMlaConfig
from attnplat.config.names import AttnType, Feature, LayerKind, Role
from attnplat.config.run import RunContext
from attnplat.models import LayerGroup, known_shapes, layer_groups, load_config, run_facts

DATA = Path(__file__).resolve().parents[1] / "data" / "models"
FILES = sorted(path.stem for path in DATA.glob("*.json"))

BOTH_WAYS = {"attn_type": AttnType.ENCODER_ONLY, "causal": False, "kv_cache_dtype": None}
TOWER = {**BOTH_WAYS, "role": Role.VISION}
MAMBA2 = {"state_kind": "mamba2"}
DEEPSEEK = {"head_size": 576, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_kv_heads": 1}
V4 = {"head_size": 512, "kv_lora_rank": 448, "v_head_size": 512, "sinks": True}

# model: {label of the group: (layers, fields of its config)}, all groups in order
EXPECTED: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    "llama-3-8b": {
        "decoder full_attention": (32, {"head_size": 128, "num_heads": 32, "num_kv_heads": 8})
    },
    "smollm2-135m": {
        "decoder full_attention": (30, {"head_size": 64, "num_heads": 9, "num_kv_heads": 3})
    },
    "mistral-7b": {"decoder sliding_attention": (32, {"sliding_window": (4095, -1)})},
    "mixtral-8x7b": {"decoder full_attention": (32, {"sliding_window": (-1, -1)})},
    "qwen2.5-0.5b": {"decoder full_attention": (24, {"head_size": 64, "num_heads": 14})},
    "qwen3-32b": {"decoder full_attention": (64, {"head_size": 128, "num_heads": 64})},
    "gemma-2-9b": {
        "decoder sliding_attention": (21, {"logits_soft_cap": 50.0, "sliding_window": (4095, -1)}),
        "decoder full_attention": (21, {"logits_soft_cap": 50.0, "head_size": 256, "scale": None}),
    },
    "gemma-3-27b": {
        "decoder sliding_attention": (52, {"sliding_window": (1023, -1), "mm_prefix": True}),
        "decoder full_attention": (10, {"scale": 168**-0.5, "mm_prefix": True, "num_heads": 32}),
        "vision full_attention": (27, {**TOWER, "head_size": 72}),
    },
    "gemma-3-4b": {  # the file leaves heads and head size to the defaults of its type
        "decoder sliding_attention": (29, {"head_size": 256, "num_heads": 8, "num_kv_heads": 4}),
        "decoder full_attention": (5, {"head_size": 256, "num_heads": 8, "num_kv_heads": 4}),
        "vision full_attention": (27, {**TOWER, "num_heads": 16}),
    },
    "embeddinggemma-300m": {
        "decoder sliding_attention": (20, {**BOTH_WAYS, "sliding_window": (256, 256)}),
        "decoder full_attention": (4, {**BOTH_WAYS, "head_size": 256, "dtype": "float32"}),
    },
    "gemma-4-31b": {
        "decoder sliding_attention": (50, {"head_size": 256, "num_kv_heads": 16, "scale": 1.0}),
        "decoder full_attention": (10, {"head_size": 512, "num_kv_heads": 4, "scale": 1.0}),
    },
    "gpt-oss-120b": {
        "decoder sliding_attention": (18, {"sinks": True, "sliding_window": (127, -1)}),
        "decoder full_attention": (18, {"sinks": True, "num_heads": 64, "num_kv_heads": 8}),
    },
    "phi-3-mini": {
        "decoder sliding_attention": (32, {"head_size": 96, "sliding_window": (2046, -1)})
    },
    "phi-2": {"decoder full_attention": (32, {"head_size": 80, "dtype": "float16"})},
    "llama-4-scout": {
        "decoder chunked_attention": (36, {"chunk_size": 8192, "num_heads": 40}),
        "decoder full_attention": (12, {"chunk_size": None}),
        "vision full_attention": (34, {**TOWER, "head_size": 88}),
    },
    "granite-3.1-8b": {"decoder full_attention": (40, {"scale": 1 / 128})},
    "command-r7b": {
        "decoder sliding_attention": (24, {"sliding_window": (4095, -1)}),
        "decoder full_attention": (8, {"head_size": 128}),
    },
    "mimo-v2-flash": {
        "decoder full_attention": (9, {"sinks": False, "num_kv_heads": 4, "v_head_size": 128}),
        "decoder sliding_attention": (
            39,
            {"sinks": True, "num_kv_heads": 8, "head_size": 192, "sliding_window": (128, -1)},
        ),
    },
    "gpt2": {"decoder full_attention": (12, {"head_size": 64, "num_heads": 12})},
    "opt-125m": {"decoder full_attention": (12, {"head_size": 64, "num_heads": 12})},
    "gpt-neox-20b": {"decoder full_attention": (44, {"head_size": 96, "num_heads": 64})},
    "gpt-neo-1.3b": {
        "decoder full_attention": (12, {"scale": 1.0, "head_size": 128}),
        "decoder sliding_attention": (12, {"scale": 1.0, "sliding_window": (255, -1)}),
    },
    "starcoder": {"decoder full_attention": (40, {"head_size": 128, "num_kv_heads": 1})},
    "glm-4-9b-chat": {"decoder full_attention": (40, {"head_size": 128, "num_kv_heads": 2})},
    "falcon-7b": {"decoder full_attention": (32, {"num_heads": 71, "num_kv_heads": 1})},
    "falcon-40b": {"decoder full_attention": (60, {"num_heads": 128, "num_kv_heads": 8})},
    "falcon": {"decoder full_attention": (24, {"alibi": True, "num_kv_heads": 32})},
    "bloom": {"decoder full_attention": (70, {"alibi": True, "head_size": 128})},
    "mpt": {"decoder full_attention": (32, {"alibi": True, "head_size": 128})},
    "baichuan2-13b": {"decoder full_attention": (40, {"alibi": True, "head_size": 128})},
    "deepseek-v2-lite": {"decoder full_attention": (27, {**DEEPSEEK, "num_heads": 16})},
    "deepseek-v3": {"decoder full_attention": (61, {**DEEPSEEK, "num_heads": 128})},
    "deepseek-v3.2": {
        "decoder indexed_attention": (
            61,
            {**DEEPSEEK, "index_topk": 2048, "index_n_heads": 64, "model_type": "deepseek_v32"},
        )
    },
    "glm-5": {
        "decoder indexed_attention": (78, {"qk_nope_head_dim": 192, "v_head_size": 256}),
    },
    "deepseek-v4": {
        "decoder sliding_attention": (2, {**V4, "sliding_window": (127, -1), "index_topk": None}),
        "decoder compressed_sparse_attention": (21, {**V4, "index_topk": 512, "o_groups": 8}),
        "decoder heavily_compressed_attention": (20, {**V4, "sliding_window": (-1, -1)}),
    },
    "minimax-m3": {
        "decoder full_attention": (3, {"head_size": 128, "num_kv_heads": 4}),
        "decoder minimax_m3_sparse": (57, {"topk_blocks": 16, "model": "minimax_m3"}),
        "vision full_attention": (32, {**TOWER, "head_size": 80}),
    },
    "jamba": {
        "decoder mamba1": (28, {"state_kind": "mamba1", "head_size": 16}),
        "decoder full_attention": (4, {"num_kv_heads": 8}),
    },
    "zamba": {
        "decoder mamba1": (76, {"state_kind": "mamba1"}),
        "decoder full_attention": (13, {"head_size": 464, "scale": 232**-0.5}),
    },
    "nemotron-h": {
        "decoder mamba2": (24, {**MAMBA2, "head_size": 64, "num_heads": 128}),
        "decoder full_attention": (4, {"head_size": 128, "num_kv_heads": 8}),
    },
    "bamba-9b": {
        "decoder mamba2": (29, {**MAMBA2, "head_size": 64}),
        "decoder full_attention": (3, {"num_kv_heads": 8}),
    },
    "qwen3-next": {
        "decoder gdn": (36, {"head_size": 128, "num_heads": 32, "num_kv_heads": 16}),
        "decoder full_attention": (12, {"head_size": 256, "num_heads": 16, "num_kv_heads": 2}),
    },
    "kimi-linear-48b": {
        "decoder gdn": (20, {"head_size": 128, "num_heads": 32}),
        "decoder full_attention": (7, {**DEEPSEEK, "num_heads": 32}),
    },
    "lfm2": {
        "decoder short_conv": (10, {"state_kind": "short_conv"}),
        "decoder full_attention": (6, {"num_kv_heads": 8}),
    },
    "bert-base": {"encoder full_attention": (12, {**BOTH_WAYS, "head_size": 64})},
    "xlm-roberta-base": {"encoder full_attention": (12, {**BOTH_WAYS, "num_heads": 12})},
    "distilbert-base": {"encoder full_attention": (6, {**BOTH_WAYS, "head_size": 64})},
    "mpnet-base": {"encoder full_attention": (12, {**BOTH_WAYS, "position_bias": True})},
    "deberta-v3-base": {
        "encoder full_attention": (12, {"position_bias": True, "scale": (3 * 64) ** -0.5})
    },
    "modernbert-base": {
        "encoder full_attention": (8, {**BOTH_WAYS, "sliding_window": (-1, -1)}),
        "encoder sliding_attention": (14, {**BOTH_WAYS, "sliding_window": (64, 64)}),
    },
    "t5-base": {
        "encoder full_attention": (12, {"attn_type": "encoder", "position_bias": True}),
        "decoder full_attention": (12, {"causal": True, "position_bias": True, "scale": 1.0}),
        "cross full_attention": (12, {"position_bias": False, "scale": 1.0}),
    },
    "bart-large": {
        "encoder full_attention": (12, {"attn_type": "encoder", "kv_cache_dtype": None}),
        "decoder full_attention": (12, {"attn_type": "decoder", "causal": True}),
        "cross full_attention": (12, {"attn_type": "encoder_decoder", "causal": False}),
    },
    "whisper-large-v3": {
        "encoder full_attention": (32, {"attn_type": "encoder", "head_size": 64}),
        "decoder full_attention": (32, {"num_heads": 20, "dtype": "float16"}),
        "cross full_attention": (32, {"attn_type": "encoder_decoder", "num_kv_heads": 20}),
    },
    "qwen2.5-vl-7b": {
        "decoder full_attention": (28, {"head_size": 128, "dtype": "bfloat16"}),
        "vision window_attention": (28, {**TOWER, "head_size": 80}),
        "vision full_attention": (4, {**TOWER, "head_size": 80}),
    },
    "qwen2-vl-7b": {
        "decoder full_attention": (28, {"head_size": 128, "num_kv_heads": 4}),
        "vision full_attention": (32, {**TOWER, "head_size": 80}),
    },
    "llava-1.5-7b": {
        "decoder full_attention": (32, {"head_size": 128, "num_heads": 32, "mm_prefix": False}),
        "vision full_attention": (24, {**TOWER, "head_size": 64, "dtype": "float16"}),
    },
    "paligemma-3b": {
        "decoder full_attention": (18, {"head_size": 256, "num_kv_heads": 1, "mm_prefix": True}),
        "vision full_attention": (27, {**TOWER, "head_size": 72}),
    },
    "llama-3.2-11b-vision": {
        "decoder full_attention": (32, {"head_size": 128, "num_kv_heads": 8}),
        "cross full_attention": (8, {"attn_type": "encoder_decoder", "num_heads": 32}),
        "vision full_attention": (40, {**TOWER, "head_size": 80}),
    },
}


def groups_of(name: str, **request: Any) -> tuple[LayerGroup, ...]:
    """The groups of a known shape or of a file in the data folder."""
    source = name if name in known_shapes() else DATA / f"{name}.json"
    return layer_groups(load_config(source), **request)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_groups_of_a_published_model_are_those_of_its_paper(name: str) -> None:
    groups = groups_of(name)
    assert [g.label for g in groups] == list(EXPECTED[name])
    for group in groups:
        count, values = EXPECTED[name][group.label]
        assert group.count == count
        found = {field: getattr(group.config, field) for field in values}
        assert found == {
            field: pytest.approx(value) if isinstance(value, float) else value
            for field, value in values.items()
        }


def test_every_shape_but_a_sibling_and_every_file_is_checked() -> None:
    assert set(known_shapes()) | set(FILES) == set(EXPECTED) | {"llama-3-70b"}


@pytest.mark.parametrize("name", EXPECTED)
def test_groups_cover_each_stack_without_repetition(name: str) -> None:
    seen: dict[tuple[str, bool], list[int]] = {}
    for group in groups_of(name):
        attends = isinstance(group.config, (MhaConfig, MlaConfig, BlockSparseConfig))
        seen.setdefault((group.part, attends), []).extend(group.layers)
    for indices in seen.values():
        assert len(indices) == len(set(indices))


@pytest.mark.parametrize("name", EXPECTED)
def test_labels_are_unique_and_reach_the_config(name: str) -> None:
    groups = groups_of(name)
    assert len({g.label for g in groups}) == len(groups)
    assert all(g.config.label == g.label for g in groups)


def test_layers_alternate_where_the_model_says_so() -> None:
    sliding, full = groups_of("gemma-2-9b")
    assert sliding.layers == tuple(range(0, 42, 2))
    assert full.layers == tuple(range(1, 42, 2))


def test_needs_and_kinds_follow_from_the_groups() -> None:
    sliding, full = groups_of("gpt-oss-120b")
    assert sliding.config.needs == {Feature.SINKS, Feature.SLIDING_WINDOW}
    assert full.config.needs == {Feature.SINKS}
    assert (sliding.config.kind, full.config.kind) == (
        LayerKind.SLIDING_WINDOW,
        LayerKind.FULL_ATTENTION,
    )


def test_a_sparse_layer_knows_its_indexer() -> None:
    config = groups_of("deepseek-v3.2")[0].config
    assert isinstance(config, SparseMlaConfig)
    indexer = config.indexer()
    assert (indexer.head_size, indexer.num_heads, indexer.topk) == (128, 64, 2048)


@pytest.mark.parametrize(("name", "mscale"), [("deepseek-v3", 1.0), ("deepseek-v2-lite", 0.707)])
def test_yarn_scales_the_logits_of_latent_attention_twice(name: str, mscale: float) -> None:
    factor = 0.1 * mscale * math.log(40) + 1
    assert groups_of(name)[0].config.effective_scale == pytest.approx(192**-0.5 * factor**2)


def test_latent_attention_without_yarn_keeps_the_plain_scale() -> None:
    config = load_config("deepseek-v3") | {"rope_scaling": None}
    assert layer_groups(config)[0].config.scale is None


def test_gpt2_may_divide_the_scale_by_the_layers_number() -> None:
    config = load_config("gpt2") | {"scale_attn_by_inverse_layer_idx": True}
    groups = layer_groups(config)
    assert [g.config.effective_scale for g in groups] == pytest.approx(
        [64**-0.5 / (i + 1) for i in range(12)]
    )
    assert groups[3].label == "decoder full_attention (3)"


def test_a_layer_of_falcon_h1_attends_and_keeps_a_state() -> None:
    groups = layer_groups({"model_type": "falcon_h1", "num_hidden_layers": 3})
    assert [(g.label, g.layers) for g in groups] == [
        ("decoder full_attention", (0, 1, 2)),
        ("decoder mamba2", (0, 1, 2)),
    ]


@pytest.mark.parametrize("key", ["5", "05", 5])
def test_per_layer_config_overrides_one_layer(key: Any) -> None:
    config = load_config("llama-3-8b") | {"per_layer_config": {key: {"num_key_value_heads": 4}}}
    rest, own = layer_groups(config)
    assert (own.layers, own.config.num_kv_heads) == ((5,), 4)
    assert (rest.count, rest.label) == (31, "decoder full_attention (0-4, 6-31)")


def test_a_per_layer_list_gives_each_layer_its_own_heads() -> None:
    config = {
        "model_type": "openelm",
        "num_hidden_layers": 2,
        "head_dim": 64,
        "num_attention_heads": [12, 16],
        "num_key_value_heads": [3, 4],
    }
    groups = layer_groups(config)
    assert [(g.config.num_heads, g.config.num_kv_heads) for g in groups] == [(12, 3), (16, 4)]


# dtypes, block size, ranks ----------------------------------------------------------------


def test_the_files_dtype_is_the_default_and_the_callers_wins() -> None:
    assert groups_of("whisper-large-v3")[0].config.dtype == "float16"
    assert groups_of("whisper-large-v3", dtype="fp32")[0].config.dtype == "float32"


def test_the_whole_models_dtype_beats_that_of_a_part() -> None:
    config = load_config("gemma-3-27b")
    config["text_config"]["torch_dtype"] = "float32"
    assert {g.config.dtype for g in layer_groups(config)} == {"bfloat16"}


def test_an_absent_dtype_is_assumed_and_said() -> None:
    group = groups_of("bert-base")[0]
    assert group.config.dtype == "bfloat16"
    assert group.config.source_of("dtype") == "default"
    assert any("names no dtype" in note for note in group.notes)


def test_cache_wishes_reach_exactly_the_layers_with_a_kv_cache() -> None:
    for group in groups_of("whisper-large-v3", kv_cache_dtype="fp8", block_size=32):
        expected = ("fp8", 32) if group.config.has_kv_cache else (None, None)
        assert (group.config.kv_cache_dtype, group.config.block_size) == expected


def test_sources_tell_the_models_values_from_the_callers() -> None:
    config = groups_of("gpt-oss-120b", kv_cache_dtype="fp8", block_size=32)[0].config
    sources = {name: config.source_of(name) for name in ("head_size", "sinks", "sliding_window")}
    assert set(sources.values()) == {"model"}
    assert config.source_of("kv_cache_dtype") == config.source_of("block_size") == "caller"


@pytest.mark.parametrize(
    ("name", "ranks", "heads", "kv_heads"),
    [
        ("llama-3-8b", 8, 4, 1),
        ("llama-3-70b", 16, 4, 1),
        ("smollm2-135m", 3, 3, 1),
        ("falcon-7b", 71, 1, 1),
        ("deepseek-v3", 16, 8, 1),
        ("nemotron-h", 8, 16, None),
        ("qwen3-next", 4, 8, 4),
    ],
)
def test_ranks_share_heads_and_repeat_the_last_kv_head(
    name: str, ranks: int, heads: int, kv_heads: int | None
) -> None:
    config = groups_of(name, tensor_parallel=ranks)[0].config
    assert (config.num_heads, config.num_kv_heads) == (heads, kv_heads)


def test_a_tower_that_does_not_divide_stays_whole_and_says_so() -> None:
    config = load_config("llama-3-8b") | {
        "vision_config": {
            "model_type": "intern_vit_6b",
            "hidden_size": 3200,
            "num_attention_heads": 25,
            "num_hidden_layers": 45,
        }
    }
    text, vision = layer_groups(config, tensor_parallel=2)
    assert (text.config.num_heads, vision.config.num_heads) == (16, 25)
    assert any("whole on each rank" in note for note in vision.notes)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("llama-3-8b", {}),
        ("gemma-4-31b", {"model_head_size": 512}),
        ("gemma-2-9b", {"model_soft_cap": 50.0}),
        ("gemma-3-27b", {"uses_mm_prefix": True}),
        ("whisper-large-v3", {"model_attn_type": "encoder_decoder"}),
        ("deepseek-v3", {}),
    ],
)
def test_what_holds_for_the_whole_run_follows_from_the_groups(
    name: str, facts: dict[str, Any]
) -> None:
    assert run_facts(groups_of(name)) == facts
    assert RunContext(**facts).to_dict() == facts


# notes ------------------------------------------------------------------------------------


def test_an_unknown_type_is_read_the_plain_way_and_says_so() -> None:
    config = {
        "model_type": "lama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "sliding_window": 8,
        "attn_logit_softcapping": 30.0,
    }
    group = layer_groups(config)[0]
    assert group.config.sliding_window == (7, -1)
    assert group.config.logits_soft_cap == 30.0
    assert any("'lama' is not known (closest: 'llama')" in note for note in group.notes)


def test_what_the_plain_rule_does_not_read_is_named() -> None:
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "attention_multiplier": 0.5,
    }
    notes = " ".join(layer_groups(config)[0].notes)
    assert "model_type is not given" in notes
    assert "attention_multiplier" in notes


@pytest.mark.parametrize("model_type", ["minimax_m2", "something_new"])
def test_block_sparse_attention_is_never_read_as_dense(model_type: str) -> None:
    config = load_config("minimax-m3")
    config["text_config"]["model_type"] = model_type
    groups = layer_groups(config)
    assert [g.config.operation for g in groups[:2]] == ["mha", "block_sparse"]


def test_unknown_latent_and_recurrent_models_are_told_by_their_fields() -> None:
    latent = load_config("deepseek-v3.2") | {"model_type": "something_new"}
    assert isinstance(layer_groups(latent)[0].config, SparseMlaConfig)
    hybrid = load_config(DATA / "bamba-9b.json")
    hybrid |= {"model_type": "something_new", "layer_types": ["mamba", "attention"] * 16}
    assert [g.label for g in layer_groups(hybrid)] == [
        "decoder mamba2",
        "decoder full_attention",
    ]


def test_defaults_of_the_type_are_said() -> None:
    notes = groups_of("gemma-3-4b")[0].notes
    assert any("defaults of gemma3_text apply: num_attention_heads 8" in note for note in notes)


@pytest.mark.parametrize(
    "tower",
    [
        {"model_type": "mobilenetv5"},
        {"model_type": "swin", "hidden_size": [96, 192], "num_heads": [3, 6], "depth": 2},
    ],
)
def test_a_tower_without_a_rule_is_left_out_aloud(tower: dict[str, Any]) -> None:
    groups = layer_groups(load_config("llama-3-8b") | {"vision_config": tower})
    assert [g.part for g in groups] == ["decoder"]
    assert any("vision tower" in note and "not planned" in note for note in groups[0].notes)


def test_shared_caches_are_said() -> None:
    groups = layer_groups({"model_type": "gemma3n_text", "num_kv_shared_layers": 10})
    assert any("last 10 layers reuse" in note for note in groups[0].notes)
