"""Where other rule sets depart from the CUDA platform's catalog and preferences.

Conditions that only another rule set has stand in `departures`, beside this table.
"""

from __future__ import annotations

from typing import Any

from attnplat.backends.backend import Rule
from attnplat.backends.limits import Cases, Limit, MultipleOf, OneOf
from attnplat.backends.portable.catalog import (
    FP32,
    FP8_KV,
    HALF_DTYPES,
    TRITON_ATTN,
    TRITON_ATTN_DIFFKV,
    TRITON_MLA,
)
from attnplat.backends.portable.predicates import is_vision
from attnplat.config.frozen import FrozenMap
from attnplat.config.names import Dtype, KVCacheDtype, Operation
from attnplat.platforms.cuda import departures as they
from attnplat.platforms.cuda import flashinfer as fi
from attnplat.platforms.cuda import sparse
from attnplat.platforms.cuda.multi_head import FI_KV, majors
from attnplat.platforms.differences import Difference

_SELECTOR = "vLLM 0.33, CUDA platform, selector"
_CLASSES = "vLLM 0.33, capability answers of the backend classes"
_VISION = "vLLM 0.33, vision selector"
_PREFILL = "vLLM 0.33, MLA prefill selector"
_V4 = "vLLM 0.33, DeepSeek-V4 model code"
_MINIMAX = "vLLM 0.33, MiniMax-M3 model code"
_INDEXER = "vLLM 0.33, sparse indexer"

_AUTO_BF16 = (KVCacheDtype.AUTO, KVCacheDtype.BFLOAT16)
ANY_DTYPE = OneOf(Dtype.FLOAT16, Dtype.BFLOAT16, FP32)


def _differs(
    backend: str | None,
    subject: str,
    theirs: Any,
    ours: str,
    because: str,
    source: str = _CLASSES,
    *,
    where: Limit | None = None,
    operation: Operation | None = None,
) -> Difference:
    return Difference(
        backend=backend,
        subject=subject,
        theirs=theirs,
        ours=ours,
        because=because,
        source=source,
        where=FrozenMap() if where is None else FrozenMap({"capability": where}),
        operation=operation,
    )


def _says(backend: str, code: str, when: Any, ours: str, because: str) -> Difference:
    """A combination that they refuse and attnplat does not, or not so."""
    return _differs(backend, f"rule.{code}", Rule(code, when, ours), ours, because)


def _never_says(backend: str, code: str, ours: str, because: str) -> Difference:
    """A combination that attnplat refuses and they do not."""
    return _differs(backend, f"rule.{code}", None, ours, because)


ACCEPTANCE = (
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
        "accepts.automatic_unvalidated",
        they.is_chosen_by_model_code,
        "every backend of a row is checked",
        "a model's own kernels have limits and packages like all others",
        _V4,
    ),
)

