"""Where other rule sets depart from the CUDA platform's catalog and preferences.

Conditions and orders that only another rule set has stand in `departures`.
"""

from __future__ import annotations

from typing import Any

from attnplat.backends.backend import Rule
from attnplat.backends.limits import Cases, MultipleOf, OneOf
from attnplat.backends.portable.catalog import FP8_KV
from attnplat.backends.portable.predicates import is_vision
from attnplat.config.names import KVCacheDtype, Operation
from attnplat.platforms.cuda import departures as they
from attnplat.platforms.cuda import flashinfer as fi
from attnplat.platforms.cuda.multi_head import FI_KV, majors
from attnplat.platforms.cuda.sparse import (
    ENGINE_KERNELS,
    FLASHINFER_MLA_SPARSE_SM90,
    FLASHINFER_MLA_SPARSE_SM120,
)
from attnplat.platforms.differences import Difference

_SELECTOR = "vLLM 0.33, CUDA platform, selector"
_CLASSES = "vLLM 0.33, what its backend classes answer"
_VISION = "vLLM 0.33, vision selector"
_PREFILL = "vLLM 0.33, MLA prefill selector"
_V4 = "vLLM 0.33, DeepSeek-V4 model code"
_MINIMAX = "vLLM 0.33, MiniMax-M3 model code"
_INDEXER = "vLLM 0.33, sparse indexer"

_Names = str | tuple[str, ...] | None


def _differs(
    backend: _Names,
    subject: str,
    theirs: Any,
    ours: str,
    because: str,
    source: str = _CLASSES,
    operation: Operation | None = None,
) -> Difference:
    return Difference(
        backend=backend,
        subject=subject,
        theirs=theirs,
        ours=ours,
        because=because,
        source=source,
        operation=operation,
    )


def _says(backend: _Names, code: str, when: Any, ours: str, because: str) -> Difference:
    """A combination that they refuse and attnplat does not, or not so."""
    return _differs(backend, f"rule.{code}", Rule(code, when, ours), ours, because)


def _never_says(backend: _Names, code: str, ours: str, because: str) -> Difference:
    """A combination that attnplat refuses and they do not."""
    return _differs(backend, f"rule.{code}", None, ours, because)


_ACCEPTANCE = (
    _differs(
        None,
        "accepts.foreign_platform",
        they.is_left_to_the_selector,
        "a backend of another vendor is refused",
        "its kernels cannot run here",
        _SELECTOR,
    ),
    _differs(
        None,
        "accepts.cache_asked_of_all",
        True,
        "a layer without a KV cache is not asked for the cache's format",
        "a wish about the cache says nothing of layers that have none",
        _SELECTOR,
    ),
    _differs(
        None,
        "accepts.parts_apart",
        True,
        "a latent layer is served only if its prefill and indexer are",
        "otherwise the model fails when it is built",
        _SELECTOR,
    ),
    _differs(
        None,
        "accepts.request_unvalidated",
        is_vision,
        "a request is checked for vision layers as for all others",
        "a head size or dtype that its kernels lack fails at the first image",
        _VISION,
    ),
    _differs(
        None,
        "accepts.request_ignored",
        they.is_deepseek_v4_family,
        "a request is honoured or refused",
        "a request is never dropped silently",
        _V4,
    ),
    _differs(
        None,
        "accepts.row_unvalidated",
        they.is_chosen_by_model_code,
        "every backend of a row is checked",
        "a model's own kernels have limits and packages like all others",
        _V4,
    ),
)

