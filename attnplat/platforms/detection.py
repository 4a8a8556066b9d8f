"""What the platforms' detectors share: their result, device lists, and asking torch.

Detectors are pure functions of a `probes` object with the few system accesses they need, so
recorded values can be passed in. Nothing here is done at import.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from attnplat.config.env import DriverEnvironment
from attnplat.platforms.device import DeviceInfo


class Detection(NamedTuple):
    """The devices of one platform, and what was odd that belongs to no single device."""

    devices: tuple[DeviceInfo, ...] = ()
    notes: tuple[str, ...] = ()


class Visible(NamedTuple):
    """Ordinals of the devices a process may see, in its own order; `note` says what was lost."""

    ordinals: tuple[int, ...]
    note: str | None = None


class TorchDevice(NamedTuple):
    """One GPU as torch describes it. `gcn_arch` is set on AMD only."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    gcn_arch: str | None = None


class TorchReading(NamedTuple):
    """What torch sees: the devices left after its own reading of the visible-device lists.

    `vendor` is "cuda" or "rocm" by the build of torch; `failure` says why nothing is known.
    """

    vendor: str | None = None
    devices: tuple[TorchDevice, ...] = ()
    failure: str | None = None


NOT_ASKED = TorchReading(failure="torch was not asked")


def read_text(path: str | Path) -> str | None:
    """The text of a (pseudo) file, or None where it is missing or may not be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def parse_meminfo(text: str) -> int | None:
    """Total memory in bytes, from `/proc/meminfo`."""
    match = re.search(r"^MemTotal:\s*([0-9]+) kB", text, re.MULTILINE | re.ASCII)
    return int(match.group(1)) * 1024 if match else None


def lost_note(variable: str, text: str, item: str, found: int = 0, maker: str = "") -> str | None:
    """What a list of visible devices lost at `item`, which `found` devices could be meant by.

    `maker` is said where the list may be meant for another's devices. None for the usual ways
    of hiding every device: an empty list, and -1 at its end.
    """
    if item.strip() == "" or re.fullmatch(r"\s*-[0-9]+\s*", item):
        return None
    of = f"{maker} " if maker else ""
    why = f"could be any of {found} devices" if found > 1 else f"names no {of}device here"
    return f"{variable}={text!r}: {item!r} {why}; it and what follows is ignored"


def disagreements(
    platform: str, found: Sequence[DeviceInfo], reading: TorchReading
) -> tuple[str, ...]:
    """Where torch sees other devices than detection found, one sentence each."""
    if reading.vendor != platform:
        told = reading.failure or f"it is a build for {reading.vendor or 'processors'}"
        return (f"torch does not tell of {platform} devices: {told}",) if found else ()
    notes = []
    if len(found) != len(reading.devices):
        notes.append(
            f"torch sees {len(reading.devices)} {platform} devices, and {len(found)} were found"
        )
    for device, seen in zip(found, reading.devices, strict=False):
        arch = (seen.gcn_arch or "").partition(":")[0] or None
        same = (
            device.capability in (None, seen.capability)
            if platform == "cuda"
            else (arch in (None, device.arch))
        )
        if not same:
            what = arch or f"sm{seen.capability[0]}{seen.capability[1]}"
            notes.append(
                f"{platform}:{device.index} is {device.arch} ({device.name}), and torch calls it "
                f"{what} ({seen.name})"
            )
    return tuple(notes)


# Run in a process of its own: torch's device properties create a context on the device.
_TORCH_SCRIPT = """
import json, os, sys
import torch
vendor = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else None
found = []
if vendor and torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        arch = getattr(p, "gcnArchName", None) if vendor == "rocm" else None
        found.append([p.name, [p.major, p.minor], p.total_memory, arch])
with open(sys.argv[1], "w") as answer:
    json.dump({"vendor": vendor, "devices": found}, answer)
os._exit(0)
"""


def ask_torch(timeout_s: float = 60.0) -> TorchReading:
    """What torch sees, asked in a process of its own so that none of this one's state changes."""
    from attnplat.platforms.processes import run_python

    run = run_python(_TORCH_SCRIPT, timeout_s)
    return parse_torch_answer(run.answer, run.failure)


@cache
def ask_torch_once(environment: DriverEnvironment) -> TorchReading:
    """`ask_torch`, once for each environment: what a process sees does not change later.

    `environment` is the process's own, which the child inherits.
    """
    return ask_torch()


def parse_torch_answer(answer: str | None, failure: str | None = None) -> TorchReading:
    """The reading that the script wrote, or why there is none."""
    import json

    try:
        return _torch_reading(json.loads(answer or ""))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        return TorchReading(failure=f"torch gave no answer ({failure or 'nothing it wrote'})")


def _torch_reading(answer: dict[str, Any]) -> TorchReading:
    devices = tuple(
        TorchDevice(
            str(name),
            (int(capability[0]), int(capability[1])),
            int(memory),
            arch if isinstance(arch, str) else None,
        )
        for name, capability, memory, arch in answer["devices"]
    )
    return TorchReading(answer["vendor"], devices)
