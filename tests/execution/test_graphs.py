"""Plans that are updated in place: what a device graph needs, shown on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnplat.backends.batch import Batch, BatchBounds, PageTable
from attnplat.backends.interface import AttentionImpl, Plan
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.portable.torch_sdpa import TorchSdpaImpl
from attnplat.config.layer import MlaConfig
from attnplat.config.names import Feature
from attnplat.errors import (
    AttnplatError,
    ConfigError,
    PlanMismatchError,
    TensorError,
    UnsupportedCallError,
)
from tests.execution.cases import IMPLS, Paged, Step, assert_close, layer, make_step, run
from tests.execution.fuzz import random_step
from tests.execution.test_against_definition import MASKS, SCORES

NAN = float("nan")
IN_PLACE = [name for name, impl in IMPLS.items() if impl.updates_in_place]
BOUNDS = BatchBounds(max_reqs=4, max_tokens=9, max_query_len=5, max_seq_len=90)
"""Wider than any step below; no multiple of a page."""

STEPS = (([1, 1, 1], [33, 60, 1]), ([5, 0, 2, 1], [88, 0, 2, 64]), ([1], [90]), ([0], [0]))
"""Steps within the bounds: of other numbers, lengths and orders each time."""


def bounds_of(batch: Batch, more: int) -> BatchBounds:
    """Bounds that a batch keeps, with room for more."""
    return BatchBounds(
        max_reqs=batch.num_reqs + more,
        max_tokens=batch.num_tokens + more,
        max_query_len=batch.max_query_len + more,
        max_seq_len=batch.max_seq_len + more,
    )


def padded(tensor: torch.Tensor, rows: int, fill: float = NAN) -> torch.Tensor:
    """The tensor with rows at its end that nothing may look at."""
    wide = tensor.new_full((rows, *tensor.shape[1:]), fill)
    wide[: len(tensor)] = tensor
    return wide


def pages_of(paged: Paged | None) -> PageTable | None:
    """The step's table without slots: its keys are in the cache."""
    return None if paged is None else replace(paged.pages, slot_mapping=None)


