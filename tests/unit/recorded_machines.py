"""Machines whose answers were written down (`tests/data/detect/machines`), as doctor sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from attnplat.cli.examination import Machine, System
from attnplat.config.env import DriverEnvironment, Environment, read_driver_env, read_env
from attnplat.platforms.cuda.nvml import MigInstance, NvmlDevice, NvmlReading
from attnplat.platforms.detection import TorchDevice, TorchReading
from attnplat.platforms.distributions import MISTAKEN, Installed
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.probe_outcome import Outcome
from attnplat.platforms.rocm.detect import KfdNode
from attnplat.storage import FolderState

DATA = Path(__file__).parents[1] / "data" / "detect"
NAMES = sorted(path.stem for path in (DATA / "machines").glob("*.json"))


class Recorded:
    """The system accesses of one machine, for every detector.

    `files` are the texts of files, those that start with `@` from beside the machines; `exists`
    are files that are there and have no text here.
    """

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.torch_calls = 0

    def _text(self, text: str | None) -> str | None:
        return (DATA / text[1:]).read_text() if text and text.startswith("@") else text

    # What every detector asks.

    @cached_property
    def environment(self) -> DriverEnvironment:
        return read_driver_env(self.answers.get("environ", {}))

    def text(self, path: str) -> str | None:
        return self._text(self.answers.get("files", {}).get(path))

    def meminfo(self) -> str | None:
        return self.text("/proc/meminfo")

    def torch(self) -> TorchReading:
        self.torch_calls += 1
        answer = self.answers.get("torch", {"failure": "torch is not there"})
        devices = [TorchDevice(n, (c[0], c[1]), m, g) for n, c, m, g in answer.get("devices", ())]
        return TorchReading(answer.get("vendor"), tuple(devices), answer.get("failure"))

    # NVIDIA's.

    def nvml(self) -> NvmlReading:
        answer = self.answers.get("nvml", {"failure": "NVML cannot be loaded (OSError: none)"})
        return NvmlReading(
            tuple(
                NvmlDevice(
                    d["uuid"],
                    d["name"],
                    tuple(d["capability"]) if d["capability"] else None,
                    d["memory_bytes"],
                    d.get("mig_enabled", False),
                    tuple(
                        MigInstance(m["uuid"], m["name"], m["memory_bytes"], tuple(m["numbers"]))
                        for m in d.get("mig", ())
                    ),
                )
                for d in answer.get("devices", ())
            ),
            answer.get("failure"),
        )

    def driver_files(self) -> tuple[str, ...]:
        from attnplat.platforms.cuda.detect import DRIVER_FILES

        return tuple(path for path in DRIVER_FILES if path in self.answers.get("exists", ()))

    def tegra_release(self) -> str | None:
        return self.text("/etc/nv_tegra_release")

    def device_tree_compatible(self) -> str | None:
        return self.text("/proc/device-tree/compatible")

    # AMD's.

    def kfd_nodes(self) -> tuple[KfdNode, ...]:
        return tuple(self._node(node) for node in self.answers.get("kfd", ()))

    def _node(self, node: Mapping[str, Any]) -> KfdNode:
        text = self._text(node["properties"]) or ""
        if "unique_id" in node:
            lines = [line for line in text.splitlines() if not line.startswith("unique_id")]
            text = "\n".join([*lines, f"unique_id {node['unique_id']}"])
        banks = tuple(node.get("memory_banks", ()))
        return KfdNode(node["number"], text, banks, node.get("product_name"))

    def kfd_opens(self) -> bool:
        return "/dev/kfd" in self.answers.get("exists", ())

    def wsl_device(self) -> bool:
        return {"/dev/dxg", "/opt/rocm"} <= set(self.answers.get("exists", ()))

    # The processor's.

    def system(self) -> str:
        return str(self.answers.get("platform", "linux"))

    def machine(self) -> str:
        return str(self.answers["system"]["machine"])

    def processor(self) -> str:
        return str(self.answers.get("processor", ""))

    def sysctl(self) -> str | None:
        return self._text(self.answers.get("sysctl"))

    def cores(self) -> int | None:
        count: int | None = self.answers.get("cores")
        return count

    def isa_limit(self) -> str | None:
        return self.settings.cpu_isa

    @cached_property
    def settings(self) -> Environment:
        return read_env(self.answers.get("environ", {}))


def recorded(name: str, cache: Path) -> Machine:
    """The recorded machine of that name, its cache folder elsewhere."""
    answers = json.loads((DATA / "machines" / f"{name}.json").read_text())
    probes = Recorded(answers)
    packages = answers.get("packages", {})

    def take_stock(outcomes: Mapping[str, Outcome]) -> Inventory:
        on = probes.settings.aiter
        inventory = Inventory.assume(
            {k: v for k, v in packages.items() if k not in MISTAKEN},
            switches={} if on is None else {"aiter": on},
        )
        notes = tuple(MISTAKEN[name] for name in MISTAKEN if name in packages)
        return replace(inventory, notes=notes)

    return Machine(
        system=System(**answers["system"]),
        probes=dict.fromkeys(("cuda", "rocm", "cpu"), probes),
        environment=probes.settings,
        driver=probes.environment,
        installed=Installed(packages),
        take_stock=take_stock,
        paths=[],
        cache=FolderState(cache, None),
        plugins=lambda: (),
    )
