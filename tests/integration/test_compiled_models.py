"""torch.compile of a whole model: attention stands between the graphs, and all is as before."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from attnplat.integrations.transformers import register


@pytest.mark.slow
def test_a_compiled_model_gives_what_the_plain_one_gives() -> None:
    register()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        attn_implementation="attnplat",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 99, (2, 12))
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        for length in (12, 12):
            given = tokens[:, :length]
            padding = torch.ones_like(given)
            padding[0, :3] = 0
            expected = model(given, attention_mask=padding).logits[padding.bool()]
            got = compiled(given, attention_mask=padding).logits[padding.bool()]
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] >= config.num_hidden_layers, "nothing was compiled"
    breaks = list(counters["graph_break"])
    assert any("planned with lengths on the host" in reason for reason in breaks)
    assert all("torch.compiler.disable" in reason for reason in breaks if "attnplat" in reason)
