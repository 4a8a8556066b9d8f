"""Processors: the instruction sets kernels are built for, and what each processor can run."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from attnplat.errors import ConfigError, UnknownNameError
from attnplat.platforms.device import DeviceInfo, PlatformName

X86_64, AARCH64 = "x86_64", "aarch64"


class Isa(NamedTuple):
    """An instruction set that kernels are built for.

    Attributes:
        name: one of `config.env.CPU_ISAS`.
        machine: the processors that have it.
        flags: what such a processor reports.
        options: flags that may come with it, each a trait of its own.
        above: the next lower one of the same machine, which it includes.
    """

    name: str
    machine: str
    flags: frozenset[str]
    options: frozenset[str]
    above: str


def _isa(name: str, machine: str, flags: str, options: str, above: str) -> Isa:
    return Isa(name, machine, frozenset(flags.split()), frozenset(options.split()), above)


# Lowest first. Below them all is "scalar", which any machine runs.
ISAS: tuple[Isa, ...] = (
    _isa("avx2", X86_64, "avx2 fma f16c", "avx_vnni", "scalar"),
    _isa(
        "avx512",
        X86_64,
        "avx512f avx512bw avx512vl avx512dq",
        "avx512_vnni avx512_fp16",
        "avx2",
    ),
    _isa("avx512_bf16", X86_64, "avx512_bf16", "", "avx512"),
    _isa("amx", X86_64, "amx_tile amx_bf16", "amx_int8 amx_fp16", "avx512_bf16"),
    _isa("neon", AARCH64, "asimd", "asimddp asimdhp i8mm sve sve2", "scalar"),
    _isa("neon_bf16", AARCH64, "bf16", "svebf16", "neon"),
)


class Simulated(NamedTuple):
    """A processor that `simulate` knows by name: its highest ISA and its vendor."""

    isa: str
    vendor: str


SIMULATED: dict[str, Simulated] = {
    "scalar": Simulated("scalar", "intel"),
    "avx2": Simulated("avx2", "intel"),
    "avx512": Simulated("avx512", "intel"),
    "avx512_bf16": Simulated("avx512_bf16", "intel"),
    "amx": Simulated("amx", "intel"),
    "zen": Simulated("avx512_bf16", "amd"),
    "neon": Simulated("neon", "arm"),
    "neon_bf16": Simulated("neon_bf16", "arm"),
    "x86_avx2": Simulated("avx2", "intel"),
    "x86_avx512": Simulated("avx512", "intel"),
    "x86_amx": Simulated("amx", "intel"),
    "arm": Simulated("neon", "arm"),
}


class Processor(NamedTuple):
    """What the operating system says: `flags` only those that every processor here has."""

    machine: str
    vendor: str = ""
    name: str = ""
    flags: frozenset[str] = frozenset()


def simulate(arch: str) -> DeviceInfo:
    """A processor of the given instruction set that is not here: `amx`, `avx2`, `zen` ...

    Raises UnknownNameError with the known names.
    """
    known = SIMULATED.get(arch.strip().lower().replace("-", "_"))
    if known is None:
        raise UnknownNameError("processor architecture", arch, SIMULATED)
    has = [isa for isa in ISAS if isa.name in _with_lower(known.isa)]
    flags = frozenset().union(*(isa.flags for isa in has))
    machine = has[0].machine if has else X86_64
    return replace(device_of(Processor(machine, known.vendor, flags=flags)), simulated=True)


def device_of(processor: Processor, limit: str | None = None) -> DeviceInfo:
    """The device a processor makes: its highest ISA as arch; all it can run, and its vendor.

    `limit` makes it seem as if that were its highest ISA (`ATTNPLAT_CPU_ISA`); ConfigError
    where the processor does not run it.
    """
    usable = usable_isas(processor)
    notes: tuple[str, ...] = ()
    if limit is not None and limit != usable[-1]:
        if limit not in usable:
            runs = ", ".join(reversed(usable))
            raise ConfigError(f"ATTNPLAT_CPU_ISA is {limit!r}; this processor runs {runs}")
        usable = usable[: usable.index(limit) + 1]
        notes = (f"limited to {limit} by ATTNPLAT_CPU_ISA",)
    known = frozenset().union(*(i.flags | i.options for i in ISAS if i.name in usable))
    maker = {processor.vendor} if processor.vendor else set()
    return DeviceInfo(
        platform=PlatformName.CPU,
        arch=usable[-1],
        traits=frozenset({*usable, *(processor.flags & known), *maker, processor.machine}),
        name=processor.name,
        notes=notes,
    )


def usable_isas(processor: Processor) -> tuple[str, ...]:
    """The instruction sets that kernels may use, lowest first, "scalar" always among them."""
    usable = ["scalar"]
    for isa in ISAS:
        # Every 64-bit ARM processor has NEON, whether or not its flags can be read.
        has_all = isa.flags <= processor.flags or isa.name == "neon"
        if has_all and isa.machine == processor.machine and isa.above in usable:
            usable.append(isa.name)
    return tuple(usable)


def _with_lower(isa: str) -> tuple[str, ...]:
    """`isa` and every instruction set it includes."""
    known = next((i for i in ISAS if i.name == isa), None)
    return (isa,) if known is None else (isa, *_with_lower(known.above))
