"""Which version of FlashAttention a layer gets: 2, 3, 4, or none that works here.

`resolve_version` walks a table of steps. Each may change what the steps before it decided,
and says why; the last word is whether that version runs on this device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from attnplat.backends.portable.predicates import is_quantised
from attnplat.config.names import Feature
from attnplat.platforms.world import World

# What the backend is able to use: FlashAttention 4 has a kernel of its own for heads of 256.
OLDEST = (8, 0)
LARGEST_HEAD = {2: 256, 3: 256, 4: 512}
OWN_KERNEL_HEAD, OWN_KERNEL_BLOCK = 256, 128


class Ask(NamedTuple):
    """What the version depends on beyond the world; None and False are unknown.

    Attributes:
        head_size, v_head_size: as in the layer's config.
        sinks, alibi, soft_cap, spans, rswa: what the layer wants.
        quantised: the cache holds codes rather than floats.
        block_size: tokens per block, where the user gave it.
        own_kernel: the caller can run FlashAttention 4's own kernel for heads of 256.
    """

    head_size: int | None = None
    v_head_size: int | None = None
    sinks: bool = False
    alibi: bool = False
    soft_cap: bool = False
    spans: bool = False
    rswa: bool = False
    quantised: bool = False
    block_size: int | None = None
    own_kernel: bool = False


NOTHING_KNOWN = Ask()


def ask_of(config: Any) -> Ask:
    """What a layer's config says, each layer judged by its own sizes and formats."""
    needs = config.needs
    return Ask(
        head_size=config.head_size,
        v_head_size=getattr(config, "v_head_size", None),
        sinks=Feature.SINKS in needs,
        alibi=Feature.ALIBI in needs,
        soft_cap=Feature.LOGITS_SOFT_CAP in needs,
        spans=Feature.MM_PREFIX in needs,
        rswa=Feature.RSWA in needs,
        quantised=is_quantised(config.kv_cache_dtype),
        block_size=config.block_size,
        own_kernel=True,
    )


# Availability -----------------------------------------------------------------------------


def fa2_usable(world: World) -> bool:
    """FlashAttention 2 is installed and runs on the device."""
    capability = world.device.capability
    return capability is not None and capability >= OLDEST and world.inventory.usable("fa2")


def fa3_usable(world: World) -> bool:
    """FlashAttention 3 is installed and the device is a Hopper."""
    return world.device.major == 9 and world.inventory.usable("fa3")


def fa4_usable(world: World) -> bool:
    """FlashAttention 4 is installed and runs on the device."""
    return world.device.major in (9, 10, 11) and world.inventory.usable("fa4")


_USABLE = {2: fa2_usable, 3: fa3_usable, 4: fa4_usable}


def is_usable(version: int, world: World) -> bool:
    """Whether a version of FlashAttention is installed and runs on the device."""
    return world.holds(_USABLE[version])


# Steps ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One row of the table: where `when` holds, the version becomes what `then` answers."""

    when: Callable[[Ask, World, int], bool]
    then: Callable[[World], int]
    because: str


def _two(world: World) -> int:
    return 2


def _three(world: World) -> int:
    return 3


def _four(world: World) -> int:
    return 4


def _forced(world: World) -> int:
    version = world.wishes.flash_attn_version
    assert version is not None
    return version


def _four_or_two(world: World) -> int:
    return 4 if is_usable(4, world) else 2


def is_hopper_with_3(ask: Ask, world: World, version: int) -> bool:
    return world.device.major == 9 and is_usable(3, world)


def is_blackwell_with_4(ask: Ask, world: World, version: int) -> bool:
    return world.device.major in (10, 11) and is_usable(4, world)


def is_forced(ask: Ask, world: World, version: int) -> bool:
    return world.wishes.flash_attn_version is not None


def is_3_after_hopper(ask: Ask, world: World, version: int) -> bool:
    return version == 3 and (world.device.major or 0) >= 10


def has_alibi(ask: Ask, world: World, version: int) -> bool:
    return ask.alibi and version > 2


