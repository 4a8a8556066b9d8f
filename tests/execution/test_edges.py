"""Inputs made to show one mistake each: needles, twins, uniform rows, poison, empty rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache
from attnplat.config.layer import MhaConfig, MlaConfig
from attnplat.config.names import Dtype, Feature
from tests.execution.cases import (
    IMPLS,
    LSE_TOLERANCE,
    NAN,
    Step,
    assert_close,
    layer,
    make_step,
    run,
    run_plan,
)

INF = float("inf")

every_impl = pytest.mark.parametrize("name", IMPLS)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


def needles(config: MhaConfig, keys: int, at: list[int], rows: int = 1) -> Step:
    """Keys that are 0 but for needles, whose logit is 40 above; V rows tell their position."""
    step = make_step(config, [rows], [keys])
    step.q[:] = 0
    step.q[..., 0] = 40 / config.effective_scale / 32
    step.k[0][:] = 0
    step.k[0][at, :, 0] = 32
    step.v[0][:] = 0
    for j in range(keys):
        step.v[0][j, :, : config.value_size // 2] = j % 128
        step.v[0][j, :, config.value_size // 2 :] = j // 128
    return step


def found(out: torch.Tensor) -> list[tuple[float, float]]:
    """(low, high) part of the position each row's first head found."""
    half = out.shape[-1] // 2
    return [(float(row[0, 0]), float(row[0, half])) for row in out]


# A. Empty and zero-length ----------------------------------------------------------------


@every_impl
def test_a1_an_empty_batch_gives_empty_tensors(name: str) -> None:
    out, lse = run(name, make_step(layer(), []))
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


@every_impl
def test_a2_padding_alone_leaves_the_output_as_it_is(name: str) -> None:
    step = make_step(layer(), [0, 0], [0, 0])
    step = replace(step, batch=step.batch.padded(2, 5), q=torch.full((5, 4, 16), NAN))
    empty = (torch.zeros(0, 2, 16), torch.zeros(0, 2, 16))
    impl = IMPLS[name].create(step.config, "cpu")
    plan = impl.plan(step.batch)
    own = torch.full((5, 4, 16), 7.0)
    impl.forward(plan, step.q, kv=empty, out=own)
    assert (own == 7).all()
    assert (impl.forward(plan, step.q, kv=empty) == 0).all()


@every_impl
def test_a3_a_request_without_queries_leaves_its_neighbours_alone(name: str) -> None:
    with_gap = make_step(layer(), [2, 0, 3], [9, 40, 30])
    keep = [0, 2]
    without = replace(
        with_gap,
        batch=Batch.from_lengths([2, 3], [9, 30]),
        k=[with_gap.k[r] for r in keep],
        v=[with_gap.v[r] for r in keep],
    )
    assert torch.equal(run(name, with_gap, with_gap.paged())[0], run(name, without)[0])


@every_impl
def test_a5_the_table_row_of_an_empty_request_is_not_read(name: str) -> None:
    step = make_step(layer(), [1, 0], [20, 0])
    paged = step.paged()
    table = paged.pages.block_table.clone()
    table[1] = 1 << 30
    paged.pages = replace(paged.pages, block_table=table)
    assert_close(run(name, step, paged), run("REFERENCE", step), step)


@every_impl
@pytest.mark.parametrize("sinks", [False, True])
def test_a6_a7_no_keys_give_zero_and_minus_infinity_or_the_sink(name: str, sinks: bool) -> None:
    step = make_step(layer(attn_type="encoder_decoder", sinks=sinks), [2, 3], [0, 4])
    out, lse = run(name, step, step.paged())
    assert (out[:2] == 0).all() and not out[2:].isnan().any()
    expected = step.options["sinks"].expand(2, 4) if sinks else torch.full((2, 4), -INF)
    assert torch.equal(lse[:2], expected)


@every_impl
@every_dtype
def test_a10_the_first_token_is_its_own_value(name: str, dtype: str) -> None:
    step = make_step(layer(dtype=dtype), [1])
    out, lse = run(name, step, step.paged())
    assert torch.equal(out[0, ::2], step.v[0][0])
    assert torch.equal(out[0, 1::2], step.v[0][0])
    assert lse.isfinite().all()


