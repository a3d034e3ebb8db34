"""The asynchronous faces, and what they can be told to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioenvs.engine.config import BatchConfig, Timeouts
from aioenvs.faces.lifecycle import AsyncBatchedEnv
from aioenvs.hints import hints_at_keywords, signed_as
from aioenvs.tensors.device import Device

__all__ = ["AsyncParallelEnv", "AsyncSerialEnv"]


HOSTING = (
    *("num_processes", "backend", "mp_start_method", "ray_options", "on_worker_death", "max_restarts"),
    *("step_timeout", "start_timeout", "close_timeout"),
)


def is_single(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether these arguments ask for one env."""
    count = args[0] if args else options.get("num_workers")
    return bool(count == 1)


def without_hosts(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that mean something to envs without workers."""
    return {name: value for name, value in options.items() if name not in HOSTING}


class AsyncParallelEnv(AsyncBatchedEnv):
    """Many envs in worker processes, or threads, stepped from an event loop.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env: a Gymnasium id, an `EnvSpec`, or a callable that returns a `gymnasium.Env`,
            an `EnvBase` (of TorchRL's, too), a `pettingzoo.ParallelEnv`, which becomes what `PettingZooWrapper` makes
            of it by default, or a coroutine env (lambdas and local functions too); or a list with one of these for each
            env. A coroutine env has Gymnasium's spaces and signatures, and a `reset` or `step` that is an `async def`;
            those of one process step at the same time, on an event loop.
        create_env_kwargs: Keyword arguments for the callable or for `gymnasium.make`: a dict, or one for each env.
        num_processes: How many processes host the envs, each an equal share; as many as there are cores, at most one
            per env, if None. Envs that wait rather than compute want one process each. With threads: how many of
            those, one per env if None.
        backend: "process"; "thread" to run the envs in threads of this process; or "serial" to run them right in the
            event loop's thread. Threads start at once, need no pickling, and serve envs that release the GIL: those
            that sleep, wait for a network, or leave the work to a native simulator. The factories of all envs are
            called as they are, each in the thread of its env. What threads cannot do: the random generators that all
            of a process share (`random`, `numpy.random`, torch's) stay shared, so a seed reaches only what an env
            seeds itself; `use_buffers=False`, `shared_memory`, `memmap` and `num_sub_threads` have no effect; and a
            thread cannot be killed: where an env hangs, `close`, or a start that fails, returns after `close_timeout`,
            or as soon as `close` is cancelled, says so in a warning to the log, and leaves the thread behind, which
            does not keep the interpreter from its exit. Or "ray" to run them in actors of a Ray cluster (the extra
            `ray`), one for each of `num_processes`: that to which this process is connected (`ray.init`), or which
            RAY_ADDRESS names, or else one that is started on this machine, and ended with the envs. Each machine needs
            aioenvs and what the factories import. Everything is as with processes, but what is sent goes over the
            network: see `ray_options`.
        device: Where results go: a device by its name or number, or a `DeviceBackend` (`aioenvs.tensors.device`); None
            leaves them on the envs' own. They cross as one copy, and actions may come from there. Results of torch
            envs that are on a device themselves are brought to the host in between, except in an `AsyncSerialEnv`.
        share_individual_td: True to get lazy stacks of one TensorDict per env; False to be told if they cannot be
            stacked into one tensor for each key; None for lazy stacks only where they cannot.
        shared_memory: False to keep the buffers in a file without a name rather than in memory.
        memmap: The same, by the other name.
        use_buffers: False to send the tensors of `EnvBase` envs as messages; they travel through shared buffers
            otherwise, except those whose size varies.
        consolidate: Accepted and without effect: all buffers are one block, and results one copy of it.
        num_threads: Threads of torch in this process while the envs are open; None leaves them alone.
        num_sub_threads: Threads of torch in each worker.
        serial_for_single: Make an `AsyncSerialEnv` instead if there is one env only.
        mp_start_method: "forkserver" (default: workers are forked from a small clean process), "spawn" (a fresh
            interpreter for each) or "fork" (a copy of this process, whose factories then need not be pickled).
        ray_options: What Ray is asked for, for each actor of `backend="ray"`, as in `Actor.options`: `num_cpus` (if it
            is not given, 1, or 0 in a cluster that is started on this machine), `num_gpus`, `resources`, `memory`,
            `runtime_env`, `scheduling_strategy` ("SPREAD" if it is not given), or a `placement_group`. What the cluster
            does not have within `start_timeout` is an error.
        allow_step_when_done: Only False is possible; an env needs a reset after its episode's end.
        on_worker_death: "raise" (default: a `WorkerDiedError`; the envs of the dead worker raise until they are reset,
            which builds them anew), or "restart" (they are built anew and reset at once; the step that was lost comes
            back with `truncated` set, the last known observation and no reward, and a step of an env that was lost
            with others of its process does so, too). With "restart", a worker that exceeds `step_timeout` is killed.
        max_restarts: How often each worker may be restarted with "restart", before its death raises after all. One that
            dies soon after its start again and again is restarted later and later.
        step_timeout: Seconds that a command may take, None for as long as it likes. What it waits for may also be a
            copy to or from a device; nobody is asked anything then. With restarts it costs all envs
            of a process their episode if one of them takes longer, and so does the `timeout` of any command.
        start_timeout: Seconds that a worker may take to build its envs.
        close_timeout: Seconds that the envs may take to close, before their processes are killed; and then those that
            copies to or from a device may take, before they are left to themselves, and the memory to them.
        max_concurrency: How many envs of a process or thread may be inside `reset` or `step` at once, if there are
            coroutine envs among them; None for all. Other envs are there one after the other in any case. Waiting for
            its turn counts as a part of an env's time.
        shutdown_timeout: The same, by TorchRL's name, as `close_timeout`; it prevails.
        pin_memory: Whether the buffers are pinned, so that copies to a CUDA device are quick and nobody waits for them;
            None for when results go to one. Where it cannot be done, a `PerformanceWarning` says so, and copies go
            without. True also without a `device`, for results that are lent (`copy=False`) and copied by the caller.
        non_blocking: Whether results that go to a CUDA device may be returned while they are on their way: what the
            current stream does with them comes after that in any case. False waits until they are there, for callers
            with streams of their own; None is True.
        daemon: Accepted and without effect: workers end with this process in any case.

    >>> import asyncio
    >>> async def main():
    ...     async with AsyncParallelEnv(4, "CartPole-v1", num_processes=2) as env:
    ...         td = await env.reset(seed=0)
    ...         td, following = await env.step_and_maybe_reset(env.rand_action(td))
    ...         return td["next", "reward"].shape, following["observation"].shape
    >>> asyncio.run(main())
    (torch.Size([4, 1]), torch.Size([4, 4]))
    """

    @hints_at_keywords
    def __init__(
        self,
        num_workers: int,
        create_env_fn: Any,
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_processes: int | None = None,
        backend: str = "process",
        device: Device = None,
        share_individual_td: bool | None = None,
        shared_memory: bool | None = None,
        memmap: bool = False,
        use_buffers: bool | None = None,
        consolidate: bool = True,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        serial_for_single: bool = False,
        mp_start_method: str | None = None,
        ray_options: Mapping[str, Any] | None = None,
        allow_step_when_done: bool = False,
        on_worker_death: str = "raise",
        max_restarts: int = 10,
        step_timeout: float | None = None,
        start_timeout: float | None = 60.0,
        close_timeout: float = 5.0,
        max_concurrency: int | None = None,
        shutdown_timeout: float | None = None,
        non_blocking: bool | None = None,
        pin_memory: bool | None = None,
        daemon: bool = False,
    ) -> None:
        if shutdown_timeout is not None:
            close_timeout = shutdown_timeout
        config = BatchConfig.of(
            num_workers,
            create_env_fn,
            create_env_kwargs=create_env_kwargs,
            num_processes=num_processes,
            backend=backend,
            mp_start_method=mp_start_method,
            ray_options=ray_options,
            timeouts=Timeouts(start=start_timeout, step=step_timeout, close=close_timeout),
            share_individual_td=share_individual_td,
            shared_memory=shared_memory,
            memmap=memmap,
            use_buffers=use_buffers,
            num_threads=num_threads,
            num_sub_threads=num_sub_threads,
            allow_step_when_done=allow_step_when_done,
            on_worker_death=on_worker_death,
            max_restarts=max_restarts,
            max_concurrency=max_concurrency,
            pin_memory=pin_memory,
            non_blocking=non_blocking,
        )
        super().__init__(config, device)

    @signed_as(__init__)
    def __new__(cls, *args: Any, serial_for_single: bool = False, **options: Any) -> Any:
        """Make one, or an `AsyncSerialEnv` with the options that it has a use for."""
        if serial_for_single and is_single(args, options):
            return AsyncSerialEnv(*args, **without_hosts(options))
        return super().__new__(cls)


class AsyncSerialEnv(AsyncBatchedEnv):
    """Many envs without processes, one after the other in the event loop's thread; coroutine envs at the same time.

    For envs that are quicker than a message to another process, for debugging, for gradients through the envs, and as
    the reference for results. Its coroutines never wait for anything but the envs, and a device, and nothing can
    interrupt the former: a `timeout` has an effect on coroutine envs, and on waiting for a device.

    Args:
        num_workers: How many envs.
        create_env_fn: As for `AsyncParallelEnv`.
        create_env_kwargs: As for `AsyncParallelEnv`.
        device: As for `AsyncParallelEnv`.
        share_individual_td: As for `AsyncParallelEnv`.
        shared_memory: Accepted and without effect, as `memmap`, `consolidate`, `num_sub_threads`, `serial_for_single`,
            `shutdown_timeout` and `daemon` are, so that the classes take the same options as TorchRL's:
            there is no other process.
        memmap: See `shared_memory`.
        use_buffers: Accepted; True warns where sizes vary, as for `AsyncParallelEnv`.
        consolidate: See `shared_memory`.
        num_threads: As for `AsyncParallelEnv`.
        pin_memory: As for `AsyncParallelEnv`.
        non_blocking: As for `AsyncParallelEnv`.
        num_sub_threads: See `shared_memory`.
        serial_for_single: See `shared_memory`.
        allow_step_when_done: As for `AsyncParallelEnv`.
        max_concurrency: How many coroutine envs may be inside `reset` or `step` at once; None for all.
        shutdown_timeout: See `shared_memory`.
        daemon: See `shared_memory`.

    >>> import asyncio
    >>> async def main():
    ...     async with AsyncSerialEnv(2, "CartPole-v1") as env:
    ...         return (await env.rollout(5, break_when_any_done=False)).batch_size
    >>> asyncio.run(main())
    torch.Size([2, 5])
    """

    @hints_at_keywords
    def __init__(
        self,
        num_workers: int,
        create_env_fn: Any,
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: Device = None,
        share_individual_td: bool | None = None,
        shared_memory: bool | None = None,
        memmap: bool = False,
        use_buffers: bool | None = None,
        consolidate: bool = True,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        serial_for_single: bool = False,
        allow_step_when_done: bool = False,
        max_concurrency: int | None = None,
        shutdown_timeout: float | None = None,
        non_blocking: bool | None = None,
        pin_memory: bool | None = None,
        daemon: bool = False,
    ) -> None:
        config = BatchConfig.of(
            num_workers,
            create_env_fn,
            create_env_kwargs=create_env_kwargs,
            backend="serial",
            share_individual_td=share_individual_td,
            shared_memory=shared_memory,
            memmap=memmap,
            use_buffers=use_buffers,
            num_threads=num_threads,
            num_sub_threads=num_sub_threads,
            allow_step_when_done=allow_step_when_done,
            max_concurrency=max_concurrency,
            pin_memory=pin_memory,
            non_blocking=non_blocking,
        )
        super().__init__(config, device)
