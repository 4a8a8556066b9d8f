"""Layers, batches and arrangements that nobody thought of."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnplat.testing import Arrangement, Failed, Scene, subject_of
from attnplat.testing.bench import Bench, same, threads
from attnplat.testing.mutations.bug import healthy
from attnplat.testing.mutations.planted import PLANTED
from tests.conformance.strategies import arrangements, scenes

BACKENDS = ("REFERENCE", "TORCH_SDPA")
QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def agrees_however_laid_out(backend: str, data: st.DataObject) -> None:
    """The scene is within the contract, and bit for bit the same in another arrangement."""
    scene, how, other = data.draw(scenes()), data.draw(arrangements()), data.draw(arrangements())
    bench = Bench(subject_of(backend))
    assert bench.subject.refusal(scene.config) is None
    with threads(1):
        first = bench.agree(scene, how)
        # Block sizes may change bits, and so may pages against dense keys.
        other = other.replace(block_size=how.block_size, paged=how.paged)
        same(f"{how}, then {other}", first, bench.call(scene, other))


@pytest.mark.parametrize("backend", BACKENDS)
@QUICK
@given(data=st.data())
def test_any_layer_agrees_with_the_truth_however_it_is_laid_out(
    backend: str, data: st.DataObject
) -> None:
    agrees_however_laid_out(backend, data)


BUGS = ("window left wide", "sink twice")


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_and_shrunk(name: str) -> None:
    (bug,) = (bug for bug in PLANTED if bug.name == name)
    bench = Bench(bug.plant(healthy(subject_of("REFERENCE"))))
    found: list[Scene] = []

    @settings(QUICK, max_examples=1000, report_multiple_bugs=False)
    @given(scene=scenes())
    def search(scene: Scene) -> None:
        try:
            bench.agree(scene, Arrangement())
        except Failed:
            found.append(scene)
            raise

    with threads(1), pytest.raises(Failed):
        search()
    # Hypothesis ends with the smallest that it has found.
    assert len(found) > 1
    assert len(found[-1].requests) == 1
    assert max(found[-1].seq_lens) <= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(QUICK, max_examples=2000, derandomize=False)
@given(data=st.data())
def test_any_layer_agrees_with_the_truth_for_a_long_time(backend: str, data: st.DataObject) -> None:
    agrees_however_laid_out(backend, data)
