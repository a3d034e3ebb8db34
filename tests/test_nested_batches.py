"""Batched envs as the envs of other batched envs."""

from __future__ import annotations

import itertools
from typing import Any

import psutil
import pytest
import torch
from talking_envs import TalkingEnv, numbered
from tensordict import TensorDict
from torch_faces import Driver, TorchFace, faces_called

from aioenvs import AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.engine.worker.random_streams import seed_chain
from aioenvs.envs import EnvCreator, GymEnv, check_env_specs
from aioenvs.errors import WorkerStartError
from aioenvs.testing import CountingEnv, FailingEnv, NonTensorEnv, ParameterEnv, RandomEnv, StateEnv

INNER = {
    "serial": lambda count, fn, kwargs=None: SerialEnv(count, fn, create_env_kwargs=kwargs),
    "parallel": lambda count, fn, kwargs=None: ParallelEnv(count, fn, create_env_kwargs=kwargs, num_processes=1),
    "thread": lambda count, fn, kwargs=None: ParallelEnv(count, fn, create_env_kwargs=kwargs, backend="thread"),
}


def nestings(*names: str) -> Any:
    """Parameters `face` and `inner`, by names such as "packed-of-serial"."""
    pairs = [name.split("-of-") for name in names]
    params = [pytest.param(*faces_called(outer)[0].values, inner, id=f"{outer}-of-{inner}") for outer, inner in pairs]
    return pytest.mark.parametrize(("face", "inner"), params)


NESTINGS = ("serial-of-thread", "async-serial-of-parallel", "packed-of-serial", "async-one-each-of-thread")
over_nestings = nestings(*NESTINGS)
# workers that have workers are slow to start
over_all_nestings = nestings(*NESTINGS, "serial-of-serial", "packed-of-parallel")
over_outer_faces = pytest.mark.parametrize("face", faces_called("serial", "packed", "async-one-each"))
CHAIN, FOLLOWING = seed_chain(0, 4)


def nested(inner: str, count: int, fn: Any, kwargs: Any = None) -> Any:
    """A factory of a batch."""
    make = INNER[inner]
    return lambda: make(count, fn, kwargs)


def counts(td: Any) -> list[list[int]]:
    """The observations, of `next` if there was a step, for each outer and inner env."""
    values: list[list[int]] = td.get("next", td)["observation"].squeeze(-1).tolist()
    return values


@over_all_nestings
async def test_steps_and_resets(face: TorchFace, inner: str) -> None:
    factories = [nested(inner, 2, CountingEnv, [{"start": 10 * i, "max_steps": 2}, {"start": 5}]) for i in range(2)]
    async with face.open(2, factories) as env:
        assert env.batch_size == (2, 2)
        assert env.action_spec.shape == (2, 2)
        assert env.reward_spec.shape == (2, 2, 1)
        td = await env.reset()
        assert td.batch_size == (2, 2)
        assert counts(td) == [[0, 5], [10, 5]]
        td, root = await env.step_and_maybe_reset(env.rand_action(td))
        assert counts(td) == [[1, 6], [11, 6]]
        td, root = await env.step_and_maybe_reset(env.rand_action(root))
        assert counts(td) == [[2, 7], [12, 7]]
        assert td["next", "done"].squeeze(-1).tolist() == [[True, False]] * 2
        assert counts(root) == [[0, 7], [10, 7]]
        td, _ = await env.step_and_maybe_reset(env.rand_action(root))
        assert counts(td) == [[1, 8], [11, 8]]


@over_nestings
async def test_partial_resets(face: TorchFace, inner: str) -> None:
    async with face.open(2, nested(inner, 3, CountingEnv)) as env:
        td = await env.step(env.rand_action(await env.reset()))
        root = td["next"].exclude("reward")
        root["_reset"] = torch.tensor([[False, True, False], [False, False, False]]).unsqueeze(-1)
        root["mine"] = torch.ones(2, 3)
        after = await env.reset(root)
        assert counts(after) == [[1, 0, 1], [1, 1, 1]]
        assert after["mine"].all()
        assert "_reset" not in after
        td = await env.step(env.rand_action(after))
        assert counts(td) == [[2, 1, 2], [2, 2, 2]]
        mask = torch.ones(2, 3, 1, dtype=torch.bool)
        assert counts(await env.reset(TensorDict({"_reset": mask}, [2, 3]))) == [[0] * 3] * 2


