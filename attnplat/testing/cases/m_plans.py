"""M: plans, updates, threads, modes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnplat.backends.batch import BatchBounds
from attnplat.backends.handle import HANDLE_TYPE
from attnplat.backends.plan import Plan
from attnplat.backends.workspace import Workspace
from attnplat.config.names import Feature
from attnplat.errors import AttnplatError
from attnplat.testing.bench import Bench, Outcome, layers, raises, same, threads
from attnplat.testing.bits import differing
from attnplat.testing.case import CaseList, Check, Checks, Failed, Refused
from attnplat.testing.compiled import Compiled
from attnplat.testing.graphs import Recording
from attnplat.testing.guard import in_child
from attnplat.testing.inputs import edges, normal
from attnplat.testing.scenes import Scene
from attnplat.testing.stage import tensors_of
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
        # A plan that is updated in place is of as many rows as its bounds.
        padded = t.pages(padding=3)
        other = bench.lay_out(small, padded, impl)
        plan = impl.update(plan, other.batch, other.pages)
        bench.judge(small, bench.call(small, padded, impl=impl, stage=other, plan=plan))
        bare = bench.lay_out(small, how, impl)
        for name in exactly.__dataclass_fields__:
            tight = replace(exactly, **{name: getattr(exactly, name) - 1})
            raises(
                f"a batch beyond {name}",
                AttnplatError,
                lambda tight=tight: impl.plan(stage.batch, stage.pages, bounds=tight),
            )
            kept = impl.plan(bare.batch, bare.pages, bounds=tight)
            raises(
                f"an update beyond {name}",
                AttnplatError,
                lambda kept=kept: impl.update(kept, stage.batch, stage.pages),
            )

    yield Check(layers(scene, small), run, "bounds")


@M.case(5, "An update in place keeps every address, allocates nothing and waits for nothing")
def _(t: Terrain) -> Checks:
    for config in (t.layer(), t.layer(sinks=True, sliding_window=(6, -1))):
        first = edges(normal(config, [1, 3], [40, 20]))
        steps = [edges(normal(config, *lens, seed=1)) for lens in (([2], [37]), ([1, 1], [3, 40]))]

        def run(bench: Bench, first: Scene = first, steps: list[Scene] = steps) -> None:
            if not bench.subject.impl.updates_in_place:
                raise Refused("does not update plans in place")
            impl, how = bench.impl(first), t.pages()
            stage = bench.lay_out(first, how, impl)
            bounds = BatchBounds(max_reqs=2, max_tokens=4, max_query_len=3, max_seq_len=40)
            plan = impl.plan(stage.batch, stage.pages, bounds=bounds)
            addresses = _addresses(plan)
            for scene in steps:
                padded = t.pages(padding=4 - scene.num_rows)
                stage = bench.lay_out(scene, padded, impl)
                with _no_waiting(bench), _Allocations() as seen:
                    updated = impl.update(plan, stage.batch, stage.pages)
                if seen.names:
                    raise Failed(f"the update allocates: {', '.join(seen.names)}")
                if updated is not plan or _addresses(plan) != addresses:
                    raise Failed("the update makes a new plan, or moves what it reads")
                outcome = bench.call(scene, padded, impl=impl, stage=stage, plan=plan)
                bench.judge(scene, outcome)

        yield Check(layers(first), run, str(first))


def _addresses(plan: Plan) -> list[int]:
    """Where everything is that a recorded call reads."""
    found = [tensor.data_ptr() for _, tensor in tensors_of(plan.batch)]
    pages = [] if plan.pages is None else tensors_of(plan.pages)
    return found + [tensor.data_ptr() for _, tensor in pages]


class _Allocations(TorchDispatchMode):
    """Names of the operations whose results are new memory, not views and not given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for made in result if isinstance(result, list | tuple) else [result]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.names.append(str(func))
        return result


@contextmanager
def _no_waiting(bench: Bench) -> Iterator[None]:
    """Where the device is CUDA's, any wait for it is an error."""
    if bench.device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@M.case(6, "Two threads with two workspaces do not disturb each other")
def _(t: Terrain) -> Checks:
    # Of one shape, so that one thread's scratch would fit the other's call.
    one = normal(t.layer(sinks=True), *LENS)
    other = normal(t.layer(sinks=True), *LENS, seed=1)

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
            impl, stage = bench.impl(scene), bench.lay_out(scene, how)
            with torch.autocast(t.device, dtype=torch.bfloat16):
                other = bench.call(scene, how, impl=impl, stage=stage)
            same("autocast", plain, other)
            if t.device == "cuda":
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    other = bench.call(scene, how)
                torch.cuda.current_stream().wait_stream(stream)
                same("another stream", plain, other)

        yield Check(layers(scene), run, str(scene))


@M.case(10, "A call may be captured on a side stream and replayed")
def _(t: Terrain) -> Checks:
    if t.device != "cuda":
        return
    for config in (t.layer(), t.layer(sinks=True), t.layer(sliding_window=(5, -1))):
        first, second = (normal(config, *LENS, seed=seed) for seed in (0, 1))

        def run(bench: Bench, first: Scene = first, second: Scene = second) -> None:
            impl, how = bench.impl(first), t.pages()
            stage = bench.lay_out(first, how, impl)
            bounds = BatchBounds(max_reqs=4, max_tokens=23, max_query_len=18, max_seq_len=40)
            plan = impl.plan(stage.batch, stage.pages, bounds=bounds)
            recording = Recording(bench, impl, plan, stage)
            for scene in (first, second, first):
                bench.judge(scene, recording.replay(bench.lay_out(scene, how, impl)))

        yield Check(layers(first, second), run, str(first))


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


@M.case(12, "torch.compile clones no cache and keeps write before read", threaded=True)
def _(t: Terrain) -> Checks:
    if not t.full:  # a graph takes a compiler longer than all other cases of a quick run
        return
    config = t.layer()
    steps = [
        edges(normal(config, [1, 1], lens, seed=n)) for n, lens in enumerate(([20, 33], [7, 64]))
    ]

    def run(bench: Bench) -> None:
        if HANDLE_TYPE is None:
            raise Refused("torch before 2.11: graphs break at plans")
        impl, how = bench.impl(steps[0]), t.pages(write="first", out="allocated")
        compiled = Compiled(impl)
        for n, scene in enumerate(steps):
            ask = compiled.again if n else compiled.first
            ask(bench, scene, bench.lay_out(scene, how, impl))

    yield Check(layers(*steps), run, "a whole graph")


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
