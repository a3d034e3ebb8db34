"""Specs of TorchRL as ours, and ours as TorchRL's: the same shapes, dtypes, devices and values.

A TorchRL spec that has no equal here (`Choice`, a class of the user's, a domain that is not the dtype's) stays itself,
as a `Foreign`, so that no way there and back loses anything.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Self

import torch
import torchrl.data as rl
from tensordict import is_non_tensor
from torchrl.data.tensor_specs import BoundedDiscrete

from aioenvs import specs as own
from aioenvs.errors import shown
from aioenvs.specs.base import DeviceLike, Rearrange, concrete
from aioenvs.specs.leaf import LeafSpec, key_prefix


def _by_theirs(name: str) -> Any:
    """Return the method of a `Foreign` that calls the one of this name of TorchRL's spec."""

    @functools.wraps(getattr(LeafSpec, name), updated=())  # else it would be as abstract as that is declared
    def method(self: Foreign, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.spec, name)(*args, **kwargs)

    return method


class Foreign(LeafSpec):
    """A spec of TorchRL that has no equal here; it does all work.

    >>> import torchrl.data
    >>> spec = from_torchrl(torchrl.data.Choice([torchrl.data.Unbounded(2), torchrl.data.Bounded(0, 1, (2,))][:1] * 2))
    >>> spec.rand().shape, to_torchrl(spec) == spec.spec
    (torch.Size([2]), True)
    """

    def __init__(self, spec: Any) -> None:
        super().__init__(spec.shape, spec.device)
        self._dtype = spec.dtype
        self.spec = spec

    @property
    def domain(self) -> str | None:
        """The kind of values: "continuous" or "discrete"; None where TorchRL does not say."""
        found: str | None = self.spec.domain
        return found

    rand, zero, one = map(_by_theirs, ("rand", "zero", "one"))
    project, encode, to_numpy = map(_by_theirs, ("project", "encode", "to_numpy"))
    cardinality, enumerate = map(_by_theirs, ("cardinality", "enumerate"))

    def is_in(self, value: Any) -> bool:
        """Whether the value fits."""
        return bool(self.spec.is_in(value))

    def type_check(self, value: Any, key: Any = None) -> None:
        """Do nothing if the value has the spec's dtype, see `TensorSpec.type_check`."""
        if not is_non_tensor(value) and getattr(value, "dtype", None) is not self._dtype:
            where = "" if key is None else f"{key!r}: "
            raise TypeError(f"{where}expected dtype {self._dtype} for {self!r}, found {getattr(value, 'dtype', None)}")

    def to(self, dest: DeviceLike | torch.dtype | None) -> Self:
        """Return the spec on another device or of another dtype; None changes nothing."""
        return self._around(self.spec if dest is None else self.spec.to(dest))

    def _around(self, spec: Any) -> Self:
        new = copy.copy(self)
        new._shape, new._dtype, new._device, new.spec = spec.shape, spec.dtype, spec.device, spec
        return new

    def _rearranged(self, shape: torch.Size, op: Rearrange) -> Self:
        return self._around(op(self.spec))

    def _differences(self, value: Any, key: tuple[str, ...]) -> list[str]:
        return [] if self.is_in(value) else [f"{key_prefix(key)}expected {self!r}, found {shown(value)}"]

    def __eq__(self, other: object) -> bool:
        """Whether TorchRL says that both are equal."""
        return type(other) is type(self) and bool(self.spec == other.spec)

    __hash__ = None

    def _details(self) -> list[str]:
        return [type(self.spec).__name__]


def _plain(spec: Any) -> dict[str, Any]:
    """The arguments that all specs of one tensor have."""
    return {"shape": spec.shape, "device": spec.device, "dtype": spec.dtype}


def _copied_mask(spec: Any) -> Any:
    mask = getattr(spec, "mask", None)
    return None if mask is None else mask.clone()


# -- from TorchRL -----------------------------------------------------------------------------------------

_FROM: dict[type, Callable[[Any], own.TensorSpec]] = {
    rl.BoundedContinuous: lambda spec: own.Bounded(spec.low, spec.high, **_plain(spec)),
    BoundedDiscrete: lambda spec: own.Bounded(spec.low, spec.high, **_plain(spec)),
    rl.UnboundedContinuous: lambda spec: own.Unbounded(**_plain(spec)),
    rl.UnboundedDiscrete: lambda spec: own.Unbounded(**_plain(spec)),
    rl.Categorical: lambda spec: own.Categorical(spec.space.n, mask=_copied_mask(spec), **_plain(spec)),
    rl.OneHot: lambda spec: own.OneHot(spec.space.n, mask=_copied_mask(spec), **_plain(spec)),
    rl.MultiOneHot: lambda spec: own.MultiOneHot(list(spec.nvec), mask=_copied_mask(spec), **_plain(spec)),
    rl.MultiCategorical: lambda spec: own.MultiCategorical(spec.nvec, mask=_copied_mask(spec), **_plain(spec)),
    rl.Binary: lambda spec: own.Binary(mask=_copied_mask(spec), **_plain(spec)),
    rl.NonTensor: lambda spec: own.NonTensor(
        spec.shape, spec.device, None, spec.example_data, feature_dims=spec.feature_dims
    ),
}


