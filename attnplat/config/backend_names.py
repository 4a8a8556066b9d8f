"""The canonical names of backends, and how a user may spell them."""

from __future__ import annotations

import re
from typing import Any

from attnplat.config.entry_points import BACKENDS, declared
from attnplat.config.names import Name
from attnplat.errors import UnknownNameError


class BackendName(Name):
    """Every backend that attnplat knows, in the field's canonical spelling.

    The names of installed plugins' backends join when a name is asked for that is not here.
    """

    # Portable
    REFERENCE = "REFERENCE"
    TORCH_SDPA = "TORCH_SDPA"
    FLEX_ATTENTION = "FLEX_ATTENTION"
    TRITON_ATTN = "TRITON_ATTN"
    TRITON_ATTN_DIFFKV = "TRITON_ATTN_DIFFKV"
    TRITON_MLA = "TRITON_MLA"
    TURBOQUANT = "TURBOQUANT"
    MINIMAX_M3_SPARSE = "MINIMAX_M3_SPARSE"
    TRITON_INDEXER = "TRITON_INDEXER"
    TRITON_BLOCK_INDEXER = "TRITON_BLOCK_INDEXER"
    MAMBA1_ATTN = "MAMBA1_ATTN"
    MAMBA2_ATTN = "MAMBA2_ATTN"
    SHORT_CONV_ATTN = "SHORT_CONV_ATTN"
    LINEAR_ATTN = "LINEAR_ATTN"
    GDN_ATTN = "GDN_ATTN"
    # NVIDIA
    FLASH_ATTN = "FLASH_ATTN"
    FLASH_ATTN_DIFFKV = "FLASH_ATTN_DIFFKV"
    FLASHINFER = "FLASHINFER"
    TRITON_FLASH_ATTN = "TRITON_FLASH_ATTN"
    TRITON_FLASHINFER = "TRITON_FLASHINFER"
    B12X = "B12X"
    HPC_ATTN = "HPC_ATTN"
    FLASH_ATTN_MLA = "FLASH_ATTN_MLA"
    FLASHINFER_MLA = "FLASHINFER_MLA"
    FLASHMLA = "FLASHMLA"
    CUTLASS_MLA = "CUTLASS_MLA"
    TOKENSPEED_MLA = "TOKENSPEED_MLA"
    FLASH_ATTN_MLA_SPARSE = "FLASH_ATTN_MLA_SPARSE"
    FLASH_ATTN_MLA_SPARSE_FA4 = "FLASH_ATTN_MLA_SPARSE_FA4"
    FLASHINFER_MLA_SPARSE = "FLASHINFER_MLA_SPARSE"
    FLASHINFER_MLA_SPARSE_SM90 = "FLASHINFER_MLA_SPARSE_SM90"
    FLASHINFER_MLA_SPARSE_SM120 = "FLASHINFER_MLA_SPARSE_SM120"
    FLASHINFER_MLA_SPARSE_DSV4 = "FLASHINFER_MLA_SPARSE_DSV4"
    FLASHINFER_MLA_SPARSE_DSV41 = "FLASHINFER_MLA_SPARSE_DSV41"
    FLASHMLA_SPARSE = "FLASHMLA_SPARSE"
    FLASHMLA_SPARSE_DSV4 = "FLASHMLA_SPARSE_DSV4"
    FLASHMLA_SPARSE_DSV41 = "FLASHMLA_SPARSE_DSV41"
    FLASHMLA_MEGA_ATTN_DSV41 = "FLASHMLA_MEGA_ATTN_DSV41"
    CUTLASS_MSA = "CUTLASS_MSA"
    TRITON_MSA = "TRITON_MSA"
    STEP5_DSA = "STEP5_DSA"
    TRTLLM_RAGGED = "TRTLLM_RAGGED"
    DEEPGEMM_INDEXER = "DEEPGEMM_INDEXER"
    MSA_INDEXER = "MSA_INDEXER"
    # AMD
    ROCM_ATTN = "ROCM_ATTN"
    ROCM_SEGMENTED_ATTN = "ROCM_SEGMENTED_ATTN"
    ROCM_AITER_FA = "ROCM_AITER_FA"
    ROCM_AITER_UNIFIED_ATTN = "ROCM_AITER_UNIFIED_ATTN"
    ROCM_AITER_MLA = "ROCM_AITER_MLA"
    ROCM_AITER_TRITON_MLA = "ROCM_AITER_TRITON_MLA"
    ROCM_AITER_MLA_SPARSE = "ROCM_AITER_MLA_SPARSE"
    ROCM_FLASHMLA_SPARSE_DSV4 = "ROCM_FLASHMLA_SPARSE_DSV4"
    ROCM_FLASHMLA_SPARSE_DSV41 = "ROCM_FLASHMLA_SPARSE_DSV41"
    ROCM_OCTAVE = "ROCM_OCTAVE"
    ULTRAQUANT = "ULTRAQUANT"
    ROCM_AITER_INDEXER = "ROCM_AITER_INDEXER"
    ROCM_AITER_BLOCK_INDEXER = "ROCM_AITER_BLOCK_INDEXER"
    # CPU
    CPU = "CPU"
    ZEN_CPU = "ZEN_CPU"
    CPU_ATTN = "CPU_ATTN"
    CPU_MLA = "CPU_MLA"
    AMX_MLA = "AMX_MLA"
    CPU_MLA_SPARSE = "CPU_MLA_SPARSE"
    CPU_INDEXER = "CPU_INDEXER"
    ZENTORCH = "ZENTORCH"
    IPEX = "IPEX"
    # Devices without a platform of their own
    XPU_MLA_SPARSE = "XPU_MLA_SPARSE"

    @classmethod
    def _missing_(cls, value: object) -> BackendName | None:
        join_plugins()
        return cls.__members__.get(str(value))


