"""What the portable backends take. No torch here: the catalog and the implementations read it.

Both build an explicit mask from the same mask algebra, so they take the same features. They
leave out what needs machinery that neither has: context-parallel ranks, whose keys are not
contiguous in position.
"""

from __future__ import annotations

from attnplat.config.names import Feature, Operation

REFERENCE_FEATURES: frozenset[Feature] = frozenset(
    {
        Feature.SLIDING_WINDOW,
        Feature.CHUNKED_LOCAL,
        Feature.LOGITS_SOFT_CAP,
        Feature.SINKS,
        Feature.STATIC_SINK_TOKENS,
        Feature.ALIBI,
        Feature.POSITION_BIAS,
        Feature.NON_CAUSAL,
        Feature.PER_REQUEST_CAUSAL,
        Feature.TREE_MASK,
        Feature.MM_PREFIX,
        Feature.PREFIX_LENGTHS,
        Feature.RSWA,
        Feature.TOPK,
        Feature.V_HEAD_SIZE,
        Feature.LSE,
        Feature.PER_HEAD_QUANT_SCALES,
        Feature.DETERMINISTIC,
        Feature.BATCH_INVARIANCE,
        Feature.KV_CONNECTOR,
        Feature.ADAPTIVE_VERIFICATION,
    }
)
"""KV_CONNECTOR: the cache is a plain, named layout that the caller owns and may move between
steps. ADAPTIVE_VERIFICATION: query lengths may differ from step to step and request to request."""

REFERENCE_INDEXER_FEATURES: frozenset[Feature] = frozenset(
    {
        Feature.KV_CONNECTOR,
        Feature.ADAPTIVE_VERIFICATION,
        Feature.DETERMINISTIC,
        Feature.BATCH_INVARIANCE,
        Feature.DCP,
        Feature.PCP,
    }
)
"""DCP and PCP: a rank scores its own keys and rows up to ends that it is given, and
`ops.topk.merge_topk` chooses among the ranks' candidates."""

TORCH_SDPA_FEATURES: frozenset[Feature] = REFERENCE_FEATURES
"""Under BATCH_INVARIANCE every request runs alone, so its batch-mates cannot matter."""

PORTABLE_OPERATIONS: frozenset[Operation] = frozenset(
    {Operation.MHA, Operation.MLA, Operation.SPARSE_MLA, Operation.MLA_PREFILL}
)
"""Operations that both implementations run."""
