"""The outputs of envs of one family, wherever each has its latest values: known, counted, copied, looked at, sent."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.double_buffer import DoubleBuffer
from aioenvs.engine.layout import HALVES, IN_ROOT, INPUT, LATEST, NEXT, ROOT, STATUS, Arrays, EnvMetadata, Family
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.faces.batch_specs import EnvSpecs
from aioenvs.faces.rows.inputs import Bounds, Rows, selector
from aioenvs.specs import NonTensor
from aioenvs.tensors.device import Transfer, typed
from aioenvs.tensors.trees import Key, Tree, non_tensor, region_trees

__all__ = ["Ledger", "Lent", "Reader", "placed"]


class Ledger:
    """The knowledge of one family's envs besides the arrays: latest values without a row, action spaces, counts.

    Args:
        family: The family.
        arrays: Its arrays.
        buffers: In which half its envs have and write their values.
        metadata: What each of its envs says of itself.
    """

    def __init__(
        self, family: Family, arrays: dict[str, Arrays], buffers: DoubleBuffer, metadata: Sequence[EnvMetadata]
    ) -> None:
        self.family = family
        self.inputs = arrays[INPUT]
        self.halves = tuple({region: arrays[name] for region, name in half.items()} for half in HALVES)
        self.buffers = buffers
        self.place = {env: place for place, env in enumerate(family.envs)}
        self.where = arrays[STATUS][LATEST]
        self.memory = _bytes_behind(self.where)
        self.spaces = [copy.deepcopy(each.specs.get("action", {})) for each in metadata]
        self.objects: list[Objects] = [{} for _ in family.envs]
        self.done = [
            [own[NEXT][key].reshape(len(family.envs), -1) for key in family.metadata.done_keys if key in own[NEXT]]
            for own in self.halves
        ]
        # What says of each env whether it is done, where one flag for each does.
        self.flags = [own[0][:, 0] if len(own) == 1 and own[0].shape[1] == 1 else None for own in self.done]
        self.rounds = 0  # steps of all of them together, which are counted apart from the others
        self.steps = np.zeros(len(family.envs), np.int64)
        self.episodes = np.zeros(len(family.envs), np.int64)
        self.specs = EnvSpecs.of(family.metadata)
        self.trees = region_trees(self.specs.output_spec, self.specs.input_spec)
        self.input_objects = [key for key, spec in self.trees[INPUT].leaves.items() if isinstance(spec, NonTensor)]
        # Inputs that may be missing, and those of them that are observations as well.
        states = Tree.of(self.specs.full("state")).leaves if family.metadata.free_states else {}
        self.free_states = frozenset(states)
        self.observed_states = frozenset(
            key
            for key, spec in states.items()
            if (own := self.trees[ROOT].leaves.get(key)) is not None
            and (own.shape, own.dtype) == (spec.shape, spec.dtype)
        )
        self.bounds = {
            key: Bounds.of([own.get(key) for own in self.spaces], len(spec.shape))
            for key, spec in self.trees[INPUT].leaves.items()
        }
        others = Tree.of(self.specs.full("observation"), self.specs.full("reward")).leaves
        self.done_leaves = frozenset(key for key in self.trees[ROOT].entries if key not in others)
        # Leaves that are kept under another dtype, since numpy does not have theirs.
        self.foreign = {
            region: [
                (key, dtype)
                for key, array in leaves.items()
                if (dtype := self.trees[region].leaves[key].dtype) is not torch.from_numpy(array[:0]).dtype
            ]
            for region, leaves in {INPUT: self.inputs, **self.halves[0]}.items()
        }

    def finished(self) -> NDArray[np.bool_]:
        """For each env whether its last step ended an episode."""
        if self.buffers.plain:
            flags = self._flags(0)
        else:
            one, other = (self._flags(half) for half in range(len(HALVES)))
            first = self.buffers.halves(slice(None)) == 0
            flags = None if one is None or other is None else np.where(first, one, other)
        if flags is not None:
            return flags
        keys, known = self.family.metadata.done_keys, self.objects
        return np.array([any(bool(own[key].any()) for key in keys if key in own) for own in known], np.bool_)

    def _flags(self, half: int) -> NDArray[np.bool_] | None:
        """Return which envs are finished, by the flags in one half; None if there are no such flags."""
        flag, done = self.flags[half], self.done[half]
        if flag is None and done:
            flag = np.logical_or.reduce([own.any(1) for own in done])
        return flag

    def count(self, places: Any, outcome: Outcome) -> None:
        """Count the steps that came back, and the episodes that ended with them.

        Args:
            places: What selects the envs that were stepped among those of the family; None for all.
            outcome: What came of it.
        """
        chosen: Any = slice(None) if places is None else places
        if not outcome.failures and not outcome.lost:
            if places is None:
                self.rounds += 1
            else:
                self.steps[chosen] += 1
            if outcome.finished:
                self.episodes[chosen] += self.finished()[chosen]
            return
        finished = self.finished()
        for place in np.arange(len(self.steps))[chosen].tolist():
            env = self.family.envs[place]
            if env not in outcome.failures:
                self.steps[place] += 1
                self.episodes[place] += env in outcome.lost or finished[place]

    def counts(self, places: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many steps came back from each of these envs, and how many of them ended an episode."""
        return tuple((self.steps[places] + self.rounds).tolist()), tuple(self.episodes[places].tolist())

    def random_objects(self, places: Sequence[int]) -> list[Objects]:
        """For each of these envs samples of its action spaces without a fixed shape; see `Exchange.random_objects`."""
        sampled: list[Objects] = [{} for _ in places]
        for key in self.input_objects:
            depth = self.trees[INPUT].leaves[key].ndim
            for own, place in zip(sampled, places, strict=True):
                spaces = self.spaces[place]
                if key in spaces:
                    spaces[key].seed(int(torch.randint(2**31, ())))
                    own[key] = non_tensor(spaces[key].sample(), depth)
        return sampled

    def store(self, region: str, key: Key, targets: Any, values: NDArray[Any]) -> None:
        """Write rows of a region; of an output, to the half in which the env itself writes next."""
        if region == INPUT:
            self.inputs[key][targets] = values
            return
        chosen = self.buffers.target(targets)
        for half, own in enumerate(self.halves):
            places = np.arange(len(self.family.envs))[targets][chosen == half]
            own[region][key][places] = values[chosen == half]


