"""Stored rows by the definition of their format: one number at a time, in Python's own floats.

Slow, and independent of the codecs: the nearest code is looked up among the values of all.
Quotients are rounded to float32 once, which a double in between does not disturb, as
53 >= 2 * 24 + 2 bits.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from attnplat.backends.formats.elements import E4M3FN, Element, Integer, Minifloat
from attnplat.backends.formats.facts import Format, Scale, ScaleDtype, ScalePlace, ScaleRule
from attnplat.config.names import Dtype

TINY = 2.0**-126
"""The smallest scale that is computed."""


def float32(x: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def encode(format: Format, x: Sequence[float], factor: float | None = None) -> bytes:
    """The stored row of `x`, float32 numbers; `factor` is the caller's scale."""
    assert format.scale is not None
    split = len(x) - format.rest_size
    rest = _rest(format.rest, x[split:])
    if format.scale.place is ScalePlace.CALLER:
        scaled = [_divided(value, factor) for value in x]
        return _packed(format.element, [nearest(format.element, value) for value in scaled])
    codes, scales = [], []
    tile = format.tile(len(x))
    for first in range(0, split, tile):
        own = x[first : first + tile]
        stored, multiplier, zero_point = _scale_of(format.scale, format.element, own, factor)
        scales.append(stored)
        for value in own:
            codes.append(_code(format.element, value, multiplier, zero_point))
    main = _packed(format.element, codes).ljust(format.code_bytes(len(x)), b"\0")
    behind = _arranged(format.scale, scales)
    inline = format.scale.place is ScalePlace.CODES
    return main + behind + rest if inline else main + rest + behind


def _code(element: Element, x: float, multiplier: float | None, zero_point: int | None) -> int:
    quotient = _divided(x, None if multiplier is None else float32(multiplier))
    return nearest(element, quotient if zero_point is None else round(quotient) + zero_point)


def _divided(x: float, scale: float | None) -> float:
    """x / scale in float32; 0 where the scale is 0."""
    if scale is None:
        return x
    return 0.0 if scale == 0 else float32(x / scale)


def _scale_of(
    scale: Scale, element: Element, tile: Sequence[float], factor: float | None
) -> tuple[bytes, float, int | None]:
    """A tile's scale as stored, what codes are multiplied by, and the zero point."""
    assert not isinstance(element, Dtype)
    amax = max(abs(value) for value in tile)
    if scale.rule is ScaleRule.RANGE:
        return _range_scale(tile)
    if scale.rule is ScaleRule.POWER_OF_TWO:
        amax = max(amax, float32(scale.amax_floor), element.headroom * TINY)
        exponent = min(e for e in range(-140, 130) if amax <= math.ldexp(element.headroom, e))
        byte = exponent + 127
        stored = bytes([byte]) if scale.dtype is ScaleDtype.E8M0 else struct.pack("<I", byte << 23)
        return stored, math.ldexp(1.0, exponent), None
    ratio = float32(amax / element.headroom)
    ratio = ratio if factor is None else _divided(ratio, factor)
    if scale.dtype is ScaleDtype.E4M3FN:
        code = nearest(E4M3FN, max(ratio, E4M3FN.value(1)))
        given = 1.0 if factor is None else factor
        return bytes([code]), E4M3FN.value(code) * given, None
    ratio = max(ratio, TINY)
    return struct.pack("<f", ratio), ratio, None


def _range_scale(tile: Sequence[float]) -> tuple[bytes, float, int]:
    """Of 4-bit integers: the zero point is in the lowest 4 bits of the scale."""
    low, high = min(0.0, *tile), max(0.0, *tile)
    width = max(float32(float32(high / 15) - float32(low / 15)), TINY)
    word = struct.unpack("<I", struct.pack("<f", width))[0] & ~0xF
    multiplier = struct.unpack("<f", struct.pack("<I", word))[0]
    zero_point = min(15, max(0, round(float32(-low / multiplier))))
    return struct.pack("<I", word | zero_point), multiplier, zero_point


def nearest(element: Element, x: float) -> int:
    """The code nearest to x, of two the even one; the largest beyond all."""
    assert not isinstance(element, Dtype)
    if isinstance(element, Integer):
        whole = min(element.highest, max(element.lowest, round(x)))
        return whole % (1 << element.bits)
    size, middles = abs(x), _middles(element)
    code = bisect_left(middles, size)
    if code < len(middles) and middles[code] == size:
        code += code % 2
    negative = math.copysign(1.0, x) < 0 and (code != 0 or element.negative_zero)
    return code | element.sign if negative else code


@cache
def _middles(element: Minifloat) -> list[float]:
    """Halfway between each positive code's value and the next; all are exact."""
    values = [element.value(code) for code in range(element.largest_code + 1)]
    return [(low + high) / 2 for low, high in pairwise(values)]


def _packed(element: Element, codes: Sequence[int]) -> bytes:
    assert isinstance(element, Minifloat | Integer)
    if element.bits == 8:
        return bytes(codes)
    even = [*codes, 0] if len(codes) % 2 else codes
    return bytes(low | high << 4 for low, high in zip(even[0::2], even[1::2], strict=True))


def _arranged(scale: Scale, stored: Sequence[bytes]) -> bytes:
    """Scales in the order of the row."""
    copied = [one for one in stored for _ in range(scale.copies)]
    places = [b""] * len(copied)
    for s, one in enumerate(copied):
        places[s % scale.interleave * (len(copied) // scale.interleave) + s // scale.interleave] = (
            one
        )
    return b"".join(places) + bytes(scale.padding)


def _rest(element: Element | None, x: Sequence[float]) -> bytes:
    """The unscaled part: bfloat16, to even, or codes."""
    if element is None:
        return b""
    if isinstance(element, Dtype):
        assert element is Dtype.BFLOAT16
        words = [struct.unpack("<I", struct.pack("<f", value))[0] for value in x]
        halves = [(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words]
        return b"".join(struct.pack("<H", half) for half in halves)
    return _packed(element, [nearest(element, value) for value in x])


def meaning(format: Format, x: Sequence[float], factor: float | None = None) -> list[float]:
    """What the stored row of `x` means, exactly: codes times scales."""
    assert format.scale is not None
    split, found = len(x) - format.rest_size, []
    tile = split if format.scale.place is ScalePlace.CALLER else format.tile(len(x))
    for first in range(0, split, tile):
        own, multiplier, zero_point = x[first : first + tile], factor, None
        if format.scale.place is not ScalePlace.CALLER:
            _, multiplier, zero_point = _scale_of(format.scale, format.element, own, factor)
        for value in own:
            code = _code(format.element, value, multiplier, zero_point)
            whole = _value(format.element, code) - (zero_point or 0)
            found.append(whole * (1.0 if multiplier is None else multiplier))
    rest = _rest(format.rest, x[split:])
    if isinstance(format.rest, Dtype):
        words = struct.unpack(f"<{format.rest_size}H", rest)
        tail = [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]
    else:
        tail = [] if format.rest is None else [_value(format.rest, code) for code in rest]
    return found + tail


def _value(element: Element, code: int) -> float:
    assert not isinstance(element, Dtype)
    return element.value(code)
