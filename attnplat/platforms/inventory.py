"""What is installed beside a device: packages, which of their features work, and switches.

An `Inventory` is a frozen value that selection reads. `Inventory.installed()` tells of this
machine, from metadata alone; `Inventory.assume()` and the named profiles tell of another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnplat.config.env import PREFIX, DriverEnvironment, Environment, read_driver_env, read_env
from attnplat.config.frozen import FrozenMap
from attnplat.errors import UnknownNameError
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.distributions import (
    ALL,
    DISTRIBUTIONS,
    MISTAKEN,
    Installed,
    installed_versions,
)

if TYPE_CHECKING:
    from attnplat.platforms.probe_outcome import Outcome


class Found(NamedTuple):
    """Whether a feature works, and what established that."""

    usable: bool
    how: str


class Switch(NamedTuple):
    """A choice between on and off, and who made it: "environment", "default" or "assumed"."""

    on: bool
    source: str


class SwitchSpec(NamedTuple):
    """A switch that exists: its meaning, what holds by default, and the variable that sets it.

    `driver` is the field of `DriverEnvironment` with another package's own variable for it.
    """

    meaning: str
    default: bool
    variable: str | None = None
    driver: str | None = None


SWITCHES: dict[str, SwitchSpec] = {
    "aiter": SwitchSpec("use AMD's aiter kernels", False, "ATTNPLAT_AITER"),
    "aiter_mha": SwitchSpec(
        "where aiter is on, use it for multi-head attention", True, "ATTNPLAT_AITER_MHA"
    ),
    "aiter_mla": SwitchSpec(
        "where aiter is on, use it for multi-head latent attention", True, "ATTNPLAT_AITER_MLA"
    ),
    "aiter_shuffle_layout": SwitchSpec("keep the KV cache in aiter's shuffled layout", False),
    "flash_attn_triton": SwitchSpec(
        "let flash-attn use its Triton kernels, the only ones it has for AMD's consumer devices",
        False,
        driver="flash_attention_triton_amd_enable",
    ),
}


class Evidence(NamedTuple):
    """What features are judged by: installed versions, compilers that are here, attnplat's own
    compiled libraries, and packages that failed when they were tried -> how."""

    packages: Mapping[str, str]
    tools: Mapping[str, str]
    libraries: Mapping[str, str]
    broken: Mapping[str, str] = FrozenMap()

    def any_of(self, *names: str) -> Found:
        """Usable if one of the distributions is installed and not known to be broken."""
        broken = None
        for name in names:
            if name in self.broken and broken is None:
                broken = Found(False, f"{name} {self.packages[name]} is {self.broken[name]}")
            elif name in self.packages and name not in self.broken:
                return Found(True, f"{name} {self.packages[name]} is installed")
        return broken or Found(False, f"{' or '.join(names)} is not installed")

    def at_least(self, name: str, version: str) -> Found:
        """Usable if the distribution is installed in this version or a later one."""
        found = self.any_of(name)
        if not found.usable:
            return found
        have = self.packages[name]
        enough = _release(have) >= _release(version)
        return Found(enough, f"{name} {have} is installed, {version} brought it")

    def tool(self, name: str) -> Found:
        """Usable if the program is here."""
        where = self.tools.get(name)
        return Found(where is not None, where or f"{name} was not found")

    def library(self, name: str) -> Found:
        """Usable if attnplat was installed with the library."""
        where = self.libraries.get(name)
        if where is not None:
            return Found(True, where)
        compiler = self.tools.get("c++")
        there = f"{compiler} could build it" if compiler else "there is no C++ compiler on PATH"
        return Found(False, f"{name} was not built with attnplat; {there}")


def _release(version: str) -> tuple[int, ...]:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def _flashinfer(evidence: Evidence) -> Found:
    """FlashInfer runs with ready-made kernels, or where it can compile its own."""
    package = evidence.any_of("flashinfer-python")
    if not package.usable:
        return package
    kernels = evidence.any_of("flashinfer-cubin")
    if kernels.usable:
        return Found(True, f"{package.how}; {kernels.how}")
    tools = [evidence.tool(name) for name in ("nvcc", "ninja")]
    if all(tool.usable for tool in tools):
        return Found(True, f"{package.how}; compiles with {tools[0].how} and {tools[1].how}")
    return Found(False, f"{package.how}; neither flashinfer-cubin nor both of nvcc and ninja")


def _both(first: Found, second: Found) -> Found:
    if not first.usable:
        return first
    return Found(second.usable, second.how)


def _torch_build(evidence: Evidence, vendor: str, tag: str) -> Found:
    """Whether the installed torch can drive the vendor's devices, by its local version tag."""
    if "torch" not in evidence.packages:
        return Found(False, "torch is not installed")
    if "torch" in evidence.broken:
        return Found(False, f"torch is {evidence.broken['torch']}")
    version = evidence.packages["torch"]
    _, plus, local = version.partition("+")
    if plus:
        return Found(local.startswith(tag), f"torch {version} is the build {local!r}")
    # The index's own build for Linux and Windows drives NVIDIA's devices and has no tag.
    usable = vendor == "cuda" and sys.platform != "darwin"
    return Found(usable, f"torch {version} is the build without a tag")


