"""Attention by its definition, in float64: what every implementation is compared with.

Whether a query sees a key is one predicate on two positions, in plain Python; the products
and sums are float64 on the numbers exactly as a cache holds them. Nothing here comes from an
implementation, so that no mistake can be on both sides of a comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from attnplat.config.layer import (
    LayerConfig,
    MhaConfig,
    MlaConfig,
    MlaPrefillConfig,
    SparseMlaConfig,
)

NEG_INF = float("-inf")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a layer's config says of masks, scores and sizes."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    scale: float
    causal: bool = True
    left: int = -1
    right: int = -1
    chunk: int | None = None
    cap: float | None = None
    static_sink_tokens: int = 0
    topk: int | None = None
    values_in_keys: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads


def rules_of(config: LayerConfig) -> Rules:
    """The rules of a layer whose head counts are known."""
    heads, kv_heads = config.num_heads or 0, config.num_kv_heads or 1
    if isinstance(config, MhaConfig):
        return Rules(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=config.head_size,
            v_head_size=config.v_head_size or config.head_size,
            scale=config.head_size**-0.5 if config.scale is None else config.scale,
            causal=bool(config.causal),
            left=config.sliding_window[0],
            right=config.sliding_window[1],
            chunk=config.chunk_size,
            cap=config.logits_soft_cap,
            static_sink_tokens=config.static_sink_tokens,
            topk=config.topk,
        )
    width = (getattr(config, "qk_nope_head_dim", 0) or 0) + (
        getattr(config, "qk_rope_head_dim", 0) or 0
    )
    scale = (width or config.head_size) ** -0.5 if config.scale is None else config.scale
    if isinstance(config, MlaConfig):
        return Rules(
            num_heads=heads,
            num_kv_heads=1,
            head_size=config.head_size,
            v_head_size=config.kv_lora_rank or 0,
            scale=scale,
            causal=config.causal,
            left=config.sliding_window[0],
            right=config.sliding_window[1],
            topk=config.index_topk if isinstance(config, SparseMlaConfig) else None,
            values_in_keys=True,
        )
    assert isinstance(config, MlaPrefillConfig)
    return Rules(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=config.head_size,
        v_head_size=config.v_head_size or config.head_size,
        scale=scale,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One request as dense tensors on the CPU.

    Attributes:
        q: [query_len, num_heads, head_size].
        k: all its keys, [seq_len, num_kv_heads, head_size].
        v: all its values, [seq_len, num_kv_heads, v_head_size]; None where they are in keys.
        causal: its own causality, or None for the layer's.
        prefix_len: leading keys that stay visible outside the window.
        ranges: (begin, end) positions that see each other both ways.
        tree: bool [query_len, query_len]: does row i see the request's k-th query token.
        topk: int32 [query_len, topk], key positions, negative for none; or None.
        bias: [num_heads, query_len, seq_len] added after the soft cap, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    causal: bool | None = None
    prefix_len: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    tree: torch.Tensor | None = None
    topk: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def query_len(self) -> int:
        """Query rows."""
        return self.q.shape[0]

    @property
    def seq_len(self) -> int:
        """Keys."""
        return self.k.shape[0]

    def position(self, row: int) -> int:
        """The position of a query row, aligned bottom-right."""
        return self.seq_len - self.query_len + row


class Sight:
    """Which keys the rows of one request see: the mask algebra, one key at a time.

    allowed(p, j) = j < seq_len  and  j in topk(row)  and
        ( (causal => j <= p) and window and chunk and tree
          or p and j in one bidirectional range
          or (j < prefix_len or j < static_sink_tokens) and (causal => j <= p) )
    """

    def __init__(self, rules: Rules, request: Request) -> None:
        self.rules = rules
        self.request = request
        self.causal = rules.causal if request.causal is None else request.causal
        self.shielded = max(request.prefix_len, rules.static_sink_tokens)
        self.tree = None if request.tree is None else request.tree.tolist()
        self.named = None if request.topk is None else [set(row) for row in request.topk.tolist()]

    def in_place(self, p: int) -> Callable[[int], bool]:
        """Whether causality, window, chunk, ranges and shielded keys allow key j at p."""
        rules, causal, shielded = self.rules, self.causal, self.shielded
        left, right, chunk = rules.left, rules.right, rules.chunk
        own = [(begin, end) for begin, end in self.request.ranges if begin <= p < end]

        def allowed(j: int) -> bool:
            for begin, end in own:
                if begin <= j < end:
                    return True
            if causal and j > p:
                return False
            if j < shielded:
                return True
            if left >= 0 and p - j > left:
                return False
            if right >= 0 and j - p > right:
                return False
            return chunk is None or j // chunk == p // chunk

        return allowed

    @cached_property
    def places(self) -> torch.Tensor:
        """`in_place` for all rows and keys, bool [query_len, seq_len]."""
        request = self.request
        keys = range(request.seq_len)
        rows = [
            list(map(self.in_place(request.position(i)), keys)) for i in range(request.query_len)
        ]
        return torch.tensor(rows, dtype=torch.bool).reshape(request.query_len, request.seq_len)

    @cached_property
    def table(self) -> torch.Tensor:
        """Whether each row sees each key, bool [query_len, seq_len]."""
        seen = self.places
        if self.tree is not None or self.named is not None:
            rows = seen.tolist()
            for i, row in enumerate(rows):
                for j, placed in enumerate(row):
                    row[j] = placed and self._chosen(i, j)
            seen = torch.tensor(rows, dtype=torch.bool).reshape(seen.shape)
        return seen

    def _chosen(self, row: int, j: int) -> bool:
        """Whether tree and top-k leave key j to a row that sees it by its place."""
        if self.named is not None and j not in self.named[row]:
            return False
        context = self.request.seq_len - self.request.query_len
        if self.tree is None or j < context or j < self.shielded:
            return True
        p = self.request.position(row)
        if any(b <= p < e and b <= j < e for b, e in self.request.ranges):
            return True
        return bool(self.tree[row][j - context])

    def in_reach(self) -> torch.Tensor:
        """Whether any row could see each key by its place; no other block may be read."""
        return self.places.any(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What one request's rows must give, float64.

    Attributes:
        out: [query_len, num_heads, v_head_size].
        lse: natural log-sum-exp, the sink included iff there is one, [query_len, num_heads].
        magnitude: sum of weight * |value|, shaped as out: the scale of rounding errors.
        visible: bool [query_len, seq_len].
    """

    out: torch.Tensor
    lse: torch.Tensor
    magnitude: torch.Tensor
    visible: torch.Tensor

    @cached_property
    def blind(self) -> torch.Tensor:
        """Rows that see no key, bool [query_len]."""
        return ~self.visible.any(1)


