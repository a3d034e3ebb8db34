"""Collectors over coroutine envs: all of them, wherever they run, and what cancelling does."""

import asyncio
from typing import Any

import pytest
import torch
from collecting import (
    NUM_ENVS,
    by_step,
    check_continuous,
    check_ids,
    check_steps,
    collector,
    every_batch,
    persistently,
    trajectories,
)
from coroutine_envs import AwaitingEnv, door
from faces import EVERY_FACE, Face
from failing_envs import CountingEnv, Gate, numbered, raise_value_error

from aioenvs import AsyncCollector, Collector, SerialEnv

LENGTHS = numbered(NUM_ENVS, {0: {"length": 3}, 1: {"length": 5}, 2: {"length": 4}})
EITHER = pytest.mark.parametrize("min_get", [None, 1], ids=["lockstep", "first-ready"])
every_face = pytest.mark.parametrize("face", EVERY_FACE, ids=lambda face: face.name)
async_faces = pytest.mark.parametrize(
    "face", [face for face in EVERY_FACE if face.is_async], ids=lambda face: face.name
)


@every_face
@EITHER
async def test_they_are_collected_from_wherever_they_run(face: Face, min_get: int | None) -> None:
    async with face.open(NUM_ENVS, AwaitingEnv, create_env_kwargs=LENGTHS) as env:
        source = collector(env, by_step, frames_per_batch=15, total_frames=45, min_get=min_get)
        batches = await every_batch(source)
        assert sum(batch.numel() for batch in batches) == 45
        envs = trajectories(batches)
        for env_id, own in enumerate(envs):
            assert own["observation"][0].tolist() == [env_id, 1, 0, 0]
            check_continuous(own)
        check_ids(envs)
        assert env.outstanding == ()


@every_face
async def test_together_they_do_what_other_envs_do(face: Face) -> None:
    results = []
    for cls in (AwaitingEnv, CountingEnv):
        async with face.open(NUM_ENVS, cls, create_env_kwargs=LENGTHS) as env:
            batches = await every_batch(collector(env, by_step, frames_per_batch=12, total_frames=24))
            results.append(torch.cat(batches, 1))
    assert (results[0] == results[1]).all()


@every_face
@EITHER
async def test_one_that_raises_begins_a_new_episode(face: Face, min_get: int | None) -> None:
    kwargs = numbered(NUM_ENVS, {1: {"fault": raise_value_error, "at": (1, 3)}})
    async with face.open(NUM_ENVS, AwaitingEnv, create_env_kwargs=kwargs) as env:
        source = collector(env, by_step, frames_per_batch=12, total_frames=24, min_get=min_get)
        batches, (error,) = await persistently(source, ValueError)
        assert str(error) == "the reactor is hot"
        envs = trajectories(batches)
        assert sum(map(len, envs)) == 24
        for own in envs:
            check_steps(own)
        assert set(envs[0]["observation"][:, 1].tolist()) == {1}
        check_ids(envs)


@async_faces
@EITHER
async def test_cancelling_loses_nothing(face: Face, gate: Gate, min_get: int | None) -> None:
    kwargs = numbered(NUM_ENVS, {0: {"fault": door(gate), "at": (1, 3)}})
    async with face.open(NUM_ENVS, AwaitingEnv, create_env_kwargs=kwargs) as env:
        get = None if min_get is None else NUM_ENVS
        source = AsyncCollector(env, by_step, frames_per_batch=15, total_frames=30, min_get=get)
        waiting = asyncio.create_task(source.next())
        await gate.arrival()
        for _ in range(3):
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            waiting = asyncio.create_task(source.next())
            await asyncio.sleep(0)
        gate.open()
        for own in trajectories([await waiting, await source.next()]):
            check_continuous(own)
            assert own["observation"][:, 1:3].tolist() == [[1, step] for step in range(10)]


@async_faces
@EITHER
async def test_those_that_wait_for_ever_hold_up_no_shutdown(face: Face, gate: Gate, min_get: int | None) -> None:
    kwargs = numbered(NUM_ENVS, {0: {"fault": door(gate), "at": (1, 2)}})
    async with face.open(NUM_ENVS, AwaitingEnv, create_env_kwargs=kwargs) as env:
        source = AsyncCollector(env, by_step, frames_per_batch=300, min_get=min_get)
        waiting = asyncio.create_task(source.next())
        await gate.arrival()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await source.shutdown()
        assert env.is_closed


async def test_a_policy_that_awaits_shares_the_loop_of_a_serial_env() -> None:
    async def remote(observation: torch.Tensor) -> Any:
        await asyncio.sleep(0)
        return by_step(observation)

    for min_get in (None, 1):
        env = SerialEnv(NUM_ENVS, AwaitingEnv, create_env_kwargs=LENGTHS)
        with Collector(env, remote, frames_per_batch=12, total_frames=24, min_get=min_get) as source:
            for own in trajectories(list(source)):
                check_continuous(own)
