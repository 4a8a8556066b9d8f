"""Keys an indexer chose: their slots in the cache, and choosing over several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.checks import at_least, check_tensor
from attnplat.backends.indexer import topk_rows
from attnplat.ops.context_parallel import Shard

_BEYOND = 1 << 40
"""Sorts candidates that name no key behind all that do."""


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


def shard_topk(logits: torch.Tensor, topk: int, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's candidates: the best keys of those it has, by their positions in the whole.

    `logits` [rows, keys of this rank] are -inf for what a row may not see. Returns scores,
    of the dtype of `logits`, and positions, int32, both [rows, topk]; -inf and -1 for none.
    """
    local = topk_rows(logits, topk).long()
    none = local < 0
    if logits.shape[1] == 0:
        return logits.new_full(local.shape, float("-inf")), local.int()
    scores = logits.gather(1, local.clamp(min=0)).masked_fill(none, float("-inf"))
    positions = shard.global_positions(local.clamp(min=0)).masked_fill(none, -1)
    return scores, positions.int()


def merge_topk(
    scores: Sequence[torch.Tensor], positions: Sequence[torch.Tensor], topk: int
) -> torch.Tensor:
    """The best keys of all ranks from each rank's candidates (`shard_topk`, same `topk`).

    int32 [rows, topk], ascending, -1 at the end: bit for bit `topk_rows` of the whole, as
    ties go to the lower position here, too.
    """
    where = torch.cat(tuple(positions), dim=1).long()
    # In order of position, the lower column of equal scores is the lower position.
    order = torch.where(where < 0, _BEYOND, where).argsort(dim=1)
    chosen = topk_rows(torch.cat(tuple(scores), dim=1).gather(1, order), topk).long()
    found = where.gather(1, order).gather(1, chosen.clamp(min=0))
    return torch.where(chosen < 0, -1, found).int()
