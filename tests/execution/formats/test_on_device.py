"""An accelerator stores and reads what the CPU does, byte for byte."""

from __future__ import annotations

import pytest
import torch

from attnplat.backends.formats.element_codec import decode_elements, encode_elements
from attnplat.backends.formats.elements import E2M1, E4M3FN, E4M3FNUZ, E5M2, INT8, UINT4
from attnplat.backends.formats.facts import FORMATS, Format, format_of
from attnplat.backends.formats.index_pages import IndexPageOrder, read_rows, write_rows
from attnplat.backends.formats.pages import Pages, PageShape
from attnplat.backends.formats.rows import amax_scale, decode_rows, encode_rows

pytestmark = pytest.mark.gpu

EVERY = list(FORMATS.values())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu(), b.cpu()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def heads_of(format: Format) -> int:
    return 1 if format.one_head else 3


def rows_of(format: Format, count: int = 400) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(count, heads_of(format), format.size or 96, generator=source)
    x *= torch.exp2(torch.randint(-12, 13, x.shape, generator=source))
    x[torch.rand(x.shape, generator=source) < 0.05] = 0.0
    x[5] = 0.0
    return x


def scale_of(format: Format) -> torch.Tensor | None:
    return torch.tensor([0.3, 1.0, 7.0]) if format.needs else None


@pytest.mark.parametrize(
    "element", [E4M3FN, E4M3FNUZ, E5M2, E2M1, INT8, UINT4], ids=lambda e: e.name
)
def test_elements(element) -> None:
    x = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    x = x[~x.isnan()]
    assert torch.equal(encode_elements(element, x.cuda()).cpu(), encode_elements(element, x))
    codes = torch.arange(1 << element.bits).to(torch.uint8)
    assert same(decode_elements(element, codes.cuda()), decode_elements(element, codes))


@pytest.mark.parametrize("format", EVERY, ids=lambda f: f.encoding.value)
def test_rows(format: Format) -> None:
    x, scale = rows_of(format), scale_of(format)
    rows = encode_rows(format, x, scale=scale)
    there = None if scale is None else scale.cuda()
    on_device = encode_rows(format, x.cuda(), scale=there)
    assert torch.equal(on_device.cpu(), rows)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        read = decode_rows(format, on_device, size=x.shape[-1], scale=there, dtype=dtype)
        assert same(read, decode_rows(format, rows, size=x.shape[-1], scale=scale, dtype=dtype))


@pytest.mark.parametrize("format", EVERY, ids=lambda f: f.encoding.value)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite(format: Format, bad: float) -> None:
    x, scale = rows_of(format, 8), scale_of(format)
    x[3, 0, 1] = bad
    there = None if scale is None else scale.cuda()
    on_device = encode_rows(format, x.cuda(), scale=there)
    read = decode_rows(format, on_device, size=x.shape[-1], scale=there)
    rows = encode_rows(format, x, scale=scale)
    assert same(read, decode_rows(format, rows, size=x.shape[-1], scale=scale))


@pytest.mark.parametrize("format", EVERY, ids=lambda f: f.encoding.value)
def test_pages(format: Format) -> None:
    shape = PageShape(
        format=format,
        block_size=16,
        num_kv_heads=heads_of(format),
        head_size=format.size or 96,
        tokens_first=True,
    )
    x, scale, pools = rows_of(format, 40), scale_of(format), []
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(2))[:40]
    slots[7] = -1
    for device in ("cpu", "cuda"):
        pages = Pages.allocate(shape, 4, device)
        pages.pool.fill_(0xAB)
        moved = None if scale is None else scale.to(device)
        k = x.to(device)
        v = None if format.one_head else k.flip(0)
        pages.write(k, v, slots.to(device), k_scale=moved, v_scale=moved)
        pools.append(pages.pool.cpu())
    assert torch.equal(*pools)


@pytest.mark.parametrize("per_head", [False, True])
def test_computed_scales(per_head: bool) -> None:
    for name in ("fp8_e4m3fn", "fp8_e4m3fnuz", "nvfp4"):
        format = format_of(name)
        x = rows_of(format)
        scale = amax_scale(format, x, per_head=per_head)
        assert torch.equal(amax_scale(format, x.cuda(), per_head=per_head).cpu(), scale)


def test_index_pages() -> None:
    format = format_of("index_mxfp4_68")
    rows = encode_rows(format, torch.randn(64, 128)).cuda()
    pool = torch.zeros(1, 64 * 68, dtype=torch.uint8, device="cuda")
    order = IndexPageOrder.aiter(64)
    write_rows(pool, rows, torch.arange(64, device="cuda"), format, order, 64)
    assert torch.equal(read_rows(pool, format, order, 64)[0], rows)
