"""The conformance suite that attnplat ships, over the CPU kernels."""

from __future__ import annotations

from attnplat.testing import run_conformance
from tests.execution.cpu.every_operation import EveryOperation
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401


def test_the_kernels_hold_every_claim_of_the_suite() -> None:
    report = run_conformance(EveryOperation, "cpu", "quick")
    assert report.ok, report.of("failed")
