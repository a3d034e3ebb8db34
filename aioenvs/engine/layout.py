"""The shared block: what an env says of itself, families of envs of one structure, and what lies where.

Pure: no I/O, no asyncio, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aioenvs.errors import SpecMismatchError, shown

__all__ = [
    "HALVES",
    "INPUT",
    "IN_NEXT",
    "IN_ROOT",
    "LATEST",
    "NEXT",
    "ROOT",
    "STATUS",
    "WRITE_HALF",
    "WRITE_ROOT",
    "EnvMetadata",
    "Family",
    "Key",
    "Layout",
    "Leaf",
    "Place",
    "Region",
    "check_unchanged",
    "families_among",
    "find_collision",
    "form_families",
    "interned",
]


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


T = TypeVar("T")

INPUT = "input"
NEXT = "next"
ROOT = "root"

# Results have two halves, so that one can be looked at while the other is written: the regions of each.
HALVES = ({NEXT: NEXT, ROOT: ROOT}, {NEXT: "next'", ROOT: "root'"})

# A region of the engine's own. LATEST says in which region an env has its latest values, and, times two, in which half:
# only the env's own side writes it, when they are complete, so that it holds whatever became of the reply. WRITE_HALF
# says in which half its next command writes, and with WRITE_ROOT that a step writes the root, too, also where there is
# no reset: only the parent writes it (`aioenvs.engine.double_buffer`), while the env is not at work; what hosts the env
# looks it up with each command.
STATUS = "status"
LATEST: Key = ("where",)
IN_ROOT, IN_NEXT = 0, 1
WRITE_HALF: Key = ("turn",)
WRITE_ROOT = 2


@dataclass(frozen=True)
class EnvMetadata:
    """The description of one env.

    Attributes:
        name: How the env calls itself, for messages.
        leaves: Fixed-shape leaves by region: `input` goes in; `next` comes out of a step; `root` out of a reset.
        objects: By region, the keys of values that travel as objects behind the frames, since they have no fixed shape,
            each with what is known of the values all the same.
        reward_keys: Those of `next` that are rewards.
        done_keys: Those of `next` that say together whether the episode of the env, or of a part of it, is over.
        specs: What the values may be, in the terms of whoever wrote the env: by kind, then by key.
        takes_root: Whether a reset reads what the caller knows of the env: masks, states, former values.
        shows_root: Whether a step is shown the whole root that the caller has of the env, as an object of its input.
        free_states: Whether states are taken as TorchRL takes them: those that are missing stay what they were, and
            others are brought into form.
        num_seeds: How many seeds of a chain the env uses up; more than one if it consists of several.
        kinds: What else must be the same for values to be stacked: their dtypes, where arrays have others.
        has_coroutines: Whether its methods may be coroutine functions, so that it runs on an event loop.
    """

    name: str
    leaves: dict[str, tuple[Leaf, ...]]
    objects: dict[str, dict[Key, Any]]
    reward_keys: tuple[Key, ...]
    done_keys: tuple[Key, ...]
    specs: dict[str, Any]
    takes_root: bool = False
    shows_root: bool = False
    free_states: bool = False
    num_seeds: int = 1
    kinds: tuple[str, ...] = ()
    has_coroutines: bool = False

    @property
    def structure(self) -> Any:
        """The structure that envs must share for their values to be stored and stacked together."""
        return (
            tuple((region, leaves) for region, leaves in sorted(self.leaves.items())),
            tuple((region, tuple(objects.items())) for region, objects in sorted(self.objects.items())),
            self.reward_keys,
            self.done_keys,
            self.takes_root,
            self.shows_root,
            self.free_states,
            self.kinds,
        )


@dataclass(frozen=True)
class Family:
    """Envs of one structure, and where their values lie.

    Attributes:
        envs: Their indices, ascending; the n-th has row n of each array.
        metadata: What the first of them says of itself.
        layout: Where the leaves lie in the block.
    """

    envs: tuple[int, ...]
    metadata: EnvMetadata
    layout: Layout


def interned(values: Iterable[T]) -> list[T]:
    """Return the values with equal ones made one object, so that whoever comes next can go by identity."""
    distinct: list[T] = []
    shared = []
    for value in values:
        known = next((each for each in distinct if each is value or each == value), None)
        if known is None:
            known = value
            distinct.append(value)
        shared.append(known)
    return shared


def form_families(metadata: Sequence[EnvMetadata]) -> tuple[Family, ...]:
    """Group the envs by structure, in the order of their first members, and lay them out one family after the other."""
    members: dict[Any, list[int]] = {}
    previous, key = None, None
    for env, description in enumerate(metadata):
        if description is not previous:
            previous, key = description, description.structure
        members.setdefault(key, []).append(env)
    return _laid_out((envs, metadata[envs[0]]) for envs in members.values())


def families_among(families: Iterable[Family], envs: Iterable[int]) -> tuple[Family, ...]:
    """Return the families of these envs, laid out in a block of their own."""
    chosen = frozenset(envs)
    parts = (([env for env in family.envs if env in chosen], family.metadata) for family in families)
    return _laid_out((own, metadata) for own, metadata in parts if own)


def _laid_out(parts: Iterable[tuple[Sequence[int], EnvMetadata]]) -> tuple[Family, ...]:
    families: list[Family] = []
    offset = 0
    for envs, metadata in parts:
        layout = Layout.of(len(envs), _with_slots(metadata.leaves), offset)
        offset = layout.end
        families.append(Family(tuple(envs), metadata, layout))
    return tuple(families)


def _with_slots(leaves: Mapping[str, tuple[Leaf, ...]]) -> dict[str, tuple[Leaf, ...]]:
    """All regions of a family; the two of one half are neighbours, so that they can be copied in one go."""
    regions = {region: own for region, own in leaves.items() if region not in HALVES[0]}
    for half in HALVES:
        regions |= {name: leaves[region] for region, name in half.items() if region in leaves}
    return {**regions, STATUS: (Leaf(LATEST, "|u1", ()), Leaf(WRITE_HALF, "|u1", ()))}


def check_unchanged(env: int, expected: EnvMetadata, found: EnvMetadata) -> None:
    """Check that an env which was built anew is what it was before.

    Raises:
        SpecMismatchError: If it is not, naming what differs.
    """
    if found.structure != expected.structure or found.specs != expected.specs:
        what, before, now = _difference("", expected.specs, found.specs) or ("structure", expected.name, found.name)
        raise SpecMismatchError(
            f"env {env} was built anew and differs from what it was: expected {shown(before)} as {what}, found "
            f"{shown(now)}; a factory must always make the same kind of env"
        )


def _difference(path: str, expected: Any, found: Any) -> tuple[str, Any, Any] | None:
    """Where two nested mappings first differ, and what each has there."""
    if expected == found:
        return None
    if not (isinstance(expected, Mapping) and isinstance(found, Mapping)):
        return path, expected, found
    for key in [*expected, *found]:
        if key not in expected or key not in found:
            return f"{path} keys".strip(), sorted(map(str, expected)), sorted(map(str, found))
        difference = _difference(f"{path} {key!r}".strip(), expected[key], found[key])
        if difference is not None:
            return difference
    return None


def find_collision(observation: Sequence[Key], reserved: Sequence[Key]) -> Key | None:
    """The first observation key that hides, or is hidden by, a reserved one."""
    for key in observation:
        for other in reserved:
            if key[: len(other)] == other or other[: len(key)] == key:
                return key
    return None
