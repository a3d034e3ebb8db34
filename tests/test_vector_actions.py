"""Actions of the vector faces: which values are one for each env, and what of them arrives in the envs."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from aioenvs.errors import SpecMismatchError
from aioenvs.integrations.gymnasium import AioVectorEnv
from aioenvs.integrations.sb3 import AioVecEnv

CHOICE = spaces.Discrete(9)
PAIR = spaces.Tuple((CHOICE, CHOICE))
NESTED = spaces.Dict(at=spaces.Box(-9, 9, (2,)), pair=PAIR)


class Echo(gym.Env[Any, Any]):
    """Says what its action was.

    Args:
        space: Of its actions.
    """

    observation_space = spaces.Box(-9, 9, (1,), np.float32)

    def __init__(self, space: Any) -> None:
        self.action_space = space
        self.heard: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.heard = action
        return np.zeros(1, np.float32), 0.0, False, False, {}


def plain(value: Any) -> Any:
    """A value as lists, dicts and numbers of Python."""
    if isinstance(value, dict):
        return {key: plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [plain(own) for own in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def heard(envs: Any, actions: Any, *, halves: bool = False) -> list[Any]:
    """What each of two envs gets of actions."""
    envs.reset()
    if halves:
        envs.step_async(actions)
        envs.step_wait()
    else:
        envs.step(actions)
    found = list(envs.get_attr("heard"))
    envs.close()
    return found


def two(space: Any) -> list[Any]:
    return [functools.partial(Echo, space)] * 2


def nested(place: float, *pair: int) -> dict[str, Any]:
    return {"at": np.full(2, place, np.float32), "pair": pair}


ONE_EACH: dict[str, tuple[Any, Any]] = {
    "pairs": (PAIR, [(3, 4), (6, 7)]),
    "tuple of lists": (PAIR, ([3, 4], [6, 7])),
    "array": (PAIR, np.array([[3, 4], [6, 7]])),
    "what could be columns": (PAIR, (np.array([3, 6]), np.array([4, 7]))),
    "more members than envs": (spaces.Tuple((CHOICE,) * 3), [(3, 4, 5), (6, 7, 8)]),
    "dicts": (NESTED, [nested(0.5, 1, 2), nested(1.5, 3, 4)]),
    "array of dicts": (NESTED, np.array([nested(0.5, 1, 2), nested(1.5, 3, 4)], object)),
    "text and number": (spaces.Tuple((spaces.Text(5), CHOICE)), [("a", 1), ("b", 2)]),
}


@pytest.mark.parametrize("name", ONE_EACH)
def test_an_action_for_each_env_is_what_their_vec_env_makes_of_it(name: str) -> None:
    space, actions = ONE_EACH[name]
    theirs = plain(heard(DummyVecEnv(two(space)), actions))
    assert plain(heard(AioVecEnv(two(space), backend="serial"), actions)) == theirs
    if name in ("pairs", "dicts"):
        assert plain(heard(AioVecEnv(two(space), num_processes=1), actions, halves=True)) == theirs


COLUMNS: dict[str, tuple[Any, Any]] = {
    "dict": (NESTED, {"at": np.ones((2, 2), np.float32), "pair": (np.array([1, 3]), np.array([2, 4]))}),
    "more members than envs": (spaces.Tuple((CHOICE,) * 3), (np.array([3, 6]), np.array([4, 7]), np.array([5, 8]))),
    "text and number": (spaces.Tuple((spaces.Text(5), CHOICE)), (("a", "b"), np.array([1, 2]))),
    "members of another shape": (spaces.Tuple((spaces.Box(-9, 9, (2,)), CHOICE)), (np.ones((2, 2)), np.array([1, 2]))),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_batch_of_the_batched_space_is_one_for_both_faces(name: str) -> None:
    space, actions = COLUMNS[name]
    theirs = plain(heard(SyncVectorEnv(two(space)), actions))
    assert plain(heard(AioVectorEnv(two(space), backend="serial"), actions)) == theirs
    assert plain(heard(AioVecEnv(two(space), backend="serial"), actions)) == theirs


@pytest.mark.parametrize("name", ["pairs", "array", "what could be columns"])
def test_for_gymnasium_members_come_first(name: str) -> None:
    space, actions = ONE_EACH[name]
    theirs = plain(heard(SyncVectorEnv(two(space)), actions))
    assert plain(heard(AioVectorEnv(two(space), backend="serial"), actions)) == theirs


WHOLE: dict[str, tuple[Any, Any, list[Any]]] = {
    "choices": (CHOICE, np.array([0.0, 1.0]), [0, 1]),
    "bytes": (spaces.Box(0, 255, (2,), np.uint8), np.zeros((2, 2)), [[0, 0], [0, 0]]),
    "bits": (spaces.MultiBinary(2), [[0.0, 1.0], [1, 0]], [[0, 1], [1, 0]]),
    "one each": (PAIR, [(3.0, 4), (6, 7.0)], [[3, 4], [6, 7]]),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("face", [AioVecEnv, AioVectorEnv])
def test_floats_that_are_whole_numbers_are_integers(face: Any, name: str) -> None:
    space, actions, expected = WHOLE[name]
    if name == "one each" and face is AioVectorEnv:
        actions = ([3.0, 6.0], [4.0, 7.0])
    found = heard(face(two(space), backend="serial"), actions)
    assert plain(found) == expected
    numbers = [number for own in found for number in (own if isinstance(own, tuple) else [own])]
    assert all(np.asarray(number).dtype.kind in "iu" for number in numbers)


@pytest.mark.parametrize("face", [AioVecEnv, AioVectorEnv])
@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (CHOICE, [0.5, 1.0]),
        (CHOICE, [np.nan, 1.0]),
        (CHOICE, [2.0**63, 1.0]),
        (spaces.Box(0, 255, (2,), np.uint8), np.full((2, 2), -1.0)),
    ],
)
def test_other_floats_are_none(face: Any, space: Any, actions: Any) -> None:
    envs = face(two(space), backend="serial")
    envs.reset()
    with pytest.raises(SpecMismatchError, match=r"(?s)found values of float64 that do not fit.*no env was stepped"):
        envs.step(actions)
    assert list(envs.get_attr("heard")) == [None, None]
    envs.close()


@pytest.mark.parametrize(("face", "theirs"), [(AioVecEnv, DummyVecEnv), (AioVectorEnv, SyncVectorEnv)])
def test_a_number_alone_is_a_scalar_of_numpy(face: Any, theirs: Any) -> None:
    space, actions = spaces.Dict(at=spaces.Box(-9, 9, ())), {"at": np.array([1.5, 2.5], np.float32)}
    if theirs is DummyVecEnv:
        space, actions = space["at"], actions["at"]
    expected = heard(theirs(two(space)), actions)
    found = heard(face(two(space), backend="serial"), actions)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize("face", [AioVecEnv, AioVectorEnv, DummyVecEnv, SyncVectorEnv])
@pytest.mark.parametrize("space", [CHOICE, PAIR, NESTED], ids=["choice", "pair", "nested"])
@pytest.mark.parametrize("actions", [None, 0])
def test_what_has_none_for_each_env_is_a_type_error(face: Any, space: Any, actions: Any) -> None:
    ours = face in (AioVecEnv, AioVectorEnv)
    envs = face(two(space), **({"backend": "serial"} if ours else {}))
    envs.reset()
    with pytest.raises(TypeError) as caught:
        envs.step(actions)
    assert isinstance(caught.value, SpecMismatchError) is ours
    assert list(envs.get_attr("heard")) == [None, None]
    envs.close()
