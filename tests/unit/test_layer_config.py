"""Layer configs: values are checked, names normalised, and needs derived."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplat.config.layer import (
    BlockSparseConfig,
    IndexerConfig,
    MhaConfig,
    MlaConfig,
    SparseMlaConfig,
    StateConfig,
)
from attnplat.config.names import Feature, LayerKind, parse_dtype
from attnplat.config.run import RunContext
from attnplat.config.serial import layer_from_dict
from attnplat.errors import AttnplatError, ConfigError


class FakeTorchDtype:
    """Prints as torch's dtypes do, which is all that is read of them."""

    def __str__(self):
        return "torch.bfloat16"


@pytest.mark.parametrize(
    "spelling", ["bfloat16", "bf16", "BFloat16", "torch.bfloat16", FakeTorchDtype()]
)
def test_dtype_spellings(spelling):
    assert parse_dtype(spelling) == "bfloat16"
    assert MhaConfig(head_size=64, dtype=spelling).dtype == "bfloat16"


REFUSED = [
    (dict(head_size=0), "head_size is 0"),
    (dict(head_size=-8), "head_size is -8"),
    (dict(head_size=2**40), "integer from 1"),
    (dict(head_size=64.0), "head_size is 64.0"),
    (dict(head_size=True), "head_size is True"),
    (dict(head_size=64, dtype="int8"), "unknown dtype"),
    (dict(head_size=64, dtype="bfloat61"), "did you mean 'bfloat16'"),
    (dict(head_size=64, kv_cache_dtype="fp8_e4m4"), "did you mean 'fp8_e4m3'"),
    (dict(head_size=64, block_size=0), "block_size is 0"),
    (
        dict(head_size=64, num_heads=5, num_kv_heads=2),
        r"num_heads is 5.*multiple of num_kv_heads \(2\)",
    ),
    (dict(head_size=64, scale=math.nan), "finite"),
    (dict(head_size=64, logits_soft_cap=0.0), "above 0, or None for off"),
    (dict(head_size=64, logits_soft_cap=-1), "above 0"),
    (dict(head_size=64, logits_soft_cap=math.nan), "above 0"),
    (dict(head_size=64, sliding_window=4096), r"is \(W - 1, -1\)"),
    (dict(head_size=64, sliding_window=(-2, 0)), "at least -1"),
    (dict(head_size=64, sliding_window=(1, 2, 3)), "pair"),
    (dict(head_size=64, sliding_window=(True, -1)), "of integers"),
    (dict(head_size=64, sliding_window=(127.0, -1)), "of integers"),
    (dict(head_size=64, attn_type="decodr"), "did you mean 'decoder'"),
    (dict(head_size=64, also_needs={"sink"}), "did you mean 'sinks'"),
    (dict(head_size=64, chunk_size=-1), "chunk_size is -1"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_bad_value_is_refused_with_what_is_allowed(values, message):
    with pytest.raises(ConfigError, match=message):
        MhaConfig(**values)


NEEDS = [
    ({}, set()),
    (dict(sliding_window=(63, -1)), {Feature.SLIDING_WINDOW}),
    (dict(logits_soft_cap=50), {Feature.LOGITS_SOFT_CAP}),
    (dict(sinks=True, alibi=True), {Feature.SINKS, Feature.ALIBI}),
    (dict(causal=False), {Feature.NON_CAUSAL}),
    (dict(attn_type="encoder_only"), set()),
    (dict(v_head_size=64), set()),
    (dict(v_head_size=32), {Feature.V_HEAD_SIZE}),
    (dict(topk=16), {Feature.TOPK}),
    (dict(also_needs={"lse"}), {Feature.LSE}),
]


@pytest.mark.parametrize(("values", "needs"), NEEDS)
def test_needs_follow_from_the_fields(values, needs):
    assert MhaConfig(head_size=64, **values).needs == needs


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (MhaConfig(head_size=64), LayerKind.FULL_ATTENTION),
        (MhaConfig(head_size=64, sliding_window=(3, -1)), LayerKind.SLIDING_WINDOW),
        (MhaConfig(head_size=64, chunk_size=8192), LayerKind.CHUNKED_LOCAL_ATTENTION),
        (
            MhaConfig(head_size=64, attn_type="encoder", sliding_window=(3, 3)),
            LayerKind.SLIDING_WINDOW,
        ),
        (
            MhaConfig(head_size=64, attn_type="encoder_only", sliding_window=(3, 3)),
            LayerKind.ENCODER_ONLY_ATTENTION,
        ),
        (MhaConfig(head_size=64, attn_type="encoder_decoder"), LayerKind.CROSS_ATTENTION),
        (MlaConfig(head_size=576), LayerKind.MLA_ATTENTION),
        (MlaConfig(head_size=576, sliding_window=(3, -1)), LayerKind.SLIDING_WINDOW_MLA),
        (MlaConfig(head_size=576, attn_type="encoder_only"), LayerKind.ENCODER_ONLY_ATTENTION),
        (StateConfig(head_size=64), LayerKind.MAMBA),
    ],
)
def test_kinds(config, kind):
    assert config.kind == kind


