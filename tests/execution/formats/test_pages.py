"""A page holds all of its block, where the format says, and nothing of another's."""

from __future__ import annotations

import pytest
import torch

from attnplat.backends.formats.facts import FORMATS, Format, format_of
from attnplat.backends.formats.pages import Pages, PageShape, swizzle_scales, unswizzle_scales
from attnplat.backends.formats.rows import decode, encode
from attnplat.errors import ConfigError, PlanMismatchError

BLOCK, BLOCKS, HEADS = 8, 5, 3
EVERY = list(FORMATS.values())


def named(format: Format) -> str:
    return format.encoding.value


def shape_of(format: Format, **changes) -> PageShape:
    heads = 1 if format.one_head else HEADS
    sizes = dict(head_size=format.size or 64, v_head_size=format.size or 32)
    return PageShape(
        **{"format": format, "block_size": BLOCK, "num_kv_heads": heads, **sizes, **changes}
    )


def tokens(shape: PageShape, count: int, seed: int = 0):
    """Keys and values, and the scales that the format needs."""
    source = torch.Generator().manual_seed(seed)
    k = torch.randn(count, shape.num_kv_heads, shape.head_size, generator=source).bfloat16()
    v = torch.randn(count, shape.num_kv_heads, shape.values, generator=source).bfloat16()
    heads = torch.arange(1, shape.num_kv_heads + 1)
    scales = dict(k_scale=heads / 4, v_scale=heads / 8) if shape.format.needs else {}
    return k, (None if shape.format.one_head else v), scales


def expected(shape: PageShape, k, v, scales):
    rows = encode(shape.format, k, v, **scales)
    sizes = dict(head_size=shape.head_size, v_head_size=shape.values)
    return decode(shape.format, *rows, **sizes, **scales)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or torch.equal(a, b)


