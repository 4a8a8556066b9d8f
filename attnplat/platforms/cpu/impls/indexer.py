"""CPU_INDEXER: a sparse indexer's scores by the C++ kernels, keys read where they lie in pages.

Queries of bfloat16 meet keys as bfloat16, which holds every code times a power of two exactly, and
are added up in float32; other queries are float32 throughout. Every score is a result of its own:
it does not depend on threads, on the batch or on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnplat.backends.batch import HostLengths, PageTable
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.formats.index_pages import offsets
from attnplat.backends.index_cache import IndexCache, IndexCacheSpec
from attnplat.backends.indexer import IndexerImpl
from attnplat.config.layer import IndexerConfig
from attnplat.errors import ConfigError, PlanMismatchError
from attnplat.platforms.cpu.impls.features import CPU_INDEXER_FEATURES
from attnplat.platforms.cpu.impls.opening import open_library, require_cpu
from attnplat.platforms.cpu.kernels.indexing import (
    CHUNK,
    INDEX_ENCODINGS,
    IndexStruct,
    choose_keys,
    new_index,
    score_keys,
)
from attnplat.platforms.cpu.kernels.library import BlockError, KernelError


@dataclass(frozen=True, eq=False)
class _PageOrder:
    """Where a page keeps the codes and scales of each of its slots, as the library reads it."""

    value_at: torch.Tensor
    chunk_stride: int
    scale_at: torch.Tensor | None

    @classmethod
    def of(cls, spec: IndexCacheSpec) -> _PageOrder:
        if not spec.format.keys_only:
            row = spec.format.row_bytes(spec.head_size)
            return cls(torch.arange(spec.block_size, dtype=torch.int32) * row, CHUNK, None)
        assert spec.format.size is not None
        values = spec.format.data_bytes(spec.format.size)
        where = offsets(spec.format, spec.order, spec.block_size).int()
        stride = int(where[0, CHUNK] - where[0, 0])
        return cls(where[:, 0].contiguous(), stride, where[:, values:].contiguous())


class CpuIndexerImpl(IndexerImpl):
    """An indexer by the C++ kernels.

    `isa` is the instruction set to use; left out, the one of ATTNPLAT_CPU_ISA, or the highest
    that this machine has.
    """

    name = "CPU_INDEXER"
    features = CPU_INDEXER_FEATURES
    encodings = frozenset(map(Encoding, INDEX_ENCODINGS))

    def __init__(
        self,
        config: IndexerConfig,
        device: torch.device | str,
        encoding: Encoding | str | None,
        isa: str | None = None,
    ) -> None:
        super().__init__(config, device, encoding)
        require_cpu(self.name, self.device)
        self.library, self._isa = open_library(isa)
        self._orders: dict[IndexCacheSpec, _PageOrder] = {}

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self.library.isas[self._isa]

    def _logits(
        self,
        lengths: HostLengths,
        pages: PageTable,
        cache: IndexCache,
        q: torch.Tensor,
        weights: torch.Tensor,
        row_ends: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        index, kept = self._index(lengths, pages, cache, q, weights, row_ends)
        index.logits, index.logits_stride = out.data_ptr(), out.stride(0)
        self._run(index, cache, choosing=False)
        del kept  # what the struct points to has lived until here

    def _topk(
        self,
        lengths: HostLengths,
        pages: PageTable,
        cache: IndexCache,
        q: torch.Tensor,
        weights: torch.Tensor,
        row_ends: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        index, kept = self._index(lengths, pages, cache, q, weights, row_ends)
        index.chosen, index.topk = out.data_ptr(), out.shape[1]
        self._run(index, cache, choosing=True)
        del kept

    def _run(self, index: IndexStruct, cache: IndexCache, *, choosing: bool) -> None:
        run = choose_keys if choosing else score_keys
        try:
            run(self.library, index, torch.get_num_threads())
        except BlockError as error:
            raise _refusal(error, index, cache) from error
        except KernelError as error:
            raise PlanMismatchError(f"{self.name} cannot run this batch: {error}") from error

    def _index(
        self,
        lengths: HostLengths,
        pages: PageTable,
        cache: IndexCache,
        q: torch.Tensor,
        weights: torch.Tensor,
        row_ends: torch.Tensor | None,
    ) -> tuple[IndexStruct, list[torch.Tensor]]:
        """The step as the library reads it, and the tensors it points into."""
        order = self._orders.get(cache.spec)
        if order is None:
            order = self._orders[cache.spec] = _PageOrder.of(cache.spec)
        half = q.dtype == torch.bfloat16
        # Rows of the pool need not be apart by a multiple of anything.
        table = pages.block_table.contiguous()
        kept: list[torch.Tensor] = [table, cache.pool]

        def at(tensor: torch.Tensor | None) -> int:
            if tensor is None:
                return 0
            kept.append(tensor.contiguous())
            return kept[-1].data_ptr()

        index = new_index(
            isa=self._isa,
            num_reqs=len(lengths.seq_lens),
            num_heads=q.shape[1],
            head_size=q.shape[2],
            dtype=1 if half else 0,
            encoding=INDEX_ENCODINGS[self.encoding.value],
            query_start=at(torch.tensor(lengths.query_start, dtype=torch.int32)),
            seq_lens=at(torch.tensor(lengths.seq_lens, dtype=torch.int32)),
            row_ends=at(row_ends),
            block_table=table.data_ptr(),
            table_stride=table.shape[1],
            table_width=table.shape[1],
            block_size=pages.block_size,
            first_block=at(pages.first_block),
            pool=cache.pool.data_ptr(),
            page_stride=cache.pool.stride(0),
            num_blocks=cache.num_blocks,
            value_at=at(order.value_at),
            chunk_stride=order.chunk_stride,
            scale_at=at(order.scale_at),
            q=at(q if half else q.float()),
            weights=at(weights.float()),
        )
        return index, kept


def _refusal(error: BlockError, index: IndexStruct, cache: IndexCache) -> Exception:
    if error.outside:
        return ConfigError(
            f"request {error.request} reads block {error.block} of its sequence, which its row of "
            f"pages.block_table does not hold (it has {index.table_width} columns)"
        )
    if error.block < 0:
        return ConfigError(
            f"pages.block_table names block {error.block} among those that request "
            f"{error.request} reads; block ids start at 0"
        )
    return PlanMismatchError(
        f"pages.block_table names block {error.block}; the cache has {cache.num_blocks}"
    )
