"""A step's lengths and tables at addresses that stay, for plans that are updated in place.

A device graph repeats its kernels on the addresses that they were recorded with. So the lengths,
tables and masks of a step are copied to places of their own, made for the largest step of some
bounds; what lies beyond the step at hand is made harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnplat.backends.batch import Batch, BatchBounds
from attnplat.backends.pages import PageTable
from attnplat.errors import PlanMismatchError, UnsupportedCallError

_OPTIONAL = ("causal", "prefix_lens", "tree_mask", "kv_start_loc")


@dataclass(kw_only=True, eq=False)
class FixedStep:
    """One step, and room for every other one within the same bounds.

    Attributes:
        batch: the step padded to the bounds: requests beyond its own are empty, rows beyond are
            padding. Its tensors stay where they are.
        pages: likewise; columns beyond the step's own table are -1. None without pages.
        sizes: of the step at hand, as the host knows them.
    """

    batch: Batch
    pages: PageTable | None
    sizes: BatchBounds

    @classmethod
    def of(cls, batch: Batch, pages: PageTable | None, bounds: BatchBounds) -> FixedStep:
        """Room for steps like this one: of the same optional masks, and of the same page size.

        Raises as `fill` does.
        """
        room = _room(batch, bounds)
        fixed = cls(batch=room, pages=_table_room(pages, bounds), sizes=_sizes(batch))
        fixed.fill(batch, pages)
        return fixed

    def fill(self, batch: Batch, pages: PageTable | None) -> None:
        """Put another step, which keeps the bounds, in the place of the last one.

        It copies on the device and does nothing else: no memory is allocated and nothing
        waited for.

        Raises:
            UnsupportedCallError: `batch.ranges`, whose number has no bound.
            PlanMismatchError: a mask or table field that this step has and the first had not, or
                the other way round; another page size; a table that is wider.
        """
        self._check(batch, pages)
        own, n = self.batch, batch.num_reqs
        own.query_start_loc[: n + 1].copy_(batch.query_start_loc)
        own.query_start_loc[n + 1 :].copy_(batch.query_start_loc[-1:].expand(own.num_reqs - n))
        own.seq_lens[:n].copy_(batch.seq_lens)
        own.seq_lens[n:].zero_()
        for name in _OPTIONAL:
            given, kept = getattr(batch, name), getattr(own, name)
            if given is None:
                continue
            if name == "tree_mask":
                kept[: given.shape[0], : given.shape[1]].copy_(given)
            else:
                kept[:n].copy_(given)
                kept[n:].zero_()
        if pages is not None:
            self._fill_pages(pages)
        self.sizes = _sizes(batch)

    def _fill_pages(self, pages: PageTable) -> None:
        own = self.pages
        assert own is not None
        rows, width = pages.block_table.shape
        width = min(width, own.block_table.shape[1])
        own.block_table.fill_(-1)
        own.block_table[:rows, :width].copy_(pages.block_table[:, :width])
        if pages.slot_mapping is not None:
            assert own.slot_mapping is not None
            own.slot_mapping[: len(pages.slot_mapping)].copy_(pages.slot_mapping)
            own.slot_mapping[len(pages.slot_mapping) :].fill_(-1)
        if pages.first_block is not None:
            assert own.first_block is not None
            own.first_block[:rows].copy_(pages.first_block)
            own.first_block[rows:].zero_()

    def _check(self, batch: Batch, pages: PageTable | None) -> None:
        if batch.ranges is not None:
            raise UnsupportedCallError(
                "batch.ranges has no bound on its number, and the plan has bounds; plan this step "
                "without bounds"
            )
        _same_fields("batch", batch, self.batch, _OPTIONAL)
        if (pages is None) != (self.pages is None):
            told = ("without pages", "with pages")
            raise PlanMismatchError(
                f"the plan was made {told[self.pages is not None]} and is to be updated "
                f"{told[pages is not None]}; plan anew"
            )
        if pages is None or self.pages is None:
            return
        _same_fields("pages", pages, self.pages, ("slot_mapping", "first_block"))
        if pages.block_size != self.pages.block_size:
            raise PlanMismatchError(
                f"pages.block_size is {pages.block_size}; the plan was made for "
                f"{self.pages.block_size}"
            )
        most = self.pages.block_table.shape[1]
        if pages.first_block is not None and pages.block_table.shape[1] > most:
            raise PlanMismatchError(
                f"pages.block_table has {pages.block_table.shape[1]} columns; the rolling table "
                f"that the plan was made with has {most}"
            )


def _sizes(batch: Batch) -> BatchBounds:
    return BatchBounds(
        max_reqs=batch.num_reqs,
        max_tokens=batch.num_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
    )


def _same_fields(
    what: str, given: Batch | PageTable, own: Batch | PageTable, names: tuple[str, ...]
) -> None:
    for name in names:
        has, had = getattr(given, name) is not None, getattr(own, name) is not None
        if has != had:
            raise PlanMismatchError(
                f"{what}.{name} is {'given' if has else 'missing'}, and the plan was made "
                f"{'with' if had else 'without'} it; plan anew"
            )


def _room(batch: Batch, bounds: BatchBounds) -> Batch:
    device, n = batch.device, bounds.max_reqs
    sizes = {
        "causal": (n,),
        "prefix_lens": (n,),
        "kv_start_loc": (n,),
        "tree_mask": (bounds.max_tokens, -(-bounds.max_query_len // 8)),
    }
    masks = {}
    for name, size in sizes.items():
        given = getattr(batch, name)
        masks[name] = None if given is None else given.new_zeros(size)
    return Batch(
        query_start_loc=torch.zeros(n + 1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(n, dtype=torch.int32, device=device),
        num_reqs=n,
        num_tokens=bounds.max_tokens,
        max_query_len=bounds.max_query_len,
        max_seq_len=bounds.max_seq_len,
        host_lens="upper",
        **masks,
    )


def _table_room(pages: PageTable | None, bounds: BatchBounds) -> PageTable | None:
    if pages is None:
        return None
    slots, first = pages.slot_mapping, pages.first_block
    width = -(-bounds.max_seq_len // pages.block_size)
    if first is not None:
        width = pages.block_table.shape[1]
    return PageTable(
        block_table=pages.block_table.new_full((bounds.max_reqs, width), -1),
        block_size=pages.block_size,
        slot_mapping=None if slots is None else slots.new_full((bounds.max_tokens,), -1),
        first_block=None if first is None else first.new_zeros(bounds.max_reqs),
    )
