"""The pool without processes: envs live in the caller's, and commands run them right there."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

from aioenvs.engine.adapters.base import PLAIN_RULES, Call, GymRules, Handling, ResetArguments
from aioenvs.engine.adapters.building import refuse_shared
from aioenvs.engine.adapters.copying import arguments, received
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.failure import advised, factory_error, passable
from aioenvs.engine.memory import own_memory
from aioenvs.engine.pools.pool import Lease, PendingOutcome, Pool, Selection, closed_meanwhile, wrong_loop
from aioenvs.engine.portal import loop_wanted, outside_of
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.waiting import Deadline, outlast
from aioenvs.engine.worker.concurrent import ConcurrentHost
from aioenvs.engine.worker.env_host import EnvHost, Outcome
from aioenvs.engine.worker.random_streams import here
from aioenvs.errors import AioEnvsError, ClosedError, ConcurrencyError, describe_envs

__all__ = ["InlinePool"]


OWN = functools.partial(received, keeps_graph=True)


class InlinePool(Pool):
    """Hosts the envs in this process.

    Args:
        factories: One per env.
        kwargs: Keyword arguments for each.
        yields: Whether each command lets other tasks, timeouts and interrupts have their turn first; else its
            coroutines never suspend, unless envs have coroutines, which then ask for a loop (`aioenvs.engine.portal`).
        max_concurrency: How many envs may be inside a reset or step at once, if they have coroutines; None for all.
        rules: What is agreed about envs with Gymnasium's signatures.
    """

    def __init__(
        self,
        factories: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        yields: bool,
        max_concurrency: int | None = None,
        rules: GymRules = PLAIN_RULES,
    ) -> None:
        super().__init__([range(len(factories))])
        self.suspends = self._yields = yields
        self._factories = factories
        self._kwargs = kwargs
        handling = Handling(by_reference=True, keeps_grad=True, generators=here(), answer=OWN, rules=rules)
        self._host = EnvHost((SystemExit, KeyboardInterrupt), handling)
        self._max_concurrency = max_concurrency
        self._concurrent: ConcurrentHost | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the coroutines
        self._gate = threading.Lock()  # between commands that begin and the end of all
        self._at_work: list[int] = []  # the threads that are inside envs without coroutines

    @property
    def envs(self) -> list[Any]:
        """The envs themselves, once it was started."""
        return self._host.envs

    async def start(self) -> None:
        try:
            for env, (factory, kwargs) in enumerate(zip(self._factories, self._kwargs, strict=True)):
                try:
                    self._host.build(env, factory, arguments(kwargs, keeps_graph=True))
                except Exception as error:
                    failed = factory_error(env, error, envs=[env])
                    raise advised(failed) from failed.__cause__
            refuse_shared(self._host.cores)
            buffer = self._lay_out(self._host.metadata, own_memory)
            self._host.attach(self._places, buffer)
            if self._host.has_coroutines:
                self._concurrent = ConcurrentHost(self._host, self._max_concurrency)
                self.suspends = True
        except BaseException:
            self._host.close()
            raise

    async def hold(
        self, selection: Selection, command: str, *, replacing: bool = False, timeout: float | Deadline | None = None
    ) -> Lease:
        await self.enter_loop(command)
        return await super().hold(selection, command, replacing=replacing, timeout=timeout)

    async def _enter_loop(self, command: str) -> None:
        """See to it that this runs in the loop of the coroutines."""
        if self._loop is None:
            if not self._yields:
                await loop_wanted()
            self._loop = asyncio.get_running_loop()
            if self._concurrent is not None:
                self._concurrent.place = outside_of(self._loop)
        self.check_home(command)

    def check_home(self, command: str) -> None:
        if self.suspends and not self.states.closed:
            loop = asyncio._get_running_loop()
            if self._loop is not None and loop is not self._loop:
                raise wrong_loop(command)
            if loop is None:
                raise AioEnvsError(
                    f"{command}: these envs belong to an event loop, and none runs here; use SerialEnv there"
                )

    def acquire(
        self, selection: Selection, command: str, *, replacing: bool = False, timeout: float | Deadline | None = None
    ) -> Lease:
        self.check_home(command)
        deadline = self.deadline(timeout)
        self.states.acquire(selection.envs, command)
        lease = Lease(selection, command, deadline, waits=self._yields)
        if self.fenced and not self._yields:
            self._wait_for_fences(lease)
        return lease

    def _wait_for_fences(self, lease: Lease) -> None:
        try:
            self.wait(self.in_use(lease.selection.envs), lease)
        except BaseException:
            self.release(lease)
            raise

    async def enter_loop(self, command: str) -> None:
        if self._concurrent is not None and not self.states.closed:
            await self._enter_loop(command)

    async def ready(self, lease: Lease) -> Lease:
        await asyncio.sleep(0)
        await self.passed(self.in_use(lease.selection.envs), lease)
        if self.states.closed:
            raise closed_meanwhile(lease.selection.envs)
        return lease

    async def seed(self, lease: Lease, seeds: Mapping[int, int]) -> Outcome:
        return await self._execute(lease, Opcode.SEED, seeds)

    async def reset(self, lease: Lease, arguments: Mapping[int, ResetArguments]) -> Outcome:
        return await self._execute(lease, Opcode.RESET, arguments)

    def step_each(
        self, leases: Sequence[Lease], inputs: Mapping[int, Objects] | None, *, maybe_reset: bool
    ) -> list[PendingOutcome]:
        return [self._step(lease, inputs, maybe_reset=maybe_reset) for lease in leases]

    async def _step(self, lease: Lease, inputs: Mapping[int, Objects] | None, *, maybe_reset: bool) -> Outcome:
        began = time.perf_counter()
        opcode = Opcode.STEP_AND_MAYBE_RESET if maybe_reset else Opcode.STEP
        outcome = await self._execute(lease, opcode, inputs)
        self.times[0].add(time.perf_counter() - began)
        return outcome

    async def perform(self, lease: Lease, calls: Mapping[int, Call]) -> Outcome:
        return await self._execute(lease, Opcode.CALL, calls)

    async def _execute(self, lease: Lease, opcode: Opcode, values: Mapping[int, Any] | None) -> Outcome:
        selection, command = lease.selection, opcode.name.lower()
        positions = selection.parts[0][1] if selection.parts else ()
        if self._concurrent is None:
            outcome = self._run(opcode, positions, values, lease)
        else:
            outcome = await self.within(self._concurrent.execute(opcode, positions, values), lease)
            if self.states.closed:
                raise ClosedError(f"{describe_envs(selection.indices)} were closed while {command} was pending")
        return self._explained(outcome.located(command))

    def _explained(self, outcome: Outcome) -> Outcome:
        """The outcome, with what to use instead in the errors of envs that run an event loop of their own."""
        for env, error in outcome.failures.items():
            if not self.metadata[env].has_coroutines:
                outcome.failures[env] = advised(passable(error))
        return outcome

    def _run(self, opcode: Opcode, positions: Sequence[int], values: Mapping[int, Any] | None, lease: Lease) -> Outcome:
        thread = threading.get_ident()
        try:
            with self._gate:
                if self.states.closed:
                    raise closed_meanwhile(lease.selection.envs)
                self._at_work.append(thread)
            return self._host.execute(opcode, positions, values)
        finally:  # also after an interrupt right behind the append
            if thread in self._at_work:
                self._at_work.remove(thread)

    def _unanswered(self, envs: Set[int]) -> Set[int]:
        assert self._concurrent is not None
        return self._concurrent.at_work & envs

    async def within(self, awaitable: Any, lease: Lease) -> Any:
        """Wait as other pools do; but envs that are late have ended, too: no other request finds them at work."""
        if lease.deadline is None:
            return await awaitable
        task = asyncio.ensure_future(awaitable)
        try:
            return await super().within(task, lease)
        finally:
            await outlast(task)

    def begin_close(self) -> None:
        with self._gate:
            if self._at_work:
                own = threading.get_ident() in self._at_work
                whom = "code that they run themselves" if own else "another thread"
                raise ConcurrencyError(
                    f"close: these envs are in the middle of a call from {whom}; let that end first, and close then"
                )
            self.states.close()

    async def close(self) -> None:
        self.begin_close()
        if self._concurrent is None or (self._loop is not None and self._loop is not asyncio.get_running_loop()):
            self.discard()
        else:
            await self._enter_loop("close")
            await self._concurrent.close()
            self._drop_memory()

    def discard(self) -> None:
        self.states.close()
        if self._concurrent is not None and self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(_close_soon, self._concurrent)
        else:
            self._host.close()
        self._drop_memory()


_closing: set[asyncio.Task[None]] = set()  # tasks that no one else keeps


def _close_soon(host: ConcurrentHost) -> None:
    task = asyncio.ensure_future(host.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
