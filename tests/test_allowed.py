"""Random actions keep to an action mask that is observed, and only to one that fits."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from faces import FACES, Face
from gymnasium.spaces import Box, Dict, Discrete

from aioenvs import GymWrapper
from aioenvs.envs.spec_properties import draw_allowed, mask_keys
from aioenvs.specs import Binary, Bounded, Categorical, Composite, OneHot


class ShrinkingEnv(gym.Env[Any, Any]):
    """Of four actions, those below the number of the step are ruled out, and raise."""

    observation_space = Dict(steps=Discrete(9), action_mask=Box(0, 1, (4,), np.int8))
    action_space = Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        if action < self.steps:
            raise RuntimeError(f"the action {action} is ruled out in step {self.steps}")
        self.steps += 1
        return self._observed(), 1.0, self.steps == 4, False, {}

    def _observed(self) -> Any:
        return {"steps": self.steps, "action_mask": (np.arange(4) >= self.steps).astype(np.int8)}


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
async def test_random_actions_are_allowed_in_each_env(face: Face) -> None:
    async with face.open(3, ShrinkingEnv) as env:
        rollout = await face.call(env.rollout, 12, break_when_any_done=False)
        assert rollout["next", "done"].sum() == 9
        assert (rollout["action"] >= rollout["steps"]).all()


@pytest.mark.parametrize("categorical", [True, False])
def test_random_actions_of_a_single_env_are_allowed(categorical: bool) -> None:
    env = GymWrapper(ShrinkingEnv(), categorical)
    torch.manual_seed(0)
    for _ in range(10):
        assert env.rollout(9).shape == (4,)


@pytest.mark.parametrize("spec", [Categorical(3, (2,)), OneHot(3, (2, 3))])
def test_allowed_values_are_drawn_and_all_where_none_is_allowed(spec: Any) -> None:
    mask = torch.tensor([[False, True, False], [False, False, False]])
    torch.manual_seed(0)
    drawn = torch.stack([draw_allowed(spec, mask, torch.Size([])) for _ in range(60)])
    choices = drawn if drawn.ndim == 2 else drawn.int().argmax(-1)
    assert choices[:, 0].unique().tolist() == [1]
    assert choices[:, 1].unique().tolist() == [0, 1, 2]
    batched = draw_allowed(spec, mask.expand(5, 2, 3), torch.Size([5]))
    assert batched.shape == (5, *spec.shape)
    assert spec.is_in(batched)


def test_masks_are_those_that_fit() -> None:
    actions = Composite(
        action=Categorical(3),
        a=Composite(action=OneHot(4)),
        b=Composite(move=Categorical(5), speed=Bounded(-1, 1, (1,))),
    )
    keys = ["action", ("a", "action"), ("b", "move"), ("b", "speed")]
    fitting = Composite(action_mask=Binary(3), a=Composite(action_mask=Binary(4)), b=Composite(action_mask=Binary(5)))
    assert mask_keys(actions, keys, fitting) == {
        "action": "action_mask",
        ("a", "action"): ("a", "action_mask"),
        ("b", "move"): ("b", "action_mask"),
    }
    assert mask_keys(actions, keys, Composite(action_mask=Binary(4), a=Composite(action_mask=Binary(3)))) == {}
    assert mask_keys(actions, keys, Composite(mask=Binary(3))) == {}
