"""The pool of worker processes: starts them, asks them, and sees to it that none is left."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import cloudpickle

from aioenvs.engine.channel import Channel
from aioenvs.engine.failure import Failure, rebuild
from aioenvs.engine.host import Outcome
from aioenvs.engine.layout import Layout
from aioenvs.engine.memory import SharedBlock
from aioenvs.engine.metadata import EnvMetadata, agree
from aioenvs.engine.pool import Pool, Selection, Timeouts, outlast
from aioenvs.engine.process import Exit, Launcher, WorkerProcess, shared_launcher
from aioenvs.engine.protocol import Frame, Opcode
from aioenvs.engine.shipping import pack
from aioenvs.engine.spaces import Objects
from aioenvs.engine.supervision import Worker, end_all
from aioenvs.engine.worker import WorkerConfig
from aioenvs.errors import (
    AioEnvsError,
    ClosedError,
    PerformanceWarning,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
    describe_envs,
)

__all__ = ["WorkerPool"]

logger = logging.getLogger("aioenvs")


class WorkerPool(Pool):
    """Hosts the envs in worker processes, one group each, and belongs to the event loop that starts it.

    Args:
        groups: The envs of each process.
        factories: One per env: a callable, or something `gymnasium.make` takes.
        kwargs: Keyword arguments for each factory.
        start_method: "forkserver", "spawn" or "fork".
        timeouts: How long things may take.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        factories: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        start_method: str,
        timeouts: Timeouts,
    ) -> None:
        super().__init__(groups)
        self._factories = factories
        self._kwargs = kwargs
        self._method = start_method
        self._owner = os.getpid()
        self._timeouts = timeouts
        self._workers: dict[int, Worker] = {}
        self._generation = 0
        self._block: SharedBlock | None = None
        self._launcher: Launcher | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._advised = False
        self._drained: list[tuple[frozenset[int], asyncio.Future[None]]] = []
        self._replacing: dict[int, asyncio.Task[None]] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        running = [worker.process for _, worker in sorted(self._workers.items()) if not worker.process.exited.done()]
        return tuple(process.pid for process in running if process.pid is not None)

    # -- start ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            configs = self._pack(self.groups)
            self._block = SharedBlock.create()
            self._launcher = self._make_launcher()
            descriptions = await self._start_workers(configs)
            self.metadata = descriptions[0]
            agree([descriptions[env] for env in range(self.num_envs)], range(self.num_envs), self.metadata)
            self.layout = Layout.of(self.num_envs, self.metadata.leaves)
            self.arrays = self.layout.arrays(self._block.allocate(self.layout.nbytes))
            await self._attach(range(len(self.groups)))
        except BaseException:
            await self._end(polite=False)
            raise

    def _pack(self, groups: Sequence[tuple[int, ...]]) -> list[WorkerConfig]:
        return pack(self._factories, self._kwargs, groups, inherited=self._method == "fork")

    def _make_launcher(self) -> Launcher:
        if self._method == "fork":
            return Launcher.forked(list(zip(self._factories, self._kwargs, strict=True)))
        needed = "gymnasium" in sys.modules or any(not callable(factory) for factory in self._factories)
        return shared_launcher(("gymnasium",) if needed else ())

    async def _start_workers(self, configs: Sequence[WorkerConfig]) -> dict[int, EnvMetadata]:
        """Start all at once; the first that fails ends the others."""
        tasks = [asyncio.ensure_future(self._start_worker(index, c)) for index, c in enumerate(configs)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return {
            env: description
            for config, task in zip(configs, tasks, strict=True)
            for env, description in zip(config.env_index, task.result(), strict=True)
        }

    async def _start_worker(self, index: int, config: WorkerConfig) -> list[EnvMetadata]:
        try:
            async with asyncio.timeout(self._timeouts.start):
                worker = await self._spawn(index)
                reply = await worker.channel.request(Opcode.START, (), (), pickle.dumps(config))
        except TimeoutError:
            raise self._start_error(
                index, f"did not build its envs within {self._timeouts.start} s (start_timeout)"
            ) from None
        except WorkerDiedError as error:
            raise self._start_error(index, f"ended before its envs were built: {error}") from None
        except OSError as error:
            raise self._start_error(index, f"could not be started: {error}") from error
        if reply.opcode is Opcode.FAILED:
            raise _factory_error(pickle.loads(reply.body), worker)
        descriptions: list[EnvMetadata] = cloudpickle.loads(reply.body)
        return descriptions

    async def _spawn(self, index: int) -> Worker:
        assert self._launcher is not None
        assert self._block is not None
        loop = asyncio.get_running_loop()
        self._generation = self._generation % 0xFFFF + 1
        process = WorkerProcess(self._launcher, self._method, self._block.fd)
        channel = Channel(self._generation, self._answered)
        worker = self._workers[index] = Worker(self.groups[index], process, channel, self._ended)
        process.sock.setblocking(False)
        await loop.create_unix_connection(lambda: channel, sock=process.sock)
        return worker

    def _start_error(self, index: int, what: str) -> WorkerStartError:
        envs, worker = self.groups[index], self._workers.get(index)
        pid = worker.process.pid if worker is not None else None
        return WorkerStartError(f"the worker of {describe_envs(envs)} (pid {pid}) {what}", env_index=envs, pid=pid)

    async def _attach(self, indices: Collection[int]) -> None:
        body = pickle.dumps(self.layout)
        await asyncio.gather(*(self._workers[index].channel.request(Opcode.ATTACH, (), (), body) for index in indices))

    # -- requests ---------------------------------------------------------------------------------------

    async def hold(self, selection: Selection, command: str, *, replacing: bool = False) -> None:
        if (asyncio.get_running_loop() is not self._loop or os.getpid() != self._owner) and not self.slots.closed:
            raise AioEnvsError(
                f"{command}: these envs belong to the event loop and process that started them, and this is another "
                "one; make envs of its own for each, or close these there first"
            )
        ready = self.slots.acquire(selection.envs, command, replacing=replacing)
        if ready and not (replacing and self.slots.broken(selection.envs)):
            return
        try:
            await self._within(self._drain(selection.envs), selection, command)
            if replacing:
                await self._revive(selection)
            elif broken := self.slots.broken(selection.envs):
                raise self.slots.error(min(broken))
        except BaseException:
            self.release(selection)
            raise

    async def _drain(self, envs: frozenset[int]) -> None:
        while not self.slots.drained(envs):
            waiter = asyncio.get_running_loop().create_future()
            self._drained.append((envs, waiter))
            await waiter
        if self.slots.closed:
            raise ClosedError(f"{describe_envs(tuple(envs))} were closed while a request waited for them")

    async def seed(self, selection: Selection, seeds: Mapping[int, int]) -> Outcome:
        return await self._ask(selection, Opcode.SEED, seeds)

    async def reset(self, selection: Selection, kwargs: Mapping[int, Mapping[str, Any]]) -> Outcome:
        return await self._ask(selection, Opcode.RESET, kwargs)

    async def step(self, selection: Selection, actions: Mapping[int, Objects] | None, *, maybe_reset: bool) -> Outcome:
        return await self._ask(selection, Opcode.STEP_AND_MAYBE_RESET if maybe_reset else Opcode.STEP, actions)

    async def _ask(self, selection: Selection, opcode: Opcode, values: Mapping[int, Any] | None) -> Outcome:
        """Send a command to every worker concerned, with the values for its envs, and await all replies."""
        asked: list[asyncio.Future[Frame]] = []
        for index, positions, envs in selection.parts:
            worker = self._workers[index]
            worker.last_command = opcode
            body = cloudpickle.dumps({env: values[env] for env in envs if env in values}) if values else b""
            asked.append(worker.channel.request(opcode, envs, positions, body))
            self.slots.sent(envs)
        replies = asyncio.gather(*asked)
        if self._timeouts.step is not None:
            frames = await self._within(replies, selection, opcode.name.lower())
        else:
            frames = await replies
        outcome = _merge(frames)
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
                "at the same time",
                PerformanceWarning,
                stacklevel=2,
            )

    async def _within(self, awaitable: Any, selection: Selection, command: str) -> Any:
        try:
            async with asyncio.timeout(self._timeouts.step) as scope:
                return await awaitable
        except TimeoutError:
            if not scope.expired():
                raise
            late = self.slots.unanswered(selection.envs) or selection.envs
            raise self._late(tuple(sorted(late)), command) from None

    def _late(self, envs: tuple[int, ...], command: str) -> WorkerTimeoutError:
        pids = [worker.process.pid for worker in self._workers.values() if not set(worker.envs).isdisjoint(envs)]
        return WorkerTimeoutError(
            f"{describe_envs(envs)} (pid {', '.join(map(str, pids))}) did not answer {command} within "
            f"{self._timeouts.step} s (step_timeout); the late reply will be dropped, and the next request for it "
            "waits until it has come",
            env_index=envs,
            pid=pids[0] if pids else None,
        )

    def _answered(self, envs: Collection[int]) -> None:
        self.slots.answered(envs)
        if self._drained:
            self._wake()

    def _wake(self) -> None:
        for envs, waiter in self._drained:
            if self.slots.drained(envs) and not waiter.done():
                waiter.set_result(None)
        self._drained = [(envs, waiter) for envs, waiter in self._drained if not waiter.done()]

    # -- the end of workers -----------------------------------------------------------------------------

    def _ended(self, worker: Worker, how: Exit, cause: Exception | None) -> None:
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
            f"the worker of {describe_envs(worker.envs)} (pid {pid}) {how} (last command: {last})",
            env_index=worker.envs,
            pid=pid,
        )
        error.__cause__ = cause
        logger.info("%s", error)
        self.slots.break_(worker.envs, error)
        worker.channel.fail(error)
        self._wake()

    async def _revive(self, selection: Selection) -> None:
        """Replace the dead workers of these envs; their other envs then need a reset of their own.

        Callers that want envs of the same worker share one replacement, which outlives a caller that is cancelled.
        """
        while dead := [index for index, _, envs in selection.parts if self.slots.broken(envs)]:
            for index in dead:
                if index not in self._replacing:
                    task = self._replacing[index] = asyncio.ensure_future(self._replace(index))
                    task.add_done_callback(functools.partial(self._replaced, index))
            tasks = [self._replacing[index] for index in dead]
            await asyncio.wait(tasks)
            for task in tasks:
                task.result()

    def _replaced(self, index: int, task: asyncio.Task[None]) -> None:
        del self._replacing[index]
        if not task.cancelled():
            task.exception()  # those who wait for it have it; there may be nobody left

    async def _replace(self, index: int) -> None:
        if self._launcher is None or not self._launcher.alive:
            self._launcher = self._make_launcher()
        (config,) = self._pack([self.groups[index]])
        try:
            agree(await self._start_worker(index, config), self.groups[index], self.metadata)
            await self._attach([index])
        except BaseException:
            await asyncio.shield(self._dismiss([self._workers[index]], polite=False))
            raise
        self.slots.repair(self.groups[index])

    async def close(self) -> None:
        if asyncio.get_running_loop() is not self._loop or os.getpid() != self._owner:
            self.discard()
            return
        self._shut()
        await self._end(polite=True)

    def _shut(self) -> None:
        """Let nobody in any more, and nobody wait."""
        self.slots.close()
        for task in self._replacing.values():
            task.cancel()
        self._wake()

    async def _end(self, *, polite: bool) -> None:
        """End all there is; cancelling it makes it quicker, but it ends all the same."""
        ending = asyncio.ensure_future(self._end_everything(polite=polite))
        await outlast(ending, self._kill)
        ending.result()

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.process.signal(signal.SIGKILL)

    async def _end_everything(self, *, polite: bool) -> None:
        if self._replacing:
            await asyncio.wait(list(self._replacing.values()))
        await self._dismiss(list(self._workers.values()), polite=polite)
        self._workers.clear()
        self._release_block()
        if self._launcher is not None and self._method == "fork":
            await self._launcher.close()
        self._launcher = None

    async def _dismiss(self, workers: Sequence[Worker], *, polite: bool) -> None:
        """End these workers, and give back what is held for them here."""
        await end_all(workers, self._timeouts.close, polite=polite)
        for worker in workers:
            worker.channel.close()
            worker.process.abandon()
        if workers:
            await asyncio.wait([worker.ended for worker in workers])

    def _release_block(self) -> None:
        self.arrays = {}
        if self._block is not None:
            self._block.close()
            self._block = None

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
            self.slots.close()
        else:
            self._shut()
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.closing = True
            worker.channel.close()
            worker.process.abandon()
        self._release_block()
        if self._launcher is not None and self._method == "fork":
            self._launcher.stop()


def _merge(replies: Sequence[Frame]) -> Outcome:
    """One outcome of all replies."""
    outcome = Outcome()
    for reply in replies:
        if reply.positions:
            finished, waiting = reply.positions
            outcome.finished += finished
            outcome.waiting = max(outcome.waiting, waiting / 100)
        if reply.body:
            failures, objects = cloudpickle.loads(reply.body)
            outcome.failures |= {env: rebuild(failure) for env, failure in failures.items()}
            outcome.objects |= objects
    return outcome


def _factory_error(failures: dict[int, Failure], worker: Worker) -> WorkerStartError:
    env, failure = next(iter(failures.items()))
    error = WorkerStartError(
        f"the factory of env {env} failed in process {worker.process.pid}: {failure.summary}",
        env_index=worker.envs,
        pid=worker.process.pid,
    )
    error.__cause__ = rebuild(failure)
    return error
