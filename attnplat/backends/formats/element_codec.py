"""Tensors of numbers to codes and back, bit for bit, on any device.

Written from the formats' definitions and not with torch's casts, which differ in what they do
beyond the largest value: e4m3fn saturates, e4m3fnuz gives NaN, e5m2 gives infinity, and the
answers change between versions. Rules of encoding, for every element:

- round to nearest, ties to the even code;
- beyond the largest value, infinity included, store the largest with the sign;
- NaN becomes the format's NaN, without sign; e2m1 has none and stores 6 (as PTX does), and
  integers store 0;
- zero keeps its sign where the format has a negative zero.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from attnplat.backends.formats.elements import Integer, Minifloat


def encode_elements(element: Minifloat | Integer, x: torch.Tensor) -> torch.Tensor:
    """One code per number: uint8, in the shape of `x` (any floating dtype)."""
    # Narrower dtypes widen exactly; float64 is not narrowed, which would round twice.
    x = x if x.dtype == torch.float64 else x.float()
    if isinstance(element, Integer):
        whole = x.clamp(element.lowest, element.highest).round().nan_to_num(nan=0.0)
        return (whole.int() & ((1 << element.bits) - 1)).to(torch.uint8)
    magnitude = x.abs().nan_to_num(nan=0.0).clamp(max=element.largest)
    # Below the smallest normal number, 2^lowest, codes are as far apart as just above it.
    lowest, highest = 1 - element.bias, math.frexp(element.largest)[1] - 1
    exponent = torch.frexp(magnitude.clamp(min=2.0**lowest)).exponent - 1
    per_step = tuple(2.0 ** (element.mantissa_bits - e) for e in range(lowest, highest + 1))
    steps = constants(per_step, x.dtype, x.device)[exponent - lowest]
    # A count of steps that rounds up to the next power of two is the next exponent's first code.
    code = (magnitude * steps).round().int() + (exponent - lowest << element.mantissa_bits)
    signed = torch.signbit(x)
    if not element.negative_zero:
        signed = signed & (code != 0)
    code = torch.where(signed, code | element.sign, code)
    return torch.where(x.isnan(), element.nan_code, code).to(torch.uint8)


def decode_elements(
    element: Minifloat | Integer, codes: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The numbers that `codes` (uint8) stand for, exactly, in `dtype`."""
    return constants(_values(element), dtype, codes.device)[codes.int()]


@cache
def _values(element: Minifloat | Integer) -> tuple[float, ...]:
    return tuple(element.value(code) for code in range(1 << element.bits))


@cache
def constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers, made once per device: making it waits for the device, and
    cannot be recorded into a device graph. Not to be written."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def pack(element: Minifloat | Integer, codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., size] to bytes [..., ceil(size * bits / 8)].

    Of two 4-bit codes in a byte the even element has the low half. An odd one at the end is
    alone in its byte.
    """
    if element.bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(element: Minifloat | Integer, stored: torch.Tensor, size: int) -> torch.Tensor:
    """Bytes [..., ceil(size * bits / 8)] to codes [..., size]: the inverse of `pack`."""
    if element.bits == 8:
        return stored[..., :size]
    halves = torch.stack((stored & 0xF, stored >> 4), dim=-1)
    return halves.flatten(-2)[..., :size]


def relabel_fn_as_fnuz(codes: torch.Tensor) -> torch.Tensor:
    """The e4m3fnuz codes of half the values of e4m3fn `codes`: the scale doubles. Exact.

    The same byte means half as much in fnuz. Negative zero becomes zero, whose byte is NaN in
    fnuz, and NaN moves to it.
    """
    nan = (codes & 0x7F) == 0x7F
    return torch.where(nan, 0x80, torch.where(codes == 0x80, 0x00, codes)).to(torch.uint8)


def relabel_fnuz_as_fn(codes: torch.Tensor) -> torch.Tensor:
    """The e4m3fn codes of twice the values of e4m3fnuz `codes`: the scale halves.

    Exact but for the largest magnitude, 240: e4m3fn has no 480 and saturates at 448.
    """
    nan = codes == 0x80
    largest = (codes & 0x7F) == 0x7F
    return torch.where(nan, 0x7F, torch.where(largest, codes - 1, codes)).to(torch.uint8)
