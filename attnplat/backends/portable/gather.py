"""Copying keys and values out of pages into dense tensors.

The dense form is always contiguous [requests, kv heads, keys, size], whatever the cache's
layout and strides, so that the arithmetic after it, and its bits, do not depend on them.
Keys and values that come without a cache are a cache of one-token blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

import torch

from attnplat.backends.batch import PageTable
from attnplat.backends.checks import to_device
from attnplat.backends.interface import Call
from attnplat.errors import ConfigError


def planes_of(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The call's keys and values as [num_blocks, kv heads, block_size, size] views."""
    if call.cache is not None:
        return call.cache.pages()
    assert call.k is not None and call.v is not None
    return call.k[:, :, None], call.v[:, :, None]


def copy_pages(
    plane: torch.Tensor, blocks: torch.Tensor, heads: torch.Tensor, into: torch.Tensor
) -> None:
    """One head of one page after the other: `into` [len(blocks), block_size, size] is filled.

    `blocks` and `heads` (int64) name them; `plane` is [num_blocks, kv heads, block_size, size]
    of any strides but the last.
    """
    counts, size = plane.shape[:3], plane.shape[3]
    steps = plane.stride()[:3]
    tokens = counts[2]
    step = gcd(*(s for s, n in zip(steps, counts, strict=True) if n > 1)) or 1
    index = blocks * (steps[0] // step) + heads * (steps[1] // step)
    last = sum((n - 1) * s for s, n in zip(steps, counts, strict=True))
    if tokens == 1 or steps[2] == size:
        # A head's page lies in one piece, and is copied as one.
        piece = tokens * size
        last -= (tokens - 1) * steps[2]
    else:
        # Tokens before heads. Copying tokens straight to their place takes two thirds of the
        # time of copying pages and turning them afterwards.
        piece = size
        token = torch.arange(tokens, device=index.device) * (steps[2] // step)
        index = (index[:, None] + token).flatten()
    pieces = plane.as_strided((last // step + 1, piece), (step, 1))
    torch.index_select(pieces, 0, index, out=into.view(len(index), piece))


def look_up(pages: PageTable, requests: list[int], logical: torch.Tensor) -> torch.Tensor:
    """Physical blocks of logical ones, int64 on the table's device.

    `logical` int64 [requests, blocks] is on the host. Raises ConfigError for a block that a
    rolling table no longer has, and, where the host can see them, for negative block ids: one
    would count from the end of the cache and read another request's tokens.
    """
    firsts = pages.host_first_blocks(pages.block_table.shape[0])
    first = torch.tensor([firsts[r] for r in requests], dtype=torch.int64)[:, None]
    column = logical - first
    width = pages.block_table.shape[1]
    outside = (column < 0) | (column >= width)
    if bool(outside.any()):
        row = int(outside.any(1).int().argmax())
        raise ConfigError(
            f"request {requests[row]} reads block {int(logical[row][outside[row]][0])} of its "
            f"sequence; its row of pages.block_table holds {int(first[row])} to "
            f"{int(first[row]) + width - 1}"
        )
    device = pages.block_table.device
    request = to_device(torch.tensor(requests, dtype=torch.int64), device)[:, None]
    blocks = pages.block_table[request, to_device(column, device)].long()
    if device.type == "cpu" and bool((blocks < 0).any()):
        row = int((blocks < 0).any(1).int().argmax())
        raise ConfigError(
            f"pages.block_table names block {int(blocks[row].min())} among those that request "
            f"{requests[row]} reads; block ids start at 0"
        )
    return blocks


def highest_block(blocks: Iterable[torch.Tensor]) -> int | None:
    """The largest block id, where the host can see them; else None."""
    seen = [b for b in blocks if b.device.type == "cpu" and b.numel()]
    return max((int(b.max()) for b in seen), default=None)
