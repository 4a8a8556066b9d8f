"""Private copies of modules, one of them changed, that import each other and nothing else's.

The product is never patched: a copy is executed under another name, and the imports among
the copied modules are led to the copies.
"""

from __future__ import annotations

import ast
import copy
import itertools
import sys
from collections.abc import Iterator, Mapping
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


@contextmanager
def copies(
    modules: tuple[str, ...], changed: Mapping[str, ast.Module]
) -> Iterator[dict[str, ModuleType]]:
    """Copies of `modules`, those in `changed` from that source; gone afterwards."""
    prefix = f"_attnplat_copy_{next(_numbers)}"
    renamed = {module: f"{prefix}_{module.rpartition('.')[2]}" for module in modules}
    made = {}
    try:
        for module in modules:
            tree = changed.get(module) or ast.parse(source_of(module))
            made[module] = _execute(module, renamed, tree)
        yield made
    finally:
        for name in renamed.values():
            sys.modules.pop(name, None)


def _execute(module: str, renamed: Mapping[str, str], tree: ast.Module) -> ModuleType:
    """The module under its new name, its imports of copied modules led to the copies."""
    led = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in renamed:
            node = copy.copy(node)
            node.module = renamed[node.module]
        led.append(node)
    own = copy.copy(tree)
    own.body = led
    made = ModuleType(renamed[module])
    # Dataclasses look their module up by name.
    sys.modules[made.__name__] = made
    exec(compile(own, f"<copy of {module}>", "exec"), made.__dict__)
    return made


def planted(mutant: Mutant, subject: Subject) -> Subject:
    """The subject with TORCH_SDPA, merging or codecs from the mutant's source.

    The copies stay in `sys.modules`; call it in a process of its own.
    """
    changed = {mutant.module: mutant.tree}
    library = subject.library
    if mutant.module in CODECS:
        with copies(CODECS, changed) as made:
            rows, pages = made[f"{_FORMATS}.rows"], made[f"{_FORMATS}.pages"]
            library = replace(
                library,
                encode_rows=rows.encode_rows,
                decode_rows=rows.decode_rows,
                pages=pages.Pages,
            )
            return subject.replace(name=mutant.name, library=library)
    with copies(EXECUTION, changed) as made:
        merge = made["attnplat.ops.merge"]
        library = replace(library, merge_states=merge.merge_states, apply_sinks=merge.apply_sinks)
        impl = made[f"{_PORTABLE}.torch_sdpa"].TorchSdpaImpl
        return subject.replace(name=mutant.name, impl=impl, library=library)
