"""The asynchronous faces, and what they can be told to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aioenvs.batched.base import AsyncBatchedEnv
from aioenvs.batched.config import BatchConfig
from aioenvs.engine.pool import Timeouts

__all__ = ["AsyncParallelEnv", "AsyncSerialEnv"]


class AsyncParallelEnv(AsyncBatchedEnv):
    """Many envs in worker processes, stepped from an event loop.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env: a Gymnasium id, an `EnvSpec`, or a callable that returns a `gymnasium.Env`
            (lambdas and local functions too); or a list with one of these for each env.
        create_env_kwargs: Keyword arguments for the callable or for `gymnasium.make`: a dict, or one for each env.
        num_processes: How many processes host the envs, each an equal share; as many as there are cores, at most one
            per env, if None. Envs that wait rather than compute want one process each.
        backend: "process", or "serial" to run the envs right in the event loop's thread.
        device: Where results go; None leaves them on the CPU and the TensorDicts without a device.
        mp_start_method: "forkserver" (default: workers are forked from a small clean process), "spawn" (a fresh
            interpreter for each) or "fork" (a copy of this process, whose factories then need not be pickled).
        step_timeout: Seconds that a command may take, None for as long as it likes.
        start_timeout: Seconds that a worker may take to build its envs.
        close_timeout: Seconds that the envs may take to close, before their processes are killed.

    >>> import asyncio
    >>> async def main():
    ...     async with AsyncParallelEnv(4, "CartPole-v1", num_processes=2) as env:
    ...         td = await env.reset(seed=0)
    ...         td, following = await env.step_and_maybe_reset(env.rand_action(td))
    ...         return td["next", "reward"].shape, following["observation"].shape
    >>> asyncio.run(main())
    (torch.Size([4, 1]), torch.Size([4, 4]))
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Any,
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_processes: int | None = None,
        backend: str = "process",
        device: torch.device | str | int | None = None,
        mp_start_method: str | None = None,
        step_timeout: float | None = None,
        start_timeout: float | None = 60.0,
        close_timeout: float = 5.0,
    ) -> None:
        config = BatchConfig.of(
            num_workers,
            create_env_fn,
            create_env_kwargs=create_env_kwargs,
            num_processes=num_processes,
            backend=backend,
            mp_start_method=mp_start_method,
            timeouts=Timeouts(start=start_timeout, step=step_timeout, close=close_timeout),
        )
        super().__init__(config, device)


class AsyncSerialEnv(AsyncBatchedEnv):
    """The same envs without processes, one after the other in the event loop's thread.

    For envs that are quicker than a message to another process, for debugging, and as the reference for results.
    Its coroutines never suspend.

    Args:
        num_workers: How many envs.
        create_env_fn: As for `AsyncParallelEnv`.
        create_env_kwargs: As for `AsyncParallelEnv`.
        device: As for `AsyncParallelEnv`.

    >>> import asyncio
    >>> async def main():
    ...     async with AsyncSerialEnv(2, "CartPole-v1") as env:
    ...         return (await env.rollout(5, break_when_any_done=False)).batch_size
    >>> asyncio.run(main())
    torch.Size([2, 5])
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Any,
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        config = BatchConfig.of(
            num_workers,
            create_env_fn,
            create_env_kwargs=create_env_kwargs,
            num_processes=None,
            backend="serial",
            mp_start_method=None,
            timeouts=Timeouts(),
        )
        super().__init__(config, device)
