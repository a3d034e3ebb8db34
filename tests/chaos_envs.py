"""The envs of chaos.py: what they observe follows from what they were told, so that the wrong answer shows."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from aioenvs.errors import ResetNeededError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker has the tests on its path

__all__ = ["FAILING", "UNTOLD", "ChaosEnv", "bulk_of", "length_of", "make_torch_env", "reward_of"]

UNTOLD = -1  # what an env was last told after a reset without options
FAILING = 61  # every so many actions one makes its env fail
MODULUS = 251


class ChaosEnv(gym.Env[Any, Any]):
    """Observes `mark` `[index, generation, episode, step, last]`, and `bulk`, which follows from it.

    Args:
        index: Its index.
        size: Of `bulk`.
        loose: Whether `bulk` is a text, which travels as an object, rather than an array.
    """

    action_space = gym.spaces.Discrete(2**62)

    def __init__(self, index: int, size: int, loose: bool) -> None:
        bulk: Any = gym.spaces.Box(0, 255, (size,), np.uint8)
        if loose:
            bulk = gym.spaces.Text(max(size, 1), charset=[chr(65 + i) for i in range(26)])
        self.observation_space = gym.spaces.Dict(mark=gym.spaces.Box(-(2**63), 2**63 - 1, (5,), np.int64), bulk=bulk)
        self.index, self.size, self.loose = index, size, loose
        self.generation = uuid.uuid4().int >> 65
        self.episode, self.steps, self.last = 0, 0, UNTOLD

    @property
    def mark(self) -> tuple[int, ...]:
        return self.index, self.generation, self.episode, self.steps, self.last

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.steps, self.last = self.episode + 1, 0, (options or {}).get("told", UNTOLD)
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        if not self.episode:
            raise ResetNeededError(f"env {self.index} was never reset")
        if action % FAILING == 0:
            raise ValueError(f"env {self.index} was told {int(action)}")
        self.steps, self.last = self.steps + 1, int(action)
        return self._observation(), reward_of(self.last), self.steps >= length_of(self.index), False, {}

    def echo(self, told: int, payload: bytes) -> tuple[tuple[int, ...], int, bytes]:
        return self.mark, told, payload[::-1]

    def _observation(self) -> Any:
        return {"mark": np.array(self.mark, np.int64), "bulk": bulk_of(self.mark, self.size, self.loose)}


def make_torch_env(index: int, size: int, loose: bool) -> Any:
    """The same as a torch env; only here is torch needed."""
    import torch
    from tensordict import NonTensorData, TensorDict

    from aioenvs.envs import EnvBase
    from aioenvs.specs import Categorical, Composite, NonTensor, Unbounded

    class TorchChaosEnv(EnvBase):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ChaosEnv(index, size, loose)
            bulk = NonTensor((), example_data="A") if loose else Unbounded((size,), dtype=torch.uint8)
            self.observation_spec = Composite(mark=Unbounded((5,), dtype=torch.int64), bulk=bulk)
            self.action_spec = Unbounded((), dtype=torch.int64)
            self.reward_spec = Unbounded((1,))
            names = ("done", "terminated", "truncated")
            self.done_spec = Composite({name: Categorical(2, shape=(1,), dtype=torch.bool) for name in names})

        @property
        def mark(self) -> tuple[int, ...]:
            return self.inner.mark

        def echo(self, *args: Any) -> Any:
            return self.inner.echo(*args)

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
            observation, _ = self.inner.reset(**kwargs)
            return self._answer(observation, False)

        def _step(self, tensordict: Any) -> Any:
            observation, reward, over, _, _ = self.inner.step(int(tensordict["action"]))
            return self._answer(observation, over).set("reward", torch.tensor([reward]))

        def _answer(self, observation: Any, over: bool) -> Any:
            bulk = NonTensorData(observation["bulk"]) if loose else torch.from_numpy(observation["bulk"])
            flags = {
                "done": torch.tensor([over]),
                "terminated": torch.tensor([over]),
                "truncated": torch.tensor([False]),
            }
            return TensorDict({"mark": torch.from_numpy(observation["mark"]), "bulk": bulk, **flags})

        def _set_seed(self, seed: int | None) -> None:
            pass

    return TorchChaosEnv()


def reward_of(action: int) -> float:
    return float(action % 1000 + 1)


def length_of(index: int) -> int:
    return 5 + 3 * index


def bulk_of(mark: Sequence[int], size: int, loose: bool) -> Any:
    number = sum(mark) % MODULUS
    return chr(65 + number % 26) * max(size, 1) if loose else np.full(size, number, np.uint8)
