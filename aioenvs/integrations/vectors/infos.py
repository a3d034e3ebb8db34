"""The infos of many envs as one, as Gymnasium documents it. Pure.

Every key of an env's info has an array with a place for each env, and a mask `_key` of those that have the key. Numbers
and arrays share an array of their dtype where that changes none of them; nested dicts are batched in turn; anything
else is in an array of objects, as it is, with None for envs that do not have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["batch_infos"]

NUMBERS = (int, float, np.number)


def batch_infos(infos: Mapping[int, Mapping[str, Any]], num_envs: int) -> dict[str, Any]:
    """Batch the infos of some envs, by index.

    >>> batch_infos({0: {"lives": 3}, 2: {"lives": 2.5}}, 3)
    {'lives': array([3. , 0. , 2.5]), '_lives': array([ True, False,  True])}
    """
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for env, info in infos.items():
        for key, value in info.items():
            envs, values = found.setdefault(key, ([], []))
            envs.append(env)
            values.append(value)
    batched: dict[str, Any] = {}
    for key, (envs, values) in found.items():
        mask = np.zeros(num_envs, np.bool_)
        mask[envs] = True
        batched[key] = _batched(key, envs, values, num_envs)
        batched[f"_{key}"] = mask
    return batched


def _batched(key: str, envs: Sequence[int], values: Sequence[Any], num_envs: int) -> Any:
    if key == "final_obs":
        return _objects(envs, values, num_envs)
    first = type(values[0])
    alike = all(type(value) is first for value in values)
    if alike and first is bool:
        return _filled(envs, values, num_envs, (), np.dtype(np.bool_))
    if all(isinstance(value, dict) for value in values):
        return batch_infos(dict(zip(envs, values, strict=True)), num_envs)
    if all(isinstance(value, NUMBERS) and not isinstance(value, bool) for value in values):
        return _numbers(envs, values, num_envs)
    if all(isinstance(value, np.ndarray) and value.shape == values[0].shape for value in values):
        return _arrays(envs, values, num_envs)
    return _objects(envs, values, num_envs)


def _numbers(envs: Sequence[int], values: Sequence[Any], num_envs: int) -> NDArray[Any]:
    """Numbers in an array of the dtype that holds them all, if there is one."""
    dtype = np.result_type(*{np.dtype(type(value)) for value in values})
    try:
        filled = _filled(envs, values, num_envs, (), dtype)
    except OverflowError:
        return _objects(envs, values, num_envs)
    kept = all(_same(filled[env].item(), value) for env, value in zip(envs, values, strict=True))
    return filled if kept else _objects(envs, values, num_envs)


def _same(kept: Any, value: Any) -> bool:
    exact = value.item() if isinstance(value, np.number) else value  # numpy compares integers as floats
    return bool(kept == exact) or exact != exact


def _arrays(envs: Sequence[int], values: Sequence[NDArray[Any]], num_envs: int) -> NDArray[Any]:
    """Arrays of one shape in one of the dtype that holds them all, if there is one."""
    dtypes = {value.dtype for value in values}
    if len(dtypes) == 1:
        return _filled(envs, values, num_envs, values[0].shape, values[0].dtype)
    if all(dtype.kind in "iuf" for dtype in dtypes):
        dtype = np.result_type(*dtypes)
        if all(np.can_cast(own, dtype, "safe") and _is_exact(own, dtype) for own in dtypes):
            return _filled(envs, values, num_envs, values[0].shape, dtype)
    return _objects(envs, values, num_envs)


def _is_exact(own: np.dtype[Any], common: np.dtype[Any]) -> bool:
    """Whether all values of a dtype are values of a wider one; int64 counts as part of float64 for numpy alone."""
    return not (own.kind in "iu" and common.kind == "f" and own.itemsize >= common.itemsize)


def _filled(
    envs: Sequence[int], values: Sequence[Any], num_envs: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    array = np.zeros((num_envs, *shape), dtype)
    for env, value in zip(envs, values, strict=True):
        array[env] = value
    return array


def _objects(envs: Sequence[int], values: Sequence[Any], num_envs: int) -> NDArray[Any]:
    array = np.full(num_envs, None, object)
    for env, value in zip(envs, values, strict=True):
        array[env] = value
    return array
