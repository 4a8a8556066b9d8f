"""Random layers and batches that mix every feature, from a seed."""

from __future__ import annotations

import random
from typing import Any

import torch

from attnplat.backends.batch import pack_tree_mask
from attnplat.config.names import Feature
from tests.execution.cases import Paged, Step, layer, make_step

LAYOUTS = ("HND", "NHD", "LHBNC", "BLHNC", "BHLNC", "BLNHC")


def random_step(seed: int, *, longest: int) -> tuple[Step, Paged | None]:
    """A step and, more often than not, a cache for it."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    wants: dict[str, Any] = {
        "num_heads": kv_heads * rng.choice([1, 2, 3, 5]),
        "num_kv_heads": kv_heads,
        "head_size": rng.choice([4, 8, 16, 24]),
        "dtype": rng.choice(["float32", "float32", "bfloat16", "float16", "float64"]),
        **_layer_options(rng),
    }
    needs = {Feature.LSE}
    queries, keys, batch = _lengths(rng, longest, cross="attn_type" in wants)
    batch.update(_batch_masks(rng, queries, keys, wants, needs))
    if rng.random() < 0.2:
        needs.add(Feature.BATCH_INVARIANCE)
    step = make_step(layer(also_needs=frozenset(needs), **wants), queries, keys, seed=seed, **batch)
    paged = rng.random() < 0.7
    where = (rng.choice([1, 3, 8, 16, 32]), rng.choice(LAYOUTS))
    return step, step.paged(*where) if paged else None


def _layer_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, tuple[float, dict[str, Any]]] = {
        "values": (0.3, {"v_head_size": rng.choice([4, 12])}),
        "cross": (0.2, {"attn_type": "encoder_decoder", "causal": False}),
        "bidirectional": (0.2, {"causal": False}),
        "window": (
            0.4,
            {"sliding_window": (rng.choice([-1, 0, 1, 3, 15, 16, 40]), rng.choice([-1, 0, 2, 20]))},
        ),
        "chunk": (0.2, {"chunk_size": rng.choice([1, 5, 16, 24])}),
        "cap": (0.25, {"logits_soft_cap": rng.choice([0.5, 30.0])}),
        "sinks": (0.3, {"sinks": True}),
        "alibi": (0.2, {"alibi": True}),
        "bias": (0.2, {"position_bias": True}),
        "static": (0.2, {"static_sink_tokens": rng.choice([1, 4, 17])}),
        "topk": (0.15, {"topk": rng.choice([1, 3, 9])}),
    }
    return {
        name: value
        for likely, given in options.values()
        if rng.random() < likely
        for name, value in given.items()
    }


def _lengths(
    rng: random.Random, longest: int, *, cross: bool
) -> tuple[list[int], list[int], dict[str, Any]]:
    count, most = rng.choice([1, 2, 4, 6]), rng.choice([1, 1, 3, max(longest // 2, 1)])
    queries = [rng.choice([0, 1, rng.randint(1, most)]) for _ in range(count)]
    if rng.random() < 0.3:
        queries = [most] * count
    keys = [rng.choice([q, q + rng.randint(0, longest)]) for q in queries]
    if cross:
        keys = [rng.choice([0, rng.randint(0, longest)]) for _ in queries]
    return queries, keys, {}


def _batch_masks(
    rng: random.Random,
    queries: list[int],
    keys: list[int],
    wants: dict[str, Any],
    needs: set[Feature],
) -> dict[str, Any]:
    masks: dict[str, Any] = {}
    if rng.random() < 0.2:
        needs.add(Feature.PER_REQUEST_CAUSAL)
        masks["causal"] = [rng.random() < 0.5 for _ in queries]
    if rng.random() < 0.2:
        wants["rswa"] = True
        masks["prefix_lens"] = [rng.choice([0, 3, rng.randint(0, n + 2)]) for n in keys]
    if rng.random() < 0.2:
        wants["mm_prefix"] = True
        masks["ranges"] = []
        for r, length in enumerate(keys):
            for _ in range(rng.randint(0, 2)):
                begin = rng.randint(0, max(length, 1))
                masks["ranges"].append((r, begin, begin + rng.randint(0, 12)))
    if rng.random() < 0.15 and "attn_type" not in wants and max(queries) < 30:
        needs.add(Feature.TREE_MASK)
        gen = torch.Generator().manual_seed(rng.randint(0, 9999))
        visible = torch.rand(sum(queries), max(queries), generator=gen) < 0.6
        masks["tree_mask"] = pack_tree_mask(visible)
    return masks
