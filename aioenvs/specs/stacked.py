"""Specs of batches whose elements differ: what `torch.stack` makes of different specs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from tensordict import lazy_stack

from aioenvs.errors import shown

from .base import DeviceLike, TensorSpec
from .classes import same_class
from .composite import Composite
from .leaf import dtype_name
from .stack import StackSpec, shapes_of


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
