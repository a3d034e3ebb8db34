"""Each public method once on each backend, from coroutines and plainly; whoever adds a method adds it here.

A plain batch runs the coroutine of the same name, so most tests of values use coroutines or plain calls, not both: here
both give the same for every method.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from faces import EVERY_FACE, Face, acting, observed
from failing_envs import DrawingEnv, numbered
from vector_faces import HOSTS

from aioenvs import AsyncParallelEnv
from aioenvs.integrations.gymnasium import AioVectorEnv
from aioenvs.integrations.sb3 import AioVecEnv


class Seen:
    """What methods gave, by their names."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def __setitem__(self, name: str, result: Any) -> None:
        assert name not in self.results
        self.results[name] = result


BATCH: dict[str, Any] = {
    "update_kwargs": None,
    "start": None,
    "set_seed": 2837264643,
    "reset": [[0, 1, 0, 0], [1, 1, 0, 0]],
    "rand_action": (2,),
    "rand_step": [[0, 1, 1], [1, 1, 1]],
    "step": [[0, 2, 1, 1], [1, 2, 1, 2]],
    "any_done": False,
    "maybe_reset": [[0, 2, 1, 1], [1, 2, 1, 2]],
    "step_and_maybe_reset": ([[0, 2, 2, 4], [1, 2, 2, 6]], [[0, 2, 2, 4], [1, 2, 2, 6]]),
    "send": (0, 1),
    "recv": ([[0, 2, 3, 9], [1, 2, 3, 12]], [[0, 3, 0, 0], [1, 3, 0, 0]]),
    "rollout": [[[0, 4, 1, 1], [0, 4, 2, 2]], [[1, 4, 1, 1], [1, 4, 2, 2]]],
    "call": [0, 3],
    "set_attr": None,
    "get_attr": [8, 9],
    "state_dict": ["worker0", "worker1"],
    "load_state_dict": [8, 9],
    "render": [7, 8],
    "statistics": ("idle", "idle"),
    "on_host": [1, 2],
    "to": True,
    "every_key": ["action"],
    "fake_tensordict": (2,),
    "numel": 2,
    "ndimension": 1,
    "close": None,
}
VECTOR: dict[str, Any] = {
    "reset": [[0, 1, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0]],
    "reset_async": None,
    "reset_wait": [[0, 2, 0, 0], [1, 2, 0, 0], [2, 2, 0, 0]],
    "step": [[[0, 2, 1, 1], [1, 2, 1, 2], [2, 2, 1, 3]], [1.0, 1.0, 1.0]],
    "step_async": None,
    "step_wait": [[0, 2, 2, 2], [1, 2, 2, 4], [2, 2, 2, 6]],
    "call": (0, 3, 6),
    "call_async": None,
    "call_wait": (0, 2, 4),
    "set_attr": None,
    "get_attr": (7, 8, 9),
    "render": [7, 8, 9],
    "close_extras": None,
}
VEC: dict[str, Any] = {
    "seed": [3, 4, 5],
    "reset": [[0, 1, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0]],
    "step": [[[0, 1, 1, 1], [1, 1, 1, 2], [2, 1, 1, 3]], [1.0, 1.0, 1.0]],
    "step_async": None,
    "step_wait": [[0, 1, 2, 2], [1, 1, 2, 4], [2, 1, 2, 6]],
    "env_method": [0, 3, 6],
    "set_attr": None,
    "get_attr": [7, 7, 7],
    "has_attr": (True, False),
    "env_is_wrapped": [False, False, False],
    "get_images": [7, 8, 9],
    "render": (4, 4, 3),
    "close": None,
}


def public_methods(cls: Any) -> set[str]:
    """Names of the methods of a class and of the classes of aioenvs that it is made of."""
    return {
        name
        for base in cls.__mro__
        if base.__module__.partition(".")[0] == "aioenvs"
        for name, member in vars(base).items()
        if inspect.isroutine(member) and not name.startswith("_")
    }


