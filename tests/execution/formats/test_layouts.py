"""A page's elements are where the layout says, and come back from every layout."""

from __future__ import annotations

import itertools

import pytest
import torch

from attnplat.backends.formats.layouts import (
    ElementLayout,
    convert_layout,
    keys_from_layout,
    keys_to_layout,
    values_from_layout,
    values_to_layout,
)
from attnplat.errors import ConfigError

BLOCKS, HEADS, TOKENS, KEY, VALUE = 3, 2, 32, 48, 64
LAYOUTS = [ElementLayout.HND, ElementLayout.NHD, ElementLayout.KX, ElementLayout.SHUFFLE]
PAIRS = list(itertools.product(LAYOUTS, repeat=2))
DTYPES = [torch.uint8, torch.bfloat16, torch.float32]


def numbered(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements that tell where they came from, as far as the dtype can count."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 37 % 251).reshape(shape).to(dtype)


def keys(dtype: torch.dtype) -> torch.Tensor:
    return numbered(BLOCKS, HEADS, TOKENS, KEY, dtype=dtype)


def values(dtype: torch.dtype) -> torch.Tensor:
    return numbered(BLOCKS, HEADS, TOKENS, VALUE, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_layout_converts_to_every_other_and_back(
    source: ElementLayout, target: ElementLayout, dtype: torch.dtype
) -> None:
    k, v = keys_to_layout(keys(dtype), source), values_to_layout(values(dtype), source)
    there = convert_layout(k, v, source, target)
    assert there[1] is not None
    assert all(t.is_contiguous() for t in there)
    assert torch.equal(there[0], keys_to_layout(keys(dtype), target))
    assert torch.equal(there[1], values_to_layout(values(dtype), target))
    back = convert_layout(*there, target, source)
    assert torch.equal(back[0], k) and torch.equal(back[1], v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_element_is_where_its_layout_says(dtype: torch.dtype) -> None:
    """Indices written out from the layouts' definitions."""
    x = 16 // dtype.itemsize
    k, v = keys(dtype), values(dtype)
    nhd = keys_to_layout(k, ElementLayout.NHD)
    kx = keys_to_layout(k, ElementLayout.KX)
    transposed = values_to_layout(v, ElementLayout.KX)
    shuffled = values_to_layout(v, ElementLayout.SHUFFLE)
    for b, h, n, d in itertools.product([0, 2], [0, 1], [0, 1, 17, 31], [0, 1, 5, 16, 33, 47]):
        assert nhd[b, n, h, d] == k[b, h, n, d]
        assert kx[b, h, d // x, n, d % x] == k[b, h, n, d]
        assert transposed[b, h, d, n] == v[b, h, n, d]
        assert shuffled[b, h, n // x, d, n % x] == v[b, h, n, d]
    assert kx.shape == (BLOCKS, HEADS, KEY // x, TOKENS, x)
    assert transposed.shape == (BLOCKS, HEADS, VALUE, TOKENS)
    assert shuffled.shape == (BLOCKS, HEADS, TOKENS // x, VALUE, x)


def test_latent_rows_are_keys_of_one_head() -> None:
    rows = numbered(3, 32, 576, dtype=torch.bfloat16)
    k, v = convert_layout(rows, None, ElementLayout.MLA, ElementLayout.NHD)
    assert v is None
    assert torch.equal(k, rows.unsqueeze(2))
    assert torch.equal(convert_layout(k, None, ElementLayout.NHD, ElementLayout.MLA)[0], rows)


def test_a_conversion_is_a_copy() -> None:
    k = keys(torch.uint8)
    for layout in LAYOUTS:
        assert keys_to_layout(k, layout).data_ptr() != k.data_ptr()
        assert keys_from_layout(keys_to_layout(k, layout), layout).data_ptr() != k.data_ptr()


REFUSED = {
    "kx of a head size that 16 bytes do not divide": (
        lambda: keys_to_layout(torch.zeros(1, 1, 16, 40, dtype=torch.uint8), ElementLayout.KX),
        "'kx' takes a multiple of 16 for head_size with this dtype; it is 40",
    ),
    "shuffle of a block size that 16 bytes do not divide": (
        lambda: values_to_layout(torch.zeros(1, 1, 4, 64).bfloat16(), ElementLayout.SHUFFLE),
        "'shuffle' takes a multiple of 8 for block_size with this dtype; it is 4",
    ),
    "mla of two heads": (
        lambda: keys_to_layout(torch.zeros(1, 2, 16, 576), ElementLayout.MLA),
        "'mla' has one KV head; num_kv_heads is 2",
    ),
    "mla values": (
        lambda: values_to_layout(torch.zeros(1, 1, 16, 512), ElementLayout.MLA),
        "keeps values inside the keys",
    ),
    "mla values back": (
        lambda: values_from_layout(torch.zeros(1, 16, 512), ElementLayout.MLA),
        "keeps values inside the keys",
    ),
    "a tensor of another layout": (
        lambda: keys_from_layout(torch.zeros(1, 2, 16, 64), ElementLayout.SHUFFLE),
        r"'shuffle' takes a tensor of 5 dimensions; it has \[1, 2, 16, 64\]",
    ),
}


@pytest.mark.parametrize("claim", REFUSED)
def test_refused(claim: str) -> None:
    call, message = REFUSED[claim]
    with pytest.raises(ConfigError, match=message):
        call()
