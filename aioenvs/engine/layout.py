"""What lies where in the one shared block. Pure: no I/O, no asyncio, no torch.

A *leaf* is one named array of fixed shape and dtype; every env has one of each. A *region* is a group of
leaves that is copied as a whole, each leaf being stored for all envs one after the other, so that a batch is
contiguous and a region is one run of bytes:

    region "next":  observation[env 0] observation[env 1] ... | reward[env 0] reward[env 1] ... | ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Key", "Layout", "Leaf", "Place", "Region"]

Key = tuple[str, ...]
Arrays = dict[Key, NDArray[Any]]
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Leaf:
    """One named array of an env.

    Attributes:
        key: Path from the root, as in a nested TensorDict.
        dtype: numpy's name of the dtype.
        shape: Shape for one env.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes for one env."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf and the offset of its first byte within its region."""

    leaf: Leaf
    offset: int


@dataclass(frozen=True, slots=True)
class Region:
    """Leaves that are copied together.

    Attributes:
        offset: Where the region begins in the block.
        nbytes: Its size, alignment included.
    """

    offset: int
    nbytes: int
    places: tuple[Place, ...]

    def views(self, buffer: Any, num_envs: int, base: int = 0) -> Arrays:
        """Arrays `(num_envs, *shape)` over a buffer whose byte `base` is the region's first."""
        return {
            place.leaf.key: np.ndarray(
                (num_envs, *place.leaf.shape), np.dtype(place.leaf.dtype), buffer, base + place.offset
            )
            for place in self.places
        }


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each region, and in it each leaf of each env, lies in the block; `end` is the first byte behind."""

    num_envs: int
    regions: Mapping[str, Region]
    end: int

    @classmethod
    def of(cls, num_envs: int, leaves: Mapping[str, Iterable[Leaf]], offset: int = 0) -> Layout:
        """Lay out the given leaves for `num_envs` envs, from this byte of the block on.

        Raises:
            ValueError: If a region names a key twice, or a dtype has no fixed size.
        """
        regions: dict[str, Region] = {}
        for name, members in leaves.items():
            places, nbytes = _place(name, num_envs, members)
            regions[name] = Region(offset, nbytes, places)
            offset += nbytes
        return cls(num_envs, regions, offset)

    def arrays(self, buffer: Any) -> dict[str, Arrays]:
        """Arrays `(num_envs, *shape)` over the whole block, by region and key."""
        return {name: region.views(buffer, self.num_envs, region.offset) for name, region in self.regions.items()}


def _place(region: str, num_envs: int, leaves: Iterable[Leaf]) -> tuple[tuple[Place, ...], int]:
    places: dict[Key, Place] = {}
    offset = 0
    for leaf in leaves:
        if leaf.key in places:
            raise ValueError(f"region {region!r} has the key {leaf.key!r} twice")
        if np.dtype(leaf.dtype).hasobject or not np.dtype(leaf.dtype).itemsize:
            raise ValueError(f"{leaf.key!r} has the dtype {leaf.dtype!r}, which has no fixed size")
        places[leaf.key] = Place(leaf, offset)
        offset += -(-leaf.nbytes * num_envs // ALIGNMENT) * ALIGNMENT
    return tuple(places.values()), offset
