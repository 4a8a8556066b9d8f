"""E: scale, soft cap, sinks, ALiBi, position bias."""

from __future__ import annotations

import torch

from attnplat.testing.bench import Bench, agrees, layers
from attnplat.testing.case import CaseList, Check, Checks, Failed
from attnplat.testing.cases.b_masked import parts_agree
from attnplat.testing.cases.h_quantised import coded
from attnplat.testing.inputs import LOUD, edges, needle, normal, uniform
from attnplat.testing.scenes import Scene
from attnplat.testing.serving import serve
from attnplat.testing.terrain import Terrain

E = CaseList("E", "scale, soft cap, sinks, ALiBi")

LENS = ([1, 4, 20], [40, 37, 20])
LONG = ([1, 2], [1100, 530])


@E.case(1, "The scale is the default, a given one, a negative one or zero", every_dtype=True)
def _(t: Terrain) -> Checks:
    for scale in (None, 1.0, 0.05, -0.3, 0.0):
        yield agrees(normal(t.layer(scale=scale), *LENS), t.pages())
    yield agrees(normal(t.latent(scale=0.4), *LENS), t.pages())
    yield agrees(uniform(t.layer(scale=0.0), [1], [8]), t.pages())


@E.case(2, "A soft cap holds for logits far beyond it", every_dtype=True)
def _(t: Terrain) -> Checks:
    for cap in (30.0, 0.5):
        for gain in (1.0, 10.0, 300.0):
            scene = normal(t.layer(logits_soft_cap=cap), *LENS, gain=gain, note=f"gain {gain}")
            yield agrees(scene, t.pages())


@E.case(3, "The soft cap comes before the mask: hidden keys are not at -cap")
def _(t: Terrain) -> Checks:
    for cap in (0.5, 5.0):
        for changes in ({}, {"sliding_window": (4, -1)}, {"causal": False}):
            scene = edges(normal(t.layer(logits_soft_cap=cap, **changes), *LENS))
            yield agrees(scene, t.pages())


@E.case(4, "The soft cap comes before ALiBi and position bias")
def _(t: Terrain) -> Checks:
    for changes in ({"alibi": True}, {"position_bias": True}):
        scene = normal(t.layer(logits_soft_cap=2.0, **changes), *LENS, gain=5.0)
        yield agrees(scene, t.pages())
        slopes = scene.alibi_slopes
        if slopes is not None:
            yield agrees(scene.replace(alibi_slopes=slopes * 20), t.pages())


@E.case(5, "The soft cap holds in prefill, in decode and over long sequences")
def _(t: Terrain) -> Checks:
    config = t.layer(logits_soft_cap=8.0)
    for lens in (([1, 1], [40, 3]), ([30], [30]), ([3, 2], [30, 50]), LONG):
        yield agrees(normal(config, *lens, gain=6.0), t.pages())
    yield agrees(normal(t.encoder(logits_soft_cap=8.0), [30, 5], gain=6.0), t.pages())
    yield agrees(normal(t.cross(logits_soft_cap=8.0), *LENS, gain=6.0), t.pages())
    yield agrees(coded(t, "int8_th", logits_soft_cap=8.0), t.pages())


def _with_sinks(scene: Scene, *sinks: float) -> Scene:
    heads = scene.rules.num_heads
    values = [sinks[h % len(sinks)] for h in range(heads)]
    return scene.replace(sinks=torch.tensor(values), note=f"sinks {sinks}")


@E.case(6, "A sink of -inf is none, one of +40 takes nearly all, one of 0 is one more key")
def _(t: Terrain) -> Checks:
    scene = normal(t.layer(sinks=True), *LENS)
    for sink in (float("-inf"), 40.0, 0.0, -3.0):
        yield agrees(_with_sinks(scene, sink), t.pages())
    yield agrees(_with_sinks(scene, 0.0, float("-inf"), 5.0), t.pages())


def _half(t: Terrain, lens: tuple[list[int], list[int]], at: list[list[int]]) -> Scene:
    """A needle and a sink of its logit: half the needle's value."""
    scene = needle(t.layer(sinks=True, scale=0.25), *lens, at)
    return _with_sinks(scene, LOUD)


@E.case(7, "A sink counts once, however many parts a sequence is computed in", every_dtype=True)
def _(t: Terrain) -> Checks:
    yield agrees(_half(t, ([1, 2], [9, 33]), [[3], [30]]), t.pages())
    for at in (0, 511, 512, 1024, 1099):
        yield agrees(_half(t, ([1], [1100]), [[at]]), t.pages())
    yield agrees(_with_sinks(uniform(t.layer(sinks=True), *LONG), 0.0), t.pages())


@E.case(8, "A sink without any visible key gives 0 and the sink")
def _(t: Terrain) -> Checks:
    config = t.cross(sinks=True, sliding_window=(1, 1))
    yield agrees(normal(config, [6, 1, 3], [3, 2, 0]), t.pages())


