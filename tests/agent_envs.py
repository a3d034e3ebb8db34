"""Small envs of several agents, which act at once. Workers import this module, so it must not import torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple
from pettingzoo import ParallelEnv

__all__ = ["CrowdEnv", "MaskedEnv", "SpacesEnv", "kill_at"]

NAMES = ("walker_0", "walker_1", "walker_2", "guard")


class CrowdEnv(ParallelEnv[Any, Any, Any]):
    """Agents that leave one after the other: `lives[i]` is how many steps the i-th has, and -1 for ever.

    An agent observes `[seed, step, its number, sum of its actions]`; its reward is its action, and it terminates with
    its last step. After `length` steps all that are left are truncated. Actions of agents that are gone are an error.

    Args:
        lives: How many steps each agent has; 0 for one that is not there at all.
        length: Steps of an episode.
        names: Of the agents.
        last_words: Whether an agent is in the dicts of its last step.
        fault: What is called before a step with the number of the step.
        infos: What the infos of an agent are, by its number and the step.
        spaces: The number of actions of each agent.
        strict: Whether actions of others than those that are there are an error.
    """

    metadata = {"name": "crowd_v0", "is_parallelizable": True}  # noqa: RUF012
    render_mode = None

    def __init__(
        self,
        lives: Sequence[int] = (2, -1, 4, -1),
        *,
        length: int = 6,
        names: Sequence[Any] = NAMES,
        last_words: bool = True,
        fault: Callable[[int], object] | None = None,
        infos: Callable[[int, int], dict[str, Any]] | None = None,
        spaces: Sequence[int] = (5, 5, 5, 7),
        strict: bool = True,
    ) -> None:
        self.lives, self.length, self.last_words, self.fault, self.infos = lives, length, last_words, fault, infos
        self.possible_agents, self.strict = list(names), strict
        self.agents: list[Any] = []
        self._number = {name: number for number, name in enumerate(names)}
        self._actions = [Discrete(n) for n in spaces]
        self._observation = Box(-(2.0**40), 2.0**40, (4,), np.float64)
        self.steps = 0
        self.seed = 0
        self.totals = [0] * len(names)

    def observation_space(self, agent: Any) -> Any:
        return self._observation

    def action_space(self, agent: Any) -> Any:
        return self._actions[self._number[agent]]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seed = self.seed + 1 if seed is None else seed
        self.steps, self.totals = 0, [0] * len(self.totals)
        self.agents = [name for name in self.possible_agents if self.lives[self._number[name]]]
        return self._observed(self.agents), self._informed(self.agents)

    def step(self, actions: Mapping[Any, Any]) -> Any:
        if self.strict and actions.keys() != set(self.agents):
            raise RuntimeError(f"expected actions of {self.agents}, found {actions!r}")
        self.steps += 1
        if self.fault is not None:
            self.fault(self.steps)
        acting = self.agents
        for name, action in actions.items():
            if name not in acting:
                continue
            self.totals[self._number[name]] += int(action)
        ended = {name: self.lives[self._number[name]] == self.steps for name in acting}
        timed_out = self.steps >= self.length
        self.agents = [] if timed_out else [name for name in acting if not ended[name]]
        told = acting if self.last_words else [name for name in acting if name in self.agents or timed_out]
        return (
            self._observed(told),
            {name: float(actions[name]) for name in told},
            {name: ended[name] for name in told},
            {name: timed_out and not ended[name] for name in told},
            self._informed(told),
        )

    def state(self) -> Any:
        return np.array([self.steps, *self.totals], np.int64)

    def _observed(self, names: Sequence[Any]) -> dict[Any, Any]:
        numbers = ((name, self._number[name]) for name in names)
        return {
            name: np.array([self.seed, self.steps, number, self.totals[number]], np.float64) for name, number in numbers
        }

    def _informed(self, names: Sequence[Any]) -> dict[Any, Any]:
        return {name: self.infos(self._number[name], self.steps) if self.infos else {} for name in names}

    def render(self) -> None:
        return None

    def loaded(self, module: str) -> bool:
        """Whether this process has loaded a module."""
        return module in sys.modules


class MaskedEnv(ParallelEnv[Any, Any, Any]):
    """Two agents that may take all actions but one: the number of the step and their own, modulo 4; others raise.

    Args:
        where: Whether the masks are in the "observation" or in the "info".
    """

    metadata = {"name": "masked_v0"}  # noqa: RUF012
    render_mode = None

    def __init__(self, where: str = "observation") -> None:
        self.where = where
        self.possible_agents = ["player_0", "player_1"]
        self.agents: list[str] = []
        position = Box(-1, 1, (2,), np.float32)
        inside = {"observation": position, "action_mask": Box(0, 1, (4,), np.int8)}
        self._space: Any = Dict(inside) if where == "observation" else position
        self.steps = 0

    def observation_space(self, agent: str) -> Any:
        return self._space

    def action_space(self, agent: str) -> Any:
        return self._action

    _action = Discrete(4)

    def mask(self, agent: str) -> Any:
        mask = np.ones(4, np.int8)
        mask[(self.steps + self.possible_agents.index(agent)) % 4] = 0
        return mask

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.agents = 0, list(self.possible_agents)
        return self._observed(), self._informed()

    def step(self, actions: Mapping[str, Any]) -> Any:
        for agent, action in actions.items():
            if not self.mask(agent)[action]:
                raise RuntimeError(f"{agent} took the action {action}, which is ruled out")
        self.steps += 1
        over = self.steps == 9
        flags = dict.fromkeys(self.agents, over)
        nothing = dict.fromkeys(self.agents, False)
        result = self._observed(), dict.fromkeys(self.agents, 1.0), nothing, flags, self._informed()
        if over:
            self.agents = []
        return result

    def _observed(self) -> dict[str, Any]:
        position = np.full(2, self.steps / 10, np.float32)
        if self.where != "observation":
            return dict.fromkeys(self.agents, position)
        return {agent: {"observation": position, "action_mask": self.mask(agent)} for agent in self.agents}

    def _informed(self) -> dict[str, Any]:
        if self.where == "observation":
            return {agent: {} for agent in self.agents}
        return {agent: {"action_mask": self.mask(agent)} for agent in self.agents}


class SpacesEnv(ParallelEnv[Any, Any, Any]):
    """Agents with observations and actions of given spaces; observations are samples, and so are actions.

    Args:
        observations: The space of each agent, by name.
        actions: Likewise.
    """

    metadata = {"name": "spaces_v0"}  # noqa: RUF012
    render_mode = None

    def __init__(self, observations: Mapping[str, Any], actions: Mapping[str, Any]) -> None:
        self.possible_agents = list(observations)
        self.agents: list[str] = []
        self._observations, self._actions = dict(observations), dict(actions)
        self.given: list[dict[str, Any]] = []
        self.sent: list[dict[str, Any]] = []

    def observation_space(self, agent: str) -> Any:
        return self._observations[agent]

    def action_space(self, agent: str) -> Any:
        return self._actions[agent]

    def _observed(self) -> dict[str, Any]:
        observed = {agent: self._observations[agent].sample() for agent in self.agents}
        self.sent.append(observed)
        return observed

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        if seed is not None:
            for number, space in enumerate(self._observations.values()):
                space.seed(seed + number)
        return self._observed(), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> Any:
        for agent, action in actions.items():
            assert self._actions[agent].contains(action), (agent, action)
        self.given.append(dict(actions))
        none = dict.fromkeys(self.agents, False)
        return self._observed(), dict.fromkeys(self.agents, 0.5), none, none, {agent: {} for agent in self.agents}


def kill_at(step: int) -> Callable[[int], object]:
    """A fault that kills the process at a step."""
    return lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == step else None


MIXED = {
    "box": Box(-1, 1, (3,), np.float32),
    "image": Box(0, 255, (4, 4, 3), np.uint8),
    "number": Box(-1, 1, (), np.float64),
    "discrete": Discrete(4, start=1),
    "multi": MultiDiscrete([2, 3]),
    "dict": Dict(position=Box(-1, 1, (2,), np.float32), camera=Dict(zoom=Discrete(3))),
    "tuple": Tuple((Discrete(3), Box(-1, 1, (2,), np.float32))),
    "text": Text(5),
}
