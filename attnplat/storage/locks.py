"""A lock between processes that outlives none of its owners.

The operating system drops a file lock when the last process that has the file open ends.
A child that the owner forked keeps it open, though, and some network file systems keep it
longer still. So the owner's identity stands beside the lock, and whoever waits takes the lock
away from an owner that is gone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

POLL_S = 0.5
"""How long a waiter waits before it asks whether the owner still lives."""


class Owner(NamedTuple):
    """The process that holds a lock. `start` tells it from a later one with its number."""

    pid: int
    machine: str
    start: str

    def __str__(self) -> str:
        return f"process {self.pid}"

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return cls(os.getpid(), _machine(), _start_of(os.getpid()) or "")

    def is_gone(self) -> bool:
        """Whether it has certainly ended; False where that cannot be told from here."""
        if self.machine != _machine() or sys.platform == "win32":
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # another user's process
            return False
        start = _start_of(self.pid)
        return start is not None and self.start not in ("", start)


def _machine() -> str:
    """Host and process namespace: within the same one, process numbers mean the same."""
    import socket

    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace}".strip()


def _start_of(pid: int) -> str | None:
    """When the process began, in the kernel's count; None where the kernel does not say.

    A zombie has ended, whatever its parent has not yet heard.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return "ended" if fields[0] in ("Z", "X") else fields[19]


@contextmanager
def locked(path: Path, waiting: Callable[[Owner | None], None] | None = None) -> Iterator[None]:
    """Hold the lock at `path`, a file in a folder that exists.

    Args:
        waiting: told once, of the owner where known, before this process has to wait.

    Raises OSError where the lock cannot be made.
    """
    lock = _acquire(path, waiting)
    try:
        yield
    finally:
        with suppress(OSError):
            _beside(path).unlink()
        lock.release()


def _acquire(path: Path, waiting: Callable[[Owner | None], None] | None) -> Any:
    from filelock import FileLock, Timeout

    timeout = 0.0
    while True:
        lock = FileLock(path)
        try:
            lock.acquire(timeout=timeout)
        except Timeout:
            owner = _owner(path)
            if owner is not None and owner.is_gone():
                lock = _take_over(path)
                if lock is not None:
                    return lock
            elif timeout == 0 and waiting is not None:
                waiting(owner)
            timeout = POLL_S
        else:
            _sign(path)
            return lock


def _take_over(path: Path) -> Any:
    """The lock, if its owner is still one that is gone; None if another was faster."""
    from filelock import FileLock, Timeout

    # Only one at a time: a second one would take the lock from the first.
    with suppress(Timeout), FileLock(path.with_name(path.name + ".takeover"), timeout=POLL_S):
        owner = _owner(path)
        if owner is None or not owner.is_gone():
            return None
        # Who still has the old file open holds a lock that nobody asks for any more.
        path.unlink(missing_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return None
        _sign(path)
        return lock
    return None


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".owner")


def _sign(path: Path) -> None:
    """Say whose the lock is. A lock without it is held all the same, and not taken over."""
    import json

    temporary = path.with_name(f"{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    with suppress(OSError):
        temporary.write_text(json.dumps(Owner.here()), encoding="utf-8")
        temporary.replace(_beside(path))
    with suppress(OSError):
        temporary.unlink()


def _owner(path: Path) -> Owner | None:
    import json

    try:
        pid, machine, start = json.loads(_beside(path).read_text(encoding="utf-8"))
        return Owner(int(pid), str(machine), str(start))
    except (OSError, ValueError, TypeError):
        return None
