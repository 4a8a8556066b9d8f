"""Checks of tensor headers: shape, dtype, stride and device, never values.

They run for every implementation before any work is enqueued, so a refused call has touched
neither the cache nor the output. Each message names the tensor, what it is and what was
expected.
"""

from __future__ import annotations

from typing import Any

import torch

from attnplat.errors import ConfigError, PlanMismatchError, TensorError

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
    written: bool = False,
) -> None:
    """Refuse `tensor` unless its header is as expected.

    `contiguous_rows` asks that neighbouring elements of the last dimension are neighbours in
    memory, `written` that no two elements are the same memory. Raises TensorError.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(name, f"{name} is a {type(tensor).__name__}; expected a tensor")
    if tensor.layout is not torch.strided:
        raise TensorError(
            name, f"{name} has layout {tensor.layout}; expected torch.strided ({name}.to_dense())"
        )
    if tensor.dtype is not dtype and (not isinstance(dtype, tuple) or tensor.dtype not in dtype):
        takes = " or ".join(map(str, dtype)) if isinstance(dtype, tuple) else str(dtype)
        raise TensorError(name, f"{name} has dtype {tensor.dtype}; expected {takes}")
    if not _fits(tensor.shape, shape):
        expected = describe_shape(shape)
        raise TensorError(name, f"{name} has shape {list(tensor.shape)}; expected {expected}")
    if tensor.device != device:
        raise TensorError(name, f"{name} is on {tensor.device}; expected {device}")
    if contiguous_rows and tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise TensorError(
            name,
            f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1 "
            f"({name}.contiguous() has it)",
        )
    if tensor.is_neg():
        raise TensorError(name, f"{name} is a negated view; pass {name}.resolve_neg()")
    if written and is_folded(tensor):
        raise TensorError(
            name,
            f"{name} has elements that share memory (strides {list(tensor.stride())}); it is "
            f"written, so each needs its own ({name}.clone() has that)",
        )


def check_kind(name: str, value: Any, kind: type) -> None:
    """Refuse an argument that is no `kind`. Raises PlanMismatchError."""
    if not isinstance(value, kind):
        raise PlanMismatchError(f"{name} is a {type(value).__name__}; expected a {kind.__name__}")


def check_apart(name: str, written: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    """Refuse `written` where it shares memory with a tensor that is read or written besides.

    Slices of one buffer that lie between each other share none. Raises TensorError.
    """
    if written.device.type == "meta":
        return
    begin, end = extent_of(written)
    for other, tensor in others.items():
        if tensor is None or tensor.data_ptr() >= end:
            continue
        if extent_of(tensor)[1] <= begin or begin == end:
            continue
        if _meet(written, tensor):
            raise TensorError(
                name,
                f"{name} shares memory with {other}; it is written while {other} is in use, so "
                "give it memory of its own",
            )


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and of the first behind it; equal for no elements."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)])
    return begin, begin + (last + 1) * tensor.element_size()


def is_folded(tensor: torch.Tensor) -> bool:
    """Whether two of its elements may be the same memory, as its dimensions do not nest."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size < 2:
            continue
        if stride < reach:
            return tensor.numel() > 0
        reach = stride * (size - 1) + reach
    return False


Sides = list[tuple[int, int]]
"""(bytes from one to the next, how many) of a tensor's dimensions, the farthest apart first."""


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether some byte is in elements of both; where that is long to tell, True."""
    gap = other.data_ptr() - one.data_ptr()
    return _overlap(_sides(one), one.element_size(), _sides(other), other.element_size(), gap)


def _sides(tensor: torch.Tensor) -> Sides:
    size = tensor.element_size()
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted(((s * size, n) for s, n in sides if s and n > 1), reverse=True)


def _overlap(one: Sides, one_size: int, other: Sides, other_size: int, gap: int) -> bool:
    """Whether two sets of pieces of `one_size` and `other_size` bytes have a byte in common; the
    other begins `gap` bytes behind the one."""
    if not one and not other:
        return -other_size < gap < one_size
    stride = max(sides[0][0] for sides in (one, other) if sides)
    ones, one = (one[0][1], one[1:]) if one and one[0][0] == stride else (1, one)
    others, other = (other[0][1], other[1:]) if other and other[0][0] == stride else (1, other)
    one_length = one_size + sum(s * (n - 1) for s, n in one)
    other_length = other_size + sum(s * (n - 1) for s, n in other)
    # Of all steps between a part of one and a part of the other, those at which parts touch.
    low = max((-gap - other_length) // stride + 1, 1 - ones)
    high = min(-((gap - one_length) // stride) - 1, others - 1)
    if high - low > 8:
        return True
    steps = range(low, high + 1)
    return any(_overlap(one, one_size, other, other_size, gap + stride * t) for t in steps)


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
            most = f"{size.start} to {size.stop - 1}"
            words.append(f"at least {size.start}" if size.stop == LARGEST else most)
        else:
            words.append(str(size))
    return f"[{', '.join(words)}]"


def _fits(actual: torch.Size, shape: tuple[Size, ...]) -> bool:
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
