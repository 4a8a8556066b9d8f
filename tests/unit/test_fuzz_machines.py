"""Whatever a driver, a file or an environment says, no exception escapes but attnplat's own."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import attnplat.cli
from attnplat import MhaConfig, platform_for
from attnplat.cli import doctor
from attnplat.cli.examination import Trial, examine
from attnplat.cli.findings import findings
from attnplat.config.env import (
    CPU_ISAS,
    ENV_VARS,
    REPLACED_VARS,
    DriverEnvironment,
    read_driver_env,
    read_env,
)
from attnplat.errors import AttnplatError, ConfigError
from attnplat.platforms.cpu import detect as cpu
from attnplat.platforms.cpu.cgroup import read_limits
from attnplat.platforms.cuda import detect as cuda
from attnplat.platforms.cuda.nvml import NvmlReading, read_nvml
from attnplat.platforms.cuda.visible import visible_devices
from attnplat.platforms.detection import Visible, disagreements, parse_torch_answer
from attnplat.platforms.device import DeviceInfo
from attnplat.platforms.distributions import DISTRIBUTIONS, Installed, installed_versions
from attnplat.platforms.names import known_devices, parse_device_name
from attnplat.platforms.probe_outcome import Outcome, ProbeKind
from attnplat.platforms.probe_specs import spec_for
from attnplat.platforms.probing import Probe, judge
from attnplat.platforms.processes import Ending, PythonRun
from attnplat.platforms.rocm import detect as rocm
from attnplat.platforms.rocm.visible import visible_to_hip, visible_to_rocr
from tests.unit.given_machines import AmdMachine, NvidiaMachine
from tests.unit.recorded_machines import DATA, NAMES, Recorded, recorded

SCHEMA = json.loads((Path(attnplat.cli.__file__).parent / "doctor_schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)

# Texts ---------------------------------------------------------------------------------------

# No variable of an environment holds a NUL; bytes that are no UTF-8 come as lone surrogates.
anything = st.text(max_size=60)
variable_text = st.one_of(
    st.text(alphabet=st.characters(exclude_characters="\0"), max_size=40),
    st.text(alphabet=string.printable + "\udcff", max_size=40),
)
words = st.sampled_from(
    ["", "-1", "0", "1", "2,1", "0x1", "all", "none", "NoDevFiles", "GPU-", "MIG-", "MIG-GPU-",
     "GPU-3a11f0c2", "GPU-9c2f", "MIG-c6d4/1/0", "1gpu", "+", "-", "٣", "²", "1" * 5000, ",", " "]
)  # fmt: skip
device_list = st.one_of(
    variable_text, words, st.lists(st.one_of(words, variable_text), max_size=6).map(",".join)
)
numbers = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from(
        ["", "max", "[N/A]", "Not Supported", "1e9", "-0", "0x10", "1 1", "²", "9" * 99]
    ),
)
values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), anything,
    st.binary(max_size=20), st.lists(st.integers(-3, 99), max_size=3),
    st.tuples(anything, anything),
)  # fmt: skip
errors = st.sampled_from(
    [
        RuntimeError("Not Supported"),
        OSError(),
        KeyError("x"),
        SystemExit(1),
        UnicodeError(),
        Exception(),
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | anything,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(anything, inner, max_size=4),
    max_leaves=12,
)


def recordings(folder: str) -> st.SearchStrategy[str]:
    """Recorded texts, some of their lines lost, doubled, cut or replaced, and pure nonsense."""
    texts = [path.read_text() for path in sorted((DATA / folder).iterdir())]
    return st.one_of(st.sampled_from(texts).flatmap(damaged), st.text(max_size=200))


def damaged(text: str) -> st.SearchStrategy[str]:
    lines = text.splitlines() or [""]
    edits = st.tuples(
        st.integers(0, len(lines) - 1), st.integers(0, 4), numbers, st.integers(0, 300)
    )
    return st.lists(edits, max_size=6).map(lambda wanted: edited(lines, wanted))


def edited(lines: list[str], wanted: list[tuple[int, int, str, int]]) -> str:
    left = list(lines)
    for at, how, number, cut in wanted:
        at %= max(1, len(left))
        if how == 0:
            left[at : at + 1] = []
        elif how == 1:
            left[at:at] = left[at : at + 1]
        elif how == 2:
            left[at : at + 1] = [line[:cut] for line in left[at : at + 1]]
        elif how == 3:
            left[at : at + 1] = [f"{line.split(' ')[0]} {number}" for line in left[at : at + 1]]
        else:
            left.insert(at, number)
    return "\n".join(left)


# Checks --------------------------------------------------------------------------------------


def check_environment(data: st.DataObject) -> None:
    names = [var.name for var in (*ENV_VARS, *REPLACED_VARS)]
    known = st.sampled_from([*names, "ATTNPLAT_", "ATTNPLAT_BACKENDS", "PATH"])
    environ = data.draw(st.dictionaries(st.one_of(known, variable_text), variable_text, max_size=6))
    read_driver_env(environ)
    try:
        environment = read_env(environ)
    except ConfigError as error:
        assert any(var.name in str(error) for var in ENV_VARS)
        return
    json.dumps(environment.to_dict())
    assert all(isinstance(notice, str) for notice in environment.notices)


def well_formed(visible: Visible, count: int) -> None:
    assert len(set(visible.ordinals)) == len(visible.ordinals)
    assert all(0 <= ordinal < count for ordinal in visible.ordinals)
    assert visible.note is None or visible.note


def check_device_lists(data: st.DataObject) -> None:
    uuids = data.draw(
        st.lists(st.sampled_from(["", "GPU-3a11f0c2", "GPU-3a1177", "GPU-9c2f", "MIG-c6d4"]))
    )
    text = data.draw(st.none() | device_list)
    well_formed(visible_devices(text, uuids), len(uuids))
    well_formed(visible_to_rocr(text, uuids), len(uuids))
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        well_formed(visible_to_hip(variable, text, uuids), len(uuids))


def check_device_names(data: st.DataObject) -> None:
    known = st.sampled_from([*known_devices(), "h100", "cuda:1", "gfx942:xnack-"])
    name = data.draw(st.one_of(known.flatmap(damaged), anything, known))
    try:
        parsed = parse_device_name(name)
        if parsed.arch is not None:
            platform_for(name).select(MhaConfig(head_size=128)).explain()
    except AttnplatError as error:
        assert str(error)


class Bindings:
    """NVML as bindings that answer, and raise, whatever is drawn."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def answer(*_: Any) -> Any:
            if name == "nvmlDeviceGetCount":
                return self._data.draw(st.one_of(st.integers(-2, 4), st.sampled_from(["2", None])))
            if name == "nvmlDeviceGetMigMode":
                return self._data.draw(st.sampled_from([(1, 1), (0, 1), (), None, "11"]))
            if name == "nvmlDeviceGetMaxMigDeviceCount":
                return self._data.draw(st.integers(-1, 3))
            found = self._data.draw(st.one_of(values, errors, st.just((9, 0))))
            if isinstance(found, BaseException):
                raise found
            return found

        return answer


