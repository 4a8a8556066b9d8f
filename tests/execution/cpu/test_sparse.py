"""CPU_MLA_SPARSE gives what float64 gives, whatever a row's list of keys looks like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache, Slots
from attnplat.backends.portable.reference import ReferenceImpl
from attnplat.config.layer import LayerConfig, MlaConfig, SparseMlaConfig
from attnplat.config.names import Feature, Operation
from attnplat.errors import PlanMismatchError
from attnplat.platforms.cpu.impls.attention import CpuAttnImpl
from attnplat.platforms.cpu.impls.sparse import LATENT_ROWS, CpuSparseMlaImpl, LatentRowsImpl
from tests.execution.cases import Step, assert_close, layer, make_step, run
from tests.execution.cpu.steps import ISAS, attend, lse, same
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401

LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1, 1, 1], [1, 70, 1500]),
    "mixed": ([2, 0, 5], [600, 9, 33]),
}
SIZES = {Encoding.MLA_FP8_584: 512, Encoding.MLA_FP8_528: 512}
Result = tuple[torch.Tensor, torch.Tensor]


class DenseLatent(LatentRowsImpl):
    """The same over all keys."""

    name = "CPU_MLA_SPARSE"
    operations = frozenset({Operation.MLA})


class World:
    """A latent layer's step: a cache of which nothing unread is a number, and lists of keys."""

    def __init__(self, encoding: str, lengths: str, **changes: Any) -> None:
        self.gen = torch.Generator().manual_seed(6)
        self.encoding = Encoding(encoding)
        kind = changes.pop("kind", SparseMlaConfig)
        block_size, layout = changes.pop("block_size", 16), changes.pop("layout", "HND")
        topk, seed = changes.pop("topk", 300), changes.pop("blocks", 1)
        size = SIZES.get(self.encoding, 576)
        wants: dict[str, Any] = {
            "head_size": size,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": size - 512,
            "num_heads": 5,
            "scale": 0.06,
            "dtype": "bfloat16",
            "also_needs": frozenset({Feature.LSE}),
        }
        if kind is SparseMlaConfig:
            wants["index_topk"] = topk
        self.config: LayerConfig = kind(**{**wants, **changes})
        self.query_lens, self.seq_lens = LENGTHS[lengths]
        self.batch = Batch.from_lengths(self.query_lens, self.seq_lens)
        owner = self.impl()
        rows, heads = self.batch.num_tokens, int(self.config.num_heads or 0)
        self.q = torch.randn(rows, heads, size, generator=self.gen).to(owner.dtype)
        self._fill(owner, block_size, layout, seed)
        self.topk = torch.randint(
            -40, max(self.seq_lens), (rows, topk), generator=self.gen, dtype=torch.int32
        )

    def _fill(self, owner: AttentionImpl, block_size: int, layout: str, seed: int) -> None:
        count = sum(-(-n // block_size) for n in self.seq_lens) + 2
        ids = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        blocks = [[ids.pop() for _ in range(-(-n // block_size))] for n in self.seq_lens]
        self.cache = KVCache.allocate(owner.kv_cache_spec(block_size, layout), count)
        if self.cache.k.dtype == torch.uint8:
            self.cache.k.fill_(0xFF)
        else:
            self.cache.k.fill_(float("nan"))
        if self.cache.k_scales is not None:
            self.cache.k_scales.fill_(0xFF)
        written = PageTable.from_blocks(blocks, self.batch, block_size, write="all")
        assert written.slot_mapping is not None
        keys = torch.randn(sum(self.seq_lens), 1, self.config.head_size, generator=self.gen).to(
            owner.dtype
        )
        self.cache.write(keys, None, Slots.of(written.slot_mapping))
        self.pages = PageTable.from_blocks(blocks, self.batch, block_size, write="none")

    def impl(self, isa: str | None = None) -> AttentionImpl:
        """The kernels of an instruction set, or what they are held against."""
        if isa is None:
            return ReferenceImpl.create(self.config, "cpu", encoding=self.encoding)
        kind = CpuSparseMlaImpl if isinstance(self.config, SparseMlaConfig) else DenseLatent
        return kind.create(self.config, "cpu", encoding=self.encoding, isa=isa)

    def run(self, isa: str | None = None) -> Result:
        """(out, lse) by an instruction set, or in float64."""
        impl = self.impl(isa)
        given = {"topk_indices": self.topk} if isinstance(self.config, SparseMlaConfig) else {}
        plan = impl.plan(self.batch, self.pages)
        result = impl.forward(plan, self.q, self.cache, return_lse=True, **given)
        assert isinstance(result, tuple)
        return result

    def step(self) -> Step:
        """What `assert_close` asks of."""
        return Step(config=self.config, batch=self.batch, q=self.q, k=[], v=[], options={})


ENCODINGS = ["bfloat16", "float32", "fp8_e4m3fn", *sorted(LATENT_ROWS)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_encoding_of_latent_rows(isa: str, encoding: str, lengths: str, dtype: str) -> None:
    made = World(encoding, lengths, dtype=dtype)
    assert_close(made.run(isa), made.run(), made.step())


@pytest.mark.parametrize("encoding", sorted(LATENT_ROWS))
@pytest.mark.parametrize("isa", ISAS)
def test_dense_attention_over_latent_rows(isa: str, encoding: str) -> None:
    for lengths in LENGTHS:
        made = World(encoding, lengths, kind=MlaConfig)
        assert_close(made.run(isa), made.run(), made.step())


@pytest.mark.parametrize("heads", [1, 4, 16, 37, 128, 130])
@pytest.mark.parametrize("isa", ISAS)
def test_every_number_of_heads(isa: str, heads: int) -> None:
    made = World("bfloat16", "decode", num_heads=heads)
    assert_close(made.run(isa), made.run(), made.step())


@pytest.mark.parametrize("encoding", ["bfloat16", "mla_fp8_584"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("isa", ISAS)
def test_where_rows_are_does_not_matter(isa: str, layout: str, encoding: str) -> None:
    want = World(encoding, "decode").run(isa)
    for block_size in (1, 24, 64, 256):
        made = World(encoding, "decode", block_size=block_size, layout=layout, blocks=block_size)
        assert same(made.run(isa), want)


@pytest.mark.parametrize("encoding", ["bfloat16", "mla_fp8_656"])
@pytest.mark.parametrize("isa", ISAS)
def test_the_order_of_a_list_and_what_is_twice_or_nothing_in_it_do_not_matter(
    isa: str, encoding: str
) -> None:
    made = World(encoding, "mixed")
    want = made.run(isa)
    ordered = made.topk.sort(dim=1).values
    once = torch.full_like(ordered, -1)
    for row, keys in zip(once, made.topk, strict=True):
        kept = keys[keys >= 0].unique()
        row[: len(kept)] = kept
    beyond = made.topk.clone()
    beyond[beyond < 0] = 1 << 30
    for topk in (made.topk.flip(1), ordered, once, beyond):
        made.topk = topk
        assert same(made.run(isa), want)


@pytest.mark.parametrize("isa", ISAS)
def test_threads_and_batch_mates_do_not_matter(isa: str) -> None:
    made = World("bfloat16", "decode", num_heads=20, topk=1400)
    want = made.run(isa)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert same(made.run(isa), want)
    finally:
        torch.set_num_threads(before)
    made.batch = Batch.from_lengths([1], [1500])
    made.pages = PageTable(block_table=made.pages.block_table[2:], block_size=16)
    made.q, made.topk = made.q[2:], made.topk[2:]
    assert same(made.run(isa), (want[0][2:], want[1][2:]))


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_that_names_no_key_it_sees_gives_zero(isa: str) -> None:
    made = World("bfloat16", "mixed")
    made.topk[0] = -1
    made.topk[3] = 40
    out, found = made.run(isa)
    for row in (0, 3):
        assert torch.equal(out[row], torch.zeros_like(out[row]))
        assert bool((found[row] == -torch.inf).all())
    assert_close((out, found), made.run(), made.step())


@pytest.mark.parametrize("isa", ISAS)
def test_rows_that_are_not_named_may_be_gone(isa: str) -> None:
    made = World("bfloat16", "decode")
    want = made.run(isa)
    for r, n in enumerate(made.seq_lens):
        named = set(made.topk[r].tolist())
        for key in (k for k in range(n) if k not in named):
            block = int(made.pages.block_table[r, key // 16])
            made.cache.k[block, 0, key % 16] = float("nan")
    assert same(made.run(isa), want)


@pytest.mark.parametrize("wants", [{"sinks": True}, {"sliding_window": (40, 0)}, {"causal": False}])
@pytest.mark.parametrize("isa", ISAS)
def test_other_masks_hold_besides(isa: str, wants: dict[str, Any]) -> None:
    config = layer(**lse(topk=50, dtype="bfloat16", **wants))
    step = make_step(config, [3, 40, 1], [100, 40, 700])
    paged = step.paged(16, "HND")
    assert_close(attend(step, isa, paged), run("REFERENCE", step, paged), step)


@pytest.mark.parametrize("option", ["alibi", "position_bias"])
@pytest.mark.parametrize("isa", ISAS)
def test_what_depends_on_positions_follows_those_of_the_list(isa: str, option: str) -> None:
    config = layer(**lse(topk=50, **{option: True}))
    step = make_step(config, [3, 1], [100, 300])
    paged = step.paged(16, "HND")
    assert_close(attend(step, isa, paged), run("REFERENCE", step, paged), step)


def test_a_longer_list_than_the_layer_says_is_refused() -> None:
    made = World("bfloat16", "decode", topk=8)
    made.topk = torch.zeros(3, 9, dtype=torch.int32)
    with pytest.raises(PlanMismatchError, match="9 columns; the layer's config says 8"):
        made.run(ISAS[-1])
    step = make_step(layer(topk=3), [1], [9])
    options = {"topk_indices": torch.zeros(1, 4, dtype=torch.int32)}
    with pytest.raises(PlanMismatchError, match="4 columns; the layer's config says 3"):
        attend(replace(step, options=options), ISAS[-1], step.paged())
    assert not CpuAttnImpl.encodings & LATENT_ROWS
