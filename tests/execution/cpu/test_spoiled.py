"""A value that is no finite number spoils its own element of the result, and no other."""

from __future__ import annotations

import pytest
import torch

from tests.execution.cases import layer, make_step
from tests.execution.cpu.steps import ISAS, attend
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 2, 9], ids=["decode", "two tokens", "nine tokens"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_neighbouring_elements_are_not_touched(isa: str, rows: int, bad: float) -> None:
    step = make_step(layer(dtype="bfloat16", num_heads=4, head_size=64), [rows], [700])
    want, _ = attend(step, isa, step.paged())
    step.v[0][100, :, 33] = bad
    out, _ = attend(step, isa, step.paged())
    others = [d for d in range(64) if d != 33]
    assert bool(out[:, :, others].isfinite().all())
    assert torch.allclose(out[:, :, others].float(), want[:, :, others].float(), atol=0.02)
    assert not bool(out[:, :, 33].isfinite().any())
