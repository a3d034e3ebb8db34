"""The same seed gives the same trajectory as stepping the raw Gymnasium envs by hand, whatever hosts them."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from faces import EVERY_FACE, FACES, Face
from numpy.typing import NDArray
from tensordict import TensorDict

from aioenvs import ParallelEnv, SerialEnv

gym.register_envs(ale_py)

NUM_ENVS = 3
SEEDS = (0, 795726461, 2841183792)  # the chain that TorchRL's rule makes of seed 0
FOLLOWING = 2309840538
FLAGS = ("done", "terminated", "truncated")

SOME = tuple(face for face in FACES if face.name in ("serial", "async-packed"))

Trajectory = dict[str, NDArray[Any]]

every = pytest.mark.parametrize("face", EVERY_FACE, ids=lambda face: face.name)
some = pytest.mark.parametrize("face", SOME, ids=lambda face: face.name)


@dataclass(frozen=True)
class Case:
    """An env, and how many steps it takes until every one of them was reset at least once."""

    factory: Any
    steps: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def make(self) -> Any:
        make = self.factory if callable(self.factory) else functools.partial(gym.make, self.factory)
        return make(**self.kwargs)


CASES = {
    "CartPole": Case("CartPole-v1", 80),
    "Pendulum": Case("Pendulum-v1", 20, {"max_episode_steps": 7}),
    "MountainCarContinuous": Case("MountainCarContinuous-v0", 20, {"max_episode_steps": 7}),
    "Taxi": Case("Taxi-v4", 20, {"max_episode_steps": 6}),
    "FrozenLake": Case("FrozenLake-v1", 60),
    "LunarLander": Case("LunarLander-v3", 50, {"max_episode_steps": 20}),
    "HalfCheetah": Case("HalfCheetah-v5", 20, {"max_episode_steps": 8}),
    "Pong": Case("ale_py:ALE/Pong-v5", 12, {"max_episode_steps": 5}),
    "Pong-lambda": Case(lambda **kwargs: gym.make("ALE/Pong-v5", **kwargs), 12, {"max_episode_steps": 5}),
}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where MuJoCo may put its log


@functools.cache
def actions_of(name: str) -> NDArray[Any]:
    """Actions `(steps, envs, ...)`, the same in every test of a case."""
    case = CASES[name]
    env = case.make()
    env.action_space.seed(7)
    drawn = [[env.action_space.sample() for _ in range(NUM_ENVS)] for _ in range(case.steps)]
    env.close()
    return np.array(drawn)


@functools.cache
def by_hand(name: str) -> Trajectory:
    """What a user gets who seeds and steps the raw envs; each leaf is `(steps, envs, ...)`."""
    envs = [CASES[name].make() for _ in SEEDS]
    actions = actions_of(name).swapaxes(0, 1)
    columns = [_alone(*each) for each in zip(envs, SEEDS, actions, strict=True)]
    return {leaf: np.stack([column[leaf] for column in columns], axis=1) for leaf in columns[0]}


def _alone(env: Any, seed: int, actions: NDArray[Any]) -> Trajectory:
    rows: list[dict[str, Any]] = []
    root, _ = env.reset(seed=seed)
    for action in actions:
        following, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        flags = {"done": [done], "terminated": [terminated], "truncated": [truncated]}
        row = {"root": root, "next": following, "reward": np.array([reward], np.float32), **flags}
        rows.append({leaf: np.array(value) for leaf, value in row.items()})
        root = env.reset()[0] if done else following
    env.close()
    return {leaf: np.stack([row[leaf] for row in rows]) for leaf in rows[0]}


async def stepped(face: Face, env: Any, actions: NDArray[Any]) -> Trajectory:
    """The same from a batched env that was just seeded."""
    rows: list[dict[str, Any]] = []
    td = await face.call(env.reset)
    for action in actions:
        assert not any(td[flag].any() for flag in FLAGS)
        td["action"] = torch.from_numpy(action)
        td, following = await face.call(env.step_and_maybe_reset, td)
        row = {"root": td["observation"], "next": td["next", "observation"], "reward": td["next", "reward"]}
        row |= {flag: td["next", flag] for flag in FLAGS}
        rows.append({leaf: value.numpy() for leaf, value in row.items()})
        td = following
    return {leaf: np.stack([row[leaf] for row in rows]) for leaf in rows[0]}


def assert_identical(found: Trajectory, expected: Trajectory) -> None:
    assert found.keys() == expected.keys()
    for leaf, values in expected.items():
        assert (found[leaf].dtype, found[leaf].shape) == (values.dtype, values.shape), leaf
        different = np.argwhere(found[leaf] != values)
        assert not len(different), f"{leaf} differs first at (step, env, ...) {different[0]}"


async def check(face: Face, name: str, **options: Any) -> None:
    case = CASES[name]
    async with face.open(NUM_ENVS, case.factory, create_env_kwargs=case.kwargs, **options) as env:
        assert await face.call(env.set_seed, 0) == FOLLOWING
        assert_identical(await stepped(face, env, actions_of(name)), by_hand(name))


@pytest.mark.parametrize("name", CASES)
def test_every_env_is_reset_on_the_way(name: str) -> None:
    done = by_hand(name)["done"]
    assert done.any(axis=0).all()
    assert not done.all()


@every
@pytest.mark.parametrize("name", ["CartPole", "LunarLander"])
async def test_same_whatever_hosts_it(name: str, face: Face) -> None:
    await check(face, name)


@some
@pytest.mark.parametrize("name", CASES)
async def test_same_as_by_hand(name: str, face: Face) -> None:
    await check(face, name)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("name", ["CartPole", "LunarLander", "Pong-lambda"])
async def test_same_under_every_start_method(name: str, method: str) -> None:
    await check(Face("packed", ParallelEnv, 2), name, mp_start_method=method)


def first_roots() -> NDArray[Any]:
    return by_hand("CartPole")["root"][0]


def observation(td: TensorDict) -> NDArray[Any]:
    return td["observation"].numpy()


@some
async def test_the_seed_of_reset_starts_the_same_chain(face: Face) -> None:
    async with face.open(NUM_ENVS, "CartPole-v1") as env:
        assert np.array_equal(observation(await face.call(env.reset, seed=0)), first_roots())


@some
async def test_a_static_seed_is_the_same_for_all_envs(face: Face) -> None:
    async with face.open(NUM_ENVS, "CartPole-v1") as env:
        assert await face.call(env.set_seed, SEEDS[1], static_seed=True) == SEEDS[1]
        assert np.array_equal(observation(await face.call(env.reset)), first_roots()[[1, 1, 1]])


@some
async def test_seed_none_draws_another_seed_each_time(face: Face) -> None:
    roots = []
    async with face.open(NUM_ENVS, "CartPole-v1") as env:
        for _ in range(2):
            assert isinstance(await face.call(env.set_seed, None), int)
            roots.append(observation(await face.call(env.reset)))
    assert len(np.unique(np.concatenate(roots), axis=0)) == 2 * NUM_ENVS


@some
async def test_a_seed_is_kept_until_the_next_reset_of_its_env(face: Face) -> None:
    mask = torch.tensor([False, True, False])
    async with face.open(NUM_ENVS, "CartPole-v1") as env:
        await face.call(env.reset, seed=5)
        await face.call(env.set_seed, 0)
        first = observation(await face.call(env.reset, TensorDict({"_reset": mask}, [NUM_ENVS])))
        second = observation(await face.call(env.reset, TensorDict({"_reset": ~mask}, [NUM_ENVS])))
    assert np.array_equal(first[1], first_roots()[1])
    assert not np.isin(first[[0, 2]], first_roots()).any()
    assert np.array_equal(second, first_roots())


@some
async def test_a_seed_counts_once(face: Face) -> None:
    async with face.open(NUM_ENVS, "CartPole-v1") as env:
        await face.call(env.set_seed, 0)
        roots = np.stack([observation(await face.call(env.reset)) for _ in range(3)])
    alone = gym.make("CartPole-v1")
    expected = [alone.reset(seed=0)[0], alone.reset()[0], alone.reset()[0]]
    alone.close()
    assert np.array_equal(roots[:, 0], np.stack(expected))


@some
async def test_own_seeds_go_before_the_chain(face: Face) -> None:
    own = [{}, {"seed": SEEDS[2]}, {}]
    async with face.open(NUM_ENVS, "CartPole-v1") as env:
        root = observation(await face.call(env.reset, seed=0, list_of_kwargs=own))
    assert np.array_equal(root, first_roots()[[0, 2, 2]])


@pytest.mark.parametrize("seed", [-1, 1.5, "0", True])
def test_what_is_no_seed_is_refused_and_changes_nothing(seed: Any) -> None:
    with SerialEnv(NUM_ENVS, "CartPole-v1") as env:
        env.set_seed(0)
        with pytest.raises((TypeError, ValueError), match="seed must"):
            env.set_seed(seed)
        with pytest.raises((TypeError, ValueError), match="seed must"):
            env.reset(seed=seed)
        assert np.array_equal(observation(env.reset()), first_roots())


def test_a_reopened_env_starts_the_same_way() -> None:
    env = ParallelEnv(NUM_ENVS, "CartPole-v1", num_processes=2)
    for _ in range(2):
        with env:
            env.set_seed(0)
            assert np.array_equal(observation(env.reset()), first_roots())
