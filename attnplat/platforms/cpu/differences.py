"""Where other rule sets depart from the CPU platform's catalog and preferences.

vLLM's CPU platform has neither a list nor a check: its code names one class per case.
"""

from __future__ import annotations

from typing import Any

from attnplat.backends.limits import MultipleOf, OneOf
from attnplat.backends.portable.catalog import (
    BLOCK_SPARSE,
    DECODER,
    FP8_KV,
    HALF_DTYPES,
    INDEXER,
    MHA,
    MLA,
    MLA_PREFILL,
    PAGED,
    PLAIN_KV,
    STATE,
)
from attnplat.backends.portable.predicates import has_narrower_values, is_vision
from attnplat.config.layer import BlockSparseConfig, IndexerConfig
from attnplat.config.names import Feature, KVCacheDtype, Operation
from attnplat.platforms.cpu.rules import lacks_wide_vectors
from attnplat.platforms.differences import Difference
from attnplat.platforms.selection import Preference, Ranked
from attnplat.platforms.world import World

_SELECTOR = "vLLM 0.33, CPU platform, selector"
_MODEL_CODE = "vLLM 0.33, code of the models"
_NAMED = (Operation.MHA, Operation.MLA, Operation.MLA_PREFILL)
_STATES = ("MAMBA1_ATTN", "MAMBA2_ATTN", "SHORT_CONV_ATTN", "LINEAR_ATTN", "GDN_ATTN")


def _is_named_by_the_platform(config: Any, world: World) -> bool:
    if is_vision(config, world) or has_narrower_values(config, world):
        return False
    return config.operation in _NAMED


def _ignores_requests(config: Any, world: World) -> bool:
    return not is_vision(config, world)


def _is_text(config: Any, world: World) -> bool:
    return not is_vision(config, world) and not has_narrower_values(config, world)


def _keeps_plain_or_fp8(config: Any, world: World) -> bool:
    fp8 = () if lacks_wide_vectors(world) else (*FP8_KV, KVCacheDtype.FP8_E5M2)
    return config.kv_cache_dtype in (None, *PLAIN_KV, *fp8)


def _keeps_plain(config: Any, world: World) -> bool:
    return config.kv_cache_dtype in (None, *PLAIN_KV)


def _takes_amx(config: Any, world: World) -> bool:
    unasked = str(world.wishes.backend_for(config.kind)[0]) != "CPU_MLA"
    return _keeps_plain(config, world) and "amx" in world.device.traits and unasked


def _takes_no_amx(config: Any, world: World) -> bool:
    return _keeps_plain(config, world) and not _takes_amx(config, world)


def _has_zentorch(config: Any, world: World) -> bool:
    traits = world.device.traits
    return {"amd", "avx512"} <= traits and "zentorch" in world.inventory.packages


def _is_minimax(config: Any, world: World) -> bool:
    if isinstance(config, BlockSparseConfig):
        return config.model == "minimax_m3"
    return isinstance(config, IndexerConfig) and config.model_type == "minimax_m3"


_ATTENTION_ROW = Preference(
    serves=MHA,
    when=_is_text,
    order=(Ranked("CPU_ATTN", _keeps_plain_or_fp8),),
    because="vLLM asks for the cache's format, and for nothing else",
)
_LATENT_ROW = Preference(
    serves=MLA,
    order=(Ranked("AMX_MLA", _takes_amx), Ranked("CPU_MLA", _takes_no_amx)),
    because="vLLM asks for the cache's format and for AMX, and for nothing else",
)
_PREFILL_ROW = Preference(
    serves=MLA_PREFILL,
    order=(Ranked("ZEN_CPU", _has_zentorch), "CPU"),
    because="vLLM asks for the processor, and for nothing else",
)
_NARROWER_ROW = Preference(
    serves=MHA,
    when=has_narrower_values,
    order=("TRITON_ATTN_DIFFKV",),
    because="the model's code names it on every platform",
)
_MINIMAX_ROW = Preference(
    serves=BLOCK_SPARSE | INDEXER,
    when=_is_minimax,
    order=("MINIMAX_M3_SPARSE", "TRITON_BLOCK_INDEXER"),
    because="the model's code names them on every platform",
)
_INDEXER_ROW = Preference(
    serves=INDEXER,
    order=("TRITON_INDEXER",),
    because="the format is settled without asking whether anything reads it",
)
_STATE_ROW = Preference(
    serves=STATE,
    order=_STATES,
    because="they are named without asking for Triton",
)


