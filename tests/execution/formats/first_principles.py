"""The formats once more, from their definitions, in Python's integers and fractions.

The oracle of the codec tests. It shares no code and no table with the library.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from functools import cache

HALF = Fraction(1, 2)
NAN = None

# name -> (exponent bits, mantissa bits, bias), codes that are NaN, codes that are infinite
DEFINITIONS = {
    "e4m3fn": ((4, 3, 7), {0x7F, 0xFF}, set()),
    "e4m3fnuz": ((4, 3, 8), {0x80}, set()),
    "e5m2": ((5, 2, 15), {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, {0x7C, 0xFC}),
    "e2m1": ((2, 1, 1), set(), set()),
}
LARGEST = {"e4m3fn": 448, "e4m3fnuz": 240, "e5m2": 57344, "e2m1": 6}


def value(name: str, code: int) -> Fraction | None:
    """The number of a code: (-1)^s * 2^(e - bias) * 1.m, or 2^(1 - bias) * 0.m; None for NaN."""
    (exponent_bits, mantissa_bits, bias), nan, _ = DEFINITIONS[name]
    if code in nan:
        return NAN
    mantissa = Fraction(code % 2**mantissa_bits, 2**mantissa_bits)
    exponent = code // 2**mantissa_bits % 2**exponent_bits
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    if exponent == 0:
        return sign * mantissa * two_to(1 - bias)
    return sign * (1 + mantissa) * two_to(exponent - bias)


def two_to(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


@cache
def nearest_code(name: str) -> Callable[[Fraction], int]:
    """x -> the code of the nearest finite value of its sign, ties to the even code.

    Beyond the largest value that is the largest. x's own sign decides that of a zero.
    """
    (exponent_bits, mantissa_bits, _), nan, infinite = DEFINITIONS[name]
    half = 2 ** (exponent_bits + mantissa_bits)
    values = [value(name, c) for c in range(half) if c not in nan | infinite]
    # Every float32 is an integer multiple of 2^-149; integers compare fast.
    unit = 149
    grid = [int(v * 2**unit) for v in values if v is not None]

    def code(x: Fraction) -> int:
        scaled, rest = divmod(abs(x.numerator) << unit, x.denominator)
        assert rest == 0
        above = bisect_left(grid, scaled)
        if above == len(grid):
            found = len(grid) - 1
        elif above == 0 or grid[above] == scaled:
            found = above
        else:
            up, down = grid[above] - scaled, scaled - grid[above - 1]
            even = above if above % 2 == 0 else above - 1
            found = even if up == down else (above if up < down else above - 1)
        negative = x < 0 and (name != "e4m3fnuz" or found)
        return found + half if negative else found

    return code


def float32(x: Fraction) -> Fraction:
    """x rounded to float32, ties to even; beyond its range is an error."""
    if x == 0:
        return x
    exponent = max(floor_log2(abs(x)), -126)
    unit = two_to(exponent - 23)
    rounded = half_even(x / unit) * unit
    assert abs(rounded) < two_to(128)
    return rounded


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if two_to(exponent) <= x else exponent - 1


def half_even(x: Fraction) -> int:
    below = x.numerator // x.denominator
    rest = x - below
    if rest == HALF:
        return below + below % 2
    return below + (rest > HALF)


def float32_bytes(x: Fraction) -> bytes:
    packed = struct.pack("<f", float(x))
    assert Fraction(struct.unpack("<f", packed)[0]) == x
    return packed


def bfloat16_bytes(x: Fraction) -> bytes:
    """x as bfloat16, which it must be exactly."""
    packed = struct.pack("<f", float(x))
    assert packed[:2] == b"\0\0"
    return packed[2:]


def least_exponent(amax: Fraction, largest: int) -> int:
    """The smallest e with amax <= largest * 2^e, by trying."""
    if amax == 0:
        return -(10**6)
    e = floor_log2(amax / largest)
    while amax > largest * two_to(e):
        e += 1
    return e


def packed(codes: list[int]) -> bytes:
    """Two 4-bit codes a byte, the even one low."""
    codes = [*codes, 0] if len(codes) % 2 else codes
    return bytes(low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True))


def tiles(row: list[Fraction], size: int) -> list[list[Fraction]]:
    return [row[i : i + size] for i in range(0, len(row), size)]


def joined(parts: list[tuple[list[int], int]]) -> list[int]:
    """The codes of all tiles, one after the other."""
    return [code for codes, _ in parts for code in codes]


def divided(tile: list[Fraction], scale: Fraction) -> list[Fraction]:
    return [float32(x / scale) for x in tile]


def ratio_scale(tile: list[Fraction], largest: int) -> Fraction:
    return max(float32(max(map(abs, tile)) / largest), two_to(-126))


def token_head(row: list[Fraction], name: str, largest: int) -> bytes:
    """Codes, padding to 4 bytes, float32 scale."""
    scale = ratio_scale(row, largest)
    quotients = divided(row, scale)
    if name == "int8":
        codes = [max(-127, min(127, half_even(q))) % 256 for q in quotients]
    else:
        codes = [nearest_code(name)(q) for q in quotients]
    return bytes(codes) + bytes(-len(codes) % 4) + float32_bytes(scale)


def int4_token_head(row: list[Fraction]) -> bytes:
    low, high = min([*row, Fraction(0)]), max([*row, Fraction(0)])
    width = float32(float32(high / 15) - float32(low / 15))
    width = max(width, two_to(-126))
    (bits,) = struct.unpack("<I", float32_bytes(width))
    bits -= bits % 16
    scale = Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])
    zero_point = max(0, min(15, half_even(float32(-low / scale))))
    codes = [max(0, min(15, half_even(q) + zero_point)) for q in divided(row, scale)]
    data = packed(codes)
    return data + bytes(-len(data) % 4) + struct.pack("<I", bits + zero_point)


def e4m3_scaled_tile(tile: list[Fraction], factor: Fraction) -> tuple[list[int], int]:
    """nvfp4: codes of a tile of 16 and the code of its scale."""
    ratio = float32(float32(max(map(abs, tile)) / 6) / factor)
    scale_code = nearest_code("e4m3fn")(max(Fraction(1, 512), min(Fraction(448), ratio)))
    scale = value("e4m3fn", scale_code)
    assert scale is not None
    quotients = divided(tile, float32(scale * factor))
    return [nearest_code("e2m1")(q) for q in quotients], scale_code


def power_scaled_tile(
    tile: list[Fraction], name: str, largest: int, floor: Fraction
) -> tuple[list[int], int]:
    """Codes of a tile and its scale's exponent."""
    exponent = max(least_exponent(max([floor, *map(abs, tile)]), largest), -126)
    return [nearest_code(name)(x / two_to(exponent)) for x in tile], exponent


