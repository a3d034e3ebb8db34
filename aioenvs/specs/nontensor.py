"""The spec of data that is no tensor (text, ragged arrays, any object), and of all that a TensorDict holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    lazy_stack,
)

from aioenvs.errors import shown
from aioenvs.hints import hints_at_keywords
from aioenvs.specs.base import DeviceLike, Lead, TensorSpec, ends_with
from aioenvs.specs.composite import Composite
from aioenvs.specs.interval import Unbounded
from aioenvs.specs.leaf import LeafSpec, key_prefix, open_shape
from aioenvs.specs.mapping import is_structure, like, opened
from aioenvs.specs.stacked import stack_specs


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


def make_composite_from_td(
    data: TensorDictBase, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False
) -> Composite:
    """Return the spec of a TensorDict, with unbounded entries.

    A lazy stack whose parts have different keys or shapes gives a `StackedComposite`. Names of dims are kept, and so
    are tensorclasses.

    Args:
        data: the TensorDict.
        unsqueeze_null_shapes: whether entries without dims get the shape (1,).
        dynamic_shape: whether the size of the last dim of each entry may vary, where it is no batch dim.

    Raises:
        TypeError: something else than a TensorDict.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from aioenvs.specs import make_composite_from_td
    >>> make_composite_from_td(TensorDict(reward=torch.zeros(()), steps=torch.zeros(3, dtype=torch.int64)))
    Composite(
        'reward': Unbounded(shape=(1,), dtype=float32, device=cpu),
        'steps': Unbounded(shape=(3,), dtype=int64, device=cpu),
    shape=(), device=None)
    """
    if not is_tensor_collection(data):
        raise TypeError(f"expected a TensorDict, found {shown(data)}")
    options = {"unsqueeze_null_shapes": unsqueeze_null_shapes, "dynamic_shape": dynamic_shape}
    inner = opened(data)
    if isinstance(inner, LazyStackedTensorDict):
        options["unsqueeze_null_shapes"] = False  # each entry has the stack's dim
        parts = [make_composite_from_td(like(data, part), **options) for part in inner.tensordicts]
        stacked: Composite = stack_specs(parts, inner.stack_dim)
        return stacked
    entries = {key: _entry(data, entry, options) for key, entry in inner.items()}
    data_cls = type(data) if is_structure(data) else None
    return Composite(entries, shape=data.batch_size, device=data.device, data_cls=data_cls, names=_names(data))


def _names(data: TensorDictBase) -> list[str | None] | None:
    names = list(data.names)
    return None if all(name is None for name in names) else names


def _entry(data: TensorDictBase, entry: Any, options: dict[str, bool]) -> TensorSpec:
    if is_non_tensor(entry):
        example = entry
        while not hasattr(example, "data") or hasattr(example, "tensordicts"):
            example = example.tensordicts[0]
        features = entry.ndim - data.ndim
        return NonTensor(entry.batch_size, entry.device, example_data=example.data, feature_dims=features)
    if is_tensor_collection(entry):
        return make_composite_from_td(entry, **options)
    shape = entry.shape
    if len(shape) > data.ndim and options["dynamic_shape"]:
        shape = torch.Size([*shape[:-1], -1])
    elif not shape and options["unsqueeze_null_shapes"]:
        shape = torch.Size([1])
    return Unbounded(shape, entry.device, entry.dtype)
