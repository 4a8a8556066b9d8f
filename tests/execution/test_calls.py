"""A call that does not fit gets one error that names the tensor, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, BatchBounds, PageTable
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.workspace import Workspace
from attnplat.config.layer import BlockSparseConfig, MhaConfig
from attnplat.config.names import Feature
from attnplat.errors import (
    ConfigError,
    HostLengthsNeededError,
    PlanMismatchError,
    UnsupportedCallError,
    WorkspaceTooSmallError,
)
from tests.execution.cases import IMPLS, layer, make_step

every_impl = pytest.mark.parametrize("name", IMPLS)
ALL = {"sinks": True, "alibi": True, "position_bias": True, "topk": 3}


@dataclass
class World:
    """A step ready to run, with every argument of `forward` in `args`."""

    impl: AttentionImpl
    batch: Batch
    pages: PageTable
    cache: KVCache
    args: dict[str, Any]

    def forward(self) -> Any:
        plan = self.impl.plan(self.batch, self.pages)
        return self.impl.forward(plan, **self.args)


def world(name: str, config: MhaConfig) -> World:
    step = make_step(config, [2, 1], [20, 33])
    paged = step.paged()
    paged.cache.k.fill_(1)
    paged.cache.v.fill_(1)
    args: dict[str, Any] = {
        "q": step.q,
        "cache": paged.cache,
        "kv": (torch.randn(3, 2, 16), torch.randn(3, 2, 16)),
        "out": torch.full((3, 4, 16), 7.0),
        "lse": torch.full((3, 4), 7.0),
        **step.options,
    }
    return World(IMPLS[name].create(config, "cpu"), step.batch, paged.pages, paged.cache, args)


def other(**changes: Any) -> Callable[[World], None]:
    def change(w: World) -> None:
        w.args.update(changes)

    return change


def spec(**changes: Any) -> Callable[[World], None]:
    def change(w: World) -> None:
        w.args["cache"] = KVCache.allocate(replace(w.cache.spec, **changes), 9)

    return change


def pages(**changes: Any) -> Callable[[World], None]:
    def change(w: World) -> None:
        w.pages = replace(w.pages, **changes)

    return change


def z(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


# (config, what is wrong, the error, what it says)
WRONG: dict[str, tuple[dict[str, Any], Callable[[World], None], type[Exception], str]] = {
    "q rows": ({}, other(q=z(2, 4, 16)), PlanMismatchError, "q has shape [2, 4, 16]; expected [at"),
    "q heads": ({}, other(q=z(3, 3, 16)), PlanMismatchError, "q has shape [3, 3, 16]"),
    "q size": ({}, other(q=z(3, 4, 8)), PlanMismatchError, "expected [at least 3, 4, 16]"),
    "q dtype": (
        {},
        other(q=z(3, 4, 16, dtype=torch.bfloat16)),
        PlanMismatchError,
        "q has dtype torch.bfloat16; expected torch.float32",
    ),
    "q stride": (
        {},
        other(q=z(3, 4, 32)[..., ::2]),
        PlanMismatchError,
        "q has stride 2 in its last dimension; expected 1",
    ),
    "q no tensor": ({}, other(q=[1.0]), PlanMismatchError, "q is a list; expected a tensor"),
    "q device": (
        {},
        other(q=torch.empty(3, 4, 16, device="meta")),
        PlanMismatchError,
        "q is on meta; expected cpu",
    ),
    "k rows": (
        {},
        other(kv=(z(2, 2, 16), z(2, 2, 16))),
        PlanMismatchError,
        "k has shape [2, 2, 16]",
    ),
    "k heads": ({}, other(kv=(z(3, 4, 16), z(3, 2, 16))), PlanMismatchError, "k has shape"),
    "v rows": ({}, other(kv=(z(3, 2, 16), z(2, 2, 16))), PlanMismatchError, "v has shape"),
    "v dtype": (
        {},
        other(kv=(z(3, 2, 16), z(3, 2, 16, dtype=torch.float16))),
        PlanMismatchError,
        "v has dtype torch.float16",
    ),
    "v missing": ({}, other(kv=(z(3, 2, 16), None)), PlanMismatchError, "v is a NoneType"),
    "out shape": ({}, other(out=z(3, 4, 8)), PlanMismatchError, "out has shape [3, 4, 8]"),
    "out dtype": (
        {},
        other(out=z(3, 4, 16, dtype=torch.float16)),
        PlanMismatchError,
        "out has dtype torch.float16",
    ),
    "lse shape": ({}, other(lse=z(3, 5)), PlanMismatchError, "lse has shape [3, 5]"),
    "lse dtype": ({}, other(lse=z(3, 4, dtype=torch.float64)), PlanMismatchError, "lse has dtype"),
    "sinks shape": ({"sinks": True}, other(sinks=z(3)), PlanMismatchError, "sinks has shape [3]"),
    "sinks dtype": (
        {"sinks": True},
        other(sinks=z(4, dtype=torch.int32)),
        PlanMismatchError,
        "sinks has dtype torch.int32",
    ),
    "slopes shape": ({"alibi": True}, other(alibi_slopes=z(5)), PlanMismatchError, "alibi_slopes"),
    "bias too narrow": (
        {"position_bias": True},
        other(position_bias=z(4, 2, 32)),
        PlanMismatchError,
        "position_bias has shape [4, 2, 32]; expected [4, at least 2, at least 33]",
    ),
    "top-k dtype": (
        {"topk": 3},
        other(topk_indices=z(3, 3, dtype=torch.int64)),
        PlanMismatchError,
        "topk_indices has dtype torch.int64; expected torch.int32",
    ),
    "sinks undeclared": ({}, other(sinks=z(4)), UnsupportedCallError, "sinks is given"),
    "slopes undeclared": ({}, other(alibi_slopes=z(4)), UnsupportedCallError, "alibi_slopes is"),
    "bias undeclared": (
        {},
        other(position_bias=z(4, 2, 40)),
        UnsupportedCallError,
        "position_bias is given",
    ),
    "top-k undeclared": (
        {},
        other(topk_indices=z(3, 3, dtype=torch.int32)),
        UnsupportedCallError,
        "topk_indices is given",
    ),
    "sinks missing": ({"sinks": True}, other(sinks=None), UnsupportedCallError, "declares sinks"),
    "slopes missing": (
        {"alibi": True},
        other(alibi_slopes=None),
        UnsupportedCallError,
        "declares alibi_slopes",
    ),
    "bias missing": (
        {"position_bias": True},
        other(position_bias=None),
        UnsupportedCallError,
        "declares position_bias",
    ),
    "top-k missing": ({"topk": 3}, other(topk_indices=None), UnsupportedCallError, "topk_indices"),
    "LSE undeclared": (
        {"also_needs": frozenset()},
        other(),
        UnsupportedCallError,
        "Feature.LSE",
    ),
    "cache missing": ({}, other(cache=None), UnsupportedCallError, "needs the cache"),
    "cache dtype": ({}, spec(encoding="bfloat16"), PlanMismatchError, "encoding bfloat16, not"),
    "cache blocks": ({}, spec(block_size=32), PlanMismatchError, "block_size 32, not 16"),
    "cache heads": ({}, spec(num_kv_heads=4), PlanMismatchError, "num_kv_heads 4, not 2"),
    "cache size": ({}, spec(head_size=8), PlanMismatchError, "head_size 8, not 16"),
    "block past the cache": (
        {},
        pages(block_table=torch.full((2, 3), 99, dtype=torch.int32)),
        PlanMismatchError,
        "names block 99; the cache has",
    ),
    "block negative": (
        {},
        pages(block_table=torch.full((2, 3), -1, dtype=torch.int32)),
        ConfigError,
        "names block -1",
    ),
    "slot past the cache": (
        {},
        pages(slot_mapping=torch.tensor([0, 1, 9999])),
        PlanMismatchError,
        "names slot 9999; the cache has",
    ),
    "no slots": ({}, pages(slot_mapping=None), UnsupportedCallError, "slot_mapping is None"),
    "slots of another batch": (
        {},
        pages(slot_mapping=torch.tensor([0, 1])),
        PlanMismatchError,
        "pages.slot_mapping has shape [2]; expected [3]",
    ),
    "table too narrow": (
        {},
        pages(block_table=torch.zeros(2, 2, dtype=torch.int32)),
        PlanMismatchError,
        "room for 32 tokens a request; seq_lens go up to 33",
    ),
    "table of another batch": (
        {},
        pages(block_table=torch.zeros(5, 9, dtype=torch.int32)),
        PlanMismatchError,
        "pages.block_table has shape [5, 9]; expected [2, any]",
    ),
    "rolled past the window": (
        {},
        pages(first_block=torch.tensor([1, 0], dtype=torch.int32)),
        ConfigError,
        "request 0 reads block 0 of its sequence",
    ),
}


@every_impl
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_names_the_fault_and_writes_nothing(case: str, name: str) -> None:
    wants, change, error, says = WRONG[case]
    w = world(name, layer(**wants))
    own = {key: w.args[key] for key in ("out", "lse")}
    change(w)
    with pytest.raises(error, match=re.escape(says)):
        w.forward()
    assert (w.cache.k == 1).all() and (w.cache.v == 1).all()
    assert all((tensor == 7).all() for tensor in own.values())


@every_impl
def test_the_right_call_of_that_table_runs(name: str) -> None:
    world(name, layer()).forward()
    world(name, layer(**ALL)).forward()


@every_impl
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"causal": [True, False]}, "batch.causal is given"),
        ({"ranges": [(0, 1, 2)]}, "batch.ranges is given"),
        ({"prefix_lens": [1, 1]}, "batch.prefix_lens is given"),
        ({"tree_mask": z(3, 1, dtype=torch.uint8)}, "batch.tree_mask is given"),
    ],
)
def test_masks_of_a_batch_must_be_declared(name: str, given: dict[str, Any], says: str) -> None:
    batch = Batch.from_lengths([2, 1], [20, 33], **given)
    with pytest.raises(UnsupportedCallError, match=re.escape(says)):
        IMPLS[name].create(layer(), "cpu").plan(batch)


@every_impl
def test_a_restarted_window_needs_its_prefix_lengths(name: str) -> None:
    impl = IMPLS[name].create(layer(rswa=True), "cpu")
    with pytest.raises(UnsupportedCallError, match="prefix_lens"):
        impl.plan(Batch.from_lengths([1]))


@every_impl
def test_a_plan_serves_layers_of_its_key_only(name: str) -> None:
    one = IMPLS[name].create(layer(sliding_window=(7, -1)), "cpu")
    other_scale = IMPLS[name].create(layer(sliding_window=(7, -1), scale=2.0), "cpu")
    full = IMPLS[name].create(layer(), "cpu")
    step = make_step(one.config, [3])
    plan = one.plan(step.batch)
    assert one.plan_key == other_scale.plan_key != full.plan_key
    other_scale.forward(plan, step.q, kv=step.packed())
    with pytest.raises(PlanMismatchError, match="sliding_window"):
        full.forward(plan, step.q, kv=step.packed())


@every_impl
def test_without_pages_keys_come_with_the_call(name: str) -> None:
    w = world(name, layer())
    plan = w.impl.plan(w.batch)
    with pytest.raises(UnsupportedCallError, match="needs kv"):
        w.impl.forward(plan, w.args["q"])
    with pytest.raises(UnsupportedCallError, match="without pages"):
        w.impl.forward(plan, w.args["q"], w.cache)
    with pytest.raises(PlanMismatchError, match=re.escape("k has shape [52, 2, 16]")):
        w.impl.forward(plan, w.args["q"], kv=(z(52, 2, 16), z(52, 2, 16)))


@every_impl
def test_layers_without_a_cache_refuse_pages(name: str) -> None:
    w = world(name, layer())
    impl = IMPLS[name].create(layer(attn_type="encoder_only"), "cpu")
    with pytest.raises(UnsupportedCallError, match="keeps no KV cache"):
        impl.plan(w.batch, w.pages)
    with pytest.raises(ConfigError, match="keeps no KV cache"):
        impl.kv_cache_spec()


@every_impl
def test_gradients_are_refused_and_not_dropped(name: str) -> None:
    step = make_step(layer(), [3])
    impl = IMPLS[name].create(step.config, "cpu")
    q = step.q.requires_grad_()
    with pytest.raises(UnsupportedCallError, match=r"no_grad"):
        impl.forward(impl.plan(step.batch), q, kv=step.packed())
    with torch.inference_mode():
        assert not impl.forward(impl.plan(step.batch), q, kv=step.packed()).requires_grad


@every_impl
def test_autocast_changes_nothing(name: str) -> None:
    step = make_step(layer(logits_soft_cap=5.0), [3])
    impl = IMPLS[name].create(step.config, "cpu")
    plan = impl.plan(step.batch)
    expected = impl.forward(plan, step.q, kv=step.packed())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(impl.forward(plan, step.q, kv=step.packed()), expected)


@every_impl
def test_validate_looks_at_values(name: str) -> None:
    w = world(name, layer())
    short = Batch.from_lengths([2, 9], [20, 3])
    with pytest.raises(ConfigError, match="request 1 has seq_len 3, fewer than its 9"):
        w.impl.plan(short, validate=True)
    twice = replace(w.pages, slot_mapping=torch.tensor([5, 5, 1]))
    with pytest.raises(ConfigError, match="names a slot twice"):
        w.impl.plan(w.batch, twice, validate=True)


@every_impl
def test_bounds_hold_for_plan_and_update(name: str) -> None:
    w = world(name, layer())
    bounds = BatchBounds(max_reqs=2, max_tokens=3, max_query_len=2, max_seq_len=33)
    plan = w.impl.plan(w.batch, w.pages, bounds=bounds)
    assert plan.bounds == w.impl.update(plan, w.batch, w.pages).bounds == bounds
    longer = make_step(layer(), [2, 1], [20, 34])
    with pytest.raises(PlanMismatchError, match=r"max_seq_len is 34; bounds.max_seq_len is 33"):
        w.impl.update(plan, longer.batch, longer.paged().pages)


def test_a_workspace_of_the_advertised_size_does_and_a_smaller_one_is_refused() -> None:
    w = world("TORCH_SDPA", layer())
    bounds = BatchBounds(max_reqs=2, max_tokens=3, max_query_len=2, max_seq_len=33)
    enough = Workspace("cpu", w.impl.workspace_bytes(bounds))
    plans = [w.impl.plan(w.batch, w.pages, workspace=enough, bounds=bounds) for _ in range(3)]
    outs = [w.impl.forward(plan, w.args["q"], w.cache) for plan in plans]
    assert torch.equal(outs[0], outs[2]) and enough.free_nbytes == enough.nbytes
    with pytest.raises(WorkspaceTooSmallError, match=r"reserve\("):
        w.impl.plan(w.batch, w.pages, workspace=Workspace("cpu", 100))


@every_impl
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (BlockSparseConfig(head_size=16), "runs mha"),
        (layer(also_needs=frozenset({Feature.DCP})), "does not take dcp"),
        (MhaConfig(head_size=16), "num_heads is None"),
        (layer(kv_cache_dtype="turboquant_k8v4"), "encoding is turbo_k8v4"),
    ],
    ids=["operation", "feature", "heads", "encoding"],
)
def test_what_a_backend_does_not_run_is_refused_at_creation(
    name: str, config: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        IMPLS[name].create(config, "cpu")


def test_lengths_on_a_device_alone_are_asked_for_and_not_fetched() -> None:
    batch = Batch.from_lengths([2], [4])
    meta = replace(
        batch,
        query_start_loc=batch.query_start_loc.to("meta"),
        seq_lens=batch.seq_lens.to("meta"),
        host_lens="upper",
    )
    with pytest.raises(HostLengthsNeededError, match="query_start_loc_host"):
        meta.host_lengths()
    assert replace(meta, host_lens="exact").host_lengths().seq_lens == (4,)
