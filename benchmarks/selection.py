"""How long one decision takes: cold, and asked again through a SelectionCache.

    python benchmarks/selection.py [--json] [--rounds N]

CPU time of this process; torch is not imported. A latent layer is two decisions (decode and
prefill) and a sparse one three, so a layer's time is given per decision too.

Every round times every case in turn, and in the same round a reference: a fixed piece of pure
Python that has nothing to do with attnplat. A machine that shares its cores runs all of it up
to twice as slowly from one moment to the next; the reference tells which moment it was. The
best round is what the code takes, the median what this machine had to give.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attnplat import MhaConfig, MlaConfig, SparseMlaConfig, platform_for
from attnplat.config.layer import LayerConfig
from attnplat.platforms.remembered import SelectionCache
from attnplat.platforms.selection import Selection

_LATENT = {
    "head_size": 576,
    "num_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "v_head_size": 128,
}
LAYERS: dict[str, LayerConfig] = {
    "llama": MhaConfig(head_size=128, num_heads=32, num_kv_heads=8),
    "gpt-oss": MhaConfig(
        head_size=64, num_heads=64, num_kv_heads=8, sinks=True, sliding_window=(127, -1)
    ),
    "deepseek-v3": MlaConfig(**_LATENT),
    "deepseek-v3.2": SparseMlaConfig(**_LATENT, index_topk=2048),
}
DEVICES = ("cuda:sm90", "cuda:sm100", "rocm:gfx950", "cpu:amx")
# The reference: a nested value, copied by the standard library in Python.
_NESTED = {f"key {i}": [i, {"inner": (i, str(i))}] for i in range(8)}


class Case(NamedTuple):
    """What is timed: so many calls at a time, each of them so many decisions."""

    name: tuple[str, ...]
    call: Callable[[], object]
    calls: int
    decisions: int = 1


def decisions(selection: Selection) -> int:
    """Selections made for a layer, its parts included."""
    return 1 + sum(map(decisions, selection.parts.values()))


def cases() -> list[Case]:
    """The reference, then each layer on each device: cold, and from a cache."""
    found = [Case(("reference",), partial(copy.deepcopy, _NESTED), 20)]
    for device in DEVICES:
        platform = platform_for(device)
        cache = SelectionCache(platform)
        for layer, config in LAYERS.items():
            count = decisions(cache.select(config))
            cold, again = (device, layer, "cold"), (device, layer, "again")
            found.append(Case(cold, partial(platform.select, config), 20, count))
            found.append(Case(again, partial(cache.select, config), 200))
    return found


def measure(rounds: int) -> dict[tuple[str, ...], tuple[float, float, int]]:
    """Case -> (best, median) microseconds of one call, and its decisions."""
    timed = cases()
    taken: dict[tuple[str, ...], list[float]] = {case.name: [] for case in timed}
    for _ in range(rounds):
        for case in timed:
            started = time.process_time()
            for _ in range(case.calls):
                case.call()
            taken[case.name].append((time.process_time() - started) / case.calls * 1e6)
    return {
        case.name: (min(times), statistics.median(times), case.decisions)
        for case in timed
        for times in [taken[case.name]]
    }


def rows_of(
    measured: dict[tuple[str, ...], tuple[float, float, int]],
) -> list[dict[str, object]]:
    """One row per device and layer."""
    rows: list[dict[str, object]] = []
    for name, (best, median, count) in measured.items():
        if name[-1] != "cold":
            continue
        again_best, again_median, _ = measured[(*name[:2], "again")]
        rows.append(
            {
                "device": name[0],
                "layer": name[1],
                "decisions": count,
                "layer_best_us": round(best, 1),
                "decision_best_us": round(best / count, 1),
                "decision_median_us": round(median / count, 1),
                "again_best_us": round(again_best, 2),
                "again_median_us": round(again_median, 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    measured = measure(args.rounds)
    rows = rows_of(measured)
    best, median, _ = measured[("reference",)]
    reference = {"best_us": round(best, 1), "median_us": round(median, 1)}
    if args.json:
        print(json.dumps({"reference": reference, "rows": rows}, indent=2))
        return
    from attnplat.cli.tables import print_table

    print_table([list(row.values()) for row in rows], list(rows[0]))
    print(f"reference: best {best:.1f} us, median {median:.1f} us")


if __name__ == "__main__":
    main()
