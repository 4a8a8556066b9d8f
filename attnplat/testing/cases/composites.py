"""Checks of what the library makes of several calls: cascades, latent layers, chosen keys."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnplat.config.layer import MlaConfig
from attnplat.testing.bench import Bench, Outcome, layers
from attnplat.testing.bits import differing
from attnplat.testing.case import Check, Failed
from attnplat.testing.compare import CONTRACT, tolerance_class
from attnplat.testing.inputs import generator, normal
from attnplat.testing.paging import paging_of
from attnplat.testing.scenes import Scene
from attnplat.testing.terrain import Terrain


def cascaded(t: Terrain, whole: Scene, blocks: tuple[tuple[int, ...], ...], shared: int) -> Check:
    """The library's cascade gives the whole; `blocks` share those of the first `shared` keys."""
    how = t.pages(blocks=blocks, num_blocks=1 + max(map(max, blocks)), write="fused")
    halves = whole.config.replace(sinks=False, causal=False)

    def run(bench: Bench) -> None:
        stage = bench.lay_out(whole, how)
        made = bench.subject.library.cascade.create(bench.subject.impl, whole.config, bench.device)
        plan = made.plan(stage.batch, stage.pages, shared)
        out, lse = made.forward(plan, stage.q, stage.cache, kv=stage.kv, **stage.options)
        rows = whole.num_rows
        unused = bench.impl(whole).plan(stage.batch, stage.pages)
        bench.judge(whole, Outcome(out[:rows], lse[:rows], stage, unused), merged=True)
        if damage := stage.damage():
            raise Failed(damage)

    configs = (*layers(whole), (halves, whole.encoding))
    return Check(configs, run, f"cascade over {shared} shared keys; {whole}")


def latent_layer(
    t: Terrain,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    decode_query_len: int,
    chunk: int,
) -> Check:
    """A whole latent layer, projections included, against its definition in float64."""
    config, expanded = t.latent(), t.expanded()
    weights, tensors = _latent_inputs(config, query_lens, seq_lens)
    scene = _latent_scene(config, query_lens, seq_lens, tensors)
    truth = _latent_truth(config, query_lens, seq_lens, weights, tensors)

    def run(bench: Bench) -> None:
        subject = bench.subject
        layer = subject.library.mla_layer.create(
            subject.impl,
            config,
            bench.device,
            prefill_kind=subject.impl,
            decode_query_len=decode_query_len,
            context_chunk=chunk,
        )
        stage = bench.lay_out(scene, t.pages(write="fused"))
        plan = layer.plan(stage.batch, stage.pages)
        new = [_new(x, query_lens, seq_lens).to(bench.device) for x in tensors[2:]]
        q = [x.to(bench.device) for x in tensors[:2]]
        w = [x.to(bench.device) for x in weights]
        got = subject.library.mla_attend(layer, plan, stage.cache, *q, *new, *w)
        off = float((got.cpu().double() - truth).norm() / truth.norm())
        # Projections round, too: once before and once after attention.
        if not off <= 3 * CONTRACT[tolerance_class(scene, merged=True)].out:
            raise Failed(f"the layer is off by {off:.1e}")
        if damage := stage.damage():
            raise Failed(damage)

    note = f"latent layer, (query, keys) {query_lens}, {seq_lens}, context in {chunk}"
    return Check(((config, None), (expanded, None)), run, note)


Weights = tuple[torch.Tensor, torch.Tensor]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _latent_inputs(
    config: MlaConfig, query_lens: list[int], seq_lens: list[int]
) -> tuple[Weights, Tensors]:
    """w_uk, w_uv; q_nope, q_rope of all rows, latents and rope parts of all keys."""
    heads, rank = config.num_heads or 0, config.kv_lora_rank or 0
    nope, rope = config.qk_nope_head_dim or 0, config.qk_rope_head_dim or 0
    gen = generator("latent layer", query_lens, seq_lens)
    dtype = getattr(torch, str(config.dtype))

    def draw(*shape: int, by: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=gen) * by).to(dtype)

    weights = (
        draw(heads, nope, rank, by=rank**-0.5),
        draw(heads, rank, config.v_head_size or 0, by=rank**-0.5),
    )
    rows, keys = sum(query_lens), sum(seq_lens)
    tensors = (
        draw(rows, heads, nope), draw(rows, heads, rope), draw(keys, rank), draw(keys, rope)
    )  # fmt: skip
    return weights, tensors


def _new(x: torch.Tensor, query_lens: list[int], seq_lens: list[int]) -> torch.Tensor:
    """The rows of the step's new tokens."""
    own = x.split(seq_lens)
    return torch.cat([k[len(k) - n :] for k, n in zip(own, query_lens, strict=True)])


