"""Dense calls: queries, keys and values of whole sequences, as a plain model brings them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from attnplat.backends.form import MaskRules
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.plan import Plan
from attnplat.errors import UnsupportedCallError
from attnplat.integrations.transformers.kernels import Kernels
from attnplat.integrations.transformers.keywords import Keywords
from attnplat.integrations.transformers.layers import (
    layer_config,
    own_rules,
    with_window,
)
from attnplat.integrations.transformers.masks import Layout, StructuredMask, packed_starts

_NEG_INF = float("-inf")


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseCall:
    """The tensors of one call.

    Attributes:
        query: [batch, num_heads, queries, head_size].
        key, value: [batch, num_kv_heads, keys, head_size | v_head_size].
        mask: as the model hands it over, or None.
        scaling: multiplies QK^T; None for head_size ** -0.5.
        keywords: what else came.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float | None
    keywords: Keywords

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Batch rows, queries and keys of a row."""
        return self.query.shape[0], self.query.shape[2], self.key.shape[2]


def attend(kernels: Kernels, call: DenseCall) -> torch.Tensor:
    """Attention of a dense call, [batch, queries, num_heads, v_head_size].

    Rows of padding, and rows that see no key, are 0.
    """
    layout, bias = _lay_out(call)
    config = layer_config(
        call.module,
        call.query,
        call.key,
        call.value,
        rules=layout.rules,
        scaling=call.scaling,
        keywords=call.keywords,
        position_bias=bias is not None,
        crosses=layout.crosses,
    )
    device = call.query.device
    batch_size, num_queries, num_keys = call.sizes
    impl = kernels.impl(config, device)
    rows = layout.row_index(device)
    keys = layout.key_index(batch_size * num_keys, device)
    out = impl.forward(
        _plan(impl, layout, device),
        flat(call.query, rows),
        kv=(flat(call.key, keys), flat(call.value, keys)),
        sinks=call.keywords.s_aux,
        position_bias=bias,
        topk_indices=_topk(call, layout, rows),
    )
    if rows is not None:
        padded = out.new_zeros(layout.num_rows, *out.shape[1:])
        padded[rows] = out
        out = padded
    return out.view(batch_size, num_queries, *out.shape[1:])


def _plan(impl: AttentionImpl, layout: Layout, device: torch.device) -> Plan:
    key = impl.plan_key
    plan = layout.plans.get(key)
    if plan is None:
        plan = layout.plans[key] = impl.plan(layout.batch(device))
    return plan


def flat(heads: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    """[batch, heads, length, size] as rows [batch * length, heads, size], or those of `index`."""
    rows = heads.transpose(1, 2)
    if index is not None:
        return rows[index // rows.shape[1], index % rows.shape[1]]
    rows = rows.flatten(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


# From masks to layouts ------------------------------------------------------------------------


def _lay_out(call: DenseCall) -> tuple[Layout, torch.Tensor | None]:
    """The requests of a call, and the bias table where a rule over lengths does not say it all.

    A mask that is given is the whole mask: transformers builds causality and window into it.
    """
    _check_mask(call)
    if call.keywords.cu_seq_lens_q is not None:
        return _packed(call)
    mask, bias = call.mask, call.keywords.position_bias
    if mask is None:
        layout = Layout.full(own_rules(call.module, call.keywords), *call.sizes)
        _check_alignment(call, layout.rules)
        return _with_bias(call, layout, None, bias)
    if isinstance(mask, StructuredMask) and mask.ragged is not None:
        layout = mask.ragged
        rules = with_window(layout.rules, call.keywords, layout.longest)
        if rules != layout.rules:
            layout = replace(layout, rules=rules)  # with the same plans: their keys have the rules
        return _with_bias(call, layout, mask, bias)
    return _explicit(call, mask, bias)


def _check_mask(call: DenseCall) -> None:
    mask = call.mask
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        what = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise UnsupportedCallError(
            f"the attention mask is {what}; it takes [batch, 1 or heads, queries, keys]. The "
            "mask function of attnplat must be registered under the same name: register() does"
        )
    batch_size, num_queries, num_keys = call.sizes
    allowed = ({1, batch_size}, {1, call.query.shape[1]}, {1, num_queries}, {num_keys})
    if any(size not in sizes for size, sizes in zip(mask.shape, allowed, strict=True)):
        raise UnsupportedCallError(
            f"the attention mask is {list(mask.shape)}; the call has {batch_size} sequences, "
            f"{call.query.shape[1]} heads, {num_queries} queries and {num_keys} keys"
        )
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise UnsupportedCallError(
            f"the attention mask has dtype {mask.dtype}; it takes bool (True: attend) or a float "
            "that is added"
        )


def _check_alignment(call: DenseCall, rules: MaskRules) -> None:
    _, num_queries, num_keys = call.sizes
    if rules.causal and num_queries > num_keys:
        raise UnsupportedCallError(
            f"a causal layer has {num_queries} queries, {num_keys} keys and no mask; where the "
            "queries lie among the keys is not said. Pass is_causal=False, or a mask"
        )


def _packed(call: DenseCall) -> tuple[Layout, torch.Tensor | None]:
    """Packed sequences: `cu_seq_lens_*` say where each begins."""
    batch_size, num_queries, num_keys = call.sizes
    keywords = call.keywords
    if batch_size != 1:
        raise UnsupportedCallError(
            f"cu_seq_lens_q describes sequences packed into one row; the batch has {batch_size}"
        )
    assert keywords.cu_seq_lens_q is not None and keywords.cu_seq_lens_k is not None
    query_starts = packed_starts(keywords.cu_seq_lens_q, "cu_seq_lens_q", num_queries)
    key_starts = packed_starts(keywords.cu_seq_lens_k, "cu_seq_lens_k", num_keys)
    if len(query_starts) != len(key_starts):
        raise UnsupportedCallError(
            f"cu_seq_lens_q names {len(query_starts) - 1} sequences and cu_seq_lens_k "
            f"{len(key_starts) - 1}"
        )
    layout = Layout.packed(own_rules(call.module, keywords), query_starts, key_starts)
    if call.mask is None and keywords.position_bias is None:
        return layout, None
    device = call.query.device
    sequences = range(len(query_starts) - 1)
    same = (
        layout.per_row(sequences, device)[:, None] == _sequence_of_key(key_starts, device)[None]
    )[None, None]
    if call.mask is None:
        if layout.rules != MaskRules(causal=False):
            raise UnsupportedCallError(
                "position_bias with packed causal sequences needs a mask; pass one"
            )
        return _explicit(call, same, keywords.position_bias)
    mask = call.mask.as_subclass(torch.Tensor)
    both = mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, _NEG_INF)
    return _explicit(call, both, keywords.position_bias)


def _sequence_of_key(starts: list[int], device: torch.device) -> torch.Tensor:
    counts = torch.tensor(starts).diff()
    return torch.arange(len(counts)).repeat_interleave(counts).to(device)


def _with_bias(
    call: DenseCall, layout: Layout, mask: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[Layout, torch.Tensor | None]:
    """A layout with the call's own position bias, if it brought one."""
    if bias is None:
        return layout, None
    _check_bias(call, bias)
    if all(start == (0, 0) for start in layout.starts):
        return layout, bias[0] if bias.shape[0] == 1 else bias
    assert mask is not None, "a layout without a mask begins every request at 0"
    return _explicit(call, mask, bias)


