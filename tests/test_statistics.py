"""What the envs say they have done."""

import asyncio
import os
import signal
from dataclasses import FrozenInstanceError
from typing import Any

import failing_envs as faults
import pytest
from faces import Face, acting, call, masked
from failing_envs import CountingEnv, Gate, numbered
from test_death import kill_and_reap
from test_restarts import kill_and_wait

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, SerialEnv
from aioenvs.errors import AioEnvsError, WorkerDiedError
from aioenvs.testing import CountingEnv as TorchCountingEnv
from aioenvs.testing import DynamicShapeEnv, MultiKeyCountingEnv, NestedCountingEnv, NonTensorEnv

RESTART: dict[str, Any] = {"on_worker_death": "restart"}


async def test_counts(face: Face) -> None:
    kwargs = numbered(4, {0: {"length": 2}, 1: {"length": 3}})
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs) as env:
        await face.call(env.reset)
        found = env.statistics()
        assert found.steps == found.episodes == found.restarts == (0,) * 4
        assert found.mean_step_seconds == found.max_step_seconds == (0.0,) * 4
        assert found.states == ("idle",) * 4
        for _ in range(6):
            await face.call(env.step_and_maybe_reset, acting([0] * 4))
        found = env.statistics()
        assert found.steps == (6,) * 4
        assert found.episodes == (3, 2, 0, 0)
        assert found.restarts == (0,) * 4
        assert found.states == ("idle",) * 4
        assert all(type(count) is int for count in found.steps + found.episodes + found.restarts)
        pairs = zip(found.mean_step_seconds, found.max_step_seconds, strict=True)
        assert all(0 < mean <= longest for mean, longest in pairs)


async def test_partial_steps_and_views(face: Face) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4, length=2)) as env:
        await face.call(env.reset)
        await face.call(env.step, acting([0] * 4, only=[1, 3]))
        await face.call(env.step, acting([0] * 4, only=[3]))
        await face.call(env[[3, 0]].reset)
        await face.call(env[[3, 0]].step, acting([0, 0]))
        assert env.statistics().steps == (1, 1, 0, 3)
        assert env.statistics().episodes == (0, 0, 0, 1)
        assert env[[3, 0, 2]].statistics().steps == (3, 1, 0)
        assert env[3].statistics().episodes == (1,)
        await face.call(env.step, acting([0] * 4, only=[]))
        await face.call(env.reset, masked("_reset", 4, [3]))
        assert env.statistics().steps == (1, 1, 0, 3)
        assert env[1:].statistics().states == ("idle",) * 3


async def test_rollouts(face: Face) -> None:
    async with face.open(2, lambda: TorchCountingEnv(max_steps=3)) as env:
        await face.call(env.rollout, 7, break_when_any_done=False)
        assert env.statistics().steps == (7, 7)
        assert env.statistics().episodes == (2, 2)


@pytest.mark.parametrize(
    "factory",
    [NonTensorEnv, DynamicShapeEnv, lambda: NestedCountingEnv(nest=("done",)), lambda: MultiKeyCountingEnv()],
    ids=["objects", "dynamic", "nested", "several"],
)
@pytest.mark.parametrize("use_buffers", [None, False])
async def test_what_an_episode_is_for_other_envs(factory: Any, use_buffers: bool | None) -> None:
    async with AsyncParallelEnv(2, factory, num_processes=1, use_buffers=use_buffers) as env:
        td = await env.reset()
        ends = 0
        for _ in range(8):
            td, root = await env.step_and_maybe_reset(env.rand_action(td))
            keys = [key for key in env.done_keys if "done" in key]
            ends += any(bool(td[0]["next"][key].any()) for key in keys)
            td = root
        assert env.statistics().steps == (8, 8)
        assert env.statistics().episodes == (ends, ends)
        assert ends > 0


async def test_envs_that_differ(face: Face) -> None:
    factories = [lambda: TorchCountingEnv(max_steps=2), DynamicShapeEnv, lambda: TorchCountingEnv(max_steps=3)]
    async with face.open(3, factories) as env:
        td = await face.call(env.reset)
        for _ in range(6):
            _, td = await face.call(env.step_and_maybe_reset, env.rand_action(td))
        found = env.statistics()
        assert (found.steps, found.episodes) == ((6, 6, 6), (3, 1, 2))


async def test_steps_that_failed_do_not_count(face: Face) -> None:
    kwargs = numbered(3, {1: {"fault": faults.raise_value_error, "at": (1, 2)}}, length=2)
    async with face.open(3, CountingEnv, create_env_kwargs=kwargs) as env:
        await face.call(env.reset)
        await face.call(env.step, acting([0] * 3))
        with pytest.raises(ValueError, match="reactor"):
            await face.call(env.step, acting([0] * 3))
        assert env.statistics().steps == (2, 1, 2)
        assert env.statistics().episodes == (1, 0, 1)


