"""Scratch comes from the front, aligned, and never moves unasked."""

from __future__ import annotations

import pytest
import torch

from attnplat.backends.workspace import Workspace
from attnplat.errors import WorkspaceTooSmallError


@pytest.mark.parametrize("align", [1, 64, 256, 4096])
def test_pieces_are_aligned_and_apart(align: int) -> None:
    workspace = Workspace("cpu", 20000)
    first, second = workspace.take(3, align), workspace.take(100, align)
    assert first.data_ptr() % align == second.data_ptr() % align == 0
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all() and (second == 2).all() and second.shape == (100,)


def test_more_than_there_is_is_refused_with_the_size_that_would_do() -> None:
    workspace = Workspace("cpu", 1000)
    workspace.take(500)
    with pytest.raises(WorkspaceTooSmallError, match=r"reserve\((\d+)\)") as refused:
        workspace.take(600)
    size = int(str(refused.value).split("reserve(")[1].split(")")[0])
    workspace.reserve(size)
    workspace.take(500)
    assert workspace.take(600).numel() == 600


def test_reserving_less_moves_nothing() -> None:
    workspace = Workspace("cpu", 1000)
    place = workspace.take(10).data_ptr()
    workspace.reserve(900)
    workspace.reset()
    assert workspace.take(10).data_ptr() == place


def test_borrowed_pieces_come_back_even_after_an_error() -> None:
    workspace = Workspace("cpu", 1000)
    kept = workspace.take(10)
    with workspace.borrowed():
        place = workspace.take(600).data_ptr()
    with pytest.raises(RuntimeError, match="stop"), workspace.borrowed():
        workspace.take(600)
        raise RuntimeError("stop")
    assert workspace.take(600).data_ptr() == place != kept.data_ptr()


def test_the_zero_region_is_zero_and_bounded() -> None:
    workspace = Workspace("cpu", zeroed_nbytes=64)
    assert torch.equal(workspace.zeroed(64), torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(WorkspaceTooSmallError, match="zeroed_nbytes=65"):
        workspace.zeroed(65)


def test_a_caller_s_workspace_is_used_and_never_grown() -> None:
    own = Workspace("cpu", 100)
    assert Workspace.of_size(own, "cpu", 100) is own
    assert Workspace.of_size(None, "cpu", 100).nbytes == 100
    with pytest.raises(WorkspaceTooSmallError):
        Workspace.of_size(own, "cpu", 101)
