"""Specs of choices of which a mask may exclude some, and those that are one-hot encoded."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch

from aioenvs.errors import shown
from aioenvs.specs.base import DeviceLike, Lead, as_shape, broadcasts, concrete, joint_shape
from aioenvs.specs.interval import IntervalSpec, as_ordered, from_ordered
from aioenvs.specs.leaf import (
    TensorLeafSpec,
    compact,
    dtype_name,
    dtype_or_device_first,
    integers,
    new_tensor,
    open_shape,
)


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
    """Draw indices along the last dim of a mask `(*shape, n)` where it is True: int64 of `size`, `(*lead, *shape)`.

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

    @property
    @abstractmethod
    def mask(self) -> torch.Tensor | None:
        """Which values are in the spec; None for all of them."""

    def to_categorical(self, value: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return the value, after a check if `safe`."""
        if safe:
            self.assert_is_in(value)
        return value

    def to_categorical_spec(self) -> Self:
        """Return the spec."""
        return self

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


class OneHotSpec(TensorLeafSpec):
    """One-hot encoded choices, one behind the other in the last dim."""

    _event_ndim = 1
    _held = ("_mask",)
    _mask: torch.Tensor | None = None
    _is_single = False
    """Whether there is but one choice, for which integers have no dim of their own."""

    def __init__(
        self,
        nvec: Any,
        shape: Iterable[int] | int | None,
        device: DeviceLike | None,
        dtype: torch.dtype | None,
        use_register: bool,
        mask: Any,
        start: Any,
    ) -> None:
        if use_register:
            raise NotImplementedError("use_register=True is not supported; encode with start, or map the values")
        counts = integers("nvec", nvec)
        if counts.ndim != 1 or not counts.numel() or not bool((counts >= 1).all()):
            raise ValueError(f"expected one n >= 1 per choice for {type(self).__name__}, found {shown(nvec)}")
        self._nvec: tuple[int, ...] = tuple(counts.tolist())
        total = sum(self._nvec)
        size = as_shape([total] if shape is None else shape)
        if size[-1:] != (total,):
            kind = type(self).__name__
            raise ValueError(f"expected a shape that ends with {total} for {kind}, found {tuple(size)}")
        super().__init__(size, dtype or torch.bool, device)
        self._start = tuple(np.broadcast_to(integers("start", start).numpy(), len(self._nvec)).tolist())
        if mask is not None:
            self.update_mask(mask)

    def update_mask(self, mask: Any) -> None:
        """Change, in place, which values are in the spec.

        Args:
            mask: bool, broadcasts to the spec's shape: which elements may be 1; None for all. Where it is False for
                all elements of a choice, nothing is in the spec, and `rand` and `project` raise ValueError.

        Raises:
            ValueError: the mask has another shape or dtype.
        """
        self._mask = None if mask is None else as_mask(mask, concrete(self._shape), self)

    @property
    def mask(self) -> torch.Tensor | None:
        """Which elements may be 1, bool of the spec's shape; None for all of them."""
        return self._mask

    def rand(self, shape: Lead = ()) -> torch.Tensor:
        """Return a random value of shape `(*shape, *self.shape)`, one allowed choice as likely as another."""
        batch = self._size(shape)[:-1]
        if self._mask is None:
            return self._one_hot([torch.randint(n, (*batch, 1), device=self._device) for n in self._nvec])
        return self._one_hot([draw_masked(part, batch, self).unsqueeze(-1) for part in self._parts(self._mask)])

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
        if self._mask is not None and bool((hot & ~self._mask.to(hot.device)).any()):
            return False
        ones_and_zeros = value.dtype == torch.bool or bool((hot | (value == 0)).all())
        return ones_and_zeros and all(bool((part.sum(-1) == 1).all()) for part in self._parts(hot))

    def _domain(self) -> str:
        allowed = ", where the mask allows it" * (self._mask is not None)
        return f"exactly one 1 in each group of {', '.join(map(str, self._nvec))} elements{allowed}"

    def project(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value with the (first) largest allowed element of each choice set, see `TensorSpec.project`.

        Raises:
            ValueError: its shape does not fit, or the mask allows no element somewhere.
        """
        value = self._fitted(value)
        if self._mask is not None and value.numel():
            mask = self._mask.to(value.device)
            for part in self._parts(mask):
                require_choice(part, self)
            floating = value.is_floating_point()
            value = value if floating else value.to(torch.int64)
            value = value.masked_fill(~mask, -math.inf if floating else torch.iinfo(torch.int64).min)
        return self._one_hot(self._chosen(value))

    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Return integers, each in [start, start + n), as a new one-hot tensor.

        Args:
            value: of shape `(*, *self.shape[:-1], len(nvec))`; of a `OneHot`, `(*, *self.shape[:-1])`.
            ignore_device: whether to return the value on the CPU.

        Raises:
            ValueError: the shape does not fit, or an integer is out of range.
        """
        indices = new_tensor(value, torch.int64, self._encoding_device(ignore_device))
        if self._is_single:
            indices = indices.unsqueeze(-1)
        expected = (*self._shape[:-1], len(self._nvec))
        if indices.shape[max(indices.ndim - len(expected), 0) :] != expected:
            shape = open_shape(expected)
            raise ValueError(f"expected integers of shape {shape} for {self!r}, found {tuple(indices.shape)}")
        return encode_choices(self, [indices[..., i : i + 1] for i in range(len(self._nvec))])

    def to_numpy(self, value: torch.Tensor, safe: bool | None = None) -> Any:
        """Return the integers of a one-hot value, an array of shape `(*, len(nvec))`; of a `OneHot`, `(*)`."""
        if safe:
            self.assert_is_in(value)
        numbers = (torch.cat(self._chosen(value), -1).cpu() + torch.tensor(self._start)).numpy()
        return numbers[..., 0] if self._is_single else numbers

    def cardinality(self) -> int:
        """Return the number of one-hot rows, regardless of a mask."""
        return math.prod(self._nvec)

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor that a one-hot value points to, see `TensorSpec.index`.

        Args:
            index: one-hot, of shape `(*, n)`, n the sum of all choices.
            tensor_to_index: of a shape to which that of `index` broadcasts, or the other way round.

        Returns:
            One element for each choice: `(*, number of choices)`.
        """
        if not isinstance(index, torch.Tensor):
            raise TypeError(f"expected a one-hot tensor as index of {self!r}, found {shown(index)}")
        size = joint_shape(index.shape, tensor_to_index.shape)
        parts = self._parts(tensor_to_index.expand(size))
        chosen = self._chosen(index.expand(size))
        return torch.cat([part.gather(-1, at) for part, at in zip(parts, chosen, strict=True)], -1)

    def to_one_hot(self, value: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return the value, after a check if `safe`."""
        if safe:
            self.assert_is_in(value)
        return value

    def to_one_hot_spec(self) -> Self:
        """Return the spec."""
        return self

    def to_categorical(self, value: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return the integers of a one-hot value: int64 `(*, len(nvec))`; of a `OneHot`, `(*)`.

        Args:
            value: of shape `(*, n)`, n the sum of all choices; the largest element of each choice counts.
            safe: whether to check that the value is in the spec.
        """
        if safe:
            self.assert_is_in(value)
        found = torch.cat(self._chosen(value), -1) + torch.tensor(self._start, device=value.device)
        return found.squeeze(-1) if self._is_single else found

    @abstractmethod
    def to_categorical_spec(self) -> Any:
        """Return the spec of the integers."""

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Return all rows, each for the whole batch, `(cardinality, *self.shape)`, see `TensorSpec.enumerate`."""
        categorical = self.to_categorical_spec()
        rows: torch.Tensor = categorical.to_one_hot(categorical.enumerate(use_mask)).to(self._dtype)
        return rows

    def __eq__(self, other: object) -> bool:
        """Whether the other spec describes the same values on the same device."""
        return super().__eq__(other) and (self._nvec, self._start) == (
            getattr(other, "_nvec", ()),
            getattr(other, "_start", ()),
        )

    __hash__ = None  # type: ignore[assignment]


def encode_choices(spec: OneHotSpec, choices: list[torch.Tensor]) -> torch.Tensor:
    """Return integers, `(*, 1)` for each choice, as a one-hot value; ValueError if one is out of range."""
    choices = [choice.to(torch.int64) - start for choice, start in zip(choices, spec._start, strict=True)]
    for index, n, start in zip(choices, spec._nvec, spec._start, strict=True):
        if not bool(((index >= 0) & (index < n)).all()):
            found = (index + start).squeeze(-1).tolist()
            raise ValueError(f"expected integers in [{start}, {start + n}) for {spec!r}, found {shown(found)}")
    return spec._one_hot(choices)


class OneHot(OneHotSpec):
    """One of n choices, one-hot in the last dim.

    Args:
        n: how many values there are.
        shape: the shape of a value, which ends with n; by default just that.
        device: the device of a value.
        dtype: any dtype; bool by default.
        use_register: not supported, must be False.
        mask: bool, broadcasts to `shape`: which elements may be 1; all by default.
        start: the smallest value on the side of the integers (`encode`, `to_numpy`, `to_categorical`).

    Raises:
        ValueError: n is not positive, the shape does not end with it, or the mask does not fit.

    >>> from aioenvs.specs import OneHot
    >>> spec = OneHot(3)
    >>> spec.encode(1)
    tensor([False,  True, False])
    >>> int(spec.to_numpy(spec.encode(1)))
    1
    """

    _is_single = True

    @dtype_or_device_first(2)
    def __init__(
        self,
        n: int,
        shape: Iterable[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        use_register: bool = False,
        mask: Any = None,
        *,
        start: int = 0,
    ) -> None:
        super().__init__([int(n)], shape, device, dtype, use_register, mask, start)

    @property
    def n(self) -> int:
        """How many values there are."""
        return self._nvec[0]

    def to_categorical_spec(self) -> Any:
        """Return the spec of the integers."""
        shape, start = self._shape[:-1], self._start[0]
        return self._kinds["Categorical"](self.n, shape, device=self._device, mask=self._mask, start=start)

    def _details(self) -> list[str]:
        return [f"n={self.n}", *["masked"] * (self._mask is not None)]


@OneHot.register
class MultiOneHot(OneHotSpec):
    """Several choices, each one-hot, one behind the other in the last dim.

    For `isinstance` it is a OneHot, as in TorchRL.

    Args:
        nvec: how many values each choice has.
        shape: the shape of a value, which ends with `sum(nvec)`; by default just that.
        device: the device of a value.
        dtype: any dtype; bool by default.
        use_register: not supported, must be False.
        mask: bool, broadcasts to `shape`: which elements may be 1; all by default.
        start: the smallest value on the side of the integers (`encode`, `to_numpy`, `to_categorical`), one for all
            or one for each.

    Raises:
        ValueError: an n is not positive, the shape does not end with their sum, or the mask does not fit.

    >>> from aioenvs.specs import MultiOneHot
    >>> spec = MultiOneHot([2, 3])
    >>> spec.encode([1, 2]).int()
    tensor([0, 1, 0, 0, 1], dtype=torch.int32)
    >>> spec.to_numpy(spec.encode([1, 2]))
    array([1, 2])
    """

    @dtype_or_device_first(2)
    def __init__(
        self,
        nvec: Sequence[int] | torch.Tensor | np.ndarray[Any, Any],
        shape: Iterable[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        use_register: bool = False,
        mask: Any = None,
        *,
        start: Any = 0,
    ) -> None:
        super().__init__(nvec, shape, device, dtype, use_register, mask, start)

    @property
    def nvec(self) -> list[int]:
        """How many values each choice has."""
        return list(self._nvec)

    def to_categorical_spec(self) -> Any:
        """Return the spec of the integers."""
        shape, start = (*self._shape[:-1], len(self._nvec)), self._start
        return self._kinds["MultiCategorical"](self._nvec, shape, device=self._device, mask=self._mask, start=start)

    def _details(self) -> list[str]:
        return [f"nvec={list(self._nvec)}", *["masked"] * (self._mask is not None)]
