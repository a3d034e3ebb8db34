"""Envs that deal in TensorDicts, as sessions play them. Only their workers import this module, and torch with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from tensordict import TensorDict, TensorDictBase

from aioenvs.anything import Anything
from aioenvs.serving.codec import MessageError
from aioenvs.serving.hosting.players import Plain
from aioenvs.serving.spaces import received
from aioenvs.tensors.done import done_mask

__all__ = ["Tensors"]


class Tensors(Plain):
    """An env without batch dims that deals in TensorDicts; its payloads are these as nested dicts.

    Args:
        env: An `aioenvs.EnvBase` or TorchRL's.
    """

    def __init__(self, env: Any) -> None:
        if math.prod(env.batch_size) != 1:
            raise ValueError(f"a session has one env, but {env!r} has the batch size {tuple(env.batch_size)}")
        self.env = env
        self._td: TensorDictBase | None = None
        self._action_specs = {_path(key): env.full_action_spec[key] for key in env.action_keys}
        self.action_space = _nested({path: _space(spec) for path, spec in self._action_specs.items()})
        observed = {_path(key): env.full_observation_spec[key] for key in env.observation_keys}
        self._observed = list(observed)
        self.observation_space = _nested({path: _space(spec) for path, spec in observed.items()})

    def action(self, given: Any, *, payload: bool) -> Any:
        """Return the TensorDict of an action, on top of what the last step left."""
        values = received(self.action_space, given)
        assert self._td is not None
        td = self._td.clone(recurse=False)
        for path, spec in self._action_specs.items():
            value = values
            for name in path:
                value = value[name]
            try:
                tensor = torch.as_tensor(np.asarray(value), dtype=spec.dtype, device=spec.device).reshape(spec.shape)
                fits = spec.is_in(tensor)
            except (TypeError, ValueError, RuntimeError):
                fits = False
            if not fits:
                raise MessageError(f"expected values of {type(spec).__name__}, shape {tuple(spec.shape)}, as {path}")
            td[path] = tensor
        return td

    def reset(self, seed: int | None, options: Any) -> Any:
        """Begin an episode."""
        if seed is not None:
            self.env.set_seed(seed)
        self._td = self.env.reset(**(options or {}))
        return self._td, {}

    def step(self, action: Any) -> Any:
        """Take a step."""
        after = self.env.step(action)["next"]
        rewards = {_path(key): after[key].cpu().numpy() for key in self.env.reward_keys}
        over = bool(done_mask(after, self.env.done_keys).any())
        cut = [key for key in self.env.done_keys if _path(key)[-1] == "truncated" and bool(after[key].any())]
        ended = [key for key in self.env.done_keys if _path(key)[-1] == "terminated" and bool(after[key].any())]
        truncated = over and bool(cut) and not ended
        self._td = after.exclude(*self.env.reward_keys)
        reward: Any = next(iter(rewards.values()))
        if len(rewards) > 1:
            reward = {".".join(path): float(each.sum()) for path, each in rewards.items()}
        elif reward.size == 1:
            reward = reward.item()
        return after, reward, over and not truncated, truncated, {}

    def observed(self, observation: TensorDictBase, *, payload: bool) -> Any:
        """Return the nested dict of an observation."""
        return _nested_values({path: observation.get(path) for path in self._observed})


def _path(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _nested_values(values: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        node = nested
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value.cpu().numpy() if isinstance(value, torch.Tensor) else _plain(value)
    return nested


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, TensorDict) else getattr(value, "data", value)


def _nested(leaves: dict[tuple[str, ...], Space[Any]]) -> spaces.Dict:
    nested: dict[str, Any] = {}
    for path, space in leaves.items():
        node = nested
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = space
    return _dict_space(nested)


def _dict_space(nested: dict[str, Any]) -> spaces.Dict:
    return spaces.Dict({name: _dict_space(each) if isinstance(each, dict) else each for name, each in nested.items()})


def _space(spec: Any) -> Space[Any]:
    """Return the space of a leaf's values; those of its own spec that it does not know are checked besides."""
    if not isinstance(spec.dtype, torch.dtype) or not hasattr(spec, "is_in"):
        return Anything()
    if type(spec).__name__ == "Categorical" and not spec.shape and spec.n > 0:
        return spaces.Discrete(int(spec.n))
    dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype.type
    if spec.dtype is torch.bool:
        return spaces.Box(0, 1, tuple(spec.shape), np.int8)
    low, high = (-np.inf, np.inf) if spec.dtype.is_floating_point else _limits(dtype)
    return spaces.Box(low, high, tuple(spec.shape), dtype)


def _limits(dtype: Any) -> tuple[int, int]:
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