def is_beyond_3(ask: Ask, world: World, version: int) -> bool:
    if version != 3 or world.device.major != 9 or not is_usable(4, world):
        return False
    wide = ask.head_size is not None and ask.head_size > LARGEST_HEAD[3]
    narrow_values = ask.v_head_size is not None and ask.v_head_size != ask.head_size
    return wide or (ask.sinks and narrow_values) or bool(world.run.is_diffusion)


def wants_reset_windows(ask: Ask, world: World, version: int) -> bool:
    return ask.rswa and version < 4 and is_usable(4, world)


def is_batch_invariant(ask: Ask, world: World, version: int) -> bool:
    return version == 4 and bool(world.run.batch_invariant)


def is_own_kernel_head(ask: Ask, world: World) -> bool:
    """Heads of 256 on a device for which FlashAttention 4 has a kernel of their own."""
    same_values = ask.v_head_size in (None, OWN_KERNEL_HEAD)
    return ask.head_size == OWN_KERNEL_HEAD and same_values and world.device.major in (10, 11)


def is_barred_from_own_kernel(ask: Ask, world: World, version: int) -> bool:
    if version != 4 or not is_own_kernel_head(ask, world):
        return False
    other_block = ask.block_size is not None and ask.block_size % OWN_KERNEL_BLOCK != 0
    capped = ask.soft_cap or world.run.model_soft_cap is not None
    barred = ask.sinks or capped or ask.quantised or other_block or ask.spans or ask.rswa
    return not ask.own_kernel or barred or (world.run.dcp_size or 1) > 1


def is_beyond_4(ask: Ask, world: World, version: int) -> bool:
    if version != 4 or (world.device.major or 0) < 10 or ask.head_size is None:
        return False
    known = is_own_kernel_head(ask, world) or (ask.head_size, ask.v_head_size) == (192, 128)
    return ask.head_size > 128 and not known


STEPS: tuple[Step, ...] = (
    Step(is_hopper_with_3, _three, "FlashAttention 3 is written for Hopper"),
    Step(is_blackwell_with_4, _four, "FlashAttention 4 is written for Blackwell"),
    Step(is_forced, _forced, "the user asked for this version"),
    Step(is_3_after_hopper, _four_or_two, "FlashAttention 3 runs on Hopper only"),
    Step(has_alibi, _two, "only FlashAttention 2 adds linear biases"),
    Step(is_beyond_3, _four, "FlashAttention 3 has no kernel for this layer"),
    Step(wants_reset_windows, _four, "only FlashAttention 4 has the mask of reset windows"),
    Step(is_batch_invariant, _two, "FlashAttention 4's schedule depends on the batch"),
    Step(is_barred_from_own_kernel, _two, "FlashAttention 4's kernel for 256 takes less"),
    Step(is_beyond_4, _two, "FlashAttention 4 has no kernel for this head size"),
)


def resolve_version(ask: Ask, world: World, steps: tuple[Step, ...] = STEPS) -> int | None:
    """The version that serves such a layer in `world`; None where it does not run here."""
    version = 2
    for step in steps:
        if step.when(ask, world, version):
            version = step.then(world)
    return version if is_usable(version, world) else None


def takes_fp8(ask: Ask, world: World, steps: tuple[Step, ...] = STEPS) -> bool:
    """Whether the version of such a layer reads an fp8_e4m3 cache."""
    version, major = resolve_version(ask, world, steps), world.device.major
    if major == 9:
        return version == 3 or (version == 4 and ask.head_size in (None, LARGEST_HEAD[4]))
    return major == 10 and version == 4


# The class as a whole, before any layer is known -------------------------------------------


def fa_is_3_or_4(world: World) -> bool:
    """What FlashAttention resolves to without a layer is version 3 or 4."""
    return resolve_version(NOTHING_KNOWN, world) in (3, 4)


def fa_takes_fp8(world: World) -> bool:
    """What FlashAttention resolves to without a layer reads fp8 caches."""
    return takes_fp8(NOTHING_KNOWN, world)


