"""Every wrong tensor of every operation is refused by name, before anything has been written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, BatchBounds, PageTable
from attnplat.backends.interface import AttentionImpl, Plan
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.portable.reference import ReferenceImpl
from attnplat.backends.portable.torch_sdpa import TorchSdpaImpl
from attnplat.backends.workspace import Workspace
from attnplat.config.layer import LayerConfig, MlaConfig, SparseMlaConfig
from attnplat.config.names import Feature
from attnplat.errors import (
    AttnplatError,
    ConfigError,
    PlanMismatchError,
    TensorError,
    UnsupportedCallError,
    WorkspaceTooSmallError,
)
from attnplat.platforms.cpu.impls.attention import CpuAttnImpl, CpuMlaImpl, CpuPrefillImpl
from attnplat.platforms.cpu.kernels import library
from tests.execution.cases import layer

BUILT = library.find_library() is not None
PORTABLE = (ReferenceImpl, TorchSdpaImpl)
LENS = ([2, 1], [20, 33])
BLOCKS, BLOCK_SIZE = 9, 16
TABLE = [[4, 1], [0, 7, 3]]

LATENT: dict[str, Any] = {
    "head_size": 96,
    "num_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_size": 16,
    "dtype": "float32",
    "also_needs": frozenset({Feature.LSE}),
}
OPERATIONS: dict[str, tuple[LayerConfig, tuple[type[AttentionImpl], ...]]] = {
    "mha": (layer(), (*PORTABLE, CpuAttnImpl)),
    "mha with everything": (
        layer(sinks=True, alibi=True, position_bias=True, topk=3),
        (*PORTABLE, CpuAttnImpl),
    ),
    "mha fp8": (layer(kv_cache_dtype="fp8_e4m3"), (*PORTABLE, CpuAttnImpl)),
    "encoder": (layer(attn_type="encoder_only"), (*PORTABLE, CpuAttnImpl)),
    "mla": (MlaConfig(**LATENT), (*PORTABLE, CpuMlaImpl)),
    "sparse mla": (SparseMlaConfig(**LATENT, index_topk=3), (*PORTABLE, CpuMlaImpl)),
    "mla prefill": (
        MlaConfig(**LATENT).prefill().replace(num_kv_heads=4),
        (*PORTABLE, CpuPrefillImpl),
    ),
}
SERVED = [(name, impl) for name, (_, impls) in OPERATIONS.items() for impl in impls]


@dataclass
class Stage:
    """One step of one layer: every tensor that a call of it takes."""

    impl: AttentionImpl
    batch: Batch
    pages: PageTable | None
    cache: KVCache | None
    given: dict[str, torch.Tensor]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory of the step."""
        yield from self.given.values()
        for value in (self.batch, self.pages):
            for each in () if value is None else fields(value):
                if isinstance(tensor := getattr(value, each.name), torch.Tensor):
                    yield tensor
        if self.cache is not None:
            yield from (view for view in self.cache.views if view is not None)

    def forward(self, plan: Plan | None = None, **changes: Any) -> Any:
        given = {**self.given, **changes}
        plan = plan or self.impl.plan(self.batch, self.pages)
        k, v, q = given.pop("k"), given.pop("v", None), given.pop("q")
        cache, kv = given.pop("cache", self.cache), given.pop("kv", (k, v))
        return self.impl.forward(plan, q, cache, kv=kv, **given)

    def write(self, **changes: Any) -> None:
        names = ("k", "v", "k_scale", "v_scale")
        given = {name: self.given[name] for name in names if name in self.given} | changes
        where = given.pop("where", self.pages)
        cache, k, v = given.pop("cache", self.cache), given.pop("k"), given.pop("v", None)
        self.impl.write_kv(cache, k, v, where, **given)


