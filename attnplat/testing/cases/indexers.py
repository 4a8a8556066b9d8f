"""Checks of sparse indexers: scores by their definition, choices by what makes one valid."""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding
from attnplat.backends.formats.facts import format_of
from attnplat.backends.formats.rows import decode_rows, encode_rows
from attnplat.backends.index_cache import IndexCache
from attnplat.config.layer import IndexerConfig
from attnplat.testing.bench import Bench
from attnplat.testing.case import Check, Failed
from attnplat.testing.inputs import generator
from attnplat.testing.terrain import Terrain

HEADS, SIZE, TOPK = 4, 128, 6


def indexed(
    t: Terrain,
    encoding: str,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    ties: bool = False,
    spoilt: bool = False,
    spare: int = 2,
) -> Check:
    """One indexer over a poisoned cache; `ties`: equal keys; `spoilt`: a key of NaN."""
    config = IndexerConfig(
        head_size=SIZE, num_heads=HEADS, topk=TOPK, indexer_kv_dtype="bf16", dtype="bfloat16"
    )
    gen = generator("indexer", t.seed, encoding, query_lens, seq_lens)
    rows = sum(query_lens)
    q, weights = (
        torch.randn(rows, HEADS, SIZE, generator=gen),
        torch.randn(rows, HEADS, generator=gen),
    )
    keys = [torch.randn(n, SIZE, generator=gen) for n in seq_lens]
    if ties:
        keys = [k[:1].expand(k.shape).contiguous() for k in keys]
    if spoilt:
        for k in keys:
            k[1] = math.nan
    stored = Encoding(encoding)

    def run(bench: Bench) -> None:
        _run(bench, t, config, stored, (q, weights, keys), query_lens, spare)

    return Check(((config, stored),), run, f"{encoding}, (query, keys) {query_lens}, {seq_lens}")


def _run(
    bench: Bench,
    t: Terrain,
    config: IndexerConfig,
    encoding: Encoding,
    tensors: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]],
    query_lens: list[int],
    spare: int,
) -> None:
    indexer = bench.subject.indexer
    assert indexer is not None
    q, weights, keys = tensors
    impl = indexer.create(config, bench.device, encoding=encoding)
    size, device = t.block_size, bench.device
    counts = [-(-len(k) // size) for k in keys]
    order = torch.randperm(sum(counts) + spare, generator=generator("blocks", counts)).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    spec = impl.cache_spec(size)
    shape = (sum(counts) + spare, spec.bytes_per_block)
    cache = IndexCache(pool=torch.full(shape, 0xFF, dtype=torch.uint8, device=device), spec=spec)
    batch, pages = _tables(blocks, [len(k) for k in keys], query_lens, size, device)
    impl.write(cache, torch.cat(keys).to(device), pages)
    logits = impl.logits(batch, pages, cache, q.to(device), weights.to(device)).cpu()
    chosen = impl.topk(batch, pages, cache, q.to(device), weights.to(device)).cpu()
    row = 0
    for own, count in zip(keys, query_lens, strict=True):
        meant = _meant(encoding, own)
        for i in range(count):
            end = len(own) - count + i + 1
            truth = _scores(q[row], weights[row], meant[:end])
            _check_row(logits[row], chosen[row], truth)
            row += 1


def _tables(
    blocks: list[list[int]],
    seq_lens: list[int],
    query_lens: list[int],
    size: int,
    device: torch.device,
) -> tuple[Batch, PageTable]:
    start = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    batch = Batch(
        query_start_loc=start.to(device),
        seq_lens=lens.to(device),
        num_reqs=len(seq_lens),
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_loc_host=start,
        seq_lens_host=lens,
    )
    width = max(map(len, blocks)) + 1
    table = torch.tensor([[*own, *[-1] * (width - len(own))] for own in blocks], dtype=torch.int32)
    slots = [own[p // size] * size + p % size for own, n in zip(blocks, seq_lens, strict=True)
             for p in range(n)]  # fmt: skip
    return batch, PageTable(
        block_table=table.to(device),
        block_size=size,
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
    )


def _meant(encoding: Encoding, keys: torch.Tensor) -> torch.Tensor:
    """What the stored keys mean, float64 [keys, size]."""
    if encoding in PLAIN_ENCODINGS:
        return keys.to(getattr(torch, encoding.value)).double()
    format = format_of(encoding)
    rows = encode_rows(format, keys[:, None])
    return decode_rows(format, rows, size=SIZE, dtype=torch.float64)[:, 0]


def _scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """sum_h w * max(0, q . k), float64 [keys]; NaN keys keep NaN."""
    dots = keys @ q.double().T
    return (torch.where(dots < 0, 0.0, dots) * weights.double()).sum(1)


def _check_row(logits: torch.Tensor, chosen: torch.Tensor, truth: torch.Tensor) -> None:
    end = len(truth)
    finite = ~truth.isnan()
    scale = float(truth[finite].abs().max()) if bool(finite.any()) else 1.0
    off = (logits[:end].double() - truth).abs()[finite]
    if len(off) and not float(off.max()) <= 1e-4 * max(scale, 1.0):
        raise Failed(f"logits are off by {float(off.max()):.1e}")
    if bool((logits[end:] != -math.inf).any()):
        raise Failed("a key past the row's end has a logit")
    named = [int(i) for i in chosen if i >= 0]
    visible = int(finite.sum())
    if len(named) != min(len(chosen), visible) or len(set(named)) != len(named):
        raise Failed(f"{len(named)} keys are chosen of {visible} that can be")
    if any(i >= end or not bool(finite[i]) for i in named):
        raise Failed("a key is chosen that the row does not see, or one of NaN")
    rest = [i for i in range(end) if i not in named and bool(finite[i])]
    if named and rest:
        least, most = min(float(truth[i]) for i in named), max(float(truth[i]) for i in rest)
        if least < most - 1e-4 * max(scale, 1.0):
            raise Failed("a better key was left out")
