"""attnplat: which attention kernel each layer should use on this machine, why, and run it.

    >>> import attnplat
    >>> cfg = attnplat.MhaConfig(head_size=128, num_heads=32, num_kv_heads=8)
    >>> attnplat.current_platform().get_attn_backend(cfg)
    >>> print(attnplat.platform_for("rocm:gfx950").select(cfg).explain())

Importing attnplat imports neither torch nor any kernel package; each public name is
loaded when it is first used.
"""

# ruff: noqa: F401 - the imports below tell type checkers what `__getattr__` loads

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnplat._version import __version__

if TYPE_CHECKING:
    from attnplat.backends.batch import Batch, PageTable
    from attnplat.backends.index_cache import IndexCache, IndexCacheSpec
    from attnplat.backends.kv_cache import KVCache, KVCacheLayout, KVCacheSpec
    from attnplat.backends.workspace import Workspace
    from attnplat.config.attention import AttentionConfig, HiSparseConfig
    from attnplat.config.backend_names import BackendName
    from attnplat.config.layer import (
        BlockSparseConfig,
        IndexerConfig,
        LayerConfig,
        MhaConfig,
        MlaConfig,
        MlaPrefillConfig,
        SparseMlaConfig,
        StateConfig,
    )
    from attnplat.config.names import Feature
    from attnplat.config.run import RunContext
    from attnplat.errors import AttnplatError, ConfigError, NoBackendError, UnknownNameError
    from attnplat.platforms import current_platform, platform_for
    from attnplat.platforms.flat import get_attn_backend, get_mamba_attn_backend
    from attnplat.platforms.platform import Platform
    from attnplat.platforms.selection import Selection
    from attnplat.platforms.shared import SharedSelection, select_shared
    from attnplat.platforms.world import World

_HOME = {
    "AttentionConfig": "attnplat.config.attention",
    "AttnplatError": "attnplat.errors",
    "BackendName": "attnplat.config.backend_names",
    "Batch": "attnplat.backends.batch",
    "BlockSparseConfig": "attnplat.config.layer",
    "ConfigError": "attnplat.errors",
    "Feature": "attnplat.config.names",
    "HiSparseConfig": "attnplat.config.attention",
    "IndexCache": "attnplat.backends.index_cache",
    "IndexCacheSpec": "attnplat.backends.index_cache",
    "IndexerConfig": "attnplat.config.layer",
    "KVCache": "attnplat.backends.kv_cache",
    "KVCacheLayout": "attnplat.backends.kv_cache",
    "KVCacheSpec": "attnplat.backends.kv_cache",
    "LayerConfig": "attnplat.config.layer",
    "MhaConfig": "attnplat.config.layer",
    "MlaConfig": "attnplat.config.layer",
    "MlaPrefillConfig": "attnplat.config.layer",
    "NoBackendError": "attnplat.errors",
    "PageTable": "attnplat.backends.batch",
    "Platform": "attnplat.platforms.platform",
    "RunContext": "attnplat.config.run",
    "Selection": "attnplat.platforms.selection",
    "SharedSelection": "attnplat.platforms.shared",
    "SparseMlaConfig": "attnplat.config.layer",
    "StateConfig": "attnplat.config.layer",
    "UnknownNameError": "attnplat.errors",
    "Workspace": "attnplat.backends.workspace",
    "World": "attnplat.platforms.world",
    "current_platform": "attnplat.platforms",
    "get_attn_backend": "attnplat.platforms.flat",
    "get_mamba_attn_backend": "attnplat.platforms.flat",
    "platform_for": "attnplat.platforms",
    "select_shared": "attnplat.platforms.shared",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'attnplat' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
