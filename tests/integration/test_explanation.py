"""What is said of a transformers model before it runs."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from transformers import LlamaConfig

from attnplat import platform_for
from attnplat.integrations.transformers import explain

LLAMA = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
)


def test_an_explanation_tells_of_what_would_make_a_better_choice():
    told = str(explain(LLAMA, platform=platform_for("gfx950", assume="default")))
    choice, advice = told.splitlines()
    assert "-> ROCM_ATTN" in choice
    assert advice.startswith("  advice: set ATTNPLAT_AITER=1: ROCM_AITER_FA is then chosen")


def test_an_explanation_without_a_better_choice_has_no_advice():
    assert "advice" not in str(explain(LLAMA, platform=platform_for("gfx950")))
