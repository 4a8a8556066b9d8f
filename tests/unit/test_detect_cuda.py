"""NVIDIA's detector reads NVML right, survives it, and creates no context."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attnplat.config.env import DriverEnvironment
from attnplat.errors import UnknownNameError
from attnplat.platforms.cuda import arch, detect, nvml, nvml_library
from attnplat.platforms.cuda.nvml import MigInstance, NvmlDevice, NvmlReading
from attnplat.platforms.detection import TorchDevice, TorchReading
from tests.unit.given_machines import NvidiaMachine

GIB = 2**30
H200 = NvmlDevice("GPU-3a11f0c2-6a2b-7d0e-9e2f-0b5d7c9a1e44", "NVIDIA H200", (9, 0), 150754820096)
B200 = NvmlDevice("GPU-9c2f1d60-11aa-4b0c-8d3e-aa00bb11cc22", "NVIDIA B200", (10, 0), 192 * GIB)
L4 = NvmlDevice("GPU-3a1177c2-0000-7d0e-9e2f-0b5d7c9a1e44", "NVIDIA L4", (8, 9), 24 * GIB)
A100 = NvmlDevice(
    "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77",
    "NVIDIA A100-SXM4-40GB",
    (8, 0),
    40 * GIB,
    mig_enabled=True,
    mig=(
        MigInstance(
            "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "A100 MIG 3g.20gb", 20 * GIB, (1, 0)
        ),
        MigInstance(
            "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", "A100 MIG 1g.5gb", 5 * GIB, (13, 0)
        ),
    ),
)


def machine(
    *devices: NvmlDevice, visible: str | None = None, order: str | None = None
) -> NvidiaMachine:
    environment = DriverEnvironment(cuda_visible_devices=visible, cuda_device_order=order)
    return NvidiaMachine(NvmlReading(devices), environment)


def test_devices_carry_what_nvml_says() -> None:
    (device,) = detect.detect_devices(machine(H200))
    assert (device.platform, device.arch, device.capability) == ("cuda", "sm90", (9, 0))
    assert (device.name, device.memory_bytes) == ("NVIDIA H200", 150754820096)
    assert (device.index, device.simulated, device.notes) == (0, False, ())
    assert {"hopper", "wgmma", "tma", "fp8", "bf16"} <= device.traits


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("sm70", {"volta", "tensor_cores"}, {"bf16"}),
        ("sm75", {"turing", "tensor_cores"}, {"bf16", "cp_async"}),
        ("sm80", {"ampere", "bf16", "cp_async"}, {"fp8", "tma"}),
        ("sm87", {"ampere", "integrated"}, {"fp8"}),
        ("sm89", {"ada", "fp8"}, {"tma", "wgmma"}),
        ("sm90", {"hopper", "fp8", "tma", "wgmma"}, {"tcgen05", "fp4"}),
        ("sm100", {"blackwell", "tma", "tcgen05", "fp4"}, {"wgmma"}),
        ("sm103", {"blackwell", "tcgen05"}, {"wgmma"}),
        ("sm110", {"blackwell", "tcgen05", "integrated"}, {"wgmma"}),
        ("sm120", {"blackwell", "fp4", "tma"}, {"tcgen05", "wgmma", "integrated"}),
        ("sm121", {"blackwell", "fp4", "integrated"}, {"tcgen05"}),
    ],
)
def test_architectures_have_their_traits(name: str, has: set[str], lacks: set[str]) -> None:
    device = detect.simulate(name)
    assert (device.arch, device.simulated, device.notes) == (name, True, ())
    assert has <= device.traits
    assert not lacks & device.traits


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ("sm90", (9, 0)),
        ("SM_90", (9, 0)),
        ("sm90a", (9, 0)),
        ("sm_100f", (10, 0)),
        (" sm121 ", (12, 1)),
        ("sm", None),
        ("sm9", None),
        ("sm13", None),
        ("sm1000", None),
        ("sm90x", None),
        ("90", None),
        ("gfx90a", None),
        ("", None),
    ],
)
def test_architecture_names_are_parsed(text: str, capability: tuple[int, int] | None) -> None:
    assert arch.parse_arch(text) == capability


@pytest.mark.parametrize("name", ["sm130", "sm107", "sm999"])
def test_an_unknown_architecture_keeps_only_what_lasts_and_says_so(name: str) -> None:
    device = detect.simulate(name)
    assert device.traits == {"tensor_cores", "bf16", "cp_async", "fp8", "tma"}
    assert name in device.notes[0]


def test_nonsense_is_refused_with_the_closest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'sm90'"):
        detect.simulate("sm9o")


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA H200", "NVIDIA B200", "NVIDIA L4"]),
        ("0,1,2", ["NVIDIA H200", "NVIDIA B200", "NVIDIA L4"]),
        ("2, 0", ["NVIDIA L4", "NVIDIA H200"]),
        ("1", ["NVIDIA B200"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["NVIDIA H200"]),
        ("0,7,1", ["NVIDIA H200"]),
        ("none", []),
        ("1gpu", ["NVIDIA B200"]),
        ("1,1", []),
        ("GPU-9c2f", ["NVIDIA B200"]),
        ("GPU-9c2f1d60-11aa-4b0c-8d3e-aa00bb11cc22,GPU-3a1177", ["NVIDIA B200", "NVIDIA L4"]),
        ("GPU-3a11", []),
        ("GPU-9c2f,0", ["NVIDIA B200"]),
        ("0,GPU-9c2f", ["NVIDIA H200"]),
        ("GPU-9c2f,GPU-9c", []),
        ("99999999999999999999", []),
    ],
)
def test_cuda_visible_devices_is_obeyed_as_cuda_reads_it(
    visible: str | None, names: list[str]
) -> None:
    devices = detect.detect_devices(machine(H200, B200, L4, visible=visible))
    assert [d.name for d in devices] == names
    assert [d.index for d in devices] == list(range(len(names)))


# How many devices the driver counted under each list, on a machine with one.
DRIVER_COUNTED = {
    **dict.fromkeys(("0", "0,1", "0,-1", "0x0", "00", " 0", "0gpu", "+0", "-0"), 1),
    **dict.fromkeys(("", "-1", "0,0", "1", "none", ",0", "GPU-", "GPU-ffff"), 0),
    **dict.fromkeys((H200.uuid, H200.uuid[:8], f"0,{H200.uuid}"), 1),
    **dict.fromkeys((f"{H200.uuid},{H200.uuid[:9]}", f"{H200.uuid.lower()[:4]}3a,0"), 0),
    f"MIG-{H200.uuid}": 0,
}


@pytest.mark.parametrize("visible", DRIVER_COUNTED)
def test_lists_give_as_many_devices_as_the_driver_counted(visible: str) -> None:
    assert len(detect.detect_devices(machine(H200, visible=visible))) == DRIVER_COUNTED[visible]


@pytest.mark.parametrize(
    ("visible", "noted"),
    [
        ("0,7,1", "'7' names no device here; it and what follows is ignored"),
        ("1,1", "names a device twice, which hides them all"),
        ("none", "'none' names no device here"),
        ("GPU-3a11,GPU-9c2f", "'GPU-3a11' could be any of 2 devices"),
        ("GPU-9c2f,GPU-ffff", "'GPU-ffff' names no device here"),
        ("", None),
        ("-1", None),
        ("0,-1", None),
        ("1,0,2", None),
    ],
)
def test_a_list_that_loses_devices_by_mistake_is_noted(visible: str, noted: str | None) -> None:
    notes = detect.detect(machine(H200, B200, L4, visible=visible, order="PCI_BUS_ID")).notes
    assert bool(notes) == (noted is not None)
    assert all("CUDA_VISIBLE_DEVICES" in note and (noted or "") in note for note in notes)


def test_unlike_devices_in_an_unsure_order_are_noted() -> None:
    assert "PCI_BUS_ID" in detect.detect(machine(H200, L4)).notes[0]
    assert detect.detect(machine(H200, L4, order="PCI_BUS_ID")).notes == ()
    assert detect.detect(machine(H200, H200._replace(uuid="GPU-1"))).notes == ()
    assert detect.detect(machine(H200, L4, visible="GPU-3a11f0c2")).notes == ()


OLD = f"MIG-{A100.uuid}"


@pytest.mark.parametrize(
    ("visible", "memory"),
    [
        ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", [20 * GIB]),
        ("MIG-cba6", [5 * GIB]),
        (f"{OLD}/13/0", [5 * GIB]),
        (f"{OLD}/1/0,{OLD}/13/0", [20 * GIB]),
        (f"{OLD}/2/0", []),
        ("MIG-c", []),
        ("MIG-ffff", []),
        ("MIG-cba6,MIG-cba6", []),
        ("0", [20 * GIB]),
        ("GPU-5d5ba0d6", [20 * GIB]),
        (None, [20 * GIB]),
        ("", []),
        ("-1", []),
    ],
)
def test_a_mig_slice_has_its_own_memory(visible: str | None, memory: list[int]) -> None:
    devices = detect.detect_devices(machine(A100, visible=visible))
    assert [d.memory_bytes for d in devices] == memory
    assert all(d.arch == "sm80" and "MIG" in d.name for d in devices)


@pytest.mark.parametrize(
    ("visible", "name", "hidden"),
    [
        ("MIG-cba6,MIG-c6d4", "A100 MIG 1g.5gb", "1 of 2"),
        (None, "A100 MIG 3g.20gb", "2 of 3"),
        ("0,2", "A100 MIG 3g.20gb", "1 of 2"),
        ("0,1", "NVIDIA H200", None),
    ],
)
def test_a_process_sees_one_slice_and_then_no_other_device(
    visible: str | None, name: str, hidden: str | None
) -> None:
    second = H200._replace(uuid="GPU-2")
    found = detect.detect(machine(H200, second, A100, visible=visible, order="PCI_BUS_ID"))
    assert (found.devices[0].name, found.devices[0].index) == (name, 0)
    assert len(found.devices) == (2 if hidden is None else 1)
    assert [note for note in found.notes if "one MIG slice" in note] == (
        []
        if hidden is None
        else [f"CUDA shows a process one MIG slice and no other device: {hidden} are hidden"]
    )


def test_a_device_cut_into_no_slices_cannot_be_used() -> None:
    found = detect.detect(machine(A100._replace(mig=())))
    assert found.devices == ()
    assert "MIG" in found.notes[0]


def test_fields_the_driver_does_not_tell_are_unknown_and_nothing_is_assumed() -> None:
    (device,) = detect.detect_devices(machine(NvmlDevice("GPU-1", "Orin (nvgpu)")))
    assert (device.arch, device.capability, device.memory_bytes) == ("unknown", None, None)
    assert device.traits == frozenset()
    assert len(device.notes) == 1


def test_a_jetsons_files_tell_what_its_nvml_does_not() -> None:
    probes = machine(NvmlDevice("GPU-1", "Orin (nvgpu)"))
    probes.release, probes.compatible = "# R36 (release)", "nvidia,tegra234\0"
    probes.mem = "MemTotal:       64349336 kB\n"
    (device,) = detect.detect_devices(probes)
    assert (device.name, device.arch, device.notes) == ("Orin (nvgpu)", "sm87", ())
    assert device.memory_bytes == 64349336 * 1024
    assert "integrated" in device.traits


def test_a_device_that_shares_the_systems_memory_has_that_memory() -> None:
    gb10 = NvmlDevice("GPU-1", "NVIDIA GB10", (12, 1))
    probes = machine(gb10, H200)
    probes.mem = "MemTotal:       127600748 kB\n"
    shared, own = detect.detect_devices(probes)
    assert (shared.arch, shared.memory_bytes) == ("sm121", 127600748 * 1024)
    assert own.memory_bytes == 150754820096
    assert detect.detect_devices(machine(gb10))[0].memory_bytes is None


class LibraryNotFound(Exception):
    """Stands for pynvml's own classes, which differ between its versions."""


