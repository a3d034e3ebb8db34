"""The life of the envs behind an asynchronous face: started when first used, closed, and started again."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from aioenvs.batched.base import AsyncEnvs
from aioenvs.batched.config import REPLACED, BatchConfig
from aioenvs.batched.hosts import make_pool, share_states
from aioenvs.batched.scope import Running, Scope
from aioenvs.batched.views import AsyncView, chosen_envs
from aioenvs.device import Device, DeviceBackend, checked_device, require_device
from aioenvs.engine.deadlines import outlast
from aioenvs.engine.pool import Pool
from aioenvs.errors import AioEnvsError, ClosedError
from aioenvs.hints import Instead
from aioenvs.specs.classes import name_classes

__all__ = ["AsyncBatchedEnv"]

RUNNING = frozenset(  # what a copy has anew
    (
        *("_pool", "_running", "_starting", "_waiting", "_yields", "_former_threads", "_was_closed"),
        *("_config", "_device", "_backend", "_known_signature", "_known_index"),
    )
)


def _unstarted(cls: type[AsyncBatchedEnv], config: BatchConfig, device: Device) -> AsyncBatchedEnv:
    """A copy, of a pickle or in memory: the same envs, not started."""
    env = cls.__new__(cls)
    AsyncBatchedEnv.__init__(env, config, device)
    return env


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, also while being cancelled."""
    task.cancel()
    await outlast(task)


