"""Where other rule sets depart from the CUDA platform's catalog and preferences.

Conditions that only another rule set has stand in `departures`, beside this table.
"""

from __future__ import annotations

from typing import Any

from attnplat.backends.backend import Rule
from attnplat.backends.limits import Cases, Limit, MultipleOf, OneOf
from attnplat.backends.portable.catalog import (
    FP32,
    FP8_KV,
    HALF_DTYPES,
    PLAIN_KV,
    TRITON_ATTN,
)
from attnplat.backends.portable.predicates import is_vision
from attnplat.config.frozen import FrozenMap
from attnplat.config.names import Dtype, KVCacheDtype, Operation
from attnplat.platforms.cuda import departures as they
from attnplat.platforms.cuda import sparse
from attnplat.platforms.cuda.flashinfer import trtllm_serves_both
from attnplat.platforms.cuda.multi_head import FLASHINFER, majors
from attnplat.platforms.differences import Difference

_SELECTOR = "vLLM 0.33, CUDA platform, selector"
_CLASSES = "vLLM 0.33, capability answers of the backend classes"
_VISION = "vLLM 0.33, vision selector"
_PREFILL = "vLLM 0.33, MLA prefill selector"
_V4 = "vLLM 0.33, DeepSeek-V4 model code"
_MINIMAX = "vLLM 0.33, MiniMax-M3 model code"
_INDEXER = "vLLM 0.33, sparse indexer"

ANY_DTYPE = OneOf(Dtype.FLOAT16, Dtype.BFLOAT16, FP32)


def _differs(
    backend: str | None,
    subject: str,
    theirs: Any,
    ours: str,
    because: str,
    source: str = _CLASSES,
    *,
    where: Limit | None = None,
    operation: Operation | None = None,
) -> Difference:
    return Difference(
        backend=backend,
        subject=subject,
        theirs=theirs,
        ours=ours,
        because=because,
        source=source,
        where=FrozenMap() if where is None else FrozenMap({"capability": where}),
        operation=operation,
    )


def _says(backend: str, code: str, when: Any, ours: str, because: str) -> Difference:
    """A combination that they refuse and attnplat does not, or not so."""
    return _differs(backend, f"rule.{code}", Rule(code, when, ours), ours, because)


def _never_says(backend: str, code: str, ours: str, because: str) -> Difference:
    """A combination that attnplat refuses and they do not."""
    return _differs(backend, f"rule.{code}", None, ours, because)


ACCEPTANCE = (
    _differs(
        None,
        "accepts.foreign_platform",
        they.is_left_to_the_selector,
        "a backend of another vendor is refused",
        "its kernels cannot run here",
        _SELECTOR,
    ),
    _differs(
        None,
        "accepts.cache_asked_of_all",
        True,
        "a layer without a KV cache is not asked for the cache's format",
        "a wish about the cache says nothing of layers that have none",
        _SELECTOR,
    ),
    _differs(
        None,
        "accepts.parts_apart",
        True,
        "a latent layer is served only if its prefill and indexer are",
        "otherwise the model fails when it is built",
        _SELECTOR,
    ),
    _differs(
        None,
        "accepts.request_unvalidated",
        is_vision,
        "a request is checked for vision layers as for all others",
        "a head size or dtype that its kernels lack fails at the first image",
        _VISION,
    ),
    _differs(
        None,
        "accepts.request_ignored",
        they.is_deepseek_v4_family,
        "a request is honoured or refused",
        "a request is never dropped silently",
        _V4,
    ),
    _differs(
        None,
        "accepts.automatic_unvalidated",
        they.is_chosen_by_model_code,
        "every backend of a row is checked",
        "a model's own kernels have limits and packages like all others",
        _V4,
    ),
)

ORDER = (
    _differs(
        "TORCH_SDPA",
        "exists",
        is_vision,
        "serves every layer, behind all fused kernels",
        "torch's own attention runs where nothing else does",
        _SELECTOR,
    ),
    _differs(
        "REFERENCE",
        "exists",
        False,
        "serves every layer on request, slowly",
        "a right answer is there on every device",
        _SELECTOR,
    ),
    _differs(
        None,
        "order",
        they.V4_ROWS,
        "DeepSeek-V4's row is tried in order, and a request by name is one of its own backends",
        "a name that means another backend would be replaced silently",
        _V4,
    ),
    _differs(
        None,
        "order",
        (they.LATENT_CONSUMER, *they.LATENT_BLACKWELL, *they.LATENT_ORDINARY),
        "dense and sparse latent layers have rows of their own",
        "a backend of the other kind can never be chosen, and its refusals are noise",
        _SELECTOR,
    ),
    _differs(
        None,
        "order",
        they.BLOCK_ROWS,
        "block-sparse layers have a row",
        "no backend of ordinary attention reads the chosen blocks alone",
        _SELECTOR,
    ),
    _differs(
        None,
        "order",
        they.MINIMAX_ROWS,
        "MiniMax-M3's row is tried in order",
        "what each backend takes is declared once, beside it",
        _MINIMAX,
    ),
    _differs(
        None,
        "order",
        they.NARROW_ROWS,
        "Triton's kernels need no FlashAttention beside them",
        "asking FlashAttention for its version must not fail where it is not installed",
        "vLLM 0.33, attention with values of another width",
    ),
    _differs(
        None,
        "order",
        they.VISION_ROWS,
        "Triton comes before torch on every device",
        "where it takes the layer it is the faster",
        _VISION,
    ),
)
DIFFERENCES: tuple[Difference, ...] = (*ACCEPTANCE, *ORDER)
