"""The attention function honours every keyword it knows and refuses the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from attnplat import AttentionConfig
from attnplat.errors import ConfigError, NoBackendError, UnsupportedCallError
from attnplat.integrations.transformers import AttentionFunction
from attnplat.integrations.transformers.keywords import BOUNDS, HONOURED, NOISE, REFUSED

BATCH, HEADS, KV_HEADS, LENGTH, HEAD_SIZE = 2, 4, 2, 9, 16
SCALE = HEAD_SIZE**-0.5


class Layer(nn.Module):
    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


def tensors(length: int = LENGTH, batch: int = BATCH, queries: int | None = None) -> Any:
    generator = torch.Generator().manual_seed(1)
    shapes = ((HEADS, queries or length), (KV_HEADS, length), (KV_HEADS, length))
    return [torch.randn(batch, *s, HEAD_SIZE, generator=generator) * 2 for s in shapes]


def attend(*qkv: torch.Tensor, mask: Any = None, causal: bool = True, **keywords: Any) -> Any:
    """What attnplat gives, [batch, queries, heads, size]."""
    layer = Layer(is_causal=causal).eval()
    with torch.inference_mode():
        out, weights = AttentionFunction()(layer, *qkv, mask, SCALE, **keywords)
    assert weights is None
    return out


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float = SCALE,
    soft_cap: float | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by its formula, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = scale * q @ k.transpose(2, 3)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.double()
    weights = torch.exp(scores.masked_fill(~visible, float("-inf")))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    out = weights / torch.where(total == 0, 1, total) @ v
    return out.transpose(1, 2)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.double(), expected, rtol=1e-4, atol=2e-5)


def causal(queries: int = LENGTH, keys: int = LENGTH) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


INDICES = torch.stack(
    [torch.randperm(LENGTH, generator=torch.Generator().manual_seed(i))[:4] for i in range(18)]
).view(BATCH, LENGTH, 4)
NAMED = torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.bool).scatter(2, INDICES, True)[:, None]
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
BIAS = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5))

# What a call brings, and what of the oracle it must equal.
HONOURING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "module.is_causal": ({}, {}),
    "is_causal=False": ({"is_causal": False}, {"visible": torch.ones(LENGTH, LENGTH).bool()}),
    "sliding_window=1": ({"sliding_window": 1}, {"visible": torch.eye(LENGTH).bool()}),
    "sliding_window=3": ({"sliding_window": 3}, {"visible": causal().triu(-2)}),
    "sliding_window longer than all": ({"sliding_window": 99}, {}),
    "sliding_window without causality": (
        {"sliding_window": 3, "is_causal": False},
        {"visible": torch.ones(LENGTH, LENGTH).bool().triu(-2).tril(2)},
    ),
    "softcap": ({"softcap": 1.5}, {"soft_cap": 1.5}),
    "s_aux": ({"s_aux": SINKS}, {"sinks": SINKS}),
    "position_bias": ({"position_bias": BIAS}, {"bias": BIAS}),
    "position_bias of each sequence": (
        {"position_bias": torch.cat([BIAS, BIAS.flip(-1)])},
        {"bias": torch.cat([BIAS, BIAS.flip(-1)])},
    ),
    "indices": ({"indices": INDICES}, {"visible": causal() & NAMED}),
    "indices with none": (
        {"indices": INDICES.where(INDICES > 2, -1)},
        {"visible": causal() & NAMED & (torch.arange(LENGTH) > 2)},
    ),
    "deterministic": ({"deterministic": True}, {}),
    "all at once": (
        {"sliding_window": 4, "softcap": 2.0, "s_aux": SINKS, "position_bias": BIAS},
        {"visible": causal().triu(-3), "soft_cap": 2.0, "sinks": SINKS, "bias": BIAS},
    ),
}


@pytest.mark.parametrize("case", HONOURING)
def test_a_known_keyword_is_honoured(case: str) -> None:
    keywords, expected = HONOURING[case]
    qkv = tensors()
    found = attend(*qkv, **keywords)
    assert close(found, oracle(*qkv, **{"visible": causal(), **expected}))


def test_every_keyword_in_the_table_has_a_test() -> None:
    tested = {name for keywords, _ in HONOURING.values() for name in keywords}
    packed = {"cu_seq_lens_q", "cu_seq_lens_k"}  # below
    assert tested | packed | {"attnplat_step"} == set(HONOURED)


def test_a_keyword_stands_in_one_table() -> None:
    names = [*HONOURED, *BOUNDS, *REFUSED, *NOISE]
    assert len(names) == len(set(names))


def test_packed_sequences_do_not_see_each_other() -> None:
    q, k, v = tensors(batch=1)
    offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    found = attend(
        q, k, v, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=5, max_length_k=5
    )
    sequence = torch.tensor([0] * 4 + [2] * 5)
    same = sequence[:, None] == sequence
    assert close(found, oracle(q, k, v, causal() & same))


def test_packed_sequences_with_a_mask_keep_to_both() -> None:
    q, k, v = tensors(batch=1)
    offsets = torch.tensor([0, 4, 9])
    sequence = torch.tensor([0] * 4 + [1] * 5)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(-1)
    found = attend(q, k, v, mask=mask, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    assert close(found, oracle(q, k, v, mask & (sequence[:, None] == sequence)))


def test_queries_are_the_last_of_their_keys() -> None:
    q, k, v = tensors(queries=3)
    assert close(attend(q, k, v), oracle(q, k, v, causal(3, LENGTH)))


def test_values_may_be_narrower_than_keys() -> None:
    q, k, v = tensors()
    v = v[..., :5]
    assert close(attend(q, k, v), oracle(q, k, v, causal()))


def test_a_mask_is_the_whole_mask() -> None:
    """As in eager attention: causality and window are built into it."""
    qkv = tensors()
    mask = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[0, 0, 3] = False
    expected = oracle(*qkv, mask)
    assert close(attend(*qkv, mask=mask, sliding_window=2), expected)
    assert (attend(*qkv, mask=mask)[0, 3] == 0).all(), "a row that sees nothing is 0"
    lowest = torch.finfo(torch.float32).min
    for hidden in (lowest, float("-inf"), lowest * 0.75):
        added = torch.zeros(mask.shape).masked_fill(~mask, hidden)
        assert close(attend(*qkv, mask=added), expected), hidden


def test_a_mask_may_be_added_and_differ_by_head() -> None:
    qkv = tensors()
    mask = BIAS.masked_fill(~causal(), float("-inf"))
    assert close(attend(*qkv, mask=mask), oracle(*qkv, causal(), bias=BIAS))


def test_a_mask_may_leave_out_the_queries() -> None:
    qkv = tensors()
    keys = torch.arange(LENGTH) > torch.tensor([[2], [4]])
    found = attend(*qkv, mask=keys[:, None, None])
    assert close(found, oracle(*qkv, keys[:, None, None].expand(-1, 1, LENGTH, -1)))


def test_inputs_are_left_as_they_are() -> None:
    qkv = tensors()
    before = [t.clone() for t in qkv]
    attend(*qkv, sliding_window=3, s_aux=SINKS, softcap=3.0)
    assert all(torch.equal(a, b) for a, b in zip(qkv, before, strict=True))


def test_half_precision_is_as_near_as_it_can_be() -> None:
    q, k, v = (t.bfloat16() for t in tensors())
    found, expected = attend(q, k, v).double(), oracle(q, k, v, causal())
    assert found.dtype == torch.float64 and (found - expected).norm() < 8e-3 * expected.norm()


# Each row: keywords or other departures, and what the message must name.
REFUSALS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown keyword": ({"head_mask": torch.ones(HEADS)}, ("'head_mask'", "softcap")),
    "misspelt keyword": ({"soft_cap": 30.0}, ("'soft_cap'", "did you mean 'softcap'")),
    "weights": ({"output_attentions": True}, ("output_attentions", "eager")),
    "sinks per token": ({"sinks": SINKS}, ("sinks", "s_aux")),
    "block indices": ({"block_indices": INDICES}, ("block_indices",)),
    "window of nothing": ({"sliding_window": 0}, ("sliding_window", "0")),
    "half of the offsets": ({"cu_seq_lens_q": torch.tensor([0, 9])}, ("cu_seq_lens_k",)),
    "offsets in a batch": (
        {"cu_seq_lens_q": torch.tensor([0, 9]), "cu_seq_lens_k": torch.tensor([0, 9])},
        ("cu_seq_lens_q", "2"),
    ),
    "two-dimensional mask": ({"mask": torch.ones(BATCH, LENGTH)}, ("[2, 9]", "mask function")),
    "mask of other keys": ({"mask": torch.ones(BATCH, 1, LENGTH, 5).bool()}, ("[2, 1, 9, 5]",)),
    "integer mask": ({"mask": torch.ones(BATCH, 1, LENGTH, LENGTH).long()}, ("int64",)),
    "bias of other heads": ({"position_bias": BIAS[:, :1]}, ("position_bias", "[1, 1, 9, 9]")),
    "indices of other queries": ({"indices": INDICES[:, :3]}, ("indices", "[2, 3, 4]")),
    "soft cap of nothing": ({"softcap": 0.0}, ("logits_soft_cap", "0.0")),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_served_is_refused_by_name(case: str) -> None:
    keywords, names = REFUSALS[case]
    with pytest.raises((UnsupportedCallError, ConfigError)) as refusal:
        attend(*tensors(), **keywords)
    assert all(name in str(refusal.value) for name in names), str(refusal.value)


def test_noise_and_absent_keywords_change_nothing() -> None:
    qkv = tensors()
    noise = dict.fromkeys(NOISE, object())
    absent = dict.fromkeys([*HONOURED, *REFUSED, "head_mask"])
    found = attend(*qkv, **noise, **absent)
    assert torch.equal(found, attend(*qkv))
    assert torch.equal(found, attend(*qkv, output_attentions=False))


def test_more_causal_queries_than_keys_are_refused_without_a_mask() -> None:
    with pytest.raises(UnsupportedCallError, match="12 queries, 9 keys"):
        attend(*tensors(queries=12))


def test_dropout_is_refused_in_training_only() -> None:
    function, layer = AttentionFunction(), Layer()
    with torch.inference_mode():
        with pytest.raises(UnsupportedCallError, match=r"dropout is 0\.1"):
            function(layer.train(), *tensors(), None, SCALE, dropout=0.1)
        out, _ = function(layer.eval(), *tensors(), None, SCALE, dropout=0.1)
    assert torch.equal(out, attend(*tensors()))


def test_gradients_are_refused_rather_than_lost() -> None:
    q, k, v = tensors()
    q.requires_grad_()
    with pytest.raises(UnsupportedCallError, match="no gradients"):
        AttentionFunction()(Layer().eval(), q, k, v, None, SCALE)
    with torch.no_grad():
        AttentionFunction()(Layer().eval(), q, k, v, None, SCALE)


def test_the_users_backend_is_used_and_one_that_does_not_fit_is_refused() -> None:
    qkv = tensors()
    with torch.inference_mode():
        reference = AttentionFunction(AttentionConfig(backend="reference"))
        out, _ = reference(Layer(), *qkv, None, SCALE)
        assert [s.chosen.name for s in reference.kernels.selections.values()] == ["REFERENCE"]
        assert close(out, oracle(*qkv, causal()))
        with pytest.raises(NoBackendError, match="FLASHINFER"):
            AttentionFunction(AttentionConfig(backend="FLASHINFER"))(Layer(), *qkv, None, SCALE)