def attend(
    sight: Sight,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> Answer:
    """The answer for one request.

    `k`, `v` [seq_len, num_kv_heads, size] are as stored, float64; `sinks` and `slopes`
    [num_heads], float64, or None.
    """
    rules, visible = sight.rules, sight.table
    of_head = torch.arange(rules.num_heads) // rules.group
    scores = _scores(rules, sight.request, k[:, of_head], slopes)
    weights, lse = _softmax(torch.where(visible, scores, NEG_INF), sinks)
    # A hidden value has no part in the sum, not even as 0 times what is not finite.
    values = torch.where(visible.any(0)[:, None, None], v, 0.0)[:, of_head]
    return Answer(
        out=torch.einsum("hrj,jhd->rhd", weights, values),
        lse=lse.T,
        magnitude=torch.einsum("hrj,jhd->rhd", weights, values.abs()),
        visible=visible,
    )


def _scores(
    rules: Rules, request: Request, k: torch.Tensor, slopes: torch.Tensor | None
) -> torch.Tensor:
    """[num_heads, query_len, seq_len]: scale, soft cap, ALiBi, position bias."""
    s = rules.scale * torch.einsum("rhd,jhd->hrj", request.q.double(), k)
    if rules.cap is not None:
        s = rules.cap * torch.tanh(s / rules.cap)
    if slopes is not None:
        first = request.position(0)
        p = torch.arange(first, first + request.query_len, dtype=torch.float64)
        j = torch.arange(request.seq_len, dtype=torch.float64)
        s = s - slopes[:, None, None] * (p[:, None] - j[None]).abs()
    if request.bias is not None:
        s = s + request.bias.double()
    return s


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as `scores`, and the log-sum-exp [num_heads, query_len]; sinks join both."""
    terms, keys = scores, scores.shape[2]
    if sinks is not None:
        extra = sinks[:, None, None].expand(*scores.shape[:2], 1)
        terms = torch.cat([scores, extra], 2)
    if terms.shape[2] == 0:
        return scores, torch.full(scores.shape[:2], NEG_INF, dtype=torch.float64)
    high = terms.amax(2, keepdim=True)
    shift = torch.where(high == NEG_INF, 0.0, high)
    weights = torch.exp(terms - shift)
    total = weights.sum(2, keepdim=True)
    lse = (shift + torch.log(total)).squeeze(2)
    weights = weights / torch.where(total == 0, 1.0, total)
    return weights[..., :keys], lse
