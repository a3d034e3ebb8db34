"""Gymnasium spaces as named leaves, and the functions that carry values between an env and its rows.

The naming rule: a Dict observation puts its keys at the root, a Tuple puts "0", "1", ... under its own name, a
nested container continues the path, and anything else is one leaf. Box, Discrete, MultiDiscrete and MultiBinary
have a fixed shape; every other space (Text, Sequence, Graph, OneOf, unknown ones) travels as an object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters.copying import copied
from aioenvs.engine.layout import Arrays, Key, Leaf, interned
from aioenvs.errors import SpecMismatchError, shown

__all__ = [
    "Alike",
    "Numbers",
    "Objects",
    "SpaceLeaf",
    "children",
    "conform",
    "flatten",
    "integer_range",
    "is_as_read",
    "is_outside",
    "observation_key",
    "reader",
    "writer",
]

PLAIN_INTEGERS = (int, np.int64)
BEYOND = np.float64(2**63)  # what int64 holds
FIXED = frozenset({"Box", "Discrete", "MultiDiscrete", "MultiBinary"})

Objects = dict[Key, Any]
Writer = Callable[[Any], None]
Reader = Callable[[], Any]


class SpaceLeaf(NamedTuple):
    """A non-container space and its key; `leaf` is None where its values have no fixed shape."""

    key: Key
    space: Any
    leaf: Leaf | None


class Numbers(NamedTuple):
    """Values of a fixed shape that no space describes, such as rewards.

    Attributes:
        dtype: Of numpy, by its name; bools are flags.
        shape: Of a value.
    """

    dtype: str
    shape: tuple[int, ...]


class Alike(NamedTuple):
    """Spaces whose values are the rows of one array, or of one list of objects.

    Attributes:
        spaces: One for each row, of the same shape and dtype; equal ones are one object.
    """

    spaces: tuple[Any, ...]

    @classmethod
    def of(cls, spaces: Iterable[Any]) -> Alike:
        """The spaces, of which equal ones are one object, so that they are sent as one."""
        return cls(tuple(interned(spaces)))

    @property
    def same(self) -> Any:
        """The space that all of them are; None if they differ."""
        first = self.spaces[0]
        return first if all(space is first or space == first for space in self.spaces) else None

    def seed(self, seed: int) -> None:
        """Seed them, each differently."""
        for place, space in enumerate({id(space): space for space in self.spaces}.values()):
            space.seed(seed + place)

    def sample(self) -> list[Any]:
        """A value for each row."""
        return [space.sample() for space in self.spaces]


def observation_key(space: Any) -> Key:
    """The path above an observation's members: empty for a Dict, whose keys stand at the root."""
    return () if _kind(space) == "Dict" else ("observation",)


def flatten(space: Any, key: Key) -> list[SpaceLeaf]:
    """Name the leaves of a space that stands at `key`."""
    members = children(space)
    if members is not None:
        return [leaf for name, child in members for leaf in flatten(child, (*key, str(name)))]
    if _kind(space) not in FIXED:
        return [SpaceLeaf(key, space, None)]
    dtype = np.dtype(space.dtype).newbyteorder("=")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise SpecMismatchError(
            f"{shown(space)} at {key!r} has the dtype {dtype}, which tensors do not have; use float64"
        )
    return [SpaceLeaf(key, space, Leaf(key, dtype.str, tuple(space.shape)))]


def children(space: Any) -> list[tuple[Any, Any]] | None:
    """The members of a Dict by key, or of a Tuple by number; None for any other space."""
    kind = _kind(space)
    if kind == "Dict":
        return list(space.spaces.items())
    if kind == "Tuple":
        return list(enumerate(space.spaces))
    return None


def _kind(space: Any) -> str | None:
    """The name of the Gymnasium space class that this one is, or derives from."""
    for cls in type(space).__mro__:
        if cls.__module__.startswith("gymnasium.spaces"):
            return cls.__name__
    return None


