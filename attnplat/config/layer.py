"""What one layer asks for. The subclass is the operation.

Every config is frozen, keyword-only, hashable and free of tensors; dtypes are held by
name. It is the caller's request and the whole of a selection's cache key (with the World).
None means unknown and passes every limit that does not require a value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from attnplat.config.names import (
    INDEXER_KV_DTYPES,
    AttnType,
    Dtype,
    Feature,
    KVCacheDtype,
    LayerKind,
    Operation,
    Role,
    StateKind,
    parse_dtype,
    parse_kv_cache_dtype,
    parse_name,
)
from attnplat.config.numbers import is_whole
from attnplat.errors import ConfigError, UnknownNameError

C = TypeVar("C")

OPEN_WINDOW = (-1, -1)
_NO_DEFAULT = object()
MAX_SIZE = 1 << 24  # no real head size, block size or head count comes near it


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def _config(cls: type[C]) -> type[C]:
    """A frozen, keyword-only dataclass that shares LayerConfig's equality, hash and repr.

    Generating those anew for every subclass is a third of what importing this module costs,
    and every command line pays for it.
    """
    return dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)


@_config
class LayerConfig:
    """The fields that every operation has.

    Attributes:
        head_size: elements of one query or key head (MLA: latent plus rope).
        dtype: activation dtype; a name, a short name (`bf16`) or a torch dtype.
        kv_cache_dtype: the user's word for the cache format; None when there is no cache
            or it is not known yet.
        block_size: tokens per KV-cache block, only when the user asked for one.
        num_heads, num_kv_heads: query and key-value heads on this rank.
        scale: multiplies QK^T before the softmax; default `head_size ** -0.5`.
        also_needs: features wanted beyond those the other fields imply.
        label: a name for messages (`model.layers.7`); no part of equality.
        provenance: (field, who set it) pairs, for messages; no part of equality.

    Raises:
        ConfigError: a value that no device could serve, naming field, value and allowed.
        UnknownNameError: a name outside its vocabulary, naming the closest.
    """

    operation: ClassVar[Operation]

    head_size: int
    dtype: Dtype | str = Dtype.BFLOAT16
    kv_cache_dtype: KVCacheDtype | str | None = KVCacheDtype.AUTO
    block_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    scale: float | None = None
    also_needs: frozenset[Feature] = frozenset()
    label: str = field(default="", compare=False)
    provenance: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._set("dtype", parse_dtype(self.dtype))
        if self.kv_cache_dtype is not None:
            self._set("kv_cache_dtype", parse_kv_cache_dtype(self.kv_cache_dtype))
        self._set("also_needs", _parse_features(self.also_needs))
        self._check_size("head_size", required=True)
        for name in ("block_size", "num_heads", "num_kv_heads"):
            self._check_size(name)
        self._check_head_counts()
        if self.scale is not None and not _is_finite(self.scale):
            self._refuse("scale", "a finite number")
        if not isinstance(self.label, str):
            self._refuse("label", "a string")
        self._validate()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerConfig):
            return NotImplemented
        return type(self) is type(other) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if f.repr and getattr(self, f.name) != f.default]
        inner = ", ".join(f"{f.name}={_shown(getattr(self, f.name))}" for f in shown)
        return f"{type(self).__name__}({inner})"

    @cached_property
    def _compared(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self) if f.compare)

    # Validation -----------------------------------------------------------------------

    def _validate(self) -> None:
        """Checks of a subclass's own fields."""

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _refuse(self, name: str, takes: str) -> None:
        raise ConfigError(
            f"{type(self).__name__}.{name} is {getattr(self, name)!r}; it takes {takes}"
        )

    def _check_size(self, name: str, *, required: bool = False, least: int = 1) -> None:
        value = getattr(self, name)
        if value is None and not required:
            return
        if not is_whole(value) or not least <= value <= MAX_SIZE:
            self._refuse(name, f"an integer from {least} to {MAX_SIZE}")

    def _check_flags(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "True or False")

    def _check_head_counts(self) -> None:
        if self.num_heads is None or self.num_kv_heads is None:
            return
        if self.num_heads % self.num_kv_heads:
            self._refuse("num_heads", f"a multiple of num_kv_heads ({self.num_kv_heads})")

    # What the config says -------------------------------------------------------------

    @cached_property
    def needs(self) -> frozenset[Feature]:
        """Every feature this layer wants; a backend must take them all."""
        return self.also_needs

    @property
    def kind(self) -> LayerKind:
        """The layer's KV-cache kind, the key of `AttentionConfig.backend_per_kind`."""
        return LayerKind.UNKNOWN

    @property
    def has_kv_cache(self) -> bool:
        """Whether the layer keeps keys and values between steps."""
        return True

    @property
    def effective_scale(self) -> float:
        """`scale`, or `head_size ** -0.5` where none was given."""
        return self.scale if self.scale is not None else self.head_size**-0.5

    def replace(self, **changes: Any) -> Self:
        """A copy with the given fields changed, validated anew."""
        return replace(self, **changes)

    def source_of(self, name: str) -> str:
        """Who set the field: as recorded, else `caller`, or `default` for an untouched default."""
        for field_name, source in self.provenance:
            if field_name == name:
                return source
        # A dataclass keeps a field's default as the attribute of the class.
        untouched = getattr(type(self), name, _NO_DEFAULT) == getattr(self, name)
        return "default" if untouched else "caller"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of the fields that differ from their defaults, and the operation."""
        out: dict[str, Any] = {"operation": str(self.operation)}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "provenance" or value == f.default:
                continue
            if isinstance(value, frozenset):
                value = sorted(map(str, value))
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, str):
                value = str(value)
            out[f.name] = value
        return out


@_config
class MhaConfig(LayerConfig):
    """Multi-head, grouped-query or multi-query attention.

    Attributes:
        v_head_size: elements of one value head where it differs from `head_size`.
        attn_type: decoder, encoder, encoder_only or encoder_decoder (cross attention).
        role: the text or the vision tower.
        causal: query at position p sees keys at positions <= p, aligned bottom-right.
            Default: True for decoder layers, False otherwise.
        sliding_window: (left, right): key j is visible to position p iff
            p - left <= j <= p + right; -1 is open. A model's `sliding_window=W` with
            causal attention is `(W - 1, -1)`.
        chunk_size: chunked-local attention: key and query in the same chunk of this many
            tokens (Llama 4).
        logits_soft_cap: c in c*tanh(x/c) on the scaled logits, before bias and mask
            (Gemma 2); None is off, 0 is an error.
        sinks: one learned logit per head in the softmax denominator (gpt-oss).
        alibi: bias of -slope*|p - j| per head (Press et al. 2022).
        position_bias: an additive bias per head, query and key (T5).
        static_sink_tokens: the first so many keys stay visible outside the window.
        topk: number of keys each query may see, given as `topk_indices` (DSA).
        rswa: window restarted after a fixed prefix (`prefix_lens` in the batch).
        mm_prefix: bidirectional attention inside given token ranges.
        per_head_quant_scales: KV scales per head rather than per tensor.
    """

    operation: ClassVar[Operation] = Operation.MHA

    v_head_size: int | None = None
    attn_type: AttnType | str = AttnType.DECODER
    role: Role | str = Role.TEXT
    causal: bool | None = None
    sliding_window: tuple[int, int] = OPEN_WINDOW
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    position_bias: bool = False
    static_sink_tokens: int = 0
    topk: int | None = None
    rswa: bool = False
    mm_prefix: bool = False
    per_head_quant_scales: bool = False

    def _validate(self) -> None:
        self._set("attn_type", parse_name(AttnType, self.attn_type, "attn_type"))
        self._set("role", parse_name(Role, self.role, "role"))
        if self.causal is None:
            self._set("causal", self.attn_type == AttnType.DECODER)
        for name in ("v_head_size", "chunk_size", "topk"):
            self._check_size(name)
        self._check_size("static_sink_tokens", required=True, least=0)
        self._check_flags(
            "causal",
            "sinks",
            "alibi",
            "position_bias",
            "rswa",
            "mm_prefix",
            "per_head_quant_scales",
        )
        _check_window(self)
        _check_soft_cap(self)

    @cached_property
    def without_spans(self) -> Self:
        """This layer as steps without bidirectional spans see it."""
        if Feature.MM_PREFIX not in self.needs:
            return self
        return self.replace(mm_prefix=False, also_needs=self.also_needs - {Feature.MM_PREFIX})

    @property
    def value_size(self) -> int:
        """Elements of one value head."""
        return self.head_size if self.v_head_size is None else self.v_head_size

    @property
    def kind(self) -> LayerKind:
        if self.attn_type == AttnType.ENCODER_ONLY:
            return LayerKind.ENCODER_ONLY_ATTENTION
        if self.attn_type == AttnType.ENCODER_DECODER:
            return LayerKind.CROSS_ATTENTION
        if self.chunk_size is not None:
            return LayerKind.CHUNKED_LOCAL_ATTENTION
        if self.static_sink_tokens:
            return LayerKind.SINK_FULL_ATTENTION
        windowed = self.sliding_window != OPEN_WINDOW
        return LayerKind.SLIDING_WINDOW if windowed else LayerKind.FULL_ATTENTION

    @property
    def has_kv_cache(self) -> bool:
        return self.attn_type in (AttnType.DECODER, AttnType.ENCODER_DECODER)

    @cached_property
    def needs(self) -> frozenset[Feature]:
        wanted = {
            Feature.SLIDING_WINDOW: self.sliding_window != OPEN_WINDOW,
            Feature.CHUNKED_LOCAL: self.chunk_size is not None,
            Feature.LOGITS_SOFT_CAP: self.logits_soft_cap is not None,
            Feature.SINKS: self.sinks,
            Feature.STATIC_SINK_TOKENS: self.static_sink_tokens > 0,
            Feature.ALIBI: self.alibi,
            Feature.POSITION_BIAS: self.position_bias,
            Feature.NON_CAUSAL: self.attn_type == AttnType.DECODER and not self.causal,
            Feature.MM_PREFIX: self.mm_prefix,
            Feature.RSWA: self.rswa,
            Feature.TOPK: self.topk is not None,
            Feature.V_HEAD_SIZE: self.value_size != self.head_size,
            Feature.PER_HEAD_QUANT_SCALES: self.per_head_quant_scales,
        }
        return self.also_needs | {feature for feature, want in wanted.items() if want}


@_config
class MlaConfig(LayerConfig):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), as decoded: absorbed.

    `head_size` is the width of one cache row, `kv_lora_rank + qk_rope_head_dim`. The
    dimensions may each be None when unknown.

    Attributes:
        qk_nope_head_dim: elements of a query-key head without rotation, before absorption.
        qk_rope_head_dim: rotated elements, shared by all heads.
        kv_lora_rank: width of the latent.
        v_head_size: elements of one value head after expansion.
        index_topk: keys each query may see; set by models with a sparse indexer.
        sinks: one learned logit per head in the denominator (DeepSeek-V4).
        sliding_window: as for MhaConfig.
        causal: as for MhaConfig; default True.
    """

    operation: ClassVar[Operation] = Operation.MLA

    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    kv_lora_rank: int | None = None
    v_head_size: int | None = None
    index_topk: int | None = None
    sinks: bool = False
    sliding_window: tuple[int, int] = OPEN_WINDOW
    causal: bool = True
    attn_type: AttnType | str = AttnType.DECODER

    def _validate(self) -> None:
        self._set("attn_type", parse_name(AttnType, self.attn_type, "attn_type"))
        for name in ("qk_nope_head_dim", "kv_lora_rank", "v_head_size", "index_topk"):
            self._check_size(name)
        self._check_size("qk_rope_head_dim", least=0)
        self._check_flags("causal", "sinks")
        _check_window(self)
        if self.kv_lora_rank is not None and self.qk_rope_head_dim is not None:
            row = self.kv_lora_rank + self.qk_rope_head_dim
            if self.head_size != row:
                self._refuse("head_size", f"kv_lora_rank + qk_rope_head_dim ({row})")

    @property
    def kind(self) -> LayerKind:
        if self.attn_type == AttnType.ENCODER_ONLY:
            return LayerKind.ENCODER_ONLY_ATTENTION
        if self.attn_type == AttnType.ENCODER_DECODER:
            return LayerKind.CROSS_ATTENTION
        windowed = self.sliding_window != OPEN_WINDOW
        return LayerKind.SLIDING_WINDOW_MLA if windowed else LayerKind.MLA_ATTENTION

    @cached_property
    def needs(self) -> frozenset[Feature]:
        wanted = {
            Feature.SLIDING_WINDOW: self.sliding_window != OPEN_WINDOW,
            Feature.SINKS: self.sinks,
            Feature.NON_CAUSAL: not self.causal,
        }
        return self.also_needs | {feature for feature, want in wanted.items() if want}

    @property
    def effective_scale(self) -> float:
        """`scale`, or (nope + rope) ** -0.5: the width before absorption."""
        if self.scale is not None:
            return self.scale
        if self.qk_nope_head_dim is None or self.qk_rope_head_dim is None:
            raise ConfigError(
                f"{type(self).__name__} needs scale, or qk_nope_head_dim and qk_rope_head_dim to "
                "derive it"
            )
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)

    def prefill(self) -> MlaPrefillConfig:
        """The expanded attention that prefills this layer."""
        return MlaPrefillConfig(
            head_size=(self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0) or self.head_size,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            scale=self.scale,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_size=self.v_head_size,
            also_needs=self.also_needs & {Feature.DETERMINISTIC, Feature.BATCH_INVARIANCE},
            label=self.label,
            provenance=self.provenance,
        )