@over_nestings
async def test_partial_steps_select_whole_outer_envs(face: TorchFace, inner: str) -> None:
    async with face.open(2, nested(inner, 2, CountingEnv)) as env:
        td = env.rand_action(await env.reset())
        td["_step"] = torch.tensor([[True, True], [False, False]])
        await env.step(td)
        assert counts(td) == [[1, 1], [0, 0]]
        td["_step"] = torch.tensor([[True, False], [False, False]])
        with pytest.raises(ValueError, match="whole envs"):
            await env.step(td)


@over_all_nestings
@pytest.mark.slow
async def test_seeds_are_one_chain(face: TorchFace, inner: str) -> None:
    async with face.open(2, nested(inner, 2, TalkingEnv)) as env:
        assert env.num_seeds == 4
        following = await env.set_seed(0)
        seeds = await env.read("seed")
        assert list(itertools.chain(*seeds)) == CHAIN
        assert following == FOLLOWING
        await env.reset(seed=0)
        assert list(itertools.chain(*await env.read("seed"))) == CHAIN
        assert await env.set_seed(7, static_seed=True) == 7
        assert await env.read("seed") == [[7, 7], [7, 7]]
        assert await env[1].set_seed(0) == CHAIN[2]
        assert await env.read("seed") == [[7, 7], CHAIN[:2]]


async def test_a_nested_batch_gives_what_a_flat_one_gives() -> None:
    rollouts = []
    for make in (
        lambda: SerialEnv(4, RandomEnv),
        lambda: SerialEnv(2, lambda: SerialEnv(2, RandomEnv)),
        lambda: ParallelEnv(2, lambda: SerialEnv(2, RandomEnv), num_processes=1),
        lambda: SerialEnv(2, lambda: ParallelEnv(2, RandomEnv, num_processes=1)),
    ):
        env = Driver(make())
        await env.set_seed(3)
        torch.manual_seed(0)
        actions = torch.stack([env.rand_action()["action"].reshape(4, -1) for _ in range(6)])
        td, seen = await env.reset(), []
        for action in actions:
            td, following = await env.step_and_maybe_reset(td.update({"action": action.view(env.action_spec.shape)}))
            seen.append(td["next", "observation"].flatten().clone())
            td = following
        rollouts.append(torch.stack(seen))
        await env.close()
    for other in rollouts[1:]:
        assert torch.equal(other, rollouts[0])


@over_nestings
async def test_reset_arguments(face: TorchFace, inner: str) -> None:
    async with face.open(2, nested(inner, 2, TalkingEnv)) as env:
        assert counts(await env.reset(start=3)) == [[3, 3], [3, 3]]
        each = [{"start": 4}, {"list_of_kwargs": [{"start": 5}, {}]}]
        assert counts(await env.reset(list_of_kwargs=each, start=6)) == [[4, 4], [5, 6]]


@over_all_nestings
@pytest.mark.slow
async def test_methods_attributes_and_states(face: TorchFace, inner: str) -> None:
    async with face.open(2, nested(inner, 2, TalkingEnv, numbered(2))) as env:
        assert await env.ask("shout") == [["here is 0", "here is 1"]] * 2
        assert await env.read("index") == [[0, 1], [0, 1]]
        assert await env.get_attr("num_workers") == [2, 2]
        with pytest.raises(AttributeError, match="telepathy"):
            await env.get_attr("telepathy")
        with pytest.raises(AttributeError, match="telepathy"):
            await env.call("telepathy")
        with pytest.raises(LookupError, match="env 1 does not know") as caught:
            await env.ask("fail", 1)
        assert caught.value.env_index == (0, 1)
        await env.step(env.rand_action(await env.reset()))
        states = await env.state_dict()
        assert [list(state) for state in states.values()] == [["worker0", "worker1"]] * 2
        await env.reset()
        await env.load_state_dict(states)
        assert await env.read("custom_property") == [[1, 1], [1, 1]]


@over_nestings
async def test_attributes_of_the_inner_envs_can_be_set(face: TorchFace, inner: str) -> None:
    async with face.open(2, nested(inner, 2, TalkingEnv)) as env:
        await env.call("set_attr", "index", ["a", "b"])
        assert await env.read("index") == [["a", "b"]] * 2
        await env.set_attr("index", [["c", "d"], ["e", "f"]])
        assert await env.read("index") == [["c", "d"], ["e", "f"]]
        assert await env.ask("shout") == [["here is c", "here is d"], ["here is e", "here is f"]]


