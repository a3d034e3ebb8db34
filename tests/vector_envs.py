"""Gymnasium envs for the tests of vector environments. Workers import this module, so it must not import torch."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

__all__ = ["Careless", "Chatty", "Endless", "Informer", "Mixed", "Regular", "StepFails", "Surveyor"]


class Endless(gym.Env[Any, Any]):
    """Has infos in which a dict contains itself, or others without end, at its second step.

    Args:
        kind: "self", "inner" or "deep"; or "list" for a list that contains itself.
    """

    observation_space = spaces.Box(-99, 99, (1,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, kind: str | None = None) -> None:
        self.kind = kind
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {"lives": 3}

    def step(self, action: Any) -> Any:
        self.steps += 1
        info = self._info() if self.steps == 2 else {}
        return np.full(1, self.steps, np.float32), 1.0, False, False, {"lives": 3, **info}

    def _info(self) -> dict[str, Any]:
        inner: dict[str, Any] = {"level": 1}
        info: dict[str, Any] = {"inner": inner, "same": inner}
        if self.kind == "self":
            info["all"] = info
        elif self.kind == "inner":
            inner["itself"] = inner
        elif self.kind == "list":
            info["list"] = [info]
        elif self.kind == "deep":
            for _ in range(200):
                inner = inner.setdefault("more", {})
        return info


class Informer(gym.Env[Any, Any]):
    """Has infos of all kinds, other ones in each env, and an episode of `3 + number` steps.

    Args:
        number: Of the env.
    """

    observation_space = spaces.Box(-99, 99, (2,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.level = 7
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.options = options
        return self._observation(), {"began": True, "draw": float(self.np_random.random()), "options": options}

    def step(self, action: Any) -> Any:
        self.steps += 1
        info: dict[str, Any] = {
            "number": 2 if self.number == 0 else 2.7,
            "count": self.steps,
            "flag": self.steps % 2 == 0,
            "place": np.array([self.number, self.steps]),
            "ragged": np.arange(self.number + 1),
            "nothing": None,
            "maybe": None if self.number == 1 else 1,
            "word": f"env {self.number}",
            "nested": {"depth": 1.5, "deeper": {"n": self.steps}},
            "either": {"a": 1} if self.number else 5,
        }
        if self.number == 2:
            info["rare"] = np.float32(0.5)
        return self._observation(), 0.1 * int(action), self.steps == 3 + self.number, False, info

    def _observation(self) -> Any:
        return np.array([self.number, self.steps], np.float32)

    def double(self, value: int, plus: int = 0) -> int:
        return 2 * value + self.number + plus

    def render(self) -> Any:
        return np.full((2, 2, 3), self.number, np.uint8)


class Careless(gym.Env[Any, Any]):
    """Uses one array for all observations, and one dict, with one array, for all infos."""

    observation_space = spaces.Box(0, 99, (1,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 2) -> None:
        self.length = length
        self.observation = np.zeros(1, np.int64)
        self.info: dict[str, Any] = {"steps": 0, "array": np.zeros(2)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.observation[0] = self.info["steps"] = 0
        self.info["array"][:] = -1
        return self.observation, self.info

    def step(self, action: Any) -> Any:
        self.observation[0] += 1
        self.info["steps"] += 1
        self.info["array"][:] = self.info["steps"]
        return self.observation, 0.0, self.info["steps"] == self.length, False, self.info


class Mixed(gym.Env[Any, Any]):
    """Dict, Tuple and Text in both directions; says in its info what its action was."""

    observation_space = spaces.Dict(
        at=spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(4, start=2))),
        bits=spaces.MultiBinary(3),
        word=spaces.Text(8),
    )
    action_space = spaces.Dict(
        move=spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(3, start=-1))),
        say=spaces.Text(6),
        some=spaces.MultiDiscrete([2, 3]),
    )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        said = [len(action["say"]), int(action["move"][1]), *action["some"].tolist()]
        heard = {"said": np.array(said), "moved": action["move"][0], "words": action["say"]}
        return self._observation(), float(action["move"][0].sum()), self.np_random.random() < 0.2, False, heard

    def _observation(self) -> Any:
        word = "abcdefgh"[: int(self.np_random.integers(1, 8))]
        at = (self.np_random.random(2, np.float32), self.np_random.integers(2, 6))
        return {"word": word, "at": at, "bits": self.np_random.integers(0, 2, 3).astype(np.int8)}


class Chatty(gym.Env[Any, Any]):
    """Answers a text by a text."""

    observation_space = spaces.Text(20)
    action_space = spaces.Text(10)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.turns = 0
        return "hello", {}

    def step(self, action: Any) -> Any:
        self.turns += 1
        return f"{action}!", 1.0, self.turns == 4, False, {}


class StepFails(gym.Env[Any, Any]):
    """Fails where its action is 1."""

    observation_space = spaces.Discrete(100)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ZeroDivisionError("action 1")
        self.steps += 1
        return self.steps, 1.0, False, False, {}


class Surveyor(Informer):
    """Says what is imported where it lives."""

    def imported(self, *names: str) -> list[bool]:
        return [name in sys.modules for name in names]


class Regular(Informer):
    """Has infos of which Gymnasium makes the same."""

    def step(self, action: Any) -> Any:
        *outcome, info = super().step(action)
        return (*outcome, {key: info[key] for key in ("count", "flag", "place", "word", "nested")})
