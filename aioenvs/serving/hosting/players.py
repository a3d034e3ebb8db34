"""Envs with the signatures of Gymnasium and of PettingZoo, and the payloads of their actions and observations."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from aioenvs.serving.spaces import payload_of, received, unwrapped

__all__ = ["Agents", "Plain"]


class Plain:
    """An env with Gymnasium's signatures.

    Args:
        env: The env, whose methods may be coroutine functions.

    Attributes:
        observation_space: Its space; None if it says nothing of it.
        action_space: The same for actions.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space: Any = getattr(env, "observation_space", None)
        self.action_space: Any = getattr(env, "action_space", None)

    def action(self, given: Any, *, payload: bool) -> Any:
        """Return an action that was given as itself, or as the payload of a message.

        Raises:
            MessageError: If it is none of the env's.
        """
        return received(self.action_space, unwrapped(self.action_space, given, "action") if payload else given)

    def reset(self, seed: int | None, options: Any) -> Any:
        """Begin an episode, with Gymnasium's signature."""
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Take a step."""
        return self.env.step(action)

    def observed(self, observation: Any, *, payload: bool) -> Any:
        """Return an observation as itself, or as the payload of a message."""
        return payload_of(self.observation_space, observation, "observation") if payload else observation


class Agents(Plain):
    """An env with PettingZoo's signatures; its payloads are dicts by agent, and it is over once all agents are."""

    def __init__(self, env: Any) -> None:
        self.env = env
        agents = env.possible_agents
        self.observation_space = spaces.Dict({agent: env.observation_space(agent) for agent in agents})
        self.action_space = spaces.Dict({agent: env.action_space(agent) for agent in agents})

    def action(self, given: Any, *, payload: bool) -> Any:
        """Return the actions, one for each agent that lives."""
        return received(spaces.Dict({agent: self.action_space[agent] for agent in self.env.agents}), given)

    def step(self, action: Any) -> Any:
        """Take a step of all agents."""
        observations, rewards, terminated, truncated, infos = self.env.step(action)
        over = not self.env.agents or all(terminated[each] or truncated[each] for each in terminated)
        cut = over and any(truncated.values()) and not all(terminated.values())
        return observations, rewards, over and not cut, cut, infos

    def observed(self, observation: Any, *, payload: bool) -> Any:
        """Return the observations."""
        return observation
