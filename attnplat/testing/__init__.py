"""The conformance suite: what a backend claims, asked of it.

    >>> from attnplat.testing import run_conformance
    >>> report = run_conformance("TORCH_SDPA", device="cpu")
    >>> assert report.ok, report.of("failed")

The author of a kernel passes the implementation's class, or `"my_module:MyImpl"`. On the
command line it is `attnplat check`.
"""

from __future__ import annotations

from attnplat.testing.case import Case, Check, Failed
from attnplat.testing.cases import CASES
from attnplat.testing.records import Record, read_records, verified
from attnplat.testing.runner import Report, Result, Status, Suite, run_conformance
from attnplat.testing.scenes import Arrangement, Scene
from attnplat.testing.subject import Subject, subject_of
from attnplat.testing.truth import Request

__all__ = [
    "CASES",
    "Arrangement",
    "Case",
    "Check",
    "Failed",
    "Record",
    "Report",
    "Request",
    "Result",
    "Scene",
    "Status",
    "Subject",
    "Suite",
    "read_records",
    "run_conformance",
    "subject_of",
    "verified",
]
