"""Cascade attention: keys that all requests of a batch share are read once for all of them.

The batch runs as two: all query rows as one request against the shared prefix, without a
causal mask as they come after all of it, and every request against the rest of its own keys.
The two are joined by log-sum-exp (Juravsky et al., Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.call_checks import NewKV
from attnplat.backends.checks import FLOATS, check_tensor
from attnplat.backends.interface import AttentionImpl, Plan
from attnplat.backends.kv_cache import KVCache
from attnplat.config.layer import MhaConfig, MlaConfig
from attnplat.config.names import AttnType, Feature
from attnplat.errors import ConfigError, PlanMismatchError, UnsupportedCallError
from attnplat.ops.merge import apply_sinks, merge_states

_OF_NEW_TOKENS = frozenset({"tree_mask", "causal"})
"""Masks of a batch that say nothing about keys before the query, which are all visible."""

_SHIFTED = "its mask or scores depend on positions, which differ in the two halves"


@dataclass(frozen=True, kw_only=True, eq=False)
class CascadePlan:
    """One step's two plans.

    Attributes:
        prefix: all real query rows against the shared keys; None where nothing is shared.
        suffix: every request against the rest of its keys.
        num_tokens: real query rows, padding left out.
    """

    prefix: Plan | None
    suffix: Plan
    num_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Cascade:
    """A layer's attention in two halves.

    Attributes:
        prefix, suffix: the implementations of the halves; both give the log-sum-exp and take
            no sinks. `suffix.kv_cache_spec` is the layer's.
        sinks: whether the layer has sinks, which join the whole.
    """

    prefix: AttentionImpl
    suffix: AttentionImpl
    sinks: bool

    @classmethod
    def create(
        cls,
        kind: type[AttentionImpl],
        config: MhaConfig | MlaConfig,
        device: torch.device | str,
        *,
        encoding: str | None = None,
    ) -> Cascade:
        """The cascade of a layer on one backend.

        Raises:
            ConfigError: a layer that cannot be cut in two: no causal decoder, or one whose
                mask or scores depend on positions; or what the backend does not run.
        """
        if config.attn_type != AttnType.DECODER or not config.causal:
            raise ConfigError("cascade attention is for causal decoder layers")
        halves = config.replace(sinks=False, also_needs=config.also_needs | {Feature.LSE})
        suffix = kind.create(halves, device, encoding=encoding)
        form = suffix.form
        scored = form.alibi or form.position_bias or bool(form.batch_masks - _OF_NEW_TOKENS)
        if scored or not form.mask.only_causality or form.mask.static_sink_tokens:
            raise ConfigError(f"cascade attention does not take this layer: {_SHIFTED}")
        prefix = kind.create(halves.replace(causal=False), device, encoding=encoding)
        return cls(prefix=prefix, suffix=suffix, sinks=config.sinks)

    def plan(self, batch: Batch, pages: PageTable, shared_tokens: int) -> CascadePlan:
        """How this batch runs, made once a step for all layers of equal plan keys.

        The first `shared_tokens` keys of all requests with query rows are in the same blocks;
        they are rounded down to whole blocks. The first such request's row of the table is
        read for all.

        Raises:
            PlanMismatchError: a request whose query rows are not all behind the shared keys.
            HostLengthsNeededError: the batch carries no exact lengths.
            UnsupportedCallError: a rolling table, or a mask of the batch that the layer did not
                declare or that depends on positions.
        """
        lengths, size = batch.host_lengths(), pages.block_size
        for name in ("ranges", "prefix_lens"):
            if getattr(batch, name) is not None:
                raise UnsupportedCallError(f"batch.{name} depends on positions; plan flat")
        if pages.first_block is not None:
            raise UnsupportedCallError("a rolling table has no shared first blocks; plan flat")
        live = [r for r in range(batch.num_reqs) if lengths.query_len(r)]
        blocks = shared_tokens // size
        tokens = blocks * size
        for r in live:
            context = lengths.seq_lens[r] - lengths.query_len(r)
            if context < tokens:
                raise PlanMismatchError(
                    f"request {r} has {context} keys before its query; {tokens} are to be shared"
                )
        if not tokens or not live:
            return CascadePlan(
                prefix=None,
                suffix=self.suffix.plan(batch, pages),
                num_tokens=lengths.num_tokens,
            )
        own = Batch.from_lengths(
            [lengths.query_len(r) for r in range(batch.num_reqs)],
            [max(n - tokens, 0) for n in lengths.seq_lens],
            device=batch.device,
        ).padded(batch.num_reqs, batch.num_tokens)
        own = own.replace(
            max_query_len=batch.max_query_len, tree_mask=batch.tree_mask, causal=batch.causal
        )
        rest = replace(pages, block_table=pages.block_table[:, blocks:])
        whole = Batch.from_lengths([lengths.num_tokens], [tokens], device=batch.device)
        table = pages.block_table[live[0] : live[0] + 1, :blocks]
        return CascadePlan(
            prefix=self.prefix.plan(whole, PageTable(block_table=table, block_size=size)),
            suffix=self.suffix.plan(own, rest),
            num_tokens=lengths.num_tokens,
        )

    def forward(
        self,
        plan: CascadePlan,
        q: torch.Tensor,
        cache: KVCache,
        *,
        kv: NewKV | None = None,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of one layer: what `AttentionImpl.forward` gives without a cascade.

        Arguments are as there. Raises as it does.
        """
        if (sinks is not None) != self.sinks:
            raise UnsupportedCallError(
                "sinks must be given if and only if the layer's config declares them"
            )
        if sinks is not None:
            heads, device = self.suffix.form.num_heads, self.suffix.device
            check_tensor("sinks", sinks, shape=(heads,), dtype=FLOATS, device=device)
        out, lse = self.suffix.forward(
            plan.suffix, q, cache, kv=kv, k_scale=k_scale, v_scale=v_scale, return_lse=True
        )
        rows = plan.num_tokens
        if plan.prefix is not None:
            shared = self.prefix.forward(
                plan.prefix, q, cache, k_scale=k_scale, v_scale=v_scale, return_lse=True
            )
            parts = (shared[0][:rows], out[:rows]), (shared[1][:rows], lse[:rows])
            out[:rows], lse[:rows] = merge_states(*parts)
        if sinks is not None:
            out[:rows], lse[:rows] = apply_sinks(out[:rows], lse[:rows], sinks)
        return out, lse
