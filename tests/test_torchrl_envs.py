"""Real envs behind the dress for TorchRL: specs, values, dtypes, shapes and flags are those of TorchRL's SerialEnv."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import pytest
from oracle import TORCHRL_MARKS
from torchrl_envs import ENVS, SEEN_THROUGH, DictEnv, differences, made, theirs, trajectory

from aioenvs.engine.adapters.base import Handling
from aioenvs.errors import SpecMismatchError
from aioenvs.integrations import torchrl as ours
from aioenvs.integrations.torchrl.worker import TorchRLGymAdapter, adapted

pytestmark = list(TORCHRL_MARKS)
COUNT = 3
PACKED = ("cartpole", "taxi", "half-cheetah-floats", "dict", "transforms", "pettingzoo-turns")


def factory_of(name: str) -> Any:
    try:
        return made(name)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@functools.cache
def expected(name: str) -> Any:
    """TorchRL's own specs and trajectory, made once."""
    env = theirs.SerialEnv(COUNT, ENVS[name])
    try:
        return env.output_spec.clone(), env.input_spec.clone(), trajectory(env)
    finally:
        env.close(raise_if_closed=False)


def check(env: Any, name: str) -> None:
    output_spec, input_spec, seen = expected(name)
    assert env.output_spec == output_spec
    assert env.input_spec == input_spec
    found = trajectory(env)
    assert [step for step, _ in found] == [step for step, _ in seen]
    lines = [
        line for (step, own), (_, other) in zip(found, seen, strict=True) for line in differences(own, other, step)
    ]
    assert not lines, "\n".join(lines[:8])


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.slow
def test_in_this_process(name: str) -> None:
    with ours.SerialEnv(COUNT, factory_of(name)) as env:
        check(env, name)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.slow
def test_in_workers(name: str, backend: str) -> None:
    with ours.ParallelEnv(COUNT, factory_of(name), num_processes=2, backend=backend) as env:
        check(env, name)


@pytest.mark.parametrize("name", ENVS)
def test_which_are_seen_through(name: str) -> None:
    """To the Gymnasium env, which is exact for these; the others are driven as TensorDict envs."""
    adapter = adapted(factory_of(name)(), 0, Handling())
    assert isinstance(adapter, TorchRLGymAdapter) == (name in SEEN_THROUGH)
    adapter.close()


def test_an_observed_integer_out_of_range_is_told() -> None:
    class Lost(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Discrete(3)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return 2, {}

        def step(self, action: Any) -> Any:
            return 3, 0.0, False, False, {}

    with ours.SerialEnv(1, lambda: theirs.GymWrapper(Lost())) as env:
        td = env.reset()
        assert td["observation"].tolist() == [[0, 0, 1]]
        with pytest.raises(SpecMismatchError, match=r"below 3.*found 3"):
            env.step(env.rand_action(td))


def test_several_observed_integers_are_not_seen_through() -> None:
    class Several(DictEnv):
        observation_space = gymnasium.spaces.MultiDiscrete([3, 4])
        action_space = gymnasium.spaces.Discrete(2)

    adapter = adapted(theirs.GymWrapper(Several()), 0, Handling())
    assert not isinstance(adapter, TorchRLGymAdapter)
    adapter.close()


def test_a_patched_env_is_not_seen_through() -> None:
    def patched() -> Any:
        env = theirs.GymEnv("CartPole-v1")
        read = env.read_reward
        env.read_reward = lambda reward: read(reward) * 3
        return env

    with ours.SerialEnv(2, patched) as env:
        assert env.rollout(3)["next", "reward"].tolist() == [[[3.0]] * 3] * 2
