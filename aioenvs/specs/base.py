"""The base of all specs: shape, dtype and device, the shape operations of a tensor, and arithmetic with shapes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch

from aioenvs.errors import SpecMismatchError, shown


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


def joint_shape(*shapes: Sequence[int]) -> torch.Size:
    """Return the shape to which all of these broadcast."""
    joint: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return joint


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


def resolved_sizes(old: torch.Size, new: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes after `reshape(new)`, with -1 replaced by what is left."""
    known = math.prod(size for size in new if size != -1)
    free = sum(size == -1 for size in new)
    total = old.numel()
    if -1 in old or free > 1 or (not known or total % known if free else total != known):
        raise ValueError(f"cannot reshape a spec of shape {tuple(old)} to {tuple(new)}")
    return tuple(total // known if size == -1 else size for size in new)


def shape_argument(shape: Sequence[Any]) -> Sequence[int]:
    """Return the sizes given as `f(2, 3)` or as `f((2, 3))`."""
    return shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape


def full_index(index: Any, ndim: int) -> tuple[Any, ...]:
    """Return an index as a tuple without Ellipsis, which otherwise would reach beyond the `ndim` dims."""
    items = index if isinstance(index, tuple) else (index,)
    where = [i for i, item in enumerate(items) if item is Ellipsis]
    if not where:
        return items
    used = sum(dims_used(item) for item in items)
    start, stop = where[0], where[0] + 1
    return (*items[:start], *[slice(None)] * (ndim - used), *items[stop:])


def dims_used(item: Any) -> int:
    """Return how many dims of the value one item of an index stands for."""
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


DeviceLike = torch.device | str | int
Rearrange = Callable[[Any], Any]
"""A shape operation on the leading dims, of whatever it gets: a tensor or a spec."""
Lead = Sequence[int] | None
"""Sizes of dims in front of a spec's own; None for none."""


def as_device(device: DeviceLike) -> torch.device:
    """Return the device as tensors report it: an accelerator always has its index."""
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta"):
        current = torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_available() else 0
        device = torch.device(device.type, current)
    return device


class TensorSpec(ABC):
    """The shape, dtype and device of a value, and the values that it may take.

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
    _kinds: ClassVar[dict[str, Callable[..., Any]]] = {}
    """The classes of specs by name, for a spec that turns into one which is built on its own class."""
    _stack_specs: ClassVar[Callable[..., TensorSpec]]
    """The function behind `torch.stack`; set by the module of stacked specs, which is built on all others."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        TensorSpec._kinds.setdefault(cls.__name__, cls)

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

    def ndimension(self) -> int:
        """Return the number of dims of a value."""
        return self.ndim

    @property
    def space(self) -> Self | None:
        """The object that has `low`, `high` or `n`: the spec itself (it is another one in TorchRL)."""
        return self

    @property
    def domain(self) -> str | None:
        """The kind of values: "continuous", "discrete" or "composite"; None for those that are no tensors."""
        return None

    @abstractmethod
    def rand(self, shape: Lead = ()) -> Any:
        """Return a random value of shape `(*shape, *self.shape)`, drawn with torch's global generator."""

    @abstractmethod
    def zero(self, shape: Lead = ()) -> Any:
        """Return zeros of shape `(*shape, *self.shape)`; they need not be in the spec."""

    @abstractmethod
    def one(self, shape: Lead = ()) -> Any:
        """Return ones of shape `(*shape, *self.shape)`; they need not be in the spec."""

    def sample(self, shape: Lead = ()) -> Any:
        """Return a random value, see `rand`."""
        return self.rand(shape)

    def zeros(self, shape: Lead = ()) -> Any:
        """Return zeros, see `zero`."""
        return self.zero(shape)

    def ones(self, shape: Lead = ()) -> Any:
        """Return ones, see `one`."""
        return self.one(shape)

    def cardinality(self) -> int | float:
        """Return how many values there are along one element (or row, where elements are not independent).

        As in TorchRL the batch dims do not count: `Categorical(4, shape=(2,))` has 4.

        Raises:
            NotImplementedError: the spec has no such number.
        """
        raise NotImplementedError(f"{type(self).__name__} has no number of values; only discrete specs have one")

    def enumerate(self, use_mask: bool = False) -> Any:
        """Return the values that `cardinality` counts, stacked along a new first dim.

        Args:
            use_mask: whether to leave out those that a mask excludes.

        Raises:
            NotImplementedError: the spec has no such list.
            ValueError: with `use_mask`, the elements have different masks.
        """
        raise NotImplementedError(f"the values of {type(self).__name__} cannot be listed; those of discrete specs can")

    @abstractmethod
    def is_in(self, value: Any) -> bool:
        """Whether the value fits: dtype, last dims and range. Leading dims and the device are free."""

    def contains(self, item: Any) -> bool:
        """Whether the value fits, see `is_in`."""
        return self.is_in(item)

    @abstractmethod
    def type_check(self, value: Any, key: Any = None) -> None:
        """Do nothing if the value has the spec's dtype (a Composite: if each entry has).

        Args:
            value: the value.
            key: its name, for the message; for a Composite, the entries to check.

        Raises:
            TypeError: it has another dtype.
        """

    @abstractmethod
    def project(self, value: Any) -> Any:
        """Return the value, or the nearest one that is in the spec.

        Raises:
            ValueError: its shape does not fit.
        """

    @abstractmethod
    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Return a numpy or Python value of a Gymnasium space as a new tensor of this spec.

        Args:
            value: an array-like of shape `(*, *self.shape)`; a last dim of size 1 may be missing.
            ignore_device: whether to return the value on the CPU.

        Raises:
            ValueError: its shape does not fit.
        """

    @abstractmethod
    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return a value of this spec as the Gymnasium space has it; a copy. The inverse of `encode`.

        Args:
            value: a value of this spec.
            safe: whether to check that it is in the spec.
        """

    @abstractmethod
    def to(self, dest: DeviceLike | torch.dtype | None) -> Self:
        """Return the spec on another device or of another dtype; None changes nothing."""

    def cpu(self) -> Self:
        """Return the spec on the CPU."""
        return self.to("cpu")

    def cuda(self, device: DeviceLike | None = None) -> Self:
        """Return the spec on a CUDA device, by default the current one."""
        return self.to("cuda" if device is None else device)

    def index(self, index: Any, tensor_to_index: Any) -> Any:
        """Return the elements of a tensor that a value of this spec points to, along the tensor's last dim.

        Args:
            index: a value of this spec.
            tensor_to_index: what is indexed.

        Raises:
            NotImplementedError: values of the spec point to nothing; those of Categorical and the one-hot specs do.
        """
        raise NotImplementedError(f"a value of {type(self).__name__} is no index; one of Categorical or OneHot is")

    def clear_device_(self) -> Self:
        """Make a Composite, and those in it, have no device; a leaf keeps its own. Returns self."""
        return self

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
        ndim, new = self._batch_ndim(), shape_argument(shape)
        sizes, event = resolved_sizes(self.shape, new), tuple(self.shape[ndim:])
        batch = sizes[: len(sizes) - self._event_ndim]
        if sizes[len(batch) :] != event:
            raise ValueError(f"cannot reshape {self!r} to {tuple(new)}: its last dim must stay {event[0]}")
        return self._rearranged(torch.Size(sizes), lambda held: held.reshape(*batch, *held.shape[ndim:]))

    def view(self, *shape: Any) -> Self:
        """Return the spec in another shape, see `reshape`."""
        return self.reshape(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Return the spec with the dims from `start_dim` to `end_dim` made one."""
        start, end = wrap_dim(start_dim, self.ndim), wrap_dim(end_dim, self.ndim)
        if start > end:
            raise ValueError(f"expected start_dim <= end_dim, found {start_dim} and {end_dim}")
        shape = self.shape
        return self.reshape(*shape[:start], shape[start : end + 1].numel(), *shape[end + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """Return the spec with dim `dim` made several, of these sizes."""
        dim = wrap_dim(dim, self.ndim)
        return self.reshape(
            *self.shape[:dim], *resolved_sizes(self.shape[dim : dim + 1], sizes), *self.shape[dim + 1 :]
        )

    def make_neg_dim(self, dim: int) -> Self:
        """Return the spec with a size that varies (-1) at dim `dim`.

        Raises:
            ValueError: what is allowed differs along the dim.
        """
        dim = wrap_dim(dim, self._batch_ndim())
        shape = torch.Size([*self.shape[:dim], -1, *self.shape[dim + 1 :]])

        def op(held: Any) -> Any:
            if isinstance(held, TensorSpec):
                return held.make_neg_dim(dim)
            first = held.narrow(dim, 0, 1)
            if not torch.equal(first.expand_as(held), held):
                raise ValueError(f"the size of dim {dim} cannot vary: what is allowed differs along it in {self!r}")
            return first

        return self._rearranged(shape, op)

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
            raise IndexError(f"index {shown(index)} does not fit the batch dims {dims}: {error}") from None
        return self._rearranged(torch.Size([*head, *self.shape[known:]]), lambda held: held[items])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make `torch.stack`, `squeeze`, `unsqueeze` and `index_select` work on specs."""
        kwargs = kwargs or {}
        if func is torch.stack:
            return cls._stack_specs(*args, **kwargs)
        if func is torch.index_select:
            return _index_select(*args, **kwargs)
        if func in (torch.squeeze, torch.unsqueeze):
            spec, *rest = args or (kwargs.pop("input"),)
            return getattr(spec, func.__name__)(*rest, **kwargs)
        return NotImplemented


def _index_select(input: TensorSpec, dim: int, index: torch.Tensor) -> TensorSpec:
    selected: TensorSpec = input[(*[slice(None)] * wrap_dim(dim, input.ndim), index)]
    return selected
