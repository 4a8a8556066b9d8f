"""Queries that come as fp8 codes, and outputs that leave as fp8 codes, around any kernel.

A code times its scale is the number: `q_scale` multiplies what is read, `out_scale` divides what is
written. Kernels see the layer's dtype; one that does this in the same pass would give the same up
to the rounding of the output to that dtype.
"""

from __future__ import annotations

import torch

from attnplat.backends.arch import TorchArch
from attnplat.backends.formats.element_codec import decode_elements, encode_elements
from attnplat.backends.formats.elements import E4M3FN, E4M3FNUZ, E5M2, Minifloat
from attnplat.backends.formats.encodings import FNUZ_ARCHS

FP8: dict[torch.dtype, Minifloat] = {
    torch.float8_e4m3fn: E4M3FN,
    torch.float8_e4m3fnuz: E4M3FNUZ,
    torch.float8_e5m2: E5M2,
}
"""What the codes of a torch dtype mean."""


def fp8_of(device: torch.device) -> torch.dtype:
    """The fp8 dtype of outputs that nobody has chosen: e4m3, in its fnuz form on CDNA3."""
    fnuz = TorchArch.of(device).arch in FNUZ_ARCHS
    return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn


def read_query(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp8 queries [rows, num_heads, size] as numbers: code * scale, rounded once, to `dtype`.

    scale is float32 [1] or [num_kv_heads], one for the query heads of a key-value head.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if len(scale) > 1:
        scale = scale.repeat_interleave(q.shape[1] // len(scale))[:, None]
    codes = decode_elements(FP8[q.dtype], q.view(torch.uint8), wide)
    return (codes * scale.to(wide)).to(dtype)


def write_output(
    found: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, num_real: torch.Tensor
) -> None:
    """Rows of `found` below `num_real` (0-d) as fp8 codes of found / scale, saturating."""
    wide = found if found.dtype == torch.float64 else found.float()
    codes = encode_elements(FP8[out.dtype], wide / scale.to(wide.dtype))
    kept = out.view(torch.uint8)
    real = torch.arange(len(out), device=out.device) < num_real
    kept.copy_(torch.where(real[:, None, None], codes, kept))
