"""CPU_INDEXER and CPU_MLA_SPARSE beside torch on this machine: one command and a table.

    python benchmarks/indexer.py                 on two threads
    python benchmarks/indexer.py --only sparse   the rows whose name contains the word

torch is given keys that are dense, decoded and in place, in whichever of bfloat16 and float32 it is
faster with, and chooses with torch.topk; attnplat reads codes and scales from pages. Both run in
turns, and a ratio is the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.index_cache import IndexCache
from attnplat.backends.kv_cache import KVCache, Slots
from attnplat.config.layer import IndexerConfig, SparseMlaConfig
from attnplat.platforms.cpu.impls.indexer import CpuIndexerImpl
from attnplat.platforms.cpu.impls.sparse import CpuSparseMlaImpl
from attnplat.platforms.cpu.kernels import library

Run = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One kind of work: ours and torch's ways to do it, and what it comes to."""

    name: str
    ours: Run
    torchs: tuple[Run, ...]
    products: int
    nbytes: int


def tables(requests: int, keys: int) -> tuple[PageTable, torch.Tensor, list[list[int]]]:
    """Blocks of 64 in no order."""
    each = -(-keys // 64)
    order = torch.randperm(requests * each).tolist()
    blocks = [order[r * each : (r + 1) * each] for r in range(requests)]
    batch = Batch.from_lengths([1] * requests, [keys] * requests)
    written = PageTable.from_blocks(blocks, batch, 64, write="all")
    assert written.slot_mapping is not None
    return written, written.slot_mapping, blocks


def indexer(encoding: str, requests: int, queries: int, keys: int, heads: int = 64) -> Row:
    """Scores and the 2048 best keys of the last `queries` tokens of each request."""
    config = IndexerConfig(head_size=128, num_heads=heads, topk=2048)
    impl = CpuIndexerImpl.create(config, "cpu", encoding=encoding)
    pages, slots, _ = tables(requests, keys)
    batch = Batch.from_lengths([queries] * requests, [keys] * requests)
    cache = IndexCache.allocate(impl.cache_spec(64), requests * -(-keys // 64))
    dense = torch.randn(requests, keys, 128)
    for r in range(requests):
        cache.write(dense[r], slots[r * keys : (r + 1) * keys])
    rows = requests * queries
    q = torch.randn(rows, heads, 128).bfloat16()
    weights = torch.randn(rows, heads)

    def torchs(dtype: torch.dtype) -> Run:
        k = dense.to(dtype)
        by_request = q.to(dtype).view(requests, queries * heads, 128)

        def run() -> torch.Tensor:
            dots = torch.matmul(by_request, k.transpose(1, 2)).relu_()
            dots = dots.view(requests * queries, heads, keys)
            scores = torch.bmm(weights.to(dtype)[:, None], dots)[:, 0]
            return scores.topk(min(2048, keys), dim=-1).indices

        return run

    return Row(
        f"indexer {encoding} {requests} x {queries} over {keys}",
        lambda: impl.topk(batch, pages, cache, q, weights),
        (torchs(torch.bfloat16), torchs(torch.float32)),
        rows * heads * 128 * keys,
        requests * keys * impl.cache_spec(64).bytes_per_block // 64,
    )


def sparse(encoding: str, tokens: int, keys: int, heads: int = 128) -> Row:
    """Latent attention of `tokens` requests, each over 2048 of its keys."""
    config = SparseMlaConfig(
        head_size=576, kv_lora_rank=512, qk_rope_head_dim=64, num_heads=heads, index_topk=2048,
        scale=0.06, dtype="bfloat16",
    )  # fmt: skip
    impl = CpuSparseMlaImpl.create(config, "cpu", encoding=encoding)
    _, slots, blocks = tables(tokens, keys)
    batch = Batch.from_lengths([1] * tokens, [keys] * tokens)
    cache = KVCache.allocate(impl.kv_cache_spec(64), tokens * -(-keys // 64))
    dense = torch.randn(tokens, keys, 576).bfloat16()
    for r in range(tokens):
        cache.write(dense[r][:, None], None, Slots.of(slots[r * keys : (r + 1) * keys]))
    q = torch.randn(tokens, heads, 576).bfloat16()
    chosen = torch.stack([torch.randperm(keys)[:2048] for _ in range(tokens)])
    topk = chosen.sort(dim=1).values.int()
    plan = impl.plan(batch, PageTable.from_blocks(blocks, batch, 64, write="none"))

    def torchs(dtype: torch.dtype) -> Run:
        stored, queries = dense.to(dtype), q.to(dtype)

        def run() -> torch.Tensor:
            rows = torch.gather(stored, 1, chosen[..., None].expand(-1, -1, 576))
            weights = (torch.matmul(queries, rows.transpose(1, 2)) * 0.06).softmax(-1)
            return torch.matmul(weights, rows[..., :512])

        return run

    return Row(
        f"sparse {encoding} {tokens} x 2048 of {keys}",
        lambda: impl.forward(plan, q, cache, topk_indices=topk),
        (torchs(torch.bfloat16), torchs(torch.float32)),
        tokens * heads * 2048 * (576 + 512),
        tokens * 2048 * impl.kv_cache_spec(64).bytes_per_token,
    )


def makers() -> dict[str, Callable[[], Row]]:
    """The rows, made when they are run."""
    found: dict[str, Callable[[], Row]] = {}
    for encoding in ("bfloat16", "index_fp8_132", "index_mxfp4_68"):
        for shape in ((1, 1, 131072), (8, 2, 8192), (1, 128, 8192)):
            name = f"indexer {encoding} {shape[0]} x {shape[1]} over {shape[2]}"
            found[name] = lambda e=encoding, s=shape: indexer(e, *s)  # type: ignore[misc]
    for encoding in ("bfloat16", "mla_fp8_656"):
        for tokens, keys in ((1, 32768), (8, 8192)):
            name = f"sparse {encoding} {tokens} x 2048 of {keys}"
            found[name] = lambda e=encoding, t=tokens, k=keys: sparse(e, t, k)  # type: ignore[misc]
    return found


def timed(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(row: Row, seconds: float) -> dict[str, Any]:
    """Milliseconds of both and the ratio, in turns."""
    best = min(row.torchs, key=lambda run: min(timed(run), timed(run)))
    timed(row.ours)
    ours, theirs = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ours) < 5:
        ours.append(timed(row.ours))
        theirs.append(timed(best))
    ratio = median(b / a for a, b in zip(ours, theirs, strict=True))
    return {
        "name": row.name,
        "ms": 1e3 * min(ours),
        "ms_median": 1e3 * median(ours),
        "torch_ms": 1e3 * min(theirs),
        "torch_ms_median": 1e3 * median(theirs),
        "ratio": ratio,
        "gflops": 2e-9 * row.products / min(ours),
        "gbytes": 1e-9 * row.nbytes / min(ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"isa {library.load().usable_isas[-1]}, torch {torch.__version__}")
    print(f"{'':44} {'ms':>15} {'torch ms':>15} {'ratio':>6} {'GFLOP/s':>8} {'GB/s':>6}")
    found = []
    for name, make in makers().items():
        if options.only not in name:
            continue
        result = measure(make(), options.seconds)
        found.append(result)
        ours = f"{result['ms']:.2f}/{result['ms_median']:.2f}"
        theirs = f"{result['torch_ms']:.2f}/{result['torch_ms_median']:.2f}"
        print(
            f"{name:44} {ours:>15} {theirs:>15} {result['ratio']:6.2f} "
            f"{result['gflops']:8.1f} {result['gbytes']:6.2f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
