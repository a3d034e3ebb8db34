"""The life of a batch of envs: started when first used, closed, started again; and its live views."""

from __future__ import annotations

import asyncio
import operator
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import torch

from aioenvs.engine.config import REPLACED, BatchConfig
from aioenvs.engine.pools.backends import make_pool, share_states
from aioenvs.engine.pools.pool import Pool
from aioenvs.engine.waiting import outlast
from aioenvs.errors import AioEnvsError, ClosedError, shown
from aioenvs.faces.batch_specs import Signature
from aioenvs.faces.commands import AsyncEnvs
from aioenvs.faces.session import EnvSelection, Session
from aioenvs.hints import Instead
from aioenvs.specs.mapping import name_classes
from aioenvs.tensors.device import Device, DeviceBackend, checked_device, require_device

__all__ = ["AsyncBatchedEnv", "AsyncView", "chosen_envs"]


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
        self._running: Session | None = None
        self._starting: asyncio.Task[Session] | None = None
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

    async def _started(self) -> Session:
        """Return the session, started if need be; tasks that come here at the same time share one start."""
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

    def _check_start(self, starting: asyncio.Task[Session]) -> None:
        """Refuse to wait for a start in another event loop.

        Raises:
            AioEnvsError: If that is where they are being started.
        """
        if starting.get_loop() is not asyncio.get_running_loop():
            raise AioEnvsError(
                f"{self!r} is being started in another event loop than this one; wait for it there, or make envs of "
                "its own for each"
            )

    def _start_ended(self, starting: asyncio.Task[Session]) -> None:
        if self._starting is starting:  # it was cancelled before it began
            self._starting = None
        if not starting.cancelled():
            starting.exception()  # those who wait for it have it; there may be nobody left

    async def _start(self) -> Session:
        """Start, and say so in the same turn of the loop: whoever comes next must not find it between the two."""
        try:
            self._running = await self._make_running()
            self._was_closed = False
            return self._running
        finally:
            self._starting = None

    async def _make_running(self) -> Session:
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
            running = Session(
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

    def _remember(self, running: Session) -> None:
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

    async def _scope(self) -> EnvSelection:
        return (self._running or await self._started()).everything

    @property
    def _running_scope(self) -> EnvSelection | None:
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


def chosen_envs(index: Any, count: int) -> tuple[int, ...]:
    """The envs that an index selects, in its order.

    Raises:
        IndexError: If it selects nothing, one env twice, or one that does not exist.
        NotImplementedError: If it is a bool mask.
    """
    if isinstance(index, slice):
        chosen: Sequence[int] = range(count)[index]
    else:
        array = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index)
        if array.dtype == np.bool_:
            raise NotImplementedError("Boolean masks are not supported for batched envs; use their nonzero() indices")
        if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
            raise IndexError(
                f"Batched env indices must be scalar or 1D: an int, a slice or a list of ints; found {shown(index)}"
            )
        chosen = [operator.index(item) for item in array.reshape(-1).tolist()]
    if not len(chosen):
        raise IndexError(
            f"Empty batched env indexing is not supported: the index {shown(index)} selects none of {count} envs"
        )
    for env in chosen:
        if not -count <= env < count:
            raise IndexError(f"index {env} is out of bounds for {count} envs")
    envs = tuple(env % count for env in chosen)
    if len(set(envs)) < len(envs):
        raise IndexError(f"the index {shown(index)} selects an env twice, which can only be asked once at a time")
    return envs


class AsyncView(AsyncEnvs):
    """Some envs of a batch; what `env[index]` returns.

    It has the methods of the whole. Views that share no env may be awaited at the same time. It keeps the whole alive,
    starts it when it is used first, and leaves it open when it is closed. Once the whole was closed, using the view
    raises `ClosedError`, until somebody starts the whole again. What `copy.copy` makes of it is a view of the
    same whole; `copy.deepcopy` and a pickle make a view of a copy of the whole, which is not started, and is closed
    as `view.whole`.

    >>> import asyncio
    >>> from aioenvs import AsyncSerialEnv
    >>> async def main():
    ...     async with AsyncSerialEnv(4, "CartPole-v1") as env:
    ...         td = await env[1:3].reset(seed=0)
    ...         return td.batch_size
    >>> asyncio.run(main())
    torch.Size([2])
    """

    _ends_when_closed = False

    def __init__(self, owner: AsyncBatchedEnv, envs: tuple[int, ...]) -> None:
        self._owner = owner
        self._envs = envs
        self._known_of: Signature | None = None  # the whole's, when this one's became known

    async def _scope(self) -> EnvSelection:
        return (self._owner._running or await self._started()).scope(self._envs)

    async def _started(self) -> Session:
        """Return the session, started if need be, but not anew."""
        if self._was_closed:
            raise ClosedError(
                f"Cannot use {self!r} after its parent environment has been closed: views do not start that again"
            )
        return await self._owner._started()

    @property
    def _was_closed(self) -> bool:
        return self._owner._was_closed

    def _last_signature(self) -> Signature | None:
        whole = self._owner._last_signature()
        if whole is not self._known_of:  # the whole was started, moved or changed since
            self._known_signature, self._known_of = None, whole
        return super()._last_signature()

    @property
    def _running_scope(self) -> EnvSelection | None:
        running = self._owner._running
        return None if running is None else running.scope(self._envs)

    async def start(self) -> None:
        """Start the whole, if it is not started.

        Cancelling it is as cancelling the start of the whole; but a start for which another task waits too goes on.

        Raises:
            ClosedError: If the whole was closed.
        """
        await self._started()

    async def close(self, *, raise_if_closed: bool = True) -> None:
        """Do nothing: the envs belong to the whole, and close with it. There is nothing in it to be cancelled."""

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @property
    def is_closed(self) -> bool:
        """Whether the whole is closed."""
        return self._owner.is_closed

    @property
    def whole(self) -> AsyncBatchedEnv:
        """The envs of which this is a view."""
        return self._owner

    @property
    def env_index(self) -> tuple[int, ...]:
        """The indices of these envs in the whole."""
        return self._envs

    @property
    def num_workers(self) -> int:
        return len(self._envs)

    @property
    def num_processes(self) -> int:
        """How many processes host them; 0 where they live in this one, in threads or not."""
        return len(self._hosts()) if self._owner.num_processes else 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers that host them, in order; empty where envs live in this process."""
        pids = self._owner.pids
        return tuple(pids[host] for host in self._hosts()) if pids else ()

    def _hosts(self) -> list[int]:
        groups = self._owner._config.groups
        return [host for host, group in enumerate(groups) if not set(self._envs).isdisjoint(group)]

    def update_kwargs(self, kwargs: Any) -> NoReturn:
        """Not possible: the arguments of the factories are the whole's."""
        raise AioEnvsError(
            f"{self!r} cannot change arguments; use update_kwargs of the envs that it is a view of, with a list that "
            "has {} for all others"
        )

    @property
    def device(self) -> torch.device | None:
        """Where results go, as for the whole."""
        return self._owner.device

    def __getitem__(self, index: Any) -> AsyncView:
        """A view of some of these envs; see `AsyncBatchedEnv.__getitem__`."""
        return AsyncView(self._owner, tuple(self._envs[place] for place in chosen_envs(index, len(self._envs))))

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self._owner, list(self._envs))

    def __repr__(self) -> str:
        return f"<envs {list(self._envs)} of {self._owner!r}>"
