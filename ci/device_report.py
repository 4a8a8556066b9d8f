"""Prints every version that a result on an accelerator depends on; fails without a device."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from importlib import metadata

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "flash-attn",
    "amd-aiter",
    "numpy",
    "packaging",
    "platformdirs",
    "filelock",
    "rich",
    "pytest",
    "hypothesis",
    "nvidia-ml-py",
)
DRIVER_QUERIES = (
    ("nvidia-smi", "--query-gpu=index,name,driver_version,memory.total", "--format=csv,noheader"),
    ("rocminfo",),
)
# rocminfo prints hundreds of lines; these name the runtime and the devices.
DRIVER_LINES = ("Runtime Version", "Marketing Name", "Name:  ", "Driver")


def package_lines() -> list[str]:
    """`name version` of each package, or that it is not installed."""
    lines = []
    for name in PACKAGES:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} not installed")
    return lines


def driver_lines() -> list[str]:
    """What the vendor's own tool says of driver and devices."""
    lines = []
    for command in DRIVER_QUERIES:
        if shutil.which(command[0]) is None:
            lines.append(f"{command[0]}: not on this machine")
            continue
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        text = (done.stdout or done.stderr).splitlines()
        if command[0] == "rocminfo":
            text = [line for line in text if any(word in line for word in DRIVER_LINES)]
        lines += [f"{command[0]}: {line.strip()}" for line in text]
    return lines


def main() -> int:
    print(f"python {sys.version.split()[0]} ({sys.executable})")
    print(f"system {platform.platform()}")
    print("\n".join(package_lines() + driver_lines()))
    try:
        import torch
    except ImportError as error:
        print(f"ci/device: FAILED: torch cannot be imported: {error}")
        return 1
    print(f"torch's CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    if not torch.cuda.is_available():
        print("ci/device: FAILED: torch sees no CUDA or HIP device")
        return 1
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = getattr(properties, "gcnArchName", f"sm{properties.major}{properties.minor}")
        print(f"device {index}: {properties.name}, {arch}, {properties.total_memory >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
