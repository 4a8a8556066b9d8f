"""Comparing tensors bit by bit, NaN and signs of zero included."""

from __future__ import annotations

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same size."""
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8)
    return tensor.contiguous().view(_WORDS[tensor.dtype.itemsize])


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many elements differ in any bit."""
    return int((bits(one) != bits(other)).sum())
