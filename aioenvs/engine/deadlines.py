"""Waiting for no longer than one may, and what becomes of what was waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from numbers import Real
from typing import Any, NamedTuple

from aioenvs.errors import shown

__all__ = ["TURNS", "Deadline", "check_seconds", "done_within", "drop", "hear", "outlast"]

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
