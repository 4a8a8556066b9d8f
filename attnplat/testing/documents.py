"""The pages of docs/ that are made from the suite and its records.

python -m attnplat.testing.documents          # are they current?
python -m attnplat.testing.documents --write  # make them so
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from attnplat.testing.case import by_number
from attnplat.testing.cases import KINDS
from attnplat.testing.compare import CONTRACT
from attnplat.testing.mutations.campaign import Kills
from attnplat.testing.mutations.equivalent import EQUIVALENT
from attnplat.testing.mutations.planted import PLANTED
from attnplat.testing.records import Record, latest, read_records

SHOWN = 4
"""Bugs that the table names for each case; the others are counted."""

UNKILLED = {
    "F2": "asks the configs, before any implementation",
    "N8": "asks the configs, before any implementation",
    "N7": "asks accelerators only; the bugs are planted on a CPU",
}
"""Cases that no planted bug can fail, and why."""


def conformance_page(kills: Kills) -> str:
    """docs/conformance.md: every case, what it claims, and which bugs fail it."""
    lines = [
        "# The conformance suite",
        "",
        "`attnplat check` asks a backend every case below that it claims to run. A case's id is",
        "stable. The last column names planted bugs that fail the case, or says why none can:",
        "a case that nothing can fail shows nothing. `attnplat check --mutations` plants them.",
        "",
        f"{len(PLANTED)} bugs are planted by hand. Mutants are made of the masks, merging, page",
        "arithmetic, softmax and codecs of TORCH_SDPA:",
        f"{len(kills.mutants)} are killed, and {len(EQUIVALENT)} are no bugs and listed with",
        "the reason in `attnplat/testing/mutations/equivalent.py`.",
        "",
    ]
    for kind in KINDS:
        lines += [f"## {kind.kind}: {kind.title}", ""]
        lines += ["| case | claim | failed by |", "|---|---|---|"]
        for case in by_number(kind.cases):
            told = case.absent or UNKILLED.get(case.id) or _some(kills.bugs_of(case.id))
            lines.append(f"| {case.id} | {case.claim} | {told} |")
        lines.append("")
    lines += _bug_table(kills)
    return "\n".join(lines)


def _some(bugs: Sequence[str]) -> str:
    more = f" and {len(bugs) - SHOWN} more" if len(bugs) > SHOWN else ""
    return ", ".join(bugs[:SHOWN]) + more


def _bug_table(kills: Kills) -> list[str]:
    lines = [
        "## The planted bugs",
        "",
        "| bug | what is wrong | cases that fail |",
        "|---|---|---|",
    ]
    for bug in PLANTED:
        cases = kills.planted.get(bug.name, ())
        more = f" and {len(cases) - 8} more" if len(cases) > 8 else ""
        lines.append(f"| {bug.name} | {bug.what} | {', '.join(cases[:8])}{more} |")
    return [*lines, ""]


def numerics_page(records: Iterable[Record]) -> str:
    """docs/numerics.md: the contract's tolerances, and the worst errors on record."""
    lines = [
        "# Numbers",
        "",
        "The metric is `||out - truth|| / ||truth||` per request and head over the request's rows,",
        "against float64 on the inputs exactly as stored. A fixed absolute tolerance would accept",
        "almost anything: outputs shrink with the number of keys. LSE errors are absolute, beyond",
        "what is relative. Rows that see no key must be exact.",
        "",
        "| class | output | LSE |",
        "|---|---|---|",
        *(
            f"| {name} | {t.out:.1e} | {t.lse:.1e} + {t.lse_relative:.0e} x |"
            for name, t in CONTRACT.items()
        ),
        "",
        "Classes are the activations' dtype; `tf32` where the user allowed TF32 products, `fp8`",
        "where queries or weights are fp8. Coded caches have their activations' class: the truth",
        "is computed from what the codes mean.",
        "",
        "## Worst errors on record",
        "",
        "| backend | device | class | output | LSE | record |",
        "|---|---|---|---|---|---|",
    ]
    for record in latest(records).values():
        for name, worst in sorted(record.values["errors"].items()):
            cells = (record.backend, f"{record.platform}:{record.arch}", name)
            worst_of = (f"{worst['out']:.1e}", f"{worst['lse']:.1e}", record.name)
            lines.append("| " + " | ".join((*cells, *worst_of)) + " |")
    return "\n".join([*lines, ""])


def _tolerances() -> list[str]:
    return [
        f"| {name} | {allowed.out:.1e} | {allowed.lse:.1e} + {allowed.lse_relative:.0e} x |"
        for name, allowed in CONTRACT.items()
    ]


def pages(root: Path) -> dict[Path, str]:
    """Each page's path under `root`, the repository, and what it must say."""
    records = read_records(root / "conformance" / "records")
    return {
        root / "docs" / "conformance.md": conformance_page(Kills.read()),
        root / "docs" / "numerics.md": numerics_page(records),
    }


def main() -> int:
    """Write the pages, or say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the repository")
    options = parser.parse_args()
    stale = 0
    for path, text in pages(options.root).items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if options.write:
            path.write_text(text, encoding="utf-8")
        print(f"{'wrote' if options.write else 'stale:'} {path}")
    return 0 if options.write or not stale else 1


if __name__ == "__main__":
    sys.exit(main())
