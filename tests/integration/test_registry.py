"""Registration, verification and explanation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnplat import AttentionConfig, platform_for
from attnplat.errors import ConfigError
from attnplat.integrations.transformers import explain, register, verify
from attnplat.integrations.transformers.masks import attention_mask
from attnplat.integrations.transformers.verification import attention_modules
from tests.integration.families import CHOSEN, FAMILIES, build

TINY = dict(vocab_size=97, hidden_size=64)


def test_registering_twice_changes_nothing() -> None:
    first = register()
    assert register() is first
    assert AttentionInterface()["attnplat"] is first
    assert AttentionMaskInterface()["attnplat"] is attention_mask


def test_other_wishes_replace_the_first_and_other_names_stand_beside() -> None:
    first = register("attnplat_wish")
    second = register("attnplat_wish", AttentionConfig(backend="REFERENCE"))
    assert second is not first and AttentionInterface()["attnplat_wish"] is second
    assert register("attnplat_wish", AttentionConfig(backend="REFERENCE")) is second
    assert register("attnplat_wish_2") is not second


@pytest.mark.parametrize("name", ["attnplat_flash", "sdpa", "my/attnplat", "paged|attnplat"])
def test_a_name_that_means_something_else_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be registered"):
        register(name)


def test_a_name_of_somebody_elses_is_refused() -> None:
    AttentionInterface.register("somebodys", lambda *a, **k: None)
    with pytest.raises(ConfigError, match="registered already"):
        register("somebodys")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_of_the_families_reaches_attnplat(name: str) -> None:
    register()
    model = build(name)
    model.set_attn_implementation("attnplat")
    report = verify(model)
    assert report.ok, str(report)
    assert report.total == len(list(attention_modules(model))) >= 2


# Families that do not ask the registry, and what is said of them.
APART = {
    "Bloom": (dict(n_layer=2, n_head=4), 2, "BloomAttention (2) computes its attention itself"),
    "Mpt": (dict(d_model=64, n_layers=2, n_heads=4), 2, "MptAttention (2) computes its attention"),
    "Falcon": (dict(num_hidden_layers=2, num_attention_heads=4), 0, "a table of its own"),
}


@pytest.mark.parametrize("name", APART)
def test_families_that_go_their_own_way_are_reported(name: str) -> None:
    options, total, says = APART[name]
    config = getattr(transformers, f"{name}Config")(**{**TINY, **options})
    report = verify(config)
    assert not report.ok
    assert str(report).startswith(f"0 of {total} attention layers use attnplat: ")
    assert says in str(report)


def test_a_large_model_is_verified_from_its_config_alone() -> None:
    report = verify(transformers.GptOssConfig())
    assert str(report) == "36 of 36 attention layers use attnplat"


def test_a_model_with_another_implementation_does_not_count() -> None:
    report = verify(build("llama"))
    assert report.dispatched == 0 and "attn_implementation is" in report.problem


def test_verifying_leaves_the_model_as_it_was() -> None:
    register()
    model = build("llama")
    model.set_attn_implementation("attnplat")
    ids = torch.arange(3, 9)[None]
    with torch.inference_mode():
        before = model(ids).logits
        verify(model)
        assert torch.equal(model(ids).logits, before)
    assert not any("_attnplat_watch" in vars(m) or m._forward_pre_hooks for m in model.modules())


def test_a_module_that_skips_the_registry_is_named() -> None:
    register()
    model = build("llama")
    model.set_attn_implementation("attnplat")

    class OwnAttention(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    model.model.layers[1].self_attn = OwnAttention()
    report = verify(model)
    assert str(report) == (
        "1 of 2 attention layers use attnplat: OwnAttention (1) computes its attention itself"
    )


def test_one_line_per_kind_of_layer() -> None:
    model = build("gemma2")
    lines = str(explain(model)).splitlines()
    assert len(lines) == 2 and all(f"-> {CHOSEN}" in line for line in lines)
    assert "sliding_window" in lines[0] and "float32" in lines[0]


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt_oss", "qwen3", "deepseek_v3", "deepseek_v32"]
)
def test_layers_are_explained_as_they_are_dispatched(name: str) -> None:
    """What a config says beforehand is what the attention function is then asked for."""
    function = register(f"attnplat_of_{name}")
    model = build(name)
    model.set_attn_implementation(f"attnplat_of_{name}")
    said = {group.config for group, _ in explain(model).decisions}
    with torch.inference_mode():
        model(torch.arange(3, 12)[None], use_cache=False)
    asked = {config for config, _ in function.kernels.selections}
    assert {replace(c, label="", provenance=()) for c in said} == asked


def test_a_device_that_is_not_here_can_be_asked_for() -> None:
    explanation = explain(transformers.GptOssConfig(), platform=platform_for("sm90"))
    assert explanation.ok
    assert "REFERENCE" not in str(explanation) and "sinks" in str(explanation)


def test_a_kind_without_a_backend_says_why() -> None:
    wish = AttentionConfig(backend="FLASHINFER")
    explanation = explain(build("llama"), wish, platform=platform_for("cpu"))
    assert not explanation.ok
    assert "-> none: FLASHINFER" in str(explanation)