def microscaled(row: list[Fraction], name: str) -> tuple[list[int], bytes]:
    parts = [power_scaled_tile(t, name, LARGEST[name], Fraction(0)) for t in tiles(row, 32)]
    return joined(parts), bytes(e + 127 for _, e in parts)


TINY = Fraction(struct.unpack("<f", struct.pack("<f", 1e-4))[0])


def latent(row: list[Fraction], tile: int) -> tuple[bytes, list[int]]:
    parts = [power_scaled_tile(t, "e4m3fn", 448, TINY) for t in tiles(row, tile)]
    return bytes(joined(parts)), [e for _, e in parts]


def index_row(row: list[Fraction], name: str, largest: int) -> tuple[bytes, int]:
    codes, exponent = power_scaled_tile(row, name, largest, TINY)
    return bytes(codes), exponent


def mla_fp8_656(row: list[Fraction]) -> bytes:
    codes, exponents = latent(row[:512], 128)
    scales = b"".join(float32_bytes(two_to(e)) for e in exponents)
    return codes + scales + b"".join(map(bfloat16_bytes, row[512:]))


def mla_fp8_584(row: list[Fraction]) -> bytes:
    codes, exponents = latent(row[:448], 64)
    rope = b"".join(map(bfloat16_bytes, row[448:]))
    return codes + rope + bytes(e + 127 for e in exponents) + b"\0"