def stage(operation: str, kind: type[AttentionImpl]) -> Stage:
    """A step that runs, of an operation on a backend."""
    if not issubclass(kind, PORTABLE) and not BUILT:
        pytest.skip("the C++ kernels were not built")
    impl = kind.create(OPERATIONS[operation][0], "cpu")
    form, gen = impl.form, torch.Generator().manual_seed(1)
    batch, paged = Batch.from_lengths(*LENS), impl.config.has_kv_cache
    rows, new = 3, 3 if paged else sum(LENS[1])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    given = {
        "q": normal(rows, form.num_heads, form.head_size),
        "k": normal(new, form.num_kv_heads, form.head_size),
        "out": torch.full((rows, form.num_heads, form.v_head_size), 7.0),
        "lse": torch.full((rows, form.num_heads), 7.0),
    }
    if not form.values_in_keys:
        given["v"] = normal(new, form.num_kv_heads, form.v_head_size)
    if form.sinks:
        given["sinks"] = normal(form.num_heads)
    if form.alibi:
        given["alibi_slopes"] = normal(form.num_heads)
    if form.position_bias:
        given["position_bias"] = normal(form.num_heads, 2, 33)
    if form.mask.topk is not None:
        given["topk_indices"] = torch.tensor([[0, 3, -1]] * rows, dtype=torch.int32)
    if operation == "mha fp8":
        given.update(k_scale=torch.tensor([0.5]), v_scale=torch.tensor([2.0]))
    if not paged:
        return Stage(impl, batch, None, None, given)
    pages = PageTable.from_blocks(TABLE, batch, BLOCK_SIZE)
    cache = KVCache.allocate(impl.kv_cache_spec(BLOCK_SIZE), BLOCKS)
    for view in cache.views:
        if view is not None:
            view.zero_()
    return Stage(impl, batch, pages, cache, given)


@pytest.mark.parametrize(("operation", "kind"), SERVED)
def test_the_step_of_the_tables_runs(operation: str, kind: type[AttentionImpl]) -> None:
    it = stage(operation, kind)
    out = it.forward()
    assert out is it.given["out"] and not (out == 7).any() and not (it.given["lse"] == 7).any()
    if it.cache is not None:
        it.write()


# One wrong tensor ---------------------------------------------------------------------------

Change = Callable[[torch.Tensor], Any]
ANY_TENSOR: dict[str, tuple[Change, str]] = {
    "a list": (lambda x: [1.0], "is a list; expected a tensor"),
    "another dtype": (lambda x: x.to(torch.complex64), "has dtype torch.complex64; expected"),
    "another device": (lambda x: x.to("meta"), "is on meta; expected cpu"),
    "a dimension more": (lambda x: x[None], "has shape [1, "),
    "a dimension less": (lambda x: x[0], "has shape ["),
    "sparse": (lambda x: x.to_sparse(), "has layout torch.sparse_coo; expected torch.strided"),
}
"""What is wrong in any tensor, and what the error says after the tensor's name."""

FLOATING: dict[str, tuple[Change, str]] = {
    "negated": (lambda x: torch._neg_view(-x), "is a negated view"),
}
ROWS: dict[str, tuple[Change, str]] = {
    "a row less": (lambda x: x[:-1], "has shape ["),
    "an element less": (lambda x: x[..., :-1], "has shape ["),
    "a head more": (lambda x: torch.cat([x, x[:, :1]], 1), "has shape ["),
}
STRIDED: dict[str, tuple[Change, str]] = {
    "gaps in rows": (
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        "has stride 2 in its last dimension; expected 1",
    ),
}
WRITTEN: dict[str, tuple[Change, str]] = {
    "folded rows": (lambda x: x[:1].expand_as(x), "has elements that share memory"),
    "folded heads": (lambda x: x[:, :1].expand_as(x), "has elements that share memory"),
}
FAULTS: dict[str, dict[str, tuple[Change, str]]] = {
    "q": ANY_TENSOR | FLOATING | ROWS | STRIDED,
    "k": ANY_TENSOR | FLOATING | ROWS | STRIDED,
    "v": ANY_TENSOR | FLOATING | ROWS | STRIDED,
    "out": ANY_TENSOR | FLOATING | ROWS | STRIDED | WRITTEN,
    "lse": ANY_TENSOR | FLOATING | ROWS | WRITTEN,
    "sinks": ANY_TENSOR | FLOATING,
    "alibi_slopes": ANY_TENSOR | FLOATING,
    "position_bias": ANY_TENSOR | FLOATING,
    "topk_indices": ANY_TENSOR,
    "k_scale": ANY_TENSOR | FLOATING,
    "v_scale": ANY_TENSOR | FLOATING,
}
SPARES = {("position_bias", "a dimension more")}
"""Faults that are none: a bias may have requests in front (their number is wrong then)."""


def refused(it: Stage, name: str, says: str, call: Callable[[], Any]) -> None:
    """`call` raises a TensorError about `name`, and no tensor of the step has changed."""
    before = [tensor.clone() for tensor in it.tensors()]
    with pytest.raises(TensorError) as caught:
        call()
    assert caught.value.argument == name and str(caught.value).startswith(f"{name} {says}")
    assert all(torch.equal(a, b) for a, b in zip(before, it.tensors(), strict=True))


