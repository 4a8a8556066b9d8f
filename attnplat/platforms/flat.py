"""The flat forms: one call with plain arguments, as engines write it today."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplat.config.layer import (
    BlockSparseConfig,
    LayerConfig,
    MhaConfig,
    MlaConfig,
    SparseMlaConfig,
    StateConfig,
)
from attnplat.config.names import AttnType
from attnplat.errors import ConflictError
from attnplat.platforms import current_platform

if TYPE_CHECKING:
    from attnplat.backends.interface import AttentionImpl


def get_attn_backend(
    head_size: int,
    dtype: Any,
    kv_cache_dtype: str | None,
    use_mla: bool = False,
    has_sink: bool = False,
    use_sparse: bool = False,
    use_mm_prefix: bool = False,
    use_per_head_quant_scales: bool = False,
    attn_type: str | None = None,
    num_heads: int | None = None,
) -> type[AttentionImpl]:
    """The implementation class for a layer on this machine's platform.

    Args:
        head_size: elements of one query or key head (MLA: latent plus rope).
        dtype: activation dtype, a name or a torch dtype.
        kv_cache_dtype: the cache format's name, or None when unknown.
        use_mla: multi-head latent attention.
        has_sink: one learned logit per head in the softmax denominator.
        use_sparse: keys are chosen by an indexer.
        use_mm_prefix: bidirectional attention inside multimodal spans.
        use_per_head_quant_scales: KV scales per head.
        attn_type: decoder (default), encoder, encoder_only or encoder_decoder.
        num_heads: query heads on this rank.

    Raises:
        NoBackendError: nothing fits, with every reason.
        ConflictError: wants that exclude each other.
    """
    config = layer_config(
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        use_mla=use_mla,
        has_sink=has_sink,
        use_sparse=use_sparse,
        use_mm_prefix=use_mm_prefix,
        use_per_head_quant_scales=use_per_head_quant_scales,
        attn_type=attn_type,
        num_heads=num_heads,
    )
    return current_platform().get_attn_backend(config)


def get_mamba_attn_backend(mamba_type: str) -> type[Any]:
    """The implementation class of a recurrent layer: mamba1, mamba2, short_conv, linear, gdn."""
    return current_platform().get_attn_backend(StateConfig(head_size=1, state_kind=mamba_type))


def layer_config(
    *,
    head_size: int,
    dtype: Any,
    kv_cache_dtype: str | None,
    use_mla: bool,
    has_sink: bool,
    use_sparse: bool,
    use_mm_prefix: bool,
    use_per_head_quant_scales: bool,
    attn_type: str | None,
    num_heads: int | None,
) -> LayerConfig:
    """The layer config that the flat arguments describe."""
    common: dict[str, Any] = {
        "head_size": head_size,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "num_heads": num_heads,
    }
    if not use_mla and not use_sparse:
        return MhaConfig(
            **common,
            sinks=has_sink,
            mm_prefix=use_mm_prefix,
            per_head_quant_scales=use_per_head_quant_scales,
            attn_type=attn_type or AttnType.DECODER,
        )
    for name, given in (
        ("use_mm_prefix", use_mm_prefix),
        ("use_per_head_quant_scales", use_per_head_quant_scales),
    ):
        if given:
            with_what = "use_mla" if use_mla else "use_sparse"
            raise ConflictError(f"{name} and {with_what} are both set; no such layer exists")
    if use_mla:
        cls = SparseMlaConfig if use_sparse else MlaConfig
        return cls(**common, sinks=has_sink, attn_type=attn_type or AttnType.DECODER)
    return BlockSparseConfig(**common, sinks=has_sink)
