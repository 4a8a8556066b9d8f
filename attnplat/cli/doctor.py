"""`attnplat doctor`: what is here, what is usable, what is not, and how to fix it.

Judged from drivers' files and package metadata: no package is imported, no device is touched.
With `--probe`, packages are tried in processes of their own. The report is built as data and
printed as tables or as JSON (`doctor_schema.json` says of what form).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attnplat.cli.examination import Examination, Trial, examine
from attnplat.cli.findings import Finding, cpu_kernels, findings
from attnplat.cli.main import EXIT_BAD_INPUT, EXIT_OK
from attnplat.cli.tables import print_table
from attnplat.config.attention import AttentionConfig
from attnplat.config.env import ENV_VARS
from attnplat.errors import ConfigError
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.distributions import DISTRIBUTIONS
from attnplat.platforms.inventory import FEATURES, SWITCHES

if TYPE_CHECKING:
    from attnplat.platforms.plugins import Plugin
    from attnplat.platforms.probe_outcome import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="try every installed package, in a process of its own (seconds each)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="with --probe: try again what worked before, too"
    )
    parser.add_argument(
        "--probe-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="with --probe: how long a package may take (default 60)",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 3600 seconds")
    return value


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 unless something the user set is wrong."""
    if args.attention != AttentionConfig():
        raise ConfigError("doctor reads no attention options; attnplat explain does")
    if not args.probe and (args.fresh or args.probe_timeout is not None):
        option = "--fresh" if args.fresh else "--probe-timeout"
        raise ConfigError(f"{option} goes with --probe")
    trial = Trial(args.fresh, args.probe_timeout or 60.0, _tell) if args.probe else None
    examination = examine(trial=trial)
    found = findings(examination)
    if args.json:
        print(json.dumps(report(examination, found), indent=2, sort_keys=True))
    else:
        print_report(examination, found)
    return EXIT_BAD_INPUT if examination.errors else EXIT_OK


def _tell(outcome: Outcome) -> None:
    """Each package as it has been tried, to those who watch."""
    if sys.stderr.isatty():
        print(f"{outcome.distribution}: {outcome.kind}", file=sys.stderr)


def report(examination: Examination, found: Iterable[Finding]) -> dict[str, Any]:
    """The whole examination as plain JSON values."""
    from attnplat import __version__

    have = examination.inventory.packages
    kernels = cpu_kernels(examination)
    return {
        "cpu_kernels": None if kernels is None else kernels._asdict(),
        "attnplat": __version__,
        "python": examination.system.python,
        "system": {
            "name": examination.system.name,
            "release": examination.system.release,
            "machine": examination.system.machine,
        },
        "device": examination.device.to_dict() if examination.device else None,
        "devices": {
            name: [device.to_dict() for device in detection.devices]
            for name, detection in examination.detections.items()
        },
        "packages": {
            d.name: {
                "version": have.get(d.name),
                "purpose": d.purpose,
                "platforms": list(d.platforms),
                "install": d.install,
                "probe": _probe_report(examination, d.name),
            }
            for d in DISTRIBUTIONS
        },
        "features": examination.inventory.to_dict()["features"],
        "plugins": [plugin.to_dict() for plugin in examination.plugins],
        "switches": examination.inventory.to_dict()["switches"],
        "environment": examination.environment.to_dict(),
        "cache": {
            "path": str(examination.cache.path),
            "writable": examination.cache.problem is None,
            "problem": examination.cache.problem,
        },
        "findings": [{"level": f.level, "text": f.text, "fix": f.fix} for f in found],
    }


def _probe_report(examination: Examination, name: str) -> dict[str, Any] | None:
    """What came of trying a package, and whether that was now or before; None if nobody did."""
    outcome = examination.outcomes.get(name)
    if outcome is None:
        return None
    return {**outcome.to_dict(), "remembered": name in examination.remembered}


