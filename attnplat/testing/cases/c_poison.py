"""C: padding, poison and stale memory."""

from __future__ import annotations

from attnplat.backends.batch import BatchBounds
from attnplat.backends.workspace import Workspace
from attnplat.testing.bench import Bench, agrees, layers, same
from attnplat.testing.case import CaseList, Check, Checks, Failed
from attnplat.testing.cases.h_quantised import coded
from attnplat.testing.guard import run_guarded
from attnplat.testing.inputs import edges, normal, uniform
from attnplat.testing.scenes import NAN, Arrangement, Scene
from attnplat.testing.serving import serve
from attnplat.testing.stage import lay_out
from attnplat.testing.terrain import Terrain

C = CaseList("C", "padding, poison, stale memory")

INF = float("inf")


def _varied(t: Terrain) -> list[Scene]:
    """Short steps of several kinds of layer, lengths off every block edge."""
    lens = ([1, 3, 1], [17, 5, 1])
    made = [
        normal(t.layer(), *lens),
        normal(t.layer(sliding_window=(4, -1)), *lens),
        normal(t.layer(logits_soft_cap=20.0), *lens),
        normal(t.layer(alibi=True), *lens),
        normal(t.layer(sinks=True), *lens),
        normal(t.cross(), [2, 1], [7, 19]),
        normal(t.latent(), *lens),
        normal(t.encoder(), [5, 1]),
    ]
    return [edges(scene) for scene in made]


@C.case(1, "NaN in keys and values past a sequence's end has no effect")
def _(t: Terrain) -> Checks:
    for scene in _varied(t):
        yield agrees(scene, t.pages(poison=NAN))
    for how in t.arrangements(4):
        yield agrees(edges(normal(t.layer(), [1, 2, 33], [33, 47, 33])), how)


@C.case(2, "Inf, or codes of NaN, past a sequence's end have no effect")
def _(t: Terrain) -> Checks:
    for scene in _varied(t):
        yield agrees(scene, t.pages(poison=INF))
        yield agrees(scene, t.pages(poison=-INF))
    # In a coded cache, what must not be read are bytes that are NaN in codes and scales.
    for name in ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "int8_th", "nvfp4", "mxfp8"):
        yield agrees(coded(t, name), t.pages(padding=2, write="fused"))


@C.case(3, "NaN in padding rows of q, k and v has no effect and is not written to the cache")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [1, 3], [17, 3]))
    for write in ("fused", "first"):
        yield agrees(scene, t.pages(padding=5, write=write))
        # Padding rows are skipped whatever slot they name: here one of a live token.
        yield agrees(scene, t.pages(padding=5, write=write, padding_slots=0, padding_requests=2))
    yield agrees(edges(normal(t.encoder(), [3, 2])), t.pages(padding=4))


@C.case(4, "A null block full of NaN, to which padding requests and hidden blocks point, is inert")
def _(t: Terrain) -> Checks:
    for config in (t.layer(), t.layer(sliding_window=(5, -1)), t.layer(chunk_size=16)):
        scene = edges(normal(config, [1, 2], [70, 40]))
        yield agrees(scene, t.pages(tail="spare", padding_requests=3, padding=3))


@C.case(5, "Table entries past a sequence's end are never used: -1, huge or stale")
def _(t: Terrain) -> Checks:
    for scene in _varied(t)[:6]:
        for tail in (-1, 1 << 30, 0):
            yield agrees(scene, t.pages(tail=tail, columns=3))


def _with_workspace(t: Terrain, scene: Scene, garbage: int) -> Check:
    how = t.pages()

    def run(bench: Bench) -> None:
        plain = bench.agree(scene, how)
        impl = bench.impl(scene)
        bounds = BatchBounds(max_reqs=64, max_tokens=64, max_query_len=64, max_seq_len=1024)
        workspace = Workspace(bench.device, impl.workspace_bytes(bounds) + 4096)
        whole = workspace.take(workspace.nbytes, align=1)
        whole.fill_(garbage)
        workspace.reset()
        used = bench.call(scene, how, workspace=workspace)
        same(f"a workspace full of {garbage:#x}", plain, used)
        if workspace.zeroed(1024).any():
            raise Failed("the workspace's zero region is not zero afterwards")
        whole.fill_(garbage)
        same(
            "the plan run again after its workspace was overwritten",
            plain,
            bench.call(scene, how, impl=impl, plan=used.plan, stage=bench.lay_out(scene, how)),
        )

    return Check(layers(scene), run, str(scene))


@C.case(6, "What a workspace held before has no effect")
def _(t: Terrain) -> Checks:
    for scene in _varied(t)[:6]:
        for garbage in (0xFF, 0x7F):
            yield _with_workspace(t, scene, garbage)


