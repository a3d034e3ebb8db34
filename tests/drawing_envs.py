"""Gymnasium envs that draw from the generators of their process. Workers import this module, so it imports no torch."""

from __future__ import annotations

import importlib
import random
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["SharedDiceEnv", "TorchDiceEnv"]


class SharedDiceEnv(gym.Env[Any, Any]):
    """Observes a draw from each generator; an episode lasts five steps.

    Args:
        late: The step, counted over all episodes, from which it draws from the process's generators.
        torch_too: Whether it uses torch.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, late: int = 0, torch_too: bool = False) -> None:
        self.late = late
        self.torch = importlib.import_module("torch") if torch_too else None
        self.steps = 0

    def observation(self) -> Any:
        shared = [0.0, 0.0, 0.0]
        if self.steps >= self.late:
            last = 0.0 if self.torch is None else self.torch.rand((), dtype=self.torch.float64).item()
            shared = [random.random(), np.random.rand(), last]
        return np.array([*shared, self.np_random.random()])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.observation(), 1.0, self.steps % 5 == 0, False, {}


class TorchDiceEnv(SharedDiceEnv):
    """The same with torch."""

    def __init__(self, late: int = 0) -> None:
        super().__init__(late, torch_too=True)