def from_torchrl(spec: Any) -> own.TensorSpec:
    """Return the spec as one of `aioenvs.specs`; a part that has no equal there is a `Foreign`.

    Args:
        spec: A spec of TorchRL, a leaf or a Composite.

    >>> import torchrl.data
    >>> from_torchrl(torchrl.data.Bounded(-1, 1, (3,)))
    Bounded(low=-1.0, high=1.0, shape=(3,), dtype=float32, device=cpu)
    """
    if isinstance(spec, rl.StackedComposite):
        members: list[Any] = [from_torchrl(each) for each in spec._specs]
        return own.StackedComposite(*members, dim=spec.stack_dim)
    if isinstance(spec, rl.Stacked):
        return own.Stacked(*map(from_torchrl, spec._specs), dim=spec.stack_dim)
    if isinstance(spec, rl.Composite):
        return _own_composite(spec)
    return _own_leaf(spec)


def _own_leaf(spec: Any) -> own.TensorSpec:
    make = _FROM.get(type(spec))
    if make is not None:
        try:
            made = make(spec)
            if _says_the_same(to_torchrl(made), spec):
                return made
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            pass  # it says what ours cannot say
    return Foreign(spec.clone())


def _says_the_same(made: Any, spec: Any) -> bool:
    try:
        return type(made) is type(spec) and made.shape == spec.shape and bool(made == spec)
    except (TypeError, ValueError, RuntimeError):  # examples that cannot be compared
        return isinstance(spec, rl.NonTensor) and made.shape == spec.shape


def _own_composite(spec: Any) -> own.Composite:
    children = {key: None if child is None else from_torchrl(child) for key, child in spec._specs.items()}
    names = spec.names if spec._td_dim_names is not None else None
    return own.Composite(
        children,
        shape=spec.shape,
        device=spec.device,
        data_cls=spec.data_cls,
        step_mdp_static=spec.step_mdp_static,
        names=names,
    )


# -- to TorchRL -------------------------------------------------------------------------------------------


def to_torchrl(spec: own.TensorSpec) -> Any:
    """Return the spec as one of TorchRL's.

    TorchRL's specs of integers begin at 0: where ours have a `start`, a Categorical becomes a Bounded of integers.

    Args:
        spec: A leaf or a Composite.

    >>> to_torchrl(own.OneHot(3)).n
    3
    """
    if isinstance(spec, Foreign):
        return spec.spec.clone()
    if isinstance(spec, own.StackedComposite):
        return rl.StackedComposite(*map(to_torchrl, spec.unbind(spec.stack_dim)), dim=spec.stack_dim)
    if isinstance(spec, own.Stacked):
        return rl.Stacked(*map(to_torchrl, spec.unbind(spec.stack_dim)), dim=spec.stack_dim)
    if isinstance(spec, own.Composite):
        return _their_composite(spec)
    if isinstance(spec, own.NonTensor):
        return rl.NonTensor(
            shape=spec.shape, device=spec.device, example_data=spec.example_data, **_batched_or_features(spec)
        )
    return _their_tensor(spec)


def _batched_or_features(spec: own.NonTensor) -> dict[str, Any]:
    return {"batched": True} if spec.batched else {"feature_dims": spec.feature_dims}


def _their_composite(spec: own.Composite) -> Any:
    children = {key: None if child is None else to_torchrl(child) for key, child in spec.items()}
    names = {"names": spec.names} if any(name is not None for name in spec.names or ()) else {}
    return rl.Composite(
        children,
        shape=spec.shape,
        device=spec.device,
        data_cls=spec.data_cls,
        step_mdp_static=spec.step_mdp_static,
        **names,
    )


def _their_tensor(spec: own.TensorSpec) -> Any:
    plain = _plain(spec)
    mask = _copied_mask(spec)
    if isinstance(spec, own.Binary):
        return rl.Binary(**plain) if mask is None else rl.Categorical(2, mask=mask, **plain)
    if isinstance(spec, own.MultiOneHot):
        return rl.MultiOneHot(spec.nvec, mask=mask, **plain)
    if isinstance(spec, own.OneHot):
        return rl.OneHot(spec.n, mask=mask, **plain)
    if isinstance(spec, own.MultiCategorical):
        if not spec.start.any():
            return rl.MultiCategorical(_one_row(spec.nvec), mask=mask, **plain)
    elif isinstance(spec, own.Categorical) and spec.start == 0:
        return rl.Categorical(spec.n, mask=mask, **plain)
    if isinstance(spec, own.Bounded | own.Categorical | own.MultiCategorical):
        size = concrete(spec.shape)
        low, high = (bound.expand(size).clone() for bound in _bounds(spec))
        return rl.Bounded(low, high, **plain)
    return rl.Unbounded(**plain)


def _bounds(spec: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(spec, own.MultiCategorical):
        return spec.start, spec.start + spec.nvec - 1
    if isinstance(spec, own.Categorical):
        return torch.tensor(spec.start), torch.tensor(spec.start + spec.n - 1)
    return spec.low, spec.high


def _one_row(nvec: torch.Tensor) -> torch.Tensor:
    """The numbers of one row where all rows have the same."""
    rows = nvec.reshape(-1, nvec.shape[-1]) if nvec.ndim else nvec
    return rows[0].clone() if nvec.ndim and len(rows) and bool((rows == rows[0]).all()) else nvec.clone()
