"""A second opinion: attention by the definition, one key at a time, in plain Python.

It shares no code with the library, and is as slow as it looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

INF = float("inf")


@dataclass
class Rules:
    """The mask and score options of a layer, spelt independently of its config."""

    scale: float
    causal: bool = True
    left: int = -1
    right: int = -1
    chunk: int | None = None
    cap: float | None = None
    static_sink_tokens: int = 0
    sinks: list[float] | None = None
    slopes: list[float] | None = None
    bias: torch.Tensor | None = None
    topk: torch.Tensor | None = None


@dataclass
class Request:
    """One request: its query rows, all its keys and values, and its own masks."""

    number: int
    q: torch.Tensor  # [rows, heads, size]
    k: torch.Tensor  # [keys, kv heads, size]
    v: torch.Tensor  # [keys, kv heads, value size]
    first_row: int = 0
    causal: bool | None = None
    prefix_len: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    tree: torch.Tensor | None = None  # bool [rows, rows]


def allowed(rules: Rules, request: Request, i: int, j: int) -> bool:
    """Whether query row i of the request sees key j."""
    rows, keys = len(request.q), len(request.k)
    p = keys - rows + i
    causal = rules.causal if request.causal is None else request.causal
    if rules.topk is not None and j not in rules.topk[request.first_row + i].tolist():
        return False
    if any(b <= p < e and b <= j < e for b, e in request.ranges):
        return True
    if causal and j > p:
        return False
    if j < request.prefix_len or j < rules.static_sink_tokens:
        return True
    if rules.left >= 0 and p - j > rules.left:
        return False
    if rules.right >= 0 and j - p > rules.right:
        return False
    if rules.chunk is not None and math.floor(j / rules.chunk) != math.floor(p / rules.chunk):
        return False
    return request.tree is None or j < keys - rows or bool(request.tree[i, j - (keys - rows)])


def attend(rules: Rules, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """out [rows, heads, value size] and lse [rows, heads], float64."""
    rows, heads, _ = request.q.shape
    group = heads // request.k.shape[1]
    out = torch.zeros(rows, heads, request.v.shape[2], dtype=torch.float64)
    lse = torch.full((rows, heads), -INF, dtype=torch.float64)
    for i in range(rows):
        seen = [j for j in range(len(request.k)) if allowed(rules, request, i, j)]
        for h in range(heads):
            scores = [score(rules, request, i, j, h, h // group) for j in seen]
            terms = scores + ([rules.sinks[h]] if rules.sinks is not None else [])
            high = max(terms, default=-INF)
            if high == -INF:
                continue
            total = sum(math.exp(s - high) for s in terms)
            lse[i, h] = high + math.log(total)
            for j, s in zip(seen, scores, strict=True):
                out[i, h] += math.exp(s - high) / total * request.v[j, h // group].double()
    return out, lse


def score(rules: Rules, request: Request, i: int, j: int, h: int, kv: int) -> float:
    """The logit of row i and key j in head h."""
    s = rules.scale * float(request.q[i, h].double() @ request.k[j, kv].double())
    p = len(request.k) - len(request.q) + i
    if rules.cap is not None:
        s = rules.cap * math.tanh(s / rules.cap)
    if rules.slopes is not None:
        s -= rules.slopes[h] * abs(p - j)
    if rules.bias is not None:
        bias: Any = rules.bias[request.number] if rules.bias.dim() == 4 else rules.bias
        s += float(bias[h, i, j])
    return s
