"""PettingZoo envs as torch-native ones, with their agents in groups."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDictBase

from aioenvs.engine.adapters.agents import (
    AgentOptions,
    Description,
    default_groups,
    has_agents,
    members_of,
    refuse_turns,
)
from aioenvs.engine.adapters.pettingzoo import PettingZooAdapter
from aioenvs.engine.worker.random_streams import Generators
from aioenvs.envs.gym import EnvWrapper
from aioenvs.errors import shown
from aioenvs.hints import OWN, hints_at_keywords, keywords_of, passed_on
from aioenvs.specs.base import DeviceLike
from aioenvs.specs.inferred import composites
from aioenvs.tensors.trees import Tree, region_trees


class MarlGroupMapType(Enum):
    """A grouping that fits any agents; agents of a group share one nested TensorDict.

    Attributes:
        ALL_IN_ONE_GROUP: One group called "agents".
        ONE_GROUP_PER_AGENT: Each agent is a group of its own name.

    >>> MarlGroupMapType.ALL_IN_ONE_GROUP.get_group_map(["red", "blue"])
    {'agents': ['red', 'blue']}
    >>> MarlGroupMapType.ONE_GROUP_PER_AGENT.get_group_map(["red", "blue"])
    {'red': ['red'], 'blue': ['blue']}
    """

    ALL_IN_ONE_GROUP = 1
    ONE_GROUP_PER_AGENT = 2

    def get_group_map(self, agent_names: Sequence[str]) -> dict[str, list[str]]:
        """Group these agents.

        Args:
            agent_names: All agents of an env.

        Returns:
            The agents of each group, by its name.
        """
        if self is MarlGroupMapType.ALL_IN_ONE_GROUP:
            return {"agents": list(agent_names)}
        return {name: [name] for name in agent_names}


def check_marl_grouping(group_map: Mapping[str, Sequence[str]], agent_names: Sequence[str]) -> None:
    """Check that each agent is in exactly one group.

    Args:
        group_map: The agents of each group, by its name.
        agent_names: All agents of the env.

    Raises:
        ValueError: There are no agents, or some of one name; more groups than agents, or an empty group; or an
            agent of a group is unknown, is in two places, or is in none. The message names the culprits.

    >>> check_marl_grouping({"team": ["red"], "rest": []}, ["red", "blue"])
    Traceback (most recent call last):
    ...
    ValueError: expected agents in each group, found none in ['rest']
    """
    if not agent_names:
        raise ValueError(f"expected at least one agent, found {shown(agent_names)}")
    _refuse("expected agents of different names, found more than one called", _repeated(agent_names))
    if len(group_map) > len(agent_names):
        raise ValueError(
            f"expected at most as many groups as agents, found {len(group_map)} groups, {shown(list(group_map))}, "
            f"for {len(agent_names)} agents, {shown(list(agent_names))}"
        )
    grouped = [agent for group in group_map.values() for agent in group]
    _refuse("expected agents in each group, found none in", [name for name, group in group_map.items() if not group])
    _refuse(
        f"expected agents among {shown(list(agent_names))}, found also",
        [agent for agent in dict.fromkeys(grouped) if agent not in agent_names],
    )
    _refuse("expected each agent in one place, found in several", _repeated(grouped))
    _refuse("expected each agent in a group, found in none", [agent for agent in agent_names if agent not in grouped])


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _refuse(problem: str, culprits: Sequence[str]) -> None:
    if culprits:
        raise ValueError(f"{problem} {shown(culprits)}")


GroupMap = MarlGroupMapType | Mapping[str, Sequence[Any]]

AEC = (
    "AEC envs, whose agents act one after the other, are not supported; wrap what "
    "pettingzoo.utils.conversions.turn_based_aec_to_parallel makes of one"
)
FAMILIES = ("pettingzoo.butterfly", "pettingzoo.classic", "pettingzoo.sisl", "pettingzoo.atari", "mpe2")


class PettingZooWrapper(EnvWrapper):
    """A `pettingzoo.ParallelEnv` as an `EnvBase`, in TorchRL's layout.

    The agents of a group are the rows of a nested TensorDict: `(group, "observation")`, `(group, "action")`,
    `(group, "reward")`, `(group, "done")`, `(group, "terminated")`, `(group, "truncated")`; at the root `done`,
    `terminated` and `truncated` say whether the episode is over. Where observations or infos have an `action_mask`, it
    is `(group, "action_mask")`, True wherever nothing is ruled out, and random actions keep to it. Numbers that the
    infos of all of a group have after a reset are `(group, "info", name)`, float32, and zero where they are missing.
    A Dict or Tuple observation nests; Text and the like are `NonTensor`.

    An agent that has left has zeros in its row, keeps the flags with which it ended, and its action is ignored.
    Agents of one group may differ in the bounds of their spaces, not in shapes or dtypes.

    The constructor resets the env once, to see infos and state. What a wrapped
    env has and this one has not can be read and set here too.

    Args:
        env: With PettingZoo's parallel signatures.
        return_state: Whether the env's `state()` is an observation, `state`.
        group_map: The agents of each group, by its name, or a `MarlGroupMapType`; None for agents called "name_0",
            "name_1" under "name", and each of the others, or those that cannot be stacked, under its own name.
        use_mask: Whether each group has a bool `mask` of its agents that act next, so that agents may leave before the
            episode is over; None for wherever `done_on_any` is False.
        categorical_actions: Keep the integers of Discrete and MultiDiscrete actions; else they are one-hot (int64).
        seed: For the first reset, see `set_seed`.
        done_on_any: Whether the episode is over with the first agent's, as by default, or with the last one's.
        device: Where results go; None for CPU tensors in TensorDicts without a device.
        allow_done_after_reset: See `EnvBase`.

    Raises:
        TypeError: This is no such env, but perhaps an AEC env.
        ValueError: The groups do not have each agent once.
        SpecMismatchError: It has no agents or spaces, those of a group differ, or a group's name is taken.

    >>> from mpe2 import simple_tag_v3
    >>> env = PettingZooWrapper(simple_tag_v3.parallel_env())
    >>> td = env.rand_step(env.reset(seed=0))
    >>> env.group_map
    {'adversary': ['adversary_0', 'adversary_1', 'adversary_2'], 'agent': ['agent_0']}
    >>> td["adversary", "action"].shape, td["next", "agent", "reward"].shape, td["next", "done"].shape
    (torch.Size([3]), torch.Size([1, 1]), torch.Size([1]))
    """

    @hints_at_keywords
    def __init__(
        self,
        env: Any,
        *,
        return_state: bool = False,
        group_map: GroupMap | None = None,
        use_mask: bool | None = None,
        categorical_actions: bool = True,
        seed: int | None = None,
        done_on_any: bool | None = None,
        device: DeviceLike | None = None,
        allow_done_after_reset: bool = False,
    ) -> None:
        _require_parallel(env, type(self).__name__)
        super().__init__(device=device, allow_done_after_reset=allow_done_after_reset)
        on_any = done_on_any is None or done_on_any
        masked = not on_any if use_mask is None else use_mask
        self._options = AgentOptions(_grouped(env, group_map, shown(env)), masked, on_any, return_state)
        self._description: Description | None = None
        self._first_seed = seed
        self._wrap(env)
        self._pending_seed = seed
        outputs, inputs = composites(self._adapter.metadata.specs, "cpu", one_hot=not categorical_actions)
        self.observation_spec = outputs["full_observation_spec"]
        self.full_action_spec = inputs["full_action_spec"]
        self.full_reward_spec = outputs["full_reward_spec"]
        self.done_spec = outputs["full_done_spec"]
        self._action_leaves = dict(Tree.of(inputs["full_action_spec"]).leaves)
        self._results = region_trees(outputs, inputs)

    def make_adapter(self, env_index: int, who: str, generators: Generators = Generators.LEFT) -> PettingZooAdapter:
        """An adapter for what is wrapped, see `EnvWrapper.make_adapter`."""
        adapter = PettingZooAdapter(
            self._env,
            env_index,
            self._options,
            generators=generators,
            who=who,
            description=self._description,
            seed=self._first_seed,
        )
        self._description = adapter.description
        return adapter

    def _outcome(self, region: str) -> TensorDictBase:
        arrays, objects = self._arrays[region], self._adapter.objects(region)
        values: dict[Any, Any] = {key: torch.from_numpy(array[0].copy()) for key, array in arrays.items()}
        td = self._results[region].build(values | objects)
        return td if self.device is None else td.to(self.device)

    @property
    def group_map(self) -> dict[str, list[Any]]:
        """The agents of each group, by its name, in the order of their rows."""
        assert self._description is not None
        return {group.name: [member.name for member in group.members] for group in self._description.groups}


class PettingZooEnv(PettingZooWrapper):
    """An env of PettingZoo's own, or of `mpe2`, as an `EnvBase`.

    Args:
        task: The module of the env, such as "multiwalker_v9" or "sisl/multiwalker_v9".
        parallel: Must be True: AEC envs, whose agents act one after the other, are not supported.
        **kwargs: For the env's `parallel_env`.

    The other arguments are those of `PettingZooWrapper`.

    Raises:
        ImportError: PettingZoo, or what this env needs, is not installed, or there is no such env.
        TypeError: `parallel` is False, or the env has no parallel form.
    """

    def __init__(
        self,
        task: str,
        parallel: bool = True,
        *,
        return_state: bool = False,
        group_map: GroupMap | None = None,
        use_mask: bool | None = None,
        categorical_actions: bool = True,
        seed: int | None = None,
        done_on_any: bool | None = None,
        device: DeviceLike | None = None,
        allow_done_after_reset: bool = False,
        **kwargs: Any,
    ) -> None:
        if not parallel:
            raise TypeError(f"expected parallel=True, found {shown(parallel)}: {AEC}")
        self.task_name = task
        with passed_on(kwargs, keywords_of(PettingZooEnv.__init__), OWN):
            env = _make_task(task, kwargs)
        super().__init__(
            env,
            return_state=return_state,
            group_map=group_map,
            use_mask=use_mask,
            categorical_actions=categorical_actions,
            seed=seed,
            done_on_any=done_on_any,
            device=device,
            allow_done_after_reset=allow_done_after_reset,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(task={self.task_name!r}, device={self.device})"


def _require_parallel(env: Any, wrapper: str) -> None:
    refuse_turns(env, f"what {wrapper} was given")
    if (
        isinstance(env, type)
        or not has_agents(env)
        or not all(callable(getattr(env, name, None)) for name in ("reset", "step"))
    ):
        raise TypeError(
            f"{wrapper} wraps a pettingzoo.ParallelEnv, with methods reset, step, observation_space and action_space, "
            f"found {shown(env)}"
        )


def _grouped(env: Any, group_map: GroupMap | None, who: str) -> dict[str, list[Any]]:
    members = members_of(env, who)
    if group_map is None:
        return default_groups(list(members.values()))
    names = list(members)
    groups = group_map.get_group_map(names) if isinstance(group_map, MarlGroupMapType) else group_map
    check_marl_grouping(groups, names)
    return {str(name): list(agents) for name, agents in groups.items()}


def _make_task(task: str, kwargs: Mapping[str, Any]) -> Any:
    """Make the env of a task, by its name, or by its family and name."""
    try:
        pettingzoo: Any = importlib.import_module("pettingzoo")
    except ImportError as error:
        raise ImportError(
            f"the task {shown(task)} needs PettingZoo, which cannot be imported ({error}); "
            "to install it: pip install 'aioenvs[pettingzoo]'",
            name="pettingzoo",
        ) from error
    for registry, kind in (("parallel_registry", "parallel"), ("aec_registry", "aec")):  # newer versions have them
        for name in getattr(pettingzoo, registry, ()):
            if _plain(task) in (_plain(name), _plain(name).rpartition("/")[2]):
                if kind == "aec":
                    raise TypeError(f"{shown(task)} has no parallel form: {AEC}")
                return pettingzoo.make("parallel", name, **kwargs)
    module = _task_module(task)
    if not hasattr(module, "parallel_env"):
        raise TypeError(f"{shown(task)} has no parallel form: {AEC}")
    return module.parallel_env(**kwargs)


def _plain(name: str) -> str:
    """A task's name as its module has it, "pursuit_v5", also where it is that of the registry, "pursuit-v5"."""
    base, _, version = name.rpartition("-v")
    return f"{base}_v{version}" if base and version.isdigit() else name


def _task_module(task: str) -> ModuleType:
    family, _, name = task.rpartition("/")
    packages = {"": FAMILIES, "mpe": ("mpe2",)}.get(family, (f"pettingzoo.{family}", family))
    for package in packages:
        if _exists(package) and _exists(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
    raise ImportError(
        f"expected a task such as 'multiwalker_v9' or 'sisl/multiwalker_v9', found {shown(task)}; "
        f"there is none in {' or '.join(packages)}"
    )


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
