"""The portable backends on an accelerator: right, and without waiting for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.interface import AttentionImpl, Plan
from attnplat.backends.kv_cache import KVCache
from tests.execution.cases import IMPLS, Paged, Step, assert_close, layer, make_step, run
from tests.execution.fuzz import random_step

pytestmark = pytest.mark.gpu


def moved(value: Any) -> Any:
    """A batch, page table, cache, mapping or tensor on the accelerator; host mirrors stay."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {name: moved(v) for name, v in value.items()}
    if isinstance(value, KVCache):
        return KVCache(k=moved(value.k), v=moved(value.v), spec=value.spec)
    if isinstance(value, Batch | PageTable):
        tensors = {
            name: moved(getattr(value, name))
            for name in value.__dataclass_fields__
            if isinstance(getattr(value, name), torch.Tensor) and not name.endswith("_host")
        }
        return replace(value, **tensors)
    raise TypeError(type(value).__name__)


def run_there(
    name: str, step: Step, paged: Paged | None, *, watched: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) computed on the accelerator; `watched` makes any wait for it an error."""
    impl = IMPLS[name].create(step.config, "cuda")
    batch, q, options = moved(step.batch), moved(step.q), moved(step.options)
    pages = cache = kv = None
    if paged is None:
        kv = tuple(map(moved, step.packed()))
    else:
        pages, cache = moved(paged.pages), moved(paged.cache)
    torch.cuda.set_sync_debug_mode("error" if watched else "default")
    try:
        plan: Plan = impl.plan(batch, pages)
        result = impl.forward(plan, q, cache, kv=kv, **options, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return result[0].cpu(), result[1].cpu()


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("seed", range(3000, 3040))
def test_an_accelerator_gives_what_the_host_gives(name: str, seed: int) -> None:
    step, paged = random_step(seed, longest=80)
    assert_close(run_there(name, step, paged), run("REFERENCE", step, paged), step)


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("wants", [{}, {"sinks": True}, {"sliding_window": (20, -1)}])
def test_plan_and_forward_never_wait(name: str, wants: dict[str, Any]) -> None:
    step = make_step(layer(dtype="bfloat16", **wants), [1, 1, 40, 2], [33, 60, 70, 9])
    run_there(name, step, step.paged())
    got = run_there(name, step, step.paged(), watched=True)
    assert_close(got, run("REFERENCE", step, step.paged()), step)


@pytest.mark.parametrize("slots", [[3, -1, 40], [-1, -1, -1], [0, 1, -7]])
def test_negative_slots_are_skipped_without_asking_how_many(slots: list[int]) -> None:
    step = make_step(layer(), [3])
    impl: AttentionImpl = IMPLS["TORCH_SDPA"].create(step.config, "cuda")
    cache = KVCache.allocate(impl.kv_cache_spec(), 3, "cuda")
    for plane in cache.pages():
        plane.fill_(5)
    pages = PageTable(
        block_table=torch.zeros(1, 3, dtype=torch.int32).cuda(),
        block_size=16,
        slot_mapping=torch.tensor(slots).cuda(),
    )
    k, v = moved(step.k[0]), moved(step.v[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        impl.write_kv(cache, k, v, pages)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tokens = cache.pages()[0].transpose(1, 2).reshape(48, 2, 16).cpu()
    expected = torch.full((48, 2, 16), 5.0)
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = step.k[0][row]
    assert torch.equal(tokens, expected)
