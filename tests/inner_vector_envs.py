"""Vector envs, and what makes them, for tests of these inside workers, which import this module: no torch here."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

__all__ = ["PARTS", "SEED", "Countdown", "Texts", "pool", "vector"]

PARTS, SEED = 3, 7


class Countdown(gym.Env[Any, Any]):
    """Counts its steps; an episode ends after a few, of which the seed says how many."""

    observation_space = gym.spaces.Dict(
        {"steps": gym.spaces.Box(0, 100, (2,), np.float64), "kind": gym.spaces.Discrete(9, start=-1)}
    )
    action_space = gym.spaces.MultiDiscrete([3, 4])

    def __init__(self, fail_at: int = 0) -> None:
        self._left, self._fail_at = 0, fail_at
        self._steps = np.zeros(2)

    def _observation(self) -> Any:
        return {"steps": self._steps.copy(), "kind": np.int64(self._left % 9 - 1)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(2, 6))
        self._steps[:] = (0, self._left)
        return self._observation(), {"episode": self._left}

    def step(self, action: Any) -> Any:
        if self._fail_at and self._steps[0] + 1 == self._fail_at:
            raise ZeroDivisionError("as it was told")
        self._left -= 1
        self._steps[0] += 1
        reward = float(action[0]) + 0.25 * float(action[1])
        return self._observation(), reward, self._left == 0, False, {"left": self._left}


def vector(mode: AutoresetMode, parts: int = PARTS, kind: type = SyncVectorEnv, **kwargs: Any) -> VectorEnv:
    return kind([functools.partial(Countdown, **kwargs)] * parts, autoreset_mode=mode)


def pool(parts: int = PARTS, seed: int = SEED, env_id: str = "CartPole-v1", **kwargs: Any) -> Any:
    import envpool

    return envpool.make_gymnasium(env_id, num_envs=parts, seed=seed, **kwargs)


class Texts(Countdown):
    """Observes a text."""

    observation_space = gym.spaces.Text(5)
