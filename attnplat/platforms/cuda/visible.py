"""`CUDA_VISIBLE_DEVICES`, read as CUDA reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from attnplat.platforms.detection import Visible, lost_note

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(text: str | None, uuids: Sequence[str]) -> Visible:
    """Which of the devices with `uuids` a process sees under `CUDA_VISIBLE_DEVICES=text`.

    Indices or unique prefixes of UUIDs; the first item that names no device ends the list; an
    item given twice hides every device; unset shows all.
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
        return Visible((), f"{VARIABLE}={text!r} names a device twice, which hides them all")
    if len(seen) == len(items):
        return Visible(tuple(seen))
    lost = items[len(seen)]
    meant = sum(uuid.startswith(lost) for uuid in uuids) if lost[:4] == prefix else 0
    return Visible(tuple(seen), lost_note(VARIABLE, text, lost, meant))


def _leading_number(item: str) -> int | None:
    # Like strtol: "1gpu" is 1 and "-0" is 0; a negative number names no device.
    match = re.match(r"\+?([0-9]+)|-(0+)(?![0-9])", item)
    return None if match is None else int((match.group(1) or match.group(2))[:9])


def _by_uuid(item: str, uuids: Sequence[str]) -> int | None:
    matches = [i for i, uuid in enumerate(uuids) if uuid.startswith(item)]
    # CUDA takes a prefix of some digits; torch takes one of none, too.
    return matches[0] if len(matches) == 1 and len(item) > len("GPU-") else None
