"""The binding of the C++ library: its structs as `csrc/cpu/attnplat_cpu.h` has them.

The library is loaded when first asked for. Threads are torch's own, through a symbol that its
library exports from 2.10 on; below that the library brings a pool.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnplat.platforms.cpu import kernels

ABI = 3
FILE_NAME = "libattnplat_cpu.so"

ENCODINGS = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "fp8_e4m3fn": 3,
    "fp8_e5m2": 4,
    "int8_th": 5,
    "fp8_th": 3,
    "mla_fp8_656": 6,
    "mla_fp8_584": 7,
    "mla_fp8_528": 8,
    "mla_nvfp4_352": 9,
}
"""The library's numbers for how k and v are stored; the first three for q and out, too. Formats
with a scale in each row are told by where in the row it is."""


class KernelError(Exception):
    """The library is missing, of another version, or refuses what it was given."""


class NotBuiltError(KernelError):
    """There is no library beside this module."""


class BlockError(KernelError):
    """A block table names a block that cannot be read.

    `request` is its row, `block` the id in it, or the logical block where `outside` the row.
    """

    def __init__(self, request: int, block: int, outside: bool) -> None:
        self.request, self.block, self.outside = request, block, outside
        super().__init__(f"request {request}, block {block}")


_Field = tuple[str, type[Any]]


def struct_fields(*groups: tuple[type[Any], str]) -> list[_Field]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class PlanStruct(ctypes.Structure):
    """`attnplat_cpu_plan`."""

    _fields_ = struct_fields(
        (c_uint32, "size version"),
        (c_int32, "isa num_reqs"),
        (c_int64, "num_tokens"),
        (c_int32, "num_heads num_kv_heads head_size v_head_size dtype kv_encoding"),
        (c_int32, "values_in_keys causal"),
        (c_void_p, "query_start seq_lens block_table"),
        (c_int64, "table_stride table_width block_size"),
        (c_void_p, "first_block kv_start causal_of"),
        (c_int64, "window_left window_right chunk_size static_sink_tokens"),
        (c_void_p, "prefix_lens ranges range_starts tree_mask"),
        (c_int64, "tree_stride tree_bytes"),
        (c_int32, "topk reserved"),
    )


class TensorsStruct(ctypes.Structure):
    """`attnplat_cpu_tensors`, for its layout: `Tensors` fills it."""

    _fields_ = struct_fields(
        (c_uint32, "size version"),
        (c_void_p, "q"),
        (c_int64, "q_token q_head"),
        (c_void_p, "k"),
        (c_int64, "k_block k_head k_token"),
        (c_void_p, "v"),
        (c_int64, "v_block v_head v_token"),
        (c_void_p, "out"),
        (c_int64, "out_token out_head"),
        (c_void_p, "lse"),
        (c_int64, "lse_token lse_head"),
        (c_void_p, "sinks alibi_slopes position_bias"),
        (c_int64, "bias_request bias_head bias_query"),
        (c_void_p, "topk_indices"),
        (c_int64, "topk_stride topk_count"),
        (c_void_p, "k_scale v_scale"),
        (c_int64, "k_scale_head v_scale_head"),
        (c_int64, "k_scale_at v_scale_at"),
        (c_float, "scale logits_soft_cap"),
        (c_void_p, "partials row_scales"),
        (c_int64, "row_scales_block row_scales_token"),
    )


class SummaryStruct(ctypes.Structure):
    """`attnplat_cpu_summary`."""

    _fields_ = struct_fields(
        (c_int64, "num_tasks num_whole whole_workers num_folds partial_floats scratch_bytes"),
        (c_int64, "most_workers highest_block bad_request bad_block"),
    )


_CODES: dict[type[Any], str] = {
    c_uint32: "I",
    c_int32: "i",
    c_int64: "q",
    c_void_p: "P",
    c_float: "f",
}


def layout_of(kind: type[ctypes.Structure]) -> str:
    """The struct's fields in the letters of the module `struct`, which packs faster."""
    return "".join(_CODES[field[1]] for field in kind._fields_)


