"""The binding of the library's writer: new keys and values to their slots."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_int32, c_int64, c_uint32, c_void_p

import torch

from attnplat.platforms.cpu.kernels.library import (
    ABI,
    REFUSALS,
    KernelError,
    Library,
    layout_of,
    struct_fields,
)


class WritingStruct(ctypes.Structure):
    """`attnplat_cpu_writing`, for its layout: `Writer` fills it."""

    _fields_ = struct_fields(
        (c_uint32, "size version"),
        (c_int32, "element_size num_heads"),
        (c_void_p, "rows slots"),
        (c_int64, "count block_size"),
        (c_void_p, "k"),
        (c_int64, "k_token k_head k_size"),
        (c_void_p, "k_pages"),
        (c_int64, "k_pages_block k_pages_head k_pages_token"),
        (c_void_p, "v"),
        (c_int64, "v_token v_head v_size"),
        (c_void_p, "v_pages"),
        (c_int64, "v_pages_block v_pages_head v_pages_token"),
    )


_PACKED = struct.Struct(layout_of(WritingStruct))
_HEAD = (ctypes.sizeof(WritingStruct), ABI)
_NO_VALUES = (0,) * 8


class Writer:
    """Copies rows that are stored as they come."""

    def __init__(self, library: Library) -> None:
        arguments = [ctypes.c_char_p, c_int64, c_void_p]
        self._write = library.function("write", c_int32, arguments)
        self._parallel_for = library.parallel_for

    def write(
        self,
        k: tuple[torch.Tensor, torch.Tensor],
        v: tuple[torch.Tensor, torch.Tensor] | None,
        axes: tuple[int, int, int],
        rows: torch.Tensor | None,
        slots: torch.Tensor,
    ) -> None:
        """Store new tokens.

        `k` are new rows [tokens, num_kv_heads, head_size] and the plane they go to, of the same
        dtype, whose block, head and token are dimensions `axes`; `v` alike, or None. `rows`
        (int64; None for all) says which tokens, `slots` (int64, none negative) where they go.
        Raises KernelError.
        """
        new, plane = k
        where = slots.contiguous()
        packed = _PACKED.pack(
            *_HEAD,
            new.element_size(),
            new.shape[1],
            0 if rows is None else rows.data_ptr(),
            where.data_ptr(),
            len(where),
            plane.shape[axes[2]],
            *_plane(new, plane, axes),
            *(_NO_VALUES if v is None else _plane(*v, axes)),
        )
        status = self._write(packed, torch.get_num_threads(), self._parallel_for)
        if status:
            raise KernelError(REFUSALS[status])


def _plane(
    rows: torch.Tensor, plane: torch.Tensor, axes: tuple[int, int, int]
) -> tuple[int, int, int, int, int, int, int, int]:
    token, head, _ = rows.stride()
    to = plane.stride()
    block_axis, head_axis, token_axis = axes
    return (
        *(rows.data_ptr(), token, head, rows.shape[2]),
        *(plane.data_ptr(), to[block_axis], to[head_axis], to[token_axis]),
    )
