"""Under another engine's rules a backend takes what that engine's class says that it takes."""

from __future__ import annotations

from attnplat.platforms.rules import platform_under
from tests.unit.recorded_classes import questions


def test_every_answer_of_every_class_is_given():
    wrong = [
        (*q.device, q.row["requested"], q.code, q.refused, q.row["config"])
        for q in questions()
        if not q.agrees(platform_under("vllm-0.33", *q.device))
    ]
    assert wrong == []


def test_every_code_is_asked_for_both_ways():
    asked = {(q.code, q.refused) for q in questions()}
    assert asked == {(code, refused) for code, _ in asked for refused in (True, False)}
