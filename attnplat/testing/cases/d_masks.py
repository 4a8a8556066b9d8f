"""D: the geometry of masks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from attnplat.config.names import Feature
from attnplat.errors import AttnplatError, ConfigError, HostLengthsNeededError
from attnplat.testing.bench import Bench, agrees, layers, raises, same
from attnplat.testing.case import CaseList, Check, Checks, Failed, Refused
from attnplat.testing.inputs import edges, generator, normal
from attnplat.testing.scenes import Arrangement, Scene
from attnplat.testing.serving import serve
from attnplat.testing.terrain import Terrain

D = CaseList("D", "geometry of masks")

# Query rows and keys of requests off every edge: decode, extend, prefill.
MIXED = ([1, 4, 20, 2], [40, 37, 20, 3])


def _mixed(t: Terrain, quick: int = 1, **changes: object) -> Checks:
    scene = edges(normal(t.layer(**changes), *MIXED))
    for how in t.arrangements(quick):
        yield agrees(scene, how)


@D.case(1, "Causal with context is aligned bottom-right", every_dtype=True)
def _(t: Terrain) -> Checks:
    yield from _mixed(t, 2)
    for rows, keys in t.some(((2, 3), (3, 40), (17, 33), (40, 41), (70, 140)), 4):
        yield agrees(edges(normal(t.layer(), [rows], [keys])), t.pages())


@D.case(2, "A prompt split into chunks anywhere gives what the whole gives")
def _(t: Terrain) -> Checks:
    for config in (t.layer(), t.layer(sliding_window=(9, -1)), t.latent()):
        whole = edges(normal(config, [70], [70]))
        yield agrees(whole, t.pages())
        for first in t.some(tuple(range(1, 70)), 0) or (1, 16, 17, 33, 69):

            def run(bench: Bench, whole: Scene = whole, first: int = first) -> None:
                serve(bench, whole, t.pages(write="fused"), [[first, 70]])

            yield Check(layers(whole), run, f"{whole}, split after {first}")


@D.case(3, "A window of any width sees exactly its keys: self only, a block, more than all")
def _(t: Terrain) -> Checks:
    block = t.block_size
    for left in (0, 1, block - 1, block, block + 1, 39, 40, 500):
        yield from _mixed(t, sliding_window=(left, -1))


@D.case(4, "A window means the same in prefill and in decode")
def _(t: Terrain) -> Checks:
    for left in t.some((0, 6, 16, 33), 2):
        whole = edges(normal(t.layer(sliding_window=(left, -1)), [41, 19], [41, 19]))

        def run(bench: Bench, whole: Scene = whole) -> None:
            how = t.pages(write="fused")
            steps = serve(bench, whole, how, [[1], [1]] if t.full else [[30, 1], [12, 1]])
            prefill = bench.agree(whole, how)
            if steps.shape != prefill.out.shape:
                raise Failed("decode gives other rows than prefill")

        yield Check(layers(whole), run, f"{whole}, in steps")


@D.case(5, "A window wider than any sequence is none, whatever integer it is")
def _(t: Terrain) -> Checks:
    for window in ((1000, -1), ((1 << 31) - 1, -1), (1 << 31, -1), (1 << 40, 1 << 40)):
        yield from _mixed(t, sliding_window=window)

    scene = edges(normal(t.layer(), *MIXED))
    wide = scene.replace(config=t.layer(sliding_window=(-1, -1)))

    def run(bench: Bench) -> None:
        same("window (-1, -1)", bench.agree(scene, t.pages()), bench.agree(wide, t.pages()))

    yield Check(layers(scene, wide), run, "(-1, -1) and causal is causal")


@D.case(6, "Blocks that a window hides are not read, whatever the table says of them")
def _(t: Terrain) -> Checks:
    for left in (3, t.block_size, t.block_size + 5):
        scene = edges(normal(t.layer(sliding_window=(left, -1)), [1, 4], [90, 133]))
        for tail in ("spare", -1, 1 << 30):
            yield agrees(scene, t.pages(tail=tail))


@D.case(7, "A window of cross attention or an encoder is two-sided and not symmetric")
def _(t: Terrain) -> Checks:
    for window in ((3, 0), (0, 3), (2, 5), (5, 2), (-1, 4), (4, -1)):
        yield agrees(edges(normal(t.encoder(sliding_window=window), [20, 7])), t.pages())
        yield agrees(edges(normal(t.cross(sliding_window=window), [6, 1], [9, 40])), t.pages())
    yield agrees(edges(normal(t.encoder(sliding_window=(3, 5)), [600])), t.pages())


@D.case(8, "Rows of one decode step have each its own left edge")
def _(t: Terrain) -> Checks:
    for rows in (2, 4, 7):
        scene = edges(normal(t.layer(sliding_window=(5, -1)), [rows, rows], [40, 61]))
        yield agrees(scene, t.pages())


@D.case(9, "A table may roll: its first column is the first block that a query sees")
def _(t: Terrain) -> Checks:
    for left in (4, t.block_size):
        scene = edges(normal(t.layer(sliding_window=(left, -1)), [1, 3, 1], [90, 133, 5]))
        for write in ("done", "fused"):
            yield _rolling(scene, t.pages(rolling=True, write=write))
            yield _rolling(scene, t.pages(rolling=True, write=write, validate=True))
    yield _rolled_too_far(t)


def _rolled_too_far(t: Terrain) -> Check:
    """Tables that lack a block which a query reads, at either end, or name a negative one."""
    size = t.block_size
    config = t.layer(sliding_window=(2 * size - 1, -1))
    scene = edges(normal(config, [1, 1, 1], [9 * size, 2 * size, 4]))
    # What is wrong -> the first block of each row, the request that lacks one.
    lacking = {
        "begins too late": ([7, 1, 0], "request 1"),
        "ends too early": ([5, 0, 0], "request 0"),
        "is negative": ([6, 0, 0], "request 1"),
    }

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(columns=9), impl)
        assert stage.pages is not None
        whole = stage.pages.block_table
        for what, (firsts, named) in lacking.items():
            rows = [whole[r, first : first + 3] for r, first in enumerate(firsts)]
            table = torch.stack(rows)
            if what == "is negative":
                table[0], table[1, 1] = 0, -2
            first_block = torch.tensor(firsts, dtype=torch.int32)
            pages = replace(stage.pages, block_table=table, first_block=first_block)
            plan = partial(impl.plan, stage.batch, pages)
            error = raises(f"a table that {what}", ConfigError, plan)
            if named not in str(error):
                raise Failed(f"the error about a table that {what} does not name it: {error}")

    # Only a host sees the ids.
    return Check(layers(scene), run if t.device == "cpu" else _unseen, "blocks that are not there")


def _unseen(bench: Bench) -> None:
    raise Refused("what tables hold is not looked at on a device")


def _rolling(scene: Scene, how: Arrangement) -> Check:
    """`agrees`, but for backends that plan on the host and cannot see the table's first blocks."""
    plain = agrees(scene, how)

    def run(bench: Bench) -> None:
        try:
            plain.run(bench)
        except HostLengthsNeededError as error:
            if bench.device.type == "cpu":
                raise
            raise Refused(str(error)) from error

    return Check(plain.configs, run, plain.note)


