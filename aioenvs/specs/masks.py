"""Specs of integers of which a mask may exclude some, and the drawing under a mask."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from aioenvs.errors import shown

from .base import Lead
from .interval import IntervalSpec, as_ordered, from_ordered
from .leaf import TensorLeafSpec, compact, dtype_name
from .shapes import broadcasts, concrete


def as_mask(mask: Any, size: Sequence[int], spec: TensorLeafSpec) -> torch.Tensor:
    """Return a copy of a mask, bool, expanded to `size`; one with as many elements as the last dim serves for all.

    Raises:
        ValueError: it has another shape, or elements that are neither bools nor 0 and 1.
    """
    mask = torch.as_tensor(mask, device=spec.device)
    if mask.numel() == size[-1] and not broadcasts(mask.shape, size):
        mask = mask.reshape(-1)
    proper = mask.dtype == torch.bool or (bool(((mask == 0) | (mask == 1)).all()) and mask.numel() > 0)
    if not proper or not broadcasts(mask.shape, size):
        found = f"{dtype_name(mask.dtype)} of shape {tuple(mask.shape)}"
        raise ValueError(f"expected a bool mask of shape {tuple(size)} for {shown(spec)}, found {found}")
    copied: torch.Tensor = mask.to(torch.bool, copy=True).expand(size)
    return copied


def draw_masked(mask: torch.Tensor, size: torch.Size, spec: TensorLeafSpec) -> torch.Tensor:
    """Draw indices along the last dim of the mask where it is True, int64 of shape `size`.

    Args:
        mask: bool `(*shape, n)`.
        size: `(*lead, *shape)`.
        spec: for the message.

    Raises:
        ValueError: the mask is False for all n somewhere.
    """
    if not size.numel():
        return torch.zeros(size, dtype=torch.int64, device=mask.device)
    weights = mask.reshape(-1, mask.shape[-1])
    require_choice(weights, spec)
    drawn = torch.multinomial(weights.float(), size.numel() // len(weights), replacement=True)
    return drawn.T.reshape(size)


def require_choice(mask: torch.Tensor, spec: TensorLeafSpec) -> None:
    """Raise ValueError where a mask, `(*, n)`, excludes all n."""
    if not bool(compact(mask).any(-1).all()):
        raise ValueError(f"the mask of {shown(spec)} allows no value somewhere; call update_mask with another one")


class MaskedSpec(IntervalSpec):
    """Integers in an interval for each element, some of which a mask may exclude."""

    _held = ("_mask",)
    _mask: torch.Tensor | None = None
    """Which integers are allowed, bool `(*shape, width)`: at i, the one i above the lower bound."""

    @abstractmethod
    def update_mask(self, mask: Any) -> None:
        """Change, in place, which values are in the spec; None for all of them."""

    def rand(self, shape: Lead = ()) -> torch.Tensor:
        """Return a random value of shape `(*shape, *self.shape)`, uniform over the allowed integers."""
        if self._mask is None:
            value: torch.Tensor = super().rand(shape)
            return value
        drawn = draw_masked(self._mask, self._size(shape), self)
        return from_ordered(as_ordered(self._low) + drawn, self._dtype)

    def _index(self, value: torch.Tensor) -> torch.Tensor:
        """Return how far integers are above the lower bound, int64 with a new last dim of size 1."""
        value = self._comparable(value)
        return (as_ordered(value) - as_ordered(self._low.to(value.device))).unsqueeze(-1)

    def _contains(self, value: torch.Tensor) -> bool:
        if not super()._contains(value):
            return False
        if self._mask is None:
            return True
        mask = self._mask.to(value.device)
        return bool(mask.expand(*value.shape, mask.shape[-1]).gather(-1, self._index(value)).all())

    def project(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value with the nearest allowed integer for each element, see `TensorSpec.project`.

        Raises:
            ValueError: its shape does not fit, or the mask allows no integer somewhere.
        """
        value = super().project(value)
        if self._mask is None or not value.numel():
            return value
        mask = self._mask.to(value.device)
        require_choice(mask, self)
        width = mask.shape[-1]
        distance = (torch.arange(width, device=value.device) - self._index(value)).abs().masked_fill(~mask, width)
        return from_ordered(as_ordered(self._low.to(value.device)) + distance.argmin(-1), self._dtype)

    def _domain(self) -> str:
        return super()._domain() + ", of those that the mask allows" * (self._mask is not None)

    def _row(self) -> tuple[int, ...] | None:
        """Return how many integers there are for each element of the last dim; None if that differs among rows."""
        low, high = as_ordered(self._low), as_ordered(self._high)
        counts = high - low + 1
        rows = counts.reshape(-1, counts.shape[-1] if counts.ndim else 1)
        if not len(rows) or not torch.equal(rows, rows[:1].expand_as(rows)):
            return None
        return tuple(rows[0].tolist())

    def _same_mask(self) -> torch.Tensor | None:
        """Return the mask of a row, without the batch dims.

        Raises:
            ValueError: the rows have different masks.
        """
        if self._mask is None:
            return None
        dims = max(self.ndim - self._row_ndim, 0)
        first = self._mask[(0,) * dims] if math.prod(concrete(self.shape[:dims])) else self._mask
        if not torch.equal(first.expand_as(self._mask), self._mask):
            raise ValueError(f"expected the same mask for all elements of {self!r}, to list the values it allows")
        return first

    _row_ndim = 0
    """How many of the last dims `enumerate` takes together."""