@every_impl
def test_a12_a_top_k_row_of_nothing_is_empty(name: str) -> None:
    step = make_step(layer(topk=3), [2], [9])
    step.options["topk_indices"] = torch.tensor([[-1, -1, -1], [4, 4, 100]], dtype=torch.int32)
    out, lse = run(name, step, step.paged())
    assert (out[0] == 0).all() and (lse[0] == -INF).all()
    torch.testing.assert_close(out[1, 0], step.v[0][4, 0])


# B. Masked rows and log-sum-exp -----------------------------------------------------------


@every_impl
def test_b4_rows_of_very_low_logits_are_ordinary_rows(name: str) -> None:
    step = needles(layer(), 40, [])
    step.k[0][..., 0] = -1e6
    out, lse = run(name, step, step.paged())
    torch.testing.assert_close(out[0, 0, 0], torch.tensor(19.5))
    assert lse.isfinite().all() and (lse < -1e5).all()


@every_impl
def test_b5_rows_of_very_high_logits_do_not_overflow(name: str) -> None:
    step = make_step(layer(scale=1.0), [1], [30])
    step.q[:] = 0
    step.q[..., 0] = 1e19
    step.k[0][..., 0] = 1e19
    out, lse = run(name, step, step.paged())
    assert out.isfinite().all() and lse.isfinite().all()


@every_impl
@every_dtype
def test_b14_lse_of_equal_logits_is_the_log_of_their_count(name: str, dtype: str) -> None:
    step = make_step(layer(dtype=dtype), [1, 1], [64, 100])
    step.q[:] = 0
    _, lse = run(name, step, step.paged())
    expected = torch.tensor([math.log(64), math.log(100)])[:, None].expand(2, 4)
    absolute, relative = LSE_TOLERANCE[Dtype(dtype)]
    torch.testing.assert_close(lse, expected, atol=absolute, rtol=relative)


@every_impl
def test_b12_lse_may_be_a_transposed_longer_buffer(name: str) -> None:
    step = make_step(layer(), [2, 1], [9, 30])
    buffer = torch.full((4, 9), NAN)
    _, lse = run(name, step, step.paged(), lse=buffer.T)
    assert torch.equal(buffer.T[:3], run(name, step, step.paged())[1])
    assert lse.data_ptr() == buffer.data_ptr() and buffer[:, 3:].isnan().all()


# C. Poison ----------------------------------------------------------------------------------


@every_impl
@pytest.mark.parametrize("poison", [NAN, INF])
def test_c1_c2_slots_without_a_token_do_not_matter(name: str, poison: float) -> None:
    step = make_step(layer(sinks=True), [1, 1, 20, 4], [3, 17, 33, 40])
    clean, dirty = step.paged(), step.paged()
    for cache, fill in ((clean.cache, 0.0), (dirty.cache, poison)):
        for plane in cache.pages():
            plane[plane.isnan()] = fill
    assert torch.equal(run(name, step, clean)[0], run(name, step, dirty)[0])


@every_impl
def test_c3_c7_padding_rows_are_neither_read_nor_written(name: str) -> None:
    step = make_step(layer(), [2, 1], [9, 30])
    expected = run(name, step, step.paged())[0]
    q = torch.cat([step.q, torch.full((4, 4, 16), NAN)])
    padded = replace(step, batch=step.batch.padded(4, 6), q=q)
    paged = step.paged()
    slots = torch.cat([paged.pages.slot_mapping, torch.tensor([0, 1, 2])])
    pages = replace(paged.pages.padded(4, 6), slot_mapping=slots)
    impl = IMPLS[name].create(step.config, "cpu")
    plan = impl.plan(padded.batch, pages)
    before = paged.cache.k.clone()
    new = [
        torch.cat([torch.cat([a[-2:], b[-1:]]), torch.full((3, 2, 16), NAN)])
        for a, b in (step.k, step.v)
    ]
    own = torch.full((7, 4, 16), NAN)
    impl.forward(plan, q, paged.cache, kv=(new[0], new[1]), out=own)
    assert torch.equal(own[:3], expected) and own[3:].isnan().all()
    assert torch.equal(paged.cache.k.nan_to_num(9), before.nan_to_num(9))