def _accepts(rule: str, theirs: Any, ours: str, because: str) -> Difference:
    return Difference(
        backend=None,
        subject=f"accepts.{rule}",
        theirs=theirs,
        ours=ours,
        because=because,
        source=_SELECTOR,
    )


def _order(row: Preference, ours: str, because: str, source: str = _SELECTOR) -> Difference:
    return Difference(
        backend=None,
        subject="order",
        theirs=(row,),
        ours=ours,
        because=because,
        source=source,
    )


def _portable(backend: str | tuple[str, ...], theirs: Any, because: str) -> Difference:
    return Difference(
        backend=backend,
        subject="exists",
        theirs=theirs,
        ours="serves every layer, behind all others",
        because=because,
        source=_SELECTOR,
    )


def _any_processor(backend: str) -> Difference:
    return Difference(
        backend=backend,
        subject="on.traits",
        theirs=None,
        ours="only processors with the instructions it is written in",
        because="it would stop at the first of them; vLLM takes it even on other vendors' devices",
        source="vLLM 0.33, CUDA and ROCm platforms, selector",
    )


def _compiled_anywhere(backend: str) -> Difference:
    return Difference(
        backend=backend,
        subject="requires",
        theirs=(),
        ours="attnplat's C++ library must have been built",
        because="an install without them has nothing to run; vLLM names its own on any device",
        source="vLLM 0.33, CUDA and ROCm platforms, selector",
    )


def _unchecked_triton(backend: str) -> Difference:
    return Difference(
        backend=backend,
        subject="requires",
        theirs=(),
        ours="Triton must be installed, and compiles for no processor",
        because="the first step of the model would fail",
        source=_MODEL_CODE,
    )


def _any_shape(backend: str | tuple[str, ...], field: str, theirs: Any, ours: str) -> Difference:
    return Difference(
        backend=backend,
        subject=f"takes.{field}",
        theirs=theirs,
        ours=ours,
        because="attnplat's kernels read pages in place, in blocks and rows of any size",
        source="vLLM 0.33, CUDA and ROCm platforms, selector",
    )


def _class_takes(backend: str | tuple[str, ...], subject: str, theirs: Any) -> Difference:
    return Difference(
        backend=backend,
        subject=subject,
        theirs=theirs,
        ours="whatever attnplat's kernels were written for",
        because="the kernels are attnplat's own; vLLM's classes answer so on other platforms",
        source="vLLM 0.33, CUDA and ROCm platforms, selector",
    )


_LATENT_NAMES = ("CPU_MLA", "AMX_MLA")
_CLASSES = (
    _class_takes("CPU_ATTN", "features", PAGED | {Feature.SLIDING_WINDOW, Feature.NON_CAUSAL}),
    _class_takes(
        "CPU_ATTN", "takes.kv_cache_dtype", OneOf(*PLAIN_KV, *FP8_KV, KVCacheDtype.FP8_E5M2)
    ),
    _class_takes(_LATENT_NAMES, "features", PAGED | {Feature.PCP}),
    _class_takes(_LATENT_NAMES, "takes.attn_type", DECODER),
    _class_takes("CPU_MLA", "takes.kv_cache_dtype", OneOf(KVCacheDtype.AUTO)),
    _class_takes("AMX_MLA", "takes.kv_cache_dtype", OneOf(*PLAIN_KV)),
)

