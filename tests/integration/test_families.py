"""Models of many families give what transformers' own eager attention gives, and no feature
of theirs could be dropped without being seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from attnplat.integrations.transformers import PagedModel, register
from attnplat.integrations.transformers.masks import attention_mask
from tests.integration.families import FAMILIES, alone, difference, together, yardstick

PLANTED = "attnplat_planted"

Call = dict[str, Any]


def without_window(call: Call) -> None:
    """Only causality and padding are left of the mask."""
    mask = call["attention_mask"].as_subclass(torch.Tensor)
    if mask.shape[2] == mask.shape[3] and not mask.triu(1).any():
        mask = torch.ones_like(mask).tril() & mask.any(2, keepdim=True)
    else:
        mask = torch.ones_like(mask)
    call["attention_mask"], call["sliding_window"] = mask, None


def without_mask(call: Call) -> None:
    call["attention_mask"], call["is_causal"] = None, False


def without_scale(call: Call) -> None:
    head_size = call["query"].shape[-1]
    call["scaling"] = head_size**-0.5 if call["scaling"] == 1.0 else 1.0


def without(keyword: str) -> Callable[[Call], None]:
    def drop(call: Call) -> None:
        call[keyword] = None

    return drop


DROPS: dict[str, Callable[[Call], None]] = {
    "mask": without_mask,
    "scale": without_scale,
    "window": without_window,
    "sinks": without("s_aux"),
    "soft_cap": without("softcap"),
    "position_bias": without("position_bias"),
    "topk": without("indices"),
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


@pytest.fixture
def planted() -> Iterator[Callable[[str], None]]:
    """Registers an implementation that loses one feature on the way to attnplat's."""
    real = register()

    def plant(feature: str) -> None:
        def faulty(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **keywords: Any
        ) -> Any:
            call = dict(
                query=query, key=key, value=value, attention_mask=attention_mask, **keywords
            )
            DROPS[feature](call)
            return real(module, **call)

        AttentionInterface.register(PLANTED, faulty)
        AttentionMaskInterface.register(PLANTED, attention_mask)

    yield plant
    AttentionInterface._global_mapping.pop(PLANTED, None)
    AttentionMaskInterface._global_mapping.pop(PLANTED, None)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_padded_batch_gives_what_each_sequence_gives_alone(name: str) -> None:
    known = yardstick(name)
    for side in FAMILIES[name].sides:
        found = together(known.model, known.given, "attnplat", side)
        assert difference(found, known.expected) <= known.bound, side


@pytest.mark.parametrize("name", FAMILIES)
def test_sequences_without_padding_give_the_same(name: str) -> None:
    known = yardstick(name)
    found = alone(known.model, known.given, "attnplat")
    assert difference(found, known.expected) <= known.bound


@pytest.mark.parametrize(
    ("name", "feature"),
    [(n, f) for n, family in FAMILIES.items() for f in ("mask", "scale", *family.features)],
)
def test_a_dropped_feature_shows(name: str, feature: str, planted: Callable[[str], None]) -> None:
    known = yardstick(name)
    planted(feature)
    found = together(known.model, known.given, PLANTED, FAMILIES[name].sides[-1])
    assert difference(found, known.expected) > 10 * known.bound


@pytest.mark.parametrize("name", [n for n, family in FAMILIES.items() if family.paged])
def test_paged_steps_give_the_logits_of_whole_sequences(name: str) -> None:
    """Prompts of different lengths together, then token by token, through scattered blocks."""
    known = yardstick(name)
    known.model.set_attn_implementation("attnplat")
    paged = PagedModel(known.model, block_size=4)
    paged.allocate(16)
    ids = [sequence.tolist() for sequence in known.given.ids]
    blocks = [[3, 1], [0, 15, 4, 14], [5, 6, 8]]
    done, new = [0] * len(ids), [5, 1, 9]
    starts = [0, len(ids[0]), len(ids[0]) + len(ids[1])]
    rows, found = [], []
    while running := [r for r in range(len(ids)) if done[r] < len(ids[r])]:
        logits = paged.step(
            [ids[r][done[r] : done[r] + new[r]] for r in running],
            [done[r] for r in running],
            [blocks[r] for r in running],
        )
        for r, row in zip(running, logits.double(), strict=True):
            done[r] += new[r]
            rows.append(starts[r] + done[r] - 1)
            found.append(row)
        new = [1] * len(ids)
    assert difference(torch.stack(found), known.expected[rows]) <= known.bound


def test_sequences_packed_by_position_give_what_each_gives_alone() -> None:
    known = yardstick("llama")
    known.model.set_attn_implementation("attnplat")
    ids = torch.cat(known.given.ids)[None]
    positions = torch.cat([torch.arange(len(sequence)) for sequence in known.given.ids])[None]
    with torch.inference_mode():
        found = known.model(ids, position_ids=positions, use_cache=False).logits[0].double()
    assert difference(found, known.expected) <= known.bound


# Caches of transformers' own, each with its own idea of where keys lie.
OWN_GENERATE: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {},
    "gpt_oss": {"cache_implementation": "static"},
    "deepseek_v3": {"cache_implementation": "static"},
    "t5": {},
    "bart": {},
}


@pytest.mark.parametrize("name", OWN_GENERATE)
def test_transformers_own_generate_gives_the_same_tokens(name: str) -> None:
    model, given = yardstick(name).model, yardstick(name).given
    side = FAMILIES[name].sides[0]
    ids = torch.zeros(len(given.ids), max(map(len, given.ids)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(given.ids):
        place = slice(len(sequence)) if side == "right" else slice(-len(sequence), None)
        ids[row, place], mask[row, place] = sequence, 1
    options = dict(
        attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found = []
    for implementation in ("eager", "attnplat"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(ids, **options, **OWN_GENERATE[name]))
    assert torch.equal(*found)
