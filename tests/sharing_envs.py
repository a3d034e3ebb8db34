"""Envs that use what their factory shares with the process that started them. Imported by workers: no torch."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["BareEnv", "SharingEnv"]


class SharingEnv(gym.Env[Any, Any]):
    """Counts its steps with those of all others, in each of the things it was given, and observes the counts.

    Args:
        count: A value with a lock.
        counts: An array, of which it adds to the first.
        lock: Held while it does so.
        queue: Gets its process id when it was made.
        pipe: The writing end of a pipe, which gets its process id, too.
        tensor: One in shared memory; None for no tensor.
    """

    observation_space = gym.spaces.Box(0, 1000, (3,), np.int64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, count: Any, counts: Any, lock: Any, queue: Any, pipe: Any, tensor: Any = None) -> None:
        self.count, self.counts, self.lock, self.tensor = count, counts, lock, tensor
        queue.put(os.getpid())
        with lock:
            pipe.send(os.getpid())

    def _observe(self) -> Any:
        told = 0 if self.tensor is None else int(self.tensor[0])
        return np.array([self.count.value, self.counts[0], told], np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        with self.count.get_lock():
            self.count.value += 1
        with self.lock:
            self.counts[0] += 1
            if self.tensor is not None:
                self.tensor += 1
        return self._observe(), 0.0, False, False, {}


class BareEnv(gym.Env[Any, Any]):
    """Says how many descriptors its process has."""

    observation_space = action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, False, False, {}

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))
