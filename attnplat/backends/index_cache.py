"""The cache of a sparse indexer: one key a token, no values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attnplat.backends.checks import at_least, check_tensor
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding
from attnplat.backends.formats.facts import Format, format_of
from attnplat.backends.formats.index_pages import IndexPageOrder, offsets, write_rows
from attnplat.backends.formats.rows import decode_rows, encode_rows
from attnplat.config.names import parse_name
from attnplat.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class IndexCacheSpec:
    """The format of one indexer's cache.

    Attributes:
        encoding: an index format, or a plain one.
        block_size: keys per block.
        head_size: elements of a key.
        order: where bytes are in a page; plain keys have the planar order only.

    Raises:
        ConfigError, UnknownNameError: a value no cache could have.
    """

    encoding: Encoding
    block_size: int
    head_size: int
    order: IndexPageOrder = field(default_factory=IndexPageOrder.planar)

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoding", parse_name(Encoding, self.encoding, "encoding"))
        self.format.check_size(self.head_size)
        if self.block_size < 1:
            raise ConfigError(f"IndexCacheSpec.block_size is {self.block_size}; at least 1")
        if self.format.keys_only:
            self.order.check(self.format, self.block_size)
        elif self.encoding not in PLAIN_ENCODINGS or self.order.name != "planar":
            raise ConfigError(
                f"{self.encoding.value} in order {self.order.name!r} stores no index keys; it "
                "takes an index format, or a plain one in order 'planar'"
            )

    @property
    def format(self) -> Format:
        """How a key is stored."""
        return format_of(self.encoding)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes."""
        return self.block_size * self.format.row_bytes(self.head_size)


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexCache:
    """One indexer's keys in memory the caller owns.

    Attributes:
        pool: uint8 [num_blocks, bytes_per_block or more]; bytes of a page are adjacent, pages
            may be any distance apart.
        spec: the format.

    Raises:
        PlanMismatchError: a pool of the wrong dtype, shape or stride.
    """

    pool: torch.Tensor
    spec: IndexCacheSpec

    def __post_init__(self) -> None:
        check_tensor(
            "pool",
            self.pool,
            shape=(None, at_least(self.spec.bytes_per_block)),
            dtype=torch.uint8,
            device=getattr(self.pool, "device", torch.device("cpu")),
            contiguous_rows=True,
        )

    @classmethod
    def allocate(
        cls, spec: IndexCacheSpec, num_blocks: int, device: torch.device | str = "cpu"
    ) -> IndexCache:
        """A cache of unspecified content. For callers; no backend allocates one."""
        pool = torch.empty(num_blocks, spec.bytes_per_block, dtype=torch.uint8, device=device)
        return cls(pool=pool, spec=spec)

    @property
    def num_blocks(self) -> int:
        """Blocks this cache has."""
        return len(self.pool)

    def write(self, k: torch.Tensor, slots: torch.Tensor) -> None:
        """Store keys [num_tokens, head_size] at `slots` (int64, negative = skip)."""
        spec = self.spec
        kept = slots >= 0
        rows, slots = encode_rows(spec.format, k[kept]), slots[kept]
        if spec.format.keys_only:
            write_rows(self.pool, rows, slots, spec.format, spec.order, spec.block_size)
            return
        block, offset = slots // spec.block_size, slots % spec.block_size
        self.pool[block[:, None], self._bytes()[offset]] = rows

    def read(
        self, blocks: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The keys at `tokens` of `blocks` (int64, equally many), decoded: [keys, head_size]."""
        rows = self.pool[blocks[:, None], self._bytes()[tokens]]
        return decode_rows(self.spec.format, rows, size=self.spec.head_size, dtype=dtype)

    def _bytes(self) -> torch.Tensor:
        """Where each byte of each key is in a page: int64 [block_size, row_bytes]."""
        spec, device = self.spec, self.pool.device
        if spec.format.keys_only:
            return offsets(spec.format, spec.order, spec.block_size, device)
        width = spec.format.row_bytes(spec.head_size)
        return torch.arange(spec.block_size * width, device=device).view(spec.block_size, width)
