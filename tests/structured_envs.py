"""Envs that deal in what has no fixed shape; in a module of their own, since workers import it."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from aioenvs import Anything, EnvBase
from aioenvs.specs import Composite, NonTensor, Unbounded

__all__ = ["BulkEnv", "ChatEnv", "TensorChatEnv", "TextEnv"]


class ChatEnv(gym.Env[Any, Any]):
    """A conversation; an image that grows with it, None in env 0; and how long it is, which has a fixed shape.

    Args:
        index: Its index.
    """

    observation_space = spaces.Dict(messages=Anything(), image=Anything(), length=spaces.Box(0, 99, (1,), np.int64))
    action_space = Anything([{"role": "user", "content": "Go on."}, None, [1, [2.5, "x"]]])

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.messages: list[Any] = []

    def _observation(self) -> dict[str, Any]:
        length = len(self.messages)
        image = np.full((length, 2 + self.index), length, np.uint8) if self.index else None
        return {"messages": self.messages, "image": image, "length": np.array([length])}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.messages = [{"role": "system", "content": f"You are env {self.index}."}]
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.messages.append(action)
        return self._observation(), float(len(self.messages)), len(self.messages) > 4, False, {}


class TensorChatEnv(EnvBase):
    """The same conversation, on TensorDicts.

    Args:
        index: Its index.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.messages: list[Any] = []
        self.observation_spec = Composite(
            messages=NonTensor(()), image=NonTensor(()), length=Unbounded((1,), dtype=torch.int64)
        )
        self.action_spec = NonTensor(())
        self.reward_spec = Unbounded((1,))

    def _observation(self) -> TensorDict:
        length = len(self.messages)
        td = TensorDict(length=torch.tensor([length]))
        td.set_non_tensor("messages", list(self.messages))
        td.set_non_tensor("image", np.full((length, 2 + self.index), length, np.uint8) if self.index else None)
        return td

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        self.messages = [{"role": "system", "content": f"You are env {self.index}."}]
        return self._observation()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.messages.append(tensordict["action"])
        length = len(self.messages)
        return self._observation().update({"reward": torch.tensor([float(length)]), "done": torch.tensor([length > 4])})

    def _set_seed(self, seed: int | None) -> None:
        pass


class BulkEnv(gym.Env[Any, Any]):
    """Gets bytes and gives them back reversed; it tells whether torch is loaded around it.

    Args:
        index: Its index.
    """

    observation_space = Anything()
    action_space = Anything([b""])

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return bytes([self.index]), {}

    def step(self, action: bytes) -> Any:
        return action[::-1], 0.0, False, False, {}

    def has_torch(self) -> bool:
        return "torch" in sys.modules


class TextEnv(gym.Env[str, str]):
    """Observes the text that it is given.

    Args:
        length: How long that may be.
    """

    def __init__(self, length: int = 3) -> None:
        self.observation_space = self.action_space = spaces.Text(length)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "-", {}

    def step(self, action: str) -> Any:
        return action, 0.0, False, False, {}
