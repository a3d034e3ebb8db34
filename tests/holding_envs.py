"""Envs that keep what they are given, and give what they keep. Workers import this module, so it imports no torch."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from failing_envs import CountingEnv

__all__ = ["Holding", "HoldingGymEnv", "OddEnv"]


class Holding:
    """Has things that callers may ask for; the lock is one that cannot leave its process."""

    shared: ClassVar[list[int]] = [0]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.things = [1, 2]
        self.lock = threading.Lock()
        self.weights = {"w": np.zeros(2)}
        self.given: Any = None

    def give(self) -> list[int]:
        return self.things

    def give_shared(self) -> list[int]:
        return self.shared

    def take(self, given: Any) -> bool:
        self.given = given
        return True

    def has(self, given: Any) -> bool:
        return self.given is given

    def add(self) -> None:
        self.things.append(len(self.things))
        self.weights["w"] += 1

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.weights = state


class HoldingGymEnv(Holding, CountingEnv):
    """Of Gymnasium's kind."""


class OddEnv(gym.Env[Any, Any]):
    """Observes what does not fit its space; the space is of the size that it is told."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, size: int, wrong: bool) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (size,), np.float32)
        self.wrong = wrong

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(9 if self.wrong else self.observation_space.shape, np.float32), {}
