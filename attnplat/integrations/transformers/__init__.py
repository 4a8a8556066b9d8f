"""attnplat for Hugging Face transformers.

    >>> from attnplat.integrations.transformers import explain, register, verify
    >>> register()
    >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="attnplat")
    >>> print(verify(model))
    30 of 30 attention layers use attnplat
    >>> print(explain(model))

`PagedModel` runs ragged batches of such a model through a paged KV cache, `generate` decodes
with it.
"""

from attnplat.integrations.transformers.decoding import Completion, generate
from attnplat.integrations.transformers.explanation import Explanation, explain
from attnplat.integrations.transformers.paged import PagedModel
from attnplat.integrations.transformers.registry import AttentionFunction, register
from attnplat.integrations.transformers.verification import Verification, verify

__all__ = [
    "AttentionFunction",
    "Completion",
    "Explanation",
    "PagedModel",
    "Verification",
    "explain",
    "generate",
    "register",
    "verify",
]
