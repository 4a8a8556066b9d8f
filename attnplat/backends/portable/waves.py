"""Copying the pages of many groups at once, as much as fits in a bounded scratch buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnplat.backends.form import AttentionForm
from attnplat.backends.portable.gather import copy_pages
from attnplat.backends.portable.groups import Group

WAVE_ELEMENTS = 1 << 22
"""Key elements copied before they are used. Enough to make the fixed cost of a copy small,
little enough that scratch stays at some tens of MiB."""


@dataclass(frozen=True)
class Heads:
    """A run of key-value heads, `first` to `last`, with their query heads."""

    first: int
    last: int
    group_size: int

    @property
    def query(self) -> slice:
        """Their query heads."""
        return slice(self.first * self.group_size, self.last * self.group_size)

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, eq=False)
class Part:
    """One group and a run of its heads, whose pages start at page `offset` of their wave."""

    group: Group
    heads: Heads
    offset: int

    @property
    def num_pages(self) -> int:
        """Pages of single heads that it copies."""
        return self.group.blocks.numel() * len(self.heads)

    def dense(self, copied: torch.Tensor) -> torch.Tensor:
        """Its [requests, kv heads, keys, size] in what its wave has copied; 0 without a key."""
        group, size = self.group, copied.shape[-1]
        own = copied[self.offset : self.offset + self.num_pages]
        rows = own.reshape(group.size, len(self.heads), group.blocks.shape[1] * own.shape[1], size)
        if group.dead is not None:
            request, key = group.dead
            # A number of Python's would be sent to an accelerator, and the sending waited for.
            rows[request, :, key] = rows.new_zeros(())
        return rows[:, :, group.start : group.start + group.num_keys]


@dataclass(frozen=True, eq=False)
class Wave:
    """Parts whose pages are copied together.

    `blocks` and `heads`, int64, name the pages of single heads in the order of the parts.
    """

    parts: tuple[Part, ...]
    blocks: torch.Tensor
    heads: torch.Tensor

    @classmethod
    def of(cls, parts: list[Part]) -> Wave:
        """The wave of these parts."""
        blocks, heads = [], []
        for part in parts:
            table = part.group.blocks
            own = torch.arange(part.heads.first, part.heads.last, device=table.device)
            shape = (table.shape[0], len(part.heads), table.shape[1])
            blocks.append(table[:, None, :].expand(shape).flatten())
            heads.append(own[None, :, None].expand(shape).flatten())
        return cls(tuple(parts), torch.cat(blocks), torch.cat(heads))

    def copy(self, plane: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Its pages of `plane`, [pages, block_size, size], at the front of `scratch` (uint8)."""
        tokens, size = plane.shape[2:]
        count = len(self.blocks) * tokens * size
        into = scratch[: count * plane.dtype.itemsize].view(plane.dtype)
        into = into.view(len(self.blocks), tokens, size)
        if count:
            copy_pages(plane, self.blocks, self.heads, into)
        return into


def waves_of(
    groups: tuple[Group, ...], form: AttentionForm, page: int, *, separate: bool
) -> tuple[Wave, ...]:
    """The groups in waves of at most `WAVE_ELEMENTS` key elements, or one head of one group.

    `separate`: one group a wave, so that its copies lie at the same alignment whatever its
    mates (matrix products may round differently at another).
    """
    waves: list[Wave] = []
    parts: list[Part] = []
    size = page * max(form.head_size, form.v_head_size)
    offset = 0
    for group, heads in _head_runs(groups, form, size):
        part = Part(group, heads, offset)
        full = separate or (offset + part.num_pages) * size > WAVE_ELEMENTS
        if parts and full:
            waves.append(Wave.of(parts))
            parts, offset = [], 0
            part = Part(group, heads, 0)
        parts.append(part)
        offset += part.num_pages
    return (*waves, Wave.of(parts)) if parts else tuple(waves)


def _head_runs(
    groups: tuple[Group, ...], form: AttentionForm, size: int
) -> Iterator[tuple[Group, Heads]]:
    """Each group with all its heads, or in runs of fewer where all would be too many."""
    for group in groups:
        per_head = max(group.blocks.numel() * size, 1)
        step = max(1, min(form.num_kv_heads, WAVE_ELEMENTS // per_head))
        for first in range(0, form.num_kv_heads, step):
            last = min(first + step, form.num_kv_heads)
            yield group, Heads(first, last, form.group_size)
