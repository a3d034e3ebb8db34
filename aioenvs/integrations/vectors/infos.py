"""The infos of many envs as one, as Gymnasium documents it. Pure.

Every key of an env's info has an array with a place for each env, and a mask `_key` of those that have the key. Numbers
and arrays share an array of their dtype where that changes none of them; nested dicts are batched in turn; anything
else is in an array of objects, as it is, with None for envs that do not have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["batch_infos"]

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
