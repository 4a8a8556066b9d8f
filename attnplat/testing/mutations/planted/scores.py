"""Bugs in scores, softmax and sinks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from attnplat.backends.plan import Call, Plan
from attnplat.testing.mutations.bug import BugList
from attnplat.testing.mutations.specimen import NEG_INF, Rows, Specimen

BUGS = BugList("EOBAHI")
Tensor = torch.Tensor
Three = tuple[Tensor, Tensor, Tensor]


class _Scaled(Specimen):
    """Base of bugs in the scale."""

    def scale(self) -> float:
        return self.form.scale

    def scores(self, plan: Plan, call: Call, rows: Rows, q: Tensor, k: Tensor, j: Tensor) -> Tensor:
        raw = torch.einsum("hrd,khd->hrk", q.to(self.wide), k.to(self.wide))
        return self.adjusted(plan, call, rows, raw * self.scale(), j)


@BUGS.impl
class ScaleIgnored(_Scaled):
    """Scores are not scaled."""

    def scale(self) -> float:
        return 1.0


@BUGS.impl
class ScaleTwice(_Scaled):
    """Scores are scaled twice."""

    def scale(self) -> float:
        return self.form.scale**2


@BUGS.impl
class ScaleAlwaysDefault(_Scaled):
    """A scale that was given is ignored."""

    def scale(self) -> float:
        return float(self.form.head_size**-0.5)


@BUGS.impl
class ScaleOfZeroIsDefault(_Scaled):
    """A scale of 0 is taken for none."""

    def scale(self) -> float:
        return self.form.scale or float(self.form.head_size**-0.5)


@BUGS.impl
class ScalePositive(_Scaled):
    """The scale's sign is lost."""

    def scale(self) -> float:
        return abs(self.form.scale)


@BUGS.impl
class LatentScaleOfRow(_Scaled):
    """Absorbed attention is scaled by the width of the cached row."""

    def scale(self) -> float:
        return float(self.form.head_size**-0.5) if self.form.values_in_keys else self.form.scale


@BUGS.impl
class CapIgnored(Specimen):
    """The soft cap is ignored."""

    def capped(self, s: Tensor) -> Tensor:
        return s


@BUGS.impl
class CapWithoutFactor(Specimen):
    """tanh of the scores, without the cap as factor."""

    def capped(self, s: Tensor) -> Tensor:
        cap = self.form.logits_soft_cap
        return s if cap is None else torch.tanh(s / cap)


@BUGS.impl
class CapAfterMask(Specimen):
    """The soft cap comes after the mask, so hidden keys are at -cap."""

    def capped(self, s: Tensor) -> Tensor:
        return s

    def hidden(self, s: Tensor, seen: Tensor) -> Tensor:
        return super().capped(super().hidden(s, seen))


@BUGS.impl
class CapAfterBiases(Specimen):
    """The soft cap comes after ALiBi and position bias."""

    def capped(self, s: Tensor) -> Tensor:
        return s

    def adjusted(self, plan: Plan, call: Call, rows: Rows, s: Tensor, j: Tensor) -> Tensor:
        return super().capped(super().adjusted(plan, call, rows, s, j))


@BUGS.impl
class CapIgnoredInDecode(Specimen):
    """The soft cap is ignored where a request has one row."""

    def capped(self, s: Tensor) -> Tensor:
        return s if s.shape[1] == 1 else super().capped(s)


@BUGS.impl
class CapByExponentials(Specimen):
    """tanh is computed from exponentials that overflow."""

    def capped(self, s: Tensor) -> Tensor:
        cap = self.form.logits_soft_cap
        if cap is None:
            return s
        high = torch.exp(2 * s / cap)
        return cap * (high - 1) / (high + 1)


@BUGS.impl
class AlibiIgnored(Specimen):
    """ALiBi is ignored."""

    def alibi(self, slopes: Tensor, rows: Rows, j: Tensor) -> Tensor:
        return slopes.new_zeros(1)


@BUGS.impl
class AlibiFromQueryIndex(Specimen):
    """ALiBi counts from a row's index in the step, not from its position."""

    def alibi(self, slopes: Tensor, rows: Rows, j: Tensor) -> Tensor:
        index = torch.arange(len(rows.p), device=self.device)
        return -slopes[:, None, None] * (index[:, None] - j[None]).abs()


@BUGS.impl
class AlibiShifted(Specimen):
    """ALiBi is slope * j: right but for the LSE, when causal."""

    def alibi(self, slopes: Tensor, rows: Rows, j: Tensor) -> Tensor:
        return slopes[:, None, None] * (j[None] - rows.context)


