"""What does not fit is refused in words that help, the same whatever hosts the envs, and all goes on after it."""

import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from faces import FACES, Face, acting, call, observed
from failing_envs import CountingEnv, numbered
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from space_envs import ScriptedEnv
from tensordict import TensorDict

from aioenvs.errors import SpecMismatchError, WorkerStartError

COUNT = 3
SOME = ("async-serial", "async-packed", "one-each", "thread")  # one of each kind of host
over_hosts = pytest.mark.parametrize("face", [face for face in FACES if face.name in SOME], ids=lambda face: face.name)


class ChoiceEnv(CountingEnv):
    """A counting env with any action space."""

    def __init__(self, space: Any, env_id: int) -> None:
        super().__init__(env_id)
        self.action_space = space

    def step(self, action: Any) -> Any:
        return super().step(1)


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """Workers need not import this module, and all that it imports."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


# -- actions --------------------------------------------------------------------------------------------

NAN = math.nan
ACTIONS: list[tuple[Any, torch.Tensor, list[tuple[torch.Tensor, list[str]]]]] = [
    (
        Discrete(3),
        torch.tensor([0, 1, 2]),
        [
            (torch.tensor([0.0, NAN, 1.0]), ["torch.int64", "torch.float32"]),
            (torch.full((3,), NAN, dtype=torch.float64), ["torch.int64", "torch.float64"]),
            (torch.zeros(3, dtype=torch.int64, device="meta"), ["on the cpu", "meta"]),
            (torch.tensor([0, 3, 0]), ["integers from 0 to 2", "3 for env 1"]),
            (torch.tensor([0, 0, -(2**63)]), ["integers from 0 to 2", "for env 2"]),
        ],
    ),
    (
        Discrete(3, start=5),
        torch.tensor([5, 6, 7]),
        [(torch.tensor([5, 5, 8]), ["integers from 5 to 7", "8 for env 2"])],
    ),
    (
        MultiDiscrete([3, 9], start=[0, -2]),
        torch.tensor([[2, 6]] * 3),
        [
            (torch.tensor([[2, 7], [0, 0], [0, 0]]), ["integers from [ 0 -2] to [2 6]", "[2 7] for env 0"]),
            (torch.full((3, 2), NAN), ["torch.int64", "torch.float32"]),
        ],
    ),
    (
        MultiBinary(2),
        torch.tensor([[0, 1]] * 3, dtype=torch.int8),
        [
            (torch.tensor([[0, 1], [0, 1], [2, 0]], dtype=torch.int8), ["integers from 0 to 1", "[2 0] for env 2"]),
            (torch.tensor([[-1, 1], [0, 1], [1, 0]], dtype=torch.int8), ["integers from 0 to 1", "[-1  1] for env 0"]),
        ],
    ),
]


@over_hosts
async def test_actions(face: Face) -> None:
    for space, good, wrong in ACTIONS:
        async with face.open(COUNT, ChoiceEnv, create_env_kwargs=numbered(COUNT, space=space)) as env:
            await face.call(env.reset)
            for action, words in wrong:
                with pytest.raises(SpecMismatchError) as caught:
                    await face.call(env.step, TensorDict({"action": action}, [COUNT]))
                told = str(caught.value)
                assert [word for word in ("action 'action'", "no env was stepped", *words) if word not in told] == []
            td = await face.call(env.step, TensorDict({"action": good}, [COUNT]))
            assert observed(td) == [[env_id, 1, 1, 1] for env_id in range(COUNT)]


@over_hosts
async def test_the_action_of_an_env_that_does_not_step_is_not_looked_at(face: Face) -> None:
    async with face.open(COUNT, CountingEnv, create_env_kwargs=numbered(COUNT)) as env:
        await face.call(env.reset)
        td = await face.call(env.step, acting([1, -5, 3], only=[0, 2]))
        assert observed(td) == [[0, 1, 1, 1], [1, 1, 0, 0], [2, 1, 1, 3]]


# -- what envs say of themselves, and do not keep ---------------------------------------------------------


class Spaceless(CountingEnv):
    observation_space = None


class Actionless(CountingEnv):
    action_space = (0, 1)


class Bare:
    def reset(self, **_: Any) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, False, False, {}


@over_hosts
@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Spaceless, "must have a Gymnasium space as its observation_space, found None"),
        (Actionless, r"must have a Gymnasium space as its action_space, found \(0, 1\)"),
        (Bare, "must have a Gymnasium space as its observation_space, found None"),
    ],
)
async def test_envs_without_spaces(face: Face, cls: Any, words: str) -> None:
    env = face.make(2, [CountingEnv, lambda: cls()])
    with pytest.raises(WorkerStartError, match=f"the factory of env 1 failed.*env 1 .*{words}") as caught:
        await call(env.start)
    assert isinstance(caught.value.__cause__, SpecMismatchError)
    assert env.is_closed


BOX, ZEROS = Box(-1, 1, (2,)), np.zeros(2, np.float32)
LIES: list[tuple[gym.Space, Any, Any, str]] = [
    (BOX, ZEROS, np.zeros(3, np.float32), "float32 of shape (2,) at ('observation',), found float32 of shape (3,)"),
    (Discrete(3), 0, 0.5, "int64 of shape () at ('observation',), found float64 of shape ()"),
    (Dict(a=BOX), {"a": ZEROS}, {"a": "up"}, "float32 of shape (2,) at ('a',), found <U2 of shape ()"),
    (Dict(a=BOX), {"a": ZEROS}, {"b": 1}, "a value with exactly the members ['a'] as observation, found {'b': 1}"),
    (Dict(a=BOX), {"a": ZEROS}, None, "a value with exactly the members ['a'] as observation, found None"),
    (
        Tuple((BOX, Dict(a=BOX))),
        (ZEROS, {"a": ZEROS}),
        (ZEROS, ZEROS),
        "a value with exactly the members ['a'] at ('observation', '1'), found array([0., 0.], dtype=float32)",
    ),
]


@over_hosts
async def test_envs_whose_spaces_lie(face: Face) -> None:
    for space, true, false, words in LIES:
        scripts = [(true, true, true), (true, false, true), (true, true, true)]
        async with face.open(COUNT, [scripted(space, *script) for script in scripts]) as env:
            td = await face.call(env.reset)
            with pytest.raises(SpecMismatchError) as caught:
                await face.call(env.step, env.rand_action(td))
            assert str(caught.value) == f"env 1: expected {words}"
            assert caught.value.env_index == (1,)
            td = await face.call(env.reset)
            assert not td["done"].any()


def scripted(space: Any, *values: Any) -> Callable[[], Any]:
    return lambda: ScriptedEnv(space, *values)


# -- factories that cannot travel -------------------------------------------------------------------------


class LockedFactory:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, **_: Any) -> Any:
        return CountingEnv()


@pytest.mark.parametrize(
    ("factory", "kwargs", "words"),
    [
        (LockedFactory(), {}, r"the factory of env 0, <\S*LockedFactory object at \S+>, cannot be pickled"),
        (
            CountingEnv,
            {"env_id": 3, "on_close": threading.Lock()},
            r"the argument 'on_close' for the factory of env 0, <unlocked _thread.lock .*>, cannot be pickled",
        ),
    ],
    ids=["factory", "argument"],
)
async def test_what_cannot_be_pickled_is_named(process_face: Face, factory: Any, kwargs: Any, words: str) -> None:
    env = process_face.make(2, factory, create_env_kwargs=kwargs)
    with pytest.raises(WorkerStartError, match=words) as caught:
        await call(env.start)
    assert "cannot pickle '_thread.lock' object" in str(caught.value)
    assert "give a factory that builds by itself what cannot be pickled" in str(caught.value)
    assert caught.value.env_index == (0,)
    assert env.is_closed
