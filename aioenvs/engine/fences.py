"""Waiting for what is no worker's doing, such as a copy to another device, while the event loop runs others."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Sequence

from aioenvs.engine.turns import Fence

__all__ = ["Watchman"]

Watch = tuple[Sequence[Fence], asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Watchman:
    """Waits for fences in a thread of its own, which is started when there is one to be waited for."""

    def __init__(self) -> None:
        self._watches: queue.SimpleQueue[Watch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def passed(self, fences: Sequence[Fence]) -> None:
        """Wait for all of these. Cancelling it leaves them alone.

        Raises:
            Exception: That of a fence which failed.
        """
        pending = [fence for fence in fences if not fence.done()]
        if not pending:
            return
        if self._thread is None:
            # A daemon, since a device that hangs must not keep the interpreter from its exit.
            self._thread = threading.Thread(target=_watch, args=(self._watches,), name="aioenvs fences", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        reported = loop.create_future()
        self._watches.put((pending, loop, reported))
        await reported

    def close(self) -> None:
        """End the thread, once what is being waited for is over."""
        if self._thread is not None:
            self._watches.put(None)
            self._thread = None


def _watch(watches: queue.SimpleQueue[Watch | None]) -> None:
    while (watch := watches.get()) is not None:
        _see_to(watch)
        del watch  # an idle thread keeps nothing


def _see_to(watch: Watch) -> None:
    """Wait for the fences of a watch, and say so to whoever waits for that."""
    fences, loop, reported = watch
    error: BaseException | None = None
    try:
        for fence in fences:
            fence.wait()
    except BaseException as caught:  # whoever waits for it has it
        error = caught
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
        loop.call_soon_threadsafe(_report, reported, error)


def _report(reported: asyncio.Future[None], error: BaseException | None) -> None:
    if reported.done():
        return
    if error is None:
        reported.set_result(None)
    else:
        reported.set_exception(error)
