"""Copying keys and values out of pages (or out of packed rows) into dense tensors.

The dense form is always contiguous [requests, kv heads, keys, size], whatever the cache's
layout and strides, so that the arithmetic after it, and its bits, do not depend on them.
"""

from __future__ import annotations

from math import gcd

import torch

from attnplat.errors import ConfigError


def gather_pages(pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Whole pages, one after the other: [requests, heads, num_pages * block_size, size].

    `pages` is a [num_blocks, heads, block_size, size] view of any strides but the last;
    `blocks` int64 [requests, num_pages].
    """
    count, heads, block_size, size = pages.shape
    requests, num_pages = blocks.shape
    if pages.stride(2) != size:
        # Tokens before heads: a page is one row, and heads come out of it afterwards.
        rows = pages.transpose(1, 2).index_select(0, blocks.flatten())
        return rows.view(requests, -1, heads, size).transpose(1, 2).contiguous()
    # Heads before tokens: a head's page is one row, found at a whole number of steps from
    # the start, so one copy brings rows straight to their place. Gathering pages and
    # transposing afterwards copies twice.
    block_step, head_step = pages.stride(0), pages.stride(1)
    step = gcd(block_step if count > 1 else 0, head_step if heads > 1 else 0) or block_size * size
    last = ((count - 1) * block_step + (heads - 1) * head_step) // step
    flat = pages.as_strided((last + 1, block_size * size), (step, 1))
    head = torch.arange(heads, device=blocks.device)[None, :, None]
    index = blocks[:, None, :] * (block_step // step) + head * (head_step // step)
    rows = flat.index_select(0, index.flatten())
    return rows.view(requests, heads, num_pages * block_size, size)


def gather_rows(packed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of packed keys or values: [requests, heads, keys, size].

    `packed` [rows, heads, size]; `rows` int64 [requests, keys].
    """
    requests, keys = rows.shape
    chosen = packed.index_select(0, rows.flatten())
    return chosen.view(requests, keys, *packed.shape[1:]).transpose(1, 2).contiguous()


def refuse_negative(blocks: torch.Tensor, request: int) -> int:
    """The largest of a request's block ids, which are on the host; 0 for none.

    A negative id would count from the end of the cache and read another request's tokens.
    Raises ConfigError.
    """
    if not blocks.numel():
        return 0
    if (lowest := int(blocks.min())) < 0:
        raise ConfigError(
            f"pages.block_table names block {lowest} among those that request {request} reads; "
            "block ids start at 0"
        )
    return int(blocks.max())