def _explicit(
    call: DenseCall, mask: torch.Tensor, bias: torch.Tensor | None
) -> tuple[Layout, torch.Tensor]:
    """Every entry of a mask as a bias: 0 or its value where visible, -inf where hidden."""
    batch_size, num_queries, num_keys = call.sizes
    mask = mask.as_subclass(torch.Tensor)
    wide = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    if mask.dtype == torch.bool:
        table = torch.zeros((), dtype=wide, device=mask.device).where(mask, _NEG_INF)
    else:
        # Models mask with the lowest number of the dtype, or what is left of it after sums.
        table = mask.to(wide).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, _NEG_INF)
    if bias is not None:
        _check_bias(call, bias)
        table = table + bias.to(wide)
    table = table.expand(batch_size, call.query.shape[1], num_queries, num_keys)
    rules = MaskRules(causal=False)
    return Layout.full(rules, batch_size, num_queries, num_keys), table


def _check_bias(call: DenseCall, bias: torch.Tensor) -> None:
    batch_size, num_queries, num_keys = call.sizes
    heads = call.query.shape[1]
    fits = bias.dim() == 4 and bias.shape[0] in (1, batch_size)
    if not fits or tuple(bias.shape[1:]) != (heads, num_queries, num_keys):
        raise UnsupportedCallError(
            f"position_bias is {list(bias.shape)}; it takes [1 or {batch_size}, {heads}, "
            f"{num_queries}, {num_keys}]"
        )


def _topk(call: DenseCall, layout: Layout, rows: torch.Tensor | None) -> torch.Tensor | None:
    """Key indices of a dense row, as positions within each request."""
    indices = call.keywords.indices
    if indices is None:
        return None
    batch_size, num_queries, _ = call.sizes
    if indices.dim() != 3 or tuple(indices.shape[:2]) != (batch_size, num_queries):
        raise UnsupportedCallError(
            f"indices is {list(indices.shape)}; it takes [{batch_size}, {num_queries}, topk]"
        )
    named = indices.flatten(0, 1)
    named = named if rows is None else named[rows]
    first = layout.per_row([key for _, key in layout.starts], named.device)[:, None]
    return torch.where(named >= first, named - first, -1).to(torch.int32)
