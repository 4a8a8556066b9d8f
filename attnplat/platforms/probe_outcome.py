"""What came of trying an optional package: a kind, a sentence, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple


class ProbeKind(StrEnum):
    """How a package behaves when it is used, the good one first."""

    WORKS = "works"
    NOT_TRIED = "not tried"
    WRONG_TORCH = "wrong torch"
    ABI_MISMATCH = "ABI mismatch"
    MISSING_SYMBOL = "missing symbol"
    MISSING_MODULE = "missing module"
    MISSING_LIBRARY = "missing library"
    NO_DEVICE = "no device or driver"
    SOMETHING_ELSE = "something else of that name"
    RAISES = "raises"
    EXITS = "ends the program"
    CRASHES = "crashes"
    HANGS = "hangs"


class Outcome(NamedTuple):
    """What came of trying one distribution.

    Attributes:
        distribution: its name on the index.
        version: the installed one.
        kind: how it behaves.
        text: what was seen, one sentence.
        fix: what to do, or "".
        module: what was imported, or "".
        symbols: those asked for -> whether they are there.
        effects: what importing it did beside being imported, one clause each.
        seconds: how long it took.
    """

    distribution: str
    version: str
    kind: ProbeKind
    text: str
    fix: str = ""
    module: str = ""
    symbols: Mapping[str, bool] = {}
    effects: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def broken(self) -> bool:
        """Whether it cannot be used here."""
        return self.kind not in (ProbeKind.WORKS, ProbeKind.NOT_TRIED)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "distribution": self.distribution,
            "version": self.version,
            "kind": str(self.kind),
            "text": self.text,
            "fix": self.fix,
            "module": self.module,
            "symbols": dict(sorted(self.symbols.items())),
            "effects": list(self.effects),
            "seconds": round(self.seconds, 2),
        }

    @classmethod
    def from_dict(cls, value: Any) -> Outcome | None:
        """The outcome that `to_dict` made, or None for anything else."""
        try:
            texts = {name: value[name] for name in _TEXTS}
            symbols = {str(name): bool(there) for name, there in value["symbols"].items()}
            effects = tuple(map(str, value["effects"]))
            kind, seconds = ProbeKind(value["kind"]), float(value["seconds"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        if not all(isinstance(text, str) for text in texts.values()):
            return None
        return cls(**texts, kind=kind, symbols=symbols, effects=effects, seconds=seconds)


_TEXTS = ("distribution", "version", "text", "fix", "module")


class Failure(NamedTuple):
    """An exception, as a process told of it before it ended."""

    type: str
    text: str
    name: str | None = None
    is_exit: bool = False


# Compiled when they are first needed: most runs never do.
_ABI = (
    r"(?i)undefined symbol|symbol not found|procedure could not be found|version `[^']+' not found"
    r"|compiled (using|against) .*NumPy|ABI version|dtype size changed"
)
_LIBRARY = r"cannot open shared object file|Library not loaded|DLL load failed|image not found"
# Libraries that come with a driver, not with a package.
_OF_DRIVERS = r"lib(cuda|nvidia-ml|amdhip64|hsa-runtime64|amd_smi|rocm_smi64)\.so"
_NO_DEVICE = (
    r"(?i)no nvidia driver|nvml|driver not loaded|no hip gpus|no cuda gpus|no cuda-capable"
    r"|rocm version file not found|libamd_smi|no rocm-capable|0 active drivers|cuda driver"
    r"|no gpu|gpu not found|not linked with support for any|torch not compiled with cuda"
)
_TORCH = (
    r"(?is)(requires?|built (for|with|against)|needs|incompatible with|expects?)\b.{0,60}"
    r"\b(py)?torch\b"
    r"|\b(py)?torch\b.{0,60}\b(is required|version mismatch|but (found|got|have))"
    r"|\b(py)?torch\b.{0,20}version.{0,60}\b(is required|required|mismatch|but)"
)


def kind_of(failure: Failure, module: str) -> ProbeKind:
    """The kind of a failure that an import or a call raised."""
    text = f"{failure.type}: {failure.text}"
    if failure.is_exit:
        return ProbeKind.EXITS
    if failure.type == "ModuleNotFoundError":
        return ProbeKind.MISSING_MODULE
    if re.search(_ABI, failure.text):
        return ProbeKind.ABI_MISMATCH
    if re.search(_LIBRARY, failure.text):
        of_driver = re.search(_OF_DRIVERS, failure.text) is not None
        return ProbeKind.NO_DEVICE if of_driver else ProbeKind.MISSING_LIBRARY
    if re.search(_NO_DEVICE, text):
        return ProbeKind.NO_DEVICE
    if re.search(_TORCH, failure.text):
        return ProbeKind.WRONG_TORCH
    if failure.type == "ImportError" and "cannot import name" in failure.text:
        return ProbeKind.MISSING_SYMBOL
    return ProbeKind.RAISES


def fix_for(
    kind: ProbeKind, distribution: str, module: str, install: str, torch: str | None
) -> str:
    """What to do about a package of that kind; "" where it works."""
    minor = minor_of(torch) if torch else None
    alone = f"python -X faulthandler -c 'import {module}'"
    rebuilt = f"{install} --force-reinstall --no-cache-dir --no-deps"
    by_kind = {
        ProbeKind.WRONG_TORCH: f"install the {distribution} made for torch {minor}, or the torch "
        "that it was made for",
        ProbeKind.ABI_MISMATCH: "it was built beside other libraries than those here, torch "
        f"{torch} among them: {rebuilt}",
        ProbeKind.MISSING_SYMBOL: f"another version of it, or of what it imports: {install} "
        "--upgrade",
        ProbeKind.MISSING_LIBRARY: f"install the build of {distribution} that was made for this "
        f"machine's libraries and torch {torch}",
        ProbeKind.NO_DEVICE: "check the driver (nvidia-smi, rocminfo); nothing, where there is to "
        "be no such device",
        ProbeKind.SOMETHING_ELSE: f"remove what is in its place, then {rebuilt}",
        ProbeKind.RAISES: f"see all of it with {alone}; {rebuilt}",
        ProbeKind.EXITS: f"see all of it with {alone}; {rebuilt}",
        ProbeKind.CRASHES: f"see where with {alone}; {rebuilt}",
        ProbeKind.HANGS: f"see where with timeout -s ABRT 60 {alone}",
    }
    return by_kind.get(kind, "")


def minor_of(version: str) -> str:
    """`2.13` of `2.13.0+cpu`."""
    return ".".join(re.split(r"[.+]", version)[:2])
