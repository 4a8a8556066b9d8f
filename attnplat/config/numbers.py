"""What counts as a number where one is asked for."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is an integer; 3.0 and true are none, though they equal one."""
    return isinstance(value, int) and not isinstance(value, bool)
