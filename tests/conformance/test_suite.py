"""What the suite says of itself: complete, repeatable, honest, and open to foreign kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplat.backends.kv_cache import KVCache
from attnplat.backends.portable.torch_sdpa import TorchSdpaImpl
from attnplat.cli import check
from attnplat.cli.main import main
from attnplat.config.names import Feature
from attnplat.errors import ConfigError, UnknownNameError
from attnplat.testing import CASES, Status, Suite, run_conformance, subject_of
from attnplat.testing.bits import differing
from attnplat.testing.children import each_in_a_child
from attnplat.testing.compare import CONTRACT, gap
from attnplat.testing.inputs import edges, normal
from attnplat.testing.mutations.specimen import Specimen
from attnplat.testing.runner import chosen
from attnplat.testing.terrain import Terrain

ROOT = Path(__file__).resolve().parents[2]

# The contract's kinds and how many cases each has; R are its bitwise rules.
COUNTS = {
    "A": 13, "B": 15, "C": 14, "D": 20, "E": 15, "F": 14, "G": 17, "H": 17, "I": 16,
    "J": 12, "K": 8, "L": 11, "M": 13, "N": 8, "O": 11, "R": 12,
}  # fmt: skip

# Cases that the contract does not have.
OWN = ("O11",)


def test_every_case_of_the_contract_is_there_once_and_none_silently_missing() -> None:
    expected = [f"{kind}{n}" for kind, count in COUNTS.items() for n in range(1, count + 1)]
    assert [case.id for case in CASES] == expected
    assert sum(count for kind, count in COUNTS.items() if kind != "R") == 203 + len(OWN)
    for case in CASES:
        assert case.claim
        assert bool(case.absent) == (case.build is None), case.id


def test_the_same_seed_asks_the_same_questions() -> None:
    scenes = [edges(normal(Terrain().layer(), [1, 3], [20, 5], seed=5)) for _ in range(2)]
    for one, other in zip(scenes[0].requests, scenes[1].requests, strict=True):
        assert not differing(one.q, other.q)
        assert not differing(one.k, other.k)
    other = normal(Terrain().layer(), [1, 3], [20, 5], seed=6)
    assert differing(other.requests[0].k, normal(Terrain().layer(), [1, 3], [20, 5]).requests[0].k)


def test_the_metric_is_relative_and_per_head() -> None:
    scene = normal(Terrain().layer(), [3], [40])
    out = torch.cat([answer.out for answer in scene.answers])
    allowed = CONTRACT["float32"]
    assert gap(scene, out, None, allowed).out == 0
    for small in (1.0, 1e-3):
        wrong = out.clone()
        wrong[:, 2] *= 1 + 0.01 * small
        assert gap(scene, wrong, None, allowed).out == pytest.approx(0.01 * small, rel=1e-6)
    spoilt = out.clone()
    spoilt[0, 0, 0] = float("nan")
    assert gap(scene, spoilt, None, allowed).beyond(allowed) is not None


def test_a_row_that_sees_nothing_must_be_exact() -> None:
    scene = normal(Terrain().cross(), [2], [0])
    out, lse = torch.zeros(2, 4, 16), torch.full((2, 4), float("-inf"))
    allowed = CONTRACT["float32"]
    assert gap(scene, out, lse, allowed).beyond(allowed) is None
    assert gap(scene, out, torch.zeros(2, 4), allowed).beyond(allowed) is not None
    assert gap(scene, out + 1e-30, lse, allowed).beyond(allowed) is not None


class Silent(TorchSdpaImpl):
    """Takes no sinks and says so."""

    features = TorchSdpaImpl.features - {Feature.SINKS}


class Boastful(TorchSdpaImpl):
    """Says that it takes sinks, and does not."""

    def _attend(self, plan, call):  # type: ignore[no-untyped-def]
        import dataclasses

        super()._attend(plan, dataclasses.replace(call, sinks=None))


def test_what_is_not_claimed_is_not_asked_and_what_is_claimed_must_hold() -> None:
    silent = run_conformance(Silent, ids=["E6", "E8", "A10"])
    assert silent.of(Status.REFUSED) == ["E6", "E8"]
    assert silent.of(Status.PASSED) == ["A10"]
    assert all("sinks" in r.reason for r in silent.results if r.status == Status.REFUSED)
    boastful = run_conformance(Boastful, ids=["E6", "E8", "A10"])
    assert boastful.of(Status.FAILED) == ["E6", "E8"]
    assert not boastful.ok


def test_a_class_from_elsewhere_is_checked_by_module_and_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"{Specimen.__module__}:Specimen"
    assert main(["check", name, "--case", "A3", "--case", "a10", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (report,) = told["backends"]
    assert told["cases"].keys() == {"A3", "A10"}
    assert told["planted"] == told["caught"] >= 40
    assert (report["backend"], report["passed"]) == ("Specimen", ["A3", "A10"])


@pytest.mark.parametrize(
    "what", ["nowhere:Impl", "attnplat.testing:Suite", "attnplat.backends.interface:AttentionImpl"]
)
def test_what_is_no_implementation_is_refused(what: str) -> None:
    with pytest.raises(ConfigError, match=what.partition(":")[2]):
        subject_of(what)


def test_unknown_names_get_the_closest() -> None:
    with pytest.raises(UnknownNameError, match="TORCH_SDPA"):
        subject_of("TORCH_SDPAA")
    with pytest.raises(UnknownNameError, match="case"):
        chosen(["Z1"])
    with pytest.raises(ConfigError, match="adapter"):
        subject_of("ZEN_CPU")


def test_the_exit_code_says_whether_claims_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "torch_sdpa", "--case", "A10"]) == 0
    assert "1 passed, 0 failed" in capsys.readouterr().out
    assert main(["check", f"{__name__}:Boastful", "--case", "E6"]) == 1
    assert "E6" in capsys.readouterr().out
    assert main(["check", "no_such_backend"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["torch_sdpa", "--case", "Z9"], "Z9"),
        (["no_such_backend"], "no_such_backend"),
        (["torch_sdpa", "--device", "warp"], "warp"),
        (["torch_sdpa", "--record", "--case", "A1"], "whole suite"),
        (["torch_sdpa", "--mutations"], "BACKEND"),
        (["--mutations", "--record"], "--full"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *options]) == 2
    out, told = capsys.readouterr()
    assert not out
    assert said in told
    assert told.count("\n") == 1


def test_what_is_to_be_said_of_several_cases_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check._runs(["A1", "A2", "A3", "B2", "B4", "B5"]) == "A1-A3 B2 B4-B5"
    report = run_conformance(Silent, ids=["E6", "E8", "A10", "L"])
    check._print(report, every=False)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("refused")]
    assert line.endswith("E6 E8")
    assert "sinks" in line
    assert any(line.endswith("L1-L11") for line in lines)


def test_the_list_of_cases_needs_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--cases", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(CASES)


def test_a_suite_is_built_once_and_serves_many_subjects() -> None:
    suite = Suite()
    reports = [
        run_conformance(name, ids=["D1"], suite=suite) for name in ("REFERENCE", "TORCH_SDPA")
    ]
    assert [report.of(Status.PASSED) for report in reports] == [["D1"], ["D1"]]
    assert reports[0].gaps.keys() == {"float32", "bfloat16", "float16", "float64"}
    assert reports[1].gaps.keys() == {"float32", "bfloat16", "float16"}


def test_importing_the_records_loads_no_torch() -> None:
    code = "import sys, attnplat.testing.records; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0


# In a compiled graph ----------------------------------------------------------------------------


class Copies(TorchSdpaImpl):
    """The cache as it was is kept beside the new one."""

    def write_kv(self, cache: KVCache, *args: Any, **scales: Any) -> None:
        kept = cache.k.clone()
        super().write_kv(cache, *args, **scales)
        cache.k.copy_(torch.where(cache.k == cache.k, cache.k, kept))


class Stale(TorchSdpaImpl):
    """The last new token is written as zeros."""

    def write_kv(self, cache: KVCache, k: torch.Tensor, *args: Any, **scales: Any) -> None:
        k = torch.cat([k[:-1], torch.zeros_like(k[-1:])])
        super().write_kv(cache, k, *args, **scales)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "says"),
    [(TorchSdpaImpl, ""), (Copies, "the cache is copied"), (Stale, "off by")],
)
def test_what_is_wrong_in_a_compiled_graph_is_seen(impl: type[TorchSdpaImpl], says: str) -> None:
    report = run_conformance(subject_of("TORCH_SDPA").replace(impl=impl), level="full", ids=["M12"])
    (result,) = report.results
    assert result.status == (Status.FAILED if says else Status.PASSED), result.reason
    assert says in result.reason


# Side by side ------------------------------------------------------------------------------------


def test_cores_share_the_cases_and_the_report_is_that_of_one() -> None:
    ids = [option for kind in "ABCDN" for option in ("--case", kind)]
    command = [sys.executable, "-m", "attnplat", "check", "REFERENCE", "TORCH_SDPA", "--json"]
    done = subprocess.run([*command, *ids], cwd=ROOT, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)["backends"]
    for backend, found in zip(("REFERENCE", "TORCH_SDPA"), told, strict=True):
        alone = run_conformance(backend, ids=list("ABCDN")).to_dict()
        assert {**found, "seconds": 0} == {**alone, "seconds": 0}


def test_a_child_gives_its_result_its_error_or_its_death() -> None:
    assert each_in_a_child([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]

    def refuses() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        each_in_a_child([refuses])
    with pytest.raises(ChildProcessError, match="told nothing"):
        each_in_a_child([lambda: os._exit(3)])
