"""What is under test: an implementation, the library functions above it, and its limits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from attnplat.backends.backend import Backend
from attnplat.backends.checks import same_device
from attnplat.backends.formats import element_codec, rows
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.formats.pages import Pages, PageShape, swizzle_scales, unswizzle_scales
from attnplat.backends.indexer import IndexerImpl
from attnplat.backends.interface import AttentionImpl
from attnplat.config.backend_names import parse_backend
from attnplat.config.layer import IndexerConfig, LayerConfig
from attnplat.errors import ConfigError, UnknownNameError
from attnplat.ops import merge, topk
from attnplat.ops.cascade import Cascade
from attnplat.ops.context_parallel import Shard, combine_shards
from attnplat.ops.mla import MlaLayer, mla_attend
from attnplat.platforms import platform_for
from attnplat.platforms.world import World
from attnplat.testing.scenes import stored_encoding


@dataclass(frozen=True)
class Library:
    """What is beside the kernels and that the suite runs, too: merging, splitting, codecs."""

    merge_states: Callable[..., tuple[torch.Tensor, torch.Tensor]] = merge.merge_states
    apply_sinks: Callable[..., tuple[torch.Tensor, torch.Tensor]] = merge.apply_sinks
    encode_rows: Callable[..., torch.Tensor] = rows.encode_rows
    decode_rows: Callable[..., torch.Tensor] = rows.decode_rows
    amax_scale: Callable[..., torch.Tensor] = rows.amax_scale
    relabel_fn_as_fnuz: Callable[..., torch.Tensor] = element_codec.relabel_fn_as_fnuz
    relabel_fnuz_as_fn: Callable[..., torch.Tensor] = element_codec.relabel_fnuz_as_fn
    swizzle_scales: Callable[..., torch.Tensor] = swizzle_scales
    unswizzle_scales: Callable[..., torch.Tensor] = unswizzle_scales
    pages: type[Any] = Pages
    page_shape: type[Any] = PageShape
    combine_shards: Callable[..., tuple[torch.Tensor, torch.Tensor]] = combine_shards
    shard: type[Any] = Shard
    cascade: type[Any] = Cascade
    mla_layer: type[Any] = MlaLayer
    mla_attend: Callable[..., torch.Tensor] = mla_attend
    physical_topk: Callable[..., torch.Tensor] = topk.physical_topk
    shard_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] = topk.shard_topk
    merge_topk: Callable[..., torch.Tensor] = topk.merge_topk


class NoAttention(AttentionImpl):
    """In the place of an implementation where a backend has none: it runs nothing."""

    name = "NONE"
    operations = frozenset()
    features = frozenset()


@dataclass(frozen=True)
class Subject:
    """An implementation on a device.

    Attributes:
        name: what reports call it.
        impl: the class; one that runs nothing for a backend of indexers alone.
        device: where it runs.
        indexer: its class for sparse indexers, or None.
        declared: its declarations, resolved for `world`, one an operation; none for a class
            that no catalog knows.
        world: the machine, as selection sees it.
        library: the functions above the kernels.
    """

    name: str
    impl: type[AttentionImpl]
    device: torch.device
    indexer: type[IndexerImpl] | None = None
    declared: tuple[Backend, ...] = ()
    world: World | None = None
    library: Library = field(default_factory=Library)

    def replace(self, **changes: Any) -> Subject:
        """A copy with fields changed."""
        return replace(self, **changes)

    def refusal(self, config: LayerConfig, encoding: Encoding | None = None) -> str | None:
        """Why it says that it does not run such a layer, or None: then it must run it."""
        if isinstance(config, IndexerConfig):
            if self.indexer is None:
                return "has no indexer"
            operations, features = frozenset({config.operation}), self.indexer.features
            encodings = self.indexer.encodings
        else:
            operations, features = self.impl.operations, self.impl.features
            encodings = self.impl.encodings
        if config.operation not in operations:
            return f"runs {', '.join(sorted(operations)) or 'no attention'}, not {config.operation}"
        if missing := config.needs - features:
            return f"does not take {', '.join(sorted(missing))}"
        stored = stored_encoding(config, encoding)
        if stored not in encodings:
            return f"does not store {stored.value}"
        for backend in self.declared:
            if config.operation in backend.serves and self.world is not None:
                reasons = backend.refuse(config, self.world)
                return str(reasons[0]) if reasons else None
        return f"does not declare {config.operation}" if self.declared else None


def subject_of(what: str | type[AttentionImpl], device: str = "cpu") -> Subject:
    """A backend by name, `module:Class`, or a class, on a device of this machine.

    Raises:
        UnknownNameError: a name that no backend of the device's platform has.
        ConfigError: a backend without an adapter, or a class that is no implementation.
        DeviceError: no such device here.
    """
    if isinstance(what, str) and ":" not in what:
        return _catalogued(what, device)
    return _foreign(what, device)


def _catalogued(name: str, device: str) -> Subject:
    platform = platform_for(device)
    catalog, world = platform.tables.catalog, platform.world()
    known = {b.name for b in catalog if b.loads}
    try:
        canonical = str(parse_backend(name))
    except UnknownNameError:
        canonical = name
    found = [b for b in catalog if b.name == canonical]
    if not found:
        raise UnknownNameError(f"backend of {platform.name} with an adapter", name, known)
    able = [b for b in found if b.loads is not None]
    if not able:
        raise ConfigError(f"{canonical} has no adapter yet, so there is nothing to check")
    # A plugin that cannot be used says so here.
    kinds = [backend.load() for backend in able]
    attention = [kind for kind in kinds if issubclass(kind, AttentionImpl)]
    indexers = [kind for kind in kinds if issubclass(kind, IndexerImpl)]
    return Subject(
        name=canonical,
        impl=attention[0] if attention else NoAttention,
        device=same_device(platform.torch_device),
        indexer=indexers[0] if indexers else None,
        declared=tuple(b.resolve(world) for b in able),
        world=world,
    )


def _foreign(what: str | type[AttentionImpl], device: str) -> Subject:
    if isinstance(what, str):
        module, _, attribute = what.partition(":")
        try:
            what = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{what!r} cannot be loaded: {error}") from error
    if not (inspect.isclass(what) and issubclass(what, AttentionImpl)):
        raise ConfigError(f"{what!r} is no AttentionImpl; expected module:Class of one")
    if inspect.isabstract(what):
        raise ConfigError(f"{what.__name__} is abstract; it must implement _schedule and _attend")
    platform = platform_for(device)
    return Subject(name=what.__name__, impl=what, device=same_device(platform.torch_device))
