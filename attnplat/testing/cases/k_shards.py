"""K: keys split over ranks, shared prefixes, split prompts.

Each rank's part is a call of its own; the parts are merged by their log-sum-exp. Nothing here
communicates: what is shown is that calls give parts that merge to the whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attnplat.testing.bench import Bench, Outcome, agrees, layers
from attnplat.testing.case import CaseList, Check, Checks, Failed
from attnplat.testing.cases.composites import cascaded, local_lengths
from attnplat.testing.inputs import normal
from attnplat.testing.scenes import Scene
from attnplat.testing.terrain import Terrain
from attnplat.testing.truth import Request

K = CaseList("K", "shards, shared prefixes, split prompts")


@K.case(1, "The local length of every rank, interleave and length is right")
def _(t: Terrain) -> Checks:
    yield Check((), local_lengths, "Shard")


def shard(whole: Scene, rank: int, size: int, interleave: int) -> Scene:
    """The keys of one rank, dealt in runs of `interleave`; every query row a request.

    A row keeps the rank's keys up to its own global position, so the part is not causal.
    """
    requests = []
    for request in whole.requests:
        mine = [j for j in range(request.seq_len) if j // interleave % size == rank]
        for row in range(request.query_len):
            p = request.position(row)
            seen = [j for j in mine if j <= p] if whole.rules.causal else mine
            v = None if request.v is None else request.v[seen]
            requests.append(Request(q=request.q[row : row + 1], k=request.k[seen], v=v))
    config = whole.config.replace(causal=False)
    return whole.replace(config=config, requests=tuple(requests), note=f"rank {rank} of {size}")


def _merged(bench: Bench, whole: Scene, parts: list[Outcome]) -> None:
    """Fail unless the parts, row by row, merge to the whole."""
    lses = [part.lse for part in parts if part.lse is not None]
    out, lse = bench.subject.library.combine_shards([part.out for part in parts], lses)
    bench.judge(whole, replace(parts[0], out=out, lse=lse), merged=True)


def _combines(t: Terrain, whole: Scene, size: int, interleave: int) -> Check:
    shards = [shard(whole, rank, size, interleave) for rank in range(size)]

    def run(bench: Bench) -> None:
        _merged(bench, whole, [bench.agree(part, t.pages()) for part in shards])

    return Check(layers(whole, *shards), run, f"{whole} over {size} ranks by {interleave}")


@K.case(2, "A rank without a key gives 0 and -inf, and does not count")
def _(t: Terrain) -> Checks:
    if t.lse:
        whole = normal(t.layer(), [1, 2], [3, 2])
        yield _combines(t, whole, 8, 1)
        yield _combines(t, whole, 2, 16)


@K.case(3, "Causality goes by global positions, however keys are dealt")
def _(t: Terrain) -> Checks:
    if t.lse:
        whole = normal(t.layer(), [9, 1, 20], [9, 40, 33])
        for size, interleave in ((2, 1), (3, 1), (2, 16), (4, 5)):
            yield _combines(t, whole, size, interleave)


@K.case(4, "A rank whose keys are all in a row's future does not count for that row")
def _(t: Terrain) -> Checks:
    if t.lse:
        yield _combines(t, normal(t.layer(), [5, 2], [5, 3]), 2, 4)
        yield _combines(t, normal(t.latent(), [5, 2], [5, 3]), 2, 4)


@K.case(5, "The parts of all ranks merge to the whole")
def _(t: Terrain) -> Checks:
    if t.lse:
        for config in (t.layer(), t.latent(), t.layer(causal=False, logits_soft_cap=5.0)):
            yield _combines(t, normal(config, [1, 3], [90, 41], gain=2.0), 4, 8)


def _sharing(t: Terrain, prefix: int, **changes: object) -> Scene:
    """Requests whose first `prefix` keys are the same."""
    whole = normal(t.layer(**changes), [1, 3, 2], [40, 37, 33])
    first = whole.requests[0]
    requests = []
    for request in whole.requests:
        assert request.v is not None and first.v is not None
        k = torch.cat([first.k[:prefix], request.k[prefix:]])
        v = torch.cat([first.v[:prefix], request.v[prefix:]])
        requests.append(replace(request, k=k, v=v))
    return whole.replace(requests=tuple(requests), note=f"shared prefix of {prefix}")


def _cascade(t: Terrain, prefix: int) -> Check:
    """A prefix that all requests share, once for all rows, then each one's own rest."""
    whole = _sharing(t, prefix)
    requests, first = whole.requests, whole.requests[0]
    assert first.v is not None
    all_rows = Request(q=torch.cat([r.q for r in requests]), k=first.k[:prefix], v=first.v[:prefix])
    shared = whole.replace(config=whole.config.replace(causal=False), requests=(all_rows,))
    rest = whole.replace(
        requests=tuple(replace(r, k=r.k[prefix:], v=_rest(r, prefix)) for r in requests)
    )

    def run(bench: Bench) -> None:
        _merged(bench, whole, [bench.agree(shared, t.pages()), bench.agree(rest, t.pages())])

    return Check(layers(whole, shared, rest), run, str(whole))


