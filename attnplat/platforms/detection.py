"""What the platforms' detectors share: their result, device lists, and asking torch.

Detectors are pure functions of a `probes` object with the few system accesses they need, so
recorded values can be passed in. Nothing here is done at import.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

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


def visible_devices(variable: str, text: str | None, uuids: Sequence[str]) -> Visible:
    """Which of the devices with `uuids` a process sees under `variable=text`.

    Reads the list as CUDA does: indices or unique prefixes of UUIDs; the first item that
    names no device ends the list; an item given twice hides every device; unset shows all.
    """
    if text is None:
        return Visible(tuple(range(len(uuids))))
    items = [item.strip() for item in text.split(",")]
    prefix = items[0][:4]
    if prefix in ("GPU-", "MIG-"):
        listed = list(takewhile(lambda item: item.startswith(prefix), items))
        found = [_by_uuid(item, uuids) for item in listed]
    else:
        numbers = [_leading_number(item) for item in items]
        listed = [str(n) for n in takewhile(lambda n: n is not None, numbers)]
        found = [n if n < len(uuids) else None for n in map(int, listed)]
    seen = [ordinal for ordinal in takewhile(lambda o: o is not None, found) if ordinal is not None]
    if len(set(listed)) < len(listed) or len(set(seen)) < len(seen):
        return Visible((), f"{variable}={text!r} names a device twice, which hides them all")
    lost = items[len(seen)] if len(seen) < len(items) else None
    return Visible(tuple(seen), None if lost is None else _lost_note(variable, text, lost))


def _leading_number(item: str) -> int | None:
    # Like strtol: "1gpu" is 1 and "-0" is 0; a negative number names no device.
    match = re.match(r"\+?([0-9]+)|-(0+)(?![0-9])", item)
    return None if match is None else int((match.group(1) or match.group(2))[:9])


def _by_uuid(item: str, uuids: Sequence[str]) -> int | None:
    matches = [i for i, uuid in enumerate(uuids) if uuid.startswith(item)]
    return matches[0] if len(matches) == 1 else None


def _lost_note(variable: str, text: str, item: str) -> str | None:
    """None for the usual ways of hiding every device: an empty list, and -1 at its end."""
    if item == "" or re.fullmatch(r"-[0-9]+", item):
        return None
    return f"{variable}={text!r}: {item!r} names no device here; it and what follows is ignored"


# Run in a process of its own: torch's device properties create a context on the device.
_TORCH_SCRIPT = """
import json, torch
vendor = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else None
found = []
if vendor and torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        arch = getattr(p, "gcnArchName", None) if vendor == "rocm" else None
        found.append([p.name, [p.major, p.minor], p.total_memory, arch])
print("attnplat-torch:" + json.dumps({"vendor": vendor, "devices": found}))
"""
_MARK = "attnplat-torch:"


class PythonRun(NamedTuple):
    """How a Python program in a process of its own ended: its output, or why there is none."""

    output: str = ""
    failure: str | None = None


def run_python(script: str, timeout_s: float, python: str = sys.executable) -> PythonRun:
    """Run `script` in a fresh Python process, without the working directory on its path.

    Survives whatever the script does: exceptions, aborts, and running past `timeout_s`.
    """
    import subprocess

    try:
        done = subprocess.run(
            [python, "-P", "-c", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return PythonRun(failure=f"no answer within {timeout_s:g} s")
    except OSError as error:
        return PythonRun(failure=f"{python!r} cannot be started: {error}")
    if done.returncode < 0:
        return PythonRun(done.stdout, f"killed by signal {-done.returncode}")
    if done.returncode > 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else "no message"
        return PythonRun(done.stdout, f"exit code {done.returncode}: {last}")
    return PythonRun(done.stdout)


def ask_torch(timeout_s: float = 60.0) -> TorchReading:
    """What torch sees, asked in a process of its own so that none of this one's state changes."""
    run = run_python(_TORCH_SCRIPT, timeout_s)
    return parse_torch_output(run.output, run.failure)


def parse_torch_output(output: str, failure: str | None = None) -> TorchReading:
    """The reading in the script's output; whatever else torch's import printed is skipped."""
    import json

    for line in reversed(output.splitlines()):
        if line.startswith(_MARK):
            return _torch_reading(json.loads(line.removeprefix(_MARK)))
    return TorchReading(failure=failure or "torch printed no answer")


def _torch_reading(answer: dict[str, Any]) -> TorchReading:
    devices = tuple(
        TorchDevice(name, (capability[0], capability[1]), memory, arch)
        for name, capability, memory, arch in answer["devices"]
    )
    return TorchReading(answer["vendor"], devices)