# Rules of combination ----------------------------------------------------------------------


def forced_version_is_not_used(config: Any, world: World) -> bool:
    """The user asked for a version, and another, or none, would serve this layer."""
    forced = world.wishes.flash_attn_version
    return forced is not None and resolve_version(ask_of(config), world) != forced


def no_version_runs(config: Any, world: World) -> bool:
    """The version that the layer needs is not installed or does not run on this device.

    That is version 2: no step leads to another one that is not usable, unless it is forced.
    """
    capability = world.device.capability
    if world.wishes.flash_attn_version is not None or capability is None or is_usable(2, world):
        return False
    somewhere = capability >= OLDEST and world.inventory.usable("flash_attention")
    return somewhere and resolve_version(ask_of(config), world) is None


def head_is_beyond_version(config: Any, world: World) -> bool:
    """The head is larger than the version that serves the layer takes."""
    size = config.head_size
    if not LARGEST_HEAD[2] < size <= LARGEST_HEAD[4] or not is_usable(4, world):
        return False
    version = resolve_version(ask_of(config), world)
    return version is not None and size > LARGEST_HEAD[version]


def sinks_are_beyond_version(config: Any, world: World) -> bool:
    """The layer has sinks and resolves to FlashAttention 2, which has none."""
    if Feature.SINKS not in config.needs or not world.holds(fa_is_3_or_4):
        return False
    return resolve_version(ask_of(config), world) == 2


def reset_windows_are_beyond_version(config: Any, world: World) -> bool:
    """The layer's windows are reset after a prefix, and another version than 4 serves it."""
    if Feature.RSWA not in config.needs:
        return False
    return resolve_version(ask_of(config), world) in (2, 3)


def is_hopper_fp8_with_spans(config: Any, world: World) -> bool:
    """Image spans over a quantised cache on a Hopper."""
    spans = Feature.MM_PREFIX in config.needs and is_quantised(config.kv_cache_dtype)
    return spans and world.device.capability == (9, 0)


def fp8_is_beyond_version(config: Any, world: World) -> bool:
    """An fp8 cache that the version serving this layer does not read, though others do."""
    if config.kv_cache_dtype not in ("fp8", "fp8_e4m3") or not world.holds(fa_takes_fp8):
        return False
    return not takes_fp8(ask_of(config), world)


def spans_are_beyond_version(config: Any, world: World) -> bool:
    """Image spans, and another version than 4 serves the layer though 4 is here."""
    if Feature.MM_PREFIX not in config.needs or not is_usable(4, world):
        return False
    return resolve_version(ask_of(config), world) != 4


def block_is_not_own_kernels(config: Any, world: World) -> bool:
    """A block size that FlashAttention 4's kernel for this head and cache does not take."""
    size = config.block_size
    if size is None or size % OWN_KERNEL_BLOCK == 0:
        return False
    ask = ask_of(config)._replace(block_size=None)
    if is_own_kernel_head(ask, world):
        return resolve_version(ask, world) == 4
    fp8 = config.kv_cache_dtype in ("fp8", "fp8_e4m3") and config.head_size == LARGEST_HEAD[4]
    wide = fp8 and world.device.major == 9 and size % 64 != 0
    return wide and resolve_version(ask, world) == 4


def causal_half_is_2(config: Any, world: World) -> bool:
    """Steps without image spans would run on FlashAttention 2."""
    return resolve_version(ask_of(config), world) not in (3, 4)


# DiffKV -----------------------------------------------------------------------------------


def serves_narrow_values(config: Any, world: World) -> bool:
    """FlashAttention 3 or 4 serves a layer whose values are narrower than its keys."""
    return resolve_version(ask_of(config), world) in (3, 4)


def narrow_values_need_3_or_4(config: Any, world: World) -> bool:
    """Values narrower than keys, and version 2 serves the layer."""
    return Feature.V_HEAD_SIZE in config.needs and resolve_version(ask_of(config), world) == 2
