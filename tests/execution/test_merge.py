"""Partial results joined by log-sum-exp are the whole."""

from __future__ import annotations

import math

import pytest
import torch

from attnplat.ops.merge import apply_sinks, merge_states

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [tokens, heads, keys], v [keys, heads, size]."""
    return torch.einsum("thk,khd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_the_parts_are_the_whole(parts: int) -> None:
    scores, v = normal(6, 3, 40) * 4, normal(40, 3, 8, seed=1)
    whole = attention(scores, v)
    pieces = zip(scores.chunk(parts, -1), v.chunk(parts), strict=True)
    outs, lses = zip(*(attention(s, u) for s, u in pieces), strict=True)
    out, lse = merge_states(outs, lses)
    torch.testing.assert_close(out, whole[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
@pytest.mark.parametrize("first", [True, False])
def test_an_empty_part_changes_no_bit(dtype: torch.dtype, garbage: float, first: bool) -> None:
    out, lse = normal(6, 3, 8, dtype=dtype), normal(6, 3, seed=1) * 30
    empty = (torch.full_like(out, garbage), torch.full_like(lse, -INF))
    order = [empty, (out, lse)] if first else [(out, lse), empty]
    got = merge_states([o for o, _ in order], [n for _, n in order])
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    assert got[0].dtype == dtype


def test_empty_parts_make_an_empty_whole() -> None:
    nothing = torch.full((2, 3), -INF)
    out, lse = merge_states([torch.full((2, 3, 4), NAN)] * 3, [nothing] * 3)
    assert (out == 0).all() and (lse == -INF).all()


def test_rows_are_empty_one_by_one() -> None:
    out = normal(2, 1, 4)
    lse = torch.tensor([[1.0], [-INF]])
    other = torch.tensor([[-INF], [2.0]])
    merged, joined = merge_states([out, out + 1], [lse, other])
    assert torch.equal(merged, torch.stack([out[0], out[1] + 1]))
    assert joined.flatten().tolist() == [1, 2]


@pytest.mark.parametrize("size", [-3e38, -1e4, 0.0, 1e4, 3e38])
def test_any_finite_lse_weighs_as_it_should(size: float) -> None:
    lse = torch.full((1, 1), size)
    out, joined = merge_states([torch.zeros(1, 1, 1), torch.ones(1, 1, 1)], [lse, lse])
    assert out.item() == 0.5 and joined.item() == pytest.approx(size + math.log(2), rel=1e-6)


def test_lse_is_natural_and_no_other_base_would_do() -> None:
    lses = [torch.zeros(1, 1), torch.full((1, 1), math.log(3))]
    out, lse = merge_states([torch.zeros(1, 1, 1), torch.ones(1, 1, 1)], lses)
    assert out.item() == pytest.approx(0.75) and lse.item() == pytest.approx(math.log(4))


def test_strides_are_free_and_out_may_be_a_part() -> None:
    wide = normal(6, 3, 20)
    a, b = wide[..., :8], normal(3, 6, 8, seed=2).transpose(0, 1)
    lses = [normal(3, 6, seed=3).T, normal(6, 3, seed=4)]
    expected = merge_states([a.clone(), b.clone()], lses)
    got = merge_states([a, b], lses, out=a)
    assert got[0].data_ptr() == wide.data_ptr() and torch.equal(a, expected[0])


def test_mismatched_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="1 outputs and 0"):
        merge_states([torch.zeros(1, 1, 1)], [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_is_one_more_logit(dtype: torch.dtype) -> None:
    scores, v = normal(6, 3, 40), normal(40, 3, 8, seed=1)
    sinks = torch.tensor([0.5, -3.0, 6.0])
    out, lse = attention(scores, v)
    got, joined = apply_sinks(out.to(dtype), lse, sinks)
    with_sink = torch.cat([scores, sinks.expand(6, 3)[..., None]], -1)
    expected = torch.einsum("thk,khd->thd", with_sink.softmax(-1)[..., :-1], v)
    torch.testing.assert_close(got.float(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(joined, with_sink.logsumexp(-1))
    assert got.dtype == dtype


def test_extreme_sinks() -> None:
    out, lse = torch.ones(4, 1, 2), torch.tensor([[0.0], [0.0], [-INF], [-INF]])
    out[2:] = NAN
    for sink, weights, lses in (
        (-INF, [1, 1, 0, 0], [0, 0, -INF, -INF]),
        (100.0, [0, 0, 0, 0], [100, 100, 100, 100]),
        (0.0, [0.5, 0.5, 0, 0], [math.log(2), math.log(2), 0, 0]),
    ):
        got, joined = apply_sinks(out, lse, torch.tensor([sink]))
        assert got[:, 0, 0].tolist() == pytest.approx(weights)
        assert joined.flatten().tolist() == pytest.approx(lses)