@E.case(9, "Sinks hold over quantised keys and values")
def _(t: Terrain) -> Checks:
    for name in ("fp8_e4m3fn", "int8_th", "mla_fp8_656"):
        scene = coded(t, name, k_scale=[0.5], v_scale=[2.0], sinks=True)
        yield agrees(_with_sinks(scene, 64.0, 0.0), t.pages())
        yield agrees(_with_sinks(scene, float("-inf"), 66.0), t.pages(write="fused"))


@E.case(10, "A sink is neither scaled, nor capped, nor turned to base 2")
def _(t: Terrain) -> Checks:
    for changes in ({"scale": 0.01}, {"scale": 2.0}, {"logits_soft_cap": 1.0}):
        scene = normal(t.layer(sinks=True, **changes), *LENS)
        yield agrees(_with_sinks(scene, 3.0, -1.0), t.pages())
    capped = uniform(t.layer(sinks=True, logits_soft_cap=2.0), [1, 2], [8, 33])
    yield agrees(_with_sinks(capped, 6.0), t.pages())


@E.case(11, "Sinks may be bfloat16, and heads any number", every_dtype=True)
def _(t: Terrain) -> Checks:
    for heads, kv_heads in t.some(((5, 5), (6, 2), (17, 1), (20, 4)), 3):
        scene = normal(t.layer(sinks=True, num_heads=heads, num_kv_heads=kv_heads), [1, 3], [9, 20])
        assert scene.sinks is not None
        yield agrees(scene, t.pages())
        yield agrees(scene.replace(sinks=scene.sinks.bfloat16()), t.pages())


@E.case(12, "ALiBi counts from positions: the same in prefill, in chunks and in decode")
def _(t: Terrain) -> Checks:
    yield agrees(normal(t.layer(alibi=True), *LENS), t.pages())
    yield agrees(edges(normal(t.layer(alibi=True), *LENS)), t.pages())
    yield agrees(normal(t.layer(alibi=True), *LONG), t.pages())
    whole = normal(t.layer(alibi=True), [40, 23], [40, 23])

    def run(bench: Bench) -> None:
        serve(bench, whole, t.pages(write="fused"), [[17, 1, 5], [3, 1]])

    yield Check(layers(whole), run, f"{whole}, in steps")
    yield agrees(normal(t.encoder(alibi=True), [20, 9]), t.pages())


@E.case(13, "ALiBi takes any number of heads, and a rank's share of them")
def _(t: Terrain) -> Checks:
    for heads, kv_heads in ((5, 1), (12, 4), (3, 3)):
        scene = normal(t.layer(alibi=True, num_heads=heads, num_kv_heads=kv_heads), *LENS)
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / 12) for h in range(4, 4 + heads)])
        yield agrees(scene.replace(alibi_slopes=slopes), t.pages())


@E.case(14, "With ALiBi the LSE is that of -slope * |p - j|, which only the LSE shows")
def _(t: Terrain) -> Checks:
    if not t.lse:
        return
    for lens in (([1, 3], [40, 20]), ([12], [12])):
        scene = uniform(t.layer(alibi=True), *lens)
        assert scene.alibi_slopes is not None
        yield agrees(scene.replace(alibi_slopes=scene.alibi_slopes + 0.5), t.pages())


@E.case(15, "Sinks over merged parts are applied once, and give what the whole gives")
def _(t: Terrain) -> Checks:
    if t.lse:
        whole = normal(t.layer(causal=False, sinks=True), [3], [90])
        for cuts in ([1], [45], [30, 60]):
            yield parts_agree(t, whole, cuts)
        yield parts_agree(t, _with_sinks(whole, 2.0, float("-inf")), [45])
    yield Check((), _joined_by_definition, "merge_states and apply_sinks in float64 and float32")


def _joined_by_definition(bench: Bench) -> None:
    """One key a part, joined with a sink: exact in float64 where the parts are float64."""
    for dtype, near in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        logits = torch.tensor([0.3, -1.2, 2.0], dtype=dtype)
        values = torch.tensor([[1.7, -3.0], [0.1, 8.0], [5.5, 0.7]], dtype=dtype)
        sink = torch.tensor([0.9], dtype=dtype)
        outs = [v[None, None].to(bench.device) for v in values]
        lses = [s[None, None].to(bench.device) for s in logits]
        library = bench.subject.library
        out, lse = library.apply_sinks(*library.merge_states(outs, lses), sink.to(bench.device))
        weights = torch.cat([logits, sink]).double().softmax(0)[:3]
        truth = (weights[:, None] * values.double()).sum(0)
        off = float((out.flatten().cpu().double() - truth).norm() / truth.norm())
        if not off <= near or out.dtype != dtype:
            raise Failed(f"parts of {dtype} and a sink are off by {off:.1e} as {out.dtype}")
        wanted = float(torch.cat([logits, sink]).double().logsumexp(0))
        if abs(float(lse) - wanted) > near:
            raise Failed(f"the LSE of parts of {dtype} is {float(lse)}, must be {wanted}")
        empty = torch.full_like(outs[0], float("nan")), torch.full_like(lses[0], float("-inf"))
        blank, own = library.apply_sinks(*empty, sink.to(bench.device))
        if bool((blank != 0).any()) or float(own) != float(sink):
            raise Failed("a sink over nothing is not 0 and the sink, whatever the output held")
