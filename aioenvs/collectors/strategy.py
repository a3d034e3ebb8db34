"""The strategies of collecting: all envs stepping together, or whoever is ready first.

What they share stands first: trajectories, failures, commands that outlive a cancelled caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.collectors.policy import places_of
from aioenvs.engine.portal import driven
from aioenvs.engine.waiting import hear
from aioenvs.errors import ClosedError, WorkerError
from aioenvs.faces.commands import AsyncEnvs
from aioenvs.faces.requests import envs_of, index_of
from aioenvs.faces.steps import step_apart
from aioenvs.tensors.device import Device, Transfer, backend_of, checked_device
from aioenvs.tensors.done import done_mask
from aioenvs.tensors.storage import StepStorage, array_of


def apart() -> contextlib.AbstractContextManager[Any]:
    """Neither gradients nor inference mode: what is kept from call to call is of use whatever a caller is in."""
    return _outside_of_inference() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextlib.contextmanager
def _outside_of_inference() -> Iterator[None]:
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
        """Return these numbers, int64, with new ones where a trajectory ended, which bools of the same shape say."""
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

    The envs run; so many steps make a batch, which is kept on a device, and `ids` numbers the trajectories.
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
        """The next batch, the first of so many that are to come; None for any number."""
        if self._storage is None:
            self._storage = StepStorage(self._steps, self._device, flat=self.flat, crossing=self._crossing)
        await self._fill(self._storage, act, None if batches is None else (batches - 1) * self._steps)
        storage, self._storage = self._storage, None
        return storage.finish()

    @abstractmethod
    async def _fill(self, storage: StepStorage, act: Act, more: int | None) -> None:
        """Write until the storage is full; so many `more` steps are wanted after it, or any number."""

    @abstractmethod
    async def settle(self) -> None:
        """Wait until no env is at work, and keep what came of it."""

    @abstractmethod
    def restart(self) -> None:
        """Begin new episodes in all envs with the next step; no env may be at work."""

    async def abandon(self, *, drains: bool) -> None:
        """Have nothing to do with the envs any more; what they are at work on is dropped.

        `drains` is whether to see to it that others can use them.
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