@pytest.mark.parametrize(("operation", "kind"), SERVED)
def test_each_tensor_of_a_call_is_refused_for_each_fault(
    operation: str, kind: type[AttentionImpl]
) -> None:
    it = stage(operation, kind)
    plan = it.impl.plan(it.batch, it.pages)
    for name, tensor in it.given.items():
        for fault, (change, says) in FAULTS[name].items():
            wrong = change(tensor)
            if (name, fault) in SPARES:
                continue
            refused(
                it, name, says, lambda name=name, wrong=wrong: it.forward(plan, **{name: wrong})
            )


@pytest.mark.parametrize(("operation", "kind"), [s for s in SERVED if s[0] != "encoder"][:-3])
def test_each_tensor_of_a_write_is_refused_for_each_fault(
    operation: str, kind: type[AttentionImpl]
) -> None:
    it = stage(operation, kind)
    for name in {"k", "v", "k_scale", "v_scale"} & it.given.keys():
        for change, says in FAULTS[name].values():
            wrong = change(it.given[name])
            for where in (it.pages, it.impl.plan(it.batch, it.pages)):
                refused(
                    it,
                    name,
                    says,
                    lambda name=name, wrong=wrong, where=where: it.write(
                        where=where, **{name: wrong}
                    ),
                )


# What is no pair of keys and values -----------------------------------------------------------

Pair = Callable[[torch.Tensor, torch.Tensor], Any]
NO_PAIRS: dict[str, tuple[Pair, str, str]] = {
    "stacked": (
        lambda k, v: torch.stack([k, k]),
        "kv",
        r"is one tensor of shape \[2, \d+, \d+, \d+\]; expected a tuple \(k, {v}\)",
    ),
    "concatenated": (
        lambda k, v: torch.cat([k, k]),
        "kv",
        r"is one tensor of shape \[\d+, \d+, \d+\]; expected a tuple \(k, {v}\)",
    ),
    "a list": (
        lambda k, v: [k, v],
        "kv",
        r"is a list of 2; expected a tuple \(k, {v}\).* \(tuple\(kv\) is one\)",
    ),
    "an empty list": (lambda k, v: [], "kv", r"is a list of 0; expected a tuple \(k, {v}\)"),
    "an empty tuple": (lambda k, v: (), "kv", r"is a tuple of 0; expected a tuple \(k, {v}\)"),
    "one of them": (lambda k, v: (k,), "kv", r"is a tuple of 1; expected a tuple \(k, {v}\)"),
    "three": (lambda k, v: (k, v, v), "kv", r"is a tuple of 3; expected a tuple \(k, {v}\)"),
    "a mapping": (lambda k, v: {"k": k}, "kv", r"is a dict; expected a tuple \(k, {v}\)"),
    "a number": (lambda k, v: 0, "kv", r"is a int; expected a tuple \(k, {v}\)"),
    "a list for keys": (lambda k, v: (k.tolist(), v), "k", "is a list; expected a tensor"),
    "a number for values": (lambda k, v: (k, 1.0), "v", "is a float; expected a tensor"),
    "an array for values": (lambda k, v: (k, v.numpy()), "v", "is a ndarray; expected a tensor"),
    "no keys": (lambda k, v: (None, v), "k", "is a NoneType; expected a tensor"),
}
"""What is given for (k, v), the argument that the error names, and what it says of it."""


def refused_pair(it: Stage, case: str, call: Callable[[Any], Any]) -> None:
    """`call` with what is no pair raises the TensorError of the table, and nothing changed."""
    make, name, says = NO_PAIRS[case]
    k, inside = it.given["k"], it.impl.form.values_in_keys
    wrong = make(k, it.given.get("v", k))
    before = [tensor.clone() for tensor in it.tensors()]
    with pytest.raises(
        TensorError, match=f"^{name} " + says.format(v=None if inside else "v")
    ) as e:
        call(wrong)
    assert e.value.argument == name
    assert all(torch.equal(a, b) for a, b in zip(before, it.tensors(), strict=True))


@pytest.mark.parametrize("case", NO_PAIRS)
@pytest.mark.parametrize(("operation", "kind"), SERVED)
def test_what_is_no_pair_of_keys_and_values_is_refused(
    operation: str, kind: type[AttentionImpl], case: str
) -> None:
    it = stage(operation, kind)
    plan = it.impl.plan(it.batch, it.pages)
    refused_pair(it, case, lambda wrong: it.forward(plan, kv=wrong))
    plain = {name: None for name in ("out", "lse") if name in it.given}
    refused_pair(it, case, lambda wrong: it.forward(plan, kv=wrong, **plain))


