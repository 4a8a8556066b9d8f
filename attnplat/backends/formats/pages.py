"""Pages: where the rows of a block are in memory.

A page holds everything of one block, scales included, so that a block that is moved, copied
or sent elsewhere decodes to the same values. Its areas, one behind the other:

    key rows | key scales | value rows | value scales | padding

Areas that a format does not have are empty: most keep scales inside the rows, and latent and
index rows have no values. Scale areas are linear, one row of scales per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnplat.backends.checks import at_least, check_tensor
from attnplat.backends.formats.facts import Format
from attnplat.backends.formats.rows import decode, encode
from attnplat.errors import ConfigError, PlanMismatchError


@dataclass(frozen=True, kw_only=True)
class PageShape:
    """One layer's pages.

    Attributes:
        format: how rows are stored.
        block_size, num_kv_heads, head_size: as in the glossary.
        v_head_size: defaults to `head_size`.
        tokens_first: rows are ordered token, head (NHD); otherwise head, token (HND).

    Raises:
        ConfigError: a size or head count the format cannot store.
    """

    format: Format
    block_size: int
    num_kv_heads: int
    head_size: int
    v_head_size: int | None = None
    tokens_first: bool = False

    def __post_init__(self) -> None:
        if self.v_head_size is None:
            object.__setattr__(self, "v_head_size", self.head_size)
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}; it takes at least 1")
        self.format.check_heads(self.num_kv_heads)
        self.format.row_bytes(self.head_size)
        self.format.value_bytes(self.values)

    @property
    def values(self) -> int:
        """Elements of one head's value."""
        assert self.v_head_size is not None
        return self.v_head_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, padding included."""
        return self.format.page_bytes(
            self.block_size, self.num_kv_heads, self.head_size, self.values
        )

    def areas(self) -> tuple[int, int, int, int]:
        """Bytes per row in each area: key rows, key scales, value rows, value scales."""
        format = self.format
        apart = format.scales_apart
        k_scales = format.scale_bytes(self.head_size) if apart else 0
        value = format.value_bytes(self.values)
        v_scales = format.scale_bytes(self.values) if apart and value else 0
        return format.data_bytes(self.head_size), k_scales, value - v_scales, v_scales


@dataclass(frozen=True, kw_only=True, eq=False)
class Pages:
    """The pages of one layer in memory the caller owns.

    Attributes:
        shape: what one page holds.
        pool: uint8 [num_blocks, page_bytes or more], bytes of a page adjacent; pages may be
            any distance apart.

    Raises:
        PlanMismatchError: a pool of the wrong dtype, shape or stride.
    """

    shape: PageShape
    pool: torch.Tensor

    def __post_init__(self) -> None:
        check_tensor(
            "pool",
            self.pool,
            shape=(None, at_least(self.shape.page_bytes)),
            dtype=torch.uint8,
            device=getattr(self.pool, "device", torch.device("cpu")),
            contiguous_rows=True,
        )

    @classmethod
    def allocate(
        cls, shape: PageShape, num_blocks: int, device: torch.device | str = "cpu"
    ) -> Pages:
        """Pages of unspecified content. For callers; no backend allocates any."""
        pool = torch.empty(num_blocks, shape.page_bytes, dtype=torch.uint8, device=device)
        return cls(shape=shape, pool=pool)

    @property
    def k(self) -> torch.Tensor:
        """Key rows without scales kept apart: [num_blocks, num_kv_heads, block_size, bytes]."""
        return self._area(0)

    @property
    def k_scales(self) -> torch.Tensor:
        """Key scales kept apart, as bytes, in the shape of `k`; empty where there are none."""
        return self._area(1)

    @property
    def v(self) -> torch.Tensor:
        """Value rows, as `k`; empty where the format has none."""
        return self._area(2)

    @property
    def v_scales(self) -> torch.Tensor:
        """Value scales, as `k_scales`."""
        return self._area(3)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        slots: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Encode tokens and store them; nothing but their slots is touched.

        `k` [num_tokens, num_kv_heads, head_size], `v` alike or None (see `rows.encode`);
        `slots` int64 [num_tokens], negative = skip.
        """
        shape = self.shape
        kept = slots >= 0
        slots = slots[kept]
        _check_tokens("k", k, kept, shape.num_kv_heads, shape.head_size)
        if v is not None:
            _check_tokens("v", v, kept, shape.num_kv_heads, shape.values)
        k_rows, v_rows = encode(
            shape.format,
            k[kept],
            None if v is None else v[kept],
            k_scale=k_scale,
            v_scale=v_scale,
        )
        for first, rows in ((0, k_rows), (2, v_rows)):
            if rows is None:
                continue
            data, scales = self._area(first), self._area(first + 1)
            block, offset = slots // shape.block_size, slots % shape.block_size
            data[block, :, offset] = rows[..., : data.shape[-1]]
            scales[block, :, offset] = rows[..., data.shape[-1] :]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies of all key and value rows: [num_blocks, num_kv_heads, block_size, row_bytes]."""
        k = torch.cat((self.k, self.k_scales), dim=-1)
        if self.shape.format.one_head:
            return k, None
        return k, torch.cat((self.v, self.v_scales), dim=-1)

    def read(
        self,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All keys and values: [num_blocks, block_size, num_kv_heads, head_size | v_head_size].

        Rows that were never written decode to whatever they hold.
        """
        k, v = self.rows()
        return decode(
            self.shape.format,
            k.transpose(1, 2),
            None if v is None else v.transpose(1, 2),
            head_size=self.shape.head_size,
            v_head_size=self.shape.values,
            k_scale=k_scale,
            v_scale=v_scale,
            dtype=dtype,
        )

    def reordered(self, *, tokens_first: bool) -> Pages:
        """A copy with the rows of each page in the other order; the rows are the same bytes."""
        shape = PageShape(
            format=self.shape.format,
            block_size=self.shape.block_size,
            num_kv_heads=self.shape.num_kv_heads,
            head_size=self.shape.head_size,
            v_head_size=self.shape.values,
            tokens_first=tokens_first,
        )
        made = Pages.allocate(shape, len(self.pool), self.pool.device)
        for area in range(4):
            made._area(area).copy_(self._area(area))
        return made

    def _area(self, index: int) -> torch.Tensor:
        """A view of one area: [num_blocks, num_kv_heads, block_size, bytes per row]."""
        shape = self.shape
        heads, tokens = shape.num_kv_heads, shape.block_size
        areas = shape.areas()
        begin = heads * tokens * sum(areas[:index])
        flat = self.pool[:, begin : begin + heads * tokens * areas[index]]
        if shape.tokens_first:
            return flat.view(len(flat), tokens, heads, areas[index]).transpose(1, 2)
        return flat.view(len(flat), heads, tokens, areas[index])


