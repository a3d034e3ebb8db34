"""`AioVecEnv` against `DummyVecEnv` and `SubprocVecEnv`: the same envs, seeds and actions; and training."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from failing_envs import CountingEnv, Gate, failing_factory, hang, kill_itself
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecCheckNan,
    VecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)
from vector_envs import Careless, Endless, Informer, StepFails, Surveyor
from vector_faces import HOSTS, closed_in_the_middle_of_a_step, counting

from aioenvs.errors import ClosedError, ConcurrencyError, SpecMismatchError, WorkerDiedError, WorkerStartError
from aioenvs.integrations.sb3 import AioVecEnv


def made(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: gym.make(name, **{"max_episode_steps": 9, **options})


CASES: dict[str, Callable[[], Any]] = {
    "CartPole": made("CartPole-v1"),
    "MountainCar": made("MountainCar-v0"),
    "Acrobot": made("Acrobot-v1"),
    "Pendulum": made("Pendulum-v1"),
    "Taxi": made("Taxi-v4"),
    "FrozenLake": made("FrozenLake-v1"),
    "LunarLander": made("LunarLander-v3"),
    "BipedalWalker": made("BipedalWalker-v3"),
    "HalfCheetah": made("HalfCheetah-v5"),
    "Pong": made("ale_py:ALE/Pong-v5", max_episode_steps=4),
    "MiniGrid": lambda: _images(gym.make("minigrid:MiniGrid-Empty-5x5-v0", max_episode_steps=9)),
    "Blackjack": made("Blackjack-v1"),
    "Informer": Informer,
}


def _images(env: Any) -> Any:
    from minigrid.wrappers import ImgObsWrapper

    return ImgObsWrapper(env)


class Sighted(gym.Env[Any, Any]):
    """Has a Dict of observations."""

    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (2, 2), np.uint8), state=gym.spaces.Box(-1, 1, (3,)), turn=gym.spaces.Discrete(9)
    )
    action_space = gym.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.turn = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.turn += 1
        return self._observation(), float(action.sum()), False, self.turn == 5, {}

    def _observation(self) -> Any:
        draws = self.np_random.random(3, np.float32)
        return {"image": np.full((2, 2), self.turn, np.uint8), "state": draws, "turn": self.turn}


CASES["Sighted"] = Sighted


@pytest.fixture(autouse=True)
def _no_complaints() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Gymnasium's and stable-baselines3's checks, about the envs
        warnings.simplefilter("error", ResourceWarning)
        yield


def opened(*args: Any, **options: Any) -> contextlib.closing[AioVecEnv]:
    return contextlib.closing(AioVecEnv(*args, **options))


def compare(own: Any, peer: Any) -> None:
    """Two nested values must be the same; numbers are compared by value."""
    if isinstance(peer, dict):
        assert own.keys() == peer.keys()
        for key in peer:
            compare(own[key], peer[key])
    elif isinstance(peer, list | tuple):
        assert len(own) == len(peer)
        for one, other in zip(own, peer, strict=True):
            compare(one, other)
    elif isinstance(peer, np.ndarray) and peer.shape:
        assert (own.dtype, own.shape) == (peer.dtype, peer.shape)
        np.testing.assert_array_equal(own, peer)
    else:
        np.testing.assert_array_equal(own, peer)


def compare_runs(own: VecEnv, peer: VecEnv, steps: int = 25) -> None:
    assert own.observation_space == peer.observation_space
    assert own.action_space == peer.action_space
    assert own.render_mode == peer.render_mode
    assert own.seed(3) == peer.seed(3)
    compare(own.reset(), peer.reset())
    compare(own.reset_infos, peer.reset_infos)
    own.action_space.seed(1)
    ends = 0
    for _ in range(steps):
        actions = np.array([own.action_space.sample() for _ in range(own.num_envs)])
        mine, theirs = own.step(actions), peer.step(actions)
        assert isinstance(mine[3], list)
        compare(mine, theirs)
        compare(own.reset_infos, peer.reset_infos)
        ends += mine[2].sum()
    assert ends


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every_combination
def test_every_env_does_the_same(name: str) -> None:
    with contextlib.closing(DummyVecEnv([CASES[name]] * 3)) as peer, opened([CASES[name]] * 3) as own:
        compare_runs(own, peer)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["CartPole", "Sighted", "Informer"])
def test_it_is_the_same_wherever_envs_live(name: str, host: str) -> None:
    with contextlib.closing(DummyVecEnv([CASES[name]] * 3)) as peer, opened([CASES[name]] * 3, **HOSTS[host]) as own:
        compare_runs(own, peer)


def test_it_is_what_their_processes_return() -> None:
    makes = [CASES["CartPole"]] * 3
    with contextlib.closing(SubprocVecEnv(makes, "fork")) as peer, opened(makes) as own:
        own.seed(3)
        peer.seed(3)
        compare(own.reset(), peer.reset())
        for step in range(25):
            actions = np.array([step % 2, 1, 0])
            mine, theirs = own.step(actions), peer.step(actions)
            compare(mine[0], theirs[0])
            compare(mine[1], theirs[1].astype(np.float32))
            compare(mine[2:], theirs[2:])


@pytest.mark.parametrize("host", HOSTS)
def test_envs_may_reuse_what_they_return(host: str) -> None:
    with opened([Careless] * 3, **HOSTS[host]) as env:
        env.reset()
        zeros = np.zeros(3, np.int64)
        one, _, _, infos = env.step(zeros)
        end, _, dones, last = env.step(zeros)
        assert one.tolist() == [[1]] * 3
        assert infos[0]["array"].tolist() == [1, 1]
        assert dones.all()
        assert end.tolist() == [[0]] * 3
        assert last[2]["terminal_observation"].tolist() == [2]
        assert last[2]["array"].tolist() == [2, 2]
        assert env.reset_infos[2]["array"].tolist() == [-1, -1]


# -- training -------------------------------------------------------------------------------------------


def weights(model: Any) -> Any:
    return torch.cat([parameter.flatten() for parameter in model.policy.parameters()])


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.slow
def test_training_gives_the_same_numbers(algorithm: Any) -> None:
    found = []
    for make in (DummyVecEnv, functools.partial(AioVecEnv, num_processes=2)):
        with contextlib.closing(make([lambda: Monitor(gym.make("CartPole-v1"))] * 3)) as env:
            options = {"n_steps": 32, "batch_size": 32} if algorithm is PPO else {}
            model = algorithm("MlpPolicy", env, seed=0, device="cpu", **options).learn(200)
            found.append((weights(model), evaluate_policy(model, env, 3)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.slow
def test_training_off_policy() -> None:
    with opened("CartPole-v1", 2) as env:
        model = DQN("MlpPolicy", env, seed=0, device="cpu", learning_starts=20, buffer_size=500)
        before = weights(model).clone()
        assert not torch.equal(before, weights(model.learn(200)))


def test_workers_do_without_torch() -> None:
    with opened([Surveyor] * 2, num_processes=1) as env:
        assert env.env_is_wrapped(Monitor) == [False, False]
        env.reset()
        env.step(np.zeros(2, np.int64))
        assert env.env_method("imported", "torch", "tensordict", "stable_baselines3") == [[False] * 3] * 2


def test_an_env_of_a_dict_trains() -> None:
    with opened([Sighted] * 2) as env:
        model = PPO("MultiInputPolicy", env, seed=0, device="cpu", n_steps=16, batch_size=16).learn(40)
        assert model.num_timesteps == 64


def test_their_helper_makes_it() -> None:
    env = make_vec_env("CartPole-v1", 2, seed=5, vec_env_cls=AioVecEnv, vec_env_kwargs={"num_processes": 1})
    with contextlib.closing(env):
        assert env.env_is_wrapped(Monitor) == [True, True]
        with contextlib.closing(make_vec_env("CartPole-v1", 2, seed=5)) as peer:
            np.testing.assert_array_equal(env.reset(), peer.reset())


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "VecNormalize": VecNormalize,
    "VecMonitor": VecMonitor,
    "VecFrameStack": lambda env: VecFrameStack(env, 3),
    "VecCheckNan": VecCheckNan,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_work_on_top(name: str) -> None:
    wrap, makes = WRAPPERS[name], [made("CartPole-v1")] * 3
    with contextlib.closing(wrap(DummyVecEnv(makes))) as peer, contextlib.closing(wrap(AioVecEnv(makes))) as own:
        own.seed(3)
        peer.seed(3)
        compare(own.reset(), peer.reset())
        for step in range(30):
            actions = np.array([step % 2, 1, 0])
            mine, theirs = own.step(actions), peer.step(actions)
            for info in (*mine[3], *theirs[3]):
                info.get("episode", {}).pop("t", None)
            compare(mine, theirs)


# -- calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_methods_and_attributes(host: str) -> None:
    makes = [functools.partial(_monitored, number) for number in range(3)]
    with opened(makes, **HOSTS[host]) as env, contextlib.closing(DummyVecEnv(makes)) as peer:
        for indices in (None, 1, [2, 0], range(2), -1, []):
            wanted = peer.env_method("double", 5, plus=1, indices=[2] if indices == -1 else indices)
            assert env.env_method("double", 5, plus=1, indices=indices) == wanted
            assert env.get_attr("level", indices) == [7] * len(wanted)
            assert env.env_is_wrapped(Monitor, indices) == [True] * len(wanted)
            assert env.env_is_wrapped(gym.wrappers.TimeLimit, indices) == [False] * len(wanted)
        env.set_attr("level", 9, [0, 2])
        assert env.get_attr("level") == [9, 7, 9]
        for each in (env, peer):
            each.set_attr("nobody_had_this", "new", [1])
            assert each.get_attr("nobody_had_this", 1) == ["new"]
        assert [method(5) for method in env.get_attr("double")] == [10, 11, 12]
        assert (env.has_attr("double"), env.has_attr("level"), env.has_attr("nothing")) == (True, True, False)
        with pytest.raises(AttributeError, match="nothing"):
            env.get_attr("nothing")
        with pytest.raises(AttributeError, match="nothing"):
            env.env_method("nothing")
        with pytest.raises(IndexError, match="expected indices of 3 envs, found 3"):
            env.get_attr("level", 3)
        with pytest.raises(TypeError, match="expected indices of 3 envs, found 'level'"):
            env.get_attr("level", "level")  # type: ignore[arg-type]


def _monitored(number: int) -> Any:
    return Monitor(Informer(number))


def test_options_and_seeds_are_used_once() -> None:
    with opened([Informer] * 3) as env, contextlib.closing(DummyVecEnv([Informer] * 3)) as peer:
        for each in (env, peer):
            each.seed(7)
            each.set_options([{"level": 1}, {}, {"level": 3}])
        compare(env.reset(), peer.reset())
        compare(env.reset_infos, peer.reset_infos)
        assert env.get_attr("options") == [{"level": 1}, None, {"level": 3}]
        env.reset()
        peer.reset()
        compare(env.reset_infos, peer.reset_infos)
        assert env.get_attr("options") == [None] * 3


def test_images() -> None:
    makes = [made("CartPole-v1", render_mode="rgb_array")] * 3
    with opened(makes) as env, contextlib.closing(DummyVecEnv(makes)) as peer:
        for each in (env, peer):
            each.seed(0)
            each.reset()
        compare(env.get_images(), peer.get_images())
        compare(env.render(), peer.render())
    with opened(counting(), backend="serial") as env, pytest.warns(UserWarning, match="The render mode is None"):
        assert env.get_images() == [None] * 3


# -- order, bad input and faults ------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_what_may_be_asked_when(host: str) -> None:
    with opened(counting(), **HOSTS[host]) as env:
        actions = np.array([1, 2, 3])
        assert env.step(actions)[0].tolist() == [[0, 0, 1, 1], [1, 0, 1, 2], [2, 0, 1, 3]]  # whatever it makes of it
        env.reset()
        with pytest.raises(ConcurrencyError, match="no step is under way"):
            env.step_wait()
        env.step_async(actions)
        for other in (lambda: env.step_async(actions), lambda: env.get_attr("steps"), lambda: env.step(actions)):
            with pytest.raises(ConcurrencyError, match="a step is still under way"):
                other()
        assert env.step_wait()[0][:, 3].tolist() == [1, 2, 3]
        env.step_async(actions)
        assert env.reset()[:, 2].tolist() == [0, 0, 0]  # which drops it
        assert env.step(actions)[0][:, 3].tolist() == [1, 2, 3]
    for use in (env.reset, lambda: env.step(actions), env.step_wait, lambda: env.get_attr("steps")):
        with pytest.raises(ClosedError, match="was closed, so its envs are gone"):
            use()
    env.close()


@pytest.mark.parametrize(
    ("args", "options", "kind", "words"),
    [
        (([],), {}, ValueError, "expected a callable for each env, found none"),
        (("CartPole-v1",), {}, TypeError, "expected n_envs, or a list with a callable"),
        (("CartPole-v1", 0), {}, ValueError, "n_envs must be an integer of at least 1, got 0"),
        (([CountingEnv()],), {}, TypeError, "must make an env, but .* is one"),
        (([CountingEnv],), {"start_method": "thread"}, ValueError, "start_method must be one of"),
        (([failing_factory],), {}, WorkerStartError, "the factory of env 0 failed"),
        (([CountingEnv, Careless],), {}, SpecMismatchError, "spaces of one structure"),
    ],
)
def test_what_it_cannot_be_made_of(args: Any, options: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        AioVecEnv(*args, **options)


def test_bad_actions_step_nobody() -> None:
    with opened(counting(), num_processes=2) as env:
        env.reset()
        for bad in (np.array([1, 2]), np.array([1.5, 2, 3]), None, np.zeros((3, 1), int)):
            with pytest.raises(SpecMismatchError, match=r"(?s)actions: expected .*no env was stepped"):
                env.step(bad)
        assert env.step(np.array([1, 2, 3]))[0][:, 3].tolist() == [1, 2, 3]


def test_an_env_that_raises() -> None:
    with opened([StepFails] * 3, num_processes=2) as env:
        env.reset()
        with pytest.raises(ZeroDivisionError, match="action 1") as caught:
            env.step(np.array([0, 1, 0]))
        assert caught.value.env_index == (1,)
        assert env.reset().tolist() == [0, 0, 0]


def test_the_death_of_a_worker() -> None:
    with opened(counting({1: {"fault": kill_itself}}), num_processes=3) as env:
        env.reset()
        env.step(np.array([1, 1, 1]))
        with pytest.raises(WorkerDiedError, match="killed by SIGKILL"):
            env.step(np.array([1, 1, 1]))
        assert env.reset()[:, 2].tolist() == [0, 0, 0]


def test_a_worker_that_is_restarted() -> None:
    makes = counting({1: {"fault": kill_itself}})
    with opened(makes, num_processes=3, on_worker_death="restart") as env:
        env.reset()
        env.step(np.array([1, 1, 1]))
        observations, rewards, dones, infos = env.step(np.array([1, 1, 1]))
        assert observations[:, 2].tolist() == [2, 0, 2]
        assert rewards.tolist() == [2, 0, 2]
        assert dones.tolist() == [False, True, False]
        assert infos[1]["TimeLimit.truncated"] is True
        assert infos[1]["terminal_observation"].tolist() == [1, 1, 1, 1]


def test_the_end_of_a_step_that_hangs(gate: Gate) -> None:
    env = AioVecEnv(counting({1: {"fault": hang}, 2: {"fault": gate.wait}}), num_processes=3, close_timeout=0.2)
    env.reset()
    env.step(np.array([1, 1, 1]))
    env.step_async(np.array([1, 1, 1]))
    gate.wait_for_arrival()
    env.close()


def test_what_was_not_closed_says_so_and_is_gone() -> None:
    envs = [AioVecEnv(counting(), num_processes=2)]
    envs[0].reset()
    with pytest.warns(ResourceWarning, match="AioVecEnv was never closed"):
        envs.clear()
    gc.collect()


@pytest.mark.parametrize("host", HOSTS)
def test_an_info_may_contain_itself_as_each_env_has_its_own(host: str) -> None:
    with contextlib.closing(AioVecEnv([functools.partial(Endless, "self")] * 3, **HOSTS[host])) as envs:
        envs.reset()
        envs.step([1, 1, 1])
        infos = envs.step([1, 1, 1])[-1]
    assert all(info["all"]["all"]["inner"] == {"level": 1} for info in infos)


@pytest.mark.parametrize("host", HOSTS)
def test_whoever_closes_while_another_thread_steps_is_told_so_and_can_close_later(host: str, gate: Gate) -> None:
    closed_in_the_middle_of_a_step(functools.partial(AioVecEnv, **HOSTS[host]), [1, 1, 1], gate)


class Slotted:
    """Has no `__dict__`."""

    __slots__ = ("action_space", "observation_space")

    def __init__(self) -> None:
        self.observation_space, self.action_space = gym.spaces.Discrete(3), gym.spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return int(action), 0.0, False, False, {}


def test_an_env_without_a_dict_is_not_wrapped() -> None:
    with opened([Slotted] * 2, backend="serial") as env:
        assert env.env_is_wrapped(Monitor) == [False, False]