async def test_lost_steps_count_and_end_an_episode(process_face: Face) -> None:
    face = process_face
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=2, **RESTART) as env:
        await face.call(env.reset)
        await face.call(env.step, acting([0, 0]))
        await kill_and_reap(env.pids[0])
        await face.call(env.step, acting([0, 0]))
        found = env.statistics()
        assert (found.steps, found.episodes, found.restarts) == ((2, 2), (1, 0), (1, 0))
        await face.call(env.step, acting([0, 0]))
        assert env.statistics().episodes == (1, 0)


async def test_a_restart_counts_for_all_envs_of_a_worker() -> None:
    async with AsyncParallelEnv(4, CountingEnv, create_env_kwargs=numbered(4), num_processes=2) as env:
        await env.reset()
        await kill_and_wait(env)
        assert env.statistics().states == ("broken", "broken", "idle", "idle")
        with pytest.raises(WorkerDiedError):
            await env.step(acting([0] * 4))
        assert env.statistics().restarts == (0,) * 4
        await env.reset()
        assert env.statistics().restarts == (1, 1, 0, 0)
        assert env.statistics().states == ("idle",) * 4
        assert env[[3, 0]].statistics().restarts == (0, 1)


async def test_states(gate: Gate) -> None:
    kwargs = numbered(3, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with AsyncParallelEnv(3, CountingEnv, create_env_kwargs=kwargs, num_processes=3) as env:
        await env.reset()
        stepping = asyncio.create_task(env[[0, 1]].step(acting([0, 0])))
        await gate.arrival()
        assert env.statistics().states == ("busy", "busy", "idle")
        assert env[[2, 1]].statistics().states == ("idle", "busy")
        stepping.cancel()
        await asyncio.wait([stepping])
        await env[0].get_attr("steps")  # which waits for what it still does
        assert env.statistics().states == ("idle", "draining", "idle")
        ended = env._pool.hosts[1].ended  # type: ignore[union-attr]
        os.kill(env.pids[1], signal.SIGKILL)
        await ended
        assert env.statistics().states == ("idle", "broken", "idle")
        assert env.statistics().steps == (0, 0, 0)  # nobody has the results


async def test_a_cancelled_step_has_taken_its_time(gate: Gate) -> None:
    kwargs = numbered(1, {0: {"fault": gate.wait, "at": (1, 1)}})
    async with AsyncParallelEnv(1, CountingEnv, create_env_kwargs=kwargs) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([0])))
        await gate.arrival()
        stepping.cancel()
        await asyncio.wait([stepping])
        assert env.statistics().max_step_seconds == (0.0,)
        gate.open()
        await env.get_attr("steps")
        assert env.statistics().max_step_seconds[0] > 0


async def test_the_time_of_a_step_that_never_came_back_does_not_count() -> None:
    kwargs = numbered(1, {0: {"fault": faults.kill_itself, "at": (1, 1)}})
    async with AsyncParallelEnv(1, CountingEnv, create_env_kwargs=kwargs) as env:
        await env.reset()
        with pytest.raises(WorkerDiedError):
            await env.step(acting([0]))
        await env.reset()
        assert env.statistics().max_step_seconds == (0.0,)


async def test_what_has_been_said_stays_as_it_was() -> None:
    async with AsyncSerialEnv(2, CountingEnv) as env:
        await env.reset()
        before = env.statistics()
        await env.step(acting([0, 0]))
        assert before.steps == (0, 0)
        assert env.statistics() != before
        with pytest.raises(FrozenInstanceError):
            before.steps = (1, 1)  # type: ignore[misc]


async def test_only_running_envs_have_any(face: Face) -> None:
    env = face.make(2, CountingEnv)
    with pytest.raises(AioEnvsError, match="has no statistics while it is not running"):
        env.statistics()
    with pytest.raises(AioEnvsError, match="has no statistics while it is not running"):
        env[0].statistics()
    await call(env.reset)
    await call(env.step, acting([0, 0]))
    assert env.statistics().steps == (1, 1)
    await call(env.close)
    with pytest.raises(AioEnvsError, match="not running"):
        env.statistics()
    await call(env.reset)
    assert env.statistics().steps == (0, 0)
    await call(env.close)


def test_they_survive_another_device() -> None:
    with SerialEnv(2, CountingEnv) as env:
        env.step(env.reset().update(acting([0, 0])))
        env.to("cpu")
        assert env.statistics().steps == (1, 1)
