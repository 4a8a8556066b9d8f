"""An ordinary call is checked shortly and its new tokens are copied by the library: to the same
bits, and to the same refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache, KVCacheLayout
from attnplat.backends.pages import PageTable
from attnplat.config.layer import MlaConfig
from attnplat.errors import AttnplatError, PlanMismatchError
from attnplat.platforms.cpu.impls.attention import CpuAttnImpl, CpuMlaImpl
from tests.execution.cases import layer, make_step
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401

LATENT = MlaConfig(
    num_heads=4, head_size=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_size=8, dtype="bfloat16",
)  # fmt: skip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def two_caches(impl: AttentionImpl, layout: str, blocks: int, size: int) -> list[KVCache]:
    caches = []
    for _ in range(2):
        pool = KVCache.allocate_layers(impl.kv_cache_spec(size, layout), 2, blocks)
        for view in (pool[1].k, pool[1].v):
            assert view is not None
            view.fill_(7)
        caches.append(pool[1])
    return caches


@pytest.mark.parametrize("layout", sorted(KVCacheLayout))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("skipped", [False, True])
def test_new_tokens_are_stored_as_the_cache_stores_them(
    layout: str, dtype: str, skipped: bool
) -> None:
    config = layer(dtype=dtype, num_kv_heads=2, head_size=20, v_head_size=12)
    impl = CpuAttnImpl.create(config, "cpu")
    step = make_step(config, [3, 1, 40], [3, 50, 41])
    pages = PageTable.from_blocks([[5], [0, 7, 2, 9], [3, 1, 8]], step.batch, 16)
    if skipped:
        assert pages.slot_mapping is not None
        pages.slot_mapping[1::5] = -1
    plan = impl.plan(step.batch, pages)
    wide = torch.randn(44, 2, 50).to(step.dtype)
    k, v = wide[..., :20], wide[..., 30:42]
    ours, theirs = two_caches(impl, layout, 11, 16)
    out = impl.forward(plan, step.q, ours, kv=(k, v))
    assert plan.slots is not None
    theirs.write(k, v, plan.slots)
    for a, b in ((ours.k, theirs.k), (ours.v, theirs.v)):
        assert a is not None and b is not None and torch.equal(bits(a), bits(b))
    assert torch.equal(bits(out), bits(impl.forward(plan, step.q, theirs)))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_latent_rows_are_stored_once(layout: str) -> None:
    impl = CpuMlaImpl.create(LATENT, "cpu")
    step = make_step(layer(dtype="bfloat16"), [5, 1], [5, 20])
    pages = PageTable.from_blocks([[1], [0, 2]], step.batch, 16)
    plan = impl.plan(step.batch, pages)
    rows, q = torch.randn(6, 1, 24).bfloat16(), torch.randn(6, 4, 24).bfloat16()
    ours, theirs = two_caches(impl, layout, 4, 16)
    out = impl.forward(plan, q, ours, kv=(rows, None))
    assert plan.slots is not None
    theirs.write(rows, None, plan.slots)
    assert torch.equal(bits(ours.k), bits(theirs.k))
    assert torch.equal(bits(out), bits(impl.forward(plan, q, theirs)))


def test_many_tokens_are_stored_by_all_threads() -> None:
    config = layer(dtype="bfloat16", head_size=128, num_kv_heads=4)
    impl = CpuAttnImpl.create(config, "cpu")
    step = make_step(config, [3000], [3000])
    order = torch.randperm(188, generator=torch.Generator().manual_seed(1)).tolist()
    plan = impl.plan(step.batch, PageTable.from_blocks([order], step.batch, 16))
    ours, theirs = two_caches(impl, "HND", 188, 16)
    impl.forward(plan, step.q, ours, kv=(step.k[0], step.v[0]))
    assert plan.slots is not None
    theirs.write(step.k[0], step.v[0], plan.slots)
    assert torch.equal(bits(ours.k), bits(theirs.k))


@pytest.mark.parametrize("given_out", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_short_way_gives_the_bits_of_the_long_one(
    dtype: str, padding: int, given_out: bool
) -> None:
    config = layer(dtype=dtype, num_heads=6, sliding_window=(50, -1), logits_soft_cap=3.0)
    impl = CpuAttnImpl.create(config, "cpu")
    step = make_step(config, [1, 7, 0, 1], [1200, 30, 0, 1])
    paged = step.paged(16, "NHD")
    plan = impl.plan(step.batch, paged.pages)
    q = torch.cat([step.q, step.q.new_full((padding, 6, 16), float("nan"))])

    def answer(forward: Callable[..., Any]) -> torch.Tensor:
        out = q.new_full((9 + padding, 6, 16), 5.0) if given_out else None
        found: torch.Tensor = forward(plan, q, paged.cache, out=out)
        assert out is None or found is out
        return found

    def long(*args: Any, **options: Any) -> Any:
        return AttentionImpl.forward(impl, *args, **options)

    assert torch.equal(bits(answer(impl.forward)), bits(answer(long)))


def wrong_calls() -> dict[str, Callable[[Any, Any, Any], dict[str, Any]]]:
    """What is changed of a good call: (step, cache, impl) -> keywords of forward."""

    def other_cache(step: Any, cache: KVCache, impl: Any, **changes: Any) -> dict[str, Any]:
        other = CpuAttnImpl.create(step.config.replace(**changes), "cpu")
        return {"cache": KVCache.allocate(other.kv_cache_spec(16), 9)}

    return {
        "q of another dtype": lambda s, c, i: {"q": s.q.float()},
        "q with too few rows": lambda s, c, i: {"q": s.q[:-1]},
        "q with too few heads": lambda s, c, i: {"q": s.q[:, :-1]},
        "q of another size": lambda s, c, i: {"q": s.q[..., :-1]},
        "q with gaps": lambda s, c, i: {"q": s.q.repeat_interleave(2, -1)[..., ::2]},
        "q with a gradient": lambda s, c, i: {"q": s.q.clone().requires_grad_()},
        "q that is no tensor": lambda s, c, i: {"q": s.q.tolist()},
        "out of another size": lambda s, c, i: {"out": s.q.new_empty(4, 4, 8)},
        "out of another dtype": lambda s, c, i: {"out": torch.empty_like(s.q).float()},
        "no cache": lambda s, c, i: {"cache": None},
        "cache of another head size": lambda s, c, i: other_cache(s, c, i, head_size=32),
        "cache of another dtype": lambda s, c, i: other_cache(s, c, i, dtype="float32"),
        "cache that is too small": lambda s, c, i: {
            "cache": KVCache.allocate(i.kv_cache_spec(16), 2)
        },
        "k with a row more": lambda s, c, i: {"kv": (s.q.new_empty(5, 2, 16),) * 2},
        "k of another dtype": lambda s, c, i: {"kv": (torch.empty(4, 2, 16),) * 2},
        "no v": lambda s, c, i: {"kv": (s.q.new_empty(4, 2, 16), None)},
        "k and v as lists": lambda s, c, i: {
            "kv": ([[0.0]], [[0.0]]),
            "out": torch.empty_like(s.q),
        },
        "sinks": lambda s, c, i: {"sinks": torch.zeros(4)},
        "lse": lambda s, c, i: {"return_lse": True},
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_both_ways_refuse_alike(name: str) -> None:
    config = layer(dtype="bfloat16", also_needs=frozenset())
    impl = CpuAttnImpl.create(config, "cpu")
    step = make_step(config, [1, 3], [40, 30])
    paged = step.paged(16)
    plan = impl.plan(step.batch, paged.pages)
    call = {"q": step.q, "cache": paged.cache, **wrong_calls()[name](step, paged.cache, impl)}
    q = call.pop("q")
    told = []
    for forward in (impl.forward, lambda *a, **k: AttentionImpl.forward(impl, *a, **k)):
        with pytest.raises(AttnplatError) as caught:
            forward(plan, q, **call)
        told.append((type(caught.value), str(caught.value)))
    assert told[0] == told[1]


def test_a_plan_of_another_layer_is_refused() -> None:
    step = make_step(layer(), [1], [40])
    paged = step.paged(16)
    other = CpuAttnImpl.create(layer(sliding_window=(3, 0)), "cpu")
    plan = other.plan(step.batch, paged.pages)
    with pytest.raises(PlanMismatchError, match="another kind of layer"):
        CpuAttnImpl.create(step.config, "cpu").forward(plan, step.q, paged.cache)