@BUGS.impl
class AlibiSigned(Specimen):
    """ALiBi is not symmetric: keys after a row gain."""

    def alibi(self, slopes: Tensor, rows: Rows, j: Tensor) -> Tensor:
        return -slopes[:, None, None] * (rows.p[:, None] - j[None])


@BUGS.impl
class AlibiOfPowersOfTwo(Specimen):
    """ALiBi slopes are made anew from the number of heads."""

    def alibi(self, slopes: Tensor, rows: Rows, j: Tensor) -> Tensor:
        heads = torch.arange(1, len(slopes) + 1, device=self.device)
        own = (2.0 ** (-8.0 * heads / len(slopes))).to(slopes.dtype)
        return super().alibi(own, rows, j)


@BUGS.impl
class BiasTransposed(Specimen):
    """The position bias of two heads is swapped."""

    def bias(self, table: Tensor, rows: Rows, j: Tensor) -> Tensor:
        return super().bias(table, rows, j).flip(0)


@BUGS.impl
class BiasOfFirstRequest(Specimen):
    """All requests have the first one's position bias."""

    def bias(self, table: Tensor, rows: Rows, j: Tensor) -> Tensor:
        return super().bias(table[0] if table.dim() == 4 else table, rows, j)


@BUGS.impl
class SinkIgnored(Specimen):
    """Sinks are ignored."""

    def with_sink(self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        return high, total, out


@BUGS.impl
class SinkTwice(Specimen):
    """The sink counts twice."""

    def with_sink(self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        return super().with_sink(sinks, *super().with_sink(sinks, high, total, out))


@BUGS.impl
class SinkPerTile(Specimen):
    """The sink counts once for every tile of keys."""

    def attend(self, plan: Plan, call: Call, rows: Rows) -> tuple[Tensor, Tensor]:
        seen = self.visible(plan.batch, rows, call.topk_indices)
        self._tiles = max(1, sum(1 for _ in self.tiles(seen)))
        return super().attend(plan, call, rows)

    def with_sink(self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        return super().with_sink(sinks + math.log(self._tiles), high, total, out)


@BUGS.impl
class SinkOfZeroIsNone(Specimen):
    """Sinks that are all 0 are taken for none."""

    def with_sink(self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        return super().with_sink(sinks, high, total, out) if sinks.any() else (high, total, out)


@BUGS.impl
class SinkScaled(Specimen):
    """The sink is scaled."""

    def with_sink(self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        return super().with_sink(sinks * self.form.scale, high, total, out)


@BUGS.impl
class SinkInBase2(Specimen):
    """The sink is taken for a power of 2."""

    def with_sink(self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        return super().with_sink(sinks * math.log(2), high, total, out)


@BUGS.impl
class SinkCapped(Specimen):
    """The sink is capped."""

    def with_sink(self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        return super().with_sink(self.capped(sinks.float()), high, total, out)


@BUGS.impl
class SinkOfNextHead(Specimen):
    """Each head has the next one's sink."""

    def with_sink(self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        return super().with_sink(sinks.roll(-1), high, total, out)


@BUGS.impl
class SinkNotInLse(Specimen):
    """The LSE leaves the sink out."""

    def finish(self, call: Call, high: Tensor, total: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        result, _ = super().finish(call, high, total, out)
        return result, self.log_sum(high, total).transpose(0, 1)


@BUGS.impl
class SinkOnlyWithKeys(Specimen):
    """A row without keys has an LSE of -inf, not the sink."""

    def finish(self, call: Call, high: Tensor, total: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        result, lse = super().finish(call, high, total, out)
        return result, torch.where((total == 0).transpose(0, 1), NEG_INF, lse)


@BUGS.impl
class SinkIsKeyOfOnes(Specimen):
    """The sink adds a value of 1 to the output, too."""

    def with_sink(self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        higher, more, kept = super().with_sink(sinks, high, total, out)
        share = more - total * torch.exp(high - torch.where(higher == NEG_INF, 0.0, higher))
        return higher, more, kept + share[..., None]


@BUGS.impl
class SinksIn16s(Specimen):
    """Sinks are read 16 heads at a time; the rest has none."""

    def with_sink(self, sinks: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        cut = sinks.float().clone()
        cut[max(4, len(cut) // 16 * 16) :] = NEG_INF
        return super().with_sink(cut, high, total, out)


# Softmax -------------------------------------------------------------------------------------


@BUGS.impl
class ScoresInBfloat16(Specimen):
    """Scores are rounded to bfloat16."""

    def hidden(self, s: Tensor, seen: Tensor) -> Tensor:
        return super().hidden(s.bfloat16().to(s.dtype), seen)


@BUGS.impl
class WeightsInBfloat16(Specimen):
    """Weights are rounded to bfloat16, also for wider layers."""

    def weights(self, s: Tensor, base: Tensor) -> Tensor:
        return super().weights(s, base).bfloat16().to(s.dtype)


@BUGS.impl
class SumsInHalf(Specimen):
    """The running output is kept in float16."""

    def step(self, s: Tensor, v: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        high, total, out = super().step(s, v, high, total, out)
        return high, total, out.half().to(out.dtype)


@BUGS.impl
class TotalInHalf(Specimen):
    """The running sum of weights is kept in float16."""

    def step(self, s: Tensor, v: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        high, total, out = super().step(s, v, high, total, out)
        return high, total.half().to(total.dtype), out


@BUGS.impl
class SentinelFinite(Specimen):
    """Hidden keys have a score of -10000."""

    def hidden(self, s: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen, s, -1e4)


@BUGS.impl
class MaximumStartsFinite(Specimen):
    """The running maximum starts at -10000."""

    def step(self, s: Tensor, v: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        return super().step(s, v, high.clamp(min=-1e4), total, out)


@BUGS.impl
class ExpClamped(Specimen):
    """Exponents are clamped at -20: keys far below keep a weight."""

    def weights(self, s: Tensor, base: Tensor) -> Tensor:
        shifted = torch.where(s == NEG_INF, s, (s - base[..., None]).clamp(min=-20.0))
        return torch.exp(shifted)


@BUGS.impl
class NoMaximum(Specimen):
    """Exponentials are taken without subtracting the maximum."""

    def weights(self, s: Tensor, base: Tensor) -> Tensor:
        return torch.exp(s) * torch.exp(-base[..., None])


@BUGS.impl
class NoRescale(Specimen):
    """What was summed is not rescaled when the maximum rises."""

    def step(self, s: Tensor, v: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        higher, more, new = super().step(s, v, high, torch.zeros_like(total), torch.zeros_like(out))
        return higher, total + more, out + new


@BUGS.impl
class TotalNotRescaled(Specimen):
    """The sum of weights is not rescaled when the maximum rises."""

    def step(self, s: Tensor, v: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        higher, more, _ = super().step(s, v, high, torch.zeros_like(total), out)
        return higher, total + more, super().step(s, v, high, total, out)[2]


@BUGS.impl
class FirstTileUnguarded(Specimen):
    """exp(-inf - -inf) where a row's first tile is hidden."""

    def step(self, s: Tensor, v: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        higher = torch.maximum(high, s.amax(-1))
        weights, kept = torch.exp(s - higher[..., None]), torch.exp(high - higher)
        kept = torch.where(high == NEG_INF, torch.where(higher == NEG_INF, kept, 0.0), kept)
        total = total * kept + weights.sum(-1)
        out = out * kept[..., None] + torch.einsum("hrk,khd->hrd", weights, v)
        return higher, total, out


@BUGS.impl
class LastTileDropped(Specimen):
    """The last tile, if it is not full, is dropped."""

    def tiles(self, seen: Tensor) -> Iterator[Tensor]:
        for number, tile in enumerate(super().tiles(seen)):
            if number == 0 or len(tile) == self.tile:
                yield tile


@BUGS.impl
class OneKeyTileDropped(Specimen):
    """A tile of a single key is dropped unless it is the first."""

    def tiles(self, seen: Tensor) -> Iterator[Tensor]:
        for number, tile in enumerate(super().tiles(seen)):
            if number == 0 or len(tile) > 1:
                yield tile


@BUGS.impl
class LongSequenceCut(Specimen):
    """Keys past 8192 are dropped."""

    def tiles(self, seen: Tensor) -> Iterator[Tensor]:
        yield from super().tiles(seen[:, :8192])


@BUGS.impl
class LongRowsCut(Specimen):
    """Rows past 512 see what row 511 sees."""

    def hidden(self, s: Tensor, seen: Tensor) -> Tensor:
        if len(seen) > 512:
            seen = torch.cat([seen[:512], seen[511:512].expand(len(seen) - 512, -1)])
        return super().hidden(s, seen)


@BUGS.impl
class DenominatorEpsilon(Specimen):
    """1e-4 is added to the sum of weights."""

    def divided(self, out: Tensor, total: Tensor) -> Tensor:
        return out / (total + 1e-4)[..., None]


@BUGS.impl
class NotDivided(Specimen):
    """The output is not divided by the sum of weights."""

    def divided(self, out: Tensor, total: Tensor) -> Tensor:
        return out


@BUGS.impl
class EmptyRowNaN(Specimen):
    """A row without keys is 0/0."""

    def divided(self, out: Tensor, total: Tensor) -> Tensor:
        return out / total[..., None]


@BUGS.impl
class EmptyRowOne(Specimen):
    """A row without keys is 1."""

    def divided(self, out: Tensor, total: Tensor) -> Tensor:
        return torch.where((total == 0)[..., None], 1.0, super().divided(out, total))


@BUGS.impl
class EmptyRowLseZero(Specimen):
    """The LSE of a row without keys is 0."""

    def log_sum(self, high: Tensor, total: Tensor) -> Tensor:
        return torch.where(total == 0, 0.0, super().log_sum(high, total))


@BUGS.impl
class EmptyRowLseInf(Specimen):
    """The LSE of a row without keys is +inf."""

    def log_sum(self, high: Tensor, total: Tensor) -> Tensor:
        return torch.where(total == 0, math.inf, super().log_sum(high, total))


@BUGS.impl
class LseInBase2(Specimen):
    """The LSE is in base 2."""

    def log_sum(self, high: Tensor, total: Tensor) -> Tensor:
        return super().log_sum(high, total) / math.log(2)


@BUGS.impl
class LseWithoutMaximum(Specimen):
    """The LSE leaves the maximum out."""

    def log_sum(self, high: Tensor, total: Tensor) -> Tensor:
        return torch.log(total)


@BUGS.impl
class LseInHalf(Specimen):
    """The LSE is rounded to float16."""

    def log_sum(self, high: Tensor, total: Tensor) -> Tensor:
        return super().log_sum(high, total).half().to(high.dtype)


@BUGS.impl
class LargeValuesOverflow(Specimen):
    """Values times weights are summed in the activations' dtype."""

    def step(self, s: Tensor, v: Tensor, high: Tensor, total: Tensor, out: Tensor) -> Three:
        high, total, out = super().step(s, v, high, total, out)
        most = torch.finfo(torch.float16).max if self.dtype == torch.float16 else 1e37
        return high, total, torch.where(out.abs() > most, math.inf, out)


@BUGS.impl
class TiesHalved(Specimen):
    """Keys that equal the maximum share one weight."""

    def weights(self, s: Tensor, base: Tensor) -> Tensor:
        top = s == base[..., None]
        count = top.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(top, 1.0 / count, super().weights(s, base))


@BUGS.impl
class DenormalsToNaN(Specimen):
    """Denormal queries are divided by their own size."""

    def scores(self, plan: Plan, call: Call, rows: Rows, q: Tensor, k: Tensor, j: Tensor) -> Tensor:
        tiny = torch.finfo(self.dtype).tiny
        spoilt = torch.where((q.abs() < tiny) & (q != 0), math.nan, q)
        return super().scores(plan, call, rows, spoilt, k, j)


@BUGS.impl
class OutlierChannelClamped(Specimen):
    """Keys are clamped to 64 times the smallest that is usual."""

    def scores(self, plan: Plan, call: Call, rows: Rows, q: Tensor, k: Tensor, j: Tensor) -> Tensor:
        clamped = k.clamp(-180, 180) if self.form.scale != 1.0 else k
        return super().scores(plan, call, rows, q, clamped, j)


class _Codes(Specimen):
    """Base of bugs in the scales of fp8 queries and outputs."""

    def changed(self, name: str, scale: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, plan: Plan, q: Tensor, cache: Any = None, **options: Any) -> Any:
        for name in ("q_scale", "out_scale"):
            if isinstance(options.get(name), Tensor):
                options[name] = self.changed(name, options[name])
        return super().forward(plan, q, cache, **options)


@BUGS.impl
class QueryScaleTwice(_Codes):
    """The scale of fp8 queries is applied twice."""

    def changed(self, name: str, scale: Tensor) -> Tensor:
        return scale * scale if name == "q_scale" else scale


@BUGS.impl
class QueryScaleOfFirstHead(_Codes):
    """All heads of fp8 queries have the first one's scale."""

    def changed(self, name: str, scale: Tensor) -> Tensor:
        return scale[:1] if name == "q_scale" else scale


@BUGS.impl
class OutScaleMultiplies(_Codes):
    """The scale of fp8 outputs multiplies."""

    def changed(self, name: str, scale: Tensor) -> Tensor:
        return scale if name == "q_scale" else 1.0 / scale


@BUGS.impl
class OutScaleIgnored(_Codes):
    """The scale of fp8 outputs is ignored."""

    def changed(self, name: str, scale: Tensor) -> Tensor:
        return scale if name == "q_scale" else torch.ones_like(scale)
