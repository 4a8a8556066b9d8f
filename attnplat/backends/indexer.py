"""What every sparse indexer is and does: scores of keys, and the best of them.

    logit[m, n] = sum_h w[m, h] * max(0, q[m, h] . k[n])    for n < end[m], else -inf

(DeepSeek-V3.2's lightning indexer.) There is no softmax and no scale; every factor is in w.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch

from attnplat.backends.arch import TorchArch
from attnplat.backends.batch import Batch, HostLengths, PageTable
from attnplat.backends.checks import FLOATS, at_least, check_tensor, same_device
from attnplat.backends.formats.encodings import FNUZ_ARCHS, Encoding
from attnplat.backends.formats.index_pages import IndexPageOrder
from attnplat.backends.index_cache import IndexCache, IndexCacheSpec
from attnplat.config.layer import IndexerConfig
from attnplat.config.names import Feature, parse_name
from attnplat.errors import ConfigError, PlanMismatchError, UnsupportedCallError

_NEG_INF = float("-inf")


class IndexerImpl(ABC):
    """One layer's indexer on one device. Subclasses implement `_logits`,
    and `_topk` where they choose without keeping all scores.

    Attributes:
        name, features, encodings: as for `AttentionImpl`.
        config, device: what it was created for.
        encoding: the stored format of the keys.
    """

    name: ClassVar[str]
    features: ClassVar[frozenset[Feature]]
    encodings: ClassVar[frozenset[Encoding]]

    def __init__(
        self,
        config: IndexerConfig,
        device: torch.device | str,
        encoding: Encoding | str | None,
    ) -> None:
        self.config = config
        self.device = same_device(device)
        if missing := config.needs - self.features:
            raise ConfigError(
                f"{self.name} does not take {', '.join(sorted(missing))}, which the indexer wants"
            )
        if encoding is None:
            self.encoding = resolve_index_encoding(config, self.device)
        else:
            self.encoding = parse_name(Encoding, encoding, "encoding")
        if self.encoding not in self.encodings:
            stores = ", ".join(sorted(self.encodings))
            raise ConfigError(
                f"{self.name} reads {stores}; the cache's encoding is {self.encoding.value}"
            )

    @classmethod
    def create(
        cls,
        config: IndexerConfig,
        device: torch.device | str,
        *,
        encoding: Encoding | str | None = None,
    ) -> Self:
        """The implementation for indexers of `config` on `device`.

        `encoding` is the cache's stored format; left out, it is what `indexer_kv_dtype` means
        on `device`.

        Raises:
            ConfigError: a feature or encoding this backend does not take, or
                `indexer_kv_dtype` auto without an encoding.
        """
        return cls(config, device, encoding)

    def cache_spec(self, block_size: int, order: IndexPageOrder | None = None) -> IndexCacheSpec:
        """The format of the cache; `order` defaults to the planar one."""
        return IndexCacheSpec(
            encoding=self.encoding,
            block_size=block_size,
            head_size=self.config.head_size,
            order=order or IndexPageOrder.planar(),
        )

    def write(self, cache: IndexCache, k: torch.Tensor, pages: PageTable) -> None:
        """Store new keys [rows, head_size] at `pages.slot_mapping`; nothing else is touched.

        Raises as `logits` does; UnsupportedCallError for a table without slots.
        """
        self._check_cache(cache, pages)
        if pages.slot_mapping is None:
            raise UnsupportedCallError("pages.slot_mapping is None; give each new key its slot")
        shape = (len(pages.slot_mapping), self.config.head_size)
        self._check("k", k, shape, FLOATS)
        with torch.no_grad():
            cache.write(k, pages.slot_mapping)

    def logits(
        self,
        batch: Batch,
        pages: PageTable,
        cache: IndexCache,
        q: torch.Tensor,
        weights: torch.Tensor,
        *,
        row_ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The score of every key for every query row.

        Args:
            q: [num_tokens or more, num_heads, head_size], any floating dtype; rotated as the
                keys are.
            weights: [num_tokens or more, num_heads], all factors folded in.
            row_ends: keys each row may see, int32 [num_tokens], at most its request's
                `seq_lens` count. Default: those up to its own position. Compressed keys, and
                the keys of one rank among several, need it.

        Returns:
            float32 [num_tokens, longest sequence of the batch]; columns are positions in the
            row's request, -inf from the row's end on, and everywhere in padding rows.

        Raises:
            PlanMismatchError: a tensor of the wrong shape, dtype or device, or another cache.
            HostLengthsNeededError: the batch carries no exact lengths.
        """
        lengths = self._check_step(batch, pages, cache, q, weights, row_ends)
        out = self._no_logits(batch.num_tokens, lengths)
        with torch.no_grad():
            self._logits(lengths, pages, cache, q, weights, row_ends, out)
        return out

    def topk(
        self,
        batch: Batch,
        pages: PageTable,
        cache: IndexCache,
        q: torch.Tensor,
        weights: torch.Tensor,
        *,
        row_ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The positions of the best keys of each row: `topk_rows` of `logits`.

        int32 [num_tokens, config.topk]. Raises as `logits` does; ConfigError for a config
        without `topk`.
        """
        if self.config.topk is None:
            raise ConfigError("IndexerConfig.topk is None; choosing keys needs their number")
        lengths = self._check_step(batch, pages, cache, q, weights, row_ends)
        shape = (batch.num_tokens, self.config.topk)
        out = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        with torch.no_grad():
            self._topk(lengths, pages, cache, q, weights, row_ends, out)
        return out

    def _check_step(
        self,
        batch: Batch,
        pages: PageTable,
        cache: IndexCache,
        q: torch.Tensor,
        weights: torch.Tensor,
        row_ends: torch.Tensor | None,
    ) -> HostLengths:
        self._check_cache(cache, pages)
        if batch.device != self.device:
            raise PlanMismatchError(f"the batch is on {batch.device}; expected {self.device}")
        rows, config = batch.num_tokens, self.config
        self._check("pages.block_table", pages.block_table, (batch.num_reqs, None), torch.int32)
        self._check("q", q, (at_least(rows), config.num_heads, config.head_size), FLOATS)
        self._check("weights", weights, (at_least(rows), q.shape[1]), FLOATS)
        if row_ends is not None:
            self._check("row_ends", row_ends, (rows,), torch.int32)
        return batch.host_lengths()

    def _no_logits(self, rows: int, lengths: HostLengths) -> torch.Tensor:
        shape = (rows, max(lengths.seq_lens, default=0))
        return torch.full(shape, _NEG_INF, dtype=torch.float32, device=self.device)

    def _check(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int | range | None, ...],
        dtype: torch.dtype | tuple[torch.dtype, ...],
    ) -> None:
        check_tensor(name, tensor, shape=shape, dtype=dtype, device=self.device)

    def _check_cache(self, cache: IndexCache, pages: PageTable) -> None:
        want = self.cache_spec(pages.block_size, cache.spec.order)
        if cache.spec != want:
            raise PlanMismatchError(f"the index cache is {cache.spec}; expected {want}")
        if cache.pool.device != self.device:
            raise PlanMismatchError(f"the cache is on {cache.pool.device}; expected {self.device}")

    @abstractmethod
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
        """Write the scores of visible keys into `out`, which is -inf; headers are checked."""

    def _topk(
        self,
        lengths: HostLengths,
        pages: PageTable,
        cache: IndexCache,
        q: torch.Tensor,
        weights: torch.Tensor,
        row_ends: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the best keys into `out`, which is -1. By default from all scores at once."""
        logits = self._no_logits(out.shape[0], lengths)
        self._logits(lengths, pages, cache, q, weights, row_ends, logits)
        out.copy_(topk_rows(logits, out.shape[1]))


def topk_rows(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """The columns of the `topk` largest logits of each row: int32 [rows, topk], ascending.

    Of equal logits the lower column is taken, 0 and -0 are equal, and neither NaN nor -inf is
    ever taken. -1 fills up at the end.
    """
    # Adding 0 makes -0 of 0's kind, which sorting otherwise may tell apart.
    scores = torch.where(logits.isnan(), _NEG_INF, logits) + 0.0
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)[:, :topk]
    beyond = logits.shape[1]
    taken = torch.where(scores.gather(1, order) > _NEG_INF, order, beyond)
    taken = torch.nn.functional.pad(taken, (0, topk - taken.shape[1]), value=beyond)
    taken = taken.sort(dim=-1).values
    return torch.where(taken == beyond, -1, taken).int()


def resolve_index_encoding(config: IndexerConfig, device: torch.device) -> Encoding:
    """The stored format that `indexer_kv_dtype` means on a device.

    fp8 is e4m3 with a power-of-two float32 scale, in its fnuz form on CDNA3.

    Raises ConfigError for auto, which a selection settles, and for formats no indexer stores.
    """
    word = config.indexer_kv_dtype
    if word == "fp8":
        fnuz = TorchArch.of(device).arch in FNUZ_ARCHS
        return Encoding.INDEX_FP8_132_FNUZ if fnuz else Encoding.INDEX_FP8_132
    found = {"bf16": Encoding.BFLOAT16, "mxfp4": Encoding.INDEX_MXFP4_68}.get(word)
    if found is None:
        raise ConfigError(
            f"IndexerConfig.indexer_kv_dtype is {word!r}, which names no stored format; it "
            "takes 'bf16', 'fp8' or 'mxfp4', or pass the encoding"
        )
    return found