@_config
class SparseMlaConfig(MlaConfig):
    """Latent attention over the keys an indexer chose (DeepSeek-V3.2 and later).

    Attributes:
        index_head_dim: elements of one indexer key; 128 in every published model.
        index_n_heads: query heads of the indexer.
        model_type: the Hugging Face model type; formats of the indexer depend on it.
        o_groups: output groups of the whole model, whose heads share one output projection
            (DeepSeek-V4).
    """

    operation: ClassVar[Operation] = Operation.SPARSE_MLA

    index_head_dim: int = 128
    index_n_heads: int | None = None
    model_type: str | None = None
    o_groups: int | None = None

    def _validate(self) -> None:
        super()._validate()
        self._check_size("index_head_dim", required=True)
        self._check_size("index_n_heads")
        self._check_size("o_groups")

    def indexer(self) -> IndexerConfig:
        """The scorer that chooses this layer's keys."""
        return IndexerConfig(
            head_size=self.index_head_dim,
            dtype=self.dtype,
            num_heads=self.index_n_heads,
            topk=self.index_topk,
            model_type=self.model_type,
            label=self.label,
        )


@_config
class MlaPrefillConfig(LayerConfig):
    """The expanded half of MLA: ordinary attention whose values are narrower than its keys.

    Made by `MlaConfig.prefill()`. `head_size` is nope + rope.
    """

    operation: ClassVar[Operation] = Operation.MLA_PREFILL

    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_size: int | None = None

    def _validate(self) -> None:
        self._check_size("qk_nope_head_dim", least=0)
        self._check_size("qk_rope_head_dim", least=0)
        self._check_size("v_head_size", least=0)

    @property
    def has_kv_cache(self) -> bool:
        return False

    @property
    def dims(self) -> tuple[int, int, int] | None:
        """(nope, rope, value) elements of a head; None unless all three are known."""
        nope, rope, value = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_size
        if nope is None or rope is None or value is None:
            return None
        return (nope, rope, value)


