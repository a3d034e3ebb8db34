"""The envs of all sessions, asked one by one; what sessions need of the engine, in one place. Free of torch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from typing import Any

from aioenvs.engine.adapters.base import Call
from aioenvs.engine.config import BatchConfig, Timeouts
from aioenvs.errors import AioEnvsError, WorkerDiedError
from aioenvs.integrations.vectors.core import AsyncVector, Autoreset
from aioenvs.registry import find_spec
from aioenvs.serving.hosting.hosted import Answer, make_hosted

__all__ = ["Batch"]


class Batch:
    """Envs in worker processes, behind `Hosted`.

    Args:
        make_env: What makes one: a callable, a Gymnasium id or an `EnvSpec`.
        num_envs: How many.
        kwargs: Keyword arguments of what makes them.
        start_timeout: Seconds until they are there.
        close_timeout: Seconds that closing them may take.
        **options: `num_processes`, `backend`, `mp_start_method`, `max_concurrency`; see `aioenvs.AsyncParallelEnv`.
    """

    def __init__(
        self,
        make_env: Any,
        num_envs: int,
        *,
        kwargs: Any = None,
        start_timeout: float | None = 60.0,
        close_timeout: float = 5.0,
        **options: Any,
    ) -> None:
        factory = find_spec(make_env) if isinstance(make_env, str) else make_env
        each = kwargs if isinstance(kwargs, list | tuple) else [kwargs or {}] * num_envs
        config = BatchConfig.of(
            num_envs,
            [functools.partial(make_hosted, factory, own) for own in each],
            create_env_kwargs=None,
            timeouts=Timeouts(start=start_timeout, close=close_timeout),
            **options,
        )
        self._vector = AsyncVector(config, Autoreset.DISABLED)
        self.about: dict[str, Any] = {}
        self._turns: list[_Turns] | None = None  # of the workers, where these do one thing after the other anyway

    async def start(self) -> None:
        """Start them all."""
        await self._vector.start()
        try:
            (self.about,) = await self._vector.perform({0: Call("call", "about")}, "about")
        except BaseException:
            await self._vector.close()
            raise
        if not self.about["concurrent"]:
            self._turns = [_Turns(self._vector) for _ in self._vector.pool.groups]

    async def close(self) -> None:
        """Close them all, whatever they do."""
        await self._vector.close()

    async def ask(self, env: int, holder: int, command: str, data: Any = None, form: str | None = None) -> Answer:
        """Return the answer of an env; see `Hosted`. What it still does for somebody who left is waited for first.

        Raises:
            WorkerDiedError: If its worker is dead, or dies.
        """
        call = Call("call", "answer", (holder, command, data, form))
        if self._turns is None:
            answers: list[Answer] = await self._vector.perform({env: call}, command)
            return answers[0]
        return await self._turns[self._vector.pool.host_of(env)].ask(env, call)

    async def renew(self, env: int) -> None:
        """Have a worker for an env, a new one in the place of one that is dead.

        Raises:
            AioEnvsError: If there is none to be had.
        """
        try:
            async with self._renewing(env):
                await self._vector.reset({}, [env])
        except AioEnvsError:
            raise
        except Exception as error:
            raise AioEnvsError(f"env {env} cannot be made anew: {error!r}") from error

    def _renewing(self, env: int) -> contextlib.AbstractAsyncContextManager[object]:
        return contextlib.nullcontext() if self._turns is None else self._turns[self._vector.pool.host_of(env)].lock

    def kill(self, env: int) -> None:
        """End the worker of an env at once, where that is a process."""
        pool = self._vector.pool
        pids = pool.pids
        if (index := pool.host_of(env)) < len(pids) and pids[index] != os.getpid():
            os.kill(pids[index], signal.SIGKILL)

    def pid(self, env: int) -> int | None:
        """The process of an env; None if that is not known."""
        pids, index = self._vector.pool.pids, self._vector.pool.host_of(env)
        return pids[index] if index < len(pids) else None

    def workers(self) -> list[dict[str, Any]]:
        """The state of each worker: `pid`, `envs`, `restarts`."""
        pool = self._vector.pool
        groups = pool.groups
        pids = pool.pids if len(pool.pids) == len(groups) else (None,) * len(groups)
        return [
            {"pid": pid, "envs": list(group), "restarts": restarts}
            for pid, group, restarts in zip(pids, groups, pool.replaced, strict=True)
        ]


class _Turns:
    """The requests to the envs of one worker, all that have come meanwhile in one go.

    The worker answers one go at a time, so that a caller who leaves holds none of the others up: the answer to it is
    dropped, and whatever its env is asked next is in a later one.

    Args:
        vector: All envs.

    Attributes:
        lock: Held while one is under way.
    """

    def __init__(self, vector: AsyncVector) -> None:
        self._vector = vector
        self.lock = asyncio.Lock()
        self._asked: list[tuple[int, Call, asyncio.Future[Answer]]] = []
        self._working: asyncio.Task[None] | None = None

    async def ask(self, env: int, call: Call) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.append((env, call, future))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        try:
            while self._asked:
                async with self.lock:
                    now: dict[int, tuple[Call, asyncio.Future[Answer]]] = {}
                    later = []
                    for env, call, future in self._asked:
                        if future.done():
                            continue  # nobody waits for it any more
                        if env in now:
                            later.append((env, call, future))
                        else:
                            now[env] = call, future
                    self._asked = later
                    if now:
                        await self._answer(now)
        finally:
            self._working = None

    async def _answer(self, now: dict[int, tuple[Call, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._vector.perform({env: call for env, (call, _) in now.items()}, "answer")
        except BaseException as error:
            for env, (_, future) in now.items():
                if not future.done():
                    future.set_exception(_alike(error, env))
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), answer in zip(now.values(), answers, strict=True):
            if not future.done():
                future.set_result(answer)


def _alike(error: BaseException, env: int) -> BaseException:
    """Return an error for one of those who wait; one object would gather the tracebacks of all."""
    if isinstance(error, WorkerDiedError):
        return WorkerDiedError(str(error), env_index=(env,), pid=error.pid)
    if isinstance(error, AioEnvsError):
        return error.again()
    return AioEnvsError(f"env {env} could not be asked: {error!r}")
