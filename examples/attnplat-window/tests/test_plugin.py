"""The plugin is found, explained, chosen where it says so, and does what it claims."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch

import attnplat
from attnplat.cli.main import main
from attnplat.platforms import plugins_here
from attnplat.testing import run_conformance

WINDOWED = attnplat.MhaConfig(
    head_size=64, num_heads=8, num_kv_heads=2, dtype="float32", sliding_window=(127, -1)
)


def test_importing_attnplat_imports_no_plugin() -> None:
    code = "import sys, attnplat; sys.exit('attnplat_window' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_is_used_and_nothing_is_wrong_with_it() -> None:
    (plugin,) = plugins_here()
    assert (plugin.label, plugin.problem, plugin.advice) == ("attnplat-window 0.1.0", None, None)


def test_its_name_is_one_of_the_backends_names_in_any_case() -> None:
    for spelling in ("WINDOW_ATTN", "window_attn", "Window-Attn"):
        assert attnplat.AttentionConfig(backend=spelling).backend == "WINDOW_ATTN"
    assert attnplat.BackendName("WINDOW_ATTN") in attnplat.BackendName
    with pytest.raises(attnplat.UnknownNameError, match="did you mean 'WINDOW_ATTN'"):
        attnplat.AttentionConfig(backend="WINDOW_ATN")


def test_it_ranks_where_it_says_and_is_explained() -> None:
    selection = attnplat.platform_for("cpu:avx2").select(WINDOWED)
    names = [backend.name for backend in selection.accepted]
    assert names == ["CPU_ATTN", "TORCH_SDPA", "WINDOW_ATTN", "REFERENCE"]
    told = attnplat.platform_for("cpu:avx2").select(WINDOWED.replace(alibi=True)).explain()
    assert "WINDOW_ATTN: the layer wants alibi, which it does not take" in told


def test_asked_for_by_name_it_is_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attnplat")
    wishes = attnplat.AttentionConfig(backend="window_attn")
    impl = attnplat.platform_for("cpu").get_attn_backend(WINDOWED, wishes)
    assert impl.__module__ == "attnplat_window.impls.attention"
    assert "WINDOW_ATTN for mha: the caller asked for it" in caplog.text


def test_a_layer_that_it_does_not_take_is_refused_with_the_reason() -> None:
    wishes = attnplat.AttentionConfig(backend="window_attn")
    with pytest.raises(attnplat.NoBackendError, match="WINDOW_ATTN: the layer wants alibi"):
        attnplat.platform_for("cpu").get_attn_backend(WINDOWED.replace(alibi=True), wishes)


def test_it_does_what_it_claims() -> None:
    report = run_conformance("WINDOW_ATTN", "cpu")
    wrong = {r.case.id: r.reason for r in report.results if r.case.id in report.of("failed")}
    assert report.ok, wrong
    assert len(report.of("passed")) >= 40


def test_the_command_line_checks_and_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "window_attn", "--case", "D1"]) == 0
    assert "WINDOW_ATTN on cpu" in capsys.readouterr().out
    for command in (["backends", "--platform", "cpu"], ["doctor"]):
        assert main(command) == 0
        assert "attnplat-window 0.1.0" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_it_runs_on_a_gpu(record_property: Any) -> None:
    report = run_conformance("WINDOW_ATTN", "cuda")
    record_property("passed", len(report.of("passed")))
    assert report.ok
