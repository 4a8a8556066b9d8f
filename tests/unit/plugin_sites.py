"""Tiny distributions, really installed: a package and its metadata in a folder on Python's path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

CATALOG = """
from attnplat.backends.backend import Backend
from attnplat.config.names import Operation

CATALOG = (
    Backend(
        name="{name}", summary="made up", serves={{Operation.MHA}}, loads="{package}.impls:Impl"
    ),
)
"""
PREFERENCES = """
from attnplat.config.names import Operation
from attnplat.platforms.plugins import REST
from attnplat.platforms.selection import Preference

PREFERENCES = (
    Preference(serves={{Operation.MHA}}, order=({order}), because="it is made up"),
)
"""
FIRST, LAST = '"{name}", REST', 'REST, "{name}"'


def install(
    site: Path,
    distribution: str,
    entry_points: str,
    files: Mapping[str, str],
    *,
    version: str = "1.0",
) -> None:
    """Install a distribution with the given `entry_points.txt` and files."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def install_backend(
    site: Path,
    distribution: str,
    name: str,
    *,
    contract: str = "ATTNPLAT_CONTRACT = 1\n",
    catalog: str = CATALOG,
    order: str = FIRST,
    preferences: str = PREFERENCES,
    impls: str = "raise ImportError('no kernel')\n",
    declared: str | None = None,
    version: str = "1.0",
) -> None:
    """Install a distribution that brings one backend, sound unless told otherwise."""
    package = distribution.replace("-", "_")
    words = {"name": name, "package": package, "order": order.format(name=name)}
    files = {
        f"{package}/__init__.py": contract,
        f"{package}/catalog.py": catalog.format(**words),
        f"{package}/preferences.py": preferences.format(**words),
        f"{package}/impls.py": impls,
    }
    entry = f"[attnplat.backends]\n{declared or name} = {package}\n"
    install(site, distribution, entry, files, version=version)


def ask(site: Path, code: str, **environ: str) -> Any:
    """What `code` prints as JSON, in a process that has `site` on its path.

    Its cache is beside the site, so that no trial of another test is remembered.
    """
    done = run(site, code, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run(site: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process that has `site` on its path."""
    return subprocess.run(
        [sys.executable, "-c", "import json\n" + textwrap.dedent(code)],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("ATTNPLAT_")},
            "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
            "ATTNPLAT_CACHE_DIR": str(site.with_name(site.name + "-cache")),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
