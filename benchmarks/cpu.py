"""CPU_ATTN beside torch's attention on this machine: one command, a table and JSON.

    python benchmarks/cpu.py                    everything, on two threads
    python benchmarks/cpu.py --only decode      the rows whose name contains the word
    python benchmarks/cpu.py --restrict avx2    both sides held to an instruction set

torch is given its keys and values dense and in place, and of several ways to call it the fastest
counts; attnplat reads pages. Both run in turns, so that a machine that changes its speed changes
it for both: a ratio is the median of the ratios of neighbouring runs. The ceilings, reading
memory and multiplying from L1, are measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.kv_cache import KVCache
from attnplat.config.layer import MhaConfig, MlaConfig
from attnplat.platforms.cpu.impls.attention import CpuAttnImpl, CpuMlaImpl
from attnplat.platforms.cpu.kernels import library

Run = Callable[[], Any]

RESTRICTED = {
    "avx2": {
        "ATTNPLAT_CPU_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {
        "ATTNPLAT_CPU_ISA": "avx512",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx512_bf16": {
        "ATTNPLAT_CPU_ISA": "avx512_bf16",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1",
    },
}


@dataclass(frozen=True)
class Work:
    """One row of the table: a batch, and the layer it runs through."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"
    block_sizes: tuple[int, ...] = (16, 64, 128)
    latent: bool = False
    warm: bool = False
    kv_dtype: str = "auto"

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products over the keys that are seen."""
        seen = sum(
            q * n - q * (q - 1) // 2 for q, n in zip(self.query_lens, self.seq_lens, strict=True)
        )
        values = 512 if self.latent else self.head_size
        return 2 * seen * self.num_heads * (self.head_size + values)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, each once."""
        planes = 1 if self.latent else 2 * self.num_kv_heads
        size = 1 if self.kv_dtype != "auto" else getattr(torch, self.dtype).itemsize
        return sum(self.seq_lens) * planes * self.head_size * size


RAGGED = tuple(
    2048 + 128 * n for n in (-15, 9, -3, 14, 0, 5, -8, 2, -12, 11, 7, -6, 15, -10, 1, -10)
)


def works(dtype: str) -> Iterator[Work]:
    """The table's rows for one dtype."""

    def row(name: str, q: tuple[int, ...], n: tuple[int, ...], **more: Any) -> Work:
        return Work(name, q, n, dtype=dtype, **more)

    yield row("prefill 1024", (1024,), (1024,))
    yield row("prefill 4096", (4096,), (4096,))
    yield row("chunked prefill 512 over 3584", (512,), (4096,))
    yield row("decode 1 x 8192", (1,), (8192,))
    yield row("decode 16 ragged, mean 2048", (1,) * 16, RAGGED)
    yield row("decode 64 x 512", (1,) * 64, (512,) * 64)
    small = {"num_heads": 9, "num_kv_heads": 3, "head_size": 64, "warm": True}
    yield row("decode 9/3 heads of 64, 1 x 1024, warm", (1,), (1024,), **small)
    one = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "block_sizes": (16,), "warm": True}
    yield row("tiny decode (host overhead)", (1,), (8,), **one)
    if dtype == "bfloat16":
        eight = {"kv_dtype": "fp8_e4m3", "block_sizes": (16, 64)}
        yield row("decode 1 x 8192, fp8 KV", (1,), (8192,), **eight)
        latent: dict[str, Any] = {"num_heads": 128, "num_kv_heads": 1, "head_size": 576}
        latent |= {"latent": True, "block_sizes": (16, 64)}
        yield row("latent decode 128 heads, 1 x 4096", (1,), (4096,), **latent)
        yield row("latent decode 128 heads, 8 x 4096", (1,) * 8, (4096,) * 8, **latent)


