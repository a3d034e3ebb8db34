"""Specs of whole numbers: one of n, several of them, and zeros and ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from .base import DeviceLike, as_shape, broadcasts, concrete
from .interval import IntervalSpec
from .leaf import dtype_name


class Categorical(IntervalSpec):
    """Integers in [start, start + n).

    Args:
        n: how many values there are.
        shape: the shape of a value.
        dtype: an integer dtype, or bool for n <= 2.
        device: the device of a value.
        start: the smallest value.
        mask: bool, broadcasts to `(*shape, n)`: which of the n values are allowed; all by default.

    Raises:
        ValueError: n is not positive, the values do not fit the dtype, or the mask does not fit.

    >>> from aioenvs.specs import Categorical
    >>> spec = Categorical(4, shape=(2,), start=1)
    >>> spec.is_in(spec.rand((5,))), spec.rand((5,)).shape
    (True, torch.Size([5, 2]))
    """

    _held = ("_mask",)
    _mask: torch.Tensor | None = None

    def __init__(
        self,
        n: int,
        shape: Iterable[int] | int = (),
        dtype: torch.dtype = torch.int64,
        device: DeviceLike | None = None,
        *,
        start: int = 0,
        mask: Any = None,
    ) -> None:
        super().__init__(shape, dtype, device)
        n, start = int(n), int(start)
        if n < 1:
            raise ValueError(f"expected n >= 1 for Categorical, found {n!r}")
        self._n, self._start = n, start
        self._bound_by(torch.tensor(start), torch.tensor(start + n - 1))
        if mask is not None:
            self.update_mask(mask)

    @property
    def n(self) -> int:
        """How many values there are."""
        return self._n

    @property
    def start(self) -> int:
        """The smallest value."""
        return self._start

    def to_numpy(self, value: torch.Tensor) -> Any:
        """Return a value of this spec as a new array, or a numpy integer if it has no dims."""
        return super().to_numpy(value)[()]

    def update_mask(self, mask: Any) -> None:
        """Change, in place, which values are in the spec.

        Args:
            mask: bool, broadcasts to `(*shape, n)`; None for all of them.

        Raises:
            ValueError: the mask has another shape or dtype, or allows no value somewhere.
        """
        if mask is None:
            self._mask = None
            return
        mask = torch.as_tensor(mask, device=self._device).clone()
        size = (*concrete(self._shape), self._n)
        if mask.dtype != torch.bool or not broadcasts(mask.shape, size):
            found = f"{dtype_name(mask.dtype)} of shape {tuple(mask.shape)}"
            raise ValueError(f"expected a bool mask of shape {size}, found {found}")
        if not bool(mask.any(-1).all()):
            raise ValueError(f"the mask of {self!r} allows no value: {mask.tolist()!r}")
        self._mask = mask.expand(size)

    @property
    def mask(self) -> torch.Tensor | None:
        """Which of the n values are in the spec, bool `(*shape, n)`; None for all of them."""
        return self._mask

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Return a random value of shape `(*shape, *self.shape)`, uniform over the allowed integers."""
        size = self._size(shape)
        if self._mask is None or not size.numel():
            value: torch.Tensor = super().rand(shape)
            return value
        weights = self._mask.reshape(-1, self._n).float()
        drawn = torch.multinomial(weights, size.numel() // len(weights), replacement=True)
        return (drawn.T.reshape(size) + self._start).to(self._dtype)

    def _allowed(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mask's entries for integers in [start, start + n)."""
        if self._mask is None:
            return torch.ones_like(value, dtype=torch.bool)
        index = value.to(torch.int64).sub(self._start).unsqueeze(-1)
        return self._mask.to(value.device).expand(*value.shape, self._n).gather(-1, index).squeeze(-1)

    def _contains(self, value: torch.Tensor) -> bool:
        return super()._contains(value) and (self._mask is None or bool(self._allowed(value).all()))

    def project(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value with the nearest allowed integer for each, see `TensorSpec.project`."""
        value = super().project(value)
        if self._mask is None:
            return value
        choices = torch.arange(self._start, self._start + self._n, device=value.device)
        distance = (choices - value.unsqueeze(-1)).abs().masked_fill(~self._mask.to(value.device), self._n)
        return choices[distance.argmin(-1)].to(self._dtype)

    def _domain(self) -> str:
        return super()._domain() + ", of those that the mask allows" * (self._mask is not None)

    def _details(self) -> list[str]:
        details = [f"n={self._n}"]
        if self._start:
            details.append(f"start={self._start}")
        if self._mask is not None:
            details.append("masked")
        return details


class MultiCategorical(IntervalSpec):
    """An integer in [start, start + n) for each n of `nvec`.

    Args:
        nvec: how many values each element has, of any number of dims.
        shape: the shape of a value, which ends with that of `nvec`; by default just that.
        dtype: an integer dtype.
        device: the device of a value.
        start: the smallest value, one for all or one for each.

    Raises:
        ValueError: an n is not positive, the shapes do not fit, or the values do not fit the dtype.

    >>> from aioenvs.specs import MultiCategorical
    >>> spec = MultiCategorical([2, 3])
    >>> spec.nvec, spec.is_in(spec.rand((5,)))
    (tensor([2, 3]), True)
    """

    def __init__(
        self,
        nvec: Any,
        shape: Iterable[int] | int | None = None,
        dtype: torch.dtype = torch.int64,
        device: DeviceLike | None = None,
        start: Any = 0,
    ) -> None:
        counts = integers("nvec", nvec)
        super().__init__(counts.shape if shape is None else shape, dtype, device)
        first = integers("start", start)
        for name, tensor in (("nvec", counts), ("start", first)):
            if not broadcasts(tensor.shape, concrete(self._shape)):
                found = tuple(tensor.shape)
                raise ValueError(f"expected a {name} that broadcasts to {tuple(self._shape)}, found {found}")
        if not bool((counts >= 1).all()):
            raise ValueError(f"expected n >= 1 for MultiCategorical, found nvec={counts.tolist()!r}")
        last = first + counts - 1
        self._bound_by(first, last)

    @property
    def nvec(self) -> torch.Tensor:
        """How many values each element has, int64 of the spec's shape."""
        return self.high.to(torch.int64) - self.low.to(torch.int64) + 1

    @property
    def start(self) -> torch.Tensor:
        """The smallest value of each element, of the spec's shape."""
        return self.low

    def _details(self) -> list[str]:
        return [f"nvec={self.nvec.tolist() if self._high.numel() <= 16 else '...'}"]


class Binary(IntervalSpec):
    """Zeros and ones, independent of each other.

    Args:
        n: the size of the last dim.
        shape: the shape of a value; `(n,)` by default.
        dtype: any dtype.
        device: the device of a value.

    Raises:
        ValueError: neither `n` nor `shape` is given, or they differ.

    >>> from aioenvs.specs import Binary
    >>> Binary(3).rand((2,)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        n: int | None = None,
        shape: Iterable[int] | int | None = None,
        dtype: torch.dtype = torch.int8,
        device: DeviceLike | None = None,
    ) -> None:
        if n is None and shape is None:
            raise ValueError("Binary needs n or a shape")
        size = as_shape([int(n or 0)] if shape is None else shape)
        if n is not None and size[-1:] != (n,):
            raise ValueError(f"expected a shape that ends with n={n!r} for Binary, found {tuple(size)}")
        super().__init__(size, dtype, device)
        self._bound_by(torch.tensor(0), torch.tensor(1))

    @property
    def n(self) -> int:
        """The size of the last dim; 1 if there is none."""
        return self._shape[-1] if self._shape else 1


def integers(name: str, value: Any) -> torch.Tensor:
    """Return an array-like of integers as an int64 tensor."""
    array = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"expected integers for {name}, found {value!r}")
    return torch.from_numpy(array.astype(np.int64))