class AsyncBatchedEnv(AsyncEnvs):
    """Many envs behind coroutines; see `AsyncParallelEnv` and `AsyncSerialEnv`.

    It belongs to the event loop in which it is started. An env does one thing at a time: a second request while one
    is pending raises `ConcurrencyError`.
    """

    def __init__(self, config: BatchConfig, device: Device) -> None:
        self._pool: Pool | None = None  # also while it starts
        self._running: Running | None = None
        self._starting: asyncio.Task[Running] | None = None
        self._was_closed = False  # since it ran last
        self._waiting = 0  # how many tasks wait for the start
        self._face = type(self).__name__  # what messages call it: a sync face puts its own name here
        self._yields = True  # whether commands let other tasks run, even if they have nothing to wait for
        self._former_threads: int | None = None
        self._config = config
        self._device = checked_device(device)
        self._backend = device if isinstance(device, DeviceBackend) else None

    # -- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers and build the envs. Any other command does so when it is the first.

        Cancelling it ends the workers that were started, unless another task waits for them too; it can then be
        started again.

        Raises:
            RuntimeError: If it is started already.
            WorkerStartError: If a factory raised, hung (`start_timeout`) or ended its process.
            SpecMismatchError: If the envs have different batch sizes.
            ValueError: If they cannot be stacked although `share_individual_td` is False, or are on different devices
                and `device` does not say where results go.
            ClosedError: If another task closed it meanwhile.
        """
        if self._running is not None or self._starting is not None:
            raise AioEnvsError(f"{self!r} is started already")
        await self._started()

    async def _started(self) -> Running:
        """What runs, started if need be; tasks that come here at the same time share one start."""
        if self._running is not None:
            return self._running
        if self._config.backend == "serial":  # nothing in it waits, so nobody can come in between
            return await self._start()
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
            self._starting.add_done_callback(self._start_ended)
        starting = self._starting
        self._check_start(starting)
        self._waiting += 1
        try:
            await asyncio.wait([starting])
        except asyncio.CancelledError:
            if self._waiting == 1:
                await _cancelled(starting)
                before = self._was_closed
                await self.close(raise_if_closed=False)  # it may have been quicker
                self._was_closed = before
            raise
        finally:
            self._waiting -= 1
        if starting.cancelled():
            raise ClosedError(f"{self!r} was closed by another task while it started")
        return starting.result()

    def _check_start(self, starting: asyncio.Task[Running]) -> None:
        """Refuse to wait for a start in another event loop.

        Raises:
            AioEnvsError: If that is where they are being started.
        """
        if starting.get_loop() is not asyncio.get_running_loop():
            raise AioEnvsError(
                f"{self!r} is being started in another event loop than this one; wait for it there, or make envs of "
                "its own for each"
            )

    def _start_ended(self, starting: asyncio.Task[Running]) -> None:
        if self._starting is starting:  # it was cancelled before it began
            self._starting = None
        if not starting.cancelled():
            starting.exception()  # those who wait for it have it; there may be nobody left

    async def _start(self) -> Running:
        """Start, and say so in the same turn of the loop: whoever comes next must not find it between the two."""
        try:
            self._running = await self._make_running()
            self._was_closed = False
            return self._running
        finally:
            self._starting = None

    async def _make_running(self) -> Running:
        if self._device is not None:
            require_device(self._device)
        share_states(self._config)
        config, pool = self._config, make_pool(self._config, yields=self._yields)
        pool.shares_loop = self._yields
        self._pool = pool
        self._former_threads = torch.get_num_threads() if config.num_threads is not None else None
        try:
            if config.num_threads is not None:
                torch.set_num_threads(config.num_threads)
            name_classes()
            await pool.start()
            running = Running(
                pool, self._backend or self._device, config.share_individual_td, config.pin_memory, config.non_blocking
            )
            if config.use_buffers and running.everything.signature.varies:
                warnings.warn(
                    "use_buffers=True has no effect for envs with a size that varies (-1 in a spec's shape): what "
                    "varies travels without buffers",
                    UserWarning,
                    stacklevel=2,
                )
            return running
        except BaseException:
            await pool.close()
            self._ended()
            raise

    def _ended(self) -> None:
        """Undo what a start did here."""
        self._pool = None
        threads, self._former_threads = self._former_threads, None
        if threads is not None:
            torch.set_num_threads(threads)

    async def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all envs and end the workers, within `close_timeout`, whatever state they are in.

        Cancelling it kills the workers at once; they are gone when it returns. The next command starts new ones. A
        thread (`backend="thread"`) cannot be killed: one that hangs is left behind, and closes its envs if it ever
        returns.

        Raises:
            ClosedError: If it is closed already, unless `raise_if_closed` is False.
            AioEnvsError: If it is being started in another event loop.
            ConcurrencyError: If envs of this thread (`backend="serial"`) are in the middle of a call; nothing is closed
                then.
        """
        running = self._running
        if running is not None:
            running.pool.begin_close()
            self._running, self._was_closed = None, True
            self._remember(running)
            self._ended()
            try:
                await running.pool.close()
                await running.outbox.close()
            finally:
                await running.finish()
        elif self._starting is not None:
            self._check_start(self._starting)
            await _cancelled(self._starting)
            self._was_closed = True
        elif raise_if_closed:
            raise ClosedError(f"trying to close a closed environment: {self!r} is closed already, or was never started")

    def _remember(self, running: Running) -> None:
        self._known_signature = running.everything.signature

    __enter__ = Instead(
        "is entered by `async with`, within a coroutine; for `with` there are ParallelEnv and SerialEnv"
    )

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(raise_if_closed=False)

    def __del__(self) -> None:
        if getattr(self, "_running", None) is not None:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            self._discard()

    def _discard(self) -> None:
        """Give everything back at once, without waiting; for envs that were forgotten."""
        running, self._running = self._running, None
        if running is not None:
            self._ended()
            running.pool.discard()
            running.outbox.discard()
            running.discard()

    # -- what there is ----------------------------------------------------------------------------------

    async def _scope(self) -> Scope:
        return (self._running or await self._started()).everything

    @property
    def _running_scope(self) -> Scope | None:
        return None if self._running is None else self._running.everything

    @property
    def is_closed(self) -> bool:
        """Whether there are no envs now: not started yet, or closed."""
        return self._running is None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers, in order; empty where envs live in this process."""
        return self._pool.pids if self._pool is not None else ()

    @property
    def num_workers(self) -> int:
        return len(self._config.factories)

    @property
    def num_processes(self) -> int:
        """How many processes, here or elsewhere, host them; 0 where they live in this one, in threads or not."""
        return len(self._config.groups) if self._config.backend in REPLACED else 0

    @property
    def device(self) -> torch.device | None:
        """Where results go: the one that was asked for, else the envs' own; None if they have none."""
        return self._device if self._running is None else self._running.device

    def to(self, device: torch.device | str | int | DeviceBackend) -> Self:
        """Bring specs and results to another device from now on.

        Args:
            device: As for the constructor, but not None.

        Returns:
            The same object.

        Raises:
            ValueError: If it is no device that could hold results.
            AioEnvsError: If it is not there.
        """
        target = checked_device(device)
        if target is None:
            raise TypeError("expected a device, found None: results cannot be told to stay where they are any more")
        require_device(target)
        self._device = target
        self._backend = device if isinstance(device, DeviceBackend) else None
        if self._known_signature is not None:
            self._known_signature = self._known_signature.to(self._device)
        if self._running is not None:
            self._running.place(self._backend or self._device)
        return self

    def update_kwargs(self, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Change the keyword arguments of the factories, before the envs are started.

        Args:
            kwargs: A dict for all envs, or a list with one for each; entries that it does not have stay.

        Raises:
            RuntimeError: If the envs are started, the list has another length than there are envs, or this is a view.
        """
        if self._running is not None or self._starting is not None:
            raise AioEnvsError(f"{self!r} is started, so its envs have their arguments: close() first")
        self._config = self._config.with_kwargs(kwargs)
        self._known_signature = None

    def __getitem__(self, index: Any) -> AsyncView:
        """A live view of some envs, with the same methods.

        Args:
            index: An int, a slice, a list or an integer array or tensor; a view of one env is a batch of one.

        Raises:
            IndexError: If it selects nothing, or an env that does not exist.
            NotImplementedError: If it is a bool mask.
        """
        return AsyncView(self, chosen_envs(index, self.num_workers))

    def __reduce__(self) -> tuple[Any, ...]:
        own = {name: value for name, value in self.__dict__.items() if name not in RUNNING}
        return _unstarted, (type(self), self._config, self._backend or self._device), own or None

    def __repr__(self) -> str:
        return f"<{self._face} {self._describe()}>"

    def _describe(self) -> str:
        state = "closed" if self._running is None else "open"
        hosts = f"num_processes={self.num_processes}, " if self.num_processes else ""
        return f"num_workers={self.num_workers}, {hosts}{state}"
