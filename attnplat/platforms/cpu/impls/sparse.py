"""CPU_MLA_SPARSE: latent attention over the keys that an indexer chose, by the C++ kernels.

A query token's indices are put in order, each key once, and its rows are read one by one where
they lie: no tile holds a key that is not wanted, and nothing is gathered beforehand. Rows that
are stored as codes and scales are decoded on the way, for AMX and AVX-512-BF16 to bfloat16 (which
rounds only where a scale is no power of two), else to float32.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.plan import Call
from attnplat.config.names import Operation
from attnplat.platforms.cpu.impls.attention import CpuAttnImpl
from attnplat.platforms.cpu.kernels.library import Tensors

LATENT_ROWS = frozenset(
    {
        Encoding.MLA_FP8_656,
        Encoding.MLA_FP8_584,
        Encoding.MLA_FP8_528,
        Encoding.MLA_NVFP4_352,
    }
)
"""Formats of latent rows alone."""


class LatentRowsImpl(CpuAttnImpl):
    """Attention of the C++ kernels over caches of latent rows as well as plain ones."""

    encodings: ClassVar[frozenset[Encoding]] = CpuAttnImpl.encodings | LATENT_ROWS

    def _scale_offsets(self) -> tuple[int, int]:
        # A latent row has a scale per tile, which its decoding applies.
        return (0, 0) if self.encoding in LATENT_ROWS else super()._scale_offsets()

    def _tensors(self, call: Call, kept: list[torch.Tensor]) -> Tensors:
        tensors = super()._tensors(call, kept)
        if call.cache is None or (scales := call.cache.k_scales) is None:
            return tensors
        axes, strides = call.cache.spec.layout.of_one_layer, scales.stride()
        return tensors._replace(
            row_scales=scales.data_ptr(),
            row_scales_block=strides[axes.index("B")],
            row_scales_token=strides[axes.index("N")],
        )


class CpuSparseMlaImpl(LatentRowsImpl):
    """Absorbed latent attention over chosen keys: one key head, values in its keys."""

    name = "CPU_MLA_SPARSE"
    operations = frozenset({Operation.SPARSE_MLA})
    block_size = 64
