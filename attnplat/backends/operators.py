"""`write_kv` and `forward` as operators of torch, so that a compiler passes over them whole.

A compiled graph holds a call of one of them where the model calls an `AttentionImpl`. Each says
what it writes (the cache, `out`, `lse`), from which the compiler knows that keys are written
before they are read, and that nothing needs a copy. Plans, implementations and the format of a
cache travel as handles.

They are defined with `Library.define`: an operator made by `torch.library.custom_op` costs five
times as much a call. What they do is what the methods do outside of a graph, checks included.
On a torch without opaque objects (before 2.11) a graph ends before each call and begins anew
after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from attnplat.backends.call_checks import CallChecks, NewKV
from attnplat.backends.handle import HANDLE_TYPE, Handle
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.pages import PageTable
from attnplat.backends.plan import Plan

if TYPE_CHECKING:
    from attnplat.backends.interface import AttentionImpl

Tensor = torch.Tensor

_READ = "Tensor? cache_k, Tensor? cache_v, Tensor? cache_k_scales, Tensor? cache_v_scales"
_WRITTEN = (
    "Tensor(a!) cache_k, Tensor(b!)? cache_v, Tensor(c!)? cache_k_scales, "
    "Tensor(d!)? cache_v_scales"
)
_SCALES = "Tensor? k_scale, Tensor? v_scale"
OPTIONS = (
    *("sinks", "alibi_slopes", "position_bias", "topk_indices"),
    *("k_scale", "v_scale", "q_scale", "out_scale"),
)
"""The optional inputs of `forward`, in the operators' order."""

_OPTIONS = ", ".join(f"Tensor? {name}" for name in OPTIONS)
_OUT = "Tensor(e!) out, Tensor(f!)? lse"

SCHEMAS = {
    "write_kv": f"(Handle layer, Handle plan, Handle cache, {_WRITTEN}, Tensor k, Tensor? v, "
    f"{_SCALES}) -> ()",
    "write_kv_at": "(Handle layer, Tensor block_table, Tensor? slot_mapping, SymInt block_size, "
    f"Handle cache, {_WRITTEN}, Tensor k, Tensor? v, {_SCALES}) -> ()",
    "forward": f"(Handle layer, Handle plan, Tensor q, Handle? cache, {_READ}, Tensor? k, "
    f"Tensor? v, {_OPTIONS}, {_OUT}) -> ()",
    "write_and_forward": f"(Handle layer, Handle plan, Tensor q, Handle cache, {_WRITTEN}, "
    f"Tensor k, Tensor? v, {_OPTIONS}, {_OUT}) -> ()",
}
"""The operators by name; `Handle` stands for its type. Arguments are those of the methods, the
cache with its views behind it."""


# What they do ------------------------------------------------------------------------------


def _write_kv(layer: Handle, plan: Handle, cache: Handle, *rest: Any) -> None:
    k, v, k_scale, v_scale = rest[4:]
    where = plan.owner(Plan, "plan")
    _impl(layer).write_kv(_cache(cache, rest[:4]), k, v, where, k_scale=k_scale, v_scale=v_scale)


def _write_kv_at(
    layer: Handle,
    block_table: Tensor,
    slot_mapping: Tensor | None,
    block_size: int,
    cache: Handle,
    *rest: Any,
) -> None:
    k, v, k_scale, v_scale = rest[4:]
    where = PageTable(block_table=block_table, block_size=block_size, slot_mapping=slot_mapping)
    _impl(layer).write_kv(_cache(cache, rest[:4]), k, v, where, k_scale=k_scale, v_scale=v_scale)


