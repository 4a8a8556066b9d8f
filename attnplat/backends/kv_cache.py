"""The KV cache: its format, its layout, and views on memory that the caller owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch

from attnplat.backends.batch import PageTable
from attnplat.backends.checks import (
    check_apart,
    check_tensor,
    extent_of,
    to_device,
    torch_dtype,
)
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding
from attnplat.backends.formats.facts import Format, format_of
from attnplat.backends.formats.pages import Pages
from attnplat.backends.formats.rows import decode_rows, encode_rows
from attnplat.backends.handle import Handle
from attnplat.config.names import parse_name
from attnplat.errors import ConfigError, PlanMismatchError


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
        ConfigError, UnknownNameError: a value no cache could have, or a size that the encoding
            cannot store.
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
        self._check_format()

    def _check_format(self) -> None:
        format = self.format
        if format.keys_only or (format.latent and not self.values_in_keys):
            holds = "index keys" if format.keys_only else "latent rows (values in the keys)"
            raise ConfigError(
                f"KVCacheSpec.encoding {self.encoding.value} stores {holds}; this cache has values "
                "of its own"
            )
        format.check_heads(self.num_kv_heads)
        format.check_size(self.head_size)
        if not self.values_in_keys:
            format.check_size(self.v_head_size)

    @property
    def format(self) -> Format:
        """How a row of `encoding` is made. Raises UnknownNameError for one without a codec."""
        return format_of(self.encoding)

    @property
    def is_plain(self) -> bool:
        """Whether elements are stored as torch stores them; other rows are bytes."""
        return self.encoding in PLAIN_ENCODINGS

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the views: the encoding's where it is plain, else uint8."""
        return torch_dtype(self.encoding.value) if self.is_plain else torch.uint8

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes, all heads, keys and values, scales included."""
        values = 0 if self.values_in_keys else self.format.row_bytes(self.v_head_size)
        return self.num_kv_heads * (self.format.row_bytes(self.head_size) + values)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes: the unit in which memory becomes `num_blocks`."""
        multiple = self.format.page_multiple
        return -(-self.block_size * self.bytes_per_token // multiple) * multiple

    def row_width(self, size: int) -> int:
        """Entries of `dtype` in the stored row of `size` elements, scales apart left out."""
        return self.format.data_bytes(size) // self.dtype.itemsize

    def k_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the key view, axes in the layout's order without the layer."""
        return self._shape(num_blocks, self.row_width(self.head_size))

    def v_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the value view, axes in the layout's order without the layer."""
        return self._shape(num_blocks, self.row_width(self.v_head_size))

    @cached_property
    def widths(self) -> Mapping[str, int]:
        """The views that a cache of this spec has besides plain values in keys, by the name
        `KVCache` has for them: entries of `dtype` in a row."""
        sizes = {"k": self.head_size}
        if not self.values_in_keys:
            sizes["v"] = self.v_head_size
        found = {name: self.row_width(size) for name, size in sizes.items()}
        if self.format.scales_apart:
            scales = {f"{name}_scales": self.format.scale_bytes(n) for name, n in sizes.items()}
            found.update(scales)
        return found

    @cached_property
    def axes(self) -> str:
        """Block, head, token and content in the order of a view's dimensions."""
        return self.layout.of_one_layer

    def _shape(self, num_blocks: int, content: int) -> tuple[int, ...]:
        sizes = self._sizes(num_blocks, content)
        return tuple([sizes[axis] for axis in self.axes])

    def _sizes(self, num_blocks: int, content: int) -> dict[str, int]:
        return {"B": num_blocks, "H": self.num_kv_heads, "N": self.block_size, "C": content}


@dataclass(frozen=True, eq=False)
class _Shared:
    """Keys and values that are parts of one storage, as views of one tensor.

    Of two arguments in one storage that an operator writes, Inductor takes the first in place and
    copies the second, all of it; views of one argument it takes both in place.
    """

    memory: torch.Tensor
    places: tuple[tuple[torch.Size, tuple[int, ...], int], ...]

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> _Shared | None:
        """None for tensors that have storages of their own."""
        if k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr() or not k.numel():
            return None
        places = tuple((t.shape, t.stride(), int(t.storage_offset())) for t in (k, v))
        begins, ends = zip(extent_of(k), extent_of(v), strict=True)
        length = (max(ends) - min(begins)) // k.element_size()
        return cls(k.as_strided((length,), (1,), min(place[2] for place in places)), places)

    def views(self) -> list[torch.Tensor]:
        """k and v."""
        return [self.memory.as_strided(*place) for place in self.places]


@dataclass(frozen=True, kw_only=True, eq=False)
class KVCache:
    """One layer's keys and values: views on memory the caller owns.

    Attributes:
        k, v: [num_blocks, num_kv_heads, block_size, row] with the axes in `spec.layout`'s order
            (HND as written, NHD with tokens before heads). A row is head_size or v_head_size
            elements of a plain encoding, else the bytes of the format. Strides are free except
            in the last dimension, so slices of an engine's own pool do. `v` is None, and for a
            plain encoding becomes a view of `k`, where the spec keeps values in keys.
        k_scales, v_scales: for formats that keep scales apart from rows, their bytes, axes as
            in `k`; otherwise None.
        spec: the format.
        handle: what stands for the cache's format in a compiled graph.

    Raises:
        PlanMismatchError: a view that is missing, has no place in the format, or is of the
            wrong shape, dtype or device (TensorError), or shares memory with another.
    """

    k: torch.Tensor
    spec: KVCacheSpec
    v: torch.Tensor | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    handle: Handle = field(init=False, repr=False)
    _shared: _Shared | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", Handle(self))
        spec = self.spec
        axis = spec.axes.index("B")
        blocks = self.k.shape[axis] if isinstance(self.k, torch.Tensor) and self.k.dim() == 4 else 0
        widths = dict(spec.widths)
        self._check("k", spec.k_shape(blocks))
        if spec.values_in_keys and spec.is_plain:
            if self.v is None:
                object.__setattr__(self, "v", self.k[..., : spec.v_head_size])
            widths["v"] = spec.v_head_size
        for name in ("k", "v", "k_scales", "v_scales"):
            width = widths.get(name)
            self._check(name, None if width is None else spec._shape(blocks, width))
        self._check_apart()
        if self.v is not None and not spec.values_in_keys:
            object.__setattr__(self, "_shared", _Shared.of(self.k, self.v))

    def _check_apart(self) -> None:
        """No two views of one storage share memory."""
        named = zip(("k", "v", "k_scales", "v_scales"), self.views, strict=True)
        seen: list[tuple[int, str, torch.Tensor]] = []
        for name, view in named:
            if view is None:
                continue
            storage = view.untyped_storage().data_ptr()
            others = {f"cache.{other}": tensor for at, other, tensor in seen if at == storage}
            check_apart(f"cache.{name}", view, dict(others))
            seen.append((storage, name, view))

    def _check(self, name: str, shape: tuple[int, ...] | None) -> None:
        view = getattr(self, name)
        if shape is None:
            if view is not None:
                raise PlanMismatchError(
                    f"cache.{name} is given; {self.spec.encoding.value} has no such view here"
                )
            return
        check_tensor(
            f"cache.{name}",
            view,
            shape=shape,
            dtype=self.spec.dtype,
            device=getattr(self.k, "device", torch.device("cpu")),
            contiguous_rows=True,
            written=True,
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
        """Caches for layers of one spec, laid out in memory as `spec.layout` says.

        Keys, values and scales apart are areas of their own; `from_pages` has them in one page.
        """
        widths = spec.widths
        areas = [_planes(spec, num_layers, num_blocks, n, device) for n in widths.values()]
        return tuple(
            cls(spec=spec, **dict(zip(widths, views, strict=True)))
            for views in zip(*areas, strict=True)
        )

    @classmethod
    def from_pages(cls, pages: Pages) -> KVCache:
        """The cache whose blocks are `pages`: rows and scales of a block side by side.

        NHD where the pages have tokens first, else HND.
        """
        shape = pages.shape
        spec = KVCacheSpec(
            encoding=shape.format.encoding,
            block_size=shape.block_size,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            v_head_size=shape.values,
            layout=KVCacheLayout.NHD if shape.tokens_first else KVCacheLayout.HND,
            values_in_keys=shape.format.latent,
        )
        views = {}
        for name in spec.widths:
            area: torch.Tensor = getattr(pages, name)
            turned = area.transpose(1, 2) if shape.tokens_first else area
            views[name] = turned.view(spec.dtype)
        return cls(spec=spec, **views)

    @property
    def views(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Keys, values, and the scales of both where they are apart: memory of its own each, so
        no values where they are inside keys."""
        v = None if self.spec.values_in_keys else self.v
        return self.k, v, self.k_scales, self.v_scales

    @property
    def graph_views(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The same as a compiled graph is to have them, which then copies nothing."""
        if self._shared is None:
            return self.views
        k, v = self._shared.views()
        return k, v, self.k_scales, self.v_scales

    @property
    def num_blocks(self) -> int:
        """Blocks this cache has."""
        return self.k.shape[self.spec.axes.index("B")]

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.k.device

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as [num_blocks, num_kv_heads, block_size, row] views, whatever the layout.

        Encoded rows that hold values in the keys are both.
        """
        k = self._view(self.k, "BHNC")
        return k, k if self.v is None else self._view(self.v, "BHNC")

    def _view(self, tensor: torch.Tensor, axes: str) -> torch.Tensor:
        have = self.spec.axes
        return tensor.permute([have.index(axis) for axis in axes])

    # Reading and writing -----------------------------------------------------------------

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        slots: Slots,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Store new tokens; nothing but their slots is touched.

        `k` [num_tokens, num_kv_heads, head_size] and `v` alike; `v` is None where the spec
        keeps values in keys. `k_scale` and `v_scale` (float32, [1] or [num_kv_heads]) divide
        what is stored, in formats that take the caller's scales; None is 1.
        """
        self._write_rows(self.k, self.k_scales, k, slots, k_scale)
        if not self.spec.values_in_keys:
            assert v is not None and self.v is not None
            self._write_rows(self.v, self.v_scales, v, slots, v_scale)

    def _write_rows(
        self,
        plane: torch.Tensor,
        scales: torch.Tensor | None,
        new: torch.Tensor,
        slots: Slots,
        scale: torch.Tensor | None,
    ) -> None:
        spec = self.spec
        rows = new if slots.rows is None else new[slots.rows]
        if not spec.is_plain:
            rows = encode_rows(spec.format, rows, scale=scale)
        width = plane.shape[-1]
        _scatter(self._view(plane, "BNHC"), rows[..., :width], slots, spec.block_size)
        if scales is not None:
            _scatter(self._view(scales, "BNHC"), rows[..., width:], slots, spec.block_size)

    def read(
        self,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens at `offsets` of `blocks` (int64, equally many), decoded.

        k [tokens, num_kv_heads, head_size] and v alike, in `dtype` (default: as stored, and
        float32 for encoded rows). The scales are those that `write` was given.
        """
        spec = self.spec
        where = (blocks, offsets)
        k = self._read_rows(self.k, self.k_scales, where, spec.head_size, k_scale, dtype)
        if spec.values_in_keys:
            return k, k[..., : spec.v_head_size]
        assert self.v is not None
        return k, self._read_rows(self.v, self.v_scales, where, spec.v_head_size, v_scale, dtype)

    def _read_rows(
        self,
        plane: torch.Tensor,
        scales: torch.Tensor | None,
        where: tuple[torch.Tensor, torch.Tensor],
        size: int,
        scale: torch.Tensor | None,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        rows = self._view(plane, "BNHC")[where]
        if self.spec.is_plain:
            return rows.to(dtype or rows.dtype)
        if scales is not None:
            rows = torch.cat((rows, self._view(scales, "BNHC")[where]), dim=-1)
        return decode_rows(
            self.spec.format, rows, size=size, scale=scale, dtype=dtype or torch.float32
        )

    def gather(
        self,
        pages: PageTable,
        spans: Sequence[tuple[int, int, int]],
        *,
        dtype: torch.dtype | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A dense copy of the tokens in `spans` of (request, begin, end), one after the other.

        k [tokens, num_kv_heads, head_size] and v alike; `dtype` and scales as in `read`.
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
        blocks = pages.block_table[where[0], column].long()
        return self.read(blocks, where[1] % size, dtype=dtype, k_scale=k_scale, v_scale=v_scale)


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


def _scatter(plane: torch.Tensor, rows: torch.Tensor, slots: Slots, block_size: int) -> None:
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
