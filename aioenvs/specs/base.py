"""What all specs share: shape, dtype and device, and the shape operations of a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch

from ..errors import SpecMismatchError

DeviceLike = torch.device | str | int
Rearrange = Callable[[Any], Any]
"""A shape operation on the leading dims, of whatever it gets: a tensor or a spec."""


def as_device(device: DeviceLike) -> torch.device:
    """Return the device as tensors report it: an accelerator always has its index."""
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta"):
        current = torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_available() else 0
        device = torch.device(device.type, current)
    return device


def as_shape(shape: Iterable[int] | int) -> torch.Size:
    """Return the shape; -1 stands for a dim whose size varies."""
    shape = torch.Size([shape] if isinstance(shape, int) else shape)
    if any(size < -1 for size in shape):
        raise ValueError(f"expected sizes >= 0 (or -1 for a size that varies), found shape {tuple(shape)}")
    return shape


def concrete(shape: Sequence[int]) -> torch.Size:
    """Return the shape with 1 for each size that varies."""
    return torch.Size([1 if size == -1 else size for size in shape])


def ends_with(found: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether the last dims of `found` are `expected`, where -1 stands for any size."""
    lead = len(found) - len(expected)
    return lead >= 0 and all(e in (f, -1) for f, e in zip(found[lead:], expected, strict=True))


def broadcasts(shape: Sequence[int], size: Sequence[int]) -> bool:
    """Whether a tensor of this shape can be expanded to the size."""
    pairs = zip(reversed(shape), reversed(size), strict=False)
    return len(shape) <= len(size) and all(a in (1, b) for a, b in pairs)


def expanded_shape(old: torch.Size, new: Sequence[int]) -> torch.Size:
    """Return the shape `old` has after `expand(new)`; -1 keeps a size."""
    lead = len(new) - len(old)
    sizes = list(new)
    for i, size in enumerate(old, start=lead):
        if lead < 0 or (sizes[i] not in (-1, size) and size != 1):
            raise ValueError(f"cannot expand a spec of shape {tuple(old)} to {tuple(new)}")
        sizes[i] = size if sizes[i] == -1 else sizes[i]
    if -1 in sizes[: max(lead, 0)]:
        raise ValueError(f"a new dim needs a size, found -1 in {tuple(new)}")
    return torch.Size(sizes)


def shape_argument(shape: Sequence[Any]) -> Sequence[int]:
    """Return the sizes given as `f(2, 3)` or as `f((2, 3))`."""
    return shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape


def full_index(index: Any, ndim: int) -> tuple[Any, ...]:
    """Return an index as a tuple without Ellipsis, which otherwise would reach beyond the `ndim` dims."""
    items = index if isinstance(index, tuple) else (index,)
    where = [i for i, item in enumerate(items) if item is Ellipsis]
    if not where:
        return items
    used = sum(_dims_used(item) for item in items)
    start, stop = where[0], where[0] + 1
    return (*items[:start], *[slice(None)] * (ndim - used), *items[stop:])


def _dims_used(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, torch.Tensor | np.ndarray) and item.dtype in (torch.bool, np.bool_):
        return int(item.ndim)
    return 1


