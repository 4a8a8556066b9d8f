"""A program in a process of its own may do anything: its caller is told and carries on."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from attnplat.platforms.processes import Ending, run_python

ANSWER = "import sys; open(sys.argv[1], 'w').write('here')\n"


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_its_output_and_its_answer_come_back() -> None:
    run = run_python("print('out')\n" + ANSWER, 60)
    assert (run.output, run.answer, run.failure, run.ending) == ("out\n", "here", None, Ending.DONE)
    assert run_python("", 60).answer is None


@pytest.mark.parametrize(
    ("script", "ending", "failure"),
    [
        (
            "raise KeyError('libamd_smi.so')",
            Ending.EXITED,
            "exit code 1: KeyError: 'libamd_smi.so'",
        ),
        ("raise SystemExit(3)", Ending.EXITED, "exit code 3: no message"),
        ("raise SystemExit('no device')", Ending.EXITED, "exit code 1: no device"),
        ("raise KeyboardInterrupt", Ending.KILLED, "killed by signal 2"),
        ("import os; os._exit(7)", Ending.EXITED, "exit code 7: no message"),
        ("import os; os.abort()", Ending.KILLED, "killed by signal 6"),
        ("import ctypes; ctypes.string_at(0)", Ending.KILLED, "killed by signal 11"),
    ],
)
def test_its_death_is_told_of(script: str, ending: Ending, failure: str) -> None:
    run = run_python(script, 60)
    assert (run.ending, run.failure, run.answer) == (ending, failure, None)


@pytest.mark.parametrize(
    "script",
    [
        "import time; time.sleep(600)",
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
        "import signal, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
        "time.sleep(600)",
        "while True: print('x' * 1000)",
        "import sys\nwhile True: sys.stderr.write('no end ')",
        "import atexit, time; atexit.register(time.sleep, 600)",
    ],
    ids=["sleep", "thread", "no signal helps", "output", "errors", "at its end"],
)
def test_a_hang_of_any_kind_is_ended_in_time(script: str) -> None:
    start = time.monotonic()
    run = run_python(script, 1)
    assert (run.ending, run.failure) == (Ending.TIMED_OUT, "no answer within 1 s")
    assert time.monotonic() - start < 10
    assert len(run.output) <= 64 * 1024
    assert len(run.errors) <= 64 * 1024


def test_an_answer_given_before_a_hang_counts() -> None:
    run = run_python(ANSWER + "import time; time.sleep(600)", 1)
    assert (run.answer, run.ending) == ("here", Ending.TIMED_OUT)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("end", ["", "time.sleep(600)"], ids=["ends well", "hangs"])
def test_processes_it_leaves_are_ended_with_it(end: str) -> None:
    # They hold its output open, for which a careless reader would wait.
    start = time.monotonic()
    run = run_python(
        "import subprocess, sys, time\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open(sys.argv[1], 'w').write(str(left.pid))\n{end}",
        2,
    )
    assert time.monotonic() - start < 10
    assert run.answer is not None
    deadline = time.monotonic() + 5
    while is_alive(int(run.answer)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(int(run.answer))


@pytest.mark.skipif(not hasattr(os, "setsid"), reason="needs sessions")
def test_a_process_that_left_the_group_does_not_hold_the_caller() -> None:
    start = time.monotonic()
    run = run_python(
        "import os, time\n"
        "if os.fork() == 0:\n    os.setsid(); time.sleep(6); os._exit(0)\n"
        "print('done', flush=True)",
        60,
    )
    assert run.ending is Ending.DONE
    assert "done" in run.output
    assert time.monotonic() - start < 5


def test_an_interpreter_that_is_not_there_is_told_of() -> None:
    run = run_python("", 5, python="/nowhere/python")
    assert run.ending is Ending.NOT_STARTED
    assert run.failure is not None
    assert "/nowhere/python" in run.failure


def test_it_neither_sees_the_working_directory_nor_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "aiter.py").write_text("raise RuntimeError")
    run = run_python("import sys; open('left', 'w').close(); import aiter", 60)
    assert run.failure is not None
    assert "ModuleNotFoundError" in run.failure
    assert [path.name for path in tmp_path.iterdir()] == ["aiter.py"]
