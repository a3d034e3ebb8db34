"""The rows of envs: written with what they are to do, read where each has its latest values, counted. Pure: numpy only.

A batch is a list of parts, one for each family of its envs; where all are of one family, a list of one. What leaves
here does not look into the shared block, unless it is lent: it is copied leaf by leaf, which is quicker than one copy
of a region with views of it, and keeps no memory for a leaf but its own. What travels as an object comes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters.base import CALLERS
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.double_buffer import DoubleBuffer
from aioenvs.engine.layout import HALVES, IN_ROOT, INPUT, LATEST, NEXT, ROOT, STATUS, Arrays, Family, Key
from aioenvs.engine.worker.env_host import Outcome

T = TypeVar("T")

RowIndex = NDArray[np.intp] | None  # None means all of them
Values = dict[Key, Any]  # an array for all envs, or a list of objects, one per env; None for an input that is missing

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


def selector(members: RowIndex) -> Any:
    """Return the index of these rows, a slice where they follow each other."""
    if members is None:
        return slice(None)
    first, last = int(members[0]), int(members[-1])
    if len(members) == 1 or (last - first == len(members) - 1 and (np.diff(members) == 1).all()):
        return slice(first, last + 1)
    return members


class FamilyRows:
    """The rows of all envs of one family, and what is known of the envs besides: latest objects, counts.

    Args:
        family: The family.
        arrays: Its arrays.
        buffers: In which half its envs have and write their values.
        free_states: Inputs that may be missing.
        observed_states: Those of them that are observations as well, which then take their place.
        flags: The keys of done flags.
        fill: Makes an object under a key, which may be None, one of its kind that holds but this number.

    Attributes:
        place: Of each env, its row.
        halves: The arrays of both halves, by region and key.
        memory: The bytes of the whole block.
        objects: Of each row the latest values without a place in it.
    """

    def __init__(
        self,
        family: Family,
        arrays: dict[str, Arrays],
        buffers: DoubleBuffer,
        *,
        free_states: frozenset[Key] = frozenset(),
        observed_states: frozenset[Key] = frozenset(),
        flags: frozenset[Key] = frozenset(),
        fill: Callable[[Key, Any, float], Any] = lambda key, value, filling: value,
    ) -> None:
        self.family = family
        self.inputs = arrays[INPUT]
        self.halves = tuple({region: arrays[name] for region, name in half.items()} for half in HALVES)
        self.buffers = buffers
        self.place = {env: place for place, env in enumerate(family.envs)}
        self.where = arrays[STATUS][LATEST]
        self.memory = _bytes_behind(self.where)
        self.objects: list[Objects] = [{} for _ in family.envs]
        self.free_states = free_states
        self.observed_states = observed_states
        self.flags = flags
        self.fill = fill
        loose = family.metadata.objects
        self.loose = {region: tuple(loose[region]) for region in (INPUT, NEXT, ROOT)}
        self.loose_inputs = (*self.loose[INPUT], *((CALLERS,) if family.metadata.shows_root else ()))
        self._done = [
            [own[NEXT][key].reshape(len(family.envs), -1) for key in family.metadata.done_keys if key in own[NEXT]]
            for own in self.halves
        ]
        # What says of each env whether it is done, where one flag for each does.
        self._single = [own[0][:, 0] if len(own) == 1 and own[0].shape[1] == 1 else None for own in self._done]
        self._rounds = 0  # steps of all of them together, which are counted apart from the others
        self._steps = np.zeros(len(family.envs), np.int64)
        self._episodes = np.zeros(len(family.envs), np.int64)

    def store(self, region: str, key: Key, targets: Any, values: NDArray[Any]) -> None:
        """Write rows of a region; of an output, to the half in which the env itself writes next."""
        if region == INPUT:
            self.inputs[key][targets] = values
            return
        chosen = self.buffers.target(targets)
        for half, own in enumerate(self.halves):
            places = np.arange(len(self.family.envs))[targets][chosen == half]
            own[region][key][places] = values[chosen == half]

    # -- counts -----------------------------------------------------------------------------------------

    def finished(self) -> NDArray[np.bool_]:
        """For each env whether its last step ended an episode."""
        flags: NDArray[np.bool_] | None
        if self.buffers.plain:
            flags = self._single[0]
            flags = self._finished_in(0) if flags is None else flags
        else:
            one, other = (self._finished_in(half) for half in range(len(HALVES)))
            first = self.buffers.halves(slice(None)) == 0
            flags = None if one is None or other is None else np.where(first, one, other)
        if flags is not None:
            return flags
        keys, known = self.family.metadata.done_keys, self.objects
        return np.array([any(bool(own[key].any()) for key in keys if key in own) for own in known], np.bool_)

    def _finished_in(self, half: int) -> NDArray[np.bool_] | None:
        """Return which envs are finished, by the flags in one half; None if there are no such flags."""
        flag, done = self._single[half], self._done[half]
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
                self._rounds += 1
            else:
                self._steps[chosen] += 1
            if outcome.finished:
                self._episodes[chosen] += self.finished()[chosen]
            return
        finished = self.finished()
        for place in np.arange(len(self._steps))[chosen].tolist():
            env = self.family.envs[place]
            if env not in outcome.failures:
                self._steps[place] += 1
                self._episodes[place] += env in outcome.lost or finished[place]

    def counts(self, places: Any) -> tuple[list[int], list[int]]:
        """How many steps came back from each of these envs, and how many of them ended an episode."""
        return (self._steps[places] + self._rounds).tolist(), self._episodes[places].tolist()


def _bytes_behind(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The whole buffer into which an array looks."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return np.frombuffer(base, np.uint8)


class Part:
    """The rows of those envs of a batch that are of one family.

    Args:
        own: The family's rows.
        envs: Their indices, in the order of the batch.
        members: Which of the family's they are; None for all.
        places: Where the envs are in the batch, ascending.
    """

    def __init__(self, own: FamilyRows, envs: tuple[int, ...], members: RowIndex, places: NDArray[np.intp]) -> None:
        self.own = own
        self.members = members
        self.places = places
        self.all = selector(members)
        self.envs = envs
        self._buffers = own.buffers
        self._rewards = own.family.metadata.reward_keys

    def targets(self, rows: RowIndex) -> Any:
        """Return what selects these rows of the part among those of the family."""
        if rows is None:
            return self.all
        return rows if self.members is None else self.members[rows]

    # -- in ---------------------------------------------------------------------------------------------

    def decide(self, rows: RowIndex, lends: bool, whole: bool) -> None:
        """Say where the envs in these rows write next; see `Rows.decide`."""
        lends = lends and rows is None and isinstance(self.all, slice)
        self._buffers.decide(self.targets(rows), lends=lends, whole=lends and whole)

    def write(self, values: Values, rows: RowIndex) -> dict[int, Objects] | None:
        """Store inputs; see `Rows.write`."""
        own = self.own
        for key, target in own.inputs.items():
            value = values[key]
            if value is None and (key not in own.observed_states or (value := self.latest()[key]) is None):
                continue  # it stays what it was
            if rows is None and self.members is None:
                target[...] = value
            else:
                target[self.targets(rows)] = value if rows is None else value[rows]
        if not own.loose_inputs:
            return None
        loose, free = [key for key in own.loose_inputs if values[key] is not None], own.free_states
        return {
            self.envs[row]: {key: value for key in loose if (value := values[key][row]) is not None or key not in free}
            for row in (range(len(self.envs)) if rows is None else rows.tolist())
        }

    # -- out --------------------------------------------------------------------------------------------

    def in_root(self) -> NDArray[np.bool_]:
        """Which envs had a reset after their last step, or no step yet."""
        where = self.own.where
        in_root: NDArray[np.bool_] = (where if self._buffers.plain else where & 1) == IN_ROOT
        return in_root if self.members is None else in_root[self.all]

    def note(self, outcome: Outcome, region: str) -> bool:
        """Keep the objects of a region as the latest; whether there were any."""
        noted = False
        for env in outcome.objects.keys() & self.envs if len(outcome.objects) < len(self.envs) else self.envs:
            regions = outcome.objects.get(env)
            if regions is not None and region in regions and env not in outcome.failures:
                self.own.objects[self.own.place[env]] = regions[region]
                noted = True
        return noted

    def step(self, rows: RowIndex, outcome: Outcome, lends: bool) -> Values:
        """The outcome of a step, by key; rows that were not stepped hold their latest values and no reward."""
        if outcome.objects:
            self.note(outcome, NEXT)
        self.own.count(None if rows is None and self.members is None else self.targets(rows), outcome)
        if lends and rows is None and (lent := self._lend(NEXT)) is not None:
            self._buffers.lend(self.all)
            return lent
        arrays = self._copy(NEXT)
        if rows is None:
            return self._with_objects(NEXT, arrays) if self.own.loose[NEXT] else arrays
        others = np.ones(len(self.envs), np.bool_)
        others[rows] = False
        self._replace(arrays, np.flatnonzero(others & self.in_root()))
        values = self._with_objects(NEXT, arrays)
        for key in self._rewards:
            values[key] = self._filled(key, values[key], others, 0)
        return values

    def with_losses(self, following: Values, known: Values, outcome: Outcome) -> Values:
        """The outcome of a step in which some envs were lost: what was known of them before, truncated, no reward.

        Args:
            following: The outcome.
            known: What was known before the step.
            outcome: What came of the command; the lost envs have been reset since.
        """
        lost = np.isin(self.envs, list(outcome.lost))
        if not lost.any():
            return following
        if outcome.objects:
            self.note(outcome, ROOT)
        replaced: Values = {}
        for key, value in following.items():
            if key in self._rewards:
                replaced[key] = self._filled(key, value, lost, 0)
            elif key in self.own.flags:
                replaced[key] = self._filled(key, value, lost, key[-1] != "terminated")
            elif isinstance(value, list):
                replaced[key] = [old if row else new for row, old, new in zip(lost, known[key], value, strict=True)]
            else:
                replaced[key] = np.where(_beside(lost, value), known[key], value)
        return replaced

    def last_step(self) -> Values:
        """The outcome of the last step of each env."""
        return self._with_objects(NEXT, self._copy(NEXT))

    def root(self, following: Values, outcome: Outcome, lends: bool = False, apart: bool = False) -> Values:
        """The root of the next step: what came of the last one, except where the env was reset since.

        Args:
            following: What came of the last step.
            outcome: What came of the command.
            lends: Whether it may be lent.
            apart: Whether it is a copy in any case, rather than what came of the last step itself.
        """
        rows = self.in_root().nonzero()[0]
        noted = self.note(outcome, ROOT) if outcome.objects else False
        if not len(rows) and not noted:
            root = dict(following)
            for key in self._rewards:
                del root[key]
            if apart:
                return {key: value.copy() for key, value in root.items()}
            return root
        if lends and (lent := self._lend(ROOT)) is not None:
            return lent
        return self._merged(rows)

    def latest(self) -> Values:
        """Return the latest values of every env: those after its last step or reset."""
        mask = self.in_root()
        if mask.all():
            return self._with_objects(ROOT, self._copy(ROOT))
        return self._merged(np.flatnonzero(mask))

    def _merged(self, rows: NDArray[np.intp]) -> Values:
        """The values of the last step, or, in these rows, of the reset after it."""
        arrays = self._copy(NEXT)
        for key in self._rewards:
            arrays.pop(key, None)
        if self._buffers.plain:
            self._fill(arrays, ROOT, 0, rows)
        else:
            self._replace(arrays, rows)
        return self._with_objects(ROOT, arrays) if self.own.loose[ROOT] else arrays

    def _lend(self, region: str) -> Lent | None:
        """A region of these envs where it is, without being copied; None where it is not all in one place."""
        half = self._buffers.half(self.all) if isinstance(self.all, slice) else None
        if half is None:
            return None
        looks = {key: array[self.all] for key, array in self.own.halves[half][region].items()}
        return Lent(self._with_objects(region, looks), half, region)

    def _with_objects(self, region: str, arrays: Arrays) -> Values:
        values: Values = arrays
        if loose := self.own.loose[region]:
            objects = self.own.objects
            known = objects if self.members is None else [objects[member] for member in self.members.tolist()]
            for key in loose:
                values[key] = [own.get(key) for own in known]
        return values

    def _filled(self, key: Key, values: Any, rows: NDArray[np.bool_], filling: float) -> Any:
        """Values of the step with all of these rows the same."""
        if isinstance(values, list):
            fill = self.own.fill
            return [fill(key, value, filling) if row else value for value, row in zip(values, rows, strict=True)]
        filled = values.copy()
        filled[rows] = filling
        return filled

    def _copy(self, region: str) -> Arrays:
        """A region of these envs, as it is where each has its latest values."""
        if self._buffers.plain and self.members is None:
            return {key: array.copy() for key, array in self.own.halves[0][region].items()}
        if self._buffers.plain:
            return self._copied(region, 0)
        half = self._buffers.half(self.all)
        arrays = self._copied(region, half or 0)
        if half is None:
            self._fill(arrays, region, 1, np.flatnonzero(self._buffers.halves(self.all)))
        return arrays

    def _copied(self, region: str, half: int) -> Arrays:
        leaves = self.own.halves[half][region].items()
        if self.members is None:
            return {key: array.copy() for key, array in leaves}
        if isinstance(self.all, slice):
            return {key: array[self.all].copy() for key, array in leaves}
        return {key: array[self.all] for key, array in leaves}

    def _replace(self, arrays: Arrays, rows: NDArray[np.intp]) -> None:
        """Replace these rows by those of the root."""
        halves = self._buffers.halves(self.targets(rows))
        for half in range(len(HALVES)):
            self._fill(arrays, ROOT, half, rows[halves == half])

    def _fill(self, arrays: Arrays, region: str, half: int, rows: NDArray[np.intp]) -> None:
        """Replace these rows by those of a region in a half."""
        sources = rows if self.members is None else self.members[rows]
        leaves = self.own.halves[half][region].items()
        if len(rows) > FEW:
            for key, source in leaves:
                arrays[key][rows] = source[sources]
            return
        for row, place in zip(rows.tolist(), sources.tolist(), strict=True):
            for key, source in leaves:
                arrays[key][row] = source[place]


def _beside(rows: NDArray[np.bool_], values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows, in a shape that goes with these values."""
    return rows.reshape(-1, *[1] * (values.ndim - 1))


