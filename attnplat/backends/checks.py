"""Checks of tensor headers: shape, dtype, stride and device, never values.

They run for every implementation before any work is enqueued, so a refused call has touched
neither the cache nor the output. Each message names the tensor, what it is and what was
expected.
"""

from __future__ import annotations

from typing import Any

import torch

from attnplat.errors import ConfigError, PlanMismatchError

Size = int | None | range
"""An exact size, None for any, or a range of allowed sizes (`at_least`)."""

LARGEST = 1 << 62

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def at_least(size: int) -> range:
    """A size of `size` or more."""
    return range(size, LARGEST)


def check_tensor(
    name: str,
    tensor: Any,
    *,
    shape: tuple[Size, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    contiguous_rows: bool = False,
) -> None:
    """Refuse `tensor` unless its header is as expected.

    `contiguous_rows` asks that neighbouring elements of the last dimension are neighbours in
    memory. Raises PlanMismatchError.
    """
    if not isinstance(tensor, torch.Tensor):
        raise PlanMismatchError(f"{name} is a {type(tensor).__name__}; expected a tensor")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in dtypes:
        takes = " or ".join(str(d) for d in dtypes)
        raise PlanMismatchError(f"{name} has dtype {tensor.dtype}; expected {takes}")
    if not _fits(tuple(tensor.shape), shape):
        raise PlanMismatchError(
            f"{name} has shape {list(tensor.shape)}; expected {describe_shape(shape)}"
        )
    if tensor.device != device:
        raise PlanMismatchError(f"{name} is on {tensor.device}; expected {device}")
    if contiguous_rows and tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise PlanMismatchError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1 "
            f"({name}.contiguous() has it)"
        )


def demand(holds: bool, otherwise: str) -> None:
    """Raise ConfigError with the sentence `otherwise` unless the condition holds."""
    if not holds:
        raise ConfigError(otherwise)


def describe_shape(shape: tuple[Size, ...]) -> str:
    """The expected shape in words: `[at least 4, 8, any]`."""
    words = []
    for size in shape:
        if size is None:
            words.append("any")
        elif isinstance(size, range):
            words.append(f"at least {size.start}")
        else:
            words.append(str(size))
    return f"[{', '.join(words)}]"


def _fits(actual: tuple[int, ...], shape: tuple[Size, ...]) -> bool:
    if len(actual) != len(shape):
        return False
    for size, expected in zip(actual, shape, strict=True):
        if expected is None:
            continue
        if size not in expected if isinstance(expected, range) else size != expected:
            return False
    return True


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
