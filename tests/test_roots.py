"""What the step of a torch env sees: the root of its caller in this process, in workers what the env said last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faces import Face, masked
from root_envs import KeepingEnv, MovingEnv, acting
from tensordict import TensorDict, TensorDictBase

from aioenvs import AsyncParallelEnv, ParallelEnv, SerialEnv, step_mdp
from aioenvs.errors import ResetNeededError

KINDS: dict[str, dict[str, Any]] = {"nested": {"nested": True}, "unlocked": {"locked": False}}


def at(td: TensorDictBase, key: Any = "position") -> list[float]:
    return td.get("next", td)[key].flatten().tolist()


def moved(root: TensorDictBase, by: float) -> TensorDictBase:
    """A root in which the caller changed the positions."""
    return root.clone().update({"position": root["position"] + by, **acting([1.0] * len(root)).to_dict()})


def is_serial(face: Face) -> bool:
    return not face.in_processes and face.threads == 0


async def test_a_step_sees_its_root(face: Face) -> None:
    shift = 10 if is_serial(face) else 0  # what the caller changes counts where the envs are, and nowhere else
    async with face.open(3, MovingEnv, create_env_kwargs=[{}, {"limit": 1.5}, {}]) as env:
        root = await face.call(env.reset)
        for expected in ([1, 1, 1], [2, 2, 2], [3, 1, 3]):
            td, root = await face.call(env.step_and_maybe_reset, moved(root, 0))
            assert at(td) == expected
        td = await face.call(env.step, moved(root, 10).update(masked("_step", 3, {0, 1})))
        assert at(td) == [4 + shift, 2 + shift, 13]  # who does not step repeats what the caller has
        assert at(await face.call(env[2].step, moved(root[2:], 10))) == [4 + shift]
        root = await face.call(env.reset, step_mdp(td).update(masked("_reset", 3, {1})))
        assert at(root) == [4 + shift, 0, 13]
        env_index = {"env_index": torch.tensor([1, 0])}
        await send(face, env, moved(root[[1, 0]], 0).update(env_index))
        received = await recv(face, env)
        assert received == {0: 5 + shift, 1: 1}


async def send(face: Face, env: Any, td: TensorDictBase) -> None:
    env.send(td) if face.is_async else await face.call(env.send, td)


async def recv(face: Face, env: Any) -> dict[int, float]:
    td, _ = await face.call(env.recv, 2)
    return dict(zip(td["env_index"].tolist(), at(td), strict=True))


@pytest.mark.parametrize("kind", KINDS)
async def test_roots_of_other_kinds(face: Face, kind: str) -> None:
    async with face.open(2, MovingEnv, create_env_kwargs=KINDS[kind]) as env:
        key = ("agent", "position") if kind == "nested" else "position"
        root = await face.call(env.reset)
        for expected in (1, 2):
            td, root = await face.call(env.step_and_maybe_reset, root.update(acting([1.0] * 2)))
            assert at(td, key) == [expected] * 2


async def test_what_an_env_changes_in_place_is_what_it_was_in_its_root(face: Face) -> None:
    async with face.open(2, KeepingEnv) as env:
        root = await face.call(env.reset)
        for _ in range(3):
            td, root = await face.call(env.step_and_maybe_reset, root.update(acting([1.0, 2.0])), copy=False)
            assert at(td, "reward") == [1, 2]
            root = root.clone()


def test_gradients_through_the_roots() -> None:
    def gradients(env: Any, size: tuple[int, ...]) -> Any:
        weight = torch.full((*size, 1), 0.5, requires_grad=True)
        first = torch.full((*size, 1), 2.0, requires_grad=True)
        root, total = env.reset(), torch.zeros(())
        root["position"] = root["position"] + first
        for _ in range(4):
            root["action"] = weight * root["position"].tanh()
            td, root = env.step_and_maybe_reset(root)
            total = total + td["next", "reward"].sum()
        return [each.flatten()[0] for each in torch.autograd.grad(total, (weight, first))]

    alone = gradients(MovingEnv(3.5), ())
    with SerialEnv(2, MovingEnv, create_env_kwargs={"limit": 3.5}) as env:
        assert gradients(env, (2,)) == alone
    assert all(alone)


def test_a_caller_keeps_what_it_has() -> None:
    class Careless(MovingEnv):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            tensordict["position"] += tensordict["action"]
            assert tensordict["mine"] == 7  # all that the caller has
            return TensorDict(position=tensordict["position"], reward=tensordict["action"])

    with SerialEnv(2, Careless) as env:
        td = env.reset().update(acting([1.0, 2.0])).set("mine", torch.full((2, 1), 7))
        assert at(env.step(td)) == [1, 2]
        assert td["position"].flatten().tolist() == [0, 0]


async def test_a_step_before_the_first_reset(face: Face) -> None:
    async with face.open(2, MovingEnv) as env:
        if is_serial(face):
            with pytest.raises(KeyError, match="position"):
                await face.call(env.step, acting([1.0, 1.0]))
            await face.call(env.reset)
        given = acting([3.0, 4.0]).set("position", torch.full((2, 1), 10.0)).update(masked("_step", 2, {1}))
        td = await face.call(env.step, given)
        assert at(td) == [10, 14 if is_serial(face) else 4]
        assert at(td, "reward")[0] == 0


async def test_an_env_that_was_replaced_needs_a_reset() -> None:
    async with AsyncParallelEnv(2, MovingEnv, num_processes=1) as env:
        await env.step(acting([1.0, 2.0]))
        with pytest.raises(RuntimeError, match="exited with code 3"):
            await env.step(acting([99.0, 1.0]))
        root = await env[0].reset()
        assert at(await env[0].step(root.update(acting([1.0])))) == [1]
        with pytest.raises(ResetNeededError, match="env 1 cannot step: it failed, was cancelled or was replaced"):
            await env[1].step(acting([1.0]))
        await env[1].reset()
        assert at(await env.step(acting([1.0, 5.0]))) == [2, 5]


def test_a_restarted_env_begins_where_its_reset_did() -> None:
    with ParallelEnv(2, MovingEnv, num_processes=1, on_worker_death="restart") as env:
        env.reset()
        assert at(env.step(acting([1.0, 2.0]))) == [1, 2]
        td, root = env.step_and_maybe_reset(acting([99.0, 1.0]))
        assert td["next", "truncated" if "truncated" in td["next"] else "done"].all()
        assert at(root) == [0, 0]
        assert at(env.step(acting([3.0, 4.0]))) == [3, 4]


def test_a_state_that_is_loaded_leaves_the_root() -> None:
    with ParallelEnv(2, MovingEnv, num_processes=1) as env:
        env.reset()
        env.step(acting([1.0, 2.0]))
        env.load_state_dict(env.state_dict())
        assert at(env.step(acting([1.0, 1.0]))) == [2, 3]
