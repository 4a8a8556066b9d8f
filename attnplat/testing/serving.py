"""Running whole sequences step by step over one cache, as an engine does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnplat.testing.bench import Bench
from attnplat.testing.case import Failed
from attnplat.testing.paging import PagedMemory, paging_of
from attnplat.testing.scenes import Arrangement, Scene
from attnplat.testing.stage import Stage, lay_out
from attnplat.testing.truth import Request


def serve(
    bench: Bench, whole: Scene, how: Arrangement, steps: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Each request's tokens in steps of the given sizes, the last repeated until all are in.

    The cache starts as poison and is written by the calls alone. Every step is judged;
    answers all rows, request after request. `how.write` must be `fused` or `first`.
    """
    assert how.write != "done"
    impl = bench.impl(whole)
    done = [0] * len(whole.requests)
    rows: list[list[torch.Tensor]] = [[] for _ in whole.requests]
    blocks, memory = _home(bench, whole, how)
    for number in range(max(whole.seq_lens) + 1):
        sizes = [
            min(own[min(number, len(own) - 1)], length - at)
            for own, length, at in zip(steps, whole.seq_lens, done, strict=True)
        ]
        if not any(sizes):
            break
        scene = step_of(whole, done, sizes)
        now = how.replace(blocks=blocks, num_blocks=memory.cache.num_blocks, order=number)
        outcome = bench.call(scene, now, impl=impl, stage=_stage(bench, scene, now, memory))
        bench.judge(scene, outcome)
        at = 0
        for r, size in enumerate(sizes):
            rows[r].append(outcome.out[at : at + size])
            at += size
            done[r] += size
    return torch.cat([torch.cat(own) for own in rows])


def step_of(whole: Scene, done: Sequence[int], sizes: Sequence[int]) -> Scene:
    """The scene of one step: `sizes` new tokens of each request after `done` ones."""
    key = ("step", tuple(done), tuple(sizes))
    if key not in whole.memory:
        parts = zip(whole.requests, done, sizes, strict=True)
        requests = tuple(_part(request, at, size) for request, at, size in parts)
        whole.memory[key] = whole.replace(requests=requests)
    found = whole.memory[key]
    assert isinstance(found, Scene)
    return found


def _part(request: Request, at: int, size: int) -> Request:
    end = at + size
    rows, keys = slice(at, end), slice(0, end)
    return replace(
        request,
        q=request.q[rows],
        k=request.k[keys],
        v=None if request.v is None else request.v[keys],
        topk=None if request.topk is None else request.topk[rows],
        bias=None if request.bias is None else request.bias[:, rows, keys],
        tree=None,
    )


def _home(
    bench: Bench, whole: Scene, how: Arrangement
) -> tuple[tuple[tuple[int, ...], ...], PagedMemory]:
    """Physical blocks for the whole sequences, and a cache that holds nothing yet."""
    paging = paging_of(whole, how)
    memory = PagedMemory.allocate(paging, bench.impl(whole), bench.device)
    memory = replace(memory, fresh=False)
    return tuple(tuple(own) for own in paging.blocks), memory


def _stage(bench: Bench, scene: Scene, how: Arrangement, memory: PagedMemory) -> Stage:
    """The step in the given cache, which must hold all earlier tokens already."""
    before = {name: own.clone() for name, (own, _) in memory.planes.items()}
    stage = lay_out(scene, how, bench.impl(scene), bench.device, memory)
    for name, (own, _) in memory.planes.items():
        if not bool(((own == before[name]) | own.isnan() & before[name].isnan()).all()):
            raise Failed("an earlier step did not leave its tokens in the cache")
    return stage
