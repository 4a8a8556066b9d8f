"""Batches and page tables: constructors are pure, values are checked when asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable, pack_tree_mask
from attnplat.errors import ConfigError, PlanMismatchError, UnsupportedCallError

INT = torch.int32


def ints(*values: int, dtype: torch.dtype = INT) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_from_lengths_has_every_field() -> None:
    batch = Batch.from_lengths([1, 0, 3], [5, 0, 3])
    assert batch.query_start_loc.tolist() == [0, 1, 1, 4]
    assert batch.seq_lens.tolist() == [5, 0, 3]
    assert (batch.num_reqs, batch.num_tokens) == (3, 4)
    assert (batch.max_query_len, batch.max_seq_len) == (3, 5)
    assert batch.host_lengths().query_start == (0, 1, 1, 4)


def test_a_batch_has_no_context_unless_told() -> None:
    assert Batch.from_lengths([2, 3]).seq_lens.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("queries", "keys"), [([1, 2], [3]), ([-1], [3]), ([1], [-3])], ids=["count", "query", "keys"]
)
def test_lengths_that_cannot_be_are_refused(queries: list[int], keys: list[int]) -> None:
    with pytest.raises(ConfigError, match="as many, and not negative"):
        Batch.from_lengths(queries, keys)


def test_an_unknown_field_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no field \['sequence_lens'\].*seq_lens"):
        Batch.from_lengths([1], sequence_lens=[2])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seq_lens": ints(1, 2)}, r"batch.seq_lens has shape \[2\]; expected \[1\]"),
        ({"seq_lens": ints(1, dtype=torch.int64)}, "batch.seq_lens has dtype torch.int64"),
        ({"causal": ints(1)}, "batch.causal has dtype torch.int32; expected torch.bool"),
        ({"ranges": ints(0, 1, 2)}, r"batch.ranges has shape \[3\]; expected \[any, 3\]"),
        ({"tree_mask": torch.zeros(2, 0, dtype=torch.uint8)}, "expected \\[2, at least 1\\]"),
        ({"prefix_lens": ints(1).to("meta")}, "batch.prefix_lens is on meta; expected cpu"),
        ({"seq_lens_host": [1]}, "batch.seq_lens_host is a list; expected a tensor"),
        ({"host_lens": "about"}, "'exact' or 'upper'"),
    ],
)
def test_wrong_headers_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises((PlanMismatchError, ConfigError), match=says):
        replace(Batch.from_lengths([2], [4]), **changes)


def test_padding_adds_empty_requests_and_rows() -> None:
    batch = Batch.from_lengths([1, 2], [5, 7], causal=[True, False], prefix_lens=[1, 2])
    padded = batch.padded(4, 8)
    assert padded.query_start_loc.tolist() == [0, 1, 3, 3, 3]
    assert padded.seq_lens.tolist() == [5, 7, 0, 0]
    assert padded.causal.tolist() == [True, False, False, False]
    assert padded.num_tokens == 8 and batch.num_reqs == 2
    padded.validate()
    with pytest.raises(ConfigError, match="cannot be padded to 3 and 9"):
        padded.padded(3, 9)


def test_a_slice_is_a_batch_of_its_own() -> None:
    batch = Batch.from_lengths(
        [1, 2, 3],
        [5, 7, 9],
        ranges=[(0, 1, 2), (2, 3, 4)],
        tree_mask=torch.arange(6, dtype=torch.uint8)[:, None],
        num_decode_reqs=2,
    )
    part = batch.slice(1, 3)
    assert part.query_start_loc.tolist() == [0, 2, 5]
    assert part.seq_lens.tolist() == [7, 9]
    assert part.ranges.tolist() == [[1, 3, 4]]
    assert part.tree_mask.flatten().tolist() == [1, 2, 3, 4, 5]
    assert (part.num_decode_reqs, part.max_query_len, part.max_seq_len) == (1, 3, 9)
    part.validate()


def test_expanded_rows_see_up_to_themselves() -> None:
    batch = Batch.from_lengths([2, 0, 3], [5, 0, 3], prefix_lens=[1, 2, 3]).padded(4, 7)
    rows, old = batch.expand_rows()
    assert rows.seq_lens.tolist() == [4, 5, 1, 2, 3, 0, 0]
    assert rows.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 5, 5]
    assert old.tolist() == [0, 0, 2, 2, 2, 0, 0]
    assert rows.prefix_lens.tolist() == [1, 1, 3, 3, 3, 1, 1]
    rows.validate()
    table = PageTable(block_table=ints(7, 8, 9, 1)[:, None], block_size=16)
    assert table.take_requests(old).block_table.flatten().tolist() == [7, 7, 9, 9, 9, 7, 7]


def test_rows_of_an_empty_batch_expand_to_empty_requests() -> None:
    rows, _ = Batch.from_lengths([]).padded(0, 2).expand_rows()
    assert rows.seq_lens.tolist() == [0, 0]


def test_masks_of_several_rows_do_not_expand() -> None:
    with pytest.raises(UnsupportedCallError, match=r"batch\.causal"):
        Batch.from_lengths([2], causal=[False]).expand_rows()


def test_csr_is_the_live_part_of_the_table() -> None:
    batch = Batch.from_lengths([1, 1, 0, 1], [33, 32, 0, 1])
    table = torch.arange(12, dtype=INT).view(4, 3)
    csr = batch.csr(PageTable(block_table=table, block_size=16))
    assert csr.indptr.tolist() == [0, 3, 5, 5, 6]
    assert csr.indices.tolist() == [0, 1, 2, 3, 4, 9]
    assert csr.last_page_len.tolist() == [1, 16, 0, 1]
    rolled = PageTable(block_table=table, block_size=16, first_block=ints(2, 1, 0, 0))
    csr = batch.csr(rolled)
    assert csr.indptr.tolist() == [0, 1, 2, 2, 3]
    assert csr.indices.tolist() == [0, 3, 9]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query_start_loc": ints(1, 2, 3)}, "starts at 1; expected 0"),
        ({"query_start_loc": ints(0, 2, 1)}, "decreases at request 1"),
        ({"query_start_loc": ints(0, 1, 9)}, "ends at 9; num_tokens is 3"),
        ({"seq_lens": ints(0, 5)}, "request 0 has seq_len 0, fewer than its 1 query rows"),
        ({"seq_lens": ints(5, 99)}, r"seq_len 99; it takes 0 to max_seq_len \(7\)"),
        ({"max_query_len": 1}, "request 1 has 2 query rows; max_query_len is 1"),
        ({"seq_lens_host": ints(5, 6)}, "batch.seq_lens_host differs from batch.seq_lens"),
        ({"ranges": ints(5, 1, 2).view(1, 3)}, r"batch.ranges has \(5, 1, 2\)"),
    ],
)
def test_validate_names_the_value(changes: dict[str, Any], says: str) -> None:
    batch = replace(
        Batch.from_lengths([1, 2], [5, 7]), query_start_loc_host=None, seq_lens_host=None
    )
    batch.validate()
    with pytest.raises(ConfigError, match=says):
        replace(batch, **changes).validate()


def test_cross_attention_may_have_fewer_keys_than_queries() -> None:
    Batch.from_lengths([4], [2]).validate(self_attention=False)


def test_lengths_that_go_back_are_refused_even_unasked() -> None:
    batch = replace(Batch.from_lengths([1, 2]), query_start_loc=ints(0, 4, 3))
    with pytest.raises(ConfigError, match="decreases at request 1, from 4 to 3"):
        batch.host_lengths()


# Page tables ---------------------------------------------------------------------------------


def test_from_blocks_finds_the_slots_of_new_tokens() -> None:
    batch = Batch.from_lengths([1, 3], [17, 6]).padded(2, 6)
    pages = PageTable.from_blocks([[4, 2], [7]], batch, 16)
    assert pages.block_table.tolist() == [[4, 2], [7, -1]]
    assert pages.slot_mapping.tolist() == [2 * 16, 7 * 16 + 3, 7 * 16 + 4, 7 * 16 + 5, -1, -1]


@pytest.mark.parametrize(("write", "count"), [("all", 23), ("none", None)])
def test_from_blocks_can_write_everything_or_nothing(write: Any, count: int | None) -> None:
    batch = Batch.from_lengths([1, 3], [17, 6])
    slots = PageTable.from_blocks([[4, 2], [7]], batch, 16, write=write).slot_mapping
    assert (None if slots is None else len(slots)) == count


def test_a_rolling_table_has_slots_in_its_own_blocks() -> None:
    batch = Batch.from_lengths([1], [40])
    pages = PageTable.from_blocks([[9]], batch, 16, first_block=[2])
    assert pages.slot_mapping.tolist() == [9 * 16 + 7]
    pages.validate(batch, first_keys=[32])
    with pytest.raises(ConfigError, match=r"sees block 0; pages.first_block\[0\] is 2"):
        pages.validate(batch)


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="request 0 has 17 tokens and blocks for 16; give it 2"):
        PageTable.from_blocks([[4]], Batch.from_lengths([1], [17]), 16)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_table": ints(3, -1).view(1, 2)}, r"block_table\[0, 1\] is -1; it takes 0 to 8"),
        ({"block_table": ints(9, 1).view(1, 2)}, r"block_table\[0, 0\] is 9; it takes 0 to 8"),
        ({"block_table": ints(3).view(1, 1)}, "needs 2 columns of pages.block_table, which has 1"),
        ({"slot_mapping": ints(5, 5, dtype=torch.int64)}, "names a slot twice"),
    ],
)
def test_page_tables_validate_live_entries(changes: dict[str, Any], says: str) -> None:
    batch = Batch.from_lengths([2], [20])
    pages = PageTable.from_blocks([[3, 8]], batch, 16)
    pages.validate(batch, num_blocks=9)
    with pytest.raises(ConfigError, match=says):
        replace(pages, **changes).validate(batch, num_blocks=9)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"block_table": torch.zeros(1, 2, dtype=torch.int64)},
            "block_table has dtype torch.int64",
        ),
        ({"slot_mapping": ints(1)}, "slot_mapping has dtype torch.int32; expected torch.int64"),
        ({"first_block": ints(1, 2)}, r"first_block has shape \[2\]; expected \[1\]"),
        ({"block_size": 0}, "block_size is 0; it takes at least 1"),
    ],
)
def test_page_tables_name_wrong_headers(changes: dict[str, Any], says: str) -> None:
    pages = PageTable(block_table=torch.zeros(1, 2, dtype=INT), block_size=16)
    with pytest.raises((PlanMismatchError, ConfigError), match=says):
        replace(pages, **changes)


def test_tree_masks_are_packed_lowest_bit_first() -> None:
    visible = torch.zeros(2, 10, dtype=torch.bool)
    visible[0, [0, 3, 9]] = True
    visible[1, 8] = True
    assert pack_tree_mask(visible).tolist() == [[0b1001, 0b10], [0, 0b1]]
