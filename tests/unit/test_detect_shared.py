"""What the detectors share: names of devices, and torch's answer."""

from __future__ import annotations

import pytest

from attnplat.errors import ConflictError, UnknownNameError
from attnplat.platforms.cpu import detect as cpu
from attnplat.platforms.cuda import detect as cuda
from attnplat.platforms.detection import TorchDevice, parse_torch_answer
from attnplat.platforms.names import PRODUCTS, DeviceName, known_devices, parse_device_name
from attnplat.platforms.rocm import detect as rocm

SIMULATE = {"cuda": cuda.simulate, "rocm": rocm.simulate, "cpu": cpu.simulate}


@pytest.mark.parametrize(
    ("text", "platform", "arch", "index"),
    [
        ("cuda", "cuda", None, None),
        ("CUDA:1", "cuda", None, 1),
        ("cuda:sm90", "cuda", "sm90", None),
        ("cuda:sm_90a", "cuda", "sm90", None),
        ("sm100", "cuda", "sm100", None),
        ("rocm:gfx950", "rocm", "gfx950", None),
        ("hip:0", "rocm", None, 0),
        ("gfx942:sramecc+:xnack-", "rocm", "gfx942", None),
        ("rocm:gfx942:sramecc+:xnack-", "rocm", "gfx942", None),
        ("cpu", "cpu", None, None),
        ("cpu:0", "cpu", None, 0),
        ("cpu:amx", "cpu", "amx", None),
        ("amx", "cpu", "amx", None),
        ("avx512-bf16", "cpu", "avx512_bf16", None),
        (" h100 ", "cuda", "sm90", None),
        ("cuda:H200", "cuda", "sm90", None),
        ("RTX 4090", "cuda", "sm89", None),
        ("mi355x", "rocm", "gfx950", None),
        ("sm130", "cuda", "sm130", None),
        ("gfx9999", "rocm", "gfx9999", None),
    ],
)
def test_devices_are_named_in_many_ways(
    text: str, platform: str, arch: str | None, index: int | None
) -> None:
    assert parse_device_name(text) == DeviceName(platform, arch, index)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "cuda:",
        "cuda:-1",
        "cuda:x",
        "gpu",
        "cuda:sm90:1",
        "tpu:v5",
        "cpu:sm",
        "1",
    ],
)
def test_what_names_no_device_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown device .*known: "):
        parse_device_name(text)


def test_a_refusal_names_the_closest_and_no_other_platforms_devices() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'rocm:gfx950'"):
        parse_device_name("rocm:gfx95o")
    with pytest.raises(UnknownNameError) as error:
        parse_device_name("cpu:avx51")
    assert not any(name.startswith(("cuda", "rocm")) for name in error.value.known)


@pytest.mark.parametrize("text", ["cuda:gfx950", "rocm:sm90", "cpu:h100", "cuda:amx"])
def test_an_architecture_of_another_platform_is_refused_with_the_right_name(text: str) -> None:
    with pytest.raises(ConflictError, match=r"write (rocm:gfx950|cuda:sm90|cpu:amx)"):
        parse_device_name(text)


def test_every_known_name_and_product_can_be_simulated() -> None:
    products = [f"{platform}:{arch}" for platform, arch in PRODUCTS.values()]
    for name in [*known_devices(), *products]:
        parsed = parse_device_name(name)
        if parsed.arch is not None:
            device = SIMULATE[parsed.platform](parsed.arch)
            assert device.platform == parsed.platform
            assert device.notes == (), name


def test_torchs_answer_is_read_whatever_it_says() -> None:
    answer = '{"vendor": "cuda", "devices": [["NVIDIA H200", [9, 0], 150754820096, null]]}'
    reading = parse_torch_answer(answer)
    assert reading.devices == (TorchDevice("NVIDIA H200", (9, 0), 150754820096),)
    failed = parse_torch_answer(None, "exit code 1: no torch")
    assert failed.failure == "torch gave no answer (exit code 1: no torch)"
    for nonsense in ("", "[]", "{}", '{"devices": [[1, 2]], "vendor": 1}', "[" * 100_000):
        reading = parse_torch_answer(nonsense)
        assert reading.devices == ()
        assert reading.failure is not None
