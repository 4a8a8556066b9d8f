"""Steps to run: a layer, its requests, and a cache in which all that must not be read is NaN."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnplat.backends.batch import Batch, PageTable, pack_tree_mask
from attnplat.backends.interface import AttentionImpl, Plan
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.portable.reference import ReferenceImpl
from attnplat.backends.portable.torch_sdpa import TorchSdpaImpl
from attnplat.config.layer import MhaConfig
from attnplat.config.names import Dtype, Feature
from tests.execution.oracle import Request, Rules

IMPLS: dict[str, type[AttentionImpl]] = {"REFERENCE": ReferenceImpl, "TORCH_SDPA": TorchSdpaImpl}

NAN = float("nan")

TOLERANCE = {Dtype.FLOAT32: 1e-5, Dtype.FLOAT16: 1.2e-3, Dtype.BFLOAT16: 8e-3, Dtype.FLOAT64: 1e-12}
LSE_TOLERANCE = {
    Dtype.FLOAT32: (2e-5, 1e-6),
    Dtype.FLOAT16: (2e-4, 1e-5),
    Dtype.BFLOAT16: (2e-4, 1e-5),
    Dtype.FLOAT64: (2e-5, 1e-6),
}


def layer(**changes: Any) -> MhaConfig:
    """A small float32 layer with LSE, changed as asked."""
    wants: dict[str, Any] = {
        "head_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "dtype": "float32",
        "also_needs": frozenset({Feature.LSE}),
    }
    return MhaConfig(**{**wants, **changes})


@dataclass
class Step:
    """One step of one layer.

    `k`, `v`: each request's keys and values, [keys, kv heads, size]. `options`: what forward
    is given besides.
    """

    config: MhaConfig
    batch: Batch
    q: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    options: dict[str, torch.Tensor] = field(default_factory=dict)
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def paged(self, block_size: int = 16, layout: str = "HND", spare: int = 3) -> Paged:
        return page(self, block_size, layout, spare)

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        none = self.q.new_empty(0, config.num_kv_heads or 1, config.head_size)
        none_v = self.q.new_empty(0, config.num_kv_heads or 1, config.value_size)
        return torch.cat([none, *self.k]), torch.cat([none_v, *self.v])

    def requests(self) -> list[Request]:
        """The same step for the oracle."""
        starts = self.batch.query_start_loc.tolist()
        found = []
        for r in range(self.batch.num_reqs):
            rows = slice(starts[r], starts[r + 1])
            ranges = [] if self.batch.ranges is None else self.batch.ranges.tolist()
            tree, count = None, rows.stop - rows.start
            if self.batch.tree_mask is not None and count:
                bits = self.batch.tree_mask[rows]
                tree = torch.stack([bits[:, c // 8] >> (c % 8) & 1 for c in range(count)], 1)
            causal, prefix = self.batch.causal, self.batch.prefix_lens
            found.append(
                Request(
                    number=r,
                    q=self.q[rows],
                    k=self.k[r],
                    v=self.v[r],
                    first_row=rows.start,
                    causal=None if causal is None else bool(causal[r]),
                    prefix_len=0 if prefix is None else int(prefix[r]),
                    ranges=[(b, e) for number, b, e in ranges if number == r],
                    tree=tree,
                )
            )
        return found

    def rules(self) -> Rules:
        """The layer's own options for the oracle."""
        config, given = self.config, self.options
        as_list = {n: t.double().tolist() for n, t in given.items() if t.dim() == 1}
        return Rules(
            scale=config.effective_scale,
            causal=bool(config.causal),
            left=config.sliding_window[0],
            right=config.sliding_window[1],
            chunk=config.chunk_size,
            cap=config.logits_soft_cap,
            static_sink_tokens=config.static_sink_tokens,
            sinks=as_list.get("sinks"),
            slopes=as_list.get("alibi_slopes"),
            bias=given.get("position_bias"),
            topk=given.get("topk_indices"),
        )


@dataclass
class Paged:
    """A step's cache: its blocks in any order, everything without a live token NaN."""

    step: Step
    cache: KVCache
    pages: PageTable
    blocks: list[list[int]]


