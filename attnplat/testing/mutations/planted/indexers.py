"""Bugs in sparse indexers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnplat.backends.portable.reference_indexer import ReferenceIndexerImpl
from attnplat.testing.mutations.bug import BugList

BUGS = BugList("IH")
Tensor = torch.Tensor
NEG_INF = float("-inf")


@BUGS.indexer
class IndexerWithoutReLU(ReferenceIndexerImpl):
    """Scores are not cut at 0 before they are weighted."""

    def logits(
        self, batch: Any, pages: Any, cache: Any, q: Tensor, weights: Tensor, **given: Any
    ) -> Tensor:
        plus = super().logits(batch, pages, cache, q, weights, **given)
        minus = super().logits(batch, pages, cache, -q, weights, **given)
        return torch.where(plus == NEG_INF, plus, plus - minus)


@BUGS.indexer
class IndexerWeightsSwapped(ReferenceIndexerImpl):
    """Each head has the next one's weight."""

    def logits(
        self, batch: Any, pages: Any, cache: Any, q: Tensor, weights: Tensor, **given: Any
    ) -> Tensor:
        return super().logits(batch, pages, cache, q, weights.roll(1, 1), **given)


@BUGS.indexer
class IndexerSeesFuture(ReferenceIndexerImpl):
    """Rows see keys in their future."""

    def logits(
        self, batch: Any, pages: Any, cache: Any, q: Tensor, weights: Tensor, **given: Any
    ) -> Tensor:
        start = batch.query_start_loc
        count = start[1:] - start[:-1]
        ends = torch.repeat_interleave(batch.seq_lens, count)
        return super().logits(batch, pages, cache, q, weights, row_ends=ends.int())


@BUGS.indexer
class IndexerChoosesNaN(ReferenceIndexerImpl):
    """A NaN score is chosen before all others."""

    def topk(
        self, batch: Any, pages: Any, cache: Any, q: Tensor, weights: Tensor, **given: Any
    ) -> Tensor:
        chosen = super().topk(batch, pages, cache, q, weights, **given)
        logits = self.logits(batch, pages, cache, q, weights, **given)
        spoilt = logits.isnan()
        first = torch.where(spoilt.any(1), spoilt.int().argmax(1), chosen[:, 0].long())
        return torch.cat([first[:, None].int(), chosen[:, 1:]], 1)


@BUGS.indexer
class IndexerFillsWithZero(ReferenceIndexerImpl):
    """Rows short of k are filled with key 0."""

    def topk(self, *arguments: Any, **given: Any) -> Tensor:
        return super().topk(*arguments, **given).clamp(min=0)


@BUGS.indexer
class IndexerScoresTail(ReferenceIndexerImpl):
    """The cache's blocks past a sequence are scored."""

    def logits(
        self, batch: Any, pages: Any, cache: Any, q: Tensor, weights: Tensor, **given: Any
    ) -> Tensor:
        found = super().logits(batch, pages, cache, q, weights, **given)
        return torch.where(found == NEG_INF, 1e9, found)


@BUGS.indexer
class IndexerDropsTies(ReferenceIndexerImpl):
    """Of keys with equal scores one is chosen."""

    def topk(
        self, batch: Any, pages: Any, cache: Any, q: Tensor, weights: Tensor, **given: Any
    ) -> Tensor:
        chosen = super().topk(batch, pages, cache, q, weights, **given)
        logits = self.logits(batch, pages, cache, q, weights, **given)
        scores = logits.gather(1, chosen.clamp(min=0).long())
        again = torch.zeros_like(chosen, dtype=torch.bool)
        again[:, 1:] = (scores[:, 1:] == scores[:, :-1]) & (chosen[:, 1:] >= 0)
        return torch.where(again, -1, chosen)


@BUGS.indexer
class IndexerReadsOtherBlocks(ReferenceIndexerImpl):
    """All requests read the first one's blocks."""

    def logits(
        self, batch: Any, pages: Any, cache: Any, q: Tensor, weights: Tensor, **given: Any
    ) -> Tensor:
        table = pages.block_table[:1].expand_as(pages.block_table)
        found = replace(pages, block_table=torch.where(pages.block_table < 0, -1, table.abs()))
        return super().logits(batch, found, cache, q, weights, **given)
