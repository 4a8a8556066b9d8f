"""Every byte of an index page is where its engine reads it."""

from __future__ import annotations

import itertools

import pytest
import torch

from attnplat.backends.formats.facts import format_of
from attnplat.backends.formats.index_pages import (
    IndexPageOrder,
    offsets,
    read_rows,
    reorder,
    write_rows,
)
from attnplat.backends.formats.rows import encode_rows
from attnplat.errors import ConfigError, PlanMismatchError

FP8, MXFP4 = format_of("index_fp8_132"), format_of("index_mxfp4_68")
ORDERS = {
    "planar fp8": (FP8, IndexPageOrder.planar()),
    "tile16 fp8": (FP8, IndexPageOrder.tile16()),
    "planar mxfp4": (MXFP4, IndexPageOrder.planar()),
    "aiter, few heads": (MXFP4, IndexPageOrder.aiter(16)),
    "aiter, many heads": (MXFP4, IndexPageOrder.aiter(64)),
    "aiter mode 0, few heads": (MXFP4, IndexPageOrder.aiter(16, wide=False)),
    "aiter mode 0, many heads": (MXFP4, IndexPageOrder.aiter(32, wide=False)),
    "flydsl": (MXFP4, IndexPageOrder.flydsl()),
}


@pytest.mark.parametrize("name", ORDERS)
def test_every_byte_of_a_page_has_one_place(name: str) -> None:
    format, order = ORDERS[name]
    where = offsets(format, order, 64)
    assert torch.equal(where.flatten().sort().values, torch.arange(64 * format.row_bytes(128)))
    values = format.data_bytes(128)
    assert (where[:, :values] < 64 * values).all()


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("wide", [False, True])
def test_aiters_order_is_a_permutation_of_axes(block_size: int, heads: int, wide: bool) -> None:
    """The order as reshapes, the other way its readers write it."""
    rows = torch.randint(0, 256, (1, block_size, 68)).to(torch.uint8)
    order = IndexPageOrder.aiter(heads, wide=wide)
    pool = torch.zeros(1, block_size * 68, dtype=torch.uint8)
    write_rows(pool, rows[0], torch.arange(block_size), MXFP4, order, block_size)
    n = 32 if heads >= 32 else 16
    lanes = 64 // n if wide else 4
    values = rows[0, :, :64].reshape(block_size // n, n, 4, 16).permute(0, 2, 1, 3)
    scales = rows[0, :, 64:].reshape(block_size // n, n, 4 // lanes, lanes).permute(0, 3, 1, 2)
    assert torch.equal(pool[0, : block_size * 64], values.flatten())
    assert torch.equal(pool[0, block_size * 64 :], scales.flatten())


def test_aiters_worked_example() -> None:
    where = offsets(MXFP4, IndexPageOrder.aiter(32), 64)
    assert where[37, 20] == 2644
    assert where[37, 64 + 3] == 4299
    assert where[::8, 0].tolist() == [0, 128, 256, 384, 2048, 2176, 2304, 2432]


def test_tiles_of_16_tokens_by_16_bytes() -> None:
    where = offsets(FP8, IndexPageOrder.tile16(), 32)
    for t, b in itertools.product(range(32), range(128)):
        expected = t // 16 * 2048 + b // 16 * 256 + t % 16 * 16 + b % 16
        assert where[t, b] == expected
    assert where[5, 128:].tolist() == [32 * 128 + 20 + i for i in range(4)]


def test_flydsls_order() -> None:
    where = offsets(MXFP4, IndexPageOrder.flydsl(), 64)
    for t, b in itertools.product(range(64), range(64)):
        assert where[t, b] == b // 16 * 1024 + (t % 16 * 4 + t // 16) * 16 + b % 16
    for t, s in itertools.product(range(64), range(4)):
        assert where[t, 64 + s] == 4096 + s * 64 + t % 16 * 4 + t // 16


@pytest.mark.parametrize("name", ORDERS)
def test_rows_come_back_and_reordering_moves_bytes_alone(name: str) -> None:
    format, order = ORDERS[name]
    rows = encode_rows(format, torch.randn(3 * 64, 128))
    pool = torch.full((3, 64 * format.row_bytes(128) + 16), 0xEE, dtype=torch.uint8)
    slots = torch.randperm(3 * 64)
    write_rows(pool, rows, slots, format, order, 64)
    back = read_rows(pool, format, order, 64)
    assert torch.equal(back.flatten(0, 1)[slots], rows)
    assert (pool[:, -16:] == 0xEE).all()
    planar = reorder(pool, format, order, IndexPageOrder.planar(), 64)
    assert torch.equal(read_rows(planar, format, IndexPageOrder.planar(), 64), back)
    again = reorder(planar, format, IndexPageOrder.planar(), order, 64)
    assert torch.equal(again, pool[:, :-16])


def test_negative_slots_are_skipped() -> None:
    pool = torch.zeros(1, 64 * 68, dtype=torch.uint8)
    rows = torch.full((3, 68), 0xAB, dtype=torch.uint8)
    order = IndexPageOrder.aiter(64)
    write_rows(pool, rows, torch.tensor([-1, 9, -7]), MXFP4, order, 64)
    assert (read_rows(pool, MXFP4, order, 64)[0] != 0).any(dim=1).nonzero().tolist() == [[9]]


POOL = torch.zeros(1, 64 * 132, dtype=torch.uint8)
REFUSED = {
    "tiles of 4-bit rows": (
        lambda: offsets(MXFP4, IndexPageOrder.tile16(), 64),
        ConfigError,
        "'tile16' is for 8-bit values; index_mxfp4_68 has 4-bit ones",
    ),
    "aiter's order of fp8 rows": (
        lambda: offsets(FP8, IndexPageOrder.aiter(64), 64),
        ConfigError,
        "'aiter' is for 4-bit values",
    ),
    "a block smaller than a run": (
        lambda: offsets(MXFP4, IndexPageOrder.aiter(64), 16),
        ConfigError,
        "takes a multiple of 32 for block_size; it is 16",
    ),
    "a large block that 64 does not divide": (
        lambda: offsets(MXFP4, IndexPageOrder.aiter(16), 80),
        ConfigError,
        "takes a multiple of 64 for block_size; it is 80",
    ),
    "flydsl's order of another block size": (
        lambda: offsets(MXFP4, IndexPageOrder.flydsl(), 128),
        ConfigError,
        "takes exactly 64 for block_size; it is 128",
    ),
    "no index format": (
        lambda: offsets(format_of("mxfp4"), IndexPageOrder.planar(), 64),
        ConfigError,
        "mxfp4 is no index format",
    ),
    "a pool too narrow": (
        lambda: read_rows(POOL[:, 1:], FP8, IndexPageOrder.planar(), 64),
        PlanMismatchError,
        "at least 8448",
    ),
    "rows of another format": (
        lambda: write_rows(
            POOL,
            torch.zeros(2, 68, dtype=torch.uint8),
            torch.tensor([0, 1]),
            FP8,
            IndexPageOrder.planar(),
            64,
        ),
        PlanMismatchError,
        r"rows has shape \[2, 68\]; expected \[2, 132\]",
    ),
}


@pytest.mark.parametrize("claim", REFUSED)
def test_refused(claim: str) -> None:
    call, error, message = REFUSED[claim]
    with pytest.raises(error, match=message):
        call()
