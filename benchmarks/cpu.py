"""CPU_ATTN beside torch's attention on this machine: one command, a table and JSON.

    python benchmarks/cpu.py                     everything, on two threads; also with both
                                                 sides held to lower instruction sets
    python benchmarks/cpu.py --rows decode       the rows whose name contains a word
    python benchmarks/cpu.py --isa native        with what this machine has, alone
    python benchmarks/cpu.py --quick             a fifth of the time

torch is given its keys and values dense and in place, and of several ways to call it the fastest
counts; attnplat reads pages. Both run in turns, so that a machine that changes its speed changes
it for both: a ratio is the median of the ratios of neighbouring runs. Decoding takes other keys
and values each time, as the layers of a model do, so many that none are in the cache still. The
ceilings, reading memory and multiplying from L1, are measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.kv_cache import KVCache
from attnplat.config.layer import MhaConfig, MlaConfig
from attnplat.errors import AttnplatError
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
class Goal:
    """What a row is to reach: so many times as fast as torch, or at most so long."""

    ratio: float | None = None
    most_us: float | None = None
    most_of_bfloat16: float | None = None


GOALS = {
    "prefill 4096": Goal(1.35),
    "prefill 1024": Goal(1.5),
    "chunked prefill 512 over 3584": Goal(1.5),
    "decode 1 x 8192": Goal(1.6),
    "decode 16 ragged, mean 2048": Goal(1.6),
    "decode 64 x 512": Goal(1.6),
    "decode 9/3 heads of 64, 1 x 1024, warm": Goal(2.0),
    "decode 1 x 8192, fp8 KV": Goal(most_of_bfloat16=0.83),
    "latent decode 128 heads, 1 x 4096": Goal(3.0),
    "latent decode 128 heads, 8 x 4096": Goal(6.0),
    "tiny decode (host overhead)": Goal(most_us=25),
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

    @property
    def sets(self) -> int:
        """Keys and values to go through by turns."""
        if self.warm or max(self.query_lens) > 1:
            return 1
        return min(96, -(-COLD_BYTES // self.kv_bytes))


COLD_BYTES = 400 << 20
"""More than a cache holds."""

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
        eight = {"kv_dtype": "fp8_e4m3"}
        yield row("decode 1 x 8192, fp8 KV", (1,), (8192,), **eight)
        latent: dict[str, Any] = {"num_heads": 128, "num_kv_heads": 1, "head_size": 576}
        latent |= {"latent": True}
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
    spec = impl.kv_cache_spec(block_size)
    caches = [KVCache.allocate(spec, sum(counts)) for _ in range(work.sets)]
    for plane in caches[0].pages():
        if work.kv_dtype == "auto":
            plane.normal_()
        else:
            plane.random_(0, 0x40)  # codes of numbers up to 2
    for cache in caches[1:]:
        for plane, first in zip(cache.pages(), caches[0].pages(), strict=True):
            plane.copy_(first)
    turns = itertools.cycle(caches)
    plan = impl.plan(batch, PageTable.from_blocks(blocks, batch, block_size, write="none"))
    q = torch.randn(sum(work.query_lens), work.num_heads, work.head_size).to(impl.dtype)
    return lambda: impl.forward(plan, q, next(turns))


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
    square = work.query_lens == work.seq_lens
    sets = [made]
    for _ in range(work.sets - 1):
        copies = [(q, k.clone(), v, mask) for q, k, v, mask in made]
        sets.append(
            [(q, k, k[..., :512] if work.latent else v.clone(), mask) for q, k, v, mask in copies]
        )
    turns = itertools.cycle(sets)

    def grouped() -> None:
        for q, k, v, mask in next(turns):
            sdpa(q, k, v, mask, is_causal=square and q.shape[2] > 1, enable_gqa=group > 1)

    def folded() -> None:
        for q, k, v, mask in next(turns):
            rows = q.view(1, work.num_kv_heads, -1, work.head_size)
            many = mask if mask is None else mask.repeat(group, 1)
            sdpa(rows, k, v, many)

    def padded() -> None:  # values as wide as keys, which torch's fused kernel asks for
        for q, k, _, _ in next(turns):
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
    """What was measured of one work at one block size; milliseconds.

    `ratios` are those to each way of torch, `ratio` the one to the fastest; `of_bfloat16` is the
    time over that of the same work with bfloat16 keys and values.
    """

    work: str
    dtype: str
    block_size: int
    best: dict[str, float]
    median: dict[str, float]
    ratios: dict[str, float]
    torch_way: str
    ratio: float
    gflops: float
    gbytes: float
    of_bfloat16: float | None
    met: bool | None
    times: dict[str, list[float]] = field(repr=False, default_factory=dict)


def in_turns(work: Work, runs: dict[str, Run], budget: float) -> dict[str, list[float]]:
    """Milliseconds of each run, taken in turns."""
    for run in runs.values():
        run()
    once = sum(seconds(run) for run in runs.values())
    inner = max(1, int(0.002 * len(runs) / once)) if work.warm else 1
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for n in range(max(5, min(60, int(budget / (once * inner))))):
        for name in names if n % 2 else reversed(names):
            times[name].append(1e3 * seconds(runs[name], inner))
    return times


def ratio_of(times: dict[str, list[float]], one: str, other: str) -> float:
    """How many times as long `one` takes as `other`."""
    return median(a / b for a, b in zip(times[one], times[other], strict=True))


def measure(work: Work, budget: float) -> Iterator[Row]:
    """One row a block size; about `budget` seconds each."""
    ways = torch_runs(work)
    first = {name: min(seconds(run) for _ in range(2)) for name, run in ways.items()}
    fastest = min(first.values())
    ways = {name: ways[name] for name in ways if work.latent or first[name] < 1.3 * fastest}
    goal = GOALS.get(work.name, Goal())
    for block_size in work.block_sizes:
        runs = {"ours": paged_run(work, block_size)}
        if goal.most_of_bfloat16:
            runs["bfloat16"] = paged_run(replace(work, kv_dtype="auto"), block_size)
        times = in_turns(work, runs | ways, budget)
        ratios = {way: ratio_of(times, way, "ours") for way in ways}
        way = min(ways, key=lambda name: median(times[name]))
        share = ratio_of(times, "ours", "bfloat16") if "bfloat16" in runs else None
        middle = {name: median(found) for name, found in times.items()}
        met: bool | None = None
        if goal.most_of_bfloat16 and share:
            met = share <= goal.most_of_bfloat16
        elif goal.most_us:
            met = 1e3 * middle["ours"] <= goal.most_us
        elif goal.ratio:
            # Values inside wider keys are the same work for torch only where it takes them so.
            met = ratios[next(iter(ways))] >= goal.ratio if work.latent else None
            met = ratios[way] >= goal.ratio if met is None else met
        yield Row(
            work=work.name,
            dtype=work.dtype,
            block_size=block_size,
            best={name: min(found) for name, found in times.items()},
            median=middle,
            ratios=ratios,
            torch_way=way,
            ratio=ratios[way],
            gflops=work.flops / middle["ours"] / 1e6,
            gbytes=work.kv_bytes / middle["ours"] / 1e6,
            of_bfloat16=share,
            met=met,
            times=times,
        )


def ceilings(threads: int) -> dict[str, float]:
    """What the machine can do: GB/s read by us and by torch, GFLOP/s from L1."""
    lib = library.load()
    isa = os.environ.get("ATTNPLAT_CPU_ISA")
    data = torch.ones(1 << 27, dtype=torch.float32)
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
    top = result["ceilings"]["gflops_from_l1_median"], result["ceilings"]["read_gbytes_median"]
    print(f"{'work':38} {'dtype':8} {'block':>5} {'ours, ms':>15} {'torch, ms':>15} "
          f"{'ratio':>6} {'GFLOP/s':>13} {'GB/s':>11}  goal")  # fmt: skip
    for row in result["rows"]:
        best, middle, way = row["best"], row["median"], row["torch_way"]
        goal = {None: "", True: "met", False: "missed"}[row["met"]]
        if row["of_bfloat16"]:
            goal += f" ({row['of_bfloat16']:.2f} of bfloat16)"
        for name, ratio in row["ratios"].items():
            goal += f" ({ratio:.2f} of {name})" if name != way and len(row["ratios"]) > 1 else ""
        print(
            f"{row['work']:38} {row['dtype']:8} {row['block_size']:5} "
            f"{best['ours']:7.3f}/{middle['ours']:7.3f} {best[way]:7.3f}/{middle[way]:7.3f} "
            f"{row['ratio']:6.2f} {row['gflops']:7.1f} {row['gflops'] / top[0]:4.0%} "
            f"{row['gbytes']:6.1f} {row['gbytes'] / top[1]:4.0%}  {goal}"
        )


def measure_here(options: argparse.Namespace) -> dict[str, Any]:
    """All rows that are asked for, with the instruction set of this process."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    budget = options.budget / (5 if options.quick else 1)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    with torch.inference_mode():
        result = {"machine": machine(options.threads), "ceilings": ceilings(options.threads)}
        for work in (w for dtype in options.dtype for w in works(dtype)):
            if options.rows and not any(word in work.name for word in options.rows):
                continue
            wanted = options.block_size or work.block_sizes
            sizes = tuple(n for n in work.block_sizes if n in wanted)
            try:
                measured = measure(replace(work, block_sizes=sizes), budget)
                rows += [asdict(row) for row in measured]
            except AttnplatError as error:
                skipped[work.name] = str(error)
    return result | {"rows": rows, "skipped": skipped}


