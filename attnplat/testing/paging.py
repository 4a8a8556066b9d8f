"""Where a scene's tokens are in a paged cache, and the memory of that cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attnplat.backends.batch import PageTable
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache, KVCacheLayout, KVCacheSpec
from attnplat.testing.scenes import Arrangement, Scene
from attnplat.testing.truth import Request

GAP = 3
"""Elements of poison behind each row of a spread cache."""


def new_positions(scene: Scene, request: Request) -> range:
    """Positions of the tokens that this step writes: an encoder's all, else the queries'."""
    first = 0 if scene.cross else max(0, request.seq_len - request.query_len)
    return range(first, request.seq_len)


LARGEST_IMAGE = 1 << 18
"""Elements of a plane up to which its contents are kept for the next time."""


def paging_of(scene: Scene, how: Arrangement) -> Paging:
    """The scene's paging, found once."""
    key = ("paging", str(how))
    if key not in scene.memory:
        scene.memory[key] = Paging(scene, how)
    found = scene.memory[key]
    assert isinstance(found, Paging)
    return found


@dataclass(frozen=True, eq=False)
class Paging:
    """Physical blocks of a scene, and what its tables say."""

    scene: Scene
    how: Arrangement

    @cached_property
    def images(self) -> dict[Any, tuple[torch.Tensor, torch.Tensor]]:
        """Contents of planes before and after the step, by plane and format."""
        return {}

    @cached_property
    def counts(self) -> list[int]:
        """Blocks that each request needs."""
        return [-(-n // self.how.block_size) for n in self.scene.seq_lens]

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        if self.how.blocks is not None:
            return self.how.num_blocks
        return sum(self.counts) + self.how.spare

    @cached_property
    def _order(self) -> list[int]:
        order = list(range(self.num_blocks))
        random.Random(self.how.order).shuffle(order)
        return order

    @cached_property
    def blocks(self) -> list[list[int]]:
        """Physical blocks of each request."""
        if self.how.blocks is not None:
            return [list(row) for row in self.how.blocks]
        rest = iter(self._order)
        return [[next(rest) for _ in range(count)] for count in self.counts]

    @property
    def tail(self) -> int:
        """What table entries hold that must not be read."""
        if self.how.tail != "spare":
            return self.how.tail
        return self._order[-1] if self.how.blocks is None and self.how.spare else -1

    @cached_property
    def reached(self) -> list[list[bool]]:
        """Whether any query may read each block of each request."""
        found = []
        size = self.how.block_size
        for sight, count in zip(self.scene.sights, self.counts, strict=True):
            keys = sight.in_reach()
            padded = torch.zeros(count * size, dtype=torch.bool)
            padded[: len(keys)] = keys
            found.append(padded.view(count, size).any(1).tolist())
        return found

    @cached_property
    def firsts(self) -> list[int]:
        """The first block in each row of the table."""
        if not self.how.rolling:
            return [0] * len(self.blocks)
        return [row.index(True) if True in row else 0 for row in self.reached]

    def table(self, device: torch.device) -> PageTable:
        """The page table, with columns and rows to spare."""
        table, slots, first = (
            None if tensor is None else tensor.to(device, copy=True) for tensor in self._table
        )
        assert table is not None
        return PageTable(
            block_table=table,
            block_size=self.how.block_size,
            slot_mapping=slots,
            first_block=first,
        )

    @cached_property
    def _table(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The block table, slots and first blocks, on the CPU."""
        how, pad = self.how, self.how.padding_requests
        width = (
            max([c - f for c, f in zip(self.counts, self.firsts, strict=True)], default=0)
            + how.columns
        )
        rows = [[self.tail] * width for _ in range(len(self.blocks) + pad)]
        for r, own in enumerate(self.blocks):
            for b, block in enumerate(own[: self.counts[r]]):
                column = b - self.firsts[r]
                if column >= 0 and (self.reached[r][b] or how.blocks is not None):
                    rows[r][column] = block
        table = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width)
        first = torch.tensor([*self.firsts, *[0] * pad], dtype=torch.int32)
        slots = None if how.write == "done" else self.slots()
        return table, slots, first if how.rolling else None

    def slots(self) -> torch.Tensor:
        """The slot of every token that this step writes, int64."""
        slots = [
            self.at(r, torch.arange(new.start, new.stop))
            for r, request in enumerate(self.scene.requests)
            for new in [new_positions(self.scene, request)]
        ]
        padding = 0 if self.scene.cross else self.how.padding
        end = torch.full((padding,), self.how.padding_slots, dtype=torch.int64)
        return torch.cat([*slots, end])

    def at(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens of a request are: block * block_size + offset, int64."""
        size = self.how.block_size
        blocks = torch.tensor(self.blocks[request], dtype=torch.int64)
        return blocks[positions // size] * size + positions % size

    def homes(self, *, new: bool) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(request, positions, slots) of tokens to store: the step's new ones, or the others.

        Others in blocks that no query may read are left out, unless the caller chose blocks.
        """
        size = self.how.block_size
        for r, request in enumerate(self.scene.requests):
            positions = torch.arange(request.seq_len)
            written = new_positions(self.scene, request)
            first = written.start if self.how.write != "done" else request.seq_len
            if new:
                positions = positions[first:]
            else:
                positions = positions[:first]
                if self.how.blocks is None:
                    readable = torch.tensor(self.reached[r], dtype=torch.bool)
                    positions = positions[readable[positions // size]]
            yield r, positions, self.at(r, positions)


@dataclass(frozen=True, eq=False)
class PagedMemory:
    """The planes of a cache: each its memory and its view [blocks, heads, tokens, elements].

    `fresh`: nothing has been stored in it.
    """

    cache: KVCache
    planes: dict[str, tuple[torch.Tensor, torch.Tensor]]
    fresh: bool = False

    @classmethod
    def allocate(cls, paging: Paging, impl: AttentionImpl, device: torch.device) -> PagedMemory:
        """Fresh memory, all poison, in the format `impl` wants."""
        how = paging.how
        spec = impl.kv_cache_spec(how.block_size, how.layout)
        made = {
            name: plane(spec, paging.num_blocks, width, how, device)
            for name, width in spec.widths.items()
        }
        cache = KVCache(spec=spec, **{name: view for name, (_, view) in made.items()})
        planes = {n: (m, by_block(v, spec.layout)) for n, (m, v) in made.items()}
        return cls(cache, planes, fresh=True)

    def fill(self, paging: Paging) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Store the scene's tokens; (name, memory, what it must hold after the step)."""
        found = []
        for name, (memory, view) in self.planes.items():
            key = (name, memory.shape, self.cache.spec)
            if self.fresh and key in paging.images:
                before, after = (image.to(memory.device) for image in paging.images[key])
                memory.copy_(before)
            else:
                before, after = self._store(paging, name, memory, view)
                if self.fresh and memory.numel() <= LARGEST_IMAGE:
                    paging.images[key] = (before.cpu(), after.cpu())
            found.append((name, memory, after))
        return found

    def _store(
        self, paging: Paging, name: str, memory: torch.Tensor, view: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory with the scene's earlier tokens in it, and a copy with the new ones too."""
        scene, kind = paging.scene, name.removesuffix("_scales")
        rows = [scene.rows(kind, request) for request in scene.requests]
        width = self.cache.spec.widths[kind]
        # Scales that a page keeps apart are the last bytes of a row.
        rows = [r[..., width:] if name != kind else r[..., :width] for r in rows]
        _store(view, rows, paging, new=False)
        before = memory.clone()
        _store(view, rows, paging, new=True)
        after = memory.clone()
        memory.copy_(before)
        return before, after


def plane(
    spec: KVCacheSpec, num_blocks: int, width: int, how: Arrangement, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """One plane's memory and the layer's view of it, axes in the layout's order."""
    sizes = {"L": how.layers, "B": num_blocks, "H": spec.num_kv_heads, "N": spec.block_size}
    gap = GAP if how.spread else 0
    letters = spec.layout.value
    shape = [sizes.get(letter, width + gap) for letter in letters]
    count = 1
    for n in shape:
        count *= n
    memory = torch.full((count + how.offset,), _poison(spec, how), dtype=spec.dtype, device=device)
    pool = memory[how.offset :].view(shape)
    return memory, pool.select(letters.index("L"), how.layers - 1)[..., :width]


def _poison(spec: KVCacheSpec, how: Arrangement) -> float:
    """What fills a plane: for coded rows, a byte that is NaN both as a code and in a scale."""
    if how.poison is None:
        return 0
    if spec.is_plain:
        return how.poison
    return 0x80 if spec.encoding in (Encoding.FP8_E4M3FNUZ, Encoding.FP8_TH_FNUZ) else 0xFF


def by_block(view: torch.Tensor, layout: KVCacheLayout) -> torch.Tensor:
    """A layer's view as [blocks, heads, tokens, elements]."""
    letters = layout.value.replace("L", "")
    return view.permute([letters.index(axis) for axis in "BHNC"])


def _store(view: torch.Tensor, rows: list[torch.Tensor], paging: Paging, *, new: bool) -> None:
    size = paging.how.block_size
    for request, positions, slots in paging.homes(new=new):
        if len(slots):
            block, offset = (slots // size).to(view.device), (slots % size).to(view.device)
            view[block, :, offset] = rows[request][positions].to(view.device)
