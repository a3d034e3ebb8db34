"""The spec of a Gymnasium space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .specs import Binary, Bounded, Categorical, MultiCategorical, NonTensor, TensorSpec, Unbounded
from .specs.base import DeviceLike

if TYPE_CHECKING:
    import gymnasium


def leaf_spec(space: gymnasium.Space[Any], device: DeviceLike | None = None) -> TensorSpec:
    """Return the spec of the values of a space that contains no other spaces.

    Integers stay integers: `Discrete` becomes `Categorical`, not `OneHot`. What has no fixed shape
    (Text, Sequence, Graph, OneOf and spaces unknown here) becomes `NonTensor` of shape ().

    Args:
        space: any space but Dict and Tuple.
        device: the device of the spec.

    Returns:
        The spec; its `encode` and `to_numpy` convert the space's values.

    Raises:
        TypeError: the space is a Dict or a Tuple, or no space at all.

    >>> from gymnasium.spaces import Box, Discrete
    >>> leaf_spec(Discrete(3, start=1))
    Categorical(n=3, start=1, shape=(), dtype=int64, device=cpu)
    >>> leaf_spec(Box(0, 255, (2, 2), dtype="uint8"))
    Bounded(low=0, high=255, shape=(2, 2), dtype=uint8, device=cpu)
    """
    from gymnasium import Space, spaces

    match space:
        case spaces.Box():
            return _box_spec(space, device)
        case spaces.Discrete():
            return Categorical(int(space.n), (), _dtype(space), device, start=int(space.start))
        case spaces.MultiDiscrete():
            return MultiCategorical(space.nvec, space.shape, _dtype(space), device, start=space.start)
        case spaces.MultiBinary():
            return Binary(shape=space.shape, dtype=_dtype(space), device=device)
        case spaces.Dict() | spaces.Tuple():
            raise TypeError(f"expected a space that contains no other spaces, found {space!r}")
        case Space():
            return NonTensor((), device)
        case _:
            raise TypeError(f"expected a gymnasium space, found {space!r}")


def _box_spec(space: gymnasium.spaces.Box, device: DeviceLike | None) -> TensorSpec:
    dtype = _dtype(space)
    if dtype == torch.bool:
        return Binary(shape=space.shape, dtype=dtype, device=device)
    if dtype.is_floating_point and np.isneginf(space.low).all() and np.isposinf(space.high).all():
        return Unbounded(space.shape, dtype, device)
    return Bounded(space.low, space.high, space.shape, dtype, device)


def _dtype(space: gymnasium.Space[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, space.dtype)).dtype
