"""Scratch memory that the caller owns and backends borrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attnplat.backends.checks import same_device
from attnplat.errors import WorkspaceTooSmallError

ALIGNMENT = 256
"""Bytes; enough for the widest vector or bulk copy of any device."""


class Workspace:
    """A scratch arena of one stream (or one thread), handed out front to back.

    `take` pieces live until `reset`. The arena grows only in `reserve`, never in `take`, so
    that addresses captured in a device graph stay good. A second, small region is zero
    whenever a kernel starts: a kernel that counts in it must leave it zero.

    Args:
        device: where the memory is.
        nbytes: size of the arena in bytes.
        zeroed_nbytes: size of the zero region in bytes.
    """

    def __init__(
        self, device: torch.device | str, nbytes: int = 0, *, zeroed_nbytes: int = 4096
    ) -> None:
        self.device = same_device(device)
        self._arena = self._allocate(nbytes)
        self._zeroed = torch.zeros(zeroed_nbytes, dtype=torch.uint8, device=self.device)
        self._taken = 0

    @classmethod
    def of_size(cls, given: Workspace | None, device: torch.device | str, nbytes: int) -> Workspace:
        """The caller's workspace if there is one, else a new one; either has `nbytes` left.

        Raises WorkspaceTooSmallError when the caller's has less: it is never grown unasked.
        """
        if given is None:
            return cls(device, nbytes)
        if given.free_nbytes < nbytes:
            raise given._too_small(nbytes)
        return given

    @property
    def nbytes(self) -> int:
        """Size of the arena in bytes."""
        return self._arena.numel()

    @property
    def free_nbytes(self) -> int:
        """Bytes that `take` can still hand out, before alignment."""
        return self.nbytes - self._taken

    def reserve(self, nbytes: int) -> None:
        """Grow the arena to at least `nbytes`. Pieces handed out before stay valid.

        Raises WorkspaceTooSmallError during a graph capture, where memory may not move.
        """
        if nbytes <= self.nbytes:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise WorkspaceTooSmallError(
                f"workspace holds {self.nbytes} bytes and {nbytes} are needed, but it may not "
                "grow during a graph capture; reserve() them before"
            )
        self._arena = self._allocate(nbytes)
        self._taken = 0

    def take(self, nbytes: int, align: int = ALIGNMENT) -> torch.Tensor:
        """`nbytes` of scratch as uint8 `[nbytes]`, aligned to `align` bytes, contents unspecified.

        Raises WorkspaceTooSmallError when the arena has not that much left.
        """
        start = _round_up(self._arena.data_ptr() + self._taken, align) - self._arena.data_ptr()
        if start + nbytes > self.nbytes:
            raise self._too_small(nbytes)
        self._taken = start + nbytes
        return self._arena[start : start + nbytes]

    def zeroed(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of the zero region as uint8; leave them zero.

        Raises WorkspaceTooSmallError when the region is smaller.
        """
        if nbytes > self._zeroed.numel():
            raise WorkspaceTooSmallError(
                f"workspace has a zero region of {self._zeroed.numel()} bytes and {nbytes} are "
                f"needed; create it with zeroed_nbytes={nbytes}"
            )
        return self._zeroed[:nbytes]

    def reset(self) -> None:
        """Take every piece back; the next `take` starts at the front."""
        self._taken = 0

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Pieces taken inside are taken back at the end, so the next borrower gets the same."""
        before = self._taken
        try:
            yield
        finally:
            self._taken = before

    def _too_small(self, nbytes: int) -> WorkspaceTooSmallError:
        return WorkspaceTooSmallError(
            f"workspace has {self.nbytes} bytes, {self._taken} of them taken, and {nbytes} are "
            f"needed; reserve({self._taken + nbytes + ALIGNMENT}) before planning"
        )

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """An arena that starts at a multiple of ALIGNMENT, so that what fits is no accident."""
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=self.device)
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