class Rows:
    """The rows of the envs of one batch.

    Args:
        envs: The envs, in the order of the batch.
        families: The rows of all families of the pool.

    Attributes:
        parts: Its parts; values are a list with those of each.
        takes_root: Whether a reset of the envs reads what the caller knows of them.
    """

    def __init__(self, envs: Sequence[int], families: Sequence[FamilyRows]) -> None:
        self.envs = tuple(envs)
        self.parts: list[Part] = []
        if len(families) == 1:
            self._add(families[0], np.arange(len(self.envs)))
        else:
            for own in families:
                places = np.array([place for place, env in enumerate(self.envs) if env in own.place], np.intp)
                if len(places):
                    self._add(own, places)
        self._whole = [(part, None) for part in self.parts]
        self.takes_root = any(part.own.family.metadata.takes_root for part in self.parts)

    def _add(self, own: FamilyRows, places: NDArray[np.intp]) -> None:
        envs = self.envs if len(places) == len(self.envs) else tuple(self.envs[place] for place in places.tolist())
        members = None if envs == own.family.envs else np.array([own.place[env] for env in envs], np.intp)
        self.parts.append(Part(own, envs, members, places))

    def local(self, rows: RowIndex) -> Iterable[tuple[Part, RowIndex]]:
        """Rows of the batch as rows of each part."""
        if rows is None:
            return self._whole
        if len(self.parts) == 1:
            return [(self.parts[0], rows)]
        return [(part, np.flatnonzero(np.isin(part.places, rows))) for part in self.parts]

    def decide(self, rows: RowIndex, lends: bool = False, whole: bool = False) -> None:
        """Say where the envs in these rows write next: a command is about to be sent to them, or none of them.

        Args:
            rows: Which.
            lends: Whether the results are to be lent, where that is possible.
            whole: Whether a step writes the root, too, also where there is no reset.
        """
        for part, local in self._whole if rows is None else self.local(rows):
            if lends or not part.own.buffers.plain:
                part.decide(local, lends, whole)

    def write(self, values: Sequence[Values], rows: RowIndex) -> dict[int, Objects] | None:
        """Store the checked inputs of each part for these rows; returns those without a place, by env."""
        if len(self.parts) == 1:
            return self.parts[0].write(values[0], rows)
        found = [part.write(own, local) for own, (part, local) in zip(values, self.local(rows), strict=True)]
        if all(each is None for each in found):
            return None
        loose: dict[int, Objects] = {env: {} for env in (self.envs if rows is None else self.named(rows))}
        for each in found:
            loose |= each or {}
        return loose

    def share(self, values: Sequence[Values], env: int) -> list[Values]:
        """Return the share that one env has of values of all parts, for whoever exchanges with it alone."""
        for part, own in zip(self.parts, values, strict=True):
            if env in part.envs:
                row = part.envs.index(env)
                return [{key: None if value is None else value[row : row + 1] for key, value in own.items()}]
        raise KeyError(env)

    def named(self, rows: NDArray[np.intp]) -> list[int]:
        """The envs in these rows."""
        return [self.envs[row] for row in rows.tolist()]

    def note_reset(self, outcome: Outcome) -> None:
        """Keep what came of a reset and has no place in the rows."""
        if outcome.objects:
            for part in self.parts:
                part.note(outcome, ROOT)

    def step(
        self,
        rows: RowIndex,
        outcome: Outcome,
        known: Sequence[Values] | None,
        *,
        maybe_reset: bool,
        lends: bool = False,
        apart: bool = False,
    ) -> tuple[list[Values], list[Values] | None]:
        """Return the outcome of a step, and the root for the next one if finished envs were reset.

        Args:
            rows: Which envs were stepped.
            outcome: What came of the command.
            known: What was known of them before, where some may be lost.
            maybe_reset: Whether finished ones were reset.
            lends: Whether the values may be looked at where they are, as was decided before.
            apart: Whether the two have no memory in common.
        """
        parts = self._whole if rows is None else self.local(rows)
        following = [part.step(local, outcome, lends) for part, local in parts]
        if outcome.lost:
            assert known is not None
            lost = zip(self.parts, following, known, strict=True)
            following = [part.with_losses(own, before, outcome) for part, own, before in lost]
        if not maybe_reset:
            return following, None
        parts_of = zip(self.parts, following, strict=True)
        return following, [part.root(own, outcome, lends, apart) for part, own in parts_of]

    def last_step(self) -> tuple[list[Values], list[Values]]:
        """The outcome of the last step of each env, which was counted, and the root for the next one."""
        following = [part.last_step() for part in self.parts]
        nothing = Outcome()
        return following, [part.root(own, nothing) for part, own in zip(self.parts, following, strict=True)]

    def latest(self) -> list[Values]:
        """Return the latest values of every env: those after its last step or reset."""
        return [part.latest() for part in self.parts]

    def count(self, outcome: Outcome) -> None:
        """Count the steps of all envs that came back, and the episodes that ended with them."""
        for part in self.parts:
            part.own.count(None if part.members is None else part.all, outcome)

    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many steps came back from each env, and how many of them ended an episode."""
        found = [part.own.counts(part.all) for part in self.parts]
        steps, episodes = (self.joined([each[index] for each in found]) for index in range(2))
        return tuple(steps), tuple(episodes)

    def joined(self, values: Sequence[Sequence[T]]) -> list[T]:
        """Return what each part has for its envs, in the order of the batch."""
        if len(self.parts) == 1:
            return list(values[0])
        joined: dict[int, T] = {}
        for part, own in zip(self.parts, values, strict=True):
            joined.update(zip(part.places.tolist(), own, strict=True))
        return [joined[place] for place in range(len(self.envs))]
