"""Attention over dense keys: torch's fused kernel, and an online softmax in float32.

Both take query rows [requests, kv heads, rows, group, head_size] and dense keys and values
[requests, kv heads, keys, size], and answer out [requests, kv heads, rows, group,
v_head_size] and the natural log-sum-exp of the same shape without the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

_NEG_INF = float("-inf")

KEY_CHUNK = 512
"""Keys of one step of the online softmax: its scores stay in the cache of one core."""

Bias = Callable[[int, int], torch.Tensor]
"""(first, last) key of a chunk -> what to add to its scores, broadcast to
[requests, kv heads, rows, group, last - first]."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class TileMask:
    """One tile's mask, in the forms the two functions want.

    Attributes:
        visible: bool [requests, rows, keys].
        fused: for the fused kernel: as [requests or 1, 1, query rows, keys], float to be
            added on the CPU, bool elsewhere; None for the online softmax.
        nonempty: rows that see a key, bool [requests, rows]; None when all do.
    """

    visible: torch.Tensor
    fused: torch.Tensor | None
    nonempty: torch.Tensor | None

    @classmethod
    def of(
        cls,
        visible: torch.Tensor,
        dtype: torch.dtype,
        *,
        group_size: int,
        folded: bool,
        fused: bool,
    ) -> TileMask:
        """The forms of `visible`. `folded`: heads of a group are rows of the fused kernel."""
        nonempty: torch.Tensor | None = visible.any(-1)
        if visible.device.type == "cpu" and bool(nonempty.all()):  # type: ignore[union-attr]
            nonempty = None
        if not fused:
            return cls(visible, None, nonempty)
        rows = visible[:, None]
        if folded and visible.shape[1] > 1:
            rows = visible.repeat_interleave(group_size, dim=1)[:, None]
        if visible.device.type == "cpu":
            added = torch.zeros(rows.shape, dtype=accumulator(dtype))
            rows = added.masked_fill_(~rows, _NEG_INF)
        return cls(visible, rows, nonempty)


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TileMask | None,
    *,
    scale: float,
    square: bool,
    folded: bool,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch's fused kernel; all sizes of q, k and v equal, no change to scores but the mask.

    `square` asks for the kernel's own causal mask, which is aligned top-left: query and key
    counts are equal. `folded` makes the heads of a group rows of one head, which reads each
    key once; otherwise they are heads that share keys by stride 0, which needs no copies of
    the mask, and there must be one request. LSE only where `cpu_flash_gives_lse`.
    """
    requests, kv_heads, rows, group, size = q.shape
    if scale <= 0:
        # The CPU kernel scales maxima and masks of -inf along with the scores, so that a
        # negative scale turns them round and 0 makes NaN of them.
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    if folded:
        heads = q.reshape(requests, kv_heads, rows * group, size)
    else:
        heads = q[0].transpose(1, 2)
        shared = (kv_heads, group, k.shape[2], size)
        k, v = k[0][:, None].expand(shared), v[0][:, None].expand(shared)
    added = None if mask is None else mask.fused
    lse: torch.Tensor | None = None
    if q.device.type == "cpu" and cpu_flash_gives_lse(q.dtype):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(heads, k, v, 0.0, square, attn_mask=added, scale=scale)
    else:
        assert not want_lse
        out = scaled_dot_product_attention(
            heads, k, v, attn_mask=added, is_causal=square, scale=scale
        )
    if folded:
        out = out.view(requests, kv_heads, rows, group, size)
        lse = None if lse is None else lse.view(requests, kv_heads, rows, group)
    else:
        out = out.transpose(1, 2)[None]
        lse = None if lse is None else lse.transpose(1, 2)[None]
    if mask is None or mask.nonempty is None:
        return out, lse
    # Kernels differ in what they give a row without keys: 0, NaN, a mean, an LSE of 0.
    live = mask.nonempty[:, None, :, None]
    out = torch.where(live[..., None], out, 0.0)
    return out, None if lse is None else torch.where(live, lse, _NEG_INF)


@cache
def cpu_flash_gives_lse(dtype: torch.dtype) -> bool:
    """Whether this torch has its CPU flash kernel, with a mask and a natural log-sum-exp.

    The kernel is no public interface, so it is asked a question whose answer is known.
    """
    flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if flash is None:
        return False
    one = torch.ones(1, 1, 2, 8, dtype=dtype)
    added = torch.zeros(1, 1, 2, 2, dtype=accumulator(dtype))
    added[0, 0, 0, 1] = _NEG_INF
    try:
        out, lse = flash(one, one, one, 0.0, False, attn_mask=added, scale=0.25)
    except (RuntimeError, TypeError):
        return False
    expected = torch.tensor([2.0, 2.0 + 0.6931471805599453])
    shaped = tuple(lse.shape) == (1, 1, 2) and torch.equal(out, one)
    return shaped and torch.allclose(lse.flatten().float(), expected, rtol=0, atol=1e-5)


def online_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    *,
    scale: float,
    soft_cap: float | None,
    bias: Bias | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over chunks of keys, all scores and sums in float32 (float64 for float64).

    The recurrence of Milakov and Gimelshein (arXiv 1805.02867). Scores are never rounded to
    the inputs' dtype: bf16 scores would be off by up to 2^-8 of their size, before the exp.
    `visible` is bool [requests, rows, keys], or None for all.
    """
    requests, kv_heads, rows, group, _ = q.shape
    wide = accumulator(q.dtype)
    shape = (requests, kv_heads, rows, group)
    scaled = (q.to(wide) * scale).flatten(2, 3)
    high = q.new_full(shape, _NEG_INF, dtype=wide)
    total = q.new_zeros(shape, dtype=wide)
    out = q.new_zeros((*shape, v.shape[-1]), dtype=wide)
    for first in range(0, k.shape[2], KEY_CHUNK):
        last = min(first + KEY_CHUNK, k.shape[2])
        part = k[:, :, first:last].to(wide)
        scores = torch.matmul(scaled, part.transpose(2, 3)).view(*shape, last - first)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if bias is not None:
            scores = scores + bias(first, last)
        if visible is not None:
            seen = visible[:, None, :, None, first:last]
            scores = torch.where(seen, scores, _NEG_INF)
        higher = torch.maximum(high, scores.amax(-1))
        base = torch.where(higher == _NEG_INF, 0.0, higher)
        weights = torch.exp(scores - base[..., None])
        kept = torch.exp(high - base)
        total = total * kept + weights.sum(-1)
        added = torch.matmul(weights.flatten(2, 3), v[:, :, first:last].to(wide))
        out = out * kept[..., None] + added.view(*shape, -1)
        high = higher
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    return out, torch.where(high == _NEG_INF, 0.0, high) + torch.log(total)
