"""Named inventories, to answer for machines that are not here.

The names are those of the golden decision tables: `full` has everything the platform can
use; `full_no_trtllm` has FlashInfer without its ready-made kernels; `bundled` has what an
engine compiles into its own package; `default` has AMD's kernels switched off; `minimal` has
torch and Triton alone; `zen` has AMD's CPU extension. `all` is another word for `full`.
"""

from __future__ import annotations

from attnplat.errors import UnknownNameError
from attnplat.platforms.inventory import Inventory

_TORCH = {"torch": "2.13.0", "transformers": "5.24.0"}
_GPU = {**_TORCH, "triton": "3.9.0"}
_BUNDLED = {
    **_GPU,
    "flash-attn": "2.8.3.post2",
    "fa3-fwd": "0.0.3",
    "flash-attn-4": "4.0.0b36",
    "flash-mla": "1.0.0.dev0",
    "deep-gemm": "2.1.0",
}
_NO_TRTLLM = {**_BUNDLED, "flashinfer-python": "0.7.2", "tokenspeed-mla": "2.0.3"}
_CUDA_FULL = {**_NO_TRTLLM, "flashinfer-cubin": "0.7.2"}
_COMPILER = {"nvcc": "/usr/local/cuda/bin/nvcc", "ninja": "/usr/bin/ninja"}
_ENGINE_BUILD = {"cutlass_mla": True, "engine_kernels": True}
_ROCM = {**_GPU, "torch": "2.13.0+rocm7.1"}
_AITER = {
    **_ROCM,
    "amd-aiter": "0.1.7.post2.dev18",
    "flydsl": "0.4.2",
    "flash-attn": "2.8.3.post2",
}
_CPU = {**_TORCH, "torch": "2.13.0+cpu"}


def _cuda(name: str, packages: dict[str, str], tools: dict[str, str] | None = None) -> Inventory:
    features = _ENGINE_BUILD if packages is not _GPU else None
    return Inventory.assume(packages, features, tools=tools, profile=name)


def _rocm(name: str, packages: dict[str, str], aiter: bool) -> Inventory:
    # The tables were recorded with an engine's build, whose classes for NVIDIA's devices can
    # all be imported, and with an aiter whose MLA decode takes a `causal` argument.
    features = {"engine_kernels": True, "aiter_mla_non_causal": "amd-aiter" in packages}
    switches = {"aiter": aiter, "flash_attn_triton": aiter}
    return Inventory.assume(packages, features, switches, profile=name)


def _cpu(name: str, packages: dict[str, str]) -> Inventory:
    return Inventory.assume(packages, {"cpu_kernels": True}, profile=name)


PROFILES: dict[str, dict[str, Inventory]] = {
    "cuda": {
        "full": _cuda("full", _CUDA_FULL, _COMPILER),
        "full_no_trtllm": _cuda("full_no_trtllm", _NO_TRTLLM, _COMPILER),
        "bundled": _cuda("bundled", _BUNDLED),
        "minimal": _cuda("minimal", _GPU),
    },
    "rocm": {
        "full": _rocm("full", _AITER, aiter=True),
        "default": _rocm("default", _AITER, aiter=False),
        "minimal": _rocm("minimal", _ROCM, aiter=False),
    },
    "cpu": {
        "full": _cpu("full", _CPU),
        "zen": _cpu("zen", {**_CPU, "zentorch": "2.13.0.2"}),
        "minimal": _cpu("minimal", {"torch": "2.13.0+cpu"}),
    },
}
ALIASES = {"all": "full"}


def named_inventory(platform: str, profile: str) -> Inventory:
    """The profile of a platform; a plugin's platform has `minimal` alone.

    Raises UnknownNameError with the profiles that the platform has.
    """
    known = PROFILES.get(platform, {"minimal": _cpu("minimal", _TORCH)})
    name = ALIASES.get(profile, profile)
    if name in known:
        return known[name]
    if profile in ALIASES:
        return known["minimal"]
    names = [*known, "installed", *ALIASES]
    raise UnknownNameError(f"package profile of {platform}", profile, names)