@D.case(10, "Chunked-local attention sees its chunk, also where chunks and blocks disagree")
def _(t: Terrain) -> Checks:
    for chunk in (5, t.block_size, 24):
        yield from _mixed(t, chunk_size=chunk)
        yield from _mixed(t, chunk_size=chunk, sliding_window=(2, -1))
        first = edges(normal(t.layer(chunk_size=chunk), [1, 2], [chunk * 2 + 1, chunk + 1]))
        yield agrees(first, t.pages())


@D.case(11, "A window restarted after a prefix shows the prefix and the window")
def _(t: Terrain) -> Checks:
    config = t.layer(rswa=True, sliding_window=(4, -1))
    for prefix in ([0, 5, 3, 1], [16, 20, 40, 3], [37, 36, 1, 9]):
        yield agrees(edges(normal(config, *MIXED, prefix_len=prefix)), t.pages())
    # Rows inside their prefix, of which the window shows them but themselves; a prefix before
    # a window that it does not touch, next to one that it does; and a prompt of several tiles.
    alone = t.layer(rswa=True, sliding_window=(0, -1))
    inside = normal(alone, [3, 1, 1], [9, 40, 12], prefix_len=[30] * 3)
    for paged in (True, False):
        yield agrees(edges(inside), t.pages(paged=paged))
        yield agrees(inside, t.pages(paged=paged))
    yield agrees(edges(normal(config, [2, 1], [5, 90], prefix_len=[2, 20])), t.pages())
    yield agrees(edges(normal(config, [600], [640], prefix_len=[30])), t.pages())
    also = t.layer(rswa=True, sliding_window=(4, -1), static_sink_tokens=3)
    yield agrees(edges(normal(also, *MIXED, prefix_len=[0, 5, 1, 2])), t.pages())


