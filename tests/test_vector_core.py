"""The coroutines behind the vector faces: what cancelling does, and who may ask at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from failing_envs import Gate, hang, raise_value_error
from vector_faces import HOSTS, counting

from aioenvs.engine.adapters.base import Call
from aioenvs.engine.config import BatchConfig, Timeouts
from aioenvs.errors import ClosedError, ConcurrencyError, WorkerTimeoutError
from aioenvs.integrations.vectors.core import AsyncVector, Autoreset

OTHERS = [host for host in HOSTS if host != "serial"]  # those that run on while somebody waits
ONES = np.ones(3, np.int64)


@contextlib.asynccontextmanager
async def opened(
    each: dict[int, dict[str, Any]] | None = None, autoreset: Autoreset = Autoreset.NEXT_STEP, **options: Any
) -> AsyncIterator[AsyncVector]:
    envs = AsyncVector(BatchConfig.of(3, counting(each), create_env_kwargs=None, **options), autoreset)
    await envs.start()
    try:
        yield envs
    finally:
        await envs.close()


@pytest.mark.usefixtures("any_loop")
@pytest.mark.parametrize("host", OTHERS)
async def test_a_cancelled_step_shifts_nothing(host: str, gate: Gate) -> None:
    async with opened({1: {"fault": gate.wait}}, **HOSTS[host]) as envs:
        await envs.reset({})
        await envs.step(ONES)
        step = asyncio.ensure_future(envs.step(2 * ONES))
        await gate.arrival()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        following = asyncio.ensure_future(envs.step(4 * ONES))
        await asyncio.sleep(0)
        assert not following.done()
        gate.open()
        assert (await following).observations.tolist() == [[env, 1, 3, 7] for env in range(3)]


@pytest.mark.parametrize("host", OTHERS)
async def test_a_cancelled_reset_and_call_shift_nothing(host: str, gate: Gate) -> None:
    async with opened({1: {"fault": gate.wait, "at": (1, 0)}}, **HOSTS[host]) as envs:
        reset = asyncio.ensure_future(envs.reset({}))
        await gate.arrival()
        reset.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reset
        call = asyncio.ensure_future(envs.perform(dict.fromkeys(range(3), Call("get", "steps")), "get_attr"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gate.open()
        assert (await envs.reset({})).observations[:, 1].tolist() == [2, 2, 2]


@pytest.mark.parametrize("host", OTHERS)
async def test_one_command_at_a_time(host: str, gate: Gate) -> None:
    async with opened({1: {"fault": gate.wait, "at": (1, 1)}}, **HOSTS[host]) as envs:
        await envs.reset({})
        step = asyncio.ensure_future(envs.step(ONES))
        await gate.arrival()
        with pytest.raises(ConcurrencyError, match=r"step was asked of .* while step is still pending"):
            await envs.step(ONES)
        with pytest.raises(ConcurrencyError, match=r"reset was asked of .* while step is still pending"):
            await envs.reset({})
        gate.open()
        assert (await step).observations[:, 3].tolist() == [1, 1, 1]


@pytest.mark.parametrize("host", ["thread", "one each"])
async def test_envs_are_free_once_a_wait_was_too_long(host: str, gate: Gate) -> None:
    async with opened({1: {"fault": gate.wait, "at": (1, 1)}}, **HOSTS[host]) as envs:
        await envs.reset({})
        pending = envs.begin_step(ONES)
        await envs.set_off(pending)
        await gate.arrival()
        with pytest.raises(WorkerTimeoutError, match=r"within 0 s \(timeout\)"):
            await envs.finish(pending, timeout=0)
        calls = {0: Call("get", "steps"), 2: Call("get", "steps")}
        assert len(await envs.perform(calls, "get_attr")) == 2  # nobody holds them, and these have answered
        gate.open()
        assert (await envs.step(ONES)).observations[:, 3].tolist() == [2, 2, 2]


async def test_closing_ends_what_is_pending() -> None:
    async with opened({1: {"fault": hang, "at": (1, 1)}}, num_processes=3, timeouts=Timeouts(close=0.2)) as envs:
        await envs.reset({})
        pending = envs.begin_step(ONES)
        await envs.set_off(pending)
        await envs.close()
        with pytest.raises(ClosedError):
            await envs.finish(pending)
        with pytest.raises(ClosedError):
            await envs.step(ONES)


@pytest.mark.parametrize("host", OTHERS)
async def test_what_is_never_set_off_holds_nobody(host: str) -> None:
    async with opened(**HOSTS[host]) as envs:
        await envs.reset({})
        pending = envs.begin_step(5 * ONES)
        assert (await envs.step(ONES)).observations[:, 3].tolist() == [1, 1, 1]
        await envs.abandon(pending)
        assert (await envs.step(ONES)).observations[:, 3].tolist() == [2, 2, 2]


async def test_what_is_wrong_is_said_by_the_wait() -> None:
    async with opened({1: {"fault": raise_value_error, "at": (1, 1)}}, num_processes=1) as envs:
        await envs.reset({})
        pending = envs.begin_step(ONES)
        await envs.set_off(pending)
        with pytest.raises(ValueError, match="the reactor is hot"):
            await envs.finish(pending)


@pytest.mark.parametrize("autoreset", list(Autoreset))
async def test_a_serial_pool_of_coroutine_faces(autoreset: Autoreset) -> None:
    async with opened({0: {"length": 1}}, autoreset, backend="serial") as envs:
        assert (await envs.reset({})).observations[:, 1].tolist() == [1, 1, 1]
        steps = await envs.step(ONES)
        assert steps.terminated.tolist() == [True, False, False]
        assert steps.finals.keys() == ({0} if autoreset is Autoreset.SAME_STEP else set())
