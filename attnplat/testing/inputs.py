"""Constructed inputs: numbers chosen so that a wrong key, head or weight cannot hide.

Random data does not see the classic mistakes: one leaked key among 8192 moves a bfloat16
output by less than its tolerance. Here the keys at the edges of what a row may see, on both
sides, outweigh all others by exp(64), so that one too many or one too few changes the row by
tens of percent.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attnplat.config.layer import LayerConfig
from attnplat.testing.scenes import Scene
from attnplat.testing.truth import Request, Rules, rules_of

LOUD = 64.0
"""Logit of a marked key above those of the others."""


def generator(*seeds: object) -> torch.Generator:
    """A generator that depends on the seeds alone."""
    return torch.Generator().manual_seed(zlib.crc32(repr(seeds).encode()))


def normal(
    config: LayerConfig,
    query_lens: Sequence[int],
    seq_lens: Sequence[int] | None = None,
    *,
    seed: object = 0,
    gain: float = 1.0,
    note: str = "",
    **masks: Any,
) -> Scene:
    """Normal-distributed q, k and v, and whatever the config declares.

    `masks` are fields of `Request`, one value a request; `gain` multiplies q.
    """
    rules, gen = rules_of(config), generator(seed, query_lens, seq_lens)
    dtype = getattr(torch, str(config.dtype))
    requests = []
    for r, rows in enumerate(query_lens):
        keys = rows if seq_lens is None else seq_lens[r]
        own = {name: values[r] for name, values in masks.items()}
        q, k, v = draw(rules, rows, keys, gen)
        if rules.topk is not None and own.get("topk") is None:
            own["topk"] = some_keys(rows, keys, rules.topk, gen)
        if getattr(config, "position_bias", False) and own.get("bias") is None:
            own["bias"] = torch.randn(rules.num_heads, rows, keys, generator=gen)
        requests.append(
            Request(
                q=(q * gain).to(dtype),
                k=k.to(dtype),
                v=None if rules.values_in_keys else v.to(dtype),
                **own,
            )
        )
    sinks = alibi = None
    if getattr(config, "sinks", False):
        sinks = torch.randn(rules.num_heads, generator=gen)
    if getattr(config, "alibi", False):
        alibi = torch.rand(rules.num_heads, generator=gen) / 4
    return Scene(
        config=config, requests=tuple(requests), sinks=sinks, alibi_slopes=alibi, note=note
    )


def draw(
    rules: Rules, rows: int, keys: int, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one request, float32."""
    q = torch.randn(rows, rules.num_heads, rules.head_size, generator=gen)
    k = torch.randn(keys, rules.num_kv_heads, rules.head_size, generator=gen)
    v = torch.randn(keys, rules.num_kv_heads, rules.v_head_size, generator=gen)
    return q, k, v


def some_keys(rows: int, keys: int, topk: int, gen: torch.Generator) -> torch.Tensor:
    """int32 [rows, topk]: keys in any order, none twice, negative and too large ones among."""
    named = torch.full((rows, topk), -1, dtype=torch.int32)
    for i in range(rows):
        chosen = torch.randperm(keys, generator=gen)[: max(1, topk - 2)]
        named[i, : len(chosen)] = chosen
        named[i] = named[i][torch.randperm(topk, generator=gen)]
    return named


def integers(shape: Sequence[int], gen: torch.Generator, most: int = 31) -> torch.Tensor:
    """Whole numbers from -most to most but 0, which every dtype holds exactly."""
    sizes = torch.randint(1, most + 1, list(shape), generator=gen).float()
    return torch.where(torch.rand(list(shape), generator=gen) < 0.5, -sizes, sizes)


def edges(scene: Scene, *, seed: object = 0) -> Scene:
    """The scene with the keys marked that lie at the edges of what its rows see.

    Marked are both sides of every edge, and the first and the last key. Row i looks for its
    marks in one dimension, another for each key-value head; rows that share a dimension see
    each other's marks, which the truth knows.
    """
    rules, gen = scene.rules, generator("edges", seed, scene.query_lens, scene.seq_lens)
    requests = []
    for sight in scene.sights:
        blank = request_of(rules, sight.request, gen, scene.dtype)
        for row, seen in enumerate(sight.table):
            for key in edge_keys(seen):
                mark(rules, blank, row, key)
        requests.append(blank)
    return scene.replace(requests=tuple(requests), note=scene.note or "edges marked")


