"""The kernels touch no byte outside the tensors they are given: guard pages on both sides."""

from __future__ import annotations

import ctypes
import mmap
import tempfile

import pytest
import torch

from attnplat.backends.kv_cache import KVCache
from attnplat.platforms.cpu.impls.attention import CpuAttnImpl
from tests.execution.cases import Paged, Step, layer, make_step
from tests.execution.cpu.steps import ISAS, attend, same
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401


class Guarded:
    """Copies of tensors whose first or last byte is next to memory that must not be touched."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self._maps: list[mmap.mmap] = []
        libc = ctypes.CDLL(None, use_errno=True)
        self._protect = libc.mprotect
        self._protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        page, nbytes = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
        inner = max(-(-nbytes // page), 1) * page
        area = mmap.mmap(-1, inner + 2 * page)
        self._maps.append(area)
        start = page + (inner - nbytes if self.at_end else 0)
        bytes_ = torch.frombuffer(area, dtype=torch.uint8, count=nbytes, offset=start)
        copied = bytes_.view(tensor.dtype).view(tensor.shape)
        copied.copy_(tensor)
        base = bytes_.data_ptr() - start
        for guard in (base, base + page + inner):
            assert self._protect(guard, page, 0) == 0
        return copied


def guarded_step(step: Step, guards: Guarded) -> tuple[Step, Paged]:
    """The step, its cache ending exactly with its last live token."""
    paged = step.paged(16, "NHD", spare=0)
    # The last block's dead slots stay outside: NHD keeps them at the block's end.
    cache = paged.cache
    k, v = (guards.copy(t) for t in (cache.k, cache.v))
    paged = Paged(step, KVCache(k=k, v=v, spec=cache.spec), paged.pages, paged.blocks)
    guarded = Step(
        config=step.config,
        batch=step.batch,
        q=guards.copy(step.q),
        k=step.k,
        v=step.v,
        options={name: guards.copy(t) for name, t in step.options.items()},
    )
    return guarded, paged


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("head_size", [16, 36, 72, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("isa", ISAS)
def test_no_byte_outside_is_touched(isa: str, dtype: str, head_size: int, at_end: bool) -> None:
    config = layer(
        head_size=head_size, dtype=dtype, sinks=True, alibi=True, position_bias=True, num_heads=6
    )
    step = make_step(config, [1, 13, 1], [129, 31, 5])
    guards = Guarded(at_end)
    guarded, paged = guarded_step(step, guards)
    out = guards.copy(torch.zeros_like(step.q))
    lse = guards.copy(torch.zeros(step.q.shape[:2]))
    found = attend(guarded, isa, paged, out=out, lse=lse)
    assert same(found, attend(step, isa, step.paged(16, "NHD", spare=0)))


@pytest.mark.parametrize("isa", ISAS)
def test_pages_without_a_live_token_are_never_read(isa: str) -> None:
    step = make_step(layer(dtype="bfloat16", head_size=128), [1], [65])
    guards = Guarded(True)
    paged = step.paged(64, "HND", spare=0)
    # 65 tokens need two blocks: of the second, one token's row is live. The guarded copy of the
    # cache ends right behind that row.
    blocks = [[0, 1]]
    k, v = paged.cache.pages()
    order = torch.tensor(paged.blocks[0])
    dense_k, dense_v = k[order], v[order]
    config = step.config
    heads, size = config.num_kv_heads or 1, config.head_size
    # One head a time is a cache of its own: heads outermost, blocks packed.
    for head in range(heads):
        rows_k = dense_k[:, head].reshape(-1, size)[:65]
        rows_v = dense_v[:, head].reshape(-1, size)[:65]
        one = make_step(
            layer(dtype="bfloat16", head_size=128, num_heads=2, num_kv_heads=1), [1], [65]
        )
        one.q.copy_(step.q[:, 2 * head : 2 * head + 2])
        one.k[0][:, 0], one.v[0][:, 0] = rows_k, rows_v
        want = attend(one, isa, one.paged(64, "HND"))
        spec = CpuAttnImpl.create(one.config, "cpu", isa=isa).kv_cache_spec(64, "HND")
        short_k, short_v = guards.copy(rows_k), guards.copy(rows_v)
        shape, strides = (2, 1, 64, size), (64 * size, 64 * size, size, 1)
        views = [
            torch.as_strided(_claim(t, 128 * size), shape, strides) for t in (short_k, short_v)
        ]
        cache = KVCache(k=views[0], v=views[1], spec=spec)
        pages = one.paged(64, "HND").pages
        pages.block_table[0, :2] = torch.tensor(blocks[0], dtype=torch.int32)
        assert pages.slot_mapping is not None
        pages.slot_mapping.fill_(-1)
        assert same(attend(one, isa, Paged(one, cache, pages, blocks)), want)


def _claim(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A view that claims more elements than there are; whoever reads them faults."""
    pointer = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
    array = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8 * (2 * elements))).contents
    return torch.frombuffer(array, dtype=torch.bfloat16)


@pytest.mark.parametrize("isa", ISAS)
def test_blocks_more_than_two_gigabytes_apart_are_found(isa: str) -> None:
    step = make_step(layer(dtype="bfloat16", num_heads=2, num_kv_heads=1), [1], [40])
    spec = CpuAttnImpl.create(step.config, "cpu", isa=isa).kv_cache_spec(16, "HND")
    paged = step.paged(16, "HND")
    apart = 1 << 29  # elements from block to block: a sparse file, of which little is written
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * 8 * 2 * apart)
        area = mmap.mmap(file.fileno(), 0)
    far = torch.frombuffer(area, dtype=torch.bfloat16)
    views = []
    for n, plane in enumerate(paged.cache.pages()):
        view = torch.as_strided(
            far, (len(plane), 1, 16, 16), (apart, 256, 16, 1), storage_offset=n * 8 * apart
        )
        view.copy_(plane)
        views.append(view)
    cache = KVCache(k=views[0], v=views[1], spec=spec)
    got = attend(step, isa, Paged(step, cache, paged.pages, paged.blocks))
    assert same(got, attend(step, isa, paged))
