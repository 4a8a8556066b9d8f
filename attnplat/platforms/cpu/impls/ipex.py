"""IPEX: paged attention by Intel's retired extension, in place over pages.

Requests with one query run in its decoding kernel, the others in its kernel for prompts, which
is where the extension's own callers split a batch. What its kernels get wrong never reaches them:
see `ipex_facts`. Keys and values without a cache are a cache of one-token blocks, and so is a
copy of pages whose size its kernels do not take.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from attnplat.backends.batch import Batch, HostLengths, PageTable
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.plan import Call, Plan, Schedule
from attnplat.backends.portable.gather import highest_block, look_up
from attnplat.backends.workspace import Workspace
from attnplat.config.layer import LayerConfig
from attnplat.config.names import AttnType, Operation
from attnplat.errors import ConfigError, PackageError
from attnplat.platforms.cpu.impls.ipex_facts import (
    IPEX_FEATURES,
    IPEX_TORCH,
    IPEX_VERSION,
    MOST_GROUPED_HEADS,
    PARTITION,
    is_pair,
)
from attnplat.platforms.cpu.impls.opening import require_cpu

NAME = "intel-extension-for-pytorch"


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """The requests of a batch that one kernel runs.

    Attributes:
        rows: their query rows, int64.
        blocks: their blocks in order, int32 [requests, most blocks of any], 0 where one has fewer.
        seq_lens: their keys, int32 [requests].
        query_starts, key_starts: sums of query rows and keys so far, int32 [requests + 1].
        most_queries, most_keys: of any one request.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True, kw_only=True, eq=False)
class IpexSchedule(Schedule):
    """The requests with one query, and those with more.

    `copied` are the spans (request, begin, end) of pages to copy first; None reads in place.
    """

    decoding: Share | None
    prompts: Share | None
    block_size: int
    copied: tuple[tuple[int, int, int], ...] | None


