"""Cancelled, timed out, or two at once: nobody ever reads the result of another request."""

import asyncio
import random
from typing import Any

import pytest
from faces import Face, acting, in_thread, observed
from failing_envs import CountingEnv, Gate, numbered

from aioenvs import AsyncParallelEnv
from aioenvs.errors import AioEnvsError

pytestmark = pytest.mark.usefixtures("any_loop")


def gated(gate: Gate, at: tuple[int, int] = (1, 2)) -> Any:
    """Four envs, of which env 1 waits at the gate."""
    return numbered(4, {1: {"fault": gate.wait, "at": at}})


def rows(episode: int, step: int, *totals: int) -> list[list[int]]:
    return [[env, episode, step, total] for env, total in enumerate(totals)]


async def turn_the_loop(turns: int = 5) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_next_step_waits_for_a_cancelled_one(async_face: Face, gate: Gate) -> None:
    async with async_face.open(4, CountingEnv, create_env_kwargs=gated(gate)) as env:
        await env.reset()
        await env.step(acting([1, 2, 3, 4]))
        stepping = asyncio.create_task(env.step(acting([10, 20, 30, 40])))
        await gate.arrival()
        await cancelled(stepping)

        following = asyncio.create_task(env.step(acting([100, 200, 300, 400])))
        await turn_the_loop()
        assert not following.done()
        gate.open()
        assert observed(await following) == rows(1, 3, 111, 222, 333, 444)
        assert observed(await env.step(acting([0] * 4))) == rows(1, 4, 111, 222, 333, 444)


async def test_envs_that_are_not_concerned_need_not_wait(async_face: Face, gate: Gate) -> None:
    async with async_face.open(4, CountingEnv, create_env_kwargs=gated(gate)) as env:
        await env.reset()
        await env.step(acting([1, 2, 3, 4]))
        stepping = asyncio.create_task(env.step(acting([10, 20, 30, 40], only=[1])))
        await gate.arrival()
        await cancelled(stepping)
        td = await env.step(acting([100, 200, 300, 400], only=[2, 3]))
        assert observed(td)[2:] == [[2, 1, 2, 303], [3, 1, 2, 404]]
        gate.open()
        td = await env.step(acting([1000 - 1] * 4))
        assert observed(td) == [[0, 1, 2, 1000], [1, 1, 3, 1021], [2, 1, 3, 1302], [3, 1, 3, 1403]]


async def test_a_cancelled_reset(async_face: Face, gate: Gate) -> None:
    async with async_face.open(4, CountingEnv, create_env_kwargs=gated(gate, at=(2, 0))) as env:
        await env.reset()
        await env.step(acting([1, 2, 3, 4]))
        resetting = asyncio.create_task(env.reset())
        await gate.arrival()
        await cancelled(resetting)
        gate.open()
        assert observed(await env.step(acting([5, 6, 7, 8]))) == rows(2, 1, 5, 6, 7, 8)
        assert observed(await env.reset()) == rows(3, 0, 0, 0, 0, 0)


async def test_a_request_that_is_cancelled_while_it_waits(async_face: Face, gate: Gate) -> None:
    async with async_face.open(4, CountingEnv, create_env_kwargs=gated(gate, at=(1, 1))) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([1, 2, 3, 4])))
        await gate.arrival()
        await cancelled(stepping)
        waiting = asyncio.create_task(env.step(acting([10, 20, 30, 40])))
        await turn_the_loop()
        await cancelled(waiting)
        gate.open()
        assert observed(await env.step(acting([100, 200, 300, 400]))) == rows(1, 2, 101, 202, 303, 404)


async def test_cancelling_one_request_leaves_the_other_alone(async_face: Face, gate: Gate) -> None:
    async with async_face.open(4, CountingEnv, create_env_kwargs=gated(gate, at=(1, 1))) as env:
        await env.reset()
        first = asyncio.create_task(env.step(acting([1, 2, 3, 4], only=[1])))
        await gate.arrival()
        second = asyncio.create_task(env.step(acting([10, 20, 30, 40], only=[0, 3])))
        await turn_the_loop()
        await cancelled(first)
        gate.open()
        td = await second
        assert [observed(td)[env] for env in (0, 3)] == [[0, 1, 1, 10], [3, 1, 1, 40]]
        td = await env.step(acting([100, 200, 300, 400]))
        assert observed(td) == [[0, 1, 2, 110], [1, 1, 2, 202], [2, 1, 1, 300], [3, 1, 2, 440]]


