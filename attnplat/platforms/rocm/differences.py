"""Where other rule sets depart from the ROCM platform's catalog and preferences.

Conditions that only another rule set has stand in `departures`, beside this table.
"""

from __future__ import annotations

from typing import Any

from attnplat.backends.backend import Rule
from attnplat.backends.limits import Between, Either, OneOf
from attnplat.backends.portable.catalog import FP8_KV
from attnplat.backends.portable.predicates import is_vision
from attnplat.config.names import AttnType, KVCacheDtype, Operation
from attnplat.platforms.differences import Difference
from attnplat.platforms.rocm import departures as they
from attnplat.platforms.rocm import rules

_SELECTOR = "vLLM 0.33, ROCm platform, selector"
_ROWS = "vLLM 0.33, ROCm platform, recorded decisions"
_VISION = "vLLM 0.33, ROCm platform, vision selector"
_V4 = "vLLM 0.33, DeepSeek-V4 model code"
# Two names of one decode: they differ in the prefill that an engine pairs with it.
_AITER_MLA = ("ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA")
_ENGINE_CLASSES = (
    "FLASH_ATTN_DIFFKV",
    "TRITON_FLASH_ATTN",
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "CUTLASS_MLA",
    "FLASHMLA_SPARSE",
    "FLASHMLA_SPARSE_DSV4",
    "FLASHMLA_SPARSE_DSV41",
)
_EXPANDED_DIMS = ((128, 64, 128), (192, 64, 256), (64, 64, 128), (256, 0, 256))


def _accepts(rule: str, theirs: Any, ours: str, because: str, source: str) -> Difference:
    return Difference(
        backend=None,
        subject=f"accepts.{rule}",
        theirs=theirs,
        ours=ours,
        because=because,
        source=source,
    )


def _unchecked_package(
    backend: str | tuple[str, ...], operation: Operation | None = None
) -> Difference:
    return Difference(
        backend=backend,
        subject="requires",
        theirs=(),
        operation=operation,
        ours="the package must be installed",
        because="a kernel that is not there fails at the first step of a model, not at the choice",
        source=_ROWS,
    )


def _importable(backend: str) -> Difference:
    return Difference(
        backend=backend,
        subject="requires",
        theirs=(),
        ours="a backend of another vendor is refused whether its package is there or not",
        because="an engine's build has the class, and no kernel behind it",
        source=_ROWS,
    )


def _told_as_combination(backend: str, code: str, lacks: Any) -> Difference:
    return Difference(
        backend=backend,
        subject=f"rule.{code}",
        theirs=Rule(code, lacks, "its kernels are not there"),
        ours="a backend of another vendor is refused as such",
        because="one reason is enough",
        source=_ROWS,
    )


def _any_device(backend: str | tuple[str, ...]) -> Difference:
    return Difference(
        backend=backend,
        subject="on.traits",
        theirs=None,
        ours="only the devices that its kernels are written for",
        because="aiter has no kernels for the others",
        source=_SELECTOR,
    )


def _any_latent_row(backend: str | tuple[str, ...]) -> Difference:
    return Difference(
        backend=backend,
        subject="takes.head_size",
        theirs=None,
        ours="rows of 576 elements",
        because="aiter's latent kernels are assembled for 512 + 64 elements",
        source=_SELECTOR,
    )


def _inherited_pcp(backend: str | tuple[str, ...]) -> Difference:
    return Difference(
        backend=backend,
        subject="feature.pcp",
        theirs=True,
        ours="prefill context parallelism is refused",
        because="no dense latent kernel merges parts of a prefill; vLLM's yes is inherited",
        source=_SELECTOR,
    )


def _requested_beside_ultraquant(backend: str) -> Difference:
    return Difference(
        backend=backend,
        subject="rule.layout_vs_ultraquant",
        theirs=Rule(
            "layout_vs_ultraquant",
            they.is_explicit_beside_ultraquant,
            "vLLM asks it of requested backends only",
            last=True,
        ),
        ours="asked of automatic choices too",
        because="layers without a layout in common cannot share a run, whoever chose them",
        source=_SELECTOR,
    )


def _vendor_numbers(backend: str) -> tuple[Difference, ...]:
    ours = "gfx942 and gfx950"
    because = "aiter's DeepSeek-V4 kernels are written for them"
    numbers = Either(Between((9, 0), (9, 9)), Between((10, 0), (10, 9)))
    return tuple(
        Difference(
            backend=backend,
            subject=subject,
            theirs=theirs,
            ours=ours,
            because=because,
            source=_SELECTOR,
        )
        for subject, theirs in (("on.traits", None), ("on.capability", numbers))
    )


