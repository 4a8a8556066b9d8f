"""A layer inside torch.compile: the new tokens' write and the attention after it, as one graph."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.plan import Plan
from attnplat.testing.bench import Bench, Outcome
from attnplat.testing.case import Failed
from attnplat.testing.scenes import Scene
from attnplat.testing.stage import Stage


class Compiled:
    """`write_kv` and `forward` of one layer as a whole graph by Inductor."""

    def __init__(self, impl: AttentionImpl) -> None:
        self.impl = impl
        torch._dynamo.reset()
        self._call = torch.compile(self._layer, fullgraph=True)

    def _layer(
        self, plan: Plan, cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
    ) -> Any:
        self.impl.write_kv(cache, k, v, plan)
        return self.impl.forward(plan, q, cache, return_lse=self.impl.form.lse)

    def first(self, bench: Bench, scene: Scene, stage: Stage) -> None:
        """The call that makes the graph; fail unless it is right and copies no cache."""
        from torch._inductor import config
        from torch._inductor.utils import run_and_get_code

        def call() -> None:
            self._judge(bench, scene, stage)

        with config.patch(force_disable_caches=True):
            _, codes = run_and_get_code(call)
        assert stage.cache is not None
        largest = max((size for code in codes for size in buffers(code)), default=0)
        if largest >= stage.cache.k.numel():
            raise Failed(f"the graph makes a buffer of {largest} elements: the cache is copied")

    def again(self, bench: Bench, scene: Scene, stage: Stage) -> None:
        """A call with a plan of its own; fail unless the graph that is there does it, rightly."""
        from torch._dynamo.utils import counters

        before = counters["stats"]["unique_graphs"]
        self._judge(bench, scene, stage)
        if more := counters["stats"]["unique_graphs"] - before:
            raise Failed(f"another plan makes {more} more graphs")

    def _judge(self, bench: Bench, scene: Scene, stage: Stage) -> None:
        assert stage.cache is not None and stage.kv is not None
        plan = self.impl.plan(stage.batch, stage.pages)
        with torch.no_grad():
            result = self._call(plan, stage.cache, stage.q, *stage.kv)
        out, lse = result if isinstance(result, tuple) else (result, None)
        bench.judge(scene, Outcome(out, lse, stage, plan))
        if damage := stage.damage():
            raise Failed(damage)


def buffers(code: str) -> list[int]:
    """Elements of each buffer that generated code allocates."""
    shapes = re.findall(r"empty_strided_\w+\(\(([\d, ]+)\)", code)
    return [math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes]
