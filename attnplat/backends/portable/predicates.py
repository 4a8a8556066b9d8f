"""Questions about a layer and its world that declarations of several platforms ask.

Each is a named pure function: of the world alone where a `Cases` asks it, of config and world
where a rule or a preference does. A config of another operation lacks a field: that is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplat.config.names import PLAIN_KV_CACHE_DTYPES, Feature, KVCacheDtype, Role
from attnplat.errors import ConfigError

if TYPE_CHECKING:
    from attnplat.platforms.world import World


def is_vision(config: Any, world: World) -> bool:
    """The layer belongs to a vision tower."""
    return getattr(config, "role", None) == Role.VISION


def has_narrower_values(config: Any, world: World) -> bool:
    """Multi-head attention whose value heads differ in size from its key heads, or may."""
    differs = getattr(config, "value_size", config.head_size) != config.head_size
    return bool(differs) or Feature.V_HEAD_SIZE in config.also_needs


def is_quantised(kv_cache_dtype: str | None) -> bool:
    """Whether a cache of this dtype holds anything but plain floats; unknown counts as plain."""
    return kv_cache_dtype is not None and kv_cache_dtype not in PLAIN_KV_CACHE_DTYPES


def has_quantised_cache(config: Any, world: World) -> bool:
    """The layer's cache holds codes and scales rather than plain floats."""
    return is_quantised(config.kv_cache_dtype)


_SIZED_ROWS = frozenset(
    {
        KVCacheDtype.NVFP4,
        KVCacheDtype.MXFP4,
        KVCacheDtype.MXFP8,
        KVCacheDtype.FP8_DS_MLA,
        KVCacheDtype.NVFP4_DS_MLA,
    }
)


def cannot_store_rows(config: Any, world: World) -> bool:
    """The format of the layer's cache is for rows of another operation or size."""
    word = config.kv_cache_dtype
    if word not in _SIZED_ROWS or not config.has_kv_cache:
        return False
    # Here, because few layers ask, and every command would pay for the table of formats.
    from attnplat.backends.formats.encodings import resolve_encoding
    from attnplat.backends.formats.facts import format_of

    try:
        format = format_of(resolve_encoding(word, config.operation, world.device))
        format.check_size(config.head_size)
        format.check_size(getattr(config, "value_size", config.head_size))
    except ConfigError:
        return True
    return False


def scores_blocks(config: Any, world: World) -> bool:
    """The indexer ranks blocks of keys by MiniMax-M3's rule, which has no weights."""
    return getattr(config, "model_type", None) == "minimax_m3"


def wants_split_indexer(config: Any, world: World) -> bool:
    """The user wants MiniMax-M3's indexer split over ranks."""
    return world.wishes.minimax_m3_indexer_cp


def model_is_known(world: World) -> bool:
    """Something has been said of the model as a whole."""
    return world.run.model_head_size is not None


def is_turboquant_run(world: World) -> bool:
    """The run as a whole keeps its cache in TurboQuant's format."""
    dtype = world.run.run_kv_cache_dtype
    return dtype is not None and dtype.startswith("turboquant_")


def lacks_bf16(world: World) -> bool:
    """The accelerator cannot multiply bfloat16."""
    return world.device.platform != "cpu" and "bf16" not in world.device.traits


def triton_lacks_e4m3(world: World) -> bool:
    """Triton converts fp8_e4m3 on NVIDIA's devices only from compute capability 8.9 on."""
    return world.device.platform == "cuda" and "fp8" not in world.device.traits
