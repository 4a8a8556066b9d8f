"""Bugs in masks."""

from __future__ import annotations

import math

import torch

from attnplat.backends.batch import Batch
from attnplat.backends.plan import Call, Plan
from attnplat.config.layer import MhaConfig
from attnplat.testing.mutations.bug import BugList
from attnplat.testing.mutations.specimen import Rows, Specimen

BUGS = BugList("DABKJ")
Tensor = torch.Tensor


@BUGS.impl
class WindowLeftWide(Specimen):
    """The window's left edge lies one key too far."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        return super().window(p, j) | super().window(p - 1, j)


@BUGS.impl
class WindowLeftNarrow(Specimen):
    """The window's left edge lies one key too near."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        return super().window(p, j) & super().window(p + 1, j)


@BUGS.impl
class WindowRightWide(Specimen):
    """The window's right edge lies one key too far."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        return super().window(p, j) | super().window(p + 1, j)


@BUGS.impl
class WindowRightNarrow(Specimen):
    """The window's right edge lies one key too near."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        return super().window(p, j) & super().window(p - 1, j)


@BUGS.impl
class WindowSwapped(Specimen):
    """Left and right of the window are swapped."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        return super().window(-p, -j)


@BUGS.impl
class WindowIgnored(Specimen):
    """The window is ignored."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        return torch.ones_like(p - j, dtype=torch.bool)


@BUGS.impl
class WindowIgnoredInDecode(Specimen):
    """The window is ignored where a request has one row."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        return super().window(p, j) | (torch.ones_like(p - j, dtype=torch.bool) & (len(p) == 1))


@BUGS.impl
class WindowOfLastRow(Specimen):
    """All rows of a request have the last row's left edge."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        return super().window(p, j) & super().window(p.max(), j)


@BUGS.impl
class WindowOfFirstRow(Specimen):
    """All rows of a request have the first row's left edge."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        return super().window(p, j) | (super().window(p.min(), j) & (j <= p))


@BUGS.impl
class WindowIn32Bits(Specimen):
    """A window of 2^31 or more wraps to a negative one and hides everything."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        left = self.form.mask.sliding_window[0]
        seen = super().window(p, j)
        return seen & (p - j <= left - (1 << 32)) if left >= 1 << 31 else seen


@BUGS.impl
class WindowCountsItself(Specimen):
    """A window of 0, the token alone, is taken for none."""

    def window(self, p: Tensor, j: Tensor) -> Tensor:
        if self.form.mask.sliding_window[0] == 0:
            return torch.ones_like(p - j, dtype=torch.bool)
        return super().window(p, j)


@BUGS.impl
class CausalTopLeft(Specimen):
    """Causality is aligned top-left: query rows count from 0."""

    def past(self, p: Tensor, j: Tensor) -> Tensor:
        return j <= p - p.min()


@BUGS.impl
class CausalIgnored(Specimen):
    """Causality is ignored."""

    def causal_of(self, batch: Batch, request: int) -> bool:
        return False


@BUGS.impl
class CausalStrict(Specimen):
    """A row does not see its own key."""

    def past(self, p: Tensor, j: Tensor) -> Tensor:
        return (j < p) | ((j == p) & (p == 0))


@BUGS.impl
class CausalLeaksNext(Specimen):
    """A row sees the key after its own."""

    def past(self, p: Tensor, j: Tensor) -> Tensor:
        return j <= p + 1


@BUGS.impl
class CausalPerRequestIgnored(Specimen):
    """Causality per request is ignored."""

    def causal_of(self, batch: Batch, request: int) -> bool:
        return self.form.mask.causal


@BUGS.impl
class CausalOfFirstRequest(Specimen):
    """All requests have the first one's causality."""

    def causal_of(self, batch: Batch, request: int) -> bool:
        return super().causal_of(batch, 0)


@BUGS.impl
class EncoderCausal(Specimen):
    """Layers that are not causal are run as causal."""

    def causal_of(self, batch: Batch, request: int) -> bool:
        return super().causal_of(batch, request) or batch.causal is None


@BUGS.impl
class EncoderNeverCausal(Specimen):
    """An encoder is never causal, whatever its config says."""

    def causal_of(self, batch: Batch, request: int) -> bool:
        config = self.config
        encoder = isinstance(config, MhaConfig) and str(config.attn_type).startswith("encoder")
        return super().causal_of(batch, request) and not encoder