@dataclass
class Module:
    """NVML's bindings, as a value: what each call answers, or raises where it is an exception."""

    init: object = None
    count: object = 1
    capability: object = (9, 0)
    name: object = "NVIDIA H200"
    memory: object = 150754820096
    mig_mode: object = RuntimeError("Not Supported")
    lost: frozenset[int] = frozenset()
    closed: bool = False

    @staticmethod
    def _answer(value: object) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    def nvmlInit(self) -> None:
        self._answer(self.init)

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetCount(self) -> Any:
        return self._answer(self.count)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise RuntimeError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return f"GPU-{handle}" if isinstance(handle, int) else f"MIG-{handle[1]}"

    def nvmlDeviceGetName(self, handle: Any) -> Any:
        return self._answer(self.name)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> Any:
        return self._answer(self.capability)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        total = self._answer(self.memory)
        return type("Memory", (), {"total": total})

    def nvmlDeviceGetMigMode(self, handle: int) -> Any:
        return self._answer(self.mig_mode)

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int:
        return 7 + int(handle[1])

    def nvmlDeviceGetComputeInstanceId(self, handle: Any) -> int:
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, slot: int) -> Any:
        if slot > 1:
            raise RuntimeError("Not Found")
        return (handle, slot)


def test_nvml_is_read_field_by_field_and_closed() -> None:
    module = Module(count=2, name=b"NVIDIA H200")
    reading = nvml.read_nvml(module)
    assert reading.failure is None
    assert [d.uuid for d in reading.devices] == ["GPU-0", "GPU-1"]
    assert reading.devices[0].name == "NVIDIA H200"
    assert not reading.devices[0].mig_enabled
    assert module.closed


