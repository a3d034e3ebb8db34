"""Commands that go on when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import torch

from aioenvs.engine.deadlines import hear
from aioenvs.engine.driving import driven
from aioenvs.errors import ClosedError

__all__ = ["Errand", "apart"]


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Neither gradients nor inference mode: what is kept from call to call is of use whatever a caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Errand:
    """One command at a time, which cancelling the one who waits for it does not end: who asks next gets its result."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None

    @property
    def pending(self) -> bool:
        """Whether there is one that nobody has got the result of."""
        return self._task is not None

    async def result(self, command: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result of the command that is under way, or else of this one.

        Args:
            command: Begins it.

        Raises:
            ClosedError: If it was cancelled by `cancel`.
            Exception: Whatever the command raised.
        """
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(_apart(command))
            self._task.add_done_callback(hear)  # whoever asks next is told; there may be nobody
        task = self._task
        try:
            found = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():  # but whoever waits for it was, perhaps just when it was done
                raise
            self._task = None
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            raise ClosedError("the collector was shut down meanwhile") from None
        except BaseException:
            self._task = None
            raise
        self._task = None
        return found

    async def cancel(self) -> None:
        """End the command."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _apart(command: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return await driven(command(), apart)
