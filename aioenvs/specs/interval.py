"""Specs with and without bounds, the drawing from intervals, and the names that tell continuous from discrete."""

from __future__ import annotations

import math
from abc import ABCMeta
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch

from aioenvs.errors import shown
from aioenvs.specs.base import DeviceLike, Lead, Rearrange, broadcasts, concrete
from aioenvs.specs.leaf import CPU, TensorLeafSpec, compact, dtype_name, dtype_or_device_first, moved, numpy_dtype, same

INT64 = torch.iinfo(torch.int64)
NO_COMPARISON = (torch.uint16, torch.uint32, torch.uint64)
"""The dtypes that torch can store but not compare."""


def as_ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers as int64 in the same order (uint64 is shifted by 2**63)."""
    if tensor.dtype == torch.uint64:
        return tensor.view(torch.int64) ^ INT64.min
    return tensor.to(torch.int64)


def from_ordered(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `as_ordered`."""
    if dtype == torch.uint64:
        return (tensor ^ INT64.min).view(torch.uint64)
    return tensor.to(dtype)


def saturated(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of any dtype as the nearest ones of an integer dtype."""
    if value.dtype == dtype:
        return value
    if value.is_floating_point():
        # 2**63 - 1024 is the largest double that is an int64.
        value = value.double().nan_to_num(0.0).round().clamp(INT64.min, 2**63 - 1024)
    info = torch.iinfo(dtype)
    return value.to(torch.int64).clamp(info.min, min(info.max, INT64.max)).to(dtype)


def draw_integers(low: torch.Tensor, high: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """Draw int64 from [low, high], both included, per element."""
    bits = torch.empty(size, dtype=torch.int64, device=low.device).random_(INT64.min, None)
    width = high - low + 1  # wraps to <= 0 for 2**63 integers or more
    narrow = low + (bits & INT64.max) % width.clamp(min=1)
    if bool((compact(width) > 0).all()):
        return narrow
    # At least half of all int64 are in a wide interval, so where one is not, the one 2**63 away is.
    inside = (bits >= low) & (bits <= high)
    return torch.where(width > 0, narrow, torch.where(inside, bits, bits ^ INT64.min))


def draw_floats(low: torch.Tensor, high: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """Draw uniformly from [low, high], per element; both are finite."""
    unit = torch.rand(size, dtype=low.dtype, device=low.device)
    return (low * (1 - unit) + high * unit).clamp(low, high)


def draw_unbounded(low: torch.Tensor, high: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """Draw per element as `gymnasium.spaces.Box.sample` does.

    That is uniform between finite bounds, exponential from the bound where there is one, else normal.
    """
    below, above = low.isfinite(), high.isfinite()
    start, stop = low.where(below, 0), high.where(above, 0)
    tail = torch.empty(size, dtype=low.dtype, device=low.device).exponential_()
    bounded_below = torch.where(above, draw_floats(start, stop.maximum(start), size), start + tail)
    drawn = torch.where(below, bounded_below, torch.where(above, stop - tail, torch.randn_like(tail)))
    return drawn.clamp(low, high)


class IntervalSpec(TensorLeafSpec):
    """Elements between `low` and `high`, both included.

    The bounds are held in a dtype that can be compared (see `as_ordered`).
    """

    _low: torch.Tensor
    _high: torch.Tensor
    _scalars: tuple[float, float] | None
    """The bounds where they are the same for all elements: most work is then one call."""
    _finite: bool

    def _bound(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Set the bounds, which broadcast to the spec's shape and which its dtype can hold."""
        size = concrete(self._shape)
        lowest, highest = (_aminmax(low), _aminmax(high)) if size.numel() else ((0, 0), (0, 0))
        self._scalars = (lowest[0], highest[1]) if (lowest[0], highest[0]) == (lowest[1], highest[1]) else None
        self._finite = math.isfinite(lowest[0]) and math.isfinite(highest[1])
        if self._scalars is not None and size.numel():
            low, high = (bound[(0,) * bound.ndim].clone() for bound in (low, high))
        self._low, self._high = (self._comparable(bound.to(self._dtype)) for bound in (low, high))
        self._low, self._high = (bound.to(self._device).expand(size) for bound in (self._low, self._high))

    def _comparable(self, tensor: torch.Tensor) -> torch.Tensor:
        return as_ordered(tensor) if self._dtype in NO_COMPARISON else tensor

    def _natural(self, bound: torch.Tensor) -> torch.Tensor:
        if self._dtype not in NO_COMPARISON:
            return bound
        return from_ordered(compact(bound), self._dtype).expand(bound.shape)

    def _bound_by(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Set bounds given as int64; ValueError if the spec's dtype cannot hold them."""
        check_dtype(low, high, self._dtype)
        self._bound(low, high)

    @property
    def low(self) -> torch.Tensor:
        """The lower bounds, of the spec's shape: a view, not to be written to."""
        return self._natural(self._low)

    @property
    def high(self) -> torch.Tensor:
        """The upper bounds, of the spec's shape: a view, not to be written to."""
        return self._natural(self._high)

    def rand(self, shape: Lead = ()) -> Any:
        """Return a random value of shape `(*shape, *self.shape)`, uniform over the interval."""
        size, dtype = self._size(shape), self._dtype
        if self._scalars is not None and dtype != torch.uint64:
            low, high = int(self._scalars[0]), int(self._scalars[1])
            if high < INT64.max:
                return torch.randint(low, high + 1, size, dtype=dtype, device=self._device)
        return from_ordered(draw_integers(as_ordered(self._low), as_ordered(self._high), size), dtype)

    def _contains(self, value: torch.Tensor) -> bool:
        if value.numel() == 0:
            return True
        if self._whole_numbers and value.is_floating_point() and not torch.equal(value, value.round()):
            return False
        if self._scalars is not None and value.dtype not in NO_COMPARISON:
            lowest, highest = value.aminmax()
            return self._scalars[0] <= lowest.item() and highest.item() <= self._scalars[1]
        low, high, value = self._low.to(value.device), self._high.to(value.device), self._comparable(value)
        return bool(((value >= low) & (value <= high)).all())

    def project(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value with each element moved to the nearest one in range, see `TensorSpec.project`."""
        value = self._fitted(value)
        if self.is_in(value):
            return value
        dtype = self._dtype if self._dtype in NO_COMPARISON else torch.int64
        low, high = as_ordered(self._low.to(value.device)), as_ordered(self._high.to(value.device))
        return from_ordered(as_ordered(saturated(value, dtype)).clamp(low, high), self._dtype)

    def _domain(self) -> str:
        if self._scalars is not None:
            return f"elements in [{self._scalars[0]}, {self._scalars[1]}]"
        return f"elements in [{_bounds_text(self.low)}, {_bounds_text(self.high)}]"

    def to(self, dest: DeviceLike | torch.dtype | None) -> Self:
        """Return the spec on another device or of another dtype; None changes nothing."""
        new = super().to(dest)
        if dest is None:
            return new
        if isinstance(dest, torch.dtype):
            check_dtype(self.low, self.high, dest)
            new._bound(compact(self.low).to(dest), compact(self.high).to(dest))
        else:
            new._low, new._high = moved(self._low, new._device), moved(self._high, new._device)
        return new

    def _rearranged(self, shape: torch.Size, op: Rearrange) -> Self:
        new = super()._rearranged(shape, op)
        if self._scalars is not None and self._low.numel():
            size, first = concrete(shape), (0,) * self._low.ndim
            new._low, new._high = self._low[first].expand(size), self._high[first].expand(size)
        else:
            new._low, new._high = op(self._low), op(self._high)
        return new

    def __eq__(self, other: object) -> bool:
        """Whether the other spec describes the same values on the same device."""
        if not super().__eq__(other) or not isinstance(other, IntervalSpec):
            return False
        if self._scalars is not None and other._scalars is not None:
            return self._scalars == other._scalars
        return same(self._low, other._low) and same(self._high, other._high)

    __hash__ = None  # type: ignore[assignment]


class Bounded(IntervalSpec):
    """Numbers between `low` and `high`, both included, or without a bound where it is infinite.

    `rand` is uniform; where a bound is infinite it draws as Gymnasium's `Box.sample` does.

    Args:
        low: the lower bound, a number or an array-like that broadcasts to `shape`.
        high: the upper bound, the same.
        shape: the shape of a value; by default that of the bounds, which must then have one.
        device: the device of a value; by default that of `low` if it is a tensor.
        dtype: any number dtype; by default that of the bounds if they are tensors or arrays, else float32.

    Raises:
        ValueError: the bounds have no shape, do not fit it, do not fit the dtype, or exclude every value.

    >>> from aioenvs.specs import Bounded
    >>> spec = Bounded(-1, 1, shape=(3,))
    >>> spec
    Bounded(low=-1.0, high=1.0, shape=(3,), dtype=float32, device=cpu)
    >>> spec.rand((2,)).shape, spec.is_in(spec.rand((2,)))
    (torch.Size([2, 3]), True)
    """

    _whole_numbers = False

    @dtype_or_device_first(3)
    def __init__(
        self,
        low: Any,
        high: Any,
        shape: Iterable[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = dtype or _bounds_dtype(low, high)
        if dtype == torch.bool or dtype.is_complex:
            raise ValueError(f"expected the dtype of a number for Bounded, found {dtype}")
        if device is None and isinstance(low, torch.Tensor):
            device = low.device
        low, high = _as_bound("low", low, dtype), _as_bound("high", high, dtype)
        if shape is None:
            shape = np.broadcast_shapes(low.shape, high.shape)
            if not shape:
                raise ValueError("Bounded with scalar bounds needs a shape, such as shape=(1,) or shape=()")
        super().__init__(shape, dtype, device)
        _check_bounds(low, high, self._shape)
        self._bound(low, high)

    @property
    def low(self) -> torch.Tensor:
        """The lower bounds, of the spec's shape: a view, not to be written to, but it may be replaced."""
        return super().low

    @low.setter
    def low(self, bound: Any) -> None:
        self._replace_bounds(bound, self.high)

    @property
    def high(self) -> torch.Tensor:
        """The upper bounds, of the spec's shape: a view, not to be written to, but it may be replaced."""
        return super().high

    @high.setter
    def high(self, bound: Any) -> None:
        self._replace_bounds(self.low, bound)

    def _replace_bounds(self, low: Any, high: Any) -> None:
        low, high = (_as_bound(name, b, self._dtype).to(CPU) for name, b in (("low", low), ("high", high)))
        _check_bounds(low, high, self._shape)
        self._bound(low, high)

    def cardinality(self) -> int | float:
        """Return infinity, whatever the dtype, as TorchRL does."""
        return math.inf

    def rand(self, shape: Lead = ()) -> torch.Tensor:
        """Return a random value of shape `(*shape, *self.shape)`."""
        if not self._dtype.is_floating_point:
            value: torch.Tensor = super().rand(shape)
            return value
        size = self._size(shape)
        if not self._finite:
            return draw_unbounded(self._low, self._high, size)
        low, high = self._scalars or (0, math.inf)
        if high - low > torch.finfo(self._dtype).max:
            return draw_floats(self._low, self._high, size)
        value = torch.empty(size, dtype=self._dtype, device=self._device).uniform_(low, high)
        return value.clamp_(low, high)  # the rounding of the last bit could lead out of the interval

    def project(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value clamped to the bounds (NaN counts as 0), see `TensorSpec.project`."""
        if not self._dtype.is_floating_point:
            return super().project(value)
        value = self._fitted(value).to(self._dtype).nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
        return value.clamp(self._low.to(value.device), self._high.to(value.device))

    def _details(self) -> list[str]:
        return [f"low={_bounds_text(self.low)}", f"high={_bounds_text(self.high)}"]


def _bounds_dtype(low: Any, high: Any) -> torch.dtype:
    for bound in (low, high):
        if isinstance(bound, torch.Tensor):
            return bound.dtype
        if isinstance(bound, np.ndarray):
            return torch.from_numpy(np.empty(0, bound.dtype)).dtype
    return torch.get_default_dtype()


def _as_bound(name: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a bound as a tensor, unless an integer dtype cannot hold it."""
    array = value.detach() if isinstance(value, torch.Tensor) else np.array(value)
    if dtype.is_floating_point:
        try:
            return torch.as_tensor(array).to(dtype, copy=True)
        except TypeError:
            raise ValueError(f"expected a number or an array of numbers as {name}, found {shown(value)}") from None
    if isinstance(value, torch.Tensor | np.ndarray):
        tensor = torch.as_tensor(array)
        if not tensor.is_floating_point():
            check_dtype(tensor, tensor, dtype)
            return tensor.to(dtype, copy=True)
    return _whole(name, np.array(value, dtype=object), dtype)


def _whole(name: str, numbers: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return Python numbers as integers; an infinite one becomes the extreme of the dtype."""
    info = torch.iinfo(dtype)
    extremes = {math.inf: info.max, -math.inf: info.min}

    def whole(number: Any) -> int:
        if number in extremes:
            return extremes[number]
        if int(number) != number:
            raise ValueError(number)
        return int(number)

    try:
        integers = [whole(number) for number in numbers.ravel().tolist()]
    except (TypeError, ValueError):
        raise ValueError(
            f"expected whole numbers as {name} of {dtype_name(dtype)}, found {numbers.tolist()!r}"
        ) from None
    if integers:
        _check_range(min(integers), max(integers), dtype)
    return torch.from_numpy(np.array(integers, dtype=numpy_dtype(dtype)).reshape(numbers.shape))


def _check_bounds(low: torch.Tensor, high: torch.Tensor, shape: torch.Size) -> None:
    for name, bound in (("low", low), ("high", high)):
        if not broadcasts(bound.shape, concrete(shape)):
            raise ValueError(f"expected a {name} that broadcasts to {tuple(shape)}, found {tuple(bound.shape)}")
    if low.dtype in NO_COMPARISON:
        low, high = as_ordered(low), as_ordered(high)
    proper = low <= high
    if low.is_floating_point():
        proper = proper & (low < math.inf) & (high > -math.inf)
    if not bool(proper.all()):
        raise ValueError(f"expected low <= high, found low={low.tolist()!r} and high={high.tolist()!r}")


def check_dtype(low: torch.Tensor, high: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless the dtype, if one of integers, can hold the bounds."""
    if low.numel() and not dtype.is_floating_point:
        _check_range(_aminmax(low)[0], _aminmax(high)[1], dtype)


def _check_range(lowest: float, highest: float, dtype: torch.dtype) -> None:
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not least <= lowest <= highest <= most:
        raise ValueError(f"{dtype_name(dtype)} cannot hold the values from {lowest} to {highest}")


def _aminmax(bound: torch.Tensor) -> tuple[Any, Any]:
    """Return the least and the greatest element as Python numbers."""
    bound = compact(bound)
    if bound.dtype in NO_COMPARISON:
        values = bound.flatten().tolist()
        return min(values), max(values)
    lowest, highest = (extreme.item() for extreme in bound.aminmax())
    return (int(lowest), int(highest)) if bound.dtype == torch.bool else (lowest, highest)


def _bounds_text(bound: torch.Tensor) -> str:
    if bound.is_meta:
        return "..."
    stored = compact(bound)
    if stored.numel() == 1:
        return str(stored.flatten().tolist()[0])
    if stored.numel() <= 6:
        return str(stored.tolist())
    lowest, highest = _aminmax(stored)
    return f"{lowest}..{highest}"


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

    _whole_numbers = False

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
