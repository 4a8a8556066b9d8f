"""Questions about AMD's devices, aiter's switches, and combinations that no kernel takes.

Of the world alone where a `Cases` asks; of config and world where a rule or a row does.
"""

from __future__ import annotations

from typing import Any

from attnplat.backends.backend import Rule
from attnplat.backends.portable.predicates import (
    has_narrower_values,
    has_quantised_cache,
    is_turboquant_run,
    wants_split_indexer,
)
from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import IndexerConfig, MhaConfig, MlaConfig, SparseMlaConfig
from attnplat.config.names import Feature, KVCacheDtype, Role
from attnplat.config.run import RunContext
from attnplat.platforms.world import World

_CDNA3_OR_LATER = frozenset({"cdna3", "cdna4", "cdna5"})
PAGED_HEAD_SIZES = (64, 128, 256)
MXFP4_INDEXER_MODELS = ("deepseek_v4", "deepseek_v41")
HALF_PRECISION_KV = (None, KVCacheDtype.AUTO, KVCacheDtype.FLOAT16)

# Of the world ------------------------------------------------------------------------------


def is_cdna(world: World) -> bool:
    """A data-centre device."""
    return "cdna" in world.device.traits


def is_cdna3_or_later(world: World) -> bool:
    """A data-centre device that aiter's kernels are written for (gfx942 and later)."""
    return not _CDNA3_OR_LATER.isdisjoint(world.device.traits)


def is_cdna3(world: World) -> bool:
    """The third data-centre generation (gfx942)."""
    return "cdna3" in world.device.traits


def is_cdna4(world: World) -> bool:
    """The fourth data-centre generation (gfx950)."""
    return "cdna4" in world.device.traits


def is_rdna(world: World) -> bool:
    """A consumer device."""
    return "rdna" in world.device.traits


def has_aiter(world: World) -> bool:
    """aiter is installed and has kernels for this data-centre device."""
    return is_cdna3_or_later(world) and world.inventory.usable("aiter")


def aiter_is_on(world: World) -> bool:
    """aiter is switched on and has kernels for this data-centre device."""
    return world.inventory.on("aiter") and has_aiter(world)


def shuffles_pages(world: World) -> bool:
    """The run keeps its pages in aiter's shuffled layout."""
    return world.inventory.on("aiter_shuffle_layout") and has_aiter(world)


def uses_kv_connector(world: World) -> bool:
    """KV blocks are sent to or received from another instance."""
    return bool(world.run.kv_connector)


def decodes_latent_without_causality(world: World) -> bool:
    """aiter's latent decode takes a mask flag here."""
    return is_cdna4(world) and world.inventory.usable("aiter_mla_non_causal")


def takes_latent_sinks(world: World) -> bool:
    """aiter's sparse latent kernels add sinks on this device."""
    return "mi3xx" in world.device.traits


def is_ultraquant_run(world: World) -> bool:
    """The run as a whole keeps its cache in UltraQuant's format."""
    return world.run.run_kv_cache_dtype == KVCacheDtype.ULTRAQUANT_4BIT


def verifies_adaptively(world: World) -> bool:
    """Speculative verification of varying length is on."""
    return bool(world.run.adaptive_verification)


# Of config and world -----------------------------------------------------------------------


def keeps_turboquant(config: Any, world: World) -> bool:
    """The layer's cache is in TurboQuant's format."""
    return str(config.kv_cache_dtype).startswith("turboquant_")


def keeps_octave(config: Any, world: World) -> bool:
    """The layer's cache is in one of Octave's formats."""
    return str(config.kv_cache_dtype).startswith("octave_")


def keeps_ultraquant(config: Any, world: World) -> bool:
    """The layer's cache is in UltraQuant's format."""
    return str(config.kv_cache_dtype).startswith("ultraquant_")


def aiter_mha_is_on(config: Any, world: World) -> bool:
    """aiter is on, and on for multi-head attention."""
    return world.holds(aiter_is_on) and world.inventory.on("aiter_mha")


def aiter_mla_is_on(config: Any, world: World) -> bool:
    """aiter is on, and on for latent attention."""
    return world.holds(aiter_is_on) and world.inventory.on("aiter_mla")


