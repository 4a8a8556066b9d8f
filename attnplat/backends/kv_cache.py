"""The KV cache: its format, its layout, and views on memory that the caller owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from attnplat.backends.batch import PageTable
from attnplat.backends.checks import check_tensor, to_device, torch_dtype
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding
from attnplat.config.names import parse_name
from attnplat.errors import ConfigError, UnknownNameError


class KVCacheLayout(StrEnum):
    """Order of layer, block, head, token (N) and content in memory, outermost first.

    `NHD` and `HND` are older names of the two common ones.
    """

    LBNHC = "LBNHC"
    LBHNC = "LBHNC"
    LHBNC = "LHBNC"
    BLNHC = "BLNHC"
    BLHNC = "BLHNC"
    BHLNC = "BHLNC"
    NHD = "LBNHC"
    HND = "LBHNC"

    @classmethod
    def parse(cls, value: Any) -> KVCacheLayout:
        """The layout that `value` names, old names included, in any case.

        Raises UnknownNameError.
        """
        old = {"nhd": cls.NHD, "hnd": cls.HND}
        if isinstance(value, str) and value.lower() in old:
            return old[value.lower()]
        return parse_name(cls, value, "KV-cache layout")

    @property
    def of_one_layer(self) -> str:
        """The letters without the layer: the axes of one layer's view, in order."""
        return self.value.replace("L", "")


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The format of one layer's cache.

    Attributes:
        encoding: how numbers are stored.
        block_size: tokens per block.
        num_kv_heads, head_size, v_head_size: as in the glossary.
        layout: order of the axes in memory.
        values_in_keys: there is no value plane; v is the first `v_head_size` elements of each
            key row (absorbed MLA).

    Raises:
        ConfigError, UnknownNameError: a value no cache could have.
    """

    encoding: Encoding
    block_size: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    layout: KVCacheLayout = KVCacheLayout.LBHNC
    values_in_keys: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", KVCacheLayout.parse(self.layout))
        object.__setattr__(self, "encoding", parse_name(Encoding, self.encoding, "encoding"))
        for name in ("block_size", "num_kv_heads", "head_size", "v_head_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"KVCacheSpec.{name} is {value!r}; it takes at least 1")
        if self.values_in_keys and self.v_head_size > self.head_size:
            raise ConfigError(
                f"KVCacheSpec.v_head_size is {self.v_head_size}; values inside keys take at most "
                f"head_size ({self.head_size})"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the stored elements.

        Raises UnknownNameError for an encoding that is no plain dtype.
        """
        if self.encoding not in PLAIN_ENCODINGS:
            raise UnknownNameError("plain encoding", self.encoding.value, PLAIN_ENCODINGS)
        return torch_dtype(self.encoding.value)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes, all heads, keys and values."""
        elements = self.head_size + (0 if self.values_in_keys else self.v_head_size)
        return self.num_kv_heads * elements * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes: the unit in which memory becomes `num_blocks`."""
        return self.block_size * self.bytes_per_token

    def k_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the key view, axes in the layout's order without the layer."""
        return self._shape(num_blocks, self.head_size)

    def v_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the value view, axes in the layout's order without the layer."""
        return self._shape(num_blocks, self.v_head_size)

    def _shape(self, num_blocks: int, content: int) -> tuple[int, ...]:
        sizes = self._sizes(num_blocks, content)
        return tuple(sizes[axis] for axis in self.layout.of_one_layer)

    def _sizes(self, num_blocks: int, content: int) -> dict[str, int]:
        return {"B": num_blocks, "H": self.num_kv_heads, "N": self.block_size, "C": content}


