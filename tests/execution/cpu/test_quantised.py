"""CPU_ATTN reads quantised caches as their codecs do, scales and all."""

from __future__ import annotations

import pytest
import torch

from attnplat.backends.kv_cache import KVCache, Slots
from attnplat.backends.pages import PageTable
from attnplat.backends.portable.reference import ReferenceImpl
from attnplat.config.names import Feature
from attnplat.platforms.cpu.impls.attention import CpuAttnImpl
from tests.execution.cases import assert_close, layer, make_step
from tests.execution.cpu.steps import ISAS, lse
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401

WORDS = {
    "fp8_e4m3": "fp8_e4m3fn",
    "fp8_e5m2": "fp8_e5m2",
    "fp8_per_token_head": "fp8_th",
    "int8_per_token_head": "int8_th",
}


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_encoding(isa: str, word: str, dtype: str, layout: str, per_head: bool) -> None:
    encoding = WORDS[word]
    given = word in ("fp8_e4m3", "fp8_e5m2")
    if per_head and not given:
        pytest.skip("the format keeps its own scales")
    wants = lse(dtype=dtype, kv_cache_dtype=word, head_size=72, num_heads=6)
    if per_head:
        wants |= {"per_head_quant_scales": True}
    step = make_step(layer(**wants), [1, 21, 2], [130, 21, 600])
    impls = [
        ReferenceImpl.create(step.config, "cpu", encoding=encoding),
        CpuAttnImpl.create(step.config, "cpu", encoding=encoding, isa=isa),
    ]
    scales = {}
    if given:
        pick = [0.5, 1.25] if per_head else [0.75]
        scales = {"k_scale": torch.tensor(pick), "v_scale": torch.tensor(pick) * 1.5}
    cache = KVCache.allocate(impls[0].kv_cache_spec(16, layout), 60)
    cache.k.fill_(0x7F)
    assert cache.v is not None
    cache.v.fill_(0x7F)
    blocks = [list(range(9)), [50, 40], list(range(10, 48))]
    written = PageTable.from_blocks(blocks, step.batch, 16, write="all")
    assert written.slot_mapping is not None
    cache.write(torch.cat(step.k), torch.cat(step.v), Slots.of(written.slot_mapping), **scales)
    pages = PageTable.from_blocks(blocks, step.batch, 16, write="none")
    results = []
    for impl in impls:
        plan = impl.plan(step.batch, pages)
        result = impl.forward(plan, step.q, cache, **scales, return_lse=True)
        assert isinstance(result, tuple)
        results.append(result)
    assert_close(results[1], results[0], step)


def test_scales_per_head_are_a_feature_of_the_backend() -> None:
    assert Feature.PER_HEAD_QUANT_SCALES in CpuAttnImpl.features
