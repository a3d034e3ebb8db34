"""The base of pools whose workers answer later: who may ask, who must wait, and who came too late."""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from aioenvs.engine.adapters.base import Call, ResetArguments
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.pools.pool import Lease, PendingOutcome, Pool, Selection, Timeouts, closed_meanwhile, wrong_loop
from aioenvs.engine.protocol import STEPS, Opcode
from aioenvs.engine.waiting import Deadline, outlast
from aioenvs.engine.worker.env_host import Outcome

__all__ = ["AnsweringPool", "all_or_none"]

T = TypeVar("T")


class AnsweringPool(Pool):
    """Asks workers, one for each group, and awaits their answers; belongs to the event loop that starts it.

    Subclasses say what a worker is, how a command reaches it, and how it is ended.

    Args:
        groups: The envs of each worker.
        timeouts: How long things may take.
    """

    def __init__(self, groups: Sequence[Sequence[int]], timeouts: Timeouts) -> None:
        super().__init__(groups, timeouts)
        self._owner = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sent_at: dict[Collection[int], float] = {}  # steps that are under way
        self._drained: list[tuple[frozenset[int], asyncio.Future[None]]] = []

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._build()
        except BaseException:
            await self._end(polite=False)
            raise

    @abstractmethod
    async def _build(self) -> None:
        """Start the workers, let them build their envs, and connect these to the arrays."""

    # -- requests ---------------------------------------------------------------------------------------

    async def hold(
        self, selection: Selection, command: str, *, replacing: bool = False, timeout: float | Deadline | None = None
    ) -> Lease:
        if replacing:
            self.check_home(command)
            await self._caught_up()
        return await super().hold(selection, command, replacing=replacing, timeout=timeout)

    def acquire(
        self, selection: Selection, command: str, *, replacing: bool = False, timeout: float | Deadline | None = None
    ) -> Lease:
        self.check_home(command)
        deadline = self.deadline(timeout)
        replacing = replacing or self.restarts
        ready = self.states.acquire(selection.envs, command, replacing=replacing)
        waits = not ready or (replacing and bool(self.states.broken(selection.envs)))
        if self.fenced and not waits:
            try:
                waits = bool(self.in_use(selection.envs))
            except BaseException:  # of a device that is broken
                self.states.release(selection.envs)
                raise
        return Lease(selection, command, deadline, replacing, waits)

    def check_home(self, command: str) -> None:
        if (asyncio._get_running_loop() is not self._loop or os.getpid() != self._owner) and not self.states.closed:
            raise wrong_loop(command)

    async def ready(self, lease: Lease) -> Lease:
        selection = lease.selection
        await self.within(self._drain(selection.envs), lease)
        if self.fenced:
            await self.passed(self.in_use(selection.envs), lease)
        if self.states.closed:
            raise closed_meanwhile(selection.envs)
        broken = self.states.broken(selection.envs)
        if not broken:
            return lease
        if not lease.replacing:
            raise self.states.error(min(broken))
        await self._revive(selection)
        return lease.renewed()

    async def _caught_up(self) -> None:
        """Let the loop notice what happened while it did not run, as between two calls of a sync face."""

    @abstractmethod
    async def _revive(self, selection: Selection) -> None:
        """Replace the dead workers of these envs.

        Cancelling it does not end a replacement for which others wait too.

        Raises:
            ClosedError: If the envs are closed meanwhile.
            WorkerError: If there is no replacement.
        """

    async def _drain(self, envs: frozenset[int]) -> None:
        while not self.states.drained(envs):
            waiter = asyncio.get_running_loop().create_future()
            self._drained.append((envs, waiter))
            await waiter
        if self.states.closed:
            raise closed_meanwhile(envs)

    async def seed(self, lease: Lease, seeds: Mapping[int, int]) -> Outcome:
        return await self._ask(lease, Opcode.SEED, self._enclosed(lease, seeds))

    async def reset(self, lease: Lease, arguments: Mapping[int, ResetArguments]) -> Outcome:
        return await self._ask(lease, Opcode.RESET, self._enclosed(lease, arguments))

    async def perform(self, lease: Lease, calls: Mapping[int, Call]) -> Outcome:
        return await self._ask(lease, Opcode.CALL, self._enclosed(lease, calls))

    def step_each(
        self, leases: Sequence[Lease], inputs: Mapping[int, Objects] | None, *, maybe_reset: bool
    ) -> list[PendingOutcome]:
        opcode = Opcode.STEP_AND_MAYBE_RESET if maybe_reset else Opcode.STEP
        enclosed = [self._enclosed(lease, inputs) for lease in leases]
        return [self._ask(lease, opcode, own) for lease, own in zip(leases, enclosed, strict=True)]

    def _enclosed(self, lease: Lease, values: Mapping[int, Any] | None) -> Mapping[int, Any]:
        """Return the share of these values for each worker, by its number."""
        return {index: self._enclose(values, envs) for index, _, envs in lease.selection.parts} if values else {}

    def _ask(self, lease: Lease, opcode: Opcode, enclosed: Mapping[int, Any]) -> PendingOutcome:
        """Send a command to every worker concerned; what came of it is to be awaited.

        Cancelling that abandons the replies, which are dropped when they come.

        Raises:
            ClosedError: If the envs were closed since they were held.
        """
        if self.states.closed:
            raise closed_meanwhile(lease.selection.envs)
        asked: list[asyncio.Future[Any]] = []
        for index, positions, envs in lease.selection.parts:
            asked.append(self._send(index, opcode, positions, envs, enclosed.get(index)))
            self.states.sent(envs)
            if opcode in STEPS:
                self._sent_at[envs] = time.perf_counter()
            elif self._sent_at:
                self._sent_at.pop(envs, None)  # of a step that nobody answered any more
        return self._outcome(asked, lease, opcode)

    async def _outcome(self, asked: Sequence[asyncio.Future[Any]], lease: Lease, opcode: Opcode) -> Outcome:
        return self._merge(await self._replies(asked, lease, opcode))

    async def _replies(self, asked: Sequence[asyncio.Future[Any]], lease: Lease, opcode: Opcode) -> Sequence[Any]:
        """The replies to a command, in time."""
        if len(asked) == 1:
            return [await self.within(asked[0], lease)]
        answers: Sequence[Any] = await self.within(asyncio.gather(*asked), lease)
        return answers

    @abstractmethod
    def _enclose(self, values: Mapping[int, Any], envs: Collection[int]) -> Any:
        """The values for these envs, where there are any, in a form of the worker's own."""

    @abstractmethod
    def _send(
        self, index: int, opcode: Opcode, positions: tuple[int, ...], envs: frozenset[int], enclosed: Any
    ) -> asyncio.Future[Any]:
        """Give a command to a worker, and return the future of its reply; `_answered` is called when that comes."""

    @abstractmethod
    def _merge(self, replies: Sequence[Any]) -> Outcome:
        """One outcome of all replies."""

    def _answered(self, envs: Collection[int]) -> None:
        """A reply for these envs came in, whoever awaits it."""
        self.states.answered(envs)
        began = self._sent_at.pop(envs, None)
        if began is not None:
            self.times[self.host_of(next(iter(envs)))].add(time.perf_counter() - began)
        if self._drained:
            self._wake()

    def _wake(self) -> None:
        for envs, waiter in self._drained:
            if self.states.drained(envs) and not waiter.done():
                waiter.set_result(None)
        self._drained = [(envs, waiter) for envs, waiter in self._drained if not waiter.done()]

    # -- the end ----------------------------------------------------------------------------------------

    async def close(self) -> None:
        if asyncio.get_running_loop() is not self._loop or os.getpid() != self._owner:
            self.discard()
            return
        self._shut()
        await self._end(polite=True)

    def _shut(self) -> None:
        """Let nobody in any more, and nobody wait."""
        self.states.close()
        self._wake()

    async def _end(self, *, polite: bool) -> None:
        """End all there is; cancelling it makes it quicker, but it ends all the same."""
        ending = asyncio.ensure_future(self._end_everything(polite=polite))
        await outlast(ending, self._hurry)
        ending.result()

    @abstractmethod
    async def _end_everything(self, *, polite: bool) -> None:
        """End all workers and give everything back, within the time for closing.

        Args:
            polite: Whether the envs are to be closed, rather than merely gone.
        """

    @abstractmethod
    def _hurry(self) -> None:
        """Make `_end_everything` end at once."""

    def discard(self) -> None:
        if os.getpid() != self._owner:
            return  # a fork of the parent: the workers, and what the loop watches, are not ours
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if loop.is_running():
            loop.call_soon_threadsafe(self._abandon, loop)
        else:
            self._abandon(loop)

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop.is_closed():
            self.states.close()
        else:
            self._shut()
        self._let_go(loop)

    @abstractmethod
    def _let_go(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell all workers to end, and wait for nothing; the loop may be closed."""


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once and return their results; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