@pytest.mark.parametrize("kind", (*PORTABLE, CpuAttnImpl))
def test_the_fix_that_a_stacked_tensor_is_told_works(kind: type[AttentionImpl]) -> None:
    it = stage("mha", kind)
    kv = torch.stack([it.given["k"], it.given["v"]])
    with pytest.raises(TensorError, match=r"\(kv\.unbind\(0\) is one\)$"):
        it.forward(kv=kv)
    expected = it.forward().clone()
    assert torch.equal(it.forward(kv=kv.unbind(0)), expected)
    # Of two heads and two parts none can be told from the other.
    with pytest.raises(TensorError, match=r"\[3, 2, 2, 16\]; expected a tuple \(k, v\)$"):
        it.forward(kv=torch.stack([it.given["k"], it.given["v"]], 1))


@pytest.mark.parametrize(
    ("change", "name"),
    [({"k": None}, "k"), ({"k": (1, 2)}, "k"), ({"v": [1.0]}, "v"), ({"v": None}, "v")],
)
@pytest.mark.parametrize("kind", (*PORTABLE, CpuAttnImpl))
def test_a_write_of_what_is_no_tensor_is_refused(
    kind: type[AttentionImpl], change: dict[str, Any], name: str
) -> None:
    it = stage("mha", kind)
    (wrong,) = change.values()
    says = f"is a {type(wrong).__name__}; expected a tensor"
    for where in (it.pages, it.impl.plan(it.batch, it.pages)):
        refused(it, name, says, lambda where=where: it.write(where=where, **change))


# Memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "kind"), SERVED)
def test_results_may_not_be_in_memory_that_the_call_reads(
    operation: str, kind: type[AttentionImpl]
) -> None:
    it = stage(operation, kind)
    form = it.impl.form
    shape, rows = it.given["out"].shape, it.given["out"].numel()
    inputs = {n: t for n, t in it.given.items() if n not in ("out", "lse")}
    if it.cache is not None and it.cache.k.dtype == torch.float32:
        inputs["cache.k"] = it.cache.k
    for other, tensor in inputs.items():
        if tensor.untyped_storage().nbytes() < 4 * rows:
            continue
        memory = tensor.new_empty(0).set_(tensor.untyped_storage()).view(torch.float32)
        out, lse = memory[:rows].view(shape), memory[: 3 * form.num_heads].view(3, -1)
        says = f"shares memory with {other}"
        for given in ({"out": out}, {"out": out, "lse": None}):
            refused(it, "out", says, lambda given=given: it.forward(**given))
        refused(it, "lse", says, lambda lse=lse: it.forward(lse=lse))
    out = it.given["out"]
    lse = out.view(-1)[: 3 * form.num_heads].view(3, -1)
    refused(it, "lse", "shares memory with out", lambda: it.forward(lse=lse))


@pytest.mark.parametrize("kind", (*PORTABLE, CpuAttnImpl))
def test_results_may_lie_between_the_inputs_of_a_fused_buffer(kind: type[AttentionImpl]) -> None:
    it = stage("mha", kind)
    expected = it.forward().clone()
    fused = torch.zeros(3, 4 + 2 + 2 + 4, 16)
    q, k, v, out = fused.split([4, 2, 2, 4], 1)
    for name, part in zip("qkv", (q, k, v), strict=True):
        part.copy_(it.given[name])
    assert torch.equal(it.forward(q=q, k=k, v=v, out=out), expected)
    one_head_late = fused[:, 1:5]
    with pytest.raises(TensorError, match="out shares memory with q"):
        it.forward(q=q, k=k, v=v, out=one_head_late)


def test_views_of_a_cache_may_share_nothing() -> None:
    spec = ReferenceImpl.create(layer(), "cpu").kv_cache_spec(BLOCK_SIZE)
    k = torch.zeros(spec.k_shape(4))
    with pytest.raises(TensorError, match=r"cache\.v shares memory with cache\.k"):
        KVCache(k=k, v=k, spec=spec)
    with pytest.raises(TensorError, match=r"cache\.v has elements that share memory"):
        KVCache(k=k, v=torch.zeros(1, *k.shape[1:]).expand_as(k), spec=spec)


