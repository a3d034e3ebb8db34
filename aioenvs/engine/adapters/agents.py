"""Envs of several agents: who they are, in which groups, what each has, and their rows. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aioenvs.engine.adapters.spaces import Alike, Numbers, Objects, SpaceLeaf, Writer, conform, flatten, writer
from aioenvs.engine.layout import INPUT, NEXT, ROOT, Arrays, EnvMetadata, Key, Leaf
from aioenvs.errors import SpecMismatchError, shown

__all__ = [
    "ACTION_MASK",
    "DONE_NAMES",
    "STATE",
    "AgentOptions",
    "AgentRow",
    "AgentRows",
    "Description",
    "Ended",
    "Group",
    "Member",
    "default_groups",
    "describe",
    "has_agents",
    "is_turn_based",
    "members_of",
    "refuse_turns",
    "state_leaves",
]


ACTION_MASK = "action_mask"
DONE_NAMES = ("done", "terminated", "truncated")
STATE: Key = ("state",)
RESERVED = frozenset({*DONE_NAMES, "next", "reward", "_reset", "_step", "env_index", *STATE})


class AgentOptions(NamedTuple):
    """How the agents of an env become rows.

    Attributes:
        group_map: The agents of each group, by its name; None for those of `default_groups`.
        use_mask: Whether each group says which of its agents act, and agents may leave before the episode is over.
        done_on_any: Whether the episode is over with the first agent's, or with the last one's.
        return_state: Whether the env's `state()` is an observation.
    """

    group_map: Mapping[str, Sequence[Any]] | None = None
    use_mask: bool = False
    done_on_any: bool = True
    return_state: bool = False


class Member(NamedTuple):
    """An agent of a group: its name and spaces; what its observation says of allowed actions is not among them."""

    name: Any
    observation: Any
    action: Any


class Group(NamedTuple):
    """Agents that share arrays, one row for each.

    Attributes:
        name: The key above all that the group has.
        members: The agents.
        observation: The leaves of the observation of one agent.
        action: The leaves of its action.
        mask: What says which actions an agent may take: its shape, and whether it is in the "observation" or the
            "info"; None if nothing does.
        infos: The numbers in the info of each agent: their shapes by name.
    """

    name: str
    members: tuple[Member, ...]
    observation: tuple[SpaceLeaf, ...]
    action: tuple[SpaceLeaf, ...]
    mask: tuple[tuple[int, ...], str] | None
    infos: dict[str, tuple[int, ...]]


class Description(NamedTuple):
    """An env of several agents: its groups, its state if that is wanted, and all of it in the engine's terms."""

    groups: tuple[Group, ...]
    state: Any
    metadata: EnvMetadata


# -- recognising them -----------------------------------------------------------------------------------


def has_agents(env: Any) -> bool:
    """Whether an env has PettingZoo's signatures, in which spaces are asked for by agent."""
    return all(callable(getattr(env, f"{kind}_space", None)) for kind in ("observation", "action"))


def is_turn_based(env: Any) -> bool:
    """Whether an env has PettingZoo's signatures for agents that act one after the other."""
    return has_agents(env) and callable(getattr(env, "agent_iter", None))


def refuse_turns(env: Any, who: str) -> None:
    """Refuse an env whose agents act one after the other.

    Raises:
        TypeError: If it is one; the message says how it is made one in which all act at once.
    """
    if is_turn_based(env):
        raise TypeError(
            f"{who} is the AEC env {shown(env, str)}, whose agents act one after the other; expected a "
            "pettingzoo.ParallelEnv, "
            "such as pettingzoo.utils.conversions.aec_to_parallel(env) makes of one whose agents all act in each "
            "cycle, and turn_based_aec_to_parallel(env) of others"
        )


# -- grouping -------------------------------------------------------------------------------------------


def default_groups(agents: Sequence[Member]) -> dict[str, list[Any]]:
    """Group agents called "name_0", "name_1" under "name", and each of the others under its own name.

    Where those of a group have values that cannot be rows of one array, each is a group of its own.
    """
    groups: dict[str, list[Member]] = {}
    for agent in agents:
        prefix, _, number = str(agent.name).rpartition("_")
        groups.setdefault(prefix if prefix and number.isdigit() else str(agent.name), []).append(agent)
    named: dict[str, list[Any]] = {}
    for name, members in groups.items():
        if len({_form(member) for member in members}) == 1:
            named[name] = [member.name for member in members]
        else:
            named.update({str(member.name): [member.name] for member in members})
    return named


def _form(agent: Member) -> Any:
    """Return the form that agents must share for their values to be rows of one array."""
    mask = _mask_space(agent.observation)
    spaces = (_without_mask(agent.observation), agent.action)
    return *(tuple((leaf.key, leaf.leaf) for leaf in flatten(space, ())) for space in spaces), mask and mask.shape


def _mask_space(space: Any) -> Any:
    """The space of an action mask within that of an observation; None if there is none."""
    return getattr(space, "spaces", {}).get(ACTION_MASK) if _is_dict(space) else None


