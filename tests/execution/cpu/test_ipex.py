"""The adapter of Intel's extension: against a strict double of it, and on demand against itself.

`ci/ipex` runs this file beside torch 2.8 and the extension; elsewhere its half is skipped.
"""

from __future__ import annotations

import inspect
from importlib import metadata
from typing import Any

import pytest
import torch

from attnplat import AttentionConfig, MhaConfig, platform_for
from attnplat.errors import ConfigError, PackageError
from attnplat.platforms.cpu.impls.ipex import IpexImpl
from attnplat.platforms.cpu.impls.ipex_facts import is_pair
from attnplat.platforms.inventory import Inventory
from attnplat.testing.runner import run_conformance
from attnplat.testing.subject import Subject
from tests.execution.cpu.ipex_double import PagedAttention

NAME = "intel-extension-for-pytorch"
PAIR = Inventory.assume({"torch": "2.8.0", NAME: "2.8.0"})
LAYER = MhaConfig(head_size=64, num_heads=8, num_kv_heads=2)


def has_extension() -> bool:
    try:
        return is_pair(metadata.version(NAME), torch.__version__)
    except metadata.PackageNotFoundError:
        return False


needs_extension = pytest.mark.skipif(
    not has_extension(), reason=f"needs {NAME} 2.8 beside torch 2.8; ci/ipex has them"
)


class Doubled(IpexImpl):
    """The adapter, with the double in the extension's place."""

    double = PagedAttention()

    @staticmethod
    def load_extension() -> Any:
        return Doubled.double


def doubled() -> Subject:
    """The adapter over the double, on a machine that has the pair of versions."""
    platform = platform_for("cpu:avx2", inventory=PAIR)
    world = platform.world()
    declared = tuple(b.resolve(world) for b in platform.tables.catalog if b.name == "IPEX")
    return Subject(
        name="IPEX", impl=Doubled, device=torch.device("cpu"), declared=declared, world=world
    )


def test_over_the_double_it_does_what_it_claims() -> None:
    report = run_conformance(doubled(), ids=["A", "B", "E", "G", "J", "N"])
    wrong = {r.case.id: r.reason for r in report.results if r.status == "failed"}
    assert not wrong, wrong
    assert len(report.of("passed")) >= 35
    assert all(count > 100 for count in Doubled.double.calls.values()), Doubled.double.calls


@needs_extension
def test_the_double_has_the_signatures_of_the_extension() -> None:
    real = IpexImpl.load_extension()
    for name in Doubled.double.calls:
        ours = inspect.signature(getattr(PagedAttention, name)).parameters
        theirs = inspect.signature(getattr(real, name)).parameters
        assert [*ours][1:] == [*theirs]
        assert [p.default for p in ours.values()][1:] == [p.default for p in theirs.values()]


@needs_extension
def test_over_the_extension_it_does_what_it_claims() -> None:
    report = run_conformance("IPEX")
    wrong = {r.case.id: r.reason for r in report.results if r.status == "failed"}
    assert report.ok, wrong


@pytest.mark.parametrize(
    ("packages", "why"),
    [
        ({"torch": "2.13.0+cpu", NAME: "2.8.0"}, "imports in version 2.8.0 beside torch 2.8 alone"),
        ({"torch": "2.8.0", NAME: "2.7.0"}, "imports in version 2.8.0 beside torch 2.8 alone"),
        ({"torch": "2.8.0"}, f"needs the package {NAME}"),
    ],
)
def test_versions_that_are_no_pair_are_refused_at_selection(
    packages: dict[str, str], why: str
) -> None:
    platform = platform_for("cpu:avx2", inventory=Inventory.assume(packages))
    selection = platform.select(LAYER, AttentionConfig(backend="IPEX"))
    assert not selection.ok and why in selection.failure()


def test_it_is_chosen_by_name_alone() -> None:
    platform = platform_for("cpu:avx2", inventory=PAIR)
    assert platform.select(LAYER, AttentionConfig(backend="ipex")).ok
    assert "IPEX" not in {backend.name for backend in platform.select(LAYER).accepted}


@pytest.mark.skipif(has_extension(), reason="it is installed here")
def test_without_the_extension_nothing_is_created() -> None:
    with pytest.raises(PackageError, match=NAME):
        IpexImpl.create(LAYER, "cpu")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(num_heads=71, num_kv_heads=1), "up to 16 query heads a key head"),
        (dict(v_head_size=32), "does not take v_head_size"),
        (dict(sliding_window=(7, -1)), "does not take sliding_window"),
        (dict(attn_type="encoder_only"), "runs causal decoder layers"),
        (dict(kv_cache_dtype="float16"), "stores keys as bfloat16"),
    ],
)
def test_layers_that_its_kernels_get_wrong_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Doubled.create(LAYER.replace(**change), "cpu")