# What is no tensor ----------------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "kind"), [s for s in SERVED if s[0] in ("mha", "mla")])
def test_plans_caches_and_tables_of_another_kind_are_refused(
    operation: str, kind: type[AttentionImpl]
) -> None:
    it = stage(operation, kind)
    assert it.cache is not None and it.pages is not None
    spec = it.cache.spec
    larger = Batch.from_lengths([4, 1], [20, 33])
    wide = PageTable.from_blocks(TABLE, larger, BLOCK_SIZE)
    plan = it.impl.plan(it.batch, it.pages)
    cases: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
        "plan of more rows": (
            lambda: it.forward(it.impl.plan(larger, wide)),
            TensorError,
            "k has shape [3, ",
        ),
        "no plan": (lambda: it.impl.forward(None, it.given["q"]), PlanMismatchError, "plan is a N"),  # type: ignore[call-overload]
        "no batch": (lambda: it.impl.plan([1, 2]), PlanMismatchError, "batch is a list"),  # type: ignore[arg-type]
        "no table": (
            lambda: it.impl.plan(it.batch, it.pages.block_table),  # type: ignore[arg-type, union-attr]
            PlanMismatchError,
            "pages is a Tensor; expected a PageTable",
        ),
        "no place": (lambda: it.write(where=None), PlanMismatchError, "where is a NoneType"),
        "a tuple for a cache": (
            lambda: it.forward(cache=it.cache.views),  # type: ignore[union-attr]
            PlanMismatchError,
            "cache is a tuple; expected a KVCache",
        ),
        "cache of other blocks": (
            lambda: it.forward(cache=KVCache.allocate(replace(spec, block_size=32), 9)),
            PlanMismatchError,
            "block_size 32, not 16",
        ),
        "cache of another encoding": (
            lambda: it.write(cache=KVCache.allocate(replace(spec, encoding="float16"), 9)),
            PlanMismatchError,
            "encoding float16, not float32",
        ),
        "cache of fewer blocks": (
            lambda: it.forward(cache=KVCache.allocate(spec, 3)),
            PlanMismatchError,
            "names block 7; the cache has 3",
        ),
        "cache on another device": (
            lambda: it.forward(cache=KVCache.allocate(spec, BLOCKS, "meta")),
            PlanMismatchError,
            "the cache is on meta; expected cpu",
        ),
        "workspace on another device": (
            lambda: it.impl.plan(it.batch, it.pages, workspace=Workspace("meta")),
            PlanMismatchError,
            "the workspace is on meta",
        ),
        "a batch past its bounds": (
            lambda: it.impl.update(
                it.impl.plan(
                    it.batch,
                    it.pages,
                    bounds=BatchBounds(max_reqs=2, max_tokens=3, max_query_len=2, max_seq_len=33),
                ),
                larger,
                wide,
            ),
            PlanMismatchError,
            "is 5; bounds.max_tokens is 3",
        ),
        "gradients": (
            lambda: it.forward(q=it.given["q"].clone().requires_grad_()),
            UnsupportedCallError,
            "computes no gradients",
        ),
        "gradients of keys to be written": (
            lambda: it.write(k=it.given["k"].clone().requires_grad_()),
            UnsupportedCallError,
            "computes no gradients",
        ),
        "gradients of the output": (
            lambda: it.forward(plan, out=it.given["out"].clone().requires_grad_()),
            UnsupportedCallError,
            "computes no gradients",
        ),
    }
    before = [tensor.clone() for tensor in it.tensors()]
    for what, (call, error, says) in cases.items():
        with pytest.raises(error) as caught:
            call()
        assert says in str(caught.value), what
    assert all(torch.equal(a, b) for a, b in zip(before, it.tensors(), strict=True))


