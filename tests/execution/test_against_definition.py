"""REFERENCE is attention by its definition, and TORCH_SDPA is REFERENCE within its dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplat.config.names import Feature
from tests.execution.cases import IMPLS, Step, assert_close, layer, make_step, run, tree
from tests.execution.fuzz import random_step
from tests.execution.oracle import attend

CAUSAL = frozenset({Feature.LSE, Feature.PER_REQUEST_CAUSAL})
TREE = frozenset({Feature.LSE, Feature.TREE_MASK})
FORK = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
LINE = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

# name: (config, query lengths, sequence lengths, batch options)
MASKS: dict[str, tuple[dict[str, Any], list[int], list[int], dict[str, Any]]] = {
    "causal with context": ({}, [2, 5, 1], [9, 30, 17], {}),
    "bidirectional, more keys than queries": ({"causal": False}, [2, 5], [9, 30], {}),
    "window of itself only": ({"sliding_window": (0, -1)}, [1, 6], [20, 40], {}),
    "window one less than a page": ({"sliding_window": (15, -1)}, [1, 6, 20], [20, 40, 50], {}),
    "window of a page": ({"sliding_window": (16, -1)}, [1, 6, 20], [20, 40, 50], {}),
    "window beyond everything": ({"sliding_window": (1 << 50, -1)}, [1, 6], [20, 40], {}),
    "window open to the left": ({"sliding_window": (-1, 3), "causal": False}, [9], [9], {}),
    "window wider left": ({"sliding_window": (4, 1), "causal": False}, [9, 1], [9, 30], {}),
    "window wider right": ({"sliding_window": (1, 4), "causal": False}, [9, 1], [9, 30], {}),
    "chunks that are no pages": ({"chunk_size": 7}, [20, 1, 1], [20, 21, 22], {}),
    "query longer than chunk": ({"chunk_size": 4}, [20], [30], {}),
    "static sinks and window": (
        {"sliding_window": (3, -1), "static_sink_tokens": 2},
        [1, 8, 2],
        [60, 8, 3],
        {},
    ),
    "window restarted after a prefix": (
        {"sliding_window": (3, -1), "rswa": True},
        [1, 8, 2],
        [60, 8, 20],
        {"prefix_lens": [5, 0, 99]},
    ),
    "ranges see both ways": (
        {"mm_prefix": True, "sliding_window": (2, -1)},
        [12, 4],
        [12, 40],
        {"ranges": [(0, 2, 6), (0, 6, 9), (1, 34, 60)]},
    ),
    "causal per request": (
        {"also_needs": CAUSAL},
        [5, 5, 1],
        [9, 9, 9],
        {"causal": [True, False, False]},
    ),
    "tree": ({"also_needs": TREE}, [4, 3], [30, 3], {"tree_mask": tree(FORK, LINE)}),
    "top-k": ({"topk": 5}, [4, 1], [30, 20], {}),
    "cross, one encoder empty": (
        {"attn_type": "encoder_decoder"},
        [3, 2, 1],
        [7, 0, 40],
        {},
    ),
    "cross with a window nobody is in": (
        {"attn_type": "encoder_decoder", "sliding_window": (2, 0)},
        [30, 1],
        [7, 9],
        {},
    ),
}

SCORES: dict[str, dict[str, Any]] = {
    "scale given": {"scale": 0.7},
    "scale negative": {"scale": -0.3},
    "scale 0": {"scale": 0.0},
    "soft cap": {"logits_soft_cap": 0.5},
    "soft cap and window": {"logits_soft_cap": 2.0, "sliding_window": (5, -1)},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "sliding_window": (5, -1)},
    "ALiBi": {"alibi": True},
    "position bias": {"position_bias": True},
    "all": {"alibi": True, "position_bias": True, "logits_soft_cap": 2.0, "sinks": True},
    "narrow values": {"v_head_size": 8},
    "wide values": {"v_head_size": 24},
    "five heads share one": {"num_heads": 5, "num_kv_heads": 1},
    "no sharing": {"num_heads": 3, "num_kv_heads": 3},
    "odd sizes": {"head_size": 10, "num_heads": 14, "num_kv_heads": 2},
}


def by_definition(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [attend(step.rules(), request) for request in step.requests()]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("case", MASKS)
def test_every_mask_is_the_definition(case: str, name: str) -> None:
    wants, queries, keys, batch = MASKS[case]
    step = make_step(layer(**wants), queries, keys, **batch)
    expected = by_definition(step)
    assert_close(run(name, step, step.paged()), expected, step)
    assert_close(run(name, step), expected, step)


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("case", SCORES)
def test_every_change_to_scores_is_the_definition(case: str, name: str) -> None:
    step = make_step(layer(**SCORES[case]), [1, 6, 1, 3], [20, 6, 33, 40])
    assert_close(run(name, step, step.paged()), by_definition(step), step)


@pytest.mark.parametrize("name", IMPLS)
def test_a_position_bias_may_differ_by_request(name: str) -> None:
    bias = torch.randn(2, 4, 6, 20, generator=torch.Generator().manual_seed(1))
    step = make_step(layer(position_bias=True), [1, 6], [20, 6], options={"position_bias": bias})
    assert_close(run(name, step, step.paged()), by_definition(step), step)


@pytest.mark.parametrize("seed", range(40))
def test_random_mixtures_are_the_definition(seed: int) -> None:
    step, paged = random_step(seed, longest=24)
    reference = run("REFERENCE", step, paged)
    assert_close(reference, by_definition(step), step)
    assert_close(run("TORCH_SDPA", step, paged), reference, step)


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_random_mixtures_of_length_agree(seed: int) -> None:
    step, paged = random_step(seed, longest=600)
    assert_close(run("TORCH_SDPA", step, paged), run("REFERENCE", step, paged), step)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "wants",
    [{}, {"sliding_window": (63, -1), "sinks": True}, {"logits_soft_cap": 30.0}],
    ids=["plain", "window and sinks", "soft cap"],
)
def test_torch_sdpa_keeps_the_tolerance_of_its_dtype(dtype: str, wants: dict[str, Any]) -> None:
    config = layer(head_size=64, num_heads=4, num_kv_heads=2, dtype=dtype, **wants)
    step = make_step(config, [1, 1, 530, 3, 64, 1], [400, 390, 560, 100, 64, 5])
    paged = step.paged(32)
    expected = run("REFERENCE", step, paged)
    assert_close(run("TORCH_SDPA", step, paged), expected, step)
    without = config.replace(also_needs=frozenset())
    impl = IMPLS["TORCH_SDPA"].create(without, "cpu")
    out = impl.forward(impl.plan(step.batch, paged.pages), step.q, paged.cache, **step.options)
    assert_close((out, expected[1]), expected, step)


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 128, 48])
def test_lengths_around_page_ends(name: str, block_size: int) -> None:
    keys = [k * block_size + d for k in (1, 2) for d in (-1, 0, 1) if k * block_size + d > 0]
    step = make_step(layer(head_size=8), [1] * len(keys), keys)
    assert_close(run(name, step, step.paged(block_size)), run("REFERENCE", step), step)


@pytest.mark.parametrize("name", IMPLS)
def test_chunked_prefill_is_the_whole_prompt(name: str) -> None:
    whole = make_step(layer(sliding_window=(20, -1), sinks=True), [70])
    expected, _ = run(name, whole)
    for cut in (1, 16, 17, 32, 69):
        batch = whole.batch.from_lengths([70 - cut], [70])
        rest = Step(whole.config, batch, whole.q[cut:], whole.k, whole.v, whole.options)
        out, _ = run(name, rest, rest.paged())
        torch.testing.assert_close(out, expected[cut:], atol=1e-6, rtol=1e-5)
