"""How a worker drives one env: the interface, and the adapter for Gymnasium's `reset` and `step`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from aioenvs.engine.layout import Arrays, Key, Leaf
from aioenvs.engine.metadata import (
    ACTION,
    DONE_KEYS,
    NEXT,
    REWARD_KEY,
    ROOT,
    EnvMetadata,
    find_collision,
)
from aioenvs.engine.spaces import Objects, Reader, SpaceLeaf, Writer, flatten, observation_key, reader, writer
from aioenvs.errors import ResetNeededError, SpecMismatchError

FLOAT32_MAX = float(np.finfo(np.float32).max)

__all__ = ["EnvAdapter", "GymAdapter", "adapt", "build"]


class EnvAdapter(Protocol):
    """One env behind the worker's commands. Values go through the rows it was bound to."""

    metadata: EnvMetadata

    def bind(self, arrays: Mapping[str, Arrays], row: int) -> None:
        """Take these arrays, by region, and this row of each, for all values of fixed shape."""

    def seed(self, seed: int) -> None:
        """Use this seed at the next reset."""

    def reset(self, kwargs: Mapping[str, Any]) -> None:
        """Begin an episode; the observation goes to the `root` region."""

    def step(self) -> bool:
        """Take one step with the stored action; the outcome goes to `next`. True at an episode's end."""

    def objects(self, region: str) -> Objects:
        """The values of a region that have no fixed shape: filled by the parent for `action`, else by the env."""

    def close(self) -> None:
        """Close the env."""


def build(factory: Any, kwargs: Mapping[str, Any], env_index: int) -> EnvAdapter:
    """Call a factory, or make a registered Gymnasium env, and adapt what comes out.

    Raises:
        Exception: Whatever the factory raises.
        TypeError: If it returns something that is not an env.
    """
    if callable(factory):
        return adapt(factory(**kwargs), env_index)
    import gymnasium

    return adapt(gymnasium.make(factory, **kwargs), env_index)


def adapt(env: Any, env_index: int) -> EnvAdapter:
    """Find the adapter for what a factory returned.

    Raises:
        TypeError: If there is none; the message says what was found.
    """
    if isinstance(env, type) or not callable(getattr(env, "reset", None)) or not callable(getattr(env, "step", None)):
        found = f"the class {env.__name__}" if isinstance(env, type) else repr(env)
        raise TypeError(
            f"the factory of env {env_index} returned {found}; it must return an env, with methods reset and step"
        )
    if hasattr(env, "num_envs") and hasattr(env, "single_observation_space"):
        raise TypeError(f"the factory of env {env_index} returned the vector env {env!r}; it must return a single env")
    return GymAdapter(env, env_index)


