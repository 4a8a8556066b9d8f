"""F: heads, sizes, strides, layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnplat.errors import PlanMismatchError
from attnplat.testing.bench import Bench, agrees, exact, layers, raises, same, unchanged
from attnplat.testing.case import CaseList, Check, Checks, Failed
from attnplat.testing.inputs import edges, needle, normal
from attnplat.testing.scenes import Scene
from attnplat.testing.terrain import Terrain
from attnplat.testing.truth import Request

F = CaseList("F", "heads, sizes, strides, layouts")

LENS = ([1, 3, 1, 18], [40, 20, 1, 18])


@F.case(1, "Any number of query heads may share a key-value head", every_dtype=True)
def _(t: Terrain) -> Checks:
    groups = (1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 24, 40, 71)
    for group in t.some(groups[2:] + groups[:2], 5):
        for kv_heads in (1, 3):
            config = t.layer(num_heads=group * kv_heads, num_kv_heads=kv_heads)
            yield agrees(edges(normal(config, [1, 3], [20, 5])), t.pages())


@F.case(2, "Query heads that are no multiple of key-value heads are refused")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        for heads, kv_heads in ((4, 3), (1, 2), (6, 4)):
            raises(
                f"{heads} heads over {kv_heads}",
                ValueError,
                lambda h=heads, k=kv_heads: t.layer(num_heads=h, num_kv_heads=k),
            )

    yield Check((), run, "head counts")


SIZES = (64, 80, 192, 32, 40, 72, 96, 112, 120, 128, 160, 256, 512, 576)


@F.case(3, "Any head size is right, and so are values narrower or wider than keys")
def _(t: Terrain) -> Checks:
    for size in t.some(SIZES, 3):
        yield agrees(edges(normal(t.layer(head_size=size), *LENS)), t.pages())
    for size, v_size in t.some(((24, 16), (16, 24), (192, 128), (576, 512)), 2):
        yield agrees(edges(normal(t.layer(head_size=size, v_head_size=v_size), *LENS)), t.pages())


@F.case(4, "q, k and v may be slices of one tensor")
def _(t: Terrain) -> Checks:
    for config in (t.layer(), t.layer(num_heads=6, num_kv_heads=1), t.encoder()):
        lens = LENS if config.has_kv_cache else (LENS[0],)
        scene = edges(normal(config, *lens))
        for write in ("fused", "first"):
            plain = t.pages(write=write)
            yield unchanged(scene, plain, plain.replace(fused=True))


@F.case(5, "out may be a slice of a larger tensor, with strides of its own")
def _(t: Terrain) -> Checks:
    for config in (t.layer(), t.layer(sinks=True), t.layer(alibi=True)):
        scene = edges(normal(config, *LENS))
        yield unchanged(
            scene,
            t.pages(out="allocated"),
            t.pages(spread=True),
            t.pages(spread=True, lse="transposed", padding=2),
        )


@F.case(6, "Keys and values may have strides of their own")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(v_head_size=t.head_size // 2), *LENS))
    for layout in t.layouts:
        plain = t.pages(layout=layout, write="fused")
        yield unchanged(scene, plain, plain.replace(spread=True, layers=3))
    dense = edges(normal(t.encoder(), LENS[0]))
    yield unchanged(dense, t.pages(), t.pages(spread=True))


@F.case(7, "Dimensions of size 1 may have any stride, and keys may be shared by stride 0")
def _(t: Terrain) -> Checks:
    config = t.encoder(num_heads=4, num_kv_heads=4)
    one = edges(normal(config, [1, 5], [1, 5]))
    shared = []
    for request in one.requests:
        assert request.v is not None
        k = request.k[:, :1].expand(request.k.shape)
        shared.append(replace(request, k=k, v=request.v[:, :1].expand(request.v.shape)))
    scene = one.replace(requests=tuple(shared), note="keys of one head for all")

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(), impl)
        assert stage.kv is not None and stage.kv[1] is not None
        k, v = (x[:, :1].expand(x.shape) for x in stage.kv if x is not None)
        plain = bench.call(scene, t.pages(), impl=impl, stage=stage)
        expanded = bench.lay_out(scene, t.pages(), impl)
        expanded.kv = (k, v)
        same("keys by stride 0", plain, bench.call(scene, t.pages(), impl=impl, stage=expanded))
        bench.judge(scene, plain)

    yield Check(layers(scene), run, str(scene))
    single = edges(normal(t.layer(num_heads=1, num_kv_heads=1), [1], [9]))

    def odd(bench: Bench) -> None:
        stage = bench.lay_out(single, t.pages())
        stage.q = stage.q.as_strided(stage.q.shape, (7, 3, 1))
        bench.judge(single, bench.call(single, t.pages(), stage=stage))

    yield Check(layers(single), odd, f"{single}, strides (7, 3, 1)")


@F.case(8, "All cache layouts and interleaved layers give the same bits")
def _(t: Terrain) -> Checks:
    orders = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")
    named = {"HND": "LBHNC", "NHD": "LBNHC"}
    taken = {named[layout] for layout in t.layouts}
    hows = [
        t.pages(layout=layout, layers=layers, spread=spread, write="fused")
        for layout in orders
        if layout in taken or len(taken) == 2
        for layers, spread in ((1, False), (3, False), (3, True))
    ]
    for config in (t.layer(), t.layer(logits_soft_cap=9.0)):
        yield unchanged(edges(normal(config, *LENS)), *hows)


@F.case(9, "Tensors off an aligned address are right, or refused")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), *LENS))
    for offset in t.some((1, 3, 2, 4, 8), 2):

        def run(bench: Bench, offset: int = offset) -> None:
            try:
                outcome = bench.call(scene, t.pages(offset=offset, write="fused"))
            except ValueError:
                return
            bench.judge(scene, outcome)

        yield Check(layers(scene), run, f"offset of {offset} elements")


@F.case(10, "A last dimension that is not dense is refused, never misread")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [1, 3], [20, 5]))

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(write="fused"), impl)
        plan = impl.plan(stage.batch, stage.pages)
        assert stage.kv is not None and stage.out is not None
        k, v = stage.kv
        assert v is not None
        wrong: dict[str, dict[str, Any]] = {
            "q": {"q": _turned(stage.q)},
            "k": {"kv": (_turned(k), v)},
            "v": {"kv": (k, _turned(v))},
            "out": {"out": _turned(stage.out)},
        }
        for name, change in wrong.items():
            given: dict[str, Any] = {"q": stage.q, "kv": stage.kv, "out": stage.out, **change}
            q = given.pop("q")
            error = raises(
                f"{name} with a strided last dimension",
                PlanMismatchError,
                lambda q=q, given=given: impl.forward(plan, q, stage.cache, **given),
            )
            if name not in str(error):
                raise Failed(f"the error about {name} does not name it: {error}")
        if touched := stage.touched():
            raise Failed(f"a refused call wrote: {touched}")

    yield Check(layers(scene), run, "strided last dimensions")


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a last dimension of stride 2."""
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    view = wide.to(tensor.device)[..., ::2]
    view.copy_(tensor)
    return view


