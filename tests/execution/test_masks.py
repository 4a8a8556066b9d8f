"""Key spans on the host hold every key that the mask shows on the device."""

from __future__ import annotations

import pytest

from attnplat.backends.form import form_of
from attnplat.backends.portable.groups import Reach
from attnplat.backends.portable.masks import HostMasks
from tests.execution.fuzz import random_step
from tests.execution.oracle import allowed


@pytest.mark.parametrize("seed", range(2000, 2080))
def test_spans_hold_every_visible_key(seed: int) -> None:
    step, _ = random_step(seed, longest=24)
    rules, form = step.rules(), form_of(step.config)
    masks = HostMasks.of(form.mask, step.batch)
    for r, request in enumerate(step.requests()):
        rows, keys = len(request.q), len(request.k)
        if not rows:
            continue
        context = keys - rows
        spans = masks.key_spans(form.mask, r, context, keys - 1, keys)
        inside = {j for a, b in spans for j in range(a, b)}
        seen = {j for i in range(rows) for j in range(keys) if allowed(rules, request, i, j)}
        assert seen <= inside
        assert len(spans) <= 2 and all(0 <= a < b <= keys for a, b in spans)


# Trees and chosen keys make holes that a span cannot have.
SOLID = [
    seed
    for seed in range(2000, 2100)
    if (step := random_step(seed, longest=24)[0]).batch.tree_mask is None
    and step.config.topk is None
]


@pytest.mark.parametrize("seed", SOLID)
def test_a_lone_row_s_span_holds_no_other_key(seed: int) -> None:
    step, _ = random_step(seed, longest=24)
    rules, form = step.rules(), form_of(step.config)
    masks = HostMasks.of(form.mask, step.batch)
    for r, request in enumerate(step.requests()):
        keys, context = len(request.k), len(request.k) - len(request.q)
        for i in range(len(request.q)):
            spans = masks.key_spans(form.mask, r, context + i, context + i, keys)
            inside = {j for a, b in spans for j in range(a, b)}
            assert inside == {j for j in range(keys) if allowed(rules, request, i, j)}


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize(
    "spans",
    [(), ((0, 5),), ((7, 40),), ((0, 2), (30, 40)), ((0, 2), (4, 40)), ((0, 17), (18, 19))],
)
def test_reach_covers_its_spans_page_by_page(spans: tuple[tuple[int, int], ...], page: int) -> None:
    reach = Reach.of(spans, page)
    pages = [i if i < reach.head else reach.second + i - reach.head for i in range(reach.count)]
    positions = [p * page + o for p in pages for o in range(page)][reach.begin : reach.end]
    wanted = [j for a, b in spans for j in range(a, b)]
    assert set(wanted) <= set(positions) and positions == sorted(set(positions))
    if wanted:
        assert positions[-1] == wanted[-1]
        assert len(spans) > 1 or positions[0] == wanted[0]
