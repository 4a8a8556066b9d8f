"""A mapping for frozen values."""

from __future__ import annotations

from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenMap(dict[K, V]):
    """A hashable dict that refuses changes: frozen values hold their mappings in it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("this mapping belongs to a frozen value and cannot be changed")

    __setitem__ = __delitem__ = update = pop = clear = setdefault = popitem = _refuse
    __ior__ = _refuse