def aiter_indexes(config: Any, world: World) -> bool:
    """aiter is on for a sparse indexer."""
    return world.holds(aiter_is_on)


def unified_is_on(config: Any, world: World) -> bool:
    """aiter's Triton kernels are on: for data-centre devices, and consumer devices of RDNA4."""
    on = world.holds(aiter_is_on) or rdna_aiter_is_on(config, world)
    return on and world.inventory.on("aiter_mha")


def rdna_aiter_is_on(config: Any, world: World) -> bool:
    """aiter is on for an RDNA4 device."""
    inventory = world.inventory
    return "rdna4" in world.device.traits and inventory.on("aiter") and inventory.usable("aiter")


def is_deepseek_v4(config: Any, world: World) -> bool:
    """A latent layer of DeepSeek-V4."""
    return isinstance(config, SparseMlaConfig) and config.model_type == "deepseek_v4"


def is_deepseek_v41(config: Any, world: World) -> bool:
    """A latent layer of DeepSeek-V4.1."""
    return isinstance(config, SparseMlaConfig) and config.model_type == "deepseek_v41"


def is_minimax(config: Any, world: World) -> bool:
    """MiniMax-M3's indexer."""
    return isinstance(config, IndexerConfig) and config.model_type == "minimax_m3"


def _pages_of_another_head_size(config: Any, world: World) -> bool:
    return config.has_kv_cache and config.head_size not in PAGED_HEAD_SIZES


def _has_narrower_values_than_paged(config: Any, world: World) -> bool:
    return config.has_kv_cache and has_narrower_values(config, world)


def _is_no_rdna(config: Any, world: World) -> bool:
    return not is_rdna(world)


def _has_fp8_cache_before_gfx12(config: Any, world: World) -> bool:
    fp8 = config.kv_cache_dtype in (KVCacheDtype.FP8, KVCacheDtype.FP8_E4M3)
    return fp8 and "rdna4" not in world.device.traits


def _wants_image_spans(config: Any, world: World) -> bool:
    return Feature.MM_PREFIX in config.needs


def _is_rdna_without_triton_kernels(config: Any, world: World) -> bool:
    return is_rdna(world) and not world.inventory.on("flash_attn_triton")


def _is_non_causal_fp16(config: Any, world: World) -> bool:
    half = config.dtype == "float16" and config.kv_cache_dtype in HALF_PRECISION_KV
    return half and Feature.NON_CAUSAL in config.needs


def _keeps_mxfp4_index(config: Any) -> bool:
    return isinstance(config, IndexerConfig) and config.indexer_kv_dtype == "mxfp4"


def _is_mxfp4_of_another_model(config: Any, world: World) -> bool:
    return _keeps_mxfp4_index(config) and config.model_type not in MXFP4_INDEXER_MODELS


def _is_mxfp4_over_ranks(config: Any, world: World) -> bool:
    over_ranks = not world.run_needs.isdisjoint({Feature.DCP, Feature.PCP})
    return _keeps_mxfp4_index(config) and over_ranks


def _keeps_plain_pages(config: Any, world: World) -> bool:
    return not shuffles_pages(world)


def _runs_turboquant_beside(config: Any, world: World) -> bool:
    return world.holds(is_turboquant_run) and config.has_kv_cache


def _runs_ultraquant_beside(config: Any, world: World) -> bool:
    return world.holds(is_ultraquant_run) and config.has_kv_cache


_LAYER = MhaConfig(head_size=128)
_BESIDE = "has no KV layout in common with the run's packed format, and a run has one layout"

