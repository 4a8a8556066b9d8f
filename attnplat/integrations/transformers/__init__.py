"""attnplat for Hugging Face transformers.

    >>> from attnplat.integrations.transformers import register, verify, explain
    >>> register()
    >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="attnplat")
    >>> print(verify(model))
    >>> print(explain(model))
"""

from attnplat.integrations.transformers.registry import AttentionFunction, register

__all__ = ["AttentionFunction", "register"]
