"""The suite catches what is planted."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplat.testing import Status, Suite, subject_of
from attnplat.testing.bench import Bench
from attnplat.testing.mutations.campaign import Kills, all_mutants
from attnplat.testing.mutations.copies import EXECUTION, MUTATED, copies, source_of
from attnplat.testing.mutations.equivalent import COSTS, EQUIVALENT
from attnplat.testing.mutations.infection import Infection, same
from attnplat.testing.mutations.mutants import mutants
from attnplat.testing.runner import chosen
from attnplat.testing.terrain import terrains

ROOT = Path(__file__).resolve().parents[2]


def campaign(*options: str, timeout: int) -> dict[str, Any]:
    """A campaign in a process of its own, as it forks."""
    command = [sys.executable, "-m", "attnplat", "check", "--mutations", "--json", *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) == (not told["escaped"] and not told["unhealthy"])
    return told


@pytest.mark.timeout(900)
def test_every_bug_and_mutant_is_caught_by_what_caught_it_before() -> None:
    told = campaign(timeout=900)
    assert told["unhealthy"] == {}
    assert told["escaped"] == []
    assert told["caught"] == told["planted"] >= 40
    assert told["killed"] == told["mutants"] > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_bug_and_mutant_is_caught_by_the_whole_suite() -> None:
    told = campaign("--full", timeout=3600)
    assert told["unhealthy"] == {}
    assert told["escaped"] == []


# Whoever changes a mutated module makes other mutants: the full campaign records what kills them.
@pytest.mark.slow
def test_every_mutant_is_killed_or_listed_with_its_reason() -> None:
    kills = Kills.read()
    names = {mutant.name for mutant in all_mutants()}
    remedy = "attnplat check --mutations --full --record"
    assert not EQUIVALENT.keys() - names, "listed and gone"
    bare = names - EQUIVALENT.keys() - kills.mutants.keys()
    assert not bare, f"neither killed nor listed: {remedy}"


def test_no_mutant_is_both_killed_and_no_bug() -> None:
    assert not EQUIVALENT.keys() & Kills.read().mutants.keys()
    assert all(EQUIVALENT.values())
    assert all(COSTS.values())


def test_the_functions_about_costs_alone_are_there() -> None:
    found = {f"{m.module}.{m.function}" for name in MUTATED for m in mutants(name, source_of(name))}
    assert COSTS.keys() <= found


def test_a_mutant_is_told_from_the_original_by_the_calls_that_differ() -> None:
    merging = [m for m in all_mutants() if m.module == "attnplat.ops.merge"]
    infection, subject = Infection(merging), subject_of("TORCH_SDPA").replace(declared=())
    watched, ground = Bench(infection.of(subject)), terrains(subject, "quick", 0)
    for case in chosen(["B6", "B10"]):
        infection.begin(case.id)
        assert Suite().run_case(case, watched, ground).status == Status.PASSED
    found = infection.cases
    # A weight that is subtracted changes nothing where there is none.
    assert found["merge.merge_states: total + weight -> total - weight"] == ["B10"]
    assert found["merge.merge_states: torch.where(high == _NEG_INF, 0.0, high) -> high"] == ["B6"]
    assert not found["merge.apply_sinks: out.dtype == torch.float64 -> out.dtype != torch.float64"]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        ((1, [2.0, float("nan")]), (1, [2.0, float("nan")]), True),
        ((1, 2), (1, 2, 3), False),
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}, True),
        (ValueError("a"), ValueError("b"), False),
        (lambda: 1, lambda: 1, False),
    ],
)
def test_results_are_compared_bit_by_bit(one: Any, other: Any, equal: bool) -> None:
    assert same(one, other) is equal


def test_mutants_change_one_expression_each() -> None:
    source = "def f(a, b):\n    return a + b if a < b else min(a, 1) - g(a, 1)\n"
    found = {m.change: ast.unparse(m.tree) for m in mutants("m", source)}
    assert "a < b -> a <= b" in found
    assert "a + b -> a - b" in found
    assert "min(a, 1) -> max(a, 1)" in found
    assert "min(a, 1) -> min(1, a)" not in found
    assert "g(a, 1) -> g(1, a)" in found
    assert all(text.count("def f(a, b)") == 1 for text in found.values())
    assert len(set(found.values())) == len(found)
    assert ast.unparse(ast.parse(source)) not in found.values()


def test_messages_and_annotations_are_not_mutated() -> None:
    source = (
        "def f(a: int | None) -> int | None:\n"
        "    assert a < 5\n"
        "    if a is None:\n"
        "        raise ValueError(f'{a + 1}')\n"
        "    return a\n"
    )
    assert list(mutants("m", source)) == []


def test_copies_import_each_other_and_leave_the_product_alone() -> None:
    from attnplat.backends.portable import masks, torch_sdpa

    with copies(EXECUTION, {}) as made:
        copied = made["attnplat.backends.portable.torch_sdpa"]
        assert copied.HostMasks is made["attnplat.backends.portable.masks"].HostMasks
        assert copied.HostMasks is not masks.HostMasks
        assert torch_sdpa.HostMasks is masks.HostMasks
        names = [module.__name__ for module in made.values()]
        assert all(name in sys.modules for name in names)
    assert not any(name in sys.modules for name in names)


def test_the_copied_modules_are_in_the_order_they_import_each_other() -> None:
    seen: set[str] = set()
    for module in EXECUTION:
        tree = ast.parse(source_of(module))
        wanted = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert wanted & set(EXECUTION) <= seen, module
        seen.add(module)
