"""The envs of all sessions, asked one by one; what sessions need of the engine, in one place. Free of torch."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

from aioenvs.engine.adapters.base import Call
from aioenvs.engine.config import BatchConfig
from aioenvs.engine.pools.pool import Timeouts
from aioenvs.errors import AioEnvsError
from aioenvs.integrations.vectors.core import AsyncVector, Autoreset
from aioenvs.registry import find_spec
from aioenvs.serving.hosted import Answer, make_hosted

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

    async def start(self) -> None:
        """Start them all."""
        await self._vector.start()
        try:
            (self.about,) = await self._vector.perform({0: Call("call", "about")}, "about")
        except BaseException:
            await self._vector.close()
            raise

    async def close(self) -> None:
        """Close them all, whatever they do."""
        await self._vector.close()

    async def ask(self, env: int, holder: int, command: str, data: Any = None, form: str | None = None) -> Answer:
        """Return the answer of an env; see `Hosted`. What it still does for somebody who left is waited for first.

        Raises:
            WorkerDiedError: If its worker is dead, or dies.
        """
        call = Call("call", "answer", (holder, command, data, form))
        answer: Answer = (await self._vector.perform({env: call}, command))[0]
        return answer

    async def renew(self, env: int) -> None:
        """Have a worker for an env, a new one in the place of one that is dead.

        Raises:
            AioEnvsError: If there is none to be had.
        """
        try:
            await self._vector.reset({}, [env])
        except AioEnvsError:
            raise
        except Exception as error:
            raise AioEnvsError(f"env {env} cannot be made anew: {error!r}") from error

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
        """What there is to say of each worker: `pid`, `envs`, `restarts`."""
        pool = self._vector.pool
        groups = pool.groups
        pids = pool.pids if len(pool.pids) == len(groups) else (None,) * len(groups)
        return [
            {"pid": pid, "envs": list(group), "restarts": restarts}
            for pid, group, restarts in zip(pids, groups, pool.replaced, strict=True)
        ]
