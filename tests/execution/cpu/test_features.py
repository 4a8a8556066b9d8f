"""CPU_ATTN gives what float64 gives: every feature, dtype, head size and cache, on every ISA."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplat.config.names import Feature
from attnplat.platforms.cpu.impls.features import CPU_FEATURES
from tests.execution.cases import assert_close, layer, make_step, run
from tests.execution.cpu.steps import FEATURES, ISAS, LENGTHS, attend, batch_masks, lse
from tests.execution.cpu.steps import needs_library as pytestmark  # noqa: F401

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_feature_over_pages_of_which_all_that_is_unread_is_nan(
    isa: str, feature: str, lengths: str
) -> None:
    dtype = DTYPES[(len(feature) + len(lengths)) % 3]
    step = make_step(layer(**{**FEATURES[feature], "dtype": dtype}), *LENGTHS[lengths])
    paged = step.paged(16, "HND")
    assert_close(attend(step, isa, paged), run("REFERENCE", step, paged), step)


@pytest.mark.parametrize("mask", ["causal by request", "ranges", "prefix lengths", "tree"])
@pytest.mark.parametrize("window", [(-1, -1), (9, 0)])
@pytest.mark.parametrize("isa", ISAS)
def test_every_mask_that_a_batch_carries(isa: str, mask: str, window: tuple[int, int]) -> None:
    query_lens, seq_lens = LENGTHS["mixed"]
    feature, fields = batch_masks(query_lens)[mask]
    config = layer(**lse(feature, sliding_window=window))
    step = make_step(config, query_lens, seq_lens, **fields)
    paged = step.paged(16, "NHD")
    assert_close(attend(step, isa, paged), run("REFERENCE", step, paged), step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [32, 36, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512])
@pytest.mark.parametrize("isa", ISAS)
def test_every_head_size(isa: str, head_size: int, dtype: str) -> None:
    step = make_step(layer(head_size=head_size, dtype=dtype), [1, 20], [90, 30])
    paged = step.paged(32, "HND")
    assert_close(attend(step, isa, paged), run("REFERENCE", step, paged), step)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 24, 40, 71])
@pytest.mark.parametrize("isa", ISAS)
def test_every_group_size_for_single_tokens_and_prompts(isa: str, group: int) -> None:
    config = layer(num_heads=2 * group, dtype="bfloat16", head_size=32)
    step = make_step(config, [1, 11], [77, 11])
    paged = step.paged(16, "HND")
    assert_close(attend(step, isa, paged), run("REFERENCE", step, paged), step)


@pytest.mark.parametrize("layout", ["HND", "NHD", "BHLNC"])
@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 24, 32, 64, 128, 256, 528])
@pytest.mark.parametrize("isa", ISAS)
def test_every_block_size_and_layout(isa: str, block_size: int, layout: str) -> None:
    for edge in (-1, 0, 1):
        seq_len = max(2 * block_size, 64) + edge
        step = make_step(layer(dtype="bfloat16"), [1, 3], [seq_len, seq_len])
        paged = step.paged(block_size, layout)
        assert_close(attend(step, isa, paged), run("REFERENCE", step, paged), step)


@pytest.mark.parametrize("encoding", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_a_cache_of_another_plain_dtype_than_the_layer(isa: str, dtype: str, encoding: str) -> None:
    config = layer(dtype=dtype, kv_cache_dtype=encoding)
    step = make_step(config, [1, 19], [65, 19])
    stored = getattr(torch, encoding)
    step = replace(step, k=[k.to(stored) for k in step.k], v=[v.to(stored) for v in step.v])
    paged = step.paged(16, "HND")
    assert_close(attend(step, isa, paged), run("REFERENCE", step, paged), step)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("isa", ISAS)
def test_keys_and_values_that_come_with_the_call(isa: str, lengths: str) -> None:
    step = make_step(layer(dtype="bfloat16"), *LENGTHS[lengths])
    assert_close(attend(step, isa), run("REFERENCE", step), step)


@pytest.mark.parametrize("isa", ISAS)
def test_cross_attention_with_more_and_fewer_queries_than_keys_and_none(isa: str) -> None:
    config = layer(attn_type="encoder_decoder", sinks=True)
    step = make_step(config, [5, 3, 7], [2, 70, 0])
    paged = step.paged(16, "HND")
    out, found = attend(step, isa, paged)
    assert_close((out, found), run("REFERENCE", step, paged), step)
    assert torch.equal(out[8:], torch.zeros_like(out[8:]))
    assert torch.equal(found[8:], step.options["sinks"].expand(7, -1))


@pytest.mark.parametrize("isa", ISAS)
def test_an_encoder_without_a_cache(isa: str) -> None:
    step = make_step(layer(attn_type="encoder_only", sliding_window=(4, 6)), [50, 1, 9])
    assert_close(attend(step, isa), run("REFERENCE", step), step)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_that_sees_no_key_gives_zero_and_minus_infinity(isa: str) -> None:
    config = layer(attn_type="encoder_decoder", sliding_window=(0, 0))
    step = make_step(config, [1, 8], [0, 3])
    paged = step.paged(16, "HND")
    out, found = attend(step, isa, paged)
    # The second request's queries stand at -5 to 2, so that only the last three see a key.
    assert torch.equal(out[:6], torch.zeros_like(out[:6]))
    assert bool((found[:6] == -torch.inf).all())
    assert bool((found[6:] > -torch.inf).all())


@pytest.mark.parametrize("isa", ISAS)
def test_the_first_token_is_its_value_exactly(isa: str) -> None:
    step = make_step(layer(dtype="bfloat16", num_kv_heads=4), [1], [1])
    out, _ = attend(step, isa, step.paged())
    assert torch.equal(out, step.v[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("logits", [-3e38, -1e4, 1e4, 1.5e38])
def test_logits_far_from_zero_overflow_nowhere(isa: str, logits: float) -> None:
    step = make_step(layer(num_heads=2, scale=1.0), [1], [100])
    step.q.fill_(0)
    step.q[..., 0] = 1
    step.k[0][..., 0] = logits
    out, found = attend(step, isa, step.paged())
    want, want_lse = run("REFERENCE", step, step.paged())
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, want_lse, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("position", [0, 1, 15, 16, 63, 64, 127, 511, 512, 1023, 1024, 1099])
def test_a_needle_is_found_exactly_at_every_edge(isa: str, position: int) -> None:
    step = make_step(layer(num_heads=4, dtype="bfloat16"), [1], [1100])
    step.q.fill_(0)
    step.q[..., 0] = 16
    step.k[0].fill_(0)
    step.k[0][position, :, 0] = 16
    out, _ = attend(step, isa, step.paged())
    assert torch.equal(out[0], step.v[0][position].repeat_interleave(2, 0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("keys", [64, 512, 2048])
def test_equal_logits_give_the_mean_and_the_logarithm_of_their_number(isa: str, keys: int) -> None:
    step = make_step(layer(num_heads=2, num_kv_heads=1, dtype="bfloat16"), [1], [keys])
    step.q.fill_(0)
    step.v[0].copy_((torch.arange(keys) % 4)[:, None, None].expand_as(step.v[0]))
    out, found = attend(step, isa, step.paged())
    assert torch.equal(out, torch.full_like(out, 1.5))
    torch.testing.assert_close(found, torch.full_like(found, keys).log(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_what_lies_outside_the_window_may_be_gone(isa: str) -> None:
    step = make_step(layer(sliding_window=(20, 0), dtype="bfloat16"), [1, 2], [200, 130])
    paged = step.paged(16, "HND")
    want = run("REFERENCE", step, paged)
    table = paged.pages.block_table.clone()
    table[0, : (199 - 20) // 16] = -1
    table[1, : (128 - 20) // 16] = -7
    for row, count in ((0, 13), (1, 9)):
        table[row, count:] = 1 << 30
    object.__setattr__(paged.pages, "block_table", table)
    impl_out = attend_without_validation(step, isa, paged)
    assert_close(impl_out, want, step)


def attend_without_validation(step, isa, paged):  # type: ignore[no-untyped-def]
    """As `attend`, without looking at block ids beforehand."""
    from attnplat.platforms.cpu.impls.attention import CpuAttnImpl
    from tests.execution.cases import run_plan

    impl = CpuAttnImpl.create(step.config, "cpu", isa=isa)
    return run_plan(impl, impl.plan(step.batch, paged.pages), step, paged)


@pytest.mark.parametrize("isa", ISAS)
def test_a_number_that_is_none_is_not_lost(isa: str) -> None:
    step = make_step(layer(num_heads=2, num_kv_heads=2), [1, 1], [1, 40])
    step.k[0][0, 0, 3] = float("nan")
    step.v[1][7, 1, 2] = float("inf")
    out, _ = attend(step, isa, step.paged())
    assert bool(out[0, 0].isnan().all())
    assert bool(out[0, 1].isfinite().all())
    assert out[1, 1, 2] == float("inf")


def test_every_feature_of_the_backend_is_run_by_a_case() -> None:
    by_batch = {feature for feature, _ in batch_masks([1, 2]).values()}
    run_here = {Feature(f) for changes in FEATURES.values() for f in layer(**changes).needs}
    elsewhere = {
        Feature.RSWA,  # prefix lengths by another name
        Feature.PER_HEAD_QUANT_SCALES,  # test_quantised.py
        Feature.DETERMINISTIC,  # test_bits.py
        Feature.BATCH_INVARIANCE,
        Feature.KV_CONNECTOR,  # a plain named layout
        Feature.ADAPTIVE_VERIFICATION,  # ragged lengths
    }
    assert CPU_FEATURES - run_here - by_batch == elsewhere