def _forward(
    layer: Handle,
    plan: Handle,
    q: Tensor,
    cache: Handle | None,
    cache_k: Tensor | None,
    cache_v: Tensor | None,
    cache_k_scales: Tensor | None,
    cache_v_scales: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    position_bias: Tensor | None,
    topk_indices: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_scale: Tensor | None,
    out_scale: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    found = None
    if cache is not None:
        found = _cache(cache, (cache_k, cache_v, cache_k_scales, cache_v_scales))
    _impl(layer).forward(
        plan.owner(Plan, "plan"),
        q,
        found,
        kv=None if k is None and v is None else cast(NewKV, (k, v)),
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        position_bias=position_bias,
        topk_indices=topk_indices,
        k_scale=k_scale,
        v_scale=v_scale,
        q_scale=q_scale,
        out_scale=out_scale,
        out=out,
        lse=lse,
    )


def _impl(layer: Handle) -> AttentionImpl:
    return cast("AttentionImpl", layer.owner(CallChecks, "layer"))


def _cache(cache: Handle, views: tuple[Tensor | None, ...]) -> KVCache:
    """The cache in the memory that the graph names, which is its own or a compiler's copy."""
    own = cache.owner(KVCache, "cache")
    if all(map(_is_same, views, own.views)):
        return own
    k, v, k_scales, v_scales = views
    assert k is not None
    return KVCache(k=k, v=v, k_scales=k_scales, v_scales=v_scales, spec=own.spec)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two views are one, or are alike on the same memory, as a compiler makes them."""
    if one is other or one is None or other is None:
        return one is other
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


# Telling torch -----------------------------------------------------------------------------


def _define(handle: str) -> torch.library.Library:
    """The library with the operators; they live as long as it does."""
    library = torch.library.Library("attnplat", "FRAGMENT")
    bodies = {
        "write_kv": _write_kv,
        "write_kv_at": _write_kv_at,
        "forward": _forward,
        "write_and_forward": _forward,
    }
    for name, body in bodies.items():
        library.define(name + SCHEMAS[name].replace("Handle", handle))
        library.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"attnplat::{name}", _nothing, lib=library)
    return library


def _nothing(*args: Any) -> None:
    """What an operator gives that only writes."""


LIBRARY = None if HANDLE_TYPE is None else _define(HANDLE_TYPE)


# Calling them from a graph -------------------------------------------------------------------


def call_write_kv(
    impl: AttentionImpl,
    cache: KVCache,
    k: Tensor,
    v: Tensor | None,
    where: PageTable | Plan,
    scales: dict[str, Tensor | None],
) -> None:
    """`impl.write_kv` as a call of an operator."""
    if LIBRARY is None:
        _outside_graphs(impl.write_kv, cache, k, v, where, **scales)
        return
    rest = (cache.handle, *cache.graph_views, k, v, scales["k_scale"], scales["v_scale"])
    if isinstance(where, Plan):
        torch.ops.attnplat.write_kv(impl.handle, where.handle, *rest)
        return
    torch.ops.attnplat.write_kv_at(
        impl.handle, where.block_table, where.slot_mapping, where.block_size, *rest
    )


def call_forward(
    impl: AttentionImpl,
    plan: Plan,
    q: Tensor,
    cache: KVCache | None,
    kv: NewKV | None,
    options: dict[str, Tensor | None],
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """`impl.forward` into `out` and `lse` as a call of an operator."""
    if LIBRARY is None:
        _outside_graphs(impl.forward, plan, q, cache, kv=kv, **options, out=out, lse=lse)
        return
    k, v = (None, None) if kv is None else kv
    views = (None, None, None, None, None) if cache is None else (cache.handle, *cache.graph_views)
    both = cache is not None and kv is not None
    operator = torch.ops.attnplat.write_and_forward if both else torch.ops.attnplat.forward
    given = (options[name] for name in OPTIONS)
    operator(impl.handle, plan.handle, q, *views, k, v, *given, out, lse)


def _call(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return method(*args, **options)


_outside_graphs = _call
if LIBRARY is None:
    _outside_graphs = torch.compiler.disable(
        _call, reason="torch before 2.11 cannot pass a plan through a graph"
    )