def test_mig_slices_are_read_where_the_mode_is_on() -> None:
    (device,) = nvml.read_nvml(Module(mig_mode=(1, 1))).devices
    assert [(i.uuid, i.numbers) for i in device.mig] == [("MIG-0", (7, 0)), ("MIG-1", (8, 0))]
    (device,) = nvml.read_nvml(Module(mig_mode=(0, 1))).devices
    assert device.mig == ()


@pytest.mark.parametrize(
    "failure",
    [
        LibraryNotFound("NVML Shared Library Not Found"),
        RuntimeError("Driver Not Loaded"),
        PermissionError("Insufficient Permissions"),
        OSError("libnvidia-ml.so.1: cannot open shared object file"),
        AttributeError("nvmlInit"),
        KeyError("libamd_smi.so"),
        SystemExit("no driver"),
    ],
)
def test_every_failure_of_nvml_is_survived_and_named(failure: BaseException) -> None:
    for module in (Module(init=failure), Module(count=failure)):
        reading = nvml.read_nvml(module)
        assert reading.devices == ()
        assert reading.failure is not None
        assert type(failure).__name__ in reading.failure


def test_fields_that_fail_alone_leave_the_others() -> None:
    broken = RuntimeError("Not Supported")
    (device,) = nvml.read_nvml(Module(capability=broken, memory=broken, name=broken)).devices
    assert device == NvmlDevice("GPU-0")


