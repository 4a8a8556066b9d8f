"""G: pages, indices, 64-bit addresses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnplat.backends.batch import PageTable
from attnplat.backends.kv_cache import KVCache
from attnplat.errors import AttnplatError, PlanMismatchError
from attnplat.testing.bench import Bench, Outcome, agrees, layers, raises, same
from attnplat.testing.bits import differing
from attnplat.testing.case import CaseList, Check, Checks, Failed, Refused
from attnplat.testing.far import FAR, far_blocks, lazy
from attnplat.testing.inputs import edges, normal
from attnplat.testing.paging import by_block
from attnplat.testing.scenes import Arrangement, Scene
from attnplat.testing.stage import Stage, lay_out
from attnplat.testing.terrain import Terrain

G = CaseList("G", "pages, indices, 64-bit addresses")

LENS = ([1, 3, 1, 18], [40, 20, 1, 18])


@G.case(1, "Sequences that end one before, at and one past a block's end are whole")
def _(t: Terrain) -> Checks:
    for how in t.arrangements(5):
        size = how.block_size
        lens = [size - 1, size, size + 1, 3 * size - 1, 3 * size, 3 * size + 1]
        yield agrees(edges(normal(t.layer(), [1] * 6, lens)), how)
        yield agrees(edges(normal(t.layer(), [2, size], [2 * size, 2 * size])), how)


@G.case(2, "One block may stand twice in a sequence and in several sequences")
def _(t: Terrain) -> Checks:
    size = t.block_size
    scene = edges(normal(t.layer(), [1, 1], [3 * size, 2 * size]))
    first = scene.requests[0]
    assert first.v is not None
    k, v = first.k[:size], first.v[:size]
    tail = slice(size, 2 * size)
    twice = replace(first, k=torch.cat([k, first.k[tail], k]), v=torch.cat([v, first.v[tail], v]))
    other = scene.requests[1]
    assert other.v is not None
    shared = replace(other, k=torch.cat([k, other.k[tail]]), v=torch.cat([v, other.v[tail]]))
    scene = scene.replace(requests=(twice, shared), note="shared blocks")
    yield agrees(scene, t.pages(blocks=((4, 1, 4), (4, 2)), num_blocks=6))


@G.case(3, "Any block size is right, also 1 and what is no power of two")
def _(t: Terrain) -> Checks:
    for size in t.some((1, 528, 8, 24, 2, 16, 32, 64, 128, 256), 5):
        config = t.layer(block_size=size) if size % t.block_size else t.layer()
        for layout in t.layouts:
            how = t.pages(block_size=size, layout=layout, write="fused")
            yield agrees(edges(normal(config, *LENS)), how)


@G.case(4, "A logical block of 4 kernel blocks is the same memory as those 4")
def _(t: Terrain) -> Checks:
    small = t.block_size
    large = 4 * small
    scene = edges(normal(t.layer(), [1, 2], [large + 3, 2 * large]))
    blocks = ((2, 0), (1, 4))
    split = tuple(tuple(4 * b + i for b in row for i in range(4)) for row in blocks)

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        how = t.pages(block_size=large, layout="NHD", blocks=blocks, num_blocks=5)
        stage = bench.lay_out(scene, how, impl)
        one = bench.call(scene, how, impl=impl, stage=stage)
        bench.judge(scene, one)
        cut = how.replace(block_size=small, blocks=split, num_blocks=20)
        assert stage.cache is not None and stage.cache.v is not None
        spec = impl.kv_cache_spec(small, "NHD")
        k, v = (x.reshape(20, small, *x.shape[2:]) for x in (stage.cache.k, stage.cache.v))
        other = bench.lay_out(scene, cut, impl)
        other.cache = KVCache(k=k, v=v, spec=spec)
        bench.judge(scene, bench.call(scene, cut, impl=impl, stage=other))

    if "NHD" in t.layouts:
        yield Check(layers(scene), run, f"{scene}, blocks of {large} as {small}")


@G.case(5, "Any negative slot skips its token and writes nowhere")
def _(t: Terrain) -> Checks:
    scene = normal(t.layer(), [3, 2], [3, 20])

    def run(bench: Bench) -> None:
        for negative in (-1, -2, -t.block_size, -(1 << 31), -(1 << 62)):
            impl = bench.impl(scene)
            stage = bench.lay_out(scene, t.pages(write="first"), impl)
            assert stage.pages is not None and stage.pages.slot_mapping is not None
            assert stage.cache is not None and stage.kv is not None
            slots = torch.full_like(stage.pages.slot_mapping, negative)
            before = [x.clone() for x in stage.cache.pages()]
            impl.write_kv(stage.cache, *stage.kv, replace(stage.pages, slot_mapping=slots))
            if any(map(differing, before, stage.cache.pages())):
                raise Failed(f"slot {negative} wrote into the cache")

    yield Check(layers(scene), run, "negative slots")
    yield agrees(edges(scene), t.pages(write="fused", padding=4, padding_slots=-(1 << 31)))


# Large addresses -----------------------------------------------------------------------------


@G.case(6, "Cache offsets past 2^31 elements and 2^32 bytes, and slots past 2^31, are addressed")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [1, 2], [20, 18]))
    yield far_blocks(scene, t)
    config = t.layer(num_heads=1, num_kv_heads=1)
    many = edges(normal(config, [1, 1], [5, 3]))
    block = (1 << 31) // t.block_size + 5

    def vast(bench: Bench) -> None:
        impl = bench.impl(many)
        low = t.pages(blocks=((1,), (0,)), num_blocks=2, write="fused")
        stage = _in_vast_cache(many, low, impl, bench, block)
        bench.judge(many, bench.call(many, low, impl=impl, stage=stage))

    # So many slots take some hundred GiB of addresses, which only a CPU has to spare.
    if t.device == "cpu":
        yield Check(layers(many), vast, "slots past 2^31")


def _in_vast_cache(scene: Scene, how: Arrangement, impl: Any, bench: Bench, block: int) -> Stage:
    """The stage in a cache of `block` + 2 blocks, its first sequence at `block`, the other at 0."""
    stage = lay_out(scene, how, impl, bench.device)
    assert stage.cache is not None and stage.cache.v is not None and stage.pages is not None
    spec, planes = stage.cache.spec, []
    count = block + 2
    for plane in (stage.cache.k, stage.cache.v):
        apart = plane[0].numel()
        try:
            memory = lazy(count * apart * plane.element_size(), bench.device)
        except OSError as error:
            raise Refused(f"the machine has no addresses for 2^31 slots: {error}") from error
        planes.append(
            memory.view(plane.dtype).as_strided(
                (count, *plane.shape[1:]), (apart, *plane.stride()[1:])
            )
        )
    cache = KVCache(k=planes[0], v=planes[1], spec=spec)
    size = how.block_size
    table = stage.pages.block_table.clone()
    table[0, 0], table[1, 0] = block, 0
    slots = stage.pages.slot_mapping
    assert slots is not None
    moved = torch.tensor([block * size + 4, 2], dtype=torch.int64, device=bench.device)
    for r, (request, home) in enumerate(zip(scene.requests, (block, 0), strict=True)):
        old = request.seq_len - 1
        for source, target in zip((request.k, request.v), planes, strict=True):
            assert source is not None
            by_block(target, spec.layout)[home, :, :old] = (
                source[:old].transpose(0, 1).to(bench.device)
            )
        assert int(moved[r]) == home * size + old
    stage.cache = cache
    stage.pages = PageTable(block_table=table, block_size=size, slot_mapping=moved)
    stage.watches = [w for w in stage.watches if "cache" not in w.name]
    return stage


@G.case(7, "Rows of q and out past 2^31 elements are addressed")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), [1, 3], [20, 18]))

    def run(bench: Bench) -> None:
        impl, how = bench.impl(scene), t.pages()
        plain = bench.call(scene, how, impl=impl)
        stage = bench.lay_out(scene, how, impl)
        rows, apart = scene.num_rows, FAR
        assert stage.out is not None
        for name in ("q", "out"):
            near = getattr(stage, name)
            memory = lazy(rows * apart * near.element_size(), bench.device).view(near.dtype)
            setattr(stage, name, memory.as_strided(near.shape, (apart, near.shape[2], 1)))
            getattr(stage, name).copy_(near)
        same("rows far apart", plain, bench.call(scene, how, impl=impl, stage=stage))

    yield Check(layers(scene), run, "rows far apart")


def _refused(t: Terrain, what: str, change: Any) -> Check:
    """A page table changed by `change(pages)` is refused by its header, and nothing written."""
    scene = edges(normal(t.layer(), [1, 3], [20, 5]))

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(write="fused"), impl)
        assert stage.pages is not None
        pages = stage.pages
        raises(what, PlanMismatchError, lambda: impl.plan(stage.batch, change(pages)))

    return Check(layers(scene), run, what)


@G.case(8, "Slots of 32 bits are refused, never taken for others")
def _(t: Terrain) -> Checks:
    yield _refused(
        t, "slots of int32", lambda pages: replace(pages, slot_mapping=pages.slot_mapping.int())
    )


@G.case(9, "Slots are decoded with the table's block size; a cache of another is refused")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), *LENS))
    for how in t.arrangements(4):
        yield agrees(scene, how.replace(write="first"))

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(write="first"), impl)
        assert stage.pages is not None and stage.kv is not None and stage.cache is not None
        wrong = replace(stage.pages, block_size=2 * t.block_size)
        cache, kv = stage.cache, stage.kv
        raises(
            "write_kv with another block size",
            PlanMismatchError,
            lambda: impl.write_kv(cache, *kv, wrong),
        )

    yield Check(layers(scene), run, "block size of table and cache differ")


@G.case(10, "Caches of different block sizes may share one piece of memory")
def _(t: Terrain) -> Checks:
    narrow = edges(normal(t.layer(), [1, 2], [20, 33]))
    wide = edges(normal(t.layer(head_size=2 * t.head_size), [1, 2], [20, 33]))

    def run(bench: Bench) -> None:
        raw = torch.full((1 << 20,), float("nan"), dtype=narrow.dtype, device=bench.device)
        for scene, size, start in ((narrow, t.block_size, 0), (wide, 2 * t.block_size, 1 << 19)):
            how = t.pages(block_size=size, write="fused")
            impl = bench.impl(scene)
            stage = bench.lay_out(scene, how, impl)
            _share(stage, raw, start)
            bench.judge(scene, bench.call(scene, how, impl=impl, stage=stage))

    yield Check(layers(narrow, wide), run, "one buffer, two groups")


def _share(stage: Stage, raw: torch.Tensor, start: int) -> None:
    """Move the stage's cache into `raw`, K and V of a block side by side."""
    assert stage.cache is not None and stage.cache.v is not None
    k, v = stage.cache.k, stage.cache.v
    each = k[0].numel() + v[0].numel()
    moved = []
    for plane, at in ((k, 0), (v, k[0].numel())):
        view = raw.as_strided(plane.shape, (each, *plane[0].contiguous().stride()), start + at)
        view.copy_(plane)
        moved.append(view)
    stage.cache = KVCache(k=moved[0], v=moved[1], spec=stage.cache.spec)
    stage.watches = [w for w in stage.watches if "cache" not in w.name]


