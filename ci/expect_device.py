"""Compares the devices of this machine with what a runner's labels promise; see ci/expect."""

from __future__ import annotations

import argparse
import sys

from attnplat.platforms import detect, simulate
from attnplat.platforms.device import DeviceInfo


def problem(wanted: str, at_least: bool, found: tuple[DeviceInfo, ...]) -> str | None:
    """Why the devices found are not what was promised, or None."""
    platform, _, arch = wanted.partition(":")
    if not found:
        return f"{wanted} was promised, and no {platform} device is here"
    if at_least:
        lacks = simulate(platform, arch).traits - found[0].traits - _VENDORS
        if lacks:
            return f"at least {wanted} was promised; {found[0]} lacks {', '.join(sorted(lacks))}"
        return None
    others = sorted({str(device) for device in found if device.arch != arch})
    return f"{wanted} was promised, and here is {', '.join(others)}" if others else None


# A simulated processor has some vendor; which one makes no difference here.
_VENDORS = frozenset({"intel", "amd", "arm", "apple"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device")
    parser.add_argument("--at-least", action="store_true")
    options = parser.parse_args()
    found = detect(options.device.partition(":")[0])
    wrong = problem(options.device, options.at_least, found)
    for device in found:
        print(f"ci/expect: {device} {device.name}".rstrip())
    if wrong is not None:
        print(f"ci/expect: FAILED: {wrong}")
    return 1 if wrong is not None else 0


if __name__ == "__main__":
    sys.exit(main())