def integer_range(space: Any) -> tuple[Any, Any] | None:
    """The lowest value and one past the highest, of a space of choices; None for other spaces."""
    if isinstance(space, Alike):
        ranges = [integer_range(each) for each in space.spaces]
        known = [each for each in ranges if each is not None]
        if len(known) < len(ranges):
            return None
        return np.stack([low for low, _ in known]), np.stack([high for _, high in known])
    kind = _kind(space)
    if kind == "Discrete":
        return int(space.start), int(space.start) + int(space.n)
    if kind == "MultiDiscrete":
        return space.start, space.start + space.nvec
    if kind == "MultiBinary":
        return 0, 2
    return None


def is_outside(space: Any, value: Any) -> bool:
    """Whether a value that travels as an object is certainly none of the space: a text that is too long, or is none."""
    if isinstance(space, Alike):
        return len(value) != len(space.spaces) or any(map(is_outside, space.spaces, value))
    return _kind(space) == "Text" and not space.contains(value)


def writer(space: Any, key: Key, arrays: Arrays, objects: Objects, row: int, who: str = "") -> Writer:
    """A function that stores one value of the space: leaves into their row of `arrays`, the rest in `objects`.

    Args:
        space: The space.
        key: Where it stands.
        arrays: For the leaves of fixed shape.
        objects: For the others.
        row: Of the arrays.
        who: Whose values they are, for messages.

    Raises:
        SpecMismatchError: From that function, if a value has the wrong keys, length, shape or dtype.
    """
    members = children(space)
    if members is not None:
        parts = [(name, writer(child, (*key, str(name)), arrays, objects, row, who)) for name, child in members]
        return _container_writer(key, who, parts)
    array = arrays.get(key)
    if array is None:
        return lambda value: objects.__setitem__(key, copied(value))  # the env may reuse it
    return (_scalar_writer if _kind(space) == "Discrete" else _array_writer)(array, key, row, who)


def _container_writer(key: Key, who: str, parts: list[tuple[Any, Writer]]) -> Writer:
    def write(value: Any) -> None:
        try:
            members = [(store, value[name]) for name, store in parts]
            complete = len(value) == len(parts)
        except (KeyError, IndexError, TypeError):
            complete = False
        if not complete:
            names, where = [name for name, _ in parts], f"at {key!r}" if key else "as observation"
            raise SpecMismatchError(
                f"{_prefix(who)}expected a value with exactly the members {shown(names)} {where}, found {shown(value)}"
            )
        for store, member in members:
            store(member)

    return write


def _array_writer(array: NDArray[Any], key: Key, row: int, who: str) -> Writer:
    target = array[row, ...]
    dtype, shape, ndarray = target.dtype, target.shape, np.ndarray
    if target.ndim == 1:
        return _row_writer(target, key, who)

    def write(value: Any) -> None:
        if type(value) is not ndarray or value.shape != shape or value.dtype != dtype:
            value = conform(value, dtype, shape, key, who)
        target[...] = value

    return write


def _row_writer(target: NDArray[Any], key: Key, who: str) -> Writer:
    dtype, shape, ndarray = target.dtype, target.shape, np.ndarray
    memory: Any = target.data  # takes arrays of its own dtype and shape, no others, and twice as quickly as an array

    def write(value: Any) -> None:
        if type(value) is ndarray:
            try:
                memory[:] = value
            except ValueError:
                pass
            else:
                return
        target[...] = conform(value, dtype, shape, key, who)

    return write


def _scalar_writer(array: NDArray[Any], key: Key, row: int, who: str) -> Writer:
    dtype = array.dtype
    plain = dtype == np.int64

    def write(value: Any) -> None:
        try:
            array[row] = value if plain and type(value) in PLAIN_INTEGERS else conform(value, dtype, (), key, who)
        except OverflowError:
            conform(value, dtype, (), key, who)  # says what is wrong

    return write


