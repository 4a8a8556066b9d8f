"""Where other rule sets depart from the CPU platform's catalog and preferences.

vLLM's CPU platform has neither a list nor a check: its code names one class per case.
"""

from __future__ import annotations

from typing import Any

from attnplat.backends.limits import OneOf
from attnplat.backends.portable.catalog import (
    BLOCK_SPARSE,
    FP8_KV,
    HALF_DTYPES,
    INDEXER,
    MHA,
    MLA,
    MLA_PREFILL,
    PLAIN_KV,
    SPARSE_MLA,
    STATE,
)
from attnplat.backends.portable.predicates import has_narrower_values, is_vision
from attnplat.config.layer import BlockSparseConfig, IndexerConfig
from attnplat.config.names import KVCacheDtype, Operation
from attnplat.platforms.cpu.rules import has_wide_vectors
from attnplat.platforms.differences import Difference
from attnplat.platforms.selection import Preference, Ranked
from attnplat.platforms.world import World

_SELECTOR = "vLLM 0.33, CPU platform, selector"
_MODEL_CODE = "vLLM 0.33, code of the models"
_NAMED = (Operation.MHA, Operation.MLA, Operation.MLA_PREFILL)


def _is_named_by_the_platform(config: Any, world: World) -> bool:
    if is_vision(config, world) or has_narrower_values(config, world):
        return False
    return config.operation in _NAMED


def _ignores_requests(config: Any, world: World) -> bool:
    return not is_vision(config, world)


def _is_text(config: Any, world: World) -> bool:
    return not is_vision(config, world) and not has_narrower_values(config, world)


def _keeps_plain_or_fp8(config: Any, world: World) -> bool:
    fp8 = (*FP8_KV, KVCacheDtype.FP8_E5M2) if has_wide_vectors(world) else ()
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


_ROWS = (
    Preference(serves=MHA, when=is_vision, order=("TORCH_SDPA",), because="vLLM names it"),
    Preference(
        serves=MHA,
        when=has_narrower_values,
        order=("TRITON_ATTN_DIFFKV",),
        because="the model's code names it on every platform",
    ),
    Preference(
        serves=MHA,
        order=(Ranked("CPU_ATTN", _keeps_plain_or_fp8),),
        because="vLLM asks for the cache's format, and for nothing else",
    ),
    Preference(
        serves=MLA,
        order=(Ranked("AMX_MLA", _takes_amx), Ranked("CPU_MLA", _takes_no_amx)),
        because="vLLM asks for the cache's format and for AMX, and for nothing else",
    ),
    Preference(serves=SPARSE_MLA, order=(), because="vLLM has no sparse attention here"),
    Preference(
        serves=MLA_PREFILL,
        order=(Ranked("ZEN_CPU", _has_zentorch), "CPU"),
        because="vLLM asks for the processor, and for nothing else",
    ),
    Preference(
        serves=BLOCK_SPARSE | INDEXER,
        when=_is_minimax,
        order=("MINIMAX_M3_SPARSE", "TRITON_BLOCK_INDEXER"),
        because="the model's code names them on every platform",
    ),
    Preference(
        serves=INDEXER,
        order=("TRITON_INDEXER",),
        because="the format is settled without asking whether anything reads it",
    ),
    Preference(
        serves=STATE,
        order=("MAMBA1_ATTN", "MAMBA2_ATTN", "SHORT_CONV_ATTN", "LINEAR_ATTN", "GDN_ATTN"),
        because="they are named without asking for Triton",
    ),
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


def _order(row: Preference, ours: str, because: str) -> Difference:
    return Difference(
        backend=None,
        subject="order",
        theirs=(row,),
        ours=ours,
        because=because,
        source=_SELECTOR,
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