@D.case(12, "Spans of an image see each other both ways, and nobody else sees more")
def _(t: Terrain) -> Checks:
    spans: list[list[tuple[tuple[int, int], ...]]] = [
        [(), ((33, 36),), ((2, 9), (9, 15)), ()],
        [((0, 40),), ((30, 90),), ((0, 20),), ((1, 2),)],
        [(), ((35, 50),), ((18, 30),), ()],
    ]
    for ranges in spans:
        for config in (t.layer(mm_prefix=True), t.layer(mm_prefix=True, sliding_window=(3, -1))):
            yield agrees(edges(normal(config, *MIXED, ranges=ranges)), t.pages())
    # A span that begins with a tile's last row, and ones that lie in the past of all rows.
    config = t.layer(mm_prefix=True, sliding_window=(3, -1))
    yield agrees(edges(normal(config, [600], [600], ranges=[((511, 520),)])), t.pages())
    past = edges(normal(config, [2, 1], [90, 70], ranges=[((3, 9),), ((40, 50), (2, 6))]))
    yield _rolling(past, t.pages(rolling=True))


@D.case(13, "Causality per request holds for each request of a mixed batch")
def _(t: Terrain) -> Checks:
    config = t.layer(also_needs={Feature.PER_REQUEST_CAUSAL})
    for causal in ([True, False, False, True], [False, True, True, False], [False] * 4):
        yield agrees(edges(normal(config, *MIXED, causal=causal)), t.pages())
        near = t.layer(also_needs={Feature.PER_REQUEST_CAUSAL}, sliding_window=(4, -1))
        yield agrees(edges(normal(near, *MIXED, causal=causal)), t.pages())
    yield agrees(edges(normal(config, *MIXED)), t.pages())


def _tree(rows: int, seed: int) -> torch.Tensor:
    """A forest: each row sees itself and the ancestors of a random parent, if it has one."""
    gen = generator("tree", rows, seed)
    seen = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        # A parent of -1 makes another root: not every row sees token 0.
        parent = int(torch.randint(-1, row, (1,), generator=gen)) if row > 1 else -1
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen


@D.case(14, "A tree mask of any width and depth is read bit by bit")
def _(t: Terrain) -> Checks:
    config = t.layer(also_needs={Feature.TREE_MASK})
    for lens in (([5, 3], [30, 3]), ([9, 1, 12], [40, 7, 29]), ([17, 8], [17, 50])):
        trees = [_tree(rows, at) for at, rows in enumerate(lens[0])]
        yield agrees(edges(normal(config, *lens, tree=trees)), t.pages())
        yield agrees(edges(normal(config, *lens, tree=trees)), t.pages(padding=3, slack=9))
    trees = [_tree(8, 0), torch.ones(8, 8, dtype=torch.bool), _tree(3, 1)]
    for changes in ({}, {"sliding_window": (5, -1)}, {"causal": False}):
        other = t.layer(also_needs={Feature.TREE_MASK}, **changes)
        yield agrees(edges(normal(other, [8, 8, 3], [29, 11, 30], tree=trees)), t.pages())