@BUGS.impl
class CrossCausal(Specimen):
    """Cross attention is run as causal."""

    def causal_of(self, batch: Batch, request: int) -> bool:
        return super().causal_of(batch, request) or not self.form.self_attention


@BUGS.impl
class ChunkShifted(Specimen):
    """Chunks begin one key early."""

    def chunk(self, p: Tensor, j: Tensor) -> Tensor:
        return super().chunk(p + 1, j + 1)


@BUGS.impl
class ChunkIgnored(Specimen):
    """Chunks are ignored."""

    def chunk(self, p: Tensor, j: Tensor) -> Tensor:
        return torch.ones_like(p - j, dtype=torch.bool)


@BUGS.impl
class ChunkAsWindow(Specimen):
    """A chunk is taken for a window of its size."""

    def chunk(self, p: Tensor, j: Tensor) -> Tensor:
        size = self.form.mask.chunk_size
        return super().chunk(p, j) if size is None else p - j < size


@BUGS.impl
class PrefixIgnored(Specimen):
    """The prefix of a restarted window is ignored."""

    def shielded(self, batch: Batch, rows: Rows, j: Tensor) -> Tensor:
        return j < self.form.mask.static_sink_tokens


@BUGS.impl
class PrefixShort(Specimen):
    """The prefix of a restarted window lacks its last key."""

    def shielded(self, batch: Batch, rows: Rows, j: Tensor) -> Tensor:
        return super().shielded(batch, rows, j + (batch.prefix_lens is not None))


@BUGS.impl
class PrefixOfFirstRequest(Specimen):
    """All requests have the first one's prefix."""

    def shielded(self, batch: Batch, rows: Rows, j: Tensor) -> Tensor:
        first = Rows(0, rows.first, rows.p, rows.keys, rows.causal)
        return super().shielded(batch, first, j)


@BUGS.impl
class PrefixBidirectional(Specimen):
    """Rows see all of a prefix, also what lies in their future."""

    def visible(self, batch: Batch, rows: Rows, topk: Tensor | None) -> Tensor:
        seen = super().visible(batch, rows, topk)
        if batch.prefix_lens is None:
            return seen
        return seen | self.shielded(batch, rows, torch.arange(rows.keys, device=self.device))


@BUGS.impl
class StaticSinksIgnored(Specimen):
    """Static sink tokens are hidden by the window."""

    def shielded(self, batch: Batch, rows: Rows, j: Tensor) -> Tensor:
        return super().shielded(batch, rows, j) & (batch.prefix_lens is not None)


@BUGS.impl
class StaticSinksTwice(Specimen):
    """Static sink tokens inside the window count twice."""

    def adjusted(self, plan: Plan, call: Call, rows: Rows, s: Tensor, j: Tensor) -> Tensor:
        s = super().adjusted(plan, call, rows, s, j)
        count = self.form.mask.static_sink_tokens
        both = (j < count)[None] & self.window(rows.p[:, None], j[None])
        return s + both * math.log(2)


@BUGS.impl
class RangesIgnored(Specimen):
    """Bidirectional spans are ignored."""

    def in_ranges(self, batch: Batch, rows: Rows, p: Tensor, j: Tensor) -> Tensor:
        return torch.zeros_like(p - j, dtype=torch.bool)


@BUGS.impl
class RangesOfOthers(Specimen):
    """Bidirectional spans of one request apply to all."""

    def in_ranges(self, batch: Batch, rows: Rows, p: Tensor, j: Tensor) -> Tensor:
        seen = torch.zeros_like(p - j, dtype=torch.bool)
        for _, begin, end in [] if batch.ranges is None else batch.ranges.tolist():
            seen = seen | ((begin <= p) & (p < end) & (begin <= j) & (j < end))
        return seen


@BUGS.impl
class RangesBackwards(Specimen):
    """Bidirectional spans lift the window and keep causality."""

    def in_ranges(self, batch: Batch, rows: Rows, p: Tensor, j: Tensor) -> Tensor:
        return super().in_ranges(batch, rows, p, j) & (j <= p)