@every_impl
def test_c4_d6_blocks_before_the_window_may_be_gone(name: str) -> None:
    step = make_step(layer(sliding_window=(7, -1), static_sink_tokens=2), [1, 2], [90, 75])
    paged = step.paged()
    expected = run(name, step)
    table = paged.pages.block_table.clone()
    table[:, 1:4] = -1
    paged.pages = replace(paged.pages, block_table=table)
    impl = IMPLS[name].create(step.config, "cpu")
    assert_close(run_plan(impl, impl.plan(step.batch, paged.pages), step, paged), expected, step)


@every_impl
def test_c5_the_tail_of_the_table_is_not_read(name: str) -> None:
    step = make_step(layer(), [1, 3], [9, 40])
    paged = step.paged()
    width = paged.pages.block_table.shape[1]
    table = torch.full((2, width + 7), -(1 << 31), dtype=torch.int32)
    table[0, :1] = paged.pages.block_table[0, :1]
    table[1, :width] = paged.pages.block_table[1]
    expected = run(name, step, paged)
    paged.pages = replace(paged.pages, block_table=table)
    assert torch.equal(run(name, step, paged)[0], expected[0])


@every_impl
def test_c13_slot_0_is_an_ordinary_slot(name: str) -> None:
    step = make_step(layer(), [3])
    impl = IMPLS[name].create(step.config, "cpu")
    cache = KVCache.allocate(impl.kv_cache_spec(), 1)
    pages = PageTable.from_blocks([[0]], step.batch, 16)
    out = impl.forward(impl.plan(step.batch, pages), step.q, cache, kv=(step.k[0], step.v[0]))
    assert torch.equal(out, run(name, step)[0])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_reference_keeps_a_bad_value_to_the_rows_that_see_it(value: float) -> None:
    step = make_step(layer(), [6])
    step.v[0][3, 0, 2] = value
    out, _ = run("REFERENCE", step)
    assert out[:3].isfinite().all() and not out[3:, :2, 2].isfinite().any()
    assert out[:, 2:].isfinite().all()
    assert torch.equal(
        out[3:, :2, 2].nan_to_num(1, 2, 3), torch.full((3, 2), value).nan_to_num(1, 2, 3)
    )


# D. Geometry --------------------------------------------------------------------------------


@every_impl
@every_dtype
@pytest.mark.parametrize("left", [0, 1, 15, 16, 200])
def test_d3_a_needle_is_found_inside_the_window_and_only_there(
    name: str, dtype: str, left: int
) -> None:
    keys = 50
    config = layer(dtype=dtype, sliding_window=(left, -1))
    p = keys - 1
    for at in {0, p - left - 1, p - left, p - 1, p}:
        if not 0 <= at < keys:
            continue
        step = needles(config, keys, [at])
        first = max(0, p - left)
        expected = (float(at), 0.0) if at >= first else ((first + p) / 2, 0.0)
        assert found(run(name, step, step.paged())[0]) == [pytest.approx(expected, abs=1e-9)]


@every_impl
@every_dtype
def test_d1_a_twin_needle_in_the_future_is_not_seen(name: str, dtype: str) -> None:
    step = needles(layer(dtype=dtype), 40, [36, 38], rows=4)
    low = [position for position, _ in found(run(name, step, step.paged())[0])]
    assert low == [36, 36, 37, 37]


@every_impl
def test_d9_a_rolling_table_starts_at_its_first_block(name: str) -> None:
    step = make_step(layer(sliding_window=(20, -1)), [1, 3], [100, 90])
    paged = step.paged()
    first = torch.tensor([4, 3], dtype=torch.int32)
    table = torch.stack(
        [paged.pages.block_table[r, f : f + 3] for r, f in enumerate(first.tolist())]
    )
    expected = run(name, step, paged)
    paged.pages = replace(paged.pages, block_table=table, first_block=first)
    assert torch.equal(run(name, step, paged)[0], expected[0])


# E. Scores ----------------------------------------------------------------------------------


