"""Rows of bytes written by hand, and what they must decode to."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from attnplat.backends.formats.facts import format_of
from attnplat.testing.bench import Bench
from attnplat.testing.case import Check, Failed

ONE_E4M3 = 0x38
"""1.0 in OCP e4m3."""

ONES_E2M1 = 0x22
"""Two 1.0 in e2m1."""


def decoded(
    bench: Bench, encoding: str, stored: torch.Tensor, size: int, **given: object
) -> torch.Tensor:
    """Rows uint8 [..., bytes] of one head, as float64 [..., size] on the CPU."""
    rows = stored[..., None, :].to(bench.device)
    out = bench.subject.library.decode_rows(
        format_of(encoding), rows, size=size, dtype=torch.float64, **given
    )
    return out.squeeze(-2).cpu()


def encoded(bench: Bench, encoding: str, x: torch.Tensor, **given: object) -> torch.Tensor:
    """Rows [..., size] of one head as uint8 [..., bytes] on the CPU."""
    rows = bench.subject.library.encode_rows(
        format_of(encoding), x[..., None, :].to(bench.device), **given
    )
    return rows.squeeze(-2).cpu()


def expect(what: str, got: torch.Tensor, wanted: torch.Tensor | list[float]) -> None:
    """Fail unless the numbers are equal, NaN where NaN is wanted."""
    wanted = torch.as_tensor(wanted, dtype=got.dtype)
    if got.shape != wanted.shape:
        raise Failed(f"{what}: shape {list(got.shape)}, must be {list(wanted.shape)}")
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    if not bool(same.all()):
        at = tuple(int(i) for i in (~same).nonzero()[0])
        raise Failed(f"{what}: element {at} is {float(got[at])}, must be {float(wanted[at])}")


def check(note: str, run: object) -> Check:
    """A check of the codecs alone, which asks nothing of the implementation."""
    return Check((), run, note)  # type: ignore[arg-type]


def row(*parts: bytes) -> torch.Tensor:
    """Bytes as a row, uint8."""
    return torch.tensor(list(b"".join(parts)), dtype=torch.uint8)


def bfloat16(*values: float) -> bytes:
    """Values as bfloat16, little-endian; each must be one exactly."""
    return b"".join(struct.pack("<f", value)[2:] for value in values)


def latent_rows() -> Iterator[Check]:
    """One row of each latent format by hand: tiles of ones, each with its own scale."""
    rope = [0.5 * i - 9.0 for i in range(64)]

    def fp8_656(bench: Bench) -> None:
        scales = struct.pack("<4f", 1.0, 2.0, 0.25, 512.0)
        stored = row(bytes([ONE_E4M3] * 512), scales, bfloat16(*rope))
        wanted = [1.0] * 128 + [2.0] * 128 + [0.25] * 128 + [512.0] * 128 + rope
        expect("mla_fp8_656", decoded(bench, "mla_fp8_656", stored, 576), wanted)

    def fp8_584(bench: Bench) -> None:
        scales = bytes(127 + e for e in (0, 1, 2, -1, -2, 3, 4)) + b"\xff"
        stored = row(bytes([ONE_E4M3] * 448), bfloat16(*rope), scales)
        wanted = [2.0**e for e in (0, 1, 2, -1, -2, 3, 4) for _ in range(64)] + rope
        expect("mla_fp8_584", decoded(bench, "mla_fp8_584", stored, 512), wanted)

    def fp8_528(bench: Bench) -> None:
        exponents = [i - 8 for i in range(16)]
        stored = row(bytes([ONE_E4M3] * 512), bytes(127 + e for e in exponents))
        wanted = [2.0**e for e in exponents for _ in range(32)]
        expect("mla_fp8_528", decoded(bench, "mla_fp8_528", stored, 512), wanted)

    def nvfp4_352(bench: Bench) -> None:
        # Scale of tile t is byte 8 * (t % 4) + t // 4: 1.0 times 2 ** (t % 4).
        scales = bytearray(32)
        for tile in range(32):
            scales[8 * (tile % 4) + tile // 4] = ONE_E4M3 + 8 * (tile % 4)
        stored = row(bytes([ONES_E2M1] * 256), bytes([ONE_E4M3] * 64), bytes(scales))
        wanted = [2.0 ** (tile % 4) for tile in range(32) for _ in range(16)] + [1.0] * 64
        expect("mla_nvfp4_352", decoded(bench, "mla_nvfp4_352", stored, 576), wanted)

    for run in (fp8_656, fp8_584, fp8_528, nvfp4_352):
        yield check(run.__name__, run)
