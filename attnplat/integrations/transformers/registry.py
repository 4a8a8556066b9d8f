"""The attention function, and its place in transformers' registries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnplat.config.attention import AttentionConfig
from attnplat.errors import ConfigError, UnsupportedCallError
from attnplat.integrations.transformers.dense import DenseCall, attend
from attnplat.integrations.transformers.kernels import Kernels
from attnplat.integrations.transformers.keywords import read_keywords
from attnplat.integrations.transformers.masks import attention_mask

WATCH = "_attnplat_watch"
"""Attribute of a module under which a `Watch` is told of its calls; set while probing only."""

Watch = Callable[["DenseCall"], torch.Tensor]
"""Sees one call and answers it, [batch, queries, num_heads, v_head_size]."""

# Transformers reads these in a name as a wish for one of its own implementations or a kernel
# of its hub, and acts on it before any registry is asked.
_NAME_TRAPS = ("flash", "sdpa", "flex_attention", "eager", "paged", "/", "|")


class AttentionFunction:
    """attnplat as an attention function of transformers.

    Each call is planned, which takes the lengths to the host: `torch.compile` ends a graph before
    it and begins the next one after it.

    Args:
        attention: the user's wishes; None for what the environment says.
    """

    def __init__(self, attention: AttentionConfig | None = None) -> None:
        self.attention = attention
        self.kernels = Kernels(attention)

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="attention is planned with lengths on the host"
    )
    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of one layer.

        Args:
            query: [batch, num_heads, queries, head_size].
            key, value: [batch, num_kv_heads, keys, head_size | v_head_size].
            attention_mask: [batch, 1 or heads, queries, keys], bool (True: attend) or a float
                that is added; what attnplat's mask function made; or None.
            scaling: multiplies QK^T; default head_size ** -0.5.
            dropout: refused when above 0 in training.
            keywords: see `keywords.py`.

        Returns:
            [batch, queries, num_heads, v_head_size], and None for the weights.

        Raises:
            UnsupportedCallError: training, or a keyword or mask that is not served.
            NoBackendError: no backend fits what the layer asks for.
        """
        call = DenseCall(
            module=module,
            query=query,
            key=key,
            value=value,
            mask=attention_mask,
            scaling=scaling,
            keywords=read_keywords(keywords),
        )
        watch: Watch | None = vars(module).get(WATCH)
        if watch is not None:
            return watch(call), None
        _refuse_training(call, dropout)
        if call.keywords.step is not None:
            return call.keywords.step.attend(call), None
        return attend(self.kernels, call), None


def register(name: str = "attnplat", attention: AttentionConfig | None = None) -> AttentionFunction:
    """Make `attn_implementation=name` run attnplat in transformers.

    Registers the attention function and, under the same name, the mask function: without
    it a model would make no mask at all. A second call with the same wishes changes nothing;
    other wishes replace the first. Several names may stand for several wishes.

    Raises ConfigError for a name that transformers would take for something else.
    """
    for trap in _NAME_TRAPS:
        if trap in name:
            raise ConfigError(
                f"{name!r} cannot be registered: transformers takes a name with {trap!r} for "
                "something of its own; 'attnplat' or 'attnplat_2' are fine"
            )
    found = AttentionInterface().get(name)
    if found is not None and not isinstance(found, AttentionFunction):
        raise ConfigError(f"{name!r} is registered already, by something else than attnplat")
    if found is None or found.attention != attention:
        found = AttentionFunction(attention)
        AttentionInterface.register(name, found)
    AttentionMaskInterface.register(name, attention_mask)
    return found


def _refuse_training(call: DenseCall, dropout: float) -> None:
    if dropout and call.module.training:
        raise UnsupportedCallError(
            f"dropout is {dropout} in training mode; attnplat runs inference: call model.eval(), "
            "or train with another attn_implementation"
        )
    tensors = (call.query, call.key, call.value, call.keywords.s_aux, call.keywords.position_bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedCallError(
            "attnplat computes no gradients and an input requires them: run the model under "
            "torch.inference_mode() or torch.no_grad(), or train with another attn_implementation"
        )