_ORDER = (
    _differs(
        ("TORCH_SDPA", "REFERENCE"),
        "exists",
        {"TORCH_SDPA": is_vision, "REFERENCE": False},
        "serve every layer: torch behind all fused kernels, the reference on request",
        "torch's own attention runs where nothing else does, and a right answer can be compared to",
        _SELECTOR,
    ),
    _differs(
        None,
        "order",
        they.V4_ROWS,
        "DeepSeek-V4's row is tried in order, and a request by name is one of its own backends",
        "a name that means another backend would be replaced silently",
        _V4,
    ),
    _differs(
        None,
        "order",
        they.ATTENTION_ROWS,
        "TURBOQUANT is a candidate for its own caches only",
        "that it reads no other would be said of every layer",
        _SELECTOR,
    ),
    _differs(
        None,
        "order",
        they.LATENT_ROWS,
        "dense and sparse latent layers have rows of their own",
        "a backend of the other kind can never be chosen, and its refusals are noise",
        _SELECTOR,
    ),
    _differs(
        None,
        "order",
        they.BLOCK_ROWS,
        "block-sparse layers have a row",
        "no backend of ordinary attention reads the chosen blocks alone",
        _SELECTOR,
    ),
    _differs(
        None,
        "order",
        they.MINIMAX_ROWS,
        "MiniMax-M3's row is tried in order",
        "what each backend takes is declared once, beside it",
        _MINIMAX,
    ),
    _differs(
        None,
        "order",
        they.NARROW_ROWS,
        "Triton's kernels need no FlashAttention beside them",
        "asking FlashAttention for its version must not fail where it is not installed",
        "vLLM 0.33, attention with values of another width",
    ),
    _differs(
        None,
        "order",
        they.VISION_ROWS,
        "Triton comes before torch on every device",
        "where it takes the layer it is the faster",
        _VISION,
    ),
)

_TRITON = ("TRITON_ATTN", "TRITON_ATTN_DIFFKV", "TRITON_MLA")
_COMPOSITES = ("TRITON_FLASH_ATTN", "TRITON_FLASHINFER")
_ONE_LAYOUT = "a run has one layout, so the model would fail to start"
_PER_LAYER = "in a model of mixed heads one head size would judge every layer"
_TOLD_ONCE = "one fact is told once"

_MULTI_HEAD = (
    _differs(
        (*_TRITON, *_COMPOSITES, "FLEX_ATTENTION", "TURBOQUANT"),
        "takes.dtype",
        they.everywhere,
        "bfloat16 where the device multiplies it",
        "devices before compute capability 8.0 do not",
    ),
    _differs(
        (*_TRITON, "TRITON_FLASHINFER"),
        "takes.kv_cache_dtype",
        they.everywhere,
        "fp8_e4m3 where Triton converts it",
        "it does so from compute capability 8.9 on",
    ),
    _differs(
        "FLASHINFER",
        "takes.kv_cache_dtype",
        Cases(
            (fi.takes_nvfp4, OneOf(*FI_KV, KVCacheDtype.NVFP4)),
            (
                they.trtllm_is_there,
                OneOf(
                    *FI_KV,
                    KVCacheDtype.NVFP4,
                    KVCacheDtype.NVFP4_4OVER6,
                    KVCacheDtype.NVFP4_DS_MLA,
                ),
            ),
            otherwise=OneOf(*FI_KV),
        ),
        "nvfp4 where the TRT-LLM kernels are in use, and nvfp4_ds_mla for latent layers only",
        "they match by prefix, and forget that the user can rule those kernels out",
        operation=Operation.MHA,
    ),
    _never_says(
        "FLASHINFER",
        "layout_vs_turboquant",
        "refused beside TURBOQUANT's layers where the layouts have none in common",
        _ONE_LAYOUT,
    ),
    _never_says(
        ("ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN"),
        "layout_vs_turboquant",
        "a backend of another vendor is refused",
        "its kernels cannot run here",
    ),
    _differs(
        "HPC_ATTN",
        "requires",
        (ENGINE_KERNELS,),
        "the package that has the kernels must be installed",
        they.UNCHECKED,
    ),
)

_FA = ("FLASH_ATTN", "FLASH_ATTN_DIFFKV")

