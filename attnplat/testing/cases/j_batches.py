"""J: shapes and roles of batches."""

from __future__ import annotations

from dataclasses import replace

from attnplat.errors import HostLengthsNeededError
from attnplat.testing.bench import Bench, agrees, layers, same, unchanged
from attnplat.testing.case import CaseList, Check, Checks, Refused
from attnplat.testing.inputs import edges, normal
from attnplat.testing.scenes import Scene
from attnplat.testing.terrain import Terrain

J = CaseList("J", "shapes and roles of batches")


def _alone(scene: Scene, t: Terrain) -> Checks:
    """The scene, and each of its requests by itself."""
    yield agrees(scene, t.pages())
    for r in range(len(scene.requests)):
        yield agrees(scene.reordered([r]), t.pages())


@J.case(1, "A mixed batch of decode and prefill gives each request what it gets alone")
def _(t: Terrain) -> Checks:
    for changes in ({}, {"sliding_window": (7, -1)}, {"logits_soft_cap": 5.0}):
        scene = edges(normal(t.layer(**changes), [1, 9, 1, 20], [40, 33, 7, 20]))
        yield from _alone(scene, t)


@J.case(2, "Requests may come in any order, prompts first or among tokens")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [1, 9, 1, 20], [40, 33, 7, 20]))
    for order in ([3, 1, 0, 2], [0, 3, 2, 1], [1, 0, 3, 2]):
        yield agrees(scene.reordered(order), t.pages())


@J.case(3, "Decode rows may be 1, 2 and 5 in one batch")
def _(t: Terrain) -> Checks:
    for lens in (([1, 2, 5], [40, 41, 39]), ([5, 1, 2, 1, 5], [5, 1, 33, 33, 90])):
        yield agrees(edges(normal(t.layer(), *lens)), t.pages())


@J.case(4, "A prompt of one token without context is no decode of an old sequence")
def _(t: Terrain) -> Checks:
    for lens in (([1, 1], [1, 40]), ([1, 1, 1], [1, 1, 1]), ([1, 7], [1, 7])):
        for write in ("done", "fused"):
            yield agrees(edges(normal(t.layer(), *lens)), t.pages(write=write))


@J.case(5, "Several rows a request over long sequences: drafts being verified")
def _(t: Terrain) -> Checks:
    for changes in ({}, {"sinks": True}, {"logits_soft_cap": 9.0}):
        scene = edges(normal(t.layer(**changes), [4, 4, 4], [1100, 530, 40]))
        yield agrees(scene, t.pages(write="fused"))


@J.case(6, "Cross attention is written once and then only read, encoders of any length")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.cross(), [2, 1, 3], [33, 5, 16]))
    for write in ("done", "fused", "first"):
        yield agrees(scene, t.pages(write=write))

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        how = t.pages(write="fused")
        stage = bench.lay_out(scene, how, impl)
        written = bench.call(scene, how, impl=impl, stage=stage)
        assert stage.pages is not None
        later = bench.lay_out(scene, t.pages(), impl)
        later.cache, later.pages = stage.cache, replace(stage.pages, slot_mapping=None)
        same("read again", written, bench.call(scene, t.pages(), impl=impl, stage=later))

    yield Check(layers(scene), run, f"{scene}, then read again")


@J.case(7, "An encoder needs no cache, and plans without a table")
def _(t: Terrain) -> Checks:
    for lens in ([20], [1, 30, 9], [16] * 5):
        yield agrees(edges(normal(t.encoder(), lens)), t.pages())
    yield agrees(edges(normal(t.encoder(causal=True), [20, 3])), t.pages())
    dense = edges(normal(t.layer(), [1, 5], [20, 5]))
    yield agrees(dense, t.pages(paged=False, spread=True))


@J.case(8, "Bounds on lengths may be far above the lengths")
def _(t: Terrain) -> Checks:
    for changes in ({}, {"sliding_window": (7, -1)}):
        scene = edges(normal(t.layer(**changes), [1, 9, 3], [40, 33, 3]))
        yield agrees(scene, t.pages(slack=5000))


@J.case(9, "Lengths on the device may be shorter than the host's upper bounds")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [1, 9, 3], [40, 33, 3]))

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(slack=64), impl)
        host = stage.batch.seq_lens_host
        assert host is not None
        stage.batch = stage.batch.replace(host_lens="upper", seq_lens_host=host + 64)
        try:
            outcome = bench.call(scene, t.pages(), impl=impl, stage=stage)
        except HostLengthsNeededError as error:
            # On an accelerator a backend may say that it needs them; never copy them unasked.
            if t.device == "cpu":
                raise
            raise Refused(str(error)) from error
        bench.judge(scene, outcome)

    yield Check(layers(scene), run, "host_lens='upper'")


@J.case(10, "More rows than tokens change nothing")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [1, 9, 3], [40, 33, 3]))
    hows = [t.pages(padding=n, padding_requests=r) for n, r in ((0, 0), (1, 0), (7, 3), (40, 1))]
    yield unchanged(scene, *hows)


@J.case(11, "One very long sequence among many short ones")
def _(t: Terrain) -> Checks:
    long, many = (100_000, 255) if t.full else (9_000, 40)
    lens = [1 + (7 * i) % 30 for i in range(many)]
    scene = normal(t.layer(), [1] * (many + 1), [*lens[:9], long, *lens[9:]])
    yield agrees(scene, t.pages())
    yield agrees(edges(scene), t.pages())


@J.case(12, "A layer may read the cache of another, and write nothing")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [1, 9, 3], [40, 33, 3]))
    yield agrees(scene, t.pages(write="done"))
    other = scene.replace(config=t.layer(sliding_window=(5, -1)), note="another layer's window")

    def run(bench: Bench) -> None:
        how = t.pages(write="fused")
        stage = bench.lay_out(scene, how)
        bench.judge(scene, bench.call(scene, how, stage=stage))
        reader = bench.lay_out(edges(other), t.pages(order=how.order))
        assert stage.pages is not None
        reader.cache, reader.pages = stage.cache, replace(stage.pages, slot_mapping=None)
        reader.q = stage.q
        bench.judge(other, bench.call(other, t.pages(), stage=reader))

    yield Check(layers(scene, other), run, str(other))
