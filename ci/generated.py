"""Keeps the command output in README.md, docs/ and the package equal to what commands print.

A block reads

    <!-- generated: attnplat explain --device rocm:gfx950 -->
    ```text
    ...
    ```

Some files are the output of one command from first line to last; `FILES` lists them.

`--check` fails when a block or file differs from the command's output; `--write` rewrites it.
Commands run from the repository root, as on a machine of which nothing is known but the
arguments; only those in `PROGRAMS` may be named.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {
    "attnplat": [sys.executable, "-m", "attnplat"],
    "documents": [sys.executable, "-m", "attnplat.testing.documents"],
    "records": [sys.executable, "-m", "attnplat.testing.records"],
    "make": ["make", "--no-print-directory"],
}
FILES = {
    # First: the marks that all others print come from it.
    "attnplat/platforms/earned.json": "records conformance/records",
    "docs/backends.md": "attnplat backends --markdown --records conformance/records",
    "docs/conformance.md": "documents conformance",
    "docs/numerics.md": "documents numerics",
    "docs/selection-differences.md": "attnplat backends --differences --markdown",
}
BLOCK = re.compile(
    r"^(?P<head><!-- generated: (?P<command>[^\n]+?) -->\n```[a-z]*\n)(?P<body>.*?)(?P<tail>^```$)",
    re.MULTILINE | re.DOTALL,
)


def run(command: str) -> str:
    """Standard output of one command, or an error that shows what it said."""
    name, *arguments = shlex.split(command)
    if name not in PROGRAMS:
        raise SystemExit(f"generated: {name!r} is not one of {', '.join(sorted(PROGRAMS))}")
    # Nothing of the caller's own settings or terminal may show in a committed file.
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ATTNPLAT_", "MAKE")) and key not in {"MFLAGS", "FORCE_COLOR"}
    }
    done = subprocess.run(
        [*PROGRAMS[name], *arguments],
        cwd=ROOT,
        env={**environment, "COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"generated: {command!r} ended with {done.returncode}: {done.stderr}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.rstrip().splitlines())


def regenerate(text: str) -> tuple[str, int]:
    """The text with every block's body replaced by its command's output, and the count."""
    return BLOCK.subn(lambda match: match["head"] + run(match["command"]) + match["tail"], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--write", action="store_true")
    options = parser.parse_args()
    stale = total = 0
    whole = [ROOT / name for name in FILES]
    for path in dict.fromkeys([*whole, ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]):
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        command = FILES.get(path.relative_to(ROOT).as_posix())
        after, count = (run(command), 0) if command else regenerate(before)
        if before.count("<!-- generated:") != count:
            raise SystemExit(f"generated: {path.name} has a marker without a fenced block")
        total += count
        if after == before:
            continue
        stale += 1
        if options.write:
            path.write_text(after, encoding="utf-8")
            print(f"generated: rewrote {path.relative_to(ROOT)}")
        else:
            name = str(path.relative_to(ROOT))
            lines = (before.splitlines(True), after.splitlines(True))
            sys.stdout.writelines(difflib.unified_diff(*lines, name, f"{name} (regenerated)"))
    if total == 0:
        raise SystemExit("generated: found no block at all; is the marker misspelt?")
    print(f"generated: {total} blocks; files that were stale: {stale}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
