"""The adapter for envs with PettingZoo's `reset` and `step`, in which all agents act at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aioenvs.engine.agents import (
    ACTION_MASK,
    DONE_NAMES,
    STATE,
    AgentOptions,
    Description,
    Group,
    Member,
    describe,
)
from aioenvs.engine.gym_adapter import GymAdapter, refuse_generators
from aioenvs.engine.layout import Arrays, Key
from aioenvs.engine.metadata import (
    IN_NEXT,
    IN_ROOT,
    INPUT,
    NEXT,
    ROOT,
    SLOTS,
    STATUS,
    WHERE,
    WHOLE,
    EnvMetadata,
)
from aioenvs.engine.spaces import Numbers, Objects, Reader, Writer, conform, reader, writer
from aioenvs.engine.streams import Generators
from aioenvs.errors import SpecMismatchError

__all__ = ["PettingZooAdapter"]

Ended = tuple[bool, bool, bool]
GOING: Ended = (False, False, False)
OUTCOME = ("observations", "rewards", "terminations", "truncations", "infos")


class PettingZooAdapter(GymAdapter):
    """Drives an env with the signatures of a `pettingzoo.ParallelEnv`: those of Gymnasium with a dict in each place.

    Agents of a group share arrays, `(group, "observation")` and so on, one row for each. What an agent that is not
    there has in its row is zeros, and done flags that say how its episode ended.

    Args:
        env: The env.
        env_index: Its index.
        options: How its agents become rows.
        generators: See `GymRows`.
        who: What it is called in messages; None for "env" and its index.
        description: What is known of it already; None to find out, by a reset.
        seed: For that reset.
    """

    def __init__(
        self,
        env: Any,
        env_index: int,
        options: AgentOptions | None = None,
        *,
        generators: Generators = Generators.LEFT,
        who: str | None = None,
        description: Description | None = None,
        seed: int | None = None,
    ) -> None:
        self._options = options or AgentOptions()
        self._known = description
        self._probe_seed = seed
        super().__init__(env, env_index, generators=generators, who=who)

    @property
    def description(self) -> Description:
        """What is known of the env."""
        known = self._known
        if known is None:
            refuse_generators(self.env, self._who)
            known = self._known = describe(self.env, self._who, self._options, self._probe_seed)
        return known

    def _described(self) -> EnvMetadata:
        return self.description.metadata

    def bind(self, arrays: Mapping[str, Arrays], row: int) -> None:
        groups, state = self.description.groups, self.description.state
        self._row = row
        self._where = arrays[STATUS][WHERE]
        ended: dict[Any, Ended] = {}
        self._regions = [
            [
                _Region(groups, state, self._options, arrays[name], self._objects[region], row, self._who, ended)
                for region, name in slot.items()
            ]
            for slot in SLOTS
        ]
        self._roots = [
            [(arrays[slot[NEXT]][key][row, ...], root[row, ...]) for key, root in arrays[slot[ROOT]].items()]
            for slot in SLOTS
        ]
        self.take_turn(0)
        self._readers = {
            member.name: _action_reader(group, member, place, arrays[INPUT], self._objects[INPUT], row)
            for group in groups
            for place, member in enumerate(group.members)
        }
        self._spaces = {member.name: member for group in groups for member in group.members}
        self._read_action = self._read_actions
        self._acting: dict[Any, None] = {}  # those that act next, in the env's order

    def take_turn(self, turn: int) -> None:
        self._slot_number, self._is_whole = turn & 1, bool(turn & WHOLE)
        self._next, self._root = self._regions[self._slot_number]

    def _read_actions(self) -> dict[Any, Any]:
        """The actions of the agents that are there; those of others stay behind."""
        return {name: self._readers[name]() for name in self._acting}

    # -- resets and steps -------------------------------------------------------------------------------

    def _after_reset(self, result: Any, region: str = ROOT) -> None:
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._bad_result("reset must return (observations, infos)", result)
        observations, infos = self._by_agent(result, ("observations", "infos"))
        self._refuse_other_spaces()
        acting = self._present(observations)
        self._root.write(observations, infos, acting)
        self._root.clear_flags()
        self._next.begin()
        self._write_state(self._root)
        self._acting = acting
        self._where[self._row] = IN_ROOT + 2 * self._slot_number
        self._seed = None
        self._in_episode = True

    def _after_step(self, result: Any) -> bool:
        if not isinstance(result, tuple) or len(result) != 5:
            raise self._bad_result("step must return (observations, rewards, terminations, truncations, infos)", result)
        observations, rewards, terminations, truncations, infos = self._by_agent(result, OUTCOME)
        acting = self._present(observations)
        self._next.write(observations, infos, acting)
        entries = rewards, terminations, truncations
        for seat in self._next.seats:
            name = seat.name
            if name in self._acting or name in acting or any(name in values for values in entries):
                self._take(seat, entries, expected=name in observations, acts=name in acting)
            else:
                seat.stay()
        done = self._next.conclude()
        self._write_state(self._next)
        self._acting = acting
        if self._is_whole and not done:
            for following, root in self._roots[self._slot_number]:
                root[...] = following
        self._where[self._row] = IN_NEXT + 2 * self._slot_number
        self._in_episode = True
        return done

    def _take(self, seat: _Seat, entries: Any, *, expected: bool, acts: bool) -> None:
        """Store an agent's reward and flags."""
        name, (rewards, terminations, truncations) = seat.name, entries
        if expected:
            missing = [what for what, values in zip(OUTCOME[1:4], entries, strict=True) if name not in values]
            if missing:
                raise SpecMismatchError(
                    f"{self._who}: expected an entry for agent {name!r}, which has an observation, in each dict of a "
                    f"step, found none in {' and '.join(missing)}"
                )
        reward = rewards.get(name, 0.0)
        if type(reward) is not float or abs(reward) > self._reward_max:
            reward = self._scalar(reward, f"reward of agent {name!r}")
        terminated, truncated = terminations.get(name, False), truncations.get(name, False)
        if type(terminated) is not bool:
            terminated = self._flag(f"termination of agent {name!r}", terminated)
        if type(truncated) is not bool:
            truncated = self._flag(f"truncation of agent {name!r}", truncated)
        # one that has left has reached its end, whether the env says so or not
        seat.take(reward, terminated or not (truncated or acts or expected), truncated)

    def _by_agent(self, result: Any, names: tuple[str, ...]) -> Any:
        """The dicts of a result, of agents that are known; but for infos, in which there may be others."""
        for name, values in zip(names, result, strict=True):
            if type(values) is not dict and not isinstance(values, Mapping):
                raise SpecMismatchError(f"{self._who}: expected a dict by agent as {name}, found {values!r}")
            if name != "infos" and not self._spaces.keys() >= values.keys():
                raise self._unknown(name, values)
        return result

    def _unknown(self, what: str, names: Any) -> SpecMismatchError:
        unknown = [name for name in names if name not in self._spaces]
        return SpecMismatchError(
            f"{self._who}: expected {what} of agents among possible_agents, {list(self._spaces)!r}, "
            f"found also {unknown!r}"
        )

    def _present(self, observations: Mapping[Any, Any]) -> dict[Any, None]:
        """The agents that act next, each of which must have an observation."""
        acting = dict.fromkeys(self.env.agents)
        if not self._spaces.keys() >= acting.keys():
            raise self._unknown("env.agents", acting)
        missing = [name for name in acting if name not in observations]
        if missing:
            raise SpecMismatchError(
                f"{self._who}: expected an observation of each agent in env.agents, {list(acting)!r}, "
                f"found none of {missing!r}"
            )
        if not self._options.use_mask and len(observations) < len(self._spaces):
            absent = [name for name in self._spaces if name not in observations]
            raise SpecMismatchError(
                f"{self._who}: the agents {absent!r} are not there; wrap the env, "
                "aioenvs.PettingZooWrapper(env, use_mask=True), so that each group has a mask that says which are"
            )
        return acting

    def _refuse_other_spaces(self) -> None:
        """Refuse spaces that differ from what they were."""
        for name, member in self._spaces.items():
            space = self.env.action_space(name)
            if space is not member.action and space != member.action:
                raise SpecMismatchError(
                    f"{self._who}: expected the action space of agent {name!r} to stay {member.action!r}, "
                    f"found {space!r}; PettingZoo's rule is that an agent's spaces never change"
                )

    def _write_state(self, region: _Region) -> None:
        if region.write_state is not None:
            region.write_state(self.env.state())


def _action_reader(group: Group, member: Member, place: int, arrays: Arrays, objects: Objects, row: int) -> Reader:
    """A function that returns an agent's action."""
    key = (group.name, "action")
    own = {leaf.key: arrays[leaf.key][row] for leaf in group.action if leaf.leaf is not None}
    return reader(member.action, key, own, _Picked(objects, place), place)


class _Picked(dict[Key, Any]):
    """Of lists that hold an object for each agent, those of one agent."""

    def __init__(self, objects: Objects, place: int) -> None:
        super().__init__()
        self._objects = objects
        self._place = place

    def __getitem__(self, key: Key) -> Any:
        return self._objects[key][self._place]


class _Seat:
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
                raise SpecMismatchError(f"{self._who}: expected a dict with an action mask, found {observation!r}")
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


class _Region:
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
                [_Seat(group, place, arrays, row, who, options.use_mask, ended) for place in range(len(group.members))],
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
