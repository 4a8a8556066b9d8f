"""Recorded into a device graph and replayed: updates reach it, and nothing else has to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, BatchBounds, PageTable
from attnplat.backends.handle import HANDLE_TYPE
from attnplat.backends.interface import AttentionImpl, Plan
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.portable.torch_sdpa import TorchSdpaImpl
from tests.execution.cases import assert_close, layer, make_step, page, run
from tests.execution.test_on_device import moved

pytestmark = pytest.mark.gpu

BOUNDS = BatchBounds(max_reqs=4, max_tokens=9, max_query_len=5, max_seq_len=90)
STEPS = (([1, 1, 1], [33, 60, 1]), ([5, 0, 2, 1], [88, 0, 2, 64]), ([1], [90]), ([0], [0]))
BLOCKS, BLOCK_SIZE = 30, 16
LAYERS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "sinks and window": {"sinks": True, "sliding_window": (20, -1)},
    "soft cap and alibi": {"logits_soft_cap": 5.0, "alibi": True},
    "fp8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "int8 cache": {"kv_cache_dtype": "int8_per_token_head"},
}


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def allocations() -> int:
    """Pieces of device memory ever handed out."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def on_device_alone(batch: Batch) -> Batch:
    """The batch as an engine that knows no lengths on the host has it."""
    bare = batch.replace(query_start_loc_host=None, seq_lens_host=None, host_lens="upper")
    found = moved(bare)
    assert isinstance(found, Batch)
    return found


