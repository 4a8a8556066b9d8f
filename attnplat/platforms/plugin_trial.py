"""Trying a plugin where nothing it does can reach us: in a process of its own, with a time limit.

A plugin's package is code of somebody else's. Importing it may take minutes, end the process,
print, or start threads. So it is imported there first, and here only after that went well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from attnplat._version import __version__
from attnplat.platforms.plugin_contents import (
    CONTRACT,
    OLDEST_CONTRACT,
    PluginProblem,
    read_contents,
)
from attnplat.platforms.processes import Ending, run_python
from attnplat.storage import key_of

LIMIT_S = 10.0
"""A plugin's declarations are tables: what takes longer to import is set aside."""
SLOW_S = 2.0
"""From here on it is told of: every start of a program pays for it."""

_SCRIPT = """
import sys
sys.path[:] = {path!r}
from attnplat.platforms.plugin_trial import answer
answer(*{arguments!r}, sys.argv[1])
"""


class Outcome(NamedTuple):
    """How a trial went: in how many seconds, and what kind of problem there was (`kind` "": none).

    `text` says what happened, `fix` what to do.
    """

    seconds: float
    kind: str = ""
    text: str = ""
    fix: str = ""


def try_plugin(
    package: str,
    label: str,
    backends: Sequence[str],
    platforms: Sequence[str],
    *,
    limit_s: float = LIMIT_S,
) -> Outcome:
    """Import and check a plugin in a process of its own; see `read_contents`."""
    arguments = (package, label, tuple(backends), tuple(platforms))
    script = _SCRIPT.format(path=sys.path, arguments=arguments)
    started = time.monotonic()
    run = run_python(script, limit_s)
    seconds = time.monotonic() - started
    try:
        found: dict[str, Any] = json.loads(run.answer or "")
        return Outcome(**found)
    except (ValueError, TypeError):
        return _without_answer(run.ending, run.failure, label, seconds, limit_s)


def _without_answer(
    ending: Ending, failure: str | None, label: str, seconds: float, limit_s: float
) -> Outcome:
    fix = f"update or uninstall {label.partition(' ')[0]}"
    if ending == Ending.TIMED_OUT:
        text = f"importing the plugin {label} takes longer than {limit_s:g} s"
        return Outcome(seconds, "slow", text, fix)
    how = failure or "it ended the process"
    return Outcome(seconds, "ended", f"importing the plugin {label} ended Python: {how}", fix)


def answer(
    package: str, label: str, backends: Sequence[str], platforms: Sequence[str], path: str
) -> None:
    """In the process of the trial: import, check, write the outcome to `path`, and end."""
    started = time.monotonic()
    kind = text = fix = ""
    try:
        read_contents(package, label, backends, platforms)
    except PluginProblem as problem:
        kind, text, fix = problem.kind, problem.text, problem.fix
    outcome = Outcome(time.monotonic() - started, kind, text, fix)
    Path(path).write_text(json.dumps(outcome._asdict()), encoding="utf-8")
    # Without what the plugin wants done at the end: that may take as long as it likes.
    sys.stdout.flush()
    os._exit(0)


def trial_key(package: str, label: str, names: Sequence[str], folder: str) -> str:
    """Changes with whatever the outcome of a trial depends on and can be told without one."""
    versions = [sys.version, __version__, CONTRACT, OLDEST_CONTRACT]
    return key_of(package, label, list(names), versions, _files(package), _times(Path(folder)))


def _files(package: str) -> list[Any]:
    """Names, times and sizes of the package's files; found without importing any of them."""
    top, *below = package.split(".")
    try:
        spec = util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return []
    folders = () if spec is None else spec.submodule_search_locations or ()
    return [entry for folder in folders for entry in _times(Path(folder, *below))]


def _times(folder: Path) -> list[Any]:
    try:
        found = sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".so", ".txt", ".json"))
        return [[str(p), p.stat().st_mtime_ns, p.stat().st_size] for p in found]
    except OSError:
        return []
