"""Lists of visible devices are read as torch reads them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnplat.platforms.cuda.visible import visible_devices

UUIDS = ["GPU-3a11f0c2-6a2b", "GPU-3a1177c2-0000", "GPU-9c2f1d60-11aa", "GPU-9c2f1d60-22bb"]

items = st.one_of(
    st.integers(-2, 6).map(str),
    st.sampled_from([*UUIDS, "GPU-3", "GPU-3a117", "GPU-9c2f1d60-2", "GPU-f", "MIG-1", "none"]),
    st.text(alphabet="0123456789+ gGPU-", max_size=4),
)


def test_a_negative_zero_is_the_first_device() -> None:
    assert visible_devices("-0,1", UUIDS).ordinals == (0, 1)


def as_torch_reads() -> tuple[int, ...]:
    """The ordinals torch keeps, by its own two steps and its trimming to the devices here."""
    listed = torch.cuda._parse_visible_devices()
    if not listed:
        return ()
    if isinstance(listed[0], str):
        if listed[0].startswith("MIG-"):
            return ()
        return tuple(torch.cuda._transform_uuid_to_ordinals(listed, UUIDS))
    kept: list[int] = []
    for ordinal in listed:
        if ordinal >= len(UUIDS):
            break
        kept.append(ordinal)
    return tuple(kept)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(items, max_size=5).map(",".join))
def test_every_list_gives_the_devices_that_torch_would_see(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    if {"GPU-", "MIG-"} & {item.strip() for item in text.split(",")}:
        return  # torch takes it for a prefix of every device, and CUDA for no device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    try:
        expected = as_torch_reads()
    except ValueError:  # torch cannot read a lone sign; CUDA takes it for no device
        return
    assert visible_devices(text, UUIDS).ordinals == expected