def _is_dict(space: Any) -> bool:
    return isinstance(getattr(space, "spaces", None), Mapping)


def _without_mask(space: Any) -> Any:
    if _mask_space(space) is None:
        return space
    from gymnasium.spaces import Dict

    return Dict({name: child for name, child in space.spaces.items() if name != ACTION_MASK})


# -- describing -----------------------------------------------------------------------------------------


def describe(env: Any, who: str, options: AgentOptions, seed: int | None = None) -> Description:
    """Work out what an env has. It is reset for that, since infos, masks in them, and states have no spaces.

    Args:
        env: The env, with PettingZoo's signatures.
        who: What it is called in messages.
        options: How its agents become rows.
        seed: For that reset.

    Raises:
        SpecMismatchError: It has no agents, or no spaces for them, or agents of one group differ too much.
    """
    agents = members_of(env, who)
    grouped = options.group_map if options.group_map is not None else default_groups(list(agents.values()))
    taken = sorted(name for name in grouped if name in RESERVED)
    if taken:
        raise SpecMismatchError(
            f"{who} has the groups {shown(taken)}, keys that are taken; give them other names by group_map"
        )
    if sum(map(len, grouped.values())) != len(agents):
        raise SpecMismatchError(
            f"{who} has agents whose names do not tell their groups apart, {shown(list(agents))}; "
            "group them by group_map"
        )
    result = env.reset() if seed is None else env.reset(seed=seed)
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(part, Mapping) for part in result):
        raise SpecMismatchError(f"{who}: reset must return the dicts (observations, infos), found {shown(result)}")
    infos = {name: info for name, info in result[1].items() if isinstance(info, Mapping)}
    groups = tuple(
        _group(who, name, [agents[agent] for agent in names], [infos[agent] for agent in names if agent in infos])
        for name, names in grouped.items()
    )
    state = _state(env, who) if options.return_state else None
    return Description(groups, state, _metadata(shown(env, str), groups, state, options))


def members_of(env: Any, who: str) -> dict[Any, Member]:
    """All agents that an env may have, by name.

    Args:
        env: With PettingZoo's signatures.
        who: What it is called in messages.

    Raises:
        SpecMismatchError: It has none, or some without spaces.
    """
    names = list(getattr(env, "possible_agents", None) or ())
    if not names or len(set(names)) < len(names):
        raise SpecMismatchError(
            f"{who} ({shown(env, str)}) must have agents, of different names, as possible_agents, found {shown(names)}"
        )
    agents = {}
    for name in names:
        spaces = [getattr(env, f"{kind}_space")(name) for kind in ("observation", "action")]
        for kind, space in zip(("observation", "action"), spaces, strict=True):
            if not hasattr(space, "sample"):
                raise SpecMismatchError(
                    f"{who} ({shown(env, str)}) must have a Gymnasium space as {kind}_space({shown(name)}), found "
                    f"{shown(space)}"
                )
        agents[name] = Member(name, *spaces)
    return agents


def _group(who: str, name: str, agents: Sequence[Member], infos: Sequence[Mapping[str, Any]]) -> Group:
    members = tuple(Member(agent.name, _without_mask(agent.observation), agent.action) for agent in agents)
    flat = {
        kind: [flatten(getattr(member, kind), (name, kind)) for member in members] for kind in ("observation", "action")
    }
    for kind, leaves in flat.items():
        for member, own in zip(members, leaves, strict=True):
            if [(leaf.key, leaf.leaf) for leaf in own] != [(leaf.key, leaf.leaf) for leaf in leaves[0]]:
                raise _different(who, name, kind, (members[0], leaves[0]), (member, own))
    spaces = [_mask_space(agent.observation) for agent in agents]
    shapes = {None if space is None else tuple(space.shape) for space in spaces}
    found = {np.shape(info[ACTION_MASK]) if ACTION_MASK in info else None for info in infos}
    if len(shapes) > 1 or (len(found) > 1 and shapes == {None}):
        raise SpecMismatchError(
            f"{who}: the agents {shown([member.name for member in members])} of the group {shown(name)} have action "
            "masks of different shapes, or some have none; put them into groups of their own by group_map"
        )
    shape, origin = shapes.pop(), "observation"
    if shape is None and found:
        shape, origin = found.pop(), "info"
    first, action = flat["observation"][0], flat["action"][0]
    mask = None if shape is None else (shape, origin)
    return Group(name, members, tuple(first), tuple(action), mask, _numbers_in(infos))


def _different(
    who: str, group: str, kind: str, one: tuple[Member, list[SpaceLeaf]], other: tuple[Member, list[SpaceLeaf]]
) -> SpecMismatchError:
    (first, _), (second, _) = one, other
    return SpecMismatchError(
        f"{who}: the agents of the group {shown(group)} need {kind} spaces of one shape and dtype, found "
        f"{shown(getattr(first, kind))} of {shown(first.name)} and {shown(getattr(second, kind))} of "
        f"{shown(second.name)}; put them into groups of their own by group_map"
    )


