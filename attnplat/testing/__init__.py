"""The conformance suite: what a backend claims, asked of it.

    >>> from attnplat.testing import run_conformance
    >>> report = run_conformance("TORCH_SDPA", device="cpu")
    >>> assert report.ok, report.of("failed")

The author of a kernel passes the implementation's class, or `"my_module:MyImpl"`. On the
command line it is `attnplat check`. Names are loaded when they are used, so that records can
be read without torch.
"""

# ruff: noqa: F401 - the imports below tell type checkers what `__getattr__` loads

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplat.testing.case import Case, Check, Failed
    from attnplat.testing.cases import CASES
    from attnplat.testing.records import Record, read_records, verified
    from attnplat.testing.runner import Report, Result, Status, Suite, run_conformance
    from attnplat.testing.scenes import Arrangement, Scene
    from attnplat.testing.subject import Subject, subject_of
    from attnplat.testing.truth import Request

_HOME = {
    "Arrangement": "scenes",
    "CASES": "cases",
    "Case": "case",
    "Check": "case",
    "Failed": "case",
    "Record": "records",
    "Report": "runner",
    "Request": "truth",
    "Result": "runner",
    "Scene": "scenes",
    "Status": "runner",
    "Subject": "subject",
    "Suite": "runner",
    "read_records": "records",
    "run_conformance": "runner",
    "subject_of": "subject",
    "verified": "records",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'attnplat.testing' has no attribute {name!r}")
    value = getattr(import_module(f"attnplat.testing.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
