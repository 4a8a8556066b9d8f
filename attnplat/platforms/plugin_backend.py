"""A backend out of a plugin: judged like any other, and whatever it does wrong stays its own.

Declarations are code too: a limit, a predicate or an import may raise anything. In a plugin's
backend that is one more reason to refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from attnplat.backends.backend import Backend, Rejection
from attnplat.config.names import Operation
from attnplat.errors import PackageError

NOBODY = "an unknown plugin"


@dataclass(frozen=True, kw_only=True)
class PluginBackend(Backend):
    """A backend that a plugin declares.

    Attributes:
        plugin: the distribution it comes from, with its version.
        unusable: why nothing of it is used, with the fix; "" where all is well.
    """

    plugin: str = NOBODY
    unusable: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    def resolve(self, world: Any) -> Backend:
        """As of every backend; one that cannot be settled is unusable in this world."""
        if self.unusable:
            return self
        try:
            return super().resolve(world)
        except Exception as error:
            return without_contents(self.name, self.plugin, self._failed("its limits", error))

    def refuse(self, *args: Any, **kwargs: Any) -> tuple[Rejection, ...]:
        """As of every backend."""
        return self._guarded(super().refuse, *args, **kwargs)

    def standing_reasons(self, world: Any) -> tuple[Rejection, ...]:
        """As of every backend."""
        return self._guarded(super().standing_reasons, world)

    def reasons_against(self, *args: Any, **kwargs: Any) -> tuple[Rejection, ...]:
        """As of every backend."""
        return self._guarded(super().reasons_against, *args, **kwargs)

    def load(self) -> type[Any]:
        """The implementation's class. Raises PackageError, whatever its import did."""
        if self.unusable:
            raise PackageError(f"{self.name} cannot be used: {self.unusable}")
        try:
            return super().load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            what = f"importing its implementation ({self.loads})"
            raise PackageError(f"{self.name}: {self._failed(what, error)}") from error

    def _guarded(
        self, ask: Callable[..., tuple[Rejection, ...]], *args: Any, **kwargs: Any
    ) -> tuple[Rejection, ...]:
        if self.unusable:
            return (self._rejection(self.unusable),)
        try:
            return ask(*args, **kwargs)
        except Exception as error:
            return (self._rejection(self._failed("its declaration", error)),)

    def _rejection(self, why: str) -> Rejection:
        return Rejection(self.name, "package", self.plugin, None, why, "device")

    def _failed(self, what: str, error: BaseException) -> str:
        return failed(self.plugin, what, error)


def failed(plugin: str, what: str, error: BaseException) -> str:
    """A sentence on what went wrong in a plugin, and what can be done."""
    text = str(error).strip().splitlines()
    told = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return f"{what} in the plugin {plugin} failed with {told}; update or uninstall the plugin"


def of_plugin(backend: Backend, plugin: str) -> PluginBackend:
    """The same declaration, as the plugin's."""
    if isinstance(backend, PluginBackend):
        return replace(backend, plugin=plugin)
    values = {f.name: getattr(backend, f.name) for f in fields(backend) if f.init}
    return PluginBackend(**values, plugin=plugin)


def without_contents(name: str, plugin: str, why: str) -> PluginBackend:
    """In the place of a declared backend that cannot be had: refuses every layer and says why."""
    return PluginBackend(
        name=name,
        summary=f"of the plugin {plugin}, which cannot be used",
        serves=frozenset[Operation](),
        loads="",
        plugin=plugin,
        unusable=why,
    )
