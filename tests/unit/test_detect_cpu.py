"""The processor's detector reads recorded texts right, whatever the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attnplat.config.env import CPU_ISAS
from attnplat.errors import ConfigError, UnknownNameError
from attnplat.platforms.cpu import arch, detect
from attnplat.platforms.cpu.arch import AARCH64, X86_64, Processor
from attnplat.platforms.cpu.cgroup import read_limits

DATA = Path(__file__).parents[1] / "data" / "detect"

AVX512 = {"avx2", "fma", "f16c", "avx512", "avx512f", "avx512bw", "avx512vl", "avx512dq"}


@dataclass
class Recorded:
    """The system accesses of a machine whose answers were written down."""

    os: str = "linux"
    cpu: str = "x86_64"
    info: str | None = None
    ctl: str | None = None
    mem: str | None = None
    count: int | None = 8
    limit: str | None = None
    identifier: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def system(self) -> str:
        return self.os

    def machine(self) -> str:
        return self.cpu

    def processor(self) -> str:
        return self.identifier

    def text(self, path: str) -> str | None:
        known = {"/proc/cpuinfo": self.info, "/proc/meminfo": self.mem, **self.files}
        return known.get(path)

    def sysctl(self) -> str | None:
        return self.ctl

    def cores(self) -> int | None:
        return self.count

    def isa_limit(self) -> str | None:
        return self.limit


def linux(name: str, machine: str = "x86_64", **more: object) -> Recorded:
    text = (DATA / "cpuinfo" / f"{name}.txt").read_text()
    return Recorded(cpu=machine, info=text, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "machine", "isa", "has", "lacks"),
    [
        (
            "intel_sapphire_rapids",
            "x86_64",
            "amx",
            {"intel", "scalar", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", *AVX512},
            {"amd", "neon", "amx_fp16"},
        ),
        (
            "intel_emerald_rapids_vm",
            "x86_64",
            "amx",
            {"intel", "amx_int8", "avx512_fp16", "avx_vnni"},
            {"amx_fp16"},
        ),
        ("amd_zen4", "x86_64", "avx512_bf16", {"amd", "avx512_vnni", *AVX512}, {"amx", "intel"}),
        ("intel_skylake_avx512", "x86_64", "avx512", {"intel", *AVX512}, {"avx512_bf16", "amx"}),
        ("amd_zen3", "x86_64", "avx2", {"amd", "avx2", "fma", "f16c"}, {"avx512", "avx512f"}),
        ("intel_haswell", "x86_64", "avx2", {"intel"}, {"avx512"}),
        ("amd_epyc_vm_2cores", "x86_64", "avx2", {"amd"}, {"avx512"}),
        ("amd_k10", "x86_64", "scalar", {"amd"}, {"avx2", "fma", "f16c"}),
        ("arm_neoverse_v2", "aarch64", "neon_bf16", {"arm", "i8mm", "sve2", "svebf16"}, {"amx"}),
        ("arm_neoverse_n1", "aarch64", "neon", {"arm", "asimddp"}, {"bf16", "sve"}),
        ("arm_cortex_a72", "aarch64", "neon", {"arm", "neon"}, {"asimddp", "neon_bf16"}),
        ("arm_a64fx", "aarch64", "neon", {"sve"}, {"neon_bf16", "svebf16"}),
        ("apple_m2_linux", "aarch64", "neon_bf16", {"arm", "i8mm"}, {"sve"}),
        ("riscv_x60", "riscv64", "scalar", {"riscv64"}, {"neon", "avx2"}),
        ("power8", "ppc64le", "scalar", {"ppc64le"}, {"neon", "avx2"}),
    ],
)
def test_recorded_processors_get_their_highest_isa_and_every_lower_one(
    name: str, machine: str, isa: str, has: set[str], lacks: set[str]
) -> None:
    (device,) = detect.detect_devices(linux(name, machine))
    assert (device.platform, device.arch, device.simulated) == ("cpu", isa, False)
    assert has | {isa, "scalar"} <= device.traits
    assert not lacks & device.traits


@pytest.mark.parametrize(
    ("name", "machine", "isa", "memory", "brand"),
    [
        ("apple_m1", "arm64", "neon", 17179869184, "Apple M1 Pro"),
        ("apple_m4", "arm64", "neon_bf16", 68719476736, "Apple M4 Max"),
        ("intel_haswell", "x86_64", "avx2", None, "Intel(R) Core(TM) i7-4980HQ CPU @ 2.80GHz"),
    ],
)
def test_macos_is_read_from_sysctl(
    name: str, machine: str, isa: str, memory: int | None, brand: str
) -> None:
    text = (DATA / "sysctl" / f"{name}.txt").read_text()
    (device,) = detect.detect_devices(Recorded(os="darwin", cpu=machine, ctl=text))
    assert (device.arch, device.memory_bytes, device.name) == (isa, memory, brand)
    assert device.notes == ()


def test_a_mixed_machine_runs_only_what_all_its_processors_run() -> None:
    big = "vendor_id : GenuineIntel\nflags : avx2 fma f16c avx512f avx512bw avx512vl avx512dq\n"
    little = "vendor_id : GenuineIntel\nflags : avx2 fma f16c\n"
    (device,) = detect.detect_devices(Recorded(info=f"{big}\n{little}\n{big}"))
    assert device.arch == "avx2"
    assert "avx512f" not in device.traits


@pytest.mark.parametrize("missing", ["avx2", "fma", "f16c"])
def test_avx2_needs_all_three_of_its_flags(missing: str) -> None:
    flags = frozenset({"avx2", "fma", "f16c"} - {missing})
    assert arch.usable_isas(Processor(X86_64, flags=flags)) == ("scalar",)


@pytest.mark.parametrize("missing", ["avx512bw", "avx512vl", "avx512dq"])
def test_a_machine_that_hides_part_of_avx512_falls_back_to_avx2(missing: str) -> None:
    flags = frozenset(AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}) - {missing}
    assert arch.usable_isas(Processor(X86_64, flags=flags))[-1] == "avx2"


def test_amx_needs_its_tiles_and_its_bf16_product() -> None:
    base = frozenset(AVX512 | {"avx512_bf16"})
    for extra in ({"amx_tile"}, {"amx_bf16"}, {"amx_int8"}):
        assert arch.usable_isas(Processor(X86_64, flags=base | extra))[-1] == "avx512_bf16"


def test_flags_of_another_machine_mean_nothing() -> None:
    assert arch.usable_isas(Processor(X86_64, flags=frozenset({"asimd", "bf16"}))) == ("scalar",)
    flags = frozenset({"avx2", "fma", "f16c"})
    assert arch.usable_isas(Processor(AARCH64, flags=flags)) == ("scalar", "neon")


@pytest.mark.parametrize("info", [None, "", "garbage", "flags", ": :\n::\n"])
def test_without_a_readable_cpuinfo_x86_is_scalar_and_says_so(info: str | None) -> None:
    (device,) = detect.detect_devices(Recorded(info=info))
    assert device.arch == "scalar"
    assert len(device.notes) == 1


GIB = 2**30
ROOT = "/sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "processors", "memory"),
    [
        ({}, None, None),
        ({"/proc/self/cgroup": ""}, None, None),
        ({"/proc/self/cgroup": "0::/\n"}, None, None),
        # Version 2, in a container that sees its own folder as the root.
        (
            {
                "/proc/self/cgroup": "0::/\n",
                f"{ROOT}/cpu.max": "250000 100000\n",
                f"{ROOT}/memory.max": f"{4 * GIB}\n",
            },
            2.5,
            4 * GIB,
        ),
        # The tightest of all folders above holds.
        (
            {
                "/proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
                f"{ROOT}/system.slice/docker-1.scope/cpu.max": "max 100000\n",
                f"{ROOT}/system.slice/docker-1.scope/memory.max": "max\n",
                f"{ROOT}/system.slice/cpu.max": "400000 100000\n",
                f"{ROOT}/system.slice/memory.max": f"{6 * GIB}\n",
                f"{ROOT}/memory.max": f"{7 * GIB}\n",
            },
            4.0,
            6 * GIB,
        ),
        # A process outside of its namespace's root.
        ({"/proc/self/cgroup": "0::/../../x\n", f"{ROOT}/cpu.max": "50000 100000"}, 0.5, None),
        # Version 1, the host's path that the container does not have.
        (
            {
                "/proc/self/cgroup": "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n0::/\n",
                f"{ROOT}/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
                f"{ROOT}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                f"{ROOT}/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            },
            1.5,
            2 * GIB,
        ),
        # Version 1 without limits.
        (
            {
                "/proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/\n",
                f"{ROOT}/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                f"{ROOT}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                f"{ROOT}/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,
            None,
        ),
        # Nonsense limits nothing.
        (
            {
                "/proc/self/cgroup": "junk\n::\n0::/\n",
                f"{ROOT}/cpu.max": "many few\n",
                f"{ROOT}/memory.max": "-5\n",
            },
            None,
            None,
        ),
        ({"/proc/self/cgroup": "0::/\n", f"{ROOT}/cpu.max": "100000 0\n"}, None, None),
    ],
)
def test_control_groups_of_both_versions_are_read(
    files: dict[str, str], processors: float | None, memory: int | None
) -> None:
    assert read_limits(files.get) == (processors, memory)


@pytest.mark.parametrize(
    ("quota", "affinity", "cores", "noted"),
    [
        ("200000 100000", 8, 2, True),
        ("250000 100000", 8, 3, True),
        ("10000 100000", 8, 1, True),
        ("1600000 100000", 8, 8, False),
        ("max 100000", 8, 8, False),
        ("200000 100000", None, 2, True),
        ("max 100000", 1, 1, False),
    ],
)
def test_cores_are_those_of_the_affinity_and_of_the_control_group(
    quota: str, affinity: int | None, cores: int, noted: bool
) -> None:
    files = {"/proc/self/cgroup": "0::/\n", f"{ROOT}/cpu.max": quota}
    probes = linux("intel_sapphire_rapids", count=affinity, files=files)
    (device,) = detect.detect_devices(probes)
    assert device.cores == cores
    assert bool(device.notes) == noted
    assert all("control group" in note for note in device.notes)


@pytest.mark.parametrize(("limit", "memory"), [(3 * GIB, 3 * GIB), (99 * GIB, 8 * GIB)])
def test_memory_is_the_lesser_of_the_machines_and_the_control_groups(
    limit: int, memory: int
) -> None:
    files = {"/proc/self/cgroup": "0::/\n", f"{ROOT}/memory.max": str(limit)}
    probes = linux("amd_zen4", mem=f"MemTotal: {8 * GIB // 1024} kB\n", files=files)
    assert detect.detect_devices(probes)[0].memory_bytes == memory


@pytest.mark.parametrize(
    ("identifier", "machine", "arch", "vendor", "noted"),
    [
        ("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", "AMD64", "scalar", "intel", True),
        ("AMD64 Family 25 Model 33 Stepping 2, AuthenticAMD", "AMD64", "scalar", "amd", True),
        ("ARMv8 (64-bit) Family 8 Model 1 Revision 201, Qualcomm", "ARM64", "neon", "arm", False),
        ("", "AMD64", "scalar", "x86_64", True),
    ],
)
def test_windows_tells_a_name_and_no_instruction_sets(
    identifier: str, machine: str, arch: str, vendor: str, noted: bool
) -> None:
    probes = Recorded(os="win32", cpu=machine, identifier=identifier, count=16)
    (device,) = detect.detect_devices(probes)
    assert (device.arch, device.name, device.cores) == (arch, identifier, 16)
    assert vendor in device.traits
    assert [note.split()[0] for note in device.notes] == (["Windows"] if noted else [])


def test_an_intel_python_on_an_apple_processor_is_told_of_the_better_one() -> None:
    ctl = "machdep.cpu.brand_string: VirtualApple @ 2.50GHz\nhw.memsize: 17179869184\n"
    (device,) = detect.detect_devices(Recorded(os="darwin", cpu="x86_64", ctl=ctl))
    assert device.arch == "scalar"
    assert "one for ARM is faster" in device.notes[0]


@pytest.mark.parametrize("ctl", [None, "", "hw.memsize\n:::\n", "hw.optional.neon: 0\n"])
def test_a_mac_that_tells_nothing_still_has_what_every_one_of_its_kind_has(
    ctl: str | None,
) -> None:
    (device,) = detect.detect_devices(Recorded(os="darwin", cpu="arm64", ctl=ctl))
    assert (device.arch, device.memory_bytes, device.notes) == ("neon", None, ())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("arm_neoverse_v2", "Neoverse-V2"),
        ("arm_neoverse_n1", "Neoverse-N1"),
        ("arm_a64fx", "A64FX"),
        ("apple_m2_linux", ""),
    ],
)
def test_arms_processors_are_named_by_their_numbers(name: str, told: str) -> None:
    assert detect.detect_devices(linux(name, "aarch64"))[0].name == told


def test_memory_and_cores_are_told() -> None:
    probes = linux("amd_zen4", mem="MemTotal:       24612345 kB\nMemFree: 1 kB\n", count=6)
    (device,) = detect.detect_devices(probes)
    assert (device.memory_bytes, device.cores) == (24612345 * 1024, 6)
    (device,) = detect.detect_devices(linux("amd_zen4", mem="MemTotal: lots\n", count=None))
    assert (device.memory_bytes, device.cores) == (None, None)


@pytest.mark.parametrize(
    ("limit", "keeps", "loses"),
    [
        ("amx", {"amx", "amx_int8"}, set()),
        ("avx512_bf16", {"avx512_bf16"}, {"amx", "amx_tile", "amx_bf16", "amx_int8"}),
        ("avx512", {"avx512", "avx512_vnni"}, {"avx512_bf16", "amx_tile"}),
        ("avx2", {"avx2", "avx_vnni"}, {"avx512", "avx512f", "avx512_vnni", "amx"}),
        ("scalar", {"scalar", "intel"}, {"avx2", "fma", "f16c", "avx_vnni"}),
    ],
)
def test_a_limit_takes_away_the_higher_isas_and_their_flags(
    limit: str, keeps: set[str], loses: set[str]
) -> None:
    (device,) = detect.detect_devices(linux("intel_sapphire_rapids", limit=limit))
    assert device.arch == limit
    assert keeps <= device.traits
    assert not loses & device.traits
    assert bool(device.notes) == (limit != "amx")


@pytest.mark.parametrize("limit", ["amx", "avx512", "neon"])
def test_a_limit_above_the_machine_is_refused_with_what_it_runs(limit: str) -> None:
    with pytest.raises(ConfigError, match=f"{limit}.*runs avx2, scalar"):
        detect.detect_devices(linux("amd_zen3", limit=limit))


@pytest.mark.parametrize(
    ("name", "isa", "has"),
    [
        ("amx", "amx", {"intel", "avx512_bf16", "avx2", "amx_bf16"}),
        ("x86_amx", "amx", {"intel"}),
        ("avx512_bf16", "avx512_bf16", {"avx512"}),
        ("AVX512-BF16", "avx512_bf16", {"avx512"}),
        ("zen", "avx512_bf16", {"amd", "avx512"}),
        ("x86_avx512", "avx512", {"intel", "avx512bw"}),
        ("x86_avx2", "avx2", {"fma"}),
        ("scalar", "scalar", {"x86_64"}),
        ("arm", "neon", {"arm", "aarch64"}),
        ("neon_bf16", "neon_bf16", {"arm", "bf16", "neon"}),
    ],
)
def test_every_kind_of_processor_can_be_simulated(name: str, isa: str, has: set[str]) -> None:
    device = detect.simulate(name)
    assert (device.arch, device.simulated, device.cores) == (isa, True, None)
    assert has | {"scalar", isa} <= device.traits


def test_every_isa_of_the_vocabulary_is_built_up_and_can_be_simulated() -> None:
    assert {"scalar", *(isa.name for isa in arch.ISAS)} == set(CPU_ISAS)
    assert {detect.simulate(name).arch for name in CPU_ISAS} == set(CPU_ISAS)


@pytest.mark.parametrize("name", ["avx51", "sm90", "", "intel", "riscv"])
def test_an_unknown_processor_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownNameError, match="known: amx, arm, avx2"):
        detect.simulate(name)


def test_this_machine_is_found_without_help() -> None:
    (device,) = detect.detect(detect.SystemProbes()).devices
    assert device.arch in CPU_ISAS
    assert device.cores is not None
    assert device.cores >= 1