def conform(
    value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], key: Key, who: str = "", *, whole: bool = False
) -> NDArray[Any]:
    """The value as an array of exactly this dtype and shape, if nothing is lost but float precision.

    Args:
        value: A number, or anything that numpy makes an array of.
        dtype: Which dtype.
        shape: Which shape.
        key: Where the value stands, for messages.
        who: Whose value it is, for messages.
        whole: Whether floats that are whole numbers may stand for integers, as those of a network do in actions.

    Raises:
        SpecMismatchError: If the shape differs, the kind differs (floats for integers), an integer does not fit,
            or a finite number overflows.
    """
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise _misfit(dtype, shape, key, who, f"a ragged {type(value).__name__}") from error
    if found.dtype.kind == "f" and dtype.kind == "u":
        found = _unsigned(value, found)
    kinds = "iuf" if whole else "iu"
    numbers = found.dtype.kind in kinds and dtype.kind in "iu"  # whether their values fit is seen below
    if found.shape != shape or not (numbers or np.can_cast(found.dtype, dtype, "same_kind")):
        what = shown(value) if found.dtype == object else f"{found.dtype} of shape {found.shape}"
        raise _misfit(dtype, shape, key, who, what)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = found.astype(dtype)
    if dtype.kind in "iu":
        # what is beyond becomes another number, which may be the same again as a float
        fits = np.array_equal(cast, found) and (found.dtype.kind != "f" or bool((abs(found) < BEYOND).all()))
    elif dtype.kind == "f":
        finite = np.isfinite(cast)
        fits = bool(finite.all()) or np.array_equal(finite, np.isfinite(found))
    else:
        fits = True
    if not fits:
        raise _misfit(dtype, shape, key, who, f"values of {found.dtype} that do not fit: {shown(value)}")
    return cast


def _misfit(dtype: np.dtype[Any], shape: tuple[int, ...], key: Key, who: str, found: str) -> SpecMismatchError:
    return SpecMismatchError(f"{_prefix(who)}expected {dtype} of shape {shape} at {key!r}, found {found}")


def _unsigned(value: Any, found: NDArray[Any]) -> NDArray[Any]:
    """Integers of Python as such, where numpy made floats of them since some are beyond int64; else as found."""
    exact = np.asarray(value, object)
    if all(type(number) is int and 0 <= number < 2**64 for number in exact.flat):
        return exact.astype(np.uint64)
    return found


def _prefix(who: str) -> str:
    return f"{who}: " if who else ""


def reader(space: Any, key: Key, arrays: Arrays, objects: Objects, row: int, *, scalars: bool = False) -> Reader:
    """A function that returns the value last stored for this env, as the space's own `sample` would.

    Args:
        space: The space.
        key: Where it stands.
        arrays: With the leaves of fixed shape.
        objects: With the others.
        row: Of the arrays.
        scalars: Whether numbers of a Box without dims are numpy's scalars, as iterating over a batch of them has it.
    """
    members = children(space)
    if members is not None:
        parts = [
            (name, reader(child, (*key, str(name)), arrays, objects, row, scalars=scalars)) for name, child in members
        ]
        if _kind(space) == "Tuple":
            return lambda: tuple(read() for _, read in parts)
        return lambda: {name: read() for name, read in parts}
    array = arrays.get(key)
    if array is None:
        return lambda: objects[key]
    if array.ndim == 1 and (scalars or _kind(space) == "Discrete"):
        return functools.partial(array.__getitem__, row)  # no call of Python's
    source = array[row, ...]
    return source.copy


def is_as_read(space: Any, value: Any) -> bool:
    """Whether a value of the space that was stored is read back as an object of the same types."""
    members = children(space)
    if members is not None:
        kind = tuple if _kind(space) == "Tuple" else dict
        return type(value) is kind and all(is_as_read(child, value[name]) for name, child in members)
    if _kind(space) not in FIXED:
        return True
    if _kind(space) == "Discrete":
        return type(value) is np.dtype(space.dtype).type
    return type(value) is np.ndarray and value.dtype == space.dtype