@F.case(11, "Values near the end of their dtype's range stay finite and right", every_dtype=True)
def _(t: Terrain) -> Checks:
    # Sums of weights before the division reach the number of keys: they need room for it.
    most, many = {"float16": (65504.0, 60000.0)}.get(str(t.dtype), (2e38, 4e36))
    for config in (t.layer(), t.layer(logits_soft_cap=50.0), t.layer(sinks=True)):
        yield agrees(_large(normal(config, *LENS), many), t.pages(), cancels=True)
        yield agrees(_large(needle(config, [1, 2], [40, 9], [[30], [0]]), most), t.pages())


def _large(scene: Scene, size: float) -> Scene:
    """The scene with values of this size and their old signs."""
    requests = [
        replace(r, v=torch.where(r.v < 0, -size, size).to(scene.dtype))
        for r in scene.requests
        if r.v is not None
    ]
    return scene.replace(requests=tuple(requests), note=f"values of {size:g}")


@F.case(12, "Query head h reads key-value head h // group: permuting groups permutes the output")
def _(t: Terrain) -> Checks:
    config = t.layer(num_heads=6, num_kv_heads=3)
    yield exact(needle(config, [1, 2], [20, 5], [[7], [1]]), t.pages())
    scene = normal(config, *LENS)
    turned = scene.replace(requests=tuple(map(_rotated, scene.requests)), note="groups turned")

    def run(bench: Bench) -> None:
        one, other = bench.agree(scene, t.pages()), bench.agree(turned, t.pages())
        expected = replace(one, out=one.out.roll(2, 1), lse=_rolled(one.lse))
        off = (other.out.double() - expected.out.double()).abs().max()
        if not float(off) <= 1e-2:
            raise Failed(f"groups turned by one: output is not turned, off by {float(off):.1e}")

    yield Check(layers(scene, turned), run, str(scene))


def _rotated(request: Request) -> Request:
    assert request.v is not None
    return replace(request, q=request.q.roll(2, 1), k=request.k.roll(1, 1), v=request.v.roll(1, 1))


def _rolled(lse: torch.Tensor | None) -> torch.Tensor | None:
    return None if lse is None else lse.roll(2, 1)


@F.case(13, "A cache of another dtype than the activations is refused, or read as stored")
def _(t: Terrain) -> Checks:
    other = "bfloat16" if t.dtype == "float16" else "float16"
    mixed = edges(normal(t.layer(kv_cache_dtype=other), *LENS))
    yield agrees(mixed, t.pages(write="fused"))
    plain = edges(normal(t.layer(), [1], [5]))

    def run(bench: Bench) -> None:
        impl = bench.impl(plain)
        stage = bench.lay_out(plain, t.pages(), impl)
        plan = impl.plan(stage.batch, stage.pages)
        wrong = stage.q.to(torch.float32 if t.dtype == "float64" else torch.float64)
        raises(
            "q of another dtype",
            PlanMismatchError,
            lambda: impl.forward(plan, wrong, stage.cache),
        )

    yield Check(layers(plain), run, "q of float64, or float32")


@F.case(14, "Head sizes that leave a tail to matrix tiles of 32 are right", every_dtype=True)
def _(t: Terrain) -> Checks:
    for size in t.some((80, 112, 72, 40, 120), 2):
        for heads in ((4, 1), (8, 8)):
            config = t.layer(head_size=size, num_heads=heads[0], num_kv_heads=heads[1])
            yield agrees(edges(normal(config, [1, 5], [33, 20])), t.pages())
