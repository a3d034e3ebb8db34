"""What another library is given that wants another class: the message names it, wherever anything is asked of ours."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import gymnasium
import pytest
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from torchrl import envs as their

from aioenvs import AsyncSerialEnv, GymEnv, SerialEnv
from aioenvs.hints import hint_at
from aioenvs.integrations import torchrl as under_torchrl
from aioenvs.integrations.gymnasium import AioVectorEnv
from aioenvs.integrations.sb3 import AioVecEnv
from aioenvs.testing import CountingEnv

FOR_TORCHRL = r"TorchRL's .* ParallelEnv and SerialEnv of aioenvs\.integrations\.torchrl"
FOR_GYMNASIUM = r"aioenvs\.integrations\.gymnasium\.AioVectorEnv"
FOR_SB3 = r"aioenvs\.integrations\.sb3\.AioVecEnv"


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    """Closes at the end what it was given."""
    with ExitStack() as stack:

        def remember(env: Any) -> Any:
            stack.callback(env.close)
            return env

        yield remember


def vector(cls: Any) -> Any:
    return cls("CartPole-v1", 2, backend="serial")


@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialEnv(2, "CartPole-v1"),
        lambda: AsyncSerialEnv(2, "CartPole-v1"),
        lambda: SerialEnv(2, "CartPole-v1")[0:1],
        lambda: AsyncSerialEnv(2, "CartPole-v1")[0:1],
        lambda: GymEnv("CartPole-v1"),
        lambda: under_torchrl.AsyncSerialEnv(2, "CartPole-v1"),
    ],
)
def test_a_transform_around_an_env_that_is_not_theirs(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=rf"is no env of TorchRL's: {FOR_TORCHRL}"):
        their.TransformedEnv(make(), their.StepCounter())


def test_a_transform_around_an_env_of_ones_own() -> None:
    env = their.TransformedEnv(CountingEnv(), their.StepCounter())
    with pytest.raises(AttributeError, match=FOR_TORCHRL):
        env.reset()


def test_their_checks_and_batches(opened: Callable[[Any], Any]) -> None:
    env = opened(SerialEnv(2, "CartPole-v1"))
    env.start()
    with pytest.raises(AttributeError, match=FOR_TORCHRL):
        their.check_env_specs(env)
    with pytest.raises(AttributeError, match=FOR_TORCHRL):
        their.check_env_specs(GymEnv("CartPole-v1"))
    with pytest.raises(AttributeError, match=FOR_TORCHRL):
        their.TransformedEnv(opened(vector(AioVectorEnv)), their.StepCounter())
    with pytest.raises(AttributeError, match=FOR_TORCHRL):
        env.append_transform(their.StepCounter())


def test_an_env_of_their_own_is_transformed_within_ours(opened: Callable[[Any], Any]) -> None:
    env = opened(SerialEnv(2, lambda: their.TransformedEnv(their.GymEnv("CartPole-v1"), their.StepCounter())))
    assert env.rollout(3)["next", "step_count"].shape[:2] == (2, 3)


def test_a_vector_env_where_sb3_wants_its_own(opened: Callable[[Any], Any]) -> None:
    made: list[Any] = []

    def make(factories: Any, **options: Any) -> Any:
        made.append(opened(AioVectorEnv(factories, backend="serial")))
        return made[0]

    with pytest.raises(AttributeError, match=FOR_SB3):
        make_vec_env("CartPole-v1", 2, vec_env_cls=make)
    env = opened(SerialEnv(2, "CartPole-v1"))
    env.start()
    with pytest.raises(AttributeError, match=rf"{FOR_GYMNASIUM}.*{FOR_SB3}"):
        VecNormalize(env)


@pytest.mark.parametrize("name", ["env_method", "reset_infos", "env_is_wrapped"])
def test_what_only_sb3_asks_for(opened: Callable[[Any], Any], name: str) -> None:
    for env in (opened(vector(AioVectorEnv)), SerialEnv(2, "CartPole-v1"), AsyncSerialEnv(2, "CartPole-v1")):
        with pytest.raises(AttributeError, match=rf"{name!r}.*{FOR_SB3}"):
            getattr(env, name)


@pytest.mark.parametrize("name", ["single_observation_space", "single_action_space", "call_async"])
def test_what_only_gymnasium_asks_for(opened: Callable[[Any], Any], name: str) -> None:
    for env in (opened(vector(AioVecEnv)), SerialEnv(2, "CartPole-v1"), AsyncSerialEnv(2, "CartPole-v1")):
        with pytest.raises(AttributeError, match=rf"{name!r}.*{FOR_GYMNASIUM}"):
            getattr(env, name)


def test_other_attributes_are_missing_without_a_hint(opened: Callable[[Any], Any]) -> None:
    assert hint_at("colour") == ""
    for env in (opened(vector(AioVecEnv)), opened(vector(AioVectorEnv)), GymEnv("CartPole-v1"), CountingEnv()):
        with pytest.raises(AttributeError, match="colour") as caught:
            _ = env.colour
        assert "aioenvs.integrations" not in str(caught.value)
        assert not hasattr(env, "colour")


def test_parameters_of_an_env_are_found_as_ever() -> None:
    env = CountingEnv()
    env.weight = torch.nn.Parameter(torch.ones(2))
    env.register_buffer("seen", torch.zeros(3))
    assert env.weight.shape == (2,)
    assert pickle.loads(pickle.dumps(env)).seen.shape == (3,)


def test_what_an_env_has_itself_needs_no_hint() -> None:
    env = GymEnv("CartPole-v1")
    assert isinstance(env.spec, gymnasium.envs.registration.EnvSpec)
    with pytest.raises(AttributeError, match=FOR_SB3):
        _ = env.env_method
