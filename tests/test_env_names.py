"""What envs are called, and that those of one class are of one kind."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from aioenvs import AsyncParallelEnv


class Nameless:
    """A coroutine env that says nothing of itself."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("backend", ["process", "thread", "serial"])
async def test_envs_without_a_name_of_their_own_have_one_description(backend: str) -> None:
    async with AsyncParallelEnv(3, Nameless, backend=backend) as env:
        assert env._running is not None
        first, *others = env._running.pool.metadata
        assert first.name == "Nameless"
        assert all(other is first for other in others)
