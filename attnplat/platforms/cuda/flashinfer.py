"""What FlashInfer offers in a world: its TRT-LLM kernels, and what hangs on them.

FlashInfer's own kernels run anywhere from Ampere on. The TRT-LLM kernels are ready-made
binaries of single architectures: on Hopper and consumer Blackwell they decode, on datacenter
Blackwell they prefill too.
"""

from __future__ import annotations

from typing import Any

from attnplat.backends.portable.predicates import is_turboquant_run, model_is_known
from attnplat.config.names import Feature
from attnplat.platforms.world import World


def has_trtllm(world: World) -> bool:
    """The TRT-LLM kernels are installed and neither the user nor the run rules them out."""
    if world.wishes.use_trtllm_attention is False or world.run.batch_invariant:
        return False
    return world.inventory.usable("flashinfer_cubin")


def trtllm_decodes(world: World) -> bool:
    """The TRT-LLM kernels can decode on this device."""
    hopper = world.device.capability == (9, 0)
    return (hopper or world.device.major in (10, 12)) and has_trtllm(world)


def trtllm_serves_both(world: World) -> bool:
    """The TRT-LLM kernels can prefill and decode on this device."""
    return world.device.major == 10 and has_trtllm(world)


def takes_sinks(world: World) -> bool:
    """The kernels that the device gets take sinks."""
    return trtllm_serves_both(world) if world.device.major == 10 else trtllm_decodes(world)


def takes_adaptive_verification(world: World) -> bool:
    """Query lengths may differ from what the host planned for."""
    alone = (world.run.dcp_size or 1) == 1 and trtllm_decodes(world)
    return world.device.major == 10 and (alone or not model_is_known(world))


def takes_nvfp4(world: World) -> bool:
    """FlashInfer's own kernels read an nvfp4 cache on this device."""
    return world.device.major in (8, 9, 12)


def is_datacenter_blackwell(world: World) -> bool:
    """The device is of compute capability 10."""
    return world.device.major == 10


def is_consumer_blackwell(world: World) -> bool:
    """The device is of compute capability 12."""
    return world.device.major == 12


def is_hopper(world: World) -> bool:
    """The device is of compute capability 9."""
    return world.device.major == 9


def is_context_parallel(world: World) -> bool:
    """The cache is spread over several ranks."""
    return (world.run.dcp_size or 1) > 1


def is_before_hopper(world: World) -> bool:
    """The device is older than compute capability 9.0."""
    return (world.device.major or 0) < 9


# Rules of combination ----------------------------------------------------------------------


def _is_nvfp4_on_own_kernels(config: Any, world: World) -> bool:
    return str(config.kv_cache_dtype).startswith("nvfp4") and takes_nvfp4(world)


def is_nvfp4_with_head_64(config: Any, world: World) -> bool:
    """An nvfp4 cache under FlashInfer's own kernels, with heads of 64."""
    return config.head_size == 64 and _is_nvfp4_on_own_kernels(config, world)


def is_nvfp4_with_sinks(config: Any, world: World) -> bool:
    """An nvfp4 cache under FlashInfer's own kernels, with sinks."""
    return Feature.SINKS in config.needs and _is_nvfp4_on_own_kernels(config, world)


def layout_cannot_join_turboquant(config: Any, world: World) -> bool:
    """A layer beside TurboQuant's on datacenter Blackwell, where the layouts have none in common.

    Layers of one run share one layout. TurboQuant's is LBNHC; here FlashInfer takes LBHNC and
    BLHNC.
    """
    return is_datacenter_blackwell(world) and is_turboquant_run(world)
