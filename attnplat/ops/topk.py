"""From the positions an indexer chose to the cache's slots."""

from __future__ import annotations

import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.checks import at_least, check_tensor


def physical_topk(topk_indices: torch.Tensor, pages: PageTable, batch: Batch) -> torch.Tensor:
    """The cache slots of logical positions, -1 for none; nothing is waited for.

    For kernels that take slots and not positions. A slot is `block * block_size + offset`, as
    in `PageTable.slot_mapping`. Positions stay where they are in their row.

    Args:
        topk_indices: key positions in the request of each query row, negative for none, int32
            [num_tokens or more, topk].
        pages: the table of the layer's cache group.
        batch: the step's lengths: which row belongs to which request.

    Returns:
        int64 [num_tokens, topk]. -1 also for a position from the request's `seq_lens` on, one
        whose block a rolling table no longer has, and for padding rows.

    Raises:
        PlanMismatchError: indices of the wrong shape, dtype or device.
    """
    check_tensor(
        "topk_indices",
        topk_indices,
        shape=(at_least(batch.num_tokens), None),
        dtype=torch.int32,
        device=batch.device,
    )
    position = topk_indices[: batch.num_tokens].long()
    width = pages.block_table.shape[1]
    if batch.num_reqs == 0 or width == 0:
        return torch.full_like(position, -1)
    row = torch.arange(batch.num_tokens, device=batch.device)
    request = torch.searchsorted(batch.query_start_loc[1:].long(), row, right=True)
    request = request.clamp(max=batch.num_reqs - 1)[:, None]
    column = torch.div(position, pages.block_size, rounding_mode="floor")
    if pages.first_block is not None:
        column = column - pages.first_block[request]
    live = (position >= 0) & (position < batch.seq_lens[request])
    live &= (column >= 0) & (column < width) & (row < batch.query_start_loc[-1])[:, None]
    block = pages.block_table[request, column.clamp(0, width - 1)].long()
    slot = block * pages.block_size + position % pages.block_size
    return torch.where(live & (block >= 0), slot, -1)