def _numbers_in(infos: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """The shapes of what is a number in each of some infos, or an array of them, by name."""
    found = {}
    for name in infos[0] if infos else ():
        shapes = {_shape_of_numbers(info.get(name)) for info in infos}
        shape = shapes.pop() if len(shapes) == 1 else None
        if isinstance(name, str) and name != ACTION_MASK and shape is not None:
            found[name] = shape
    return found


def _shape_of_numbers(value: Any) -> tuple[int, ...] | None:
    """The shape of a number, a bool, or an array of them; None of anything else."""
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return None
    return array.shape if array.dtype.kind in "biuf" else None


def _state(env: Any, who: str) -> Any:
    """The space of an env's state, or what numbers one is made of."""
    space = getattr(env, "state_space", None)
    if space is not None and hasattr(space, "sample"):
        return space
    try:
        example = env.state()
    except (AttributeError, NotImplementedError) as error:
        raise SpecMismatchError(f"{who} ({shown(env, str)}) has no state(); leave out return_state=True") from error
    array = np.asarray(example)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise SpecMismatchError(f"{who}: expected an array of numbers as state(), found {shown(example)}")
    return Numbers(array.dtype.newbyteorder("=").str, array.shape)


# -- in the engine's terms ------------------------------------------------------------------------------


def _metadata(name: str, groups: Sequence[Group], state: Any, options: AgentOptions) -> EnvMetadata:
    observation: dict[Key, Any] = {}
    action: dict[Key, Any] = {}
    reward: dict[Key, Any] = {}
    done: dict[Key, Any] = {(flag,): Numbers("|b1", (1,)) for flag in DONE_NAMES}
    for group in groups:
        observation.update(_observed(group, options.use_mask))
        actions = [flatten(member.action, (group.name, "action")) for member in group.members]
        action.update(_alike(group.action, actions))
        count = len(group.members)
        reward[group.name, "reward"] = Numbers("<f4", (count, 1))
        done.update({(group.name, flag): Numbers("|b1", (count, 1)) for flag in DONE_NAMES})
    if state is not None:
        observation.update({leaf.key: leaf.space for leaf in state_leaves(state)})
    root = {**observation, **done}
    regions = {INPUT: action, NEXT: {**root, **reward}, ROOT: root}
    return EnvMetadata(
        name=name,
        leaves={region: _fixed(values) for region, values in regions.items()},
        objects={region: dict.fromkeys(_loose(values)) for region, values in regions.items()},
        reward_keys=tuple(reward),
        done_keys=(("done",),),
        specs={
            "observation": observation,
            "action": action,
            "reward": reward,
            "done": done,
            "counts": {group.name: len(group.members) for group in groups},
        },
    )


def _observed(group: Group, use_mask: bool) -> dict[Key, Any]:
    count = len(group.members)
    leaves = [flatten(member.observation, (group.name, "observation")) for member in group.members]
    observed = _alike(group.observation, leaves)
    if group.mask is not None:
        observed[group.name, ACTION_MASK] = Numbers("|b1", (count, *group.mask[0]))
    if use_mask:
        observed[group.name, "mask"] = Numbers("|b1", (count,))
    for info, shape in group.infos.items():
        observed[group.name, "info", info] = Numbers("<f4", (count, *shape))
    return observed


def state_leaves(state: Any) -> list[SpaceLeaf]:
    """The leaves of a state, by its space or its numbers."""
    if isinstance(state, Numbers):
        return [SpaceLeaf(STATE, state, Leaf(STATE, *state))]
    return flatten(state, STATE)


def _alike(first: Sequence[SpaceLeaf], leaves: Sequence[Sequence[SpaceLeaf]]) -> dict[Key, Any]:
    return {leaf.key: Alike.of(own[place].space for own in leaves) for place, leaf in enumerate(first)}


def _fixed(values: Mapping[Key, Any]) -> tuple[Leaf, ...]:
    return tuple(leaf for key, value in values.items() if (leaf := _leaf(key, value)) is not None)


def _loose(values: Mapping[Key, Any]) -> Iterable[Key]:
    return (key for key, value in values.items() if _leaf(key, value) is None)


def _leaf(key: Key, value: Any) -> Leaf | None:
    if isinstance(value, Numbers):
        return Leaf(key, *value)
    if isinstance(value, Alike):
        ((_, _, leaf),) = flatten(value.spaces[0], key)
        return None if leaf is None else Leaf(key, leaf.dtype, (len(value.spaces), *leaf.shape))
    ((_, _, leaf),) = flatten(value, key)
    return leaf


Ended = tuple[bool, bool, bool]
GOING: Ended = (False, False, False)


class AgentRow:
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


class AgentRows:
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
                [
                    AgentRow(group, place, arrays, row, who, options.use_mask, ended)
                    for place in range(len(group.members))
                ],
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
