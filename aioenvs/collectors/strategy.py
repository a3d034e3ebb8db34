"""The base of the strategies of collecting: trajectories, failures, commands that outlive a cancelled caller."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from aioenvs.collectors.policy import places_of
from aioenvs.engine.portal import driven
from aioenvs.engine.waiting import hear
from aioenvs.errors import ClosedError, WorkerError
from aioenvs.faces.commands import AsyncEnvs
from aioenvs.tensors.device import Device, backend_of, checked_device
from aioenvs.tensors.done import done_mask
from aioenvs.tensors.storage import StepStorage, array_of
from aioenvs.tensors.transfer import Transfer

__all__ = ["TRAJ_IDS", "Act", "CollectStrategy", "ShieldedCommand", "TrajectoryIds", "apart", "failed_envs"]


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Neither gradients nor inference mode: what is kept from call to call is of use whatever a caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class ShieldedCommand:
    """One command at a time, which cancelling the one who waits for it does not end: who asks next gets its result."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._ended: asyncio.Future[None] | None = None  # for who waits

    @property
    def pending(self) -> bool:
        """Whether there is one that nobody has got the result of."""
        return self._task is not None

    async def result(
        self, command: Callable[[], Coroutine[Any, Any, Any]], meanwhile: Callable[[], object] = lambda: None
    ) -> Any:
        """The result of the command that is under way, or else of this one.

        Args:
            command: Begins it.
            meanwhile: Called as soon as the command waits for something.

        Raises:
            ClosedError: If it was cancelled by `cancel`.
            Exception: Whatever the command raised.
        """
        if self._task is None:
            coroutine = command()
            try:
                # Until it waits it runs right here, so that the envs are at work without another turn of the loop.
                with apart():
                    pending = coroutine.send(None)
            except StopIteration as stop:
                meanwhile()
                return stop.value
            self._task = asyncio.get_running_loop().create_task(self._rest(coroutine, pending))
            self._task.add_done_callback(self._end)
        meanwhile()
        task = self._task
        try:
            if not task.done():
                self._ended = asyncio.get_running_loop().create_future()
                await self._ended
            found = await task  # which has done all that it does
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

    async def _rest(self, coroutine: Coroutine[Any, Any, Any], pending: Any) -> Any:
        try:
            return await driven(coroutine, apart, pending)
        finally:
            self._wake()  # rather than when it is told to have ended, which is a turn later

    def _end(self, task: asyncio.Task[Any]) -> None:
        hear(task)  # whoever asks next is told; there may be nobody
        if task is self._task:  # else the next one is under way already
            self._wake()

    def _wake(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def cancel(self) -> None:
        """End the command."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


TRAJ_IDS = ("collector", "traj_ids")


class TrajectoryIds:
    """Hands out the numbers 0, 1, 2, ...

    Attributes:
        following: The next one.

    >>> ids = TrajectoryIds()
    >>> own = ids.take((3,))
    >>> ids.renewed(own, torch.tensor([False, True, False])).tolist(), own.tolist(), ids.following
    ([0, 3, 2], [0, 1, 2], 4)
    """

    def __init__(self) -> None:
        self.following = 0

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """New numbers: int64, of this shape."""
        count = torch.Size(shape).numel()
        self.following += count
        return torch.arange(self.following - count, self.following).reshape(torch.Size(shape))

    def renewed(self, ids: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        """Return these numbers, with new ones where a trajectory ended.

        Args:
            ids: Int64.
            ended: Bool, of the same shape.
        """
        flags = array_of(ended)
        count = int(np.count_nonzero(flags))
        if not count:
            return ids
        renewed = array_of(ids).copy()
        renewed[flags] = np.arange(self.following, self.following + count)
        self.following += count
        return torch.from_numpy(renewed).to(ids.device)


Act = Callable[[TensorDictBase], Awaitable[TensorDictBase]]  # the policy: from a root to the same with the actions


class CollectStrategy(ABC):
    """Collects batch after batch, and goes on where an exception, or being cancelled, made it stop.

    Args:
        env: The envs, which run.
        steps: How many steps make a batch.
        device: Where batches are kept.
        ids: Numbers the trajectories.
    """

    flat: bool

    def __init__(self, env: AsyncEnvs, steps: int, device: Device, ids: TrajectoryIds) -> None:
        self._env = env
        self._steps = steps
        self._device = checked_device(device)
        backend = backend_of(device)
        self._crossing = None if backend is None else Transfer(None, backend)
        self._ids = ids
        self._done_keys = tuple(env._index.every_key("done"))
        self._errand = ShieldedCommand()
        self._storage: StepStorage | None = None
        scope = env._running_scope
        assert scope is not None
        self._whole = scope.whole
        # Batches on the host of results that come from there need not be brought back.
        self._returns = self._device == torch.device("cpu") and backend is None and scope.whole.crossing is not None
        if self._returns:
            scope.whole.transfer.remember()
        self._places = places_of(env)
        self._replaced = list(self._whole.pool.replaced)

    def _rebuilt(self) -> set[int]:
        """Envs that were built anew, for whatever reason, since this was asked last, and so have no episode."""
        pool = self._whole.pool
        former, self._replaced = self._replaced, list(pool.replaced)
        if former == self._replaced or pool.restarts:  # such a pool resets them
            return set()
        hosts = {env: pool.host_of(env) for env in self._places}
        return {env for env, host in hosts.items() if former[host] != self._replaced[host]}

    async def _kept(self, td: TensorDictBase) -> TensorDictBase:
        """A step as it is stored: where batches are, if they are on the host and it is not."""
        scope = self._env._running_scope
        return await scope.at_home(td) if self._returns and scope is not None else td

    def is_of(self, env: AsyncEnvs) -> bool:
        """Whether the envs are still those that it began with, rather than closed and perhaps started again."""
        scope = env._running_scope
        return scope is not None and scope.whole is self._whole

    def inherit(self, former: CollectStrategy) -> None:
        """Go on with what another one has collected."""
        self._storage = former._storage

    @property
    def is_between(self) -> bool:
        """Whether no batch was begun."""
        return self._storage is None

    async def batch(self, act: Act, batches: int | None) -> TensorDictBase:
        """The next batch.

        Args:
            act: The policy.
            batches: How many are to come, with this one; None for any number.
        """
        if self._storage is None:
            self._storage = StepStorage(self._steps, self._device, flat=self.flat, crossing=self._crossing)
        await self._fill(self._storage, act, None if batches is None else (batches - 1) * self._steps)
        storage, self._storage = self._storage, None
        return storage.finish()

    @abstractmethod
    async def _fill(self, storage: StepStorage, act: Act, more: int | None) -> None:
        """Write until the storage is full.

        Args:
            storage: Perhaps partly full.
            act: The policy.
            more: How many steps are wanted after it; None for any number.
        """

    @abstractmethod
    async def settle(self) -> None:
        """Wait until no env is at work, and keep what came of it."""

    @abstractmethod
    def restart(self) -> None:
        """Begin new episodes in all envs with the next step; no env may be at work."""

    async def abandon(self, *, drains: bool) -> None:
        """Have nothing to do with the envs any more; what they are at work on is dropped.

        Args:
            drains: Whether to see to it that others can use them.
        """
        await self._errand.cancel()

    async def _surely(
        self, command: Callable[[], Coroutine[Any, Any, Any]], meanwhile: Callable[[], object] = lambda: None
    ) -> Any:
        """The result of a command that goes on when whoever waits for it is cancelled.

        Args:
            command: Begins it.
            meanwhile: Called when it is under way.
        """
        pool = self._whole.pool
        if not pool.suspends:  # there may be no loop, and there is nothing to wait for
            meanwhile()
            return await command()
        await pool.enter_loop("collecting")
        return await self._errand.result(command, meanwhile)

    def _ended(self, td: TensorDictBase) -> torch.Tensor:
        """In which elements of the batch a step ended the episode."""
        return done_mask(td.get("next"), self._done_keys)


def failed_envs(error: BaseException) -> tuple[int, ...] | None:
    """The envs that need a reset after an error that a command to several envs ended with.

    Returns:
        Their indices in the whole; none of them where nobody was asked anything; None where it may be any, since not
        all have answered.
    """
    if isinstance(error, WorkerError) or not isinstance(error, Exception):
        return None
    found = getattr(error, "env_index", ())
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)
