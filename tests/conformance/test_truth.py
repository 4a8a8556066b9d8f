"""Two independent definitions of attention say the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from attnplat.testing.inputs import edges, needle, normal, uniform
from attnplat.testing.scenes import Scene
from attnplat.testing.terrain import Terrain
from tests.conformance.strategies import scenes
from tests.execution import oracle

QUICK = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def second_opinion(scene: Scene) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The scene by the other definition: one key at a time, in Python's own numbers."""
    rules, config = scene.rules, scene.config
    found, row = [], 0
    topk = None
    if rules.topk is not None:
        topk = torch.cat([r.topk for r in scene.requests if r.topk is not None])
    for request in scene.requests:
        other = oracle.Rules(
            scale=rules.scale,
            causal=rules.causal,
            left=rules.left,
            right=rules.right,
            chunk=rules.chunk,
            cap=getattr(config, "logits_soft_cap", None),
            static_sink_tokens=rules.static_sink_tokens,
            sinks=_list(scene.sinks),
            slopes=_list(scene.alibi_slopes),
            bias=request.bias,
            topk=topk,
        )
        v = request.k[..., : rules.v_head_size] if request.v is None else request.v
        found.append(
            oracle.attend(
                other,
                oracle.Request(
                    number=0,
                    q=request.q,
                    k=request.k,
                    v=v,
                    first_row=row,
                    causal=request.causal,
                    prefix_len=request.prefix_len,
                    ranges=list(request.ranges),
                    tree=request.tree,
                ),
            )
        )
        row += request.query_len
    return found


def _list(tensor: torch.Tensor | None) -> list[float] | None:
    return None if tensor is None else tensor.double().tolist()


@QUICK
@given(scene=scenes().filter(lambda scene: max(scene.seq_lens) <= 40))
def test_the_truth_is_that_of_another_definition(scene: Scene) -> None:
    for answer, (out, lse) in zip(scene.answers, second_opinion(scene), strict=True):
        torch.testing.assert_close(answer.out, out, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(answer.lse, lse, rtol=1e-9, atol=1e-9)


def layer(**changes: Any) -> Any:
    return Terrain().layer(**changes)


def test_a_needle_gives_its_value() -> None:
    scene = needle(layer(scale=0.25), [1], [30], [[7]])
    (request,), (answer,) = scene.requests, scene.answers
    assert request.v is not None
    expected = request.v[7].repeat_interleave(2, 0).double()
    torch.testing.assert_close(answer.out[0], expected, rtol=1e-12, atol=0)
    assert float(answer.lse[0, 0]) == pytest.approx(64.0)


def test_equal_keys_give_the_mean_and_the_log_of_their_number() -> None:
    scene = uniform(layer(), [1], [16])
    (request,), (answer,) = scene.requests, scene.answers
    assert request.v is not None
    expected = request.v.double().mean(0).repeat_interleave(2, 0)
    torch.testing.assert_close(answer.out[0], expected)
    assert float(answer.lse[0, 0]) == pytest.approx(math.log(16))


@pytest.mark.parametrize("left", [0, 1, 5, 15, 16])
def test_a_window_off_by_one_moves_marked_rows_by_far_more_than_any_tolerance(left: int) -> None:
    scene = edges(normal(layer(sliding_window=(left, -1), dtype="bfloat16"), [4], [40]))
    for wrong in (left - 1, left + 1):
        if wrong < 0:
            continue
        other = scene.replace(config=layer(sliding_window=(wrong, -1), dtype="bfloat16"))
        truth, moved = scene.answers[0].out, other.answers[0].out
        off = ((moved - truth).norm(dim=(0, 2)) / truth.norm(dim=(0, 2))).min()
        assert float(off) > 10 * 8e-3
