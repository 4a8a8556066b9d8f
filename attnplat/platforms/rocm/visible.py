"""`ROCR_VISIBLE_DEVICES` and `HIP_VISIBLE_DEVICES`, each read as its own library reads it.

The two differ from each other and from `CUDA_VISIBLE_DEVICES`: ROCr takes a device named twice
for the end of the list, HIP for named once, CUDA for a reason to hide all. Sources: ROCr's
`amd_filter_device.cpp` and clr's `rocdevice.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from attnplat.platforms.detection import Visible, lost_note

# ROCr takes a UUID of "GPU-" and 1 to 16 digits.
_SHORTEST, _LONGEST = 5, 20


class _Meant(NamedTuple):
    """The device that an item names, or None; `matches` says how many it could be."""

    ordinal: int | None
    matches: int = 0


def visible_to_rocr(text: str | None, uuids: Sequence[str]) -> Visible:
    """The devices that ROCr shows: indices, also hexadecimal, and unique prefixes of UUIDs."""
    variable = "ROCR_VISIBLE_DEVICES"
    if text is None:
        return Visible(tuple(range(len(uuids))))
    upper = [uuid.upper() for uuid in uuids]
    seen: list[int] = []
    for item in text.split(","):
        meant = _meant_by_rocr(item.strip().upper(), upper)
        if meant.ordinal is None or meant.ordinal >= len(uuids):
            return Visible(tuple(seen), lost_note(variable, text, item.strip(), meant.matches))
        if meant.ordinal in seen:
            note = f"{variable}={text!r} names a device twice, and what follows is ignored"
            return Visible(tuple(seen), note)
        seen.append(meant.ordinal)
    return Visible(tuple(seen))


def _meant_by_rocr(item: str, uuids: Sequence[str]) -> _Meant:
    if item.startswith("G"):
        fits = _SHORTEST <= len(item) <= _LONGEST
        matches = [i for i, uuid in enumerate(uuids) if fits and uuid.startswith(item)]
        return _Meant(matches[0] if len(matches) == 1 else None, len(matches))
    match = re.fullmatch(r"\+?(?:0X(?P<hex>[0-9A-F]+)|0(?P<octal>[0-7]+)|(?P<plain>[0-9]+))", item)
    if match is None:  # as strtol with base 0 reads all of an item
        return _Meant(None)
    base = {"hex": 16, "octal": 8, "plain": 10}[match.lastgroup or "plain"]
    return _Meant(_number(match.group(match.lastgroup or "plain"), base))


def visible_to_hip(variable: str, text: str | None, uuids: Sequence[str]) -> Visible:
    """The devices that HIP shows of those that ROCr left: plain indices, and parts of UUIDs.

    An empty list hides every device, as torch reads it and as it is meant; HIP itself takes it
    for unset, which a note says.
    """
    if text is None:
        return Visible(tuple(range(len(uuids))))
    if text == "":
        note = f"{variable} is empty: torch hides every device, and HIP none; -1 hides them in both"
        return Visible((), note if uuids else None)
    seen: list[int] = []
    # A comma at the end is not followed by an item.
    for item in text.removesuffix(",").split(","):
        ordinal = _meant_by_hip(item, uuids)
        if ordinal is None or ordinal >= len(uuids):
            maker = "" if variable.startswith("HIP") else "AMD"
            return Visible(tuple(seen), lost_note(variable, text, item, maker=maker))
        if ordinal not in seen:
            seen.append(ordinal)
    return Visible(tuple(seen))


def _meant_by_hip(item: str, uuids: Sequence[str]) -> int | None:
    if "GPU-" in item:
        return next((i for i, uuid in enumerate(uuids) if item in uuid), None)
    # Only a number as HIP itself would write it: no sign, space or leading zero.
    return _number(item, 10) if re.fullmatch(r"0|[1-9][0-9]*", item) else None


def _number(digits: str, base: int) -> int:
    # Nobody has more devices, and Python refuses to read thousands of digits.
    return int(digits[:40], base)
