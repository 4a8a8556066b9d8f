"""A layer's config, from what its attention function receives."""

from __future__ import annotations

import torch
from torch import nn

from attnplat.backends.form import MaskRules
from attnplat.config.layer import OPEN_WINDOW, MhaConfig
from attnplat.config.names import AttnType, Feature
from attnplat.integrations.transformers.keywords import Keywords


def layer_config(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rules: MaskRules,
    scaling: float | None,
    keywords: Keywords,
    position_bias: bool = False,
    crosses: bool = False,
) -> MhaConfig:
    """What the layer asks for.

    Args:
        query: [batch, num_heads, queries, head_size]; `key` and `value` alike with
            num_kv_heads, `value` with v_head_size.
        rules: the mask within a request.
        scaling: multiplies QK^T; None for head_size ** -0.5.
        keywords: what else the call brought.
        position_bias: whether a bias table comes with the call.
        crosses: whether keys are other tokens than the queries', or fewer.
    """
    head_size, v_head_size = query.shape[-1], value.shape[-1]
    return MhaConfig(
        head_size=head_size,
        v_head_size=None if v_head_size == head_size else v_head_size,
        dtype=str(query.dtype),
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        scale=None if scaling is None or scaling == head_size**-0.5 else float(scaling),
        attn_type=_attn_type(module, rules, crosses),
        causal=rules.causal,
        sliding_window=rules.sliding_window,
        chunk_size=rules.chunk_size,
        logits_soft_cap=keywords.softcap,
        sinks=keywords.s_aux is not None,
        position_bias=position_bias,
        topk=None if keywords.indices is None else keywords.indices.shape[-1],
        also_needs=frozenset({Feature.DETERMINISTIC} if keywords.deterministic else ()),
    )


def is_causal(module: nn.Module, keywords: Keywords) -> bool:
    """Whether a layer is causal, as far as the module and the call say it themselves."""
    said = keywords.is_causal
    return bool(getattr(module, "is_causal", True) if said is None else said)


def own_rules(module: nn.Module, keywords: Keywords) -> MaskRules:
    """The mask that the module and the call state themselves, where no mask is given.

    A window is symmetric without causality: that is what it means to flash attention, for
    which transformers passes it.
    """
    causal = is_causal(module, keywords)
    window = keywords.sliding_window
    if window is None:
        return MaskRules(causal=causal)
    return MaskRules(causal=causal, sliding_window=(window - 1, -1 if causal else window - 1))


def with_window(rules: MaskRules, keywords: Keywords, longest: int) -> MaskRules:
    """`rules` with the layer's window, where sequences are too short for it to hide anything.

    The config of a layer then does not depend on how long the sequences are.
    """
    window = keywords.sliding_window
    open_mask = rules.sliding_window == OPEN_WINDOW and rules.chunk_size is None
    if window is None or not open_mask or longest > window:
        return rules
    return MaskRules(
        causal=rules.causal, sliding_window=(window - 1, -1 if rules.causal else window - 1)
    )


def _attn_type(module: nn.Module, rules: MaskRules, crosses: bool) -> AttnType:
    if rules.causal or getattr(module, "is_causal", False):
        return AttnType.DECODER
    of_a_decoder = getattr(module, "is_cross_attention", False) or getattr(
        module, "is_decoder", False
    )
    return AttnType.ENCODER_DECODER if crosses or of_a_decoder else AttnType.ENCODER_ONLY