DIFFERENCES: tuple[Difference, ...] = (
    _accepts(
        "request_ignored",
        _ignores_requests,
        "a request that does not fit is refused, with what would fit",
        "a request is never replaced silently",
    ),
    _accepts(
        "row_unvalidated",
        _is_named_by_the_platform,
        "head size, dtype, features and block size are checked",
        "a kernel that lacks one fails, or computes something else",
    ),
    _accepts(
        "foreign_platform",
        _ignores_requests,
        "backends of other platforms are never chosen",
        "their kernels cannot run here",
    ),
    _accepts(
        "wish_ignored",
        True,
        "a wish that no backend here reads is refused",
        "a wish is never swallowed",
    ),
    _portable("TORCH_SDPA", is_vision, "torch's own attention runs where nothing else does"),
    _portable(
        ("REFERENCE", "ZENTORCH", "IPEX"),
        False,
        "a right answer, slowly or not, is better than none",
    ),
    Difference(
        backend=("CPU_MLA_SPARSE", "CPU_INDEXER"),
        subject="exists",
        theirs=False,
        ours="sparse latent layers and their indexers have C++ kernels",
        because="vLLM refuses such models on processors, or names Triton, which compiles for none",
        source=_SELECTOR,
    ),
    _order(
        _ATTENTION_ROW,
        "torch's attention comes behind CPU_ATTN, and every limit is asked",
        "a layer that CPU_ATTN lacks a kernel for is served by torch",
    ),
    _order(
        _LATENT_ROW,
        "AMX_MLA first, for what it takes; then CPU_MLA and torch",
        "float16 and unusual rows have no AMX kernel",
    ),
    _order(
        _PREFILL_ROW,
        "every limit is asked, and torch comes last",
        "AMD's kernels lack float32",
    ),
    _order(
        _NARROWER_ROW,
        "torch's attention serves values of another width",
        "Triton compiles for no processor",
        _MODEL_CODE,
    ),
    _order(
        _MINIMAX_ROW,
        "MiniMax-M3's layers are refused until there are kernels for processors",
        "Triton compiles for no processor",
        _MODEL_CODE,
    ),
    _order(
        _INDEXER_ROW,
        "CPU_INDEXER scores the keys, in every format, and REFERENCE behind it",
        "Triton compiles for no processor",
        _MODEL_CODE,
    ),
    _order(
        _STATE_ROW,
        "recurrent layers are refused until there are kernels for processors",
        "Triton compiles for no processor",
        _MODEL_CODE,
    ),
    *(
        _unchecked_triton(name)
        for name in (
            "TRITON_ATTN_DIFFKV",
            "MINIMAX_M3_SPARSE",
            "TRITON_BLOCK_INDEXER",
            "TRITON_INDEXER",
            *_STATES,
        )
    ),
    *(_any_processor(name) for name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA")),
    _any_shape(
        "CPU_ATTN",
        "head_size",
        OneOf(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        "any head size",
    ),
    _any_shape(("CPU_MLA", "AMX_MLA"), "head_size", OneOf(576), "latent rows of any size"),
    _any_shape(("CPU_ATTN", "AMX_MLA"), "block_size", MultipleOf(32), "blocks of any size"),
    _any_shape("CPU_MLA", "block_size", OneOf(16), "blocks of any size"),
    *_CLASSES,
    *(_compiled_anywhere(name) for name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA", "CPU")),
    Difference(
        backend="CPU",
        subject="takes.dtype",
        theirs=HALF_DTYPES,
        ours="float32 too",
        because="its kernels are compiled for it; vLLM asks only where another platform uses it",
        source="vLLM 0.33, MLA prefill selector",
    ),
    Difference(
        backend="TRITON_BLOCK_INDEXER",
        subject="takes.indexer_kv_dtype",
        theirs=OneOf("bf16"),
        ours="an fp8 index cache too",
        because="Triton converts fp8 on every device that is not NVIDIA's older ones",
        source="vLLM 0.33, MiniMax-M3 model code",
    ),
)