def mla_fp8_528(row: list[Fraction]) -> bytes:
    codes, exponents = latent(row, 32)
    return codes + bytes(e + 127 for e in exponents)


def mla_nvfp4_352(row: list[Fraction]) -> bytes:
    parts = [e4m3_scaled_tile(t, Fraction(1)) for t in tiles(row[:512], 16)]
    rope = bytes(nearest_code("e4m3fn")(x) for x in row[512:])
    scales = bytearray(32)
    for s, (_, code) in enumerate(parts):
        scales[8 * (s & 3) + (s >> 2)] = code
    return packed(joined(parts)) + rope + bytes(scales)


def nvfp4(row: list[Fraction], factor: Fraction) -> bytes:
    parts = [e4m3_scaled_tile(t, factor) for t in tiles(row, 16)]
    codes = packed(joined(parts))
    return codes + bytes(code for _, code in parts)


def mxfp4(row: list[Fraction]) -> bytes:
    codes, scales = microscaled(row, "e2m1")
    return packed(codes) + scales


def mxfp8(row: list[Fraction]) -> bytes:
    codes, scales = microscaled(row, "e4m3fn")
    return bytes(codes) + scales


def index_fp8_132(row: list[Fraction], name: str, largest: int) -> bytes:
    codes, exponent = index_row(row, name, largest)
    return codes + float32_bytes(two_to(exponent))


def index_fp8_132_e8m0(row: list[Fraction]) -> bytes:
    codes, exponent = index_row(row, "e4m3fn", 448)
    return codes + bytes([exponent + 127] * 4)


# encoding -> row of numbers -> stored bytes, for formats that compute their scales alone
ROWS: dict[str, Callable[[list[Fraction]], bytes]] = {
    "int8_th": lambda row: token_head(row, "int8", 127),
    "fp8_th": lambda row: token_head(row, "e4m3fn", 448),
    "fp8_th_fnuz": lambda row: token_head(row, "e4m3fnuz", 224),
    "int4_th": int4_token_head,
    "nvfp4": lambda row: nvfp4(row, Fraction(1)),
    "mxfp4": mxfp4,
    "mxfp8": mxfp8,
    "mla_fp8_656": mla_fp8_656,
    "mla_fp8_584": mla_fp8_584,
    "mla_fp8_528": mla_fp8_528,
    "mla_nvfp4_352": mla_nvfp4_352,
    "index_fp8_132": lambda row: index_fp8_132(row, "e4m3fn", 448),
    "index_fp8_132_fnuz": lambda row: index_fp8_132(row, "e4m3fnuz", 224),
    "index_fp8_132_e8m0": index_fp8_132_e8m0,
    "index_mxfp4_68": mxfp4,
}


# --- and back: any bytes to numbers, None where a code or its scale is NaN ---------------------


def times(a: Fraction | None, b: Fraction | None) -> Fraction | None:
    return NAN if a is NAN or b is NAN else a * b


