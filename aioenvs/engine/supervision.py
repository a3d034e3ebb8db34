"""One running worker, how its end is noticed, and how it is brought about."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aioenvs.engine.channel import Correspondence
from aioenvs.engine.process import Exit
from aioenvs.engine.protocol import Opcode

__all__ = ["Process", "Worker", "end_all"]

LAST_WORDS = 0.05  # seconds between the end of a worker's pipe and the report of its exit, or the other way round
KILL_PATIENCE = 2.0  # seconds until a killed process has to be gone


class Process(Protocol):
    """What runs a worker.

    Attributes:
        pid: Where it runs; None if it does not yet.
        exited: Says how it ended.
        abandoned: Whether it was given up.
    """

    pid: int | None
    exited: asyncio.Future[Exit]
    abandoned: bool

    def signal(self, number: int) -> None:
        """End it, by a signal where there are any."""

    def kill(self) -> None:
        """End it where it can no longer be said to have."""

    def abandon(self) -> None:
        """Give back what is held for it, without waiting."""


class Worker:
    """One process in the pool, with its pipe.

    Its end shows in two places, and is acted upon once: when both have said so, or a moment after the first. This is
    done by callbacks rather than a task, which somebody who cancels all tasks would take with him.

    Args:
        envs: The envs that it hosts.
        process: The process.
        channel: Its pipe.
        on_end: Called once with the worker, how the process ended, and what ended the pipe.
    """

    def __init__(
        self,
        envs: tuple[int, ...],
        process: Process,
        channel: Correspondence,
        on_end: Callable[[Worker, Exit, Exception | None], None],
    ) -> None:
        self.envs = envs
        self.process = process
        self.channel = channel
        self.last_command = Opcode.START
        self.closing = False
        self.killed_for = ""  # why it was killed, if it was, in words
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._began = time.monotonic()
        self._lived: float | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        process.exited.add_done_callback(self._sign)
        channel.lost.add_done_callback(self._sign)

    @property
    def is_ending(self) -> bool:
        """Whether one sign of its end was seen; the other, or the decision without it, comes within a moment."""
        return not self.ended.done() and (self.process.exited.done() or self.channel.lost.done())

    @property
    def lived(self) -> float:
        """Seconds from its start to its end, or until now."""
        return time.monotonic() - self._began if self._lived is None else self._lived

    def _sign(self, _: asyncio.Future[Any]) -> None:
        if self.process.exited.done() and self.channel.lost.done():
            self._end()
        elif self._timer is None:
            self._timer = self._loop.call_later(LAST_WORDS, self._end)

    def _end(self) -> None:
        if self.ended.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._lived = self.lived
        exited, lost = self.process.exited, self.channel.lost
        how = exited.result() if exited.done() else Exit(None, "its pipe was closed, but it did not exit")
        self._on_end(self, how, lost.result() if lost.done() else None)
        self.ended.set_result(None)


async def end_all(workers: Sequence[Worker], budget: float, *, polite: bool) -> None:
    """End these workers: ask them to close their envs, then terminate, then kill.

    Args:
        workers: All of them, whatever state they are in.
        budget: Seconds for asking and terminating together.
        polite: Whether to ask first, or to kill at once.
    """
    ladder: list[tuple[float, Callable[[Worker], None]]] = [(KILL_PATIENCE, _kill)]
    if polite:
        ladder = [(0.8 * budget, _ask_to_close), (0.2 * budget, _terminate), *ladder]
    for worker in workers:
        worker.closing = True
    for patience, act in ladder:
        alive = [worker for worker in workers if not worker.process.exited.done()]
        if not alive:
            return
        for worker in alive:
            act(worker)
        await asyncio.wait([worker.process.exited for worker in alive], timeout=patience)


def _ask_to_close(worker: Worker) -> None:
    if not worker.channel.connected:
        _kill(worker)
        return
    with contextlib.suppress(Exception):
        worker.channel.request(Opcode.CLOSE, ())


def _terminate(worker: Worker) -> None:
    worker.process.signal(signal.SIGTERM)


def _kill(worker: Worker) -> None:
    worker.process.signal(signal.SIGKILL)