def make_step(
    config: MhaConfig,
    query_lens: list[int],
    seq_lens: list[int] | None = None,
    *,
    seed: int = 0,
    options: dict[str, torch.Tensor] | None = None,
    **batch_options: Any,
) -> Step:
    """Normal-distributed q, k and v, and every tensor the config declares."""
    batch = Batch.from_lengths(query_lens, seq_lens, **batch_options)
    gen = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    heads, kv_heads = config.num_heads or 1, config.num_kv_heads or 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    lens = batch.seq_lens.tolist()
    given: dict[str, torch.Tensor] = {}
    if config.sinks:
        given["sinks"] = torch.randn(heads, generator=gen)
    if config.alibi:
        given["alibi_slopes"] = torch.rand(heads, generator=gen) / 4
    if config.position_bias:
        given["position_bias"] = torch.randn(
            heads, batch.max_query_len, batch.max_seq_len, generator=gen
        )
    if config.topk is not None:
        shape = (batch.num_tokens, config.topk)
        most = max(lens, default=0) + 3
        given["topk_indices"] = torch.randint(-3, most, shape, generator=gen, dtype=torch.int32)
    return Step(
        config=config,
        batch=batch,
        q=normal(batch.num_tokens, heads, config.head_size),
        k=[normal(n, kv_heads, config.head_size) for n in lens],
        v=[normal(n, kv_heads, config.value_size) for n in lens],
        options={**given, **(options or {})},
        seed=seed,
    )


def page(step: Step, block_size: int, layout: str, spare: int) -> Paged:
    """The step's keys and values in shuffled blocks of a cache that is otherwise NaN."""
    impl = ReferenceImpl.create(step.config, "cpu")
    lens = step.batch.seq_lens.tolist()
    counts = [-(-n // block_size) for n in lens]
    total = sum(counts) + spare
    order = list(range(total))
    random.Random(step.seed).shuffle(order)
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    cache = KVCache.allocate(impl.kv_cache_spec(block_size, layout), total)
    cache.k.fill_(NAN)
    cache.v.fill_(NAN)
    filled = PageTable.from_blocks(blocks, step.batch, block_size, write="all")
    slots = filled.slot_mapping
    assert slots is not None
    k_pages, v_pages = cache.pages()
    k_pages[slots // block_size, :, slots % block_size] = torch.cat(step.k)
    v_pages[slots // block_size, :, slots % block_size] = torch.cat(step.v)
    cross = step.config.attn_type == "encoder_decoder"
    pages = PageTable.from_blocks(blocks, step.batch, block_size, write="all" if cross else "new")
    return Paged(step, cache, pages, blocks)


def run(
    name: str, step: Step, paged: Paged | None = None, **extra: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the step, from its cache, or without one."""
    impl = IMPLS[name].create(step.config, "cpu")
    plan = impl.plan(step.batch, None if paged is None else paged.pages, validate=True)
    return run_plan(impl, plan, step, paged, **extra)


def run_plan(
    impl: AttentionImpl, plan: Plan, step: Step, paged: Paged | None = None, **extra: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the step with a plan made before."""
    kv = step.packed() if paged is None else None
    cache = None if paged is None else paged.cache
    result = impl.forward(plan, step.q, cache, kv=kv, **step.options, return_lse=True, **extra)
    assert isinstance(result, tuple)
    return result


def relative_error(
    out: torch.Tensor, expected: torch.Tensor, batch: Batch, scale: torch.Tensor | None = None
) -> float:
    """The largest ||out - expected|| / ||scale|| over requests and heads.

    `scale` defaults to `expected`. Rows that must be 0 have no relative error: they are
    compared exactly.
    """
    scale = expected if scale is None else scale
    starts = batch.query_start_loc.tolist()
    worst = 0.0
    for first, last in itertools.pairwise(starts):
        if first == last:
            continue
        gap = (out[first:last].double() - expected[first:last].double()).pow(2).sum((0, 2)).sqrt()
        size = scale[first:last].double().pow(2).sum((0, 2)).sqrt()
        error = torch.where(size == 0, torch.where(gap == 0, 0.0, 1.0), gap / size)
        worst = max(worst, float(error.nan_to_num(float("inf")).max()))
    return worst


def assert_close(
    got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], step: Step
) -> None:
    """Output and LSE within the numerical contract of the step's dtype."""
    dtype = Dtype(step.config.dtype)
    real = int(step.batch.query_start_loc[-1])
    allowed = TOLERANCE[dtype]
    error = relative_error(got[0], want[0], step.batch)
    if allowed < error < 1:
        # Where values cancel, the sum of their sizes is the scale of the error.
        sizes = run("REFERENCE", replace(step, v=[v.abs() for v in step.v]))[0]
        error = relative_error(got[0], want[0], step.batch, sizes)
    assert error <= allowed, f"output is off by {error:.2e}, allowed {allowed}"
    absolute, relative = LSE_TOLERANCE[dtype]
    torch.testing.assert_close(
        got[1][:real].double(), want[1][:real].double(), atol=absolute, rtol=relative
    )


def tree(*visible: list[list[int]]) -> torch.Tensor:
    """`Batch.tree_mask` from one 0/1 matrix per request."""
    width = max(len(matrix) for matrix in visible)
    rows = [row + [0] * (width - len(row)) for matrix in visible for row in matrix]
    return pack_tree_mask(torch.tensor(rows, dtype=torch.bool))
