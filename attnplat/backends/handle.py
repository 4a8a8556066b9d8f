"""What stands for a plan or an implementation inside a compiled graph.

A graph passes tensors and numbers. Anything else must be an opaque object, a type that torch
has been told to carry as it is (`torch._library.opaque_object`, from torch 2.11): an input of
the graph like any tensor, so that one graph serves every plan. There is no registry: a handle
points at its owner, and its owner holds it.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from attnplat.errors import PlanMismatchError

T = TypeVar("T")


def _opaque_objects() -> tuple[type, Any, Any]:
    """The metaclass of opaque types, and what registers and names one; plain `type` and None
    where there are none. Torch keeps them private so far."""
    try:
        from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
        from torch._opaque_base import OpaqueBaseMeta
    except ImportError:
        return type, None, None
    return OpaqueBaseMeta, register_opaque_type, get_opaque_type_name


_META, _register, _name_of = _opaque_objects()


class Handle(metaclass=_META):  # type: ignore[metaclass]
    """A weak reference that a compiled graph can pass.

    Weak, since a plan's tensors are to be freed with the plan, and not when Python next looks
    for cycles. Whoever calls with a plan holds it.
    """

    # Star arguments keep torch's schema checks, which try to compile any class that they meet
    # in a call, from giving the owner a type.
    def __init__(self, *owner: object) -> None:
        self._owner = weakref.ref(owner[0])
        self._kind = type(owner[0]).__name__

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        """The handle of the owner's copy, where the owner is being copied too."""
        owner = self._owner()
        return Handle(memo.get(id(owner), owner))

    def __reduce__(self) -> tuple[Any, ...]:
        """As what is gone: an owner stays in its process. Compilers pickle what a graph is made of
        to find it again, and a graph does not depend on whose handles it is called with."""
        return _stands_for_nothing, (self._kind,)

    def owner(self, kind: type[T], name: str) -> T:
        """What it stands for, which must be a `kind`; `name` is the argument that brought it.

        Raises PlanMismatchError when that is gone, or something else.
        """
        found = self._owner()
        if found is None:
            raise PlanMismatchError(
                f"{name} stands for a {self._kind} that is gone; hold the {self._kind} until "
                "the last call with it"
            )
        if not isinstance(found, kind):
            raise PlanMismatchError(f"{name} is a {self._kind}; expected a {kind.__name__}")
        return found


class _Gone:
    """An owner that never was."""


def _stands_for_nothing(kind: str) -> Handle:
    found = Handle(_Gone())
    found._kind = kind
    return found


def _registered() -> str | None:
    """The name that `Handle` has in schemas; None where this torch carries no opaque objects."""
    if _register is None:
        return None
    try:
        _register(Handle, typ="reference")
    except TypeError:
        # What it asks of a class and of its caller has changed from version to version.
        return None
    return str(_name_of(Handle))


HANDLE_TYPE = _registered()
"""What schemas call a `Handle`; None where this torch has no opaque objects (before 2.11)."""