_FLASH_ATTENTION = (
    _never_says(
        _FA,
        "fa_version_forced",
        "a forced version that cannot serve the layer is refused",
        "a version is a request, and a request is never replaced silently",
    ),
    _never_says(
        _FA,
        "fa_version_head_size",
        "heads beyond what the version serving the layer takes are refused",
        "the class asks whether version 4 is installed, and version 2 then gets the layer",
    ),
    _never_says(
        _FA,
        "fa_version_sinks",
        "sinks are refused where the layer falls to version 2",
        "the class asks for the version without the head size, and version 2 has no sinks",
    ),
    _never_says(
        _FA,
        "fa_version_rswa",
        "windows that are reset after a prefix get version 4, or are refused",
        "the other versions have no such mask; only one model's code asks for it there",
    ),
    _never_says(
        _FA,
        "fa4_block_size",
        "each layer's block size is judged by its own head size and cache",
        _PER_LAYER,
    ),
    _differs(
        _FA,
        "takes.block_size",
        Cases(
            (they.fa_has_model_of_512, MultipleOf(64)),
            (they.fa_has_model_of_256, MultipleOf(128)),
            otherwise=MultipleOf(16),
        ),
        "a multiple of 16, unless this layer's own kernel takes less",
        _PER_LAYER,
    ),
    _says(
        _FA,
        "fa_sink_below_sm90",
        they.fa_sinks_before_hopper,
        "sinks are refused once, as a feature",
        _TOLD_ONCE,
    ),
    _says(
        _FA,
        "fa_fp8_kv_version",
        they.fa_reads_no_such_cache,
        "asked of fp8 caches that some version here reads",
        "any other cache is refused as such",
    ),
    _says(
        _FA,
        "fa_mm_prefix_needs_fa4",
        they.fa_spans_without_4,
        "asked where version 4 runs on the device",
        "elsewhere image spans are refused as a feature",
    ),
    _says(
        "TRITON_FLASH_ATTN",
        "via_FLASH_ATTN/fa_causal_route_version",
        they.fa_causal_half_is_2,
        "compute capability 11 gets version 4 by default",
        "version 4 is written for Blackwell",
    ),
    *(
        _differs(
            _FA,
            f"feature.{feature}",
            they.fa_is_3_or_4,
            "compute capability 11 gets version 4 by default",
            "version 4 is written for Blackwell, and version 2 lacks this",
        )
        for feature in ("sinks", "per_head_quant_scales")
    ),
)

_DENSE = ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA")

_LATENT = (
    _differs(
        (*_DENSE, "TRITON_MLA"),
        "feature.pcp",
        True,
        "prefill context parallelism is refused",
        "no dense latent kernel merges parts of a prefill; their yes is inherited",
        operation=Operation.MLA,
    ),
    _says(
        "FLASHINFER_MLA",
        "fi_mla_nope_dim",
        they.lacks_nope,
        "a layer without an un-rotated part is refused as no latent layer",
        _TOLD_ONCE,
    ),
    _says(
        "TOKENSPEED_MLA",
        "tokenspeed_dims",
        they.lacks_nope,
        "a layer without latent sizes is refused as no latent layer",
        _TOLD_ONCE,
    ),
    _differs(
        "FLASHMLA",
        "on.capability",
        majors(9, 10),
        "Hopper only",
        "its dense kernels exist for Hopper alone",
    ),
    _says(
        "FLASHMLA",
        "flashmla_sparse_device",
        they.is_sparse_off_hopper_and_blackwell,
        "sparse layers are refused as such",
        _TOLD_ONCE,
    ),
    _says(
        "FLASHMLA",
        "flashmla_dense_hopper_only",
        they.is_dense_off_hopper,
        "other devices are refused as such",
        _TOLD_ONCE,
    ),
)

_V4_NAMES = ("FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV41")
_AUTO_BF16 = (KVCacheDtype.AUTO, KVCacheDtype.BFLOAT16)
_MSA = ("CUTLASS_MSA", "TRITON_MSA")