ORDER = (
    _differs(
        "TORCH_SDPA",
        "exists",
        is_vision,
        "serves every layer, behind all fused kernels",
        "torch's own attention runs where nothing else does",
        _SELECTOR,
    ),
    _differs(
        "REFERENCE",
        "exists",
        False,
        "serves every layer on request, slowly",
        "a right answer is there on every device",
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
        (they.LATENT_CONSUMER, *they.LATENT_BLACKWELL, *they.LATENT_ORDINARY),
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
FLASH_ATTENTION = (
    _never_says(
        "FLASH_ATTN",
        "fa_version_forced",
        "a forced version that cannot serve the layer is refused",
        "a version is a request, and a request is never replaced silently",
    ),
    _never_says(
        "FLASH_ATTN",
        "fa_version_head_size",
        "heads beyond what the version serving the layer takes are refused",
        "the class asks whether version 4 is installed, and version 2 then gets the layer",
    ),
    _never_says(
        "FLASH_ATTN",
        "fa_version_sinks",
        "sinks are refused where the layer falls to version 2",
        "the class asks for the version without the head size, and version 2 has no sinks",
    ),
    _never_says(
        "FLASH_ATTN",
        "fa4_block_size",
        "each layer's block size is judged by its own head size and cache",
        "in a model of mixed heads one head size would judge every layer",
    ),
    _differs(
        "FLASH_ATTN",
        "takes.block_size",
        Cases(
            (they.fa_has_model_of_512, MultipleOf(64)),
            (they.fa_has_model_of_256, MultipleOf(128)),
            otherwise=MultipleOf(16),
        ),
        "a multiple of 16, unless this layer's own kernel takes less",
        "in a model of mixed heads one head size would judge every layer",
    ),
    _says(
        "FLASH_ATTN",
        "fa_sink_below_sm90",
        they.fa_sinks_before_hopper,
        "sinks are refused once, as a feature",
        "one fact is told once",
    ),
    _says(
        "FLASH_ATTN",
        "fa_fp8_kv_version",
        they.fa_reads_no_such_cache,
        "asked of fp8 caches that some version here reads",
        "any other cache is refused as such",
    ),
    _says(
        "FLASH_ATTN",
        "fa_mm_prefix_needs_fa4",
        they.fa_spans_without_4,
        "asked where version 4 runs on the device",
        "elsewhere image spans are refused as a feature",
    ),
    *(
        _differs(
            "FLASH_ATTN",
            f"feature.{feature}",
            they.fa_is_3_or_4,
            "compute capability 11 gets version 4 by default",
            "version 4 is written for Blackwell, and version 2 lacks this",
        )
        for feature in ("sinks", "per_head_quant_scales")
    ),
)

_TRITON_CONVERTS = "Triton converts fp8_e4m3 from compute capability 8.9 on"
_TRITON_MULTIPLIES = "devices before compute capability 8.0 do not multiply bfloat16"

TRITON = (
    *(
        _differs(
            backend,
            "takes.dtype",
            theirs,
            "bfloat16 where the device multiplies it",
            _TRITON_MULTIPLIES,
        )
        for backend, theirs in (
            ("TRITON_ATTN", ANY_DTYPE),
            ("TRITON_ATTN_DIFFKV", ANY_DTYPE),
            ("FLEX_ATTENTION", ANY_DTYPE),
            ("TRITON_MLA", HALF_DTYPES),
            ("TURBOQUANT", HALF_DTYPES),
        )
    ),
    *(
        _differs(
            backend.name,
            "takes.kv_cache_dtype",
            they.everywhere(backend.takes["kv_cache_dtype"]),
            "fp8_e4m3 where Triton converts it",
            _TRITON_CONVERTS,
        )
        for backend in (TRITON_ATTN, TRITON_ATTN_DIFFKV, TRITON_MLA)
    ),
)

FLASHINFER = (
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
        "a run has one layout, so the model would fail to start",
    ),
)

FOREIGN = (
    *(
        _never_says(
            backend,
            "layout_vs_turboquant",
            "a backend of another vendor is refused",
            "its kernels cannot run here",
        )
        for backend in ("ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN")
    ),
    _differs(
        "CPU_ATTN",
        "takes.kv_cache_dtype",
        OneOf(*FI_KV),
        "a backend of another platform is refused",
        "its kernels cannot run here",
    ),
)

COMPOSITES = (
    _never_says(
        "TRITON_FLASHINFER",
        "via_FLASHINFER/layout_vs_turboquant",
        "refused beside TURBOQUANT's layers where the layouts have none in common",
        "a run has one layout, so the model would fail to start",
    ),
    *(
        _differs(
            backend,
            "takes.dtype",
            HALF_DTYPES,
            "bfloat16 where the device multiplies it",
            _TRITON_MULTIPLIES,
        )
        for backend in ("TRITON_FLASH_ATTN", "TRITON_FLASHINFER")
    ),
    _says(
        "TRITON_FLASH_ATTN",
        "via_FLASH_ATTN/fa_causal_route_version",
        they.fa_causal_half_is_2,
        "compute capability 11 gets version 4 by default",
        "version 4 is written for Blackwell",
    ),
)

_DENSE = ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA")

LATENT = (
    *(
        _differs(
            backend,
            "feature.pcp",
            True,
            "prefill context parallelism is refused",
            "no dense latent kernel merges parts of a prefill; their yes is inherited",
            operation=Operation.MLA,
        )
        for backend in (*_DENSE, "TRITON_MLA")
    ),
    _says(
        "FLASHINFER_MLA",
        "fi_mla_nope_dim",
        they.lacks_nope,
        "a layer without an un-rotated part is refused as no latent layer",
        "one fact is told once",
    ),
    _says(
        "TOKENSPEED_MLA",
        "tokenspeed_dims",
        they.lacks_nope,
        "a layer without latent sizes is refused as no latent layer",
        "one fact is told once",
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
        "one fact is told once",
    ),
    _says(
        "FLASHMLA",
        "flashmla_dense_hopper_only",
        they.is_dense_off_hopper,
        "other devices are refused as such",
        "one fact is told once",
    ),
)

_UNCHECKED = "a kernel that is not there fails at the first step of a model, not at the choice"

SPARSE = (
    *(
        _differs(
            backend,
            "requires",
            (sparse.ENGINE_KERNELS,),
            "the package that has the kernels must be installed",
            _UNCHECKED,
            operation=operation,
        )
        for backend, operation in (
            ("FLASHINFER_MLA_SPARSE", None),
            ("HPC_ATTN", None),
            ("FLASHINFER_MLA_SPARSE_DSV4", None),
            ("FLASHINFER_MLA_SPARSE_DSV41", None),
        )
    ),
    *(
        _differs(
            backend.name,
            "requires",
            (sparse.ENGINE_KERNELS, *backend.requires),
            "FlashInfer's kernels are called directly",
            "no engine's build is needed beside the package",
        )
        for backend in (sparse.FLASHINFER_MLA_SPARSE_SM90, sparse.FLASHINFER_MLA_SPARSE_SM120)
    ),
    *(
        _says(
            backend,
            code,
            they.lacks_topk,
            "a layer that does not tell its number of keys is taken",
            "unknown is no refusal; a layer that is not sparse is refused as such",
        )
        for backend, code in (
            ("FLASHINFER_MLA_SPARSE", "no_index_topk"),
            ("FLASH_ATTN_MLA_SPARSE", "no_index_topk"),
            ("FLASHINFER_MLA_SPARSE_SM120", "no_index_topk"),
            ("FLASH_ATTN_MLA_SPARSE_FA4", "fa4_sparse_topk_mod128"),
        )
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
)

_BLOCK_KV = OneOf(KVCacheDtype.BFLOAT16, *FP8_KV, KVCacheDtype.FP8_E5M2)

BLOCKS = (
    *(
        _differs(
            backend,
            "takes.kv_cache_dtype",
            _BLOCK_KV,
            "auto too, which is the activations' dtype, and what the kernels read",
            "auto has one meaning for every backend",
        )
        for backend in ("MINIMAX_M3_SPARSE", "CUTLASS_MSA", "TRITON_MSA")
    ),
    *(
        difference
        for backend in ("CUTLASS_MSA", "TRITON_MSA")
        for difference in (
            _differs(
                backend,
                "on.capability",
                None,
                "datacenter Blackwell only",
                "MSA's kernels exist for it alone; their class asks for no device",
            ),
            _differs(
                backend,
                "requires",
                (),
                "the build that has the kernels must be installed",
                _UNCHECKED,
            ),
        )
    ),
)

BESIDE = (
    _differs(
        "FLASH_ATTN",
        "on.capability",
        None,
        "from compute capability 8.0 on",
        "no version of FlashAttention runs on older devices",
        _PREFILL,
        operation=Operation.MLA_PREFILL,
    ),
    *(
        _differs(
            backend,
            "feature.batch_invariance",
            True,
            "refused in a batch-invariant run",
            "its schedule depends on the batch",
            _PREFILL,
            operation=Operation.MLA_PREFILL,
        )
        for backend in ("FLASHINFER", "TRTLLM_RAGGED", "TOKENSPEED_MLA")
    ),
    _differs(
        "TRITON_INDEXER",
        "takes.indexer_kv_dtype",
        OneOf("fp8"),
        "a bf16 index cache on every device, and fp8 where Triton converts it",
        "bf16 needs no scales; " + _TRITON_CONVERTS,
        _INDEXER,
    ),
    _differs(
        "TRITON_INDEXER",
        "takes.sparse_logits",
        None,
        "logits of chosen blocks alone are refused",
        "its kernel scores every key",
        _INDEXER,
    ),
    _differs(
        "DEEPGEMM_INDEXER",
        "requires",
        (),
        "the package that has the kernels must be installed",
        _UNCHECKED,
        _INDEXER,
    ),
    _never_says(
        "DEEPGEMM_INDEXER",
        "indexer_sparse_logits",
        "sparse logits are refused where no kernel computes them",
        "a wish is honoured or refused",
    ),
    _differs(
        "MSA_INDEXER",
        "requires",
        (),
        "the build that has the kernels must be installed",
        _UNCHECKED,
        _MINIMAX,
    ),
)

DIFFERENCES: tuple[Difference, ...] = (
    *ACCEPTANCE,
    *ORDER,
    *FLASH_ATTENTION,
    *TRITON,
    *FLASHINFER,
    *FOREIGN,
    *COMPOSITES,
    *LATENT,
    *SPARSE,
    *BLOCKS,
    *BESIDE,
)
