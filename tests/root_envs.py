"""Torch envs whose `_step` reads the root that it is given, as many of the field's do."""

from __future__ import annotations

import os
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs import EnvBase
from aioenvs.specs import Categorical, Composite, Unbounded

__all__ = ["KeepingEnv", "MovingEnv", "acting"]


def acting(actions: list[float]) -> TensorDict:
    """Actions for as many envs."""
    return TensorDict({"action": torch.tensor(actions).reshape(-1, 1)}, batch_size=[len(actions)])


class MovingEnv(EnvBase):
    """Adds its action to the position in its root; the position itself it does not keep.

    Args:
        limit: Beyond it the episode is over.
        nested: Whether the position is a nested entry.
        locked: Whether it only takes TensorDicts of its batch size.
    """

    LAST_WORDS = 99  # the action that ends its process

    def __init__(self, limit: float = 1e9, *, nested: bool = False, locked: bool = True) -> None:
        super().__init__()
        self._batch_locked = locked
        self.limit = limit
        self.key = ("agent", "position") if nested else "position"
        self.observation_spec = Composite()
        self.observation_spec[self.key] = Unbounded((1,))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Composite(done=Categorical(2, (1,), dtype=torch.bool))

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        return TensorDict().set(self.key, torch.zeros(1))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict["action"] == self.LAST_WORDS:
            os._exit(3)
        position = tensordict[self.key] + tensordict["action"]
        return TensorDict(reward=position.square(), done=position > self.limit).set(self.key, position)


class KeepingEnv(MovingEnv):
    """Changes the tensor that it handed over in place; the reward is by how much it changed."""

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        self.position = torch.zeros(1)
        return TensorDict(position=self.position)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.position += tensordict["action"]
        return TensorDict(position=self.position, reward=self.position - tensordict["position"])