@pytest.mark.parametrize("face", EVERY_FACE, ids=lambda face: face.name)
async def test_every_method_of_a_batch(face: Face) -> None:
    seen = Seen()
    env = face.make(2, DrawingEnv, create_env_kwargs=numbered(2))
    call = face.call
    env.update_kwargs(numbered(2, length=3))
    seen["update_kwargs"] = None
    try:
        seen["start"] = await call(env.start)
        seen["set_seed"] = await call(env.set_seed, 5)
        td = await call(env.reset)
        seen["reset"] = observed(td)
        seen["rand_action"] = env.rand_action(td)["action"].shape
        seen["rand_step"] = [row[:3] for row in observed(await call(env.rand_step, td))]
        await call(env.reset)
        td = await call(env.step, acting([1, 2]))
        seen["step"] = observed(td)
        seen["any_done"] = bool(env.any_done(td))
        seen["maybe_reset"] = observed(await call(env.maybe_reset, td["next"]))
        ended, following = await call(env.step_and_maybe_reset, acting([3, 4]))
        seen["step_and_maybe_reset"] = observed(ended), observed(following)
        await call(env.send, acting([5, 6]))
        seen["send"] = env.outstanding
        ended, following = await call(env.recv, 2)
        seen["recv"] = sorted(observed(ended)), sorted(observed(following))
        ones = await call(env.rollout, 2, lambda td: td.set("action", torch.ones(2, dtype=torch.int64)))
        seen["rollout"] = observed(ones)
        seen["call"] = list(await call(env.call, "scaled", 3))
        seen["set_attr"] = await call(env.set_attr, "total", [8, 9])
        seen["get_attr"] = list(await call(env.get_attr, "total"))
        state = await call(env.state_dict)
        seen["state_dict"] = sorted(state)
        await call(env.set_attr, "total", 0)
        await call(env.load_state_dict, state)
        seen["load_state_dict"] = list(await call(env.get_attr, "total"))
        seen["render"] = [int(image[0, 0, 0]) for image in await call(env.render)]
        seen["statistics"] = env.statistics().states
        seen["on_host"] = (await call(env.on_host, acting([1, 2])))["action"].tolist()
        seen["to"] = env.to("cpu") is env
        seen["every_key"] = env.every_key("action")
        seen["fake_tensordict"] = env.fake_tensordict().batch_size
        seen["numel"], seen["ndimension"] = env.numel(), env.ndimension()
    finally:
        seen["close"] = await call(env.close)
    assert seen.results == BATCH
    assert set(seen.results) == public_methods(AsyncParallelEnv)


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_every_method_of_a_vector_env(host: dict[str, Any]) -> None:
    seen = Seen()
    envs = AioVectorEnv([functools.partial(DrawingEnv, env, length=3) for env in range(3)], **host)
    actions = np.array([1, 2, 3])
    try:
        seen["reset"] = envs.reset(seed=3)[0].tolist()
        envs.reset_async()
        seen["reset_async"], seen["reset_wait"] = None, envs.reset_wait()[0].tolist()
        seen["step"] = [part.tolist() for part in envs.step(actions)[:2]]
        envs.step_async(actions)
        seen["step_async"], seen["step_wait"] = None, envs.step_wait()[0].tolist()
        seen["call"] = envs.call("scaled", 3)
        envs.call_async("scaled", factor=2)
        seen["call_async"], seen["call_wait"] = None, envs.call_wait()
        seen["set_attr"] = envs.set_attr("total", [7, 8, 9])
        seen["get_attr"] = envs.get_attr("total")
        seen["render"] = [int(image[0, 0, 0]) for image in envs.render()]
    finally:
        seen["close_extras"] = envs.close()
    assert seen.results == VECTOR
    assert set(seen.results) == public_methods(AioVectorEnv)


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_every_method_of_a_vec_env(host: dict[str, Any]) -> None:
    seen = Seen()
    envs = AioVecEnv([functools.partial(DrawingEnv, env, length=3) for env in range(3)], **host)
    actions = np.array([1, 2, 3])
    try:
        seen["seed"] = envs.seed(3)
        seen["reset"] = envs.reset().tolist()
        seen["step"] = [part.tolist() for part in envs.step(actions)[:2]]
        envs.step_async(actions)
        seen["step_async"], seen["step_wait"] = None, envs.step_wait()[0].tolist()
        seen["env_method"] = envs.env_method("scaled", 3)
        seen["set_attr"] = envs.set_attr("total", 7)
        seen["get_attr"] = envs.get_attr("total")
        seen["has_attr"] = envs.has_attr("total"), envs.has_attr("absent")
        seen["env_is_wrapped"] = envs.env_is_wrapped(gymnasium.Wrapper)
        seen["get_images"] = [int(image[0, 0, 0]) for image in envs.get_images()]
        seen["render"] = envs.render("rgb_array").shape
    finally:
        seen["close"] = envs.close()
    assert seen.results == VEC
    assert set(seen.results) >= public_methods(AioVecEnv)
