"""The binding of the library's indexer: scores of keys, and the best of them."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_void_p

import torch

from attnplat.platforms.cpu.kernels.library import (
    ABI,
    REFUSALS,
    BlockError,
    KernelError,
    Library,
    struct_fields,
)

INDEX_ENCODINGS = {
    "bfloat16": 0,
    "index_fp8_132": 1,
    "index_fp8_132_e8m0": 2,
    "index_mxfp4_68": 3,
}
"""The library's numbers for how an index cache stores keys."""

CHUNK = 16
"""Bytes of a key's codes that lie together in every order of a page."""


class IndexStruct(ctypes.Structure):
    """`attnplat_cpu_index`."""

    _fields_ = struct_fields(
        (c_uint32, "size version"),
        (c_int32, "isa num_reqs num_heads head_size dtype encoding"),
        (c_void_p, "query_start seq_lens row_ends block_table"),
        (c_int64, "table_stride table_width block_size"),
        (c_void_p, "first_block pool"),
        (c_int64, "page_stride num_blocks"),
        (c_void_p, "value_at"),
        (c_int64, "chunk_stride"),
        (c_void_p, "scale_at q weights logits"),
        (c_int64, "logits_stride"),
        (c_void_p, "chosen"),
        (c_int64, "topk bad_request bad_block"),
    )


def new_index(**values: int) -> IndexStruct:
    """A struct of this version with these fields, all others 0."""
    return IndexStruct(size=ctypes.sizeof(IndexStruct), version=ABI, **values)


def score_keys(library: Library, index: IndexStruct, workers: int) -> None:
    """Write the scores of the keys that rows see. Raises KernelError; BlockError for tables."""
    _run(library, "index_logits", index, workers)


def choose_keys(library: Library, index: IndexStruct, workers: int) -> None:
    """Write the best keys of each row. Raises KernelError; BlockError for tables."""
    _run(library, "index_topk", index, workers)


def choose_columns(library: Library, logits: torch.Tensor, topk: int, workers: int) -> torch.Tensor:
    """`topk_rows` of float32 logits [rows, columns], the last dimension in one piece."""
    rows, columns = logits.shape
    chosen = torch.empty(rows, topk, dtype=torch.int32)
    call = library.function("choose", c_int32, _CHOOSE)
    status = call(
        *(logits.data_ptr(), rows, columns, logits.stride(0), chosen.data_ptr(), topk),
        *(workers, library.parallel_for),
    )
    if status:
        raise KernelError(REFUSALS[status])
    return chosen


_CHOOSE = (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p)
_INDEX = (ctypes.POINTER(IndexStruct), c_int64, c_void_p)


def _run(library: Library, name: str, index: IndexStruct, workers: int) -> None:
    status = library.function(name, c_int32, _INDEX)(index, workers, library.parallel_for)
    if status in (3, 4):
        raise BlockError(index.bad_request, index.bad_block, status == 4)
    if status:
        raise KernelError(REFUSALS[status])
