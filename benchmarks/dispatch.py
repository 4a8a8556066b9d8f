"""What a call costs besides its kernel: directly, as an operator, and inside a compiled graph.

    python benchmarks/dispatch.py [--json] [--compiled]

The implementation measured runs no kernel, so that nothing but checks and dispatch is left; one
decode step of TORCH_SDPA stands beside it for scale. CPU time of one call on one thread, the
best of several rounds. `--compiled` adds a graph of several layers, which Inductor makes first
(half a minute). Where there is a CUDA or HIP device, a decode step there follows: run eagerly,
by a plan that is updated in place, and replayed from a device graph (wall time, waited for).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from attnplat import Batch, KVCache, MhaConfig, PageTable
from attnplat.backends.batch import BatchBounds
from attnplat.backends.handle import HANDLE_TYPE
from attnplat.backends.interface import AttentionImpl, Plan
from attnplat.backends.plan import Call
from attnplat.backends.portable.torch_sdpa import TorchSdpaImpl

CONFIG = MhaConfig(head_size=128, num_heads=32, num_kv_heads=8, dtype="bfloat16")
LAYERS, ROUNDS, CALLS = 4, 9, 300


class WithoutKernel(TorchSdpaImpl):
    """Everything but the kernel."""

    def _attend(self, plan: Plan, call: Call) -> None:
        """Leave `out` as it is."""


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """CPU time of one call, the best of `ROUNDS` rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.thread_time()
        for _ in range(calls):
            call()
        best = min(best, (time.thread_time() - started) / calls)
    return best * 1e6


def decode_step(impl: AttentionImpl) -> tuple[Plan, KVCache, dict[str, torch.Tensor]]:
    """Eight requests of 256 keys, one new token each."""
    batch = Batch.from_lengths([1] * 8, [256] * 8)
    blocks = [list(range(16 * r, 16 * r + 16)) for r in range(8)]
    pages = PageTable.from_blocks(blocks, batch, 16)
    cache = KVCache.allocate(impl.kv_cache_spec(16), 128)
    for plane in cache.pages():
        plane.zero_()
    shapes = {"q": 32, "k": 8, "v": 8, "out": 32}
    tokens = {n: torch.zeros(8, h, 128, dtype=torch.bfloat16) for n, h in shapes.items()}
    return impl.plan(batch, pages), cache, tokens


def custom_op() -> Callable[..., None]:
    """An operator of as many tensors, made the way that is shorter to write."""

    @torch.library.custom_op("attnplat_benchmark::forward", mutates_args=("out",))
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, size: int
    ) -> None:
        """Nothing."""

    return forward


def measure(compiled: bool) -> dict[str, float]:
    """Microseconds a call, by what is called."""
    impl = WithoutKernel.create(CONFIG, "cpu")
    plan, cache, t = decode_step(impl)
    q, k, v, out = t["q"], t["k"], t["v"], t["out"]
    found = {
        "direct call": microseconds(lambda: impl.forward(plan, q, cache, out=out)),
        "direct write": microseconds(lambda: impl.write_kv(cache, k, v, plan)),
    }
    if HANDLE_TYPE is not None:
        found.update(_operators(impl, plan, cache, t))
    made = custom_op()
    found["an empty custom_op, for comparison"] = microseconds(lambda: made(q, k, v, out, 3))
    real = TorchSdpaImpl.create(CONFIG, "cpu")
    real_plan = decode_step(real)[0]
    found["direct call of TORCH_SDPA, kernel included"] = microseconds(
        lambda: real.forward(real_plan, q, cache, out=out), 20
    )
    if compiled:
        found.update(_compiled(impl, plan, cache, t))
    return found


def _operators(
    impl: AttentionImpl, plan: Plan, cache: KVCache, t: dict[str, torch.Tensor]
) -> dict[str, float]:
    q, out = t["q"], t["out"]
    nothing: tuple[Any, ...] = (None,) * 10
    rest = (impl.handle, plan.handle, q, cache.handle)
    own, copied = (*rest, *cache.views, *nothing), (*rest, *_again(cache), *nothing)
    forward = torch.ops.attnplat.forward.default
    return {
        "operator": microseconds(lambda: forward(*own, out, None)),
        "operator, views made anew by a graph": microseconds(lambda: forward(*copied, out, None)),
    }


def _again(cache: KVCache) -> tuple[torch.Tensor | None, ...]:
    """The views as other tensors on the same memory."""
    return tuple(None if view is None else view[:] for view in cache.views)


def _compiled(
    impl: AttentionImpl, plan: Plan, cache: KVCache, t: dict[str, torch.Tensor]
) -> dict[str, float]:
    def run(plan: Plan, q: torch.Tensor, out: torch.Tensor) -> None:
        for _ in range(LAYERS):
            impl.forward(plan, q, cache, out=out)

    graph = torch.compile(run, fullgraph=HANDLE_TYPE is not None)
    plain = microseconds(lambda: run(plan, t["q"], t["out"])) / LAYERS
    graph(plan, t["q"], t["out"])
    inside = microseconds(lambda: graph(plan, t["q"], t["out"])) / LAYERS
    return {"a layer of a plain model": plain, "a layer of a compiled model": inside}


def measure_device() -> dict[str, float]:
    """Microseconds of a decode step of TORCH_SDPA: 8 requests of a thousand keys."""
    impl = TorchSdpaImpl.create(CONFIG, "cuda")
    batch = Batch.from_lengths([1] * 8, [1000 + 7 * r for r in range(8)], device="cuda")
    blocks = [list(range(70 * r, 70 * r + 70)) for r in range(8)]
    pages = PageTable.from_blocks(blocks, batch, 16)
    cache = KVCache.allocate(impl.kv_cache_spec(16), 560, "cuda")
    for plane in cache.pages():
        plane.normal_()
    q = torch.randn(8, 32, 128, device="cuda").bfloat16()
    out = torch.zeros_like(q)
    bounds = BatchBounds(max_reqs=8, max_tokens=8, max_query_len=1, max_seq_len=1120)
    plain, fixed = impl.plan(batch, pages), impl.plan(batch, pages, bounds=bounds)

    def run(plan: Plan) -> None:
        impl.forward(plan, q, cache, out=out)

    run(plain)
    run(fixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(fixed)
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: impl.plan(batch, pages),
        "forward": lambda: run(plain),
        "update in place": lambda: impl.update(fixed, batch, pages),
        "forward in place": lambda: run(fixed),
        "replay of it": graph.replay,
    }
    return {f"device: {name}": _waited_for(call) for name, call in calls.items()}


def _waited_for(call: Callable[[], object], calls: int = 50) -> float:
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - started) / calls)
    return best * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = measure(arguments.compiled)
    if torch.cuda.is_available():
        with torch.no_grad():
            found.update(measure_device())
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "microseconds": found}))
        return
    for what, cost in found.items():
        print(f"{cost:9.1f} us  {what}")


if __name__ == "__main__":
    main()