def _bytes_behind(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The whole buffer into which an array looks."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return np.frombuffer(base, np.uint8)


FEW = 4  # rows which numpy copies more quickly one by one than as a selection


class Lent(dict[Key, Any]):
    """Values that are where the envs wrote them.

    Attributes:
        half: In which half.
        region: In which region of it.
    """

    def __init__(self, values: Mapping[Key, Any], half: int, region: str) -> None:
        super().__init__(values)
        self.half = half
        self.region = region


class _HalfBytes:
    """The regions of one half as one run of bytes, and what is where in it."""

    def __init__(self, ledger: Ledger, half: int) -> None:
        regions = {region: ledger.family.layout.regions[name] for region, name in HALVES[half].items()}
        self._first = regions[NEXT].offset
        self._ends = {region: own.offset - self._first + own.nbytes for region, own in regions.items()}
        self._bytes = torch.from_numpy(ledger.memory[self._first : self._first + max(self._ends.values())])
        count = len(ledger.family.envs)
        self._plans = {
            region: [
                (item.leaf.key, own.offset - self._first + item.offset, dtype, torch.Size([count, *item.leaf.shape]))
                for item in own.places
                if (dtype := ledger.trees[region].leaves[item.leaf.key].dtype) is not None
            ]
            for region, own in regions.items()
        }

    def upto(self, region: str) -> torch.Tensor:
        """The bytes from the beginning of the half to the end of a region."""
        return self._bytes[: self._ends[region]]

    def of(self, region: str) -> torch.Tensor:
        """The bytes of a region alone, which are the last of the half or the first."""
        return self._bytes[: self._ends[region]] if region == NEXT else self._bytes[self._ends[NEXT] :]

    def values(self, region: str, copy: torch.Tensor, *, alone: bool) -> dict[Key, torch.Tensor]:
        """Return the tensors of a region in a copy of these bytes.

        Args:
            region: Which.
            copy: Of what `of` has if `alone`, else of what `upto` has.
            alone: See `copy`.
        """
        base = self._ends[NEXT] if alone and region == ROOT else 0
        return {key: typed(copy, offset - base, dtype, shape) for key, offset, dtype, shape in self._plans[region]}


class _PackedRegion:
    """Copies a region of one half as one run of bytes, by a plan that is made once."""

    def __init__(self, ledger: Ledger, half: int, region: str) -> None:
        place = ledger.family.layout.regions[HALVES[half][region]]
        count = len(ledger.family.envs)
        self._source = ledger.memory[place.offset : place.offset + place.nbytes]
        self._plan = [
            (item.leaf.key, (count, *item.leaf.shape), np.dtype(item.leaf.dtype), item.offset) for item in place.places
        ]

    def copy(self) -> Arrays:
        copy = self._source.copy()
        return {key: np.ndarray(shape, dtype, copy, offset) for key, shape, dtype, offset in self._plan}


class Reader:
    """Reads the outputs of some envs of one family.

    Args:
        ledger: The family.
        members: Which of its envs, by their place in it, in the order of the batch; None for all.
    """

    def __init__(self, ledger: Ledger, members: Rows) -> None:
        self._ledger = ledger
        self._buffer = ledger.buffers
        self._members = members
        self._all = selector(members)
        self._packed = (
            [{region: _PackedRegion(ledger, half, region) for region in (NEXT, ROOT)} for half in range(len(HALVES))]
            if members is None
            else []
        )

    def in_root(self) -> NDArray[np.bool_]:
        """Which envs had a reset after their last step, or no step yet."""
        where = self._ledger.where
        in_root: NDArray[np.bool_] = (where if self._buffer.plain else where & 1) == IN_ROOT
        return in_root if self._members is None else in_root[self._all]

    def half(self) -> int | None:
        """In which half all of these envs have their latest values; None if they cannot be looked at as one array."""
        return self._buffer.half(self._all) if isinstance(self._all, slice) else None

    def look(self, region: str, half: int) -> Arrays:
        """A region of these envs as it is in a half, without being copied."""
        return dict(self._looks[half][region])

    @functools.cached_property
    def _looks(self) -> list[dict[str, list[tuple[Key, NDArray[Any]]]]]:
        """The regions of envs that follow each other, where they are."""
        return [
            {region: [(key, array[self._all]) for key, array in own[region].items()] for region in (NEXT, ROOT)}
            for own in self._ledger.halves
        ]

    def copy(self, region: str) -> Arrays:
        """A region of these envs, as it is where each has its latest values."""
        if self._buffer.plain:
            return self._packed[0][region].copy() if self._members is None else self._copied(region, 0)
        half = self._buffer.half(self._all)
        arrays = self._copied(region, half or 0)
        if half is None:
            second = np.flatnonzero(self._buffer.halves(self._all))
            self._fill(arrays, region, 1, second)
        return arrays

    def _copied(self, region: str, half: int) -> Arrays:
        if self._members is None:
            return self._packed[half][region].copy()
        if isinstance(self._all, slice):
            return {key: array.copy() for key, array in self._looks[half][region]}
        return {key: array[self._all] for key, array in self._ledger.halves[half][region].items()}

    def replace(self, arrays: Arrays, rows: NDArray[np.intp]) -> None:
        """Replace these rows by those of the root."""
        if self._buffer.plain:
            self._fill(arrays, ROOT, 0, rows)
            return
        halves = self._buffer.halves(self._targets(rows))
        for half in range(len(HALVES)):
            self._fill(arrays, ROOT, half, rows[halves == half])

    def _fill(self, arrays: Arrays, region: str, half: int, rows: NDArray[np.intp]) -> None:
        """Replace these rows by those of a region in a half."""
        sources = self._targets(rows)
        leaves = self._ledger.halves[half][region].items()
        if len(rows) > FEW:
            for key, source in leaves:
                arrays[key][rows] = source[sources]
            return
        for row, place in zip(rows.tolist(), sources.tolist(), strict=True):
            for key, source in leaves:
                arrays[key][row] = source[place]

    def _targets(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        return rows if self._members is None else self._members[rows]

    def place(
        self, transfer: Transfer, following: Mapping[Key, Any] | None, root: Mapping[Key, Any] | None
    ) -> tuple[Any, Any]:
        """Bring results to the device of a transfer.

        What is lent by all envs of the family goes as it is in the block, in one run, with a fence before its half;
        anything else in one copy of what it has.

        Args:
            transfer: Where to.
            following: What came of a step.
            root: What came of it for the next one, or of a reset.
        """
        lent = [each for each in (following, root) if isinstance(each, Lent)]
        if (
            not lent
            or self._members is not None
            or any(self._ledger.family.metadata.objects[each.region] for each in lent)
        ):
            return placed(transfer, following, root)
        half, bytes_ = lent[0].half, self._slot_bytes[lent[0].half]
        alone = len(lent) == 1
        copy, fence = transfer.bring(bytes_.of(lent[0].region) if alone else bytes_.upto(ROOT))
        self._buffer.guard(self._all, half, fence)
        moved = {id(each): bytes_.values(each.region, copy, alone=alone) for each in lent}
        arrived = {id(own[key]): moved[id(own)][key] for own in lent for key in own}
        results = [
            None if each is None else {key: arrived.get(id(value), value) for key, value in each.items()}
            for each in (following, root)
        ]
        return results[0], results[1]

    @functools.cached_property
    def _slot_bytes(self) -> list[_HalfBytes]:
        return [_HalfBytes(self._ledger, half) for half in range(len(HALVES))]


def placed(transfer: Transfer, *results: Any) -> tuple[Any, ...]:
    """Results on the device of a transfer: values, lists of values with one entry per env, or None."""
    tensors: list[torch.Tensor] = []
    for each in results:
        for values in each if isinstance(each, list) else [each or {}]:
            for value in values.values():
                tensors += [item for item in _items(value) if isinstance(item, torch.Tensor)]
    if not tensors:
        return results
    moved = {id(old): new for old, new in zip(tensors, transfer.place(tensors), strict=True)}
    return tuple(_exchanged(each, moved) for each in results)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else (value,)


def _exchanged(result: Any, moved: Mapping[int, torch.Tensor]) -> Any:
    """A result with other tensors, by the ids of what they were."""
    if isinstance(result, list):
        return [_exchanged(values, moved) for values in result]
    if result is None:
        return None
    return {
        key: [moved.get(id(item), item) for item in value] if isinstance(value, list) else moved.get(id(value), value)
        for key, value in result.items()
    }