@every_impl
@every_dtype
@pytest.mark.parametrize("count", [1, 16, 17, 64, 128])
def test_uniform_rows_are_the_mean(name: str, dtype: str, count: int) -> None:
    config = layer(dtype=dtype, causal=False)
    step = make_step(config, [1], [count])
    step.q[:] = 0
    step.v[0][:] = (torch.arange(count) % 2 * 2)[:, None, None]
    mean = count // 2 * 2 / count
    out, _ = run(name, step, step.paged())
    expected = torch.full_like(out, mean)
    torch.testing.assert_close(out, expected, atol=0, rtol=0 if mean in (0, 1) else 8e-3)


@every_impl
@every_dtype
def test_e6_a_sink_as_high_as_the_needle_takes_half(name: str, dtype: str) -> None:
    step = needles(layer(dtype=dtype, sinks=True), 50, [32])
    step.options["sinks"] = torch.tensor([40.0, -INF, 200.0, 0.0])
    out, lse = run(name, step, step.paged())
    assert out[0, :, 0].tolist() == pytest.approx([16, 32, 0, 32], rel=1e-5)
    torch.testing.assert_close(
        lse[0], torch.tensor([40 + math.log(2), 40, 200, 40]), atol=1e-4, rtol=0
    )


@every_impl
def test_e2_soft_cap_holds_for_scores_far_beyond_it(name: str) -> None:
    step = needles(layer(logits_soft_cap=2.0), 2, [1])
    out, _ = run(name, step, step.paged())
    torch.testing.assert_close(out[0, 0, 0], torch.tensor(1 / (1 + math.exp(-2))))


@every_impl
def test_e11_sinks_may_come_in_the_model_s_dtype(name: str) -> None:
    step = make_step(layer(sinks=True, num_heads=6), [2], [20])
    exact = step.options["sinks"].bfloat16()
    step.options["sinks"] = exact
    with_bf16 = run(name, step)
    step.options["sinks"] = exact.float()
    assert torch.equal(with_bf16[0], run(name, step)[0])


# F. Strides and layouts ------------------------------------------------------------------------


@every_impl
def test_f4_f5_slices_of_larger_tensors_do(name: str) -> None:
    step = make_step(layer(), [5, 1])
    k, v = step.packed()
    expected = run(name, step)[0]
    qkv = torch.full((6, 3, 4, 20), NAN)
    qkv[:, 0, :, :16], qkv[:, 1, :2, :16], qkv[:, 2, :2, :16] = step.q, k, v
    large = torch.full((9, 8, 40), NAN)
    impl = IMPLS[name].create(step.config, "cpu")
    got = impl.forward(
        impl.plan(step.batch),
        qkv[:, 0, :, :16],
        kv=(qkv[:, 1, :2, :16], qkv[:, 2, :2, :16]),
        out=large[1:7, ::2, 3:19],
    )
    assert torch.equal(got, expected)
    large[1:7, ::2, 3:19] = NAN
    assert large.isnan().all()


@every_impl
def test_f7_one_key_head_may_be_expanded(name: str) -> None:
    step = make_step(layer(), [5])
    one_k, one_v = step.k[0][:, :1], step.v[0][:, :1]
    wide = replace(step, k=[one_k.repeat(1, 2, 1)], v=[one_v.repeat(1, 2, 1)])
    impl = IMPLS[name].create(step.config, "cpu")
    out = impl.forward(
        impl.plan(step.batch), step.q, kv=(one_k.expand(5, 2, 16), one_v.expand(5, 2, 16))
    )
    assert torch.equal(out, run(name, wide)[0])


@every_impl
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"])
def test_f8_every_layout_gives_the_same_bits(name: str, layout: str) -> None:
    step = make_step(layer(), [1, 1, 20], [33, 40, 50])
    paged, other = step.paged(), step.paged()
    impl = IMPLS[name].create(step.config, "cpu")
    spec = impl.kv_cache_spec(16, layout)
    other.cache = KVCache.allocate_layers(spec, 3, paged.cache.num_blocks)[1]
    for to, source in zip(other.cache.pages(), paged.cache.pages(), strict=True):
        to.copy_(source)
    assert torch.equal(run(name, step, other)[0], run(name, step, paged)[0])