def test_mla_derives_scale_and_prefill():
    mla = MlaConfig(
        head_size=576,
        num_heads=128,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        kv_lora_rank=512,
        v_head_size=128,
    )
    assert mla.effective_scale == 192**-0.5
    prefill = mla.prefill()
    assert (prefill.head_size, prefill.dims, prefill.num_kv_heads) == (192, (128, 64, 128), 128)
    with pytest.raises(ConfigError, match=r"kv_lora_rank \+ qk_rope_head_dim \(576\)"):
        mla.replace(head_size=512)


def test_sparse_mla_names_its_indexer():
    sparse = SparseMlaConfig(head_size=576, index_topk=2048, index_n_heads=64)
    assert sparse.indexer() == IndexerConfig(head_size=128, num_heads=64, topk=2048)


def test_provenance_and_labels_are_no_part_of_equality():
    plain = MhaConfig(head_size=64, block_size=16)
    told = plain.replace(label="layer 7", provenance=(("block_size", "user"),))
    assert told == plain and hash(told) == hash(plain)
    assert (told.source_of("block_size"), plain.source_of("block_size")) == ("user", "caller")
    assert plain.source_of("dtype") == "default"


ROUND_TRIPS = [
    MhaConfig(head_size=64, num_heads=9, num_kv_heads=3, sinks=True, sliding_window=(127, -1)),
    MhaConfig(head_size=64, attn_type="encoder_decoder", also_needs={"lse"}),
    MlaConfig(head_size=576, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512),
    BlockSparseConfig(head_size=128, topk_blocks=16),
    StateConfig(head_size=64, state_kind="gdn"),
]


@pytest.mark.parametrize("config", ROUND_TRIPS, ids=lambda c: str(c.operation))
def test_a_config_survives_a_round_trip_through_a_dict(config):
    assert layer_from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs head_size"),
        ({"operation": "mhaa", "head_size": 1}, "did you mean 'mha'"),
        ({"head_sise": 64}, "did you mean 'head_size'"),
    ],
)
def test_bad_dicts(values, message):
    with pytest.raises(ConfigError, match=message):
        layer_from_dict(values)


JSON_LIKE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=9),
    st.lists(st.integers(), max_size=3),
)


@given(
    st.dictionaries(st.sampled_from(sorted(MhaConfig.__dataclass_fields__)), JSON_LIKE, max_size=5)
)
def test_nonsense_never_escapes_as_another_error(values):
    values.pop("provenance", None)
    try:
        layer_from_dict({"head_size": 64, **values})
    except AttnplatError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({}, set()),
        (dict(dcp_size=1), set()),
        (dict(dcp_size=2), {Feature.DCP}),
        (dict(pcp_size=2, kv_connector=True), {Feature.PCP, Feature.KV_CONNECTOR}),
        (dict(batch_invariant=True), {Feature.BATCH_INVARIANCE}),
        (dict(adaptive_verification=True), {Feature.ADAPTIVE_VERIFICATION}),
    ],
)
def test_a_run_has_needs_too(values, needs):
    assert RunContext(**values).needs == needs


def test_a_run_refuses_nonsense():
    with pytest.raises(ConfigError, match="dcp_size is 0"):
        RunContext(dcp_size=0)
