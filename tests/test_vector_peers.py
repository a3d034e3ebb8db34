"""What users of Gymnasium's and SB3's vector envs find in the objects and errors of ours."""

from __future__ import annotations

import functools
import multiprocessing
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from failing_envs import CountingEnv, Gate
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from odd_envs import Odd, Reusing, Seeded
from stable_baselines3.common.vec_env import DummyVecEnv
from vector_faces import HOSTS, counting

from aioenvs import AsyncSerialEnv, GymEnv, SerialEnv
from aioenvs.errors import WorkerTimeoutError
from aioenvs.integrations import torchrl as dress
from aioenvs.integrations.gymnasium import AioVectorEnv
from aioenvs.integrations.sb3 import AioVecEnv

# -- the env objects ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"), [(AioVecEnv, DummyVecEnv), (AioVectorEnv, SyncVectorEnv)], ids=["sb3", "gymnasium"]
)
def test_envs_of_this_process_can_be_had(ours: Any, theirs: Any) -> None:
    make = functools.partial(gym.make, "CartPole-v1")
    with_theirs, envs = theirs([make] * 2), ours([make] * 2, backend="serial")
    assert [type(env) for env in envs.envs] == [type(env) for env in with_theirs.envs]
    envs.reset()
    envs.step(np.array([1, 1]))
    envs.envs[1].unwrapped.state = np.zeros(4)
    assert [env.unwrapped.state is value for env, value in zip(envs.envs, envs.get_attr("state"), strict=True)]
    assert envs.get_attr("state")[1].tolist() == [0.0] * 4
    with_theirs.close()
    envs.close()


@pytest.mark.parametrize(("face", "word"), [(AioVecEnv, "env_method"), (AioVectorEnv, "call")])
@pytest.mark.parametrize("host", ["thread", "packed"])
def test_others_are_asked_by_methods_which_the_error_names(face: Any, word: str, host: str) -> None:
    envs = face(counting(), **HOSTS[host])
    assert not hasattr(envs, "envs")
    with pytest.raises(AttributeError, match=f"'envs'; .*get_attr and {word}"):
        envs.envs  # noqa: B018
    envs.close()


# -- last observations ----------------------------------------------------------------------------------


def described(value: Any) -> Any:
    """A value with the types of all that is in it."""
    if isinstance(value, dict):
        return type(value), {key: described(own) for key, own in value.items()}
    if isinstance(value, tuple):
        return type(value), [described(own) for own in value]
    return type(value), str(getattr(value, "dtype", "")), np.asarray(value).tolist()


@pytest.mark.parametrize("kind", ["plain", "float64", "list", "class", "int", "dict", "tuple"])
@pytest.mark.parametrize("host", ["serial", "thread", "packed"])
def test_the_last_observation_is_what_the_env_returned(kind: str, host: str) -> None:
    makes = [functools.partial(Odd, kind)] * 2
    mode = AutoresetMode.SAME_STEP
    theirs, ours = SyncVectorEnv(makes, autoreset_mode=mode), AioVectorEnv(makes, autoreset_mode=mode, **HOSTS[host])
    for envs in (theirs, ours):
        envs.reset()
    for _ in range(2):
        expected, found = (envs.step(np.array([0, 1]))[4]["final_obs"] for envs in (theirs, ours))
        assert found.dtype == expected.dtype == object
        assert [described(value) for value in found] == [described(value) for value in expected]
    theirs.close()
    ours.close()


@pytest.mark.parametrize("kind", ["float64", "class", "int"])
def test_it_is_for_sb3_too(kind: str) -> None:
    makes = [functools.partial(Odd, kind)] * 2
    theirs, ours = DummyVecEnv(makes), AioVecEnv(makes, num_processes=1)
    for envs in (theirs, ours):
        envs.reset()
    expected, found = ([info["terminal_observation"] for info in envs.step([0, 1])[3]] for envs in (theirs, ours))
    assert [described(value) for value in found] == [described(value) for value in expected]
    theirs.close()
    ours.close()


