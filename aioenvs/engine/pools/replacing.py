"""The base of pools whose workers can die: they are started, watched, replaced, and none is left behind."""

from __future__ import annotations

import asyncio
import functools
import logging
import pickle
import signal
import warnings
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from aioenvs.engine.adapters.base import PLAIN_RULES, GymRules
from aioenvs.engine.failure import factory_error, rebuild
from aioenvs.engine.layout import EnvMetadata, check_unchanged
from aioenvs.engine.pools.answering import AnsweringPool, all_or_none
from aioenvs.engine.pools.factories import Descriptors, Shipment, pickle_factories
from aioenvs.engine.pools.pool import Selection, Timeouts, closed_meanwhile
from aioenvs.engine.pools.process_host import Exit, WorkerHandle, end_all
from aioenvs.engine.protocol import MAX_BODY, Frame, Opcode
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.errors import (
    AioEnvsError,
    ClosedError,
    PerformanceWarning,
    ProtocolError,
    WorkerDiedError,
    WorkerStartError,
    describe_envs,
)

__all__ = ["ReplacingPool", "WorkerOptions"]

logger = logging.getLogger("aioenvs")


@dataclass(frozen=True)
class WorkerOptions:
    """The options of a pool of worker processes.

    Attributes:
        preload: Modules that the process behind the workers imports once, for all of them.
        num_threads: How many threads torch may use in each worker, where the envs use it.
        by_reference: Whether envs that deal in tensors send them as objects rather than through the block.
        on_disk: Whether the block is an unnamed file rather than memory.
        at_once: How many processes may be starting at the same time; None for all.
        max_concurrency: How many envs of a process may be inside a reset or step at once, if they have coroutines; None
            for all.
        rules: What is agreed about envs with Gymnasium's signatures.
    """

    preload: tuple[str, ...] = ()
    num_threads: int = 1
    by_reference: bool = False
    on_disk: bool = False
    at_once: int | None = None
    max_concurrency: int | None = None
    rules: GymRules = PLAIN_RULES