def at(tensor: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor.flatten(0, 1)[slots]


@pytest.mark.parametrize("format", EVERY, ids=named)
@pytest.mark.parametrize("tokens_first", [False, True])
def test_tokens_come_back_from_their_slots(format: Format, tokens_first: bool) -> None:
    shape = shape_of(format, tokens_first=tokens_first)
    pages = Pages.allocate(shape, BLOCKS)
    pages.pool.fill_(0xFF)
    k, v, scales = tokens(shape, 20)
    slots = torch.randperm(BLOCK * BLOCKS)[:20]
    pages.write(k, v, slots, **scales)
    read = pages.read(**scales)
    for got, want in zip(read, expected(shape, k, v, scales), strict=True):
        assert same(at(got, slots), want)


@pytest.mark.parametrize("format", EVERY, ids=named)
def test_a_write_touches_its_slots_and_skips_negative_ones(format: Format) -> None:
    shape = shape_of(format)
    pages = Pages.allocate(shape, BLOCKS)
    pages.pool.copy_(torch.randint(0, 256, pages.pool.shape).to(torch.uint8))
    before = pages.pool.clone()
    k, v, scales = tokens(shape, 4)
    pages.write(k, v, torch.tensor([-1, -1, -(2**31), -5]), **scales)
    assert torch.equal(pages.pool, before)
    pages.write(k, v, torch.tensor([3 * BLOCK + 2, -1, 7, -1]), **scales)
    changed = (pages.pool != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [0, 3]
    rows, old = pages.rows(), Pages(shape=shape, pool=before).rows()
    for new, was in zip(rows, old, strict=True):
        if new is None:
            continue
        moved = (new != was).any(dim=-1).any(dim=1)
        assert moved.nonzero().tolist() == [[0, 7], [3, 2]]


@pytest.mark.parametrize("format", EVERY, ids=named)
def test_a_block_that_is_moved_keeps_its_scales(format: Format) -> None:
    shape = shape_of(format)
    pages = Pages.allocate(shape, BLOCKS)
    k, v, scales = tokens(shape, BLOCK * BLOCKS, seed=1)
    pages.write(k, v, torch.arange(BLOCK * BLOCKS), **scales)
    before = pages.read(**scales)
    order = torch.tensor([3, 0, 4, 2, 1])
    moved = Pages(shape=shape, pool=pages.pool[order].clone()).read(**scales)
    for got, was in zip(moved, before, strict=True):
        assert same(got, None if was is None else was[order])


@pytest.mark.parametrize("format", EVERY, ids=named)
def test_pages_may_be_any_distance_apart(format: Format) -> None:
    shape = shape_of(format)
    tight = Pages.allocate(shape, BLOCKS)
    apart = torch.full((BLOCKS, 2 * shape.page_bytes + 7), 0xEE, dtype=torch.uint8)
    odd = Pages(shape=shape, pool=apart[:, 5 : 5 + shape.page_bytes])
    k, v, scales = tokens(shape, BLOCK * BLOCKS, seed=2)
    slots = torch.arange(BLOCK * BLOCKS)
    tight.pool.fill_(0xEE)
    for pages in (tight, odd):
        pages.write(k, v, slots, **scales)
    assert torch.equal(odd.pool, tight.pool)
    assert (apart[:, :5] == 0xEE).all() and (apart[:, 5 + shape.page_bytes :] == 0xEE).all()


@pytest.mark.parametrize("format", EVERY, ids=named)
def test_reordered_pages_hold_the_same_rows(format: Format) -> None:
    shape = shape_of(format)
    pages = Pages.allocate(shape, BLOCKS)
    pages.pool.copy_(torch.randint(0, 256, pages.pool.shape).to(torch.uint8))
    other = pages.reordered(tokens_first=True)
    assert all(same(a, b) for a, b in zip(other.rows(), pages.rows(), strict=True))
    assert other.k.stride(2) >= other.k.stride(1)


# Where areas begin, by hand: encoding, sizes, areas of a page.
def test_a_nvfp4_page_is_key_data_key_scales_value_data_value_scales() -> None:
    shape = shape_of(format_of("nvfp4"))
    pages = Pages.allocate(shape, 2)
    base = pages.pool.data_ptr()
    data, scale = HEADS * BLOCK * 64 // 2, HEADS * BLOCK * 64 // 16
    value, value_scale = HEADS * BLOCK * 32 // 2, HEADS * BLOCK * 32 // 16
    starts = [t.data_ptr() - base for t in (pages.k, pages.k_scales, pages.v, pages.v_scales)]
    assert starts == [0, data, data + scale, data + scale + value]
    assert shape.page_bytes == data + scale + value + value_scale


def test_a_584_page_is_rows_then_scale_rows_then_padding() -> None:
    shape = shape_of(format_of("mla_fp8_584"), block_size=64)
    pages = Pages.allocate(shape, 1)
    pages.pool.fill_(0xAA)
    x = torch.full((64, 1, 512), 448.0)
    x[5, 0, 64:128] = 896.0
    pages.write(x, None, torch.arange(64))
    page = pages.pool[0]
    assert shape.page_bytes == 65 * 576 and len(page) == 65 * 576
    assert page[5 * 576].item() == 0x7E
    assert page[64 * 576 + 5 * 8 : 64 * 576 + 6 * 8].tolist() == [127, 128, *[127] * 5, 0]
    assert (page[64 * 584 :] == 0xAA).all()


def test_an_index_page_is_planar() -> None:
    shape = shape_of(format_of("index_fp8_132"), block_size=64)
    pages = Pages.allocate(shape, 1)
    x = torch.zeros(64, 1, 128)
    x[9, 0, 3] = 448.0
    pages.write(x, None, torch.arange(64))
    page = pages.pool[0]
    assert page[9 * 128 + 3].item() == 0x7E
    scales = page[64 * 128 :].view(torch.float32)
    assert scales[9] == 1.0 and scales[8] == 2.0**-22


def test_inline_scales_are_float32_views_of_the_rows() -> None:
    """As engines see them: a view with the scale of a token and head behind its codes."""
    shape = shape_of(format_of("int8_th"))
    pages = Pages.allocate(shape, BLOCKS)
    k, v, _ = tokens(shape, BLOCK * BLOCKS)
    pages.write(k, v, torch.arange(BLOCK * BLOCKS))
    scales = pages.k[..., 64:].view(torch.float32)
    want = k.float().abs().amax(-1) / 127
    assert torch.equal(scales.squeeze(-1).transpose(1, 2).flatten(0, 1), want)


def test_a_scale_area_is_swizzled_as_sm100_reads_it() -> None:
    tokens, count = 8, 16
    scales = torch.arange(tokens * count).reshape(tokens, count)
    moved = swizzle_scales(scales)
    for t in range(tokens):
        for s in range(count):
            quarter = count // 4
            assert moved[t // 4 * 4 + s // quarter, s % quarter * 4 + t % 4] == scales[t, s]
    assert torch.equal(unswizzle_scales(moved), scales)
    batch = torch.stack((scales, scales + 1))
    assert torch.equal(swizzle_scales(batch)[1], moved + 1)
    with pytest.raises(ConfigError, match="6 tokens and 16 scales cannot be swizzled"):
        swizzle_scales(torch.zeros(6, 16))


NVFP4 = format_of("nvfp4")
LATENT = format_of("mla_fp8_656")
REFUSED = {
    "a block without tokens": (
        lambda: shape_of(NVFP4, block_size=0),
        ConfigError,
        "block_size is 0",
    ),
    "a value size that tiles do not fill": (
        lambda: shape_of(NVFP4, v_head_size=24),
        ConfigError,
        r"multiple of 16 elements; this one has 24 \(closest: 16\)",
    ),
    "two heads of latent rows": (
        lambda: shape_of(LATENT, num_kv_heads=2),
        ConfigError,
        "mla_fp8_656 takes exactly 1 KV head; num_kv_heads is 2",
    ),
    "no head": (
        lambda: shape_of(NVFP4, num_kv_heads=0),
        ConfigError,
        "nvfp4 takes at least 1 KV head; num_kv_heads is 0",
    ),
    "a pool too narrow": (
        lambda: Pages(shape=shape_of(LATENT), pool=torch.zeros(2, 8 * 656 - 1).byte()),
        PlanMismatchError,
        "expected .any, at least 5248",
    ),
    "a pool of floats": (
        lambda: Pages(shape=shape_of(LATENT), pool=torch.zeros(2, 8 * 656)),
        PlanMismatchError,
        "pool has dtype torch.float32",
    ),
    "keys without a slot each": (
        lambda: Pages.allocate(shape_of(LATENT), 1).write(
            torch.zeros(2, 1, 576), None, torch.tensor([0])
        ),
        PlanMismatchError,
        r"k has shape \[2, 1, 576\]; expected \[1, 1, 576\]",
    ),
}


@pytest.mark.parametrize("claim", REFUSED)
def test_refused(claim: str) -> None:
    call, error, message = REFUSED[claim]
    with pytest.raises(error, match=message):
        call()