class Lockstep(CollectStrategy):
    """Every env takes each step, so that a batch is `(*batch_size, T)`."""

    flat = False
    _root: TensorDictBase | None = None  # of the next step
    _sent: TensorDictBase | None = None  # what the envs were given for the one under way
    _row: TensorDictBase | None = None  # a step that came and is not written yet
    _is_followed = False  # whether it says to which trajectories it belongs
    _marks: TensorDict  # the ids of the trajectories under way, as each step gets them
    _failed: frozenset[int] = frozenset()  # envs that need a reset, by row, where others go on

    async def _fill(self, storage: StepStorage, act: Act, more: int | None) -> None:
        while storage.left > (self._row is not None):
            if self._sent is None:
                self._sent = await act(await self._begun())
            await self._finish_step(storage)
        if storage.left:
            await self._write(storage)

    async def _begun(self) -> TensorDictBase:
        """The root of the next step."""
        if self._root is not None:
            self._lose(self._rebuilt())
        while self._root is None:
            self._follow()
            fresh = {env for env, place in self._places.items() if not self._failed or place in self._failed}
            self._root = await self._attempt(self._reset)
            self._failed = frozenset()
            self._mark(self._ids.take(self._env.batch_size))
            self._lose(self._rebuilt() - fresh)
        return self._root

    def _lose(self, envs: Collection[int]) -> None:
        """Have some envs reset, while the others go on from what they show."""
        if envs:
            self._root = None
            self._failed = frozenset(self._places[env] for env in envs)
            if len(self._failed) == len(self._places):
                self._failed = frozenset()

    async def _reset(self) -> TensorDictBase:
        """Begin new episodes where they are needed, which is everywhere at the beginning."""
        if not self._failed:
            return await self._env.reset()
        mask = torch.zeros(self._env.batch_size, dtype=torch.bool)
        mask[list(self._failed)] = True
        return await self._env.reset(TensorDict({"_reset": mask}, mask.shape))

    async def _finish_step(self, storage: StepStorage) -> None:
        """Wait for the step that is under way; the one before is written while the envs are at work."""
        if self._returns:
            await self._write(storage)
        root = await self._attempt(self._step, lambda: self._write_row(storage))
        self._row, self._is_followed = self._sent, False
        self._root, self._sent = root, None

    async def _write(self, storage: StepStorage) -> None:
        """Write the step that came last, if it is not written; where this ends too early, it is still there."""
        if self._row is not None:
            self._follow()
            self._row = await self._kept(self._row)
            self._write_row(storage)

    def _write_row(self, storage: StepStorage) -> None:
        if self._row is not None:
            self._follow()
            row, self._row = self._row, None
            storage.write(row)

    def _follow(self) -> None:
        """Say to which trajectories the step that came last belongs, and which of them it ended."""
        if self._row is None or self._is_followed:
            return
        self._is_followed = True
        if type(self._row) is TensorDict and self._row.device == self._marks.device:
            self._row._set_str(TRAJ_IDS[0], self._marks, inplace=False, validated=True)
        else:
            self._row.set(TRAJ_IDS[0], self._marks)
        former = self._marks.get(TRAJ_IDS[1])
        ids = self._ids.renewed(former, self._ended(self._row))
        if ids is not former:
            self._mark(ids)

    def inherit(self, former: CollectStrategy) -> None:
        super().inherit(former)
        if isinstance(former, Lockstep):
            former._follow()
            self._row, self._is_followed = former._row, True

    def _mark(self, ids: torch.Tensor) -> None:
        device = self._env.device
        placed = ids if device is None else ids.to(device)
        self._marks = TensorDict._new_unsafe({TRAJ_IDS[1]: placed}, batch_size=ids.shape, device=device)

    async def _step(self) -> TensorDictBase:
        assert self._sent is not None
        return await step_apart(self._env, self._sent)

    async def _attempt(
        self, command: Callable[[], Coroutine[Any, Any, Any]], meanwhile: Callable[[], object] = lambda: None
    ) -> Any:
        try:
            return await self._surely(command, meanwhile)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Note what has to be reset. The step is lost, for envs that took it, too: the next root is what they show."""
        self._sent = None
        failed = failed_envs(error)
        if failed == ():  # nobody was asked
            return
        self._root, self._failed = None, frozenset()
        self._lose(self._places.keys() & set(failed or ()))

    async def settle(self) -> None:
        if not self._errand.pending:
            return
        if self._sent is None:
            await self._begun()
        else:
            assert self._storage is not None
            await self._finish_step(self._storage)

    def restart(self) -> None:
        self._root, self._sent, self._failed = None, None, frozenset()


class FirstReady(CollectStrategy):
    """The envs step apart, so that a batch is `(steps, *bs)`, in the order in which they answered.

    Each env is at work, or ready: its root is here and waits for an action. While the policy chooses for those that are
    ready, the others work. An env that is neither begins a new episode, whatever the reason: at the beginning, since it
    failed, or since somebody else received its step. `min_get` envs are waited for, where so many are at work and a
    batch has room for them.
    """

    flat = True

    def __init__(self, env: AsyncEnvs, steps: int, device: Device, ids: TrajectoryIds, min_get: int) -> None:
        super().__init__(env, steps, device, ids)
        self._min_get = min_get
        self._ready: list[TensorDictBase] = []
        self._failed: set[int] = set(self._places)  # who needs a reset: at the beginning, everybody
        self._beginning: list[int] = []  # who is being reset
        self._bereft: set[int] = set()  # who was built anew while a step of it was still to be received
        self._own_ids: dict[int, torch.Tensor] = {}
        self._early: list[TensorDictBase] = []  # steps that were received before there was a place for them

    async def _fill(self, storage: StepStorage, act: Act, more: int | None) -> None:
        while True:
            await self._write_early(storage)
            if not storage.left:
                return
            await self._renew()
            await self._send(act, None if more is None else storage.left + more - len(self._env.outstanding))
            await self._receive(storage.left)

    async def _write_early(self, storage: StepStorage) -> None:
        while self._early and storage.left:
            td = self._early[0] = await self._kept(self._early[0])
            self._early.pop(0)
            if len(td) > storage.left:
                self._early.insert(0, td[storage.left :])
                td = td[: storage.left]
            storage.write(td)

    # -- out --------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Begin new episodes in the envs that need it."""
        while self._errand.pending or await self._find_needy():
            envs = self._beginning
            td = await self._surely(self._view(envs).reset)
            self._failed.difference_update(envs)
            self._note_rebuilt(envs)
            shape = td.batch_size
            self._ready.append(td.set("env_index", self._whole.index(envs, shape)))
            for env in envs:
                self._own_ids[env] = self._ids.take(shape[1:])

    async def _find_needy(self) -> bool:
        """Note down who has to be reset now; whether there is anybody."""
        ready = [env for td in self._ready for env in self._envs_of(td)]
        outstanding = self._env.outstanding
        self._failed |= self._places.keys() - {*ready, *outstanding}
        self._note_rebuilt()
        for env in self._failed.intersection(outstanding):  # of a worker that died: each says so itself
            with contextlib.suppress(Exception):
                await self._receive(1, [env])
        self._drop(self._failed)
        free = self._failed.difference(self._env.outstanding)
        self._beginning = [env for env in self._places if env in free]
        return bool(free)

    def _note_rebuilt(self, begun: Collection[int] = ()) -> None:
        """Note down who was built anew and has no episode, but for those that have just begun one."""
        rebuilt = self._rebuilt().difference(begun)
        self._bereft |= rebuilt.intersection(self._env.outstanding)
        self._failed |= rebuilt - self._bereft

    def _view(self, envs: Collection[int]) -> AsyncEnvs:
        """These envs alone."""
        if len(envs) == len(self._places):
            return self._env
        view: AsyncEnvs = self._env[[self._places[env] for env in envs]]
        return view

    async def _send(self, act: Act, most: int | None) -> None:
        """Let those that are ready step, as many as steps are wanted."""
        if not self._ready or (most is not None and most < 1):
            return
        td, rest = self._joined(self._ready), []
        self._ready = [td]
        if most is not None and most < len(td):
            td, rest = td[:most], [td[most:]]
        acted = await act(td)
        try:
            self._env.send(acted)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):  # an interrupt: some may be in the middle of a step
                self._failed.update(self._envs_of(td))
            raise
        self._ready = rest

    # -- in ---------------------------------------------------------------------------------------------

    async def _receive(self, most: int, envs: Sequence[int] | None = None) -> None:
        """Take in what some of those that are at work have done."""
        chosen = self._env if envs is None else self._view(envs)
        outstanding = len(chosen.outstanding)
        if not outstanding:
            return
        try:
            td, root = await chosen.recv(min(self._min_get, outstanding, most), most)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(error)
            raise
        index = self._envs_of(td)
        self._early.append(td.set(TRAJ_IDS, torch.stack([self._own_ids[env] for env in index])))
        for env, ended in zip(index, self._ended(td), strict=True):
            self._own_ids[env] = self._ids.renewed(self._own_ids[env], ended)
        self._ready.append(root)
        self._failed |= self._bereft.intersection(index)
        self._bereft.difference_update(index)
        self._drop(self._failed)

    def _fail(self, error: BaseException) -> None:
        """Note who needs a reset."""
        failed = error.env_index if isinstance(error, WorkerError) else failed_envs(error) or ()
        self._failed.update(self._places.keys() & set(failed))
        self._bereft -= self._failed
        self._drop(self._failed)

    def _drop(self, envs: Collection[int]) -> None:
        """Forget the roots of these envs."""
        kept = []
        for td in self._ready:
            rows = [row for row, env in enumerate(self._envs_of(td)) if env not in envs]
            if rows:
                kept.append(td if len(rows) == len(td) else td[torch.tensor(rows)])
        self._ready = kept

    async def settle(self) -> None:
        if self._errand.pending:
            await self._renew()
        while self._env.outstanding:
            await self._receive(len(self._env.outstanding))

    def inherit(self, former: CollectStrategy) -> None:
        super().inherit(former)
        if isinstance(former, FirstReady):
            self._early = former._early

    def restart(self) -> None:
        self._failed.update(self._places)

    async def abandon(self, *, drains: bool) -> None:
        await super().abandon(drains=drains)
        while drains and (outstanding := self._env.outstanding):
            try:
                await self._receive(len(outstanding))
            except Exception:  # it is dropped like all the rest
                if self._env.outstanding == outstanding:  # but nothing was received: not here, or by somebody else
                    raise

    def _envs_of(self, td: TensorDictBase) -> list[int]:
        return envs_of(td, self._whole.read)

    def _joined(self, tds: Sequence[TensorDictBase]) -> TensorDictBase:
        if len(tds) == 1:
            return tds[0]
        envs = [env for td in tds for env in self._envs_of(td)]
        joined: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack([row for td in tds for row in td.unbind(0)])
        if isinstance(joined, TensorDict):
            self._whole.transfer.know(joined.get("env_index"), index_of(envs, joined.batch_size))
        return joined