class ReplacingPool(AnsweringPool):
    """Hosts the envs in workers of which each is a process somewhere, and belongs to the event loop that starts it.

    Subclasses say how one is started, where the block is, and what has to be given back at the end.

    Args:
        groups: The envs of each process.
        factories: One per env: a callable, or something `gymnasium.make` takes.
        kwargs: Keyword arguments for each factory.
        timeouts: How long things may take.
        options: What else is to be done differently.
    """

    ships = True
    inherits: bool = False  # whether workers have the factories already
    is_local: bool = True  # whether they are on this machine, and so can share memory and locks with this process

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        factories: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        timeouts: Timeouts,
        options: WorkerOptions = WorkerOptions(),
    ) -> None:
        super().__init__(groups, timeouts)
        self._factories = factories
        self._kwargs = kwargs
        self._options = options
        self._workers: dict[int, WorkerHandle] = {}
        self._generation = 0
        self._advised = False
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(len(self.groups) if options.at_once is None else options.at_once)

    @property
    def pids(self) -> tuple[int, ...]:
        running = [worker.process for _, worker in sorted(self._workers.items()) if not worker.process.exited.done()]
        return tuple(process.pid for process in running if process.pid is not None)

    # -- start ------------------------------------------------------------------------------------------

    async def _build(self) -> None:
        with Descriptors() as descriptors:
            shipments = self._pack(self.groups, descriptors)
            await self._prepare()
            found = await all_or_none(self._start_worker(index, shipment) for index, shipment in enumerate(shipments))
        descriptions = {
            env: description
            for group, own in zip(self.groups, found, strict=True)
            for env, description in zip(group, own, strict=True)
        }
        self._lay_out([descriptions[env] for env in range(self.num_envs)], self._allocate)
        await self._attach(range(len(self.groups)))

    def _pack(
        self, groups: Sequence[tuple[int, ...]], descriptors: Descriptors, *, replaces: bool = False
    ) -> list[Shipment]:
        options = self._options
        return pickle_factories(
            self._factories,
            self._kwargs,
            groups,
            inherited=self.inherits,
            descriptors=descriptors if self.is_local else None,
            num_threads=options.num_threads,
            by_reference=options.by_reference,
            max_concurrency=options.max_concurrency,
            rules=options.rules,
            replaces=replaces,
        )

    @abstractmethod
    async def _prepare(self) -> None:
        """See to what it takes to start workers, if it is not there."""

    @abstractmethod
    def _allocate(self, nbytes: int) -> Any:
        """Memory for the block."""

    @abstractmethod
    async def _spawn(self, index: int, descriptors: Sequence[int]) -> WorkerHandle:
        """Start a worker without envs, and put it into `_workers` as soon as there is anything to be ended.

        Args:
            index: Which.
            descriptors: Those that it needs to build its envs.

        Raises:
            OSError: If it could not be started.
        """

    async def _start_worker(self, index: int, shipment: Shipment) -> list[EnvMetadata]:
        try:
            async with self._turns, asyncio.timeout(self.timeouts.start):
                worker = await self._spawn(index, shipment.descriptors)
                reply = await worker.channel.request(Opcode.START, (), (), pickle.dumps(shipment.config))
        except TimeoutError:
            why = await self._why_late(index)
            raise self._start_error(
                index, f"did not build its envs within {self.timeouts.start} s (start_timeout){why}"
            ) from None
        except WorkerDiedError as error:
            raise self._start_error(index, f"ended before its envs were built: {error}") from None
        except OSError as error:
            raise self._start_error(index, f"could not be started: {error}") from error
        if reply.opcode is Opcode.FAILED:
            ((env, failure),) = pickle.loads(reply.body).items()
            raise factory_error(env, failure, envs=worker.envs, pid=worker.process.pid)
        descriptions: list[EnvMetadata] = cloudpickle.loads(reply.body)
        return descriptions

    def _next_generation(self) -> int:
        self._generation = self._generation % 0xFFFF + 1
        return self._generation

    async def _why_late(self, index: int) -> str:
        """Return the known reason why a worker has not started, to be added to the error."""
        return ""

    def _start_error(self, index: int, what: str) -> WorkerStartError:
        envs, worker = self.groups[index], self._workers.get(index)
        pid = worker.process.pid if worker is not None else None
        return WorkerStartError(f"the worker of {describe_envs(envs)} (pid {pid}) {what}", env_index=envs, pid=pid)

    async def _attach(self, indices: Collection[int]) -> None:
        asked = [
            self._workers[index].channel.request(Opcode.ATTACH, (), (), body)
            for index, body in zip(indices, self._attachments(indices), strict=True)
        ]
        try:
            async with asyncio.timeout(self.timeouts.start):
                await asyncio.gather(*asked)
        except TimeoutError:
            late = next(index for index, reply in zip(indices, asked, strict=True) if reply.cancelled())
            raise self._start_error(late, f"did not answer within {self.timeouts.start} s (start_timeout)") from None

    @abstractmethod
    def _attachments(self, indices: Collection[int]) -> list[bytes]:
        """For each of these workers the body of its ATTACH frame."""

    # -- requests ---------------------------------------------------------------------------------------

    def _enclose(self, values: Mapping[int, Any], envs: Collection[int]) -> bytes:
        body: bytes = cloudpickle.dumps({env: values[env] for env in envs if env in values})
        if len(body) > MAX_BODY:
            raise ProtocolError(
                f"{describe_envs(tuple(envs))} would be sent {len(body)} bytes, more than {MAX_BODY}; nothing was sent"
            )
        return body

    def _send(
        self, index: int, opcode: Opcode, positions: tuple[int, ...], envs: frozenset[int], enclosed: bytes | None
    ) -> asyncio.Future[Frame]:
        worker = self._workers[index]
        worker.last_command = opcode
        cancels = self.has_coroutines[index]
        return worker.channel.request(opcode, envs, positions, enclosed or b"", cancels=cancels)

    def _merge(self, replies: Sequence[Frame]) -> Outcome:
        outcome = Outcome.merged(map(_decoded, replies))
        if outcome.waiting:
            self._advise(outcome.waiting)
        return outcome

    def _advise(self, waiting: float) -> None:
        """Say, once, that the envs would gain by more processes."""
        if not self._advised:
            self._advised = True
            warnings.warn(
                f"{self.num_envs} envs in {len(self.groups)} processes spend {waiting:.0%} of their steps waiting "
                f"rather than computing, one after the other; num_processes={self.num_envs} would let them wait "
                "at the same time (the command 'aioenvs bench' compares such settings)",
                PerformanceWarning,
                stacklevel=2,
            )

    def _pids_of(self, envs: Collection[int]) -> list[int | None]:
        return [worker.process.pid for worker in self._workers.values() if not set(worker.envs).isdisjoint(envs)]

    # -- the end of workers -----------------------------------------------------------------------------

    def _ended(self, worker: WorkerHandle, how: Exit, cause: Exception | None) -> None:
        """The one place where a worker's end is noticed, whichever sign of it comes first."""
        worker.channel.close()
        if how.returncode is None and not worker.process.abandoned:
            worker.process.kill()
        last = worker.last_command.name.lower()
        if worker.closing:
            worker.channel.fail(ClosedError(f"{describe_envs(worker.envs)} were closed while {last} was pending"))
            return
        pid = worker.process.pid
        error = WorkerDiedError(
            f"the worker of {describe_envs(worker.envs)} (pid {pid}) {worker.killed_for or how} (last command: {last})",
            env_index=worker.envs,
            pid=pid,
        )
        error.__cause__ = cause
        logger.info("%s", error)
        self.states.break_(worker.envs, error)
        worker.channel.fail(error)
        self._wake()

    async def _caught_up(self) -> None:
        for _ in range(2):  # a turn for the end of its pipe and the report of its exit, one for what follows from them
            await asyncio.sleep(0)
        ending = [worker.ended for worker in self._workers.values() if worker.is_ending]
        if ending:
            await asyncio.wait(ending)

    async def _revive(self, selection: Selection) -> None:
        """Replace the dead workers of these envs; their other envs then need a reset of their own.

        Callers that want envs of the same worker share one replacement, which outlives a caller that is cancelled.

        Raises:
            ClosedError: If the envs are closed meanwhile.
            WorkerError: If there is no replacement.
        """
        while dead := [index for index, _, envs in selection.parts if self.states.broken(envs)]:
            if self.states.closed:  # and so might be what it takes to start a worker
                raise closed_meanwhile(selection.envs)
            for index in dead:
                if index not in self._replacing:
                    task = self._replacing[index] = asyncio.ensure_future(self._bring_back(index))
                    task.add_done_callback(functools.partial(self._replaced, index))
            tasks = [self._replacing[index] for index in dead]
            await asyncio.wait(tasks)
            if self.states.closed or any(task.cancelled() for task in tasks):
                raise closed_meanwhile(selection.envs)
            for task in tasks:
                if (error := task.exception()) is not None:
                    raise error.again() if isinstance(error, AioEnvsError) else error

    def _replaced(self, index: int, task: asyncio.Task[None]) -> None:
        del self._replacing[index]
        if not task.cancelled():
            task.exception()  # those who wait for it have it; there may be nobody left

    async def _replace(self, index: int) -> None:
        await self._prepare()
        with Descriptors() as descriptors:
            (shipment,) = self._pack([self.groups[index]], descriptors, replaces=True)
            await self._start_anew(index, shipment)
        self.replaced[index] += 1
        self.states.repair(self.groups[index])

    async def _start_anew(self, index: int, shipment: Shipment) -> None:
        try:
            for env, found in zip(self.groups[index], await self._start_worker(index, shipment), strict=True):
                check_unchanged(env, self.metadata[env], found)
            await self._attach([index])
            await self._settle(index)
            if self._workers[index].ended.done():
                raise self._start_error(index, "ended as soon as its envs were built")
        except BaseException:
            await asyncio.shield(self._dismiss([self._workers[index]], polite=False))
            raise

    async def _bring_back(self, index: int) -> None:
        """Replace a dead worker."""
        await self._replace(index)

    async def _settle(self, index: int) -> None:
        """Do what a new worker needs besides its envs; they need a reset."""

    def _shut(self) -> None:
        super()._shut()
        for task in self._replacing.values():
            task.cancel()

    def _hurry(self) -> None:
        for worker in self._workers.values():
            worker.process.signal(signal.SIGKILL)

    async def _end_everything(self, *, polite: bool) -> None:
        if self._replacing:
            await asyncio.wait(list(self._replacing.values()))
        await self._dismiss(list(self._workers.values()), polite=polite)
        self._workers.clear()
        self._drop_memory()
        await self._give_back()

    @abstractmethod
    async def _give_back(self) -> None:
        """Give back the block and whatever else is held, now that no worker is left."""

    @abstractmethod
    def _give_up(self) -> None:
        """Give everything back at once, from any thread."""

    async def _dismiss(self, workers: Sequence[WorkerHandle], *, polite: bool) -> None:
        """End these workers, and give back what is held for them here."""
        await end_all(workers, self.timeouts.close, polite=polite)
        for worker in workers:
            worker.channel.close()
            worker.process.abandon()
        if workers:
            await asyncio.wait([worker.ended for worker in workers])

    def _let_go(self, loop: asyncio.AbstractEventLoop) -> None:
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.closing = True
            worker.channel.close()
            worker.process.abandon()
        self._drop_memory()
        self._give_up()


def _decoded(reply: Frame) -> Outcome:
    """Return the outcome of a command from a worker's reply."""
    outcome = Outcome()
    if reply.positions:
        outcome.finished, waiting = reply.positions
        outcome.waiting = waiting / 100
    if reply.body:
        failures, outcome.objects, values = cloudpickle.loads(reply.body)
        outcome.failures = {env: rebuild(failure) for env, failure in failures.items()}
        outcome.values = {env: cloudpickle.loads(value) for env, value in values.items()}
    return outcome