@pytest.mark.parametrize("capability", ["[N/A]", None, (), (9,), ("N", "A"), (0, 0), (9, 0, 0)])
@pytest.mark.parametrize("memory", ["[N/A]", None, 0])
def test_fields_that_are_no_numbers_are_unknown(capability: object, memory: object) -> None:
    (device,) = nvml.read_nvml(Module(capability=capability, memory=memory)).devices
    assert device == NvmlDevice("GPU-0", "NVIDIA H200")


def test_a_lost_device_leaves_the_others_and_is_named() -> None:
    reading = nvml.read_nvml(Module(count=3, lost=frozenset({1})))
    assert [d.uuid for d in reading.devices] == ["GPU-0", "GPU-2"]
    assert reading.notes == ("NVIDIA device 1 cannot be used (RuntimeError: GPU is lost)",)
    assert detect.detect(NvidiaMachine(reading)).notes == reading.notes
    failed = nvml.read_nvml(Module(count=1, lost=frozenset({0})))
    assert failed.devices == ()
    assert failed.failure is not None
    assert "GPU is lost" in failed.failure


def no_library() -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def bindings(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that stands where NVIDIA's bindings would."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return name


def test_the_drivers_library_is_read_and_bindings_are_not_needed() -> None:
    (device,) = nvml.load_nvml("no_such_bindings", Module).devices
    assert device.capability == (9, 0)
    failure = nvml.load_nvml("no_such_bindings", no_library).failure
    assert failure is not None
    assert "NVML cannot be loaded (OSError: libnvidia-ml.so.1" in failure


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise KeyError('libnvidia-ml.so')", "cannot be imported (KeyError"),
        ("raise SystemExit(1)", "cannot be imported (SystemExit: 1)"),
        ("import no_such_module_at_all", "cannot be imported (ModuleNotFoundError"),
        ("", "NVML cannot be started (AttributeError"),
        ("def nvmlInit(): raise RuntimeError('Driver Not Loaded')", "Driver Not Loaded"),
    ],
)
def test_bindings_are_asked_only_where_there_is_no_library_and_their_failures_told(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = bindings(tmp_path, f"attnplat_test_bindings_{abs(hash(text))}", text, monkeypatch)
    assert nvml.load_nvml(name, Module).devices
    failure = nvml.load_nvml(name, no_library).failure
    assert failure is not None
    assert "NVML cannot be loaded (OSError" in failure
    assert told in failure


# As much of NVML as detection calls, with one device; `nvmlDeviceGetMigMode` is not supported.
C_LIBRARY = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
static int started;
const char *nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "Uninitialized"; }
int nvmlInit_v2(void) { started = 1; return 0; }
int nvmlShutdown(void) { started = 0; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return started ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) { *handle = &started; return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    strncpy(text, "NVIDIA H200", size); return handle == &started ? 0 : 2; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    strncpy(text, "GPU-3a11f0c2", size); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    memory->total = 150754820096ull; return 0; }
#ifndef MIG
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) { return 3; }
#else
static int slices[2];
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
    *now = *pending = 1; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned i, void **slice) {
    *slice = &slices[i & 1]; return i < 2 ? 0 : 6; }