def test_a_last_observation_stays_as_it_was_when_its_env_begins_anew() -> None:
    envs = AioVectorEnv([functools.partial(Reusing, "plain")] * 2, autoreset_mode="SameStep", backend="serial")
    envs.reset()
    observations, *_, infos = envs.step([0, 0])
    assert observations.tolist() == [[0, 0]] * 2
    assert [(value.dtype, value.tolist()) for value in infos["final_obs"]] == [(np.float64, [1, 1])] * 2
    envs.close()


# -- errors and warnings --------------------------------------------------------------------------------


def test_what_is_late_is_what_multiprocessing_says_as_well(gate: Gate) -> None:
    envs = AioVectorEnv(counting({1: {"fault": gate.wait, "at": (1, 1)}}), backend="thread")
    envs.reset()
    envs.step_async(np.ones(3, np.int64))
    gate.wait_for_arrival()
    with pytest.raises(multiprocessing.TimeoutError, match="did not answer step") as caught:
        envs.step_wait(timeout=0.01)
    assert isinstance(caught.value, WorkerTimeoutError)
    assert isinstance(caught.value, TimeoutError)
    assert 1 in caught.value.env_index
    gate.open()
    envs.close()


def test_closing_with_a_call_pending_warns_as_their_class_does() -> None:
    envs = AioVectorEnv([CountingEnv] * 2, num_processes=1)
    envs.reset_async()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gym.logger.warn("Calling `close` while waiting for a pending call to `reset` to complete.")  # their words
        envs.close()
    assert envs.closed
    theirs, ours = ((warning.category, str(warning.message)) for warning in caught)
    assert ours == theirs


async def test_no_env_is_put_in_place_of_others() -> None:
    for env in (SerialEnv(2, CountingEnv), AsyncSerialEnv(2, CountingEnv), dress.SerialEnv(2, CountingEnv)):
        with pytest.raises(NotImplementedError, match=r"\[0\] = \.\.\.: .*writeback"):
            env[0] = CountingEnv()


# -- seeds ----------------------------------------------------------------------------------------------


SEEDS = [np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)]


@pytest.mark.parametrize("seed", SEEDS, ids=["int64", "uint8", "array", "tensor"])
def test_seeds_of_any_integer_type_reach_the_envs_as_ints(seed: Any) -> None:
    sb3 = AioVecEnv([Seeded] * 2, backend="serial")
    assert sb3.seed(seed) == [3, 4]
    sb3.reset()
    assert sb3.get_attr("seed") == [("int", 3), ("int", 4)]
    sb3.close()
    vector = AioVectorEnv([Seeded] * 2, backend="serial")
    vector.reset(seed=seed)
    assert vector.get_attr("seed") == (("int", 3), ("int", 4))
    vector.reset(seed=[seed, None])
    assert vector.get_attr("seed") == (("int", 3), ("NoneType", None))
    vector.close()
    with SerialEnv(2, Seeded) as env:
        chain = [("int", each) for each in (3, env.set_seed(3, static_seed=True))]
        env.reset(list_of_kwargs=[{"seed": seed}] * 2)
        assert env.get_attr("seed") == chain
        env.reset(seed=seed)
        assert [kind for kind, _ in env.get_attr("seed")] == ["int", "int"]
        env.set_seed(seed)
        env.reset()
        assert env.get_attr("seed")[0] == ("int", 3)


@pytest.mark.parametrize("seeds", [np.array([5, 6]), [np.int32(5), 6], torch.tensor([5, 6])])
def test_a_seed_for_each_env_may_come_in_an_array(seeds: Any) -> None:
    envs = AioVectorEnv([Seeded] * 2, num_processes=1)
    envs.reset(seed=seeds)
    assert envs.get_attr("seed") == (("int", 5), ("int", 6))
    envs.close()


def test_an_env_alone_gets_them_as_ints_too() -> None:
    env = GymEnv("CartPole-v1")
    first = env.reset(seed=np.int64(3))["observation"]
    assert first.equal(env.reset(seed=3)["observation"])


def test_what_is_no_integer_is_no_seed() -> None:
    envs = AioVecEnv([Seeded] * 2, backend="serial")
    for wrong in (3.5, "three", True, np.array([3])):
        with pytest.raises(TypeError, match="a seed must be an integer"):
            envs.seed(wrong)
    with pytest.raises(ValueError, match="must not be negative"):
        envs.seed(-1)
    envs.close()
