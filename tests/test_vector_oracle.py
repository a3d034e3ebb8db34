"""`AioVectorEnv` against Gymnasium's own vector environments: the same envs, seeds and actions, step by step."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from gymnasium.wrappers import vector
from space_envs import FIXED, LOOSE, EchoEnv, describe
from vector_envs import Careless, Chatty, Informer, Mixed, Regular
from vector_faces import HOSTS

from aioenvs.integrations.gymnasium import AioVectorEnv

MODES = ("NextStep", "SameStep", "Disabled")
WRAPPERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "statistics": (vector.RecordEpisodeStatistics, "NextStep"),
    "statistics, same step": (vector.RecordEpisodeStatistics, "SameStep"),
    "normalized observations": (vector.NormalizeObservation, "NextStep"),
    "normalized rewards": (vector.NormalizeReward, "NextStep"),
    "clipped rewards": (functools.partial(vector.ClipReward, max_reward=0.5), "NextStep"),
    "flat observations": (vector.FlattenObservation, "NextStep"),
    "list of infos": (vector.DictInfoToList, "NextStep"),
    "list of infos, same step": (vector.DictInfoToList, "SameStep"),
}


class Case(NamedTuple):
    """An env, and for how many steps it is compared."""

    make: Callable[..., Any]
    steps: int = 40


def made(name: str, max_episode_steps: int | None = 9, **kwargs: Any) -> Case:
    return Case(lambda: gym.make(name, max_episode_steps=max_episode_steps, **kwargs), 24)


CASES = {
    "CartPole": Case(lambda: gym.make("CartPole-v1"), 80),
    "MountainCar": made("MountainCar-v0"),
    "MountainCarContinuous": made("MountainCarContinuous-v0"),
    "Acrobot": made("Acrobot-v1"),
    "Pendulum": made("Pendulum-v1"),
    "Taxi": made("Taxi-v4"),
    "FrozenLake": made("FrozenLake-v1"),
    "CliffWalking": made("CliffWalking-v1"),
    "Blackjack": Case(lambda: gym.make("Blackjack-v1")),
    "LunarLander": made("LunarLander-v3"),
    "BipedalWalker": made("BipedalWalker-v3"),
    "HalfCheetah": made("HalfCheetah-v5"),
    "Hopper": made("Hopper-v5", None),
    "Pong": made("ale_py:ALE/Pong-v5", 5),
    "Breakout": made("ale_py:ALE/Breakout-v5", 5, obs_type="grayscale"),
    "MiniGrid": made("minigrid:MiniGrid-Empty-5x5-v0"),
    "MiniGridDoorKey": made("minigrid:MiniGrid-DoorKey-5x5-v0"),
    "Mixed": Case(Mixed),
    "Text": Case(Chatty),
    "Informer": Case(Informer),
}


def compare(own: Any, peer: Any) -> None:
    """Two nested values must be the same: structure, types, dtypes, shapes, values."""
    if isinstance(peer, dict):
        assert isinstance(own, dict)
        assert list(own) == list(peer)
        for key in peer:
            compare(own[key], peer[key])
    elif isinstance(peer, tuple):
        assert isinstance(own, tuple)
        assert len(own) == len(peer)
        for one, other in zip(own, peer, strict=True):
            compare(one, other)
    elif isinstance(peer, np.ndarray):
        assert isinstance(own, np.ndarray)
        assert (own.dtype, own.shape) == (peer.dtype, peer.shape)
        np.testing.assert_array_equal(own, peer)
    else:
        assert own == peer


def compare_infos(own: dict[str, Any], peer: dict[str, Any]) -> None:
    """The same for infos, whose arrays have the dtype of the first value at Gymnasium, and of all of them here."""
    assert own.keys() == peer.keys()
    for key, value in peer.items():
        mine = own[key]
        if isinstance(value, dict):
            compare_infos(mine, value)
        elif value.dtype != object and mine.dtype == object:
            for one, other in zip(mine, value, strict=True):
                assert one is None or np.array_equal(np.asarray(one, value.dtype), other)
        elif value.dtype != object:
            np.testing.assert_array_equal(mine.astype(value.dtype), value)
            assert mine.dtype == value.dtype or mine.dtype == np.float64
        else:
            assert mine.shape == value.shape
            for one, other in zip(mine, value, strict=True):
                compare_values(one, other)


def compare_values(own: Any, peer: Any) -> None:
    if isinstance(peer, dict):
        assert own.keys() == peer.keys()
        for key in peer:
            compare_values(own[key], peer[key])
    elif isinstance(peer, tuple | list):
        for one, other in zip(own, peer, strict=True):
            compare_values(one, other)
    else:
        np.testing.assert_array_equal(own, peer)


def compare_step(own: Any, peer: Any) -> None:
    for one, other in zip(own[:-1], peer[:-1], strict=True):
        compare(one, other)
    compare_infos(own[-1], peer[-1])


def compare_runs(own: AioVectorEnv, peer: Any, mode: str, steps: int) -> None:
    """Both play the same, and are reset where they do not do so of themselves."""
    assert own.single_observation_space == peer.single_observation_space
    assert own.single_action_space == peer.single_action_space
    assert own.observation_space == peer.observation_space
    assert own.action_space == peer.action_space
    assert own.metadata == peer.metadata
    assert own.render_mode == peer.render_mode
    compare_step(own.reset(seed=11), peer.reset(seed=11))
    peer.action_space.seed(5)
    ends = 0
    for _ in range(steps):
        actions = peer.action_space.sample()
        mine, theirs = own.step(actions), peer.step(actions)
        compare_step(mine, theirs)
        over = mine[2] | mine[3]
        ends += over.sum()
        if mode == "Disabled" and over.any():
            options = {"reset_mask": over}
            compare_step(own.reset(options=dict(options)), peer.reset(options=dict(options)))
    assert ends >= 2
    compare_step(own.reset(seed=[3, None, 5], options={}), peer.reset(seed=[3, None, 5], options={}))


@pytest.fixture(autouse=True)
def _no_complaints() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Gymnasium's checks, about the envs
        yield


@contextlib.contextmanager
def both(own: AioVectorEnv, peer: Any) -> Iterator[tuple[AioVectorEnv, Any]]:
    with contextlib.closing(own), contextlib.closing(peer):
        yield own, peer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every_combination
@pytest.mark.slow
def test_every_env_does_the_same(name: str, mode: str) -> None:
    make, steps = CASES[name]
    own = AioVectorEnv([make] * 3, num_processes=2, autoreset_mode=mode)
    peer = SyncVectorEnv([make] * 3, autoreset_mode=mode)
    with both(own, peer):
        compare_runs(own, peer, mode, steps)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["CartPole", "FrozenLake", "Mixed", "Informer"])
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.every_combination
def test_it_is_the_same_wherever_envs_live(name: str, mode: str, host: str) -> None:
    make, steps = CASES[name]
    own = AioVectorEnv([make] * 3, autoreset_mode=mode, **HOSTS[host])
    peer = SyncVectorEnv([make] * 3, autoreset_mode=mode)
    with both(own, peer):
        compare_runs(own, peer, mode, steps)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_it_is_what_their_processes_return(mode: str) -> None:
    make, steps = CASES["CartPole"]
    own = AioVectorEnv([make] * 3, autoreset_mode=mode)
    peer = AsyncVectorEnv([make] * 3, autoreset_mode=mode)
    with both(own, peer):
        compare_runs(own, peer, mode, steps)


def test_infos_differ_by_env_all_the_same() -> None:
    makes = [functools.partial(Informer, number) for number in range(3)]
    with contextlib.closing(AioVectorEnv(makes, num_processes=2, autoreset_mode="SameStep")) as own:
        own.reset(seed=0)
        *_, infos = own.step(np.zeros(3, np.int64))
        compare(infos["number"], np.array([2, 2.7, 2.7]))
        compare(infos["count"], np.array([1, 1, 1]))
        compare(infos["flag"], np.zeros(3, np.bool_))
        compare(infos["place"], np.array([[0, 1], [1, 1], [2, 1]]))
        assert infos["nothing"].tolist() == [None] * 3
        assert infos["maybe"].tolist() == [1, None, 1]
        assert infos["word"].tolist() == ["env 0", "env 1", "env 2"]
        assert [each.tolist() for each in infos["ragged"]] == [[0], [0, 1], [0, 1, 2]]
        assert infos["either"].tolist() == [5, {"a": 1}, {"a": 1}]
        compare(infos["nested"]["deeper"]["n"], np.array([1, 1, 1]))
        compare(infos["rare"], np.array([0, 0, 0.5], np.float32))
        assert infos["_rare"].tolist() == [False, False, True]
        for _ in range(2):
            *_, infos = own.step(np.zeros(3, np.int64))
        assert infos["_final_info"].tolist() == [True, False, False]
        assert infos["final_info"]["word"].tolist() == ["env 0", None, None]
        compare(infos["final_obs"][0], np.array([0, 3], np.float32))
        assert infos["final_obs"][1:].tolist() == [None, None]
        assert infos["_began"].tolist() == [True, False, False]
        assert infos["word"].tolist() == [None, "env 1", "env 2"]


@pytest.mark.parametrize("host", HOSTS)
def test_envs_may_reuse_what_they_return(host: str) -> None:
    with contextlib.closing(AioVectorEnv([Careless] * 3, autoreset_mode="SameStep", **HOSTS[host])) as own:
        first, began = own.reset()
        one = own.step(np.zeros(3, np.int64))
        end = own.step(np.zeros(3, np.int64))
        assert first.tolist() == [[0]] * 3
        assert began["steps"].tolist() == [0] * 3
        assert one[0].tolist() == [[1]] * 3
        assert one[-1]["steps"].tolist() == [1] * 3
        assert one[-1]["array"].tolist() == [[1, 1]] * 3
        assert end[0].tolist() == [[0]] * 3
        assert [each.tolist() for each in end[-1]["final_obs"]] == [[2]] * 3
        assert end[-1]["final_info"]["array"].tolist() == [[2, 2]] * 3
        assert end[-1]["steps"].tolist() == [0] * 3


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_work_on_top(name: str) -> None:
    wrap, mode = WRAPPERS[name]
    make = CASES["CartPole"].make
    own = wrap(AioVectorEnv([make] * 3, autoreset_mode=mode))
    peer = wrap(SyncVectorEnv([make] * 3, autoreset_mode=mode))
    with both(own, peer):
        compare(own.reset(seed=2)[0], peer.reset(seed=2)[0])
        rng = np.random.default_rng(0)
        for _ in range(60):
            actions = rng.integers(0, 2, 3)
            mine, theirs = own.step(actions), peer.step(actions)
            compare(mine[:4], theirs[:4])
            compare_infos(_untimed(mine[4]), _untimed(theirs[4]))


def _untimed(infos: Any) -> Any:
    """Infos as dicts, without how long an episode took."""
    if isinstance(infos, list):
        infos = {str(place): np.array([each], object) for place, each in enumerate(infos)}
    return {
        key: {k: v for k, v in value.items() if k not in ("t", "_t")} if isinstance(value, dict) else value
        for key, value in infos.items()
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_commands(mode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    makes = [functools.partial(Regular, number) for number in range(4)]
    own = AioVectorEnv(makes, num_processes=2, autoreset_mode=mode)
    peer = SyncVectorEnv(makes, autoreset_mode=mode)
    with both(own, peer):
        compare_step(own.reset(seed=1), peer.reset(seed=1))
        over = np.zeros(4, np.bool_)
        for _ in range(60):
            command = rng.choice(["step", "step", "step", "step", "mask", "reset", "set", "call"])
            mask = rng.random(4) < 0.5
            if mode == "Disabled" and over.any():
                command, mask = "mask", mask | over
            if command == "step":
                actions = rng.integers(0, 4, 4)
                own.step_async(actions)
                mine, theirs = own.step_wait(), peer.step(actions)
                compare_step(mine, theirs)
                over = mine[2] | mine[3]
            elif command == "mask" and mask.any():
                seeds = [int(rng.integers(99)) if rng.random() < 0.5 else None for _ in range(4)]
                options = {"level": 3, "reset_mask": mask}
                compare_step(
                    own.reset(seed=seeds, options=dict(options)), peer.reset(seed=seeds, options=dict(options))
                )
                over &= ~mask
            elif command == "reset":
                compare_step(own.reset(seed=int(seed)), peer.reset(seed=int(seed)))
                over[:] = False
            elif command == "set":
                values = rng.integers(0, 9, 4).tolist()
                own.set_attr("level", values)
                peer.set_attr("level", values)
            else:
                assert own.call("double", 3) == peer.call("double", 3)
                assert own.get_attr("level") == peer.get_attr("level")


@pytest.mark.parametrize("name", [*FIXED, *LOOSE])
@pytest.mark.parametrize("host", [{"backend": "serial"}, {"num_processes": 2}], ids=["serial", "processes"])
@pytest.mark.every_combination
def test_every_space_goes_both_ways(name: str, host: dict[str, Any]) -> None:
    space = {**FIXED, **LOOSE}[name]()
    space.seed(3)
    makes = [functools.partial(EchoEnv, space, plain=True, length=3)] * 2
    with both(AioVectorEnv(makes, autoreset_mode="SameStep", **host), SyncVectorEnv(makes)) as (own, peer):
        assert own.action_space == peer.action_space
        assert own.observation_space == peer.observation_space
        first = space.sample()
        own.action_space.seed(1)
        own.reset(options={"value": first})
        for step in range(4):
            actions = own.action_space.sample()
            observations, *_, infos = own.step(actions)
            if step == 2:
                compare_values(infos["final_obs"].tolist(), list(iterate(peer.action_space, actions)))
                actions = batch_of(space, [first, first])
            compare_values(observations, actions)
            assert describe(observations) == describe(actions)


def batch_of(space: Any, values: list[Any]) -> Any:
    return concatenate(space, values, create_empty_array(space, len(values)))
