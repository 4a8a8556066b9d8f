"""B: rows that see no key, the log-sum-exp, and merging."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from attnplat.errors import ConfigError
from attnplat.testing.bench import Bench, agrees, layers, raises
from attnplat.testing.bits import differing
from attnplat.testing.case import CaseList, Check, Checks, Failed
from attnplat.testing.compare import CONTRACT
from attnplat.testing.inputs import LOUD, edges, generator, needle, normal, uniform
from attnplat.testing.scenes import Arrangement, Scene
from attnplat.testing.terrain import Terrain

B = CaseList("B", "rows without keys, log-sum-exp, merging")

NEG_INF = float("-inf")
State = tuple[torch.Tensor, torch.Tensor]


@B.case(1, "A row whose window holds no key gives 0 and -inf")
def _(t: Terrain) -> Checks:
    for window in ((1, 1), (0, 0), (-1, 0)):
        config = t.cross(sliding_window=window)
        yield agrees(edges(normal(config, [6, 1, 3], [3, 2, 9])), t.pages())
    far = t.layer(causal=False, sliding_window=(2, 1))
    yield agrees(normal(far, [9, 1], [4, 0], note="shard"), t.pages())


def _late(config_topk: int, rows: int, keys: int, first: int) -> torch.Tensor:
    """int32 [rows, topk]: `topk` keys from `first` on."""
    gen = generator(config_topk, rows, keys, first)
    named = [torch.randperm(keys - first, generator=gen)[:config_topk] + first for _ in range(rows)]
    return torch.stack(named).int()


@B.case(2, "Masked keys before the first visible one, tiles of them, are not in the sums")
def _(t: Terrain) -> Checks:
    for keys in t.some((700, 2100), 1):
        late = _late(5, 2, keys, keys - 60)
        yield agrees(edges(normal(t.layer(topk=5), [2], [keys], topk=[late])), t.pages())
    span = normal(
        t.layer(sliding_window=(3, -1), mm_prefix=True), [12], [600], ranges=[((560, 600),)]
    )
    yield agrees(edges(span), t.pages())


@B.case(3, "Masked keys after the last visible one, tiles of them, change nothing")
def _(t: Terrain) -> Checks:
    for keys in t.some((700, 2100), 1):
        early = _late(5, 2, 40, 0)
        yield agrees(edges(normal(t.layer(topk=5), [2], [keys], topk=[early])), t.pages())
    yield agrees(edges(normal(t.layer(), [20], [25])), t.pages())


def _loud(t: Terrain, logit: float, note: str) -> Scene:
    """Three keys of which the first two have nearly the given logit, the third far less."""
    config = t.layer(scale=1.0)
    scene = normal(config, [1, 2], [3, 4], note=note)
    side = math.sqrt(abs(logit))
    requests = []
    for request in scene.requests:
        q, k = torch.zeros_like(request.q), torch.zeros_like(request.k)
        q[..., 0] = side
        k[..., 0] = math.copysign(side, logit)
        k[-1, :, 0] *= 1.5 if logit < 0 else 0.5
        requests.append(replace(request, q=q, k=k))
    return scene.replace(requests=tuple(requests))


@B.case(4, "Logits far below zero, as low as -1e38, still give a normal softmax", every_dtype=True)
def _(t: Terrain) -> Checks:
    for logit in (-1e4, -5e4, -1e7, -1e38):
        if t.dtype != "float16" or logit >= -1e7:
            yield agrees(_loud(t, logit, f"logits near {logit:g}"), t.pages())
    masked = t.layer(scale=1.0, sliding_window=(1, -1))
    scene = _loud(t, -1e6, "all logits near -1e6, window")
    yield agrees(scene.replace(config=masked), t.pages())


@B.case(5, "Logits as high as 1e38 neither overflow nor lose the LSE", every_dtype=True)
def _(t: Terrain) -> Checks:
    for logit in (1e4, 1e7, 1.5e38):
        if t.dtype != "float16" or logit <= 1e7:
            yield agrees(_loud(t, logit, f"logits near {logit:g}"), t.pages())


# Merging -------------------------------------------------------------------------------------


def _state(bench: Bench, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> State:
    gen = generator("state", seed, shape)
    out = torch.randn(*shape, generator=gen).to(dtype).to(bench.device)
    return out, torch.randn(*shape[:-1], generator=gen).to(bench.device)


def _empty(like: State, garbage: float = 0.0) -> State:
    return torch.full_like(like[0], garbage), torch.full_like(like[1], NEG_INF)


def _merge(bench: Bench, *states: State) -> State:
    outs, lses = [s[0] for s in states], [s[1] for s in states]
    return bench.subject.library.merge_states(outs, lses)


def _equal(what: str, got: State, expected: State) -> None:
    if differing(got[0], expected[0]) or differing(got[1], expected[1]):
        raise Failed(f"{what} is not bit for bit what it must be")


@B.case(6, "Merging nothing with nothing gives 0 and -inf, no NaN")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        for garbage in (0.0, float("nan"), float("inf")):
            none = _empty(_state(bench, 3, 4, 8), garbage)
            _equal("nothing merged with nothing", _merge(bench, none, none), _empty(none))
        out, lse = _state(bench, 3, 4, 8)
        for outs, lses in (([], []), ([out], [lse, lse]), ([out, out], [lse])):
            merge = partial(bench.subject.library.merge_states, outs, lses)
            raises(f"{len(outs)} outputs and {len(lses)} LSE merged", ConfigError, merge)

    yield Check((), run, "merge_states")


@B.case(7, "Merging with an empty part keeps every bit, whatever the empty part's output holds")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            state = _state(bench, 3, 4, 8, dtype=dtype)
            for garbage in (0.0, float("nan"), float("-inf")):
                none = _empty(state, garbage)
                _equal("x merged with nothing", _merge(bench, state, none), state)
                _equal("nothing merged with x", _merge(bench, none, state), state)

    yield Check((), run, "merge_states")


@B.case(8, "What a call says of rows without keys merges as nothing, never as +inf or 0")
def _(t: Terrain) -> Checks:
    for config in (t.cross(), t.cross(sliding_window=(0, 0))):
        scene = normal(config, [2, 3], [0, 1])

        def run(bench: Bench, scene: Scene = scene) -> None:
            part = bench.agree(scene, t.pages())
            assert part.lse is not None
            other = _state(bench, *part.out.shape)
            merged = _merge(bench, (part.out.float(), part.lse), other)
            blind = torch.cat([answer.blind for answer in scene.answers]).to(bench.device)
            for got, expected in zip(merged, other, strict=True):
                if differing(got[blind], expected[blind]):
                    raise Failed("a part without keys changes what it is merged with")

        if t.lse:
            yield Check(layers(scene), run, str(scene))


def _split(scene: Scene, cuts: list[int], config: object) -> list[Scene]:
    """The scene's single request cut at key positions; each part sees all of its keys."""
    request = scene.requests[0]
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, request.seq_len], strict=True):
        v = None if request.v is None else request.v[begin:end]
        own = replace(request, k=request.k[begin:end], v=v)
        parts.append(scene.replace(config=config, requests=(own,), sinks=None, note="part"))
    return parts


