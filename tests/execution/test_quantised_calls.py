"""fp8 queries and outputs: codes times scales, on every backend."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, BatchBounds, PageTable
from attnplat.backends.formats.element_codec import decode_elements, encode_elements
from attnplat.backends.handle import HANDLE_TYPE
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.portable.reference import ReferenceImpl
from attnplat.backends.portable.torch_sdpa import TorchSdpaImpl
from attnplat.backends.quantised_calls import FP8
from attnplat.config.layer import MhaConfig
from attnplat.errors import TensorError
from attnplat.platforms.cpu.impls.attention import CpuAttnImpl
from attnplat.platforms.cpu.kernels import library
from tests.execution.cases import layer

KINDS = [ReferenceImpl, TorchSdpaImpl]
if library.find_library() is not None:
    KINDS.append(CpuAttnImpl)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("fp8", FP8)


def step(
    kind: type[AttentionImpl], config: MhaConfig, bounds: BatchBounds | None = None
) -> tuple[AttentionImpl, Any, KVCache, torch.Tensor]:
    """An implementation, a plan of 3 rows and 2 padding rows, a cache, and 5 rows of queries."""
    gen = torch.Generator().manual_seed(2)
    impl = kind.create(config, "cpu")
    batch = Batch.from_lengths([2, 1], [20, 33]).padded(3, 5)
    pages = PageTable.from_blocks([[4, 1], [0, 7, 3], []], batch, 16, write="none")
    cache = KVCache.allocate(impl.kv_cache_spec(16), 9)
    for plane in cache.pages():
        plane.copy_(torch.randn(plane.shape, generator=gen))
    q = torch.randn(5, 4, 16, generator=gen).to(impl.dtype)
    return impl, impl.plan(batch, pages, bounds=bounds), cache, q


def codes_of(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    return encode_elements(FP8[fp8], x).view(fp8)


def numbers(x: torch.Tensor) -> torch.Tensor:
    return decode_elements(FP8[x.dtype], x.view(torch.uint8))


@every_dtype
@every_kind
@pytest.mark.parametrize("scale", [[1.0], [0.37], [0.25, 3.0]])
def test_fp8_queries_are_codes_times_scale(
    kind: type[AttentionImpl], scale: list[float], fp8: torch.dtype
) -> None:
    impl, plan, cache, q = step(kind, layer(sinks=True))
    sinks, codes = torch.tensor([0.5, -1.0, 2.0, 0.0]), codes_of(q, fp8)
    factor = torch.tensor(scale)
    per_head = factor.repeat_interleave(4 // len(scale))[:, None]
    given = {"sinks": sinks, "return_lse": True}
    got = impl.forward(plan, codes, cache, q_scale=factor, **given)
    want = impl.forward(plan, numbers(codes) * per_head, cache, **given)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@every_dtype
@every_kind
@pytest.mark.parametrize("scale", [1.0, 0.01, 7.0, 1e-5])
def test_outputs_are_divided_by_their_scale_and_saturate(
    kind: type[AttentionImpl], scale: float, fp8: torch.dtype
) -> None:
    impl, plan, cache, q = step(kind, layer())
    plain, lse = impl.forward(plan, q, cache, return_lse=True)
    out = torch.full((5, 4, 16), 0x3C, dtype=torch.uint8).view(fp8)
    given = {"out_scale": torch.tensor([scale]), "out": out, "return_lse": True}
    got, same_lse = impl.forward(plan, q, cache, **given)
    assert got is out and torch.equal(same_lse, lse)
    want = codes_of(plain[:3] / scale, fp8)
    assert torch.equal(out[:3].view(torch.uint8), want.view(torch.uint8))
    assert (out[3:].view(torch.uint8) == 0x3C).all(), "padding rows were written"
    if scale == 1e-5:
        assert numbers(out[:3]).abs().max() == FP8[fp8].largest


@every_kind
def test_an_output_that_is_not_given_is_e4m3_and_zero_in_padding(kind: type[AttentionImpl]) -> None:
    impl, plan, cache, q = step(kind, layer())
    out = impl.forward(plan, q, cache, out_scale=torch.tensor([0.01]))
    assert out.dtype == torch.float8_e4m3fn and not out[3:].view(torch.uint8).any()
    plain = impl.forward(plan, q, cache)
    error = (numbers(out[:3]) * 0.01 - plain[:3]).abs() / plain[:3].abs().clamp(min=0.01 * 2**-6)
    assert error.max() <= 2**-4, "more than half a step of e4m3"


@every_kind
def test_both_may_be_codes_in_a_plan_that_is_updated_in_place_and_in_a_graph(
    kind: type[AttentionImpl],
) -> None:
    bounds = BatchBounds(max_reqs=3, max_tokens=5, max_query_len=2, max_seq_len=40)
    impl, plan, cache, q = step(kind, layer(), bounds)
    codes, scales = codes_of(q, torch.float8_e4m3fn), (torch.tensor([0.5]), torch.tensor([0.02]))

    def run(codes: torch.Tensor) -> torch.Tensor:
        return impl.forward(plan, codes, cache, q_scale=scales[0], out_scale=scales[1])

    expected = run(codes)
    plain = impl.forward(plan, numbers(codes) * 0.5, cache)
    want = codes_of(plain[:3] / 0.02, torch.float8_e4m3fn)
    assert torch.equal(expected[:3].view(torch.uint8), want.view(torch.uint8))
    torch._dynamo.reset()
    # Before torch 2.11 the graph ends at the call, and the result is the same.
    compiled = torch.compile(run, fullgraph=HANDLE_TYPE is not None, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(codes).view(torch.uint8), expected.view(torch.uint8))


@every_kind
def test_codes_and_scales_come_together_and_fit(kind: type[AttentionImpl]) -> None:
    impl, plan, cache, q = step(kind, layer())
    codes, one = codes_of(q, torch.float8_e4m3fn), torch.ones(1)
    out8 = torch.zeros(5, 4, 16, dtype=torch.float8_e5m2)
    wrong: tuple[tuple[torch.Tensor, dict[str, torch.Tensor], str], ...] = (
        (codes, {}, "q has dtype torch.float8_e4m3fn; expected torch.float32"),
        (q, {"q_scale": one}, "q has dtype torch.float32; expected torch.float8_e4m3fn or"),
        (codes, {"q_scale": torch.ones(3)}, "q_scale has shape [3]; expected [1] or [2]"),
        (codes, {"q_scale": one.double()}, "q_scale has dtype torch.float64"),
        (q, {"out": out8}, "out has dtype torch.float8_e5m2; expected torch.float32"),
        (q, {"out_scale": one, "out": q.clone()}, "out has dtype torch.float32; expected torch."),
        (q, {"out_scale": torch.ones(2), "out": out8}, "out_scale has shape [2]; expected [1]"),
        (q, {"out_scale": one.to("meta")}, "out_scale is on meta; expected cpu"),
    )
    for queries, given, says in wrong:
        with pytest.raises(TensorError, match=re.escape(says)):
            impl.forward(plan, queries, cache, **given)
    assert not out8.view(torch.uint8).any()
