"""The faces behind one interface, so that one test body covers coroutines and plain calls.

    async def test_reset(face: Face) -> None:
        async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
            td = await face.call(env.reset)

`face.call` awaits a coroutine method, and runs a plain one in a thread, where no event loop runs; so a test may have
two requests in flight with either kind. `face.open` starts the envs, and closes them if the test did not.

A plain class runs the coroutine of the same name of an async one (`test_every_method`). So `FACES` and `PROCESS_FACES`
have each kind of host once, and both kinds of classes, and `ASYNC_FACES` each kind with coroutines; `EVERY_FACE` has
each kind of host with each class.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv

__all__ = [
    "ASYNC_FACES",
    "ASYNC_PROCESS_FACES",
    "EVERY_FACE",
    "FACES",
    "PROCESS_FACES",
    "THREAD_FACES",
    "Face",
    "acting",
    "call",
    "in_thread",
    "masked",
    "num_hosts",
    "observed",
]


async def call(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of either kind of face and await its result."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    return await in_thread(method, *args, **kwargs)


async def in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """As `asyncio.to_thread`, which replaces some exceptions on their way, and waits for threads that hang."""
    loop = asyncio.get_running_loop()
    outcome = loop.create_future()

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # of a loop that is closed by now
            loop.call_soon_threadsafe(lambda: outcome.done() or outcome.set_result((result, error)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    result, error = await outcome
    thread.join()
    if error is not None:
        raise error
    return result


def num_hosts(most: int | None, num_workers: int) -> int:
    """Into how many processes or threads a face puts so many envs: so few that some share one, or one for each."""
    return num_workers if most is None else max(1, min(most, num_workers - 1))


def acting(actions: Sequence[int], only: Collection[int] | None = None) -> TensorDict:
    """What `step` needs: an action for each env, and a `_step` mask if only some envs are meant."""
    td = TensorDict({"action": torch.tensor(actions)}, batch_size=[len(actions)])
    return td if only is None else td.update(masked("_step", len(actions), only))


def masked(name: str, count: int, only: Collection[int]) -> TensorDict:
    """A mask called `name` that selects some of so many envs."""
    return TensorDict({name: torch.tensor([env in only for env in range(count)])}, batch_size=[count])


def observed(td: TensorDictBase) -> list[list[int]]:
    """What the envs observed, in `next` if a step was taken: `[id, episode, step, sum of actions]` for each."""
    return td.get("next", td)["observation"].tolist()


@dataclass(frozen=True)
class Face:
    """A class of envs, and how the tests want it.

    Attributes:
        name: "async-..." for the async ones.
        cls: The class.
        processes: In how many processes: 0 for none, None for one per env; with two, one of them has several envs.
        threads: In how many threads, likewise.
    """

    name: str
    cls: Any
    processes: int | None
    threads: int | None = 0

    @property
    def is_async(self) -> bool:
        return self.name.startswith("async")

    @property
    def in_processes(self) -> bool:
        return self.processes != 0

    async def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the envs, whether it is a coroutine function or not."""
        if self.is_async and not inspect.iscoroutinefunction(method):
            return method(*args, **kwargs)
        return await call(method, *args, **kwargs)

    def make(self, num_workers: int, create_env_fn: Any, **options: Any) -> Any:
        """Envs that are not started. What only means something to processes is left out for the others."""
        hosts = self.processes if self.in_processes else self.threads
        if not self.in_processes:
            options.pop("mp_start_method", None)
        if hosts == 0:
            for name in TIMEOUTS:
                options.pop(name, None)
        else:
            options.setdefault("num_processes", num_hosts(hosts, num_workers))
        if hosts != 0 and not self.in_processes:
            options["backend"] = "thread"
        return self.cls(num_workers, create_env_fn, **options)

    @asynccontextmanager
    async def open(self, num_workers: int, create_env_fn: Any, **options: Any) -> AsyncIterator[Any]:
        """Envs that are started, and closed at the end."""
        env = self.make(num_workers, create_env_fn, **options)
        await call(env.start)
        try:
            yield env
        finally:
            await call(env.close, raise_if_closed=False)


TIMEOUTS = ("step_timeout", "start_timeout", "close_timeout")
IN_PROCESSES = (
    Face("async-packed", AsyncParallelEnv, 2),
    Face("async-one-each", AsyncParallelEnv, None),
    Face("packed", ParallelEnv, 2),
    Face("one-each", ParallelEnv, None),
)
THREAD_FACES = (Face("async-thread", AsyncParallelEnv, 0, threads=2), Face("thread", ParallelEnv, 0, threads=None))
EVERY_FACE = (Face("async-serial", AsyncSerialEnv, 0), Face("serial", SerialEnv, 0), *IN_PROCESSES, *THREAD_FACES)
ASYNC_PROCESS_FACES = IN_PROCESSES[:2]
PROCESS_FACES = (IN_PROCESSES[0], IN_PROCESSES[3])
ASYNC_FACES = (EVERY_FACE[0], IN_PROCESSES[0], THREAD_FACES[0])
FACES = (IN_PROCESSES[3], EVERY_FACE[1], IN_PROCESSES[0], THREAD_FACES[0])
