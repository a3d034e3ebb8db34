"""Batches of numpy arrays and infos, structured as Gymnasium's spaces are, and the rows of the envs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters.base import FINAL
from aioenvs.engine.adapters.copying import received
from aioenvs.engine.adapters.spaces import (
    Objects,
    Reader,
    children,
    conform,
    flatten,
    is_outside,
    observation_key,
    reader,
)
from aioenvs.engine.layout import NEXT, Arrays, Key
from aioenvs.engine.rows import FamilyRows, Values
from aioenvs.errors import SpecMismatchError, shown
from aioenvs.integrations.vectors.parts import Parts

__all__ = ["ActionBatch", "ActionTypeError", "Inputs", "ObservationBatch", "batch_infos"]


ACTION: Key = ("action",)

Inputs = list[Any]  # for each leaf of the action space an array, or a list with one value per env


class ObservationBatch:
    """Makes batches of observations of the values of envs, all of one structure.

    Args:
        space: The observation space of one env.
        rows: The rows of all envs.
        parts: What these consist of.
        copy: Whether each batch has arrays of its own, rather than those of the one before.
    """

    def __init__(self, space: Any, rows: FamilyRows, parts: Parts, *, copy: bool) -> None:
        key = observation_key(space)
        self._space, self._key, self._parts = space, key, parts
        self._next = parts.flat_arrays(rows.halves[0][NEXT])
        leaves = flatten(space, key)
        self._keys = [leaf.key for leaf in leaves]
        self._has_loose = any(leaf.leaf is None for leaf in leaves)
        self._is_plain = children(space) is None and not self._has_loose
        self._kept = None if copy else {own: np.empty_like(self._next[own]) for own in self._keys if own in self._next}
        self._readers: dict[int, Reader] = {}

    def batch(self, values: Values) -> Any:
        """The batch, in the structure of Gymnasium's batched space: tuples of what has no fixed shape."""
        values = self._parts.flat_arrays(values)
        if self._kept is not None:
            for key, kept in self._kept.items():
                kept[...] = values[key]
            values = values | self._kept
        if self._is_plain:
            return values[self._key]
        return _assembled(self._space, self._key, lambda key: _as_batch(values[key]))

    def one(self, values: Values, env: int) -> Any:
        """The observation of one env in a batch."""
        values = self._parts.flat_arrays(values)
        return _assembled(self._space, self._key, lambda key: _own(values[key][env]))

    def final(self, env: int, objects: Objects) -> Any:
        """The last observation of an env's episode, which its own reset has not touched, as the env had it."""
        if FINAL in objects:
            return objects[FINAL]
        if self._has_loose:
            return reader(self._space, self._key, self._next, objects, env)()
        read = self._readers.get(env)
        if read is None:
            read = self._readers[env] = reader(self._space, self._key, self._next, {}, env)
        return read()


def _as_batch(values: Any) -> Any:
    return tuple(values) if isinstance(values, list) else values


