"""Waiting for no longer than one may: deadlines, what becomes of what was waited for, and fences."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from aioenvs.engine.double_buffer import Fence
from aioenvs.errors import shown

__all__ = [
    "MOST",
    "TURNS",
    "Deadline",
    "FenceWaiter",
    "all_or_none",
    "check_seconds",
    "done_within",
    "drop",
    "hear",
    "outlast",
]


T = TypeVar("T")

TURNS = 10  # of the loop, in which what came while it did not run gets to whoever waits for it


class Deadline(NamedTuple):
    """When a request must have its answer.

    Attributes:
        when: By the clock of the event loop, or of the system where there is none.
        seconds: How long that was when the request began.
        name: Of the argument that said so.
    """

    when: float
    seconds: float
    name: str

    @classmethod
    def after(cls, seconds: float, name: str) -> Deadline:
        """So many seconds from now.

        Raises:
            ValueError: If that is no time to come.
        """
        check_seconds(seconds, name)
        return cls(_now() + seconds, seconds, name)

    @property
    def left(self) -> float:
        """How many seconds are left until then."""
        return max(0.0, self.when - _now())

    def __str__(self) -> str:
        return f"{self.seconds} s ({self.name})"


def _now() -> float:
    loop = asyncio._get_running_loop()
    return time.monotonic() if loop is None else loop.time()


def check_seconds(seconds: Any, name: str) -> None:
    """Refuse what is no length of time.

    Raises:
        ValueError: If it is neither None nor a number of seconds.
    """
    if seconds is None:
        return
    try:
        valid = isinstance(seconds, Real) and not isinstance(seconds, bool) and float(seconds) >= 0
    except OverflowError:
        valid = False
    if not valid:
        raise ValueError(f"expected {name} to be a number of seconds, at least 0, or None, found {shown(seconds)}")


async def done_within(futures: Collection[asyncio.Future[Any]], seconds: float | None) -> bool:
    """Wait until all of these are done, at most so long; they go on if that is too short, or it is cancelled.

    What has come while the loop was kept from running counts as in time.
    """
    await asyncio.wait(futures, timeout=seconds)
    for _ in range(TURNS):
        if all(future.done() for future in futures):
            return True
        await asyncio.sleep(0)
    return all(future.done() for future in futures)


async def outlast(task: asyncio.Future[Any], hurry: Callable[[], None] | None = None) -> None:
    """Wait for the end of a task, or another future, and only then be cancelled.

    Args:
        task: Whose result or exception stays with it.
        hurry: Called at each cancelling.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            if hurry is not None:
                hurry()
    if cancelled is not None:
        raise cancelled


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once and return their results; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def drop(future: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more, nor wants to be told that it failed."""
    if not future.done():
        future.add_done_callback(hear)
        future.cancel()
    else:
        hear(future)


def hear(future: asyncio.Future[Any]) -> None:
    """Take note of how it failed, so that nobody complains that it was not asked."""
    if not future.cancelled():
        future.exception()


MOST = 8  # threads of a watchman; what comes when all of them wait has to wait for one of them

Report = Callable[[BaseException | None], object]
Watch = tuple[Sequence[Fence], Report]


class FenceWaiter:
    """Waits for fences in threads of its own, which are started when there is something to be waited for."""

    def __init__(self) -> None:
        self._watches: queue.SimpleQueue[Watch | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = 0
        self._futures: dict[tuple[int, ...], asyncio.Future[None]] = {}

    async def passed(self, fences: Sequence[Fence], seconds: float | None = None) -> bool:
        """Wait for all of these, at most so long. Cancelling it leaves them alone.

        Returns:
            Whether they have passed.

        Raises:
            Exception: That of a fence which failed.
        """
        if all(fence.done() for fence in fences):
            return True
        passed = self._watched(fences)
        if not await done_within([passed], seconds):
            return False
        passed.result()
        return True

    def _watched(self, fences: Sequence[Fence]) -> asyncio.Future[None]:
        """A future for when they have passed, which all share that wait for the same ones."""
        loop, key = asyncio.get_running_loop(), _key(fences)
        passed = self._futures.get(key)
        if passed is None or passed.get_loop() is not loop:
            passed = self._futures[key] = loop.create_future()
            # It keeps the fences as long as their key is known, so that no other one can have the same.
            passed.add_done_callback(functools.partial(self._forget, fences))
            self.afterwards(fences, functools.partial(_report, loop, passed))
        return passed

    def _forget(self, fences: Sequence[Fence], passed: asyncio.Future[None]) -> None:
        hear(passed)
        key = _key(fences)
        if self._futures.get(key) is passed:
            del self._futures[key]

    async def outlasted(self, fences: Sequence[Fence], seconds: float | None) -> bool:
        """Wait for all of these, at most so long, also while being cancelled; with or without an event loop.

        Returns:
            Whether none of them is under way any more: they have passed, or one has failed.
        """
        if asyncio._get_running_loop() is None:
            waiting: Callable[[], bool] = functools.partial(self.wait, fences, seconds)
        else:
            task = asyncio.ensure_future(self.passed(fences, seconds))
            task.add_done_callback(hear)
            await outlast(task)
            waiting = task.result
        try:
            return waiting()
        except Exception:
            return True

    def wait(self, fences: Sequence[Fence], seconds: float | None) -> bool:
        """Wait for all of these in the calling thread, at most so long.

        Returns:
            Whether they have passed.

        Raises:
            Exception: That of a fence which failed.
        """
        pending = [fence for fence in fences if not fence.done()]
        if seconds is None or not pending:
            for fence in pending:
                fence.wait()
            return True
        reported: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.afterwards(pending, reported.put)
        try:
            error = reported.get(timeout=seconds)
        except queue.Empty:
            return False
        try:
            if error is not None:
                raise error
        finally:
            del error
        return True

    def afterwards(self, fences: Sequence[Fence], report: Report) -> None:
        """Call something in another thread when all of these have passed, with the exception of one that failed."""
        self._watches.put((fences, report))
        if self._idle.acquire(blocking=False) or self._threads == MOST:
            return
        # A daemon, since a device that hangs must not keep the interpreter from its exit.
        arguments = self._watches, self._idle
        try:
            threading.Thread(target=_watch, args=arguments, name="aioenvs fences", daemon=True).start()
        except RuntimeError:  # there are too many, or the interpreter is about to end
            if not self._threads:
                watch = self._watches.get()
                assert watch is not None
                _see_to(*watch)
        else:
            self._threads += 1

    def close(self) -> None:
        """End the threads, once what is being waited for is over."""
        for _ in range(self._threads):
            self._watches.put(None)
        self._watches, self._idle, self._threads = queue.SimpleQueue(), threading.Semaphore(0), 0


def _key(fences: Sequence[Fence]) -> tuple[int, ...]:
    return tuple(map(id, fences))


def _watch(watches: queue.SimpleQueue[Watch | None], idle: threading.Semaphore) -> None:
    while (watch := watches.get()) is not None:
        _see_to(*watch)
        del watch  # an idle thread keeps nothing
        idle.release()


def _see_to(fences: Sequence[Fence], report: Report) -> None:
    """Wait for all fences, and say so to whoever waits for that, with the first error if there is one."""
    error: BaseException | None = None
    for fence in fences:
        try:
            fence.wait()
        except BaseException as caught:  # whoever waits for it has it
            error = error or caught
    try:
        report(error)
    finally:
        del error  # which knows this frame, and so what the fences stand for


def _report(loop: asyncio.AbstractEventLoop, passed: asyncio.Future[None], error: BaseException | None) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
        loop.call_soon_threadsafe(_set, passed, error)


def _set(passed: asyncio.Future[None], error: BaseException | None) -> None:
    if passed.done():
        return
    if error is None:
        passed.set_result(None)
    else:
        passed.set_exception(error)