@D.case(15, "Without causality any number of rows sees any number of keys")
def _(t: Terrain) -> Checks:
    for lens in (([1, 5], [40, 9]), ([20], [3]), ([3, 3], [33, 16])):
        yield agrees(edges(normal(t.cross(), *lens)), t.pages())
    yield agrees(edges(normal(t.layer(causal=False), *MIXED)), t.pages())
    yield agrees(edges(normal(t.encoder(), [1, 30, 9])), t.pages())


@D.case(16, "Static sink tokens stay visible outside the window, and count once inside")
def _(t: Terrain) -> Checks:
    for count in (1, 4, t.block_size, 21):
        config = t.layer(static_sink_tokens=count, sliding_window=(5, -1))
        yield agrees(edges(normal(config, [1, 4, 20, 2], [90, 37, 20, 3])), t.pages())


@D.case(17, "Layers of different windows share a batch and no plan")
def _(t: Terrain) -> Checks:
    narrow = edges(normal(t.layer(sliding_window=(3, -1)), *MIXED))
    wide = edges(normal(t.layer(sliding_window=(30, -1)), *MIXED))

    def run(bench: Bench) -> None:
        impls = [bench.impl(narrow), bench.impl(wide)]
        if impls[0].plan_key == impls[1].plan_key:
            raise Failed("layers of different windows have one plan key")
        stage = bench.lay_out(wide, t.pages(), impls[1])
        plans = [impl.plan(stage.batch, stage.pages) for impl in impls]
        bench.judge(wide, bench.call(wide, t.pages(), impl=impls[1], stage=stage, plan=plans[1]))
        own = bench.lay_out(narrow, t.pages(), impls[0])
        bench.judge(narrow, bench.call(narrow, t.pages(), impl=impls[0], stage=own))
        raises(
            "a plan of another window",
            AttnplatError,
            lambda: impls[1].forward(plans[0], stage.q, stage.cache),
        )

    yield Check(layers(narrow, wide), run, "windows 3 and 30")


@D.case(18, "A bidirectional prompt is one span; keys of a later chunk are not there yet")
def _(t: Terrain) -> Checks:
    config = t.layer(mm_prefix=True)
    for rows, keys in ((20, 20), (7, 7), (4, 24), (1, 30)):
        yield agrees(edges(normal(config, [rows], [keys], ranges=[((0, 20),)])), t.pages())
    kept = t.layer(also_needs={Feature.PREFIX_LENGTHS}, sliding_window=(2, -1))
    yield agrees(edges(normal(kept, [20, 4], [20, 24], prefix_len=[20, 20])), t.pages())


@D.case(19, "An encoder is bidirectional unless its config says causal")
def _(t: Terrain) -> Checks:
    for causal in (None, True, False):
        yield agrees(edges(normal(t.encoder(causal=causal), [9, 20])), t.pages())
    yield agrees(edges(normal(t.layer(attn_type="encoder"), [9, 20])), t.pages())


@D.case(20, "A prompt longer than its window or its chunk keeps both edges")
def _(t: Terrain) -> Checks:
    for changes in ({"sliding_window": (6, -1)}, {"chunk_size": 7}, {"sliding_window": (20, -1)}):
        yield agrees(edges(normal(t.layer(**changes), [50, 30], [50, 65])), t.pages())
    for rows in t.some((520, 1040), 1):
        yield agrees(edges(normal(t.layer(sliding_window=(6, -1)), [rows], [rows])), t.pages())
