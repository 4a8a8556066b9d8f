"""I: latent and sparse attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnplat.config.layer import LayerConfig
from attnplat.testing.bench import Bench, agrees, layers
from attnplat.testing.case import CaseList, Check, Checks, Failed
from attnplat.testing.cases.codecs import latent_rows
from attnplat.testing.cases.composites import latent_layer, ranked_choices, slots_of_choices
from attnplat.testing.cases.h_quantised import coded
from attnplat.testing.cases.indexers import indexed
from attnplat.testing.compare import CONTRACT
from attnplat.testing.far import far_blocks
from attnplat.testing.inputs import edges, generator, normal
from attnplat.testing.scenes import INF, Scene
from attnplat.testing.terrain import Terrain
from attnplat.testing.truth import Request

I = CaseList("I", "latent and sparse attention")  # noqa: E741 - the kind's letter in the contract

LENS = ([1, 4, 20, 2], [40, 37, 20, 3])
INDEX_ENCODINGS = ("bfloat16", "index_fp8_132", "index_mxfp4_68")


@I.case(1, "Absorbed and expanded attention agree; the scale is that of the expanded head")
def _(t: Terrain) -> Checks:
    latent, expanded = t.latent(), t.expanded()
    nope, rank, rope, value, heads = 16, 32, 8, 16, 4
    gen = generator("absorbed", t.seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).double()

    w_uk, w_uv = drawn(heads, nope, rank) / rank**0.5, drawn(heads, rank, value) / rank**0.5
    q_nope, q_rope = (drawn(9, heads, n) for n in (nope, rope))
    latents, k_rope = drawn(30, rank), drawn(30, rope)
    q = torch.cat([torch.einsum("thn,hnr->thr", q_nope, w_uk), q_rope], -1)
    row = torch.cat([latents, k_rope], -1)[:, None]
    k = torch.cat(
        [torch.einsum("jr,hnr->jhn", latents, w_uk), k_rope[:, None].expand(-1, heads, -1)], -1
    )
    v = torch.einsum("jr,hrv->jhv", latents, w_uv)

    def scene(config: LayerConfig, **tensors: torch.Tensor | None) -> Scene:
        own = {n: None if x is None else x.to(_dtype(config)) for n, x in tensors.items()}
        return Scene(config=config, requests=(Request(**own),))  # type: ignore[arg-type]

    absorbed = scene(latent, q=q, k=row, v=None)
    plain = scene(expanded, q=torch.cat([q_nope, q_rope], -1), k=k, v=v)

    def run(bench: Bench) -> None:
        inner = bench.agree(absorbed, t.pages()).out.cpu().double()
        wide = torch.einsum("thr,hrv->thv", inner, w_uv)
        other = bench.agree(plain, t.pages()).out.cpu().double()
        off = float((wide - other).norm() / other.norm())
        if not off <= 10 * CONTRACT[str(t.dtype)].out:
            raise Failed(f"absorbed and expanded attention differ by {off:.1e}")

    yield Check(layers(absorbed, plain), run, "absorbed against expanded")
    for decode in (0, 1, 99):
        yield latent_layer(t, [1, 4, 9], [20, 33, 9], decode_query_len=decode, chunk=64)


def _dtype(config: LayerConfig) -> torch.dtype:
    found = getattr(torch, str(config.dtype))
    assert isinstance(found, torch.dtype)
    return found


@I.case(2, "Values are the front of the key's own row, whatever the rest of it holds")
def _(t: Terrain) -> Checks:
    for config in (t.latent(), t.latent(head_size=576, kv_lora_rank=512, qk_rope_head_dim=64)):
        scene = edges(normal(config, *LENS))
        for how in t.arrangements():
            yield agrees(scene, how.replace(write="fused", spread=True))
    large = normal(t.latent(), [1, 3], [20, 5])
    requests = []
    for request in large.requests:
        k, q = request.k.clone(), request.q.clone()
        k[..., 32:] = 1e4
        q[..., 32:] = 0
        requests.append(replace(request, q=q, k=k))
    yield agrees(large.replace(requests=tuple(requests), note="rope part of 1e4"), t.pages())


@I.case(3, "Several absorbed rows of one request are causal among themselves")
def _(t: Terrain) -> Checks:
    for lens in (([4, 2, 1], [40, 33, 7]), ([3, 3], [3, 90]), ([16], [17])):
        yield agrees(edges(normal(t.latent(), *lens)), t.pages())
        yield agrees(edges(normal(t.latent(causal=False), *lens)), t.pages())


def _chunked(t: Terrain, query_lens: list[int], seq_lens: list[int], chunk: int) -> Check:
    """New tokens causally, context in chunks not, merged: the whole."""
    whole = normal(t.expanded(), query_lens, seq_lens, gain=2.0)
    parts = [_slice(whole, lambda r: (r.seq_len - r.query_len, r.seq_len), None)]
    for begin in range(0, max(seq_lens), chunk):
        parts.append(
            _slice(
                whole,
                lambda r, begin=begin: (
                    min(begin, r.seq_len - r.query_len),
                    min(begin + chunk, r.seq_len - r.query_len),
                ),
                False,
            )
        )

    def run(bench: Bench) -> None:
        found = [bench.agree(part, t.pages()) for part in parts]
        states = [(o.out, o.lse) for o in found if o.lse is not None]
        merge = bench.subject.library.merge_states
        out, lse = merge([s[0] for s in states], [s[1] for s in states])
        bench.judge(whole, replace(found[0], out=out, lse=lse), merged=True)

    return Check(layers(whole), run, f"{whole}, context in chunks of {chunk}")


def _slice(whole: Scene, keys: object, causal: bool | None) -> Scene:
    requests = []
    for request in whole.requests:
        begin, end = keys(request)  # type: ignore[operator]
        v = None if request.v is None else request.v[begin:end]
        requests.append(replace(request, k=request.k[begin:end], v=v, causal=causal))
    return whole.replace(requests=tuple(requests))


@I.case(4, "Context computed in chunks and merged is the context, also where some have none")
def _(t: Terrain) -> Checks:
    for chunk in (16, 64, 7):
        yield _chunked(t, [3, 5, 2], [40, 5, 34], chunk)
        yield latent_layer(t, [3, 5, 2, 1], [40, 5, 34, 7], decode_query_len=0, chunk=chunk)


@I.case(5, "Any number of heads shares the one latent row", every_dtype=True)
def _(t: Terrain) -> Checks:
    for heads in t.some((16, 20, 128, 8, 32, 64), 3):
        yield agrees(edges(normal(t.latent(num_heads=heads), [1, 3], [20, 5])), t.pages())


@I.case(6, "Coded latent rows decode with the scale of each tile and the rope apart")
def _(t: Terrain) -> Checks:
    yield from latent_rows()
    for name in ("mla_fp8_656", "mla_fp8_584", "mla_fp8_528", "mla_nvfp4_352"):
        scene = coded(t, name)
        for how in t.arrangements():
            yield agrees(scene, how.replace(write="fused"))
        random = normal(scene.config, [1, 3], [20, 5])
        yield agrees(random.replace(encoding=scene.encoding), t.pages())


def _named(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@I.case(7, "Top-k indices may have -1 anywhere, any order, and ids past the sequence")
def _(t: Terrain) -> Checks:
    topk = [
        _named([-1, 3, 0, -1, 19, 7]),
        _named([4, -1, -1, -1, -1, 2], [-1] * 6, [0, 1, 2, 3, 4, -1]),
        _named([9, 2, 5, 40, 1 << 30, -7], [0, -1, 31, 30, 1, 29]),
    ]
    lens = ([1, 3, 2], [20, 5, 32])
    beyond = [_named([20, 3, 0, 99, -1, 7])]
    for config in (t.sparse(), t.layer(topk=6)):
        yield agrees(edges(normal(config, [1], [20], topk=beyond)), t.pages())
        yield agrees(edges(normal(config, *lens, topk=topk)), t.pages())
        yield agrees(normal(config, *lens, topk=topk), t.pages())


@I.case(8, "Sequences no longer than k give what dense attention gives")
def _(t: Terrain) -> Checks:
    lens = ([1, 3, 6], [6, 5, 6])
    named = [torch.arange(6, dtype=torch.int32).flip(0).expand(rows, 6) for rows in lens[0]]
    sparse = edges(normal(t.sparse(topk=6), *lens, topk=named))
    dense = sparse.replace(
        config=t.latent(), requests=tuple(replace(r, topk=None) for r in sparse.requests)
    )

    def run(bench: Bench) -> None:
        one, other = bench.agree(sparse, t.pages()), bench.agree(dense, t.pages())
        bench.judge(dense, replace(one, stage=other.stage))

    yield Check(layers(sparse, dense), run, str(sparse))


@I.case(9, "An index of -1 reads nothing, not the last element of the cache")
def _(t: Terrain) -> Checks:
    size = t.block_size
    named = [_named([-1, 3, -1, 0, -1, -1]), _named([-1, -1, -1, -1, -1, 4])]
    for config in (t.sparse(), t.layer(topk=6)):
        scene = edges(normal(config, [1, 1], [size, 5], topk=named))
        # The last block belongs to nobody, and the first request's own last token is NaN-free.
        for poison in (INF, float("nan")):
            how = t.pages(blocks=((0,), (1,)), num_blocks=3, poison=poison)
            yield agrees(scene, how)


@I.case(10, "Indices name positions; blocks of any size and stride are found")
def _(t: Terrain) -> Checks:
    for config in (t.sparse(), t.layer(topk=6)):
        scene = edges(normal(config, *LENS))
        for how in t.arrangements(4):
            yield agrees(scene, how.replace(spread=True, layers=2))
        yield slots_of_choices(t, scene)


@I.case(11, "Indexer logits: ReLU, weights, each row's own end; ties give any valid choice")
def _(t: Terrain) -> Checks:
    for encoding in INDEX_ENCODINGS:
        yield indexed(t, encoding, [1, 4, 9], [40, 33, 9])
    yield indexed(t, "index_fp8_132", [2, 3], [20, 5], ties=True)


@I.case(12, "NaN scores are never chosen; rows short of k are filled with -1")
def _(t: Terrain) -> Checks:
    yield indexed(t, "bfloat16", [1, 3], [40, 33], spoilt=True)
    yield indexed(t, "bfloat16", [1, 2, 4], [3, 2, 9])


@I.case(13, "The stale tail of an over-allocated index cache is not scored")
def _(t: Terrain) -> Checks:
    for encoding in INDEX_ENCODINGS:
        yield indexed(t, encoding, [1, 2], [17, 35], spare=4)


@I.case(14, "Layers that skip the indexer share another's indices and plan")
def _(t: Terrain) -> Checks:
    for config in (t.sparse(), t.layer(topk=6)):
        one = edges(normal(config, *LENS))
        named = [r.topk for r in one.requests]
        other = edges(normal(config, *LENS, seed=1, topk=named))

        def run(bench: Bench, one: Scene = one, other: Scene = other) -> None:
            impl = bench.impl(one)
            first = bench.agree(one, t.pages(), impl=impl)
            stage = bench.lay_out(other, t.pages(), impl)
            stage.options["topk_indices"] = first.stage.options["topk_indices"]
            second = bench.call(other, t.pages(), impl=impl, plan=first.plan, stage=stage)
            bench.judge(other, second)

        yield Check(layers(one, other), run, str(one))


@I.case(15, "Chosen keys split over ranks and merged are all the chosen keys")
def _(t: Terrain) -> Checks:
    yield ranked_choices(t)
    if t.lse:
        for config in (t.sparse(causal=False), t.layer(topk=6, causal=False)):
            yield _ranked(t, normal(config, [1, 2], [40, 21]))


def _ranked(t: Terrain, whole: Scene) -> Check:
    """Keys dealt to two ranks in turn; each rank's indices are its own positions."""
    shards = []
    for rank in (0, 1):
        requests = []
        for request in whole.requests:
            assert request.topk is not None
            named = request.topk
            mine = (named >= 0) & (named % 2 == rank)
            v = None if request.v is None else request.v[rank::2]
            local = torch.where(mine, named // 2, -1)
            requests.append(replace(request, k=request.k[rank::2], v=v, topk=local))
        shards.append(whole.replace(requests=tuple(requests), note=f"rank {rank}"))

    def run(bench: Bench) -> None:
        found = [bench.agree(shard, t.pages()) for shard in shards]
        lses = [o.lse for o in found if o.lse is not None]
        out, lse = bench.subject.library.merge_states([o.out for o in found], lses)
        bench.judge(whole, replace(found[0], out=out, lse=lse), merged=True)

    return Check(layers(whole, *shards), run, str(whole))


@I.case(16, "Latent rows past 2^31 elements are addressed, also by indices")
def _(t: Terrain) -> Checks:
    for config in (t.latent(), t.sparse()):
        yield far_blocks(edges(normal(config, [1, 2], [20, 18])), t)