@dataclass(frozen=True, kw_only=True, eq=False)
class KVCache:
    """One layer's keys and values: two views on memory the caller owns.

    Attributes:
        k, v: [num_blocks, num_kv_heads, block_size, head_size | v_head_size] with the axes in
            `spec.layout`'s order (HND as written, NHD with tokens before heads). Strides are
            free except in the last dimension, so slices of an engine's own pool do. `v` is
            None, and becomes a view of `k`, where the spec keeps values in keys.
        spec: the format.

    Raises:
        PlanMismatchError: a view of the wrong shape, dtype or device.
        UnknownNameError: an encoding that is no plain dtype.
    """

    k: torch.Tensor
    spec: KVCacheSpec
    v: torch.Tensor | None = None

    def __post_init__(self) -> None:
        spec = self.spec
        axis = spec.layout.of_one_layer.index("B")
        blocks = self.k.shape[axis] if isinstance(self.k, torch.Tensor) and self.k.dim() == 4 else 0
        device = getattr(self.k, "device", torch.device("cpu"))
        check_tensor(
            "cache.k",
            self.k,
            shape=spec.k_shape(blocks),
            dtype=spec.dtype,
            device=device,
            contiguous_rows=True,
        )
        if spec.values_in_keys and self.v is None:
            object.__setattr__(self, "v", self.k[..., : spec.v_head_size])
        check_tensor(
            "cache.v",
            self.v,
            shape=spec.v_shape(blocks),
            dtype=spec.dtype,
            device=device,
            contiguous_rows=True,
        )

    @classmethod
    def allocate(
        cls, spec: KVCacheSpec, num_blocks: int, device: torch.device | str = "cpu"
    ) -> KVCache:
        """A cache for one layer, contents unspecified. For callers; no backend allocates one."""
        return cls.allocate_layers(spec, 1, num_blocks, device)[0]

    @classmethod
    def allocate_layers(
        cls, spec: KVCacheSpec, num_layers: int, num_blocks: int, device: torch.device | str = "cpu"
    ) -> tuple[KVCache, ...]:
        """Caches for layers of one spec, laid out in memory as `spec.layout` says."""
        k = _planes(spec, num_layers, num_blocks, spec.head_size, device)
        if spec.values_in_keys:
            return tuple(cls(k=plane, spec=spec) for plane in k)
        v = _planes(spec, num_layers, num_blocks, spec.v_head_size, device)
        return tuple(cls(k=a, v=b, spec=spec) for a, b in zip(k, v, strict=True))

    @property
    def num_blocks(self) -> int:
        """Blocks this cache has."""
        return self.k.shape[self.spec.layout.of_one_layer.index("B")]

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.k.device

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as [num_blocks, num_kv_heads, block_size, size] views, whatever the layout."""
        assert self.v is not None
        return self._view(self.k, "BHNC"), self._view(self.v, "BHNC")

    def _view(self, tensor: torch.Tensor, axes: str) -> torch.Tensor:
        have = self.spec.layout.of_one_layer
        return tensor.permute([have.index(axis) for axis in axes])

    # Reading and writing plain encodings -----------------------------------------------

    def write(self, k: torch.Tensor, v: torch.Tensor | None, slots: Slots) -> None:
        """Store new tokens; nothing but their slots is touched.

        `k` [num_tokens, num_kv_heads, head_size] and `v` alike; `v` is None where the spec
        keeps values in keys.
        """
        _scatter(self._view(self.k, "BNHC"), k, slots, self.spec.block_size)
        if not self.spec.values_in_keys:
            assert v is not None and self.v is not None
            _scatter(self._view(self.v, "BNHC"), v, slots, self.spec.block_size)

    def gather(
        self,
        pages: PageTable,
        spans: Sequence[tuple[int, int, int]],
        *,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A dense copy of the tokens in `spans` of (request, begin, end), one after the other.

        k [tokens, num_kv_heads, head_size] and v alike, in `dtype` (default: as stored).
        """
        device, size = self.device, pages.block_size
        request = [r for r, begin, end in spans for _ in range(begin, end)]
        position = [p for _, begin, end in spans for p in range(begin, end)]
        where = to_device(
            torch.tensor([request, position], dtype=torch.int64).reshape(2, -1), device
        )
        column = where[1] // size
        if pages.first_block is not None:
            column = column - pages.first_block[where[0]]
        block, offset = pages.block_table[where[0], column].long(), where[1] % size
        assert self.v is not None
        k = self._view(self.k, "BNHC")[block, offset]
        v = self._view(self.v, "BNHC")[block, offset]
        return k.to(dtype or k.dtype), v.to(dtype or v.dtype)


@dataclass(frozen=True, eq=False)
class Slots:
    """Which rows of k and v go to which cache slots.

    Attributes:
        rows: source rows, int64; None for all, in order.
        slots: their slots, int64, none negative.
        anything: on a device that must not be waited for, a bool scalar: False means that no
            row is to be written, and slot 0 is given its own content.
        highest: the largest slot where the host knows it, -1 for none.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    anything: torch.Tensor | None = None
    highest: int | None = None

    @classmethod
    def of(cls, slot_mapping: torch.Tensor, num_real: torch.Tensor | None = None) -> Slots:
        """The rows of `slot_mapping` that are to be written.

        Negative slots are skipped, and rows from `num_real` (0-d) on.
        """
        wanted = slot_mapping >= 0
        if num_real is not None:
            row = torch.arange(len(slot_mapping), device=slot_mapping.device)
            wanted &= row < num_real
        if slot_mapping.device.type == "cpu":
            return cls._on_host(slot_mapping, wanted)
        if len(slot_mapping) == 0:
            return cls(rows=None, slots=slot_mapping)
        # A count of rows would have to come back from the device. Rows to skip are made
        # copies of one that is written instead: the same bytes twice to the same slot.
        row = torch.arange(len(slot_mapping), device=slot_mapping.device)
        rows = torch.where(wanted, row, wanted.int().argmax())
        return cls(rows=rows, slots=slot_mapping[rows].clamp(min=0), anything=wanted.any())

    @classmethod
    def _on_host(cls, slot_mapping: torch.Tensor, wanted: torch.Tensor) -> Slots:
        if bool(wanted.all()):
            rows, slots = None, slot_mapping
        else:
            rows = wanted.nonzero().flatten()
            slots = slot_mapping[rows]
        highest = int(slots.max()) if len(slots) else -1
        return cls(rows=rows, slots=slots, highest=highest)


def _scatter(plane: torch.Tensor, new: torch.Tensor, slots: Slots, block_size: int) -> None:
    rows = new if slots.rows is None else new[slots.rows]
    block, offset = slots.slots // block_size, slots.slots % block_size
    rows = rows.to(plane.dtype)
    if slots.anything is not None:
        rows = torch.where(slots.anything, rows, plane[block, offset])
    plane[block, offset] = rows


def _planes(
    spec: KVCacheSpec, num_layers: int, num_blocks: int, content: int, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    sizes = {**spec._sizes(num_blocks, content), "L": num_layers}
    pool = torch.empty([sizes[axis] for axis in spec.layout.value], dtype=spec.dtype, device=device)
    return pool.unbind(spec.layout.value.index("L"))
