"""The same batches behind plain calls: each runs a coroutine, and one command at a time may be under way."""

from __future__ import annotations

import warnings
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from aioenvs.batched.config import BatchConfig
from aioenvs.engine.inline import InlinePool
from aioenvs.engine.portal import Immediate, LoopPortal, Portal
from aioenvs.errors import WorkerTimeoutError, shown
from aioenvs.integrations.vectors.core import AsyncVector, Autoreset, Pending

__all__ = ["Vector", "one_each"]

T = TypeVar("T")


class Vector:
    """Many envs behind plain calls, started when made.

    Args:
        config: The envs, and what hosts them.
        autoreset: What becomes of those whose episode is over.
        name: What it is called in messages.
        late: What a `WorkerTimeoutError` is raised as.
        **options: As for `AsyncVector`.

    Attributes:
        envs: What runs.
        pending: The command that is under way.
    """

    def __init__(
        self,
        config: BatchConfig,
        autoreset: Autoreset,
        name: str,
        late: type[WorkerTimeoutError] = WorkerTimeoutError,
        **options: Any,
    ) -> None:
        self.name = name
        self._late = late
        self.pending: Pending[Any] | None = None
        self._ending = False
        self.envs = AsyncVector(config, autoreset, yields=False, **options)
        self._portal: Portal | None = Immediate() if config.backend == "serial" else LoopPortal()
        try:
            self.run(self.envs.start())
        except BaseException:
            self._close_portal()
            raise

    @property
    def closed(self) -> bool:
        """Whether there are no envs any more."""
        return self._portal is None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; Ctrl-C cancels it."""
        assert self._portal is not None
        try:
            return self._portal.run(coroutine)
        except WorkerTimeoutError as error:
            raise self._as_late(error) from error.__cause__

    def _as_late(self, error: WorkerTimeoutError) -> WorkerTimeoutError:
        if isinstance(error, self._late):
            return error
        late = self._late(str(error), env_index=error.env_index, pid=error.pid)
        for note in getattr(error, "__notes__", ()):
            late.add_note(note)
        return late

    @property
    def hosted(self) -> list[Any] | None:
        """The env objects, where this thread runs them itself, one after the other; else None."""
        pool = self.envs.pool
        return pool.envs if isinstance(pool, InlinePool) else None

    def begin(self, pending: Pending[Any]) -> None:
        """Set a command off, for `finish` to wait for."""
        try:
            self.run(self.envs.set_off(pending))
        except BaseException:
            self.run(self.envs.abandon(pending))
            raise
        self.pending = pending

    def finish(self, timeout: float | None = None) -> Any:
        """What came of the command that is under way, which is over then, also if it is late."""
        pending, self.pending = self.pending, None
        assert pending is not None
        return self.run(self.envs.finish(pending, timeout))

    def abandon(self) -> None:
        """Give up the command that is under way, if there is one; what comes of it is dropped."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.run(self.envs.abandon(pending))

    def close(self, timeout: float | None = None) -> None:
        """Close all envs and end the workers; see `AsyncVector.close`.

        Raises:
            ConcurrencyError: If another thread is in the middle of a call; nothing is closed then.
        """
        if self._portal is None or self._portal.foreign:
            return  # a fork leaves what is its parent's to close
        try:
            self.run(self._end(timeout))
        finally:
            if self._ending:
                self._close_portal()

    async def _end(self, timeout: float | None) -> None:
        self.envs.pool.begin_close()
        self._ending = True
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                await self.envs.abandon(pending)
        finally:
            await self.envs.close(timeout)

    def _close_portal(self) -> None:
        portal, self._portal = self._portal, None
        if portal is not None:
            portal.close()

    def __del__(self) -> None:
        if self.__dict__.get("_portal") is not None:
            try:
                warnings.warn(f"{self.name} was never closed", ResourceWarning, source=self, stacklevel=2)
            finally:
                if self.pending is not None:
                    self.pending.drop()
                self.envs.pool.discard()
                self._close_portal()


def one_each(env_fns: Any, count: int | None, name: str) -> list[Any]:
    """What makes each env.

    Args:
        env_fns: A callable for each; or one, a Gymnasium id or an `EnvSpec` for all.
        count: How many; None for as many as there are callables.
        name: What the count is called in messages.

    Raises:
        TypeError: If it is not known how many there are.
        ValueError: If that is no number, or another one than there are callables.
    """
    if isinstance(env_fns, str) or callable(env_fns) or not isinstance(env_fns, Iterable):
        if count is None:
            raise TypeError(f"expected {name}, or a list with a callable for each env, found {shown(env_fns)} alone")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {shown(count)}")
        return [env_fns] * count
    factories = list(env_fns)
    if not factories:
        raise ValueError("expected a callable for each env, found none")
    if count not in (None, len(factories)):
        raise ValueError(f"{name} is {count}, but there are {len(factories)} callables")
    return factories