@G.case(11, "Writing touches its slots and nothing else")
def _(t: Terrain) -> Checks:
    for scene in (
        normal(t.layer(), *LENS),
        normal(t.layer(v_head_size=t.head_size // 2), *LENS),
        normal(t.cross(), [1, 2], [20, 33]),
        normal(t.latent(), *LENS),
    ):
        for how in t.arrangements():
            for write in ("fused", "first"):
                yield agrees(scene, how.replace(write=write, layers=2, spread=True))


@G.case(12, "Two tokens for one slot are found when validated, and harm no other slot")
def _(t: Terrain) -> Checks:
    scene = normal(t.layer(), [4], [4])

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(write="first"), impl)
        assert stage.pages is not None and stage.pages.slot_mapping is not None
        assert stage.cache is not None and stage.kv is not None
        slots = stage.pages.slot_mapping.clone()
        slots[2] = slots[1]
        pages = replace(stage.pages, slot_mapping=slots)
        raises(
            "a slot named twice, validated,",
            AttnplatError,
            lambda: impl.plan(stage.batch, pages, validate=True),
        )
        expected = [x.clone() for x in stage.cache.pages()]
        impl.write_kv(stage.cache, *stage.kv, pages)
        size = t.block_size
        for plane, old, new in zip(stage.cache.pages(), expected, stage.kv, strict=True):
            assert new is not None
            for row in (0, 3):
                old[slots[row] // size, :, slots[row] % size] = new[row].to(old.dtype)
            at = (int(slots[1]) // size, slice(None), int(slots[1]) % size)
            if not any(not differing(plane[at], new[row].to(plane.dtype)) for row in (1, 2)):
                raise Failed("the slot named twice holds neither token")
            old[at] = plane[at]
            if differing(plane, old):
                raise Failed("another slot changed")

    yield Check(layers(scene), run, "a slot named twice")


@G.case(13, "A table may have any row stride and any width; its entries are of 32 bits")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), *LENS))

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        plain = bench.agree(scene, t.pages())
        stage = bench.lay_out(scene, t.pages(columns=5), impl)
        assert stage.pages is not None
        table = stage.pages.block_table
        wide = torch.full((len(table), 40), 1 << 30, dtype=torch.int32, device=bench.device)
        wide[:, 3 : 3 + table.shape[1]] = table
        stage.pages = replace(stage.pages, block_table=wide[:, 3:])
        same("a wide table", plain, bench.call(scene, t.pages(columns=5), impl=impl, stage=stage))

    yield Check(layers(scene), run, str(scene))
    yield _refused(
        t, "a table of int64", lambda pages: replace(pages, block_table=pages.block_table.long())
    )