def print_report(examination: Examination, found: Iterable[Finding]) -> None:
    """The examination as tables."""
    from attnplat import __version__

    system = examination.system
    where = f"{system.name} {system.release} {system.machine}"
    print(f"attnplat {__version__}, Python {system.python}, {where}\n")
    print_table(_device_rows(examination), ("device", "name", "memory", "traits"))
    _print_packages(examination)
    _print_outcomes(examination)
    _print_features(examination)
    if (kernels := cpu_kernels(examination)) is not None and kernels.built:
        print(f"\nThe C++ kernels use {kernels.isa}: {kernels.chosen_by}")
    if examination.plugins:
        print("\nPlugins")
        print_table(map(_plugin_row, examination.plugins), ("plugin", "brings", ""))
    print("\nSettings")
    print_table(_setting_rows(examination), ("name", "value", "set by"))
    cache = examination.cache
    print(f"\nCache folder {cache.path}: {cache.problem or 'writable'}")
    rows = [(f.level, f.text, f.fix) for f in found]
    if rows:
        print("\nFindings")
        print_table(rows, ("", "what", "what to do"))
    else:
        print("\nNothing is wrong.")


def _device_rows(examination: Examination) -> list[tuple[str, ...]]:
    devices = [d for found in examination.detections.values() for d in found.devices]
    used = examination.device
    if used is not None and used not in devices:
        devices.insert(0, used)
    return [_device_row(device, device == used) for device in devices]


def _device_row(device: DeviceInfo, used: bool) -> tuple[str, ...]:
    mark = " (used)" if used else ""
    cores = f"{device.cores} cores" if device.cores else ""
    name = ", ".join(part for part in (device.name, cores) if part)
    memory = f"{device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else ""
    return f"{device}{mark}", name, memory, " ".join(sorted(device.traits))


def _print_packages(examination: Examination) -> None:
    have, here = examination.inventory.packages, set(examination.platforms)
    relevant = [d for d in DISTRIBUTIONS if here & set(d.platforms)]
    installed = [(d.name, have[d.name], d.purpose) for d in relevant if d.name in have]
    missing = [(d.name, d.purpose, d.install) for d in relevant if d.name not in have]
    print("\nPackages")
    print_table(installed, ("installed", "version", "for"))
    print()
    print_table(missing, ("missing", "would be for", "how to get it"))


def _print_outcomes(examination: Examination) -> None:
    """What came of trying packages: all of it after --probe, else what is known to be broken."""
    outcomes = examination.outcomes.values()
    shown = [o for o in outcomes if examination.probed or o.broken]
    rows = [
        (
            o.distribution,
            o.version,
            f"{o.kind}{' (before)' if o.distribution in examination.remembered else ''}",
            "; ".join([o.text, *o.effects]),
            o.fix,
        )
        for o in shown
    ]
    if rows:
        print("\nTried")
        print_table(rows, ("package", "version", "outcome", "what was seen", "what to do"))


def _print_features(examination: Examination) -> None:
    """Features of the accelerators that are here; a plain CPU machine has none to tell of."""
    here = set(examination.platforms)
    found = examination.inventory.features
    rows = [
        (name, "yes" if found[name].usable else "no", spec.meaning, found[name].how)
        for name, spec in FEATURES.items()
        if here & set(spec.platforms)
    ]
    if rows:
        print("\nFeatures")
        print_table(rows, ("feature", "usable", "meaning", "because"))


def _plugin_row(plugin: Plugin) -> tuple[str, ...]:
    brings = ", ".join((*plugin.platforms, *plugin.backends))
    used = "used" if plugin.problem is None else f"set aside ({plugin.problem.kind})"
    return plugin.label, brings, used


def _setting_rows(examination: Examination) -> list[tuple[str, ...]]:
    """Every variable, but switches of platforms that are not here only where they are set."""
    values = examination.environment.to_dict()
    rows: list[tuple[str, ...]] = [
        (v.name, str(values.get(v.name, v.default)), _set_by(v.name in values)) for v in ENV_VARS
    ]
    own = {spec.variable for spec in SWITCHES.values()}
    if "rocm" not in examination.platforms:
        rows = [row for row in rows if row[0] not in own or row[0] in values]
    return rows


def _set_by(is_set: bool) -> str:
    return "environment" if is_set else "default"
