"""Work in forked processes, side by side."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from attnplat.errors import AttnplatError

T = TypeVar("T")


def can_fork() -> bool:
    """Whether this system forks processes; a forked child has what its parent has built."""
    return hasattr(os, "sched_getaffinity")


def each_in_a_child(works: Sequence[Callable[[], T]]) -> list[T]:
    """What each work returns, in the order of `works`, which all run at the same time.

    For a process that has not used several threads in torch: its children would wait for them.
    Raises what a work raises, and ChildProcessError for one that dies.
    """
    return [_finish(*child) for child in [_start(work) for work in works]]


def _start(work: Callable[[], Any]) -> tuple[Any, Connection]:
    forking = multiprocessing.get_context("fork")
    reader, writer = forking.Pipe(duplex=False)
    child = forking.Process(target=_report, args=(work, writer))
    child.start()
    writer.close()
    return child, reader


def _report(work: Callable[[], Any], writer: Connection) -> None:
    """In the child: send what the work returns, or what it raises."""
    try:
        writer.send((work(), None))
    except AttnplatError as error:
        writer.send((None, error))


def _finish(child: Any, reader: Connection) -> Any:
    try:
        result, error = reader.recv()
    except EOFError:
        child.join()
        raise ChildProcessError(f"a child ended with {child.exitcode} and told nothing") from None
    child.join()
    if error is not None:
        raise error
    return result
