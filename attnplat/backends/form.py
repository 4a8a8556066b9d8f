"""The numbers every attention layer boils down to, whichever config class it came from.

Adapters read an `AttentionForm` and never a config, so multi-head attention, absorbed MLA
(one key head whose values are the front of its keys) and expanded MLA (values narrower than
keys) are one case to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnplat.config.layer import (
    OPEN_WINDOW,
    LayerConfig,
    MhaConfig,
    MlaConfig,
    MlaPrefillConfig,
    SparseMlaConfig,
)
from attnplat.config.names import AttnType, Dtype, Feature
from attnplat.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MaskRules:
    """Which keys a query may see, as far as the layer alone decides it.

    Attributes:
        causal: keys at positions up to the query's own; a batch may override it per request.
        sliding_window: (left, right), -1 open.
        chunk_size: query and key in the same chunk of this many tokens.
        static_sink_tokens: the first so many keys are visible outside the window.
        topk: keys per query named by `topk_indices`, or None.
    """

    causal: bool = True
    sliding_window: tuple[int, int] = OPEN_WINDOW
    chunk_size: int | None = None
    static_sink_tokens: int = 0
    topk: int | None = None

    @property
    def only_causality(self) -> bool:
        """Whether nothing but `causal` (or nothing at all) hides a key."""
        return self.sliding_window == OPEN_WINDOW and self.chunk_size is None and self.topk is None

    def first_key(self, position: int) -> int:
        """The first key that window and chunk leave visible to a query at `position`."""
        left, first = self.sliding_window[0], 0
        if left >= 0:
            first = max(first, position - left)
        if self.chunk_size is not None:
            first = max(first, position // self.chunk_size * self.chunk_size)
        return first


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """One attention layer as numbers.

    Attributes:
        num_heads, num_kv_heads, head_size, v_head_size: as in the glossary.
        dtype: activation dtype of q, k, v and out.
        scale: multiplies QK^T.
        mask: the layer's own mask.
        logits_soft_cap: c in c*tanh(x/c), or None.
        sinks, alibi, position_bias: whether the call must bring those tensors.
        values_in_keys: v is the first `v_head_size` elements of k (absorbed MLA).
        self_attention: queries are the last tokens of their own keys; False for cross
            attention, whose `seq_lens` are the encoder's.
        lse: whether a call may ask for the log-sum-exp.
        batch_masks: the optional mask fields a `Batch` may carry for this layer.
        needs_prefix_lens: whether a `Batch` must carry `prefix_lens`.
        per_head_quant_scales: whether the cache's scales may be one per head.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: Dtype
    scale: float
    mask: MaskRules
    logits_soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    position_bias: bool = False
    values_in_keys: bool = False
    self_attention: bool = True
    lse: bool = False
    batch_masks: frozenset[str] = frozenset()
    needs_prefix_lens: bool = False
    per_head_quant_scales: bool = False

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads


def form_of(config: LayerConfig) -> AttentionForm:
    """The form of an attention layer.

    Raises:
        ConfigError: a config that is no attention over keys and values, or one whose head
            counts or value size are still unknown.
    """
    if isinstance(config, MhaConfig):
        return _mha_form(config)
    if isinstance(config, MlaConfig):
        return _mla_form(config)
    if isinstance(config, MlaPrefillConfig):
        return _mla_prefill_form(config)
    raise ConfigError(
        f"{type(config).__name__} is no attention over keys and values; it takes MhaConfig, "
        "MlaConfig, SparseMlaConfig or MlaPrefillConfig"
    )


def _mha_form(config: MhaConfig) -> AttentionForm:
    return AttentionForm(
        num_heads=_known(config, "num_heads"),
        num_kv_heads=_known(config, "num_kv_heads"),
        head_size=config.head_size,
        v_head_size=config.value_size,
        dtype=Dtype(config.dtype),
        scale=config.effective_scale,
        mask=MaskRules(
            causal=bool(config.causal),
            sliding_window=config.sliding_window,
            chunk_size=config.chunk_size,
            static_sink_tokens=config.static_sink_tokens,
            topk=config.topk,
        ),
        logits_soft_cap=config.logits_soft_cap,
        sinks=config.sinks,
        alibi=config.alibi,
        position_bias=config.position_bias,
        self_attention=config.attn_type != AttnType.ENCODER_DECODER,
        lse=Feature.LSE in config.needs,
        batch_masks=_batch_masks(config.needs),
        needs_prefix_lens=config.rswa,
        per_head_quant_scales=Feature.PER_HEAD_QUANT_SCALES in config.needs,
    )


def _mla_form(config: MlaConfig) -> AttentionForm:
    if config.num_kv_heads not in (None, 1):
        raise ConfigError(
            f"{type(config).__name__}.num_kv_heads is {config.num_kv_heads}; absorbed MLA has "
            "one latent row a token: it takes 1 or None"
        )
    sparse = isinstance(config, SparseMlaConfig)
    return AttentionForm(
        num_heads=_known(config, "num_heads"),
        num_kv_heads=1,
        head_size=config.head_size,
        v_head_size=_known(config, "kv_lora_rank"),
        dtype=Dtype(config.dtype),
        scale=config.effective_scale,
        mask=MaskRules(
            causal=config.causal,
            sliding_window=config.sliding_window,
            topk=_known(config, "index_topk") if sparse else None,
        ),
        sinks=config.sinks,
        values_in_keys=True,
        self_attention=config.attn_type != AttnType.ENCODER_DECODER,
        lse=Feature.LSE in config.needs,
        batch_masks=_batch_masks(config.needs),
    )


def _mla_prefill_form(config: MlaPrefillConfig) -> AttentionForm:
    """New tokens run causally, chunks of context do not, and LSE merges them: so always
    per-request causality and LSE."""
    return AttentionForm(
        num_heads=_known(config, "num_heads"),
        num_kv_heads=_known(config, "num_kv_heads"),
        head_size=config.head_size,
        v_head_size=_known(config, "v_head_size"),
        dtype=Dtype(config.dtype),
        scale=config.effective_scale,
        mask=MaskRules(),
        lse=True,
        batch_masks=_batch_masks(config.needs) | {"causal"},
    )


_BATCH_MASKS = {
    Feature.PER_REQUEST_CAUSAL: "causal",
    Feature.MM_PREFIX: "ranges",
    Feature.PREFIX_LENGTHS: "prefix_lens",
    Feature.RSWA: "prefix_lens",
    Feature.TREE_MASK: "tree_mask",
}


def _batch_masks(needs: frozenset[Feature]) -> frozenset[str]:
    return frozenset(name for feature, name in _BATCH_MASKS.items() if feature in needs)


def _known(config: LayerConfig, name: str) -> int:
    value = getattr(config, name)
    if not value:
        raise ConfigError(
            f"{type(config).__name__}.{name} is {value!r}; running a layer needs it as an "
            "integer of at least 1"
        )
    return int(value)