IN_TREE = frozenset(BackendName.__members__)
"""attnplat's own names, whatever plugins add."""

# Names that other releases and engines used, and what took their place.
RETIRED_NAMES = {
    "XFORMERS": "XFORMERS is retired; its place is taken by TRITON_ATTN",
    "FLASH_ATTN_VLLM_V1": "write FLASH_ATTN",
    "FLASHINFER_VLLM_V1": "write FLASHINFER",
    "TRITON_ATTN_VLLM_V1": "write TRITON_ATTN",
    "ROCM_FLASH": "ROCM_FLASH is retired; write ROCM_ATTN",
    "TRITON_MLA_VLLM_V1": "write TRITON_MLA",
    "SDPA": "write TORCH_SDPA",
    "EAGER": "write REFERENCE",
}


def parse_backend(value: Any) -> BackendName | None:
    """The backend that `value` names in any case; None for None and `"auto"`.

    Raises UnknownNameError with the known names, the closest, and for a retired name
    what to write in its place.
    """
    if value is None or isinstance(value, BackendName):
        return value
    if isinstance(value, str):
        folded = value.strip().upper().replace("-", "_")
        if folded == "AUTO":
            return None
        if folded not in BackendName.__members__:
            join_plugins()
        if folded in BackendName.__members__:
            return BackendName[folded]
        if folded in RETIRED_NAMES:
            raise UnknownNameError("backend", value, BackendName, hint=RETIRED_NAMES[folded])
    raise UnknownNameError("backend", value, BackendName)


def join_plugins() -> None:
    """Make the backends that installed plugins declare members of `BackendName`.

    From metadata alone: whether a plugin can be used shows when it is chosen.
    """
    for name in declared().names(BACKENDS):
        if is_canonical(name) and name not in BackendName.__members__:
            _join(name)


def is_canonical(name: str) -> bool:
    """Whether a name has the form of a backend's: `WINDOW_ATTN`."""
    return re.fullmatch(r"[A-Z][A-Z0-9_]*", name) is not None


def _join(name: str) -> None:
    # What the enum's own machinery does for the members in its body.
    member = str.__new__(BackendName, name)
    member._name_ = member._value_ = name
    member._sort_order_ = len(BackendName)  # type: ignore[attr-defined]
    BackendName._member_names_.append(name)
    BackendName._member_map_[name] = member
    BackendName._value2member_map_[name] = member
    type.__setattr__(BackendName, name, member)
