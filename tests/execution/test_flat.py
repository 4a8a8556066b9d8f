"""The flat forms: one call with plain arguments, and both spellings of a backend."""

from __future__ import annotations

import pytest
import torch

import attnplat
from attnplat import AttentionConfig, BackendName, NoBackendError
from attnplat.backends.interface import AttentionImpl
from attnplat.errors import ConflictError


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLAT_DEVICE", "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float32"])
def test_plain_arguments_give_the_class_that_runs_the_layer(dtype: object) -> None:
    backend = attnplat.get_attn_backend(64, dtype, "auto", num_heads=9)
    assert issubclass(backend, AttentionImpl)
    same = attnplat.MhaConfig(head_size=64, dtype=dtype, num_heads=9)
    assert attnplat.current_platform().get_attn_backend(same) is backend


@pytest.mark.parametrize("flags", [{"has_sink": True}, {"use_mm_prefix": True}, {"use_mla": True}])
def test_each_flag_describes_a_layer_that_is_served(flags: dict[str, bool]) -> None:
    head_size = 576 if flags.get("use_mla") else 64
    assert issubclass(
        attnplat.get_attn_backend(head_size, "bfloat16", "auto", **flags), AttentionImpl
    )


def test_flags_that_exclude_each_other_are_an_error() -> None:
    with pytest.raises(ConflictError, match="use_mm_prefix and use_mla"):
        attnplat.get_attn_backend(576, "bfloat16", "auto", use_mla=True, use_mm_prefix=True)


def test_a_recurrent_layer_without_an_adapter_is_refused_with_reasons() -> None:
    with pytest.raises(NoBackendError, match=r"mamba2|state"):
        attnplat.get_mamba_attn_backend("mamba2")


def test_both_spellings_of_a_backend_are_the_same_wish() -> None:
    by_member = AttentionConfig(backend=BackendName.TORCH_SDPA)
    assert by_member == AttentionConfig(backend="torch_sdpa")
    config = attnplat.MhaConfig(head_size=64)
    assert attnplat.current_platform().get_attn_backend(config, by_member).name == "TORCH_SDPA"