BLOCK_SPARSE_MODELS = ("minimax_m3", "step5")


@_config
class BlockSparseConfig(LayerConfig):
    """Attention over blocks of keys chosen per query (MiniMax-M3, Step5).

    Attributes:
        model: the model family whose scheme it is; None when unknown.
        topk_blocks: blocks each query reads.
    """

    operation: ClassVar[Operation] = Operation.BLOCK_SPARSE

    model: str | None = None
    topk_blocks: int | None = None
    sliding_window: tuple[int, int] = OPEN_WINDOW
    sinks: bool = False

    def _validate(self) -> None:
        if self.model not in (None, *BLOCK_SPARSE_MODELS):
            raise UnknownNameError("block-sparse model", self.model, BLOCK_SPARSE_MODELS)
        self._check_size("topk_blocks")
        self._check_flags("sinks")
        _check_window(self)

    @property
    def kind(self) -> LayerKind:
        windowed = self.sliding_window != OPEN_WINDOW
        return LayerKind.SLIDING_WINDOW if windowed else LayerKind.FULL_ATTENTION

    @cached_property
    def needs(self) -> frozenset[Feature]:
        wanted = {
            Feature.SLIDING_WINDOW: self.sliding_window != OPEN_WINDOW,
            Feature.SINKS: self.sinks,
        }
        return self.also_needs | {feature for feature, want in wanted.items() if want}