@every_impl
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 12, 16, 71])
def test_f1_f12_any_group_size_maps_heads_in_order(name: str, group: int) -> None:
    step = make_step(layer(head_size=8, num_heads=2 * group), [1, 3], [20, 30])
    out, _ = run(name, step, step.paged())
    for h in (0, group - 1, group, 2 * group - 1):
        kv = h // group
        one = replace(
            step,
            config=layer(head_size=8, num_heads=1, num_kv_heads=1),
            q=step.q[:, h : h + 1],
            k=[k[:, kv : kv + 1] for k in step.k],
            v=[v[:, kv : kv + 1] for v in step.v],
        )
        torch.testing.assert_close(out[:, h], run(name, one)[0][:, 0], atol=1e-6, rtol=1e-5)


# G. Paging ---------------------------------------------------------------------------------


@every_impl
def test_g2_requests_may_share_blocks(name: str) -> None:
    step = make_step(layer(), [1, 1], [20, 20])
    step.k[1], step.v[1] = step.k[0], step.v[0]
    paged = step.paged()
    table = paged.pages.block_table.clone()
    table[1] = table[0]
    paged.pages = replace(paged.pages, block_table=table, slot_mapping=None)
    assert_close(run(name, step, paged), run("REFERENCE", step), step)


@every_impl
def test_g5_g11_a_write_touches_its_slots_and_no_others(name: str) -> None:
    step = make_step(layer(), [5])
    impl = IMPLS[name].create(step.config, "cpu")
    cache = KVCache.allocate(impl.kv_cache_spec(), 3)
    cache.k.fill_(3)
    cache.v.fill_(4)
    slots = torch.tensor([33, -1, -(1 << 31), 0, 17])
    pages = PageTable(
        block_table=torch.zeros(1, 3, dtype=torch.int32), block_size=16, slot_mapping=slots
    )
    impl.write_kv(cache, step.k[0], step.v[0], pages)
    for plane, new, old in zip(cache.pages(), (step.k[0], step.v[0]), (3, 4), strict=True):
        tokens = plane.transpose(1, 2).reshape(48, 2, 16)
        assert torch.equal(tokens[slots[[0, 3, 4]]], new[[0, 3, 4]])
        rest = [s for s in range(48) if s not in slots.tolist()]
        assert (tokens[rest] == old).all()


# What must be the same bits ------------------------------------------------------------------


def test_reference_gives_each_request_what_it_gives_alone() -> None:
    step = make_step(layer(sliding_window=(30, -1), sinks=True), [1, 7, 1, 40], [33, 7, 400, 60])
    whole = run("REFERENCE", step, step.paged())
    check_alone(step, whole, "REFERENCE")


@every_impl
@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_batch_invariance_gives_each_request_what_it_gives_alone(
    name: str, soft_cap: float | None
) -> None:
    needs = frozenset({Feature.LSE, Feature.BATCH_INVARIANCE})
    config = layer(head_size=12, also_needs=needs, logits_soft_cap=soft_cap)
    step = make_step(config, [1, 7, 1, 1, 40], [33, 7, 400, 33, 60])
    check_alone(step, run(name, step, step.paged()), name)