def check_nvml(data: st.DataObject) -> None:
    reading = read_nvml(Bindings(data))
    assert bool(reading.failure) or len(reading.devices) + len(reading.notes) <= 4
    for device in reading.devices:
        assert isinstance(device.uuid, str)
        assert isinstance(device.name, str)
        assert device.capability is None or min(device.capability) >= 0
    check_found(
        cuda.detect(
            NvidiaMachine(reading, listing(data.draw(st.none() | device_list))),
            may_ask_torch=data.draw(st.booleans()),
        ).devices
    )


def listing(visible: str | None) -> DriverEnvironment:
    return read_driver_env({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


def check_found(devices: tuple[DeviceInfo, ...]) -> None:
    assert [d.index for d in devices] == list(range(len(devices)))
    for device in devices:
        device_schema = {"$ref": "#/$defs/device", "$defs": SCHEMA["$defs"]}
        Draft202012Validator(device_schema).validate(device.to_dict())


def torchs_answers(usual: object) -> st.SearchStrategy[str | None]:
    return st.one_of(st.none(), json_values.map(json.dumps), st.just(json.dumps(usual)))


def check_jetson_and_wsl(data: st.DataObject) -> None:
    release = st.one_of(st.just("# R36 (release), REVISION: 4.3").flatmap(damaged), anything)
    answer = {"vendor": "cuda", "devices": [["x", [9, 0], 1, None]]}
    probes = NvidiaMachine(
        NvmlReading(failure=data.draw(st.none() | anything)),
        listing(data.draw(st.none() | device_list)),
        data.draw(st.sampled_from([(), ("/dev/nvidiactl",), (cuda.HOST_DRIVER,)])),
        data.draw(st.none() | release),
        data.draw(st.one_of(st.none(), anything, st.just("nvidia,tegra234\0"))),
        data.draw(st.none() | st.one_of(anything, st.just("MemTotal: 1 kB"))),
        parse_torch_answer(data.draw(torchs_answers(answer))),
    )
    found = cuda.detect(probes, may_ask_torch=data.draw(st.booleans()))
    check_found(found.devices)
    assert all(found.notes)
    disagreements("cuda", found.devices, probes.torch())


def check_kfd(data: st.DataObject) -> None:
    texts = recordings("kfd")
    node = st.builds(
        rocm.KfdNode,
        st.integers(0, 9),
        st.none() | texts,
        st.lists(texts, max_size=2).map(tuple),
        st.none() | anything,
    )
    override = st.one_of(variable_text, st.sampled_from(["10.3.0", "9.4.2", "99.99.99", "11"]))
    named = {
        "ROCR_VISIBLE_DEVICES": device_list,
        "HIP_VISIBLE_DEVICES": device_list,
        "CUDA_VISIBLE_DEVICES": device_list,
        "HSA_OVERRIDE_GFX_VERSION": override,
    }
    answer = {"vendor": "rocm", "devices": [["x", [11, 0], 1, "gfx1100"], ["y", [9, 4], 1, "?"]]}
    probes = AmdMachine(
        tuple(data.draw(st.lists(node, max_size=4))),
        read_driver_env(data.draw(st.fixed_dictionaries({}, optional=named))),
        data.draw(st.booleans()),
        data.draw(st.booleans()),
        parse_torch_answer(data.draw(torchs_answers(answer))),
    )
    found = rocm.detect(probes, may_ask_torch=data.draw(st.booleans()))
    for device in found.devices:
        check_found((device,) if device.index == 0 else ())
    disagreements("rocm", found.devices, probes.torch())


@dataclass
class AnyProcessor:
    """The processor's detector's accesses to a machine that says what it likes."""

    data: st.DataObject
    limit: str | None

    def system(self) -> str:
        return self.data.draw(st.sampled_from(["linux", "darwin", "win32", "freebsd14"]))

    def machine(self) -> str:
        known = ["x86_64", "AMD64", "aarch64", "arm64", "riscv64", "i686", "ppc64le", ""]
        return self.data.draw(st.sampled_from(known) | anything)

    def processor(self) -> str:
        return self.data.draw(anything)

    def sysctl(self) -> str | None:
        return self.data.draw(st.none() | recordings("sysctl"))

    def text(self, path: str) -> str | None:
        if path == "/proc/cpuinfo":
            return self.data.draw(st.none() | recordings("cpuinfo"))
        if path == "/proc/meminfo":
            return self.data.draw(st.none() | st.just("MemTotal:  24612345 kB").flatmap(damaged))
        return self.data.draw(cgroup_text)

    def cores(self) -> int | None:
        return self.data.draw(st.none() | st.integers(1, 512))

    def isa_limit(self) -> str | None:
        return self.limit


membership = st.sampled_from(
    ["0::/", "0::/a/b", "0::/../..", "4:memory:/docker/1", "3:cpu,cpuacct:/docker/1", "::", "9", ""]
)
cgroup_text = st.one_of(
    st.none(),
    numbers,
    st.tuples(numbers, numbers).map(" ".join),
    st.lists(st.one_of(membership, anything), max_size=4).map("\n".join),
)


def check_processor(data: st.DataObject) -> None:
    limit = data.draw(st.none() | st.sampled_from(CPU_ISAS))
    try:
        found = cpu.detect(AnyProcessor(data, limit))
    except ConfigError as error:
        assert "ATTNPLAT_CPU_ISA" in str(error)
        return
    check_found(found.devices)
    assert len(found.devices) == 1


def check_control_groups(data: st.DataObject) -> None:
    drawn: dict[str, str | None] = {}

    def read(path: str) -> str | None:
        if path not in drawn:
            drawn[path] = data.draw(cgroup_text)
        return drawn[path]

    limits = read_limits(read)
    assert limits.processors is None or limits.processors > 0
    assert limits.memory_bytes is None or limits.memory_bytes > 0


def check_packages(data: st.DataObject) -> None:
    paths = data.draw(st.lists(anything, max_size=3))
    installed_versions([d.name for d in DISTRIBUTIONS], paths)
    value = data.draw(st.one_of(json_values, st.fixed_dictionaries(
        dict.fromkeys(Outcome("", "", ProbeKind.WORKS, "").to_dict(), json_values)
    )))  # fmt: skip
    Outcome.from_dict(value)
    answer = st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("stage", "error", "file", "symbols", "effects"), json_values),
    )
    run = PythonRun(
        data.draw(anything),
        data.draw(st.none() | anything),
        data.draw(st.sampled_from(Ending)),
        data.draw(st.integers(0, 255)),
        data.draw(anything),
        data.draw(st.one_of(st.none(), anything, json_values.map(json.dumps),
                            answer.map(json.dumps))),
    )  # fmt: skip
    name = data.draw(st.sampled_from(DISTRIBUTIONS)).name
    outcome = judge(Probe(name, "1.0", "", "2.13.0", "pip install it", spec_for(name)), "m", run)
    probe_schema = {"$ref": "#/$defs/probe", "$defs": SCHEMA["$defs"]}
    Draft202012Validator(probe_schema).validate({**outcome.to_dict(), "remembered": False})


