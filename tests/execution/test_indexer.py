"""An indexer's scores are their definition, and the keys it chooses the best that a row sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.formats.facts import format_of
from attnplat.backends.formats.index_pages import IndexPageOrder
from attnplat.backends.formats.rows import decode_rows, encode_rows
from attnplat.backends.index_cache import IndexCache, IndexCacheSpec
from attnplat.backends.indexer import topk_rows
from attnplat.backends.portable.reference_indexer import ReferenceIndexerImpl
from attnplat.config.layer import IndexerConfig
from attnplat.config.names import Feature
from attnplat.errors import ConfigError, PlanMismatchError, UnsupportedCallError
from attnplat.ops.context_parallel import Shard
from attnplat.ops.topk import merge_topk, shard_topk

INF, NAN = float("inf"), float("nan")
HEADS, SIZE = 4, 128
INDEX = ["bfloat16", "index_fp8_132", "index_fp8_132_fnuz", "index_fp8_132_e8m0", "index_mxfp4_68"]
QUERY_LENS, SEQ_LENS = [3, 1, 0, 2], [20, 33, 5, 2]


@dataclass
class World:
    """A step of an indexer: `keys` as decoded, each request's in order."""

    impl: ReferenceIndexerImpl
    batch: Batch
    pages: PageTable
    cache: IndexCache
    q: torch.Tensor
    weights: torch.Tensor
    keys: list[torch.Tensor]

    def args(self) -> tuple[Any, ...]:
        return self.batch, self.pages, self.cache, self.q, self.weights

    def expected(self) -> torch.Tensor:
        """By the definition, one score at a time."""
        out = torch.full((self.batch.num_tokens, max(SEQ_LENS)), -INF, dtype=torch.float64)
        row = 0
        for count, keys in zip(QUERY_LENS, self.keys, strict=True):
            for i in range(count):
                for n in range(len(keys) - count + i + 1):
                    dots = [float(self.q[row, h].double() @ keys[n].double()) for h in range(HEADS)]
                    pairs = zip(self.weights[row].tolist(), dots, strict=True)
                    out[row, n] = sum(w * max(0.0, x) for w, x in pairs)
                row += 1
        return out


