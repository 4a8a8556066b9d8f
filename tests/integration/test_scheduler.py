"""Requests get their blocks or wait; nothing that has begun is lost."""

from __future__ import annotations

import pytest

from attnplat.errors import ConfigError, OutOfBlocksError
from attnplat.integrations.transformers.scheduler import Request, Scheduler, blocks_for_all


def run(scheduler: Scheduler, stop_after: dict[int, int] | None = None) -> list[list[int]]:
    """Run to the end, the index of each step's requests; checks what must hold at each step."""
    steps = []
    while not scheduler.done:
        step = scheduler.next_step()
        assert step, "a step that does nothing would go on for ever"
        assert sum(len(work.tokens) for work in step) <= scheduler.max_step_tokens
        held = [block for work in step for block in work.request.blocks]
        assert len(held) == len(set(held)), "no block belongs to two requests"
        for work in step:
            request = work.request
            assert request.computed + len(work.tokens) <= len(request.blocks) * scheduler.block_size
            token = 7 if work.last else None
            most = (stop_after or {}).get(request.index, request.max_new_tokens)
            scheduler.advance(work, token, stop=work.last and len(request.output) + 1 == most)
        steps.append([work.request.index for work in step])
    return steps


def requests(*lengths: int, new: int = 3) -> list[Request]:
    return [Request(i, [5] * n, new) for i, n in enumerate(lengths)]


def test_all_run_together_when_there_is_room() -> None:
    scheduler = Scheduler(100, 4)
    scheduler.submit(given := requests(3, 10, 1))
    assert run(scheduler) == [[0, 1, 2]] * 3
    assert [r.output for r in given] == [[7, 7, 7]] * 3


def test_a_request_waits_until_blocks_are_free() -> None:
    scheduler = Scheduler(4, 4)  # the first two take two each
    scheduler.submit(given := requests(4, 6, 4))
    steps = run(scheduler)
    assert steps == [[0, 1]] * 3 + [[2]] * 3
    assert all(len(r.output) == 3 and not r.blocks for r in given)


def test_one_that_finishes_early_makes_room() -> None:
    scheduler = Scheduler(4, 4)
    scheduler.submit(requests(4, 6, 4))
    assert run(scheduler, stop_after={0: 1}) == [[0, 1], [1, 2], [1, 2], [2]]


def test_a_large_request_is_not_overtaken() -> None:
    scheduler = Scheduler(4, 4)
    scheduler.submit(requests(6, 13, 1))
    assert run(scheduler)[0] == [0], "the third would fit beside the first, and has to wait"


def test_long_prompts_are_computed_in_pieces_beside_those_that_decode() -> None:
    scheduler = Scheduler(100, 4, max_step_tokens=5)
    scheduler.submit(given := requests(2, 12, new=4))
    steps = run(scheduler)
    assert steps == [[0, 1], [0, 1], [0, 1], [0, 1], [1], [1], [1]]
    assert [len(r.output) for r in given] == [4, 4]


def test_a_request_that_can_never_fit_is_refused_before_any_begins() -> None:
    scheduler = Scheduler(4, 4)
    with pytest.raises(OutOfBlocksError, match=r"request 1 .* needs 5 blocks of 4 tokens.* has 4"):
        scheduler.submit(requests(4, 16))
    assert scheduler.done, "the first was not queued either"


def test_the_last_token_needs_no_place() -> None:
    scheduler = Scheduler(4, 4)
    scheduler.submit(requests(14))
    assert len(run(scheduler)) == 3


@pytest.mark.parametrize(
    ("given", "says"), [(Request(0, [], 3), "empty prompt"), (Request(0, [1], 0), "max_new_tokens")]
)
def test_requests_that_ask_for_nothing_are_refused(given: Request, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Scheduler(4, 4).submit([given])


def test_blocks_for_all_are_just_enough_that_nobody_waits() -> None:
    lengths = (3, 10, 1, 16)
    prompts = [[5] * n for n in lengths]
    enough = blocks_for_all(prompts, 3, 4)
    for count, waits in ((enough, False), (enough - 1, True)):
        scheduler = Scheduler(count, 4)
        scheduler.submit(requests(*lengths))
        scheduler.next_step()
        assert (scheduler.num_waiting > 0) == waits
