"""Rows: vectors of numbers to the bytes that a cache stores, and back.

The reference for every kernel: plain torch, any device, no state. Arithmetic is float32; a
quotient is a true division, rounded once. Inputs of float64 are rounded to float32 first,
but for encodings that store them as they are.
"""

from __future__ import annotations

import torch

from attnplat.backends.checks import FLOATS, check_tensor, torch_dtype
from attnplat.backends.formats.element_codec import (
    decode_elements,
    encode_elements,
    pack,
    unpack,
)
from attnplat.backends.formats.elements import E4M3FN, Element, Integer, Minifloat
from attnplat.backends.formats.facts import SMALLEST_NORMAL, Format, Scale, ScalePlace
from attnplat.backends.formats.scales import divide, quotient, read_scales, store_scales
from attnplat.config.names import Dtype
from attnplat.errors import PlanMismatchError, UnsupportedCallError


def encode(
    format: Format,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The stored rows of keys and values.

    `k` [..., num_kv_heads, head_size] and `v` [..., num_kv_heads, v_head_size] become uint8
    [..., num_kv_heads, row_bytes]. `v` is None, and stays so, where the format stores no
    values of their own. `k_scale` and `v_scale` are as in `encode_rows`.
    """
    if format.one_head and v is not None:
        raise UnsupportedCallError(f"{format.encoding.value} stores no values of their own")
    if not format.one_head and v is None:
        raise UnsupportedCallError(f"{format.encoding.value} stores values; v is None")
    rows = encode_rows(format, k, scale=k_scale)
    return rows, None if v is None else encode_rows(format, v, scale=v_scale)


def decode(
    format: Format,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor | None = None,
    *,
    head_size: int,
    v_head_size: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values of stored rows: the inverse of `encode`, up to rounding.

    A latent row's values are the first `v_head_size` elements of its keys; those of an index
    row are None.
    """
    k = decode_rows(format, k_rows, size=head_size, scale=k_scale, dtype=dtype)
    if format.keys_only:
        return k, None
    v_size = v_head_size or head_size
    if format.latent:
        return k, k[..., :v_size]
    if v_rows is None:
        raise UnsupportedCallError(f"{format.encoding.value} stores values; v_rows is None")
    return k, decode_rows(format, v_rows, size=v_size, scale=v_scale, dtype=dtype)


def encode_rows(
    format: Format, x: torch.Tensor, *, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """The stored bytes of rows x [..., num_kv_heads, size]: uint8 [..., row_bytes].

    Scales that a page keeps apart are the row's last bytes. `scale` (float32, [1] or
    [num_kv_heads], 1 when left out) is for formats that say so in `needs`; where it is 0,
    codes are 0.

    Raises:
        ConfigError: a row size the format cannot store.
        PlanMismatchError: a tensor of the wrong dtype or shape.
        UnsupportedCallError: a scale for a format that takes none.
    """
    size = _check_rows("x", x, FLOATS)
    format.check_size(size)
    factor = _factor(format, scale, x)
    if isinstance(format.element, Dtype):
        return _as_bytes(format.element, x)
    split = size - format.rest_size
    main, rest = x[..., :split].float(), x[..., split:]
    if format.scale is None or format.scale.place is ScalePlace.CALLER:
        scaled = main if factor is None else divide(main, factor)
        return pack(format.element, encode_elements(format.element, scaled))
    tiles = main.unflatten(-1, (-1, format.tile(size)))
    stored = store_scales(format.scale, format.element, tiles, factor)
    codes = _encode_tiles(format.scale, format.element, tiles, stored, factor)
    codes = torch.nn.functional.pad(codes, (0, format.code_bytes(size) - codes.shape[-1]))
    scales = _arrange(format.scale, stored)
    if format.scale.place is ScalePlace.CODES:
        return torch.cat((codes, scales, _rest_bytes(format, rest)), dim=-1)
    return torch.cat((codes, _rest_bytes(format, rest), scales), dim=-1)


def _encode_tiles(
    scale: Scale,
    element: Minifloat | Integer,
    tiles: torch.Tensor,
    stored: torch.Tensor,
    factor: torch.Tensor | None,
) -> torch.Tensor:
    multiplier, zero_point = read_scales(scale, stored, torch.float32)
    if factor is not None:
        multiplier = multiplier * factor
    scaled = divide(tiles, multiplier.unsqueeze(-1))
    if zero_point is not None:
        scaled = scaled.round() + zero_point.unsqueeze(-1)
    return pack(element, encode_elements(element, scaled).flatten(-2))


def decode_rows(
    format: Format,
    rows: torch.Tensor,
    *,
    size: int,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The numbers that rows (uint8 [..., num_kv_heads, row_bytes]) stand for: [..., size].

    Code times scale is computed in float32 and rounded to `dtype`; in float64 it is exact.
    Scales may be any that the format can hold, NaN and 0 included. Raises as `encode_rows`.
    """
    _check_rows("rows", rows, (torch.uint8,), format.row_bytes(size))
    factor = _factor(format, scale, rows)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    if isinstance(format.element, Dtype):
        return _from_bytes(format.element, rows).to(dtype)
    split = size - format.rest_size
    codes, stored, rest = _take_apart(format, rows, size)
    x = decode_elements(format.element, unpack(format.element, codes, split), work)
    if format.scale is not None and format.scale.place is not ScalePlace.CALLER:
        multiplier, zero_point = read_scales(format.scale, _collect(format.scale, stored), work)
        tiles = x.unflatten(-1, (multiplier.shape[-1], -1))
        if factor is not None:
            multiplier = multiplier * factor.to(work)
        if zero_point is not None:
            tiles = tiles - zero_point.unsqueeze(-1)
        x = (tiles * multiplier.unsqueeze(-1)).flatten(-2)
    elif factor is not None:
        x = x * factor.to(work)
    if format.rest is None:
        return x.to(dtype)
    tail = _from_rest(format.rest, rest, work)
    return torch.cat((x, tail), dim=-1).to(dtype)


def amax_scale(format: Format, x: torch.Tensor, *, per_head: bool = False) -> torch.Tensor:
    """A scale for a format that takes the caller's: float32 [1] or [num_kv_heads].

    x [num_tokens, num_kv_heads, size]: the largest magnitude, of all or of each head, over
    the largest that the format's codes reach; at least 2^-126.

    Raises UnsupportedCallError for a format that takes none.
    """
    if not format.needs or isinstance(format.element, Dtype):
        raise UnsupportedCallError(f"{format.encoding.value} takes no scale of the caller")
    magnitude = x.float().abs()
    amax = magnitude.amax(dim=(0, 2)) if per_head else magnitude.amax().reshape(1)
    scaled_scales = format.scale is not None and format.scale.factor
    reach = format.element.headroom * (E4M3FN.headroom if scaled_scales else 1.0)
    return quotient(amax, reach).clamp(min=SMALLEST_NORMAL)


def _check_rows(
    name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], last: int | None = None
) -> int:
    dims = x.dim() if isinstance(x, torch.Tensor) else 1
    shape = (*[None] * (max(dims, 1) - 1), last)
    device = getattr(x, "device", torch.device("cpu"))
    check_tensor(name, x, shape=shape, dtype=dtypes, device=device)
    return int(x.shape[-1])


def _factor(format: Format, scale: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """The caller's scale as it broadcasts to [..., num_kv_heads, tiles or size], or None."""
    if scale is None:
        return None
    if not format.needs:
        raise UnsupportedCallError(
            f"{format.encoding.value} takes no scale of the caller; leave `scale` out"
        )
    check_tensor("scale", scale, shape=(None,), dtype=torch.float32, device=x.device)
    heads = x.shape[-2] if x.dim() > 1 else 1
    if len(scale) not in (1, heads):
        raise PlanMismatchError(
            f"scale has shape [{len(scale)}]; expected [1] or [{heads}], one per KV head"
        )
    return scale.unsqueeze(-1) if x.dim() > 1 else scale


def _as_bytes(dtype: Dtype, x: torch.Tensor) -> torch.Tensor:
    return x.to(torch_dtype(dtype.value)).contiguous().view(torch.uint8)


def _from_bytes(dtype: Dtype, stored: torch.Tensor) -> torch.Tensor:
    # A copy, because a view as a wider dtype asks for an aligned start.
    copy = stored.clone(memory_format=torch.contiguous_format)
    return copy.view(torch_dtype(dtype.value))


def _rest_bytes(format: Format, rest: torch.Tensor) -> torch.Tensor:
    if format.rest is None:
        return rest.to(torch.uint8)  # no elements
    if isinstance(format.rest, Dtype):
        return _as_bytes(format.rest, rest)
    return encode_elements(format.rest, rest)


def _from_rest(element: Element, rest: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    if isinstance(element, Dtype):
        return _from_bytes(element, rest).to(work)
    return decode_elements(element, rest, work)


def _take_apart(
    format: Format, rows: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and rest of stored rows."""
    sizes = [format.code_bytes(size), format.rest_bytes(), format.scale_bytes(size)]
    if format.scale is not None and format.scale.place is ScalePlace.CODES:
        codes, scales, rest = rows.split([sizes[0], sizes[2], sizes[1]], dim=-1)
    else:
        codes, rest, scales = rows.split(sizes, dim=-1)
    return codes, scales, rest


def _arrange(scale: Scale, stored: torch.Tensor) -> torch.Tensor:
    """Stored scales [..., tiles, itemsize] in the order of the row: [..., scale_bytes]."""
    copied = stored.repeat_interleave(scale.copies, dim=-2)
    # Scale s goes to s % interleave * (n / interleave) + s // interleave: a transposition.
    ordered = copied.unflatten(-2, (-1, scale.interleave)).transpose(-3, -2)
    return torch.nn.functional.pad(ordered.flatten(-3), (0, scale.padding))


def _collect(scale: Scale, row: torch.Tensor) -> torch.Tensor:
    """The inverse of `_arrange`, every copy a scale of its own."""
    kept = row[..., : row.shape[-1] - scale.padding].unflatten(-1, (-1, scale.dtype.itemsize))
    scales: torch.Tensor = kept.unflatten(-2, (scale.interleave, -1)).transpose(-3, -2)
    return scales.flatten(-3, -2)