def parts_agree(t: Terrain, whole: Scene, cuts: list[int]) -> Check:
    """The scene's request cut at key positions, its parts merged, is the whole."""
    config = whole.config.replace(sinks=False) if whole.sinks is not None else whole.config
    parts = _split(whole, cuts, config)

    def run(bench: Bench) -> None:
        found = [bench.agree(part, t.pages()) for part in parts]
        states = [(o.out, o.lse) for o in found if o.lse is not None]
        out, lse = _merge(bench, *states)
        if whole.sinks is not None:
            sinks = whole.sinks.to(bench.device)
            out, lse = bench.subject.library.apply_sinks(out, lse, sinks)
        first = found[0]
        bench.judge(whole, replace(first, out=out, lse=lse), merged=True)

    return Check(layers(whole, *parts), run, f"{whole} cut at {cuts}")


@B.case(9, "Parts merged are the whole, in any number of parts")
def _(t: Terrain) -> Checks:
    if t.lse:
        whole = normal(t.layer(causal=False), [3], [90], gain=3.0)
        for cuts in ([1], [45], [30, 60], [0, 89], list(range(10, 90, 10))):
            yield parts_agree(t, whole, cuts)


@B.case(10, "The LSE is a natural logarithm: parts of unlike weight merge rightly")
def _(t: Terrain) -> Checks:
    if t.lse:
        whole = normal(t.layer(causal=False), [2], [64], gain=0.0, note="one key against 63")
        yield parts_agree(t, whole, [1])
        yield parts_agree(t, normal(t.layer(causal=False), [2], [64], gain=4.0), [7])

    def run(bench: Bench) -> None:
        one, two = _state(bench, 2, 1, 4, seed=1), _state(bench, 2, 1, 4, seed=2)
        two = (two[0], one[1] + math.log(3.0))
        out, lse = _merge(bench, one, two)
        expected = 0.25 * one[0] + 0.75 * two[0]
        close = torch.allclose(out, expected, rtol=1e-5, atol=1e-6)
        if not close or not torch.allclose(lse, one[1] + math.log(4.0), rtol=0, atol=1e-5):
            raise Failed("parts whose LSE differ by log 3 do not weigh 1 to 3")

    yield Check((), run, "merge_states")


