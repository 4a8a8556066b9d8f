"""R: what must be equal bit by bit, whatever the layer (section 4.2 of the contract)."""

from __future__ import annotations

import torch

from attnplat.backends.batch import BatchBounds
from attnplat.testing.bench import Bench, Outcome, layers, same, threads, unchanged
from attnplat.testing.bits import differing
from attnplat.testing.case import CaseList, Check, Checks, Failed, Refused
from attnplat.testing.graphs import Recording
from attnplat.testing.inputs import normal
from attnplat.testing.scenes import Scene
from attnplat.testing.terrain import Terrain

R = CaseList("R", "equal bit by bit")

LENS = ([1, 3, 1, 18, 1], [40, 20, 1, 18, 47])


def kinds(t: Terrain, number: int) -> list[Scene]:
    """One step of every kind of layer; with little time half of them, others for each case."""
    made = [
        normal(t.layer(), *LENS),
        normal(t.layer(sliding_window=(9, -1)), *LENS),
        normal(t.layer(chunk_size=16), *LENS),
        normal(t.layer(sinks=True), *LENS),
        normal(t.layer(alibi=True), *LENS),
        normal(t.layer(logits_soft_cap=9.0), *LENS),
        normal(t.layer(causal=False), *LENS),
        normal(t.layer(v_head_size=t.head_size // 2), *LENS),
        normal(t.cross(), [2, 1, 3], [33, 0, 16]),
        normal(t.encoder(), [20, 3, 7]),
        normal(t.latent(), *LENS),
        normal(t.sparse(), *LENS),
        normal(t.expanded(), [20, 3, 7]),
    ]
    return made if t.full else [made[0], *made[1 + number % 2 :: 2]]


@R.case(1, "The same inputs twice")
def _(t: Terrain) -> Checks:
    for scene in kinds(t, 1):
        yield unchanged(scene, t.pages(), t.pages())


@R.case(2, "A plan used before, or made anew")
def _(t: Terrain) -> Checks:
    for scene in kinds(t, 2):

        def run(bench: Bench, scene: Scene = scene) -> None:
            impl, how = bench.impl(scene), t.pages()
            first = bench.agree(scene, how, impl=impl)
            again = bench.lay_out(scene, how, impl)
            same(
                "a plan used again",
                first,
                bench.call(scene, how, impl=impl, plan=first.plan, stage=again),
            )

        yield Check(layers(scene), run, str(scene))


@R.case(3, "Blocks in any physical order")
def _(t: Terrain) -> Checks:
    for scene in kinds(t, 3):
        yield unchanged(scene, *(t.pages(order=order, spare=2 + order) for order in range(3)))


@R.case(4, "Tables with any tail, and any width")
def _(t: Terrain) -> Checks:
    for scene in kinds(t, 4):
        tails = [t.pages(tail=tail, columns=n) for tail, n in (("spare", 2), (-1, 0), (1 << 30, 9))]
        yield unchanged(scene, *tails)


@R.case(5, "Padding rows and padding requests added, or what is in them")
def _(t: Terrain) -> Checks:
    for scene in kinds(t, 5):
        hows = [t.pages(padding=n, padding_requests=r) for n, r in ((0, 0), (5, 2), (64, 9))]
        yield unchanged(scene, *hows, t.pages(padding=5, padding_requests=2, poison=None))


@R.case(6, "Tensors and caches of any strides")
def _(t: Terrain) -> Checks:
    for scene in kinds(t, 6):
        hows = [t.pages(write="fused"), t.pages(write="fused", spread=True, layers=2)]
        yield unchanged(scene, *hows, t.pages(write="fused", fused=True))


@R.case(7, "out and lse given or allocated")
def _(t: Terrain) -> Checks:
    for scene in kinds(t, 7):
        hows = [t.pages(out="allocated"), t.pages(out="given", lse="given")]
        yield unchanged(scene, *hows, t.pages(lse="transposed"))


@R.case(8, "Requests in any order")
def _(t: Terrain) -> Checks:
    for scene in kinds(t, 8):
        count = len(scene.requests)
        order = [(3 * r + 1) % count if count % 3 else (count - 1 - r) for r in range(count)]

        def run(bench: Bench, scene: Scene = scene, order: list[int] = order) -> None:
            plain = bench.agree(scene, t.pages())
            turned = bench.call(scene.reordered(order), t.pages())
            rows = _rows(scene)
            moved = torch.cat([plain.out[rows[r]] for r in order])
            if count := differing(moved, turned.out):
                raise Failed(f"requests in the order {order}: {count} elements differ")

        yield Check(layers(scene), run, str(scene))


def _rows(scene: Scene) -> list[slice]:
    """The rows of each request."""
    found, at = [], 0
    for count in scene.query_lens:
        found.append(slice(at, at + count))
        at += count
    return found


@R.case(9, "New tokens written first, or by the call itself, or there already")
def _(t: Terrain) -> Checks:
    for scene in kinds(t, 9):
        yield unchanged(scene, *(t.pages(write=write) for write in ("done", "fused", "first")))


@R.case(10, "An updated plan, or a fresh one")
def _(t: Terrain) -> Checks:
    for scene in kinds(t, 10):

        def run(bench: Bench, scene: Scene = scene) -> None:
            # A plan that is updated in place is of as many rows as its bounds.
            impl, how = bench.impl(scene), t.pages(padding=64 - scene.num_rows)
            bounds = BatchBounds(max_reqs=9, max_tokens=64, max_query_len=64, max_seq_len=256)
            other = scene.reordered(range(len(scene.requests) - 1, -1, -1))
            before = bench.lay_out(other, how, impl)
            plan = impl.plan(before.batch, before.pages, bounds=bounds)
            bench.call(other, how, impl=impl, plan=plan, stage=before)
            stage = bench.lay_out(scene, how, impl)
            fresh = bench.agree(scene, how, impl=impl, bounds=bounds)
            plan = impl.update(plan, stage.batch, stage.pages)
            same(
                "an updated plan", fresh, bench.call(scene, how, impl=impl, plan=plan, stage=stage)
            )

        yield Check(layers(scene), run, str(scene))


@R.case(11, "A graph replayed, or the calls it was captured from")
def _(t: Terrain) -> Checks:
    if t.device != "cuda":
        return
    for scene in kinds(t, 11):
        other = scene.reordered(range(len(scene.requests) - 1, -1, -1))

        def run(bench: Bench, scene: Scene = scene, other: Scene = other) -> None:
            impl, how = bench.impl(scene), t.pages(padding=64 - scene.num_rows)
            bounds = BatchBounds(max_reqs=9, max_tokens=64, max_query_len=64, max_seq_len=256)
            first = bench.lay_out(other, how, impl)
            plan = impl.plan(first.batch, first.pages, bounds=bounds)
            recording = Recording(bench, impl, plan, first)
            for step in (scene, other, scene):
                fresh = bench.agree(step, how, bounds=bounds)
                stage = bench.lay_out(step, how, impl)
                impl.update(plan, stage.batch, stage.pages)
                same("a replay", fresh, recording.replay(stage))
                for name, own, theirs in recording.written(fresh.stage):
                    if count := differing(own, theirs):
                        raise Failed(f"a replay: {count} elements of all of {name} differ")

        yield Check(layers(scene), run, str(scene))


@R.case(12, "Any number of CPU threads", threaded=True)
def _(t: Terrain) -> Checks:
    if t.device != "cpu":
        return
    long = [
        normal(t.layer(), [1, 2], [1100, 530]),
        normal(t.layer(logits_soft_cap=9.0), [90], [90]),
    ]
    for scene in [*kinds(t, 12), *long]:

        def run(bench: Bench, scene: Scene = scene) -> None:
            if not bench.subject.impl.ignores_threads:
                raise Refused("does not say that the number of threads changes no bit")
            outcomes: list[Outcome] = []
            for count in (1, 2, 3) if t.full else (1, 2):
                with threads(count):
                    outcomes.append(bench.call(scene, t.pages()))
            for other in outcomes[1:]:
                same("another number of threads", outcomes[0], other)

        yield Check(layers(scene), run, str(scene))
