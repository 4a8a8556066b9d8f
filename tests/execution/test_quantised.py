"""A cache of codes is read as what its codec decodes, whatever layout, block size and backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, BatchBounds, PageTable
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.formats.facts import FORMATS, format_of
from attnplat.backends.formats.pages import Pages, PageShape
from attnplat.backends.formats.rows import decode_rows, encode_rows
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache, KVCacheSpec
from attnplat.backends.workspace import Workspace
from attnplat.config.layer import MlaConfig, SparseMlaConfig
from attnplat.config.names import Dtype, Feature
from attnplat.errors import ConfigError, PlanMismatchError, UnsupportedCallError
from tests.execution.cases import IMPLS, TOLERANCE, Step, layer, make_step, relative_error, run

CALLER = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")
INLINE = ("int8_th", "fp8_th", "fp8_th_fnuz", "int4_th")
APART = ("nvfp4", "mxfp4", "mxfp8")
LATENT = ("mla_fp8_656", "mla_nvfp4_352", "mla_fp8_584", "mla_fp8_528")

SERVED = [
    *((name, encoding) for name in IMPLS for encoding in (*CALLER, *INLINE)),
    *(("REFERENCE", encoding) for encoding in APART),
]
served = pytest.mark.parametrize(("name", "encoding"), SERVED)


@dataclass
class Coded:
    """A step whose cache holds codes: garbage everywhere but at its live tokens."""

    step: Step
    impl: AttentionImpl
    cache: KVCache
    pages: PageTable
    scales: dict[str, torch.Tensor]

    def run(self, **extra: Any) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self.impl.plan(self.step.batch, self.pages, validate=True)
        given = {**self.step.options, **self.scales}
        return self.impl.forward(plan, self.step.q, self.cache, **given, return_lse=True, **extra)

    def decoded(self) -> Step:
        """The same step with the keys and values that the codec makes of its own."""
        format = format_of(self.impl.encoding)

        def through(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
            rows = encode_rows(format, x, scale=scale)
            return decode_rows(format, rows, size=x.shape[-1], scale=scale, dtype=torch.float32).to(
                x.dtype
            )

        step, scales = self.step, self.scales
        return replace(
            step,
            k=[through(k, scales.get("k_scale")) for k in step.k],
            v=[through(v, scales.get("v_scale")) for v in step.v],
        )


def coded(
    name: str,
    encoding: str,
    step: Step,
    *,
    block_size: int = 16,
    layout: str = "HND",
    cache: KVCache | None = None,
    **scales: torch.Tensor,
) -> Coded:
    impl = IMPLS[name].create(step.config, "cpu", encoding=encoding)
    lens = step.batch.seq_lens.tolist()
    counts = [-(-n // block_size) for n in lens]
    ids = list(range(sum(counts) + 2))
    blocks = [[ids.pop() for _ in range(count)] for count in counts]
    if cache is None:
        cache = KVCache.allocate(impl.kv_cache_spec(block_size, layout), sum(counts) + 2)
    for plane in (cache.k, cache.v, cache.k_scales, cache.v_scales):
        if plane is not None:
            plane.fill_(0xFF)
    everything = PageTable.from_blocks(blocks, step.batch, block_size, write="all")
    impl.write_kv(cache, torch.cat(step.k), torch.cat(step.v), everything, **scales)
    pages = PageTable.from_blocks(blocks, step.batch, block_size, write="none")
    return Coded(step, impl, cache, pages, scales)


def small(**changes: Any) -> Step:
    wants = {"head_size": 32, "num_heads": 4, "num_kv_heads": 2, **changes}
    return make_step(layer(**wants), [3, 1, 2], [9, 33, 2], seed=3)


def two(low: float = 0.25, high: float = 2.0) -> torch.Tensor:
    return torch.tensor([low, high])


@served
@pytest.mark.parametrize("layout", ["HND", "NHD", "BLHNC"])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_attention_reads_what_the_codec_decodes(
    name: str, encoding: str, layout: str, block_size: int
) -> None:
    found = coded(name, encoding, small(), block_size=block_size, layout=layout)
    out, lse = found.run()
    want, want_lse = run("REFERENCE", found.decoded())
    assert relative_error(out, want, found.step.batch) < TOLERANCE[Dtype.FLOAT32]
    torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=1e-6)


@served
def test_half_precision_layers_read_codes_too(name: str, encoding: str) -> None:
    found = coded(name, encoding, small(dtype="bfloat16"))
    want = run("REFERENCE", found.decoded())[0]
    assert relative_error(found.run()[0], want, found.step.batch) < TOLERANCE[Dtype.BFLOAT16]


@served
def test_layouts_and_block_sizes_give_the_same_bits(name: str, encoding: str) -> None:
    step = small()
    one = coded(name, encoding, step, layout="HND").run()
    other = coded(name, encoding, step, layout="NHD").run()
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("encoding", CALLER)
def test_the_caller_s_scales_divide_on_write_and_multiply_on_read(name: str, encoding: str) -> None:
    step = small(per_head_quant_scales=True)
    # Keys far beyond what codes reach without a scale; k's and v's scales differ.
    step = replace(step, k=[k * 3000 for k in step.k], q=step.q / 3000)
    for k_scale, v_scale in (
        (torch.tensor([64.0]), torch.tensor([0.125])),
        (two(64.0, 256.0), two(0.125, 0.5)),
    ):
        found = coded(name, encoding, step, k_scale=k_scale, v_scale=v_scale)
        want = run("REFERENCE", found.decoded())[0]
        plain = run("REFERENCE", step)[0]
        assert relative_error(found.run()[0], want, step.batch) < TOLERANCE[Dtype.FLOAT32]
        assert relative_error(want, plain, step.batch) < 0.3


@pytest.mark.parametrize("name", IMPLS)
def test_writing_with_the_call_is_writing_before_it(name: str) -> None:
    step = small()
    found = coded(name, "fp8_e4m3fn", step, k_scale=two()[:1], v_scale=two()[1:])
    pages = replace(found.pages, slot_mapping=torch.arange(6) + 16)
    new = (torch.randn(6, 2, 32), torch.randn(6, 2, 32))
    plan = found.impl.plan(step.batch, pages)
    other = KVCache(k=found.cache.k.clone(), v=found.cache.v.clone(), spec=found.cache.spec)
    fused = found.impl.forward(plan, step.q, found.cache, kv=new, **found.scales)
    found.impl.write_kv(other, *new, plan, **found.scales)
    assert torch.equal(found.cache.k, other.k) and torch.equal(found.cache.v, other.v)
    apart = found.impl.forward(plan, step.q, other, **found.scales)
    assert torch.equal(fused, apart)


@served
def test_a_write_touches_its_slots_only(name: str, encoding: str) -> None:
    step = small()
    found = coded(name, encoding, step)
    views = [v for v in (found.cache.k, found.cache.v, found.cache.k_scales) if v is not None]
    before = [view.clone() for view in views]
    slots = torch.tensor([3, -1, 5])
    pages = replace(found.pages, slot_mapping=slots)
    new = torch.randn(3, 2, 32)
    new[1] = float("nan")
    found.impl.write_kv(found.cache, new, new, pages)
    for view, old in zip(views, before, strict=True):
        assert not torch.equal(view[0, :, [3, 5]], old[0, :, [3, 5]])
        view[0, :, [3, 5]] = old[0, :, [3, 5]]
        assert torch.equal(view, old)


@served
def test_gathered_tokens_are_decoded(name: str, encoding: str) -> None:
    found = coded(name, encoding, small())
    k, v = found.impl.gather_kv(found.cache, found.pages, [(1, 4, 20), (0, 0, 9)])
    want = found.decoded()
    torch.testing.assert_close(k, torch.cat([want.k[1][4:20], want.k[0]]))
    torch.testing.assert_close(v, torch.cat([want.v[1][4:20], want.v[0]]))


def test_a_nan_key_is_its_own_token_s_trouble() -> None:
    step = make_step(layer(head_size=32), [1, 1], [9, 9], seed=3)
    step.k[0][4] = float("nan")
    for encoding in ("fp8_e4m3fn", "fp8_th", "mxfp8"):
        out = coded("REFERENCE", encoding, step).run()[0]
        assert out[0].isnan().all() and out[1].isfinite().all()


def test_both_forms_of_e4m3_come_from_the_encoding_and_not_the_machine() -> None:
    step = small()
    fn = coded("REFERENCE", "fp8_e4m3fn", step)
    fnuz = coded("REFERENCE", "fp8_e4m3fnuz", step)
    assert not torch.equal(fn.cache.k, fnuz.cache.k)
    assert relative_error(fn.run()[0], fnuz.run()[0], step.batch) < 0.1


def test_the_user_s_word_is_enough_on_a_device() -> None:
    config = layer(head_size=32, kv_cache_dtype="fp8")
    for impl in IMPLS.values():
        assert impl.create(config, "cpu").encoding is Encoding.FP8_E4M3FN


# Latent rows ---------------------------------------------------------------------------------


def latent(encoding: str, kind: type[MlaConfig] = MlaConfig, **changes: Any) -> MlaConfig:
    size = format_of(encoding).size or 576
    wants: dict[str, Any] = {
        "head_size": size,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": size - 512,
        "num_heads": 3,
        "scale": 0.07,
        "dtype": "float32",
        "also_needs": frozenset({Feature.LSE}),
    }
    return kind(**{**wants, **changes})


def latent_step(config: MlaConfig) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(5)
    batch = Batch.from_lengths([2, 1], [20, 5])
    q = torch.randn(3, 3, config.head_size, generator=gen)
    return batch, q, torch.randn(25, 1, config.head_size, generator=gen)


@pytest.mark.parametrize("encoding", [*LATENT, "fp8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("sparse", [False, True])
def test_latent_rows_hold_keys_and_values(encoding: str, sparse: bool) -> None:
    config = latent(encoding)
    if sparse:
        config = latent(encoding, SparseMlaConfig, index_topk=4)
    batch, q, rows = latent_step(config)
    impl = IMPLS["REFERENCE"].create(config, "cpu", encoding=encoding)
    cache = KVCache.allocate(impl.kv_cache_spec(8), 4)
    pages = PageTable.from_blocks([[2, 0, 3], [1]], batch, 8, write="all")
    impl.write_kv(cache, rows, None, pages)
    topk = torch.tensor([[0, -1, 7, 18], [19, 3, 2, -1], [4, 0, -1, -1]], dtype=torch.int32)
    given = {"topk_indices": topk} if sparse else {}
    pages = PageTable.from_blocks([[2, 0, 3], [1]], batch, 8, write="none")
    out = impl.forward(impl.plan(batch, pages), q, cache, **given)
    format = format_of(encoding)
    decoded = decode_rows(format, encode_rows(format, rows), size=config.head_size)
    plain = IMPLS["REFERENCE"].create(config, "cpu")
    want = plain.forward(plain.plan(batch), q, kv=(decoded, None), **given)
    assert relative_error(out, want, batch) < TOLERANCE[Dtype.FLOAT32]


def test_sdpa_reads_latent_rows_whose_scales_are_inside() -> None:
    config = latent("mla_fp8_656")
    batch, q, rows = latent_step(config)
    outs = []
    for kind in IMPLS.values():
        impl = kind.create(config, "cpu", encoding="mla_fp8_656")
        cache = KVCache.allocate(impl.kv_cache_spec(8), 4)
        pages = PageTable.from_blocks([[2, 0, 3], [1]], batch, 8, write="all")
        impl.write_kv(cache, rows, None, pages)
        pages = PageTable.from_blocks([[2, 0, 3], [1]], batch, 8, write="none")
        outs.append(impl.forward(impl.plan(batch, pages), q, cache))
    assert relative_error(outs[1], outs[0], batch) < TOLERANCE[Dtype.FLOAT32]


# Sizes and refusals --------------------------------------------------------------------------


def spec(encoding: str, **changes: Any) -> KVCacheSpec:
    format = format_of(encoding)
    size = format.size or 64
    wants: dict[str, Any] = {
        "encoding": encoding,
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": size,
        "v_head_size": size if not format.latent else 512,
        "values_in_keys": format.latent,
    }
    return KVCacheSpec(**{**wants, **changes})


@pytest.mark.parametrize("encoding", [e for e, f in FORMATS.items() if not f.keys_only])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_a_cache_takes_the_bytes_of_its_format(encoding: str, tokens_first: bool) -> None:
    format, wants = format_of(encoding), spec(encoding)
    shape = PageShape(
        format=format,
        block_size=16,
        num_kv_heads=1,
        head_size=wants.head_size,
        v_head_size=wants.v_head_size,
        tokens_first=tokens_first,
    )
    assert wants.bytes_per_block == shape.page_bytes
    pages = Pages.allocate(shape, 3)
    cache = KVCache.from_pages(pages)
    assert cache.num_blocks == 3 and cache.k.data_ptr() == pages.pool.data_ptr()
    assert replace(cache.spec, layout="NHD") == replace(wants, layout="NHD")
    views = [v for v in (cache.k, cache.v, cache.k_scales, cache.v_scales) if v is not None]
    allocated = KVCache.allocate(cache.spec, 3)
    others = (allocated.k, allocated.v, allocated.k_scales, allocated.v_scales)
    assert [v.shape for v in views] == [v.shape for v in others if v is not None]


def test_a_cache_in_pages_is_the_pages() -> None:
    shape = PageShape(format=format_of("nvfp4"), block_size=16, num_kv_heads=2, head_size=32)
    step = small()
    in_pages = KVCache.from_pages(Pages.allocate(shape, 8))
    one = coded("REFERENCE", "nvfp4", step, cache=in_pages).run()[0]
    assert torch.equal(one, coded("REFERENCE", "nvfp4", step).run()[0])


@pytest.mark.parametrize(
    ("encoding", "changes", "says"),
    [
        ("nvfp4", {"head_size": 40}, "multiple of 16 elements; this one has 40"),
        ("mxfp8", {"v_head_size": 48}, "multiple of 32 elements; this one has 48"),
        ("mla_fp8_656", {"head_size": 512}, "rows of 576 elements; this one has 512"),
        ("mla_fp8_656", {"values_in_keys": False}, r"latent rows \(values in the keys\)"),
        ("mla_fp8_656", {"num_kv_heads": 2}, "exactly 1 KV head"),
        ("index_fp8_132", {}, "stores index keys"),
    ],
)
def test_sizes_that_a_format_cannot_store_are_refused(
    encoding: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        spec(encoding, **changes)


def test_views_that_the_format_does_not_have_are_refused() -> None:
    made = KVCache.allocate(spec("nvfp4"), 2)
    with pytest.raises(PlanMismatchError, match=r"cache\.k_scales is a NoneType"):
        KVCache(k=made.k, v=made.v, v_scales=made.v_scales, spec=made.spec)
    eight = KVCache.allocate(spec("int8_th"), 2)
    with pytest.raises(PlanMismatchError, match=r"cache\.k_scales is given; int8_th has no such"):
        KVCache(k=eight.k, v=eight.v, k_scales=made.k_scales, spec=eight.spec)
    rows = KVCache.allocate(spec("mla_fp8_656"), 2)
    with pytest.raises(PlanMismatchError, match=r"cache\.v is given"):
        KVCache(k=rows.k, v=rows.k, spec=rows.spec)


Refusal = tuple[str, dict[str, Any], dict[str, torch.Tensor], type[Exception], str]
ONE = torch.ones(1)
REFUSALS: tuple[Refusal, ...] = (
    ("int8_th", {}, {"k_scale": ONE}, UnsupportedCallError, "k_scale is given and int8_th takes"),
    ("float32", {}, {"v_scale": ONE}, UnsupportedCallError, "v_scale is given and float32 takes"),
    ("fp8_e4m3fn", {}, {"k_scale": two()}, UnsupportedCallError, "declare per_head_quant_scales"),
    (
        "fp8_e4m3fn",
        {"per_head_quant_scales": True},
        {"k_scale": torch.ones(4)},
        PlanMismatchError,
        r"k_scale has shape \[4\]; expected \[1\] or \[2\]",
    ),
    ("fp8_e4m3fn", {}, {"v_scale": ONE.half()}, PlanMismatchError, "v_scale has dtype"),
)


@pytest.mark.parametrize(("encoding", "changes", "scales", "error", "says"), REFUSALS)
def test_scales_that_do_not_fit_are_refused_before_anything_is_written(
    encoding: str,
    changes: dict[str, Any],
    scales: dict[str, torch.Tensor],
    error: type[Exception],
    says: str,
) -> None:
    step = small(**changes)
    found = coded("REFERENCE", encoding, step)
    before = found.cache.k.clone()
    plan = found.impl.plan(step.batch, replace(found.pages, slot_mapping=torch.arange(6)))
    new = (torch.randn(6, 2, 32), torch.randn(6, 2, 32))
    out = torch.full((6, 4, 32), 7.0)
    with pytest.raises(error, match=says):
        found.impl.forward(plan, step.q, found.cache, kv=new, out=out, **scales)
    with pytest.raises(error, match=says):
        found.impl.write_kv(found.cache, *new, plan, **scales)
    with pytest.raises(error, match=says):
        found.impl.gather_kv(found.cache, found.pages, [(0, 0, 1)], **scales)
    assert torch.equal(found.cache.k, before) and bool((out == 7).all())


def test_scales_without_a_cache_or_of_values_inside_keys_are_refused() -> None:
    step = small()
    impl = IMPLS["REFERENCE"].create(step.config, "cpu", encoding="fp8_e4m3fn")
    with pytest.raises(UnsupportedCallError, match="the plan has no pages"):
        impl.forward(impl.plan(step.batch), step.q, kv=step.packed(), k_scale=ONE)
    config = latent("fp8_e4m3fn")
    batch, q, _ = latent_step(config)
    mla = IMPLS["REFERENCE"].create(config, "cpu", encoding="fp8_e4m3fn")
    cache = KVCache.allocate(mla.kv_cache_spec(8), 4)
    pages = PageTable.from_blocks([[2, 0, 3], [1]], batch, 8, write="none")
    with pytest.raises(UnsupportedCallError, match="values are inside k: k_scale is theirs"):
        mla.forward(mla.plan(batch, pages), q, cache, v_scale=ONE)


def test_sdpa_leaves_scales_apart_to_others() -> None:
    with pytest.raises(ConfigError, match=r"TORCH_SDPA stores .*; the cache's encoding is nvfp4"):
        IMPLS["TORCH_SDPA"].create(layer(head_size=32), "cpu", encoding="nvfp4")


@pytest.mark.parametrize("name", IMPLS)
def test_keys_that_come_with_the_call_are_taken_as_they_are(name: str) -> None:
    step = small()
    outs = []
    for encoding in ("fp8_e4m3fn", "int4_th", "float32"):
        impl = IMPLS[name].create(step.config, "cpu", encoding=encoding)
        outs.append(impl.forward(impl.plan(step.batch), step.q, kv=step.packed()))
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("encoding", ["int8_th", "fp8_e4m3fn", "float32"])
def test_a_workspace_of_the_advertised_size_does(encoding: str) -> None:
    # The smallest heads, whose rows are longest for their elements.
    step = small(head_size=1, v_head_size=2)
    found = coded("TORCH_SDPA", encoding, step) if encoding != "float32" else None
    impl = IMPLS["TORCH_SDPA"].create(step.config, "cpu", encoding=encoding)
    bounds = BatchBounds(max_reqs=3, max_tokens=6, max_query_len=3, max_seq_len=33)
    pages = found.pages if found else step.paged().pages
    workspace = Workspace("cpu", impl.workspace_bytes(bounds))
    impl.plan(step.batch, pages, workspace=workspace, bounds=bounds)