DIFFERENCES: tuple[Difference, ...] = (
    # How requests and parts are treated.
    _accepts(
        "foreign_platform",
        they.is_left_to_the_selector,
        "a backend of another vendor is refused",
        "its kernels cannot run here",
        _SELECTOR,
    ),
    _accepts(
        "shared_capability_numbers",
        True,
        "gfx digits are no compute capability",
        "gfx90a and compute capability 9.0 have nothing in common but digits",
        _SELECTOR,
    ),
    _accepts(
        "packed_kv_fallback",
        True,
        "a request that does not fit is refused, with what would fit",
        "a request is never replaced silently",
        _SELECTOR,
    ),
    _accepts(
        "request_replaced",
        they.is_v41_asked_by_either_name,
        "the name of another model's backend is refused",
        "a request is never replaced silently",
        _V4,
    ),
    _accepts(
        "row_unvalidated",
        they.is_checked_nowhere,
        "every backend of a row is checked, and so is a request",
        "vision head sizes and V4's devices have limits like all others",
        _VISION,
    ),
    _accepts(
        "cache_asked_of_all",
        True,
        "what concerns a KV cache is asked of layers that have one",
        "an encoder's layer has no cache, whatever the run's format is",
        _SELECTOR,
    ),
    _accepts(
        "parts_apart",
        True,
        "a latent layer is served only if its prefill and indexer are",
        "otherwise the model fails when it is built",
        _SELECTOR,
    ),
    _accepts(
        "wish_ignored",
        True,
        "a wish that no backend here reads is refused",
        "a wish is never swallowed",
        _SELECTOR,
    ),
    # Which backends exist, and in which order they are tried.
    Difference(
        backend=("TORCH_SDPA", "REFERENCE"),
        subject="exists",
        theirs={"TORCH_SDPA": is_vision, "REFERENCE": False},
        ours="serve every layer: torch behind all others, the reference on request",
        because="torch's own attention runs where nothing else does, and a right answer can be "
        "compared to",
        source=_SELECTOR,
    ),
    Difference(
        backend=None,
        subject="order",
        theirs=(they.ATTENTION_LIST,),
        ours="aiter's kernels come first where it is switched on, and not at all where it is off",
        because="who switches it on wants it used; vLLM puts ROCM_ATTN first on CDNA, and lists "
        "the unified kernels even where aiter is off",
        source=_SELECTOR,
    ),
    Difference(
        backend=None,
        subject="order",
        theirs=(they.SPARSE_LIST,),
        ours="block-sparse layers have their own row",
        because="latent kernels cannot serve them",
        source=_SELECTOR,
    ),
    Difference(
        backend=None,
        subject="order",
        theirs=(they.VISION_LIST,),
        ours="Triton comes before torch, and who does not fit is passed over",
        because="torch's own kernels are the slowest of the four",
        source=_VISION,
    ),
    # Backends of another vendor, whose classes an engine's build has all the same.
    *(_importable(name) for name in _ENGINE_CLASSES),
    _told_as_combination("FLASH_ATTN_MLA", "fa_mla_device", they.lacks_flash_attention_3),
    _told_as_combination("FLASHMLA", "flashmla_unavailable", they.lacks_flashmla),
    _told_as_combination("FLASHMLA_MEGA_ATTN_DSV41", "flashmla_unavailable", they.lacks_flashmla),
    # What single backends take.
    *(
        _unchecked_package(name)
        for name in (
            "ROCM_AITER_UNIFIED_ATTN",
            _AITER_MLA,
            "ROCM_AITER_MLA_SPARSE",
            "ROCM_FLASHMLA_SPARSE_DSV4",
            "ROCM_FLASHMLA_SPARSE_DSV41",
        )
    ),
    _unchecked_package("ROCM_AITER_FA", Operation.MHA),
    _unchecked_package("FLASH_ATTN", Operation.MHA),
    *(
        _any_device(name)
        for name in (
            "ROCM_AITER_UNIFIED_ATTN",
            _AITER_MLA,
            "ROCM_AITER_MLA_SPARSE",
        )
    ),
    *_vendor_numbers("ROCM_FLASHMLA_SPARSE_DSV4"),
    *_vendor_numbers("ROCM_FLASHMLA_SPARSE_DSV41"),
    *(
        _any_latent_row(name)
        for name in (
            _AITER_MLA,
            "ROCM_AITER_MLA_SPARSE",
        )
    ),
    *(
        _inherited_pcp(name)
        for name in (
            "TRITON_MLA",
            _AITER_MLA,
        )
    ),
    *(
        _requested_beside_ultraquant(name)
        for name in (
            "ROCM_ATTN",
            "ROCM_AITER_FA",
            "ROCM_AITER_UNIFIED_ATTN",
        )
    ),
    Difference(
        backend="ROCM_AITER_FA",
        subject="takes.head_size",
        operation=Operation.MHA,
        theirs=OneOf(*rules.PAGED_HEAD_SIZES),
        ours="any multiple of 8 up to 256 where there is no cache",
        because="only the paged decode is built for three head sizes",
        source=_SELECTOR,
    ),
    Difference(
        backend="ROCM_AITER_FA",
        subject="rule.aiter_paged_head_size",
        operation=Operation.MHA,
        theirs=None,
        ours="refuses other head sizes for layers with a cache only",
        because="only the paged decode is built for three head sizes",
        source=_SELECTOR,
    ),
    Difference(
        backend="ROCM_AITER_FA",
        subject="takes.attn_type",
        operation=Operation.MHA,
        theirs=OneOf(AttnType.DECODER),
        ours="layers without a cache too",
        because="its forward kernel needs no cache",
        source=_SELECTOR,
    ),
    Difference(
        backend="FLASH_ATTN",
        subject="feature.rswa",
        operation=Operation.MHA,
        theirs=True,
        ours="windows that are reset after a prefix are refused",
        because="the package has no mask of them; vLLM's class answers alike on every platform",
        source=_ROWS,
    ),
    Difference(
        backend=("ROCM_FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV41"),
        subject="feature.sliding_window",
        theirs=False,
        ours="a layer's window is told like any other",
        because="the model has windowed layers; vLLM's passes the window beside the selector",
        source=_V4,
    ),
    Difference(
        backend="FLASH_ATTN",
        subject="rule.fa_rdna_needs_triton",
        theirs=None,
        ours="on consumer devices flash-attn's Triton kernels must be switched on",
        because="the package has no others for them",
        source=_ROWS,
    ),
    Difference(
        backend="FLASH_ATTN",
        subject="takes.dims",
        operation=Operation.MLA_PREFILL,
        theirs=OneOf(*_EXPANDED_DIMS),
        ours="any head of up to 256 elements",
        because="values are padded to the width of the keys",
        source="vLLM 0.33, MLA prefill selector",
    ),
    *(
        Difference(
            backend="ROCM_AITER_FA",
            subject=f"takes.{field}",
            operation=Operation.MLA_PREFILL,
            theirs=None,
            ours="heads of up to 256 elements",
            because="aiter's forward kernels stop there",
            source="vLLM 0.33, MLA prefill selector",
        )
        for field in ("head_size", "v_head_size")
    ),
    Difference(
        backend="ROCM_AITER_FA",
        subject="rule.aiter_is_off",
        operation=Operation.MLA_PREFILL,
        theirs=Rule("aiter_is_off", they.aiter_is_off, "vLLM refuses it while aiter is off"),
        ours="a request by name is honoured while aiter is off",
        because="the switch is about automatic choices, and a request is explicit",
        source="vLLM 0.33, MLA prefill selector",
    ),
    Difference(
        backend="ROCM_AITER_INDEXER",
        subject="rule.mxfp4_indexer_ranks",
        theirs=None,
        ours="an MXFP4 index cache is refused over several ranks",
        because="aiter's MXFP4 pages are shuffled for one rank; vLLM only avoids it by default",
        source="vLLM 0.33, sparse indexer",
    ),
    Difference(
        backend="MINIMAX_M3_SPARSE",
        subject="takes.kv_cache_dtype",
        theirs=OneOf(KVCacheDtype.BFLOAT16, *FP8_KV, KVCacheDtype.FP8_E5M2),
        ours="auto too, which is the activations' dtype",
        because="auto has one meaning for every backend",
        source=_SELECTOR,
    ),
    Difference(
        backend="TRITON_INDEXER",
        subject="takes.indexer_kv_dtype",
        theirs=OneOf("fp8"),
        ours="a bf16 index cache too",
        because="it is the format that needs no scales, for devices without fp8",
        source="vLLM 0.33, sparse indexer",
    ),
    Difference(
        backend="TRITON_INDEXER",
        subject="takes.sparse_logits",
        theirs=None,
        ours="logits of chosen blocks alone are refused",
        because="its kernel scores every key",
        source="vLLM 0.33, sparse indexer",
    ),
    Difference(
        backend="TRITON_BLOCK_INDEXER",
        subject="takes.indexer_kv_dtype",
        theirs=OneOf("bf16"),
        ours="an fp8 index cache too",
        because="Triton converts fp8 on every device that is not NVIDIA's older ones",
        source="vLLM 0.33, MiniMax-M3 model code",
    ),
    Difference(
        backend="TRITON_BLOCK_INDEXER",
        subject="rule.minimax_m3_indexer_cp",
        theirs=Rule(
            "minimax_m3_indexer_cp",
            they.splits_what_cannot_be_split,
            "vLLM splits a bf16 indexer over two ranks or more",
        ),
        ours="an indexer split over ranks is refused",
        because="attnplat has no merge of the ranks' candidates yet",
        source="vLLM 0.33, MiniMax-M3 model code",
    ),
)
