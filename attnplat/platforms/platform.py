"""A platform: a probe plus two tables, bound to one device, what is installed, and wishes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from attnplat.backends.backend import Mark
from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import IndexerConfig, LayerConfig
from attnplat.config.run import RunContext
from attnplat.errors import ConfigError, NoBackendError, PackageError, SimulatedDeviceError
from attnplat.notices import logger
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.selection import Selection, Tables, select
from attnplat.platforms.world import World

if TYPE_CHECKING:
    from attnplat.backends.indexer import IndexerImpl
    from attnplat.backends.interface import AttentionImpl
    from attnplat.platforms.planning import ModelPlan


@dataclass(frozen=True, repr=False)
class Platform:
    """One device of one platform: asks the tables, and loads what they choose.

    Attributes:
        device: the device, real or simulated.
        inventory: what is installed, or assumed for a simulated device.
        tables: the platform's facts and taste.
        wishes: the attention config that applies when a call gives none.
        run: facts about the run that apply when a call gives none.
        torch_type: what torch calls a plugin's devices; None for attnplat's own platforms.
    """

    device: DeviceInfo
    inventory: Inventory
    tables: Tables
    wishes: AttentionConfig = field(default_factory=AttentionConfig)
    run: RunContext = field(default_factory=RunContext)
    torch_type: str | None = None

    def __repr__(self) -> str:
        # The tables alone would fill pages.
        return f"Platform({self.device})"

    @property
    def name(self) -> str:
        """`cuda`, `rocm`, `cpu`, or a plugin's name."""
        return str(self.device.platform)

    @property
    def torch_device(self) -> str:
        """The device's name in torch; AMD's devices are called `cuda` there too."""
        kind = self.torch_type or ("cpu" if self.name == "cpu" else "cuda")
        return kind if kind == "cpu" else f"{kind}:{self.device.index}"

    def world(
        self, attention: AttentionConfig | None = None, run: RunContext | None = None
    ) -> World:
        """Everything a choice on this device depends on; `attention` beats the own wishes."""
        if attention is None and run is None:
            return self._own_world
        _check_type("attention", attention, AttentionConfig)
        _check_type("run", run, RunContext)
        wishes = self.wishes if attention is None else attention.merged_over(self.wishes)
        return World(self.device, self.inventory, run or self.run, wishes)

    @cached_property
    def _own_world(self) -> World:
        # One world for all layers of a model: what depends on it alone is settled in it once.
        return World(self.device, self.inventory, self.run, self.wishes)

    def select(
        self,
        config: LayerConfig,
        attention: AttentionConfig | None = None,
        world: World | None = None,
        *,
        run: RunContext | None = None,
        allow_reference: bool = False,
    ) -> Selection:
        """Decide for one layer, with every reason. Pure; works for simulated devices.

        Args:
            config: what the layer asks for.
            attention: the user's wishes, over the platform's own.
            world: the whole world instead, for those who keep their own.
            run: facts about the run.
            allow_reference: let REFERENCE be chosen automatically on an accelerator.
        """
        if world is None:
            world = self.world(attention, run)
        elif attention is not None:
            world = world.replace(wishes=attention)
        return select(self.tables, config, world, allow_reference=allow_reference)

    def plan_model(
        self,
        configs: Iterable[LayerConfig],
        attention: AttentionConfig | None = None,
        *,
        run: RunContext | None = None,
        allow_reference: bool = False,
    ) -> ModelPlan:
        """Decide for all layers of a model together: one KV layout and block size for all.

        `configs` holds one config per distinct kind of layer, in model order. Pure; works
        for simulated devices.
        """
        from attnplat.platforms.planning import plan_model

        world = self.world(attention, run)
        return plan_model(
            [select(self.tables, c, world, allow_reference=allow_reference) for c in configs]
        )

    @overload
    def get_attn_backend(  # type: ignore[overload-overlap]
        self,
        config: IndexerConfig,
        attention: AttentionConfig | None = None,
        *,
        run: RunContext | None = None,
        allow_reference: bool = False,
    ) -> type[IndexerImpl]: ...

    @overload
    def get_attn_backend(
        self,
        config: LayerConfig,
        attention: AttentionConfig | None = None,
        *,
        run: RunContext | None = None,
        allow_reference: bool = False,
    ) -> type[AttentionImpl]: ...

    def get_attn_backend(
        self,
        config: LayerConfig,
        attention: AttentionConfig | None = None,
        *,
        run: RunContext | None = None,
        allow_reference: bool = False,
    ) -> type[AttentionImpl] | type[IndexerImpl]:
        """Select, then load the implementation of the first accepted backend.

        Raises:
            NoBackendError: nothing fits; carries the Selection with every reason.
            SimulatedDeviceError: the device is not here; `select()` answers for it.
            PackageError: a plugin's backend that was asked for by name cannot be imported. One
                that was not is passed over, and that is told.
        """
        selection = self.select(config, attention, run=run, allow_reference=allow_reference)
        chosen = selection.chosen
        if chosen is None:
            raise NoBackendError(selection)
        if self.device.simulated:
            raise SimulatedDeviceError(
                f"{self.device} is simulated: {chosen.name} would be chosen and cannot run here; "
                "use select(config) for the decision, or current_platform() for this machine"
            )
        return load_first(selection)

    def mark(self, name: str, operation: Any) -> Mark | None:
        """How far the claims of a backend have been proven on this device."""
        from attnplat.platforms.earned import earned

        backend = self.tables.find(name, operation)
        return earned().proof(backend, operation, self.device).mark if backend else None

    def replace(self, **changes: Any) -> Platform:
        """A copy with the given parts changed."""
        return replace(self, **changes)


def load_first(selection: Selection) -> type[AttentionImpl] | type[IndexerImpl]:
    """The implementation of the first accepted backend that can be imported, and the log of it.

    attnplat's own are there; a plugin's may turn out broken when its kernels are imported.
    """
    first, *others = selection.accepted
    try:
        loaded: type[AttentionImpl] | type[IndexerImpl] = first.load()
    except PackageError as error:
        if selection.requested is not None or not others:
            raise
        logger().warning("%s; it is passed over", error)
        return load_first(replace(selection, accepted=tuple(others)))
    log_choice(selection)
    return loaded


def _check_type(name: str, value: Any, wanted: type[Any]) -> None:
    if value is not None and not isinstance(value, wanted):
        raise ConfigError(f"{name} is {value!r}; it takes {wanted.__name__}(...) or None")


def log_choice(selection: Selection) -> None:
    """One INFO line on what was chosen and why; a WARNING where it is the last resort."""
    chosen = selection.chosen
    assert chosen is not None
    because = (
        f"the {selection.requested_by} asked for it"
        if selection.requested is not None
        else selection.row.because  # type: ignore[union-attr]
    )
    told = logger()
    tell = told.warning if chosen.last_resort and not selection.requested else told.info
    tell("%s for %s: %s", chosen.name, selection.config.operation, because)
