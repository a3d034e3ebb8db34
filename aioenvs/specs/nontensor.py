"""The spec of data that is no tensor: text, ragged arrays, any Python object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch
from tensordict import NonTensorData, is_non_tensor, lazy_stack

from aioenvs.errors import shown
from aioenvs.keywords import hints_at_keywords

from .base import DeviceLike, Lead
from .leaf import LeafSpec, key_prefix, open_shape
from .shapes import ends_with


class NonTensor(LeafSpec):
    """Any Python objects; values are `NonTensorData` or `NonTensorStack`.

    Args:
        shape: the batch shape of a value; (1,) by default, as in TorchRL.
        device: a label, None by default: the data is on no device.
        dtype: must be None.
        example_data: the object that `rand`, `zero` and `one` return; `==` ignores it.
        batched: the same as `feature_dims=0`.
        feature_dims: how many of the last dims one object covers in what `rand` returns, by default all of `shape`;
            where it is not 0, other dims are stacked.

    >>> from aioenvs.specs import NonTensor
    >>> spec = NonTensor(shape=(2,), example_data="go left")
    >>> spec.rand().tolist()
    ['go left', 'go left']
    """

    @hints_at_keywords
    def __init__(
        self,
        shape: Iterable[int] | int = (1,),
        device: DeviceLike | None = None,
        dtype: None = None,
        example_data: Any = None,
        batched: bool | None = None,
        feature_dims: int | None = None,
    ) -> None:
        super().__init__(shape, device)
        if dtype is not None:
            raise ValueError(f"expected no dtype for NonTensor, found {shown(dtype)}")
        if feature_dims is None:
            feature_dims = 0 if batched else self.ndim
        if not 0 <= feature_dims <= self.ndim:
            raise ValueError(f"expected feature_dims in [0, {self.ndim}], found {shown(feature_dims)}")
        self.example_data, self.batched, self.feature_dims = example_data, bool(batched), feature_dims

    @property
    def space(self) -> None:
        """None: there are no bounds."""
        return None

    def rand(self, shape: Lead = ()) -> Any:
        """Return the example for each element, with batch size `(*shape, *self.shape)`."""
        size = self._size(shape)
        lead = size[: max(len(size) - self.feature_dims, 0)] if self.feature_dims else ()
        value: Any = NonTensorData(self.example_data, batch_size=size[len(lead) :])
        if 0 in lead:
            return NonTensorData(self.example_data, batch_size=size)
        for count in reversed(lead):
            value = lazy_stack([value.copy() for _ in range(count)])
        return value

    zero = one = rand

    def is_in(self, value: Any) -> bool:
        """Whether the value is no tensor, and its batch size, if it has one, fits."""
        if is_non_tensor(value):
            return ends_with(value.batch_size, self._shape)
        return not isinstance(value, torch.Tensor)

    def _differences(self, value: Any, key: tuple[str, ...]) -> list[str]:
        if self.is_in(value):
            return []
        if isinstance(value, torch.Tensor):
            return [f"{key_prefix(key)}expected non-tensor data, found a tensor {tuple(value.shape)}"]
        expected = open_shape(self._shape)
        return [f"{key_prefix(key)}expected batch size {expected}, found {tuple(value.batch_size)}"]

    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise TypeError for a tensor."""
        if isinstance(value, torch.Tensor):
            raise TypeError(f"{'' if key is None else f'{key!r}: '}expected non-tensor data, found {shown(value)}")

    def project(self, value: Any) -> Any:
        """Return the value."""
        return value

    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Return an object as non-tensor data; a list (or array) is taken apart along the batch dims.

        Args:
            value: any object, of which there is one for each element, or nested lists of the batch's shape.
            ignore_device: nothing depends on it.
        """
        if is_non_tensor(value):
            return value
        batch = self._shape
        if batch and isinstance(value, list | tuple | np.ndarray) and len(value) == batch[0]:
            return torch.stack([spec.encode(item) for spec, item in zip(self.unbind(0), value, strict=True)])
        return NonTensorData(value, batch_size=self._size(()))

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return the object, or nested lists of objects for a value with batch dims."""
        return value.tolist() if is_non_tensor(value) else value

    def to(self, dest: DeviceLike | torch.dtype | None) -> Self:
        """Return the spec on another device; a dtype changes nothing."""
        return self.clone() if isinstance(dest, torch.dtype) else super().to(dest)
