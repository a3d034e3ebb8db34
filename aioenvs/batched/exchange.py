"""Between the pool's arrays and TensorDicts: what a request carries in, and what a result carries out.

Nothing that leaves here looks into the shared block: a whole region is copied once, as bytes, and its tensors
are views of that copy; some rows are copied leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from aioenvs.engine.host import Outcome
from aioenvs.engine.layout import Arrays, Key
from aioenvs.engine.metadata import ACTION, DONE_KEYS, NEXT, REWARD_KEY, ROOT
from aioenvs.engine.pool import Pool
from aioenvs.engine.spaces import Objects, integer_range
from aioenvs.errors import SpecMismatchError

__all__ = ["Actions", "Exchange", "Rows", "Values", "nest", "stack_objects"]

# Where the latest values of an env are: in the region of its last step or of its last reset, or, after a step that may
# have been followed by a reset, in the one that the `done` of the step says.
IN_NEXT, WHERE_DONE_SAYS, IN_ROOT = 0, 1, 2

Rows = NDArray[np.intp] | None  # None means all of them
Actions = dict[Key, Any]  # arrays, or a list of objects
Values = dict[Key, Any]  # tensors, or a list of objects


class Exchange:
    """Reads and writes the rows of one pool.

    Besides the arrays it knows each env's latest values: those of its last step, or of a reset that came later.
    """

    def __init__(self, pool: Pool, device: torch.device | None) -> None:
        self.num_envs = pool.num_envs
        self._arrays = pool.arrays
        self._objects = pool.metadata.objects
        self._action_leaves = [_ActionLeaf(key, array, pool, device) for key, array in pool.arrays[ACTION].items()]
        self._random = {key: pool.metadata.spaces[ACTION][key] for key in self._objects[ACTION]}
        self._packed = {region: _Packed(pool, region) for region in (NEXT, ROOT)}
        self._home = np.full(pool.num_envs, IN_ROOT, np.uint8)
        self._latest_objects: list[Objects] = [{} for _ in range(pool.num_envs)]

    # -- in ---------------------------------------------------------------------------------------------

    def check_actions(self, td: TensorDictBase, entries: Mapping[str, Any]) -> Actions:
        """The whole batch of actions, checked; nothing is written yet.

        Args:
            td: What the step was given.
            entries: Its entries.

        Raises:
            SpecMismatchError: If a key is missing, or a value has the wrong shape, dtype, device or range.
        """
        values: Actions = {leaf.key: leaf.check(td, entries) for leaf in self._action_leaves}
        for key in self._objects[ACTION]:
            values[key] = self._object_list(td, key)
        return values

    def check_root(self, td: TensorDictBase) -> None:
        """Refuse root entries from which rows that are not asked could not be taken over.

        Raises:
            SpecMismatchError: If one has another kind, shape or dtype than the envs' own.
        """
        for key, array in self._arrays[ROOT].items():
            value = td.get(_path(key), None)
            if value is None:
                continue
            expected = f"{array.dtype} of shape {array.shape}"
            if not isinstance(value, torch.Tensor):
                raise SpecMismatchError(f"{_path(key)!r}: expected {expected}, found {type(value).__name__}")
            found = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
            if found != expected:
                raise SpecMismatchError(f"{_path(key)!r}: expected {expected}, found {found}; no env was asked")

    def _object_list(self, td: TensorDictBase, key: Key) -> list[Any]:
        value = td.get(_path(key), None)
        if value is None or isinstance(value, torch.Tensor):
            raise _missing(td, key, value)
        objects = value if isinstance(value, list) else value.tolist()
        if not isinstance(objects, list) or len(objects) != self.num_envs:
            raise _mismatch(key, f"{self.num_envs} values, one per env", repr(objects))
        return objects

    def write_actions(self, values: Actions, rows: Rows) -> dict[int, Objects] | None:
        """Store checked actions; returns those without a fixed shape, by env."""
        for key, target in self._arrays[ACTION].items():
            if rows is None:
                target[...] = values[key]
            else:
                target[rows] = values[key][rows]
        loose = self._objects[ACTION]
        if not loose:
            return None
        return {env: {key: values[key][env] for key in loose} for env in self._indices(rows)}

    # -- out --------------------------------------------------------------------------------------------

    def after_reset(self, rows: Rows, outcome: Outcome) -> None:
        """Note that these envs were reset."""
        self._home[_index(rows)] = IN_ROOT
        for env, regions in outcome.objects.items():
            self._latest_objects[env] = regions[ROOT]

    def before_step(self, rows: Rows, *, maybe_reset: bool) -> None:
        """Note that these envs are about to step, whatever comes of it."""
        self._home[_index(rows)] = WHERE_DONE_SAYS if maybe_reset else IN_NEXT

    def step_result(self, rows: Rows, outcome: Outcome) -> Values:
        """The outcome of a step, by key; rows that were not stepped hold their latest values and no reward."""
        for env, regions in outcome.objects.items():
            self._latest_objects[env] = regions[NEXT]
        arrays = self._packed[NEXT].copy()
        if rows is not None:
            others = np.ones(self.num_envs, np.bool_)
            others[rows] = False
            arrays[REWARD_KEY][others] = 0
            self._replace(arrays, np.flatnonzero(others & self._in_root()))
        return self._values(arrays)

    def root_result(self, following: Values, outcome: Outcome) -> Values:
        """The root of the next step: what came of the last one, except where the env was reset since."""
        rows = self._in_root().nonzero()[0]
        if not len(rows):
            return {key: value for key, value in following.items() if key != REWARD_KEY}
        for env in rows.tolist():
            if env in outcome.objects:
                self._latest_objects[env] = outcome.objects[env][ROOT]
        return self._merged(rows)

    def _in_root(self) -> NDArray[np.bool_]:
        """Which envs had a reset after their last step."""
        done = self._arrays[NEXT][DONE_KEYS[0]].reshape(-1)
        # By the numbers: IN_NEXT + done < WHERE_DONE_SAYS + done, which reaches IN_ROOT only where done is true.
        in_root: NDArray[np.bool_] = self._home + done >= IN_ROOT
        return in_root

    def latest(self) -> Values:
        """What is known of every env: the values after its last step or reset."""
        mask = self._in_root()
        return self._values(self._packed[ROOT].copy()) if mask.all() else self._merged(np.flatnonzero(mask))

    def _merged(self, rows: NDArray[np.intp]) -> Values:
        """The values of the last step, or, in these rows, of the reset after it."""
        arrays = self._packed[NEXT].copy()
        del arrays[REWARD_KEY]
        self._replace(arrays, rows)
        return self._values(arrays)

    def _replace(self, arrays: Arrays, rows: NDArray[np.intp]) -> None:
        for key, source in self._arrays[ROOT].items():
            arrays[key][rows] = source[rows]

    def _values(self, arrays: Arrays) -> Values:
        values: Values = {key: torch.from_numpy(array) for key, array in arrays.items()}
        for key in self._objects[ROOT]:
            values[key] = [objects.get(key) for objects in self._latest_objects]
        return values

    def _indices(self, rows: Rows) -> Iterable[int]:
        return range(self.num_envs) if rows is None else rows.tolist()

    def random_objects(self) -> dict[Any, NonTensorStack]:
        """Samples of the action spaces without a fixed shape, from generators seeded by torch's."""
        for space in self._random.values():
            space.seed(int(torch.randint(2**31, ())))
        return {
            _path(key): stack_objects([space.sample() for _ in range(self.num_envs)])
            for key, space in self._random.items()
        }


