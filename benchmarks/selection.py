"""How long one decision takes: cold, and asked again through a SelectionCache.

    python benchmarks/selection.py [--json]

CPU time of this process, the median of several rounds; torch is not imported. A latent
layer is two decisions (decode and prefill) and a sparse one three, so both are given per
layer and per decision.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

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
ROUNDS, CALLS = 15, 100


def microseconds(call: Callable[[], object]) -> float:
    """CPU time of one call, the median of `ROUNDS` rounds."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(CALLS):
            call()
        rounds.append((time.process_time() - started) / CALLS)
    return statistics.median(rounds) * 1e6


def decisions(selection: Selection) -> int:
    """Selections made for a layer, its parts included."""
    return 1 + sum(map(decisions, selection.parts.values()))


def measure() -> list[dict[str, object]]:
    """One row per device and layer."""
    rows: list[dict[str, object]] = []
    for device in DEVICES:
        platform = platform_for(device)
        cache = SelectionCache(platform)
        for name, config in LAYERS.items():
            count = decisions(cache.select(config))
            cold = microseconds(partial(platform.select, config))
            again = microseconds(partial(cache.select, config))
            rows.append(
                {
                    "device": device,
                    "layer": name,
                    "decisions": count,
                    "cold_us": round(cold, 1),
                    "cold_us_per_decision": round(cold / count, 1),
                    "again_us": round(again, 2),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows = measure()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from attnplat.cli.tables import print_table

    print_table([list(row.values()) for row in rows], list(rows[0]))


if __name__ == "__main__":
    main()
