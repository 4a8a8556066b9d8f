"""The byte orders of index-cache pages, which differ between engines and look alike.

An index page of P tokens has V value bytes and S scale bytes per token, P * (V + S) in all.
Only the planar order keeps a token's values together; reading a page in the wrong order gives
plausible keys and no error. Offsets below are inside one page, in bytes. `head_size` is 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from attnplat.backends.checks import at_least, check_tensor
from attnplat.backends.formats.facts import Format
from attnplat.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class IndexPageOrder:
    """Where byte b of token t's values, and of its scales, is in a page.

    Use the constructors; they know which sizes go together.

    Attributes:
        name: what it is called.
        bits: bits of a value it is for; None for any.
        run: tokens that are interleaved with each other.
        chunk: value bytes of one token that stay together.
        scale_groups: scale s is grouped with those of equal s % scale_groups; None keeps a
            token's scales together.
        token_groups: token t counts as t % token_groups * (P / token_groups) +
            t // token_groups inside its run.
    """

    name: str
    bits: int | None = None
    run: int = 1
    chunk: int = 128
    scale_groups: int | None = None
    token_groups: int | None = None

    @classmethod
    def planar(cls) -> Self:
        """All values token by token, then all scales token by token."""
        return cls(name="planar")

    @classmethod
    def tile16(cls) -> Self:
        """Values in tiles of 16 tokens by 16 bytes, scales planar (fp8 on ROCm)."""
        return cls(name="tile16", bits=8, run=16, chunk=16)

    @classmethod
    def aiter(cls, num_heads: int, *, wide: bool = True) -> Self:
        """aiter's preshuffled MXFP4. It depends on the indexer's number of query heads.

        `wide` is aiter's scale mode 1, the one vLLM uses; otherwise mode 0.
        """
        run = 32 if num_heads >= 32 else 16
        groups = 64 // run if wide else 4
        return cls(name="aiter", bits=4, run=run, chunk=16, scale_groups=groups)

    @classmethod
    def flydsl(cls) -> Self:
        """FlyDSL's MXFP4 for pages of 64 tokens.

        There it is two tensors, values and scales; here one follows the other.
        """
        return cls(name="flydsl", bits=4, run=64, chunk=16, scale_groups=4, token_groups=16)

    def value_offset(self, token: torch.Tensor, byte: torch.Tensor, width: int) -> torch.Tensor:
        """Offset of value byte `byte` of `token`, with `width` value bytes per token."""
        chunk = min(self.chunk, width)
        first, inside = self._inside(token)
        return first * width + byte // chunk * self.run * chunk + inside * chunk + byte % chunk

    def scale_offset(self, token: torch.Tensor, byte: torch.Tensor, width: int) -> torch.Tensor:
        """Offset, behind all values, of scale byte `byte` of `token`, of `width` per token."""
        if self.scale_groups is None:
            return token * width + byte
        first, inside = self._inside(token)
        deep = width // self.scale_groups
        return (
            first * width
            + byte % self.scale_groups * self.run * deep
            + inside * deep
            + byte // self.scale_groups
        )

    def check(self, format: Format, block_size: int) -> None:
        """Refuse a format or block size the order is not for. Raises ConfigError."""
        if not format.keys_only:
            raise ConfigError(f"{format.encoding.value} is no index format")
        if self.bits not in (None, format.bits):
            raise ConfigError(
                f"order {self.name!r} is for {self.bits}-bit values; {format.encoding.value} has "
                f"{format.bits}-bit ones"
            )
        # aiter's kernels walk a page 64 tokens at a time, or all of it where it is smaller.
        step = 64 if self.name == "aiter" and block_size > 64 else self.run
        exact = self.token_groups is not None
        if block_size < 1 or block_size % step or (exact and block_size != step):
            takes = f"exactly {step}" if exact else f"a multiple of {step}"
            raise ConfigError(
                f"order {self.name!r} takes {takes} for block_size; it is {block_size}"
            )

    def _inside(self, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first token of a token's run, and the token's place in it."""
        inside = token % self.run
        first = token - inside
        if self.token_groups is not None:
            each = self.run // self.token_groups
            inside = inside % self.token_groups * each + inside // self.token_groups
        return first, inside


def offsets(
    format: Format, order: IndexPageOrder, block_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Where each byte of each row is in a page: int64 [block_size, row_bytes].

    A row's last bytes are its scales. Raises ConfigError where the order is not for the sizes.
    """
    order.check(format, block_size)
    assert format.size is not None
    values, scales = format.data_bytes(format.size), format.scale_bytes(format.size)
    token = torch.arange(block_size, device=device).unsqueeze(1)
    value = order.value_offset(token, torch.arange(values, device=device), values)
    scale = order.scale_offset(token, torch.arange(scales, device=device), scales)
    return torch.cat((value, block_size * values + scale), dim=1)


def read_rows(
    pool: torch.Tensor, format: Format, order: IndexPageOrder, block_size: int
) -> torch.Tensor:
    """The rows of pages (uint8 [num_blocks, page_bytes or more]) as `decode_rows` takes them.

    uint8 [num_blocks, block_size, row_bytes], a copy.
    """
    return pool[:, _checked(pool, format, order, block_size)]


def write_rows(
    pool: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    format: Format,
    order: IndexPageOrder,
    block_size: int,
) -> None:
    """Store rows (uint8 [num_tokens, row_bytes]) in their slots (int64, negative = skip)."""
    where = _checked(pool, format, order, block_size)
    check_tensor(
        "rows", rows, shape=(len(slots), where.shape[1]), dtype=torch.uint8, device=pool.device
    )
    kept = slots >= 0
    slots = slots[kept]
    pool[(slots // block_size).unsqueeze(1), where[slots % block_size]] = rows[kept]


def reorder(
    pool: torch.Tensor,
    format: Format,
    source: IndexPageOrder,
    target: IndexPageOrder,
    block_size: int,
) -> torch.Tensor:
    """Pages of order `source` in order `target`: the same bytes elsewhere, a copy.

    uint8 [num_blocks, page_bytes].
    """
    rows = read_rows(pool, format, source, block_size)
    where = offsets(format, target, block_size, pool.device)
    made = pool.new_empty(len(pool), where.numel())
    made[:, where] = rows
    return made


def _checked(
    pool: torch.Tensor, format: Format, order: IndexPageOrder, block_size: int
) -> torch.Tensor:
    where = offsets(format, order, block_size, pool.device)
    shape = (None, at_least(where.numel()))
    check_tensor("pool", pool, shape=shape, dtype=torch.uint8, device=pool.device)
    return where