def measure_held(options: argparse.Namespace, isa: str, dtype: str) -> dict[str, Any]:
    """The same in a process of its own in which nothing above `isa` is used, torch included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [sys.executable, __file__, "--json", str(path), "--dtype", dtype]
        command += ["--threads", str(options.threads), "--budget", str(options.budget)]
        command += ["--quick"] if options.quick else []
        for name, values in (("--rows", options.rows), ("--block-size", options.block_size)):
            command += [name, *map(str, values)] if values else []
        environment = {**os.environ, **RESTRICTED[isa]}
        subprocess.run(command, env=environment, check=True)
        found: dict[str, Any] = json.loads(path.read_text())[0]
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", nargs="+", default=[], help="rows whose name contains one")
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--block-size", type=int, nargs="+", choices=(16, 64, 128))
    parser.add_argument("--budget", type=float, default=1.5, help="seconds a row and block size")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--isa", nargs="+", choices=("native", *RESTRICTED))
    parser.add_argument("--json", type=Path, help="write the results here, too")
    options = parser.parse_args()
    lower = [isa for isa in ("avx512", "avx2") if isa in library.load().usable_isas[:-1]]
    held = os.environ.get("ATTNPLAT_CPU_ISA") is not None
    results = []
    for isa in options.isa or ["native", *([] if held else lower)]:
        if isa == "native":
            here = argparse.Namespace(**{**vars(options), "dtype": options.dtype or ["bfloat16"]})
            results.append(measure_here(here))
            print_table(results[-1])
            for name, reason in results[-1]["skipped"].items():
                print(f"{name}: {reason}")
            continue
        for dtype in options.dtype or ("bfloat16", "float32"):
            results.append(measure_held(options, isa, dtype))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