class Recorded:
    """Two layers that write their new tokens and attend, at addresses that stay."""

    def __init__(self, impl: AttentionImpl, options: dict[str, torch.Tensor]) -> None:
        self.impl, self.options = impl, options
        spec, rows = impl.kv_cache_spec(BLOCK_SIZE), BOUNDS.max_tokens
        self.caches = [KVCache.allocate(spec, BLOCKS, "cuda") for _ in range(2)]

        def room(heads: int) -> torch.Tensor:
            return torch.full((rows, heads, 16), float("nan"), device="cuda", dtype=impl.dtype)

        self.q, self.k, self.v = room(4), room(2), room(2)
        self.outs = [room(4), room(4)]
        self.lse = torch.zeros(rows, 4, device="cuda")

    def run(self, plan: Plan) -> None:
        for n, (cache, out) in enumerate(zip(self.caches, self.outs, strict=True)):
            k, v = self.k * (1 + n), self.v - n
            self.impl.write_kv(cache, k, v, plan)
            self.impl.forward(plan, self.q, cache, out=out, lse=self.lse, **self.options)

    def state(self) -> list[torch.Tensor]:
        tensors = [*self.outs, self.lse]
        for cache in self.caches:
            tensors += [view for view in cache.views if view is not None]
        return [tensor.clone() for tensor in tensors]

    def restore(self, state: list[torch.Tensor]) -> None:
        for out, kept in zip((*self.outs, self.lse), state, strict=False):
            out.copy_(kept)
        kept_views = iter(state[3:])
        for cache in self.caches:
            for view in cache.views:
                if view is not None:
                    view.copy_(next(kept_views))


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bit for bit, NaN included."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_a_replay_after_an_update_is_the_eager_call(kind: str) -> None:
    config = layer(**LAYERS[kind])
    steps = [make_step(config, *lens, seed=n) for n, lens in enumerate(STEPS)]
    impl = TorchSdpaImpl.create(config, "cuda")
    model = Recorded(impl, moved(steps[0].options))
    tables = (
        [page(step, BLOCK_SIZE, "HND", 3).pages for step in steps]
        if config.kv_cache_dtype == "auto"
        else []
    )
    if not tables:
        plain = [
            make_step(layer(**{**LAYERS[kind], "kv_cache_dtype": "auto"}), *lens, seed=n)
            for n, lens in enumerate(STEPS)
        ]
        tables = [page(step, BLOCK_SIZE, "HND", 3).pages for step in plain]
    batches = [on_device_alone(step.batch) for step in steps]
    pages = [moved(table) for table in tables]
    for cache in model.caches:
        for view in cache.views:
            if view is not None:
                view.view(torch.uint8).zero_()
    plan = impl.plan(batches[0], pages[0], bounds=BOUNDS)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        model.run(plan)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        model.run(plan)
    for n in (0, 1, 2, 3, 1, 0):
        step = steps[n]
        real = len(step.q)
        for room, given in (
            (model.q, step.q),
            (model.k, torch.cat(step.k)),
            (model.v, torch.cat(step.v)),
        ):
            room.fill_(float("nan"))
            room[:real] = given[:real].cuda()
        before, count = model.state(), allocations()
        with no_waiting():
            assert impl.update(plan, batches[n], pages[n]) is plan
            assert allocations() == count, "an update allocates nothing"
            graph.replay()
        replayed = model.state()
        model.restore(before)
        with torch.no_grad(), no_waiting():
            model.run(plan)
        assert same(replayed, model.state()), f"step {n}: the replay is not the eager call"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replay_is_right(dtype: str) -> None:
    config = layer(dtype=dtype)
    impl = TorchSdpaImpl.create(config, "cuda")
    made = [make_step(config, *lens, seed=n) for n, lens in enumerate(STEPS)]
    paged = [
        page(step, BLOCK_SIZE, "HND", BLOCKS - sum(-(-n // 16) for n in lens[1]))
        for step, lens in zip(made, STEPS, strict=True)
    ]
    cache = moved(paged[0].cache)
    rows = BOUNDS.max_tokens
    q = torch.zeros(rows, 4, 16, dtype=impl.dtype, device="cuda")
    out = torch.full((rows, 4, 16), 7.0, dtype=impl.dtype, device="cuda")
    lse = torch.full((rows, 4), 7.0, device="cuda")
    tables = [replace(moved(one.pages), slot_mapping=None) for one in paged]
    batches = [on_device_alone(step.batch) for step in made]
    plan = impl.plan(batches[0], tables[0], bounds=BOUNDS)
    impl.forward(plan, q, cache, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(plan, q, cache, out=out, lse=lse)
    for n in (0, 1, 2, 3, 2, 1, 0):
        step = made[n]
        real = len(step.q)
        cache.k.copy_(paged[n].cache.k)
        cache.v.copy_(paged[n].cache.v)
        q.fill_(float("nan"))
        q[:real] = step.q.cuda()
        out.fill_(7)
        lse.fill_(7)
        impl.update(plan, batches[n], tables[n])
        graph.replay()
        got = out.cpu(), lse.cpu()
        assert (got[0][real:] == 7).all() and (got[1][real:] == 7).all()
        assert_close((got[0][:real], got[1][:real]), run("REFERENCE", step, paged[n]), step)


@pytest.mark.skipif(HANDLE_TYPE is None, reason="torch before 2.11: graphs break")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_on_the_device_takes_any_plan(backend: str) -> None:
    from torch._dynamo import config as dynamo

    config = layer(dtype="bfloat16")
    impl = TorchSdpaImpl.create(config, "cuda")
    caches = [KVCache.allocate(impl.kv_cache_spec(BLOCK_SIZE), BLOCKS, "cuda") for _ in range(2)]

    def model(plan: Plan, cache: KVCache, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            impl.write_kv(cache, k, k + 1, plan)
            q = impl.forward(plan, q, cache) + q
        return q

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad(), dynamo.patch(error_on_recompile=True):
        for n, lens in enumerate((([1, 1], [20, 33]), ([2, 0], [7, 9]), ([0, 2], [0, 40]))):
            batch = Batch.from_lengths(*lens, device="cuda")
            pages = PageTable.from_blocks([[7, 2, 9], [0, 4, 11]], batch, BLOCK_SIZE)
            given: list[Any] = [torch.randn(2, h, 16, device="cuda").bfloat16() for h in (4, 2)]
            for cache in caches:
                for plane in cache.pages():
                    plane.fill_(n)
            plan = impl.plan(batch, pages)
            torch.testing.assert_close(
                compiled(plan, caches[0], *given), model(plan, caches[1], *given)
            )
            torch.testing.assert_close(caches[0].k, caches[1].k)
