"""One running worker, how its end is noticed, and how it is brought about."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from typing import Any

from aioenvs.engine.channel import Channel
from aioenvs.engine.process import Exit, WorkerProcess
from aioenvs.engine.protocol import Opcode

__all__ = ["Worker", "end_all"]

LAST_WORDS = 0.05  # seconds between the end of a worker's pipe and the report of its exit, or the other way round
KILL_PATIENCE = 2.0  # seconds until a killed process has to be gone


class Worker:
    """One process in the pool, with its pipe and the task that waits for its end."""

    def __init__(self, index: int, envs: tuple[int, ...], process: WorkerProcess, channel: Channel) -> None:
        self.index = index
        self.envs = envs
        self.process = process
        self.channel = channel
        self.last_command = Opcode.START
        self.closing = False
        self.end: asyncio.Task[None] | None = None

    async def ended(self) -> tuple[Exit, Exception | None]:
        """Wait for the process or its pipe to end, and give the other a moment to say so too."""
        exited, lost = self.process.exited, self.channel.lost
        signs: set[asyncio.Future[Any]] = {exited, lost}
        await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(signs, timeout=LAST_WORDS)
        how = exited.result() if exited.done() else Exit(None, "its pipe was closed, but it did not exit")
        return how, lost.result() if lost.done() else None


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
    with contextlib.suppress(Exception):
        worker.channel.request(Opcode.CLOSE, ())


def _terminate(worker: Worker) -> None:
    worker.process.signal(signal.SIGTERM)


def _kill(worker: Worker) -> None:
    worker.process.signal(signal.SIGKILL)
