"""The numerical contract: how far an answer may be from the truth.

The metric is relative, per request and head: ||out - truth|| / ||truth|| over the request's
rows. A fixed absolute tolerance would accept almost anything, as outputs shrink with the
number of keys. Rows that see no key have no relative error; they must be exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnplat.testing.scenes import Scene

INF = float("inf")


@dataclass(frozen=True)
class Tolerance:
    """What is allowed: `out` relative; lse `absolute + relative * |lse|`."""

    out: float
    lse: float
    lse_relative: float


CONTRACT = {
    "float64": Tolerance(1e-12, 2e-5, 1e-6),
    "float32": Tolerance(1e-5, 2e-5, 1e-6),
    "tf32": Tolerance(3e-3, 3e-3, 0.0),
    "float16": Tolerance(1.2e-3, 2e-4, 1e-5),
    "bfloat16": Tolerance(8e-3, 2e-4, 1e-5),
    "fp8": Tolerance(6e-2, 2e-2, 0.0),
}
"""Tolerances by class: the activations' dtype, or what the arithmetic was allowed to be."""


def tolerance_class(scene: Scene, *, tf32: bool = False, merged: bool = False) -> str:
    """The class whose tolerance a scene's answer must keep.

    Parts are merged by their LSEs, which are float32 whatever the outputs are: a whole that was
    `merged` of float64 parts is as exact as those.
    """
    name = str(scene.config.dtype)
    if merged and name == "float64":
        return "float32"
    return "tf32" if tf32 and name == "float32" else name


def allowed_for(scene: Scene, name: str) -> Tolerance:
    """What is allowed for a scene's answer in a class.

    No order of a sum of n numbers is promised to be nearer than n roundings (Higham, Accuracy and
    Stability of Numerical Algorithms, 4.2). In float64, and only there, very long sequences reach
    that.
    """
    allowed = CONTRACT[name]
    if name != "float64":
        return allowed
    return replace(allowed, out=max(allowed.out, max(scene.seq_lens, default=0) * 2.0**-53))


@dataclass(frozen=True)
class Gap:
    """How far one answer was from the truth: the worst over requests, rows and heads.

    Attributes:
        out: relative error.
        lse: error beyond what `lse_relative` allows, absolute.
        wrong: what is wrong beyond any tolerance, as a sentence, or None.
    """

    out: float = 0.0
    lse: float = 0.0
    wrong: str | None = None

    def worse(self, other: Gap) -> Gap:
        """The larger error of each kind."""
        return Gap(max(self.out, other.out), max(self.lse, other.lse))

    def beyond(self, allowed: Tolerance) -> str | None:
        """Why the answer is not accepted, or None."""
        if self.wrong is not None:
            return self.wrong
        if not self.out <= allowed.out:
            return f"output is off by {self.out:.2e}, allowed {allowed.out:.1e}"
        if not self.lse <= allowed.lse:
            return f"LSE is off by {self.lse:.2e}, allowed {allowed.lse:.1e}"
        return None


def gap(
    scene: Scene,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    allowed: Tolerance,
    *,
    cancels: bool = False,
) -> Gap:
    """How far `out` [rows, heads, v_head_size] and `lse` [rows, heads] are from the truth.

    `cancels`: values cancel, so that errors are measured against the sum of |weight * value|.
    """
    worst_out = worst_lse = 0.0
    start = 0
    # Nothing closer to the truth than this may be representable.
    step = torch.finfo(out.dtype).tiny * torch.finfo(out.dtype).eps
    for number, answer in enumerate(scene.answers):
        rows = slice(start, start + answer.out.shape[0])
        start = rows.stop
        got = out[rows].double().cpu()
        got_lse = None if lse is None else lse[rows].double().cpu()
        sinks = scene.sinks
        if wrong := _blind_rows(answer.blind, got, got_lse, sinks):
            return Gap(INF, INF, f"request {number}: {wrong}")
        size = answer.magnitude if cancels else answer.out
        worst_out = max(worst_out, _relative(_beyond(got - answer.out, step), size))
        if got_lse is not None:
            worst_lse = max(worst_lse, _lse_gap(got_lse, answer.lse, allowed.lse_relative))
    return Gap(worst_out, worst_lse)


def _blind_rows(
    blind: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> str | None:
    """What is wrong with rows that see no key: 0 and -inf, or 0 and the sink."""
    if not bool(blind.any()):
        return None
    if bool((out[blind] != 0).any()):
        return "a row that sees no key is not 0"
    if lse is None:
        return None
    own = lse[blind]
    if sinks is None:
        return None if bool((own == -INF).all()) else "a row that sees no key has an LSE, not -inf"
    expected = sinks.double().expand_as(own)
    same = torch.isclose(own, expected, rtol=1e-6, atol=1e-6)
    return None if bool(same.all()) else "a row that sees no key has not the sink as its LSE"


def _beyond(difference: torch.Tensor, step: float) -> torch.Tensor:
    """The difference, without what the smallest step of the output's dtype explains."""
    return torch.where(difference.abs() <= step, 0.0, difference)


def _relative(difference: torch.Tensor, size: torch.Tensor) -> float:
    if not difference.numel():
        return 0.0
    off = _norm(difference)
    scale = _norm(size)
    ratio = torch.where(off == 0, 0.0, off / torch.where(scale == 0, 1e-300, scale))
    return float(torch.nan_to_num(ratio, nan=INF).max())


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Per head, over rows and elements; scaled so that squares stay in range."""
    high = tensor.abs().amax((0, 2))
    unit = torch.where((high == 0) | ~torch.isfinite(high), 1.0, high)
    return (tensor / unit[None, :, None]).pow(2).sum((0, 2)).sqrt() * unit


def _lse_gap(got: torch.Tensor, truth: torch.Tensor, relative: float) -> float:
    if not got.numel():
        return 0.0
    same = got == truth
    off = (got - truth).abs() - relative * truth.abs()
    off = torch.where(same, 0.0, off).clamp(min=0.0)
    return float(torch.nan_to_num(off, nan=INF).max())
