"""The base of the specs that describe one entry, that of data that is no tensor, and the handling of expanded views."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import torch
from tensordict import (
    NonTensorData,
    is_non_tensor,
    lazy_stack,
)

from aioenvs.errors import shown
from aioenvs.hints import hints_at_keywords
from aioenvs.specs.base import DeviceLike, Lead, Rearrange, TensorSpec, as_device, as_shape, concrete, ends_with

CPU = torch.device("cpu")
P = ParamSpec("P")
S = TypeVar("S")


def dtype_or_device_first(
    position: int,
) -> Callable[[Callable[Concatenate[S, P], None]], Callable[Concatenate[S, P], None]]:
    """Let a constructor take `device`, at a position without counting `self`, and then `dtype`, in either order.

    The device comes first in TorchRL, where the dtype often stands first in torch.
    """

    def decorate(init: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
        hinting = hints_at_keywords(init)

        @wraps(init)
        def either(self: S, /, *args: Any, **kwargs: Any) -> None:
            if len(args) > position and isinstance(args[position], torch.dtype):
                device = args[position + 1] if len(args) > position + 1 else kwargs.pop("device", None)
                args = (*args[:position], device, args[position], *args[position + 2 :])
            hinting(self, *args, **kwargs)

        return either

    return decorate


class LeafSpec(TensorSpec):
    """The spec of one entry."""

    _held: tuple[str, ...] = ()
    """The attributes that are None or tensors: of the spec's shape (1 for -1), perhaps with dims behind."""

    def __init__(self, shape: Iterable[int] | int, device: DeviceLike | None) -> None:
        self._shape = as_shape(shape)
        self._device = None if device is None else as_device(device)

    def _size(self, shape: Lead) -> torch.Size:
        """Return the shape of a value drawn with `shape`."""
        own = self._shape
        return torch.Size([*(shape or ()), *(concrete(own) if -1 in own else own)])

    def clone(self) -> Self:
        """Return a copy; changing one leaves the other as it is."""
        return copy.copy(self)  # what a spec holds is replaced, never changed

    def to(self, dest: DeviceLike | torch.dtype | None) -> Self:
        """Return the spec on another device or of another dtype; None changes nothing."""
        new = copy.copy(self)
        if dest is None:
            return new
        if isinstance(dest, torch.dtype):
            new._dtype = dest
            return new
        new._device = as_device(dest)
        for name in self._held:
            held = getattr(self, name)
            setattr(new, name, None if held is None else moved(held, as_device(dest)))
        return new

    def _rearranged(self, shape: torch.Size, op: Rearrange) -> Self:
        new = copy.copy(self)
        new._shape = shape
        for name in self._held:
            held = getattr(self, name)
            setattr(new, name, None if held is None else op(held))
        return new

    def __eq__(self, other: object) -> bool:
        """Whether the other spec describes the same values on the same device."""
        return (
            type(self) is type(other)
            and isinstance(other, LeafSpec)
            and (self._shape, self._dtype, self._device) == (other._shape, other._dtype, other._device)
            and all(same(getattr(self, name), getattr(other, name)) for name in self._held)
        )

    __hash__ = None  # type: ignore[assignment]

    def _details(self) -> list[str]:
        """Return what the repr says besides shape, dtype and device."""
        return []

    def __repr__(self) -> str:
        """Return one line."""
        details = [*self._details(), f"shape={tuple(self._shape)}"]
        if self._dtype is not None:
            details.append(f"dtype={dtype_name(self._dtype)}")
        return f"{type(self).__name__}({', '.join(details)}, device={self._device})"


