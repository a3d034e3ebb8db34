"""Specs of choices that are one-hot encoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from .base import DeviceLike, as_shape
from .discrete import integers
from .leaf import TensorLeafSpec, new_tensor, open_shape


class MultiOneHot(TensorLeafSpec):
    """Several choices, each one-hot, one behind the other in the last dim.

    Args:
        nvec: how many values each choice has.
        shape: the shape of a value, which ends with `sum(nvec)`; by default just that.
        dtype: bool by default; any dtype.
        device: the device of a value.
        start: the smallest value on the Gymnasium side (`encode`, `to_numpy`), one for all or one for each.

    Raises:
        ValueError: an n is not positive, or the shape does not end with their sum.

    >>> from aioenvs.specs import MultiOneHot
    >>> spec = MultiOneHot([2, 3])
    >>> spec.encode([1, 2]).int()
    tensor([0, 1, 0, 0, 1], dtype=torch.int32)
    >>> spec.to_numpy(spec.encode([1, 2]))
    array([1, 2])
    """

    _event_ndim = 1

    def __init__(
        self,
        nvec: Sequence[int] | torch.Tensor | np.ndarray[Any, Any],
        shape: Iterable[int] | int | None = None,
        dtype: torch.dtype = torch.bool,
        device: DeviceLike | None = None,
        *,
        start: Any = 0,
    ) -> None:
        counts = integers("nvec", nvec)
        if counts.ndim != 1 or not counts.numel() or not bool((counts >= 1).all()):
            raise ValueError(f"expected one n >= 1 per choice for {type(self).__name__}, found {nvec!r}")
        self._nvec: tuple[int, ...] = tuple(counts.tolist())
        total = sum(self._nvec)
        size = as_shape([total] if shape is None else shape)
        if size[-1:] != (total,):
            kind = type(self).__name__
            raise ValueError(f"expected a shape that ends with {total} for {kind}, found {tuple(size)}")
        super().__init__(size, dtype, device)
        self._start = tuple(np.broadcast_to(integers("start", start).numpy(), len(self._nvec)).tolist())

    @property
    def nvec(self) -> tuple[int, ...]:
        """How many values each choice has."""
        return self._nvec

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Return a random value of shape `(*shape, *self.shape)`, one choice as likely as another."""
        batch = (*self._size(shape)[:-1], 1)
        return self._one_hot([torch.randint(n, batch, device=self._device) for n in self._nvec])

    def _one_hot(self, choices: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the value for indices of shape `(*, 1)`, one tensor per choice."""
        sized = zip(choices, self._nvec, strict=True)
        parts = [index == torch.arange(n, device=index.device) for index, n in sized]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(self._dtype)

    def _parts(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split_with_sizes(value, self._nvec, -1)

    def _chosen(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the index of the (first) largest element of each choice, of shape `(*, 1)`."""
        comparable = value if value.is_floating_point() else value.to(torch.int64)
        return [part.argmax(-1, keepdim=True) for part in self._parts(comparable)]

    def _contains(self, value: torch.Tensor) -> bool:
        hot = value if value.dtype == torch.bool else value == 1
        ones_and_zeros = value.dtype == torch.bool or bool((hot | (value == 0)).all())
        return ones_and_zeros and all(bool((part.sum(-1) == 1).all()) for part in self._parts(hot))

    def _domain(self) -> str:
        return f"exactly one 1 in each group of {', '.join(map(str, self._nvec))} elements"

    def project(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value with the (first) largest element of each choice set, see `TensorSpec.project`."""
        return self._one_hot(self._chosen(self._fitted(value)))

    def encode(self, value: Any) -> Any:
        """Return integers of shape `(*, len(nvec))`, each in [start, start + n), as a new one-hot tensor.

        Raises:
            ValueError: the shape does not fit, or an integer is out of range.
        """
        indices = new_tensor(value, torch.int64, self._device)
        expected = (*self._shape[:-1], len(self._nvec))
        if indices.shape[max(indices.ndim - len(expected), 0) :] != expected:
            shape = open_shape(expected)
            raise ValueError(f"expected integers of shape {shape} for {self!r}, found {tuple(indices.shape)}")
        return self._encoded([indices[..., i : i + 1] for i in range(len(self._nvec))])

    def _encoded(self, choices: list[torch.Tensor]) -> torch.Tensor:
        choices = [choice - start for choice, start in zip(choices, self._start, strict=True)]
        for index, n, start in zip(choices, self._nvec, self._start, strict=True):
            if not bool(((index >= 0) & (index < n)).all()):
                found = (index + start).squeeze(-1).tolist()
                raise ValueError(f"expected integers in [{start}, {start + n}) for {self!r}, found {found!r}")
        return self._one_hot(choices)

    def to_numpy(self, value: torch.Tensor) -> Any:
        """Return the integers of a one-hot value, an array of shape `(*, len(nvec))`."""
        return (torch.cat(self._chosen(value), -1).cpu() + torch.tensor(self._start)).numpy()

    def __eq__(self, other: object) -> bool:
        """Whether the other spec describes the same values on the same device."""
        return super().__eq__(other) and (self._nvec, self._start) == (
            getattr(other, "_nvec", ()),
            getattr(other, "_start", ()),
        )

    __hash__ = None  # type: ignore[assignment]

    def _details(self) -> list[str]:
        return [f"nvec={list(self._nvec)}"]


class OneHot(MultiOneHot):
    """One of n choices, one-hot in the last dim.

    Args:
        n: how many values there are.
        shape: the shape of a value, which ends with n; by default just that.
        dtype: bool by default; any dtype.
        device: the device of a value.
        start: the smallest value on the Gymnasium side (`encode`, `to_numpy`).

    Raises:
        ValueError: n is not positive, or the shape does not end with it.

    >>> from aioenvs.specs import OneHot
    >>> spec = OneHot(3)
    >>> spec.encode(1)
    tensor([False,  True, False])
    >>> int(spec.to_numpy(spec.encode(1)))
    1
    """

    def __init__(
        self,
        n: int,
        shape: Iterable[int] | int | None = None,
        dtype: torch.dtype = torch.bool,
        device: DeviceLike | None = None,
        *,
        start: int = 0,
    ) -> None:
        super().__init__([int(n)], shape, dtype, device, start=start)

    @property
    def n(self) -> int:
        """How many values there are."""
        return self._nvec[0]

    def encode(self, value: Any) -> Any:
        """Return integers of shape `(*, *self.shape[:-1])` in [start, start + n) as a new one-hot tensor.

        Raises:
            ValueError: the shape does not fit, or an integer is out of range.
        """
        return super().encode(new_tensor(value, torch.int64, self._device).unsqueeze(-1))

    def to_numpy(self, value: torch.Tensor) -> Any:
        """Return the integers of a one-hot value, without its last dim."""
        return super().to_numpy(value)[..., 0]

    def _details(self) -> list[str]:
        return [f"n={self.n}"]