int nvmlDeviceGetGpuInstanceId(void *slice, unsigned *id) {
    *id = slice == &slices[0] ? 1 : 13; return 0; }
int nvmlDeviceGetComputeInstanceId(void *slice, unsigned *id) { *id = 0; return 0; }
#endif
"""


def built(folder: Path, *options: str) -> nvml_library.NvmlLibrary:
    source, library = folder / "nvml.c", folder / "libnvml.so"
    source.write_text(C_LIBRARY)
    command = ["cc", "-shared", "-fPIC", *options, "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return nvml_library.NvmlLibrary((str(folder / "missing.so"), str(library)))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_drivers_library_is_called_as_its_c_interface_says(tmp_path: Path) -> None:
    loaded = built(tmp_path)
    assert nvml.read_nvml(loaded) == NvmlReading(
        (NvmlDevice("GPU-3a11f0c2", "NVIDIA H200", (9, 0), 150754820096),)
    )
    with pytest.raises(nvml_library.NvmlError, match="nvmlDeviceGetCount_v2: Uninitialized"):
        loaded.nvmlDeviceGetCount()
    with pytest.raises(nvml_library.NvmlError, match="nvmlDeviceGetMigMode: Not Supported"):
        loaded.nvmlDeviceGetMigMode(loaded.nvmlDeviceGetHandleByIndex(0))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_slices_are_read_through_the_drivers_library_too(tmp_path: Path) -> None:
    (device,) = nvml.read_nvml(built(tmp_path, "-DMIG")).devices
    assert device.mig_enabled
    assert [instance.numbers for instance in device.mig] == [(1, 0), (13, 0)]
    assert {instance.memory_bytes for instance in device.mig} == {150754820096}


def test_a_machine_without_the_library_is_an_os_error() -> None:
    for names in ((), ("/nowhere/libnvml.so",)):
        with pytest.raises(OSError, match=r"NVML|nowhere"):
            nvml_library.NvmlLibrary(names)


@pytest.mark.parametrize("name", ["nvml_from_the_test"])
def test_bindings_that_find_the_library_elsewhere_are_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = ["nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"]
    text = "".join(f"def {f}(*a): return 1\n" for f in functions)
    text += "def nvmlDeviceGetUUID(h): return 'GPU-there'\n"
    bindings(tmp_path, name, text, monkeypatch)
    assert nvml.load_nvml(name, no_library).devices == (NvmlDevice("GPU-there"),)


def test_without_driver_and_nvml_there_is_nothing_to_tell() -> None:
    probes = NvidiaMachine(NvmlReading(failure="NVML cannot be loaded"))
    assert detect.detect(probes, may_ask_torch=True) == ((), ())
    assert probes.torch_calls == 0


def test_a_driver_without_nvml_is_noted_and_torch_asked_only_when_allowed() -> None:
    told = TorchReading("cuda", (TorchDevice("NVIDIA H200", (9, 0), 150 * GIB),))
    probes = NvidiaMachine(NvmlReading(failure="no bindings"), files=("/dev/nvidiactl",), told=told)
    found = detect.detect(probes)
    assert found.devices == ()
    assert "no bindings" in found.notes[0]
    assert probes.torch_calls == 0
    (device,) = detect.detect(probes, may_ask_torch=True).devices
    assert (device.arch, device.memory_bytes) == ("sm90", 150 * GIB)
    assert "no bindings" in device.notes[0]


def test_a_container_that_shows_only_its_hosts_driver_has_no_device_and_starts_nothing() -> None:
    files = ("/proc/driver/nvidia/version",)
    probes = NvidiaMachine(NvmlReading(failure="NVML cannot be loaded"), files=files)
    found = detect.detect(probes, may_ask_torch=True)
    assert (found.devices, probes.torch_calls) == ((), 0)
    assert "not in this container" in found.notes[0]


@pytest.mark.parametrize(
    "module",
    [
        Module(init=LibraryNotFound("NVML Shared Library Not Found")),
        Module(init=RuntimeError("Driver Not Loaded")),
        Module(init=PermissionError("Insufficient Permissions")),
        Module(init=RuntimeError("Driver/library version mismatch")),
        Module(count=RuntimeError("Unknown Error")),
        Module(count=0),
        Module(count=1, lost=frozenset({0})),
    ],
)
def test_where_nvml_gives_nothing_torch_does_and_both_are_told(module: Module) -> None:
    reading = nvml.read_nvml(module)
    told = TorchReading("cuda", (TorchDevice("NVIDIA H200", (9, 0), 150 * GIB),))
    probes = NvidiaMachine(reading, files=("/dev/nvidiactl",), told=told)
    (device,) = detect.detect(probes, may_ask_torch=True).devices
    assert device.arch == "sm90"
    assert (reading.failure or "NVML reports no device") in device.notes[0]


def test_torch_and_nvml_that_disagree_are_recorded() -> None:
    told = TorchReading("cuda", (TorchDevice("NVIDIA L4", (8, 9), 24 * GIB),))
    probes = NvidiaMachine(NvmlReading(), files=("/dev/nvidiactl",), told=told)
    (device,) = detect.detect(probes, may_ask_torch=True).devices
    assert "NVML reports no device" in device.notes[0]
    probes.told = TorchReading("rocm", (TorchDevice("MI300X", (9, 4), 192 * GIB, "gfx942"),))
    assert detect.detect(probes, may_ask_torch=True).devices == ()


@pytest.mark.parametrize(
    ("release", "compatible", "name"),
    [
        ("# R36 (release), REVISION: 4.3", "nvidia,p3737-0000\0nvidia,tegra234\0", "sm87"),
        ("# R38 (release), REVISION: 2.0", "nvidia,p3834\0nvidia,tegra264\0", "sm110"),
        ("# R35 (release), REVISION: 4.1", "nvidia,tegra194\0", "sm72"),
        ("# R32 (release), REVISION: 7.1", "nvidia,tegra210\0", "sm53"),
        ("# R36 (release), REVISION: 4.3", None, "sm87"),
        ("# R35 (release), REVISION: 4.1", None, "sm72"),
        ("# R32 (release)", "", "sm53"),
        ("", None, "sm53"),
        ("# R99999999999 (release)", None, "sm87"),
    ],
)
def test_a_jetson_without_nvml_is_known_by_its_files(
    release: str, compatible: str | None, name: str
) -> None:
    (device,) = detect.detect_devices(NvidiaMachine(release=release, compatible=compatible))
    assert (device.platform, device.arch) == ("cuda", name)
    assert "integrated" in device.traits
    hidden = NvidiaMachine(
        environment=DriverEnvironment(cuda_visible_devices=""),
        release=release,
        compatible=compatible,
    )
    assert detect.detect_devices(hidden) == ()


def test_looking_for_devices_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from attnplat.platforms.cuda import detect\n"
        "detect.detect()\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
