"""`python -m attnplat` is the `attnplat` command."""

from attnplat.cli.main import program

raise SystemExit(program())
