"""A padding mask becomes lengths; no other mask loses anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from attnplat.backends.form import MaskRules
from attnplat.errors import UnsupportedCallError
from attnplat.integrations.transformers import register
from attnplat.integrations.transformers.masks import StructuredMask, attention_mask

LENGTH = 10
NO_PADDING = torch.zeros(1, dtype=torch.int64)


def make(function: Any = causal_mask_function, **keywords: Any) -> StructuredMask:
    call = dict(batch_size=1, q_length=LENGTH, kv_length=LENGTH, mask_function=function)
    mask = attention_mask(**{**call, **keywords})
    assert isinstance(mask, StructuredMask)
    return mask


def padding(*rows: str) -> torch.Tensor:
    """`.` is padding, `x` a token."""
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


RULES: dict[str, tuple[Any, int | None, MaskRules]] = {
    "causal": (causal_mask_function, None, MaskRules(causal=True)),
    "bidirectional": (bidirectional_mask_function, None, MaskRules(causal=False)),
    "causal window": (
        sliding_window_causal_mask_function(4),
        4,
        MaskRules(causal=True, sliding_window=(3, -1)),
    ),
    "window of one": (
        sliding_window_causal_mask_function(1),
        1,
        MaskRules(causal=True, sliding_window=(0, -1)),
    ),
    "large window": (
        sliding_window_causal_mask_function(4096),
        4096,
        MaskRules(causal=True, sliding_window=(4095, -1)),
    ),
    "two-sided window": (
        sliding_window_bidirectional_mask_function(4),
        4,
        MaskRules(causal=False, sliding_window=(4, 4)),
    ),
    "chunks": (
        chunked_causal_mask_function(4, NO_PADDING),
        4,
        MaskRules(causal=True, chunk_size=4),
    ),
    "causal, made of parts": (
        and_masks(causal_mask_function, bidirectional_mask_function),
        None,
        MaskRules(causal=True),
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_a_rule_is_recognised(case: str) -> None:
    function, size, rules = RULES[case]
    assert make(function, local_size=size).rules == rules
    assert make(function, local_size=size, kv_length=0).rules == rules, "in a paged step"


def dilated(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key) % 2 == 0)


TABLE = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2, 2]])


def with_table(table: torch.Tensor) -> Any:
    def function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return table[batch, query] == table[batch, key]

    return function


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (dilated, None),
        (and_masks(causal_mask_function, with_table(TABLE)), None),
        (sliding_window_causal_mask_function(4), 6),  # told another size than it has
    ],
)
def test_another_rule_is_kept_entry_by_entry(function: Any, size: int | None) -> None:
    mask = make(function, local_size=size)
    assert mask.rules is None and mask.ragged is None
    expected = sdpa_mask(1, LENGTH, LENGTH, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(mask.as_subclass(torch.Tensor), expected)


def test_a_mask_is_never_left_out() -> None:
    """None would have to be told apart from no mask at all."""
    for function in (causal_mask_function, bidirectional_mask_function):
        mask = make(function, allow_is_causal_skip=True, allow_is_bidirectional_skip=True)
        assert mask.shape == (1, 1, LENGTH, LENGTH)


def test_padding_on_either_side_becomes_lengths() -> None:
    given = padding("..xxxxxxxx", "xxxxxxx...", "xxxxxxxxxx")
    layout = make(batch_size=3, attention_mask=given).ragged
    assert layout is not None and layout.rules == MaskRules(causal=True)
    assert layout.rows == layout.keys == ((2, 10), (10, 17), (20, 30))


def test_padding_with_holes_is_kept_entry_by_entry() -> None:
    mask = make(attention_mask=padding("xxx..xxxxx"))
    assert mask.ragged is None
    assert not mask[0, 0, 9, 3] and mask[0, 0, 9, 2]


def test_a_decode_step_has_the_keys_after_the_padding() -> None:
    given = padding("...xxxxxxx", "xxxxxxxxxx")
    layout = make(batch_size=2, q_length=1, q_offset=9, attention_mask=given).ragged
    assert layout is not None
    assert layout.rows == ((0, 1), (1, 2)) and layout.keys == ((3, 10), (10, 20))


def test_a_static_cache_has_no_more_keys_than_were_written() -> None:
    layout = make(q_length=4, q_offset=3, kv_length=32).ragged
    assert layout is not None
    assert layout.rows == ((0, 4),) and layout.keys == ((0, 7),)


def test_a_rolling_cache_counts_from_its_first_key() -> None:
    function = sliding_window_causal_mask_function(4)
    mask = make(function, local_size=4, q_length=1, q_offset=20, kv_offset=17, kv_length=4)
    assert mask.ragged is not None
    assert mask.ragged.keys == ((0, 4),) and mask.ragged.rules.sliding_window == (3, -1)


def test_queries_stay_where_only_keys_may_be_padding() -> None:
    given = padding("xxxxxx....")
    layout = make(bidirectional_mask_function, attention_mask=given).ragged
    assert layout is not None
    assert layout.rows == ((0, 10),) and layout.keys == ((0, 6),)


def test_chunks_count_from_the_first_token_of_each_sequence() -> None:
    given = padding("..xxxxxxxx", "xxxxxxxxxx")
    function = chunked_causal_mask_function(4, torch.tensor([2, 0]))
    mask = make(function, local_size=4, batch_size=2, attention_mask=given)
    assert mask.rules == MaskRules(causal=True, chunk_size=4)
    wrong = chunked_causal_mask_function(4, torch.tensor([1, 0]))
    assert make(wrong, local_size=4, batch_size=2, attention_mask=given).rules is None


def test_a_mask_that_is_written_to_forgets_what_it_was() -> None:
    mask = make()
    mask[0, 0, 5, 9] = True
    assert mask.ragged is None and mask.rules is None
    other = make()
    other &= torch.ones(1, dtype=torch.bool)
    assert other.ragged is None
    third = make()
    torch.logical_not(third, out=third)
    assert third.ragged is None


def test_what_is_computed_from_a_mask_is_a_plain_tensor() -> None:
    mask = make()
    for derived in (~mask, mask[:, :, :5], mask & mask, mask.float(), torch.cat([mask, mask])):
        assert type(derived) is torch.Tensor
    assert mask.ragged is not None, "reading it changes nothing"


def test_a_paged_step_takes_no_padding() -> None:
    with pytest.raises(UnsupportedCallError, match="attention_mask"):
        make(kv_length=0, attention_mask=padding("xxxxxxxxxx"))


def test_transformers_makes_its_masks_here() -> None:
    register()
    config = LlamaConfig(attn_implementation="attnplat")
    embeddings = torch.zeros(2, 5, 8)
    mask = create_causal_mask(config, embeddings, None, DynamicCache(), None)
    assert isinstance(mask, StructuredMask) and mask.ragged is not None


def test_sequences_packed_by_position_do_not_see_each_other() -> None:
    register()
    config = LlamaConfig(attn_implementation="attnplat")
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    mask = create_causal_mask(config, torch.zeros(1, 5, 8), None, None, positions)
    assert isinstance(mask, StructuredMask) and mask.ragged is None
    assert not mask[0, 0, 3, 2] and mask[0, 0, 4, 3]
