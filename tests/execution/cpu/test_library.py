"""The library says what it is, and refuses what it cannot do without touching anything."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnplat.backends.pages import PageTable
from attnplat.config.env import CPU_ISAS
from attnplat.errors import ConfigError, PackageError, PlanMismatchError
from attnplat.platforms.cpu.impls.attention import AmxMlaImpl, CpuAttnImpl
from attnplat.platforms.cpu.kernels import library
from attnplat.platforms.detection import read_text
from tests.execution.cases import layer, make_step, run_plan
from tests.execution.cpu.steps import ISAS, attend, same
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401

ROOT = Path(__file__).resolve().parents[3]


def test_instruction_sets_have_the_names_that_users_know() -> None:
    assert set(library.load().isas) <= set(CPU_ISAS)
    assert library.load().isas[0] == "scalar"
    assert set(ISAS) <= set(library.load().isas)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc/cpuinfo")
def test_what_the_processor_runs_is_what_the_system_reports() -> None:
    flags = (read_text("/proc/cpuinfo") or "").split()
    for isa, flag in (("avx2", "avx2"), ("avx512", "avx512dq"), ("amx", "amx_bf16")):
        if isa in library.load().isas:
            assert (isa in ISAS) == (flag in flags)


def test_the_structs_are_as_long_as_the_library_says() -> None:
    assert ctypes.sizeof(library.TensorsStruct) == library._PACKED.size
    names = [name for name, _ in library.TensorsStruct._fields_]
    assert names[2:] == list(library.Tensors._fields)


def test_a_struct_of_another_size_or_version_is_refused() -> None:
    plan = library.PlanStruct(size=ctypes.sizeof(library.PlanStruct) - 8, version=library.ABI)
    with pytest.raises(library.KernelError, match="version"):
        library.load().schedule(plan)
    plan = library.PlanStruct(size=ctypes.sizeof(library.PlanStruct), version=library.ABI + 1)
    with pytest.raises(library.KernelError, match="version"):
        library.load().schedule(plan)


def test_an_instruction_set_that_is_not_here_is_refused_by_name() -> None:
    missing = next(isa for isa in CPU_ISAS if isa not in ISAS)
    with pytest.raises(ConfigError, match=f"{missing}.*this machine runs.*scalar"):
        CpuAttnImpl.create(layer(), "cpu", isa=missing)


@pytest.mark.skipif("amx" in ISAS, reason="this machine has AMX")
def test_the_backend_that_is_named_for_amx_is_refused_without_it() -> None:
    from attnplat.config.layer import MlaConfig

    config = MlaConfig(
        num_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_size=8,
        head_size=24,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="needs AMX"):
        AmxMlaImpl.create(config, "cpu")


def test_the_variable_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLAT_CPU_ISA", "scalar")
    assert CpuAttnImpl.create(layer(), "cpu").isa == "scalar"
    assert CpuAttnImpl.create(layer(), "cpu", isa=ISAS[-1]).isa == ISAS[-1]


def test_an_install_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.kernels, "__path__", [])
    library.load.cache_clear()
    try:
        with pytest.raises(PackageError, match=r"without its CPU kernels.*compiler"):
            CpuAttnImpl.create(layer(), "cpu")
    finally:
        library.load.cache_clear()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block", [-1, -(1 << 31)])
def test_a_negative_block_among_those_that_are_read_is_refused(isa: str, block: int) -> None:
    step = make_step(layer(), [1], [40])
    paged = step.paged(16)
    paged.pages.block_table[0, 1] = block
    impl = CpuAttnImpl.create(step.config, "cpu", isa=isa)
    with pytest.raises(ConfigError, match=f"names block {block} among those that request 0 reads"):
        impl.plan(step.batch, paged.pages)


def test_a_block_past_the_cache_is_refused() -> None:
    step = make_step(layer(), [1], [40])
    paged = step.paged(16)
    paged.pages.block_table[0, 1] = paged.cache.num_blocks
    impl = CpuAttnImpl.create(step.config, "cpu")
    plan = impl.plan(step.batch, paged.pages)
    with pytest.raises(PlanMismatchError, match="names block"):
        run_plan(impl, plan, step, paged)


def test_a_block_that_a_rolling_table_no_longer_has_is_refused() -> None:
    step = make_step(layer(), [1], [40])
    paged = step.paged(16)
    first = torch.tensor([1], dtype=torch.int32)
    pages = PageTable(block_table=paged.pages.block_table[:, 1:], block_size=16, first_block=first)
    impl = CpuAttnImpl.create(step.config, "cpu")
    with pytest.raises(ConfigError, match=r"reads block 0 of its sequence.*holds 1 to 2"):
        impl.plan(step.batch, pages)


@pytest.mark.parametrize("isa", ISAS)
def test_a_rolling_table_gives_the_bits_of_a_whole_one(isa: str) -> None:
    step = make_step(layer(sliding_window=(20, 0)), [1, 1], [100, 37])
    paged = step.paged(16)
    want = attend(step, isa, paged)
    table = paged.pages.block_table
    rolled = torch.stack([table[0, 4:7], table[1, :3]])
    first = torch.tensor([4, 0], dtype=torch.int32)
    pages = PageTable(block_table=rolled, block_size=16, first_block=first)
    impl = CpuAttnImpl.create(step.config, "cpu", isa=isa)
    got = run_plan(impl, impl.plan(step.batch, pages), step, paged)
    assert same(got, want)


@pytest.mark.parametrize(
    ("start", "lens"),
    [([0, 3, 2], [5, 5]), ([0, 1, 9], [5, 5]), ([-1, 1, 3], [5, 5]), ([0, 1, 3], [5, -1])],
)
def test_lengths_that_do_not_fit_together_are_refused(start: list[int], lens: list[int]) -> None:
    step = make_step(layer(), [1, 2], [5, 5])
    batch = replace(
        step.batch,
        query_start_loc=torch.tensor(start, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
    )
    impl = CpuAttnImpl.create(step.config, "cpu")
    with pytest.raises(ValueError, match=r"query_start_loc|seq_len|do not fit together"):
        impl.plan(batch, step.paged().pages)


FORKED = """
import os, sys, torch
from tests.execution.cpu.steps import attend, same
from tests.execution.cases import layer, make_step
from attnplat.platforms.cpu.kernels import library
step = make_step(layer(), [1, 30], [700, 30])
paged = step.paged()
lib = library.load()
if sys.argv[1] == "pool":
    lib._parallel_for = library.ctypes.cast(lib._c.attnplat_cpu_pool_for, library.c_void_p).value
torch.set_num_threads(2 if sys.argv[1] == "pool" else 1)
want = attend(step, lib.usable_isas[-1], paged)
child = os.fork()
if child == 0:
    os._exit(0 if same(attend(step, lib.usable_isas[-1], paged), want) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("threads", ["torch", "pool"])
def test_a_child_process_runs_after_a_fork(threads: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, threads],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0


def test_the_librarys_own_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(layer(dtype="bfloat16"), [1, 90], [1100, 90])
    paged = step.paged()
    want = attend(step, ISAS[-1], paged)
    lib = library.load()
    pool = ctypes.cast(lib._c.attnplat_cpu_pool_for, ctypes.c_void_p).value
    monkeypatch.setattr(lib, "_parallel_for", pool)
    assert all(same(attend(step, ISAS[-1], paged), want) for _ in range(5))


@pytest.mark.parametrize("isa", ISAS)
def test_reading_memory_reads_all_of_it(isa: str) -> None:
    data = torch.arange(1 << 16, dtype=torch.int64)
    assert library.load().read(data, 2, isa) == int(data.sum())
