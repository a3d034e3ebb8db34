"""The spec of data that is no tensor: text, ragged arrays, any Python object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import NonTensorData, is_non_tensor

from .base import DeviceLike, ends_with
from .leaf import LeafSpec, key_prefix, open_shape


class NonTensor(LeafSpec):
    """Any Python objects; values are `NonTensorData` or `NonTensorStack`.

    Args:
        shape: the batch shape of a value; (1,) by default, as in TorchRL.
        device: a label, None by default: the data is on no device.
        example_data: the object that `rand`, `zero` and `one` return; `==` ignores it.

    >>> from aioenvs.specs import NonTensor
    >>> spec = NonTensor(shape=(2,), example_data="go left")
    >>> spec.rand().tolist()
    ['go left', 'go left']
    """

    def __init__(
        self, shape: Iterable[int] | int = (1,), device: DeviceLike | None = None, example_data: Any = None
    ) -> None:
        super().__init__(shape, device)
        self.example_data = example_data

    def rand(self, shape: Sequence[int] = ()) -> Any:
        """Return the example for each element, with batch size `(*shape, *self.shape)`."""
        return NonTensorData(self.example_data, batch_size=self._size(shape))

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

    def project(self, value: Any) -> Any:
        """Return the value."""
        return value

    def encode(self, value: Any) -> Any:
        """Return an object as non-tensor data; a list (or array) is taken apart along the batch dims.

        Args:
            value: any object, of which there is one for each element, or nested lists of the batch's shape.
        """
        if is_non_tensor(value):
            return value
        batch = self._shape
        if batch and isinstance(value, list | tuple | np.ndarray) and len(value) == batch[0]:
            return torch.stack([spec.encode(item) for spec, item in zip(self.unbind(0), value, strict=True)])
        return NonTensorData(value, batch_size=self._size(()))

    def to_numpy(self, value: Any) -> Any:
        """Return the object, or nested lists of objects for a value with batch dims."""
        return value.tolist() if is_non_tensor(value) else value

    def to(self, dest: DeviceLike | torch.dtype) -> Self:
        """Return the spec on another device; a dtype changes nothing."""
        return self.clone() if isinstance(dest, torch.dtype) else super().to(dest)
