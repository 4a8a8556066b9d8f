"""Entry point of `attnplat`: commands, common errors, exit codes.

Exit codes: 0 done; 1 the answer is no (nothing fits, a check differs); 2 bad input or a
machine that cannot do what was asked; 130 interrupted. An expected failure prints one
message and no traceback.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from attnplat.errors import AttnplatError

COMMANDS = {
    "doctor": "what is here, usable, broken, and how to fix it",
    "explain": "which backend each layer would use, why, and why not the others",
    "backends": "the tables of what every backend takes",
    "select": "decide for recorded cases and compare",
    "check": "whether a backend does on this machine what it claims",
    "cache": "what is kept in the cache folder, and clearing it",
    "run": "load a model, run it on the chosen backends, and say what ran where",
}

# Packages that a command may find missing -> what to install.
INSTALL = {
    "accelerate": "'attnplat[demo]'",
    "filelock": "filelock",
    "gguf": "'attnplat[demo]'",
    "packaging": "packaging",
    "platformdirs": "platformdirs",
    "safetensors": "'attnplat[transformers]'",
    "torch": "torch",
    "transformers": "'attnplat[transformers]'",
}

EXIT_OK, EXIT_NO, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


def program() -> int:
    """`attnplat` as a process of its own."""
    # What imports leave behind is not garbage; looking for some takes a tenth of a light start.
    gc.set_threshold(50_000)
    for stream in (sys.stdout, sys.stderr):
        # A name of a device or a folder may hold what a terminal's encoding has not.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is the result."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except AttnplatError as error:
        print(f"attnplat: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as error:
        if error.name not in INSTALL:
            raise
        print(
            f"attnplat: the package {error.name} is needed for this and is not installed; "
            f"pip install {INSTALL[error.name]}",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("attnplat: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _dispatch(arguments: list[str]) -> int:
    from attnplat.config.options import split_options

    attention, rest = split_options(arguments)
    parser = _parser(_named_command(rest))
    args = parser.parse_args(rest)
    if args.command is None:
        parser.print_help()
        return EXIT_OK
    args.attention = attention
    code: int = args.handler(args)
    return code


def _named_command(arguments: Sequence[str]) -> str | None:
    return next((a for a in arguments if not a.startswith("-")), None)


def _parser(named: str | None) -> argparse.ArgumentParser:
    """The parser; only the named command's module is imported, since each start pays for it."""
    from attnplat import __version__

    parser = argparse.ArgumentParser(
        prog="attnplat",
        description="Which attention kernel each layer should use on this machine, and why.",
        epilog="Options of the attention config are taken by every command: "
        "--attention-config JSON, --attention-config.FIELD VALUE (-ac for short), "
        "--attention-backend NAME.",
    )
    parser.add_argument("--version", action="version", version=f"attnplat {__version__}")
    # Without `prog`, argparse would ask for the terminal's size through half of the library.
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog=parser.prog)
    if named in COMMANDS:
        help_text = COMMANDS[named]
        command = commands.add_parser(named, help=help_text, description=help_text)
        module = import_module(f"attnplat.cli.{named}")
        module.add_arguments(command)
        command.set_defaults(handler=module.run)
    else:
        for name, help_text in COMMANDS.items():
            commands.add_parser(name, help=help_text, description=help_text)
    return parser
