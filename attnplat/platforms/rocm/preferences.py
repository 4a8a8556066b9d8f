"""What the ROCM platform prefers, and why: taste."""

from __future__ import annotations

from attnplat.backends.portable.catalog import (
    BLOCK_SPARSE,
    INDEXER,
    MHA,
    MLA,
    MLA_PREFILL,
    SPARSE_MLA,
    STATE,
)
from attnplat.backends.portable.predicates import has_narrower_values, is_vision
from attnplat.platforms.rocm import rules
from attnplat.platforms.selection import ByName, Preference, Ranked

_SLOW = "it serves everything, slowly: chosen on request only"

PREFERENCES: tuple[Preference, ...] = (
    Preference(
        serves=MHA,
        when=is_vision,
        order=(
            Ranked("ROCM_AITER_FA", rules.aiter_mha_is_on),
            "FLASH_ATTN",
            "TRITON_ATTN",
            "TORCH_SDPA",
            "REFERENCE",
        ),
        because="without a cache a forward kernel is all it takes, and Composable Kernels lead",
        never_first={"REFERENCE": _SLOW},
    ),
    Preference(
        serves=MHA,
        when=has_narrower_values,
        order=(
            "TRITON_ATTN_DIFFKV",
            Ranked("ROCM_AITER_FA", rules.aiter_mha_is_on),
            "FLEX_ATTENTION",
            "TORCH_SDPA",
            "REFERENCE",
        ),
        because="its pages have rows of two widths, which few kernels read",
        never_first={"REFERENCE": _SLOW},
    ),
    Preference(
        serves=MHA,
        order=(
            Ranked("ROCM_AITER_FA", rules.aiter_mha_is_on),
            Ranked("ROCM_AITER_UNIFIED_ATTN", rules.unified_is_on),
            "ROCM_ATTN",
            "TRITON_ATTN",
            "FLEX_ATTENTION",
            Ranked("TURBOQUANT", rules.keeps_turboquant),
            Ranked("ROCM_OCTAVE", rules.keeps_octave),
            Ranked("ULTRAQUANT", rules.keeps_ultraquant),
            "TORCH_SDPA",
            "REFERENCE",
        ),
        because="who switches aiter on wants its kernels, which are written for the device; "
        "then come HIP and Triton paged attention, and each packed cache has one backend",
        never_first={"REFERENCE": _SLOW},
    ),
    Preference(
        serves=MLA,
        order=(
            Ranked("ROCM_AITER_MLA", rules.aiter_mla_is_on),
            "TRITON_MLA",
            Ranked("ROCM_AITER_TRITON_MLA", rules.aiter_mla_is_on),
            "TORCH_SDPA",
            "REFERENCE",
        ),
        because="aiter's assembly decode leads where it is on; Triton's takes every head size",
        never_first={
            "ROCM_AITER_TRITON_MLA": "it takes what ROCM_AITER_MLA takes, and differs in prefill",
            "REFERENCE": _SLOW,
        },
    ),
    Preference(
        serves=SPARSE_MLA,
        when=rules.is_deepseek_v4,
        order=("ROCM_FLASHMLA_SPARSE_DSV4", "TORCH_SDPA", "REFERENCE"),
        because="only its own backend reads DeepSeek-V4's packed rows in place",
        never_first={"REFERENCE": _SLOW},
    ),
    Preference(
        serves=SPARSE_MLA,
        when=rules.is_deepseek_v41,
        order=("ROCM_FLASHMLA_SPARSE_DSV41", "TORCH_SDPA", "REFERENCE"),
        because="only its own backend reads DeepSeek-V4.1's packed rows in place",
        never_first={"REFERENCE": _SLOW},
    ),
    Preference(
        serves=SPARSE_MLA,
        order=("ROCM_AITER_MLA_SPARSE", "TORCH_SDPA", "REFERENCE"),
        because="aiter has the one fused decode over chosen rows",
        never_first={"REFERENCE": _SLOW},
    ),
    Preference(
        serves=BLOCK_SPARSE,
        order=("MINIMAX_M3_SPARSE",),
        because="Triton's kernels over chosen blocks run on every AMD device",
    ),
    Preference(
        serves=MLA_PREFILL,
        order=(
            Ranked("ROCM_AITER_FA", rules.aiter_mla_is_on),
            "FLASH_ATTN",
            "TORCH_SDPA",
            "REFERENCE",
        ),
        because="expanded latent attention is ordinary attention, and aiter's forward leads",
        never_first={"REFERENCE": _SLOW},
    ),
    Preference(
        serves=INDEXER,
        when=rules.is_minimax,
        order=(
            Ranked("ROCM_AITER_BLOCK_INDEXER", rules.aiter_indexes),
            "TRITON_BLOCK_INDEXER",
        ),
        because="aiter's scores lead on shuffled pages; Triton's run on every AMD device",
    ),
    Preference(
        serves=INDEXER,
        order=(Ranked("ROCM_AITER_INDEXER", rules.aiter_indexes), "TRITON_INDEXER"),
        because="aiter's scores read tiled fp8 and MXFP4 pages; Triton's read plain ones anywhere",
    ),
    Preference(
        serves=STATE,
        order=("MAMBA1_ATTN", "MAMBA2_ATTN", "SHORT_CONV_ATTN", "LINEAR_ATTN", "GDN_ATTN"),
        because="each recurrence has one backend",
    ),
)

BY_NAME: tuple[ByName, ...] = (
    ByName(
        "ROCM_SEGMENTED_ATTN",
        "whether segments pay depends on the length of the contexts, which is not known here",
    ),
)

LAST_RESORT_AUTOMATIC = False
