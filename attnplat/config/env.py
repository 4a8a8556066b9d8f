"""Every environment variable that attnplat reads, declared once. Nothing else reads them.

`read_env` gives the user's `ATTNPLAT_*` wishes as one frozen value; `read_driver_env` gives
what vendors' drivers and compilers are told (`CUDA_VISIBLE_DEVICES` ...). Both are read when
called, never at import, and take the mapping to read as an argument.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from attnplat.errors import ConfigError, closest_name

PREFIX = "ATTNPLAT_"

CPU_ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16")
"""Instruction sets that CPU kernels are built for, lowest first within x86-64 and within ARM."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_BOOLEANS = "1, true, yes, on, 0, false, no or off"


class EnvVar(NamedTuple):
    """One variable: its name, what it means, what holds when it is unset, how it is read.

    `parse` takes the stripped, non-empty text and raises ValueError for a value that is not
    one of `allowed` (a phrase for the error message).
    """

    name: str
    meaning: str
    default: str
    parse: Callable[[str], Any]
    allowed: str

    @property
    def field(self) -> str:
        """The attribute of `Environment` that holds the value."""
        return self.name.removeprefix(PREFIX).lower()


class Replaced(NamedTuple):
    """A variable of another engine that users still set, and what to set for attnplat.

    `retired` says that its own engine no longer reads it either.
    """

    name: str
    instead: str
    retired: bool = True


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The user's `ATTNPLAT_*` wishes; a field is None when its variable is unset or empty.

    `notices` are sentences about variables that have no effect; the caller logs them.
    """

    device: str | None = None
    backend: str | None = None
    batch_invariant: bool | None = None
    cpu_isa: str | None = None
    aiter: bool | None = None
    aiter_mha: bool | None = None
    aiter_mla: bool | None = None
    cache_dir: Path | None = None
    offline: bool | None = None
    notices: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The variables that are set, by variable name, as plain JSON values."""
        values = {f"{PREFIX}{f.name.upper()}": getattr(self, f.name) for f in fields(self)}
        del values[f"{PREFIX}NOTICES"]
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in values.items()
            if value is not None
        }


class DriverEnvironment(NamedTuple):
    """What vendors' drivers and compilers are told; None when unset.

    An empty `*_visible_devices` differs from an unset one: it hides every device.
    """

    cuda_visible_devices: str | None = None
    cuda_device_order: str | None = None
    hip_visible_devices: str | None = None
    rocr_visible_devices: str | None = None
    hsa_override_gfx_version: str | None = None
    cuda_home: str | None = None
    path: str | None = None
    flash_attention_triton_amd_enable: str | None = None
    ld_library_path: str | None = None


def _boolean(text: str) -> bool:
    folded = text.lower()
    if folded in _TRUE:
        return True
    if folded in _FALSE:
        return False
    raise ValueError(text)


def _cpu_isa(text: str) -> str:
    folded = text.lower().replace("-", "_")
    if folded not in CPU_ISAS:
        raise ValueError(text)
    return folded


def _directory(text: str) -> Path:
    return Path(text).expanduser()


ENV_VARS: tuple[EnvVar, ...] = (
    EnvVar(
        "ATTNPLAT_DEVICE",
        "the device to answer for; one that is not there is simulated",
        "the first device found, in the order cuda, rocm, cpu",
        str,
        "a device such as cuda, cuda:1, rocm:gfx950 or cpu:avx2",
    ),
    EnvVar(
        "ATTNPLAT_BACKEND",
        "the backend to use where no argument or config names one",
        "chosen by the platform",
        str,
        "a backend's name",
    ),
    EnvVar(
        "ATTNPLAT_BATCH_INVARIANT",
        "take only backends whose results do not depend on batch-mates",
        "off",
        _boolean,
        _BOOLEANS,
    ),
    EnvVar(
        "ATTNPLAT_CPU_ISA",
        "the highest instruction set that CPU kernels may use",
        "the highest that this machine has",
        _cpu_isa,
        ", ".join(CPU_ISAS),
    ),
    EnvVar("ATTNPLAT_AITER", "use AMD's aiter kernels on ROCm", "off", _boolean, _BOOLEANS),
    EnvVar(
        "ATTNPLAT_AITER_MHA",
        "where aiter is on, use it for multi-head attention",
        "on",
        _boolean,
        _BOOLEANS,
    ),
    EnvVar(
        "ATTNPLAT_AITER_MLA",
        "where aiter is on, use it for multi-head latent attention",
        "on",
        _boolean,
        _BOOLEANS,
    ),
    EnvVar(
        "ATTNPLAT_CACHE_DIR",
        "folder for converted weights, tuned choices and built kernels",
        "the user's cache folder of the operating system",
        _directory,
        "a folder's path",
    ),
    EnvVar("ATTNPLAT_OFFLINE", "never use the network", "off", _boolean, _BOOLEANS),
)