def scaled(name: str, codes: list[int], scales: list[Fraction | None]) -> list[Fraction | None]:
    """The numbers of codes, of which equal parts share each scale."""
    part = len(codes) // len(scales)
    return [times(value(name, c), scales[i // part]) for i, c in enumerate(codes)]


def halves(data: bytes) -> list[int]:
    return [half for byte in data for half in (byte % 16, byte // 16)]


def as_float32(data: bytes) -> list[Fraction]:
    return [Fraction(x) for x in struct.unpack(f"<{len(data) // 4}f", data)]


def as_bfloat16(data: bytes) -> list[Fraction]:
    pairs = zip(data[::2], data[1::2], strict=True)
    return [x for pair in pairs for x in as_float32(bytes([0, 0, *pair]))]


def as_e8m0(data: bytes) -> list[Fraction | None]:
    return [NAN if byte == 255 else two_to(byte - 127) for byte in data]


def as_e4m3(data: bytes) -> list[Fraction | None]:
    return [value("e4m3fn", byte) for byte in data]


def from_int4(row: bytes, size: int) -> list[Fraction | None]:
    (word,) = struct.unpack("<I", row[-4:])
    (scale,) = as_float32(struct.pack("<I", word - word % 16))
    return [(code - word % 16) * scale for code in halves(row)[:size]]


def from_mla_nvfp4(row: bytes) -> list[Fraction | None]:
    scales = as_e4m3(bytes(row[320 + 8 * (s & 3) + (s >> 2)] for s in range(32)))
    return [*scaled("e2m1", halves(row[:256]), scales), *as_e4m3(row[256:320])]


# encoding -> (bytes of a row, positions of float32 and bfloat16 words in it, decoder); sizes are
# 64 where the format does not fix one
BYTES: dict[str, tuple[int, range, range, Callable[[bytes], list[Fraction | None]]]] = {
    "int8_th": (
        68,
        range(64, 68, 4),
        range(0),
        lambda r: [Fraction(c - 256 * (c > 127)) * as_float32(r[64:])[0] for c in r[:64]],
    ),
    "fp8_th": (
        68,
        range(64, 68, 4),
        range(0),
        lambda r: scaled("e4m3fn", list(r[:64]), as_float32(r[64:])),
    ),
    "fp8_th_fnuz": (
        68,
        range(64, 68, 4),
        range(0),
        lambda r: scaled("e4m3fnuz", list(r[:64]), as_float32(r[64:])),
    ),
    "int4_th": (36, range(32, 36, 4), range(0), lambda r: from_int4(r, 64)),
    "nvfp4": (36, range(0), range(0), lambda r: scaled("e2m1", halves(r[:32]), as_e4m3(r[32:]))),
    "mxfp4": (34, range(0), range(0), lambda r: scaled("e2m1", halves(r[:32]), as_e8m0(r[32:]))),
    "mxfp8": (66, range(0), range(0), lambda r: scaled("e4m3fn", list(r[:64]), as_e8m0(r[64:]))),
    "mla_fp8_656": (
        656,
        range(512, 528, 4),
        range(528, 656, 2),
        lambda r: [
            *scaled("e4m3fn", list(r[:512]), as_float32(r[512:528])),
            *as_bfloat16(r[528:]),
        ],
    ),
    "mla_fp8_584": (
        584,
        range(0),
        range(448, 576, 2),
        lambda r: [
            *scaled("e4m3fn", list(r[:448]), as_e8m0(r[576:583])),
            *as_bfloat16(r[448:576]),
        ],
    ),
    "mla_fp8_528": (
        528,
        range(0),
        range(0),
        lambda r: scaled("e4m3fn", list(r[:512]), as_e8m0(r[512:])),
    ),
    "mla_nvfp4_352": (352, range(0), range(0), from_mla_nvfp4),
    "index_fp8_132": (
        132,
        range(128, 132, 4),
        range(0),
        lambda r: scaled("e4m3fn", list(r[:128]), as_float32(r[128:])),
    ),
    "index_fp8_132_fnuz": (
        132,
        range(128, 132, 4),
        range(0),
        lambda r: scaled("e4m3fnuz", list(r[:128]), as_float32(r[128:])),
    ),
    "index_fp8_132_e8m0": (
        132,
        range(0),
        range(0),
        lambda r: scaled("e4m3fn", list(r[:128]), as_e8m0(r[128:])),
    ),
    "index_mxfp4_68": (
        68,
        range(0),
        range(0),
        lambda r: scaled("e2m1", halves(r[:64]), as_e8m0(r[64:])),
    ),
}


def finite_words(row: bytes, words: range, halfwords: range) -> bytes:
    """`row` with the float32 and bfloat16 words that it has made finite."""
    changed = bytearray(row)
    for start, size in [*((w, 4) for w in words), *((w, 2) for w in halfwords)]:
        if changed[start + size - 1] % 128 == 127:
            changed[start + size - 1] -= 1
    return bytes(changed)
