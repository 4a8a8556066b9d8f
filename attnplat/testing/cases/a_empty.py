"""A: empty and zero-length."""

from __future__ import annotations

from typing import Any

import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.config.layer import LayerConfig
from attnplat.config.names import Feature
from attnplat.errors import AttnplatError
from attnplat.testing.bench import Bench, agrees, exact, layers, raises
from attnplat.testing.bits import differing
from attnplat.testing.case import CaseList, Check, Checks, Failed
from attnplat.testing.inputs import edges, needle, normal, uniform
from attnplat.testing.scenes import Scene
from attnplat.testing.terrain import Terrain

A = CaseList("A", "empty and zero-length")


def no_requests(device: torch.device, rows: int = 0) -> Batch:
    """A batch without requests and with `rows` padding rows."""
    zero = torch.zeros(1, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    return Batch(
        query_start_loc=zero.to(device),
        seq_lens=none.to(device),
        num_reqs=0,
        num_tokens=rows,
        max_query_len=0,
        max_seq_len=0,
        query_start_loc_host=zero,
        seq_lens_host=none,
    )


@A.case(1, "A batch without requests gives empty results and no error")
def _(t: Terrain) -> Checks:
    scene = normal(t.layer(), [0], [0])

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(), impl)
        table = torch.zeros((0, 1), dtype=torch.int32, device=bench.device)
        pages = PageTable(block_table=table, block_size=t.block_size)
        plan = impl.plan(no_requests(bench.device), pages)
        result = impl.forward(plan, stage.q[:0], stage.cache, return_lse=t.lse)
        out = result[0] if isinstance(result, tuple) else result
        rules = scene.rules
        if tuple(out.shape) != (0, rules.num_heads, rules.v_head_size):
            raise Failed(f"out has shape {list(out.shape)}")

    yield Check(layers(scene), run, "no request, no row")


@A.case(2, "Rows that belong to no request are padding: a given out keeps them, another has 0")
def _(t: Terrain) -> Checks:
    for out in ("given", "allocated"):
        for write in ("done", "fused"):
            scene = normal(t.layer(), [0, 0], [5, 0])
            yield agrees(scene, t.pages(padding=4, out=out, write=write))


@A.case(3, "A request without query rows between two others changes nothing for them")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [3, 0, 2], [5, 7, 20]))
    for how in t.arrangements():
        yield agrees(scene, how)
        yield agrees(scene, how.replace(write="fused"))


@A.case(4, "As many rows as requests, or fewer, does not make a batch one of single tokens")
def _(t: Terrain) -> Checks:
    for query_lens, seq_lens in (
        ([2, 0, 0], [4, 0, 0]),
        ([0, 3, 0], [0, 9, 0]),
        ([2, 0], [40, 3]),
        ([1, 3, 0, 0], [30, 31, 0, 4]),
    ):
        yield agrees(edges(normal(t.layer(), query_lens, seq_lens)), t.pages())


@A.case(5, "A padding request (no rows, no keys) has no row of the table read")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [1, 2], [17, 3]))
    for tail in (-1, 1 << 30):
        yield agrees(scene, t.pages(padding_requests=3, padding=2, tail=tail))


@A.case(6, "Cross attention to an encoder without tokens gives 0 and -inf")
def _(t: Terrain) -> Checks:
    for query_lens, seq_lens in (([2], [0]), ([1, 1, 3], [0, 9, 0]), ([1, 2], [0, 0])):
        yield agrees(normal(t.cross(), query_lens, seq_lens), t.pages())


@A.case(7, "Cross attention to an encoder without tokens, with sinks, gives 0 and the sink")
def _(t: Terrain) -> Checks:
    for query_lens, seq_lens in (([2], [0]), ([1, 1, 3], [0, 9, 0])):
        yield agrees(normal(t.cross(sinks=True), query_lens, seq_lens), t.pages())


@A.case(8, "Requests without keys do not leak NaN into their neighbours")
def _(t: Terrain) -> Checks:
    for query_lens in ([1, 1, 1, 1, 1], [4, 4, 4, 4, 4]):
        scene = normal(t.cross(), query_lens, [0, 5, 0, 33, 0])
        yield agrees(scene, t.pages())
        yield agrees(edges(scene), t.pages())


@A.case(9, "A chunk of context that some rows lack merges as nothing: its LSE is -inf")
def _(t: Terrain) -> Checks:
    config = t.expanded()
    chunk = normal(config, [2, 3, 2], [0, 4, 0], causal=[False] * 3, note="context")
    own = normal(config, [2, 3, 2], [2, 3, 2], note="new tokens")

    def run(bench: Bench) -> None:
        how = t.pages()
        first, second = bench.agree(own, how), bench.agree(chunk, how)
        assert first.lse is not None
        merge = bench.subject.library.merge_states
        out, lse = merge([first.out, second.out], [first.lse, second.lse])
        for rows in (slice(0, 2), slice(5, 7)):
            if differing(out[rows], first.out[rows]) or differing(lse[rows], first.lse[rows]):
                raise Failed("rows without context change when merged with it")

    yield Check(layers(own, chunk), run, str(chunk))


@A.case(
    10, "The first token attends to itself alone: its value comes out exactly", every_dtype=True
)
def _(t: Terrain) -> Checks:
    for write in ("done", "fused", "first"):
        scene = needle(t.layer(), [1, 1], [1, 1], [[0], []])
        yield exact(scene, t.pages(write=write))


@A.case(11, "Dense sequences of length 0 between others give nothing and harm nobody")
def _(t: Terrain) -> Checks:
    for query_lens in ([0, 3, 0, 2], [0], [0, 0, 4]):
        scene = edges(normal(t.encoder(), query_lens))
        yield agrees(scene, t.pages())
        yield agrees(scene, t.pages(spread=True, padding=2))


@A.case(12, "The smallest shapes work: one request, one row, one column, top-k of nothing")
def _(t: Terrain) -> Checks:
    yield exact(needle(t.layer(), [1], [1], [[0]]), t.pages(columns=0, spare=0))
    none = torch.full((1, 3), -1, dtype=torch.int32)
    yield agrees(normal(t.layer(topk=3), [1], [1], topk=[none]), t.pages(columns=0))
    mixed = torch.tensor([[-1, -1, -1], [2, -1, 0]], dtype=torch.int32)
    yield agrees(normal(t.layer(topk=3), [2], [5], topk=[mixed]), t.pages())
    yield agrees(uniform(t.layer(num_heads=1, num_kv_heads=1), [1], [2]), t.pages())
    yield agrees(uniform(t.encoder(num_heads=1, num_kv_heads=1), [1]), t.pages())


@A.case(13, "Fewer keys than query rows: refused when validated, right for local shards")
def _(t: Terrain) -> Checks:
    short = normal(t.layer(), [3], [2])

    def refused(bench: Bench) -> None:
        stage = bench.lay_out(short, t.pages())
        impl = bench.impl(short)
        raises(
            "a plan of 3 rows over 2 keys, validated,",
            (AttnplatError, ValueError),
            lambda: impl.plan(stage.batch, stage.pages, validate=True),
        )

    yield Check(layers(short), refused, "validate=True")
    local = t.layer(causal=False)
    yield agrees(_local(local), t.pages())
    mixed = t.layer(also_needs={Feature.PER_REQUEST_CAUSAL})
    yield agrees(_local(mixed, causal=[False] * 3), t.pages())


def _local(config: LayerConfig, **masks: Any) -> Scene:
    return normal(config, [3, 2, 1], [2, 0, 5], note="local shard", **masks)
