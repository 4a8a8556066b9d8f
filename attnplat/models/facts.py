"""What a model's layers say of the whole run, as fields of a RunContext."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attnplat.config.layer import MhaConfig
from attnplat.config.names import AttnType, Role
from attnplat.models.groups import LayerGroup


def run_facts(groups: Iterable[LayerGroup]) -> dict[str, Any]:
    """Keyword arguments for `RunContext`: only what the model settles, the rest left out.

    `model_head_size` where decoder layers differ (the largest), `model_attn_type` with cross
    attention, `uses_mm_prefix`, and `model_soft_cap` where there is one.
    """
    layers = [g.config for g in groups if isinstance(g.config, MhaConfig)]
    text = [config for config in layers if config.role == Role.TEXT]
    facts: dict[str, Any] = {}
    sizes = {c.head_size for c in text if c.attn_type == AttnType.DECODER}
    if len(sizes) > 1:
        facts["model_head_size"] = max(sizes)
    if any(c.attn_type == AttnType.ENCODER_DECODER for c in text):
        facts["model_attn_type"] = str(AttnType.ENCODER_DECODER)
    if any(c.mm_prefix for c in text):
        facts["uses_mm_prefix"] = True
    caps = {c.logits_soft_cap for c in text if c.logits_soft_cap is not None}
    if caps:
        facts["model_soft_cap"] = min(caps)
    return facts