_PACKED = struct.Struct(layout_of(TensorsStruct))
_HEAD = (ctypes.sizeof(TensorsStruct), ABI)


class Tensors(NamedTuple):
    """One layer's tensors: addresses, strides in elements, and what else `attend` takes.

    The fields of `attnplat_cpu_tensors` behind its version, in order; 0 for a null pointer.
    """

    q: int
    q_token: int
    q_head: int
    k: int
    k_block: int
    k_head: int
    k_token: int
    v: int
    v_block: int
    v_head: int
    v_token: int
    out: int
    out_token: int
    out_head: int
    lse: int
    lse_token: int
    lse_head: int
    sinks: int
    alibi_slopes: int
    position_bias: int
    bias_request: int
    bias_head: int
    bias_query: int
    topk_indices: int
    topk_stride: int
    topk_count: int
    k_scale: int
    v_scale: int
    k_scale_head: int
    v_scale_head: int
    k_scale_at: int
    v_scale_at: int
    scale: float
    logits_soft_cap: float
    partials: int
    row_scales: int = 0
    row_scales_block: int = 0
    row_scales_token: int = 0

    def packed(self) -> bytes:
        """The struct's memory."""
        return _PACKED.pack(*_HEAD, *self)

    def rest(self) -> bytes:
        """Its part behind `out_head`, which calls of a layer mostly have in common."""
        return self.packed()[_FRONT.size :]


_NUM_FRONT = 2 + Tensors._fields.index("out_head") + 1
_FRONT = struct.Struct(layout_of(TensorsStruct)[:_NUM_FRONT])


def pack_front(*values: int) -> bytes:
    """The struct's memory up to `out_head`: the fields of `Tensors` in order."""
    return _FRONT.pack(*_HEAD, *values)


def with_partials(tensors: bytes, address: int) -> bytes:
    """The struct's memory with the field `partials` set."""
    at = TensorsStruct.partials.offset
    return tensors[:at] + struct.pack("P", address) + tensors[at + struct.calcsize("P") :]


REFUSALS = {
    1: "its structs are of another version",
    2: "a length, count, encoding or block size cannot be",
    5: "there is not enough memory",
    6: "there is no such instruction set",
}


