"""Running Python programs that may do anything, in processes of their own.

An optional package can abort, hang, print without end, leave threads and further processes
behind, or end the interpreter while it is imported. None of that reaches the caller.
"""

from __future__ import annotations

import sys
from collections import deque
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from subprocess import Popen

# Of each output stream this much is kept, the end of it; the rest is read and dropped.
_KEPT_BYTES = 64 * 1024
_CHUNK_BYTES = 8 * 1024


class Ending(StrEnum):
    """How a program ended."""

    DONE = "done"
    EXITED = "exited"
    KILLED = "killed"
    TIMED_OUT = "timed out"
    NOT_STARTED = "not started"


class PythonRun(NamedTuple):
    """How a Python program in a process of its own ended.

    Attributes:
        output: the end of what it printed.
        failure: why it did not end well, or None.
        ending: the same as a kind.
        code: the exit code, or the signal that killed it.
        errors: the end of its standard error.
        answer: what it wrote into the file that its first argument names, or None. A program
            that answers and then hangs has answered.
    """

    output: str = ""
    failure: str | None = None
    ending: Ending = Ending.DONE
    code: int = 0
    errors: str = ""
    answer: str | None = None


def run_python(script: str, timeout_s: float, python: str = sys.executable) -> PythonRun:
    """Run `script` in a fresh Python process, without the working directory on its path.

    Survives whatever the script does: exceptions, aborts, endless output, running past
    `timeout_s`. What it leaves running in its process group is ended with it.
    """
    import tempfile

    with tempfile.TemporaryDirectory(prefix="attnplat-", ignore_cleanup_errors=True) as folder:
        answer = Path(folder) / "answer"
        try:
            process = _start([python, "-P", "-c", script, str(answer)], folder)
        except OSError as error:
            text = f"{python!r} cannot be started: {error}"
            return PythonRun(failure=text, ending=Ending.NOT_STARTED)
        return _watch(process, timeout_s)._replace(answer=_read(answer))


def _start(command: list[str], folder: str) -> Popen[bytes]:
    import subprocess

    return subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _watch(process: Popen[bytes], timeout_s: float) -> PythonRun:
    import subprocess

    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = _Tail(process.stdout), _Tail(process.stderr)
    code: int | None = None
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _end_group(process)
    told, complaint = output.text(), errors.text()
    if code is None:
        failure = f"no answer within {timeout_s:g} s"
        return PythonRun(told, failure, Ending.TIMED_OUT, errors=complaint)
    if code < 0:
        return PythonRun(told, f"killed by signal {-code}", Ending.KILLED, -code, complaint)
    if code > 0:
        lines = [line.strip() for line in complaint.splitlines() if line.strip()]
        last = lines[-1] if lines else "no message"
        return PythonRun(told, f"exit code {code}: {last}", Ending.EXITED, code, complaint)
    return PythonRun(told, errors=complaint)


def _end_group(process: Popen[bytes]) -> None:
    """End the process and those it started, which would keep its output open."""
    import os
    import signal

    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()
    else:
        process.kill()
    process.wait()


class _Tail:
    """Reads a stream to its end in a thread and keeps the last of it."""

    # A process that left the group may hold the stream open for good.
    _PATIENCE_S = 1.0

    def __init__(self, stream: IO[bytes]) -> None:
        import threading

        self._stream = stream
        self._chunks: deque[bytes] = deque(maxlen=_KEPT_BYTES // _CHUNK_BYTES)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        # `read1` gives what is there, so that an end without a newline is not waited for.
        try:
            while chunk := self._stream.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
                self._chunks.append(chunk)
        except (OSError, ValueError):
            return

    def text(self) -> str:
        self._thread.join(self._PATIENCE_S)
        if not self._thread.is_alive():
            self._stream.close()
        return b"".join(list(self._chunks)).decode(errors="replace")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
