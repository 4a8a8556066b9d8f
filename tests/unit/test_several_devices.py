"""A machine may hold several devices, of one kind or of several, and some that nobody knows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from attnplat import AttentionConfig, MhaConfig, MlaConfig, platform_for, select_shared
from attnplat.errors import ConfigError, DeviceError, UnknownNameError
from attnplat.platforms.cpu import detect as cpu
from attnplat.platforms.cuda.arch import make_device
from attnplat.platforms.rocm.arch import make_device as make_amd
from attnplat.platforms.shared import SharedSelection

LAYER = MhaConfig(head_size=128, num_heads=32, num_kv_heads=8, dtype="bfloat16")
# Kernels for one architecture and its kin, which must not run on what is not known.
SPECIAL = {"FLASHMLA", "CUTLASS_MLA", "TOKENSPEED_MLA", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN"}


@dataclass
class Torchs:
    """What is known of a `torch.device` here."""

    type: object
    index: int | None = None


def test_a_platform_is_bound_to_the_device_it_is_given() -> None:
    device = replace(cpu.simulate("avx2"), simulated=False, name="there")
    assert platform_for(device).device is device
    assert platform_for(device).inventory.profile is None
    simulated = platform_for(cpu.simulate("avx2"))
    assert (simulated.device.arch, simulated.inventory.profile) == ("avx2", "full")


def test_a_device_of_torchs_is_taken_by_its_type_and_index() -> None:
    assert platform_for(Torchs("cpu")).name == "cpu"
    assert platform_for(Torchs("cpu", 0)).device.index == 0
    with pytest.raises(DeviceError, match="visible: 0 to 0"):
        platform_for(Torchs("cpu", 1))
    with pytest.raises(UnknownNameError, match=r"unknown device 'xpu:0'.*known: cpu"):
        platform_for(Torchs("xpu", 0))


@pytest.mark.parametrize("device", [None, 0, 1.5, b"cuda", Torchs(3), ["cuda"]])
def test_what_is_no_device_is_refused(device: object) -> None:
    with pytest.raises(UnknownNameError, match="unknown device"):
        platform_for(device)


def shared(*devices: str, layer: object = LAYER, **options: object) -> SharedSelection:
    return select_shared([platform_for(d) for d in devices], layer, **options)  # type: ignore[arg-type]


def test_devices_alike_share_what_one_of_them_chooses() -> None:
    alone = platform_for("sm90").select(LAYER)
    assert alone.chosen is not None
    both = shared("sm90", "sm90")
    assert both.chosen == alone.chosen.name
    assert list(both.accepted) == [b.name for b in alone.accepted]
    assert both.refused == {}


def test_unlike_devices_share_what_all_accept_and_the_others_say_why_not() -> None:
    both = shared("sm80", "sm120", "gfx942")
    assert both.ok
    assert both.chosen == "TRITON_ATTN"
    names = [{b.name for b in s.accepted} for s in both.selections]
    assert set(both.accepted) == set.intersection(*names) - set(both.refused)
    assert set(both.accepted) | set(both.refused) == set.union(*names)
    assert "refused on rocm:gfx942" in both.refused["FLASH_ATTN"]
    assert "FLASH_ATTN: refused on" in both.explain()
    assert both.to_dict()["chosen"] == "TRITON_ATTN"


def test_the_best_of_the_worst_ranks_is_chosen_whatever_the_order_of_the_devices() -> None:
    ranks = [
        {b.name: i for i, b in enumerate(platform_for(d).select(LAYER).accepted)}
        for d in ("sm90", "sm100")
    ]
    common = ranks[0].keys() & ranks[1].keys()
    best = min(max(r[name] for r in ranks) for name in common)
    for order in (("sm90", "sm100"), ("sm100", "sm90")):
        chosen = shared(*order).chosen
        assert chosen is not None
        assert max(r[chosen] for r in ranks) == best


def test_one_device_that_accepts_nothing_in_common_leaves_no_choice() -> None:
    asked = shared("sm90", "gfx942", attention=AttentionConfig(backend="FLASHINFER"))
    assert (asked.chosen, asked.ok) == (None, False)
    assert "belongs to the platform" in asked.refused["FLASHINFER"]
    assert asked.explain().startswith("on all of cuda:sm90 (simulated), rocm:gfx942 (simulated)")


def test_a_layer_of_parts_needs_all_of_them_on_every_device() -> None:
    layer = MlaConfig(
        head_size=576, num_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512
    )
    both = shared("sm90", "sm100", layer=layer)
    assert both.ok == (bool(both.accepted) and all(s.ok for s in both.selections))
    assert both.ok


def test_no_device_is_an_error() -> None:
    with pytest.raises(ConfigError, match="none was given"):
        select_shared([], LAYER)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("sm130", "only what every later architecture keeps is assumed"),
        ("sm107", "only what every later architecture keeps is assumed"),
        ("gfx1399", "only what its generation is known to have is assumed"),
        ("gfx977", "only what its generation is known to have is assumed"),
        ("gfx1299", "only what its generation is known to have is assumed"),
        ("", "does not tell the compute capability; nothing is assumed"),
    ],
)
@pytest.mark.parametrize("simulated", [True, False])
def test_an_unknown_architecture_gets_a_careful_choice_and_the_reason(
    name: str, note: str, simulated: bool
) -> None:
    device = platform_for(name).device if name else make_device(None, "NVIDIA Something")
    platform = platform_for("gfx942" if name.startswith("gfx") else "sm90")
    selection = platform.replace(device=replace(device, simulated=simulated)).select(LAYER)
    assert selection.chosen is not None
    assert selection.chosen.portable
    assert all(backend.portable for backend in selection.accepted)
    if simulated and name.startswith("sm"):
        assert selection.chosen.name == "TRITON_ATTN"
    assert not SPECIAL & {b.name for b in selection.accepted}
    assert note in selection.explain()


@pytest.mark.parametrize(("name", "backend"), [("sm107", "FLASHINFER"), ("gfx1399", "ROCM_ATTN")])
def test_who_asks_for_a_backend_by_name_gets_it_on_an_unknown_architecture(
    name: str, backend: str
) -> None:
    automatic = platform_for(name).select(LAYER)
    reasons = map(str, automatic.rejections[backend])
    assert any("architectures that attnplat knows, unless it is asked for" in r for r in reasons)
    asked = platform_for(name).select(LAYER, AttentionConfig(backend=backend))
    assert asked.chosen is not None
    assert asked.chosen.name == backend


def test_an_unknown_amd_part_is_not_taken_for_the_oldest_of_cdna() -> None:
    traits = make_amd("gfx977").traits
    assert not {"cdna", "mfma", "cdna2"} & traits
