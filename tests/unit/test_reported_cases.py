"""Inputs that users of other engines reported, each with the outcome they should have had.

The table is of public reports that need no device to reproduce: wrong silent choices,
refusals without a reason, crashes at the first forward in place of a refusal.
"""

from __future__ import annotations

import pytest

from attnplat import (
    AttentionConfig,
    MhaConfig,
    MlaConfig,
    RunContext,
    SparseMlaConfig,
    platform_for,
)
from attnplat.errors import ConfigError, UnknownNameError

DEVICES = ("sm75", "sm80", "sm90", "sm100", "sm120", "gfx942", "gfx950", "gfx1201", "cpu:amx")
HEAD_SIZES = (40, 46, 72, 80, 88, 96, 224, 256, 512, 576)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_head_size_is_served_and_each_refusal_says_what_is_taken(device, head_size):
    dtype = "float16" if device == "sm75" else "bfloat16"
    selection = platform_for(device).select(MhaConfig(head_size=head_size, dtype=dtype))
    assert selection.ok
    for reasons in selection.rejections.values():
        for reason in reasons:
            if reason.subject == "head_size":
                assert f"config.head_size is {head_size}, takes " in str(reason)


def test_advice_about_a_head_size_is_itself_accepted():
    asked = AttentionConfig(backend="FLASHINFER")
    selection = platform_for("sm90").select(MhaConfig(head_size=40), asked)
    assert "pad head_size to 64: FLASHINFER takes it" in selection.failure()
    assert platform_for("sm90").select(MhaConfig(head_size=64), asked).ok


def test_values_narrower_than_keys_are_served():
    config = MhaConfig(head_size=192, v_head_size=128, num_heads=16, num_kv_heads=16)
    assert platform_for("sm90").select(config).chosen.name == "FLASH_ATTN_DIFFKV"


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "ROCM_ATTN", "FLASHINFER"])
def test_another_vendors_backend_on_a_cpu_is_an_error_that_says_whose_it_is(backend):
    selection = platform_for("cpu:avx2").select(
        MhaConfig(head_size=128), AttentionConfig(backend=backend)
    )
    assert not selection.ok
    assert "it belongs to the platform" in selection.failure()


@pytest.mark.parametrize("device", ["sm90", "gfx950", "cpu:amx"])
def test_a_layer_without_a_cache_is_not_refused_for_the_caches_dtype(device):
    encoder = MhaConfig(head_size=64, attn_type="encoder_only", kv_cache_dtype="fp8")
    plain = encoder.replace(kv_cache_dtype="auto")
    platform = platform_for(device)
    assert platform.select(encoder).chosen == platform.select(plain).chosen


def test_a_second_question_after_a_change_gets_a_new_answer():
    platform, config = platform_for("sm90"), MhaConfig(head_size=128)
    assert platform.select(config).chosen.name == "FLASH_ATTN"
    asked = AttentionConfig(backend="TRITON_ATTN")
    assert platform.select(config, asked).chosen.name == "TRITON_ATTN"
    bare = platform_for("sm90", assume="minimal")
    assert bare.select(config).chosen.name == "TRITON_ATTN"
    assert platform.select(config).chosen.name == "FLASH_ATTN"


def test_context_parallel_decode_is_refused_where_partial_results_cannot_be_merged():
    run = RunContext(dcp_size=2)
    platform, config = platform_for("sm90"), MhaConfig(head_size=128)
    assert platform.select(config, run=run).chosen.name == "FLASH_ATTN"
    refused = platform.select(config, AttentionConfig(backend="TRITON_ATTN"), run=run)
    assert [r.subject for r in refused.rejections["TRITON_ATTN"]] == ["dcp"]


def test_each_kind_of_layer_may_have_its_own_backend():
    wishes = AttentionConfig(backend_per_kind={"sliding_window": "FLASH_ATTN"})
    platform = platform_for("sm90")
    wide = MhaConfig(head_size=512, label="full")
    narrow = MhaConfig(head_size=256, sliding_window=(1023, -1), label="sliding")
    assert platform.select(narrow, wishes).chosen.name == "FLASH_ATTN"
    assert platform.select(wide, wishes).requested is None
    with pytest.raises(UnknownNameError, match="sliding_window"):
        AttentionConfig(backend_per_kind={"slidng_window": "FLASH_ATTN"})


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (71, 1), (24, 8)])
def test_odd_head_groups_are_served(heads, kv_heads):
    config = MhaConfig(head_size=64, num_heads=heads, num_kv_heads=kv_heads)
    assert all(platform_for(device).select(config).ok for device in ("sm90", "gfx942", "cpu:avx2"))


def test_heads_that_do_not_divide_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"num_heads is 5.*multiple of num_kv_heads \(2\)"):
        MhaConfig(head_size=64, num_heads=5, num_kv_heads=2)


def test_an_old_device_says_that_its_capability_rules_out_a_sparse_latent_kernel():
    config = SparseMlaConfig(head_size=576, index_topk=2048, kv_lora_rank=512, qk_rope_head_dim=64)
    asked = AttentionConfig(backend="FLASHMLA_SPARSE")
    refused = platform_for("sm75").select(config, asked)
    assert "capability" in {r.subject for r in refused.rejections["FLASHMLA_SPARSE"]}
    assert "device.capability is 7.5, takes" in refused.failure()


@pytest.mark.parametrize("device", ["sm130", "gfx9999"])
def test_an_unknown_architecture_gets_a_conservative_choice_and_a_note(device):
    platform = platform_for(device)
    assert platform.device.notes
    for config in (
        MhaConfig(head_size=128),
        MlaConfig(head_size=576, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512),
    ):
        text = platform.select(config).explain()
        assert text


@pytest.mark.parametrize("name", ["sm9x", "gfx95o", "cuda:amx", "h10o", "cpu:avx51", ""])
def test_a_device_that_cannot_be_meant_is_an_error_with_the_known_ones(name):
    with pytest.raises(ConfigError):
        platform_for(name)


CONTRADICTIONS = [
    ({"head_size": 2**40}, "head_size"),
    ({"head_size": 128, "block_size": -16}, "block_size"),
    ({"head_size": 128, "dtype": "float8"}, "dtype"),
    ({"head_size": 128, "logits_soft_cap": 0}, "logits_soft_cap"),
]


@pytest.mark.parametrize(("values", "name"), CONTRADICTIONS)
def test_nonsense_is_refused_by_name(values, name):
    with pytest.raises(ConfigError, match=name):
        MhaConfig(**values)
