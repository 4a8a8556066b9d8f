"""Which mutants make any difference in which case, found while the suite runs once more.

To run the suite again for each of a thousand mutants takes hours. Here the functions of a
healthy copy are wrapped: a call also calls the function's mutants with the same arguments and
compares what they give ("weak mutation", Howden, IEEE TSE 8(4), 1982). A mutant that gives
the same in every call of a case cannot fail it, so only the others are run for themselves.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

import torch

from attnplat.errors import ConfigError
from attnplat.testing.bench import Bench
from attnplat.testing.bits import differing
from attnplat.testing.case import Case
from attnplat.testing.mutations.copies import with_codecs, with_execution
from attnplat.testing.mutations.mutants import Mutant
from attnplat.testing.runner import Status, Suite
from attnplat.testing.subject import Subject
from attnplat.testing.terrain import Terrain

WRITERS = frozenset(
    {
        "Part.dense",
        "Wave.copy",
        "Pages.__post_init__",
        "Pages.write",
        "PageShape.__post_init__",
        "merge_states",
    }
)
"""Functions that write into their arguments, which mutants therefore get copies of."""

DANGEROUS = frozenset({"copy_pages", "fused_attention", "cpu_flash_gives_lse"})
"""Functions that hand memory to kernels which check nothing: a mutant may end the process, so
all are taken to differ."""

COPIED_BYTES = 1 << 24
"""Arguments larger than this are not copied: all mutants are taken to differ."""


class Infection:
    """What the mutants of a subject's modules did in the cases run so far.

    Attributes:
        cases: mutant -> ids of the cases in which it differed.
    """

    def __init__(self, mutants: Iterable[Mutant]) -> None:
        self.mutants = tuple(mutants)
        self.cases: dict[str, list[str]] = {mutant.name: [] for mutant in self.mutants}
        self._case = ""
        self._inside = False
        self._waiting: dict[tuple[str, str], dict[str, Callable[..., Any]]] = {}
        self._found: dict[tuple[str, str], dict[str, Callable[..., Any]]] = {}

    def of(self, subject: Subject) -> Subject:
        """The subject with healthy copies of the mutated modules, watched."""
        return with_codecs(with_execution(subject, {}, self._watch), {}, self._watch)

    def begin(self, case: str) -> None:
        """From now on, calls are those of this case."""
        self._case = case
        for key, found in self._found.items():
            self._waiting[key].update(found)
            found.clear()

    def _watch(self, module: str, made: ModuleType) -> None:
        """Wrap the functions of a copy that have mutants."""
        own = [m for m in self.mutants if m.module == module]
        for function in dict.fromkeys(m.function for m in own):
            key = (module, function)
            some = [m for m in own if m.function == function]
            self._waiting[key] = {m.name: _only(m, made) for m in some}
            self._found[key] = {}
            _replace(made, function, functools.partial(self._wrapped, key))

    def _wrapped(self, key: tuple[str, str], healthy: Callable[..., Any]) -> Callable[..., Any]:
        writes = key[1] in WRITERS

        @functools.wraps(healthy)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not self._waiting[key]:
                return healthy(*args, **kwargs)
            given = (args, kwargs)
            if key[1] in DANGEROUS or (writes and _bytes_of(given) > COPIED_BYTES):
                self._differ(key, list(self._waiting[key]))
                return healthy(*args, **kwargs)
            before = copy.deepcopy(given) if writes else given
            kind, result = _outcome(healthy, given)
            self._compare(key, (kind, result, given), before if writes else None)
            if kind == "raised":
                raise result
            return result

        return call

    def _compare(
        self, key: tuple[str, str], healthy: tuple[str, Any, Any], before: Any | None
    ) -> None:
        """Run the waiting mutants, on copies of `before` where it is given."""
        self._inside = True
        try:
            for name, mutant in list(self._waiting[key].items()):
                given = healthy[2] if before is None else copy.deepcopy(before)
                if not same(healthy, (*_outcome(mutant, given), given)):
                    self._differ(key, [name])
        finally:
            self._inside = False

    def _differ(self, key: tuple[str, str], names: list[str]) -> None:
        for name in names:
            self.cases[name].append(self._case)
            self._found[key][name] = self._waiting[key].pop(name)


@dataclass(frozen=True)
class Spread:
    """The suite on a watched subject, the cases spread over processes that work by themselves."""

    processes: Sequence[tuple[int, int]]

    @classmethod
    def start(
        cls,
        infection: Infection,
        subject: Subject,
        suite: Suite,
        grounds: Sequence[Terrain],
        cases: Sequence[Case],
        workers: int,
    ) -> Spread:
        """Fork `workers` processes, each with its share of the cases."""
        started = []
        for worker in range(workers):
            reader, writer = os.pipe()
            process = os.fork()
            if process == 0:
                try:
                    os.close(reader)
                    found = _share(infection, subject, suite, grounds, cases[worker::workers])
                    with open(writer, "w") as pipe:
                        json.dump(found, pipe)
                finally:
                    os._exit(sys.exc_info()[0] is not None)
            os.close(writer)
            started.append((process, reader))
        return cls(started)

    def found(self, infection: Infection) -> dict[str, str]:
        """Wait for all, and put what they found into `infection`; what healthy copies failed."""
        wrong: dict[str, str] = {}
        for process, reader in self.processes:
            with open(reader) as pipe:
                told = pipe.read()
            _, status = os.waitpid(process, 0)
            if status:
                raise ConfigError("a process died while it compared mutants; see its traceback")
            values = json.loads(told)
            wrong |= values["wrong"]
            for name, cases in values["cases"].items():
                infection.cases[name] += cases
        return wrong


def _share(
    infection: Infection,
    subject: Subject,
    suite: Suite,
    grounds: Sequence[Terrain],
    cases: Sequence[Case],
) -> dict[str, Any]:
    torch.set_num_threads(1)
    # Mutants make warnings that tell nothing.
    warnings.simplefilter("ignore")
    bench, wrong = Bench(infection.of(subject)), {}
    for case in cases:
        infection.begin(case.id)
        result = suite.run_case(case, bench, grounds)
        if result.status == Status.FAILED:
            wrong[case.id] = result.reason
    return {"cases": {name: own for name, own in infection.cases.items() if own}, "wrong": wrong}


def _only(mutant: Mutant, module: ModuleType) -> Callable[..., Any]:
    """The mutant's function alone, in the healthy module's namespace."""
    node = mutant.changed_function
    tree = ast.Module(body=[node], type_ignores=[])
    flags = __future__.annotations.compiler_flag
    made: dict[str, Any] = {}
    with warnings.catch_warnings():
        # Some mutants cannot work, and Python sees it.
        warnings.simplefilter("ignore", SyntaxWarning)
        exec(compile(tree, f"<{mutant.name}>", "exec", flags), module.__dict__, made)
    found: Callable[..., Any] = made[node.name]
    return found


def _replace(module: ModuleType, function: str, wrapped: Callable[[Any], Any]) -> None:
    """Put `wrapped(original)` in the place of a function, method or property."""
    *owner, name = function.split(".")
    home: Any = getattr(module, owner[0]) if owner else module
    found = inspect.getattr_static(home, name)
    if isinstance(found, classmethod):
        setattr(home, name, classmethod(wrapped(found.__func__)))
    elif isinstance(found, property):
        setattr(home, name, property(wrapped(found.fget)))
    else:
        setattr(home, name, wrapped(found))


def _outcome(function: Callable[..., Any], given: Any) -> tuple[str, Any]:
    """("gave", result) or ("raised", error); what a generator yields, as an iterator."""
    args, kwargs = given
    try:
        result = function(*args, **kwargs)
        return "gave", Replay(result) if inspect.isgenerator(result) else result
    except Exception as error:
        return "raised", error


class Replay:
    """What a generator has yielded, to be iterated as often as wanted."""

    def __init__(self, values: Iterator[Any]) -> None:
        self.values = list(values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal bit by bit; functions and unknown things never are."""
    if one is other:
        return True
    if type(one).__name__ != type(other).__name__:
        return False
    match one:
        case torch.Tensor():
            equal = one.dtype == other.dtype and one.shape == other.shape
            return equal and one.device == other.device and not differing(one, other)
        case BaseException():
            return str(one) == str(other)
        case Replay():
            return same(one.values, other.values)
        case list() | tuple():
            pairs = zip(one, other, strict=False)
            return len(one) == len(other) and all(same(a, b) for a, b in pairs)
        case dict():
            return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
        case bool() | int() | str() | float() | None | slice() | torch.dtype() | torch.device():
            return bool(one == other) or (one != one and other != other)
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return False


def _bytes_of(given: Any) -> int:
    """Bytes of memory behind all tensors of the arguments."""
    seen: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif is_dataclass(value) and not isinstance(value, type):
            walk([getattr(value, f.name) for f in fields(value)])

    walk(given)
    return sum(seen.values())
