"""Where a cache group keeps each request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import torch

from attnplat.backends.checks import check_tensor, demand, to_device
from attnplat.errors import ConfigError, HostLengthsNeededError

if TYPE_CHECKING:
    from attnplat.backends.batch import Batch

_INT = torch.int32


@dataclass(frozen=True, eq=False)
class PageCsr:
    """A page table as compressed rows.

    Attributes:
        indptr: first entry of each request in `indices`, and the end; int32 [num_reqs + 1].
        indices: block ids of all requests in order; int32 [entries].
        last_page_len: tokens in each request's last page, 0 for none; int32 [num_reqs].
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PageTable:
    """Where one cache group keeps each request's tokens.

    Attributes:
        block_table: blocks of each request in order; int32 [num_reqs, max_blocks], row stride
            free. Entries past ceil(seq_len / block_size) are never read, nor those of blocks
            that no query sees.
        block_size: tokens per block.
        slot_mapping: cache slot (block * block_size + offset) each new token is written to;
            any negative value skips the token; int64 [num_tokens] (cross attention: one per
            encoder token). None: this step writes nothing.
        first_block: logical block that column 0 of each row holds, for tables that roll with
            a window; int32 [num_reqs]. Default 0.

    Raises:
        PlanMismatchError: a tensor of the wrong shape, dtype or device.
        ConfigError: a block size below 1.
    """

    block_table: torch.Tensor
    block_size: int
    slot_mapping: torch.Tensor | None = None
    first_block: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ConfigError(f"pages.block_size is {self.block_size!r}; it takes at least 1")
        device = getattr(self.block_table, "device", torch.device("cpu"))
        check_tensor(
            "pages.block_table", self.block_table, shape=(None, None), dtype=_INT, device=device
        )
        if self.slot_mapping is not None:
            check_tensor(
                "pages.slot_mapping",
                self.slot_mapping,
                shape=(None,),
                dtype=torch.int64,
                device=device,
            )
        if self.first_block is not None:
            n = self.block_table.shape[0]
            check_tensor(
                "pages.first_block", self.first_block, shape=(n,), dtype=_INT, device=device
            )

    @classmethod
    def from_blocks(
        cls,
        blocks: Sequence[Sequence[int]],
        batch: Batch,
        block_size: int,
        *,
        write: Literal["new", "all", "none"] = "new",
        first_block: Sequence[int] | None = None,
    ) -> PageTable:
        """A table from each request's block ids, with slots for the tokens this step writes.

        `write`: `new` are the query tokens, the last of their sequence; `all` every token
        of every sequence (an encoder's, at the step it ran); `none` nothing. Padding rows of
        the batch get slot -1. Needs exact host lengths.

        Raises ConfigError when a request has fewer blocks than its tokens need.
        """
        lengths = batch.host_lengths()
        firsts = [0] * len(blocks) if first_block is None else list(first_block)
        slots: list[int] = []
        for r, length in enumerate(lengths.seq_lens):
            have = (firsts[r] + len(blocks[r])) * block_size
            demand(
                length <= have,
                f"request {r} has {length} tokens and blocks for {have}; give "
                f"it {-(-length // block_size)} blocks of {block_size}",
            )
            new = {"new": lengths.query_len(r), "all": length, "none": 0}[write]
            for position in range(length - new, length):
                block = blocks[r][position // block_size - firsts[r]]
                slots.append(block * block_size + position % block_size)
        if write == "new":
            slots += [-1] * (batch.num_tokens - len(slots))
        width = max(map(len, blocks), default=0)
        rows = [[*row, *[-1] * (width - len(row))] for row in blocks]
        table = torch.tensor(rows, dtype=_INT).reshape(len(blocks), width)
        return cls(
            block_table=table.to(batch.device),
            block_size=block_size,
            slot_mapping=None
            if write == "none"
            else torch.tensor(slots, dtype=torch.int64, device=batch.device),
            first_block=None
            if first_block is None
            else torch.tensor(firsts, dtype=_INT, device=batch.device),
        )

    def padded(self, num_reqs: int, num_tokens: int) -> PageTable:
        """This table with rows for empty requests and slots that skip, added at the end."""
        slots = self.slot_mapping
        table = grown(self.block_table, num_reqs - self.block_table.shape[0], fill=-1)
        assert table is not None
        return replace(
            self,
            block_table=table,
            slot_mapping=None if slots is None else grown(slots, num_tokens - len(slots), fill=-1),
            first_block=grown(self.first_block, num_reqs - self.block_table.shape[0]),
        )

    def take_requests(self, requests: torch.Tensor) -> PageTable:
        """The rows of `requests` (int64, in that order), with the slots unchanged."""
        first = self.first_block
        return replace(
            self,
            block_table=self.block_table[requests],
            first_block=None if first is None else first[requests],
        )

    def csr(self, seq_lens: Sequence[int]) -> PageCsr:
        """This table as compressed rows, for sequences of these lengths."""
        firsts = self.host_first_blocks(len(seq_lens))
        counts = [
            max(-(-n // self.block_size) - first, 0)
            for n, first in zip(seq_lens, firsts, strict=True)
        ]
        rows = [r for r, count in enumerate(counts) for _ in range(count)]
        columns = [column for count in counts for column in range(count)]
        last = [(n - 1) % self.block_size + 1 if n else 0 for n in seq_lens]
        device = self.block_table.device
        where = to_device(torch.tensor([rows, columns], dtype=torch.int64).reshape(2, -1), device)
        return PageCsr(
            indptr=to_device(torch.tensor([0, *accumulate(counts)], dtype=_INT), device),
            indices=self.block_table[where[0], where[1]],
            last_page_len=to_device(torch.tensor(last, dtype=_INT), device),
        )

    def host_first_blocks(self, num_reqs: int) -> tuple[int, ...]:
        """`first_block` as integers.

        Raises HostLengthsNeededError when it is on a device only.
        """
        if self.first_block is None:
            return (0,) * num_reqs
        if self.first_block.device.type != "cpu":
            raise HostLengthsNeededError(
                "pages.first_block is on a device and this backend plans on the host; give a "
                "table whose column 0 is block 0"
            )
        return tuple(self.first_block.tolist())

    def validate(
        self,
        batch: Batch,
        *,
        num_blocks: int | None = None,
        first_keys: Sequence[int] | None = None,
    ) -> None:
        """Look at the values of live entries; waits for the device.

        `first_keys`: the first key each request can see, where a window hides earlier ones
        (their blocks may be gone). Raises ConfigError for a live block id or a slot that is
        negative or past the cache, a slot given twice, or a table too narrow for its sequence.
        """
        table, lens = self.block_table.tolist(), batch.seq_lens.tolist()
        first = [0] * len(table) if self.first_block is None else self.first_block.tolist()
        for r, length in enumerate(lens):
            demand(first[r] >= 0, f"pages.first_block[{r}] is {first[r]}; it takes at least 0")
            need = -(-length // self.block_size) - first[r]
            oldest = (0 if first_keys is None else first_keys[r]) // self.block_size - first[r]
            demand(
                need <= len(table[r]),
                f"request {r} needs {need} columns of pages.block_table, which has {len(table[r])}",
            )
            demand(
                length == 0 or oldest >= 0,
                f"request {r} sees block {oldest + first[r]}; pages.first_block[{r}] is {first[r]}",
            )
            for column in range(oldest, need):
                block = table[r][column]
                good = block >= 0 and (num_blocks is None or block < num_blocks)
                most = "the cache's last" if num_blocks is None else num_blocks - 1
                demand(good, f"pages.block_table[{r}, {column}] is {block}; it takes 0 to {most}")
        self._validate_slots(num_blocks)

    def _validate_slots(self, num_blocks: int | None) -> None:
        first: dict[int, int] = {}
        for row, slot in enumerate([] if self.slot_mapping is None else self.slot_mapping.tolist()):
            if slot < 0:
                continue
            demand(
                slot not in first,
                f"pages.slot_mapping names a slot twice: {slot}, for tokens {first.get(slot)} and "
                f"{row}",
            )
            first[slot] = row
            room = slot + 1 if num_blocks is None else num_blocks * self.block_size
            demand(
                slot < room,
                f"pages.slot_mapping[{row}] is {slot}; the cache has {room} slots",
            )


def grown(
    tensor: torch.Tensor | None, more: int, *, fill: int = 0, repeat_last: bool = False
) -> torch.Tensor | None:
    """The tensor with `more` rows of `fill`, or of its last row, at the end."""
    if tensor is None or more == 0:
        return tensor
    shape = (more, *tensor.shape[1:])
    tail = tensor[-1:].expand(shape) if repeat_last else tensor.new_full(shape, fill)
    return torch.cat([tensor, tail])
