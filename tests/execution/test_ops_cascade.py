"""Attention in two halves around a shared prefix is the attention over the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable, pack_tree_mask
from attnplat.backends.kv_cache import KVCache
from attnplat.config.layer import MhaConfig
from attnplat.config.names import Feature
from attnplat.errors import ConfigError, PlanMismatchError, UnsupportedCallError
from attnplat.ops.cascade import Cascade
from tests.execution.cases import IMPLS, layer

BLOCK = 4
every_impl = pytest.mark.parametrize("name", IMPLS)


def world(config: MhaConfig, batch: Batch, encoding: str | None, name: str) -> tuple[Any, ...]:
    """A cascade, the flat layer, a cache of 40 blocks, and a table whose first 3 are shared."""
    gen = torch.Generator().manual_seed(1)
    cascade = Cascade.create(IMPLS[name], config, "cpu", encoding=encoding)
    flat = IMPLS["REFERENCE"].create(config, "cpu", encoding=encoding)
    cache = KVCache.allocate(flat.kv_cache_spec(BLOCK), 40)
    every = PageTable(
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        block_size=BLOCK,
        slot_mapping=torch.arange(160),
    )
    k, v = torch.randn(2, 160, 2, 16, generator=gen, dtype=getattr(torch, config.dtype))
    cascade.suffix.write_kv(cache, k, v, every)
    own = iter(range(10, 40))
    blocks = [
        [7, 3, 5, *(next(own) for _ in range(max(-(-n // BLOCK) - 3, 0)))]
        for n in batch.seq_lens.tolist()
    ]
    pages = PageTable.from_blocks(blocks, batch, BLOCK)
    q = torch.randn(batch.num_tokens, 4, 16, generator=gen, dtype=k.dtype)
    return cascade, flat, cache, pages, q


@every_impl
@pytest.mark.parametrize("encoding", [None, "fp8_e4m3fn"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("shared", [0, 3, 4, 11, 12])
def test_two_halves_are_the_whole(
    name: str, encoding: str | None, sinks: bool, shared: int
) -> None:
    config = layer(sinks=sinks, dtype="float32")
    batch = Batch.from_lengths([1, 5, 0, 2], [13, 30, 20, 14])
    cascade, flat, cache, pages, q = world(config, batch, encoding, name)
    given = {"sinks": torch.tensor([0.5, -1.0, 3.0, float("-inf")])} if sinks else {}
    kv = (torch.randn(8, 2, 16), torch.randn(8, 2, 16))
    out, lse = cascade.forward(cascade.plan(batch, pages, shared), q, cache, kv=kv, **given)
    want = flat.forward(flat.plan(batch, pages), q, cache, return_lse=True, **given)
    torch.testing.assert_close(out, want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want[1], atol=1e-5, rtol=1e-5)


@every_impl
def test_a_suffix_may_be_the_new_tokens_alone(name: str) -> None:
    batch = Batch.from_lengths([1, 3], [13, 15])
    cascade, flat, cache, pages, q = world(layer(), batch, None, name)
    out, _ = cascade.forward(cascade.plan(batch, pages, 12), q, cache)
    want = flat.forward(flat.plan(batch, pages), q, cache)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_padding_rows_stay_zero_and_padding_requests_do_no_harm() -> None:
    batch = Batch.from_lengths([1, 3], [13, 15])
    config = layer(sinks=True)
    cascade, _, cache, pages, q = world(config, batch, None, "REFERENCE")
    sinks = torch.zeros(4)
    bare = cascade.forward(cascade.plan(batch, pages, 12), q, cache, sinks=sinks)
    plan = cascade.plan(batch.padded(4, 6), pages.padded(4, 6), 12)
    rows = torch.cat([q, torch.full((2, 4, 16), float("nan"))])
    out, lse = cascade.forward(plan, rows, cache, sinks=sinks)
    assert torch.equal(out[:4], bare[0]) and torch.equal(lse[:4], bare[1])
    assert not out[4:].any() and not lse[4:].any()


def test_a_batch_without_queries_gives_nothing() -> None:
    batch = Batch.from_lengths([0, 0], [13, 14])
    cascade, _, cache, pages, q = world(layer(), batch, None, "REFERENCE")
    out, lse = cascade.forward(cascade.plan(batch, pages, 12), q, cache)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


def test_a_query_inside_the_shared_keys_is_refused() -> None:
    batch = Batch.from_lengths([1, 4], [13, 15])
    cascade, _, _, pages, _ = world(layer(), batch, None, "REFERENCE")
    with pytest.raises(PlanMismatchError, match="request 1 has 11 keys before its query; 12 are"):
        cascade.plan(batch, pages, 12)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": (3, -1)},
        {"chunk_size": 4},
        {"alibi": True},
        {"position_bias": True},
        {"topk": 3},
        {"static_sink_tokens": 2},
        {"causal": False},
        {"mm_prefix": True},
    ],
)
def test_layers_that_cannot_be_cut_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cascade attention"):
        Cascade.create(IMPLS["REFERENCE"], layer(**changes), "cpu")


def test_sinks_come_if_and_only_if_declared() -> None:
    batch = Batch.from_lengths([1], [13])
    cascade, _, cache, pages, q = world(layer(), batch, None, "REFERENCE")
    with pytest.raises(UnsupportedCallError, match="if and only if"):
        cascade.forward(cascade.plan(batch, pages, 12), q, cache, sinks=torch.zeros(4))


@every_impl
@pytest.mark.parametrize("slack", [0, 9])
def test_a_tree_over_the_new_tokens_is_one_in_two_halves_too(name: str, slack: int) -> None:
    needs = frozenset({Feature.LSE, Feature.TREE_MASK, Feature.PER_REQUEST_CAUSAL})
    fork = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    most = 4 + slack
    bits = torch.zeros(6, most, dtype=torch.bool)
    bits[:4, :4] = torch.tensor(fork, dtype=torch.bool)
    bits[4:, :2] = torch.tensor([[1, 0], [0, 1]], dtype=torch.bool)
    batch = Batch.from_lengths([4, 2], [17, 26], causal=[True, False]).replace(
        max_query_len=most, tree_mask=pack_tree_mask(bits)
    )
    cascade, flat, cache, pages, q = world(layer(also_needs=needs), batch, None, name)
    out, lse = cascade.forward(cascade.plan(batch, pages, 12), q, cache)
    want = flat.forward(flat.plan(batch, pages), q, cache, return_lse=True)
    torch.testing.assert_close(out, want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want[1], atol=1e-5, rtol=1e-5)
    plain = flat.forward(flat.plan(batch.replace(tree_mask=None), pages), q, cache)
    assert not torch.allclose(plain, want[0]), "the tree hides nothing"


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ({"ranges": [(0, 13, 15)]}, "batch.ranges depends on positions; plan flat"),
        ({"prefix_lens": [3, 3]}, "batch.prefix_lens depends on positions"),
        ({"causal": [True, True]}, "batch.causal is given"),
    ],
)
def test_a_mask_that_a_cascade_cannot_keep_is_refused(mask: dict[str, Any], says: str) -> None:
    batch = Batch.from_lengths([1, 3], [13, 15], **mask)
    cascade, _, _, pages, _ = world(
        layer(), batch.replace(**dict.fromkeys(mask)), None, "REFERENCE"
    )
    with pytest.raises(UnsupportedCallError, match=says):
        cascade.plan(batch, pages, 12)