def paged_run(work: Work, block_size: int) -> Run:
    """A call of the backend on shuffled pages."""
    config: Any
    if work.latent:
        config = MlaConfig(
            num_heads=work.num_heads,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_size=128,
            head_size=576,
            dtype=work.dtype,
        )
    else:
        config = MhaConfig(
            head_size=work.head_size,
            num_heads=work.num_heads,
            num_kv_heads=work.num_kv_heads,
            dtype=work.dtype,
            kv_cache_dtype=work.kv_dtype,
        )
    encoding = "fp8_e4m3fn" if work.kv_dtype == "fp8_e4m3" else None
    impl = (CpuMlaImpl if work.latent else CpuAttnImpl).create(config, "cpu", encoding=encoding)
    batch = Batch.from_lengths(work.query_lens, work.seq_lens)
    counts = [-(-n // block_size) for n in work.seq_lens]
    order = torch.randperm(sum(counts)).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    cache = KVCache.allocate(impl.kv_cache_spec(block_size), sum(counts))
    for plane in (cache.k,) if work.latent else (cache.k, cache.v):
        assert plane is not None
        if work.kv_dtype == "auto":
            plane.normal_()
        else:
            plane.random_(0, 0x40)  # codes of numbers up to 2
    plan = impl.plan(batch, PageTable.from_blocks(blocks, batch, block_size, write="none"))
    q = torch.randn(sum(work.query_lens), work.num_heads, work.head_size).to(impl.dtype)
    return lambda: impl.forward(plan, q, cache)


def torch_runs(work: Work) -> dict[str, Run]:
    """Ways to have torch do the same, by name."""
    dtype = getattr(torch, work.dtype)
    group = work.num_heads // work.num_kv_heads
    made = []
    for rows, keys in zip(work.query_lens, work.seq_lens, strict=True):
        q = torch.randn(1, work.num_heads, rows, work.head_size).to(dtype)
        k = torch.randn(1, work.num_kv_heads, keys, work.head_size).to(dtype)
        v = k[..., :512] if work.latent else torch.randn_like(k)
        mask = None
        if 1 < rows < keys:
            mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        made.append((q, k, v, mask))
    square = all(q.shape[2] == k.shape[2] for q, k, _, _ in made)

    def grouped() -> None:
        for q, k, v, mask in made:
            sdpa(q, k, v, mask, is_causal=square and q.shape[2] > 1, enable_gqa=group > 1)

    def folded() -> None:
        for q, k, v, mask in made:
            rows = q.view(1, work.num_kv_heads, -1, work.head_size)
            many = mask if mask is None else mask.repeat(group, 1)
            sdpa(rows, k, v, many)

    def padded() -> None:  # values as wide as keys, which torch's fused kernel asks for
        for q, k, _, _ in made:
            sdpa(q.view(1, 1, -1, work.head_size), k, k)[..., :512]

    if work.latent:
        return {"folded": folded, "folded, wide values": padded}
    if square and sum(work.query_lens) > len(work.query_lens):
        return {"grouped": grouped}
    return {"grouped": grouped, "folded": folded}


def seconds(run: Run, times: int = 1) -> float:
    """Of one run, on average of `times`."""
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


@dataclass
class Row:
    """What was measured of one work at one block size; milliseconds."""

    work: str
    dtype: str
    block_size: int
    ours_best: float
    ours_median: float
    torch_best: float
    torch_median: float
    torch_way: str
    ratio: float
    gflops: float
    gbytes: float
    times: dict[str, list[float]] = field(repr=False, default_factory=dict)


class Flusher:
    """Reads memory other than a run's, so that the next run finds its own not in the cache."""

    def __init__(self) -> None:
        self.memory = torch.ones(1 << 26, dtype=torch.float32)

    def __call__(self) -> None:
        self.memory.sum()


def measure(work: Work, budget: float, flush: Flusher) -> Iterator[Row]:
    """One row a block size; about `budget` seconds each."""
    ways = torch_runs(work)
    first = {name: min(seconds(run) for _ in range(2)) for name, run in ways.items()}
    way = min(first, key=lambda name: first[name])
    theirs = ways[way]
    for block_size in work.block_sizes:
        ours = paged_run(work, block_size)
        once = min(seconds(ours) for _ in range(2)) + first[way]
        inner = max(1, int(0.002 / once)) if work.warm else 1
        count = max(5, min(60, int(budget / (once * inner + (0 if work.warm else 0.02)))))
        pairs = []
        for _ in range(count):
            times = []
            for run in (ours, theirs):
                if not work.warm:
                    flush()
                times.append(1e3 * seconds(run, inner))
            pairs.append(times)
        mine, other = ([pair[n] for pair in pairs] for n in (0, 1))
        yield Row(
            work=work.name,
            dtype=work.dtype,
            block_size=block_size,
            ours_best=min(mine),
            ours_median=median(mine),
            torch_best=min(other),
            torch_median=median(other),
            torch_way=way,
            ratio=median(b / a for a, b in pairs),
            gflops=work.flops / median(mine) / 1e6,
            gbytes=work.kv_bytes / median(mine) / 1e6,
            times={"ours": mine, "torch": other},
        )


def ceilings(threads: int) -> dict[str, float]:
    """What the machine can do: GB/s read by us and by torch, GFLOP/s from L1."""
    lib = library.load()
    isa = os.environ.get("ATTNPLAT_CPU_ISA")
    data = torch.ones(1 << 27, dtype=torch.int32)
    ours, others, products = [], [], []
    for _ in range(10):
        ours.append(seconds(lambda: lib.read(data, threads, isa)))
        others.append(seconds(lambda: data.sum()))
        start = time.perf_counter()
        operations = lib.multiply(20000, threads, isa)
        products.append(operations / (time.perf_counter() - start))
    return {
        "read_gbytes": data.nbytes / min(ours) / 1e9,
        "read_gbytes_median": data.nbytes / median(ours) / 1e9,
        "torch_sum_gbytes": data.nbytes / min(others) / 1e9,
        "gflops_from_l1": max(products) / 1e9,
        "gflops_from_l1_median": median(products) / 1e9,
    }


def machine(threads: int) -> dict[str, Any]:
    """Where this was measured."""
    model = platform.processor()
    try:
        text = Path("/proc/cpuinfo").read_text()
        model = next(line.split(":")[1] for line in text.splitlines() if "model name" in line)
    except (OSError, StopIteration):
        pass
    impl = CpuAttnImpl.create(MhaConfig(head_size=64, num_heads=1, num_kv_heads=1), "cpu")
    return {
        "processor": model.strip(),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "isa": impl.isa,
        "threads": threads,
    }


def print_table(result: dict[str, Any]) -> None:
    """For people."""
    print("  ".join(f"{k}: {v}" for k, v in result["machine"].items()))
    print("  ".join(f"{k}: {v:.1f}" for k, v in result["ceilings"].items()))
    print(f"{'work':40} {'dtype':8} {'block':>5} {'ours, ms':>15} {'torch, ms':>15} "
          f"{'ratio':>6} {'GFLOP/s':>8} {'GB/s':>6}")  # fmt: skip
    for row in result["rows"]:
        print(
            f"{row['work']:40} {row['dtype']:8} {row['block_size']:5} "
            f"{row['ours_best']:7.3f}/{row['ours_median']:7.3f} "
            f"{row['torch_best']:7.3f}/{row['torch_median']:7.3f} "
            f"{row['ratio']:6.2f} {row['gflops']:8.1f} {row['gbytes']:6.1f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--block-size", type=int, action="append")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a row and block size")
    parser.add_argument("--restrict", choices=RESTRICTED, help="hold both sides to this")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    options = parser.parse_args()
    if options.restrict and os.environ.get("ATTNPLAT_CPU_ISA") != options.restrict:
        environment = {**os.environ, **RESTRICTED[options.restrict]}
        return subprocess.call([sys.executable, *sys.argv], env=environment)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    flush, rows = Flusher(), []
    with torch.inference_mode():
        result = {"machine": machine(options.threads), "ceilings": ceilings(options.threads)}
        for dtype in options.dtype or ["bfloat16"]:
            for work in works(dtype):
                if options.only in work.name:
                    wanted = options.block_size or work.block_sizes
                    sizes = tuple(n for n in work.block_sizes if n in wanted)
                    fields = {**asdict(work), "block_sizes": sizes}
                    rows += [asdict(r) for r in measure(Work(**fields), options.budget, flush)]
    result["rows"] = rows
    print_table(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