# vLLM moved the first eight into its attention config; the last four it still reads itself.
REPLACED_VARS: tuple[Replaced, ...] = (
    Replaced("VLLM_ATTENTION_BACKEND", "ATTNPLAT_BACKEND or AttentionConfig.backend"),
    Replaced("VLLM_USE_TRITON_FLASH_ATTN", "ATTNPLAT_BACKEND=TRITON_ATTN"),
    Replaced("VLLM_V1_USE_PREFILL_DECODE_ATTENTION", "ATTNPLAT_BACKEND=ROCM_ATTN"),
    Replaced("VLLM_FLASH_ATTN_VERSION", "AttentionConfig.flash_attn_version"),
    Replaced(
        "VLLM_FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH",
        "AttentionConfig.flash_attn_max_num_splits_for_cuda_graph",
    ),
    Replaced("VLLM_USE_TRTLLM_ATTENTION", "AttentionConfig.use_trtllm_attention"),
    Replaced(
        "VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION",
        "AttentionConfig.disable_flashinfer_q_quantization",
    ),
    Replaced("VLLM_USE_CUDNN_PREFILL", "AttentionConfig.mla_prefill_backend"),
    Replaced("VLLM_BATCH_INVARIANT", "ATTNPLAT_BATCH_INVARIANT", retired=False),
    Replaced("VLLM_ROCM_USE_AITER", "ATTNPLAT_AITER", retired=False),
    Replaced("VLLM_ROCM_USE_AITER_MHA", "ATTNPLAT_AITER_MHA", retired=False),
    Replaced("VLLM_ROCM_USE_AITER_MLA", "ATTNPLAT_AITER_MLA", retired=False),
)


def read_env(environ: Mapping[str, str] | None = None) -> Environment:
    """The user's wishes in `environ` (the process's environment when None).

    Raises ConfigError naming the variable, its value and what it takes.
    """
    environ = os.environ if environ is None else environ
    values = {
        var.field: _parse(var, environ[var.name].strip())
        for var in ENV_VARS
        if environ.get(var.name, "").strip()
    }
    return Environment(**values, notices=_notices(environ))


def read_driver_env(environ: Mapping[str, str] | None = None) -> DriverEnvironment:
    """What drivers and compilers are told in `environ` (the process's environment when None).

    HIP reads `CUDA_VISIBLE_DEVICES` where `HIP_VISIBLE_DEVICES` is unset; that is resolved
    where AMD's devices are detected, since the same variable is also NVIDIA's.
    """
    environ = os.environ if environ is None else environ
    return DriverEnvironment(
        cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        cuda_device_order=environ.get("CUDA_DEVICE_ORDER"),
        hip_visible_devices=environ.get("HIP_VISIBLE_DEVICES"),
        rocr_visible_devices=environ.get("ROCR_VISIBLE_DEVICES"),
        hsa_override_gfx_version=environ.get("HSA_OVERRIDE_GFX_VERSION"),
        cuda_home=environ.get("CUDA_HOME") or environ.get("CUDA_PATH"),
        path=environ.get("PATH"),
        flash_attention_triton_amd_enable=environ.get("FLASH_ATTENTION_TRITON_AMD_ENABLE"),
        ld_library_path=environ.get("LD_LIBRARY_PATH"),
    )


def _parse(var: EnvVar, text: str) -> Any:
    try:
        return var.parse(text)
    except (ValueError, RuntimeError):  # expanduser raises RuntimeError for an unknown user
        raise ConfigError(f"{var.name} is {text!r}; it takes {var.allowed}") from None


def _notices(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = {var.name for var in ENV_VARS}
    notices = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            # Without the prefix that all share, and that would make any two look alike.
            closest = closest_name(name.removeprefix(PREFIX), (var.field for var in ENV_VARS))
            hint = (
                f"did you mean {PREFIX}{closest.upper()}?"
                if closest
                else f"known: {', '.join(sorted(known))}"
            )
            notices.append(f"{name} is not a variable that attnplat reads; {hint}")
    for var in REPLACED_VARS:
        if var.name in environ:
            why = "was removed by vLLM" if var.retired else "is read by vLLM alone"
            notices.append(f"{var.name} {why} and has no effect here; set {var.instead}")
    return tuple(notices)
