"""Every format a KV cache can be stored in, as facts: sizes, scales, and where they live.

`FORMATS` is the one registry. No torch here, so that selection and the command line can read
it; `rows` encodes and decodes, `pages` places rows in a block.

Words. A row is one token of one head, keys or values. A scale multiplies on read. `size` is
the number of elements of a row (`head_size` or `v_head_size`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from attnplat.backends.formats.elements import (
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    INT8,
    UINT4,
    Element,
    element_bits,
)
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding
from attnplat.config.names import Dtype, parse_name
from attnplat.errors import ConfigError, UnknownNameError

SMALLEST_NORMAL = 2.0**-126
"""Computed scales are at least this: an all-zero tile divides by it and not by zero."""


class ScaleDtype(StrEnum):
    """How a scale itself is stored.

    e8m0 is a power of two: byte b means 2^(b - 127), 255 means NaN, and there is no zero.
    """

    FLOAT32 = "float32"
    E8M0 = "e8m0"
    E4M3FN = "e4m3fn"

    @property
    def itemsize(self) -> int:
        """Bytes of one scale."""
        return 4 if self is ScaleDtype.FLOAT32 else 1


class ScalePlace(StrEnum):
    """Where the scales of a row are."""

    CALLER = "in a tensor of the caller"
    CODES = "behind the codes they scale"
    ROW = "at the end of the row"
    PAGE = "behind all rows of the page"


class ScaleRule(StrEnum):
    """How an encoder finds the scale of a tile; amax is the tile's largest magnitude.

    A tile that holds NaN or infinity gets the scale NaN under every rule, so that all of it,
    and nothing else, decodes to NaN.
    """

    GIVEN = "given"
    RATIO = "amax / largest"
    POWER_OF_TWO = "smallest power of two with amax <= largest * scale"
    RANGE = "(highest - lowest) / 15, zero included"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The scales of a format.

    Attributes:
        dtype, place, rule: as above.
        tile: elements that share a scale; None for all scaled elements of the row.
        amax_floor: tiles with a smaller amax are scaled as if they had this one.
        copies: how many times a tile's scale is stored, each for an equal part of the tile.
        interleave: scale s of n is stored at s % interleave * (n / interleave) + s // interleave.
        padding: unused bytes (zero) behind a row's scales.
        factor: whether the caller's own scale multiplies on top.
    """

    dtype: ScaleDtype
    place: ScalePlace
    rule: ScaleRule
    tile: int | None = None
    amax_floor: float = 0.0
    copies: int = 1
    interleave: int = 1
    padding: int = 0
    factor: bool = False


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to store a KV cache: everything but tensors.

    Attributes:
        encoding: its name.
        summary: one line for people.
        element: how the elements of a row are stored, all but the last `rest_size`.
        scale: their scales; None where codes are the numbers themselves.
        rest: how the last `rest_size` elements are stored, unscaled (the rope part of a
            latent row).
        size: the one row size the format has, or None.
        size_multiple: what a row's size must be a multiple of.
        latent: one head, and values are the first elements of the key row.
        keys_only: the row has no values at all (index caches).
        page_multiple: a page is padded to a multiple of so many bytes.
    """

    encoding: Encoding
    summary: str
    element: Element
    scale: Scale | None = None
    rest: Element | None = None
    rest_size: int = 0
    size: int | None = None
    size_multiple: int = 1
    latent: bool = False
    keys_only: bool = False
    page_multiple: int = 1

    @property
    def bits(self) -> int:
        """Bits of one element's code."""
        return element_bits(self.element)

    @property
    def needs(self) -> frozenset[str]:
        """Tensors that encoding and decoding take besides the cache.

        float32 of shape [1] or [num_kv_heads].
        """
        if self.scale is None:
            return frozenset()
        given = self.scale.place is ScalePlace.CALLER or self.scale.factor
        return frozenset({"k_scale", "v_scale"}) if given else frozenset()

    @property
    def scales_apart(self) -> bool:
        """Whether a page keeps the scales away from the rows."""
        return self.scale is not None and self.scale.place is ScalePlace.PAGE

    @property
    def one_head(self) -> bool:
        """Whether a token has a single row: latent and index rows."""
        return self.latent or self.keys_only

    def check_size(self, size: int) -> None:
        """Refuse a row size that the format cannot store. Raises ConfigError."""
        name = self.encoding.value
        if self.size is not None and size != self.size:
            raise ConfigError(f"{name} stores rows of {self.size} elements; this one has {size}")
        if size < 1 or size % self.size_multiple:
            near = max(self.size_multiple, size // self.size_multiple * self.size_multiple)
            raise ConfigError(
                f"{name} stores rows of a multiple of {self.size_multiple} elements; this one "
                f"has {size} (closest: {near})"
            )

    def tile(self, size: int) -> int:
        """Elements that one computed scale covers."""
        scaled = size - self.rest_size
        return scaled if self.scale is None or self.scale.tile is None else self.scale.tile

    def code_bytes(self, size: int) -> int:
        """Bytes of a row's scaled codes, with the padding that aligns a float32 behind them."""
        count = -(-(size - self.rest_size) * self.bits // 8)
        inline = self.scale is not None and self.scale.place is ScalePlace.CODES
        if inline and self.scale is not None and self.scale.dtype is ScaleDtype.FLOAT32:
            count = -(-count // 4) * 4
        return count

    def rest_bytes(self) -> int:
        """Bytes of a row's unscaled part."""
        return 0 if self.rest is None else self.rest_size * element_bits(self.rest) // 8

    def scale_bytes(self, size: int) -> int:
        """Bytes of a row's scales, wherever in the page they are."""
        scale = self.scale
        if scale is None or scale.place is ScalePlace.CALLER:
            return 0
        tiles = (size - self.rest_size) // self.tile(size)
        return tiles * scale.copies * scale.dtype.itemsize + scale.padding

    def data_bytes(self, size: int) -> int:
        """Bytes of a row without the scales that the page keeps apart."""
        return self.row_bytes(size) - (self.scale_bytes(size) if self.scales_apart else 0)

    def row_bytes(self, size: int) -> int:
        """Bytes of a row and its scales. Raises ConfigError for a size it cannot store."""
        self.check_size(size)
        return self.code_bytes(size) + self.rest_bytes() + self.scale_bytes(size)

    def bytes_per_token(
        self, num_kv_heads: int, head_size: int, v_head_size: int | None = None
    ) -> int:
        """Bytes that one token takes, keys and values; without the padding of pages.

        `v_head_size` defaults to `head_size`. A latent or keys-only row has no values of its
        own. Raises ConfigError for a size or head count it cannot store.
        """
        values = self.value_bytes(v_head_size or head_size)
        self.check_heads(num_kv_heads)
        return num_kv_heads * (self.row_bytes(head_size) + values)

    def value_bytes(self, v_head_size: int) -> int:
        """Bytes of the value row of one head; 0 where there is none."""
        return 0 if self.one_head else self.row_bytes(v_head_size)

    def check_heads(self, num_kv_heads: int) -> None:
        """Refuse more heads than the format has. Raises ConfigError."""
        if num_kv_heads < 1 or (self.one_head and num_kv_heads != 1):
            takes = "exactly 1" if self.one_head else "at least 1"
            raise ConfigError(
                f"{self.encoding.value} takes {takes} KV head; num_kv_heads is {num_kv_heads}"
            )

    def page_bytes(
        self,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        v_head_size: int | None = None,
    ) -> int:
        """Bytes of one block of `block_size` tokens, padding included."""
        count = block_size * self.bytes_per_token(num_kv_heads, head_size, v_head_size)
        return -(-count // self.page_multiple) * self.page_multiple


def format_of(encoding: Encoding | str) -> Format:
    """The format called `encoding`.

    Raises UnknownNameError for a name that none has, and for encodings without a codec.
    """
    found = parse_name(Encoding, encoding, "encoding")
    if found not in FORMATS:
        raise UnknownNameError("encoding with a codec", found.value, FORMATS)
    return FORMATS[found]


def _plain() -> list[Format]:
    return [
        Format(
            encoding=encoding,
            summary=f"{encoding.value} as torch stores it",
            element=Dtype(encoding.value),
        )
        for encoding in sorted(PLAIN_ENCODINGS)
    ]


_CALLER = Scale(dtype=ScaleDtype.FLOAT32, place=ScalePlace.CALLER, rule=ScaleRule.GIVEN)

_TOKEN_HEAD = Scale(dtype=ScaleDtype.FLOAT32, place=ScalePlace.CODES, rule=ScaleRule.RATIO)


def _microscaled(place: ScalePlace) -> Scale:
    return Scale(dtype=ScaleDtype.E8M0, place=place, rule=ScaleRule.POWER_OF_TWO, tile=32)


def _latent_scale(dtype: ScaleDtype, place: ScalePlace, tile: int, padding: int = 0) -> Scale:
    return Scale(
        dtype=dtype,
        place=place,
        rule=ScaleRule.POWER_OF_TWO,
        tile=tile,
        amax_floor=1e-4,
        padding=padding,
    )


def _index_scale(dtype: ScaleDtype, copies: int = 1) -> Scale:
    return Scale(
        dtype=dtype,
        place=ScalePlace.PAGE,
        rule=ScaleRule.POWER_OF_TWO,
        amax_floor=1e-4,
        copies=copies,
    )


_EIGHT_BIT = [
    Format(
        encoding=Encoding.FP8_E4M3FN,
        summary="OCP e4m3, one scale per tensor or per head",
        element=E4M3FN,
        scale=_CALLER,
    ),
    Format(
        encoding=Encoding.FP8_E4M3FNUZ,
        summary="e4m3 of CDNA3, one scale per tensor or per head",
        element=E4M3FNUZ,
        scale=_CALLER,
    ),
    Format(
        encoding=Encoding.FP8_E5M2,
        summary="OCP e5m2, one scale per tensor or per head",
        element=E5M2,
        scale=_CALLER,
    ),
    Format(
        encoding=Encoding.INT8_TH,
        summary="int8 with a scale per token and head",
        element=INT8,
        scale=_TOKEN_HEAD,
    ),
    Format(
        encoding=Encoding.FP8_TH,
        summary="OCP e4m3 with a scale per token and head",
        element=E4M3FN,
        scale=_TOKEN_HEAD,
    ),
    Format(
        encoding=Encoding.FP8_TH_FNUZ,
        summary="e4m3 of CDNA3 with a scale per token and head",
        element=E4M3FNUZ,
        scale=_TOKEN_HEAD,
    ),
]

_FOUR_BIT = [
    Format(
        encoding=Encoding.INT4_TH,
        summary="4-bit integers with scale and zero point per token and head; the zero point "
        "is the scale's lowest 4 bits",
        element=UINT4,
        scale=Scale(dtype=ScaleDtype.FLOAT32, place=ScalePlace.CODES, rule=ScaleRule.RANGE),
    ),
    Format(
        encoding=Encoding.NVFP4,
        summary="e2m1 with an e4m3 scale per 16, times the caller's scale",
        element=E2M1,
        scale=Scale(
            dtype=ScaleDtype.E4M3FN,
            place=ScalePlace.PAGE,
            rule=ScaleRule.RATIO,
            tile=16,
            factor=True,
        ),
        size_multiple=16,
    ),
    Format(
        encoding=Encoding.MXFP4,
        summary="e2m1 with an e8m0 scale per 32",
        element=E2M1,
        scale=_microscaled(ScalePlace.PAGE),
        size_multiple=32,
    ),
    Format(
        encoding=Encoding.MXFP8,
        summary="OCP e4m3 with an e8m0 scale per 32",
        element=E4M3FN,
        scale=_microscaled(ScalePlace.PAGE),
        size_multiple=32,
    ),
]

_LATENT = [
    Format(
        encoding=Encoding.MLA_FP8_656,
        summary="DeepSeek V3.2 latent row: 512 e4m3, 4 scales, 64 bfloat16 of rope",
        element=E4M3FN,
        scale=_latent_scale(ScaleDtype.FLOAT32, ScalePlace.CODES, 128),
        rest=Dtype.BFLOAT16,
        rest_size=64,
        size=576,
        latent=True,
    ),
    Format(
        encoding=Encoding.MLA_FP8_584,
        summary="DeepSeek V4 latent row: 448 e4m3 and 64 bfloat16 of rope; 7 scales and a spare "
        "byte",
        element=E4M3FN,
        scale=_latent_scale(ScaleDtype.E8M0, ScalePlace.PAGE, 64, padding=1),
        rest=Dtype.BFLOAT16,
        rest_size=64,
        size=512,
        latent=True,
        page_multiple=576,
    ),
    Format(
        encoding=Encoding.MLA_FP8_528,
        summary="DeepSeek V4.1 latent row: 512 e4m3, 16 scales",
        element=E4M3FN,
        scale=_latent_scale(ScaleDtype.E8M0, ScalePlace.CODES, 32),
        size=512,
        latent=True,
    ),
    Format(
        encoding=Encoding.MLA_NVFP4_352,
        summary="DeepSeek V3.2 latent row: 512 e2m1, 64 unscaled e4m3 of rope, 32 scales",
        element=E2M1,
        scale=Scale(
            dtype=ScaleDtype.E4M3FN,
            place=ScalePlace.ROW,
            rule=ScaleRule.RATIO,
            tile=16,
            interleave=4,
        ),
        rest=E4M3FN,
        rest_size=64,
        size=576,
        latent=True,
    ),
]

_INDEX = [
    Format(
        encoding=Encoding.INDEX_FP8_132,
        summary="index key: 128 OCP e4m3, one float32 scale",
        element=E4M3FN,
        scale=_index_scale(ScaleDtype.FLOAT32),
        size=128,
        keys_only=True,
    ),
    Format(
        encoding=Encoding.INDEX_FP8_132_FNUZ,
        summary="index key of CDNA3: 128 e4m3fnuz, one float32 scale",
        element=E4M3FNUZ,
        scale=_index_scale(ScaleDtype.FLOAT32),
        size=128,
        keys_only=True,
    ),
    Format(
        encoding=Encoding.INDEX_FP8_132_E8M0,
        summary="index key of SM100: 128 OCP e4m3, one e8m0 scale stored four times",
        element=E4M3FN,
        scale=_index_scale(ScaleDtype.E8M0, copies=4),
        size=128,
        keys_only=True,
    ),
    Format(
        encoding=Encoding.INDEX_MXFP4_68,
        summary="index key: 128 e2m1, 4 e8m0 scales",
        element=E2M1,
        scale=_microscaled(ScalePlace.PAGE),
        size=128,
        keys_only=True,
    ),
]

FORMATS: Mapping[Encoding, Format] = MappingProxyType(
    {
        row.encoding: row
        for table in (_plain(), _EIGHT_BIT, _FOUR_BIT, _LATENT, _INDEX)
        for row in table
    }
)
"""Encoding -> format: every encoding that has a codec."""