def _rest(request: Request, prefix: int) -> torch.Tensor | None:
    return None if request.v is None else request.v[prefix:]


@K.case(6, "A shared prefix computed once and merged is the prefix, of any length")
def _(t: Terrain) -> Checks:
    if t.lse:
        for prefix in (0, 1, 16, 30):
            yield _cascade(t, prefix)
        size = t.block_size
        counts = [-(-n // size) for n in (40, 37, 33)]
        for changes in ({}, {"sinks": True}):
            for shared in (0, 1, 30 // size):
                own = iter(range(shared, shared + sum(counts)))
                blocks = tuple(
                    (*range(shared), *(next(own) for _ in range(count - shared)))
                    for count in counts
                )
                whole = _sharing(t, shared * size, **changes)
                yield cascaded(t, whole, blocks, shared * size)


@K.case(7, "A prompt's rows split in two calls are the prompt's rows")
def _(t: Terrain) -> Checks:
    for changes in ({}, {"sliding_window": (6, -1)}):
        whole = normal(t.layer(**changes), [30], [41])
        yield agrees(whole, t.pages())
        for cut in (1, 13, 29):
            yield _rows_split(t, whole, [(0, cut), (cut, 30)])


def _rows_split(t: Terrain, whole: Scene, spans: list[tuple[int, int]]) -> Check:
    """Rows of the single request as requests of their own, with the keys up to their end."""
    request = whole.requests[0]
    requests = []
    for begin, end in spans:
        keys = request.position(end - 1) + 1
        v = None if request.v is None else request.v[:keys]
        requests.append(replace(request, q=request.q[begin:end], k=request.k[:keys], v=v))
    parts = whole.replace(requests=tuple(requests), note=f"rows {spans}")

    def run(bench: Bench) -> None:
        found = bench.agree(parts, t.pages())
        order = sorted(range(len(spans)), key=lambda i: spans[i])
        rows, at = [], 0
        for begin, end in spans:
            rows.append(slice(at, at + end - begin))
            at += end - begin
        index = torch.cat([torch.arange(rows[i].start, rows[i].stop) for i in order])
        if len(index) != whole.num_rows:
            raise Failed(f"rows {spans} are not all the rows")
        index = index.to(bench.device)
        lse = None if found.lse is None else found.lse[index]
        bench.judge(whole, replace(found, out=found.out[index], lse=lse))

    return Check(layers(whole, parts), run, str(parts))


@K.case(8, "Rows dealt to ranks from both ends keep their positions")
def _(t: Terrain) -> Checks:
    whole = normal(t.layer(), [32], [32])
    yield _rows_split(t, whole, [(0, 8), (24, 32), (8, 16), (16, 24)])
    yield _rows_split(t, normal(t.layer(), [30], [41]), [(20, 30), (0, 10), (10, 20)])
