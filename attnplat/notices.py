"""What attnplat tells a program's user: through the logger named `attnplat`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger


def logger() -> Logger:
    """attnplat's logger."""
    import logging  # when something is told: each start of a light command would pay for it

    return logging.getLogger("attnplat")


@cache
def tell_once(notice: str) -> None:
    """A warning, however often it is asked for."""
    logger().warning("%s", notice)
