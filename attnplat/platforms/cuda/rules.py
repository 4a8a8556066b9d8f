"""Combinations that NVIDIA's latent and sparse kernels do not take, and questions of taste.

Named pure functions of config and world. A config of another operation lacks a field: that is
unknown, and no combination refuses what is unknown.
"""

from __future__ import annotations

from typing import Any

from attnplat.backends.portable.predicates import has_quantised_cache
from attnplat.config.names import Feature
from attnplat.platforms.cuda.flashinfer import is_datacenter_blackwell
from attnplat.platforms.world import World

LATENT_512 = 512
FEW_HEADS = 16
# The kernel that fuses DeepSeek-V4.1's whole attention works on groups of this many heads.
MEGA_GROUP = 8

_ROWS_OF_512 = (None, "auto", "bfloat16", "float16", "fp8_ds_mla")


def _rope(config: Any) -> int | None:
    rope: int | None = getattr(config, "qk_rope_head_dim", None)
    return rope


def _nope(config: Any) -> int | None:
    nope: int | None = getattr(config, "qk_nope_head_dim", None)
    return nope


# Combinations -----------------------------------------------------------------------------


def is_512_off_hopper_or_quantised(config: Any, world: World) -> bool:
    """Cache rows of 512 on another device than Hopper, or in another format."""
    hopper = world.device.major == 9
    return config.head_size == LATENT_512 and not (hopper and config.kv_cache_dtype in _ROWS_OF_512)


def is_512_with_rope(config: Any, world: World) -> bool:
    """Cache rows of 512 with a rotated part."""
    return config.head_size == LATENT_512 and bool(_rope(config))


def is_nvfp4_rows_off_blackwell(config: Any, world: World) -> bool:
    """nvfp4 cache rows on another device than datacenter Blackwell."""
    return config.kv_cache_dtype == "nvfp4_ds_mla" and not is_datacenter_blackwell(world)


def is_context_parallel_both_ways(config: Any, world: World) -> bool:
    """Prefill and decode context parallelism at once."""
    return (world.run.pcp_size or 1) > 1 and (world.run.dcp_size or 1) > 1


def is_no_rope_of_other_sizes(config: Any, world: World) -> bool:
    """A latent without rotated part whose sizes are not (256, 512)."""
    lora = getattr(config, "kv_lora_rank", None)
    known = _rope(config) == 0 and _nope(config) is not None
    return known and not (_nope(config) == 256 and lora in (None, LATENT_512))


def is_rope_of_other_sizes(config: Any, world: World) -> bool:
    """A latent with rotated part whose un-rotated part is neither 128 nor 192."""
    nope = _nope(config)
    return bool(_rope(config)) and nope is not None and nope not in (128, 192)


def is_odd_head_count(config: Any, world: World) -> bool:
    """A number of heads over all context-parallel ranks that has no kernel."""
    if config.num_heads is None:
        return False
    dcp = world.run.dcp_size or 1
    heads = config.num_heads * dcp
    return heads not in (8, 16, 32, 64) and not (heads == 128 and dcp == 1)


def is_fp8_rows_on_datacenter_blackwell(config: Any, world: World) -> bool:
    """DeepSeek's packed fp8 rows on compute capability 10."""
    return config.kv_cache_dtype == "fp8_ds_mla" and is_datacenter_blackwell(world)


def lacks_packed_decode(config: Any, world: World) -> bool:
    """Compute capability 12 with a FlashInfer that has no packed sparse decode."""
    return world.device.major == 12 and not world.inventory.usable("flashinfer_sparse_sm120")


def is_lone_datacenter_blackwell(world: World) -> bool:
    """Compute capability 10 without context parallelism."""
    run = world.run
    alone = (run.dcp_size or 1) == 1 and (run.pcp_size or 1) == 1
    return alone and is_datacenter_blackwell(world)


def is_sparse_logits_of_fp8(config: Any, world: World) -> bool:
    """Logits only where a key can be chosen, from another index cache than mxfp4."""
    wanted = getattr(config, "sparse_logits", False) and is_lone_datacenter_blackwell(world)
    return wanted and config.indexer_kv_dtype != "mxfp4"


def has_no_mega_groups(config: Any, world: World) -> bool:
    """Heads that do not fall into the groups of the fused attention."""
    heads = getattr(config, "num_heads", None)
    if heads is None:
        return False
    groups = getattr(config, "o_groups", None)
    per_group = None if groups is None else heads * (world.run.tp_size or 1) // groups
    return heads % MEGA_GROUP != 0 or per_group not in (None, MEGA_GROUP)


# Taste ------------------------------------------------------------------------------------


def is_causal(config: Any, world: World) -> bool:
    """The layer's queries see no key after them."""
    return Feature.NON_CAUSAL not in config.needs


def keeps_turboquant(config: Any, world: World) -> bool:
    """The layer's cache is in TurboQuant's format."""
    return str(config.kv_cache_dtype).startswith("turboquant_")


def has_spans(config: Any, world: World) -> bool:
    """The layer attends both ways inside image spans."""
    return Feature.MM_PREFIX in config.needs


def has_spans_on_hopper(config: Any, world: World) -> bool:
    """Image spans, on compute capability 9."""
    return world.device.major == 9 and has_spans(config, world)


def has_wide_dims(config: Any, world: World) -> bool:
    """Expanded heads of 192 and 64 elements with values of 256."""
    return bool(config.dims == (192, 64, 256))


def has_few_heads(config: Any, world: World) -> bool:
    """A plain cache and at most 16 query heads on this rank."""
    few = config.num_heads is not None and config.num_heads <= FEW_HEADS
    return few and not has_quantised_cache(config, world)


def has_rows_of_512(config: Any, world: World) -> bool:
    """Cache rows of 512 elements."""
    return bool(config.head_size == LATENT_512)


def is_deepseek_v4(config: Any, world: World) -> bool:
    """A layer of DeepSeek-V4."""
    return getattr(config, "model_type", None) == "deepseek_v4"


def is_deepseek_v41(config: Any, world: World) -> bool:
    """A layer of DeepSeek-V4.1."""
    return getattr(config, "model_type", None) == "deepseek_v41"


def is_minimax_m3(config: Any, world: World) -> bool:
    """A block-sparse layer of MiniMax-M3."""
    return getattr(config, "model", None) == "minimax_m3"


def is_minimax_m3_indexer(config: Any, world: World) -> bool:
    """The scorer of MiniMax-M3's blocks."""
    return getattr(config, "model_type", None) == "minimax_m3"


def decodes_with_cutlass(config: Any, world: World) -> bool:
    """The user wants CUTLASS's decode kernel for MiniMax-M3."""
    return world.wishes.minimax_m3_msa_decode_backend == "cutlass"
