"""Toy Gymnasium envs over every space. Workers import this module by name, so it needs no test library."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from failing_envs import CountingEnv
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Space,
    Text,
    Tuple,
)

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")


def _integers(dtype: str) -> Box:
    info = np.iinfo(dtype)
    return Box(info.min // 2, min(info.max, 2**62) // 2, (2, 3), dtype=np.dtype(dtype).type)


FIXED: dict[str, Callable[[], Space]] = {
    **{dtype: lambda dtype=dtype: Box(-2, 3, (2, 3), dtype=np.dtype(dtype).type) for dtype in FLOATS},
    **{dtype: lambda dtype=dtype: _integers(dtype) for dtype in INTEGERS},
    "bool": lambda: Box(0, 1, (4,), dtype=np.bool_),
    "unbounded": lambda: Box(-np.inf, np.inf, (2,)),
    "half-bounded": lambda: Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 1], np.float32)),
    "scalar": lambda: Box(-1, 1, ()),
    "scalar-uint8": lambda: Box(0, 255, (), dtype=np.uint8),
    "no-elements": lambda: Box(-1, 1, (0,)),
    "image": lambda: Box(0, 255, (5, 4, 3), dtype=np.uint8),
    "discrete": lambda: Discrete(5),
    "discrete-from-3": lambda: Discrete(4, start=3),
    "discrete-from-minus-7": lambda: Discrete(4, start=-7),
    "multi-discrete": lambda: MultiDiscrete([3, 4, 5]),
    "multi-discrete-2d": lambda: MultiDiscrete([[2, 3], [4, 5]], start=[[-1, 10], [0, -6]]),
    "multi-binary": lambda: MultiBinary(6),
    "multi-binary-2d": lambda: MultiBinary((2, 3)),
    "dict": lambda: Dict(left=Box(-1, 1, (3,)), right=Discrete(3, start=-1)),
    "tuple": lambda: Tuple((Box(-1, 1, (3,)), Discrete(3, start=1), MultiBinary(2))),
    "dict-of-tuple-of-dict": lambda: Dict(
        hand=Tuple((Dict(finger=Box(0, 9, (2,), dtype=np.int16), thumb=Discrete(2)), Box(-1, 1, ()))),
        eye=Dict(left=Box(0, 255, (2, 2), dtype=np.uint8)),
    ),
    "tuple-of-dict-of-tuple": lambda: Tuple(
        (Dict(a=Tuple((Discrete(3), MultiDiscrete([2, 2])))), Tuple((Discrete(4),))),
    ),
}
if "dtype" in inspect.signature(Discrete).parameters:
    FIXED["discrete-int16"] = lambda: Discrete(4, start=-2, dtype=np.int16)

LOOSE: dict[str, Callable[[], Space]] = {
    "text": lambda: Text(12),
    "sequence": lambda: Sequence(Box(-1, 1, (2,))),
    "sequence-of-discrete": lambda: Sequence(Discrete(3)),
    "sequence-of-dict": lambda: Sequence(Dict(a=Discrete(3), b=Text(4))),
    "sequence-stacked": lambda: Sequence(Box(-1, 1, (2,)), stack=True),
    "graph": lambda: Graph(Box(-1, 1, (2,)), Discrete(3)),
    "one-of": lambda: OneOf((Discrete(3), Box(-1, 1, (2,)), Text(5))),
    "dict-mixed": lambda: Dict(
        word=Text(8), number=Discrete(4), deep=Dict(way=Sequence(Discrete(2)), at=Box(-1, 1, (2,)))
    ),
    "tuple-mixed": lambda: Tuple(
        (Text(8), Box(-1, 1, (2,)), Tuple((OneOf((Discrete(2), Discrete(5))), MultiBinary(3)))),
    ),
}
SPACES = FIXED | LOOSE


def describe(value: Any) -> str:
    """Types, dtypes, shapes and values, so that equal descriptions mean equal values."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {describe(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(describe, value))})"
    if isinstance(value, np.ndarray | np.floating | np.unsignedinteger):  # Gymnasium's 0-d Boxes sample either
        return f"{value.dtype}{value.shape}{value.tolist()}"
    return f"{type(value).__name__} {value!r}"


class EchoEnv(gym.Env):
    """Returns the last action, and unless `plain` a description of it; a reset returns `options["value"]`.

    Args:
        space: Of actions, and of what is returned for them.
        plain: Whether an observation is the action and nothing else.
        length: Steps of an episode, which ends truncated.
    """

    def __init__(self, space: Space, *, plain: bool = False, length: int = 1000) -> None:
        self.action_space = copy.deepcopy(space)
        self.observation_space = self.action_space if plain else Dict(echo=self.action_space, seen=Text(10**8))
        self.length = length
        self.first: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.first = self.first if options is None else options["value"]
        return self._observation(self.first, "reset"), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        seen = describe(action) if self.action_space.contains(action) else f"no action: {describe(action)}"
        return self._observation(action, seen), float(self.steps), False, self.steps == self.length, {}

    def _observation(self, value: Any, seen: str) -> Any:
        plain = self.observation_space is self.action_space
        return value if plain else {"echo": value, "seen": seen}