@dataclass(eq=False)
class Tasks:
    """What a schedule came to: the tasks as the library wrote them, and their sizes."""

    memory: ctypes.Array[Any]
    summary: SummaryStruct

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Of the tasks and of the summary."""
        return ctypes.addressof(self.memory), ctypes.addressof(self.summary)


class Library:
    """The loaded library.

    Raises KernelError for a file that cannot be loaded or has another ABI.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(f"{path} cannot be loaded: {error}") from error
        _declare(self._c)
        self._attend = self._c.attnplat_cpu_attend
        if (abi := self._c.attnplat_cpu_abi()) != ABI:
            raise KernelError(f"{path} has ABI {abi}; this package reads {ABI}: build it again")
        self._parallel_for = _torch_parallel_for()
        self.has_torch_threads = self._parallel_for is not None
        if self._parallel_for is None:
            pool = ctypes.cast(self._c.attnplat_cpu_pool_for, c_void_p)
            self._parallel_for = pool.value

    @property
    def parallel_for(self) -> int | None:
        """The address of the parallel loop that the kernels are to run on."""
        return self._parallel_for

    def function(self, name: str, result: type[Any], arguments: Sequence[Any]) -> Any:
        """The library's function of that name, for bindings besides this one."""
        found = getattr(self._c, f"attnplat_cpu_{name}")
        found.restype, found.argtypes = result, arguments
        return found

    @property
    def isas(self) -> tuple[str, ...]:
        """Instruction sets that were compiled in, lowest first."""
        count = self._c.attnplat_cpu_isa_count()
        return tuple(self._c.attnplat_cpu_isa_name(n).decode() for n in range(count))

    @property
    def usable_isas(self) -> tuple[str, ...]:
        """Those of them that this machine runs."""
        return tuple(name for n, name in enumerate(self.isas) if self._c.attnplat_cpu_isa_usable(n))

    def isa_index(self, limit: str | None = None) -> int:
        """The number of the instruction set to use: the highest, or exactly `limit`.

        Raises KernelError for one that was not compiled in or that this machine does not run.
        """
        index: int = self._c.attnplat_cpu_isa_index(None if limit is None else limit.encode())
        if index < 0:
            runs = ", ".join(reversed(self.usable_isas))
            raise KernelError(f"there are no kernels for {limit} here; this machine runs {runs}")
        return index

    def schedule(self, plan: PlanStruct) -> Tasks:
        """The tasks of a plan. Raises KernelError; BlockError for block tables."""
        size, summary = self._c.attnplat_cpu_task_bytes(), SummaryStruct()
        count = 64
        while True:
            memory = ctypes.create_string_buffer(max(count, 1) * size)
            status = self._c.attnplat_cpu_schedule(plan, memory, count, summary)
            if status in (3, 4):
                raise BlockError(summary.bad_request, summary.bad_block, status == 4)
            if status:
                raise KernelError(REFUSALS[status])
            if (found := summary.num_tasks + summary.num_whole) <= count:
                return Tasks(memory, summary)
            count = found

    def attend(self, plan: PlanStruct, tensors: bytes, tasks: Tasks, workers: int) -> None:
        """Run a layer, whose tensors are packed, on at most `workers` threads.

        Raises KernelError.
        """
        status = self._attend(
            ctypes.addressof(plan),
            tensors,
            *tasks.addresses,
            workers,
            self._parallel_for,
        )
        if status:
            raise KernelError(REFUSALS[status])

    def read(self, data: torch.Tensor, workers: int, isa: str | None = None) -> int:
        """The sum of a contiguous tensor's bytes as words: how fast memory is read."""
        total: int = self._c.attnplat_cpu_read(
            self.isa_index(isa), data.data_ptr(), data.nbytes, workers, self._parallel_for
        )
        return total

    def multiply(self, rounds: int, workers: int, isa: str | None = None) -> int:
        """Multiplies and adds as fast as can be, and says how often."""
        count: int = self._c.attnplat_cpu_multiply(
            self.isa_index(isa), rounds, workers, self._parallel_for
        )
        return count


def _declare(c: ctypes.CDLL) -> None:
    pointer = ctypes.POINTER
    plan, summary = pointer(PlanStruct), pointer(SummaryStruct)
    for name, result, arguments in (
        ("abi", c_uint32, []),
        ("isa_count", c_int32, []),
        ("isa_name", ctypes.c_char_p, [c_int32]),
        ("isa_usable", c_int32, [c_int32]),
        ("isa_index", c_int32, [ctypes.c_char_p]),
        ("task_bytes", c_int64, []),
        ("schedule", c_int32, [plan, c_void_p, c_int64, summary]),
        ("attend", c_int32, [c_void_p, ctypes.c_char_p, c_void_p, c_void_p, c_int64, c_void_p]),
        ("read", c_uint64, [c_int32, c_void_p, c_int64, c_int64, c_void_p]),
        ("multiply", c_int64, [c_int32, c_int64, c_int64, c_void_p]),
    ):
        function = getattr(c, f"attnplat_cpu_{name}")
        function.restype, function.argtypes = result, arguments


def _torch_parallel_for() -> int | None:
    """The address of torch's parallel loop, or None before torch 2.10."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    path = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
    try:
        symbol = ctypes.CDLL(str(path)).torch_parallel_for
    except (OSError, AttributeError):
        return None
    return ctypes.cast(symbol, c_void_p).value


def find_library(folders: Iterable[str] | None = None) -> Path | None:
    """Where the library is, or None when it was not built.

    An editable install keeps it in another folder than the sources; a package knows both.
    """
    for folder in kernels.__path__ if folders is None else folders:
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    return None


@cache
def load() -> Library:
    """The library, loaded once. Raises NotBuiltError where there is none."""
    path = find_library()
    if path is None:
        raise NotBuiltError(
            "attnplat was installed without its CPU kernels; install it again where there is a "
            "C++ compiler"
        )
    return Library(path)