def run_in_place(
    impl: AttentionImpl, plan: Plan, step: Step, paged: Paged | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the step's own rows, from a call of as many rows as the plan's bounds."""
    assert plan.bounds is not None and plan.in_place
    rows, options = plan.bounds.max_tokens, dict(step.options)
    if "topk_indices" in options:
        options["topk_indices"] = padded(options["topk_indices"], rows, 1 << 30)
    if "position_bias" in options:
        bias = torch.full(
            (bias_heads(step), plan.bounds.max_query_len, plan.bounds.max_seq_len), NAN
        )
        given = options["position_bias"]
        bias[:, : given.shape[1], : given.shape[2]] = given
        options["position_bias"] = bias
    kv = None if paged is not None else step.packed()
    cache = None if paged is None else paged.cache
    real = len(step.q)
    out = step.q.new_full((rows, step.q.shape[1], step.config.value_size), 7)
    lse = torch.full((rows, step.q.shape[1]), 7.0)
    impl.forward(plan, padded(step.q, rows), cache, kv=kv, out=out, lse=lse, **options)
    assert (out[real:] == 7).all() and (lse[real:] == 7).all(), "padding rows were written"
    return out[:real], lse[:real]


def bias_heads(step: Step) -> int:
    return step.config.num_heads or 1


# Right -----------------------------------------------------------------------------------------


def check(step: Step, paged: Paged | None, more: int = 3) -> None:
    impl = TorchSdpaImpl.create(step.config, "cpu")
    plan = impl.plan(step.batch, pages_of(paged), bounds=bounds_of(step.batch, more))
    assert_close(run_in_place(impl, plan, step, paged), run("REFERENCE", step, paged), step)


@pytest.mark.parametrize("more", [0, 7])
@pytest.mark.parametrize("case", [case for case in MASKS if "ranges" not in case])
def test_every_mask_is_right_whatever_the_bounds(case: str, more: int) -> None:
    wants, queries, keys, batch = MASKS[case]
    step = make_step(layer(**wants), queries, keys, **batch)
    check(step, None, more)
    if step.config.has_kv_cache:
        check(step, step.paged(16), more)


@pytest.mark.parametrize("case", SCORES)
def test_every_score_is_right(case: str) -> None:
    step = make_step(layer(**SCORES[case]), [1, 4, 0, 2], [33, 20, 0, 2])
    check(step, step.paged(8, "NHD"))


@pytest.mark.parametrize("seed", range(60))
def test_random_steps_are_right(seed: int) -> None:
    step, paged = random_step(seed, longest=60)
    invariant = Feature.BATCH_INVARIANCE in step.config.needs
    if invariant or step.batch.ranges is not None:
        impl = TorchSdpaImpl.create(step.config, "cpu")
        plan = None
        if invariant:
            plan = impl.plan(step.batch, pages_of(paged), bounds=bounds_of(step.batch, 2))
        assert plan is None or not plan.in_place
        return
    check(step, paged)


@pytest.mark.parametrize(
    ("word", "scales"),
    [
        ("fp8_e4m3", None),
        ("fp8_e4m3", [0.5]),
        ("fp8_e4m3", [0.5, 2.0]),
        ("int8_per_token_head", None),
        ("fp8_per_token_head", None),
    ],
)
def test_quantised_caches_are_read_as_by_any_plan(word: str, scales: list[float] | None) -> None:
    given = {}
    if scales is not None:
        given = {"k_scale": torch.tensor(scales), "v_scale": torch.tensor(scales) * 3}
    config = layer(kv_cache_dtype=word, per_head_quant_scales=scales is not None)
    impl = TorchSdpaImpl.create(config, "cpu")
    batch = Batch.from_lengths([2, 1], [20, 33])
    pages = PageTable.from_blocks([[4, 1], [0, 7, 3]], batch, 16, write="all")
    cache = KVCache.allocate(impl.kv_cache_spec(16), 9)
    cache.k.fill_(0x7F)
    assert cache.v is not None
    cache.v.fill_(0x7F)
    k, v, q = torch.randn(53, 2, 16), torch.randn(53, 2, 16), torch.randn(3, 4, 16)
    impl.write_kv(cache, k, v, pages, **given)
    reading, asked = replace(pages, slot_mapping=None), {"return_lse": True, **given}
    exact = IMPLS["REFERENCE"].create(config, "cpu")
    expected = exact.forward(exact.plan(batch, reading), q, cache, **asked)
    plans = (impl.plan(batch, reading), impl.plan(batch, reading, bounds=bounds_of(batch, 0)))
    for one, two in zip(impl.forward(plans[0], q, cache, **asked), expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    got = impl.forward(plans[1], q, cache, **asked)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_latent_layers_are_right() -> None:
    config = MlaConfig(
        head_size=96,
        num_heads=4,
        kv_lora_rank=64,
        qk_nope_head_dim=16,
        qk_rope_head_dim=32,
        v_head_size=16,
        dtype="float32",
        also_needs=frozenset({Feature.LSE}),
    )
    impl = TorchSdpaImpl.create(config, "cpu")
    batch = Batch.from_lengths([2, 1], [20, 33])
    pages = PageTable.from_blocks([[4, 1], [0, 7, 3]], batch, 16, write="all")
    cache = KVCache.allocate(impl.kv_cache_spec(16), 9)
    cache.k.fill_(NAN)
    impl.write_kv(cache, torch.randn(53, 1, 96), None, pages)
    reading, q = replace(pages, slot_mapping=None), torch.randn(3, 4, 96)
    expected = impl.forward(impl.plan(batch, reading), q, cache)
    got = impl.forward(impl.plan(batch, reading, bounds=bounds_of(batch, 0)), q, cache)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_table_that_rolled_is_read_from_its_first_block() -> None:
    step = make_step(layer(sliding_window=(9, -1)), [1, 2], [60, 50])
    paged = step.paged(16)
    kept = [row[2:] for row in paged.blocks]
    rolled = PageTable.from_blocks(kept, step.batch, 16, write="none", first_block=[2, 2])
    impl = TorchSdpaImpl.create(step.config, "cpu")
    plan = impl.plan(step.batch, rolled, bounds=bounds_of(step.batch, 0))
    got = run_in_place(impl, plan, step, replace(paged, pages=rolled))
    assert_close(got, run("REFERENCE", step, paged), step)


# Updated ----------------------------------------------------------------------------------------


def addresses(plan: Plan) -> dict[str, int]:
    return {
        name: tensor.data_ptr()
        for value in (plan.batch, plan.pages)
        for name in value.__dataclass_fields__
        if isinstance(tensor := getattr(value, name), torch.Tensor)
    }


def steps(**wants: Any) -> list[tuple[Step, Paged]]:
    """The steps in one cache's worth of blocks each."""
    made = [make_step(layer(**wants), *lens, seed=n) for n, lens in enumerate(STEPS)]
    return [(step, step.paged(16)) for step in made]


@pytest.mark.parametrize(
    "wants",
    [{}, {"sinks": True, "sliding_window": (20, -1)}, {"alibi": True, "logits_soft_cap": 5.0}],
)
def test_an_update_is_a_fresh_plan_bit_for_bit_at_the_old_addresses(wants: dict[str, Any]) -> None:
    made = steps(**wants)
    impl = TorchSdpaImpl.create(made[0][0].config, "cpu")
    plan = impl.plan(made[0][0].batch, pages_of(made[0][1]), bounds=BOUNDS)
    before = addresses(plan)
    for step, paged in (*made, *reversed(made)):
        assert impl.update(plan, step.batch, pages_of(paged)) is plan
        assert addresses(plan) == before
        fresh = impl.plan(step.batch, pages_of(paged), bounds=BOUNDS)
        got, want = (run_in_place(impl, p, step, paged) for p in (plan, fresh))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert_close(got, run("REFERENCE", step, paged), step)


def test_masks_of_a_batch_are_updated_too() -> None:
    needs = frozenset({Feature.LSE, Feature.TREE_MASK, Feature.PER_REQUEST_CAUSAL})
    config = layer(also_needs=needs)
    gen = torch.Generator().manual_seed(0)
    made = []
    for n, (queries, keys) in enumerate(STEPS[:3]):
        shape = (sum(queries), -(-max(queries) // 8))
        tree = torch.randint(0, 256, shape, dtype=torch.uint8, generator=gen)
        causal = [bool((n + r) % 2) for r in range(len(queries))]
        made.append(make_step(config, queries, keys, tree_mask=tree, causal=causal))
    impl = TorchSdpaImpl.create(config, "cpu")
    paged = [step.paged(16) for step in made]
    plan = impl.plan(made[0].batch, pages_of(paged[0]), bounds=BOUNDS)
    for step, own in zip((*made, made[0]), (*paged, paged[0]), strict=True):
        impl.update(plan, step.batch, pages_of(own))
        assert_close(run_in_place(impl, plan, step, own), run("REFERENCE", step, own), step)


class Allocations(TorchDispatchMode):
    """The operators that gave memory which none of their inputs had."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += 1
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.found.append(str(func))
        return out


def test_an_update_only_copies_into_memory_that_is_there() -> None:
    made = steps()
    impl = TorchSdpaImpl.create(made[0][0].config, "cpu")
    plan = impl.plan(made[0][0].batch, pages_of(made[0][1]), bounds=BOUNDS)
    with Allocations() as watched:
        impl.update(plan, made[1][0].batch, pages_of(made[1][1]))
    assert watched.seen > 5 and watched.found == []
    with Allocations() as watched:
        impl.plan(made[1][0].batch, pages_of(made[1][1]))
    assert watched.found, "the watch sees no allocation at all"


def test_new_tokens_are_written_through_the_plan_and_padding_is_not() -> None:
    made = steps()
    impl = TorchSdpaImpl.create(made[0][0].config, "cpu")
    plan = impl.plan(made[0][0].batch, made[0][1].pages, bounds=BOUNDS)
    for step, paged in made:
        impl.update(plan, step.batch, paged.pages)
        rows, new = BOUNDS.max_tokens, torch.randn(2, len(step.q), 2, 16)
        caches = [
            KVCache(k=paged.cache.k.clone(), v=paged.cache.v.clone(), spec=paged.cache.spec)
            for _ in range(2)
        ]
        k, v = (padded(tensor, rows) for tensor in new)
        impl.write_kv(caches[0], k, v, plan)
        impl.write_kv(caches[1], *new, paged.pages)
        for one, two in zip(caches[0].pages(), caches[1].pages(), strict=True):
            assert torch.equal(one.nan_to_num(9), two.nan_to_num(9))
        fused = impl.forward(plan, padded(step.q, rows), caches[1], kv=(k, v))
        plain = impl.forward(plan, padded(step.q, rows), caches[0])
        assert torch.equal(fused, plain) and not fused[len(step.q) :].any()


# Refused ------------------------------------------------------------------------------------------


def test_a_refused_update_leaves_the_plan_as_it_was() -> None:
    step, paged = steps()[0]
    impl = TorchSdpaImpl.create(step.config, "cpu")
    plan = impl.plan(step.batch, pages_of(paged), bounds=BOUNDS)
    kept = [plan.batch.query_start_loc, plan.batch.seq_lens]
    assert plan.pages is not None
    kept.append(plan.pages.block_table)
    before = [tensor.clone() for tensor in kept]

    def other(queries: list[int], keys: list[int], size: int = 16) -> tuple[Batch, PageTable]:
        made = make_step(step.config, queries, keys)
        table = pages_of(made.paged(size))
        assert table is not None
        return made.batch, table

    batch, table = other([2], [40])
    rolling = replace(table, first_block=torch.zeros(1, dtype=torch.int32))
    wrong: tuple[tuple[Batch, PageTable | None, type[AttnplatError], str], ...] = (
        (*other([1] * 5, [9] * 5), PlanMismatchError, "num_reqs is 5; bounds.max_reqs is 4"),
        (*other([5, 5], [9, 9]), PlanMismatchError, "num_tokens is 10; bounds.max_tokens is 9"),
        (*other([6], [9]), PlanMismatchError, "max_query_len is 6; bounds.max_query_len is 5"),
        (*other([1], [91]), PlanMismatchError, "max_seq_len is 91; bounds.max_seq_len is 90"),
        (
            *other([1], [9], 32),
            PlanMismatchError,
            "pages.block_size is 32; the plan was made for 16",
        ),
        (batch, None, PlanMismatchError, "made with pages and is to be updated without pages"),
        (batch, rolling, PlanMismatchError, "pages.first_block is given, and the plan was made"),
        (batch, paged.pages, PlanMismatchError, "pages.block_table has shape [3, 4]; expected [1"),
        (
            batch.replace(kv_start_loc=torch.zeros(1, dtype=torch.int32)),
            table,
            PlanMismatchError,
            "batch.kv_start_loc is given, and the plan was made without it; plan anew",
        ),
    )
    for batch, pages, error, says in wrong:
        with pytest.raises(error) as caught:
            impl.update(plan, batch, pages)
        assert says in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


def test_what_has_no_bound_is_refused_with_bounds() -> None:
    step = make_step(layer(mm_prefix=True), [3], ranges=[(0, 0, 2)])
    with pytest.raises(UnsupportedCallError, match=r"batch\.ranges has no bound on its number"):
        TorchSdpaImpl.create(step.config, "cpu").plan(step.batch, bounds=BOUNDS)
    cross = make_step(layer(attn_type="encoder_decoder", causal=False), [3], [20])
    impl = TorchSdpaImpl.create(cross.config, "cpu")
    with pytest.raises(UnsupportedCallError, match="encoder's tokens, whose number has no bound"):
        impl.plan(cross.batch, cross.paged().pages, bounds=BOUNDS)


def test_a_call_brings_the_rows_of_the_step_at_hand_or_more() -> None:
    made = steps()
    impl = TorchSdpaImpl.create(made[0][0].config, "cpu")
    plan = impl.plan(made[0][0].batch, made[0][1].pages, bounds=BOUNDS)
    for step, paged in made:
        impl.update(plan, step.batch, paged.pages)
        few, many = len(step.q), BOUNDS.max_tokens
        expected = impl.forward(plan, padded(step.q, many), paged.cache)[:few]
        assert torch.equal(impl.forward(plan, step.q, paged.cache), expected)
        new = torch.randn(2, few, 2, 16)
        impl.write_kv(paged.cache, *new, plan)
        if few:
            with pytest.raises(TensorError, match=rf"q has shape .* expected \[at least {few}"):
                impl.forward(plan, step.q[:-1], paged.cache)
        for rows in (few - 1, many + 1):
            wrong = torch.zeros(max(rows, 0), 2, 16)
            if rows >= 0:
                with pytest.raises(TensorError, match=rf"k has shape \[{rows}"):
                    impl.write_kv(paged.cache, wrong, wrong, plan)


def test_where_the_host_can_see_it_a_block_that_is_not_there_is_refused() -> None:
    step, paged = steps()[0]
    impl = TorchSdpaImpl.create(step.config, "cpu")
    plan = impl.plan(step.batch, pages_of(paged), bounds=BOUNDS)
    assert plan.pages is not None
    for block in (-3, 99):
        plan.pages.block_table[1, 2] = block
        with pytest.raises(ConfigError, match=rf"request 1 reads block {block}; it takes 0 to"):
            impl.forward(plan, padded(step.q, 9), paged.cache)


@pytest.mark.parametrize("name", [name for name in IMPLS if name not in IN_PLACE])
def test_other_backends_answer_an_update_with_a_new_plan(name: str) -> None:
    (step, paged), (other, other_paged), *_ = steps()
    impl = IMPLS[name].create(step.config, "cpu")
    plan = impl.plan(step.batch, pages_of(paged), bounds=BOUNDS)
    new = impl.update(plan, other.batch, pages_of(other_paged))
    assert new is not plan and not plan.in_place and new.bounds == BOUNDS


# Recorded --------------------------------------------------------------------------------------


class Constants(TorchDispatchMode):
    """Tensors made of Python numbers: on a device a copy from the host, which no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += "lift_fresh" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "wants",
    [
        {},
        {"sinks": True, "sliding_window": (20, -1), "static_sink_tokens": 2},
        {"alibi": True, "position_bias": True, "logits_soft_cap": 5.0},
        {"topk": 3},
        {"chunk_size": 7},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "int4_per_token_head"},
        {"kv_cache_dtype": "fp8_per_token_head"},
    ],
)
def test_a_second_call_makes_no_tensor_of_python_numbers(wants: dict[str, Any]) -> None:
    config = layer(**wants)
    step = make_step(config, [2, 1], [20, 33])
    impl = TorchSdpaImpl.create(config, "cpu")
    pages = PageTable.from_blocks([[4, 1], [0, 7, 3]], step.batch, 16)
    cache = KVCache.allocate(impl.kv_cache_spec(16), 9)
    for view in cache.views:
        if view is not None:
            view.zero_()
    plan = impl.plan(step.batch, pages, bounds=bounds_of(step.batch, 0))
    new = torch.randn(2, 3, 2, 16)
    scales = {}
    if wants.get("kv_cache_dtype") == "fp8_e4m3":
        scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    with Constants() as watched:
        torch.tensor([1.0])
    assert watched.found == 1
    for _ in range(2):
        with Constants() as watched:
            impl.write_kv(cache, *new, plan, **scales)
            impl.forward(plan, step.q, cache, **step.options, **scales)
    assert watched.found == 0
