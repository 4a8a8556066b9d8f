"""Trying optional packages, each in a process of its own with a time limit.

Metadata is judged first: a package for another torch, or another package of the same name, is
not imported at all.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from attnplat.platforms.distributions import DISTRIBUTIONS, Installed
from attnplat.platforms.probe_outcome import (
    Failure,
    Outcome,
    ProbeKind,
    fix_for,
    kind_of,
    minor_of,
)
from attnplat.platforms.probe_specs import NOT_TRIED, ProbeSpec, spec_for
from attnplat.platforms.processes import Ending, PythonRun, run_python

TIMEOUT_S = 60.0

# Answers after each stage, so that what comes before an abort is known. What must not depend on
# the package is taken before it is imported.
_SCRIPT = """
import importlib, json, logging, os, sys, threading
leave, rename, answer_file = os._exit, os.replace, sys.argv[1]
wanted = json.loads(%s)
sys.path[:] = wanted["paths"] + [path for path in sys.path if path not in wanted["paths"]]
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except Exception:
    pass
root = logging.getLogger()
handlers, level = len(root.handlers), root.level
answer = {"stage": "import " + wanted["module"], "symbols": {}, "effects": []}

def tell():
    with open(answer_file + ".new", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    rename(answer_file + ".new", answer_file)

def find(module, path):
    for name in path.split("."):
        module = getattr(module, name)
    return module

def words(error):
    try:
        return str(error)[:4000]
    except BaseException:
        return "an error that cannot be printed"

def try_it():
    module = importlib.import_module(wanted["module"])
    file = getattr(module, "__file__", None)
    answer["file"] = file if isinstance(file, str) else None
    for path in wanted["symbols"]:
        answer["stage"] = "look for " + path
        try:
            find(module, path)
            answer["symbols"][path] = True
        except AttributeError:
            answer["symbols"][path] = False
    for path in wanted["calls"]:
        answer["stage"] = "call " + path
        tell()
        find(module, path)()
    answer["stage"] = ""

tell()
try:
    try_it()
except BaseException as error:
    name = getattr(error, "name", None)
    answer["error"] = {
        "type": type(error).__name__,
        "text": words(error),
        "name": name if isinstance(name, str) else None,
        "is_exit": isinstance(error, SystemExit),
    }
effects = answer["effects"]
if len(root.handlers) > handlers:
    effects.append("adds %%d handlers to the root logger" %% (len(root.handlers) - handlers))
if root.level != level:
    effects.append("changes the root logger's level")
left = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
if left:
    effects.append("leaves %%d threads running" %% len(left))
torch = sys.modules.get("torch")
try:
    if torch is not None and torch.cuda.is_initialized():
        effects.append("creates a context on a device")
except BaseException:
    pass
tell()
leave(0)
"""


class Probe(NamedTuple):
    """What is needed to try one distribution.

    Attributes:
        distribution: its name.
        version: the installed one.
        folder: its metadata folder, or "".
        torch: the installed version of torch, or None.
        install: how to get it.
        spec: what is imported, and what must be there.
    """

    distribution: str
    version: str
    folder: str
    torch: str | None
    install: str
    spec: ProbeSpec


def probes_for(installed: Installed, names: Iterable[str] | None = None) -> tuple[Probe, ...]:
    """A probe for each installed distribution that attnplat knows, or for those of `names`."""
    wanted = None if names is None else set(names)
    return tuple(
        Probe(
            d.name,
            installed.versions[d.name],
            installed.folders.get(d.name, ""),
            installed.versions.get("torch"),
            d.install,
            spec_for(d.name),
        )
        for d in DISTRIBUTIONS
        if d.name in installed.versions and (wanted is None or d.name in wanted)
    )


def try_all(
    probes: Sequence[Probe],
    paths: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    *,
    at_once: int = 2,
    told: Callable[[Outcome], None] | None = None,
) -> tuple[Outcome, ...]:
    """Try each, some at the same time; `told` hears of each as it is done. In given order."""
    from concurrent.futures import ThreadPoolExecutor

    def one(probe: Probe) -> Outcome:
        outcome = try_package(probe, paths, timeout_s)
        if told is not None:
            told(outcome)
        return outcome

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return tuple(pool.map(one, probes))


def try_package(probe: Probe, paths: Sequence[str], timeout_s: float = TIMEOUT_S) -> Outcome:
    """What comes of trying one distribution, its module found along `paths`."""
    if probe.distribution in NOT_TRIED:
        return Outcome(probe.distribution, probe.version, ProbeKind.NOT_TRIED, "it holds data")
    if (wrong := _wrong_torch(probe)) is not None:
        return wrong
    module = probe.spec.module or module_of(probe)
    if module is None:
        text = "what it installed names no module"
        return _outcome(probe, ProbeKind.MISSING_MODULE, text, probe.distribution)
    wanted = {
        "module": module,
        "paths": [os.path.abspath(path) for path in paths if path],
        "symbols": probe.spec.symbols,
        "calls": probe.spec.calls,
    }
    start = time.monotonic()
    run = run_python(_SCRIPT % repr(json.dumps(wanted)), timeout_s)
    outcome = judge(probe, module, run)
    return outcome._replace(seconds=time.monotonic() - start)


class _Answer(NamedTuple):
    """What the process told; `stage` is what it was about to do, "" at its end."""

    stage: str
    file: str | None
    symbols: Mapping[str, bool]
    effects: tuple[str, ...]
    failure: Failure | None


def judge(probe: Probe, module: str, run: PythonRun) -> Outcome:
    """What the process's end and its answer mean."""
    answer = _parse(run.answer)
    outcome = _judge_end(probe, module, run, answer)
    effects = list(answer.effects) if answer else []
    if run.output.strip():
        effects.append("prints when it is imported")
    if run.errors.strip() and not outcome.broken:
        effects.append("writes to standard error when it is imported")
    return outcome._replace(effects=tuple(effects), symbols=answer.symbols if answer else {})


def _judge_end(probe: Probe, module: str, run: PythonRun, answer: _Answer | None) -> Outcome:
    doing = f" ({answer.stage})" if answer and answer.stage else ""
    if answer and answer.failure is not None:
        return _failed(probe, module, answer.failure, doing)
    if answer and not answer.stage:
        return _judge_module(probe, module, answer)
    kinds = {Ending.TIMED_OUT: ProbeKind.HANGS, Ending.KILLED: ProbeKind.CRASHES}
    text = run.failure or "it ended its process without an error"
    return _outcome(probe, kinds.get(run.ending, ProbeKind.EXITS), f"{text}{doing}", module)


def _failed(probe: Probe, module: str, failure: Failure, doing: str) -> Outcome:
    kind = kind_of(failure, module)
    text = f"{failure.type}: {_one_line(failure.text)}{doing}"
    top = module.partition(".")[0]
    if kind is ProbeKind.MISSING_MODULE and failure.name is not None:
        if failure.name.partition(".")[0] == top:
            outcome = _outcome(probe, kind, f"its module {failure.name} is not there", module)
            return outcome._replace(fix=f"{probe.install} --force-reinstall --no-deps")
        outcome = _outcome(probe, kind, f"it imports {failure.name}, which is not there", module)
        return outcome._replace(fix=f"pip install {failure.name.partition('.')[0]}")
    return _outcome(probe, kind, text, module)


def _judge_module(probe: Probe, module: str, answer: _Answer) -> Outcome:
    """Of a module that was imported: whether it is the package's own, and complete."""
    if answer.file is None:
        text = f"the module {module} is a folder without code of its own"
        return _outcome(probe, ProbeKind.SOMETHING_ELSE, text, module)
    if (own := _own_file(probe, module)) is not None and not _same(own, answer.file):
        text = f"the module {module} comes from {answer.file}, which is not {probe.distribution}'s"
        return _outcome(probe, ProbeKind.SOMETHING_ELSE, text, module)
    lacks = [name for name in probe.spec.symbols if not answer.symbols.get(name)]
    if lacks:
        text = f"{module} has no {', '.join(lacks)}"
        return _outcome(probe, ProbeKind.MISSING_SYMBOL, text, module)
    return _outcome(probe, ProbeKind.WORKS, f"{module} can be imported", module)


def _outcome(probe: Probe, kind: ProbeKind, text: str, module: str) -> Outcome:
    fix = fix_for(kind, probe.distribution, module, probe.install, probe.torch)
    return Outcome(probe.distribution, probe.version, kind, text, fix, module)


def _wrong_torch(probe: Probe) -> Outcome | None:
    """By metadata alone: a package whose version, or requirement, is for another torch."""
    module = probe.spec.module or probe.distribution
    if probe.torch is None:
        return None
    if probe.spec.needs_torchs_minor and minor_of(probe.version) != minor_of(probe.torch):
        text = (
            f"{probe.distribution} {probe.version} works beside torch {minor_of(probe.version)} "
            f"only, and torch {probe.torch} is installed"
        )
        return _outcome(probe, ProbeKind.WRONG_TORCH, text, module)
    needs = torch_requirement(probe.folder)
    if needs is None or _satisfied(needs, probe.torch):
        return None
    text = f"{probe.distribution} {probe.version} requires torch{needs}; {probe.torch} is installed"
    return _outcome(probe, ProbeKind.WRONG_TORCH, text, module)


def torch_requirement(folder: str) -> str | None:
    """What a distribution's metadata require of torch's version, or None."""
    for line in _lines(os.path.join(folder, "METADATA")):
        if not line.strip():
            return None
        match = re.fullmatch(r"Requires-Dist:\s*torch\s*(\(.*?\)|[^;\s\[a-z].*?)?\s*(;.*)?", line)
        if match is not None and match.group(1) and "extra" not in (match.group(2) or ""):
            return match.group(1).strip("() ")
    return None


def _satisfied(needs: str, torch: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(needs).contains(torch.partition("+")[0], prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True


def module_of(probe: Probe) -> str | None:
    """The module that a distribution installed, from the list of its files, or None."""
    own = re.sub(r"[-.]+", "_", probe.distribution).lower()
    found = [line.strip() for line in _lines(os.path.join(probe.folder, "top_level.txt"))]
    for line in _lines(os.path.join(probe.folder, "RECORD")):
        match = re.match(r"([A-Za-z_]\w*)(/__init__\.py|\.py|\.[\w-]*\.?(so|pyd)),", line)
        if match is not None:
            found.append(match.group(1))
    names = [name for name in dict.fromkeys(found) if name and name.isidentifier()]
    return own if own in names else names[0] if names else None


def _own_file(probe: Probe, module: str) -> str | None:
    """The file of the module that the distribution says it installed, or None."""
    path = module.replace(".", "/")
    for line in _lines(os.path.join(probe.folder, "RECORD")):
        name = line.partition(",")[0]
        if name in (f"{path}/__init__.py", f"{path}.py"):
            return os.path.join(os.path.dirname(probe.folder), *name.split("/"))
    return None


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except (OSError, ValueError):
        return []


def _parse(text: str | None) -> _Answer | None:
    """The answer; None where there is none, or what a broken package made of it."""
    try:
        found = json.loads(text or "")
        error = found.get("error")
        failure = None if error is None else _failure(error)
        return _Answer(
            str(found["stage"]),
            found["file"] if isinstance(found.get("file"), str) else None,
            {str(name): there is True for name, there in found["symbols"].items()},
            tuple(map(str, found["effects"])),
            failure,
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _failure(error: Mapping[str, Any]) -> Failure:
    name = error["name"]
    return Failure(
        str(error["type"]),
        str(error["text"]),
        name if isinstance(name, str) else None,
        error["is_exit"] is True,
    )


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    whole = " ".join(lines)
    return whole if len(whole) <= 300 else f"{whole[:200]} ... {whole[-90:]}"


def import_paths() -> list[str]:
    """Where this process looks for modules, without its working directory."""
    return [path for path in sys.path if path]
