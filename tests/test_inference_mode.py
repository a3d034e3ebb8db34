"""Collectors that are called in `torch.inference_mode`, outside of it, or now here and now there."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from failing_envs import CountingEnv, numbered
from tensordict import TensorDictBase

from aioenvs import AsyncCollector, AsyncParallelEnv, AsyncSerialEnv, Collector, SerialEnv

over_orders = pytest.mark.parametrize("inside", list(itertools.product([True, False], repeat=3)), ids=str)
over_ways = pytest.mark.parametrize("min_get", [None, 1])


@contextlib.contextmanager
def mode(inside: bool) -> Iterator[None]:
    with torch.inference_mode() if inside else contextlib.nullcontext():
        yield


class Policy:
    """Writes into what it is given, notes in which mode it is called, and fails or waits once."""

    def __init__(self) -> None:
        self.modes: list[bool] = []
        self.fails = False

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        self.modes.append(torch.is_inference_mode_enabled())
        if self.fails and len(self.modes) == 2:
            raise ValueError("once")
        td["observation"].add_(0)
        return td.set("action", torch.ones(len(td), dtype=torch.int64))


def check(batch: TensorDictBase, steps: range) -> None:
    leaves = list(batch.values(True, True))
    assert not any(leaf.is_inference() for leaf in leaves)
    assert sorted(set(batch["next", "observation"][..., 2].flatten().tolist())) == list(steps)
    batch["next", "reward"].add_(1)  # which is what they are good for


@over_orders
@over_ways
def test_batches_begun_in_one_and_finished_in_the_other(inside: tuple[bool, ...], min_get: int | None) -> None:
    policy = Policy()
    policy.fails = True
    env = SerialEnv(2, CountingEnv, create_env_kwargs=numbered(2))
    with Collector(env, policy, frames_per_batch=6, min_get=min_get) as collector:
        with mode(inside[0]), pytest.raises(ValueError, match="once"):
            collector.next()
        for number, own in enumerate(inside[1:]):
            before = len(policy.modes)
            with mode(own):
                batch = collector.next()
            check(batch, range(3 * number + 1, 3 * number + 4))
            assert set(policy.modes[before:]) <= {own}


@over_orders
@over_ways
@pytest.mark.parametrize("cls", [AsyncParallelEnv, AsyncSerialEnv])
async def test_batches_that_were_given_up_and_gone_on_with(
    cls: Any, inside: tuple[bool, ...], min_get: int | None
) -> None:
    policy, waits = Policy(), asyncio.Event()

    async def waiting(td: TensorDictBase) -> TensorDictBase:
        if len(policy.modes) == 1:
            waits.set()
            await asyncio.sleep(3600)
        return policy(td)

    async with cls(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        collector = AsyncCollector(env, waiting, frames_per_batch=6, min_get=min_get)
        with mode(inside[0]):
            task = asyncio.ensure_future(collector.next())
            await waits.wait()
        policy.modes.append(inside[0])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for own in inside[1:]:
            with mode(own):
                batch = await collector.next()
            assert not any(leaf.is_inference() for leaf in batch.values(True, True))
            batch["next", "reward"].add_(1)
        await collector.shutdown()


def test_it_is_the_policy_that_infers() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    seen: list[Any] = []

    def act(observation: torch.Tensor) -> torch.Tensor:
        values = (observation.float() * weight).sum(-1)
        seen.append((values.is_inference(), values.requires_grad))
        return values.long().clamp(0, 9)

    with Collector(SerialEnv(2, CountingEnv), act, frames_per_batch=4) as collector:
        with torch.inference_mode():
            inferred = collector.next()
        assert set(seen) == {(True, False)}
        loss = (inferred["observation"].float() * weight).sum()
        loss.backward()  # what came of it can be learned from
        assert weight.grad is not None
        collector.next()
        assert seen[-1] == (False, False)
