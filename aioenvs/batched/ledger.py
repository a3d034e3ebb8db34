"""What is known of the envs of one family, which all who exchange with it share."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aioenvs.batched.inputs import Bounds
from aioenvs.batched.signature import EnvSpecs
from aioenvs.engine.host import Outcome
from aioenvs.engine.layout import Arrays
from aioenvs.engine.metadata import INPUT, NEXT, ROOT, SLOTS, STATUS, WHERE, EnvMetadata, Family
from aioenvs.engine.spaces import Objects
from aioenvs.engine.turns import Turns
from aioenvs.specs import NonTensor
from aioenvs.trees import Key, Tree, non_tensor, region_trees

__all__ = ["Ledger"]


class Ledger:
    """What is known of the envs of one family besides the arrays: latest values without a row, action spaces, counts.

    Args:
        family: The family.
        arrays: Its arrays.
        turns: In which slot its envs have and write their values.
        metadata: What each of its envs says of itself.
    """

    def __init__(
        self, family: Family, arrays: dict[str, Arrays], turns: Turns, metadata: Sequence[EnvMetadata]
    ) -> None:
        self.family = family
        self.inputs = arrays[INPUT]
        self.slots = tuple({region: arrays[name] for region, name in slot.items()} for slot in SLOTS)
        self.turns = turns
        self.place = {env: place for place, env in enumerate(family.envs)}
        self.where = arrays[STATUS][WHERE]
        self.memory = _bytes_behind(self.where)
        self.spaces = [copy.deepcopy(each.specs.get("action", {})) for each in metadata]
        self.objects: list[Objects] = [{} for _ in family.envs]
        self.done = [
            [own[NEXT][key].reshape(len(family.envs), -1) for key in family.metadata.done_keys if key in own[NEXT]]
            for own in self.slots
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
            for region, leaves in {INPUT: self.inputs, **self.slots[0]}.items()
        }

    def finished(self) -> NDArray[np.bool_]:
        """For each env whether its last step ended an episode."""
        if self.turns.plain:
            flags = self._flags(0)
        else:
            one, other = (self._flags(slot) for slot in range(len(SLOTS)))
            first = self.turns.slots(slice(None)) == 0
            flags = None if one is None or other is None else np.where(first, one, other)
        if flags is not None:
            return flags
        keys, known = self.family.metadata.done_keys, self.objects
        return np.array([any(bool(own[key].any()) for key in keys if key in own) for own in known], np.bool_)

    def _flags(self, slot: int) -> NDArray[np.bool_] | None:
        """The same, by what is in one slot; None if there are no such flags."""
        flag, done = self.flags[slot], self.done[slot]
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
        """Write rows of a region; of an output, to the slot in which the env itself writes next."""
        if region == INPUT:
            self.inputs[key][targets] = values
            return
        chosen = self.turns.target(targets)
        for slot, own in enumerate(self.slots):
            places = np.arange(len(self.family.envs))[targets][chosen == slot]
            own[region][key][places] = values[chosen == slot]


def _bytes_behind(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The whole buffer into which an array looks."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return np.frombuffer(base, np.uint8)
