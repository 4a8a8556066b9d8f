"""A plugin's implementation is imported when it is chosen, and one that fails harms nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.plugin_sites import ask, install_backend

IMPLS = """
    from attnplat.backends.portable.torch_sdpa import TorchSdpaImpl

    class Impl(TorchSdpaImpl):
        name = "SOUND_ATTN"
"""
CHOOSE = """
    import logging, sys, attnplat
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("attnplat").addHandler(handler)
    layer = attnplat.MhaConfig(head_size=64, num_heads=4, num_kv_heads=2)
    platform = attnplat.platform_for("cpu")
    chosen = platform.get_attn_backend(layer)
    try:
        told = platform.get_attn_backend(layer, attnplat.AttentionConfig(backend=sys.argv[1])).name
    except attnplat.AttnplatError as error:
        told = f"{type(error).__name__}: {error}"
    print(json.dumps([chosen.name, told, heard]))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


def choose(site: Path, name: str) -> list[object]:
    told: list[object] = ask(site, CHOOSE.replace("sys.argv[1]", repr(name)))
    return told


def test_what_comes_first_is_what_runs(site: Path) -> None:
    install_backend(site, "sound", "SOUND_ATTN", impls=IMPLS)
    assert choose(site, "sound_attn")[:2] == ["SOUND_ATTN", "SOUND_ATTN"]


@pytest.mark.parametrize(
    "failure", ["raise SystemExit(1)", "raise ImportError('undefined symbol')"]
)
def test_one_that_cannot_be_imported_is_passed_over_or_an_error_where_it_was_asked_for(
    failure: str, site: Path
) -> None:
    install_backend(site, "broken", "BROKEN_ATTN", impls=failure + "\n")
    chosen, told, heard = choose(site, "broken_attn")
    assert chosen in ("CPU_ATTN", "TORCH_SDPA")
    assert str(told).startswith("PackageError: BROKEN_ATTN: importing its implementation")
    assert any("it is passed over" in str(line) for line in heard)  # type: ignore[union-attr]
