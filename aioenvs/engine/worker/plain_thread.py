"""Where envs without coroutines live that share a worker with others: in a thread that runs no event loop.

It is the thread that built them and will close them, the main one in a worker process, since simulators, signal
handlers and graphics contexts are bound to a thread. The loop of the coroutines has another thread, and goes on while a
plain env computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aioenvs.engine.portal import run_to_end
from aioenvs.engine.waiting import outlast

__all__ = ["Place", "PlainThread", "done_at"]

T = TypeVar("T")

Place = Callable[[Callable[[], None]], object]  # has a job done outside of the loop, one after the other


async def done_at(place: Place | None, work: Callable[[], T]) -> T:
    """Have something done outside of the loop. Cancelling it waits for that to end, and is raised then.

    Args:
        place: Where; None for right here.
        work: What.

    Raises:
        BaseException: Whatever the work raises.
    """
    if place is None:
        return work()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    thread = threading.get_ident()
    results: list[T] = []
    errors: list[BaseException] = []

    def job() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for it
                call = loop.call_soon if threading.get_ident() == thread else loop.call_soon_threadsafe
                call(_settle, ended)

    place(job)
    await outlast(ended)
    if errors:
        raise errors.pop()
    return results.pop()


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


class PlainThread:
    """The jobs of a thread for the event loop of another one."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def order(self, job: Callable[[], None]) -> None:
        """Have it do something, once it has done what was ordered before."""
        self._jobs.put(job)

    def work(self) -> None:
        """Do what is ordered, in the calling thread, until it is dismissed."""
        while (job := self._jobs.get()) is not None:
            job()
            del job  # an idle thread keeps nothing

    def dismiss(self) -> None:
        """Let it end, once it has done what was ordered before."""
        self._jobs.put(None)

    def run_beside(self, main: Coroutine[Any, Any, T], name: str, *, whatever: bool = False) -> T:
        """Run a coroutine on a new event loop in a thread of its own, and work in the calling one until it has ended.

        Args:
            main: The coroutine.
            name: Of the loop's thread.
            whatever: See `run_to_end`.

        Raises:
            BaseException: What the coroutine raises, or what a signal handler raises here, which cancels it.
        """
        side = _LoopSide(main)
        # The context of this thread goes along: numpy's error state, and whatever the constructors of envs have set.
        target = contextvars.copy_context().run
        thread = threading.Thread(target=target, args=(side.live, self.dismiss, whatever), name=name, daemon=True)
        try:
            thread.start()
        except BaseException:
            main.close()
            raise
        raised: BaseException | None = None
        while True:
            try:
                self.work()
                break
            except BaseException as error:
                raised = raised or error
                side.cancel()
        thread.join()
        if raised is not None:
            raise raised
        result: T = side.result()
        return result


class _LoopSide:
    """A coroutine at work in the thread of its loop."""

    def __init__(self, main: Coroutine[Any, Any, Any]) -> None:
        self._main = main
        self._results: list[Any] = []
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def live(self, ended: Callable[[], None], whatever: bool) -> None:
        try:
            self._results.append(run_to_end(self._watched(), whatever=whatever))
        except BaseException as error:
            self._error = error
        finally:
            self._main.close()  # where it never had a turn
            ended()

    async def _watched(self) -> Any:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        return await self._main

    def cancel(self) -> None:
        """Cancel it, from any thread."""
        self._cancelled = True
        # Whoever finds no task here comes before that looks whether it was cancelled.
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._results.pop()