def _check_tokens(
    name: str, x: torch.Tensor, slots: torch.Tensor, num_kv_heads: int, size: int
) -> None:
    if tuple(x.shape) != (len(slots), num_kv_heads, size):
        raise PlanMismatchError(
            f"{name} has shape {list(x.shape)}; expected {[len(slots), num_kv_heads, size]}, "
            "one row per slot"
        )


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """A scale area in the order of SM100's kernels, which read nvfp4 values with it.

    `scales` [..., block_size, scales per row]: the scale of token t and tile s moves to token
    t // 4 * 4 + s // (S / 4), tile s % (S / 4) * 4 + t % 4, with S scales per row. Both sizes
    must be multiples of 4 (ConfigError).
    """
    tokens, count = _multiples_of_4(scales)
    grouped = scales.unflatten(-2, (tokens // 4, 4)).unflatten(-1, (4, count // 4))
    moved: torch.Tensor = grouped.movedim(-3, -1)
    return moved.reshape(scales.shape)


def unswizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `swizzle_scales`."""
    tokens, count = _multiples_of_4(scales)
    grouped = scales.unflatten(-2, (tokens // 4, 4)).unflatten(-1, (count // 4, 4))
    moved: torch.Tensor = grouped.movedim(-1, -3)
    return moved.reshape(scales.shape)


def _multiples_of_4(scales: torch.Tensor) -> tuple[int, int]:
    tokens, count = scales.shape[-2:]
    if tokens % 4 or count % 4:
        raise ConfigError(
            f"a scale area of {tokens} tokens and {count} scales cannot be swizzled; both "
            "must be multiples of 4"
        )
    return tokens, count
