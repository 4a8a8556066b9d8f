"""What is true of the whole run rather than of one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from attnplat.config.layer import MAX_SIZE
from attnplat.config.names import (
    AttnType,
    Feature,
    KVCacheDtype,
    parse_kv_cache_dtype,
    parse_name,
)
from attnplat.config.numbers import is_whole
from attnplat.errors import ConfigError

_SIZES = (
    "model_head_size",
    "rswa_window",
    "tp_size",
    "dcp_size",
    "pcp_size",
    "user_block_size",
)
_FLAGS = (
    "is_diffusion",
    "uses_mm_prefix",
    "kv_connector",
    "batch_invariant",
    "adaptive_verification",
)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Facts about the run that a choice may depend on. Every field None means unknown.

    Attributes:
        model_head_size: the model's nominal head size where it differs between layers.
        run_kv_cache_dtype: the run-wide KV-cache dtype, when one layer may differ from it.
        model_attn_type: `encoder_decoder` for models with cross attention.
        is_diffusion: the model denoises blocks of tokens, non-causally.
        uses_mm_prefix: the model attends bidirectionally inside multimodal spans.
        rswa_window: window in tokens of a model with reset sliding-window attention.
        model_soft_cap: the model's attention logit soft cap.
        tp_size, dcp_size, pcp_size: tensor, decode-context and prefill-context parallel sizes.
        kv_connector: KV blocks are sent to or received from another instance.
        user_block_size: tokens per block, only when the user gave it.
        batch_invariant: results must not depend on batch-mates.
        adaptive_verification: speculative verification of varying length.
    """

    model_head_size: int | None = None
    run_kv_cache_dtype: str | None = None
    model_attn_type: str | None = None
    is_diffusion: bool | None = None
    uses_mm_prefix: bool | None = None
    rswa_window: int | None = None
    model_soft_cap: float | None = None
    tp_size: int | None = None
    dcp_size: int | None = None
    pcp_size: int | None = None
    kv_connector: bool | None = None
    user_block_size: int | None = None
    batch_invariant: bool | None = None
    adaptive_verification: bool | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and not (is_whole(value) and 1 <= value <= MAX_SIZE):
                self._refuse(name, f"an integer from 1 to {MAX_SIZE}")
        for name in _FLAGS:
            # 1 and 1.0 equal True and are none.
            if not isinstance(getattr(self, name), bool | None):
                self._refuse(name, "True, False or None")
        cap = self.model_soft_cap
        number = isinstance(cap, int | float) and not isinstance(cap, bool)
        if cap is not None and not (number and 0 < cap < math.inf):
            self._refuse("model_soft_cap", "a finite number above 0, or None")
        if self.run_kv_cache_dtype is not None:
            object.__setattr__(
                self, "run_kv_cache_dtype", parse_kv_cache_dtype(self.run_kv_cache_dtype)
            )
        if self.model_attn_type is not None:
            object.__setattr__(
                self,
                "model_attn_type",
                parse_name(AttnType, self.model_attn_type, "model_attn_type"),
            )

    def _refuse(self, name: str, takes: str) -> None:
        raise ConfigError(f"run.{name} is {getattr(self, name)!r}; it takes {takes}")

    @property
    def needs(self) -> frozenset[Feature]:
        """Features that this run wants of every layer with a KV cache."""
        wanted = {
            Feature.BATCH_INVARIANCE: self.batch_invariant,
            Feature.KV_CONNECTOR: self.kv_connector,
            Feature.DCP: self.dcp_size is not None and self.dcp_size > 1,
            Feature.PCP: self.pcp_size is not None and self.pcp_size > 1,
            Feature.ADAPTIVE_VERIFICATION: self.adaptive_verification,
        }
        return frozenset(feature for feature, want in wanted.items() if want)

    def to_dict(self) -> dict[str, object]:
        """The fields that are known, as plain JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            k: str(v) if isinstance(v, (KVCacheDtype, AttnType)) else v
            for k, v in values.items()
            if v is not None
        }
