"""AMD's detector reads the KFD topology right, and hides what the user hid."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnplat.config.env import DriverEnvironment
from attnplat.errors import UnknownNameError
from attnplat.platforms.detection import TorchDevice, TorchReading
from attnplat.platforms.rocm import arch, detect
from attnplat.platforms.rocm.detect import KfdNode
from tests.unit.given_machines import AmdMachine

DATA = Path(__file__).parents[1] / "data" / "detect" / "kfd"


def node(number: int, name: str, *banks: str, product: str | None = None) -> KfdNode:
    texts = tuple((DATA / f"bank_{bank}.txt").read_text() for bank in banks)
    return KfdNode(number, (DATA / f"{name}.txt").read_text(), texts, product)


FOUR = (
    node(0, "processor"),
    node(1, "mi300x"),
    node(2, "mi325x", "mi325x", "system", product="AMD Instinct MI325X\n"),
    node(3, "mi355x"),
    node(4, "mi250x"),
)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90402, "gfx942"),
        (90010, "gfx90a"),
        (90012, "gfx90c"),
        (90500, "gfx950"),
        (90008, "gfx908"),
        (100300, "gfx1030"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
        (120500, "gfx1250"),
        (0, None),
        (70001, None),
        (80003, None),
        (91600, None),
        (90016, None),
    ],
)
def test_the_target_version_is_decoded(version: int, name: str | None) -> None:
    assert arch.gfx_name(version) == name


def test_processors_are_skipped_and_devices_counted_in_node_order() -> None:
    devices = detect.detect_devices(AmdMachine(FOUR))
    assert [(d.index, d.arch) for d in devices] == [
        (0, "gfx942"),
        (1, "gfx942"),
        (2, "gfx950"),
        (3, "gfx90a"),
    ]
    assert all(d.platform == "rocm" and d.capability is None for d in devices)


def test_memory_counts_the_devices_own_banks_and_the_name_comes_from_the_board() -> None:
    device = detect.detect_devices(AmdMachine(FOUR))[1]
    assert (device.name, device.memory_bytes) == ("AMD Instinct MI325X", 206142726144)
    assert detect.detect_devices(AmdMachine(FOUR))[0].memory_bytes is None


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("gfx908", {"cdna", "cdna1", "wave64"}, {"mi3xx", "fp8"}),
        ("gfx90a", {"cdna", "cdna2"}, {"mi3xx", "fp8"}),
        ("gfx942", {"cdna", "cdna3", "mi3xx", "fp8_fnuz"}, {"mxfp4", "fp8_ocp"}),
        ("gfx950", {"cdna", "cdna4", "mi3xx", "fp8_ocp", "mxfp4"}, {"fp8_fnuz"}),
        ("gfx1250", {"cdna", "cdna5", "mxfp4", "wave32"}, {"rdna", "mi3xx"}),
        ("gfx1100", {"rdna", "rdna3", "wave32"}, {"cdna", "fp8"}),
        ("gfx1151", {"rdna", "rdna3", "integrated"}, {"cdna"}),
        ("gfx1201", {"rdna", "rdna4", "fp8_ocp"}, {"cdna", "rdna3"}),
        ("gfx906", {"gcn5"}, {"cdna", "rdna", "mfma"}),
    ],
)
def test_architectures_have_their_traits(name: str, has: set[str], lacks: set[str]) -> None:
    device = detect.simulate(name)
    assert (device.arch, device.simulated, device.notes) == (name, True, ())
    assert has <= device.traits
    assert not lacks & device.traits


def test_every_architecture_is_of_one_family() -> None:
    for name in arch.ARCHES:
        assert len({"cdna", "rdna", "gcn5"} & arch.traits_of(name)) == 1, name


@pytest.mark.parametrize("text", ["gfx942:sramecc+:xnack-", " GFX942 ", "gfx942:xnack-"])
def test_feature_suffixes_are_stripped(text: str) -> None:
    assert detect.simulate(text).arch == "gfx942"


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("gfx9999", set()),
        ("gfx977", set()),
        ("gfx1299", {"rdna", "wave32"}),
        ("gfx1199", {"rdna", "rdna3", "wave32", "wmma", "bf16"}),
    ],
)
def test_an_unknown_architecture_gets_little_and_a_note(name: str, traits: set[str]) -> None:
    device = detect.simulate(name)
    assert device.traits == traits
    assert name in device.notes[0]


@pytest.mark.parametrize("name", ["gfx", "gfx94", "gfx94z", "942", "gfx700", "gfx942:junk", "sm90"])
def test_nonsense_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownNameError, match="gfx942"):
        detect.simulate(name)


@pytest.mark.parametrize(
    ("rocr", "hip", "cuda", "archs"),
    [
        (None, None, None, ["gfx942", "gfx942", "gfx950", "gfx90a"]),
        (None, "2", None, ["gfx950"]),
        (None, "3,2", None, ["gfx90a", "gfx950"]),
        (None, "", None, []),
        (None, "-1", None, []),
        (None, "2,9,0", None, ["gfx950"]),
        (None, "1,1", None, ["gfx942"]),
        ("2,3", None, None, ["gfx950", "gfx90a"]),
        ("2,3", "1", None, ["gfx90a"]),
        ("2,3", "2", None, []),
        (None, None, "3", ["gfx90a"]),
        (None, "2", "3", ["gfx950"]),
        ("GPU-123456789abcdef0", None, None, ["gfx950"]),
        ("GPU-1234", None, None, ["gfx950"]),
        ("GPU-0", None, None, []),
        # ROCr: any base, spaces, both kinds mixed; the second naming of a device ends the list.
        ("gpu-123456789ABC", None, None, ["gfx950"]),
        ("0x2, 03", None, None, ["gfx950", "gfx90a"]),
        ("0,GPU-1234,1", None, None, ["gfx942", "gfx950", "gfx942"]),
        ("2,2,3", None, None, ["gfx950"]),
        ("2,1gpu,3", None, None, ["gfx950"]),
        ("3,,2", None, None, ["gfx90a"]),
        ("-1", None, None, []),
        ("", None, None, []),
        ("GPU-", None, None, []),
        ("99999999999999999999999", None, None, []),
        # HIP: plain numbers without spaces, parts of UUIDs; a second naming changes nothing.
        (None, "1,1,3", None, ["gfx942", "gfx90a"]),
        (None, "3, 2", None, ["gfx90a"]),
        (None, "3,02", None, ["gfx90a"]),
        (None, "3,", None, ["gfx90a"]),
        (None, "GPU-123456789abcdef0,0", None, ["gfx950", "gfx942"]),
        (None, "GPU-ffff,0", None, []),
        (None, "all", None, []),
        (None, "9" * 5000, None, []),
        (None, None, "", []),
        (None, None, "1,1", ["gfx942"]),
    ],
)
def test_lists_of_visible_devices_are_obeyed_in_order(
    rocr: str | None, hip: str | None, cuda: str | None, archs: list[str]
) -> None:
    environment = DriverEnvironment(
        rocr_visible_devices=rocr, hip_visible_devices=hip, cuda_visible_devices=cuda
    )
    devices = detect.detect_devices(AmdMachine(FOUR, environment))
    assert [d.arch for d in devices] == archs
    assert [d.index for d in devices] == list(range(len(archs)))


@pytest.mark.parametrize(
    ("rocr", "hip", "told"),
    [
        ("2,2", None, "ROCR_VISIBLE_DEVICES='2,2' names a device twice"),
        ("7", None, "ROCR_VISIBLE_DEVICES='7': '7' names no device here"),
        ("GPU", None, "'GPU' names no device here"),
        ("GPU-1", None, "'GPU-1' could be any of 2 devices"),
        (None, "x", "HIP_VISIBLE_DEVICES='x': 'x' names no device here"),
        (None, "", "HIP_VISIBLE_DEVICES is empty: torch hides every device, and HIP none"),
        (None, "-1", None),
        ("", None, None),
        # NVIDIA's list is HIP's too where HIP has none, and seldom meant so.
        (None, None, "CUDA_VISIBLE_DEVICES='GPU-5090': 'GPU-5090' names no AMD device here"),
    ],
)
def test_lists_that_lose_devices_by_mistake_are_noted(
    rocr: str | None, hip: str | None, told: str | None
) -> None:
    environment = DriverEnvironment(
        rocr_visible_devices=rocr, hip_visible_devices=hip, cuda_visible_devices="GPU-5090"
    )
    if rocr is not None:
        environment = environment._replace(cuda_visible_devices=None)
    twin = KfdNode(
        5, (FOUR[3].properties or "").replace(str(0x123456789ABCDEF0), str(0x1FFFFFFFFFFFFFFF))
    )
    notes = detect.detect(AmdMachine((*FOUR, twin), environment)).notes
    assert len(notes) == (told is not None)
    assert all((told or "") in note for note in notes)


@pytest.mark.parametrize(
    ("name", "override", "keeps", "loses"),
    [
        ("rx9070xt", "9.4.2", {"bf16", "fp8"}, {"mfma", "cdna", "mi3xx", "wave64", "wmma"}),
        ("mi300x", "11.0.0", {"bf16"}, {"mfma", "wmma", "rdna", "wave32", "mi3xx"}),
        ("strix_halo", "11.0.0", {"rdna3", "wmma"}, {"cdna"}),
    ],
)
def test_a_device_that_passes_for_one_of_another_family_gets_what_both_have(
    name: str, override: str, keeps: set[str], loses: set[str]
) -> None:
    environment = DriverEnvironment(hsa_override_gfx_version=override)
    (device,) = detect.detect_devices(AmdMachine((node(1, name),), environment))
    assert keeps <= device.traits
    assert not loses & device.traits
    assert "HSA_OVERRIDE_GFX_VERSION" in device.notes[-1]


@pytest.mark.parametrize("version", [0, 80003, 70001, 91600, 9999999999])
def test_an_amd_device_of_no_known_kind_is_passed_over_and_told(version: int) -> None:
    text = (
        (DATA / "mi300x.txt")
        .read_text()
        .replace("gfx_target_version 90402", f"gfx_target_version {version}")
    )
    found = detect.detect(AmdMachine((node(0, "processor"), KfdNode(1, text), node(2, "mi355x"))))
    assert [d.arch for d in found.devices] == ["gfx950"]
    assert found.notes == (
        f"KFD node 1 is an AMD device with gfx_target_version {version}, "
        "no architecture from gfx900 on; it is passed over",
    )
    alone = detect.detect(AmdMachine((KfdNode(1, text),)))
    assert (alone.devices, len(alone.notes)) == ((), 1)


@pytest.mark.parametrize("name", ["gfx900", "gfx906", "gfx90c"])
def test_older_parts_with_the_numbers_of_cdna_are_not_taken_for_it(name: str) -> None:
    # torch calls all of these (9, 0), as it does gfx90a; they lack its matrix instructions.
    traits = detect.simulate(name).traits
    assert not {"cdna", "mfma", "mi3xx", "bf16", "fp8"} & traits


def test_an_override_of_the_version_is_told() -> None:
    environment = DriverEnvironment(hsa_override_gfx_version="11.0.0")
    (device,) = detect.detect_devices(AmdMachine((node(1, "strix_halo"),), environment))
    assert device.arch == "gfx1100"
    assert "gfx1151" in device.notes[0]
    nonsense = DriverEnvironment(hsa_override_gfx_version="eleven")
    (device,) = detect.detect_devices(AmdMachine((node(1, "strix_halo"),), nonsense))
    assert (device.arch, device.notes) == ("gfx1151", ())


def test_a_device_that_cannot_be_opened_is_not_offered() -> None:
    found = detect.detect(AmdMachine(FOUR, opens=False))
    assert found.devices == ()
    assert "render" in found.notes[0]


def test_nodes_that_may_not_be_read_are_named_only_where_nothing_else_is_found() -> None:
    closed = (node(0, "processor"), KfdNode(1, None))
    assert detect.detect(AmdMachine(closed)).notes == ("KFD nodes 1 may not be read",)
    assert detect.detect(AmdMachine((*closed, node(2, "mi300x")))).notes == ()


@pytest.mark.parametrize(
    "text", ["", "gfx_target_version", "simd_count x\n", "\0\0", "simd_count 0"]
)
def test_a_broken_properties_file_is_no_device(text: str) -> None:
    assert detect.detect(AmdMachine((KfdNode(1, text),))) == ((), ())


def test_another_vendors_node_is_no_device() -> None:
    text = (DATA / "mi300x.txt").read_text().replace("vendor_id 4098", "vendor_id 4318")
    assert detect.detect_devices(AmdMachine((KfdNode(1, text),))) == ()


def test_torch_is_asked_only_under_wsl_and_only_when_allowed() -> None:
    told = TorchReading("rocm", (TorchDevice("RX 7900", (11, 0), 25753026560, "gfx1100:x-"),))
    probes = AmdMachine(wsl=True, told=told)
    assert detect.detect(probes).devices == ()
    assert "torch was not asked" in detect.detect(probes).notes[0]
    assert probes.torch_calls == 0
    (device,) = detect.detect(probes, may_ask_torch=True).devices
    assert (device.arch, device.memory_bytes) == ("gfx1100", 25753026560)
    probes.told = TorchReading("rocm", (TorchDevice("RX 7900", (11, 0), 1), *told.devices))
    found = detect.detect(probes, may_ask_torch=True)
    assert [(d.arch, d.index) for d in found.devices] == [("gfx1100", 1)]
    assert "torch does not tell the architecture of 'RX 7900'" in found.notes[0]
    probes.told = TorchReading(failure="exit code 1")
    assert "exit code 1" in detect.detect(probes, may_ask_torch=True).notes[0]
    probes.told = TorchReading("cuda", (TorchDevice("NVIDIA L4", (8, 9), 1),))
    assert detect.detect(probes, may_ask_torch=True).devices == ()
    assert detect.detect(AmdMachine(), may_ask_torch=True) == ((), ())


def test_the_topology_is_read_from_its_folders(tmp_path: Path) -> None:
    nodes, drm = tmp_path / "nodes", tmp_path / "drm"
    for number, name in ((0, "processor"), (2, "mi300x"), (10, "mi325x")):
        (nodes / str(number) / "mem_banks" / "0").mkdir(parents=True)
        (nodes / str(number) / "properties").write_bytes((DATA / f"{name}.txt").read_bytes())
    bank = (DATA / "bank_mi325x.txt").read_bytes()
    (nodes / "10" / "mem_banks" / "0" / "properties").write_bytes(bank)
    (drm / "renderD128" / "device").mkdir(parents=True)
    (drm / "renderD128" / "device" / "product_name").write_text("MI325X\n")
    (nodes / "generation_id").write_text("2\n")
    found = detect.read_kfd_nodes(nodes, drm)
    assert [n.number for n in found] == [0, 2, 10]
    device = detect.parse_node(found[2])
    assert device is not None
    assert (device.arch, device.name, device.memory_bytes) == ("gfx942", "MI325X", 206142726144)


def test_a_machine_without_a_topology_has_no_devices(tmp_path: Path) -> None:
    assert detect.SystemProbes(tmp_path).kfd_nodes() == ()
