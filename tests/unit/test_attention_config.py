"""AttentionConfig: every field is validated, keeps its source, and changes the hash."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from attnplat.config.attention import AttentionConfig, HiSparseConfig
from attnplat.config.backend_names import BackendName
from attnplat.config.names import LayerKind
from attnplat.config.options import from_json, from_toml, split_options
from attnplat.errors import AttnplatError, ConfigError, ConflictError, UnknownNameError

OTHER_VALUES = {
    "backend": "TRITON_ATTN",
    "backend_per_kind": {"full_attention": "TRITON_ATTN"},
    "minimax_m3_msa_decode_backend": "cutlass",
    "minimax_m3_indexer_cp": True,
    "flash_attn_version": 3,
    "flash_attn_max_num_splits_for_cuda_graph": 16,
    "tq_max_kv_splits_for_cuda_graph": 16,
    "use_trtllm_attention": False,
    "disable_flashinfer_q_quantization": True,
    "mla_prefill_backend": "FLASH_ATTN",
    "use_prefill_query_quantization": True,
    "indexer_kv_dtype": "mxfp4",
    "indexer_sparse_logits": True,
    "hisparse_config": {"device_buffer_size": 4096},
    "use_non_causal": True,
    "sparse_mla_force_mqa": True,
    "flex_attn_block_m": 64,
    "flex_attn_block_n": 64,
    "flex_attn_q_block_size": 128,
    "flex_attn_kv_block_size": 128,
}


def test_the_table_of_other_values_covers_every_field():
    assert set(OTHER_VALUES) == set(AttentionConfig().to_dict())


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_every_field_changes_the_hash_and_survives_a_round_trip(name):
    changed = AttentionConfig.from_dict({name: OTHER_VALUES[name]})
    assert changed.compute_hash() != AttentionConfig().compute_hash()
    assert changed.set_fields() == {name}
    assert AttentionConfig.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed


def test_the_hash_is_the_same_in_another_process():
    code = (
        "from attnplat.config.attention import AttentionConfig as A;"
        "print(A(backend='flash_attn', backend_per_kind={'mamba':'TRITON_ATTN',"
        "'full_attention':'FLASH_ATTN'}).compute_hash())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = AttentionConfig(
        backend="FLASH_ATTN",
        backend_per_kind={"full_attention": "FLASH_ATTN", "mamba": "TRITON_ATTN"},
    )
    assert out.stdout.strip() == here.compute_hash()


@pytest.mark.parametrize(
    "spelling", ["flash_attn", "FLASH_ATTN", "Flash-Attn", BackendName.FLASH_ATTN]
)
def test_a_backend_may_be_spelled_in_any_case(spelling):
    assert AttentionConfig(backend=spelling).backend is BackendName.FLASH_ATTN


@pytest.mark.parametrize("spelling", [None, "auto", "AUTO"])
def test_none_and_auto_mean_automatic(spelling):
    assert AttentionConfig(backend=spelling) == AttentionConfig()


@pytest.mark.parametrize(("name", "kernel"), [("CUTLASS_MSA", "cutlass"), ("triton_msa", "triton")])
def test_msa_names_set_the_decode_kernel_and_leave_the_backend_automatic(name, kernel):
    config = AttentionConfig(backend=name)
    assert (config.backend, config.minimax_m3_msa_decode_backend) == (None, kernel)


def test_an_msa_name_that_contradicts_the_decode_kernel_is_an_error():
    with pytest.raises(ConflictError, match="minimax_m3_msa_decode_backend"):
        AttentionConfig(backend="TRITON_MSA", minimax_m3_msa_decode_backend="cutlass")


REFUSED = [
    ({"backend": "FLASHATN"}, "did you mean 'FLASH_ATTN'"),
    ({"backend": "XFORMERS"}, "retired"),
    ({"backend": 3}, "unknown backend 3"),
    ({"backend_per_kind": {"fulll": "FLASH_ATTN"}}, "did you mean 'full_attention'"),
    ({"backend_per_kind": {"mamba": "NOT_A_BACKEND"}}, "unknown backend"),
    ({"backend_per_kind": {"mamba": "auto"}}, "leave the kind out"),
    ({"backend_per_kind": ["mamba"]}, "takes a mapping"),
    ({"flash_attn_version": 5}, "takes 2, 3, 4 or None"),
    ({"flash_attn_version": True}, "takes 2, 3, 4 or None"),
    ({"flash_attn_version": 3.0}, r"flash_attn_version is 3\.0; it takes 2, 3, 4 or None"),
    ({"flash_attn_max_num_splits_for_cuda_graph": -1}, "integer from 0"),
    ({"use_trtllm_attention": "maybe"}, "true or false or null"),
    ({"use_non_causal": 1}, "true or false"),
    ({"mla_prefill_backend": "FLASHATTN"}, "did you mean 'FLASH_ATTN'"),
    ({"indexer_kv_dtype": "fp4"}, "did you mean"),
    ({"minimax_m3_msa_decode_backend": "cuda"}, "unknown minimax_m3_msa_decode_backend"),
    ({"flex_attn_block_m": 33}, "power of two"),
    ({"flex_attn_block_m": 8}, "16 to 1024"),
    ({"flex_attn_block_m": 128, "flex_attn_q_block_size": 64}, "multiple of flex_attn_block_m"),
    ({"hisparse_config": {"device_buffer": 1}}, "did you mean 'device_buffer_size'"),
    ({"hisparse_config": {"device_buffer_size": 0}}, "integer from 1"),
    ({"hisparse_config": {"host_pool_gib": True}}, "host_pool_gib is True; it takes a finite"),
    ({"hisparse_config": {"host_pool_gib": math.inf}}, "host_pool_gib is inf"),
    ({"hisparse_config": 7}, "HiSparseConfig"),
    ({"flash_attn_versoin": 3}, "did you mean 'flash_attn_version'"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_bad_value_names_itself_and_what_is_allowed(values, message):
    with pytest.raises(ConfigError, match=message):
        AttentionConfig.from_dict(values)


def test_a_listed_kind_beats_the_backend():
    config = AttentionConfig(
        backend="FLASHINFER", backend_per_kind={"sliding_window": "TRITON_ATTN"}
    )
    assert config.backend_for(LayerKind.SLIDING_WINDOW) == (BackendName.TRITON_ATTN, "caller")
    assert config.backend_for(LayerKind.FULL_ATTENTION) == (BackendName.FLASHINFER, "caller")


@pytest.mark.parametrize(
    ("given", "default", "resolved"),
    [
        ("auto", "fp8", "fp8"),
        ("auto", "bf16", "bf16"),
        ("mxfp4", "fp8", "mxfp4"),
    ],
)
def test_the_indexer_dtype_resolves_to_the_models_default(given, default, resolved):
    assert AttentionConfig(indexer_kv_dtype=given).resolve_indexer_kv_dtype(default) == resolved


def test_the_higher_config_wins_and_sources_are_kept():
    low = AttentionConfig.from_dict(
        {"backend": "FLASHINFER", "use_non_causal": True}, source="environment"
    )
    high = AttentionConfig.from_dict({"backend": "TRITON_ATTN"}, source="command line")
    merged = high.merged_over(low)
    assert (merged.backend, merged.source_of("backend")) == ("TRITON_ATTN", "command line")
    assert (merged.use_non_causal, merged.source_of("use_non_causal")) == (True, "environment")


def test_a_config_is_frozen_to_the_bottom():
    config = AttentionConfig(backend_per_kind={"mamba": "TRITON_ATTN"})
    with pytest.raises(TypeError, match="frozen"):
        config.backend_per_kind["mamba"] = BackendName.FLASH_ATTN
    assert hash(config) == hash(AttentionConfig(backend_per_kind={"mamba": "TRITON_ATTN"}))


FORMS = [
    (["--attention-backend", "flash_attn"], AttentionConfig(backend="FLASH_ATTN")),
    (["--attention-backend=flash_attn"], AttentionConfig(backend="FLASH_ATTN")),
    (["--attention-config.backend", "FLASH_ATTN"], AttentionConfig(backend="FLASH_ATTN")),
    (["-ac.backend", "FLASH_ATTN"], AttentionConfig(backend="FLASH_ATTN")),
    (["-ac.flash_attn_version=3"], AttentionConfig(flash_attn_version=3)),
    (["-ac.flash-attn-version=3"], AttentionConfig(flash_attn_version=3)),
    (["-ac.use_non_causal", "true"], AttentionConfig(use_non_causal=True)),
    (["-ac.use_trtllm_attention", "None"], AttentionConfig()),
    (["--attention-config", '{"backend": "FLASH_ATTN"}'], AttentionConfig(backend="FLASH_ATTN")),
    (
        ["-ac", '{"flex_attn_block_m": 64}', "-ac.flex_attn_block_n", "32"],
        AttentionConfig(flex_attn_block_m=64, flex_attn_block_n=32),
    ),
    (
        [
            "-ac.backend_per_kind.mamba",
            "TRITON_ATTN",
            "-ac.backend_per_kind.full_attention",
            "FLASHINFER",
        ],
        AttentionConfig(backend_per_kind={"mamba": "TRITON_ATTN", "full_attention": "FLASHINFER"}),
    ),
    (
        ["-ac.hisparse_config.device_buffer_size", "64"],
        AttentionConfig(hisparse_config=HiSparseConfig(device_buffer_size=64)),
    ),
]


@pytest.mark.parametrize(("arguments", "config"), FORMS)
def test_command_line_forms(arguments, config):
    parsed, rest = split_options(["explain", *arguments, "--json"])
    assert parsed == config
    assert rest == ["explain", "--json"]
    assert all(parsed.source_of(n) == "command line" for n in parsed.set_fields())


BAD_FORMS = [
    (["--attention-backend", "FLASH_ATTN", "-ac.backend", "FLASH_ATTN"], "give one of the two"),
    (["--attention-backend", "A", "--attention-config", '{"backend": "B"}'], "give one of the two"),
    (["-ac.backend"], "needs a value"),
    (["-ac", "[1]"], "object of fields"),
    (["-ac", "{backend}"], "JSON object"),
    (["-ac.backendd", "FLASH_ATTN"], "did you mean 'backend'"),
    (["-ac.backend.name", "FLASH_ATTN"], "has no field name"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_FORMS)
def test_bad_command_line_forms(arguments, message):
    with pytest.raises(AttnplatError, match=message):
        split_options(arguments)


def test_json_and_toml(tmp_path):
    assert from_json('{"backend": "FLASH_ATTN"}').backend == "FLASH_ATTN"
    path = tmp_path / "run.toml"
    path.write_text('[attention]\nbackend = "flash_attn"\nflash_attn_version = 3\n')
    config = from_toml(path)
    assert (config.backend, config.flash_attn_version) == ("FLASH_ATTN", 3)
    assert config.source_of("backend") == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("[attention", "not TOML"),
        ("[other]", r"no \[attention\] table"),
        ("[attention]\nbackend = 'FLASHATN'", "did you mean"),
        ("attention = 3", "object of fields"),
    ],
)
def test_bad_toml(tmp_path, text, message):
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        from_toml(path)


def test_unknown_names_carry_the_closest_and_the_known():
    with pytest.raises(UnknownNameError) as caught:
        AttentionConfig(backend="FLASHINFR")
    assert caught.value.closest == "FLASHINFER"
    assert "TRITON_ATTN" in caught.value.known