@_config
class IndexerConfig(LayerConfig):
    """The scorer that chooses the keys of a sparse layer.

    Attributes:
        model_type: the Hugging Face model type; some formats depend on it.
        indexer_kv_dtype: format of the index cache: auto, bf16, fp8, mxfp4 or nvfp4.
        topk: keys (or blocks) to choose.
        sparse_logits: compute logits only for keys that can be chosen.
    """

    operation: ClassVar[Operation] = Operation.INDEXER

    model_type: str | None = None
    indexer_kv_dtype: str = "auto"
    topk: int | None = None
    sparse_logits: bool = False

    def _validate(self) -> None:
        if self.indexer_kv_dtype not in INDEXER_KV_DTYPES:
            raise UnknownNameError("indexer_kv_dtype", self.indexer_kv_dtype, INDEXER_KV_DTYPES)
        self._check_flags("sparse_logits")
        self._check_size("topk")


@_config
class StateConfig(LayerConfig):
    """A recurrent layer: mamba1, mamba2, short_conv, linear or gdn (gated delta net)."""

    operation: ClassVar[Operation] = Operation.STATE

    state_kind: StateKind | str = StateKind.MAMBA2

    def _validate(self) -> None:
        self._set("state_kind", parse_name(StateKind, self.state_kind, "state_kind"))

    @property
    def kind(self) -> LayerKind:
        return LayerKind.MAMBA


