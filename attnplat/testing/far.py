"""Caches whose addresses need 64 bits, in memory of which only what is touched takes room."""

from __future__ import annotations

import mmap

import torch

from attnplat.backends.kv_cache import KVCache
from attnplat.testing.bench import Bench, layers, same
from attnplat.testing.case import Check
from attnplat.testing.scenes import Scene
from attnplat.testing.stage import Stage
from attnplat.testing.terrain import Terrain

MAP_NORESERVE = 0x4000
"""Linux's flag for memory that nothing is set aside for; Python's mmap does not name it."""

FAR = (1 << 31) // 3 + 4096
"""Elements between blocks or rows, so that the fourth lies past 2^31."""


def lazy(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] of memory of which, on the CPU, only what is touched takes room."""
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(area, dtype=torch.uint8)


def far_cache(bench: Bench, stage: Stage) -> KVCache:
    """The stage's cache with blocks `FAR` elements from each other."""
    assert stage.cache is not None
    own = stage.cache
    planes = []
    for plane in (own.k,) if own.spec.values_in_keys else (own.k, own.v):
        assert plane is not None
        count = plane.shape[0] * FAR * plane.element_size()
        memory = lazy(count, bench.device).view(plane.dtype)
        far = memory.as_strided(plane.shape, (FAR, *plane.stride()[1:]))
        far.copy_(plane)
        planes.append(far)
    return KVCache(k=planes[0], v=planes[1] if len(planes) > 1 else None, spec=own.spec)


def far_blocks(scene: Scene, t: Terrain) -> Check:
    """Four blocks far apart give the bits that four blocks side by side give.

    The scene has two requests of two blocks each.
    """
    how = t.pages(blocks=((3, 0), (1, 2)), num_blocks=4, write="fused")

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, how, impl)
        stage.cache = far_cache(bench, stage)
        stage.watches = [w for w in stage.watches if "cache" not in w.name]
        plain = bench.agree(scene, how)
        same("blocks far apart", plain, bench.call(scene, how, impl=impl, stage=stage))

    return Check(layers(scene), run, f"{scene}, blocks far apart")
