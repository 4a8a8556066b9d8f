"""What the CUDA platform prefers, and why: taste."""

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
from attnplat.backends.portable.predicates import (
    has_narrower_values,
    has_quantised_cache,
    is_vision,
)
from attnplat.platforms.cuda import flash_attention, rules
from attnplat.platforms.cuda.multi_head import majors
from attnplat.platforms.selection import ByName, Preference, Ranked

_SLOW = "it serves everything, slowly: chosen on request only"
_LAST = ("TORCH_SDPA", "REFERENCE")
_NEVER = {"REFERENCE": _SLOW}
_BLACKWELL, _CONSUMER_BLACKWELL = {"capability": majors(10)}, {"capability": majors(12)}
_HOPPER = {"capability": majors(9)}

# Multi-head --------------------------------------------------------------------------------

VISION = Preference(
    serves=MHA,
    when=is_vision,
    order=("FLASH_ATTN", "TRITON_ATTN", *_LAST, "FLASHINFER"),
    because="without a cache FlashAttention leads, and Triton takes the head sizes that it lacks",
    never_first={**_NEVER, "FLASHINFER": "its paged kernels need a cache, which towers lack"},
)
NARROW_VALUES = Preference(
    serves=MHA,
    when=has_narrower_values,
    order=(
        Ranked("FLASH_ATTN_DIFFKV", flash_attention.serves_narrow_values),
        "TRITON_ATTN_DIFFKV",
        "FLEX_ATTENTION",
        *_LAST,
    ),
    because="FlashAttention 3 and 4 lead on values of another width, then Triton; others lack them",
    never_first=_NEVER,
)
BLACKWELL_FORWARD = Preference(
    serves=MHA,
    on=_BLACKWELL,
    when=rules.is_causal,
    order=(
        Ranked("TRITON_FLASHINFER", rules.has_spans),
        "FLASHINFER",
        "FLASH_ATTN",
        "TRITON_ATTN",
        "FLEX_ATTENTION",
        Ranked("TURBOQUANT", rules.keeps_turboquant),
        *_LAST,
    ),
    because="on datacenter Blackwell FlashInfer's TRT-LLM kernels lead, then FlashAttention; "
    "Triton takes every mask, and torch what is left",
    never_first=_NEVER,
)
ORDINARY = Preference(
    serves=MHA,
    order=(
        Ranked("TRITON_FLASH_ATTN", rules.has_spans_on_hopper),
        "FLASH_ATTN",
        "FLASHINFER",
        "TRITON_ATTN",
        "FLEX_ATTENTION",
        Ranked("TURBOQUANT", rules.keeps_turboquant),
        *_LAST,
    ),
    because="FlashAttention leads where it runs, FlashInfer adds cache formats, Triton takes "
    "every mask, and torch what is left",
    never_first=_NEVER,
)

# Latent ------------------------------------------------------------------------------------

