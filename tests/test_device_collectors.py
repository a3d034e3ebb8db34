"""Collectors and rollouts whose envs, policy or batches are on a device that is made up."""

import asyncio
from typing import Any

import gymnasium as gym
import pytest
import torch
from device_backends import FakeBackend, are_actions, counting, waited_for
from faces import Face, in_thread
from failing_envs import CountingEnv, numbered
from space_envs import Pictures
from tensordict import NonTensorStack, TensorDictBase

from aioenvs import Anything, AsyncCollector, AsyncParallelEnv, AsyncSerialEnv, Collector, ParallelEnv


class Doubling(torch.nn.Module):
    """Acts by what it observes, and adds something of its own."""

    in_keys = ("observation",)
    out_keys = ("action", "value")

    def __init__(self, backend: FakeBackend, *, in_place: bool) -> None:
        super().__init__()
        self.backend = backend
        self.in_place = in_place

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if self.in_place:
            td["observation"].add_(1)
        td["action"] = self.backend.hold(td["observation"][..., 2] * 2)
        return td.set("value", self.backend.hold(td["observation"][..., :1].float()))


@pytest.mark.parametrize("min_get", [None, 2])
@pytest.mark.parametrize("in_place", [True, False])
async def test_a_policy_elsewhere_gets_one_copy_and_returns_what_it_changed(
    min_get: int | None, in_place: bool
) -> None:
    there = FakeBackend()
    async with AsyncSerialEnv(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        policy = Doubling(there, in_place=in_place)
        source = AsyncCollector(env, policy, frames_per_batch=6, policy_device=there, min_get=min_get)
        batch = await source.next()
        own = batch if min_get is None else batch[batch["env_index"] == 1]
        assert own["action"].flatten().unique().tolist() == [2 * (step + in_place) for step in range(3)]
        assert own["observation"][..., 2].flatten().unique().tolist() == [step + in_place for step in range(3)]
        kinds = [copy.kind for copy in there.copies]
        assert kinds == ["in", "out"] * (len(kinds) // 2)
        outs = [copy.nbytes for copy in there.copies if copy.kind == "out"]
        assert (max(outs) > 2 * (8 + 4)) == in_place  # else only the actions, int64, and the values, float32
        await source.shutdown()


def say(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", NonTensorStack("a", "abc"))


class ListeningEnv:
    """Rewards the length of what it is told."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = Anything()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), float(len(action)), False, False, {}


async def test_a_policy_elsewhere_may_change_no_tensor() -> None:
    there = FakeBackend()
    async with AsyncSerialEnv(2, ListeningEnv) as env:
        source = AsyncCollector(env, say, frames_per_batch=4, policy_device=there)
        batch = await source.next()
        assert batch["next", "reward"][..., 0].tolist() == [[1, 1], [3, 3]]
        assert {copy.kind for copy in there.copies} == {"in"}
        await source.shutdown()


@pytest.mark.parametrize("in_place", [True, False])
async def test_a_policy_elsewhere_in_inference_mode(in_place: bool) -> None:
    there = FakeBackend()
    async with AsyncSerialEnv(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        source = AsyncCollector(env, Doubling(there, in_place=in_place), frames_per_batch=6, policy_device=there)
        with torch.inference_mode():
            batch = await source.next()
        assert batch["action"][0].tolist() == [2 * (step + in_place) for step in range(3)]
        assert batch["observation"][0, :, 2].tolist() == [step + in_place for step in range(3)]
        await source.shutdown()


async def test_a_policy_elsewhere_does_not_block_the_loop() -> None:
    there = FakeBackend(held=True)
    async with AsyncSerialEnv(2, CountingEnv) as env:
        policy = Doubling(there, in_place=False)
        source = AsyncCollector(env, policy, frames_per_batch=2, policy_device=there)
        task = asyncio.ensure_future(source.next())
        (await in_thread(there.next_held)).release()
        copy = await in_thread(there.next_held)
        assert copy.kind == "out"
        await waited_for(copy)
        assert not task.done()
        there.release()
        assert (await task)["action"].tolist() == [[0], [0]]
        await source.shutdown()


@pytest.mark.parametrize("min_get", [None, 1])
async def test_batches_elsewhere_are_one_copy_a_step(min_get: int | None) -> None:
    there = FakeBackend()
    async with AsyncSerialEnv(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        source = AsyncCollector(env, None, frames_per_batch=6, storing_device=there, min_get=min_get)
        batch = await source.next()
        assert len(there.copies) == 3
        own = batch if min_get is None else batch[batch["env_index"] == 1]
        assert own["next", "observation"][..., 2].flatten().unique().tolist() == [1, 2, 3]
        await source.shutdown()


def test_a_plain_collector_waits_for_a_policy_elsewhere() -> None:
    there = FakeBackend()
    with Collector(
        ParallelEnv(2, CountingEnv, num_processes=1),
        Doubling(there, in_place=False),
        frames_per_batch=4,
        policy_device=there,
    ) as source:
        assert source.next()["action"].tolist() == [[0, 2], [0, 2]]


# -- batches on the host of results that are on a device --------------------------------------------------


def outs(backend: FakeBackend) -> list[int]:
    """How many bytes came back, in each copy."""
    return [copy.nbytes for copy in backend.copies if copy.kind == "out"]


def own_of(batch: TensorDictBase, min_get: int | None) -> TensorDictBase:
    return batch if min_get is None else batch[batch["env_index"] == 1]


over_ways = pytest.mark.parametrize("min_get", [None, 1])
over_classes = pytest.mark.parametrize("cls", [AsyncParallelEnv, AsyncSerialEnv])


@over_ways
@over_classes
async def test_what_came_from_the_host_does_not_come_back(cls: Any, min_get: int | None, backend: FakeBackend) -> None:
    options: dict[str, Any] = {"create_env_kwargs": numbered(2, length=2), "device": backend}
    async with cls(2, CountingEnv, **options) as env:
        source = AsyncCollector(env, None, frames_per_batch=8, storing_device="cpu", min_get=min_get)
        for number in range(3):
            batch = await source.next()
            own = own_of(batch, min_get)
            rows = own["next", "observation"][..., 1:3].reshape(-1, 2)
            if min_get is None:  # else they need not take turns
                assert rows[-4:].tolist() == [[2 * number + episode, step] for episode in (1, 2) for step in (1, 2)]
            assert rows[:, 1].unique().tolist() == [1, 2]
            assert own["observation"][..., 2].unique().tolist() == [0, 1]
            assert (own["next", "observation"][..., 3] >= own["action"]).all()
        assert outs(backend) == []
        await source.shutdown()


class Elsewhere:
    """Acts on the device: what it returns is there, by `made_by_the_policy`."""

    def __init__(self, *, in_place: bool = False) -> None:
        self.in_place = in_place

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        if self.in_place:
            td["observation"].add_(100)
        td["value"] = td["observation"][..., :1].double()
        return td.set("action", td["observation"][..., 2] + 3)


def made_by_the_policy(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float64 or are_actions(tensor)


@over_ways
@pytest.mark.parametrize("in_place", [True, False])
async def test_only_what_the_policy_made_comes_back(min_get: int | None, in_place: bool, backend: FakeBackend) -> None:
    backend.claims = made_by_the_policy
    async with AsyncSerialEnv(2, CountingEnv, create_env_kwargs=numbered(2), device=backend) as env:
        policy = Elsewhere(in_place=in_place)
        source = AsyncCollector(env, policy, frames_per_batch=6, storing_device="cpu", min_get=min_get)
        own = own_of(await source.next(), min_get).reshape(-1)
        shift = 100 * in_place
        assert own["observation"][:, 2].unique().tolist() == [shift, shift + 1, shift + 2]
        assert own["action"].unique().tolist() == [shift + 3, shift + 4, shift + 5]
        assert own["value"].flatten().tolist() == own["observation"][:, 0].tolist()
        assert own["next", "observation"][:, 2].unique().tolist() == [1, 2, 3]
        if min_get is None:  # else what was sent is another copy, of which the made-up device knows nothing
            assert (max(outs(backend)) > 2 * 4 * 8) == in_place  # else the actions, the values, and who took which step
        await source.shutdown()


@over_ways
@over_classes
async def test_a_batch_that_was_given_up_while_it_came_back(
    cls: Any, min_get: int | None, backend: FakeBackend
) -> None:
    backend.claims = made_by_the_policy
    async with cls(2, CountingEnv, create_env_kwargs=numbered(2), device=backend) as env:
        source = AsyncCollector(env, Elsewhere(), frames_per_batch=6, storing_device="cpu", min_get=min_get)
        backend.held = True
        task = asyncio.ensure_future(source.next())
        while len(outs(backend)) < 3:  # of actions, and of a step
            copy = await in_thread(backend.next_held)
            if len(outs(backend)) < 3:
                copy.release()
            else:
                await waited_for(copy)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        backend.release()
        own = own_of(await source.next(), min_get).reshape(-1)
        steps = own["next", "observation"][:, 2].unique().tolist()
        assert steps == list(range(1, len(steps) + 1))
        assert own["action"].unique().tolist() == [step + 2 for step in steps]
        await source.shutdown()


@over_ways
async def test_a_copy_back_that_fails_loses_nothing(min_get: int | None, backend: FakeBackend) -> None:
    backend.claims = made_by_the_policy
    async with AsyncSerialEnv(2, CountingEnv, create_env_kwargs=numbered(2), device=backend) as env:
        source = AsyncCollector(env, Elsewhere(), frames_per_batch=6, storing_device="cpu", min_get=min_get)
        backend.fails_at = 2  # the first was of the actions
        with pytest.raises(RuntimeError, match="device-side assert"):
            await source.next()
        own = own_of(await source.next(), min_get).reshape(-1)
        assert own["next", "observation"][:, 2].unique().tolist() == [1, 2, 3]
        await source.shutdown()


def test_plain_collectors_store_on_the_host_as_well(backend: FakeBackend) -> None:
    env = ParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1, device=backend)
    with Collector(env, None, frames_per_batch=6, storing_device="cpu") as source:
        assert source.next()["next", "observation"][0, :, 2].tolist() == [1, 2, 3]
        assert outs(backend) == []


@pytest.mark.parametrize("make", [CountingEnv, Pictures], ids=["small", "large"])
async def test_rollouts_come_back_as_one_copy_a_step(face: Face, make: Any, backend: FakeBackend) -> None:
    async with face.open(2, make, device=backend) as env:
        elsewhere = await face.call(env.rollout, 3, break_when_any_done=False)
        assert outs(backend) == []
        before = len(backend.copies)
        here = await face.call(env.rollout, 3, break_when_any_done=False, storing_device="cpu")
        assert [copy.kind for copy in backend.copies[before:]] == ["in", *["in", "out"] * 3]
        assert here["next", "observation"].shape == elsewhere["next", "observation"].shape
        assert (here["next", "observation"] != 0).any()
        assert not any(backend.holds(leaf) for leaf in here.values(True, True))


async def test_results_can_be_brought_back_by_hand(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        td = (await face.call(env.rand_step)).clone(False)
        backend.held = True
        bringing = asyncio.ensure_future(face.call(env.on_host, td))
        copy = await in_thread(backend.next_held)
        await waited_for(copy)
        assert not bringing.done()
        backend.release()
        here = await bringing
        assert here["next", "observation"].tolist() == td["next", "observation"].tolist()
        here["next", "observation"].fill_(-1)  # it is the caller's own
        again = await face.call(env.on_host, td)
        assert again["next", "observation"].tolist() == td["next", "observation"].tolist()
        env.to("cpu")
        assert await face.call(env.on_host, here) is here
        await face.call(env.close)
        assert (await face.call(env.on_host, td))["next", "done"].tolist() == td["next", "done"].tolist()
        assert env.is_closed
        await face.call(env.start)
