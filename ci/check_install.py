"""Looks at the environment it runs in: is what `ci/setup` promised really there?

Fails when a package differs from its pin, when the torch-free environment has torch after
all, or, in CI, when pip took a CUDA build of torch and its gigabytes of libraries.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent / "constraints.txt"
CUDA_DISTRIBUTION = re.compile(r"nvidia-.+|cuda-.+")
# NVIDIA's own Python bindings: small, and asked for by the `cuda` extra.
NOT_A_LIBRARY = frozenset({"nvidia-ml-py"})


def canonical(name: str) -> str:
    """The distribution's name as pip compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[str, str]:
    """`name==version` lines as {canonical name: version}; anything else is an error."""
    pins = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line)
        if match is None:
            raise ValueError(f"line {number} is not of the form name==version: {line!r}")
        pins[canonical(match[1])] = match[2]
    return pins


def cuda_libraries(installed: Mapping[str, str]) -> list[str]:
    """The CUDA libraries among the installed distributions."""
    return sorted(
        name
        for name in installed
        if CUDA_DISTRIBUTION.fullmatch(name) and name not in NOT_A_LIBRARY
    )


def problems(
    installed: Mapping[str, str], pins: Mapping[str, str], *, torch_free: bool, ci: bool
) -> list[str]:
    """What is wrong with an environment, one sentence each."""
    found = []
    for name, version in sorted(pins.items()):
        # A local label such as +cpu names a build of the same release.
        have = installed.get(name, version).split("+")[0]
        if have != version:
            found.append(f"{name} is {have}, the constraints say {version}")
    if torch_free and "torch" in installed:
        found.append("torch is installed in the torch-free environment")
    if not torch_free and "torch" not in installed:
        found.append("torch is not installed")
    libraries = cuda_libraries(installed)
    if libraries and ci:
        found.append(f"pip took a CUDA build of torch: {', '.join(libraries)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-free", action="store_true")
    options = parser.parse_args()
    installed = {
        canonical(distribution.metadata["Name"]): distribution.version
        for distribution in metadata.distributions()
    }
    pins = read_pins(CONSTRAINTS.read_text(encoding="utf-8"))
    found = problems(
        installed, pins, torch_free=options.torch_free, ci=os.environ.get("CI") == "true"
    )
    for problem in found:
        print(f"environment: {problem}", file=sys.stderr)
    libraries = cuda_libraries(installed)
    print(
        f"environment: Python {sys.version.split()[0]}, {len(installed)} packages,"
        f" torch {installed.get('torch', 'not installed')},"
        f" {len(libraries) or 'no'} CUDA libraries"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
