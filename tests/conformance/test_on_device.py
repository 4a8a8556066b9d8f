"""Cases that only a device with graphs and TF32 can be asked: right ones pass, wrong ones fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.interface import Plan
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.portable.torch_sdpa import TorchSdpaImpl
from attnplat.testing import Status, run_conformance, subject_of

pytestmark = pytest.mark.gpu


class KeepsQueries(TorchSdpaImpl):
    """What was captured reads queries that were copied before."""

    kept: torch.Tensor | None = None

    def forward(
        self, plan: Plan, q: torch.Tensor, cache: KVCache | None = None, **options: Any
    ) -> Any:
        if self.kept is None or self.kept.shape != q.shape:
            self.kept = q.clone()
        return super().forward(plan, self.kept, cache, **options)


class UpdatesNothing(TorchSdpaImpl):
    """An update leaves the plan as it is."""

    def update(
        self, plan: Plan, batch: Batch, pages: PageTable | None = None, **options: Any
    ) -> Plan:
        return plan


class HalfProducts(TorchSdpaImpl):
    """Where TF32 is allowed, queries are rounded to bfloat16."""

    def forward(
        self, plan: Plan, q: torch.Tensor, cache: KVCache | None = None, **options: Any
    ) -> Any:
        if torch.get_float32_matmul_precision() != "highest":
            q = q.bfloat16().to(q.dtype)
        return super().forward(plan, q, cache, **options)


@pytest.mark.parametrize(
    ("case", "impl"),
    [
        ("M10", TorchSdpaImpl),
        ("M10", KeepsQueries),
        ("R11", TorchSdpaImpl),
        ("R11", KeepsQueries),
        ("R11", UpdatesNothing),
        ("O11", TorchSdpaImpl),
        ("O11", HalfProducts),
    ],
)
def test_a_bug_is_seen_on_the_device(case: str, impl: type[TorchSdpaImpl]) -> None:
    subject = subject_of("TORCH_SDPA", "cuda").replace(impl=impl)
    (result,) = run_conformance(subject, "cuda", ids=[case]).results
    right = impl is TorchSdpaImpl
    assert result.status == (Status.PASSED if right else Status.FAILED), result.reason
