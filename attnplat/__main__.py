"""`python -m attnplat` is the `attnplat` command."""

from attnplat.cli.main import main

raise SystemExit(main())
