"""Scales of tiles: found, stored, and read back.

An encoder divides by what a decoder will read: scales are rounded to their stored form first.
"""

from __future__ import annotations

import math

import torch

from attnplat.backends.formats.element_codec import (
    constants,
    decode_elements,
    encode_elements,
)
from attnplat.backends.formats.elements import E4M3FN, Integer, Minifloat
from attnplat.backends.formats.facts import SMALLEST_NORMAL, Scale, ScaleDtype, ScaleRule

ZERO_POINT_BITS = 0xF

_E8M0 = (*(math.ldexp(1.0, byte - 127) for byte in range(255)), math.nan)
"""What each byte of a power-of-two scale means."""


def store_scales(
    scale: Scale,
    element: Minifloat | Integer,
    tiles: torch.Tensor,
    factor: torch.Tensor | None,
) -> torch.Tensor:
    """The stored scales of `tiles` [..., tiles, tile] float32: uint8 [..., tiles, itemsize].

    `factor` is the caller's own scale, of a shape that broadcasts to [..., tiles].
    """
    if scale.rule is ScaleRule.RANGE:
        return _range_words(tiles)
    amax = tiles.abs().amax(dim=-1)
    wrong = ~amax.isfinite()
    if scale.rule is ScaleRule.POWER_OF_TWO:
        floor = max(scale.amax_floor, element.headroom * SMALLEST_NORMAL)
        exponent = power_of_two(amax.clamp(min=floor), element.headroom)
        return _store_exponent(scale.dtype, exponent, wrong)
    # Divided by what codes reach, then by the caller's scale, rounding to float32 each time.
    ratio = quotient(amax, element.headroom)
    if factor is not None:
        ratio = divide(ratio, factor)
    if scale.dtype is ScaleDtype.E4M3FN:
        ratio = ratio.clamp(min=E4M3FN.value(1))
        codes = encode_elements(E4M3FN, ratio.masked_fill(wrong, math.nan))
        return codes.unsqueeze(-1)
    return _bytes(ratio.clamp(min=SMALLEST_NORMAL).masked_fill(wrong, math.nan))


def read_scales(
    scale: Scale, stored: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `stored` [..., tiles, itemsize] means: multipliers [..., tiles] and zero points.

    Zero points (subtracted from codes before the multiplication) are None for rules that have
    none.
    """
    if scale.dtype is ScaleDtype.E4M3FN:
        return decode_elements(E4M3FN, stored.squeeze(-1), dtype), None
    if scale.dtype is ScaleDtype.E8M0:
        table = constants(_E8M0, torch.float64, stored.device)
        return table.to(dtype)[stored.squeeze(-1).int()], None
    # A copy, because a view as float32 asks for a start that 4 divides.
    words = stored.clone(memory_format=torch.contiguous_format).view(torch.int32).squeeze(-1)
    if scale.rule is not ScaleRule.RANGE:
        return words.view(torch.float32).to(dtype), None
    multiplier = (words & ~ZERO_POINT_BITS).view(torch.float32).to(dtype)
    return multiplier, (words & ZERO_POINT_BITS).to(dtype)


def power_of_two(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The smallest exponent e with amax <= largest * 2^e: int32. Exact for every amax above 0.

    A logarithm of amax / largest rounds, and a cast to e8m0 rounds to nearest: both can be one
    short, and then the largest element saturates.
    """
    mantissa, exponent = torch.frexp(amax)
    limit, base = math.frexp(largest)
    return exponent - base + (mantissa > limit).int()


def quotient(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by, rounded once.

    By a tensor on x's device: torch multiplies by the reciprocal of a number on CUDA, which
    rounds twice.
    """
    return x / torch.full_like(x, by)


def divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale in float32; 0 where the scale is 0, which decodes everything to 0."""
    zero = scale == 0
    return (x / scale.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def _store_exponent(dtype: ScaleDtype, exponent: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    byte = exponent + 127
    if dtype is ScaleDtype.E8M0:
        return torch.where(wrong, 255, byte).to(torch.uint8).unsqueeze(-1)
    word = torch.where(wrong, 0x7FC00000, byte << 23)
    return _bytes(word.to(torch.int32).view(torch.float32))


def _range_words(tiles: torch.Tensor) -> torch.Tensor:
    """float32 words: scale in the upper 28 bits, zero point in the lower 4."""
    # Zero is always in the range, so that it is stored exactly.
    low, high = tiles.amin(dim=-1).clamp(max=0.0), tiles.amax(dim=-1).clamp(min=0.0)
    # Two quotients: the difference of the largest floats is infinite.
    width = (quotient(high, 15.0) - quotient(low, 15.0)).clamp(min=SMALLEST_NORMAL)
    words = width.masked_fill(~width.isfinite(), math.nan).view(torch.int32)
    words = words & ~ZERO_POINT_BITS
    zero_point = (-low / words.view(torch.float32)).round().clamp(0, 15).nan_to_num(nan=0.0)
    return _bytes((words | zero_point.int()).view(torch.float32))


def _bytes(words: torch.Tensor) -> torch.Tensor:
    return words.contiguous().unsqueeze(-1).view(torch.uint8)
