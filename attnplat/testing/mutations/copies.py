"""Private copies of modules, one of them changed, that import each other and nothing else's.

The product is never patched: a copy is executed under another name, and the imports among
the copied modules are led to the copies.
"""

from __future__ import annotations

import ast
import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import ModuleType

from attnplat.testing.mutations.mutants import Mutant
from attnplat.testing.subject import Subject

_PORTABLE = "attnplat.backends.portable"
_FORMATS = "attnplat.backends.formats"

EXECUTION = (
    "attnplat.ops.merge",
    f"{_PORTABLE}.masks",
    f"{_PORTABLE}.dense",
    f"{_PORTABLE}.gather",
    f"{_PORTABLE}.groups",
    f"{_PORTABLE}.waves",
    f"{_PORTABLE}.torch_sdpa",
)
"""What TORCH_SDPA is made of, each after those it imports."""

CODECS = (
    f"{_FORMATS}.element_codec",
    f"{_FORMATS}.scales",
    f"{_FORMATS}.rows",
    f"{_FORMATS}.pages",
)
"""What the codecs are made of, each after those it imports."""

MUTATED = (
    "attnplat.ops.merge",
    f"{_PORTABLE}.masks",
    f"{_PORTABLE}.gather",
    f"{_PORTABLE}.groups",
    f"{_PORTABLE}.waves",
    f"{_PORTABLE}.dense",
    *CODECS,
)
"""The modules with arithmetic of masks, merging, pages, scores and codes."""

_numbers = itertools.count()


def source_of(module: str) -> str:
    """A module's source."""
    spec = util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


Watch = Callable[[str, ModuleType], None]


@contextmanager
def copies(
    modules: tuple[str, ...], changed: Mapping[str, ast.Module], watch: Watch | None = None
) -> Iterator[dict[str, ModuleType]]:
    """Copies of `modules`, those in `changed` from that source; gone afterwards.

    `watch` is given each copy before another one imports from it.
    """
    prefix = f"_attnplat_copy_{next(_numbers)}"
    renamed = {module: f"{prefix}_{module.rpartition('.')[2]}" for module in modules}
    made = {}
    try:
        for module in modules:
            tree = changed.get(module) or ast.parse(source_of(module))
            made[module] = _execute(module, renamed, tree)
            if watch is not None:
                watch(module, made[module])
        yield made
    finally:
        for name in renamed.values():
            sys.modules.pop(name, None)


def _execute(module: str, renamed: Mapping[str, str], tree: ast.Module) -> ModuleType:
    """The module under its new name, its imports of copied modules led to the copies."""
    led = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (name := renamed.get(node.module or "")):
            node = copy.copy(node)
            node.module = name
        led.append(node)
    own = copy.copy(tree)
    own.body = led
    made = ModuleType(renamed[module])
    # Dataclasses look their module up by name.
    sys.modules[made.__name__] = made
    exec(compile(own, f"<copy of {module}>", "exec"), made.__dict__)
    return made


def planted(mutant: Mutant, subject: Subject) -> Subject:
    """The subject with TORCH_SDPA and merging, or the codecs, from the mutant's source."""
    changed = {mutant.module: mutant.tree}
    swap = with_codecs if mutant.module in CODECS else with_execution
    return swap(subject, changed).replace(name=mutant.name)


def with_codecs(
    subject: Subject, changed: Mapping[str, ast.Module], watch: Watch | None = None
) -> Subject:
    """The subject whose library has copies of the codecs, those in `changed` of that source."""
    with copies(CODECS, changed, watch) as made:
        rows, pages = made[f"{_FORMATS}.rows"], made[f"{_FORMATS}.pages"]
        elements = made[f"{_FORMATS}.element_codec"]
        library = replace(
            subject.library,
            encode_rows=rows.encode_rows,
            decode_rows=rows.decode_rows,
            amax_scale=rows.amax_scale,
            relabel_fn_as_fnuz=elements.relabel_fn_as_fnuz,
            relabel_fnuz_as_fn=elements.relabel_fnuz_as_fn,
            pages=pages.Pages,
            page_shape=pages.PageShape,
            swizzle_scales=pages.swizzle_scales,
            unswizzle_scales=pages.unswizzle_scales,
        )
    return subject.replace(library=library)


def with_execution(
    subject: Subject, changed: Mapping[str, ast.Module], watch: Watch | None = None
) -> Subject:
    """The subject with copies of TORCH_SDPA and merging, those in `changed` of that source."""
    with copies(EXECUTION, changed, watch) as made:
        merge, sdpa = made["attnplat.ops.merge"], made[f"{_PORTABLE}.torch_sdpa"]
        library = replace(
            subject.library, merge_states=merge.merge_states, apply_sinks=merge.apply_sinks
        )
    return subject.replace(impl=sdpa.TorchSdpaImpl, library=library)
