"""What the CPU platform knows of Intel's retired extension: facts."""

from __future__ import annotations

from typing import Any

from attnplat.backends.backend import Backend, GraphSupport, Package, Rule
from attnplat.backends.limits import Includes, OneOf
from attnplat.backends.portable.catalog import BF16, FP16, FP32, MHA
from attnplat.config.layer import MhaConfig
from attnplat.config.names import KVCacheDtype
from attnplat.platforms.cpu.impls.ipex_facts import (
    IPEX_FEATURES,
    IPEX_LAYOUTS,
    IPEX_TORCH,
    IPEX_VERSION,
    MOST_GROUPED_HEADS,
    is_pair,
)
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.world import World

DISTRIBUTION = "intel-extension-for-pytorch"
_PAIR = {"torch": f"{IPEX_TORCH}.0", DISTRIBUTION: IPEX_VERSION}


def has_another_ipex(config: Any, world: World) -> bool:
    """The extension or torch is installed in another version than IPEX was written for."""
    packages = {**_PAIR, **world.inventory.packages}
    return not is_pair(packages[DISTRIBUTION], packages["torch"])


def has_large_groups(config: Any, world: World) -> bool:
    """More query heads share a key head than the extension's scratch has room for."""
    if not config.num_heads or not config.num_kv_heads:
        return False
    return bool(config.num_heads > MOST_GROUPED_HEADS * config.num_kv_heads)


def has_negative_scale(config: Any, world: World) -> bool:
    """The layer's scale is not positive."""
    return config.scale is not None and config.scale <= 0


IPEX = Backend(
    name="IPEX",
    summary="Intel's retired extension: attention in place over pages, decoding in fixed parts",
    serves=MHA,
    takes={
        "attn_type": OneOf("decoder"),
        "causal": OneOf(True),
        "dtype": OneOf(BF16, FP16, FP32),
        "kv_cache_dtype": OneOf(KVCacheDtype.AUTO),
    },
    features=IPEX_FEATURES,
    on={"traits": Includes("x86_64", "avx2")},
    requires=(Package(DISTRIBUTION, why="its paged attention"),),
    forbids=(
        Rule(
            "ipex_version",
            has_another_ipex,
            f"it imports in version {IPEX_VERSION} beside torch {IPEX_TORCH} alone",
            MhaConfig(head_size=64),
            {"inventory": Inventory.assume({"torch": "2.13.0+cpu", DISTRIBUTION: IPEX_VERSION})},
        ),
        Rule(
            "negative_scale",
            has_negative_scale,
            "its kernel for prompts gives infinities for a scale below 0",
            MhaConfig(head_size=64, scale=-0.3),
            {"inventory": Inventory.assume(_PAIR)},
        ),
        Rule(
            "group_size",
            has_large_groups,
            f"its scratch has room for {MOST_GROUPED_HEADS} query heads a key head",
            MhaConfig(head_size=64, num_heads=71, num_kv_heads=1),
            {"inventory": Inventory.assume(_PAIR)},
        ),
    ),
    loads="attnplat.platforms.cpu.impls.ipex:IpexImpl",
    kv_layouts=IPEX_LAYOUTS,
    preferred_block_size=16,
    graphs=GraphSupport.NEVER,
)
