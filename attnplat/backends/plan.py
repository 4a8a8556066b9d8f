"""How one step runs: the plan that layers share, and the tensors of one call."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attnplat.backends.batch import Batch, BatchBounds, HostLengths, PageTable
from attnplat.backends.fixed_step import FixedStep
from attnplat.backends.form import MaskRules
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.handle import Handle
from attnplat.backends.kv_cache import KVCache, Slots
from attnplat.backends.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class PlanKey:
    """All that a schedule depends on besides batch and pages. Equal keys share a plan."""

    name: str
    device: str
    mask: MaskRules
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: str
    encoding: Encoding
    traits: frozenset[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A backend's private part of a plan; each subclasses it.

    `highest_block` is the largest block id the schedule reads, where the host knows it.
    """

    highest_block: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How one step's batch runs through every layer of one plan key.

    Read-only: it may run on many layers, many times, in any order, but not on two threads or
    streams at once, as its runs share a workspace. The device tensors of its batch and pages
    must stay alive and unchanged until the last run has been enqueued.

    Attributes:
        key: the `plan_key` of the layers it is for.
        batch, pages: what it was made from; no pages means keys and values come with the call.
        lengths: the exact lengths, where the host has them.
        slots: where new tokens are written; None when this step writes none.
        bounds: the limits that `update` must keep, or None.
        validate: whether values are looked at, too.
        workspace: the caller's, or None.
        schedule: the backend's own part.
        fixed: the memory that updates fill, where they are in place.
        handle: what stands for the plan in a compiled graph.
    """

    key: PlanKey
    batch: Batch
    pages: PageTable | None
    lengths: HostLengths | None
    slots: Slots | None
    bounds: BatchBounds | None
    validate: bool
    workspace: Workspace | None
    schedule: Schedule
    fixed: FixedStep | None = None
    handle: Handle = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", Handle(self))

    @property
    def in_place(self) -> bool:
        """Whether `update` fills this plan anew, as a device graph needs it, or makes another."""
        return self.fixed is not None

    @property
    def num_rows(self) -> int:
        """Query rows of the step, padding included: what a call brings, or more."""
        return self.batch.num_tokens if self.fixed is None else self.fixed.sizes.max_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The checked tensors of one `forward`, as a backend receives them.

    Attributes:
        q: [num_tokens or more, num_heads, head_size].
        cache: the layer's cache, or None: then `k` and `v` hold the keys and values.
        k, v: [rows, num_kv_heads, head_size | v_head_size]; None when a cache has them.
        sinks, alibi_slopes, position_bias, topk_indices: as given to `forward`, or None.
        out: [num_tokens or more, num_heads, v_head_size], to be written.
        lse: float32 [num_tokens or more, num_heads], to be written, or None.
        k_scale, v_scale: the cache's scales, float32 [1] or [num_kv_heads], or None for 1.
    """

    q: torch.Tensor
    cache: KVCache | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    position_bias: torch.Tensor | None
    topk_indices: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
