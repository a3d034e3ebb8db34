"""Specs without bounds, and the names that tell continuous specs from discrete ones."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable
from typing import Any

import torch

from .base import DeviceLike, Lead
from .interval import INT64, Bounded
from .leaf import TensorLeafSpec, dtype_or_device_first
from .shapes import concrete


class Unbounded(TensorLeafSpec):
    """Any values of the dtype.

    Args:
        shape: the shape of a value; (1,) by default, as in TorchRL.
        device: the device of a value.
        dtype: any dtype; float32 by default.

    >>> from aioenvs.specs import Unbounded
    >>> Unbounded((2, 3)).zero((4,)).shape
    torch.Size([4, 2, 3])
    """

    @dtype_or_device_first(1)
    def __init__(
        self,
        shape: Iterable[int] | int = (1,),
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape, dtype or torch.get_default_dtype(), device)

    @property
    def low(self) -> torch.Tensor:
        """The least value of the dtype, of the spec's shape: a view, not to be written to."""
        return self._extreme(0)

    @property
    def high(self) -> torch.Tensor:
        """The greatest value of the dtype, of the spec's shape: a view, not to be written to."""
        return self._extreme(1)

    def _extreme(self, which: int) -> torch.Tensor:
        extreme: float = which
        if self._dtype != torch.bool:
            info = torch.finfo(self._dtype) if self._dtype.is_floating_point else torch.iinfo(self._dtype)
            extreme = (info.min, info.max)[which]
        return torch.tensor(extreme, dtype=self._dtype, device=self._device).expand(concrete(self._shape))

    @property
    def domain(self) -> str | None:
        """The kind of values: "continuous" for floating-point dtypes, else "discrete"."""
        return "continuous" if self._dtype.is_floating_point else "discrete"

    def rand(self, shape: Lead = ()) -> torch.Tensor:
        """Return a random value of shape `(*shape, *self.shape)`: normal, or uniform for integers."""
        size, dtype = self._size(shape), self._dtype
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(size, dtype=dtype, device=self._device)
        if dtype == torch.bool:
            return torch.randint(0, 2, size, dtype=dtype, device=self._device)
        bits = torch.empty(size, dtype=torch.int64, device=self._device).random_(INT64.min, None)
        return bits.view(dtype) if dtype == torch.uint64 else bits.to(dtype)

    def _contains(self, value: torch.Tensor) -> bool:
        return True

    def project(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value in the spec's dtype, see `TensorSpec.project`."""
        return self._fitted(value).to(self._dtype)


class _ByDtype(ABCMeta):
    """Classes that make specs of another class, and whose instances are those of it that have the right dtype."""

    _made: type[TensorLeafSpec]
    _continuous: bool

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls._continuous and not any(isinstance(given, torch.dtype) for given in (*args, *kwargs.values())):
            kwargs["dtype"] = torch.int64
        return cls._made(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._made) and instance.dtype.is_floating_point == cls._continuous


class UnboundedContinuous(Unbounded, metaclass=_ByDtype):
    """Makes an `Unbounded`; its instances are those with a floating-point dtype.

    >>> from aioenvs.specs import Unbounded, UnboundedContinuous
    >>> isinstance(Unbounded((3,)), UnboundedContinuous)
    True
    """

    _made = Unbounded
    _continuous = True


class UnboundedDiscrete(Unbounded, metaclass=_ByDtype):
    """Makes an `Unbounded`, int64 by default; its instances are those with another dtype than floating-point ones.

    >>> from aioenvs.specs import UnboundedDiscrete
    >>> UnboundedDiscrete((3,))
    Unbounded(shape=(3,), dtype=int64, device=cpu)
    """

    _made = Unbounded
    _continuous = False


class BoundedContinuous(Bounded, metaclass=_ByDtype):
    """Makes a `Bounded`; its instances are those with a floating-point dtype.

    >>> import torch
    >>> from aioenvs.specs import Bounded, BoundedContinuous
    >>> isinstance(Bounded(0, 9, shape=(3,), dtype=torch.uint8), BoundedContinuous)
    False
    """

    _made = Bounded
    _continuous = True
