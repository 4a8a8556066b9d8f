"""Small helpers on tensors, dtypes and devices."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor`, made on the host and not changed afterwards, on `device`, without waiting for
    the work enqueued there before."""
    return tensor.to(device, non_blocking=True)


def same_device(device: torch.device | str) -> torch.device:
    """The device as tensors name it: `cuda` becomes `cuda:0`, the current one."""
    return torch.empty(0, device=device).device


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name` (`bfloat16`)."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