class _Packed:
    """Copies a region as one run of bytes, by a plan that is made once."""

    def __init__(self, pool: Pool, region: str) -> None:
        place = pool.layout.regions[region]
        count = pool.num_envs
        whole = next(iter(pool.arrays[region].values()))
        self._source = _bytes_behind(whole)[place.offset : place.offset + place.nbytes]
        self._plan = [
            (item.leaf.key, (count, *item.leaf.shape), np.dtype(item.leaf.dtype), item.offset) for item in place.places
        ]

    def copy(self) -> Arrays:
        copy = self._source.copy()
        return {key: np.ndarray(shape, dtype, copy, offset) for key, shape, dtype, offset in self._plan}


class _ActionLeaf:
    """What one action must be, worked out once."""

    def __init__(self, key: Key, target: NDArray[Any], pool: Pool, device: torch.device | None) -> None:
        self._device = device
        self.key = key
        self._path = _path(key)
        self._shape = torch.Size(target.shape)
        self._dtype = torch.from_numpy(np.zeros((), target.dtype)).dtype
        self._bounds = integer_range(pool.metadata.spaces[ACTION][key])

    def check(self, td: TensorDictBase, entries: Mapping[str, Any]) -> NDArray[Any]:
        value = entries.get(self._path) if isinstance(self._path, str) else td.get(self._path, None)
        if not isinstance(value, torch.Tensor):
            raise _missing(td, self.key, value)
        if value.shape != self._shape:
            raise _mismatch(self.key, f"shape {tuple(self._shape)}", f"shape {tuple(value.shape)}")
        if value.dtype is not self._dtype:
            raise _mismatch(self.key, f"dtype {self._dtype}", f"dtype {value.dtype}")
        if not value.is_cpu:
            value = self._fetched(value)
        array: NDArray[Any] = (value.detach() if value.requires_grad else value).numpy()
        if self._bounds is not None and array.size:
            self._check_range(array, *self._bounds)
        return array

    def _fetched(self, value: torch.Tensor) -> torch.Tensor:
        if self._device is None or self._device.type != value.device.type:
            raise _mismatch(self.key, f"a tensor on {self._device or 'the cpu'}", f"one on {value.device}")
        return value.cpu()

    def _check_range(self, array: NDArray[Any], low: Any, high: Any) -> None:
        outside = (array < low) | (array >= high)
        if np.count_nonzero(outside):
            env = int(np.argwhere(outside)[0][0])
            expected = f"integers from {np.min(low)} to {np.max(high) - 1}"
            raise _mismatch(self.key, expected, f"{array[env]} for env {env}")


