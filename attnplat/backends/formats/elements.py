"""How one stored number is made of bits. No torch here.

A code is the number's bits as an unsigned integer. `element_codec` turns tensors into codes
and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnplat.config.names import Dtype


@dataclass(frozen=True, kw_only=True)
class Minifloat:
    """A small floating-point format: sign, exponent, mantissa, from the highest bit down.

    A code with exponent field 0 is subnormal: mantissa * 2^(1 - bias - mantissa_bits).

    Attributes:
        name: what the codes are called.
        exponent_bits, mantissa_bits, bias: the fields and the exponent's offset.
        largest_code: the largest finite value, without sign.
        nan_codes: every code that is no number.
        nan_code: what NaN is stored as; formats without one store the largest value.
        infinity_code: positive infinity, where the format has one. Encoding never makes it.
        negative_zero: whether the sign bit alone is a zero.
        headroom: what computed scales map the largest element of a tile to.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest_code: int
    nan_codes: frozenset[int]
    nan_code: int
    headroom: float
    infinity_code: int | None = None
    negative_zero: bool = True

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.bits - 1)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return self.value(self.largest_code)

    def value(self, code: int) -> float:
        """The number that `code` stands for."""
        if code in self.nan_codes:
            return math.nan
        negative = bool(code & self.sign)
        code &= self.sign - 1
        if code == self.infinity_code:
            return -math.inf if negative else math.inf
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        if exponent:
            mantissa += 1 << self.mantissa_bits
        magnitude = math.ldexp(mantissa, max(exponent, 1) - self.bias - self.mantissa_bits)
        return -magnitude if negative else magnitude


@dataclass(frozen=True, kw_only=True)
class Integer:
    """An integer of `bits` bits, two's complement where `lowest` is negative.

    Encoding makes `lowest` to `highest` only; decoding takes every code.
    """

    name: str
    bits: int
    lowest: int
    highest: int

    @property
    def headroom(self) -> float:
        """What computed scales map the largest element of a tile to."""
        return float(self.highest)

    def value(self, code: int) -> float:
        """The number that `code` stands for."""
        wraps = self.lowest < 0 and code >= 1 << (self.bits - 1)
        return float(code - (1 << self.bits) if wraps else code)


Element = Dtype | Minifloat | Integer
"""How one number is stored; a Dtype is stored as torch stores it."""

E4M3FN = Minifloat(
    name="e4m3fn",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    largest_code=0x7E,
    nan_codes=frozenset({0x7F, 0xFF}),
    nan_code=0x7F,
    headroom=448.0,
)

# 224 and not 240: half of 448, so that one tile gets the same codes in both forms of e4m3,
# with scales a factor of 2 apart.
E4M3FNUZ = Minifloat(
    name="e4m3fnuz",
    exponent_bits=4,
    mantissa_bits=3,
    bias=8,
    largest_code=0x7F,
    nan_codes=frozenset({0x80}),
    nan_code=0x80,
    headroom=224.0,
    negative_zero=False,
)

E5M2 = Minifloat(
    name="e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    largest_code=0x7B,
    nan_codes=frozenset({0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}),
    nan_code=0x7F,
    headroom=57344.0,
    infinity_code=0x7C,
)

E2M1 = Minifloat(
    name="e2m1",
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    largest_code=0x7,
    nan_codes=frozenset(),
    nan_code=0x7,
    headroom=6.0,
)

# The range is symmetric, so that -x is stored as the negative of what x is stored as.
INT8 = Integer(name="int8", bits=8, lowest=-127, highest=127)
UINT4 = Integer(name="uint4", bits=4, lowest=0, highest=15)


def element_bits(element: Element) -> int:
    """Bits of one stored number."""
    if isinstance(element, Dtype):
        return {Dtype.FLOAT64: 64, Dtype.FLOAT32: 32}.get(element, 16)
    return element.bits


def element_name(element: Element) -> str:
    """What the stored numbers are called."""
    return element.value if isinstance(element, Dtype) else element.name
