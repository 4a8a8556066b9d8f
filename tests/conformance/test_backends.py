"""Every backend of this machine, asked every case that it claims."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnplat.cli.check import backends_here
from attnplat.testing import CASES, Case, Status, Suite, run_conformance, subject_of
from attnplat.testing.bench import Bench, threads
from attnplat.testing.terrain import terrains

ASKED = [case for case in CASES if case.build is not None]
LONGEST_REASON = 160


@pytest.fixture(scope="module")
def suite() -> Suite:
    return Suite()


@pytest.fixture(scope="module")
def benches() -> dict[tuple[str, str], Bench]:
    return {}


def bench_of(benches: dict[tuple[str, str], Bench], backend: str, device: str) -> Bench:
    """The backend's bench, made once."""
    if (backend, device) not in benches:
        benches[backend, device] = Bench(subject_of(backend, device))
    return benches[backend, device]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Scenes are small: threads would only wait for each other. Cases about threads set theirs."""
    with threads(1):
        yield


def ask(case: Case, bench: Bench, suite: Suite) -> None:
    """Fail if a claim is contradicted; skip, with the reason, if there is no such claim."""
    result = suite.run_case(case, bench, terrains(bench.subject, "quick", 0))
    assert result.status != Status.FAILED, f"{case.claim}: {result.reason}"
    if result.status != Status.PASSED:
        pytest.skip(f"{result.status}: {result.reason}"[:LONGEST_REASON])


@pytest.mark.parametrize("case", ASKED, ids=lambda case: case.id)
@pytest.mark.parametrize("backend", backends_here("cpu"))
def test_the_backend_does_what_it_claims(
    backend: str, case: Case, suite: Suite, benches: dict[tuple[str, str], Bench]
) -> None:
    ask(case, bench_of(benches, backend, "cpu"), suite)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", backends_here("cpu"))
def test_the_backend_does_what_it_claims_in_every_dtype_and_size(backend: str) -> None:
    report = run_conformance(backend, "cpu", "full")
    assert report.of(Status.FAILED) == []
    assert report.ok


def device_backends() -> list[str]:
    """The backends of the accelerator, where there is one."""
    return backends_here("cuda") if torch.cuda.is_available() else ["none"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ASKED, ids=lambda case: case.id)
@pytest.mark.parametrize("backend", device_backends())
def test_the_backend_does_what_it_claims_on_the_accelerator(
    backend: str, case: Case, suite: Suite, benches: dict[tuple[str, str], Bench]
) -> None:
    ask(case, bench_of(benches, backend, "cuda"), suite)