ONE_RANK_INDEXER = Rule(
    "minimax_m3_indexer_cp",
    wants_split_indexer,
    "minimax_m3_indexer_cp is set, and this indexer is not split over ranks",
    IndexerConfig(head_size=128, model_type="minimax_m3", indexer_kv_dtype="fp8", topk=16),
    {"wishes": AttentionConfig(minimax_m3_indexer_cp=True)},
)
SHUFFLED_PAGES = Rule(
    "aiter_shuffled_pages",
    _keeps_plain_pages,
    "it reads pages in aiter's shuffled layout, which is switched off",
    IndexerConfig(head_size=128, model_type="minimax_m3", indexer_kv_dtype="fp8", topk=16),
    {"arch": "gfx950"},
)
LAYOUT_VS_TURBOQUANT = Rule(
    "layout_vs_turboquant",
    _runs_turboquant_beside,
    f"it {_BESIDE} (TURBOQUANT reads LBNHC)",
    _LAYER,
    {"run": RunContext(run_kv_cache_dtype="turboquant_4bit_nc")},
    last=True,
)
LAYOUT_VS_ULTRAQUANT = Rule(
    "layout_vs_ultraquant",
    _runs_ultraquant_beside,
    f"it {_BESIDE} (ULTRAQUANT reads LBNHC)",
    _LAYER,
    {"run": RunContext(run_kv_cache_dtype="ultraquant_4bit")},
    last=True,
)
ONE_LAYOUT = (LAYOUT_VS_TURBOQUANT, LAYOUT_VS_ULTRAQUANT)

PAGED_HEAD_SIZE = Rule(
    "aiter_paged_head_size",
    _pages_of_another_head_size,
    "aiter's paged decode is built for heads of 64, 128 and 256 elements; only layers without "
    "a cache may have others",
    MhaConfig(head_size=96),
)
PAGED_VALUE_SIZE = Rule(
    "aiter_paged_value_size",
    _has_narrower_values_than_paged,
    "aiter's paged decode wants values as wide as keys",
    MhaConfig(head_size=128, v_head_size=64),
)
SEGMENTED_RDNA_ONLY = Rule(
    "segmented_rdna_only",
    _is_no_rdna,
    "its segments are sized for RDNA's wave of 32",
    _LAYER,
    {"arch": "gfx942"},
)
SEGMENTED_FP8_GFX12 = Rule(
    "segmented_fp8_gfx12",
    _has_fp8_cache_before_gfx12,
    "RDNA multiplies fp8 from gfx12 on",
    MhaConfig(head_size=128, kv_cache_dtype="fp8"),
    {"arch": "gfx1100"},
)
FLASH_ATTN_FP8 = Rule(
    "fa_fp8_kv_version",
    has_quantised_cache,
    "an 8-bit cache needs FlashAttention 3 or 4, which run on NVIDIA's devices only",
    MhaConfig(head_size=128, kv_cache_dtype="fp8"),
)
FLASH_ATTN_IMAGE_SPANS = Rule(
    "fa_mm_prefix_needs_fa4",
    _wants_image_spans,
    "image spans need FlashAttention 4, which runs on NVIDIA's devices only",
    MhaConfig(head_size=128, mm_prefix=True),
)
FLASH_ATTN_RDNA = Rule(
    "fa_rdna_needs_triton",
    _is_rdna_without_triton_kernels,
    "on consumer devices flash-attn has its Triton kernels only, and they are switched off "
    "(FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE)",
    MhaConfig(head_size=128, role=Role.VISION, attn_type="encoder_only"),
    {"arch": "gfx1100", "profile": "default"},
)
NON_CAUSAL_FP16_MLA = Rule(
    "non_causal_fp16_mla",
    _is_non_causal_fp16,
    "aiter's decode without a causal mask has no float16 kernel",
    MlaConfig(head_size=576, dtype="float16", causal=False),
    {"arch": "gfx950"},
)
MXFP4_MODELS = Rule(
    "mxfp4_indexer_models",
    _is_mxfp4_of_another_model,
    "only DeepSeek-V4 and V4.1 were trained for an MXFP4 index cache",
    IndexerConfig(head_size=128, model_type="deepseek_v32", indexer_kv_dtype="mxfp4"),
    {"arch": "gfx950"},
)
MXFP4_ONE_RANK = Rule(
    "mxfp4_indexer_ranks",
    _is_mxfp4_over_ranks,
    "aiter's MXFP4 pages are shuffled for one rank",
    IndexerConfig(head_size=128, model_type="deepseek_v4", indexer_kv_dtype="mxfp4"),
    {"arch": "gfx950", "run": RunContext(dcp_size=2)},
)
