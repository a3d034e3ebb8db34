"""Gymnasium envs that draw from the generators of the process: each has streams of its own once it is seeded."""

import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from faces import Face

from aioenvs import AsyncParallelEnv, SerialEnv
from aioenvs.engine.streams import NUMPY, PYTHON, TRIAL, TrialStreams

NUM_ENVS = 4


class SharedDiceEnv(gym.Env[Any, Any]):
    """Observes a draw from each generator; an episode lasts five steps.

    Args:
        late: The step, counted over all episodes, from which it draws from the process's generators.
    """

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, late: int = 0) -> None:
        self.late = late
        self.steps = 0

    def observation(self) -> Any:
        shared = [random.random(), np.random.rand()] if self.steps >= self.late else [0.0, 0.0]
        return np.array([*shared, self.np_random.random()])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.observation(), 1.0, self.steps % 5 == 0, False, {}


def drawn_by_hand(seed: int) -> list[float]:
    """The first draws of an env that is alone with its generators."""
    return [random.Random(seed).random(), np.random.RandomState(seed).rand()]


async def test_trajectories_do_not_depend_on_who_shares_the_process(face: Face) -> None:
    if face.threads != 0:
        pytest.skip("threads use the process's generators at the same time")
    with SerialEnv(NUM_ENVS, SharedDiceEnv) as serial:
        serial.set_seed(3)
        expected = serial.rollout(100, break_when_any_done=False)["next", "observation"]
    async with face.open(NUM_ENVS, SharedDiceEnv) as env:
        await face.call(env.set_seed, 3)
        found = await face.call(env.rollout, 100, break_when_any_done=False)
    assert torch.equal(found["next", "observation"], expected)
    assert len(expected[..., :2].unique()) == expected[..., :2].numel()


async def test_the_streams_are_those_of_the_seed(face: Face) -> None:
    if face.threads != 0:
        pytest.skip("threads use the process's generators at the same time")
    async with face.open(2, SharedDiceEnv) as env:
        td = await face.call(env.reset, list_of_kwargs=[{"seed": 1}, {"seed": 2}])
        again = await face.call(env.reset, list_of_kwargs=[{"seed": 1}, {"seed": 2}])
    assert td["observation"][:, :2].tolist() == [drawn_by_hand(1), drawn_by_hand(2)]
    assert torch.equal(td["observation"], again["observation"])


def test_the_callers_generators_are_left_alone() -> None:
    with SerialEnv(2, SharedDiceEnv) as env:
        env.reset(seed=0)
        before = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]
        env.rollout(20, break_when_any_done=False)
        assert (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]) == before


def test_without_a_seed_the_callers_generators_are_used() -> None:
    with SerialEnv(1, SharedDiceEnv) as env:
        random.seed(5)
        np.random.seed(5)
        assert env.reset()["observation"][0, :2].tolist() == drawn_by_hand(5)


async def test_an_env_that_begins_to_draw_late_is_not_helped() -> None:
    make = [lambda: SharedDiceEnv(late=2 * TRIAL)] * 2
    async with AsyncParallelEnv(2, make, num_processes=1) as env:
        td = await env.reset(seed=0)
        for _ in range(2 * TRIAL):
            td, root = await env.step_and_maybe_reset(env.rand_action(td))
            td = root
        shared = td["observation"][:, :2]
    assert (shared != 0).all()
    assert shared[1].tolist() != drawn_by_hand(0)


def test_a_trial_ends_when_nothing_was_drawn() -> None:
    idle, busy = TrialStreams(PYTHON, NUMPY), TrialStreams(PYTHON, NUMPY)
    for streams in (idle, busy):
        streams.seed(1)
    for _ in range(TRIAL):
        assert not idle.are_idle
        with idle:
            pass
        with busy:
            np.random.rand()
    assert idle.are_idle
    assert not busy.are_idle
    idle.seed(2)
    assert not idle.are_idle


@pytest.mark.parametrize("generator", [PYTHON, NUMPY])
def test_a_mark_changes_with_each_draw(generator: Any) -> None:
    draw = random.random if generator is PYTHON else np.random.rand
    streams = TrialStreams(generator)
    streams.seed(0)
    marks = set()
    for _ in range(3):
        with streams:
            draw()
            marks.add(generator.mark(generator.get()))
    assert len(marks) == 3