@over_all_nestings
@pytest.mark.slow
async def test_the_failure_of_an_inner_env(face: TorchFace, inner: str) -> None:
    factories = [nested(inner, 2, CountingEnv), nested(inner, 2, FailingEnv, [{"at": 2}, {"at": 99}])]
    async with face.open(2, factories) as env:
        td = await env.step(env.rand_action(await env.reset()))
        with pytest.raises(RuntimeError, match="told to fail") as caught:
            await env.step(env.rand_action(td))
        assert caught.value.env_index == (1,)
        assert counts(await env.reset()) == [[0, 0], [0, 0]]
        td = await env.step(env.rand_action())
        assert counts(td) == [[1, 1], [1, 1]]


@over_all_nestings
@pytest.mark.slow
async def test_closing_closes_all(face: TorchFace, inner: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    async with face.open(2, nested(inner, 2, TalkingEnv)) as env:
        await env.reset()
        pids = {pid for each in await env.ask("where") for pid, _ in each}
        await env.close()
        assert env.is_closed
        me = psutil.Process().pid
        assert not [pid for pid in pids - before - {me} if psutil.pid_exists(pid)]
        assert counts(await env.reset()) == [[0, 0], [0, 0]]  # and it opens again


@over_all_nestings
@pytest.mark.slow
async def test_an_inner_factory_that_raises(face: TorchFace, inner: str) -> None:
    env = Driver(face.make(2, nested(inner, 2, FailingEnv, {"where": "init", "message": "no reactor"})))
    with pytest.raises(WorkerStartError, match=r"env [01].*no reactor"):
        await env.start()
    assert env.is_closed


@nestings("serial-of-serial", "serial-of-parallel", "packed-of-serial", "packed-of-thread")
def test_nested_batches_are_what_their_specs_say(face: TorchFace, inner: str) -> None:
    for toy in (CountingEnv, StateEnv, NonTensorEnv):
        with face.make(2, nested(inner, 2, toy)) as env:
            assert env.batch_size == (2, 2)
            check_env_specs(env)


@over_outer_faces
async def test_three_levels(face: TorchFace) -> None:
    creator = EnvCreator(lambda count: SerialEnv(count, lambda: SerialEnv(2, TalkingEnv)), count=3)
    async with face.open(2, creator) as env:
        assert env.batch_size == (2, 3, 2)
        assert env.num_seeds == 12
        rollout = await env.rollout(3)
        assert rollout.batch_size == (2, 3, 2, 3)
        assert rollout["next", "observation"][0, 0, 0].flatten().tolist() == [1, 2, 3]
        await env.set_seed(0)
        seeds = torch.tensor(await env.read("seed"))
        assert seeds.shape == (2, 3, 2)
        assert len(seeds.unique()) == 12


@over_nestings
async def test_gymnasium_envs_within(face: TorchFace, inner: str) -> None:
    for factory in (lambda: GymEnv("CartPole-v1"), "CartPole-v1"):
        async with face.open(2, nested(inner, 2, factory)) as env:
            assert env.batch_size == (2, 2)
            await env.set_seed(0)
            td = await env.reset()
            assert td["observation"].shape == (2, 2, 4)
            with SerialEnv(4, "CartPole-v1") as flat:
                expected = flat.reset(seed=0)["observation"]
            assert torch.equal(td["observation"].reshape(4, 4), expected)
            assert (await env.rollout(60, break_when_any_done=False)).batch_size == (2, 2, 60)


def test_gradients_flow_through_nested_serial_envs() -> None:
    with SerialEnv(2, lambda: SerialEnv(2, ParameterEnv)) as env:
        td = env.rand_step(env.reset())
        assert td["next", "reward"].requires_grad
        td["next", "reward"].sum().backward()


@over_outer_faces
async def test_an_async_batch_is_no_env_of_a_batch(face: TorchFace) -> None:
    env = Driver(face.make(2, lambda: AsyncSerialEnv(2, CountingEnv)))
    with pytest.raises(WorkerStartError, match="AsyncSerialEnv"):
        await env.start()
    assert env.is_closed


@pytest.mark.parametrize("face", faces_called("serial", "torchrl-serial"))
async def test_sizes_of_a_nested_batch(face: TorchFace) -> None:
    toys, serial = face.toys, face.library.SerialEnv
    async with face.open(2, lambda: serial(3, toys.CountingEnv)) as env:
        rollout = await env.rollout(4)
        assert rollout.batch_size == (2, 3, 4)
        assert rollout["next", "reward"].shape == (2, 3, 4, 1)
