"""Running scenes on a subject, and judging what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attnplat.backends.interface import AttentionImpl
from attnplat.backends.plan import Plan
from attnplat.testing.bits import differing
from attnplat.testing.case import Check, Failed
from attnplat.testing.compare import Gap, allowed_for, gap, tolerance_class
from attnplat.testing.scenes import Arrangement, Scene
from attnplat.testing.stage import Stage, lay_out
from attnplat.testing.subject import Subject


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one call gave: `out` [rows, heads, v_head_size], `lse` [rows, heads] or None."""

    out: torch.Tensor
    lse: torch.Tensor | None
    stage: Stage
    plan: Plan


class Bench:
    """Runs scenes on one subject.

    Attributes:
        subject: what runs.
        gaps: the worst error of each tolerance class so far.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.gaps: dict[str, Gap] = {}

    @property
    def device(self) -> torch.device:
        """Where scenes run."""
        return self.subject.device

    def impl(self, scene: Scene) -> AttentionImpl:
        """The subject's implementation for the scene's layer."""
        return self.subject.impl.create(scene.config, self.device, encoding=scene.encoding)

    def lay_out(self, scene: Scene, how: Arrangement, impl: AttentionImpl | None = None) -> Stage:
        """The scene in the device's memory."""
        return lay_out(scene, how, impl or self.impl(scene), self.device)

    def call(
        self,
        scene: Scene,
        how: Arrangement,
        *,
        impl: AttentionImpl | None = None,
        stage: Stage | None = None,
        plan: Plan | None = None,
        **planning: Any,
    ) -> Outcome:
        """One call of one layer; also fails on anything written that must not be."""
        impl = impl or self.impl(scene)
        stage = stage or self.lay_out(scene, how, impl)
        if plan is None:
            plan = impl.plan(stage.batch, stage.pages, validate=how.validate, **planning)
        result = self.forward(impl, plan, stage)
        if damage := stage.damage():
            raise Failed(damage)
        return Outcome(*result, stage, plan)

    def forward(
        self, impl: AttentionImpl, plan: Plan, stage: Stage
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Live rows of out and LSE, as the stage's arrangement asks to write and return them."""
        out, lse = self.launch(impl, plan, stage)
        real = stage.scene.num_rows
        self._check_result(stage, out, lse)
        return out[:real], None if lse is None else lse[:real]

    def launch(
        self, impl: AttentionImpl, plan: Plan, stage: Stage
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All rows of out and LSE, not looked at."""
        kv = stage.kv
        if stage.how.write == "first" and stage.cache is not None:
            assert kv is not None
            impl.write_kv(stage.cache, *kv, plan, **stage.scales)
            kv = None
        give = stage.lse if impl.form.lse else None
        ask = impl.form.lse and give is None
        result = impl.forward(
            plan, stage.q, stage.cache, kv=kv, **stage.options, out=stage.out, lse=give,
            return_lse=ask,
        )  # fmt: skip
        return result if isinstance(result, tuple) else (result, give)

    def _check_result(self, stage: Stage, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        scene, rules = stage.scene, stage.scene.rules
        if stage.out is not None and out is not stage.out:
            raise Failed("the result is not the tensor that was given for it")
        rows = scene.num_rows + stage.how.padding
        if tuple(out.shape) != (rows, rules.num_heads, rules.v_head_size):
            raise Failed(f"out has shape {list(out.shape)}")
        if out.dtype != scene.dtype:
            raise Failed(f"out has dtype {out.dtype}")
        if stage.out is None and differing(
            out[scene.num_rows :], torch.zeros_like(out[scene.num_rows :])
        ):
            raise Failed("padding rows of an allocated out are not zero")
        if lse is not None and (lse.dtype, tuple(lse.shape)) != (
            torch.float32,
            (rows, rules.num_heads),
        ):
            raise Failed(f"lse is {lse.dtype} {list(lse.shape)}")

    def judge(
        self, scene: Scene, outcome: Outcome, *, cancels: bool = False, merged: bool = False
    ) -> None:
        """Fail unless the outcome, `merged` of parts or not, is within the contract of the
        truth."""
        name = tolerance_class(scene, tf32=self._tf32(), merged=merged)
        allowed = allowed_for(scene, name)
        found = gap(scene, outcome.out, outcome.lse, allowed, cancels=cancels)
        if why := found.beyond(allowed):
            raise Failed(why)
        self.note(name, found)

    def note(self, name: str, found: Gap) -> None:
        """Remember an error of a class."""
        self.gaps[name] = found.worse(self.gaps.get(name, Gap()))

    def _tf32(self) -> bool:
        return self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"

    def agree(self, scene: Scene, how: Arrangement, **options: Any) -> Outcome:
        """Call, and fail unless the outcome is within the contract."""
        outcome = self.call(scene, how, **options)
        self.judge(scene, outcome)
        return outcome


def same(what: str, one: Outcome, other: Outcome) -> None:
    """Fail unless two outcomes are equal bit by bit."""
    if count := differing(one.out, other.out):
        raise Failed(f"{what}: {count} elements of out differ")
    if one.lse is not None and other.lse is not None and (count := differing(one.lse, other.lse)):
        raise Failed(f"{what}: {count} elements of lse differ")


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """What torch may do to float32 products inside: `highest`, or `high`, which is TF32 on CUDA."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's CPU threads set to `count` inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# The usual checks ----------------------------------------------------------------------------


def layers(*scenes: Scene) -> tuple[Any, ...]:
    """The layers of scenes, for `Check.configs`."""
    return tuple((scene.config, scene.encoding) for scene in scenes)


def agrees(scene: Scene, how: Arrangement, *, cancels: bool = False) -> Check:
    """The scene gives what the truth gives."""

    def run(bench: Bench) -> None:
        outcome = bench.call(scene, how)
        bench.judge(scene, outcome, cancels=cancels)

    return Check(layers(scene), run, f"{scene} [{how}]")


def exact(scene: Scene, how: Arrangement) -> Check:
    """The scene gives the truth rounded to its dtype, bit for bit up to the sign of zero."""

    def run(bench: Bench) -> None:
        outcome = bench.agree(scene, how)
        truth = torch.cat([answer.out for answer in scene.answers]).to(scene.dtype)
        wrong = outcome.out.cpu() != truth
        if bool(wrong.any()):
            row, head = (int(i) for i in wrong.nonzero()[0][:2])
            raise Failed(f"row {row}, head {head} must be exact and is not")

    return Check(layers(scene), run, f"{scene} [{how}]")


def unchanged(scene: Scene, *hows: Arrangement) -> Check:
    """All arrangements of the scene give the same bits, and the truth."""

    def run(bench: Bench) -> None:
        first = bench.agree(scene, hows[0])
        for how in hows[1:]:
            same(f"{how}, compared with {hows[0]}", first, bench.call(scene, how))

    return Check(layers(scene), run, str(scene))


def raises(
    what: str, errors: type[Exception] | tuple[type[Exception], ...], action: Any
) -> Exception:
    """The error that `action` raises; fails when it raises none or another."""
    try:
        action()
    except errors as error:
        return error
    except Exception as error:
        raise Failed(f"{what} raises {type(error).__name__}: {error}") from error
    raise Failed(f"{what} raises nothing")