def check_whole_machines(data: st.DataObject) -> None:
    machine = recorded(data.draw(st.sampled_from(NAMES)), Path("/nowhere"))
    answers = dict(machine.probes["cpu"].answers)
    files = {
        path: data.draw(damaged(text) if not text.startswith("@") else st.just(text))
        for path, text in answers.get("files", {}).items()
    }
    named = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
    environ = {**answers.get("environ", {})}
    environ.update(data.draw(st.dictionaries(st.sampled_from(named), device_list, max_size=2)))
    changed = Recorded({**answers, "files": files, "environ": environ})
    machine = machine._replace(
        probes=dict.fromkeys(machine.probes, changed), installed=Installed({})
    )
    examination = examine(machine, data.draw(st.sampled_from([None, Trial()])))
    VALIDATOR.validate(json.loads(json.dumps(doctor.report(examination, findings(examination)))))


CHECKS: dict[str, Callable[[st.DataObject], None]] = {
    "environment": check_environment,
    "device lists": check_device_lists,
    "device names": check_device_names,
    "NVML": check_nvml,
    "Jetson and WSL": check_jetson_and_wsl,
    "KFD": check_kfd,
    "processor": check_processor,
    "control groups": check_control_groups,
    "packages": check_packages,
    "whole machines": check_whole_machines,
}
NO_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.parametrize("what", CHECKS)
@settings(max_examples=30, suppress_health_check=NO_CHECKS)
@given(data=st.data())
def test_nothing_but_attnplats_own_errors_escapes(what: str, data: st.DataObject) -> None:
    CHECKS[what](data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", CHECKS)
@settings(max_examples=2000, derandomize=False, suppress_health_check=NO_CHECKS)
@given(data=st.data())
def test_nothing_but_attnplats_own_errors_escapes_for_long(what: str, data: st.DataObject) -> None:
    CHECKS[what](data)


@given(st.text(max_size=200))
@example("[" * 100_000)
@example('{"vendor": "cuda", "devices": [["x", [9, 0], 1e999, null]]}')
@settings(max_examples=30)
def test_torchs_answer_may_be_anything(text: str) -> None:
    reading = parse_torch_answer(text)
    assert reading.failure is not None or isinstance(reading.devices, tuple)
