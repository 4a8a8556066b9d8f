"""The processor's detector reads recorded texts right, whatever the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from attnplat.config.env import CPU_ISAS
from attnplat.errors import ConfigError, UnknownNameError
from attnplat.platforms.cpu import arch, detect
from attnplat.platforms.cpu.arch import AARCH64, X86_64, Processor

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

    def system(self) -> str:
        return self.os

    def machine(self) -> str:
        return self.cpu

    def cpuinfo(self) -> str | None:
        return self.info

    def sysctl(self) -> str | None:
        return self.ctl

    def meminfo(self) -> str | None:
        return self.mem

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