@BUGS.impl
class RangesTooLong(Specimen):
    """Bidirectional spans include the key at their end."""

    def in_ranges(self, batch: Batch, rows: Rows, p: Tensor, j: Tensor) -> Tensor:
        return super().in_ranges(batch, rows, p, (j - 1).clamp(min=0)) | super().in_ranges(
            batch, rows, p, j
        )


@BUGS.impl
class RangesForKeysOnly(Specimen):
    """Every row sees the keys of a span, not only its own rows."""

    def in_ranges(self, batch: Batch, rows: Rows, p: Tensor, j: Tensor) -> Tensor:
        return super().in_ranges(batch, rows, j, j).expand_as(p - j)


@BUGS.impl
class TreeBitsReversed(Specimen):
    """Tree bits are read from the most significant one."""

    def tree(self, bits: Tensor, offset: Tensor) -> Tensor:
        turned = torch.zeros_like(bits)
        for place in range(8):
            turned |= (bits >> place & 1) << (7 - place)
        return super().tree(turned, offset)


@BUGS.impl
class TreeIgnored(Specimen):
    """The tree is ignored."""

    def tree(self, bits: Tensor, offset: Tensor) -> Tensor:
        return torch.ones((len(bits), offset.shape[1]), dtype=torch.bool, device=bits.device)


@BUGS.impl
class TreeOfOneByte(Specimen):
    """Only the first 8 bits of a tree row are read."""

    def tree(self, bits: Tensor, offset: Tensor) -> Tensor:
        return super().tree(bits[:, :1], offset)


@BUGS.impl
class TreeHidesContext(Specimen):
    """The tree hides keys before the query part."""

    def tree(self, bits: Tensor, offset: Tensor) -> Tensor:
        return super().tree(bits, offset.clamp(min=0))


@BUGS.impl
class TopkMinusOneIsLast(Specimen):
    """An index of -1 names the last key."""

    def named(self, topk: Tensor, keys: int) -> Tensor:
        return super().named(torch.where(topk == -1, keys - 1, topk), keys)


@BUGS.impl
class TopkIgnored(Specimen):
    """Top-k indices are ignored."""

    def named(self, topk: Tensor, keys: int) -> Tensor:
        return torch.ones((len(topk), keys), dtype=torch.bool, device=topk.device)


@BUGS.impl
class TopkStopsAtMinusOne(Specimen):
    """Top-k indices after the first -1 are not read."""

    def named(self, topk: Tensor, keys: int) -> Tensor:
        live = (topk >= 0).long().cumprod(1).bool()
        return super().named(torch.where(live, topk, -1), keys)


@BUGS.impl
class TopkClamped(Specimen):
    """Indices past the sequence are taken for its last key."""

    def named(self, topk: Tensor, keys: int) -> Tensor:
        return super().named(topk.clamp(max=keys - 1), keys)


@BUGS.impl
class TopkOfFirstRow(Specimen):
    """All rows of a request have the first one's indices."""

    def named(self, topk: Tensor, keys: int) -> Tensor:
        return super().named(topk[:1].expand_as(topk), keys)


@BUGS.impl
class TopkBeyondCausality(Specimen):
    """Indices name keys in the future, too."""

    def causal_of(self, batch: Batch, request: int) -> bool:
        return super().causal_of(batch, request) and self.form.mask.topk is None


@BUGS.impl
class LastKeyDropped(Specimen):
    """A sequence's last key is dropped."""

    def visible(self, batch: Batch, rows: Rows, topk: Tensor | None) -> Tensor:
        seen = super().visible(batch, rows, topk)
        if rows.keys > 1:
            seen[:, -1] = False
        return seen


@BUGS.impl
class FirstKeyDropped(Specimen):
    """A sequence's first key is dropped."""

    def visible(self, batch: Batch, rows: Rows, topk: Tensor | None) -> Tensor:
        seen = super().visible(batch, rows, topk)
        if rows.keys > 1:
            seen[:, 0] = False
        return seen


@BUGS.impl
class QueryLongerThanKeys(Specimen):
    """Positions of rows are never negative, also where a shard has fewer keys than rows."""

    def positions(self, rows: int, keys: int) -> Tensor:
        return super().positions(rows, keys).clamp(min=0)