BLACKWELL_LATENT = Preference(
    serves=MLA,
    on=_BLACKWELL,
    order=("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "TRITON_MLA", *_LAST),
    because="on datacenter Blackwell FlashInfer's TRT-LLM decode leads; Triton takes every size",
    never_first=_NEVER,
)
HOPPER_LATENT = Preference(
    serves=MLA,
    on=_HOPPER,
    order=("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA", *_LAST),
    because="FlashAttention 3 decodes any query length at once, FlashMLA adds fp8 caches, and "
    "Triton takes every size",
    never_first=_NEVER,
)
ORDINARY_LATENT = Preference(
    serves=MLA,
    order=("TRITON_MLA", *_LAST),
    because="Triton's decode is the one fused kernel for this device",
    never_first=_NEVER,
)

# Sparse latent -----------------------------------------------------------------------------

V4 = Preference(
    serves=SPARSE_MLA,
    when=rules.is_deepseek_v4,
    order=("FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4", *_LAST),
    never_first=_NEVER,
    because="FlashMLA was written with the model; consumer Blackwell has FlashInfer's kernels only",
)
V41 = Preference(
    serves=SPARSE_MLA,
    when=rules.is_deepseek_v41,
    order=(
        "FLASHMLA_MEGA_ATTN_DSV41",
        "FLASHMLA_SPARSE_DSV41",
        "FLASHINFER_MLA_SPARSE_DSV41",
        *_LAST,
    ),
    never_first=_NEVER,
    because="the fused kernel leads where heads fall into its groups, then FlashMLA's",
)
BLACKWELL_SPARSE_QUANTISED = Preference(
    serves=SPARSE_MLA,
    on=_BLACKWELL,
    when=has_quantised_cache,
    order=("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE"),
    because="FlashInfer's TRT-LLM kernels read fp8 rows fastest; FlashMLA reads the packed ones",
)
BLACKWELL_SPARSE_FEW_HEADS = Preference(
    serves=SPARSE_MLA,
    on=_BLACKWELL,
    when=rules.has_few_heads,
    order=("FLASH_ATTN_MLA_SPARSE_FA4", "FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE", *_LAST),
    because="FlashMLA pads to 64 heads, which wastes most of its work on 16 or fewer",
    never_first=_NEVER,
)
BLACKWELL_SPARSE = Preference(
    serves=SPARSE_MLA,
    on=_BLACKWELL,
    order=("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", *_LAST),
    because="FlashMLA leads on plain rows with many heads, and FlashInfer takes float16",
    never_first=_NEVER,
)
CONSUMER_SPARSE = Preference(
    serves=SPARSE_MLA,
    on=_CONSUMER_BLACKWELL,
    order=("FLASHINFER_MLA_SPARSE_SM120", *_LAST),
    because="FlashInfer has the one sparse decode for consumer Blackwell",
    never_first=_NEVER,
)
HOPPER_SPARSE_512 = Preference(
    serves=SPARSE_MLA,
    on=_HOPPER,
    when=rules.has_rows_of_512,
    order=("FLASHINFER_MLA_SPARSE_SM90", "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", *_LAST),
    because="FlashInfer leads on rows of 512, FlashAttention 3 takes float16, FlashMLA packed fp8",
    never_first=_NEVER,
)
HOPPER_SPARSE = Preference(
    serves=SPARSE_MLA,
    on=_HOPPER,
    order=("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90", *_LAST),
    because="FlashAttention 3 leads on plain rows; FlashMLA adds packed fp8 ones",
    never_first=_NEVER,
)
ORDINARY_SPARSE = Preference(
    serves=SPARSE_MLA,
    order=_LAST,
    because="no fused kernel over chosen rows exists for this device",
    never_first=_NEVER,
)

# Beside attention --------------------------------------------------------------------------

BLACKWELL_PREFILL_WIDE = Preference(
    serves=MLA_PREFILL,
    on=_BLACKWELL,
    when=rules.has_wide_dims,
    order=("TRTLLM_RAGGED", "FLASH_ATTN", "FLASHINFER", "TOKENSPEED_MLA", *_LAST),
    because="FlashAttention 4 has no kernel for heads of 256 with narrower parts",
    never_first={
        **_NEVER,
        "FLASHINFER": "it has no kernel for these sizes",
        "TOKENSPEED_MLA": "it has no kernel for these sizes",
    },
)
BLACKWELL_PREFILL = Preference(
    serves=MLA_PREFILL,
    on=_BLACKWELL,
    order=("FLASH_ATTN", "TRTLLM_RAGGED", "FLASHINFER", "TOKENSPEED_MLA", *_LAST),
    because="FlashAttention 4 leads on datacenter Blackwell, TRT-LLM's ragged kernels follow",
    never_first={
        **_NEVER,
        "FLASHINFER": "it takes what TRTLLM_RAGGED takes, from the same package",
    },
)
PREFILL = Preference(
    serves=MLA_PREFILL,
    order=("FLASH_ATTN", *_LAST),
    because="expanded latent attention is ordinary attention with narrower values",
    never_first=_NEVER,
)
MINIMAX = Preference(
    serves=BLOCK_SPARSE,
    when=rules.is_minimax_m3,
    order=(
        Ranked("CUTLASS_MSA", rules.decodes_with_cutlass),
        "TRITON_MSA",
        "MINIMAX_M3_SPARSE",
    ),
    because="MSA's kernels were written with the model; Triton's run on every device",
)
BLOCKS = Preference(
    serves=BLOCK_SPARSE,
    order=("TRITON_MSA", "MINIMAX_M3_SPARSE", "STEP5_DSA"),
    because="the head size tells MiniMax-M3 (128) from Step5 (192)",
)
BLOCK_INDEXER = Preference(
    serves=INDEXER,
    when=rules.is_minimax_m3_indexer,
    order=("MSA_INDEXER", "TRITON_BLOCK_INDEXER"),
    because="MSA's scorer leads for 16 blocks on datacenter Blackwell",
)
SCORER = Preference(
    serves=INDEXER,
    order=("DEEPGEMM_INDEXER", "TRITON_INDEXER"),
    because="DeepGEMM's scorer leads where it runs, Triton's takes every device",
)
RECURRENT = Preference(
    serves=STATE,
    order=("MAMBA1_ATTN", "MAMBA2_ATTN", "SHORT_CONV_ATTN", "LINEAR_ATTN", "GDN_ATTN"),
    because="each recurrence has one kernel",
)

PREFERENCES: tuple[Preference, ...] = (
    VISION,
    NARROW_VALUES,
    BLACKWELL_FORWARD,
    ORDINARY,
    BLACKWELL_LATENT,
    HOPPER_LATENT,
    ORDINARY_LATENT,
    V4,
    V41,
    BLACKWELL_SPARSE_QUANTISED,
    BLACKWELL_SPARSE_FEW_HEADS,
    BLACKWELL_SPARSE,
    CONSUMER_SPARSE,
    HOPPER_SPARSE_512,
    HOPPER_SPARSE,
    ORDINARY_SPARSE,
    BLACKWELL_PREFILL_WIDE,
    BLACKWELL_PREFILL,
    PREFILL,
    MINIMAX,
    BLOCKS,
    BLOCK_INDEXER,
    SCORER,
    RECURRENT,
)

BY_NAME: tuple[ByName, ...] = (
    ByName("B12X", "its kernels are young and take few formats"),
    ByName("HPC_ATTN", "it takes one head size and no window, and FLASH_ATTN takes both"),
)

LAST_RESORT_AUTOMATIC = False