def world(encoding: str = "index_fp8_132", block_size: int = 16, **changes: Any) -> World:
    gen = torch.Generator().manual_seed(8)
    order = changes.pop("order", None)
    wants = {"head_size": SIZE, "num_heads": HEADS, "topk": 6, **changes}
    impl = ReferenceIndexerImpl.create(IndexerConfig(**wants), "cpu", encoding=encoding)
    batch = Batch.from_lengths(QUERY_LENS, SEQ_LENS)
    ids = list(range(sum(-(-n // block_size) for n in SEQ_LENS) + 2))
    blocks = [[ids.pop() for _ in range(-(-n // block_size))] for n in SEQ_LENS]
    cache = IndexCache.allocate(impl.cache_spec(block_size, order), len(ids) + 80)
    cache.pool.fill_(0xFF)  # NaN in what must not be read, scales included
    keys = [torch.randn(n, SIZE, generator=gen) for n in SEQ_LENS]
    impl.write(
        cache, torch.cat(keys), PageTable.from_blocks(blocks, batch, block_size, write="all")
    )
    format = format_of(encoding)
    return World(
        impl=impl,
        batch=batch,
        pages=PageTable.from_blocks(blocks, batch, block_size, write="none"),
        cache=cache,
        q=torch.randn(6, HEADS, SIZE, generator=gen),
        weights=torch.randn(6, HEADS, generator=gen),
        keys=[decode_rows(format, encode_rows(format, k[:, None]), size=SIZE)[:, 0] for k in keys],
    )


@pytest.mark.parametrize("encoding", INDEX)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_scores_are_the_definition(encoding: str, block_size: int) -> None:
    found = world(encoding, block_size)
    logits = found.impl.logits(*found.args())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, found.expected().float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("encoding", "order"),
    [
        ("index_fp8_132", IndexPageOrder.tile16()),
        ("index_mxfp4_68", IndexPageOrder.aiter(32)),
        ("index_mxfp4_68", IndexPageOrder.flydsl()),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_order_of_bytes_in_a_page_does_not_matter(encoding: str, order: IndexPageOrder) -> None:
    planar, other = world(encoding, 64), world(encoding, 64, order=order)
    assert not torch.equal(planar.cache.pool, other.cache.pool)
    assert torch.equal(planar.impl.logits(*planar.args()), other.impl.logits(*other.args()))


def test_a_row_sees_as_many_keys_as_it_is_told() -> None:
    found = world()
    ends = torch.tensor([0, 7, 20, 100, 1, 2], dtype=torch.int32)
    logits = found.impl.logits(*found.args(), row_ends=ends)
    live = [0, 7, 20, 33, 1, 2]
    assert (logits > -INF).sum(1).tolist() == live
    chosen = found.impl.topk(*found.args(), row_ends=ends)
    assert (chosen >= 0).sum(1).tolist() == [min(n, 6) for n in live]


def test_the_best_keys_are_chosen() -> None:
    found = world()
    chosen = found.impl.topk(*found.args())
    want = found.expected()
    for row in range(6):
        best = want[row].topk(6)
        named = {
            n for n, s in zip(best.indices.tolist(), best.values.tolist(), strict=True) if s > -INF
        }
        assert set(chosen[row].tolist()) - {-1} == named


def test_a_request_scores_the_same_alone_and_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    found = world()
    whole = found.impl.logits(*found.args())
    alone = found.impl.logits(
        found.batch.slice(1, 2),
        PageTable(block_table=found.pages.block_table[1:2], block_size=16),
        found.cache,
        found.q[3:],
        found.weights[3:],
    )
    assert torch.equal(alone[0], whole[3])
    monkeypatch.setattr("attnplat.backends.portable.reference_indexer.PRODUCTS", 1)
    torch.testing.assert_close(found.impl.logits(*found.args()), whole)


def test_a_write_skips_negative_slots_and_touches_no_other() -> None:
    found = world()
    before = found.cache.pool.clone()
    slots = torch.tensor([5, -1, 40])
    keys = torch.randn(3, SIZE)
    found.impl.write(found.cache, keys, replace(found.pages, slot_mapping=slots))
    changed = (found.cache.pool != before).any(1).nonzero().flatten().tolist()
    assert changed == [0, 2]
    assert int((found.cache.pool != before).sum()) <= 2 * 132


@pytest.mark.parametrize(
    ("logits", "topk", "want"),
    [
        ([1.0, 3.0, 2.0], 2, [1, 2]),
        ([1.0, 3.0, 2.0], 5, [0, 1, 2, -1, -1]),
        ([2.0, 1.0, 2.0, 2.0], 2, [0, 2]),
        ([-0.0, 0.0, -0.0], 2, [0, 1]),
        ([NAN, 1.0, NAN], 2, [1, -1]),
        ([-INF, -5.0, -INF], 2, [1, -1]),
        ([INF, -INF, 3.0], 2, [0, 2]),
        ([], 2, [-1, -1]),
    ],
)
def test_rows_choose_by_the_canonical_rule(logits: list[float], topk: int, want: list[int]) -> None:
    chosen = topk_rows(torch.tensor([logits]), topk)
    assert chosen.tolist() == [want] and chosen.dtype == torch.int32


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (3, 4), (8, 16)])
def test_ranks_choose_what_the_whole_would(size: int, interleave: int) -> None:
    gen = torch.Generator().manual_seed(3)
    # Few different values, so that ties go across ranks; some rows see little or nothing.
    logits = torch.randint(0, 5, (9, 50), generator=gen).float()
    logits[torch.rand(9, 50, generator=gen) < 0.3] = -INF
    logits[0], logits[1, 4:], logits[2, ::3] = -INF, -INF, NAN
    ranks = [Shard(rank=r, size=size, interleave=interleave) for r in range(size)]
    kept = [logits[:, shard.holds(torch.arange(50))] for shard in ranks]
    parts = [shard_topk(x, 7, shard) for x, shard in zip(kept, ranks, strict=True)]
    merged = merge_topk([s for s, _ in parts], [p for _, p in parts], 7)
    assert torch.equal(merged, topk_rows(logits, 7))


@pytest.mark.parametrize(
    ("word", "encoding"),
    [("bf16", "bfloat16"), ("fp8", "index_fp8_132"), ("mxfp4", "index_mxfp4_68")],
)
def test_the_user_s_word_names_the_format(word: str, encoding: str) -> None:
    config = IndexerConfig(head_size=SIZE, indexer_kv_dtype=word)
    assert ReferenceIndexerImpl.create(config, "cpu").encoding is Encoding(encoding)


@pytest.mark.parametrize(
    ("changes", "encoding", "says"),
    [
        ({}, None, "indexer_kv_dtype is 'auto'"),
        ({"indexer_kv_dtype": "nvfp4"}, None, "'nvfp4', which names no stored format"),
        ({}, "fp8_e4m3fn", "the cache's encoding is fp8_e4m3fn"),
        ({"also_needs": frozenset({Feature.SINKS})}, "bfloat16", "does not take sinks"),
    ],
)
def test_what_it_does_not_run_is_refused(
    changes: dict[str, Any], encoding: str | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ReferenceIndexerImpl.create(
            IndexerConfig(head_size=SIZE, **changes), "cpu", encoding=encoding
        )


def test_calls_that_do_not_fit_are_refused() -> None:
    found = world()
    batch, pages, cache, q, weights = found.args()
    call = found.impl.logits
    with pytest.raises(PlanMismatchError, match="weights has shape"):
        call(batch, pages, cache, q, weights[:, :2])
    with pytest.raises(PlanMismatchError, match="q has shape"):
        call(batch, pages, cache, q[:4], weights)
    with pytest.raises(PlanMismatchError, match="row_ends has dtype"):
        call(batch, pages, cache, q, weights, row_ends=torch.zeros(6, dtype=torch.int64))
    with pytest.raises(PlanMismatchError, match="the index cache is"):
        call(batch, pages, world("bfloat16").cache, q, weights)
    with pytest.raises(UnsupportedCallError, match="slot_mapping is None"):
        found.impl.write(cache, found.keys[0], pages)
    with pytest.raises(ConfigError, match="topk is None"):
        world(topk=None).impl.topk(batch, pages, cache, q, weights)
    with pytest.raises(ConfigError, match="takes an index format, or a plain one"):
        IndexCacheSpec(encoding=Encoding.INT8_TH, block_size=16, head_size=SIZE)