@G.case(14, "A table too narrow for a sequence is refused where the host knows lengths")
def _(t: Terrain) -> Checks:
    yield _refused(
        t,
        "a table of one column for two blocks",
        lambda pages: replace(pages, block_table=pages.block_table[:, :1].contiguous()),
    )


@G.case(15, "Tokens may be written in another order than they are queried")
def _(t: Terrain) -> Checks:
    scene = edges(normal(t.layer(), *LENS))

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        plain = bench.agree(scene, t.pages(write="first"))
        stage = bench.lay_out(scene, t.pages(write="first"), impl)
        assert stage.pages is not None and stage.pages.slot_mapping is not None
        assert stage.cache is not None and stage.kv is not None and stage.kv[1] is not None
        turned = torch.arange(scene.num_rows - 1, -1, -1, device=bench.device)
        slots = stage.pages.slot_mapping[turned]
        k, v = stage.kv[0][turned], stage.kv[1][turned]
        impl.write_kv(stage.cache, k, v, replace(stage.pages, slot_mapping=slots))
        plan = impl.plan(stage.batch, stage.pages)
        stage.kv = None
        stage.how = stage.how.replace(write="done")
        out, lse = bench.forward(impl, plan, stage)
        same("tokens written backwards", plain, Outcome(out, lse, stage, plan))

    yield Check(layers(scene), run, str(scene))


@G.case(16, "Blocks larger than a kernel's tile are cut anywhere inside")
def _(t: Terrain) -> Checks:
    for size in t.some((256, 512), 1):
        for keys in t.some((255, 256, 257, 300, 383, 384, 385, 600), 5):
            how = t.pages(block_size=size)
            yield agrees(edges(normal(t.layer(), [1, 2], [keys, keys - 100])), how)


@G.case(17, "Sequences that end at a tile's edge, or one key past it, are whole", every_dtype=True)
def _(t: Terrain) -> Checks:
    for keys in t.some((513, 65, 257, 129, 512, 64, 128, 256, 511, 1024, 1025), 4):
        for changes in ({}, {"alibi": True}) if t.dtype == "float32" else ({},):
            yield agrees(edges(normal(t.layer(**changes), [1, 1], [keys, keys - 1])), t.pages())
