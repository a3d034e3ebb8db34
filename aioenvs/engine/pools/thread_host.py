"""Hosts that are threads: envs live in this process, and the event loop goes on while they wait."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from aioenvs.engine.adapters.base import Handling
from aioenvs.engine.adapters.building import refuse_shared
from aioenvs.engine.adapters.copying import arguments, received
from aioenvs.engine.config import BatchConfig
from aioenvs.engine.failure import factory_error, passable
from aioenvs.engine.layout import EnvMetadata, Family
from aioenvs.engine.pools.factories import Shipment
from aioenvs.engine.pools.host import Control, Host, HostKind, Owner
from aioenvs.engine.pools.requests import Share
from aioenvs.engine.portal import run_to_end
from aioenvs.engine.protocol import Opcode, next_sequence
from aioenvs.engine.worker.concurrent import Batch, ConcurrentHost
from aioenvs.engine.worker.env_host import EnvHost, Outcome
from aioenvs.engine.worker.plain_thread import PlainThread
from aioenvs.engine.worker.random_streams import Generators, leave_alone
from aioenvs.errors import ClosedError, WorkerStartError, describe_envs

__all__ = ["Mailbox", "ThreadHost", "ThreadJob", "Threads"]

logger = logging.getLogger("aioenvs")


class ThreadJob(NamedTuple):
    """Something that a thread is to do.

    Attributes:
        action: What.
        sequence: The number of the request that is answered thereby.
    """

    action: Callable[[], Any]
    sequence: int


class Mailbox:
    """Results of threads on their way to the event loop, which is woken once for all that come at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._letters: deque[Callable[[], None]] = deque()
        self._woken = False

    def put(self, letter: Callable[[], None]) -> None:
        """Have something called in the loop, from any thread."""
        self._letters.append(letter)
        # Whoever finds it woken comes before `_empty` sets this back, and so before it looks for letters.
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for anything
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False
        while self._letters:
            self._letters.popleft()()