async def test_cancelled_at_any_time(async_face: Face) -> None:
    """A step has action 1; a cancelled one 1000 times as much, so that the sum tells them apart."""
    chance = random.Random(7)
    loop = asyncio.get_running_loop()
    async with async_face.open(4, CountingEnv, create_env_kwargs=numbered(4)) as env:
        await env.reset()
        steps = cancels = 0
        for _ in range(60):
            task = asyncio.create_task(env.step(acting([100] * 4)))
            loop.call_later(chance.random() * 1e-3, task.cancel)
            try:
                await task
                steps += 1
            except asyncio.CancelledError:
                cancels += 1
            last = observed(await env.step(acting([1] * 4)))
            steps += 1
        assert cancels
        for env_id, (found, episode, taken, total) in enumerate(last):
            assert (found, episode) == (env_id, 1)
            assert total == 60 + 100 * (taken - 60)
            assert steps <= taken <= steps + cancels


@pytest.mark.parametrize("command", ["step", "reset"])
async def test_asyncio_timeout(async_face: Face, gate: Gate, command: str) -> None:
    at = (1, 1) if command == "step" else (2, 0)
    argument = acting([1, 2, 3, 4]) if command == "step" else None
    async with async_face.open(4, CountingEnv, create_env_kwargs=gated(gate, at)) as env:
        await env.reset()
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.1):
                await getattr(env, command)(argument)
        assert not isinstance(caught.value, AioEnvsError)
        gate.open()
        expected = rows(1, 2, 11, 22, 33, 44) if command == "step" else rows(2, 1, 10, 20, 30, 40)
        assert observed(await env.step(acting([10, 20, 30, 40]))) == expected


async def error_elsewhere(command: Any) -> BaseException | None:
    """What a command raises in an event loop of another thread."""
    try:
        await asyncio.wait_for(in_thread(lambda: asyncio.run(command())), 5)
    except Exception as error:
        return error
    return None


async def test_another_event_loop_is_refused(async_face: Face) -> None:
    async with async_face.open(4, CountingEnv, create_env_kwargs=numbered(4)) as env:
        await env.reset()
        for command in (env.reset, lambda: env.step(acting([9] * 4)), lambda: env.set_seed(1)):
            error = await error_elsewhere(command)
            assert type(error) is AioEnvsError
            assert "event loop" in str(error)
        assert observed(await env.step(acting([1, 2, 3, 4]))) == rows(1, 1, 1, 2, 3, 4)


async def test_close_from_another_event_loop(async_face: Face) -> None:
    """It closes, or says that it cannot; it does not hang, and leaves nothing half closed."""
    async with async_face.open(4, CountingEnv, create_env_kwargs=numbered(4)) as env:
        await env.reset()
        error = await error_elsewhere(env.close)
        if error is None:
            assert env.is_closed
        else:
            assert type(error) is AioEnvsError
            assert "event loop" in str(error)
            assert observed(await env.step(acting([1, 2, 3, 4]))) == rows(1, 1, 1, 2, 3, 4)


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")  # asyncio's own, of a loop closed too early
def test_the_loop_that_started_them_is_over() -> None:
    env = AsyncParallelEnv(4, CountingEnv, create_env_kwargs=numbered(4), num_processes=2)
    asyncio.run(env.reset())
    with pytest.raises(AioEnvsError, match="event loop"):
        asyncio.run(env.step(acting([0] * 4)))
    asyncio.run(env.close())
    assert env.is_closed
    assert asyncio.run(reset_and_close(env)) == rows(1, 0, 0, 0, 0, 0)


async def reset_and_close(env: AsyncParallelEnv) -> list[list[int]]:
    async with env:
        return observed(await env.reset())
