"""One env object behind several factories is refused wherever two rows would be the same env."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import pytest
import torch
from coroutine_envs import AwaitingEnv
from failing_envs import CountingEnv
from stable_baselines3.common.vec_env import DummyVecEnv
from tensordict import TensorDict

from aioenvs import EnvBase, GymWrapper, ParallelEnv, SerialEnv
from aioenvs.errors import WorkerStartError
from aioenvs.integrations.gymnasium import AioVectorEnv
from aioenvs.integrations.sb3 import AioVecEnv
from aioenvs.specs import Composite, Unbounded

FACES: dict[str, Any] = {
    "sb3 serial": lambda fns: AioVecEnv(fns, backend="serial"),
    "sb3 thread": lambda fns: AioVecEnv(fns, backend="thread"),
    "gymnasium serial": lambda fns: AioVectorEnv(fns, backend="serial"),
    "gymnasium threads": lambda fns: AioVectorEnv(fns, backend="thread", num_processes=3),
    "serial": lambda fns: SerialEnv(len(fns), fns).start(),
    "threads": lambda fns: ParallelEnv(len(fns), fns, backend="thread").start(),
}
WORDS = "envs 0, 2 are one and the same instance of CountingEnv"


class Stateless(EnvBase):
    """Has all of its state in TensorDicts, and so may stand for many envs, as with TorchRL's classes."""

    batch_locked = False

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(count=Unbounded((1,)))
        self.state_spec = Composite(count=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        return TensorDict(count=torch.zeros(1))

    def _step(self, tensordict: Any) -> TensorDict:
        count = tensordict["count"] + tensordict["action"]
        return TensorDict(count=count, reward=torch.zeros(1), done=torch.zeros(1, dtype=torch.bool))

    def _set_seed(self, seed: Any) -> None:
        pass


class Locked(Stateless):
    """Is the same, but does not say so."""

    batch_locked = True


def repeated(env: Any) -> list[Any]:
    """What makes three envs, of which the first and the last are one."""
    return [lambda: env, lambda: CountingEnv(1), lambda: env]


@pytest.mark.parametrize("face", FACES)
def test_one_instance_for_two_rows_is_a_value_error(face: str) -> None:
    with pytest.raises(ValueError, match=WORDS):
        FACES[face](repeated(CountingEnv(0)))


def test_their_class_refuses_it_as_well_and_looks_below_wrappers() -> None:
    env = gym.make("CartPole-v1")
    fns = [lambda: gym.wrappers.TimeAwareObservation(env)] * 2
    with pytest.raises(ValueError, match="same instance"):
        DummyVecEnv(fns)
    with pytest.raises(ValueError, match="envs 0-1 are one and the same instance of CartPoleEnv"):
        AioVecEnv(fns, backend="serial")
    with pytest.raises(ValueError, match="envs 0-1 are one and the same instance of CartPoleEnv"):
        SerialEnv(2, lambda: GymWrapper(env)).start()


def test_in_one_forked_process_it_is_refused_and_in_two_it_is_another_env() -> None:
    env = CountingEnv(0)
    with pytest.raises((ValueError, WorkerStartError), match="envs 0-1 are one and the same instance"):
        AioVecEnv([lambda: env] * 2, start_method="fork", num_processes=1)
    with_two = AioVecEnv([lambda: env] * 2, start_method="fork", num_processes=2)
    with_two.reset()
    with_two.step([1, 2])
    with_two.close()


def test_envs_with_coroutines_are_no_exception() -> None:
    env = AwaitingEnv()
    with pytest.raises(ValueError, match="envs 0-1 are one and the same instance of AwaitingEnv"):
        AioVectorEnv([lambda: env] * 2, backend="serial")


@pytest.mark.parametrize("options", [{}, {"backend": "thread"}], ids=["serial", "thread"])
def test_tensordict_envs_count_if_they_have_a_state_of_their_own(options: dict[str, Any]) -> None:
    make = ParallelEnv if options else SerialEnv
    free, locked = Stateless(), Locked()
    with make(2, lambda: free, **options) as env:
        td = env.step(env.reset().set("action", torch.tensor([[1.0], [2.0]])))
        assert td["next", "count"].tolist() == [[1], [2]]
    with pytest.raises(ValueError, match="envs 0-1 are one and the same instance of Locked"):
        make(2, lambda: locked, **options).start()


def test_what_is_no_env_of_gymnasium_may_share_what_it_calls_unwrapped() -> None:
    server = object()

    class Plain:
        def __init__(self) -> None:
            inner = CountingEnv(0)
            self.observation_space, self.action_space = inner.observation_space, inner.action_space
            self.reset, self.step, self.unwrapped = inner.reset, inner.step, server

    envs = AioVectorEnv([Plain] * 2, backend="serial")
    assert [type(env) for env in envs.envs] == [Plain] * 2
    envs.close()
    assert sys.getrefcount(server) > 2