def _check_window(config: Any) -> None:
    window = config.sliding_window
    if window is None:
        config._set("sliding_window", OPEN_WINDOW)
        return
    takes = "a pair (left, right) of integers of at least -1, where -1 is open"
    if not isinstance(window, tuple | list):
        config._refuse("sliding_window", takes + "; a model's sliding_window=W is (W - 1, -1)")
    if len(window) != 2 or any(not is_whole(w) or w < -1 for w in window):
        config._refuse("sliding_window", takes)
    config._set("sliding_window", tuple(window))


def _check_soft_cap(config: Any) -> None:
    cap = config.logits_soft_cap
    if cap is None:
        return
    if not _is_finite(cap) or cap <= 0:
        config._refuse("logits_soft_cap", "a finite number above 0, or None for off")
    config._set("logits_soft_cap", float(cap))


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(str, value)))}}}"
    return repr(str(value)) if isinstance(value, str) else repr(value)


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _parse_features(values: Any) -> frozenset[Feature]:
    if not isinstance(values, frozenset | set | list | tuple):
        raise ConfigError(f"also_needs is {values!r}; it takes a set of feature names")
    return frozenset(parse_name(Feature, value, "feature") for value in values)


def config_class(operation: Operation) -> type[LayerConfig]:
    """The config class of an operation."""
    return _CLASSES[operation]


_CLASSES: dict[Operation, type[LayerConfig]] = {
    cls.operation: cls
    for cls in (
        MhaConfig,
        MlaConfig,
        SparseMlaConfig,
        MlaPrefillConfig,
        BlockSparseConfig,
        IndexerConfig,
        StateConfig,
    )
}
