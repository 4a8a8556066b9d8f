"""Which format a sparse indexer's cache has: the caller's, the user's, the platform's, the model's.

The steps are data; the first that says something decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnplat.config.layer import IndexerConfig
from attnplat.platforms.device import PlatformName
from attnplat.platforms.world import World

# What a model's indexer was trained or published with. DeepSeek's is the family's default.
MODEL_DEFAULTS = {"minimax_m3": "bf16", "qwen4_exp": "bf16"}
DEFAULT = "fp8"


@dataclass(frozen=True)
class PlatformDefault:
    """A platform's own default for `auto`, where `when(config, world)` holds."""

    dtype: str
    when: Callable[[IndexerConfig, World], bool]
    because: str


def is_v4_on_cdna4_with_aiter(config: IndexerConfig, world: World) -> bool:
    """DeepSeek-V4's indexer on AMD's gfx950, with aiter on, on one rank, with dense logits."""
    run, inventory = world.run, world.inventory
    alone = (run.dcp_size or 1) == 1 and (run.pcp_size or 1) == 1
    return (
        world.device.platform == PlatformName.ROCM
        and config.model_type == "deepseek_v4"
        and "cdna4" in world.device.traits
        and alone
        and not config.sparse_logits
        and inventory.usable("aiter")
        and inventory.on("aiter")
    )


PLATFORM_DEFAULTS: tuple[PlatformDefault, ...] = (
    PlatformDefault(
        "mxfp4",
        is_v4_on_cdna4_with_aiter,
        "gfx950 multiplies MXFP4 with scales in one instruction, at half the bytes of fp8",
    ),
)


def resolve_indexer_kv_dtype(config: IndexerConfig, world: World) -> tuple[str, str]:
    """The format of `config`'s index cache in `world`, and who chose it; never `auto`."""
    if config.indexer_kv_dtype != "auto":
        return config.indexer_kv_dtype, config.source_of("indexer_kv_dtype")
    if world.wishes.indexer_kv_dtype != "auto":
        return world.wishes.indexer_kv_dtype, world.wishes.source_of("indexer_kv_dtype")
    for default in PLATFORM_DEFAULTS:
        if default.when(config, world):
            return default.dtype, "platform"
    return MODEL_DEFAULTS.get(config.model_type or "", DEFAULT), "model"


def effective_indexer(config: IndexerConfig, world: World) -> IndexerConfig:
    """`config` with its cache format settled, and the user's wish for sparse logits."""
    provenance = list(config.provenance)
    if not config.sparse_logits and world.wishes.indexer_sparse_logits:
        provenance.append(("sparse_logits", world.wishes.source_of("indexer_sparse_logits")))
        config = config.replace(sparse_logits=True)
    dtype, source = resolve_indexer_kv_dtype(config, world)
    if dtype != config.indexer_kv_dtype:
        provenance.append(("indexer_kv_dtype", source))
    return config.replace(indexer_kv_dtype=dtype, provenance=tuple(provenance))