class ThreadHost(Host):
    """A thread with some envs; except for `_live` and what that calls, all of it belongs to the event loop.

    Where some of them have coroutines and others do not, the loop of the former has another thread, and takes jobs.

    Args:
        index: As for `Host`.
        envs: Likewise.
        owner: Likewise.
        generation: Likewise.
        config: What was asked for.
        mailbox: Where answers go.

    Attributes:
        ended: Done when the thread is about to end.
    """

    def __init__(
        self, index: int, envs: tuple[int, ...], owner: Owner, generation: int, config: BatchConfig, mailbox: Mailbox
    ) -> None:
        super().__init__(index, envs, owner, generation)
        self._building = envs[0]
        self._config = config
        self._mailbox = mailbox
        self._host = EnvHost((), Handling(generators=Generators.LEFT, rules=config.rules))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs: queue.SimpleQueue[ThreadJob | None] = queue.SimpleQueue()
        self._leaving = False
        self._concurrent: ConcurrentHost | None = None
        self._own_loop: asyncio.AbstractEventLoop | None = None  # that of the envs' coroutines
        self._plain = PlainThread()
        self._left: asyncio.Future[None] | None = None
        self._batches: dict[int, Batch] = {}
        # A daemon, since one whose env hangs must not keep the interpreter from its exit.
        self._thread = threading.Thread(target=self._live, name=f"aioenvs {describe_envs(envs)}", daemon=True)

    async def start(self, shipment: Shipment | None) -> list[EnvMetadata]:
        limit = self._config.timeouts.start
        try:
            self._thread.start()
        except RuntimeError as error:
            raise WorkerStartError(
                f"the thread of {describe_envs(self.envs)} could not be started: {error}", env_index=self.envs
            ) from error
        try:
            async with asyncio.timeout(limit) as clock:
                found: list[EnvMetadata] = await self._ask(self._build)
        except TimeoutError:
            if not clock.expired():  # a factory's own
                raise
            raise WorkerStartError(
                f"the thread of {describe_envs(self.envs)} did not build its envs within {limit} s (start_timeout); "
                f"the factory of env {self._building} has not returned",
                env_index=self.envs,
            ) from None
        return found

    async def attach(self, families: Sequence[Family], arrays: Any, buffer: Any) -> None:
        places = [(family.envs, family.layout) for family in families]
        await self._ask(functools.partial(self._host.attach, places, buffer))

    def enclose(self, values: Mapping[int, Any], envs: Collection[int]) -> Mapping[int, Any]:
        # A caller who gives up may change what he gave before the thread gets to it.
        return {env: received(values[env]) for env in envs if env in values}

    def transmit(self, opcode: Opcode, sequence: int, positions: Sequence[int], enclosed: Any) -> None:
        self._order(ThreadJob(functools.partial(self._command, opcode, positions, enclosed), sequence))

    def cancel(self, sequence: int) -> None:
        if self._own_loop is not None:
            self._order(ThreadJob(functools.partial(self._cancel, sequence), 0))

    def _ask(self, action: Callable[[], Any]) -> asyncio.Future[Any]:
        """Have something else done in the thread."""
        control = Control()
        sequence = self._sequence = next_sequence(self._sequence)
        self.pending[sequence] = Share(control, frozenset())
        self._order(ThreadJob(action, sequence))
        return control.reply

    def _order(self, job: ThreadJob | None) -> None:
        self._jobs.put(job)
        # Whoever finds no loop here comes before the thread looks for what was ordered until it had one.
        if self._own_loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so are the envs
                self._own_loop.call_soon_threadsafe(self._obey)

    def _deliver(self, sequence: int, result: Any, error: BaseException | None) -> None:
        share = self.pending.get(sequence)
        if error is not None:
            self._owner.failed(self, sequence, passable(error))
        elif share is not None and isinstance(share.request, Control):
            del self.pending[sequence]
            share.request.take(result)
        else:
            self._owner.answered(self, sequence, outcome=result)

    def leave(self) -> None:
        """Have the envs closed, once what is being done is done, and the thread ended; what waits is not begun."""
        self._leaving = True
        self._order(None)
        if self._thread.ident is None and not self.ended.done():  # it was never started
            self.ended.set_result(None)

    def fail_closed(self) -> None:
        """Nobody waits any longer for what is not done."""
        last = self.last_command.name.lower()
        self.fail_all(ClosedError(f"{describe_envs(self.envs)} were closed while {last} was pending"))

    def join(self) -> None:
        """Wait for a thread that has said that it ends."""
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def cores(self) -> list[tuple[int, Any]]:
        """See `EnvHost`; of envs that are built."""
        return self._host.cores

    # -- in the thread ----------------------------------------------------------------------------------

    def _live(self) -> None:
        leave_alone()  # what envs build in here shares the generators with other threads as well
        while not self._host.has_coroutines and (job := self._jobs.get()) is not None:
            self._do(job)
            del job  # an idle thread keeps nothing
        if self._host.has_coroutines and self._host.has_plain:
            self._plain.run_beside(self._live_on_loop(), f"{self._thread.name} loop", whatever=True)
        elif self._host.has_coroutines:
            run_to_end(self._live_on_loop(), whatever=True)
        self._host.close()
        self._mailbox.put(self._has_ended)

    def _has_ended(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    async def _live_on_loop(self) -> None:
        leave_alone()
        place = self._plain.order if self._host.has_plain else None
        self._concurrent = ConcurrentHost(self._host, self._config.max_concurrency, place=place)
        self._left = asyncio.get_running_loop().create_future()
        self._own_loop = asyncio.get_running_loop()
        self._obey()
        await self._left
        await self._concurrent.close()

    def _obey(self) -> None:
        assert self._left is not None
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                self._do(job)
            elif not self._left.done():
                self._left.set_result(None)

    def _do(self, job: ThreadJob) -> None:
        if self._leaving:
            return
        result, error = None, None
        try:
            result = job.action()
        except BaseException as caught:  # whatever it is, the thread goes on
            error = caught
        if isinstance(result, Batch):
            self._batches[job.sequence] = result
            result.ended.add_done_callback(functools.partial(self._batch_ended, job.sequence, result))
        elif job.sequence:
            self._mailbox.put(functools.partial(self._deliver, job.sequence, result, error))

    def _batch_ended(self, sequence: int, batch: Batch, _: asyncio.Future[None]) -> None:
        del self._batches[sequence]
        if self._leaving:  # nobody waits for what was cancelled because of that
            return
        outcome, error = None, None
        try:
            outcome = batch.outcome().located(batch.command)
        except Exception as caught:
            error = caught
        self._mailbox.put(functools.partial(self._deliver, sequence, outcome, error))

    def _cancel(self, sequence: int) -> None:
        if sequence in self._batches:
            self._batches[sequence].cancel()

    def _build(self) -> list[EnvMetadata]:
        """Make the envs; what they say of themselves is a copy of its own."""
        for env in self.envs:
            if self._leaving:
                break
            self._building = env
            try:
                self._host.build(env, self._config.factories[env], arguments(self._config.kwargs[env]))
            except BaseException as error:
                raise (failed := factory_error(env, error, envs=self.envs)) from failed.__cause__
        return copy.deepcopy(self._host.metadata)

    def _command(self, opcode: Opcode, positions: Sequence[int], values: Mapping[int, Any] | None) -> Outcome | Batch:
        """Let the envs do something, or begin it; never raises."""
        try:
            if self._concurrent is not None:
                return self._concurrent.begin(opcode, positions, values)
            outcome = self._host.execute(opcode, positions, values)
        except BaseException as error:  # of handing values over
            outcome = Outcome(failures=dict.fromkeys(self._host.indices(positions), error))
        return outcome.located(opcode.name.lower())


class Threads(HostKind):
    """The kind of hosts that are threads of this process.

    Args:
        config: What was asked for.
    """

    def __init__(self, config: BatchConfig) -> None:
        super().__init__(config)
        self._mailbox: Mailbox | None = None
        self._hurried: asyncio.Future[None] | None = None

    async def prepare(self, owner: Owner, hosts: Mapping[int, ThreadHost]) -> None:
        self._mailbox = Mailbox()
        self._hurried = asyncio.get_running_loop().create_future()

    def make(self, index: int, envs: tuple[int, ...], owner: Owner, generation: int) -> ThreadHost:
        assert self._mailbox is not None
        return ThreadHost(index, envs, owner, generation, self.config, self._mailbox)

    def check(self, hosts: Sequence[ThreadHost]) -> None:
        refuse_shared(pair for host in hosts for pair in host.cores)

    async def end(self, hosts: Sequence[ThreadHost], *, polite: bool) -> None:
        """Wait for the envs to be closed in any case: those that would not be could not be got rid of."""
        for host in hosts:
            host.leave()
        if hosts and self._hurried is not None:
            everybody: asyncio.Future[Any] = asyncio.gather(*(host.ended for host in hosts))
            limit = self.config.timeouts.close
            await asyncio.wait([everybody, self._hurried], timeout=limit, return_when="FIRST_COMPLETED")
        for host in hosts:
            host.fail_closed()
            if host.ended.done():
                host.join()
            else:
                logger.warning(
                    "%s did not close: the thread is still busy with %s and is left behind, since no thread can be "
                    "ended from outside; it will close what it hosts if it ever comes back",
                    describe_envs(host.envs),
                    host.last_command.name.lower(),
                )

    def hurry(self, hosts: Sequence[ThreadHost]) -> None:
        if self._hurried is not None and not self._hurried.done():
            self._hurried.set_result(None)

    def let_go(self, hosts: Sequence[ThreadHost], loop: asyncio.AbstractEventLoop | None) -> None:
        for host in hosts:
            host.leave()
            if loop is not None and not loop.is_closed():
                host.fail_closed()
