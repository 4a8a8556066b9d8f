"""Limits accept, document, and generate examples on either side of themselves."""

from __future__ import annotations

import pytest

from attnplat.backends.limits import (
    Anything,
    AtLeast,
    AtMost,
    Between,
    Both,
    Cases,
    Either,
    Includes,
    MultipleOf,
    MultipleOfAny,
    Nothing,
    OneOf,
    Required,
    SubsetOf,
)
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.world import World

TABLE = [
    # limit, accepted, refused, words
    (Anything(), [1, "x"], [], "anything"),
    (OneOf(64, 128, 256), [64, 256], [63, 96], "64, 128 or 256"),
    (OneOf("auto"), ["auto"], ["fp8"], "auto"),
    (MultipleOf(16), [16, 48, 544], [0, -16, 8, 17], "a multiple of 16"),
    (MultipleOfAny(16, 32, 64), [16, 48, 544], [8, 24], "a multiple of 16"),
    (MultipleOfAny(64, 80), [64, 80, 160], [96], "a multiple of 64 or 80"),
    (AtLeast(32), [32, 4096], [31], "32 or more"),
    (AtLeast((8, 9)), [(8, 9), (9, 0)], [(8, 6), (7, 5)], "8.9 or more"),
    (AtMost(256), [1, 256], [257], "256 or less"),
    (Between((8, 0), (12, 1)), [(8, 0), (10, 3), (12, 1)], [(7, 5), (12, 2)], "8.0 to 12.1"),
    (Includes("cdna3"), [{"cdna3", "cdna"}], [{"rdna"}], "devices with cdna3"),
    (SubsetOf("sinks"), [set(), {"sinks"}], [{"alibi"}], "only sinks"),
    (Both(MultipleOf(8), AtMost(256)), [8, 256], [264, 12], "a multiple of 8, 256 or less"),
    (Either(OneOf(192), AtLeast(512)), [192, 512], [256], "192 or 512 or more"),
    (Nothing("no kernel"), [], [1, "x"], "nothing (no kernel)"),
]


@pytest.mark.parametrize(("limit", "accepted", "refused", "words"), TABLE, ids=repr)
def test_limits_accept_refuse_and_say_so(limit, accepted, refused, words):
    assert all(limit.accepts(v) for v in accepted)
    assert not any(limit.accepts(v) for v in refused)
    assert str(limit) == words


@pytest.mark.parametrize("limit", [row[0] for row in TABLE], ids=repr)
def test_generated_examples_are_on_their_side(limit):
    assert all(limit.accepts(v) for v in limit.inside())
    assert not any(limit.accepts(v) for v in limit.outside())


@pytest.mark.parametrize("limit", [row[0] for row in TABLE], ids=repr)
def test_unknown_passes_unless_required(limit):
    assert limit.accepts(None)
    assert not Required(limit).accepts(None)


@pytest.mark.parametrize(
    ("limit", "value", "nearest"),
    [
        (OneOf(64, 128, 256), 80, (128, 256, 64)),
        (MultipleOf(16), 50, (64, 48)),
        (MultipleOf(16), 7, (16,)),
        (Both(MultipleOf(8), AtMost(256)), 100, (104, 96, 256)),
        (Required(OneOf("fp8")), None, ("fp8",)),
    ],
    ids=repr,
)
def test_the_nearest_accepted_values_come_first(limit, value, nearest):
    assert limit.nearest(value) == nearest
    assert all(limit.accepts(v) for v in limit.nearest(value))


def test_cases_take_the_first_that_holds():
    def is_big(world):
        return world.device.cores > 10

    def is_huge(world):
        return world.device.cores > 100

    def of(cores):
        return World(DeviceInfo(platform="cpu", arch="avx2", cores=cores), Inventory.assume())

    cases = Cases((is_huge, OneOf(3)), (is_big, OneOf(2)), otherwise=OneOf(1))
    assert [cases.resolve(of(c)) for c in (1000, 50, 5)] == [OneOf(3), OneOf(2), OneOf(1)]
    assert repr(cases) == "Cases(is_huge, is_big)"
