"""What the C++ kernels take. No torch here: the catalog and the implementation read it."""

from __future__ import annotations

from attnplat.config.names import Feature

CPU_FEATURES: frozenset[Feature] = frozenset(
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
        Feature.PER_HEAD_QUANT_SCALES,
        Feature.LSE,
        Feature.DETERMINISTIC,
        Feature.BATCH_INVARIANCE,
        Feature.KV_CONNECTOR,
        Feature.ADAPTIVE_VERIFICATION,
    }
)
"""Everything but ranks whose keys are not contiguous in position."""

CPU_INDEXER_FEATURES: frozenset[Feature] = frozenset(
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

ZENTORCH_FEATURES: frozenset[Feature] = frozenset({Feature.NON_CAUSAL, Feature.LSE})
"""What zentorch's operator does besides plain attention."""

ZENTORCH_VERSION = "2.13.0.2"
ZENTORCH_TORCH = "2.13"
"""The one build of zentorch whose operator ZENTORCH calls, and the minor of torch it is for."""
