"""Records of conformance runs: small JSON files that say what has been shown, and where.

No torch here: the tables and the docs read records on machines without it.
"""

from __future__ import annotations

import datetime
import json
import platform as machine
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplat.errors import ModelFileError

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


def verified(records: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """(backend, platform) -> the record that verifies it.

    A backend is verified on a platform when the newest record of one of its architectures
    shows no failure, and no newest record of another shows one.
    """
    newest = latest(records)
    wrong = {(r.backend, r.platform) for r in newest.values() if r.failed}
    return {
        (r.backend, r.platform): r for r in newest.values() if (r.backend, r.platform) not in wrong
    }


def shown(records: Iterable[Record]) -> dict[tuple[str, str], dict[str, frozenset[str]]]:
    """(backend, platform) -> operation -> the features, dtypes and formats verified with it."""
    good = verified(records).keys()
    found: dict[tuple[str, str], dict[str, frozenset[str]]] = {}
    for record in latest(records).values():
        if (key := (record.backend, record.platform)) in good:
            own = found.setdefault(key, {})
            for name, traits in record.values["shown"].items():
                own[name] = own.get(name, frozenset()) | frozenset(traits)
    return found


def failing(records: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """(backend, platform) -> a newest record with a failure: its claims must be refused."""
    return {(r.backend, r.platform): r for r in latest(records).values() if r.failed}
