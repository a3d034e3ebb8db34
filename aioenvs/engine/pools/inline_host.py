"""The host without a process: envs live in the caller's, and commands run them right there."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from aioenvs.engine.adapters.base import Handling
from aioenvs.engine.adapters.building import refuse_shared
from aioenvs.engine.adapters.copying import arguments, received
from aioenvs.engine.config import BatchConfig
from aioenvs.engine.failure import advised, factory_error, passable
from aioenvs.engine.layout import EnvMetadata, Family
from aioenvs.engine.pools.factories import Shipment
from aioenvs.engine.pools.host import Host, HostKind, HostTraits, Owner
from aioenvs.engine.pools.requests import closed_meanwhile
from aioenvs.engine.portal import loop_wanted, outside_of
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.worker.concurrent import Batch, ConcurrentHost
from aioenvs.engine.worker.env_host import EnvHost, Outcome
from aioenvs.engine.worker.random_streams import here
from aioenvs.errors import ClosedError, ConcurrencyError, describe_envs

__all__ = ["Inline", "InlineHost"]

OWN = functools.partial(received, keeps_graph=True)


class InlineHost(Host):
    """Hosts the envs in this process.

    A command is answered before `send` returns, unless envs have coroutines: those run in the event loop that first
    asks for them, and belong to it from then on.

    Args:
        index: As for `Host`.
        envs: Likewise.
        owner: Likewise.
        config: What was asked for.
    """

    def __init__(self, index: int, envs: tuple[int, ...], owner: Owner, config: BatchConfig) -> None:
        super().__init__(index, envs, owner, 0)
        self._config = config
        handling = Handling(by_reference=True, keeps_grad=True, generators=here(), answer=OWN, rules=config.rules)
        self._host = EnvHost((SystemExit, KeyboardInterrupt), handling)
        self._metadata: list[EnvMetadata] = []
        self._concurrent: ConcurrentHost | None = None
        self._batches: dict[int, Batch] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._gate = threading.Lock()  # between commands that begin and the end of all
        self._at_work: list[int] = []  # the threads that are inside envs without coroutines

    @property
    def objects(self) -> list[Any]:
        """The envs themselves."""
        return self._host.envs

    @property
    def has_coroutines(self) -> bool:
        """Whether some envs do."""
        return self._concurrent is not None

    @property
    def at_work(self) -> set[int]:
        """The envs whose coroutines are not done with what they were asked."""
        return set() if self._concurrent is None else self._concurrent.at_work

    async def start(self, shipment: Shipment | None) -> list[EnvMetadata]:
        for env in self.envs:
            try:
                kwargs = arguments(self._config.kwargs[env], keeps_graph=True)
                self._host.build(env, self._config.factories[env], kwargs)
            except Exception as error:
                failed = factory_error(env, error, envs=[env])
                raise advised(failed) from failed.__cause__
        refuse_shared(self._host.cores)
        self._metadata = self._host.metadata
        return self._metadata

    async def attach(self, families: Sequence[Family], arrays: Any, buffer: Any) -> None:
        self._host.attach([(family.envs, family.layout) for family in families], buffer)
        if self._host.has_coroutines:
            self._concurrent = ConcurrentHost(self._host, self._config.max_concurrency)

    async def enter_loop(self, waits: bool) -> asyncio.AbstractEventLoop:
        """See to it that the rest of a coroutine runs in the loop of the envs' coroutines, and return that.

        Args:
            waits: Whether there may be none that runs yet.
        """
        if self._loop is None:
            if waits:
                await loop_wanted()
            self._loop = asyncio.get_running_loop()
            if self._concurrent is not None:
                self._concurrent.place = outside_of(self._loop)
        return self._loop

    def enclose(self, values: Mapping[int, Any], envs: Collection[int]) -> Mapping[int, Any]:
        return values

    def transmit(self, opcode: Opcode, sequence: int, positions: Sequence[int], enclosed: Any) -> None:
        if self._concurrent is not None:
            self._begin(opcode, sequence, positions, enclosed)
            return
        try:
            outcome = self._run(opcode, positions, enclosed)
        except BaseException as error:  # of handing values over, or one that ends more than an env
            self._owner.failed(self, sequence, error)
            if isinstance(error, self._host.fatal):
                raise
            return
        self._owner.answered(self, sequence, outcome=self._explained(outcome, opcode))

    def _run(self, opcode: Opcode, positions: Sequence[int], values: Mapping[int, Any] | None) -> Outcome:
        thread = threading.get_ident()
        try:
            with self._gate:
                if self._closed:
                    raise closed_meanwhile(self.envs)
                self._at_work.append(thread)
            return self._host.execute(opcode, positions, values)
        finally:  # also after an interrupt right behind the append
            if thread in self._at_work:
                self._at_work.remove(thread)

    def _begin(self, opcode: Opcode, sequence: int, positions: Sequence[int], values: Any) -> None:
        assert self._concurrent is not None
        try:
            batch = self._batches[sequence] = self._concurrent.begin(opcode, positions, values)
        except Exception as error:  # of handing values over
            self._owner.failed(self, sequence, error)
            return
        batch.ended.add_done_callback(functools.partial(self._ended, opcode, sequence, batch))

    def _ended(self, opcode: Opcode, sequence: int, batch: Batch, _: asyncio.Future[None]) -> None:
        del self._batches[sequence]
        if self._closed:
            command = opcode.name.lower()
            error = ClosedError(f"{describe_envs(self.envs)} were closed while {command} was pending")
            self._owner.failed(self, sequence, error)
            return
        try:
            outcome = batch.outcome()
        except BaseException as error:
            self._owner.failed(self, sequence, error)
        else:
            self._owner.answered(self, sequence, outcome=self._explained(outcome, opcode))

    def _explained(self, outcome: Outcome, opcode: Opcode) -> Outcome:
        """Return the outcome, with what to use instead in the errors of envs that run an event loop of their own."""
        if not outcome.failures:
            return outcome
        outcome.located(opcode.name.lower())
        first = self.envs[0]
        for env, error in outcome.failures.items():
            if not self._metadata[env - first].has_coroutines:
                outcome.failures[env] = advised(passable(error))
        return outcome

    def cancel(self, sequence: int) -> None:
        if sequence in self._batches:
            self._batches[sequence].cancel()

    # -- the end ----------------------------------------------------------------------------------------

    def begin_close(self, close: Callable[[], None]) -> None:
        """See `HostKind`."""
        with self._gate:
            if self._at_work:
                own = threading.get_ident() in self._at_work
                whom = "code that they run themselves" if own else "another thread"
                raise ConcurrencyError(
                    f"close: these envs are in the middle of a call from {whom}; let that end first, and close then"
                )
            self._closed = True
            close()

    async def close(self) -> None:
        """Close the envs; from another loop than that of the coroutines, only let them be closed."""
        self._closed = True
        here = asyncio._get_running_loop()
        if self._concurrent is None or here is None or self._loop not in (None, here):
            self.discard()
        else:
            await self.enter_loop(False)
            await self._concurrent.close()

    def discard(self) -> None:
        """Have the envs closed at once, or soon where their loop runs."""
        self._closed = True
        if self._concurrent is not None and self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(_close_soon, self._concurrent)
        else:
            self._host.close()


class Inline(HostKind):
    """The kind of host that is this process.

    Args:
        config: What was asked for.
        yields: Whether each command lets other tasks, timeouts and interrupts have their turn first; else nothing
            suspends, unless envs have coroutines, which then ask for a loop (`aioenvs.engine.portal`).
    """

    def __init__(self, config: BatchConfig, *, yields: bool) -> None:
        super().__init__(config)
        self.traits = HostTraits(is_bound=False, suspends=yields, yields=yields, outlasts=True)
        self.host: InlineHost | None = None

    def make(self, index: int, envs: tuple[int, ...], owner: Owner, generation: int) -> InlineHost:
        self.host = InlineHost(index, envs, owner, self.config)
        return self.host

    def begin_close(self, close: Callable[[], None]) -> None:
        if self.host is None:
            close()
        else:
            self.host.begin_close(close)

    async def end(self, hosts: Sequence[InlineHost], *, polite: bool) -> None:
        for host in hosts:
            if polite:
                await host.close()
            else:
                host.discard()

    def hurry(self, hosts: Sequence[InlineHost]) -> None:
        """Do nothing: `ConcurrentHost.close` hears of being cancelled itself."""

    def let_go(self, hosts: Sequence[InlineHost], loop: asyncio.AbstractEventLoop | None) -> None:
        for host in hosts:
            host.discard()


_closing: set[asyncio.Task[None]] = set()  # tasks that no one else keeps


def _close_soon(host: ConcurrentHost) -> None:
    task = asyncio.ensure_future(host.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
