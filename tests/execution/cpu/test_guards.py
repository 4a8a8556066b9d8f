"""Indexer and sparse kernels touch no byte but what they are given: guard pages at both ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplat.backends.batch import PageTable
from attnplat.backends.index_cache import IndexCache
from attnplat.backends.kv_cache import KVCache
from attnplat.platforms.cpu.kernels import library
from attnplat.platforms.cpu.kernels.indexing import INDEX_ENCODINGS, choose_columns
from tests.execution.cpu import test_indexer, test_sparse
from tests.execution.cpu.steps import ISAS, same
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401
from tests.execution.cpu.test_memory import Guarded


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block_size", [1, 24])
@pytest.mark.parametrize("encoding", [*INDEX_ENCODINGS, "odd"])
@pytest.mark.parametrize("isa", ISAS)
def test_an_indexer_stays_inside(
    isa: str, encoding: str, block_size: int, dtype: str, at_end: bool
) -> None:
    size = 30 if encoding == "odd" else 128
    stored = "bfloat16" if encoding == "odd" else encoding
    made = test_indexer.world(stored, "prompts", dtype=dtype, block_size=block_size, size=size)
    guards = Guarded(at_end)
    used = sorted({int(b) for b in made.pages.block_table.flatten().tolist() if b >= 0})
    place = {block: n for n, block in enumerate(used)}
    table = made.pages.block_table.clone().apply_(lambda b: place.get(b, b))
    guarded = replace(
        made,
        cache=IndexCache(pool=guards.copy(made.cache.pool[used]), spec=made.cache.spec),
        pages=PageTable(block_table=guards.copy(table), block_size=block_size),
        q=guards.copy(made.q),
        weights=guards.copy(made.weights),
    )
    assert torch.equal(guarded.logits(isa), made.logits(isa))
    ends = guards.copy(torch.arange(57, dtype=torch.int32))
    assert torch.equal(guarded.chosen(isa, row_ends=ends), made.chosen(isa, row_ends=ends.clone()))


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("columns", [1, 9, 1000])
def test_choosing_stays_inside(columns: int, at_end: bool) -> None:
    logits = torch.randn(3, columns)
    guarded = Guarded(at_end).copy(logits)
    want = choose_columns(library.load(), logits, 8, 1)
    assert torch.equal(choose_columns(library.load(), guarded, 8, 1), want)


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("encoding", test_sparse.ENCODINGS)
@pytest.mark.parametrize("isa", ISAS)
def test_sparse_attention_stays_inside(isa: str, encoding: str, at_end: bool) -> None:
    made = test_sparse.World(encoding, "mixed", block_size=1)
    want = made.run(isa)
    guards = Guarded(at_end)
    k, scales = made.cache.k, made.cache.k_scales
    # Blocks of one token: the two that no table names are left out.
    used = sorted({int(b) for b in made.pages.block_table.flatten().tolist() if b >= 0})
    place = {block: n for n, block in enumerate(used)}
    made.cache = KVCache(
        k=guards.copy(k[used]),
        k_scales=None if scales is None else guards.copy(scales[used]),
        spec=made.cache.spec,
    )
    table = made.pages.block_table.clone().apply_(lambda b: place.get(b, b))
    made.pages = PageTable(block_table=guards.copy(table), block_size=1)
    made.q, made.topk = guards.copy(made.q), guards.copy(made.topk)
    assert same(made.run(isa), want)
