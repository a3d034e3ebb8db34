"""Envs of every kind behind sessions: with coroutines, of several agents, and such as deal in TensorDicts."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import pytest

from aioenvs.serving import Sessions
from aioenvs.testing import CountingEnv


class Waiting:
    observation_space = gym.spaces.Discrete(100)
    action_space = gym.spaces.Discrete(3)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return 0, {}

    async def step(self, action: Any) -> Any:
        self.steps += 1
        return self.steps, 1.0, False, False, {}


def spread() -> Any:
    mpe2 = pytest.importorskip("mpe2.simple_spread_v3")
    return mpe2.parallel_env(N=2, max_cycles=1)


def tensors() -> Any:
    return CountingEnv(max_steps=1)


@pytest.mark.parametrize(
    ("make", "action", "over"),
    [
        (Waiting, {"action": 2}, False),
        (spread, {"agent_0": 0, "agent_1": 1}, True),
        (tensors, {"action": 1}, True),
    ],
)
async def test_an_episode_of_any_kind_of_env(make: Any, action: Any, over: bool) -> None:
    async with Sessions(make, 2, num_processes=1) as sessions, sessions.lease(seed=3) as session:
        first = json.loads((await session.ask("reset", {}, "json")).value)
        again = json.loads((await session.ask("reset", {"seed": 3}, "json")).value)
        assert first == again
        stepped = json.loads((await session.ask("step", action, "json")).value)
        assert stepped["observation"].keys() == first["observation"].keys()
        assert stepped["done"] is over
        value = await session.reset()
        assert len(value) == 2
