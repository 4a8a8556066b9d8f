"""M: plans, updates, threads, modes."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from attnplat.backends.batch import BatchBounds
from attnplat.backends.workspace import Workspace
from attnplat.config.names import Feature
from attnplat.errors import AttnplatError
from attnplat.testing.bench import Bench, Outcome, layers, raises, same, threads
from attnplat.testing.bits import differing
from attnplat.testing.case import CaseList, Check, Checks, Failed
from attnplat.testing.guard import in_child
from attnplat.testing.inputs import edges, normal
from attnplat.testing.scenes import Scene
from attnplat.testing.terrain import Terrain

M = CaseList("M", "plans, updates, threads, modes")

LENS = ([1, 3, 1, 18], [40, 20, 1, 18])


def _kinds(t: Terrain) -> list[Scene]:
    """Steps that take different paths."""
    made = [t.layer(), t.layer(sinks=True), t.layer(alibi=True), t.layer(sliding_window=(5, -1))]
    return [edges(normal(config, *LENS)) for config in made]


@M.case(1, "A plan serves many layers, in turn and again, as a fresh one does")
def _(t: Terrain) -> Checks:
    for first in _kinds(t):
        second = edges(normal(first.config, *LENS, seed=1))

        def run(bench: Bench, first: Scene = first, second: Scene = second) -> None:
            impl = bench.impl(first)
            how = t.pages()
            expected = [bench.agree(scene, how) for scene in (first, second)]
            plan = expected[0].plan
            for _ in range(2):
                for scene, want in zip((first, second), expected, strict=True):
                    stage = bench.lay_out(scene, how, impl)
                    same(
                        "a plan used again",
                        want,
                        bench.call(scene, how, impl=impl, plan=plan, stage=stage),
                    )

        yield Check(layers(first, second), run, str(first))


@M.case(2, "Two plans may be alive at once")
def _(t: Terrain) -> Checks:
    for one in _kinds(t):
        other = edges(normal(one.config, [2, 1], [33, 90], seed=1))

        def run(bench: Bench, one: Scene = one, other: Scene = other) -> None:
            impl, how = bench.impl(one), t.pages()
            stages = [bench.lay_out(scene, how, impl) for scene in (one, other)]
            plans = [impl.plan(stage.batch, stage.pages) for stage in stages]
            for scene, stage, plan in zip((one, other), stages, plans, strict=True):
                bench.judge(scene, bench.call(scene, how, impl=impl, stage=stage, plan=plan))

        yield Check(layers(one, other), run, str(one))


@M.case(3, "A plan keeps nothing of the host's length tensors, which the engine overwrites")
def _(t: Terrain) -> Checks:
    for scene in _kinds(t):

        def run(bench: Bench, scene: Scene = scene) -> None:
            impl, how = bench.impl(scene), t.pages()
            stage = bench.lay_out(scene, how, impl)
            batch = stage.batch
            assert batch.query_start_loc_host is not None and batch.seq_lens_host is not None
            stage.batch = batch.replace(
                query_start_loc_host=batch.query_start_loc_host.clone(),
                seq_lens_host=batch.seq_lens_host.clone(),
            )
            plan = impl.plan(stage.batch, stage.pages)
            assert stage.batch.query_start_loc_host is not None
            assert stage.batch.seq_lens_host is not None
            stage.batch.query_start_loc_host.fill_(-77)
            stage.batch.seq_lens_host.fill_(1 << 20)
            bench.judge(scene, bench.call(scene, how, impl=impl, stage=stage, plan=plan))

        yield Check(layers(scene), run, str(scene))


@M.case(4, "An update takes any batch within its bounds, and refuses one beyond")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [1, 3], [40, 20]))
    small = edges(normal(t.layer(), [1], [5], seed=1))

    def run(bench: Bench) -> None:
        impl, how = bench.impl(scene), t.pages()
        stage = bench.lay_out(scene, how, impl)
        exactly = BatchBounds(max_reqs=2, max_tokens=4, max_query_len=3, max_seq_len=40)
        plan = impl.plan(stage.batch, stage.pages, bounds=exactly)
        bench.judge(scene, bench.call(scene, how, impl=impl, stage=stage, plan=plan))
        other = bench.lay_out(small, how, impl)
        plan = impl.update(plan, other.batch, other.pages)
        bench.judge(small, bench.call(small, how, impl=impl, stage=other, plan=plan))
        for name in exactly.__dataclass_fields__:
            tight = replace(exactly, **{name: getattr(exactly, name) - 1})
            raises(
                f"a batch beyond {name}",
                AttnplatError,
                lambda tight=tight: impl.plan(stage.batch, stage.pages, bounds=tight),
            )
            kept = impl.plan(other.batch, other.pages, bounds=tight)
            raises(
                f"an update beyond {name}",
                AttnplatError,
                lambda kept=kept: impl.update(kept, stage.batch, stage.pages),
            )

    yield Check(layers(scene, small), run, "bounds")


M.absent(
    5,
    "An update neither allocates nor waits for the device",
    "no implementation here declares device-graph support, which is what asks for it",
)


@M.case(6, "Two threads with two workspaces do not disturb each other")
def _(t: Terrain) -> Checks:
    one = edges(normal(t.layer(sinks=True), *LENS))
    other = edges(normal(t.layer(sinks=True), [2, 1], [33, 90], seed=1))

    def run(bench: Bench) -> None:
        expected = [bench.agree(scene, t.pages()) for scene in (one, other)]
        failures: list[str] = []
        start = threading.Barrier(2)

        def work(scene: Scene, want: Outcome) -> None:
            start.wait()
            for _ in range(20):
                try:
                    same("beside another thread", want, Bench(bench.subject).call(scene, t.pages()))
                except Failed as error:
                    failures.append(str(error))
                    return

        threads = [
            threading.Thread(target=work, args=pair)
            for pair in zip((one, other), expected, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise Failed(failures[0])

    yield Check(layers(one, other), run, "two threads")


@M.case(7, "A process forked after use still gives the same")
def _(t: Terrain) -> Checks:
    if t.device != "cpu":
        return
    scene = edges(normal(t.layer(), *LENS))

    def run(bench: Bench) -> None:
        before = bench.agree(scene, t.pages())
        in_child(lambda: same("after a fork", before, bench.call(scene, t.pages())))

    yield Check(layers(scene), run, "fork")


@M.case(8, "Between planning and running the number of threads may change", threaded=True)
def _(t: Terrain) -> Checks:
    if t.device != "cpu":
        return
    for scene in _kinds(t):

        def run(bench: Bench, scene: Scene = scene) -> None:
            impl, how = bench.impl(scene), t.pages()
            for planning, running in ((1, 2), (2, 1)):
                stage = bench.lay_out(scene, how, impl)
                with threads(planning):
                    plan = impl.plan(stage.batch, stage.pages)
                with threads(running):
                    outcome = bench.call(scene, how, impl=impl, stage=stage, plan=plan)
                bench.judge(scene, outcome)

        yield Check(layers(scene), run, str(scene))


@M.case(9, "Inference mode, autocast and another stream change nothing")
def _(t: Terrain) -> Checks:
    for scene in _kinds(t):

        def run(bench: Bench, scene: Scene = scene) -> None:
            plain, how = bench.agree(scene, t.pages()), t.pages()
            with torch.inference_mode():
                same("inference mode", plain, bench.call(scene, how))
            with torch.autocast(t.device, dtype=torch.bfloat16):
                same("autocast", plain, bench.call(scene, how))
            if t.device == "cuda":
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    other = bench.call(scene, how)
                torch.cuda.current_stream().wait_stream(stream)
                same("another stream", plain, other)

        yield Check(layers(scene), run, str(scene))


M.absent(
    10,
    "A call may be captured on a side stream and replayed",
    "no implementation here declares device-graph support",
)


def _invariant(t: Terrain, note: str, changes: dict[str, object]) -> Check:
    """Whatever else is in the batch, a request's bits are its own."""
    config = t.layer(also_needs={Feature.BATCH_INVARIANCE}, **changes)
    scene = normal(config, [1, 3, 1, 18, 1], [40, 20, 40, 18, 600])

    def run(bench: Bench) -> None:
        whole = bench.agree(scene, t.pages())
        at = 0
        for r, request in enumerate(scene.requests):
            own = slice(at, at + request.query_len)
            at = own.stop
            alone = bench.call(scene.reordered([r]), t.pages(slack=300, padding=2 * r))
            pair = [r, (r + 1) % len(scene.requests)]
            mate = bench.call(scene.reordered(pair), t.pages(padding_requests=r))
            for what, got in (("alone", alone), ("with another mate", mate)):
                rows = slice(0, request.query_len)
                if differing(got.out[rows], whole.out[own]):
                    raise Failed(f"request {r} gives other bits {what}")

    return Check(layers(scene), run, note)


