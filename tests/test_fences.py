"""Waiting for fences: what is no worker's doing, and must not be written over."""

import asyncio
import threading
import weakref

import numpy as np
import pytest
from faces import Face, acting, call, in_thread, observed
from failing_envs import CountingEnv, numbered

from aioenvs.engine.double_buffer import DoubleBuffer
from aioenvs.engine.waiting import MOST, FenceWaiter


class Barrier:
    """A fence that a test lets pass, or fail."""

    def __init__(self) -> None:
        self.passed, self.asked = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def done(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        self.asked.set()
        assert self.passed.wait(20)
        if self.error is not None:
            raise self.error


async def test_the_loop_runs_while_somebody_waits(any_loop: None) -> None:
    fence_waiter, barriers = FenceWaiter(), [Barrier(), Barrier()]
    waiting = asyncio.ensure_future(fence_waiter.passed(barriers))
    for barrier in barriers:
        assert await in_thread(barrier.asked.wait, 20)
        assert not waiting.done()
        barrier.passed.set()
    await waiting
    fence_waiter.close()


async def test_nobody_waits_for_what_has_passed() -> None:
    fence_waiter, barrier = FenceWaiter(), Barrier()
    barrier.passed.set()
    before = threading.active_count()
    await fence_waiter.passed([barrier])
    await fence_waiter.passed([])
    assert threading.active_count() == before
    assert not barrier.asked.is_set()
    fence_waiter.close()


async def test_what_fails_says_so_to_whoever_waits() -> None:
    fence_waiter, barrier = FenceWaiter(), Barrier()
    barrier.error = RuntimeError("the device is gone")
    waiting = asyncio.ensure_future(fence_waiter.passed([barrier]))
    assert await in_thread(barrier.asked.wait, 20)
    barrier.passed.set()
    with pytest.raises(RuntimeError, match="the device is gone"):
        await waiting
    fence_waiter.close()


async def test_who_is_cancelled_leaves_the_others_waiting() -> None:
    fence_waiter, barrier, other = FenceWaiter(), Barrier(), Barrier()
    waiting = [asyncio.ensure_future(fence_waiter.passed([each])) for each in (barrier, other)]
    assert await in_thread(barrier.asked.wait, 20)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    barrier.passed.set()
    other.passed.set()
    await waiting[1]
    fence_waiter.close()
    fence_waiter.close()


async def test_one_that_hangs_keeps_nobody_else_waiting() -> None:
    fence_waiter, barriers = FenceWaiter(), [Barrier() for _ in range(3)]
    waiting = [asyncio.ensure_future(fence_waiter.passed([barrier])) for barrier in barriers]
    for barrier in barriers:
        assert await in_thread(barrier.asked.wait, 20)
    for place in (2, 0, 1):
        barriers[place].passed.set()
        await waiting[place]
    before = threading.active_count()
    another = Barrier()
    last = asyncio.ensure_future(fence_waiter.passed([another]))
    assert await in_thread(another.asked.wait, 20)
    assert threading.active_count() == before  # one that was idle waits
    another.passed.set()
    await last
    fence_waiter.close()


async def test_there_are_not_more_threads_than_some() -> None:
    fence_waiter, before = FenceWaiter(), threading.active_count()
    barriers = [Barrier() for _ in range(MOST + 2)]
    waiting = [asyncio.ensure_future(fence_waiter.passed([barrier])) for barrier in barriers]
    for barrier in barriers[:MOST]:
        assert await in_thread(barrier.asked.wait, 20)
    assert threading.active_count() == before + MOST
    for barrier in barriers:
        barrier.passed.set()
    assert await asyncio.gather(*waiting) == [True] * len(barriers)
    fence_waiter.close()


async def test_those_who_wait_for_the_same_share_a_thread() -> None:
    fence_waiter, barrier, before = FenceWaiter(), Barrier(), threading.active_count()
    waiting = [asyncio.ensure_future(fence_waiter.passed([barrier])) for _ in range(5)]
    assert await in_thread(barrier.asked.wait, 20)
    assert threading.active_count() == before + 1
    barrier.passed.set()
    assert await asyncio.gather(*waiting) == [True] * 5
    fence_waiter.close()


async def test_nobody_waits_longer_than_he_says() -> None:
    fence_waiter, barrier = FenceWaiter(), Barrier()
    assert not await fence_waiter.passed([barrier], 0.01)
    assert not await fence_waiter.outlasted([barrier], 0.01)
    assert not fence_waiter.wait([barrier], 0.01)
    barrier.passed.set()
    assert fence_waiter.wait([barrier], 0.01)
    fence_waiter.close()


async def test_what_fails_says_so_to_whoever_waits_in_a_thread() -> None:
    fence_waiter, barrier = FenceWaiter(), Barrier()
    barrier.error = RuntimeError("the device is gone")
    waiting = asyncio.ensure_future(in_thread(fence_waiter.wait, [barrier], 20))
    outlasting = asyncio.ensure_future(fence_waiter.outlasted([barrier], 20))
    assert await in_thread(barrier.asked.wait, 20)
    barrier.passed.set()
    with pytest.raises(RuntimeError, match="the device is gone"):
        await waiting
    assert await outlasting  # it is over
    fence_waiter.close()


class Failed(Barrier):
    """One that fails at once."""

    def wait(self) -> None:
        raise RuntimeError("the device is gone")


class Late(Barrier):
    """One that passes as soon as somebody waits for it."""

    def wait(self) -> None:
        self.passed.set()


async def test_a_fence_is_not_taken_for_one_that_was_waited_for_before() -> None:
    fence_waiter, barrier = FenceWaiter(), Barrier()
    former = weakref.ref(barrier)
    assert not await fence_waiter.passed([barrier], 0.01)
    barrier.passed.set()
    del barrier
    assert fence_waiter._idle.acquire(timeout=20)  # its thread is done with it, and the loop has not heard of that yet
    assert former() is not None  # so that no other one can be where it was
    fence_waiter._idle.release()
    for _ in range(3):
        await asyncio.sleep(0)
    assert fence_waiter._futures == {}
    assert former() is None
    fence_waiter.close()


async def test_a_failure_says_nothing_of_the_others() -> None:
    fence_waiter, barrier = FenceWaiter(), Barrier()
    assert not await fence_waiter.outlasted([Failed(), barrier], 0.01)
    barrier.passed.set()
    assert await fence_waiter.outlasted([Failed(), barrier], 20)
    fence_waiter.close()


async def test_a_thread_that_cannot_be_started_is_started_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fence_waiter = FenceWaiter()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert fence_waiter.wait([Late()], 20)
        assert await fence_waiter.passed([Late()], 20)
    assert fence_waiter.wait([Late()], 20)
    assert await fence_waiter.passed([Late()], 20)
    fence_waiter.close()


def test_a_loop_that_was_closed_is_no_reason_to_complain() -> None:
    fence_waiter, barrier = FenceWaiter(), Barrier()

    async def leave() -> None:
        asyncio.ensure_future(fence_waiter.passed([barrier]))  # noqa: RUF006
        await asyncio.sleep(0)

    asyncio.run(leave())
    barrier.passed.set()
    fence_waiter.close()


def make() -> DoubleBuffer:
    return DoubleBuffer(np.zeros(4, np.uint8), np.zeros(4, np.uint8))


def test_the_slot_that_is_not_written_next_need_not_be_waited_for() -> None:
    turns, everybody = make(), slice(None)
    barriers = [Barrier(), Barrier()]
    for slot, barrier in enumerate(barriers):
        turns.decide(everybody, lends=True)
        turns.lend(everybody)
        turns.guard(everybody, slot, barrier)
        assert turns.in_use(everybody) == barriers[:slot]
    assert turns.in_use([2]) == barriers[:1]
    barriers[0].passed.set()
    assert turns.in_use(everybody) == []
    assert turns.guarded


def test_where_nothing_is_lent_either_slot_may_come_next() -> None:
    turns, barrier = make(), Barrier()
    turns.guard([1, 2], 1, barrier)
    assert turns.in_use([0, 3]) == []
    assert turns.in_use([0, 1]) == [barrier]
    barrier.passed.set()
    assert turns.in_use([0, 1]) == []
    assert not turns.guarded


async def test_a_fence_that_fails_fails_the_command_and_no_other(face: Face) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await face.call(env.reset)
        own = env if face.is_async else env._env
        barrier = Barrier()
        barrier.error = RuntimeError("the device is gone")
        own._running.pool.fenced = True
        own._running.pool.buffers[0].guard(slice(None), 0, barrier)
        step = asyncio.ensure_future(call(env.step, acting([1, 1])))
        assert await in_thread(barrier.asked.wait, 20)
        assert not step.done()
        barrier.passed.set()
        with pytest.raises(RuntimeError, match="the device is gone"):
            await step
        assert [row[2] for row in observed(await face.call(env.step, acting([1, 1])))] == [1, 1]
