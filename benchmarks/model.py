"""A model's decoding with CPU_ATTN beside TORCH_SDPA: attention time and tokens per second.

    python benchmarks/model.py                      SmolLM2-135M at 64, 1024 and 4096 tokens
    python benchmarks/model.py --context 256 --json

Both backends run the same weights in one process and take turns, step by step, so that a machine
that changes its speed changes it for both; what is told are medians, and the median of the ratios
of neighbouring steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attnplat.config.attention import AttentionConfig
from attnplat.integrations.transformers import PagedModel, register
from attnplat.integrations.transformers.loading import find_model, load_model, quiet_transformers

BACKENDS = ("CPU_ATTN", "TORCH_SDPA")
PREFILL_STEP = 512


class Step(NamedTuple):
    """One decode step: all of it, and its attention (planning and the cache's writing too)."""

    seconds: float
    attention: float


class Decoding:
    """One backend, with a request of `context` tokens in its cache."""

    def __init__(self, model: Any, backend: str, context: int, steps: int) -> None:
        self.paged = PagedModel(model, attention=AttentionConfig(backend=backend))
        count = -(-(context + steps) // self.paged.block_size)
        self.paged.allocate(count)
        self.blocks = [list(range(count))]
        self.tokens = [1 + 7 * n % 997 for n in range(context)]
        self.steps: list[Step] = []
        self.found: list[int] = []

    def prefill(self) -> float:
        """Compute the context; seconds."""
        started = time.perf_counter()
        for first in range(0, len(self.tokens), PREFILL_STEP):
            piece = self.tokens[first : first + PREFILL_STEP]
            logits = self.paged.step([piece], [first], self.blocks)
        self.found = [int(logits.argmax())]
        return time.perf_counter() - started

    def decode(self) -> None:
        """One more token."""
        before, started = self._attention(), time.perf_counter()
        at = len(self.tokens) + len(self.found) - 1
        logits = self.paged.step([[self.found[-1]]], [at], self.blocks)
        self.found.append(int(logits.argmax()))
        seconds = time.perf_counter() - started
        self.steps.append(Step(seconds, self._attention() - before))

    def _attention(self) -> float:
        seconds = self.paged.attention_seconds
        assert seconds is not None
        return seconds


def measure(model: Any, context: int, steps: int) -> dict[str, Any]:
    """Both backends at one length of context."""
    sides = {name: Decoding(model, name, context, steps + 2) for name in BACKENDS}
    result: dict[str, Any] = {"context": context, "steps": steps, "backends": {}}
    prefill = {name: side.prefill() for name, side in sides.items()}
    for number in range(steps + 2):
        for side in sides.values() if number % 2 else reversed(sides.values()):
            side.decode()
    for name, side in sides.items():
        timed = side.steps[2:]  # the first two find caches cold
        result["backends"][name] = {
            "prefill_tokens_per_second": context / prefill[name],
            "decode_tokens_per_second": 1 / median(s.seconds for s in timed),
            "attention_milliseconds": 1e3 * median(s.attention for s in timed),
        }
    ours, theirs = (side.steps[2:] for side in sides.values())
    pairs = list(zip(ours, theirs, strict=True))
    result["decode_speedup"] = median(b.seconds / a.seconds for a, b in pairs)
    result["attention_speedup"] = median(b.attention / a.attention for a, b in pairs)
    result["same_tokens"] = sides[BACKENDS[0]].found == sides[BACKENDS[1]].found
    return result


def load(dtype: torch.dtype) -> Any:
    """The demo's model."""
    quiet_transformers()
    register()
    return load_model(
        find_model(None),
        implementation="attnplat",
        dtype=dtype,
        device=torch.device("cpu"),
        cache=None,
    ).model


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, action="append", metavar="N")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    model = load(getattr(torch, args.dtype))
    rows = (measure(model, n, args.steps) for n in args.context or (64, 1024, 4096))
    if args.json:
        result = {"dtype": args.dtype, "threads": args.threads, "rows": list(rows)}
        print(json.dumps(result, indent=2))
        return
    print(f"{'context':>8} {'backend':<12} {'tokens/s':>9} {'attention':>10}")
    for row in rows:
        print_row(row)


def print_row(row: dict[str, Any]) -> None:
    """A length of context: two backends, and what the first gains."""
    for name, side in row["backends"].items():
        rate, ms = side["decode_tokens_per_second"], side["attention_milliseconds"]
        print(f"{row['context']:>8} {name:<12} {rate:>9.1f} {ms:>7.2f} ms")
    same = "the same tokens" if row["same_tokens"] else "other tokens"
    faster, sooner = row["decode_speedup"], row["attention_speedup"]
    print(f"{'':>8} {'':<12} {faster:>8.2f}x {sooner:>8.2f}x   {same}", flush=True)


if __name__ == "__main__":
    main()
