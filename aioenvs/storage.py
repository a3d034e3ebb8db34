"""Tensors as the arrays that keep them. Where numpy lacks a dtype, the array has one of the same size."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

__all__ = ["array_of", "cast_exactly", "is_convertible", "storage_dtype", "tensor_of"]

BEYOND = 2.0**63  # what int64 holds
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storage_dtype(dtype: torch.dtype | None) -> str:
    """The name of the numpy dtype under which tensors of this dtype are kept.

    >>> storage_dtype(torch.float32), storage_dtype(torch.bfloat16)
    ('<f4', '<i2')
    """
    return array_of(torch.empty(0, dtype=dtype)).dtype.str


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor as it is kept; on the CPU it shares the memory."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(WORDS[tensor.dtype.itemsize]).numpy()


def tensor_of(array: NDArray[Any], dtype: torch.dtype | None) -> torch.Tensor:
    """What is kept in an array, as a tensor of its true dtype that shares the memory."""
    tensor = torch.from_numpy(array)
    return tensor if dtype is None or tensor.dtype is dtype else tensor.view(dtype)


def is_convertible(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether numbers of a tensor may be of another dtype: integers or flags, which are exact, of numbers."""
    exact = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return exact and not tensor.is_complex()


def cast_exactly(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    """The numbers of a tensor as integers or flags, if none changes by it; else None.

    >>> cast_exactly(torch.tensor([0.0, 1.0]), torch.int8)
    tensor([0, 1], dtype=torch.int8)
    >>> cast_exactly(torch.tensor([0.5, 1.0]), torch.int8) is None
    True
    """
    if not is_convertible(tensor, dtype):
        return None
    cast = tensor.detach().to(dtype)
    # what is beyond becomes another number, which may be the same again as a float
    within = not tensor.is_floating_point() or bool((tensor.abs() < BEYOND).all())
    return cast if within and torch.equal(cast.to(tensor.dtype), tensor) else None