@C.case(7, "Every live row of a given out is written, no other is touched")
def _(t: Terrain) -> Checks:
    for scene in _varied(t):
        yield agrees(scene, t.pages(padding=3, lse="given"))
        yield agrees(scene, t.pages(padding=3, spread=True, lse="transposed"))


def _replayed(t: Terrain, scenes: list[Scene], note: str) -> Check:
    """The scenes one after the other through `update` of one plan, padded to equal sizes."""
    rows = max(scene.num_rows for scene in scenes)
    requests = max(len(scene.requests) for scene in scenes)
    longest = max(max(scene.seq_lens) for scene in scenes)

    def run(bench: Bench) -> None:
        impl = bench.impl(scenes[0])
        bounds = BatchBounds(
            max_reqs=requests, max_tokens=rows, max_query_len=rows, max_seq_len=longest
        )
        plan = None
        for number, scene in enumerate(scenes):
            how = t.pages(
                order=number,
                padding=rows - scene.num_rows,
                padding_requests=requests - len(scene.requests),
            )
            stage = lay_out(scene, how, impl, bench.device)
            if plan is None:
                plan = impl.plan(stage.batch, stage.pages, bounds=bounds)
            else:
                plan = impl.update(plan, stage.batch, stage.pages)
            outcome = bench.call(scene, how, impl=impl, plan=plan, stage=stage)
            bench.judge(scene, outcome)

    return Check(layers(scenes[0]), run, note)


@C.case(8, "An update to fewer requests leaves nothing of the larger step behind")
def _(t: Terrain) -> Checks:
    for config in (t.layer(), t.layer(sinks=True, sliding_window=(6, -1))):
        large = edges(normal(config, [1] * 6, [40, 3, 17, 16, 90, 1]))
        small = edges(normal(config, [1, 1], [5, 33], seed=1))
        yield _replayed(t, [large, small, large], "6, 2, then 6 requests")


@C.case(9, "Updates that alternate between long and short sequences stay right")
def _(t: Terrain) -> Checks:
    long = edges(normal(t.layer(), [1, 1], [700, 530]))
    short = edges(normal(t.layer(), [1, 1], [1, 2], seed=1))
    yield _replayed(t, [long, short, long, short], "long and short in turn")


@C.case(10, "Without causality, no lane of padding joins the denominator", every_dtype=True)
def _(t: Terrain) -> Checks:
    config = t.layer(causal=False)
    for keys in t.some((1, 8, 15, 17, 33, 64, 127, 129, 256, 513), 7):
        yield agrees(uniform(config, [1], [keys]), t.pages())
    yield agrees(uniform(config, [1, 1, 2, 2], [3, 16, 31, 5]), t.pages())
    yield agrees(uniform(t.encoder(), [7, 64, 13]), t.pages())


@C.case(11, "Head sizes that are no power of two read nothing beyond their rows")
def _(t: Terrain) -> Checks:
    for size in t.some((40, 80, 24, 72, 96, 112, 120), 2):
        scene = edges(normal(t.layer(head_size=size), [1, 5], [20, 5]))
        for layout in t.layouts:
            yield agrees(scene, t.pages(layout=layout, spread=True, write="fused"))


@C.case(12, "A fresh cache of NaN serves as any other: prompts, then token after token")
def _(t: Terrain) -> Checks:
    for config in (t.layer(), t.layer(sliding_window=(7, -1))):
        whole = normal(config, [9, 20], [9, 20])

        def run(bench: Bench, whole: Scene = whole) -> None:
            serve(bench, whole, t.pages(write="fused"), [[5, 1, 1, 2]] * 2)

        yield Check(layers(whole), run, f"{whole}, in steps")


@C.case(13, "Block 0 and slot 0 are as good as any other")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [2, 1], [20, 3]))
    for write in ("done", "fused", "first"):
        how = t.pages(blocks=((0, 3), (1,)), num_blocks=5, write=write)
        yield agrees(scene, how)
        yield agrees(scene, how.replace(blocks=((2, 3), (0,))))


@C.case(14, "A cache that ends at its last valid byte is not read beyond it")
def _(t: Terrain) -> Checks:
    if t.device != "cpu":
        return
    scenes = [
        edges(normal(t.layer(), [1, 2], [17, 32])),
        edges(normal(t.layer(num_heads=2, num_kv_heads=1, head_size=40), [1], [5])),
        edges(normal(t.layer(sinks=True, num_heads=3, num_kv_heads=3), [1], [16])),
    ]
    for scene in scenes:
        for layout in t.layouts:
            how = t.pages(layout=layout, spare=0)

            def run(bench: Bench, scene: Scene = scene, how: Arrangement = how) -> None:
                run_guarded(bench, scene, how)

            yield Check(layers(scene), run, f"{scene} [{how}]")
