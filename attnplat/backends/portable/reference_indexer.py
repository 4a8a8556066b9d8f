"""REFERENCE for sparse indexers: every score in float64, one request at a time."""

from __future__ import annotations

import torch

from attnplat.backends.batch import HostLengths, PageTable
from attnplat.backends.checks import to_device
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.formats.facts import FORMATS
from attnplat.backends.index_cache import IndexCache
from attnplat.backends.indexer import IndexerImpl
from attnplat.backends.portable.features import REFERENCE_INDEXER_FEATURES
from attnplat.backends.portable.gather import look_up

_NEG_INF = float("-inf")

PRODUCTS = 1 << 22
"""Most products held at once, 32 MiB of float64; a request of more is cut into row tiles."""


class ReferenceIndexerImpl(IndexerImpl):
    """Scores in float64 from keys exactly as stored, rounded to float32 once."""

    name = "REFERENCE"
    features = REFERENCE_INDEXER_FEATURES
    encodings = frozenset(
        {Encoding.BFLOAT16, *(name for name, format in FORMATS.items() if format.keys_only)}
    )

    def _logits(
        self,
        lengths: HostLengths,
        pages: PageTable,
        cache: IndexCache,
        q: torch.Tensor,
        weights: torch.Tensor,
        row_ends: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        for r, seq_len in enumerate(lengths.seq_lens):
            first, last = lengths.query_start[r], lengths.query_start[r + 1]
            if first == last or seq_len == 0:
                continue
            position = torch.arange(seq_len)
            blocks = look_up(pages, [r], position[None] // pages.block_size)[0]
            tokens = to_device(position % pages.block_size, self.device)
            keys = cache.read(blocks, tokens, torch.float64)
            position = to_device(position, self.device)
            step = max(1, PRODUCTS // (seq_len * q.shape[1]))
            for begin in range(first, last, step):
                rows = slice(begin, min(begin + step, last))
                scores = _scores(q[rows], keys, weights[rows])
                if row_ends is None:
                    own = torch.arange(rows.start, rows.stop, device=self.device) - last
                    ends = own + seq_len + 1
                else:
                    ends = row_ends[rows]
                seen = position < ends[:, None]
                out[rows, :seq_len] = torch.where(seen, scores, _NEG_INF).float()


def _scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_h w * max(0, q . k): float64 [rows, keys]."""
    # A copy even of float64: results must not depend on strides or alignment.
    q = q.to(torch.float64, copy=True).contiguous()
    dots = torch.einsum("mhd,nd->mhn", q, keys)
    return torch.einsum("mh,mhn->mn", weights.double(), dots.clamp(min=0))
