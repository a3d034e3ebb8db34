"""Envs for tests in a Ray cluster; hosts import this module, so it must not import torch."""

from __future__ import annotations

import asyncio
from typing import Any

import gymnasium as gym
import numpy as np
from coroutine_envs import AwaitingEnv
from failing_envs import CountingEnv

__all__ = ["PatientEnv", "PlacedEnv", "WordEnv"]


class PlacedEnv(CountingEnv):
    """Knows on which node of the cluster it is."""

    def __init__(self, env_id: int = 0, **options: Any) -> None:
        import ray

        super().__init__(env_id, **options)
        self.node = ray.get_runtime_context().get_node_id()


class WordEnv(gym.Env[Any, Any]):
    """Observes what was said so far, and its length; its episodes end after ten letters."""

    observation_space = gym.spaces.Dict(said=gym.spaces.Text(100), length=gym.spaces.Box(0, 100, (1,), np.int64))
    action_space = gym.spaces.Text(3, charset="abc")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.said = "" if seed is None else f"{seed % 10}"
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.said += action
        return self._observation(), float(len(action)), len(self.said) > 10, False, {}

    def _observation(self) -> Any:
        return {"said": self.said, "length": np.array([len(self.said)], np.int64)}


class PatientEnv(AwaitingEnv):
    """Waits in its second step until it is cancelled, and remembers that it was."""

    def __init__(self, env_id: int = 0, *, waits: bool = False) -> None:
        super().__init__(env_id, fault=self._wait if waits else None, at=(1, 2))
        self.cancelled = 0

    async def _wait(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
