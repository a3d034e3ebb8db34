"""Specs of whole numbers: one of n, several of them, and zeros and ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from aioenvs.errors import shown
from aioenvs.specs.base import DeviceLike, as_shape, broadcasts, concrete, joint_shape
from aioenvs.specs.leaf import dtype_or_device_first, integers
from aioenvs.specs.onehot import MaskedSpec, MultiOneHot, OneHot, as_mask, encode_choices


class Categorical(MaskedSpec):
    """Integers in [start, start + n).

    Args:
        n: how many values there are.
        shape: the shape of a value.
        device: the device of a value.
        dtype: an integer dtype, int64 by default, or bool for n <= 2.
        mask: bool, broadcasts to `(*shape, n)`: which of the n values are allowed; all by default.
        start: the smallest value.

    Raises:
        ValueError: n is not positive, the values do not fit the dtype, or the mask does not fit.

    >>> from aioenvs.specs import Categorical
    >>> spec = Categorical(4, shape=(2,), start=1)
    >>> spec.is_in(spec.rand((5,))), spec.rand((5,)).shape
    (True, torch.Size([5, 2]))
    """

    @dtype_or_device_first(2)
    def __init__(
        self,
        n: int,
        shape: Iterable[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        mask: Any = None,
        *,
        start: int = 0,
    ) -> None:
        super().__init__(() if shape is None else shape, dtype or torch.int64, device)
        n, start = int(n), int(start)
        if n < 1:
            raise ValueError(f"expected n >= 1 for Categorical, found {shown(n)}")
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

    def to_numpy(self, value: torch.Tensor, safe: bool | None = None) -> Any:
        """Return a value of this spec as a new array, or a numpy integer if it has no dims."""
        return super().to_numpy(value, safe)[()]

    def update_mask(self, mask: Any) -> None:
        """Change, in place, which values are in the spec.

        Args:
            mask: bool, broadcasts to `(*shape, n)`; None for all of them. Where it is False for all n, nothing
                is in the spec, and `rand` and `project` raise ValueError.

        Raises:
            ValueError: the mask has another shape or dtype.
        """
        self._mask = None if mask is None else as_mask(mask, (*concrete(self._shape), self._n), self)

    @property
    def mask(self) -> torch.Tensor | None:
        """Which of the n values are in the spec, bool `(*shape, n)`; None for all of them."""
        return self._mask

    def cardinality(self) -> int:
        """Return n."""
        return self._n

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Return the n values, each for all elements, of shape `(n, *self.shape)`, see `TensorSpec.enumerate`."""
        values = torch.arange(self._start, self._start + self._n, device=self._device).to(self._dtype)
        mask = self._same_mask() if use_mask else None
        if mask is not None:
            values = values[mask]
        return values.reshape(-1, *[1] * self.ndim).expand(len(values), *concrete(self._shape)).clone()

    def to_one_hot(self, value: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return integers of shape `(*)` one-hot encoded: bool `(*, n)`.

        Args:
            value: integers in [start, start + n).
            safe: whether to check that the value is in the spec.

        Raises:
            ValueError: an integer is out of range.
        """
        if safe:
            self.assert_is_in(value)
        return encode_choices(self.to_one_hot_spec(), [value.unsqueeze(-1)])

    def to_one_hot_spec(self) -> OneHot:
        """Return the spec of one-hot encoded values."""
        shape = (*self._shape, self._n)
        return OneHot(self._n, shape, device=self._device, mask=self._mask, start=self._start)

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        """Return the elements at these integers, counted from `start`, see `TensorSpec.index`.

        Args:
            index: integers of shape `(*, k)`, or one without dims.
            tensor_to_index: of shape `(*, n)`, of which the leading dims broadcast with those of `index`.
        """
        if not isinstance(index, torch.Tensor):
            raise TypeError(f"expected a tensor of integers as index of {self!r}, found {shown(index)}")
        places = index.to(torch.int64) - self._start
        row = places.reshape(1) if not places.ndim else places
        lead = joint_shape(row.shape[:-1], tensor_to_index.shape[:-1])
        tensor = tensor_to_index.expand(*lead, tensor_to_index.shape[-1])
        found = tensor.gather(-1, row.expand(*lead, row.shape[-1]))
        return found if places.ndim else found.squeeze(-1)

    def _details(self) -> list[str]:
        details = [f"n={self._n}"]
        if self._start:
            details.append(f"start={self._start}")
        if self._mask is not None:
            details.append("masked")
        return details


@Categorical.register
class MultiCategorical(MaskedSpec):
    """An integer in [start, start + n) for each n of `nvec`.

    For `isinstance` it is a Categorical, as in TorchRL.

    Args:
        nvec: how many values each element has, of any number of dims.
        shape: the shape of a value, which ends with that of `nvec`; by default just that.
        device: the device of a value.
        dtype: an integer dtype, int64 by default.
        mask: bool, broadcasts to `(*shape[:-1], sum(nvec))`: which values are allowed, those of the first element
            first; all by default.
        remove_singleton: nothing depends on it: a value has the spec's shape, also where that is (1,).
        start: the smallest value, one for all or one for each.

    Raises:
        ValueError: an n is not positive, the shapes do not fit, or the values do not fit the dtype.

    >>> from aioenvs.specs import MultiCategorical
    >>> spec = MultiCategorical([2, 3])
    >>> spec.nvec, spec.is_in(spec.rand((5,)))
    (tensor([2, 3]), True)
    """

    _row_ndim = 1

    @dtype_or_device_first(2)
    def __init__(
        self,
        nvec: Any,
        shape: Iterable[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        mask: Any = None,
        remove_singleton: bool = True,
        *,
        start: Any = 0,
    ) -> None:
        counts = integers("nvec", nvec)
        super().__init__(counts.shape if shape is None else shape, dtype or torch.int64, device)
        first = integers("start", start)
        for name, tensor in (("nvec", counts), ("start", first)):
            if not broadcasts(tensor.shape, concrete(self._shape)):
                found = tuple(tensor.shape)
                raise ValueError(f"expected a {name} that broadcasts to {tuple(self._shape)}, found {found}")
        if not bool((counts >= 1).all()):
            raise ValueError(f"expected n >= 1 for MultiCategorical, found nvec={counts.tolist()!r}")
        self._bound_by(first, first + counts - 1)
        if mask is not None:
            self.update_mask(mask)

    @property
    def nvec(self) -> torch.Tensor:
        """How many values each element has, int64 of the spec's shape."""
        return self.high.to(torch.int64) - self.low.to(torch.int64) + 1

    @property
    def start(self) -> torch.Tensor:
        """The smallest value of each element, of the spec's shape."""
        return self.low

    def _one_row(self) -> tuple[int, ...]:
        row = self._row()
        if row is None:
            raise ValueError(f"expected the same nvec for all rows, found {self.nvec.tolist()!r}")
        return row

    def update_mask(self, mask: Any) -> None:
        """Change, in place, which values are in the spec.

        Args:
            mask: bool, broadcasts to `(*shape[:-1], sum(nvec))`; None for all of them. Where it is False for all
                values of an element, nothing is in the spec, and `rand` and `project` raise ValueError.

        Raises:
            ValueError: the mask has another shape or dtype, or the rows of `nvec` differ.
        """
        if mask is None:
            self._mask = None
            return
        row = self._one_row()
        batch = concrete(self._shape[:-1])
        full = as_mask(mask, (*batch, sum(row)), self)
        parts = torch.split_with_sizes(full, row, -1)
        padded = torch.zeros((*full.shape[:-1], len(row), max(row)), dtype=torch.bool, device=full.device)
        for i, part in enumerate(parts):
            padded[..., i, : row[i]] = part
        self._mask = padded if self._shape else padded[..., 0, :]

    @property
    def mask(self) -> torch.Tensor | None:
        """Which values are in the spec, bool `(*shape[:-1], sum(nvec))`; None for all of them."""
        if self._mask is None:
            return None
        padded = self._mask if self._shape else self._mask.unsqueeze(-2)
        return torch.cat([padded[..., i, :n] for i, n in enumerate(self._one_row())], -1)

    def cardinality(self) -> int:
        """Return the product of a row of `nvec`, or of all of it where its rows differ."""
        row = self._row()
        return math.prod(self.nvec.flatten().tolist() if row is None else row)

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Return all rows, each for the whole batch, of shape `(cardinality, *self.shape)`."""
        row = self._one_row()
        start = self.start[(0,) * (self.ndim - 1)].reshape(-1)
        values = torch.cartesian_prod(*(torch.arange(n, device=self._device) for n in row)).reshape(-1, len(row))
        mask = self._same_mask() if use_mask else None
        if mask is not None:
            allowed = mask.reshape(len(row), -1)[torch.arange(len(row), device=mask.device), values]
            values = values[allowed.all(-1)]
        values = (values + start).to(self._dtype)
        shape = concrete(self._shape)
        return values.reshape(-1, *[1] * (len(shape) - 1), *shape[-1:]).expand(len(values), *shape).clone()

    def to_one_hot(self, value: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return integers of shape `(*, k)` one-hot encoded, one behind the other: bool `(*, sum(nvec))`.

        Args:
            value: k integers, one for each element of a row.
            safe: whether to check that the value is in the spec.

        Raises:
            ValueError: an integer is out of range, or the rows of `nvec` differ.
        """
        if safe:
            self.assert_is_in(value)
        return encode_choices(self.to_one_hot_spec(), [part.unsqueeze(-1) for part in value.unbind(-1)])

    def to_one_hot_spec(self) -> MultiOneHot:
        """Return the spec of one-hot encoded values.

        Raises:
            ValueError: the rows of `nvec` or `start` differ, or the spec has no dims.
        """
        row = self._one_row()
        starts = self.start.reshape(-1, len(row))
        if not self._shape or not torch.equal(starts, starts[:1].expand_as(starts)):
            raise ValueError(f"expected dims, and the same start for all rows, found {self!r}")
        shape = (*self._shape[:-1], sum(row))
        return MultiOneHot(row, shape, device=self._device, mask=self.mask, start=starts[0])

    def _details(self) -> list[str]:
        return [f"nvec={self.nvec.tolist() if self._high.numel() <= 16 and not self._high.is_meta else '...'}"]


class Binary(Categorical):
    """Zeros and ones, independent of each other.

    It is a Categorical with two values, as in TorchRL.

    Args:
        n: the size of the last dim.
        shape: the shape of a value; `(n,)` by default.
        device: the device of a value.
        dtype: any dtype; int8 by default.
        mask: bool, broadcasts to `(*shape, 2)`: whether 0 and whether 1 is allowed; both by default.

    Raises:
        ValueError: neither `n` nor `shape` is given, or they differ, or the mask does not fit.

    >>> from aioenvs.specs import Binary
    >>> Binary(3).rand((2,)).shape
    torch.Size([2, 3])
    """

    @dtype_or_device_first(2)
    def __init__(
        self,
        n: int | None = None,
        shape: Iterable[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        mask: Any = None,
    ) -> None:
        if n is None and shape is None:
            raise ValueError("Binary needs n or a shape")
        size = as_shape([int(n or 0)] if shape is None else shape)
        if n is not None and size[-1:] != (n,):
            raise ValueError(f"expected a shape that ends with n={shown(n)} for Binary, found {tuple(size)}")
        super().__init__(2, size, device, dtype or torch.int8, mask)

    def _details(self) -> list[str]:
        return ["masked"] * (self._mask is not None)