def _latent_scene(
    config: MlaConfig, query_lens: list[int], seq_lens: list[int], tensors: Tensors
) -> Scene:
    """A scene whose cache holds the latent rows; its queries are not the layer's."""
    plain = normal(config, query_lens, seq_lens)
    rows = torch.cat([tensors[2], tensors[3]], -1)[:, None].split(seq_lens)
    requests = [replace(r, k=k) for r, k in zip(plain.requests, rows, strict=True)]
    return plain.replace(requests=tuple(requests))


def _latent_truth(
    config: MlaConfig,
    query_lens: list[int],
    seq_lens: list[int],
    weights: Weights,
    tensors: Tensors,
) -> torch.Tensor:
    """The expanded layer by its definition: float64 [rows, heads, v_head_size]."""
    w_uk, w_uv = (w.double() for w in weights)
    q = torch.cat([tensors[0], tensors[1]], -1).double().split(query_lens)
    scale = q[0].shape[-1] ** -0.5
    found = []
    parts = zip(q, tensors[2].split(seq_lens), tensors[3].split(seq_lens), strict=True)
    for rows, latent, rope in parts:
        k = torch.einsum("jr,hnr->jhn", latent.double(), w_uk)
        shared = rope.double()[:, None].expand(-1, k.shape[1], -1)
        s = scale * torch.einsum("thd,jhd->htj", rows, torch.cat([k, shared], -1))
        p = torch.arange(len(latent) - len(rows), len(latent))[:, None]
        s = s.masked_fill(torch.arange(len(latent))[None] > p, float("-inf"))
        v = torch.einsum("jr,hrv->jhv", latent.double(), w_uv)
        found.append(torch.einsum("htj,jhv->thv", s.softmax(-1), v))
    return torch.cat(found)


def slots_of_choices(t: Terrain, scene: Scene) -> Check:
    """`physical_topk` names the slots where the chosen keys are."""

    def run(bench: Bench) -> None:
        for how in t.arrangements():
            stage = bench.lay_out(scene, how)
            paging = paging_of(scene, how)
            got = bench.subject.library.physical_topk(
                stage.options["topk_indices"], stage.pages, stage.batch
            )
            wanted = []
            for r, request in enumerate(scene.requests):
                assert request.topk is not None
                good = (request.topk >= 0) & (request.topk < request.seq_len)
                slots = paging.at(r, torch.where(good, request.topk, 0).flatten().long())
                wanted.append(torch.where(good, slots.view(good.shape), -1))
            if differing(got.cpu(), torch.cat(wanted)):
                raise Failed("a chosen key is looked for in another slot")

    return Check(layers(scene), run, f"physical_topk; {scene}")


def ranked_choices(t: Terrain) -> Check:
    """The best keys of two ranks, each of its own, are the best keys of all."""

    def run(bench: Bench) -> None:
        library = bench.subject.library
        logits = torch.randn(5, 41, generator=generator("ranks", t.seed))
        logits[1, 20:] = float("-inf")
        logits[2, 3:] = float("-inf")
        logits[3] = logits[3, :1]
        for size, interleave in ((2, 1), (3, 4), (4, 16)):
            found = []
            for rank in range(size):
                shard = library.shard(rank=rank, size=size, interleave=interleave)
                mine = [j for j in range(41) if j // interleave % size == rank]
                found.append(library.shard_topk(logits[:, mine].to(bench.device), 6, shard))
            got = library.merge_topk([f[0] for f in found], [f[1] for f in found], 6).cpu()
            for row, named in zip(logits, got, strict=True):
                kept = [int(i) for i in named if i >= 0]
                count = min(6, int(torch.isfinite(row).sum()))
                best = sorted(range(41), key=lambda j: (-float(row[j]), j))[:count]
                if sorted(kept) != sorted(best):
                    raise Failed(f"{size} ranks choose {kept}, all keys together {sorted(best)}")

    return Check((), run, "shard_topk and merge_topk")


def local_lengths(bench: Bench) -> None:
    """The library's formula for what a rank holds, against counting."""
    for size in (1, 2, 3, 8):
        for interleave in (1, 4, 16):
            lens = torch.arange(0, 70, dtype=torch.int32)
            for rank in range(size):
                shard = bench.subject.library.shard(rank=rank, size=size, interleave=interleave)
                own = [j for j in range(70) if j // interleave % size == rank]
                counted = torch.tensor([sum(j < n for j in own) for n in range(70)])
                if differing(shard.local_lens(lens).long(), counted):
                    raise Failed(f"rank {rank} of {size} by {interleave}: lengths are wrong")
                there = shard.local_positions(torch.arange(70))
                wanted = torch.full((70,), -1)
                wanted[own] = torch.arange(len(own))
                if differing(there, wanted):
                    raise Failed(f"rank {rank} of {size} by {interleave}: positions are wrong")
                back = shard.global_positions(torch.arange(len(own)))
                if differing(back, torch.tensor(own, dtype=torch.int64)):
                    raise Failed(f"rank {rank} of {size} by {interleave}: positions do not return")
