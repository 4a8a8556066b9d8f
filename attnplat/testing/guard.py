"""Memory that ends in a page which must not be touched, and processes that may die of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import signal
import sys
from collections.abc import Callable

import torch

from attnplat.backends.kv_cache import KVCache
from attnplat.testing.bench import Bench
from attnplat.testing.case import Failed
from attnplat.testing.paging import PagedMemory, by_block, paging_of
from attnplat.testing.scenes import Arrangement, Scene
from attnplat.testing.stage import lay_out

PROT_NONE = 0


def guarded(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] whose last byte is followed by a page that may not be read.

    Linux only. The memory lives as long as the process.
    """
    page = mmap.PAGESIZE
    room = -(-nbytes // page) * page
    area = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + room), page, PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect refused to guard a page")
    whole = torch.frombuffer(area, dtype=torch.uint8, count=room)
    return whole[room - nbytes :]


def guarded_cache(bench: Bench, scene: Scene, how: Arrangement) -> PagedMemory:
    """The scene's cache in guarded memory, each plane ending at the guard."""
    impl, paging = bench.impl(scene), paging_of(scene, how)
    plain = PagedMemory.allocate(paging, impl, bench.device)
    spec, views, planes = plain.cache.spec, {}, {}
    for name, (memory, _) in plain.planes.items():
        own = guarded(memory.numel() * memory.element_size()).view(memory.dtype)
        own.copy_(memory)
        shape = spec.k_shape(paging.num_blocks) if name == "k" else spec.v_shape(paging.num_blocks)
        views[name] = own.view(shape)
        planes[name] = (own, by_block(views[name], spec.layout))
    return PagedMemory(KVCache(k=views["k"], v=views.get("v"), spec=spec), planes)


def run_guarded(bench: Bench, scene: Scene, how: Arrangement) -> None:
    """Judge the scene in a child process over a guarded cache; fails when the child dies."""

    def work() -> None:
        impl = bench.impl(scene)
        memory = guarded_cache(bench, scene, how)
        stage = lay_out(scene, how, impl, bench.device, memory)
        bench.judge(scene, bench.call(scene, how, impl=impl, stage=stage))

    in_child(work)


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked process, on one thread; raises `Failed` as it does, or if it dies."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os._exit(_report(work, writer))
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        told = stream.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise Failed(f"the process died of {name}: memory was touched that is not the cache's")
    if told:
        raise Failed(str(pickle.loads(told)))


def _report(work: Callable[[], None], writer: int) -> int:
    """Run in the child: what went wrong goes to the parent."""
    # A crash is expected here; nobody wants its core or its trace.
    for number in (signal.SIGSEGV, signal.SIGBUS):
        signal.signal(number, signal.SIG_DFL)
    with open(os.devnull, "w") as silent:
        os.dup2(silent.fileno(), 2)
    # Threads of the parent's pool are not in the child.
    torch.set_num_threads(1)
    signal.alarm(60)
    told = b""
    try:
        work()
    except BaseException as error:
        told = pickle.dumps(f"{type(error).__name__}: {error}"[:2000])
    with os.fdopen(writer, "wb") as stream:
        stream.write(told)
    return 0