@pytest.mark.parametrize(
    ("kind", "lens"), [(TorchSdpaImpl, LENS), (CpuAttnImpl, ([1], [4000]))], ids=["sdpa", "cpu"]
)
def test_a_workspace_that_is_too_small_is_refused_when_planning(
    kind: type[AttentionImpl], lens: tuple[list[int], list[int]]
) -> None:
    it = stage("mha", kind)
    batch = Batch.from_lengths(*lens)
    blocks = [list(range(-(-n // BLOCK_SIZE))) for n in lens[1]]
    pages = PageTable.from_blocks(blocks, batch, BLOCK_SIZE)
    with pytest.raises(WorkspaceTooSmallError, match=r"reserve\(\d+\) before planning"):
        it.impl.plan(batch, pages, workspace=Workspace("cpu", 64))


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([(2, 0, 1)], "spans names request 2; pages.block_table has 2"),
        ([(-1, 0, 1)], "spans names request -1"),
        ([(0, 0, 60)], "spans asks for keys 0 to 60 of request 0; its row of pages.block_table "),
        ([(0, -1, 3)], "spans asks for keys -1 to 3"),
        ([(0, 5, 3)], "spans asks for keys 5 to 3"),
        ([(0, 33, 40)], "pages.block_table names block -1 in the row of request 0"),
    ],
)
@pytest.mark.parametrize("kind", PORTABLE)
def test_a_gather_of_keys_that_are_not_there_is_refused(
    kind: type[AttentionImpl], spans: list[tuple[int, int, int]], says: str
) -> None:
    it = stage("mha", kind)
    assert it.cache is not None and it.pages is not None
    assert len(it.impl.gather_kv(it.cache, it.pages, [(0, 3, 20), (1, 32, 33)])[0]) == 18
    with pytest.raises(ConfigError) as caught:
        it.impl.gather_kv(it.cache, it.pages, spans)
    assert says in str(caught.value)


# Values, when asked to look at them -----------------------------------------------------------


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG_VALUES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "offsets that go back": (
        {"query_start_loc": ints(0, 2, 1)},
        {},
        "batch.query_start_loc decreases at request 1, from 2 to 1",
    ),
    "offsets that begin late": ({"query_start_loc": ints(1, 2, 3)}, {}, "starts at 1; expected 0"),
    "offsets past the rows": ({"query_start_loc": ints(0, 2, 9)}, {}, "ends at 9; num_tokens is 3"),
    "a sequence shorter than its query": (
        {"seq_lens": ints(1, 33)},
        {},
        "request 0 has seq_len 1, fewer than its 2 query rows",
    ),
    "a negative length": ({"seq_lens": ints(20, -4)}, {}, "request 1 has seq_len -4"),
    "a sequence past the bound": (
        {"seq_lens": ints(20, 34)},
        {},
        "request 1 has seq_len 34; it takes 0 to max_seq_len (33)",
    ),
    "a query past the bound": (
        {"max_query_len": 1},
        {},
        "request 0 has 2 query rows; max_query_len is 1",
    ),
    "a promise of too many": ({"num_decode_reqs": 3}, {}, "num_decode_reqs is 3"),
    "a negative block": (
        {},
        {"block_table": torch.tensor([[4, 1, -1], [0, -7, 3]], dtype=torch.int32)},
        "pages.block_table[1, 1] is -7; it takes 0 to the cache's last",
    ),
    "a slot twice": (
        {},
        {"slot_mapping": torch.tensor([5, 90, 5])},
        "pages.slot_mapping names a slot twice: 5, for tokens 0 and 2",
    ),
    "a table that rolled too far": (
        {},
        {"first_block": ints(0, 1)},
        "request 1 sees block 0; pages.first_block[1] is 1",
    ),
    "a table that rolled back": ({}, {"first_block": ints(-1, 0)}, "pages.first_block[0] is -1"),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
@pytest.mark.parametrize("kind", (*PORTABLE, CpuAttnImpl))
def test_a_validating_plan_names_request_and_value(kind: type[AttentionImpl], case: str) -> None:
    in_batch, in_pages, says = WRONG_VALUES[case]
    it = stage("mha", kind)
    assert it.pages is not None
    it.impl.plan(it.batch, it.pages, validate=True)
    batch = it.batch.replace(query_start_loc_host=None, seq_lens_host=None, **in_batch)
    with pytest.raises(ConfigError) as caught:
        it.impl.plan(batch, replace(it.pages, **in_pages), validate=True)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("in_pages", "says"),
    [
        (
            {"block_table": torch.tensor([[4, 1, -1], [0, 99, 3]], dtype=torch.int32)},
            "block 99",
        ),
        ({"slot_mapping": torch.tensor([5, 6, 144])}, "144; the cache has 144"),
    ],
)
@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("kind", (*PORTABLE, CpuAttnImpl))
def test_ids_past_the_cache_are_found_before_the_call_that_brings_it_writes(
    kind: type[AttentionImpl], validate: bool, in_pages: dict[str, Any], says: str
) -> None:
    it = stage("mha", kind)
    assert it.pages is not None
    plan = it.impl.plan(it.batch, replace(it.pages, **in_pages), validate=validate)
    before = [tensor.clone() for tensor in it.tensors()]
    with pytest.raises(AttnplatError) as caught:
        it.forward(plan)
    assert says in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, it.tensors(), strict=True))
