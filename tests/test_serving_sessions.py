"""Sessions without a server: leases, waiting, limits, deaths, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import failing_envs as faults
import gymnasium as gym
import pytest
from failing_envs import CountingEnv, Gate, numbered

from aioenvs.errors import ClosedError
from aioenvs.serving import CapacityError, EnvFailedError, SessionEndedError, SessionLostError, Sessions
from aioenvs.serving.codec import MessageError


def counting(count: int, each: Any = None, **options: Any) -> Sessions:
    options.setdefault("num_processes", count)
    return Sessions(CountingEnv, count, kwargs=numbered(count, each), **options)


async def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - it is no test's business to be told
            await asyncio.sleep(0.005)


async def test_a_session_is_an_env_of_its_own_with_gymnasiums_results() -> None:
    reference = gym.make("CartPole-v1")
    async with Sessions("CartPole-v1", 2, num_processes=1) as sessions, sessions.lease(seed=7) as session:
        assert sessions.gauges() == {"capacity": 2, "free": 1, "leased": 1, "returning": 0, "waiting": 0}
        observation, info = await session.reset()
        expected, _ = reference.reset(seed=7)
        assert observation.tolist() == expected.tolist()
        assert info == {}
        for action in (0, 1, 1):
            found, wanted = await session.step(action), reference.step(action)
            assert found[0].tolist() == wanted[0].tolist()
            assert found[1:] == wanted[1:]
        assert session.state["step_count"] == 3
        with pytest.raises(MessageError, match="expected an integer from 0 to 1 as the action, found 2"):
            await session.step(2)
        assert (await session.step(0))[0].tolist() == reference.step(0)[0].tolist()


async def test_callers_wait_in_order_and_with_bounds() -> None:
    async with counting(1, max_waiting=2) as sessions:
        first = await sessions.acquire()
        order: list[int] = []

        async def want(number: int) -> None:
            async with sessions.lease(wait=20):
                order.append(number)

        waiting = []
        for number in range(2):
            waiting.append(asyncio.create_task(want(number)))
            await until(lambda: sessions.gauges()["waiting"] == len(waiting))
        with pytest.raises(CapacityError, match="all 1 envs are taken, and 2 callers wait") as caught:
            await sessions.acquire()
        assert (caught.value.waiting, caught.value.retry_after >= 1) == (2, True)
        first.end()
        await asyncio.gather(*waiting)
        assert order == [0, 1]
        async with sessions.lease():
            with pytest.raises(CapacityError):
                await sessions.acquire(wait=0.01)
            cancelled = asyncio.create_task(sessions.acquire())
            await until(lambda: sessions.gauges()["waiting"] == 1)
            cancelled.cancel()
            await asyncio.wait([cancelled])
        await until(lambda: sessions.gauges()["free"] == 1)


async def test_what_a_holder_left_is_waited_for_and_reset(gate: Gate) -> None:
    async with counting(1, {0: {"fault": gate.wait, "at": (1, 1)}}) as sessions:
        async with sessions.lease() as session:
            await session.reset()
            step = asyncio.create_task(session.step(5))
            await gate.arrival()
            step.cancel()
            await asyncio.wait([step])
        assert sessions.gauges()["returning"] == 1
        gate.open()
        async with sessions.lease(wait=20) as session:
            with pytest.raises(SessionLostError):  # it is another's until it is reset
                await session.step(1)
            observation, _ = await session.reset()
            assert observation.tolist() == [0, 3, 0, 0]  # the second episode was that which nobody saw
            assert (await session.step(4))[0].tolist() == [0, 3, 1, 4]


async def test_a_cancelled_step_shifts_nothing(gate: Gate) -> None:
    async with counting(1, {0: {"fault": gate.wait, "at": (1, 1)}}) as sessions, sessions.lease() as session:
        await session.reset()
        step = asyncio.create_task(session.step(5))
        await gate.arrival()
        step.cancel()
        await asyncio.wait([step])
        gate.open()
        assert (await session.step(2))[0].tolist() == [0, 1, 2, 7]


async def test_the_death_of_an_env_is_told_to_its_sessions_only() -> None:
    each = {0: {"fault": faults.kill_itself, "at": (1, 2)}}
    async with Sessions(CountingEnv, 3, kwargs=numbered(3, each), num_processes=2) as sessions:
        held = {session.env: session for session in [await sessions.acquire() for _ in range(3)]}
        for session in held.values():
            await session.reset()
        together = [env for worker in sessions.batch.workers() if 0 in worker["envs"] for env in worker["envs"]]
        await held[0].step(1)
        with pytest.raises(SessionLostError, match="died"):
            await held[0].step(1)
        assert (await held[0].reset())[0].tolist() == [0, 1, 0, 0]
        for env in {1, 2} - set(together):
            assert (await held[env].step(1))[0].tolist() == [env, 1, 1, 1]
        for env in {1, 2} & set(together):
            with pytest.raises(SessionLostError):
                await held[env].step(1)
            assert (await held[env].reset())[0].tolist() == [env, 1, 0, 0]
        for session in held.values():
            session.end("left")
        await until(lambda: sessions.gauges()["free"] == 3)
        assert sessions.history.totals["deaths"] >= 1


async def test_an_env_that_raises_or_dies_unseen_is_ready_for_the_next() -> None:
    async with counting(1, {0: {"fault": faults.raise_value_error, "at": (1, 1)}}) as sessions:
        async with sessions.lease() as session:
            await session.reset()
            with pytest.raises(EnvFailedError, match="ValueError: the reactor is hot"):
                await session.step(1)
            with pytest.raises(MessageError, match="go on with a reset"):
                await session.step(1)
            await session.reset()
        async with sessions.lease():
            pid = sessions.batch.pid(0)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        async with sessions.lease(wait=20) as session:
            assert (await session.reset())[0].tolist()[2:] == [0, 0]


async def test_limits_end_sessions_and_free_their_envs(gate: Gate) -> None:
    async with counting(1, idle_seconds=0.1) as sessions:
        session = await sessions.acquire()
        await until(lambda: session.ended == "idle")
        with pytest.raises(SessionEndedError, match="for too long"):
            await session.reset()
        await until(lambda: sessions.gauges()["free"] == 1)
    async with counting(1, max_steps=2) as sessions, sessions.lease() as session:
        await session.reset()
        for _ in range(2):
            await session.step(1)
        with pytest.raises(SessionEndedError, match="all the steps"):
            await session.step(1)
    slow = {0: {"fault": gate.wait, "at": (1, 1)}}
    async with counting(1, slow, max_seconds=0.3) as sessions, sessions.lease() as session:
        await session.reset()
        with pytest.raises(SessionEndedError, match="as long as"):
            await session.step(1)
        gate.open()
        await until(lambda: sessions.gauges()["free"] == 1)


async def test_a_stuck_env_is_replaced() -> None:
    each = {0: {"fault": faults.hang, "at": (1, 1)}}
    async with counting(1, each, step_seconds=0.1, stuck_seconds=0.2) as sessions:
        async with sessions.lease() as session:
            await session.reset()
            with pytest.raises(TimeoutError):
                await session.step(1)
        async with sessions.lease(wait=20) as session:
            assert (await session.reset())[0].tolist() == [0, 1, 0, 0]
        assert sessions.history.totals["stuck"] == 1


async def test_draining_waits_and_then_ends() -> None:
    async with counting(2) as sessions:
        one, other = [await sessions.acquire() for _ in range(2)]
        waiting = asyncio.create_task(sessions.acquire())
        await until(lambda: sessions.gauges()["waiting"] == 1)
        one.end("left")
        await waiting  # the free env went to it
        draining = asyncio.create_task(sessions.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(ClosedError, match="the server stops"):
            await sessions.acquire()
        await other.reset()
        other.end("left")
        waiting.result().end("left")
        assert await draining is True
    async with counting(1) as sessions:
        session = await sessions.acquire()
        assert await sessions.drain(0.05) is False
        assert session.ended == "drained"


def test_sessions_import_no_torch() -> None:
    code = (
        "import asyncio, sys\nfrom aioenvs.serving import Sessions\n"
        "async def main():\n"
        "    async with Sessions('CartPole-v1', 1) as sessions, sessions.lease() as session:\n"
        "        await session.reset()\n"
        "asyncio.run(main())\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"