class ScriptedEnv(gym.Env):
    """Returns what it was told to: `values[0]` at a reset, then the others in turn; each ends an episode.

    Args:
        space: Of the observations, true or not.
        values: At least two, true to the space or not.
        reward: What each step gives.
    """

    action_space = Discrete(2)

    def __init__(self, space: Space, *values: Any, reward: Any = 0.0) -> None:
        self.observation_space = space
        self.values = values
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self.values[0], {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.values[self.steps], self.reward, self.steps == len(self.values) - 1, False, {}


class ReusingEnv(gym.Env):
    """Counts steps in one array (or an object that holds one), which it returns each time; -1 after a reset.

    Args:
        kind: What holds the array: "box", "dict", "tuple", or the loose "sequence" and "list".
        length: Steps of an episode.
    """

    action_space = Discrete(2)
    box = Box(-10, 1000, (2,))
    spaces: dict[str, Space] = {  # noqa: RUF012
        "box": box,
        "dict": Dict(inner=box),
        "tuple": Tuple((box,)),
        "sequence": Sequence(box),
        "loose-dict": Sequence(Dict(inner=box)),
    }

    def __init__(self, kind: str, length: int = 3) -> None:
        self.observation_space = self.spaces[kind]
        self.length = length
        self.array = np.zeros(2, np.float32)
        holders = {
            "box": self.array,
            "dict": {"inner": self.array},
            "tuple": (self.array,),
            "sequence": (self.array,),
            "loose-dict": ({"inner": self.array},),
        }
        self.observation = holders[kind]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.array[:] = -1
        self.steps = 0
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.array[:] = self.steps
        return self.observation, 1.0, self.steps == self.length, False, {}


class OverwritingEnv(gym.Env):
    """Changes the action that it is given, in place."""

    observation_space = Box(-1, 1000, (1,))

    def __init__(self, space: Space) -> None:
        self.action_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        array = action if isinstance(action, np.ndarray) else action[0]
        array[...] = 99
        return np.ones(1, np.float32), 0.0, False, False, {}


class OptionsEnv(gym.Env):
    """Observes its own number, the seed and the options of its last reset as text, and changes the options."""

    action_space = Discrete(2)
    observation_space = Dict(number=Box(-1, 10**6, (), dtype=np.int64), told=Text(1000))

    def __init__(self, number: int = -1, options: dict[str, Any] | None = None) -> None:
        self.number = number
        if options is not None:
            options["built"] = number

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.told = f"{seed} {options}"
        if options is not None:
            options["seen"] = self.number
            options.get("nested", []).append(self.number)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observation(), 0.0, False, False, {}

    def _observation(self) -> dict[str, Any]:
        return {"number": np.int64(self.number), "told": self.told}


class MarkedEnv(CountingEnv):
    """A `CountingEnv` that also observes its step further down, and as text."""

    observation_space = Dict(
        observation=CountingEnv.observation_space, agent=Dict(count=Box(-1, 1000, (1,), np.int16)), word=Text(50)
    )

    def _observation(self) -> Any:
        word = f"{self.env_id}.{self.episode}.{self.steps}"
        return {
            "observation": super()._observation(),
            "agent": {"count": np.array([self.steps], np.int16)},
            "word": word,
        }


class ChoiceEnv(gym.Env[Any, Any]):
    """Observes its last action, and the number of its steps.

    Args:
        n: How many actions there are.
    """

    observation_space = Box(0, 100, (2,), np.float32)

    def __init__(self, n: int = 2) -> None:
        self.action_space = Discrete(n)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return np.array([100, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.steps += 1
        return np.array([action, self.steps], np.float32), 1.0, False, False, {}


class HintedCartPole(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps what its resets were given."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.resets: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.resets.append((seed, copy.deepcopy(options)))
        if options is not None:
            options["spoilt"] = True
        return self.env.reset(seed=seed)


class EveryDtype(gym.Env[Any, Any]):
    """Observes a value of each dtype."""

    DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "uint16", "uint32")

    observation_space = gym.spaces.Dict(
        {name: gym.spaces.Box(0, 1, (3,) if name != "int16" else (), np.dtype(name)) for name in DTYPES}
    )
    action_space = gym.spaces.Dict(
        {
            "flag": gym.spaces.Discrete(2),
            "size": gym.spaces.Box(-1, 1, (3,), np.float32),
            "n": gym.spaces.MultiBinary(3),
        }
    )

    def __init__(self) -> None:
        self.observation_space = copy.deepcopy(type(self).observation_space)  # whose generator others have no part in

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(3)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        total = float(action["flag"]) + float(action["size"].sum()) + float(action["n"].sum())
        return self.observation_space.sample(), total, False, False, {}


class Pictures(gym.Env[Any, Any]):
    """Observes large pictures, all of whose pixels are the number of its steps."""

    observation_space = Box(0, 255, (4, 420, 420), np.uint8)
    action_space = Discrete(1000)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros((4, 420, 420), np.uint8), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full((4, 420, 420), self.steps % 256, np.uint8), 0.0, False, False, {}