def _bytes_behind(array: NDArray[Any]) -> NDArray[np.uint8]:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return np.frombuffer(base, np.uint8)


def _index(rows: Rows) -> Any:
    return slice(None) if rows is None else rows


def nest(values: Values) -> dict[str, Any]:
    """Turn `{("a", "b"): tensor}` into `{"a": {"b": tensor}}`."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        entry = value if type(value) is torch.Tensor else stack_objects(value)
        if len(key) == 1:
            nested[key[0]] = entry
            continue
        branch = nested
        for name in key[:-1]:
            branch = branch.setdefault(name, {})
        branch[key[-1]] = entry
    return nested


def stack_objects(values: Sequence[Any]) -> NonTensorStack:
    """Arbitrary objects as one entry of a TensorDict, one per env."""
    return NonTensorStack(*[NonTensorData(value) for value in values])


def _path(key: Key) -> Any:
    return key[0] if len(key) == 1 else key


def _missing(td: TensorDictBase, key: Key, value: Any) -> SpecMismatchError:
    found = f"the keys {sorted(map(str, td.keys(True, True)))!r}" if value is None else type(value).__name__
    return _mismatch(key, "a value for every env, as rand_action(td) would set", found)


def _mismatch(key: Key, expected: str, found: str) -> SpecMismatchError:
    return SpecMismatchError(f"action {_path(key)!r}: expected {expected}, found {found}; no env was stepped")
