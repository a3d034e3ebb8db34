"""Arithmetic with shapes, dims and indices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch


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
