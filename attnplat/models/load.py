"""Find and read a model's config.json, or take a known shape by name."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

from attnplat.errors import ModelFileError, UnknownNameError
from attnplat.models.shapes import SHAPES

CONFIG_NAME = "config.json"
MAX_BYTES = 64 << 20  # the largest published config files are a few MiB


def known_shapes() -> tuple[str, ...]:
    """The names that `load_config` knows without a file, sorted."""
    return tuple(sorted(SHAPES))


def load_config(path_or_name: str | os.PathLike[str]) -> dict[str, Any]:
    """The config of a model as a plain dict.

    Args:
        path_or_name: a folder that holds a config.json, a config file, or the name of a
            known shape in any case. What exists on disk wins over a name.

    Raises:
        ModelFileError: there is no such file, or it is not a JSON object.
        UnknownNameError: neither a path nor the name of a known shape; names the closest.
    """
    text = os.fspath(path_or_name)
    if not text:
        raise ModelFileError("the model is an empty string; it takes a path or a shape's name")
    path = Path(text)
    try:
        if path.is_dir():
            return _read(_inside(path))
        if path.exists():
            return _read(path)
    except (OSError, ValueError) as error:  # names too long, with NUL bytes, forbidden folders
        raise ModelFileError(f"cannot read {text!r}: {_reason(error)}") from None
    return _shape(text, path_or_name)


def _shape(text: str, given: object) -> dict[str, Any]:
    name = text.strip().lower().replace("_", "-")
    if name in SHAPES:
        return deepcopy(SHAPES[name])
    if not isinstance(given, str) or text.endswith(".json") or text[0] in "./~\\":
        raise ModelFileError(f"there is no file or folder {text!r}")
    hint = "or give a folder that holds a config.json; nothing is downloaded"
    raise UnknownNameError("model", text, SHAPES, hint=hint)


def _inside(folder: Path) -> Path:
    path = folder / CONFIG_NAME
    if path.is_file():
        return path
    others = sorted(p.name for p in folder.iterdir())[:8]
    found = ", ".join(others) if others else "nothing"
    raise ModelFileError(f"{str(folder)!r} holds no {CONFIG_NAME}; it holds {found}")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelFileError(f"{str(path)!r} is not a regular file")
    if path.stat().st_size > MAX_BYTES:
        raise ModelFileError(f"{str(path)!r} is over {MAX_BYTES >> 20} MiB; a config is small")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelFileError(
            f"{str(path)!r} is not valid JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}"
        ) from None
    except UnicodeDecodeError:
        raise ModelFileError(f"{str(path)!r} is not text in UTF-8") from None
    except RecursionError:
        raise ModelFileError(f"{str(path)!r} is nested too deeply for a config") from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{str(path)!r} holds a JSON {type(values).__name__}, not an object")
    return values


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
