"""Joining partial attention results by their log-sum-exp.

Attention over a set of keys can be computed over parts of it and joined afterwards (Dao et
al., FlashAttention, arXiv 2205.14135, section 3.1). The neutral part, over no keys, has
output 0 and LSE -inf; whatever its output holds is never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplat.errors import ConfigError

_NEG_INF = float("-inf")


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint sets of keys.

        m = max_i lse_i,  w_i = exp(lse_i - m),  out = sum_i w_i out_i / sum_i w_i,
        lse = m + log(sum_i w_i)

    Sums run in float32 (float64 for float64 outputs) in the order given. Parts must have
    been computed without sinks; `apply_sinks` comes after.

    Args:
        outs: partial outputs, each [num_tokens, num_heads, v_head_size] of one dtype.
        lses: their log-sum-exps, natural log, float32 [num_tokens, num_heads].
        out: where to write the result; may be one of `outs`. Default: allocated.

    Returns:
        (out, lse). A row that is empty in all parts but one keeps that one's bits.

    Raises:
        ConfigError: no parts, or lists of different lengths.
    """
    if not outs or len(outs) != len(lses):
        raise ConfigError(f"merge_states got {len(outs)} outputs and {len(lses)} log-sum-exps")
    wide = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    high = torch.stack(tuple(lses)).amax(0)
    base = torch.where(high == _NEG_INF, 0.0, high)
    total = torch.zeros_like(base)
    merged = torch.zeros(outs[0].shape, dtype=wide, device=outs[0].device)
    for part, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse - base)
        total = total + weight
        # A product with weight 0 would let NaN of an empty part through.
        live = (lse != _NEG_INF)[..., None]
        merged = merged + torch.where(live, part.to(wide) * weight[..., None].to(wide), 0.0)
    merged = merged / torch.where(total == 0, 1.0, total)[..., None].to(wide)
    lse = base + torch.log(total)
    if out is None:
        return merged.to(outs[0].dtype), lse
    out.copy_(merged)
    return out, lse


def apply_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result with one more logit per head in the softmax denominator.

        lse' = log(exp(lse) + exp(sink)),  out' = out * exp(lse - lse')

    Sinks are neither scaled nor capped. Apply them once, to the merged whole.

    Args:
        out: [..., num_heads, v_head_size], computed without sinks.
        lse: its log-sum-exp, natural log, [..., num_heads].
        sinks: [num_heads].

    Returns:
        (out', lse') as new tensors of the same dtypes; without keys, 0 and the sink.
    """
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    joined = torch.logaddexp(lse, sinks.to(lse.dtype).expand_as(lse))
    weight = torch.where(lse == _NEG_INF, 0.0, torch.exp(lse - joined))[..., None].to(wide)
    scaled = torch.where(lse[..., None] == _NEG_INF, 0.0, out.to(wide) * weight)
    return scaled.to(out.dtype), joined
