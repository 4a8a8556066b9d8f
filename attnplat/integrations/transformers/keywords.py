"""What arrives at an attention function besides its tensors, and what becomes of each keyword.

Transformers hands every keyword of a model's forward on to the attention function, so that
what changes the result and what merely passes by arrive together. Each keyword stands in
exactly one of the tables below. One that stands in none is refused: a feature that nobody
looked at must not vanish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnplat.errors import UnsupportedCallError, closest_name

STEP = "attnplat_step"
"""The model keyword that carries a paged step to every layer."""

HONOURED = {
    "sliding_window": "keys visible to a query, its own included; used where no mask says more",
    "is_causal": "causality; used where no mask says more",
    "softcap": "soft cap of the scaled logits",
    "s_aux": "one sink logit per head",
    "position_bias": "added to the scaled logits",
    "indices": "keys that each query may see (sparse attention)",
    "cu_seq_lens_q": "first row of each packed sequence, and the end",
    "cu_seq_lens_k": "first key of each packed sequence, and the end",
    "deterministic": "same bits at every run",
    STEP: "the step of a paged cache",
}

BOUNDS = frozenset({"max_length_q", "max_length_k"})
"""Upper bounds on lengths that `cu_seq_lens_*` and the tensors themselves give exactly."""

REFUSED = {
    "output_attentions": "the kernels never form the weights; load the model with "
    "attn_implementation='eager' to look at them",
    "sinks": "sink logits per token have no kernel here (per head, as s_aux, they have)",
    "block_indices": "block-sparse attention has no adapter here yet",
}
"""Keywords with a meaning that is not served, and what to do instead."""

NOISE = frozenset(
    {
        "cache",
        "cache_position",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    }
)
"""Keywords for other parts of a model. Positions have entered q and k by the time they arrive,
and the mask has been made from them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Keywords:
    """The keywords of one call that have a meaning; None where it brought none.

    Attributes:
        sliding_window: tokens, the query's own included.
        is_causal: causality where no mask is given.
        softcap: c in c*tanh(x/c).
        s_aux: sink logits, [num_heads].
        position_bias: [1 or batch, num_heads, queries, keys].
        indices: key indices, integer [batch, queries, topk].
        cu_seq_lens_q, cu_seq_lens_k: integer [sequences + 1].
        deterministic: whether equal bits are asked for.
        step: the paged step, or None for a dense call.
    """

    sliding_window: int | None = None
    is_causal: bool | None = None
    softcap: float | None = None
    s_aux: torch.Tensor | None = None
    position_bias: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    cu_seq_lens_q: torch.Tensor | None = None
    cu_seq_lens_k: torch.Tensor | None = None
    deterministic: bool = False
    step: Any = None


def read_keywords(given: Mapping[str, Any]) -> Keywords:
    """The meaning of a call's further keywords. A value of None asks for nothing.

    Raises UnsupportedCallError for a keyword that is not served or not known.
    """
    present = {name: value for name, value in given.items() if value is not None}
    for name, why in REFUSED.items():
        if present.pop(name, False) is not False:
            raise UnsupportedCallError(f"attention keyword {name!r} is not served: {why}")
    for name in present.keys() - HONOURED.keys() - BOUNDS - NOISE:
        raise UnsupportedCallError(_unknown(name))
    if ("cu_seq_lens_q" in present) != ("cu_seq_lens_k" in present):
        raise UnsupportedCallError(
            "attention keywords cu_seq_lens_q and cu_seq_lens_k describe packed sequences "
            "together; one of them came without the other"
        )
    window = present.get("sliding_window")
    return Keywords(
        sliding_window=None if window is None else _window(window),
        is_causal=present.get("is_causal"),
        softcap=present.get("softcap"),
        s_aux=present.get("s_aux"),
        position_bias=present.get("position_bias"),
        indices=present.get("indices"),
        cu_seq_lens_q=present.get("cu_seq_lens_q"),
        cu_seq_lens_k=present.get("cu_seq_lens_k"),
        deterministic=bool(present.get("deterministic", False)),
        step=present.get(STEP),
    )


def _window(window: Any) -> int:
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise UnsupportedCallError(
            f"attention keyword sliding_window is {window!r}; it takes a number of tokens from 1"
        )
    return window


def _unknown(name: str) -> str:
    known = sorted({*HONOURED, *BOUNDS, *REFUSED})
    closest = closest_name(name, known)
    hint = f"did you mean {closest!r}? " if closest else ""
    return (
        f"unknown attention keyword {name!r}; {hint}it may change the result, so it is not "
        f"dropped. Known: {', '.join(known)}; of no effect on attention: "
        f"{', '.join(sorted(NOISE))}"
    )