class TensorLeafSpec(LeafSpec):
    """The spec of one tensor."""

    _dtype: torch.dtype
    _device: torch.device
    _whole_numbers = True

    def __init__(self, shape: Iterable[int] | int, dtype: torch.dtype, device: DeviceLike | None) -> None:
        super().__init__(shape, torch.get_default_device() if device is None else device)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"expected a torch.dtype as dtype of {type(self).__name__}, found {shown(dtype)}")
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a value."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device of a value."""
        return self._device

    @property
    def domain(self) -> str | None:
        """The kind of values: "continuous" for floating-point numbers that need not be whole, else "discrete"."""
        return "discrete" if self._whole_numbers or not self._dtype.is_floating_point else "continuous"

    def zero(self, shape: Lead = ()) -> torch.Tensor:
        """Return zeros of shape `(*shape, *self.shape)`; they need not be in the spec."""
        return torch.zeros(self._size(shape), dtype=self._dtype, device=self._device)

    def one(self, shape: Lead = ()) -> torch.Tensor:
        """Return ones of shape `(*shape, *self.shape)`; they need not be in the spec."""
        return torch.ones(self._size(shape), dtype=self._dtype, device=self._device)

    def is_in(self, value: Any) -> bool:
        """Whether the value fits: dtype, last dims and range. Leading dims and the device are free."""
        return (
            isinstance(value, torch.Tensor)
            and value.dtype == self._dtype
            and ends_with(value.shape, self._shape)
            and self._contains(value)
        )

    def type_check(self, value: Any, key: Any = None) -> None:
        """Do nothing if the value has the spec's dtype, see `TensorSpec.type_check`."""
        found = getattr(value, "dtype", None)
        if found != self._dtype:
            where = "" if key is None else f"{key!r}: "
            raise TypeError(f"{where}expected dtype {dtype_name(self._dtype)} for {self!r}, found {found}")

    @abstractmethod
    def _contains(self, value: torch.Tensor) -> bool:
        """Whether the elements of a value of the right shape and dtype are in range."""

    def _domain(self) -> str:
        """Say which elements are in range."""
        return "any elements"

    def _differences(self, value: Any, key: tuple[str, ...]) -> list[str]:
        where = key_prefix(key)
        if not isinstance(value, torch.Tensor):
            return [f"{where}expected a tensor for {self!r}, found {type(value).__name__} {shown(value)}"]
        found = []
        if not ends_with(value.shape, self._shape):
            found.append(f"{where}expected shape {open_shape(self._shape)}, found {tuple(value.shape)}")
        if value.dtype != self._dtype:
            found.append(f"{where}expected dtype {dtype_name(self._dtype)}, found {dtype_name(value.dtype)}")
        if not found and not self._contains(value):
            found.append(f"{where}expected {self._domain()}, found {_summary(value)}")
        return found

    def _fitted(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value if its last dims fit."""
        if not ends_with(value.shape, self._shape):
            expected = open_shape(self._shape)
            raise ValueError(f"expected shape {expected} for {self!r}, found {tuple(value.shape)}")
        return value

    def encode(self, value: Any, *, ignore_device: bool = False) -> torch.Tensor:
        """Return a numpy or Python value as a new tensor of this spec, see `TensorSpec.encode`."""
        tensor = new_tensor(value, self._dtype, self._encoding_device(ignore_device))
        shape = self._shape
        if not ends_with(tensor.shape, shape) and shape[-1:] == (1,) and ends_with(tensor.shape, shape[:-1]):
            tensor = tensor.unsqueeze(-1)
        return self._fitted(tensor)

    def _encoding_device(self, ignore_device: bool) -> torch.device:
        return CPU if ignore_device else self._device

    def to_numpy(self, value: torch.Tensor, safe: bool | None = None) -> Any:
        """Return a value of this spec as a new array, see `TensorSpec.to_numpy`."""
        if safe:
            self.assert_is_in(value)
        return np.array(value.detach().cpu().numpy())


def key_prefix(key: tuple[str, ...]) -> str:
    """Return the start of a sentence about the entry at `key`."""
    return f"{(key[0] if len(key) == 1 else key)!r}: " if key else ""


def open_shape(shape: Sequence[int]) -> str:
    """Return the shape in words, with any dims in front."""
    return f"({', '.join(['*', *map(str, shape)])})"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without the module."""
    return str(dtype).removeprefix("torch.")


def _summary(value: torch.Tensor) -> str:
    if value.numel() <= 8:
        return repr(value.tolist())
    wide = value.detach().to(torch.float64)
    return f"elements from {wide.min().item():g} to {wide.max().item():g}"


def integers(name: str, value: Any) -> torch.Tensor:
    """Return an array-like of integers as an int64 tensor."""
    array = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"expected integers for {name}, found {shown(value)}")
    return torch.from_numpy(array.astype(np.int64))


@lru_cache(maxsize=64)
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return the numpy dtype of a torch dtype, None if numpy has none (bfloat16)."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def new_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a copy of an array-like as a tensor."""
    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=dtype, copy=True)
    array_dtype = numpy_dtype(dtype)
    if array_dtype is None:
        return torch.from_numpy(np.array(value)).to(device=device, dtype=dtype)
    tensor = torch.from_numpy(np.array(value, dtype=array_dtype))
    return tensor if device.type == "cpu" else tensor.to(device)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with one element along each expanded dim: each stored element once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on another device, as much expanded as it was."""
    return compact(tensor).to(device).expand(tensor.shape)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal, or both None; on the meta device, whether their shapes are."""
    if a is b or a is None or b is None:
        return a is b
    if a.is_meta or b.is_meta:
        return a.is_meta == b.is_meta and a.shape == b.shape
    if a.shape == b.shape and a.stride() == b.stride():
        a, b = compact(a), compact(b)
    return torch.equal(a, b)


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
