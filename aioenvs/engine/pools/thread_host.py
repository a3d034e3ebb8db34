"""The pool of threads: envs live in this process, and the event loop goes on while they wait."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aioenvs.engine.adapters.base import PLAIN_RULES, GymRules, Handling
from aioenvs.engine.adapters.building import refuse_shared
from aioenvs.engine.adapters.copying import arguments, received
from aioenvs.engine.failure import factory_error, passable
from aioenvs.engine.layout import EnvMetadata, Layout
from aioenvs.engine.memory import own_memory
from aioenvs.engine.pools.answering import AnsweringPool, all_or_none
from aioenvs.engine.pools.pool import Selection, Timeouts
from aioenvs.engine.portal import run_to_end
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.worker.concurrent import Batch, ConcurrentHost
from aioenvs.engine.worker.env_host import EnvHost, Outcome
from aioenvs.engine.worker.plain_thread import PlainThread
from aioenvs.engine.worker.random_streams import Generators, leave_alone
from aioenvs.errors import AioEnvsError, ClosedError, WorkerStartError, describe_envs

__all__ = ["ThreadPool"]

logger = logging.getLogger("aioenvs")


class ThreadJob(NamedTuple):
    """Something that a thread is to do.

    Attributes:
        action: What.
        envs: Those of which it is an answer that it was done.
        done: Gets what came of it, unless nobody waits for that any more.
    """

    action: Callable[[], Any]
    envs: Collection[int]
    done: asyncio.Future[Any]


class Mailbox:
    """Results of threads on their way to the event loop, which is woken once for all that come at a time.

    Args:
        deliver: Called in the loop with each errand and its result or exception.
    """

    def __init__(self, deliver: Callable[[ThreadJob, Any, BaseException | None], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._letters: deque[tuple[ThreadJob, Any, BaseException | None]] = deque()
        self._woken = False

    def put(self, errand: ThreadJob, result: Any, error: BaseException | None) -> None:
        """Send a letter, from any thread."""
        self._letters.append((errand, result, error))
        # Whoever finds it woken comes before `_empty` sets this back, and so before it looks for letters.
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for anything
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False
        while self._letters:
            self._deliver(*self._letters.popleft())


class HostThread:
    """A thread with some envs; except for `_live` and what that calls, all of it belongs to the event loop.

    Where some of them have coroutines and others do not, the loop of the former has another thread, and takes errands.

    Args:
        envs: Their indices.
        factories: What makes an env, of the whole pool.
        kwargs: Keyword arguments for each factory.
        mailbox: Where answers go.
        max_concurrency: How many may be inside a reset or step at once, if they have coroutines; None for all.
        rules: What is agreed about envs with Gymnasium's signatures.
    """

    def __init__(
        self,
        envs: tuple[int, ...],
        factories: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any]],
        mailbox: Mailbox,
        max_concurrency: int | None = None,
        rules: GymRules = PLAIN_RULES,
    ) -> None:
        self.envs = envs
        self.building = envs[0]
        self.last_command = Opcode.START
        self._factories = factories
        self._kwargs = kwargs
        self._mailbox = mailbox
        self._host = EnvHost((), Handling(generators=Generators.LEFT, rules=rules))
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._pending: set[asyncio.Future[Any]] = set()
        self._errands: queue.SimpleQueue[ThreadJob | None] = queue.SimpleQueue()
        self._leaving = False
        self._max_concurrency = max_concurrency
        self._concurrent: ConcurrentHost | None = None
        self._own_loop: asyncio.AbstractEventLoop | None = None  # that of the envs' coroutines
        self._plain = PlainThread()
        self._left: asyncio.Future[None] | None = None
        self._batches: dict[asyncio.Future[Any], Batch] = {}
        # A daemon, since one whose env hangs must not keep the interpreter from its exit.
        self._thread = threading.Thread(target=self._live, name=f"aioenvs {describe_envs(envs)}", daemon=True)

    def begin(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: If there are too many.
        """
        self._thread.start()

    def ask(self, action: Callable[[], Any], envs: Collection[int] = ()) -> asyncio.Future[Any]:
        """Have something done in the thread.

        Cancelling the future abandons what comes of it, and cancels the coroutines that envs have for it.
        """
        done = self._loop.create_future()
        self._pending.add(done)
        done.add_done_callback(self._pending.discard)
        self._order(ThreadJob(action, envs, done))
        if self._own_loop is not None:
            done.add_done_callback(self._give_up)
        return done

    def _give_up(self, done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            self._order(ThreadJob(functools.partial(self._cancel, done), (), done))

    def _order(self, errand: ThreadJob | None) -> None:
        self._errands.put(errand)
        # Whoever finds no loop here comes before the thread looks for what was ordered until it had one.
        if self._own_loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so are the envs
                self._own_loop.call_soon_threadsafe(self._obey)

    def leave(self) -> None:
        """Have the envs closed, once what is being done is done, and the thread ended; what waits is not begun."""
        self._leaving = True
        self._order(None)
        if self._thread.ident is None and not self.ended.done():  # it was never started
            self.ended.set_result(None)

    def fail(self, error: AioEnvsError) -> None:
        """Nobody waits any longer for what is not done."""
        for done in list(self._pending):
            if not done.done():
                done.set_exception(error.again())
                done.exception()  # the awaiting side may be gone as well: no complaint then

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
        while not self._host.has_coroutines and (errand := self._errands.get()) is not None:
            self._do(errand)
            del errand  # an idle thread keeps nothing
        if self._host.has_coroutines and self._host.has_plain:
            self._plain.run_beside(self._live_on_loop(), f"{self._thread.name} loop", whatever=True)
        elif self._host.has_coroutines:
            run_to_end(self._live_on_loop(), whatever=True)
        self._host.close()
        self._mailbox.put(ThreadJob(self.leave, (), self.ended), None, None)

    async def _live_on_loop(self) -> None:
        leave_alone()
        place = self._plain.order if self._host.has_plain else None
        self._concurrent = ConcurrentHost(self._host, self._max_concurrency, place=place)
        self._left = asyncio.get_running_loop().create_future()
        self._own_loop = asyncio.get_running_loop()
        self._obey()
        await self._left
        await self._concurrent.close()

    def _obey(self) -> None:
        assert self._left is not None
        while not self._errands.empty():
            errand = self._errands.get()
            if errand is not None:
                self._do(errand)
            elif not self._left.done():
                self._left.set_result(None)

    def _do(self, errand: ThreadJob) -> None:
        if self._leaving:
            return
        result, error = None, None
        try:
            result = errand.action()
        except BaseException as caught:  # whatever it is, the thread goes on
            error = caught
        if isinstance(result, Batch):
            self._batches[errand.done] = result
            result.ended.add_done_callback(functools.partial(self._batch_ended, errand, result))
        else:
            self._mailbox.put(errand, result, error)

    def _batch_ended(self, errand: ThreadJob, batch: Batch, _: asyncio.Future[None]) -> None:
        del self._batches[errand.done]
        if self._leaving:  # nobody waits for what was cancelled because of that
            return
        outcome, error = None, None
        try:
            outcome = batch.outcome().located(batch.command)
        except Exception as caught:
            error = caught
        self._mailbox.put(errand, outcome, error)

    def _cancel(self, done: asyncio.Future[Any]) -> None:
        if done in self._batches:
            self._batches[done].cancel()

    def build(self) -> list[EnvMetadata]:
        """Make the envs; what they say of themselves is a copy of its own."""
        for env in self.envs:
            if self._leaving:
                break
            self.building = env
            try:
                self._host.build(env, self._factories[env], arguments(self._kwargs[env]))
            except BaseException as error:
                raise (failed := factory_error(env, error, envs=self.envs)) from failed.__cause__
        return copy.deepcopy(self._host.metadata)

    def attach(self, places: Iterable[tuple[Sequence[int], Layout]], buffer: Any) -> None:
        """Connect the envs to their rows."""
        self._host.attach(places, buffer)

    def command(self, opcode: Opcode, positions: Sequence[int], values: Mapping[int, Any] | None) -> Outcome | Batch:
        """Let the envs do something, or begin it; never raises."""
        try:
            if self._concurrent is not None:
                return self._concurrent.begin(opcode, positions, values)
            outcome = self._host.execute(opcode, positions, values)
        except BaseException as error:  # of handing values over
            outcome = Outcome(failures=dict.fromkeys(self._host.indices(positions), error))
        return outcome.located(opcode.name.lower())


class ThreadPool(AnsweringPool):
    """Hosts the envs in threads of this process, one group each, and belongs to the event loop that starts it.

    Args:
        groups: The envs of each thread.
        factories: One per env.
        kwargs: Keyword arguments for each.
        timeouts: How long things may take.
        max_concurrency: How many envs of a thread may be inside a reset or step at once, if they have coroutines; None
            for all.
        rules: What is agreed about envs with Gymnasium's signatures.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        factories: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        timeouts: Timeouts,
        max_concurrency: int | None = None,
        rules: GymRules = PLAIN_RULES,
    ) -> None:
        super().__init__(groups, timeouts)
        self._max_concurrency = max_concurrency
        self._rules = rules
        self._factories = factories
        self._kwargs = kwargs
        self._threads: list[HostThread] = []
        self._hurried: asyncio.Future[None] | None = None

    # -- start ------------------------------------------------------------------------------------------

    async def _build(self) -> None:
        self._hurried = asyncio.get_running_loop().create_future()
        mailbox = Mailbox(self._deliver)
        self._threads = [
            HostThread(group, self._factories, self._kwargs, mailbox, self._max_concurrency, self._rules)
            for group in self.groups
        ]
        found = await all_or_none(self._start_thread(thread) for thread in self._threads)
        refuse_shared(pair for thread in self._threads for pair in thread.cores)
        buffer = self._lay_out([description for own in found for description in own], own_memory)
        places = self._places
        await asyncio.gather(
            *(thread.ask(functools.partial(thread.attach, places, buffer)) for thread in self._threads)
        )

    async def _start_thread(self, thread: HostThread) -> list[EnvMetadata]:
        limit = self.timeouts.start
        try:
            thread.begin()
        except RuntimeError as error:
            raise WorkerStartError(
                f"the thread of {describe_envs(thread.envs)} could not be started: {error}", env_index=thread.envs
            ) from error
        try:
            async with asyncio.timeout(limit) as clock:
                found: list[EnvMetadata] = await thread.ask(thread.build)
        except TimeoutError:
            if not clock.expired():  # a factory's own
                raise
            raise WorkerStartError(
                f"the thread of {describe_envs(thread.envs)} did not build its envs within {limit} s (start_timeout); "
                f"the factory of env {thread.building} has not returned",
                env_index=thread.envs,
            ) from None
        return found

    # -- requests ---------------------------------------------------------------------------------------

    async def _revive(self, selection: Selection) -> None:
        """Do nothing: no thread dies of what its envs do."""

    def _enclose(self, values: Mapping[int, Any], envs: Collection[int]) -> Mapping[int, Any]:
        # A caller who gives up may change what he gave before the thread gets to it.
        return {env: received(values[env]) for env in envs if env in values}

    def _send(
        self,
        index: int,
        opcode: Opcode,
        positions: tuple[int, ...],
        envs: frozenset[int],
        enclosed: Mapping[int, Any] | None,
    ) -> asyncio.Future[Outcome]:
        thread = self._threads[index]
        thread.last_command = opcode
        return thread.ask(functools.partial(thread.command, opcode, positions, enclosed), envs)

    def _deliver(self, errand: ThreadJob, result: Any, error: BaseException | None) -> None:
        self._answered(errand.envs)
        if errand.done.done():
            return
        if error is None:
            errand.done.set_result(result)
        else:
            errand.done.set_exception(passable(error))

    def _merge(self, replies: Sequence[Outcome]) -> Outcome:
        return Outcome.merged(replies)

    # -- the end ----------------------------------------------------------------------------------------

    async def _end_everything(self, *, polite: bool) -> None:
        """Wait for the envs to be closed in any case: those that would not be could not be got rid of."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.leave()
        if threads and self._hurried is not None:
            everybody: asyncio.Future[Any] = asyncio.gather(*(thread.ended for thread in threads))
            await asyncio.wait([everybody, self._hurried], timeout=self.timeouts.close, return_when="FIRST_COMPLETED")
        self._drop_memory()
        for thread in threads:
            thread.fail(_closed(thread))
            if thread.ended.done():
                thread.join()
            else:
                logger.warning(
                    "%s did not close: the thread is still busy with %s and is left behind, since no thread can be "
                    "ended from outside; it will close what it hosts if it ever comes back",
                    describe_envs(thread.envs),
                    thread.last_command.name.lower(),
                )

    def _hurry(self) -> None:
        if self._hurried is not None and not self._hurried.done():
            self._hurried.set_result(None)

    def _let_go(self, loop: asyncio.AbstractEventLoop) -> None:
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.leave()
            if not loop.is_closed():
                thread.fail(_closed(thread))
        self._drop_memory()


def _closed(thread: HostThread) -> ClosedError:
    return ClosedError(f"{describe_envs(thread.envs)} were closed while {thread.last_command.name.lower()} was pending")