class GymAdapter:
    """Drives an env with Gymnasium's signatures: `reset(seed=, options=)` and a five-tuple from `step`."""

    def __init__(self, env: Any, env_index: int) -> None:
        self.env = env
        self.env_index = env_index
        self.metadata = _describe(env, env_index)
        self._seed: int | None = None
        self._in_episode = False
        self._objects: dict[str, Objects] = {ACTION: {}, NEXT: {}, ROOT: {}}

    def bind(self, arrays: Mapping[str, Arrays], row: int) -> None:
        observation, following = observation_key(self.env.observation_space), arrays[NEXT]
        self._row = row
        self._write_root = self._writer(ROOT, observation, arrays)
        self._write_next = self._writer(NEXT, observation, arrays)
        self._read_action: Reader = reader(self.env.action_space, (ACTION,), arrays[ACTION], self._objects[ACTION], row)
        self._reward = following[REWARD_KEY].reshape(-1)
        self._done, self._terminated, self._truncated = (following[key].reshape(-1) for key in DONE_KEYS)

    def _writer(self, region: str, key: Key, arrays: Mapping[str, Arrays]) -> Writer:
        return writer(self.env.observation_space, key, arrays[region], self._objects[region], self._row)

    def seed(self, seed: int) -> None:
        self._seed = seed

    def reset(self, kwargs: Mapping[str, Any]) -> None:
        self._in_episode = False
        if self._seed is not None and "seed" not in kwargs:
            kwargs = {**kwargs, "seed": self._seed}
        result = self.env.reset(**kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpecMismatchError(f"env {self.env_index}: reset must return (observation, info), found {result!r}")
        self._write_root(result[0])
        self._seed = None
        self._in_episode = True

    def step(self) -> bool:
        if not self._in_episode:
            raise ResetNeededError(
                f"env {self.env_index} cannot step: it was not reset yet, or failed since; reset it first"
            )
        self._in_episode = False
        result = self.env.step(self._read_action())
        if not isinstance(result, tuple) or len(result) != 5:
            raise SpecMismatchError(
                f"env {self.env_index}: step must return (observation, reward, terminated, truncated, info), "
                f"found {result!r}"
            )
        observation, reward, terminated, truncated, _ = result
        row = self._row
        self._write_next(observation)
        self._reward[row] = reward if type(reward) is float and abs(reward) <= FLOAT32_MAX else self._scalar(reward)
        self._terminated[row] = terminated = self._flag("terminated", terminated)
        self._truncated[row] = truncated = self._flag("truncated", truncated)
        self._done[row] = done = terminated or truncated
        self._in_episode = True
        return done

    def _flag(self, name: str, value: Any) -> bool:
        if type(value) is bool:
            return value
        if isinstance(value, np.bool_ | int) or (isinstance(value, np.ndarray) and value.size == 1):
            return bool(value)
        raise SpecMismatchError(f"env {self.env_index}: expected a bool as {name}, found {value!r}")

    def _scalar(self, reward: Any) -> float:
        """A reward of any numeric type as a float, if float32 can hold it; NaN and infinity are the env's to give."""
        try:
            value = float(reward.item() if isinstance(reward, np.ndarray) else reward)
        except (TypeError, ValueError) as error:
            raise self._bad_reward("a number", reward) from error
        if abs(value) > FLOAT32_MAX and not math.isinf(value):
            raise self._bad_reward("a number that float32 can hold", reward)
        return value

    def _bad_reward(self, expected: str, reward: Any) -> SpecMismatchError:
        return SpecMismatchError(f"env {self.env_index}: expected {expected} as reward, found {reward!r}")

    def objects(self, region: str) -> Objects:
        return self._objects[region]

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def _describe(env: Any, env_index: int) -> EnvMetadata:
    name = str(env)
    for attribute in ("observation_space", "action_space"):
        space = getattr(env, attribute, None)
        if space is None or not hasattr(space, "sample"):
            raise SpecMismatchError(
                f"env {env_index} ({name}) must have a Gymnasium space as its {attribute}, found {space!r}"
            )
    if inspect.iscoroutinefunction(env.step) or inspect.iscoroutinefunction(env.reset):
        raise SpecMismatchError(f"env {env_index} ({name}) has coroutine methods, which need a coroutine adapter")
    observation = flatten(env.observation_space, observation_key(env.observation_space))
    action = flatten(env.action_space, (ACTION,))
    outcome = [Leaf(REWARD_KEY, "<f4", (1,)), *(Leaf(key, "|b1", (1,)) for key in DONE_KEYS)]
    _refuse_collisions(env_index, observation, [leaf.key for leaf in outcome])
    fixed = tuple(leaf.leaf for leaf in observation if leaf.leaf is not None)
    loose = tuple(leaf.key for leaf in observation if leaf.leaf is None)
    return EnvMetadata(
        name=name,
        leaves={
            ACTION: tuple(leaf.leaf for leaf in action if leaf.leaf is not None),
            NEXT: (*fixed, *outcome),
            ROOT: (*fixed, *outcome[1:]),
        },
        objects={ACTION: tuple(leaf.key for leaf in action if leaf.leaf is None), NEXT: loose, ROOT: loose},
        spaces={
            ROOT: {leaf.key: leaf.space for leaf in observation},
            ACTION: {leaf.key: leaf.space for leaf in action},
        },
    )


def _refuse_collisions(env_index: int, observation: list[SpaceLeaf], outcome: list[Key]) -> None:
    taken: list[Key] = [(ACTION,), (NEXT,), ("_reset",), ("_step",), ("env_index",), *outcome]
    key = find_collision([leaf.key for leaf in observation], taken)
    if key is not None:
        raise SpecMismatchError(
            f"env {env_index} has an observation at {key!r}, a key that is taken; rename it in the env"
        )
