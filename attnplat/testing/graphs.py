"""Calls captured into a device graph, and replayed over other contents of the same memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnplat.backends.interface import AttentionImpl
from attnplat.backends.plan import Plan
from attnplat.testing.bench import Bench, Outcome
from attnplat.testing.case import Refused
from attnplat.testing.stage import Stage


class Recording:
    """One call of a layer, captured on a side stream.

    Attributes:
        stage: the memory that every replay reads and writes.
        plan: the plan that it was captured with, to be updated in place.

    Raises `Refused` for a backend that does not update plans in place.
    """

    def __init__(self, bench: Bench, impl: AttentionImpl, plan: Plan, stage: Stage) -> None:
        if not impl.updates_in_place:
            raise Refused("does not update plans in place, which device graphs need")
        self.stage, self.plan = stage, plan
        side, current = torch.cuda.Stream(bench.device), torch.cuda.current_stream(bench.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            bench.launch(impl, plan, stage)  # what a first call makes once is no part of a graph
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            self.out, self.lse = bench.launch(impl, plan, stage)

    def replay(self, stage: Stage) -> Outcome:
        """The captured call over what `stage` holds, which is of the same shapes."""
        for own, other in zip(_memory(self.stage), _memory(stage), strict=True):
            own.copy_(other)
        self._graph.replay()
        torch.cuda.synchronize()
        rows = stage.scene.num_rows
        lse = None if self.lse is None else self.lse[:rows]
        return Outcome(self.out[:rows], lse, self.stage, self.plan)

    def written(self, stage: Stage) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """What a call writes, here and in `stage`: name, ours, theirs."""
        for name, own, other in (
            ("out", self.stage.out, stage.out),
            ("lse", self.stage.lse, stage.lse),
        ):
            if own is not None and other is not None:
                yield name, own, other
        for own, other in zip(_planes(self.stage), _planes(stage), strict=True):
            yield "the cache", own, other


def _planes(stage: Stage) -> list[torch.Tensor]:
    return [] if stage.cache is None else [view for view in stage.cache.views if view is not None]


def _memory(stage: Stage) -> Iterator[torch.Tensor]:
    """All tensors of the call, in an order of their own."""
    given = [stage.q, *(stage.kv or ()), stage.out, stage.lse, *_planes(stage)]
    yield from (tensor for tensor in given if tensor is not None)
    yield from (stage.options[name] for name in sorted(stage.options))
