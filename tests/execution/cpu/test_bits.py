"""CPU_ATTN's results are the same bits whatever does not belong to the request itself."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.workspace import Workspace
from attnplat.platforms.cpu.impls.attention import CpuAttnImpl
from tests.execution.cases import Step, layer, make_step, run_plan
from tests.execution.cpu.steps import ISAS, attend, same
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401

QUERIES, KEYS = [1, 90, 3, 1], [1400, 90, 700, 33]


@pytest.fixture
def step() -> Step:
    config = layer(dtype="bfloat16", num_heads=6, sinks=True, head_size=32)
    return make_step(config, QUERIES, KEYS)


def alone(step: Step, r: int) -> Step:
    """Request r by itself."""
    rows = slice(sum(QUERIES[:r]), sum(QUERIES[: r + 1]))
    return replace(
        step,
        batch=Batch.from_lengths([QUERIES[r]], [KEYS[r]]),
        q=step.q[rows],
        k=[step.k[r]],
        v=[step.v[r]],
    )


@pytest.mark.parametrize("isa", ISAS)
def test_batch_mates_and_how_work_is_shared_out_do_not_matter(isa: str, step: Step) -> None:
    out, lse = attend(step, isa, step.paged())
    for r in range(len(QUERIES)):
        rows = slice(sum(QUERIES[:r]), sum(QUERIES[: r + 1]))
        one = alone(step, r)
        assert same(attend(one, isa, one.paged()), (out[rows], lse[rows]))


@pytest.mark.parametrize("isa", ISAS)
def test_the_number_of_threads_does_not_matter(isa: str, step: Step) -> None:
    impl = CpuAttnImpl.create(step.config, "cpu", isa=isa)
    paged = step.paged()
    plan = impl.plan(step.batch, paged.pages)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(run_plan(impl, plan, step, paged))
    finally:
        torch.set_num_threads(before)
    assert all(same(found[0], other) for other in found[1:])


@pytest.mark.parametrize("isa", ISAS)
def test_where_blocks_are_and_how_memory_is_laid_out_does_not_matter(isa: str, step: Step) -> None:
    want = attend(step, isa, step.paged(16, "HND"))
    for block_size, layout, seed in (
        (16, "HND", 5),
        (16, "NHD", 1),
        (64, "HND", 2),
        (24, "NHD", 3),
    ):
        assert same(attend(step, isa, replace(step, seed=seed).paged(block_size, layout)), want)
    assert same(attend(step, isa), want)


@pytest.mark.parametrize("isa", ISAS)
def test_strides_of_q_and_out_and_lse_do_not_matter(isa: str, step: Step) -> None:
    paged = step.paged()
    want = attend(step, isa, paged)
    tokens, heads, size = step.q.shape
    wide = torch.full((tokens, heads, 3 * size + 1), float("nan"), dtype=step.q.dtype)
    wide[:, :, size : 2 * size] = step.q
    out = torch.full((tokens + 3, 2, heads, size), float("nan"), dtype=step.q.dtype)
    lse = torch.full((heads, tokens + 3), float("nan"))
    strided = replace(step, q=wide[:, :, size : 2 * size])
    attend(strided, isa, paged, out=out[:, 1], lse=lse.T)
    assert same((out[:tokens, 1], lse.T[:tokens]), want)
    assert bool(out[:, 0].isnan().all())
    assert bool(out[tokens:].isnan().all())
    assert bool(lse[:, tokens:].isnan().all())


@pytest.mark.parametrize("isa", ISAS)
def test_a_poisoned_workspace_of_the_caller_does_not_matter(isa: str, step: Step) -> None:
    paged = step.paged()
    want = attend(step, isa, paged)
    impl = CpuAttnImpl.create(step.config, "cpu", isa=isa)
    workspace = Workspace("cpu", 1 << 22)
    workspace.take(workspace.nbytes - 256).fill_(255)
    workspace.reset()
    plan = impl.plan(step.batch, paged.pages, workspace=workspace)
    assert same(run_plan(impl, plan, step, paged), want)
    assert same(run_plan(impl, plan, step, paged), want)
    assert workspace.free_nbytes == workspace.nbytes


@pytest.mark.parametrize("isa", ISAS)
def test_writing_first_or_with_the_call_is_the_same(isa: str, step: Step) -> None:
    first, second = step.paged(), step.paged()
    new = [
        torch.cat([t[n - q :] for t, q, n in zip(kv, QUERIES, KEYS, strict=True)])
        for kv in (step.k, step.v)
    ]
    impl = CpuAttnImpl.create(step.config, "cpu", isa=isa)
    results = []
    for paged, fused in ((first, False), (second, True)):
        for r, (q, n) in enumerate(zip(QUERIES, KEYS, strict=True)):
            for plane in paged.cache.pages():
                for at in range(n - q, n):
                    plane[paged.blocks[r][at // 16], :, at % 16] = float("nan")
        plan = impl.plan(step.batch, paged.pages)
        if not fused:
            impl.write_kv(paged.cache, new[0], new[1], plan)
        options: dict[str, Any] = {"kv": (new[0], new[1])} if fused else {}
        results.append(
            impl.forward(plan, step.q, paged.cache, **options, **step.options, return_lse=True)
        )
    assert same(results[0], results[1])
    assert same(results[0], attend(step, isa, step.paged()))


@pytest.mark.parametrize("isa", ISAS)
def test_two_threads_of_the_caller_do_not_disturb_each_other(isa: str, step: Step) -> None:
    paged = step.paged()
    want = attend(step, isa, paged)
    impl = CpuAttnImpl.create(step.config, "cpu", isa=isa)
    found: list[bool] = []

    def work() -> None:
        plan = impl.plan(step.batch, paged.pages)
        found.extend(same(run_plan(impl, plan, step, paged), want) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 15


@pytest.mark.parametrize("isa", ISAS)
def test_padding_requests_and_rows_are_neither_read_nor_written(isa: str, step: Step) -> None:
    paged = step.paged()
    want = attend(step, isa, paged)
    batch = step.batch.padded(7, 120)
    table = torch.full((7, paged.pages.block_table.shape[1]), -1, dtype=torch.int32)
    table[:4] = paged.pages.block_table
    q = torch.full((120, *step.q.shape[1:]), float("nan"), dtype=step.q.dtype)
    q[: len(step.q)] = step.q
    out = torch.full_like(q, 7.0)
    padded = replace(step, batch=batch, q=q)
    pages = PageTable(block_table=table, block_size=16)
    impl = CpuAttnImpl.create(step.config, "cpu", isa=isa)
    got, lse = run_plan(impl, impl.plan(batch, pages), padded, replace(paged, pages=pages), out=out)
    live = len(step.q)
    assert same((got[:live], lse[:live]), want)
    assert bool((got[live:] == 7).all())


@pytest.mark.parametrize("isa", ISAS)
def test_a_prompt_in_parts_gives_the_bits_of_the_whole_by_the_same_kernel(isa: str) -> None:
    config = layer(dtype="bfloat16", num_heads=8, num_kv_heads=2, head_size=32)
    step = make_step(config, [120], [120])
    whole, _ = attend(step, isa, step.paged())
    for cut in (40, 57, 64):
        parts = replace(
            step,
            batch=Batch.from_lengths([cut, 120 - cut], [cut, 120]),
            k=[step.k[0][:cut], step.k[0]],
            v=[step.v[0][:cut], step.v[0]],
        )
        out, _ = attend(parts, isa, parts.paged())
        assert torch.equal(out, whole)
