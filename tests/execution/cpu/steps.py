"""Steps for the CPU kernels: every feature, odd shapes, and each instruction set that runs here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnplat.config.names import Feature
from attnplat.platforms.cpu.impls.attention import CpuAttnImpl
from attnplat.platforms.cpu.kernels import library
from tests.execution.cases import Paged, Step, layer, make_step, run_plan, tree

BUILT = library.find_library() is not None
needs_library = pytest.mark.skipif(not BUILT, reason="the C++ kernels were not built")
ISAS: tuple[str, ...] = library.load().usable_isas if BUILT else ("scalar",)
"""Instruction sets that were compiled in and run on this machine, lowest first."""

LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1, 1, 1], [1, 64, 129]),
    "prefill": ([70, 3], [70, 3]),
    "mixed": ([1, 33, 0, 5], [100, 40, 0, 69]),
    "long": ([1, 2], [1100, 513]),
}
"""Query and sequence lengths: single tokens, prompts, both, and several pieces of keys."""


def lse(*also: Feature, **changes: Any) -> dict[str, Any]:
    """Changes to `layer()` that keep LSE and declare more."""
    return {**changes, "also_needs": frozenset({Feature.LSE, *also})}


FEATURES: dict[str, dict[str, Any]] = {
    "plain": lse(),
    "not causal": lse(causal=False),
    "window": lse(sliding_window=(5, 0)),
    "window of one": lse(sliding_window=(0, -1)),
    "window both ways": lse(sliding_window=(3, 4), causal=False),
    "window past a tile": lse(sliding_window=(64, -1)),
    "chunk": lse(chunk_size=50),
    "static sinks and window": lse(static_sink_tokens=3, sliding_window=(5, 0)),
    "sinks": lse(sinks=True),
    "sinks and window": lse(sinks=True, sliding_window=(9, 0)),
    "soft cap": lse(logits_soft_cap=0.5),
    "alibi": lse(alibi=True),
    "soft cap and alibi": lse(logits_soft_cap=30.0, alibi=True),
    "position bias": lse(position_bias=True),
    "topk": lse(topk=7),
    "negative scale": lse(scale=-0.4),
    "scale of zero": lse(scale=0.0),
    "narrow values": lse(Feature.V_HEAD_SIZE, v_head_size=24),
    "wide values": lse(Feature.V_HEAD_SIZE, head_size=8, v_head_size=40),
}


def batch_masks(query_lens: list[int]) -> dict[str, tuple[Feature, dict[str, Any]]]:
    """Masks that a batch carries: the feature a layer declares, and fields of the batch."""
    n = len(query_lens)
    steps = [
        [[int(b <= a and (a + b) % 3 != 1) for b in range(q)] for a in range(q)] for q in query_lens
    ]
    return {
        "causal by request": (
            Feature.PER_REQUEST_CAUSAL,
            {"causal": [r % 2 == 0 for r in range(n)]},
        ),
        "ranges": (
            Feature.MM_PREFIX,
            {"ranges": [(n - 1, 0, 4), (0, 2, 9), (n - 1, 60, 68), (0, 64, 300)]},
        ),
        "prefix lengths": (
            Feature.PREFIX_LENGTHS,
            {"prefix_lens": [5 * (r + 1) for r in range(n)]},
        ),
        "tree": (Feature.TREE_MASK, {"tree_mask": tree(*steps)}),
    }


def attend(
    step: Step,
    isa: str,
    paged: Paged | None = None,
    *,
    prepare: Callable[[CpuAttnImpl], Any] | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the step by the C++ kernels."""
    impl = CpuAttnImpl.create(step.config, "cpu", isa=isa)
    if prepare is not None:
        prepare(impl)
    plan = impl.plan(step.batch, None if paged is None else paged.pages, validate=True)
    return run_plan(impl, plan, step, paged, **extra)


def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether two results are bit for bit the same."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


__all__ = [
    "BUILT",
    "FEATURES",
    "ISAS",
    "LENGTHS",
    "attend",
    "batch_masks",
    "layer",
    "lse",
    "make_step",
    "needs_library",
    "same",
]
