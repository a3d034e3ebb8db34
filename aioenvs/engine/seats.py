"""Where the agents of an env have their values: the place of each in the arrays, and those of all in a region."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aioenvs.engine.agents import ACTION_MASK, DONE_NAMES, STATE, AgentOptions, Group
from aioenvs.engine.layout import Arrays
from aioenvs.engine.spaces import Numbers, Objects, Writer, conform, writer
from aioenvs.errors import SpecMismatchError, shown

__all__ = ["Ended", "Region", "Seat"]

Ended = tuple[bool, bool, bool]
GOING: Ended = (False, False, False)


class Seat:
    """The place of one agent in the arrays of a region."""

    def __init__(
        self, group: Group, place: int, arrays: Arrays, row: int, who: str, use_mask: bool, ended: dict[Any, Ended]
    ) -> None:
        member = group.members[place]
        self.name = member.name
        self._has_mask_inside = group.mask is not None and group.mask[1] == "observation"
        self._who = f"{who}, agent {member.name!r}"
        self.objects: Objects = {}
        own = {leaf.key: arrays[leaf.key][row] for leaf in group.observation if leaf.leaf is not None}
        key = (group.name, "observation")
        self._write: Writer = writer(member.observation, key, own, self.objects, place, self._who)
        self._infos = {name: arrays[group.name, "info", name][row, place, ...] for name in group.infos}
        self._zeros = [*(array[place, ...] for array in own.values()), *self._infos.values()]
        self._allowed = None if group.mask is None else arrays[group.name, ACTION_MASK][row, place, ...]
        self._mask = arrays[group.name, "mask"][row] if use_mask else None
        self._reward = arrays[group.name, "reward"][row, :, 0] if (group.name, "reward") in arrays else None
        self._flags = [arrays[group.name, name][row, :, 0] for name in DONE_NAMES]
        self._place = place
        self._ended = ended  # of all agents, the same for each region

    def write(self, observation: Any, info: Any, *, acts: bool) -> None:
        """Store what an agent that is there observes."""
        entries = info if type(info) is dict or isinstance(info, Mapping) else {}
        allowed = entries.get(ACTION_MASK)
        if self._has_mask_inside:
            if not isinstance(observation, Mapping) or ACTION_MASK not in observation:
                raise SpecMismatchError(f"{self._who}: expected a dict with an action mask, found {shown(observation)}")
            allowed = observation[ACTION_MASK]
            observation = {name: value for name, value in observation.items() if name != ACTION_MASK}
        self._write(observation)
        for name, target in self._infos.items():
            value = entries.get(name)
            target[...] = 0 if value is None else conform(value, target.dtype, target.shape, ("info", name), self._who)
        self._may(acts, allowed)

    def leave(self) -> None:
        """Store that the agent is not there."""
        for array in self._zeros:
            array[...] = 0
        self.objects.clear()
        self._may(False, None)

    def _may(self, acts: bool, allowed: Any) -> None:
        """Store whether the agent acts next, and what it may do then; all, where nothing says otherwise."""
        if self._mask is not None:
            self._mask[self._place] = acts
        if self._allowed is None:
            return
        if not acts or allowed is None:
            self._allowed[...] = True
            return
        mask = np.asarray(allowed)
        if mask.shape != self._allowed.shape or mask.dtype.kind not in "biu":
            raise SpecMismatchError(
                f"{self._who}: expected an action mask of shape {self._allowed.shape}, found {allowed!r}"
            )
        self._allowed[...] = mask.astype(bool)

    def begin(self) -> None:
        """Begin an episode."""
        self._ended[self.name] = GOING

    def clear_flags(self) -> None:
        """Store that the agent's episode is not over."""
        for array in self._flags:
            array[self._place] = False

    def take(self, reward: float, terminated: bool, truncated: bool) -> None:
        """Store the outcome of a step."""
        self._ended[self.name] = terminated or truncated, terminated, truncated
        self._store(reward)

    def stay(self) -> None:
        """Store that the agent is still not there: it has ended as it did, or never came."""
        if not self.ended[0]:
            self._ended[self.name] = True, True, False
        self._store(0.0)

    @property
    def ended(self) -> Ended:
        """Whether the agent's episode is over, whether it is terminated, and whether it is truncated."""
        return self._ended.get(self.name, GOING)

    def _store(self, reward: float) -> None:
        if self._reward is not None:
            self._reward[self._place] = reward
        for array, flag in zip(self._flags, self.ended, strict=True):
            array[self._place] = flag


class Region:
    """The places of all agents in one region."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        state: Any,
        options: AgentOptions,
        arrays: Arrays,
        objects: Objects,
        row: int,
        who: str,
        ended: dict[Any, Ended],
    ) -> None:
        self._of_groups = [
            (
                group,
                [Seat(group, place, arrays, row, who, options.use_mask, ended) for place in range(len(group.members))],
            )
            for group in groups
        ]
        self.seats = [seat for _, seats in self._of_groups for seat in seats]
        self._loose = [
            (leaf.key, seats) for group, seats in self._of_groups for leaf in group.observation if leaf.leaf is None
        ]
        self._objects = objects
        self._any = options.done_on_any
        self._flags = [arrays[name,][row] for name in DONE_NAMES]
        self.write_state: Writer | None = None
        if state is not None:
            self.write_state = _state_writer(state, arrays, objects, row, who)

    def write(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any], acting: Mapping[Any, None]) -> None:
        """Store what all agents observe."""
        for seat in self.seats:
            if seat.name in observations:
                seat.write(observations[seat.name], infos.get(seat.name), acts=seat.name in acting)
            else:
                seat.leave()
        for key, seats in self._loose:
            self._objects[key] = [seat.objects.get(key) for seat in seats]

    def begin(self) -> None:
        """Begin an episode."""
        for seat in self.seats:
            seat.begin()

    def clear_flags(self) -> None:
        """Store that nothing is over."""
        for seat in self.seats:
            seat.clear_flags()
        for flag in self._flags:
            flag[0] = False

    def conclude(self) -> bool:
        """Store whether the episode is over, by those of the agents; True if it is."""
        dones, terminations, truncations = zip(*(seat.ended for seat in self.seats), strict=True)
        over = any if self._any else all
        done = over(dones)
        # with the last agent, it is truncated wherever not all have terminated
        for flag, value in zip(self._flags, (done, over(terminations), done and any(truncations)), strict=True):
            flag[0] = value
        return done


def _state_writer(state: Any, arrays: Arrays, objects: Objects, row: int, who: str) -> Writer:
    if not isinstance(state, Numbers):
        return writer(state, STATE, arrays, objects, row, who)
    target = arrays[STATE][row, ...]

    def write(value: Any) -> None:
        target[...] = conform(value, target.dtype, target.shape, STATE, who)

    return write
