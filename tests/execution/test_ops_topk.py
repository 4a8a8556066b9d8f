"""Chosen positions become the slots that the page table says, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.errors import PlanMismatchError
from attnplat.ops.topk import physical_topk


def world(block_size: int) -> tuple[Batch, PageTable]:
    batch = Batch.from_lengths([2, 0, 1], [9, 5, 3])
    blocks, free = [], iter((11, 4, 7, 2, 9, 3, 8, 1, 0, *range(20, 60)))
    for n in batch.seq_lens.tolist():
        blocks.append([next(free) for _ in range(-(-n // block_size))])
    return batch, PageTable.from_blocks(blocks, batch, block_size, write="none")


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_positions_become_slots_of_their_own_request(block_size: int) -> None:
    batch, pages = world(block_size)
    topk = torch.tensor([[8, -1, 0, 3], [-5, 7, 2, 1], [2, 0, -1, 1]], dtype=torch.int32)
    slots = physical_topk(topk, pages, batch)
    table = pages.block_table.tolist()
    for row, request in enumerate((0, 0, 2)):
        for position, slot in zip(topk[row].tolist(), slots[row].tolist(), strict=True):
            block, offset = divmod(max(position, 0), block_size)
            want = table[request][block] * block_size + offset if position >= 0 else -1
            assert slot == want


def test_positions_without_a_key_name_none() -> None:
    batch, pages = world(2)
    topk = torch.tensor([[9, 100, 2**31 - 1], [-(2**31), -2, 9], [3, 4, 5]], dtype=torch.int32)
    assert bool((physical_topk(topk, pages, batch) == -1).all())


def test_a_rolling_table_counts_from_its_first_block() -> None:
    batch, pages = world(2)
    first = torch.tensor([3, 0, 1], dtype=torch.int32)
    width = pages.block_table.shape[1]
    rolled = torch.full_like(pages.block_table, -1)
    for r, gone in enumerate(first.tolist()):
        rolled[r, : width - gone] = pages.block_table[r, gone:]
    topk = torch.tensor([[8, 6, 5], [7, 0, -1], [2, 1, 0]], dtype=torch.int32)
    slots = physical_topk(topk, replace(pages, block_table=rolled, first_block=first), batch)
    flat = physical_topk(topk, pages, batch)
    gone = topk.long() // 2 < torch.tensor([[3], [3], [1]])
    assert torch.equal(slots, torch.where(gone, -1, flat))


def test_padding_rows_name_none_and_extra_rows_are_left_out() -> None:
    batch, pages = world(2)
    padded, table = batch.padded(5, 6), pages.padded(5, 6)
    topk = torch.zeros(8, 4, dtype=torch.int32)
    slots = physical_topk(topk, table, padded)
    assert slots.shape == (6, 4)
    assert bool((slots[3:] == -1).all()) and bool((slots[:3] >= 0).all())


def test_no_requests_give_no_slots() -> None:
    batch = Batch.from_lengths([])
    pages = PageTable.from_blocks([], batch, 4, write="none")
    assert physical_topk(torch.zeros(0, 3, dtype=torch.int32), pages, batch).shape == (0, 3)


def test_wide_indices_are_refused() -> None:
    batch, pages = world(2)
    with pytest.raises(PlanMismatchError, match="topk_indices has dtype"):
        physical_topk(torch.zeros(3, 3, dtype=torch.int64), pages, batch)