def edge_keys(seen: torch.Tensor) -> list[int]:
    """Keys on both sides of every edge of a row's sight, and the first and last key."""
    if not len(seen):
        return []
    change = (seen[1:] != seen[:-1]).nonzero().flatten()
    found = {0, len(seen) - 1, *change.tolist(), *(change + 1).tolist()}
    return sorted(found)


def request_of(rules: Rules, request: Request, gen: torch.Generator, dtype: torch.dtype) -> Request:
    """The request with q that looks for marks, keys without any, and whole values."""
    rows, keys = request.query_len, request.seq_len
    q = torch.zeros(rows, rules.num_heads, rules.head_size, dtype=dtype)
    k = torch.zeros(keys, rules.num_kv_heads, rules.head_size, dtype=dtype)
    values = integers((keys, rules.num_kv_heads, rules.v_head_size), gen).to(dtype)
    for row in range(rows):
        for head in range(rules.num_heads):
            q[row, head, dimension(rules, row, head // rules.group)] = query_part(rules)
    if rules.values_in_keys:
        k[..., : rules.v_head_size] = values
        first, count = mark_dimensions(rules)
        k[..., first : first + count] = 0
    return replace(request, q=q, k=k, v=None if rules.values_in_keys else values)


def mark(rules: Rules, request: Request, row: int, key: int) -> None:
    """Make `key` outweigh all unmarked ones for `row`, in place."""
    for head in range(rules.num_kv_heads):
        request.k[key, head, dimension(rules, row, head)] = key_part(rules)


def dimension(rules: Rules, row: int, kv_head: int) -> int:
    """The dimension in which a row looks for its marks; absorbed values use the others."""
    first, count = mark_dimensions(rules)
    return first + (row + 5 * kv_head) % count


def mark_dimensions(rules: Rules) -> tuple[int, int]:
    """The first dimension for marks, and how many there are.

    Behind the values where those are the front of the key; a key that is all value gives its
    first 16.
    """
    if not rules.values_in_keys:
        return 0, rules.head_size
    rest = rules.head_size - rules.v_head_size
    return (rules.v_head_size, rest) if rest else (0, 16)


def query_part(rules: Rules) -> float:
    """What q holds in the row's dimension."""
    return 8.0 if rules.scale >= 0 else -8.0


def key_part(rules: Rules) -> float:
    """What a marked key holds: scale * query_part * key_part is LOUD, up to rounding."""
    return LOUD / 8.0 / (abs(rules.scale) or 1.0)


def needle(
    config: LayerConfig,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    at: Sequence[Sequence[int]],
    *,
    seed: object = 0,
    note: str = "",
    **masks: Any,
) -> Scene:
    """Marked keys alone: `at` are those of each request, seen by all its rows that may.

    A row that sees one of them gives its value exactly.
    """
    scene = normal(config, query_lens, seq_lens, seed=seed, note=note, **masks)
    rules, gen = scene.rules, generator("needle", seed, query_lens, seq_lens)
    requests = []
    for request, keys in zip(scene.requests, at, strict=True):
        blank = request_of(rules, request, gen, scene.dtype)
        for row in range(request.query_len):
            for key in keys:
                mark(rules, blank, row, key)
        requests.append(blank)
    return scene.replace(requests=tuple(requests))


def uniform(
    config: LayerConfig,
    query_lens: Sequence[int],
    seq_lens: Sequence[int] | None = None,
    *,
    seed: object = 0,
    note: str = "",
    **masks: Any,
) -> Scene:
    """q = 0: every visible key weighs the same, and the output is the mean of whole values."""
    scene = normal(config, query_lens, seq_lens, seed=seed, note=note, **masks)
    rules, gen = scene.rules, generator("uniform", seed, query_lens, seq_lens)
    requests = []
    for request in scene.requests:
        shape = (request.seq_len, rules.num_kv_heads, rules.v_head_size)
        values = integers(shape, gen, 8).to(scene.dtype)
        k = request.k.clone()
        if rules.values_in_keys:
            k[..., : rules.v_head_size] = values
        v = None if rules.values_in_keys else values
        requests.append(replace(request, q=torch.zeros_like(request.q), k=k, v=v))
    return scene.replace(requests=tuple(requests))