def _own(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _assembled(space: Any, key: Key, leaf: Callable[[Key], Any]) -> Any:
    """A value of the space's structure, of what each leaf has."""
    members = children(space)
    if members is None:
        return leaf(key)
    values = {name: _assembled(child, (*key, str(name)), leaf) for name, child in members}
    return values if hasattr(space, "keys") else tuple(values.values())


class ActionTypeError(SpecMismatchError, TypeError):
    """Actions have none for each env: a `TypeError`, as it is for the vector envs of Gymnasium and SB3."""


class _ActionForm(NamedTuple):
    """The form of the actions of all envs at a key, which have a place in their rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class ActionBatch:
    """Checks batches of actions, and brings them to the rows of the envs, all of one structure.

    Args:
        space: The action space of one env.
        arrays: The rows for the input of all envs.
        parts: What these consist of.
        by_env: Whether a sequence with the action of each env will do, too, where the space is a Dict or Tuple; what
            could be either is that.
    """

    def __init__(self, space: Any, arrays: Arrays, parts: Parts, *, by_env: bool = False) -> None:
        self._num_envs, self._parts = parts.count, parts
        self._has_form = _form(space)
        self._by_env = by_env and children(space) is not None
        self._leaves: list[tuple[Key, tuple[Any, ...], _ActionForm | None]] = []
        self._add(space, ACTION, (), parts.flat_arrays(arrays))
        self._plain = self._leaves[0][2] if children(space) is None else None

    def _add(self, space: Any, key: Key, path: tuple[Any, ...], arrays: Arrays) -> None:
        members = children(space)
        if members is None:
            array = arrays.get(key)
            self._leaves.append((key, path, None if array is None else _ActionForm(array.shape, array.dtype)))
        for name, child in members or ():
            self._add(child, (*key, str(name)), (*path, name), arrays)

    def check(self, actions: Any) -> Inputs:
        """The leaves of a batch of actions.

        Raises:
            SpecMismatchError: If there is not one for each env, or they are of the wrong structure, shape or dtype.
        """
        plain = self._plain
        if (
            plain is not None
            and type(actions) is np.ndarray
            and actions.shape == plain.shape
            and actions.dtype == plain.dtype
        ):
            return [actions]
        if self._by_env and self._are_by_env(actions):
            columns = [[_member(action, path) for action in actions] for _, path, _ in self._leaves]
        else:
            columns = [self._column(actions, key, path) for key, path, _ in self._leaves]
        return [self._leaf(own, key, array) for own, (key, _, array) in zip(columns, self._leaves, strict=True)]

    def _are_by_env(self, actions: Any) -> bool:
        """Whether these are an action for each env."""
        return _is_sequence(actions) and len(actions) == self._num_envs and all(map(self._has_form, actions))

    def _column(self, actions: Any, key: Key, path: tuple[Any, ...]) -> Any:
        """Return the values of a leaf in a batch that has the structure of the space."""
        try:
            return _member(actions, path)
        except (KeyError, IndexError, TypeError) as error:
            kind = ActionTypeError if isinstance(error, TypeError) else SpecMismatchError
            either = ", or an action for each env" if self._by_env else ""
            raise self._mismatch(f"a batch at {key!r}{either}", actions, kind) from error

    def kept(self, inputs: Inputs) -> Inputs:
        """Copies of checked actions, which the caller may change before they are stored."""
        return [received(values) for values in inputs]

    def _leaf(self, values: Any, key: Key, form: _ActionForm | None) -> Any:
        kind = SpecMismatchError if _is_iterable(values) else ActionTypeError
        if form is not None:
            try:
                return conform(values, form.dtype, form.shape, key, "actions", whole=True)
            except SpecMismatchError as error:
                raise kind(f"{_lead(kind, values)}{error}; no env was stepped") from error.__cause__
        if not isinstance(values, Sequence | np.ndarray) or len(values) != self._num_envs:
            raise self._mismatch(f"{self._num_envs} values at {key!r}, one per env", values, kind)
        return list(values)

    def _mismatch(
        self, expected: str, found: Any, kind: type[SpecMismatchError] = SpecMismatchError
    ) -> SpecMismatchError:
        return kind(f"{_lead(kind, found)}actions: expected {expected}, found {shown(found)}; no env was stepped")

    def values(self, inputs: Inputs) -> Values:
        """Checked actions, as rows take them."""
        of_hosted = self._parts.of_hosted
        if self._plain is not None:
            return {ACTION: of_hosted(inputs[0])}
        return {key: of_hosted(values) for (key, _, _), values in zip(self._leaves, inputs, strict=True)}


def _member(value: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        value = value[name]
    return value


def _lead(kind: type[SpecMismatchError], values: Any) -> str:
    """Gymnasium's words for what has no action for each env."""
    return f"Unable to iterate over the following elements: {shown(values)}; " if kind is ActionTypeError else ""


def _is_iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True


def _is_sequence(value: Any) -> bool:
    return value.ndim > 0 if isinstance(value, np.ndarray) else isinstance(value, list | tuple)


def _form(space: Any) -> Callable[[Any], bool]:
    """Whether a value has the members and shapes of one of the space; whether its numbers fit is another matter."""
    members = children(space)
    if members is None:
        leaf = flatten(space, ())[0].leaf
        return functools.partial(_is_one, space) if leaf is None else functools.partial(_is_shaped, leaf.shape)
    forms = {name: _form(child) for name, child in members}
    return functools.partial(_is_whole, forms, Mapping if hasattr(space, "keys") else None)


def _is_one(space: Any, value: Any) -> bool:
    return not is_outside(space, value)


def _is_shaped(shape: tuple[int, ...], value: Any) -> bool:
    try:
        found = np.asarray(value)
    except ValueError:  # it is ragged
        return False
    return found.shape == shape and found.dtype.kind in "biuf"


def _is_whole(forms: Mapping[Any, Callable[[Any], bool]], kind: type | None, value: Any) -> bool:
    if not (_is_sequence(value) if kind is None else isinstance(value, kind)) or len(value) != len(forms):
        return False
    return all((kind is None or name in value) and has_form(value[name]) for name, has_form in forms.items())


NUMBERS = frozenset((int, float))
TIMES = (np.timedelta64,)  # which numpy counts as numbers, but each has a unit of its own


def batch_infos(infos: Mapping[int, Mapping[str, Any]], num_envs: int) -> dict[str, Any]:
    """Batch the infos of some envs, by index.

    >>> batch_infos({0: {"lives": 3}, 2: {"lives": 2.5}}, 3)
    {'lives': array([3. , 0. , 2.5]), '_lives': array([ True, False,  True])}
    """
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for env in sorted(infos):
        for key, value in infos[env].items():
            if key not in found:
                found[key] = ([], [])
            envs, values = found[key]
            envs.append(env)
            values.append(value)
    batched: dict[str, Any] = {}
    for key, (envs, values) in found.items():
        places = slice(None) if len(envs) == num_envs else envs
        mask = np.zeros(num_envs, np.bool_)
        mask[places] = True
        batched[key] = _Batch(envs, places, values, num_envs).array(key)
        batched[f"_{key}"] = mask
    return batched


class _Batch(NamedTuple):
    """The values that some envs have under a key.

    Attributes:
        envs: Which, ascending.
        places: What selects them in an array of all.
        values: One for each.
        num_envs: How many envs there are in all.
    """

    envs: list[int]
    places: slice | list[int]
    values: list[Any]
    num_envs: int

    def array(self, key: str) -> Any:
        """All of them in one array, or as a dict of such."""
        types = set(map(type, self.values))
        if key == "final_obs":
            return self._objects()
        if types == {bool}:
            return self._filled((), np.dtype(np.bool_))
        if all(kind in NUMBERS or (issubclass(kind, np.number) and not issubclass(kind, TIMES)) for kind in types):
            return self._numbers(types)
        if all(issubclass(kind, dict) for kind in types):
            return batch_infos(dict(zip(self.envs, self.values, strict=True)), self.num_envs)
        if types == {np.ndarray} and len({value.shape for value in self.values}) == 1:
            return self._arrays()
        return self._objects()

    def _numbers(self, types: set[type]) -> NDArray[Any]:
        """Numbers in an array of the dtype that holds them all, if there is one."""
        try:
            filled = self._filled((), np.result_type(*map(np.dtype, types)))
        except OverflowError:
            return self._objects()
        if len(types) == 1 or all(map(_same, filled[self.places].tolist(), self.values)):
            return filled
        return self._objects()

    def _arrays(self) -> NDArray[Any]:
        """Arrays of one shape in one of the dtype that holds them all, if there is one."""
        dtypes = {value.dtype for value in self.values}
        shape = self.values[0].shape
        if len(dtypes) == 1:
            return self._filled(shape, self.values[0].dtype)
        if all(dtype.kind in "iuf" for dtype in dtypes):
            common = np.result_type(*dtypes)
            if all(np.can_cast(own, common, "safe") and _is_exact(own, common) for own in dtypes):
                return self._filled(shape, common)
        return self._objects()

    def _filled(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        array = np.zeros((self.num_envs, *shape), dtype)
        array[self.places] = self.values
        return array

    def _objects(self) -> NDArray[Any]:
        array = np.full(self.num_envs, None, object)
        for env, value in zip(self.envs, self.values, strict=True):
            array[env] = value
        return array


def _same(kept: Any, value: Any) -> bool:
    exact = value.item() if isinstance(value, np.number) else value  # numpy compares integers as floats
    return bool(kept == exact) or exact != exact


def _is_exact(own: np.dtype[Any], common: np.dtype[Any]) -> bool:
    """Whether all values of a dtype are values of a wider one; int64 counts as part of float64 for numpy alone."""
    return not (own.kind in "iu" and common.kind == "f" and own.itemsize >= common.itemsize)
