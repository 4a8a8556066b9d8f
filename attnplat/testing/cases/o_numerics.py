"""O: extreme numerics."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnplat.testing.bench import Bench, agrees, float32_products, layers
from attnplat.testing.case import CaseList, Check, Checks, Failed
from attnplat.testing.inputs import generator, normal, uniform
from attnplat.testing.scenes import Scene
from attnplat.testing.terrain import Terrain

O = CaseList("O", "extreme numerics")  # noqa: E741 - the kind's letter in the contract


def _logits(t: Terrain, logits: torch.Tensor, note: str, **changes: object) -> Scene:
    """One row whose logits are as given, up to rounding, over whole values."""
    config = t.layer(scale=1.0, num_heads=2, num_kv_heads=1, **changes)
    scene = uniform(config, [1], [len(logits)], note=note)
    request = scene.requests[0]
    q, k = torch.zeros_like(request.q), torch.zeros_like(request.k)
    q[..., 0] = 1.0
    k[..., 0] = logits[:, None].to(k.dtype)
    return scene.replace(requests=(replace(request, q=q, k=k),))


def _with_values(scene: Scene, value: float) -> Scene:
    """The scene with all values equal."""
    requests = [
        replace(r, v=torch.full_like(r.v, value)) for r in scene.requests if r.v is not None
    ]
    return scene.replace(requests=tuple(requests))


@O.case(1, "Weights of very many equal keys sum to 1", every_dtype=True)
def _(t: Terrain) -> Checks:
    keys = 100_000 if t.full else 9_000
    for logit in (0.0, 20.0):
        scene = _logits(t, torch.full((keys,), logit), f"{keys} equal keys")
        yield agrees(_with_values(scene, 3.0), t.pages())


@O.case(
    2, "One key above all the others, first or last or between, and a long tail", every_dtype=True
)
def _(t: Terrain) -> Checks:
    for at in (0, 500, 1399):
        logits = torch.linspace(-3.0, 3.0, 1400)
        logits[at] = 12.0
        yield agrees(_logits(t, logits, f"key {at} of 1400 above all"), t.pages())


@O.case(3, "Logits that rise or fall with every key", every_dtype=True)
def _(t: Terrain) -> Checks:
    rising = torch.linspace(-30.0, 30.0, 1200)
    for note, logits in (("rising", rising), ("falling", rising.flip(0))):
        yield agrees(_logits(t, logits, note), t.pages())
        yield agrees(_logits(t, logits, note, logits_soft_cap=20.0), t.pages())


@O.case(4, "A channel of keys a hundred times larger than the others", every_dtype=True)
def _(t: Terrain) -> Checks:
    scene = normal(t.layer(), [1, 3], [60, 40])
    requests = []
    for request in scene.requests:
        k, q = request.k.clone(), request.q.clone()
        k[..., 3] *= 100
        q[..., 3] /= 10
        requests.append(replace(request, q=q, k=k))
    yield agrees(scene.replace(requests=tuple(requests), note="outlier channel"), t.pages())


@O.case(5, "Sums over very long sequences run in float32 or wider", every_dtype=True)
def _(t: Terrain) -> Checks:
    keys = 131_072 if t.full else 8_192
    # More keys than are copied at a time for two heads, half of them before the window.
    wide = uniform(t.layer(num_heads=4, num_kv_heads=2, head_size=8 * t.head_size), [1], [17_000])
    yield agrees(wide, t.pages())
    scene = uniform(t.layer(num_heads=2, num_kv_heads=1), [1], [keys])
    yield agrees(_with_values(scene, 1.0), t.pages())
    # Values of 1 and 1 + an ulp: narrow sums would lose the difference.
    gen = generator("ulp", keys)
    request = scene.requests[0]
    assert request.v is not None
    step = torch.finfo(scene.dtype).eps
    v = 1.0 + step * torch.randint(0, 2, request.v.shape, generator=gen)
    yield agrees(scene.replace(requests=(replace(request, v=v.to(scene.dtype)),)), t.pages())


@O.case(6, "Denormal queries and keys are zeros or themselves: equal weights either way")
def _(t: Terrain) -> Checks:
    scene = uniform(t.layer(), [1, 2], [20, 5])
    tiny = torch.finfo(scene.dtype).tiny / 8
    requests = [
        replace(r, q=torch.full_like(r.q, tiny), k=torch.full_like(r.k, tiny))
        for r in scene.requests
    ]
    small = scene.replace(requests=tuple(requests), note="denormals")

    def run(bench: Bench) -> None:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            try:
                outcome = bench.call(small, t.pages())
            finally:
                torch.set_flush_denormal(False)
            bench.judge(small, outcome)

    yield Check(layers(small), run, str(small))


@O.case(7, "Negative zeros and exact ties are ordinary")
def _(t: Terrain) -> Checks:
    scene = uniform(t.layer(), [1, 2], [8, 33])
    requests = [replace(r, q=-r.q, k=torch.full_like(r.k, -0.0)) for r in scene.requests]
    yield agrees(scene.replace(requests=tuple(requests), note="negative zeros"), t.pages())
    ties = torch.tensor([1.0, 5.0, 5.0, 1.0, 5.0, -2.0, 5.0, 5.0])
    yield agrees(_logits(t, ties, "ties at the top"), t.pages())


@O.case(8, "Constant values come out constant, at any length", every_dtype=True)
def _(t: Terrain) -> Checks:
    for keys in t.some((3, 100, 3000, 30_000), 3):
        scene = normal(t.layer(), [1], [keys], gain=2.0)
        yield agrees(_with_values(scene, 2.5), t.pages())


@O.case(
    9, "Nothing is added to the denominator: one key among hidden ones is itself", every_dtype=True
)
def _(t: Terrain) -> Checks:
    for logit in (0.0, -60.0):
        scene = _logits(t, torch.full((1,), logit), f"one key of logit {logit}")
        yield agrees(_with_values(scene, 3.0), t.pages())
    yield agrees(_logits(t, torch.tensor([-80.0, -80.0, -81.0]), "all far below 0"), t.pages())


def _spike(t: Terrain, below: float) -> Scene:
    """One key of value 1 above a thousand of value 1e4 so far below."""
    logits = torch.full((1000,), -below)
    logits[400] = 0.0
    scene = _logits(t, logits, f"a thousand keys {below:g} below one")
    request = scene.requests[0]
    v = torch.full_like(request.k[..., : scene.rules.v_head_size], 1e4)
    v[400] = 1.0
    return scene.replace(requests=(replace(request, v=v),))


@O.case(10, "Keys far below the greatest weigh nothing, not a clamped minimum", every_dtype=True)
def _(t: Terrain) -> Checks:
    for below in (30.0, 100.0, 1000.0):
        yield agrees(_spike(t, below), t.pages())

    def run(bench: Bench) -> None:
        scene = _spike(t, 200.0)
        outcome = bench.agree(scene, t.pages())
        if bool((outcome.out != 1.0).any()):
            raise Failed("keys 200 below the greatest have a weight")

    yield Check(layers(_spike(t, 200.0)), run, "a weight of exp(-200)")


@O.case(11, "Where TF32 is allowed, float32 keeps its tolerance, and nothing else is changed")
def _(t: Terrain) -> Checks:
    if t.device != "cuda":
        return
    changes: tuple[dict[str, object], ...] = (
        {},
        {"logits_soft_cap": 9.0},
        {"sliding_window": (70, -1)},
    )
    for own in changes:
        scene = normal(t.layer(head_size=max(64, t.head_size), **own), [1, 3, 40], [600, 200, 40])

        def run(bench: Bench, scene: Scene = scene) -> None:
            with float32_products("high"):
                bench.agree(scene, t.pages())
            with float32_products("highest"):
                bench.agree(scene, t.pages())

        yield Check(layers(scene), run, str(scene))
