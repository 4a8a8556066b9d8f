"""Keys spread over ranks: every key is on one rank, and the ranks' results join to the whole."""

from __future__ import annotations

import pytest
import torch

from attnplat.backends.batch import Batch
from attnplat.config.names import Feature
from attnplat.errors import ConfigError
from attnplat.ops.context_parallel import Shard, combine_shards
from tests.execution.cases import IMPLS, layer, make_step

SHARES = [(size, interleave) for size in (1, 2, 3, 8) for interleave in (1, 2, 5, 16)]


@pytest.mark.parametrize(("size", "interleave"), SHARES)
def test_local_lengths_count_what_a_rank_holds(size: int, interleave: int) -> None:
    lens = torch.arange(70, dtype=torch.int32)
    for rank in range(size):
        shard = Shard(rank=rank, size=size, interleave=interleave)
        counted = [int(shard.holds(torch.arange(n)).sum()) for n in range(70)]
        local = shard.local_lens(lens)
        assert local.tolist() == counted and local.dtype == torch.int32


@pytest.mark.parametrize(("size", "interleave"), SHARES)
def test_every_position_is_on_one_rank_without_gaps(size: int, interleave: int) -> None:
    positions = torch.arange(101)
    seen = []
    for rank in range(size):
        shard = Shard(rank=rank, size=size, interleave=interleave)
        local = shard.local_positions(positions)
        kept = positions[local >= 0]
        assert local[local >= 0].tolist() == list(range(len(kept)))
        assert torch.equal(shard.global_positions(torch.arange(len(kept))), kept)
        seen += kept.tolist()
    assert sorted(seen) == positions.tolist()


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (3, 4), (4, 16)])
def test_the_ranks_join_to_the_whole(name: str, sinks: bool, size: int, interleave: int) -> None:
    # A sequence of 2 and one of 0 leave ranks, or all of them, without keys.
    step = make_step(layer(causal=False, sinks=sinks), [1, 1, 2, 1], [40, 2, 33, 0], seed=2)
    given = step.options
    impl = IMPLS["REFERENCE"].create(step.config, "cpu")
    want = impl.forward(impl.plan(step.batch), step.q, kv=step.packed(), return_lse=True, **given)
    needs = frozenset({Feature.LSE})
    rank_impl = IMPLS[name].create(layer(causal=False, also_needs=needs), "cpu")
    outs, lses = [], []
    for rank in range(size):
        shard = Shard(rank=rank, size=size, interleave=interleave)
        k = torch.cat([x[shard.holds(torch.arange(len(x)))] for x in step.k])
        v = torch.cat([x[shard.holds(torch.arange(len(x)))] for x in step.v])
        lens = shard.local_lens(step.batch.seq_lens).tolist()
        batch = Batch.from_lengths([1, 1, 2, 1], lens)
        out, lse = rank_impl.forward(rank_impl.plan(batch), step.q, kv=(k, v), return_lse=True)
        outs.append(out)
        lses.append(lse)
    out, lse = combine_shards(outs, lses, sinks=given.get("sinks"))
    torch.testing.assert_close(out, want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want[1], atol=1e-5, rtol=1e-5)
    assert not out[4].any()


def test_what_an_empty_rank_s_output_holds_does_not_matter() -> None:
    out, lse = torch.randn(3, 2, 4), torch.randn(3, 2)
    nothing = torch.full((3, 2, 4), float("nan")), torch.full((3, 2), float("-inf"))
    joined = combine_shards([nothing[0], out], [nothing[1], lse])
    assert torch.equal(joined[0], out) and torch.equal(joined[1], lse)
    none = combine_shards([nothing[0]] * 2, [nothing[1]] * 2)
    assert not none[0].any() and bool((none[1] == float("-inf")).all())
    sink = torch.tensor([0.5, 2.0])
    only = combine_shards([nothing[0]] * 2, [nothing[1]] * 2, sinks=sink, out=out)
    assert only[0] is out and not out.any() and torch.equal(only[1], sink.expand(3, 2))


@pytest.mark.parametrize(
    ("rank", "size", "interleave"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)]
)
def test_numbers_that_name_no_share_are_refused(rank: int, size: int, interleave: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} of {size}"):
        Shard(rank=rank, size=size, interleave=interleave)