@M.case(11, "In batch-invariant mode a request's bits depend on nothing else in the batch")
def _(t: Terrain) -> Checks:
    kinds: tuple[dict[str, object], ...] = (
        {},
        {"logits_soft_cap": 9.0},
        {"sliding_window": (7, -1)},
        {"sinks": True},
        {"alibi": True},
    )
    for changes in t.some(kinds, 2):
        yield _invariant(t, f"batch-mates, padding and bounds; {changes}", dict(changes))


M.absent(
    12,
    "torch.compile clones no cache and keeps write before read",
    "deferred: write_kv and forward are not registered with torch.library yet",
)


@M.case(13, "One workspace may serve several layers and backends in turn")
def _(t: Terrain) -> Checks:
    kinds = _kinds(t)

    def run(bench: Bench) -> None:
        from attnplat.backends.portable.reference import ReferenceImpl

        how = t.pages()
        bounds = BatchBounds(max_reqs=4, max_tokens=32, max_query_len=32, max_seq_len=64)
        impls = [bench.impl(scene) for scene in kinds]
        size = max(impl.workspace_bytes(bounds) for impl in impls) + 4096
        workspace = Workspace(bench.device, size)
        for _ in range(2):
            for scene, impl in zip(kinds, impls, strict=True):
                plain = bench.call(scene, how)
                used = bench.call(scene, how, impl=impl, workspace=workspace)
                same("a shared workspace", plain, used)
                other = ReferenceImpl.create(scene.config, bench.device)
                bench.call(scene, how, impl=other, workspace=workspace)
                same(
                    "the plan run again",
                    plain,
                    bench.call(
                        scene, how, impl=impl, plan=used.plan, stage=bench.lay_out(scene, how, impl)
                    ),
                )
        if bool(workspace.zeroed(1024).any()):
            raise Failed("the workspace's zero region is not zero afterwards")

    yield Check(layers(*kinds), run, "one workspace")