def check_alone(step: Step, whole: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    starts = step.batch.query_start_loc.tolist()
    for r in range(step.batch.num_reqs):
        rows = slice(starts[r], starts[r + 1])
        one = replace(
            step, batch=step.batch.slice(r, r + 1), q=step.q[rows], k=[step.k[r]], v=[step.v[r]]
        )
        for paged in (one.paged(), None):
            out, lse = run(name, one, paged)
            assert torch.equal(out, whole[0][rows]) and torch.equal(lse, whole[1][rows])


@every_impl
def test_writing_then_attending_is_one_call_or_two(name: str) -> None:
    step = make_step(layer(), [1, 3], [20, 30])
    new = tuple(torch.cat([t[0][-1:], t[1][-3:]]) for t in (step.k, step.v))
    one, two = step.paged(), step.paged()
    for paged in (one, two):
        slots = paged.pages.slot_mapping
        for plane in paged.cache.pages():
            plane[slots // 16, :, slots % 16] = NAN
    impl = IMPLS[name].create(step.config, "cpu")
    plan = impl.plan(step.batch, one.pages)
    fused = impl.forward(plan, step.q, one.cache, kv=(new[0], new[1]))
    impl.write_kv(two.cache, new[0], new[1], plan)
    assert torch.equal(fused, impl.forward(plan, step.q, two.cache))
    assert torch.equal(one.cache.k.nan_to_num(9), two.cache.k.nan_to_num(9))


@every_impl
def test_block_order_request_order_plans_and_workspaces_do_not_matter(name: str) -> None:
    step = make_step(layer(), [1, 1, 6], [33, 40, 50])
    paged, shuffled = step.paged(), replace(step, seed=5).paged()
    impl = IMPLS[name].create(step.config, "cpu")
    plan = impl.plan(step.batch, paged.pages)
    expected = run_plan(impl, plan, step, paged)
    assert torch.equal(run_plan(impl, plan, step, paged)[0], expected[0])
    assert torch.equal(
        run_plan(impl, impl.update(plan, step.batch, paged.pages), step, paged)[0], expected[0]
    )
    assert torch.equal(run(name, step, shuffled)[0], expected[0])
    turned = make_step(layer(), [6, 1, 1], [50, 40, 33])
    turned = replace(
        turned, q=torch.cat([step.q[2:], step.q[1:2], step.q[:1]]), k=step.k[::-1], v=step.v[::-1]
    )
    out = run(name, turned, turned.paged())[0]
    assert torch.equal(torch.cat([out[7:], out[6:7], out[:6]]), expected[0])


# MLA ------------------------------------------------------------------------------------------


@every_impl
def test_i1_absorbed_latent_attention_is_the_expanded(name: str) -> None:
    gen = torch.Generator().manual_seed(3)
    config = MlaConfig(
        head_size=24,
        num_heads=4,
        dtype="float32",
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_size=10,
        also_needs=frozenset({Feature.LSE}),
    )
    w_uk = torch.randn(4, 12, 16, generator=gen)
    q_nope, q_rope = torch.randn(5, 4, 12, generator=gen), torch.randn(5, 4, 8, generator=gen)
    rows = torch.randn(20, 1, 24, generator=gen)
    batch = Batch.from_lengths([5], [20])
    impl = IMPLS[name].create(config, "cpu")
    cache = KVCache.allocate(impl.kv_cache_spec(), 2)
    write_all(impl, cache, rows)
    absorbed = torch.cat([torch.einsum("thn,hnl->thl", q_nope, w_uk), q_rope], -1)
    latent = impl.forward(impl.plan(batch, table(batch)), absorbed, cache)
    w_uv = torch.randn(4, 16, 10, generator=gen)
    got = torch.einsum("thl,hlv->thv", latent, w_uv)

    expanded = config.prefill()
    prefill = IMPLS[name].create(expanded, "cpu")
    k_nope = torch.einsum("tl,hnl->thn", rows[:, 0, :16], w_uk)
    k = torch.cat([k_nope, rows[:, :, 16:].expand(20, 4, 8)], -1)
    v = torch.einsum("tl,hlv->thv", rows[:, 0, :16], w_uv)
    want = prefill.forward(prefill.plan(batch), torch.cat([q_nope, q_rope], -1), kv=(k, v))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def write_all(impl: AttentionImpl, cache: KVCache, rows: torch.Tensor) -> None:
    batch = Batch.from_lengths([len(rows)])
    impl.write_kv(cache, rows, None, table(batch))


def table(batch: Batch) -> PageTable:
    return PageTable.from_blocks([[1, 0]], batch, 16)


@every_impl
def test_gather_kv_is_a_dense_copy(name: str) -> None:
    step = make_step(layer(dtype="bfloat16"), [1, 1], [20, 40])
    paged: Any = step.paged()
    impl = IMPLS[name].create(step.config, "cpu")
    spans = [(1, 3, 35), (0, 0, 20)]
    k, v = impl.gather_kv(paged.cache, paged.pages, spans, dtype=torch.float32)
    assert torch.equal(k, torch.cat([step.k[1][3:35], step.k[0]]).float())
    assert torch.equal(v, torch.cat([step.v[1][3:35], step.v[0]]).float())
