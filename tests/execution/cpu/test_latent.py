"""CPU_MLA and CPU: latent attention, absorbed over pages and expanded without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache, Slots
from attnplat.backends.portable.reference import ReferenceImpl
from attnplat.config.layer import MlaConfig, MlaPrefillConfig
from attnplat.config.names import Feature
from attnplat.errors import ConfigError
from attnplat.platforms.cpu.impls.attention import (
    AmxMlaImpl,
    CpuAttnImpl,
    CpuMlaImpl,
    CpuPrefillImpl,
)
from tests.execution.cases import LSE_TOLERANCE, TOLERANCE, tree
from tests.execution.cpu.steps import ISAS, LENGTHS, same
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401

Result = tuple[torch.Tensor, torch.Tensor]

# (latent, rope) of a cached row: DeepSeek's, and others with tails of every kind.
ROWS = {"512+64": (512, 64), "256+64": (256, 64), "512+0": (512, 0), "20+4": (20, 4)}


def latent(size: str = "512+64", **changes: Any) -> MlaConfig:
    """A layer of absorbed latent attention with LSE."""
    rank, rope = ROWS[size]
    wants: dict[str, Any] = {
        "num_heads": 4,
        "head_size": rank + rope,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": 16,
        "v_head_size": 16,
        "scale": 0.05,
        "dtype": "bfloat16",
        "also_needs": frozenset({Feature.LSE}),
    }
    return MlaConfig(**{**wants, **changes})


class Scene:
    """Queries and a cache whose rows without a live token are NaN, the same for every backend."""

    def __init__(
        self,
        config: MlaConfig,
        queries: list[int],
        keys: list[int],
        encoding: str | None = None,
        block_size: int = 16,
        layout: str = "HND",
        **batch: Any,
    ) -> None:
        gen = torch.Generator().manual_seed(3)
        self.config, self.encoding = config, encoding
        self.batch = Batch.from_lengths(queries, keys, **batch)
        dtype = getattr(torch, config.dtype)
        self.q = torch.randn(sum(queries), config.num_heads or 1, config.head_size, generator=gen)
        self.q = self.q.to(dtype)
        self.rows = [torch.randn(n, 1, config.head_size, generator=gen).to(dtype) for n in keys]
        counts = [-(-n // block_size) for n in keys]
        order = torch.randperm(sum(counts) + 3, generator=gen).tolist()
        blocks = [[order.pop() for _ in range(count)] for count in counts]
        spec = ReferenceImpl.create(config, "cpu", encoding=encoding).kv_cache_spec(
            block_size, layout
        )
        self.cache = KVCache.allocate(spec, sum(counts) + 3)
        self.cache.k.view(torch.uint8).fill_(0xFF)  # no number in any of the encodings but int8
        self._full = PageTable.from_blocks(blocks, self.batch, block_size, write="all")
        self.fill()
        self.pages = PageTable.from_blocks(blocks, self.batch, block_size, write="none")

    def fill(self) -> None:
        """Put the rows into the cache."""
        assert self._full.slot_mapping is not None
        self.cache.write(torch.cat(self.rows), None, Slots.of(self._full.slot_mapping))

    def answer(self, kind: type[AttentionImpl], **how: Any) -> Result:
        impl = kind.create(self.config, "cpu", encoding=self.encoding, **how)
        plan = impl.plan(self.batch, self.pages, validate=True)
        found = impl.forward(plan, self.q, self.cache, return_lse=True)
        assert isinstance(found, tuple)
        return found

    def check(self, isa: str) -> None:
        got, want = self.answer(CpuMlaImpl, isa=isa), self.answer(ReferenceImpl)
        assert_near(self.config, got, want)


def assert_near(config: Any, got: Result, want: Result) -> None:
    torch.testing.assert_close(
        got[0].double(), want[0].double(), atol=TOLERANCE[config.dtype], rtol=8e-3
    )
    atol, rtol = LSE_TOLERANCE[config.dtype]
    torch.testing.assert_close(got[1], want[1].float(), atol=10 * atol, rtol=10 * rtol)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_latent_size_and_dtype(isa: str, size: str, dtype: str, lengths: str) -> None:
    Scene(latent(size, dtype=dtype), *LENGTHS[lengths]).check(isa)


@pytest.mark.parametrize("heads", [1, 2, 7, 16, 33, 128])
@pytest.mark.parametrize("isa", ISAS)
def test_every_number_of_heads(isa: str, heads: int) -> None:
    Scene(latent(num_heads=heads), [1, 2], [600, 70]).check(isa)


@pytest.mark.parametrize(
    "encoding", ["float32", "bfloat16", "float16", "fp8_e4m3fn", "fp8_e5m2", "fp8_th", "int8_th"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("isa", ISAS)
def test_every_encoding_of_rows(isa: str, dtype: str, encoding: str) -> None:
    Scene(latent(dtype=dtype), [1, 9], [130, 40], encoding=encoding).check(isa)


@pytest.mark.parametrize("layout", ["HND", "NHD", "BHLNC"])
@pytest.mark.parametrize("block_size", [1, 16, 24, 64, 128])
@pytest.mark.parametrize("isa", ISAS)
def test_every_block_size_and_layout(isa: str, block_size: int, layout: str) -> None:
    Scene(latent(), [1, 3], [300, 3], block_size=block_size, layout=layout).check(isa)


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        ({"sliding_window": (40, -1)}, {}),
        ({"causal": False}, {}),
        ({"also_needs": frozenset({Feature.LSE, Feature.PER_REQUEST_CAUSAL})},
         {"causal": [True, False]}),
        ({"also_needs": frozenset({Feature.LSE, Feature.TREE_MASK})},
         {"tree_mask": tree([[1]], [[1, 0, 0], [1, 1, 0], [1, 0, 1]])}),
    ],
    ids=["window", "not causal", "causal by request", "tree"],
)  # fmt: skip
@pytest.mark.parametrize("isa", ISAS)
def test_every_mask(isa: str, changes: dict[str, Any], batch: dict[str, Any]) -> None:
    Scene(latent(**changes), [1, 3], [200, 90], **batch).check(isa)


@pytest.mark.parametrize("isa", ISAS)
def test_threads_batch_mates_and_pages_do_not_change_a_bit(isa: str) -> None:
    config = latent(num_heads=16)
    scene = Scene(config, [1, 3, 1], [1300, 40, 600])
    whole = scene.answer(CpuMlaImpl, isa=isa)
    elsewhere = Scene(config, [1, 3, 1], [1300, 40, 600], block_size=64, layout="NHD")
    assert same(elsewhere.answer(CpuMlaImpl, isa=isa), whole)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 3)
        assert same(scene.answer(CpuMlaImpl, isa=isa), whole)
    finally:
        torch.set_num_threads(before)
    alone = Scene(config, [1], [1300])
    alone.q, alone.rows = scene.q[:1], scene.rows[:1]
    alone.fill()
    assert same(alone.answer(CpuMlaImpl, isa=isa), (whole[0][:1], whole[1][:1]))


@pytest.mark.parametrize("isa", ISAS)
def test_as_many_heads_with_keys_and_values_of_their_own_give_the_same(isa: str) -> None:
    from attnplat.config.layer import MhaConfig

    scene = Scene(latent(), [2], [50])
    got = scene.answer(CpuMlaImpl, isa=isa)
    config = MhaConfig(
        num_heads=4, num_kv_heads=1, head_size=576, v_head_size=512, scale=0.05,
        dtype="bfloat16", also_needs=frozenset({Feature.LSE, Feature.V_HEAD_SIZE}),
    )  # fmt: skip
    impl = CpuAttnImpl.create(config, "cpu", isa=isa)
    k, v = scene.rows[0], scene.rows[0][..., :512].contiguous()
    found = impl.forward(impl.plan(scene.batch), scene.q, kv=(k, v), return_lse=True)
    assert isinstance(found, tuple)
    assert_near(scene.config, got, found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("isa", ISAS)
def test_the_expanded_form(isa: str, dtype: str) -> None:
    config = MlaPrefillConfig(
        head_size=192, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_size=128,
        num_heads=3, num_kv_heads=3, dtype=dtype,
    )  # fmt: skip
    gen, given = torch.Generator().manual_seed(1), getattr(torch, dtype)
    batch = Batch.from_lengths([70, 3, 5], [70, 40, 5], causal=[True, False, True])
    q, k, v = (
        torch.randn(n, 3, size, generator=gen).to(given)
        for n, size in ((78, 192), (115, 192), (115, 128))
    )
    found = []
    for impl in (
        CpuPrefillImpl.create(config, "cpu", isa=isa),
        ReferenceImpl.create(config, "cpu"),
    ):
        result = impl.forward(impl.plan(batch), q, kv=(k, v), return_lse=True)
        assert isinstance(result, tuple)
        found.append(result)
    assert_near(config, *found)


@pytest.mark.skipif("amx" not in ISAS, reason="this machine has no AMX")
def test_both_names_are_one_implementation() -> None:
    scene = Scene(latent(num_heads=128), [1, 1], [700, 90])
    assert same(scene.answer(AmxMlaImpl), scene.answer(CpuMlaImpl))


def test_more_than_one_latent_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="one latent row a token"):
        CpuMlaImpl.create(latent(num_kv_heads=2), "cpu")