_SPARSE = (
    _differs(
        ("FLASHINFER_MLA_SPARSE", *_V4_NAMES),
        "requires",
        (ENGINE_KERNELS,),
        "the package that has the kernels must be installed",
        they.UNCHECKED,
    ),
    *(
        _differs(
            backend.name,
            "requires",
            (ENGINE_KERNELS, *backend.requires),
            "FlashInfer's kernels are called directly",
            "no engine's build is needed beside the package",
        )
        for backend in (FLASHINFER_MLA_SPARSE_SM90, FLASHINFER_MLA_SPARSE_SM120)
    ),
    _says(
        ("FLASHINFER_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"),
        "no_index_topk",
        they.lacks_topk,
        "a layer that does not tell its number of keys is taken",
        "unknown is no refusal; a layer that is not sparse is refused as such",
    ),
    _says(
        "FLASH_ATTN_MLA_SPARSE_FA4",
        "fa4_sparse_topk_mod128",
        they.lacks_topk,
        "a layer that does not tell its number of keys is taken",
        "unknown is no refusal; a layer that is not sparse is refused as such",
    ),
    _differs(
        (
            *_V4_NAMES,
            "FLASHMLA_SPARSE_DSV4",
            "FLASHMLA_SPARSE_DSV41",
            "FLASHMLA_MEGA_ATTN_DSV41",
        ),
        "feature.sliding_window",
        False,
        "a layer's window is told like any other",
        "the model has windowed layers; their code passes the window beside the selector",
    ),
    _differs(
        "FLASHMLA_SPARSE",
        "takes.kv_cache_dtype",
        OneOf(*_AUTO_BF16, KVCacheDtype.FP8, KVCacheDtype.FP8_DS_MLA, KVCacheDtype.NVFP4_DS_MLA),
        "fp8_e4m3 as fp8",
        "the two are one format, and its rows are packed the same",
    ),
    _differs(
        "FLASHINFER_MLA_SPARSE_SM120",
        "takes.kv_cache_dtype",
        OneOf(KVCacheDtype.AUTO, *FP8_KV, KVCacheDtype.FP8_DS_MLA),
        "fp8 rows only; auto means the activations' dtype and is refused like bfloat16",
        "a cache that nobody asked to be quantised must not be",
    ),
    _differs(
        ("MINIMAX_M3_SPARSE", *_MSA),
        "takes.kv_cache_dtype",
        OneOf(KVCacheDtype.BFLOAT16, *FP8_KV, KVCacheDtype.FP8_E5M2),
        "auto too, which is the activations' dtype, and what the kernels read",
        "auto has one meaning for every backend",
    ),
    _differs(
        _MSA,
        "on.capability",
        None,
        "datacenter Blackwell only",
        "MSA's kernels exist for it alone; their class asks for no device",
    ),
    _differs(
        (*_MSA, "MSA_INDEXER"),
        "requires",
        (),
        "the build that has the kernels must be installed",
        they.UNCHECKED,
        _MINIMAX,
    ),
)

_BESIDE = (
    _differs(
        "FLASH_ATTN",
        "on.capability",
        None,
        "from compute capability 8.0 on",
        "no version of FlashAttention runs on older devices",
        _PREFILL,
        Operation.MLA_PREFILL,
    ),
    _differs(
        ("FLASHINFER", "TRTLLM_RAGGED", "TOKENSPEED_MLA"),
        "feature.batch_invariance",
        True,
        "refused in a batch-invariant run",
        "its schedule depends on the batch",
        _PREFILL,
        Operation.MLA_PREFILL,
    ),
    _differs(
        "TRITON_INDEXER",
        "takes.indexer_kv_dtype",
        OneOf("fp8"),
        "a bf16 index cache on every device, and fp8 where Triton converts it",
        "bf16 needs no scales, and Triton converts from compute capability 8.9 on",
        _INDEXER,
    ),
    _differs(
        ("TRITON_INDEXER", "DEEPGEMM_INDEXER"),
        "takes.sparse_logits",
        None,
        "logits of chosen blocks alone are refused where no kernel computes them",
        "a wish is honoured or refused",
        _INDEXER,
    ),
    _differs(
        "DEEPGEMM_INDEXER",
        "requires",
        (),
        "the package that has the kernels must be installed",
        they.UNCHECKED,
        _INDEXER,
    ),
)

DIFFERENCES: tuple[Difference, ...] = (
    *_ACCEPTANCE,
    *_ORDER,
    *_MULTI_HEAD,
    *_FLASH_ATTENTION,
    *_LATENT,
    *_SPARSE,
    *_BESIDE,
)
