"""The orders in which engines keep the elements of a page, and the way from one to another.

For caches of one plain or 8-bit number per element. The order between layers, blocks, tokens
and heads is a matter of strides (`KVCacheLayout`); these differ inside a row.
"""

from __future__ import annotations

from enum import StrEnum

import torch

from attnplat.errors import ConfigError

VECTOR_BYTES = 16
"""What one lane loads at once: x elements fill it."""


class ElementLayout(StrEnum):
    """Order of the elements of a page; x elements fill 16 bytes.

    hnd: keys and values [num_blocks, num_kv_heads, block_size, size].
    nhd: keys and values [num_blocks, block_size, num_kv_heads, size].
    kx: keys [num_blocks, num_kv_heads, head_size / x, block_size, x] and values
        [num_blocks, num_kv_heads, v_head_size, block_size] (vLLM on ROCm).
    shuffle: keys as kx and values
        [num_blocks, num_kv_heads, block_size / x, v_head_size, x] (aiter).
    mla: keys [num_blocks, block_size, size], one head, values inside them.
    """

    HND = "hnd"
    NHD = "nhd"
    KX = "kx"
    SHUFFLE = "shuffle"
    MLA = "mla"


def keys_to_layout(keys: torch.Tensor, layout: ElementLayout) -> torch.Tensor:
    """Keys [num_blocks, num_kv_heads, block_size, head_size] (hnd) in `layout`: a copy.

    Raises ConfigError for sizes that the layout cannot hold.
    """
    if layout in (ElementLayout.KX, ElementLayout.SHUFFLE):
        x = _vector(keys)
        _check_multiple("head_size", keys.shape[3], x, layout)
        return _copy(keys.unflatten(3, (-1, x)).transpose(2, 3))
    return _rows_to_layout(keys, layout)


def keys_from_layout(keys: torch.Tensor, layout: ElementLayout) -> torch.Tensor:
    """The inverse of `keys_to_layout`."""
    if layout in (ElementLayout.KX, ElementLayout.SHUFFLE):
        _check_dims(keys, 5, layout)
        return _copy(keys.transpose(2, 3).flatten(3))
    return _rows_from_layout(keys, layout)


def values_to_layout(values: torch.Tensor, layout: ElementLayout) -> torch.Tensor:
    """Values [num_blocks, num_kv_heads, block_size, v_head_size] (hnd) in `layout`: a copy.

    Raises ConfigError for sizes that the layout cannot hold, and for mla, which has none.
    """
    if layout is ElementLayout.MLA:
        raise ConfigError("layout 'mla' keeps values inside the keys; convert the keys")
    if layout is ElementLayout.KX:
        return _copy(values.transpose(2, 3))
    if layout is ElementLayout.SHUFFLE:
        x = _vector(values)
        _check_multiple("block_size", values.shape[2], x, layout)
        return _copy(values.unflatten(2, (-1, x)).transpose(3, 4))
    return _rows_to_layout(values, layout)


def values_from_layout(values: torch.Tensor, layout: ElementLayout) -> torch.Tensor:
    """The inverse of `values_to_layout`."""
    if layout is ElementLayout.MLA:
        raise ConfigError("layout 'mla' keeps values inside the keys; convert the keys")
    if layout is ElementLayout.KX:
        _check_dims(values, 4, layout)
        return _copy(values.transpose(2, 3))
    if layout is ElementLayout.SHUFFLE:
        _check_dims(values, 5, layout)
        return _copy(values.transpose(3, 4).flatten(2, 3))
    return _rows_from_layout(values, layout)


def convert_layout(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    source: ElementLayout,
    target: ElementLayout,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values of `source` in `target`: copies, bit for bit the same elements.

    `values` is None between mla and layouts that hold one head's latent rows as keys.
    """
    keys = keys_to_layout(keys_from_layout(keys, source), target)
    if values is None:
        return keys, None
    return keys, values_to_layout(values_from_layout(values, source), target)


def _rows_to_layout(rows: torch.Tensor, layout: ElementLayout) -> torch.Tensor:
    _check_dims(rows, 4, layout)
    if layout is ElementLayout.NHD:
        return _copy(rows.transpose(1, 2))
    if layout is ElementLayout.MLA:
        if rows.shape[1] != 1:
            raise ConfigError(f"layout 'mla' has one KV head; num_kv_heads is {rows.shape[1]}")
        return _copy(rows.squeeze(1))
    return _copy(rows)


def _rows_from_layout(rows: torch.Tensor, layout: ElementLayout) -> torch.Tensor:
    _check_dims(rows, 3 if layout is ElementLayout.MLA else 4, layout)
    if layout is ElementLayout.NHD:
        return _copy(rows.transpose(1, 2))
    return _copy(rows.unsqueeze(1) if layout is ElementLayout.MLA else rows)


def _vector(tensor: torch.Tensor) -> int:
    return VECTOR_BYTES // tensor.element_size()


def _check_multiple(name: str, size: int, x: int, layout: ElementLayout) -> None:
    if size % x:
        raise ConfigError(
            f"layout {layout.value!r} takes a multiple of {x} for {name} with this dtype; it is "
            f"{size}"
        )


def _check_dims(tensor: torch.Tensor, dims: int, layout: ElementLayout) -> None:
    if tensor.dim() != dims:
        raise ConfigError(
            f"layout {layout.value!r} takes a tensor of {dims} dimensions; it has "
            f"{list(tensor.shape)}"
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