def wrap_dim(dim: int, ndim: int) -> int:
    """Return a dim counted from the front, for a value of `ndim` dims."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"expected a dim in [{-ndim}, {ndim}), found {dim}")
    return dim % ndim


class TensorSpec(ABC):
    """What a value looks like (shape, dtype, device) and which values it may take.

    The spec of a batch starts with the batch dims. Operations return new specs.

    >>> from aioenvs.specs import Bounded, TensorSpec
    >>> isinstance(Bounded(-1, 1, shape=(3,)), TensorSpec)
    True
    """

    _shape: torch.Size
    _dtype: torch.dtype | None = None
    _device: torch.device | None = None
    _event_ndim = 0
    """How many of the last dims belong to one value and cannot be indexed or rearranged."""

    @property
    def shape(self) -> torch.Size:
        """The shape of a value; -1 marks a size that varies."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of a value; None where there is no single one."""
        return self._dtype

    @property
    def device(self) -> torch.device | None:
        """The device of a value; None where there is no single one."""
        return self._device

    @property
    def ndim(self) -> int:
        """The number of dims of a value."""
        return len(self.shape)

    @property
    def space(self) -> Self:
        """The object that has `low`, `high` or `n`: the spec itself (it is another one in TorchRL)."""
        return self

    @abstractmethod
    def rand(self, shape: Sequence[int] = ()) -> Any:
        """Return a random value of shape `(*shape, *self.shape)`, drawn with torch's global generator."""

    @abstractmethod
    def zero(self, shape: Sequence[int] = ()) -> Any:
        """Return zeros of shape `(*shape, *self.shape)`; they need not be in the spec."""

    @abstractmethod
    def one(self, shape: Sequence[int] = ()) -> Any:
        """Return ones of shape `(*shape, *self.shape)`; they need not be in the spec."""

    @abstractmethod
    def is_in(self, value: Any) -> bool:
        """Whether the value fits: dtype, last dims and range. Leading dims and the device are free."""

    @abstractmethod
    def project(self, value: Any) -> Any:
        """Return the value, or the nearest one that is in the spec.

        Raises:
            ValueError: its shape does not fit.
        """

    @abstractmethod
    def encode(self, value: Any) -> Any:
        """Return a numpy or Python value of a Gymnasium space as a new tensor of this spec.

        Args:
            value: an array-like of shape `(*, *self.shape)`; a last dim of size 1 may be missing.

        Raises:
            ValueError: its shape does not fit.
        """

    @abstractmethod
    def to_numpy(self, value: Any) -> Any:
        """Return a value of this spec as the Gymnasium space has it; a copy. The inverse of `encode`."""

    @abstractmethod
    def to(self, dest: DeviceLike | torch.dtype) -> Self:
        """Return the spec on another device (or, for a leaf, of another dtype)."""

    @abstractmethod
    def _differences(self, value: Any, key: tuple[str, ...]) -> list[str]: ...

    @abstractmethod
    def _rearranged(self, shape: torch.Size, op: Rearrange) -> Self:
        """Return a copy of another shape, with `op` applied to what the spec holds."""

    def differences(self, value: Any) -> list[str]:
        """Return how the value differs from the spec, one sentence each; empty if it is in.

        >>> from aioenvs.specs import Binary, Composite
        >>> Composite(a=Binary(2)).differences({})
        ["'a': expected Binary(shape=(2,), dtype=int8, device=cpu), found nothing among the keys []"]
        """
        return self._differences(value, ())

    def assert_is_in(self, value: Any) -> None:
        """Do nothing if the value is in the spec.

        Raises:
            SpecMismatchError: it is not; the message lists the differences.
        """
        if not self.is_in(value):
            raise SpecMismatchError("\n".join(["the value is not in the spec:", *self.differences(value)]))

    def clone(self) -> Self:
        """Return a copy; changing one leaves the other as it is."""
        return self._rearranged(self.shape, lambda held: held)

    # Shape operations: all act on the dims before the last `_event_ndim`.

    def _batch_ndim(self) -> int:
        return len(self.shape) - self._event_ndim

    def expand(self, *shape: Any) -> Self:
        """Return the spec of a larger shape: new leading dims, and larger ones where the size is 1.

        Raises:
            ValueError: the last dims do not fit.
        """
        ndim = self._batch_ndim()
        new = expanded_shape(self.shape, shape_argument(shape))
        batch = new[: len(new) - self._event_ndim]
        if new[len(batch) :] != self.shape[ndim:]:
            raise ValueError(f"cannot expand the last dim of {self!r} to {tuple(new)}")
        return self._rearranged(new, lambda held: held.expand(*batch, *held.shape[ndim:]))

    def reshape(self, *shape: Any) -> Self:
        """Return the spec with the same number of elements in another shape."""
        ndim = self._batch_ndim()
        new = shape_argument(shape)
        batch = tuple(new)[: len(new) - self._event_ndim]
        if tuple(new[len(batch) :]) != tuple(self.shape[ndim:]) or -1 in self.shape:
            raise ValueError(f"cannot reshape {self!r} to {tuple(new)}")
        batch = torch.zeros((), dtype=torch.bool).expand(self.shape[:ndim]).reshape(batch).shape
        return self._rearranged(
            torch.Size([*batch, *self.shape[ndim:]]), lambda held: held.reshape(*batch, *held.shape[ndim:])
        )

    def unsqueeze(self, dim: int) -> Self:
        """Return the spec with a new dim of size 1 at `dim`."""
        dim = self._insertion(dim)
        shape = torch.Size([*self.shape[:dim], 1, *self.shape[dim:]])
        return self._rearranged(shape, lambda held: held.unsqueeze(dim))

    def _insertion(self, dim: int) -> int:
        """Return where a new dim goes, counted from the front."""
        position = wrap_dim(dim, self.ndim + 1)
        if position > self._batch_ndim():
            raise IndexError(f"cannot insert dim {dim} behind the last dim of {self!r}")
        return position

    def squeeze(self, dim: int | None = None) -> Self:
        """Return the spec without the dims of size 1, or without dim `dim` if it has size 1."""
        ndim = self._batch_ndim()
        candidates = range(ndim) if dim is None else [wrap_dim(dim, self.ndim)]
        dims = [i for i in candidates if i < ndim and self.shape[i] == 1]
        shape = torch.Size([size for i, size in enumerate(self.shape) if i not in dims])

        def op(held: Any) -> Any:
            for i in reversed(dims):
                held = held.squeeze(i)
            return held

        return self._rearranged(shape, op)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Return the specs along a dim: the inverse of `torch.stack`."""
        dim = wrap_dim(dim, self.ndim)
        if self.shape[dim] == -1:
            raise ValueError(f"cannot unbind dim {dim} of {self!r}: its size varies")
        return tuple(self[(*[slice(None)] * dim, i)] for i in range(self.shape[dim]))

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of `value[index]`, where the index covers batch dims of the value."""
        ndim = self._batch_ndim()
        known = self.shape.index(-1) if -1 in self.shape[:ndim] else ndim
        items = full_index(index, ndim)
        while len(items) > known and isinstance(items[-1], slice) and items[-1] == slice(None):
            items = items[:-1]
        try:
            head = torch.zeros((), dtype=torch.bool).expand(self.shape[:known])[items].shape
        except IndexError as error:
            dims = tuple(self.shape[:known])
            raise IndexError(f"index {index!r} does not fit the batch dims {dims}: {error}") from None
        return self._rearranged(torch.Size([*head, *self.shape[known:]]), lambda held: held[items])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make `torch.stack` work on specs."""
        if func is not torch.stack:
            return NotImplemented
        from .stacked import stack_specs

        return stack_specs(*args, **(kwargs or {}))
