"""CPU_INDEXER gives the scores and the keys that float64 gives, on every instruction set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.formats.index_pages import IndexPageOrder
from attnplat.backends.index_cache import IndexCache
from attnplat.backends.indexer import IndexerImpl, topk_rows
from attnplat.backends.portable.reference_indexer import ReferenceIndexerImpl
from attnplat.config.layer import IndexerConfig
from attnplat.config.names import Feature
from attnplat.errors import ConfigError, PlanMismatchError
from attnplat.platforms.cpu.impls.indexer import CpuIndexerImpl
from attnplat.platforms.cpu.kernels import library
from attnplat.platforms.cpu.kernels.indexing import INDEX_ENCODINGS, choose_columns
from tests.execution.cpu.steps import ISAS
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401

INF, NAN = float("inf"), float("nan")
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1, 1, 1, 1], [1, 33, 700, 64]),
    "drafts": ([2, 4, 1, 3], [130, 4, 65, 2100]),
    "prompts": ([40, 0, 17], [40, 9, 300]),
}
DTYPES = ["bfloat16", "float32", "float16", "float64"]


@dataclass
class World:
    """A step of an indexer."""

    batch: Batch
    pages: PageTable
    cache: IndexCache
    q: torch.Tensor
    weights: torch.Tensor
    config: IndexerConfig
    encoding: str

    def impl(self, isa: str | None = None) -> IndexerImpl:
        """The kernels of an instruction set, or what they are held against."""
        if isa is None:
            return ReferenceIndexerImpl.create(self.config, "cpu", encoding=self.encoding)
        return CpuIndexerImpl(self.config, "cpu", self.encoding, isa)

    def logits(self, isa: str | None = None, **options: Any) -> torch.Tensor:
        """Scores by an instruction set, or in float64."""
        return self.impl(isa).logits(*self.args(), **options)

    def chosen(self, isa: str | None = None, **options: Any) -> torch.Tensor:
        """The best keys by an instruction set, or in float64."""
        return self.impl(isa).topk(*self.args(), **options)

    def args(self) -> tuple[Any, ...]:
        return self.batch, self.pages, self.cache, self.q, self.weights


def world(
    encoding: str,
    lengths: str = "drafts",
    *,
    dtype: str = "bfloat16",
    block_size: int = 16,
    heads: int = 5,
    size: int = 128,
    topk: int = 9,
    order: IndexPageOrder | None = None,
    exact: bool = False,
    seed: int = 3,
) -> World:
    """Random keys, or ones whose scores are the same however they are added up."""
    gen = torch.Generator().manual_seed(seed)
    query_lens, seq_lens = LENGTHS[lengths]
    config = IndexerConfig(head_size=size, num_heads=heads, topk=topk)
    batch = Batch.from_lengths(query_lens, seq_lens)
    count = sum(-(-n // block_size) for n in seq_lens) + 3
    ids = torch.randperm(count, generator=gen).tolist()
    blocks = [[ids.pop() for _ in range(-(-n // block_size))] for n in seq_lens]
    spec = ReferenceIndexerImpl.create(config, "cpu", encoding=encoding).cache_spec(
        block_size, order
    )
    pool = torch.full((count, spec.bytes_per_block + 48), 0xFF, dtype=torch.uint8)
    cache = IndexCache(pool=pool[:, : spec.bytes_per_block], spec=spec)
    rows = (sum(query_lens), heads)
    if exact:
        # Numbers of two bits, and never a tile of nothing else than zeros.
        keys = torch.randint(-2, 3, (sum(seq_lens), size), generator=gen).float()
        keys[:, ::32] = 6 * keys[:, ::32].sign().where(keys[:, ::32] != 0, torch.tensor(1.0))
        q = torch.randint(-2, 3, (*rows, size), generator=gen).float()
        weights = torch.randint(0, 2, rows, generator=gen) - 0.5
    else:
        keys = torch.randn(sum(seq_lens), size, generator=gen)
        q = torch.randn(*rows, size, generator=gen)
        weights = torch.randn(*rows, generator=gen)
    written = PageTable.from_blocks(blocks, batch, block_size, write="all")
    assert written.slot_mapping is not None
    cache.write(keys, written.slot_mapping)
    return World(
        batch=batch,
        pages=PageTable.from_blocks(blocks, batch, block_size, write="none"),
        cache=cache,
        q=q.to(getattr(torch, dtype)),
        weights=weights,
        config=config,
        encoding=encoding,
    )


def close(found: torch.Tensor, want: torch.Tensor, made: World) -> None:
    """Within the rounding of sums of products in float32."""
    assert torch.equal(found == -INF, want == -INF)
    reach = made.q.float().abs().amax() * made.weights.abs().sum(1).amax() * 128 * 4
    live = want > -INF
    assert float((found - want)[live].abs().max()) <= 1e-6 * float(reach)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("encoding", INDEX_ENCODINGS)
@pytest.mark.parametrize("isa", ISAS)
def test_scores_are_those_of_float64(isa: str, encoding: str, lengths: str, dtype: str) -> None:
    made = world(encoding, lengths, dtype=dtype)
    close(made.logits(isa), made.logits(), made)


@pytest.mark.parametrize("heads", [1, 2, 12, 15, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("isa", ISAS)
def test_every_number_of_heads(isa: str, dtype: str, heads: int) -> None:
    made = world("index_fp8_132", "decode", dtype=dtype, heads=heads)
    close(made.logits(isa), made.logits(), made)


@pytest.mark.parametrize("encoding", INDEX_ENCODINGS)
@pytest.mark.parametrize("block_size", [1, 2, 16, 24, 64, 128, 256])
@pytest.mark.parametrize("isa", ISAS)
def test_every_block_size(isa: str, block_size: int, encoding: str) -> None:
    made = world(encoding, block_size=block_size)
    close(made.logits(isa), made.logits(), made)


@pytest.mark.parametrize("size", [8, 30, 64, 96, 128, 200])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("isa", ISAS)
def test_plain_keys_of_any_size(isa: str, dtype: str, size: int) -> None:
    made = world("bfloat16", dtype=dtype, size=size)
    close(made.logits(isa), made.logits(), made)


ORDERS = [
    ("index_fp8_132", IndexPageOrder.tile16()),
    ("index_fp8_132_e8m0", IndexPageOrder.tile16()),
    ("index_mxfp4_68", IndexPageOrder.aiter(64)),
    ("index_mxfp4_68", IndexPageOrder.aiter(8)),
    ("index_mxfp4_68", IndexPageOrder.aiter(64, wide=False)),
    ("index_mxfp4_68", IndexPageOrder.flydsl()),
]


@pytest.mark.parametrize(("encoding", "order"), ORDERS)
@pytest.mark.parametrize("isa", ISAS)
def test_pages_of_any_order_give_the_same_bits(
    isa: str, encoding: str, order: IndexPageOrder
) -> None:
    planar, other = (world(encoding, block_size=64, order=o) for o in (None, order))
    assert torch.equal(planar.logits(isa), other.logits(isa))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("encoding", INDEX_ENCODINGS)
@pytest.mark.parametrize("isa", ISAS)
def test_where_sums_are_exact_scores_and_keys_are_bit_for_bit_those_of_float64(
    isa: str, encoding: str, lengths: str, dtype: str
) -> None:
    made = world(encoding, lengths, dtype=dtype, heads=64, exact=True, topk=40)
    want = made.logits()
    assert torch.equal(made.logits(isa), want)
    live = want[want > -INF]
    assert len(live.unique()) < 0.6 * len(live)  # ties, everywhere
    assert torch.equal(made.chosen(isa), made.chosen())


@pytest.mark.parametrize("encoding", INDEX_ENCODINGS)
@pytest.mark.parametrize("isa", ISAS)
def test_keys_are_the_best_of_its_own_scores(isa: str, encoding: str) -> None:
    made = world(encoding, "prompts", heads=20)
    ends = torch.arange(57, dtype=torch.int32) * 7 - 3
    for options in ({}, {"row_ends": ends}):
        logits = made.logits(isa, **options)
        assert torch.equal(made.chosen(isa, **options), topk_rows(logits, 9))
        close(logits, made.logits(**options), made)


@pytest.mark.parametrize("encoding", INDEX_ENCODINGS)
@pytest.mark.parametrize("isa", ISAS)
def test_threads_and_batch_mates_do_not_matter(isa: str, encoding: str) -> None:
    made = world(encoding)
    want, chosen = made.logits(isa), made.chosen(isa)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(made.logits(isa), want)
            assert torch.equal(made.chosen(isa), chosen)
    finally:
        torch.set_num_threads(before)
    table = made.pages.block_table
    alone = replace(
        made,
        batch=Batch.from_lengths([1], [2100]),
        pages=PageTable(block_table=table[3:], block_size=16),
        q=made.q[9:],
        weights=made.weights[9:],
    )
    assert torch.equal(alone.logits(isa)[0], want[9])


@pytest.mark.parametrize("isa", ISAS)
def test_scores_that_are_kept_for_a_few_rows_at_a_time(isa: str) -> None:
    gen = torch.Generator().manual_seed(0)
    config = IndexerConfig(head_size=8, num_heads=1, topk=5)
    count, rows = 9000, 1900
    batch = Batch.from_lengths([rows, 1], [count, 3])
    impl = CpuIndexerImpl(config, "cpu", "bfloat16", isa)
    cache = IndexCache.allocate(impl.cache_spec(256), 37)
    blocks = [list(range(36)), [36]]
    pages = PageTable.from_blocks(blocks, batch, 256, write="all")
    impl.write(cache, torch.randn(count + 3, 8, generator=gen), pages)
    q, weights = torch.randn(rows + 1, 1, 8, generator=gen), torch.randn(rows + 1, 1, generator=gen)
    if isa == "scalar":
        q = q.bfloat16()
    args = (batch, pages, cache, q, weights)
    want = choose_columns(library.load(), impl.logits(*args), 5, 2)
    assert torch.equal(impl.topk(*args), want)


@pytest.mark.parametrize("isa", ISAS)
def test_scales_of_any_kind(isa: str) -> None:
    made = world("index_fp8_132", "decode")
    scales = made.cache.pool[:, 128 * 16 :].view(torch.float32)
    block = made.pages.block_table[2]
    pool = made.cache.pool
    for at, scale in enumerate([-0.37, 0.0, 2.0**-140, NAN, INF, -(2.0**40), 1e30]):
        pool[block[at], 128 * 16 + 4 * at : 128 * 16 + 4 * at + 4] = torch.tensor([scale]).view(
            torch.uint8
        )
    del scales
    found, want = made.logits(isa)[2], made.logits()[2]
    odd = torch.zeros(700, dtype=torch.bool)
    odd[[16 * n + n for n in range(7)]] = True
    torch.testing.assert_close(found[odd], want[odd], rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(found[~odd], want[~odd], rtol=1e-4, atol=1e-4)
    assert set(made.chosen(isa)[2].tolist()) == set(made.chosen()[2].tolist())


@pytest.mark.parametrize("encoding", ["index_mxfp4_68", "index_fp8_132_e8m0"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_power_that_is_none_makes_its_key_none(isa: str, encoding: str) -> None:
    made = world(encoding, "decode")
    values = made.cache.spec.bytes_per_block - 4 * 16
    made.cache.pool[made.pages.block_table[2, 1], values + 4 * 3 + 2] = 255
    found, want = made.logits(isa), made.logits()
    assert bool(want[2, 19].isnan())
    assert torch.equal(found.isnan(), want.isnan())
    assert 19 not in made.chosen(isa)[2].tolist()


@pytest.mark.parametrize("isa", ISAS)
def test_an_infinite_key_is_infinitely_good(isa: str) -> None:
    made = world("bfloat16", "decode", heads=3)
    made.q.copy_(made.q.abs())
    made.weights.copy_(made.weights.abs())
    rows = made.cache.pool[made.pages.block_table[2, 0]].view(torch.bfloat16)
    rows[128 * 5 + 7] = INF
    assert float(made.logits(isa)[2, 5]) == INF
    assert int(made.chosen(isa)[2, 0]) == 5


ROWS: list[tuple[list[float], int, list[int]]] = [
    ([1.0, 3.0, 2.0], 2, [1, 2]),
    ([1.0, 3.0, 2.0], 5, [0, 1, 2, -1, -1]),
    ([2.0, 1.0, 2.0, 2.0], 2, [0, 2]),
    ([-0.0, 0.0, -0.0], 2, [0, 1]),
    ([-1.0, -0.0, 0.0, 0.0], 1, [1]),
    ([NAN, 1.0, -NAN], 2, [1, -1]),
    ([-INF, -5.0, -INF], 2, [1, -1]),
    ([INF, -INF, 3.0], 2, [0, 2]),
    ([-3.4028234663852886e38, -INF, NAN], 3, [0, -1, -1]),
    ([1e-45, 0.0, -1e-45], 1, [0]),
    ([], 2, [-1, -1]),
    ([1.0], 0, []),
]


@pytest.mark.parametrize(("logits", "topk", "want"), ROWS)
def test_the_rule_by_which_keys_are_chosen(logits: list[float], topk: int, want: list[int]) -> None:
    found = choose_columns(library.load(), torch.tensor([logits]), topk, 2)
    assert found.tolist() == [want]


@pytest.mark.parametrize("values", [1, 2, 40, 1 << 30])
@pytest.mark.parametrize("columns", [1, 7, 2048, 40000])
@pytest.mark.parametrize("topk", [1, 64, 2048])
def test_choosing_is_topk_rows_whatever_the_ties(columns: int, values: int, topk: int) -> None:
    gen = torch.Generator().manual_seed(columns + values)
    logits = (torch.randint(0, values, (9, columns), generator=gen).float() - values / 2) / 7
    logits[torch.rand(9, columns, generator=gen) < 0.1] = -INF
    logits[torch.rand(9, columns, generator=gen) < 0.1] = NAN
    logits[3], logits[4] = -INF, 1.5
    assert torch.equal(choose_columns(library.load(), logits, topk, 2), topk_rows(logits, topk))


@pytest.mark.parametrize("isa", ISAS)
def test_tables_that_cannot_be_are_refused(isa: str) -> None:
    made = world("index_mxfp4_68")
    table = made.pages.block_table
    for at, block, says, error in (
        ((0, 2), -1, "block -1 among those that request 0 reads", ConfigError),
        ((3, 9), 5000, "block 5000; the cache has", PlanMismatchError),
    ):
        bad = table.clone()
        bad[at] = block
        with pytest.raises(error, match=says):
            replace(made, pages=PageTable(block_table=bad, block_size=16)).logits(isa)
    narrow = PageTable(block_table=table[:, :100].contiguous(), block_size=16)
    with pytest.raises(ConfigError, match="request 3 reads block 100 of its sequence"):
        replace(made, pages=narrow).chosen(isa)
    # What no row sees may be anything.
    bad = table.clone()
    bad[3, 1:] = -7
    few = torch.tensor([1] * 10, dtype=torch.int32)
    hidden = replace(made, pages=PageTable(block_table=bad, block_size=16))
    assert (hidden.logits(isa, row_ends=few) > -INF).sum().item() == 10


def test_what_it_does_not_run_is_refused() -> None:
    config = IndexerConfig(head_size=128, num_heads=2)
    with pytest.raises(ConfigError, match="the cache's encoding is index_fp8_132_fnuz"):
        CpuIndexerImpl.create(config, "cpu", encoding="index_fp8_132_fnuz")
    with pytest.raises(ConfigError, match="runs on the CPU; the device is meta"):
        CpuIndexerImpl.create(config, "meta", encoding="bfloat16")
    with pytest.raises(ConfigError, match="does not take sinks"):
        CpuIndexerImpl.create(
            replace(config, also_needs=frozenset({Feature.SINKS})), "cpu", encoding="bfloat16"
        )
    with pytest.raises(ConfigError, match="there are no kernels for sse here"):
        CpuIndexerImpl(config, "cpu", "bfloat16", "sse")
