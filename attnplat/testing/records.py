"""Records of conformance runs: small JSON files that say what has been shown, and where.

No torch here: the tables and the docs read records on machines without it.

python -m attnplat.testing.records conformance/records
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform as machine
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplat.errors import ModelFileError
from attnplat.platforms.earned import Digest, Earned

if TYPE_CHECKING:
    from attnplat.testing.runner import Report

SCHEMA = 1
PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn", "amd-aiter", "numpy")

FIELDS: Mapping[str, type] = {
    "schema": int,
    "date": str,
    "attnplat": str,
    "backend": str,
    "platform": str,
    "arch": str,
    "device_name": str,
    "system": str,
    "packages": dict,
    "level": str,
    "seed": int,
    "passed": list,
    "partly refused": dict,
    "failed": dict,
    "refused": dict,
    "not applicable": dict,
    "checks": int,
    "shown": dict,
    "errors": dict,
    "seconds": float,
}


@dataclass(frozen=True)
class Record:
    """One recorded run.

    Attributes:
        name: the file's name.
        values: what it says, see `FIELDS`.
    """

    name: str
    values: Mapping[str, Any]

    @property
    def backend(self) -> str:
        """The backend's canonical name."""
        return str(self.values["backend"])

    @property
    def platform(self) -> str:
        """`cuda`, `rocm`, `cpu`."""
        return str(self.values["platform"])

    @property
    def arch(self) -> str:
        """The device's architecture."""
        return str(self.values["arch"])

    @property
    def passed(self) -> tuple[str, ...]:
        """Ids of the cases it passed."""
        return tuple(self.values["passed"])

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the cases it failed."""
        return tuple(self.values["failed"])


def record_of(report: Report, *, when: datetime.date | None = None) -> dict[str, Any]:
    """The values of a record of this report, made on this machine."""
    from attnplat import __version__

    subject, told = report.subject, report.to_dict()
    del told["device"]
    device = None if subject.world is None else subject.world.device
    return {
        "schema": SCHEMA,
        "date": (when or datetime.datetime.now(datetime.UTC).date()).isoformat(),
        "attnplat": __version__,
        "platform": subject.device.type if device is None else str(device.platform),
        "arch": "unknown" if device is None else device.arch,
        "device_name": "" if device is None else device.name,
        "system": f"{machine.system()} {machine.machine()}",
        "packages": _versions(),
        **told,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_record(values: Mapping[str, Any], folder: Path) -> Path:
    """Write a record into `folder` as `<backend>-<platform>-<arch>-<date>.json`."""
    parts = [values[name] for name in ("backend", "platform", "arch", "date")]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("-".join(map(str, parts)) + ".json")
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with a record's values, one sentence each."""
    found = [
        f"{name} is {values.get(name)!r}, not {kind.__name__}"
        for name, kind in FIELDS.items()
        if not isinstance(values.get(name), kind)
    ]
    if not found and values["schema"] != SCHEMA:
        found.append(f"schema is {values['schema']}, this reader knows {SCHEMA}")
    if not found and not values["passed"]:
        found.append("no case passed")
    return found


def read_records(folder: Path) -> tuple[Record, ...]:
    """Every record in `folder`, by name.

    Raises ModelFileError for a file that is no record.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelFileError(f"{path} is no JSON: {error}") from error
        if found := problems(values):
            raise ModelFileError(f"{path} is no conformance record: {'; '.join(found)}")
        records.append(Record(path.name, values))
    return tuple(records)


def latest(records: Iterable[Record]) -> dict[tuple[str, str, str], Record]:
    """(backend, platform, arch) -> its newest record."""
    ordered = sorted(records, key=lambda record: record.values["date"])
    return {(r.backend, r.platform, r.arch): r for r in ordered}


def earned_by(records: Iterable[Record]) -> Earned:
    """What marks ask of the newest records, by class of devices and backend."""
    digests = [
        Digest(
            backend=record.backend,
            platform=record.platform,
            arch=record.arch,
            record=record.name,
            failed=len(record.failed),
            shown={name: frozenset(traits) for name, traits in record.values["shown"].items()},
        )
        for record in latest(records).values()
    ]
    return Earned(tuple(sorted(digests, key=lambda d: (d.platform, d.arch, d.backend))))


def verified(records: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """(backend, platform) -> the record that verifies it.

    A backend is verified on a platform when the newest record of one of its architectures
    shows no failure, and no newest record of another shows one.
    """
    newest = latest(records).values()
    earned = earned_by(newest)
    good = [r for r in newest if earned.failing(r.backend, r.platform) is None]
    return {(r.backend, r.platform): r for r in good}


def failing(records: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """(backend, platform) -> a newest record with a failure: its claims must be refused."""
    return {(r.backend, r.platform): r for r in latest(records).values() if r.failed}


def main() -> int:
    """Print what the records of a folder have earned, as attnplat is installed with it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    print(earned_by(read_records(parser.parse_args().folder)).to_json(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