class IpexImpl(AttentionImpl):
    """Causal attention over pages of the activations' own dtype."""

    name = "IPEX"
    operations = frozenset({Operation.MHA})
    features = IPEX_FEATURES
    encodings = frozenset({Encoding.FLOAT32, Encoding.BFLOAT16, Encoding.FLOAT16})
    block_size = 16
    needs_host_lengths = True

    def __init__(
        self, config: LayerConfig, device: torch.device | str, encoding: Encoding | str | None
    ) -> None:
        super().__init__(config, device, encoding)
        form = self.form
        require_cpu(self.name, self.device)
        kind = getattr(config, "attn_type", None)
        if kind != AttnType.DECODER or not form.mask.causal:
            raise ConfigError(f"{self.name} runs causal decoder layers; the layer is {kind}")
        if self.encoding.value != form.dtype.value:
            raise ConfigError(
                f"{self.name} stores keys as {form.dtype.value}, the layer's dtype; the cache's "
                f"encoding is {self.encoding.value}"
            )
        if form.scale <= 0:
            raise ConfigError(f"{self.name} takes a positive scale; the layer's is {form.scale}")
        if form.group_size > MOST_GROUPED_HEADS or form.head_size != form.v_head_size:
            raise ConfigError(
                f"{self.name} takes up to {MOST_GROUPED_HEADS} query heads a key head, and values "
                f"as wide as keys; the layer has {form.group_size}, and sizes {form.head_size} and "
                f"{form.v_head_size}"
            )
        heads = torch.arange(form.num_kv_heads, dtype=torch.int32)
        self._head_mapping = heads.repeat_interleave(form.group_size)
        self._paged = self.load_extension()

    @staticmethod
    def load_extension() -> Any:
        """The extension's `PagedAttention`; importing it takes seconds.

        Raises PackageError for other versions of it or of torch.
        """
        try:
            found = version(NAME)
        except PackageNotFoundError as error:
            raise PackageError(f"IPEX needs the package {NAME}, which is not installed") from error
        if not is_pair(found, torch.__version__):
            raise PackageError(
                f"IPEX runs {NAME} {IPEX_VERSION} beside torch {IPEX_TORCH}; installed are {found} "
                f"and torch {torch.__version__}"
            )
        try:
            from intel_extension_for_pytorch.llm import modules
        except Exception as error:
            raise PackageError(f"{NAME} {found} cannot be imported: {error!r}") from error
        return modules.PagedAttention

    def _schedule(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths | None,
        workspace: Workspace | None,
    ) -> IpexSchedule:
        assert lengths is not None
        # A request without keys would read what nobody has written.
        live = [r for r in range(batch.num_reqs) if lengths.query_len(r) and lengths.seq_lens[r]]
        one = [r for r in live if lengths.query_len(r) == 1]
        more = [r for r in live if lengths.query_len(r) > 1]
        tables = {r: _blocks(batch, pages, lengths, r) for r in live}
        highest = highest_block(tables.values())
        copies = pages is not None and PARTITION % pages.block_size != 0
        if copies:
            tables = _numbered(live, lengths)
        return IpexSchedule(
            decoding=_share(tables, lengths, one),
            prompts=_share(tables, lengths, more),
            block_size=1 if pages is None or copies else pages.block_size,
            copied=tuple((r, 0, lengths.seq_lens[r]) for r in live) if copies else None,
            highest_block=highest,
        )

    def _attend(self, plan: Plan, call: Call) -> None:
        schedule = plan.schedule
        assert isinstance(schedule, IpexSchedule)
        planes = self._planes(plan, schedule, call)
        cap = -1.0 if self.form.logits_soft_cap is None else self.form.logits_soft_cap
        if (share := schedule.decoding) is not None:
            q, (k, v, blocks) = call.q[share.rows], _in_order(planes, share.blocks)
            out = torch.empty_like(q)
            self._paged.single_query_cached_kv_attention(
                out,
                q,
                k,
                v,
                self._head_mapping,
                self.form.scale,
                blocks,
                share.seq_lens,
                schedule.block_size,
                share.most_keys,
                None,
                softcap=cap,
            )
            call.out[share.rows] = out
        if (share := schedule.prompts) is not None:
            q, (k, v, blocks) = call.q[share.rows], _in_order(planes, share.blocks)
            out = torch.empty_like(q)
            self._paged.flash_attn_varlen_func(
                out,
                q,
                k,
                v,
                share.query_starts,
                share.key_starts,
                share.most_queries,
                share.most_keys,
                self.form.scale,
                True,
                blocks,
                None,
                softcap=cap,
            )
            call.out[share.rows] = out

    def _planes(
        self, plan: Plan, schedule: IpexSchedule, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as [num_blocks, num_kv_heads, block_size, head_size]."""
        if call.cache is not None and schedule.copied is None:
            return call.cache.pages()
        k, v = call.k, call.v
        if call.cache is not None:
            assert plan.pages is not None and schedule.copied is not None
            k, v = call.cache.gather(plan.pages, schedule.copied, dtype=call.q.dtype)
        assert k is not None and v is not None
        return k[:, :, None].contiguous(), v[:, :, None].contiguous()


def _in_order(
    planes: tuple[torch.Tensor, torch.Tensor], blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and the table of blocks, as they are where the tokens of a head lie one after
    the other; else a copy of the blocks that are read, and their numbers in it."""
    k, v = planes
    if all(plane.stride()[2:] == (plane.shape[3], 1) for plane in planes):
        return k, v, blocks
    used, numbers = torch.unique(blocks, return_inverse=True)
    return k[used].contiguous(), v[used].contiguous(), numbers.int()


def _blocks(
    batch: Batch, pages: PageTable | None, lengths: HostLengths, request: int
) -> torch.Tensor:
    """The request's blocks in order, int32; without pages, its rows of k and v."""
    count = lengths.seq_lens[request]
    if pages is None:
        start = batch.kv_starts(lengths)[request]
        return torch.arange(start, start + count, dtype=torch.int32)
    logical = torch.arange(-(-count // pages.block_size))[None]
    return look_up(pages, [request], logical)[0].int()


def _numbered(requests: list[int], lengths: HostLengths) -> dict[int, torch.Tensor]:
    """Where each request's keys are in a copy of all, one after the other."""
    starts = _sums(lengths.seq_lens[r] for r in requests).tolist()
    return {
        r: torch.arange(starts[n], starts[n + 1], dtype=torch.int32) for n, r in enumerate(requests)
    }


def _share(
    tables: dict[int, torch.Tensor], lengths: HostLengths, requests: list[int]
) -> Share | None:
    """The part of the batch that these requests are; None for none."""
    if not requests:
        return None
    queries = [lengths.query_len(r) for r in requests]
    keys = [lengths.seq_lens[r] for r in requests]
    rows = [torch.arange(lengths.query_start[r], lengths.query_start[r + 1]) for r in requests]
    return Share(
        rows=torch.cat(rows),
        blocks=torch.nn.utils.rnn.pad_sequence([tables[r] for r in requests], batch_first=True),
        seq_lens=torch.tensor(keys, dtype=torch.int32),
        query_starts=_sums(queries),
        key_starts=_sums(keys),
        most_queries=max(queries),
        most_keys=max(keys),
    )


def _sums(counts: Iterable[int]) -> torch.Tensor:
    """int32 [counts + 1]: what came before each, and the end."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
