"""Specs of batches whose elements differ, which `torch.stack` makes of different specs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import lazy_stack

from aioenvs.errors import shown
from aioenvs.specs.base import (
    DeviceLike,
    Lead,
    TensorSpec,
    concrete,
    dims_used,
    expanded_shape,
    full_index,
    shape_argument,
    wrap_dim,
)
from aioenvs.specs.composite import Composite
from aioenvs.specs.leaf import dtype_name, key_prefix
from aioenvs.specs.mapping import same_class

stack: Any = torch.stack  # of specs, where the type checker knows only tensors


def shapes_of(values: Iterable[Any]) -> list[tuple[int, ...]]:
    """Return the shapes of tensors or specs, for a message."""
    return [tuple(value.shape) for value in values]


def _is_basic(item: Any) -> bool:
    return isinstance(item, int | np.integer | slice) and not isinstance(item, bool)


class StackSpec(TensorSpec):
    """The base of both kinds of stacked specs: a tuple of specs, one for each index along `stack_dim`."""

    _stacked: tuple[Any, ...]
    _dim: int

    def _init_stack(self, specs: tuple[Any, ...], dim: int) -> None:
        if not specs:
            raise ValueError(f"{type(self).__name__} needs at least one spec")
        fewest = min(spec.ndim for spec in specs)
        if not -fewest - 1 <= dim <= fewest:
            shapes = shapes_of(specs)
            raise ValueError(f"expected specs with the dim {dim} along which to stack, found the shapes {shapes}")
        self._stacked, self._dim = specs, wrap_dim(dim, fewest + 1)

    @property
    def stack_dim(self) -> int:
        """The dim along which the specs differ."""
        return self._dim

    @property
    def dim(self) -> int:
        """The dim along which specs are stacked, as TorchRL calls it."""
        return self._dim

    @property
    def shape(self) -> torch.Size:
        """The shape of a value; -1 where the specs differ, and without the dims that some do not have."""
        sizes = [
            found.pop() if len(found := set(along)) == 1 else -1
            for along in zip(*(spec.shape for spec in self._stacked), strict=False)
        ]
        return torch.Size([*sizes[: self._dim], len(self._stacked), *sizes[self._dim :]])

    @shape.setter
    def shape(self, shape: Iterable[int]) -> None:
        raise AttributeError(f"cannot set the shape of a stacked spec; expand it to {tuple(shape)!r}")

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of a value; None where the specs differ."""
        found = {spec.dtype for spec in self._stacked}
        return found.pop() if len(found) == 1 else None

    @property
    def device(self) -> torch.device | None:
        """The device of a value; None where the specs differ. Setting it moves them."""
        found = {spec.device for spec in self._stacked}
        return found.pop() if len(found) == 1 else None

    @device.setter
    def device(self, device: DeviceLike | None) -> None:
        self._stacked = tuple(spec.to(device) for spec in self._stacked)

    def clear_device_(self) -> Self:
        """Make composites, and those in them, have no device. Returns self."""
        for spec in self._stacked:
            spec.clear_device_()
        return self

    @property
    def domain(self) -> str | None:
        """The kind of values; None where the specs differ."""
        found = {spec.domain for spec in self._stacked}
        return found.pop() if len(found) == 1 else None

    # Values

    def _join(self, values: Sequence[Any], dim: int) -> Any:
        raise NotImplementedError

    def _split(self, value: Any) -> Sequence[Any]:
        """Return the values of the stacked specs.

        Raises:
            ValueError: there is another number of them.
        """
        if isinstance(value, list | tuple):
            parts: Sequence[Any] = value
        elif isinstance(value, np.ndarray):
            parts = list(np.moveaxis(value, value.ndim - self.ndim + self._dim, 0))
        elif getattr(value, "is_nested", False):
            parts = value.unbind(0)
        elif hasattr(value, "unbind") and value.ndim >= self.ndim:
            parts = value.unbind(value.ndim - self.ndim + self._dim)
        else:
            raise ValueError(f"expected a value of shape {tuple(self.shape)}, found {shown(value)}")
        if len(parts) != len(self._stacked):
            n = len(self._stacked)
            raise ValueError(f"expected {n} values along dim {self._dim}, found {len(parts)}")
        return parts

    def rand(self, shape: Lead = ()) -> Any:
        """Return a random value of each spec, stacked; shape `(*shape, *self.shape)`."""
        return self._join([spec.rand(shape) for spec in self._stacked], len(shape or ()) + self._dim)

    def zero(self, shape: Lead = ()) -> Any:
        """Return zeros of each spec, stacked; shape `(*shape, *self.shape)`."""
        return self._join([spec.zero(shape) for spec in self._stacked], len(shape or ()) + self._dim)

    def one(self, shape: Lead = ()) -> Any:
        """Return ones of each spec, stacked; shape `(*shape, *self.shape)`."""
        return self._join([spec.one(shape) for spec in self._stacked], len(shape or ()) + self._dim)

    def cardinality(self) -> int | float:
        """Not known for a stacked spec."""
        return TensorSpec.cardinality(self)

    def enumerate(self, use_mask: bool = False) -> Any:
        """Not possible for a stacked spec."""
        return TensorSpec.enumerate(self, use_mask)

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check each part of the value along `stack_dim`, see `TensorSpec.type_check`."""
        for spec, part in zip(self._stacked, self._split(value), strict=True):
            spec.type_check(part, key)

    def is_in(self, value: Any) -> bool:
        """Whether each part of the value along `stack_dim` is in its spec; a list of parts will do."""
        try:
            parts = self._split(value)
        except (ValueError, IndexError):
            return False
        return all(spec.is_in(part) for spec, part in zip(self._stacked, parts, strict=True))

    def _differences(self, value: Any, key: tuple[str, ...]) -> list[str]:
        try:
            parts = self._split(value)
        except (ValueError, IndexError) as error:
            return [f"{key_prefix(key)}{error}"]
        return [
            f"[{i}] {difference}"
            for i, (spec, part) in enumerate(zip(self._stacked, parts, strict=True))
            for difference in spec._differences(part, key)
        ]

    def project(self, value: Any) -> Any:
        """Return the value with each part projected, see `TensorSpec.project`."""
        parts = [spec.project(part) for spec, part in zip(self._stacked, self._split(value), strict=True)]
        lead = parts[0].ndim - self._stacked[0].ndim
        return self._join(parts, lead + self._dim)

    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Return the parts of a list or array, each encoded by its spec, stacked."""
        parts = [
            spec.encode(part, ignore_device=ignore_device)
            for spec, part in zip(self._stacked, self._split(value), strict=True)
        ]
        lead = parts[0].ndim - self._stacked[0].ndim
        return self._join(parts, lead + self._dim)

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return a list of what the specs make of their parts."""
        return [spec.to_numpy(part, safe) for spec, part in zip(self._stacked, self._split(value), strict=True)]

    # Other specs

    def _remade(self, specs: Iterable[Any], dim: int) -> Self:
        new = copy.copy(self)
        new._stacked, new._dim = tuple(specs), dim
        return new

    def clone(self) -> Self:
        """Return a copy; changing one leaves the other as it is."""
        return self._remade((spec.clone() for spec in self._stacked), self._dim)

    def to(self, dest: DeviceLike | torch.dtype | None) -> Self:
        """Return the spec on another device or of another dtype; None changes nothing."""
        return self._remade((spec.to(dest) for spec in self._stacked), self._dim)

    def expand(self, *shape: Any) -> Self:
        """Return the spec of a larger shape, see `TensorSpec.expand`."""
        new = expanded_shape(self.shape, shape_argument(shape))
        dim = self._dim + len(new) - self.ndim
        if new[dim] != len(self._stacked):
            raise ValueError(f"cannot expand dim {self._dim}, along which specs differ, to {new[dim]}")
        rest = (*new[:dim], *new[dim + 1 :])
        return self._remade((spec.expand(*rest) for spec in self._stacked), dim)

    def reshape(self, *shape: Any) -> Self:
        """Not possible for a stacked spec."""
        raise NotImplementedError(f"cannot reshape a stacked spec to {shown(shape)}; reshape before stacking")

    def make_neg_dim(self, dim: int) -> Self:
        """Return the spec with a size that varies at dim `dim`, which is not `stack_dim`."""
        dim = wrap_dim(dim, self.ndim)
        if dim == self._dim:
            raise ValueError(f"the size of dim {dim} cannot vary: the specs differ along it")
        return self._remade((spec.make_neg_dim(dim - (dim > self._dim)) for spec in self._stacked), self._dim)

    def unsqueeze(self, dim: int) -> Self:
        """Return the spec with a new dim of size 1 at `dim`."""
        dim = wrap_dim(dim, self.ndim + 1)
        before = dim <= self._dim
        specs = (spec.unsqueeze(dim if before else dim - 1) for spec in self._stacked)
        return self._remade(specs, self._dim + before)

    def squeeze(self, dim: int | None = None) -> Any:
        """Return the spec without the dims of size 1, or without dim `dim` if it has size 1."""
        dims = range(self.ndim) if dim is None else [wrap_dim(dim, self.ndim)]
        spec: Any = self
        for i in reversed(dims):
            if self.shape[i] == 1:
                spec = spec[(*[slice(None)] * i, 0)]
        return spec

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return the specs along a dim; those that were stacked if it is `stack_dim`."""
        return self._stacked if wrap_dim(dim, self.ndim) == self._dim else super().unbind(dim)

    def _indexed(self, index: Any) -> Any:
        items = full_index(index, self.ndim)
        if sum(map(dims_used, items)) > self.ndim:
            raise IndexError(f"too many indices for a spec of shape {tuple(self.shape)}: {shown(index)}")
        before, at, after = self._divided(items)
        rest = (*before, *after)
        if not _is_basic(at) and not all(item is None or _is_basic(item) for item in rest):
            raise IndexError(f"expected only integers and slices but along dim {self._dim}, found {shown(index)}")
        chosen = self._choose(at)
        if isinstance(chosen, TensorSpec):
            return chosen[rest] if rest else chosen
        dim = torch.zeros((), dtype=torch.bool).expand(concrete(self.shape[: self._dim]))[before].ndim
        return stack([spec[rest] if rest else spec for spec in chosen], dim)

    def _divided(self, items: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        """Return the items of an index before `stack_dim`, the one along it, and those behind."""
        used = count = 0
        while count < len(items) and (used < self._dim or items[count] is None):
            used += dims_used(items[count])
            count += 1
        if used > self._dim:
            raise IndexError(f"a mask cannot reach over dim {self._dim}, along which the specs differ: {shown(items)}")
        at = items[count] if count < len(items) else slice(None)
        return items[:count], at, items[count + 1 :]

    def _choose(self, at: Any) -> Any:
        """Return the spec, or the list of specs, at an index along `stack_dim`."""
        if isinstance(at, int | np.integer):
            if not -len(self._stacked) <= at < len(self._stacked):
                raise IndexError(f"index {at} is out of range for {len(self._stacked)} specs")
            return self._stacked[at]
        if isinstance(at, slice):
            chosen = list(self._stacked[at])
        else:
            try:
                where = torch.arange(len(self._stacked))[torch.as_tensor(at)]
            except (TypeError, ValueError, RuntimeError) as error:
                raise IndexError(f"{shown(at)} is no index along dim {self._dim}: {error}") from None
            if where.ndim == 0:
                return self._stacked[int(where)]
            if where.ndim > 1:
                raise IndexError(f"expected one dim in an index along dim {self._dim}, found {shown(at)}")
            chosen = [self._stacked[i] for i in where.tolist()]
        if not chosen:
            raise IndexError(f"the index {shown(at)} selects none of {len(self._stacked)} specs")
        return chosen

    def __eq__(self, other: object) -> bool:
        """Whether the other spec stacks equal specs along the same dim."""
        return (
            type(self) is type(other)
            and isinstance(other, StackSpec)
            and (self._dim, self._stacked) == (other._dim, other._stacked)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return one line per spec."""
        lines = [f"{spec!r},".replace("\n", "\n    ") for spec in self._stacked]
        return f"{type(self).__name__}(" + "".join(f"\n    {line}" for line in lines) + f"\n{self._footer()})"

    def _footer(self) -> str:
        return f"shape={tuple(self.shape)}, stack_dim={self._dim}"

    def _rearranged(self, shape: torch.Size, op: Callable[[Any], Any]) -> Self:
        raise NotImplementedError


def stack_specs(specs: Iterable[TensorSpec], dim: int = 0) -> Any:
    """Return the spec of `torch.stack` of values: dense if the specs are equal, else a stacked one.

    Raises:
        ValueError: no specs, or they differ in their number of dims or their device.
        TypeError: something else than specs, or composites and leaves together.
    """
    specs = list(specs)
    if not specs:
        raise ValueError("cannot stack an empty list of specs")
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"expected only specs to stack, found {shown(spec)}")
    dim = specs[0]._insertion(dim)
    if all(spec == specs[0] for spec in specs[1:]):
        return _dense(specs[0], len(specs), dim)
    composites = [spec for spec in specs if isinstance(spec, Composite)]
    if not composites:
        return Stacked(*specs, dim=dim)
    if len(composites) < len(specs):
        raise TypeError(f"cannot stack composites and leaves together, found {shown(specs)}")
    return StackedComposite(*composites, dim=dim)


TensorSpec._stack_specs = staticmethod(stack_specs)


def _dense(spec: TensorSpec, n: int, dim: int) -> TensorSpec:
    spec = spec.unsqueeze(dim)
    return spec.expand(*spec.shape[:dim], n, *spec.shape[dim + 1 :])


class Stacked(StackSpec):
    """Different leaf specs along one dim.

    Values are dense tensors where the shapes agree, and nested tensors (`torch.nested`, jagged) where
    they do not. Where a value is taken, a list of tensors will do.

    >>> import torch
    >>> from aioenvs.specs import Bounded, Categorical
    >>> spec = torch.stack([Categorical(3), Categorical(4)])
    >>> spec.is_in(torch.tensor([2, 3])), spec.is_in(torch.tensor([3, 2]))
    (True, False)
    >>> torch.stack([Bounded(0, 1, shape=(3,)), Bounded(0, 1, shape=(4,))]).shape
    torch.Size([2, -1])

    Args:
        *specs: the specs, with the same number of dims.
        dim: the dim along which they are stacked.

    Raises:
        ValueError: no specs, or they differ in their number of dims or their device.
    """

    def __init__(self, *specs: TensorSpec, dim: int = 0) -> None:
        self._init_stack(specs, dim)
        devices = sorted({str(spec.device) for spec in specs})
        if len(devices) > 1:
            raise ValueError(f"expected specs on one device, found {devices}")

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of a part of the batch; integers and slices, and anything along `stack_dim`."""
        return self._indexed(index)

    def _join(self, values: Sequence[Any], dim: int) -> Any:
        if not all(isinstance(value, torch.Tensor) for value in values):
            return torch.stack(list(values), dim)
        if len({value.dtype for value in values}) > 1:
            dtypes = [dtype_name(value.dtype) for value in values]
            raise ValueError(f"cannot stack values of the dtypes {dtypes}")
        if len({value.shape for value in values}) == 1:
            return torch.stack(list(values), dim)
        try:
            if dim == 0:
                return torch.nested.nested_tensor(list(values), layout=torch.jagged)
        except RuntimeError:
            pass
        raise ValueError(
            f"cannot stack values of the shapes {shapes_of(values)} along dim {dim}: a nested tensor is stacked "
            "along dim 0 and varies along one dim; stack Composites instead"
        )


class StackedComposite(StackSpec, Composite):
    """Different composites along one dim; values are `LazyStackedTensorDict`.

    Its keys are those that all composites have; more keys of some can be reached by `spec[i]`.

    >>> import torch
    >>> from aioenvs.specs import Bounded, Composite
    >>> a = Composite(position=Bounded(0, 1, shape=(3,)))
    >>> b = Composite(position=Bounded(0, 1, shape=(4,)), speed=Bounded(0, 1, shape=(1,)))
    >>> spec = torch.stack([a, b])
    >>> list(spec.keys()), spec["position"].shape, spec[1] == b
    (['position'], torch.Size([2, -1]), True)
    >>> spec.rand()[0]["position"].shape
    torch.Size([3])

    Args:
        *specs: the composites, of the same shape.
        dim: the dim along which they are stacked.

    Raises:
        ValueError: no specs, or their shapes differ.
    """

    def __init__(self, *specs: Composite, dim: int = 0) -> None:
        self._init_stack(specs, dim)
        if len({spec.shape for spec in specs}) > 1:
            raise ValueError(f"expected composites of one shape, found {shapes_of(specs)}")

    @property
    def data_cls(self) -> Any:
        """The tensorclass of values; None if there is none, or the composites differ in it."""
        first, *others = (spec.data_cls for spec in self._stacked)
        return first if all(same_class(first, other) for other in others) else None

    def __getitem__(self, index: Any) -> Any:
        """Return the entry at a key (stacked), or the spec of a part of the batch."""
        is_key = isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str))
        return Composite.__getitem__(self, index) if is_key else self._indexed(index)

    def _names(self) -> list[str]:
        first, *others = (spec._names() for spec in self._stacked)
        return [name for name in first if all(name in names for names in others)]

    def _child(self, name: str) -> Any:
        children = [spec._child(name) for spec in self._stacked]
        return None if any(child is None for child in children) else stack_specs(children, self._dim)

    def _put(self, name: str, spec: TensorSpec | None) -> None:
        parts = [None] * len(self._stacked) if spec is None else spec.unbind(self._dim)
        for composite, part in zip(self._stacked, parts, strict=True):
            composite._put(name, part)

    def _drop(self, name: str) -> None:
        for composite in self._stacked:
            composite._drop(name)

    @property
    def is_locked(self) -> bool:
        """Whether changes raise RuntimeError."""
        return any(spec.is_locked for spec in self._stacked)

    @is_locked.setter
    def is_locked(self, locked: bool) -> None:
        self._set_lock(locked)

    def clear_device_(self) -> Self:
        """Have no device, in any of the composites; see `Composite.clear_device_`. Returns self."""
        self._require_unlocked()
        return super().clear_device_()

    @property
    def device(self) -> torch.device | None:
        """The device of a value; None where the composites differ. Setting it moves them."""
        return super().device

    @device.setter
    def device(self, device: DeviceLike | None) -> None:
        self._require_unlocked()
        if device is None:
            self.clear_device_()
        else:
            self._stacked = tuple(spec.to(device) for spec in self._stacked)

    def _set_lock(self, locked: bool, recurse: bool = True) -> Self:
        for spec in self._stacked:
            spec._set_lock(locked, recurse)
        return self

    @property
    def names(self) -> list[str | None]:
        """The names of the batch dims; `stack_dim` has none."""
        names = self._stacked[0].names
        return [*names[: self._dim], None, *names[self._dim :]]

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        self._require_unlocked()
        if names is not None and len(names) != self.ndim:
            raise ValueError(f"expected {self.ndim} names, found {shown(names)}")
        for spec in self._stacked:
            spec.names = None if names is None else [*names[: self._dim], *names[self._dim + 1 :]]

    def empty(self) -> Any:
        """Return a composite of the same shape without entries."""
        return stack_specs([spec.empty() for spec in self._stacked], self._dim)

    def select(self, *keys: Any, strict: bool = True) -> Any:
        """Return the spec with only these entries of each composite."""
        return stack_specs([spec.select(*keys, strict=strict) for spec in self._stacked], self._dim)

    def exclude(self, *keys: Any) -> Any:
        """Return the spec without these entries of each composite."""
        return stack_specs([spec.exclude(*keys) for spec in self._stacked], self._dim)

    def _join(self, values: Sequence[Any], dim: int) -> Any:
        return lazy_stack(list(values), dim)
