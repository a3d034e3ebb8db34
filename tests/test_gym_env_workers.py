"""How workers drive a `GymEnv`: through to the Gymnasium env, with the same results as by TensorDicts."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from faces import Face
from gymnasium import spaces

from aioenvs import GymEnv, GymWrapper, ParallelEnv, SerialEnv, step_mdp
from aioenvs.envs import unwrapping as through
from aioenvs.envs.unwrapping import can_see_through
from aioenvs.errors import SpecMismatchError

FACES = (Face("serial", SerialEnv, 0), Face("packed", ParallelEnv, 2))


class Everything(gym.Env[Any, Any]):
    """Echoes its actions, which are of all fixed kinds, in observations of all fixed kinds."""

    action_space = spaces.Dict(
        speed=spaces.Box(-1, 1, (), np.float32),
        choice=spaces.Discrete(3, start=2),
        choices=spaces.MultiDiscrete([2, 4]),
        flags=spaces.MultiBinary(3),
    )
    observation_space = spaces.Dict(
        speed=spaces.Box(-1, 1, (), np.float32),
        image=spaces.Box(0, 255, (2, 2), np.uint8),
        flags=spaces.MultiBinary(3),
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample() | {"speed": np.float32(self.np_random.random())}, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        number = int(action["choice"]) * 10 + int(action["choices"].sum())
        observation = {
            "speed": np.asarray(action["speed"]),
            "image": np.full((2, 2), number, np.uint8),
            "flags": action["flags"],
        }
        return observation, float(number), self.steps == 3, False, {}


def cartpole() -> Any:
    return GymEnv("CartPole-v1")


def categorical() -> Any:
    return GymEnv("CartPole-v1", categorical_action_encoding=True, max_episode_steps=7)


def skipping() -> Any:
    return GymEnv("Pendulum-v1", frame_skip=3, max_episode_steps=10)


def everything() -> Any:
    return GymWrapper(Everything(), categorical_action_encoding=True)


def one_hot() -> Any:
    return GymWrapper(Everything())


MAKERS = pytest.mark.parametrize("make", [cartpole, categorical, skipping])


@pytest.fixture(params=FACES, ids=lambda face: face.name)
def host(request: pytest.FixtureRequest) -> Face:
    face: Face = request.param
    return face


@MAKERS
async def test_results_are_those_of_the_single_env(host: Face, make: Any) -> None:
    single = make()
    assert can_see_through(single)
    async with host.open(3, make) as env:
        td = await host.call(env.reset, seed=5)
        alone = single.reset(seed=5)
        torch.manual_seed(0)
        for _ in range(12):
            td = env.rand_action(td)
            alone.update(td[0].select("action"))
            td, after = await host.call(env.step_and_maybe_reset, td)
            alone, following = single.step_and_maybe_reset(alone)
            assert (td[0] == alone).all()
            assert (after[0] == following).all()
            td, alone = after, following
    single.close()


@pytest.mark.parametrize("make", [everything, one_hot])
async def test_every_kind_of_value(host: Face, make: Any) -> None:
    assert can_see_through(make())
    async with host.open(2, make) as env:
        td = await host.call(env.reset)
        for _ in range(4):
            td = env.rand_action(td)
            td, after = await host.call(env.step_and_maybe_reset, td)
            given = [one_action(td[row], make is one_hot) for row in range(2)]
            assert td["next", "reward"].flatten().tolist() == [number for number, _ in given]
            assert td["next", "speed"].flatten().tolist() == pytest.approx([speed for _, speed in given])
            assert td["next", "image"].dtype is torch.uint8
            assert (td["next", "flags"] == td["action", "flags"]).all()
            td = after


def one_action(td: Any, encoded: bool) -> tuple[float, float]:
    choice, choices = td["action", "choice"], td["action", "choices"]
    if encoded:
        first, second = choices.split([2, 4])
        number = (int(choice.argmax()) + 2) * 10 + int(first.argmax()) + int(second.argmax())
    else:
        number = int(choice) * 10 + int(choices.sum())
    return float(number), float(td["action", "speed"])


@pytest.mark.parametrize("wrong", [[0, 0], [1, 1], [2, 0]])
async def test_what_is_not_one_hot_is_refused_by_its_env(host: Face, wrong: list[int]) -> None:
    async with host.open(2, cartpole) as env:
        td = env.rand_action(await host.call(env.reset))
        td["action"][1] = torch.tensor(wrong)
        with pytest.raises(SpecMismatchError, match="expected OneHot") as caught:
            await host.call(env.step, td)
        assert caught.value.env_index == (1,)  # type: ignore[attr-defined]


async def test_a_reset_of_an_env_that_is_done_is_not_done(host: Face) -> None:
    async with host.open(2, lambda: GymEnv("CartPole-v1", max_episode_steps=1)) as env:
        td = await host.call(env.step, env.rand_action(await host.call(env.reset)))
        assert td["next", "truncated"].all()
        td = step_mdp(td)
        td["_reset"] = td["done"]
        td = await host.call(env.reset, td)
        assert not any(td[name].any() for name in ("done", "terminated", "truncated"))


@pytest.mark.parametrize("wrong", [-1, 2])
async def test_a_choice_that_there_is_not_is_refused_by_its_env(host: Face, wrong: int) -> None:
    async with host.open(2, categorical) as env:
        td = env.rand_action(await host.call(env.reset))
        td["action"][1] = wrong
        with pytest.raises(SpecMismatchError, match="expected Categorical") as caught:
            await host.call(env.step, td)
        assert caught.value.env_index == (1,)  # type: ignore[attr-defined]


async def test_a_step_before_the_reset_is_refused_by_the_env(host: Face) -> None:
    async with host.open(2, cartpole) as env:
        with pytest.raises(gym.error.ResetNeeded):
            await host.call(env.step, env.rand_action())


async def test_a_seed_that_is_set_by_a_call_is_the_next_resets(host: Face) -> None:
    async with host.open(1, cartpole) as env:
        await host.call(env.call, "set_seed", 3)
        first = await host.call(env.reset)
        second = await host.call(env.reset)
        again = await host.call(env.reset, seed=3)
        assert (first == again).all()
        assert not (first["observation"] == second["observation"]).all()


async def test_attributes_of_the_env_are_in_reach(host: Face) -> None:
    async with host.open(2, skipping) as env:
        assert await host.call(env.get_attr, "env_name") == ["Pendulum-v1"] * 2


@pytest.mark.parametrize("encoded", [True, False])
def test_what_has_to_go_by_tensordicts(encoded: bool) -> None:
    class Own(GymEnv):
        pass

    assert not can_see_through(Own("CartPole-v1"))
    assert not can_see_through(GymEnv("FrozenLake-v1").auto_register_info_dict())
    assert can_see_through(GymEnv("FrozenLake-v1", categorical_action_encoding=True))
    assert not can_see_through(GymEnv("FrozenLake-v1"))  # its observation is one-hot
    changed = GymEnv("CartPole-v1", encoded)
    changed.reward_spec = changed.reward_spec.to(torch.float64)
    assert not can_see_through(changed)


async def test_both_ways_look_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with SerialEnv(2, cartpole) as env:
        expected = env.reset(seed=1), env.output_spec, env.input_spec
    monkeypatch.setattr(through, "can_see_through", lambda env: False)
    with SerialEnv(2, cartpole) as env:
        assert (env.reset(seed=1) == expected[0]).all()
        assert (env.output_spec, env.input_spec) == expected[1:]