@B.case(11, "Parts in memory of different strides merge as contiguous ones do")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        one, two = _state(bench, 5, 4, 8, seed=1), _state(bench, 5, 4, 8, seed=2)
        expected = _merge(bench, one, two)
        wide = torch.full((5, 6, 11), float("nan"), device=bench.device)
        wide[:, 1:5, :8] = two[0]
        turned = two[1].T.contiguous().T
        got = _merge(bench, one, (wide[:, 1:5, :8], turned))
        _equal("a merge of strided parts", got, expected)
        given = torch.full_like(expected[0], float("nan"))
        library = bench.subject.library
        found = library.merge_states([one[0], two[0]], [one[1], two[1]], out=given)
        if found[0] is not given:
            raise Failed("the result is not the tensor that was given for it")
        _equal("a merge into given memory", found, expected)

    yield Check((), run, "merge_states")


@B.case(12, "The LSE may go into a transposed, sliced or longer buffer")
def _(t: Terrain) -> Checks:
    if t.lse:
        scene = edges(normal(t.layer(), [3, 1, 4], [9, 20, 4]))
        for lse in ("given", "transposed"):
            yield agrees(scene, t.pages(lse=lse, padding=3))


@B.case(13, "Merging works for any number of heads and sizes, also past 1024 threads a row")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        for heads, size in ((1, 1), (3, 5), (5, 512), (20, 128), (71, 64)):
            one, two = _state(bench, 2, heads, size, seed=1), _state(bench, 2, heads, size, seed=2)
            out, lse = _merge(bench, one, two)
            high = torch.logaddexp(one[1].double(), two[1].double())
            w1 = torch.exp(one[1].double() - high)[..., None]
            w2 = torch.exp(two[1].double() - high)[..., None]
            expected = w1 * one[0].double() + w2 * two[0].double()
            off = float((out.double() - expected).norm() / expected.norm())
            if not off <= CONTRACT["float32"].out or not torch.allclose(lse.double(), high):
                raise Failed(f"{heads} heads of {size}: off by {off:.1e}")

    yield Check((), run, "merge_states")


@B.case(14, "The LSE of equal keys is the log of their number, that of a needle its logit")
def _(t: Terrain) -> Checks:
    if not t.lse:
        return
    for keys in (1, 2, 3, 17, 64, 1000):
        scene = uniform(t.layer(), [1], [keys])

        def run(bench: Bench, scene: Scene = scene, keys: int = keys) -> None:
            outcome = bench.agree(scene, t.pages())
            assert outcome.lse is not None
            off = float((outcome.lse - math.log(keys)).abs().max())
            if off > 2e-6 * max(1, math.log(keys)) and t.dtype == "float32":
                raise Failed(f"the LSE of {keys} equal keys is not log {keys}")

        yield Check(layers(scene), run, str(scene))
    scene = needle(t.layer(scale=0.25), [1], [50], [[20]], note="needle")

    def found(bench: Bench) -> None:
        outcome = bench.agree(scene, t.pages())
        assert outcome.lse is not None
        if float((outcome.lse - LOUD).abs().max()) > 1e-4:
            raise Failed("the LSE of a needle is not its logit")

    yield Check(layers(scene), found, str(scene))


@B.case(15, "A part that alone sees keys is the whole, bit for bit")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        state = _state(bench, 4, 4, 8)
        none = _empty(state, float("nan"))
        for at in range(5):
            parts = [none] * 5
            parts[at] = state
            _equal(f"part {at} of 5, the others empty,", _merge(bench, *parts), state)

    yield Check((), run, "merge_states")
    long = normal(t.layer(topk=4), [2], [1400], topk=[_late(4, 2, 1400, 900)])
    yield agrees(edges(long), Arrangement(block_size=t.block_size, layout=t.layouts[0]))
