"""Envs of TorchRL that several tests make, and the comparison of what comes of them."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase, is_non_tensor

pytest.importorskip("torchrl")
with warnings.catch_warnings():  # TorchRL warns of much when it is imported, and warnings are errors here
    warnings.simplefilter("ignore")
    import torchrl.collectors as collectors
    import torchrl.data as data
    import torchrl.envs as theirs
    import torchrl.modules as modules
    from torchrl.data import Unbounded
    from torchrl.envs import (
        CatFrames,
        Compose,
        DoubleToFloat,
        GymEnv,
        GymWrapper,
        InitTracker,
        ObservationNorm,
        RewardSum,
        StepCounter,
        TransformedEnv,
    )

__all__ = [
    "ENVS",
    "SEEN_THROUGH",
    "DictEnv",
    "collectors",
    "data",
    "differences",
    "made",
    "modules",
    "theirs",
    "trajectory",
]


class DictEnv(gymnasium.Env[Any, Any]):
    """Observations in a Dict within a Dict; several discrete actions."""

    observation_space = gymnasium.spaces.Dict(
        place=gymnasium.spaces.Box(-1, 1, (3,), np.float32),
        inner=gymnasium.spaces.Dict(room=gymnasium.spaces.Discrete(4), lights=gymnasium.spaces.MultiBinary(3)),
    )
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), self._info()

    def _info(self) -> Any:
        return {"count": np.array([self.steps])}

    def _observe(self) -> Any:
        inner = {"room": int(self.np_random.integers(4)), "lights": self.np_random.integers(0, 2, 3).astype(np.int8)}
        return {"place": self.np_random.uniform(-1, 1, 3).astype(np.float32), "inner": inner}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observe(), float(action[0]) + 0.5 * float(action[1]), self.steps >= 5, False, self._info()


class Renamed(theirs.GymEnv):
    """A subclass, which may change anything."""

    def read_reward(self, reward: Any) -> Any:
        return super().read_reward(reward) * 2


def _atari() -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    return GymEnv("ALE/Pong-v5")


def _minigrid() -> Any:
    import minigrid.wrappers

    return GymWrapper(minigrid.wrappers.ImgObsWrapper(gymnasium.make("MiniGrid-Empty-5x5-v0")))


def _pettingzoo_turns() -> Any:
    from pettingzoo.classic import tictactoe_v3

    return theirs.PettingZooWrapper(env=tictactoe_v3.env(), use_mask=True, group_map=None)


def _pettingzoo_parallel() -> Any:
    from pettingzoo.classic import rps_v2

    return theirs.PettingZooWrapper(env=rps_v2.parallel_env(max_cycles=4))


def _with_info() -> Any:
    env = GymWrapper(DictEnv())
    reader = theirs.default_info_dict_reader(["count"], spec={"count": Unbounded((1,), dtype=torch.int64)})
    return env.set_info_dict_reader(reader)


def _stacked() -> Any:
    return TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(
            StepCounter(7),
            RewardSum(),
            ObservationNorm(0.0, 2.0, in_keys=["observation"]),
            CatFrames(3, dim=-1, in_keys=["observation"]),
            InitTracker(),
        ),
    )


def _floats() -> Any:
    return TransformedEnv(GymEnv("HalfCheetah-v5"), Compose(DoubleToFloat(), StepCounter(6)))


def _fast() -> Any:
    env = GymEnv("CartPole-v1")
    env.fast_encoding()
    return env


def gym(name: str, **kwargs: Any) -> Callable[[], Any]:
    return functools.partial(GymEnv, name, **kwargs)


ENVS: Mapping[str, Callable[[], Any]] = {
    "cartpole": gym("CartPole-v1"),
    "cartpole-categorical": gym("CartPole-v1", categorical_action_encoding=True),
    "cartpole-cpu": gym("CartPole-v1", device="cpu"),
    "cartpole-skip": gym("CartPole-v1", frame_skip=2),
    "cartpole-fast": _fast,
    "cartpole-subclass": functools.partial(Renamed, "CartPole-v1"),
    "pendulum": gym("Pendulum-v1"),
    "acrobot": gym("Acrobot-v1"),
    "mountain-car": gym("MountainCar-v0"),
    "mountain-car-continuous": gym("MountainCarContinuous-v0"),
    "frozen-lake": gym("FrozenLake-v1"),
    "taxi": gym("Taxi-v4"),
    "infos": _with_info,
    "cliff-walking": gym("CliffWalking-v1"),
    "lunar-lander": gym("LunarLander-v3"),
    "bipedal-walker": gym("BipedalWalker-v3"),
    "half-cheetah": gym("HalfCheetah-v5"),
    "half-cheetah-floats": _floats,
    "pong": _atari,
    "dict": lambda: GymWrapper(DictEnv()),
    "transforms": _stacked,
    "model-based": theirs.PendulumEnv,
    "tic-tac-toe": theirs.TicTacToeEnv,
    "minigrid": _minigrid,
    "pettingzoo-turns": _pettingzoo_turns,
    "pettingzoo-parallel": _pettingzoo_parallel,
}
NEEDED = {"minigrid": "minigrid", "pettingzoo-turns": "pettingzoo", "pettingzoo-parallel": "pettingzoo"}
SEEN_THROUGH = (
    *("cartpole", "cartpole-categorical", "cartpole-cpu", "pendulum", "acrobot", "mountain-car"),
    *("mountain-car-continuous", "lunar-lander", "bipedal-walker", "half-cheetah", "pong", "minigrid"),
    *("frozen-lake", "taxi", "cliff-walking"),
)


def made(name: str) -> Callable[[], Any]:
    """The factory of this name.

    Raises:
        ModuleNotFoundError: If the library that it needs is not installed.
    """
    if name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
        raise ModuleNotFoundError(f"{NEEDED[name]} is not installed")
    return ENVS[name]


def trajectory(env: Any, *, steps: int = 12) -> list[tuple[str, Any]]:
    """What comes of an env with some seeds, in several manners; actions are random ones."""
    seen: list[tuple[str, Any]] = [("seed", env.set_seed(5))]
    torch.manual_seed(1)
    td = env.reset()
    seen.append(("reset", td.clone()))
    for _ in range(steps):
        td, following = env.step_and_maybe_reset(env.rand_action(td))
        seen += [("step", td.clone()), ("root", following.exclude(*env.action_keys).clone())]
        td = following
    seen.append(("single", env.step(env.rand_action(td)).clone()))
    seen.append(("rollout", env.rollout(9).clone()))
    seen.append(("on", env.rollout(9, break_when_any_done=False).exclude(*env.action_keys).clone()))
    td = env.reset()
    td["_reset"] = torch.tensor([[True], [False], [True]])
    seen.append(("partial", env.reset(td).clone()))
    return seen


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two TensorDicts, or what is in them, differ: in sizes, devices, keys, dtypes or values."""
    if isinstance(expected, TensorDictBase) and not is_non_tensor(expected):
        lines = []
        if (found.batch_size, found.device, found.names) != (expected.batch_size, expected.device, expected.names):
            lines.append(
                f"{path}: {found.batch_size} {found.device} here, {expected.batch_size} {expected.device} there"
            )
        if set(found.keys()) != set(expected.keys()):
            lines.append(f"{path}: the keys {sorted(found.keys())} here, {sorted(expected.keys())} there")
        for key in sorted(set(found.keys()) & set(expected.keys())):
            lines += differences(found.get(key), expected.get(key), f"{path}.{key}")
        return lines
    if isinstance(expected, torch.Tensor):
        same = (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if same and torch.equal(found.double().nan_to_num(7.5), expected.double().nan_to_num(7.5)):
            return []
        return [f"{path}: {found} here, {expected} there"]
    if is_non_tensor(expected):
        found, expected = found.tolist(), expected.tolist()
    return [] if found == expected else [f"{path}: {found!r} here, {expected!r} there"]
