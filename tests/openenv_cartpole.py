"""CartPole behind OpenEnv's own server, for comparison: `uvicorn openenv_cartpole:app`. Needs openenv-core."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field


class CartPoleAction(Action):
    action: int


class CartPoleObservation(Observation):
    observation: list[float] = Field(default_factory=list)


class CartPole(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._env = gym.make("CartPole-v1")
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CartPoleObservation:
        observation, _ = self._env.reset(seed=seed)
        self._state = State(step_count=0)
        return CartPoleObservation(observation=observation.tolist())

    def step(self, action: CartPoleAction, timeout_s: float | None = None, **_: Any) -> CartPoleObservation:
        observation, reward, terminated, truncated, _ = self._env.step(action.action)
        self._state.step_count += 1
        return CartPoleObservation(observation=observation.tolist(), reward=float(reward), done=terminated or truncated)

    @property
    def state(self) -> State:
        return self._state


app = create_app(CartPole, CartPoleAction, CartPoleObservation, max_concurrent_envs=600)
