"""Envs whose values are of unusual types. Workers import this module, so it must not import torch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

__all__ = ["Odd", "Reusing", "Seeded", "Tagged"]


class Tagged(np.ndarray):
    """An array of a class of its own."""


class Odd(gym.Env[Any, Any]):
    """Returns values that are not of the types that its space would draw, in episodes of one step.

    Args:
        kind: Which.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, kind: str) -> None:
        self.kind = kind
        box = spaces.Box(-9, 9, (2,), np.float32)
        self.observation_space = {
            "int": spaces.Discrete(9),
            "dict": spaces.Dict(a=box, n=spaces.Discrete(9)),
            "tuple": spaces.Tuple((box, spaces.Text(9))),
        }.get(kind, box)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._observation(0), {}

    def step(self, action: Any) -> Any:
        return self._observation(1), 0.0, True, False, {}

    def _observation(self, number: int) -> Any:
        array = np.full(2, number, np.float32)
        values: dict[str, Any] = {
            "plain": array,
            "float64": array.astype(np.float64),
            "list": [float(number)] * 2,
            "class": array.view(Tagged),
            "int": number,
            "dict": OrderedDict(n=number, a=array),
            "tuple": (array.astype(np.float64), "word"),
        }
        return values[self.kind]


class Reusing(Odd):
    """Writes to the one array that it returned before."""

    def _observation(self, number: int) -> Any:
        self.array = getattr(self, "array", np.zeros(2))
        self.array[:] = number
        return self.array


class Seeded(gym.Env[Any, Any]):
    """Says what its seed was; Gymnasium's own check of it is that it is an int."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)
    seed: Any = None

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.seed = (type(seed).__name__, seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}