class FeatureSpec(NamedTuple):
    """A feature that exists: its meaning, where it matters, and how metadata judges it."""

    meaning: str
    platforms: tuple[str, ...]
    judge: Callable[[Evidence], Found]


_CUDA, _ROCM, _CPU = ("cuda",), ("rocm",), ("cpu",)

LIBRARIES = {"libattnplat_cpu.so": "platforms/cpu/kernels"}
"""Compiled libraries of attnplat's own: file name -> folder in the package."""

FEATURES: dict[str, FeatureSpec] = {
    "torch_cuda": FeatureSpec(
        "torch drives NVIDIA devices", _CUDA, lambda e: _torch_build(e, "cuda", "cu")
    ),
    "torch_rocm": FeatureSpec(
        "torch drives AMD devices", _ROCM, lambda e: _torch_build(e, "rocm", "rocm")
    ),
    "fa2": FeatureSpec("FlashAttention 2", _CUDA, lambda e: e.any_of("flash-attn")),
    "fa3": FeatureSpec("FlashAttention 3", _CUDA, lambda e: e.any_of("flash-attn-3", "fa3-fwd")),
    "fa4": FeatureSpec("FlashAttention 4", _CUDA, lambda e: e.any_of("flash-attn-4")),
    "flash_attention": FeatureSpec(
        "any version of FlashAttention",
        _CUDA,
        lambda e: e.any_of("flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4"),
    ),
    "nvcc": FeatureSpec("NVIDIA's compiler", _CUDA, lambda e: e.tool("nvcc")),
    "ninja": FeatureSpec("the build tool ninja", _CUDA, lambda e: e.tool("ninja")),
    "flashinfer": FeatureSpec("FlashInfer with kernels or a compiler", _CUDA, _flashinfer),
    "flashinfer_cubin": FeatureSpec(
        "FlashInfer's ready-made and TRTLLM kernels",
        _CUDA,
        lambda e: _both(e.any_of("flashinfer-python"), e.any_of("flashinfer-cubin")),
    ),
    "flashinfer_sparse_sm90": FeatureSpec(
        "FlashInfer's sparse MLA on Hopper",
        _CUDA,
        lambda e: _both(_flashinfer(e), e.at_least("flashinfer-python", "0.7.2")),
    ),
    "flashinfer_sparse_sm120": FeatureSpec(
        "FlashInfer's packed sparse MLA decode on consumer Blackwell",
        _CUDA,
        lambda e: _both(_flashinfer(e), e.at_least("flashinfer-python", "0.6.14")),
    ),
    "flashmla": FeatureSpec(
        "FlashMLA's dense and sparse kernels", _CUDA, lambda e: e.any_of("flash-mla")
    ),
    "cutlass_mla": FeatureSpec(
        "CUTLASS's MLA decode",
        _CUDA,
        lambda e: Found(False, "no package offers it outside an engine's own build"),
    ),
    "engine_kernels": FeatureSpec(
        "kernels that an engine compiles into its own package",
        _CUDA,
        lambda e: Found(False, "no package offers them outside an engine's own build"),
    ),
    "deep_gemm": FeatureSpec("DeepGEMM", _CUDA, lambda e: e.any_of("deep-gemm", "sgl-deep-gemm")),
    "cpu_kernels": FeatureSpec(
        "attnplat's own C++ kernels", _CPU, lambda e: e.library("libattnplat_cpu.so")
    ),
    "aiter": FeatureSpec("AMD's aiter", _ROCM, lambda e: e.any_of("amd-aiter")),
    "aiter_mla_non_causal": FeatureSpec(
        "aiter's MLA decode without a causal mask",
        _ROCM,
        lambda e: _both(
            e.any_of("amd-aiter"), Found(False, "metadata does not tell; nobody has asked it")
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Packages, features and switches, hashable and comparable.

    Attributes:
        packages: distribution -> version, of those that attnplat knows.
        features: feature -> whether it works and what established that.
        switches: switch -> on or off, and who said so.
        profile: the name of an assumed inventory, or None for a real one.
        notes: what was odd about the installation, one sentence each.
        broken: those of the packages that failed when they were last tried -> how.
    """

    packages: Mapping[str, str]
    features: Mapping[str, Found]
    switches: Mapping[str, Switch]
    profile: str | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)
    broken: Mapping[str, str] = FrozenMap()

    def __post_init__(self) -> None:
        for name in ("packages", "features", "switches", "broken"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))
        contents = (self.packages, self.features, self.switches, self.profile, self.broken)
        # Worlds are keys of caches, so the hash is taken once.
        object.__setattr__(self, "_hash", hash(contents))

    def __hash__(self) -> int:
        known: int = self._hash  # type: ignore[attr-defined]
        return known

    def usable(self, feature: str) -> bool:
        """Whether a feature works. Raises UnknownNameError for a name nobody declares."""
        found = self.features.get(feature)
        if found is None:
            raise UnknownNameError("inventory feature", feature, {*FEATURES, *self.features})
        return found.usable

    def on(self, switch: str) -> bool:
        """Whether a switch is on. Raises UnknownNameError for a name nobody declares."""
        found = self.switches.get(switch)
        if found is None:
            raise UnknownNameError("inventory switch", switch, {*SWITCHES, *self.switches})
        return found.on

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, keys sorted."""
        features = {k: {"usable": f.usable, "how": f.how} for k, f in self.features.items()}
        switches = {k: {"on": s.on, "source": s.source} for k, s in self.switches.items()}
        return {
            "packages": dict(sorted(self.packages.items())),
            "features": dict(sorted(features.items())),
            "switches": dict(sorted(switches.items())),
            "profile": self.profile,
            "notes": list(self.notes),
            "broken": dict(sorted(self.broken.items())),
        }

    @classmethod
    def installed(
        cls,
        environment: Environment | None = None,
        *,
        driver: DriverEnvironment | None = None,
        paths: Sequence[str] | None = None,
    ) -> Inventory:
        """What this machine has, from metadata: nothing is imported.

        A package that failed when `attnplat doctor --probe` tried it, and has not changed since,
        is known to be broken.

        Args:
            environment: the user's switches; read now when left out.
            driver: where compilers are looked for; read now when left out.
            paths: folders to look for packages in; Python's own when left out.
        """
        environment = read_env() if environment is None else environment
        driver = read_driver_env() if driver is None else driver
        found = look_for_packages(sys.path if paths is None else paths)
        outcomes = _known_outcomes(found, environment, driver, paths)
        return cls.of(found, environment, driver, outcomes)

    @classmethod
    def of(
        cls,
        found: Installed,
        environment: Environment,
        driver: DriverEnvironment,
        outcomes: Mapping[str, Outcome],
    ) -> Inventory:
        """What a machine has by what was found: packages, settings, and what came of trying."""
        mistaken = tuple(MISTAKEN[name] for name in MISTAKEN if name in found.versions)
        packages = {k: v for k, v in found.versions.items() if k not in MISTAKEN}
        broken = {
            name: f"broken ({outcome.kind}: {outcome.text})"
            for name, outcome in outcomes.items()
            if outcome.broken and name in packages
        }
        return cls(
            packages=packages,
            features=_judge(Evidence(packages, find_tools(driver), find_libraries(), broken)),
            switches={name: _switch(spec, environment, driver) for name, spec in SWITCHES.items()},
            notes=(*found.notes, *mistaken),
            broken=broken,
        )

    @classmethod
    def assume(
        cls,
        packages: Mapping[str, str] | None = None,
        features: Mapping[str, bool] | None = None,
        switches: Mapping[str, bool] | None = None,
        *,
        tools: Mapping[str, str] | None = None,
        profile: str | None = None,
    ) -> Inventory:
        """What a machine that is not here would have.

        Args:
            packages: distribution -> version.
            features: those that differ from what the packages and tools give.
            switches: those that differ from the default.
            tools: program -> path.
            profile: what to call the whole.

        Raises UnknownNameError for a feature or switch that nobody declares.
        """
        judged = _judge(Evidence(packages or {}, tools or {}, {}))
        for name, usable in (features or {}).items():
            _require("inventory feature", name, FEATURES)
            judged[name] = Found(usable, "assumed")
        turned = {name: Switch(spec.default, "default") for name, spec in SWITCHES.items()}
        for name, on in (switches or {}).items():
            _require("inventory switch", name, SWITCHES)
            turned[name] = Switch(on, "assumed")
        return cls(packages=packages or {}, features=judged, switches=turned, profile=profile)

    @classmethod
    def assumed(cls, profile: str, device: DeviceInfo) -> Inventory:
        """The named profile for a device: `all`, `installed`, `minimal` or one of `PROFILES`.

        Raises UnknownNameError with the names that the device's platform has.
        """
        if profile == "installed":
            return cls.installed()
        from attnplat.platforms.profiles import named_inventory

        return named_inventory(str(device.platform), profile)


def look_for_packages(paths: Sequence[str]) -> Installed:
    """The packages that attnplat knows, and those mistaken for one, along `paths`."""
    return installed_versions([*(d.name for d in DISTRIBUTIONS), *MISTAKEN], paths)


def _known_outcomes(
    found: Installed,
    environment: Environment,
    driver: DriverEnvironment,
    paths: Sequence[str] | None,
) -> Mapping[str, Outcome]:
    """What came of trying kernel packages before; looks no further where there are none."""
    if not any(d.name in found.versions for d in DISTRIBUTIONS if d.platforms != ALL):
        return FrozenMap()
    from attnplat.platforms.probe_memory import remembered

    return remembered(found, environment, driver, paths)


def _require(what: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise UnknownNameError(what, name, known)


def _judge(evidence: Evidence) -> dict[str, Found]:
    return {name: spec.judge(evidence) for name, spec in FEATURES.items()}


def _switch(spec: SwitchSpec, environment: Environment, driver: DriverEnvironment) -> Switch:
    told = getattr(driver, spec.driver) if spec.driver is not None else None
    if told is not None:
        return Switch(told == "TRUE", "environment")
    if spec.variable is not None:
        chosen = getattr(environment, spec.variable.removeprefix(PREFIX).lower())
        if chosen is not None:
            return Switch(chosen, "environment")
    return Switch(spec.default, "default")


def find_tools(driver: DriverEnvironment) -> dict[str, str]:
    """Where the compilers are that kernels may be built with: program -> path."""
    folders = [Path(entry) for entry in (driver.path or "").split(os.pathsep) if entry]
    home = Path(driver.cuda_home or "/usr/local/cuda") / "bin"
    looked_in = {"nvcc": [home, *folders], "ninja": folders, "c++": folders}
    suffix = ".exe" if sys.platform == "win32" else ""
    found = {}
    for tool, places in looked_in.items():
        for place in places:
            candidate = place / f"{tool}{suffix}"
            if os.access(candidate, os.X_OK) and not candidate.is_dir():
                found[tool] = str(candidate)
                break
    return found


def find_libraries(folders: Sequence[str] | None = None) -> dict[str, str]:
    """Where attnplat's own libraries are: file name -> path.

    `folders` are those of the package; left out, its own. An editable install has two, the
    sources' and one for what was compiled.
    """
    if folders is None:
        folders = list(sys.modules["attnplat"].__path__)
    found = {}
    for name, inside in LIBRARIES.items():
        places = (Path(folder) / inside / name for folder in folders)
        where = next((place for place in places if place.is_file()), None)
        if where is not None:
            found[name] = str(where)
    return found
