"""The choice is a pure function: order, requests, reasons, the nearest fix, parts.

The backends here are declared for the test, so that each rule of choice is seen alone.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from attnplat.backends.backend import Backend, Package, Rule
from attnplat.backends.limits import AtLeast, Cases, Includes, MultipleOf, OneOf
from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import MhaConfig, MlaConfig
from attnplat.config.names import Feature, Operation
from attnplat.config.run import RunContext
from attnplat.errors import ConfigError, NoBackendError, SimulatedDeviceError, UnknownNameError
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.inventory import Inventory
from attnplat.platforms.platform import Platform
from attnplat.platforms.remembered import SelectionCache
from attnplat.platforms.selection import Preference, Ranked, Tables, select
from attnplat.platforms.world import World

MHA = frozenset({Operation.MHA})
WINDOW = frozenset({Feature.SLIDING_WINDOW})


def has_fast_torch(world):
    return "torch" in world.inventory.packages


def wide_fp32(config, world):
    return config.dtype == "float32" and config.head_size > 128


FAST = Backend(
    name="FLASH_ATTN",
    summary="fast",
    serves=MHA,
    takes={
        "head_size": Cases((has_fast_torch, OneOf(64, 128, 256)), otherwise=OneOf(64)),
        "dtype": OneOf("bfloat16", "float16"),
        "block_size": MultipleOf(16),
    },
    features=WINDOW | {Feature.BATCH_INVARIANCE},
    on={"capability": AtLeast((8, 0))},
    requires=(Package("triton", why="its kernels"),),
    loads="attnplat.errors:AttnplatError",
    reads=frozenset({"flash_attn_version"}),
)
BROAD = Backend(
    name="TRITON_ATTN",
    summary="broad",
    serves=MHA,
    takes={"head_size": AtLeast(32)},
    features=WINDOW | {Feature.SINKS, Feature.DCP},
    forbids=(Rule("wide_fp32", wide_fp32, "float32 heads above 128 spill"),),
    loads="attnplat.errors:ConfigError",
)
KNOWN = Backend(name="FLASHINFER", summary="facts only", serves=MHA, features=WINDOW)
LAST = Backend(
    name="REFERENCE",
    summary="slow, right",
    serves=frozenset(Operation),
    features=frozenset(Feature),
    loads="attnplat.errors:DeviceError",
    last_resort=True,
)
LATENT = Backend(name="TRITON_MLA", summary="latent", serves=frozenset({Operation.MLA}))


def is_windowed(config, world):
    return config.sliding_window != (-1, -1)


ROWS = (
    Preference(
        serves=MHA,
        order=(Ranked("FLASHINFER", is_windowed), "FLASH_ATTN", "TRITON_ATTN", "REFERENCE"),
        because="of the test",
    ),
    Preference(serves=frozenset({Operation.MLA}), order=("TRITON_MLA",), because="of the test"),
)
TABLES = Tables(
    catalog=(FAST, BROAD, KNOWN, LAST, LATENT),
    preferences=ROWS,
    foreign={"CPU_ATTN": "cpu"},
)
DEVICE = DeviceInfo(platform="cuda", arch="sm80", capability=(8, 0))
PACKAGES = Inventory.assume({"torch": "2.13.0", "triton": "3.9.0"})
LAYER = MhaConfig(head_size=128, num_heads=32, num_kv_heads=8)


def world(device=DEVICE, inventory=PACKAGES, **changes):
    return World(device, inventory, **changes)


def chosen(config=LAYER, *, tables=TABLES, allow_reference=False, **changes):
    found = select(tables, config, world(**changes), allow_reference=allow_reference).chosen
    return found.name if found else None


def test_the_first_that_fits_is_chosen_and_all_that_fit_stay():
    selection = select(TABLES, LAYER, world())
    assert [b.name for b in selection.accepted] == ["FLASH_ATTN", "TRITON_ATTN"]
    assert selection.rejections == {}


CHOICES = [
    (LAYER.replace(head_size=96), {}, "TRITON_ATTN"),
    (LAYER.replace(dtype="float32"), {}, "TRITON_ATTN"),
    (LAYER.replace(head_size=256, dtype="float32"), {}, None),
    (LAYER.replace(sinks=True), {}, "TRITON_ATTN"),
    (LAYER.replace(alibi=True), {}, None),
    (LAYER.replace(block_size=24), {}, "TRITON_ATTN"),
    (LAYER, {"inventory": Inventory.assume({"torch": "2.13.0"})}, "TRITON_ATTN"),
    (LAYER, {"device": replace(DEVICE, arch="sm75", capability=(7, 5))}, "TRITON_ATTN"),
    (LAYER, {"run": RunContext(dcp_size=2)}, "TRITON_ATTN"),
    (LAYER, {"run": RunContext(batch_invariant=True)}, "FLASH_ATTN"),
    (LAYER, {"run": RunContext(user_block_size=24)}, "TRITON_ATTN"),
    (LAYER, {"wishes": AttentionConfig(use_non_causal=True)}, None),
    (LAYER.replace(sliding_window=(63, -1)), {}, "FLASH_ATTN"),
    (
        LAYER.replace(sliding_window=(63, -1)),
        {"device": replace(DEVICE, simulated=True)},
        "FLASHINFER",
    ),
]


@pytest.mark.parametrize(("config", "changes", "name"), CHOICES)
def test_choices(config, changes, name):
    assert chosen(config, **changes) == name


def test_the_last_resort_is_chosen_only_where_it_is_allowed():
    config = LAYER.replace(alibi=True)
    assert chosen(config) is None
    assert chosen(config, allow_reference=True) == "REFERENCE"
    assert chosen(config, tables=replace(TABLES, last_resort_automatic=True)) == "REFERENCE"
    assert chosen(config, wishes=AttentionConfig(backend="REFERENCE")) == "REFERENCE"


REASONS = [
    # config, changes, backend, kind, subject, sentence
    (
        LAYER.replace(head_size=80),
        {},
        "FLASH_ATTN",
        "field",
        "head_size",
        "FLASH_ATTN: config.head_size is 80, takes 64, 128 or 256",
    ),
    (
        LAYER.replace(sinks=True),
        {},
        "FLASH_ATTN",
        "feature",
        "sinks",
        "FLASH_ATTN: the layer wants sinks, which it does not take",
    ),
    (
        LAYER,
        {"run": RunContext(dcp_size=2)},
        "FLASH_ATTN",
        "feature",
        "dcp",
        "FLASH_ATTN: the layer wants dcp (set by the run), which it does not take",
    ),
    (
        LAYER,
        {"device": replace(DEVICE, capability=(7, 5))},
        "FLASH_ATTN",
        "device",
        "capability",
        "FLASH_ATTN: device.capability is 7.5, takes 8.0 or more",
    ),
    (
        LAYER,
        {"inventory": Inventory.assume({"torch": "2.13.0"})},
        "FLASH_ATTN",
        "package",
        "triton",
        "FLASH_ATTN: needs the package triton (its kernels), which is not installed",
    ),
    (
        LAYER.replace(head_size=256, dtype="float32"),
        {},
        "TRITON_ATTN",
        "rule",
        "wide_fp32",
        "TRITON_ATTN: float32 heads above 128 spill",
    ),
    (
        LAYER.replace(sliding_window=(3, -1)),
        {},
        "FLASHINFER",
        "adapter",
        "adapter",
        "FLASHINFER: its facts are known and attnplat has no adapter for it yet",
    ),
    (
        LAYER,
        {"run": RunContext(user_block_size=24)},
        "FLASH_ATTN",
        "field",
        "block_size",
        "FLASH_ATTN: config.block_size is 24 (set by the user), takes a multiple of 16",
    ),
]


@pytest.mark.parametrize(("config", "changes", "backend", "kind", "subject", "sentence"), REASONS)
def test_reasons_are_objects_first_and_sentences_last(
    config, changes, backend, kind, subject, sentence
):
    reasons = select(TABLES, config, world(**changes)).rejections[backend]
    assert [(r.kind, r.subject, str(r)) for r in reasons if r.subject == subject] == [
        (kind, subject, sentence)
    ]


def test_all_reasons_of_a_backend_are_collected():
    config = LAYER.replace(head_size=80, dtype="float32", sinks=True)
    device = replace(DEVICE, capability=(7, 5))
    reasons = select(TABLES, config, world(device=device)).rejections["FLASH_ATTN"]
    assert [r.subject for r in reasons] == ["head_size", "dtype", "sinks", "capability"]


def test_a_request_that_does_not_fit_is_an_error_never_a_replacement():
    asked = AttentionConfig.from_dict({"backend": "flash_attn"}, source="command line")
    selection = select(TABLES, LAYER.replace(head_size=96), world(wishes=asked))
    assert not selection.ok
    text = selection.failure()
    assert "FLASH_ATTN (asked for by the command line) does not fit" in text
    assert "leave the backend open: TRITON_ATTN takes it" in text
    assert "pad head_size to 128: FLASH_ATTN takes it" in text


def test_a_request_for_another_platforms_backend_says_so():
    selection = select(TABLES, LAYER, world(wishes=AttentionConfig(backend="CPU_ATTN")))
    assert (
        "CPU_ATTN: it belongs to the platform cpu; this device is cuda:sm80" in selection.failure()
    )


def test_a_request_for_a_backend_of_another_operation_names_both():
    selection = select(TABLES, LAYER, world(wishes=AttentionConfig(backend="TRITON_MLA")))
    assert "TRITON_MLA: the layer is mha, it serves mla" in selection.failure()


def test_a_request_that_no_table_knows_is_an_unknown_name():
    with pytest.raises(UnknownNameError, match="TURBOQUANT"):
        select(TABLES, LAYER, world(wishes=AttentionConfig(backend="TURBOQUANT")))


def test_the_kind_beats_the_backend():
    wishes = AttentionConfig(
        backend="FLASH_ATTN", backend_per_kind={"sliding_window": "TRITON_ATTN"}
    )
    assert chosen(LAYER, wishes=wishes) == "FLASH_ATTN"
    assert chosen(LAYER.replace(sliding_window=(63, -1)), wishes=wishes) == "TRITON_ATTN"


def test_a_failure_names_the_one_constraint_first_and_offers_the_last_resort():
    text = select(TABLES, LAYER.replace(alibi=True), world()).failure()
    assert text.splitlines()[0].endswith("alibi rules out every candidate")
    assert "nearest: allow_reference=True: REFERENCE takes it" in text


def test_a_wish_that_nothing_here_reads_is_refused():
    with pytest.raises(ConfigError, match="flex_attn_block_m is set to 64"):
        select(TABLES, LAYER, world(wishes=AttentionConfig(flex_attn_block_m=64)))


def test_a_wish_that_only_an_unchosen_backend_reads_is_reported():
    wishes = AttentionConfig(flash_attn_version=3)
    assert select(TABLES, LAYER, world(wishes=wishes)).unread == frozenset()
    selection = select(TABLES, LAYER.replace(sinks=True), world(wishes=wishes))
    assert selection.unread == {"flash_attn_version"}
    assert "flash_attn_version is set and TRITON_ATTN does not read it" in selection.explain()


def test_a_layer_is_served_only_if_every_part_is():
    simulated = replace(DEVICE, simulated=True)
    mla = MlaConfig(head_size=576, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512)
    selection = select(TABLES, mla, world(device=simulated))
    assert [b.name for b in selection.accepted] == ["TRITON_MLA"]
    assert not selection.ok
    assert "no backend for the prefill part" in selection.failure()
    row = Preference(serves=frozenset({Operation.MLA_PREFILL}), order=("REFERENCE",), because="x")
    whole = replace(TABLES, preferences=(*ROWS, row), last_resort_automatic=True)
    served = select(whole, mla, world(device=simulated))
    assert (served.chosen.name, served.parts["prefill"].chosen.name) == ("TRITON_MLA", "REFERENCE")


def test_a_layer_without_a_cache_is_not_judged_by_its_cache():
    encoder = LAYER.replace(attn_type="encoder_only", kv_cache_dtype="fp8")
    strict = replace(BROAD, takes={"kv_cache_dtype": OneOf("auto")})
    tables = replace(TABLES, catalog=(FAST, strict, KNOWN, LAST, LATENT))
    assert chosen(encoder.replace(head_size=96), tables=tables) == "TRITON_ATTN"
    assert chosen(encoder.replace(head_size=96, attn_type="decoder"), tables=tables) is None


def test_selection_is_pure_and_serialisable():
    first = select(TABLES, LAYER.replace(alibi=True), world())
    again = select(TABLES, LAYER.replace(alibi=True), world())
    assert first.to_dict() == again.to_dict()
    assert json.loads(json.dumps(first.to_dict())) == first.to_dict()


def test_a_changed_world_changes_the_answer():
    assert chosen() == "FLASH_ATTN"
    assert chosen(inventory=Inventory.assume({})) == "TRITON_ATTN"
    assert chosen() == "FLASH_ATTN"


def platform(**changes):
    return Platform(replace(DEVICE, **changes), PACKAGES, TABLES)


def test_get_attn_backend_loads_what_was_chosen(caplog):
    from attnplat.errors import AttnplatError

    with caplog.at_level("INFO", logger="attnplat"):
        assert platform().get_attn_backend(LAYER) is AttnplatError
    assert "FLASH_ATTN for mha: of the test" in caplog.text


def test_the_last_resort_is_a_warning(caplog):
    platform().get_attn_backend(LAYER.replace(alibi=True), allow_reference=True)
    assert [r.levelname for r in caplog.records if "REFERENCE" in r.message] == ["WARNING"]


def test_get_attn_backend_refuses_with_the_selection():
    with pytest.raises(NoBackendError) as caught:
        platform().get_attn_backend(LAYER.replace(alibi=True))
    assert caught.value.selection.rejections.keys() == {"FLASH_ATTN", "TRITON_ATTN"}


def test_a_simulated_device_runs_nothing():
    with pytest.raises(SimulatedDeviceError, match=r"select\(config\)"):
        platform(simulated=True).get_attn_backend(LAYER)


def test_device_limits_may_be_traits():
    amx = replace(FAST, on={"traits": Includes("amx_bf16")})
    tables = replace(TABLES, catalog=(amx, BROAD, KNOWN, LAST, LATENT))
    assert chosen(tables=tables) == "TRITON_ATTN"
    fast_cpu = replace(DEVICE, traits=frozenset({"amx_bf16", "avx512"}))
    assert chosen(tables=tables, device=fast_cpu) == "FLASH_ATTN"


def test_a_cache_answers_as_its_platform_does_and_remembers():
    cache = SelectionCache(platform())
    first = cache.select(LAYER)
    assert first.chosen.name == "FLASH_ATTN"
    assert cache.select(MhaConfig(head_size=128, num_heads=32, num_kv_heads=8)) is first
    assert cache.select(LAYER, AttentionConfig(backend="TRITON_ATTN")).chosen.name == "TRITON_ATTN"
    assert cache.select(LAYER, run=RunContext(dcp_size=2)).chosen.name == "TRITON_ATTN"
    assert cache.select(LAYER.replace(alibi=True), allow_reference=True).ok
    assert not cache.select(LAYER.replace(alibi=True)).ok
    assert len(cache) == 5
