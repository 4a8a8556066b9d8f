"""What the caller asks of a plan, apart from the model: dtypes, block size, ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from attnplat.config.names import Dtype, parse_dtype
from attnplat.config.numbers import is_whole
from attnplat.errors import ConfigError, UnknownNameError
from attnplat.models.fields import Fields

FALLBACK_DTYPE = Dtype.BFLOAT16


@dataclass(frozen=True, kw_only=True)
class Request:
    """The caller's wishes, and the dtype once it is known.

    Attributes:
        dtype: activation dtype; None until `with_dtype_of` has read the model's.
        dtype_source: who said so: `caller`, `model` or `default`.
        kv_cache_dtype: the user's word for the format of the KV cache.
        block_size: tokens per KV-cache block, or None.
        tensor_parallel: ranks that share each layer's heads.
    """

    dtype: Any = None
    dtype_source: str = "caller"
    kv_cache_dtype: Any = "auto"
    block_size: int | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        ranks = self.tensor_parallel
        if not is_whole(ranks) or ranks < 1:
            raise ConfigError(f"tensor_parallel is {ranks!r}; it takes an integer of at least 1")

    def with_dtype_of(self, *configs: Fields) -> Self:
        """With the dtype of the first config that names one, unless the caller did."""
        if self.dtype is not None:
            return replace(self, dtype=parse_dtype(self.dtype))
        for fields in configs:
            for name in ("dtype", "torch_dtype"):
                text = fields.text(name)
                if text is not None:
                    return replace(self, dtype=_model_dtype(fields, name), dtype_source="model")
        return replace(self, dtype=FALLBACK_DTYPE, dtype_source="default")

    def share_heads(self, heads: int, name: str) -> int:
        """Query heads of one rank. Raises ConfigError where they do not divide."""
        ranks = self.tensor_parallel
        if heads % ranks:
            fits = [n for n in range(1, min(heads, ranks) + 1) if heads % n == 0]
            raise ConfigError(
                f"tensor_parallel is {ranks}; it takes a divisor of {name} ({heads}), such as "
                f"{fits[-1]}"
            )
        return heads // ranks

    def share_kv_heads(self, kv_heads: int) -> int:
        """Key-value heads of one rank: at least one, repeated where ranks outnumber heads."""
        ranks = self.tensor_parallel
        if kv_heads % ranks and ranks % kv_heads:
            raise ConfigError(
                f"tensor_parallel is {ranks}; it takes a divisor or a multiple of the key-value "
                f"heads ({kv_heads})"
            )
        return max(1, kv_heads // ranks)

    def whole(self) -> Self:
        """The same request for a part that every rank keeps whole."""
        return replace(self, tensor_parallel=1)


def _model_dtype(fields: Fields, name: str) -> Dtype:
    text = fields.text(name)
    try:
        return parse_dtype(text)
    except UnknownNameError:
        hint = f"the model's {fields.path}{name}; give dtype to override it"
        raise UnknownNameError("dtype", text, Dtype, hint=hint) from None
