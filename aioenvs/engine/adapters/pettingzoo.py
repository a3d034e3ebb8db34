"""The adapter for envs with PettingZoo's `reset` and `step`, in which all agents act at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioenvs.engine.adapters.agents import (
    AgentOptions,
    AgentRow,
    AgentRows,
    Description,
    Ended,
    Group,
    Member,
    describe,
)
from aioenvs.engine.adapters.gymnasium import GymAdapter, refuse_generators
from aioenvs.engine.adapters.spaces import Objects, Reader, reader
from aioenvs.engine.layout import (
    HALVES,
    IN_NEXT,
    IN_ROOT,
    INPUT,
    LATEST,
    NEXT,
    ROOT,
    STATUS,
    WRITE_ROOT,
    Arrays,
    EnvMetadata,
    Key,
)
from aioenvs.engine.worker.random_streams import Generators
from aioenvs.errors import SpecMismatchError, shown

__all__ = ["PettingZooAdapter"]

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
        """The description of the env and its agents."""
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
        self._where = arrays[STATUS][LATEST].data
        ended: dict[Any, Ended] = {}
        self._regions = [
            [
                AgentRows(groups, state, self._options, arrays[name], self._objects[region], row, self._who, ended)
                for region, name in half.items()
            ]
            for half in HALVES
        ]
        self._roots = [
            [(arrays[half[NEXT]][key][row, ...], root[row, ...]) for key, root in arrays[half[ROOT]].items()]
            for half in HALVES
        ]
        self.take_half(0)
        self._readers = {
            member.name: _action_reader(group, member, place, arrays[INPUT], self._objects[INPUT], row)
            for group in groups
            for place, member in enumerate(group.members)
        }
        self._spaces = {member.name: member for group in groups for member in group.members}
        self._read_action = self._read_actions
        # Those that act next, in the env's order; before a reset, whoever was there when the env was looked at.
        self._acting = {name: None for name in getattr(self.env, "agents", None) or () if name in self._spaces}

    def take_half(self, write_half: int) -> None:
        self._half, self._is_whole = write_half & 1, bool(write_half & WRITE_ROOT)
        self._next, self._root = self._regions[self._half]

    def _read_actions(self) -> dict[Any, Any]:
        """The actions of the agents that are there; those of others stay behind."""
        return {name: self._readers[name]() for name in self._acting}

    # -- resets and steps -------------------------------------------------------------------------------

    def _after_reset(self, result: Any) -> None:
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
        self._where[self._row] = IN_ROOT + 2 * self._half
        self._seed = None
        self.needs_reset = False

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
            for following, root in self._roots[self._half]:
                root[...] = following
        self._where[self._row] = IN_NEXT + 2 * self._half
        self.needs_reset = False
        return done

    def _take(self, seat: AgentRow, entries: Any, *, expected: bool, acts: bool) -> None:
        """Store an agent's reward and flags."""
        name, (rewards, terminations, truncations) = seat.name, entries
        if expected:
            missing = [what for what, values in zip(OUTCOME[1:4], entries, strict=True) if name not in values]
            if missing:
                raise SpecMismatchError(
                    f"{self._who}: expected an entry for agent {shown(name)}, which has an observation, in each dict "
                    f"of a step, found none in {' and '.join(missing)}"
                )
        reward = rewards.get(name, 0.0)
        if type(reward) is not float or abs(reward) > self._reward_max:
            reward = self._scalar(reward, f"reward of agent {shown(name)}")
        terminated, truncated = terminations.get(name, False), truncations.get(name, False)
        if type(terminated) is not bool:
            terminated = self._flag(f"termination of agent {shown(name)}", terminated)
        if type(truncated) is not bool:
            truncated = self._flag(f"truncation of agent {shown(name)}", truncated)
        # one that has left has reached its end, whether the env says so or not
        seat.take(reward, terminated or not (truncated or acts or expected), truncated)

    def _by_agent(self, result: Any, names: tuple[str, ...]) -> Any:
        """The dicts of a result, of agents that are known; but for infos, in which there may be others."""
        for name, values in zip(names, result, strict=True):
            if type(values) is not dict and not isinstance(values, Mapping):
                raise SpecMismatchError(f"{self._who}: expected a dict by agent as {name}, found {shown(values)}")
            if name != "infos" and not self._spaces.keys() >= values.keys():
                raise self._unknown(name, values)
        return result

    def _unknown(self, what: str, names: Any) -> SpecMismatchError:
        unknown = [name for name in names if name not in self._spaces]
        return SpecMismatchError(
            f"{self._who}: expected {what} of agents among possible_agents, {shown(list(self._spaces))}, "
            f"found also {shown(unknown)}"
        )

    def _present(self, observations: Mapping[Any, Any]) -> dict[Any, None]:
        """The agents that act next, each of which must have an observation."""
        acting = dict.fromkeys(self.env.agents)
        if not self._spaces.keys() >= acting.keys():
            raise self._unknown("env.agents", acting)
        missing = [name for name in acting if name not in observations]
        if missing:
            raise SpecMismatchError(
                f"{self._who}: expected an observation of each agent in env.agents, {shown(list(acting))}, "
                f"found none of {shown(missing)}"
            )
        if not self._options.use_mask and len(observations) < len(self._spaces):
            absent = [name for name in self._spaces if name not in observations]
            raise SpecMismatchError(
                f"{self._who}: the agents {shown(absent)} are not there; wrap the env, "
                "aioenvs.PettingZooWrapper(env, use_mask=True), so that each group has a mask that says which are"
            )
        return acting

    def _refuse_other_spaces(self) -> None:
        """Refuse spaces that differ from what they were."""
        for name, member in self._spaces.items():
            space = self.env.action_space(name)
            if space is not member.action and space != member.action:
                raise SpecMismatchError(
                    f"{self._who}: expected the action space of agent {shown(name)} to stay {shown(member.action)}, "
                    f"found {shown(space)}; PettingZoo's rule is that an agent's spaces never change"
                )

    def _write_state(self, region: AgentRows) -> None:
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
