"""Envs with coroutines at work, all that a command concerns at once, and the worker's loop that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioenvs.engine.adapters.base import EnvAdapter
from aioenvs.engine.portal import PATIENCE, run_to_end
from aioenvs.engine.protocol import STEPS, Decoder, Frame, Opcode
from aioenvs.engine.waiting import outlast
from aioenvs.engine.worker.answers import Answers
from aioenvs.engine.worker.commands import Worker, values_of
from aioenvs.engine.worker.env_host import EnvHost, Outcome, Plan
from aioenvs.engine.worker.plain_thread import Place, PlainThread, done_at

__all__ = ["Batch", "ConcurrentHost", "ConcurrentServer", "serve_concurrently"]


PLAYED = STEPS | {Opcode.RESET}


class Batch:
    """Envs at work on one command.

    Those with coroutines have a task each. The others do it one after the other, once each coroutine has come to its
    first await, and outside of the loop if there is a place for that.

    Args:
        command: Its name.
        plan: What each does.
        envs: Their indices and adapters.
        turns: Limits how many are at work at once.
        fatal: Exceptions that are no env's own business, and end the command.
        on_fatal: Called with the first of these, before the other envs have ended.
        place: Where envs without coroutines do it; None for right here.

    Attributes:
        ended: Done when all of them are.
        fatal_error: The first fatal exception, if there was one.
    """

    def __init__(
        self,
        command: str,
        plan: Plan,
        envs: Sequence[tuple[int, EnvAdapter]],
        turns: asyncio.Semaphore | None = None,
        fatal: tuple[type[BaseException], ...] = (),
        on_fatal: Callable[[BaseException], None] = lambda _: None,
        place: Place | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.command = command
        self._plan = plan
        self._turns = turns
        self._fatal = fatal
        self._on_fatal = on_fatal
        self._place = place
        self.fatal_error: BaseException | None = None
        self._outcome = Outcome()
        self._results: dict[int, Any] = {}
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._plain: deque[tuple[int, EnvAdapter]] = deque()  # those that have not begun
        self._plain_results: deque[tuple[int, Any, BaseException | None]] = deque()
        self._undone: set[int] = set()
        self._working: asyncio.Task[None] | None = None
        for env, adapter in envs:
            if adapter.metadata.has_coroutines:
                task = loop.create_task(self._work(env, adapter))
                task.add_done_callback(self._task_ended)
                self._tasks[task] = env
            else:
                self._plain.append((env, adapter))
                self._undone.add(env)
        if self._plain:
            self._working = loop.create_task(self._work_plainly())
            self._working.add_done_callback(self._plain_ended)

    def cancel(self) -> None:
        """Cancel what is not done; it ends when the coroutines have.

        An env that has not begun is left as it is.
        """
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(IndexError):  # another thread may be taking them out at the same time
            while True:
                self._fail_plainly(self._plain.popleft()[0], asyncio.CancelledError())
        if self._working is not None:
            self._working.cancel()
        self._maybe_end()

    @property
    def at_work(self) -> set[int]:
        """Envs that are not done."""
        return {*self._tasks.values(), *self._undone}

    def outcome(self) -> Outcome:
        """Return the outcome, once it has ended.

        Raises:
            BaseException: One of the fatal ones, if an env raised that.
        """
        if self.fatal_error is not None:
            raise self.fatal_error
        return self._plan.finish(self._outcome, self._results)

    async def _work(self, env: int, adapter: EnvAdapter) -> None:
        try:
            if self._turns is not None:
                await self._turns.acquire()
            try:
                result = self._plan.action(env, adapter)
                if inspect.iscoroutine(result):
                    result = await result
            finally:
                if self._turns is not None:
                    self._turns.release()
            if result is not False:
                self._results[env] = result
        except BaseException as error:
            self._fail(env, error)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        env = self._tasks.pop(task)
        if task.cancelled():  # before its first turn, since `_work` catches whatever comes later
            self._outcome.failures[env] = asyncio.CancelledError()
        self._maybe_end()

    async def _work_plainly(self) -> None:
        most = len(self._plain) if self._turns is None else 1
        while self._plain:
            async with self._turns or contextlib.nullcontext():
                try:
                    await done_at(self._place, functools.partial(self._take_plain, most))
                finally:
                    self._keep_plain()

    def _take_plain(self, most: int) -> None:
        """Let envs that have not begun do it, up to so many, wherever this is; what comes of it is for the loop."""
        for _ in range(most):
            try:
                env, adapter = self._plain.popleft()
            except IndexError:  # the others were cancelled
                return
            try:
                self._plain_results.append((env, self._plan.action(env, adapter), None))
            except BaseException as error:
                self._plain_results.append((env, None, error))
                if isinstance(error, self._fatal):
                    return

    def _keep_plain(self) -> None:
        while self._plain_results:
            env, result, error = self._plain_results.popleft()
            if error is not None:
                self._fail_plainly(env, error)
                continue
            self._undone.discard(env)
            if result is not False:
                self._results[env] = result

    def _fail_plainly(self, env: int, error: BaseException) -> None:
        self._undone.discard(env)
        self._fail(env, error)

    def _plain_ended(self, task: asyncio.Task[None]) -> None:
        self._working = None
        error = None if task.cancelled() else task.exception()
        for env in list(self._undone):  # a signal handler raised between them
            self._fail_plainly(env, error or asyncio.CancelledError())
        self._maybe_end()

    def _fail(self, env: int, error: BaseException) -> None:
        if not isinstance(error, self._fatal):
            self._outcome.failures[env] = error
        elif self.fatal_error is None:
            self.fatal_error = error
            self._on_fatal(error)
            self.cancel()

    def _maybe_end(self) -> None:
        if not self._tasks and not self._undone and self._working is None and not self.ended.done():
            self.ended.set_result(None)


class ConcurrentHost:
    """Executes commands on the envs of a host some of which have coroutines; belongs to the loop that runs them.

    Args:
        host: The envs.
        max_concurrency: How many may be inside a reset or step at once; None for all.
        on_fatal: See `Batch`.
        place: Where envs without coroutines do what they are asked, and are closed; None for right here.
    """

    def __init__(
        self,
        host: EnvHost,
        max_concurrency: int | None = None,
        on_fatal: Callable[[BaseException], None] = lambda _: None,
        place: Place | None = None,
    ) -> None:
        self.place = place
        self._host = host
        self._on_fatal = on_fatal
        self._turns = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._batches: set[Batch] = set()
        self._closing: list[asyncio.Future[None]] = []
        self._exit: BaseException | None = None

    def begin(self, opcode: Opcode, positions: Sequence[int], values: Mapping[int, Any] | None) -> Batch:
        """Begin what an opcode says, with values by env index where there are any.

        Raises:
            Exception: Of handing the values over; nothing was begun then.
        """
        host = self._host
        plan, envs = host.plan(opcode, positions, values or {}), host.select(positions)
        turns = self._turns if opcode in PLAYED else None
        batch = Batch(opcode.name.lower(), plan, envs, turns, host.fatal, self._on_fatal, self.place)
        self._batches.add(batch)
        batch.ended.add_done_callback(lambda _: self._batches.discard(batch))
        return batch

    @property
    def at_work(self) -> set[int]:
        """Envs that are not done with what they were asked."""
        return set().union(*(batch.at_work for batch in self._batches))

    async def execute(self, opcode: Opcode, positions: Sequence[int], values: Mapping[int, Any] | None) -> Outcome:
        """Execute a command to its end. Cancelling it cancels the envs' coroutines, and waits for them."""
        batch = self.begin(opcode, positions, values)
        await outlast(batch.ended, batch.cancel)
        return batch.outcome()

    async def close(self, patience: float | None = None) -> None:
        """Cancel what is under way, then close all envs, at the same time; what they raise goes to stderr.

        Cancelling it cancels the coroutines that close them.

        Args:
            patience: Seconds that the former has to end, and then the latter; None for as long as they take.

        Raises:
            BaseException: The last of the fatal ones that they raised.
        """
        ending = asyncio.ensure_future(self._end(patience))
        await outlast(ending, self._hurry)
        ending.result()
        if self._exit is not None:
            raise self._exit

    async def _end(self, patience: float | None) -> None:
        under_way = [batch.ended for batch in self._batches]
        self._hurry()
        if under_way:
            await asyncio.wait(under_way, timeout=patience)
        self._closing = [asyncio.ensure_future(self._close(adapter)) for adapter in self._host.give_up()]
        if self._closing:
            await asyncio.wait(self._closing, timeout=patience)
        try:
            await done_at(self.place, self._host.close)
        except self._host.fatal as error:
            self._exit = error

    def _hurry(self) -> None:
        for batch in list(self._batches):
            batch.cancel()
        for closing in self._closing:
            closing.cancel()

    async def _close(self, adapter: EnvAdapter) -> None:
        try:
            closing = adapter.close()
            if closing is not None:
                await closing
        except asyncio.CancelledError:
            raise
        except self._host.fatal as error:
            self._exit = error
        except BaseException:
            traceback.print_exc(file=sys.stderr)


def serve_concurrently(sock: socket.socket, worker: Worker, decoder: Decoder, done: int) -> None:
    """Answer frames until told to close, or until the parent is gone; then close the envs.

    The loop has a thread of its own where there are envs without coroutines, which stay in the calling one.

    Args:
        sock: Stream to the parent.
        worker: What answers; its envs are built.
        decoder: Of the stream.
        done: Descriptor of the pipe for answers without a body.
    """
    if worker.host.has_plain:
        plain = PlainThread()
        plain.run_beside(_serve(sock, worker, decoder, done, plain.order), "aioenvs loop")
    else:
        run_to_end(_serve(sock, worker, decoder, done))


async def _serve(sock: socket.socket, worker: Worker, decoder: Decoder, done: int, place: Place | None = None) -> None:
    stream = _Stream(worker, decoder, done, place)
    sock.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=sock)
    last = await stream.server.serve()
    if last is not None:
        stream.answers.send(worker.answer(last))
        transport.close()
        await stream.gone


class ConcurrentServer:
    """Has frames obeyed while envs run, and sends the answers as those are done.

    Args:
        worker: What answers; its envs are built.
        send: Called with each answer.
        place: Where envs without coroutines do what they are asked; None for right here.
    """

    def __init__(self, worker: Worker, send: Callable[[Frame], None], place: Place | None = None) -> None:
        self._told: asyncio.Future[Frame | None] = asyncio.get_running_loop().create_future()
        self._host = ConcurrentHost(worker.host, worker.max_concurrency, self.fail, place)
        self._worker = worker
        self._send = send
        self._batches: dict[int, set[Batch]] = {}  # by sequence number

    async def serve(self) -> Frame | None:
        """Wait until told to close, or until the parent is gone; then end what is under way, and close the envs.

        Returns:
            The frame that said to close, which is yet to be answered; None if the parent is gone.

        Raises:
            BaseException: Whatever else ends the worker.
        """
        patience: float | None = PATIENCE
        try:
            last = await self._told
            if last is not None:
                patience = None  # the parent has some, and ends what exceeds it
            return last
        finally:
            await self._host.close(patience)

    def obey(self, frame: Frame) -> None:
        """Do what a frame says, or begin it."""
        if frame.opcode is Opcode.CANCEL:
            for batch in list(self._batches.get(frame.sequence, ())):
                batch.cancel()
        elif frame.opcode is Opcode.CLOSE:
            self.end(frame)
        elif frame.opcode is Opcode.ATTACH:
            self._send(self._worker.answer(frame))
        else:
            self._begin(frame)

    def _begin(self, frame: Frame) -> None:
        each = frame.opcode is Opcode.STEP_EACH
        shares = [frame]
        if each:
            shares = [frame._replace(positions=(p,)) for p in frame.positions or range(len(self._worker.host))]
        try:
            values = values_of(frame)
        except Exception as error:  # they cannot be rebuilt here
            for share in shares:
                self._refuse(share, error)
            return
        for share in shares:
            try:
                batch = self._host.begin(frame.opcode, share.positions, values)
            except Exception as error:  # of handing them over
                self._refuse(share, error)
                continue
            self._batches.setdefault(frame.sequence, set()).add(batch)
            batch.ended.add_done_callback(functools.partial(self._ended, share, batch))

    def _refuse(self, frame: Frame, error: Exception) -> None:
        if frame.opcode is Opcode.STEP_EACH:
            self._send(self._worker.refusal_of(frame, frame.positions[0], error))
        else:
            self._send(self._worker.refusal(frame, error))

    def _ended(self, frame: Frame, batch: Batch, _: asyncio.Future[None]) -> None:
        under_way = self._batches[frame.sequence]
        under_way.remove(batch)
        if not under_way:
            del self._batches[frame.sequence]
        if self._told.done():  # nobody waits for what was cancelled because of that
            return
        if frame.opcode is not Opcode.STEP_EACH:
            self._send(self._worker.reply(frame, lambda _: batch.outcome()))
            return
        try:
            outcome = batch.outcome()
        except Exception as error:
            self._refuse(frame, error)
        else:
            self._send(self._worker.answer_of(frame, frame.positions[0], outcome))

    def end(self, how: Frame | None) -> None:
        """Have it end, for a frame that says so, or because the parent is gone."""
        if not self._told.done():
            self._told.set_result(how)

    def fail(self, error: BaseException) -> None:
        """Have it end, for an exception."""
        if not self._told.done():
            self._told.set_exception(error)


class _Stream(asyncio.Protocol):
    """The stream of frames, and of answers.

    Attributes:
        answers: Sends them.
        server: Obeys them.
        gone: Done when the stream is closed.
    """

    def __init__(self, worker: Worker, decoder: Decoder, done: int, place: Place | None) -> None:
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.answers = Answers(self._write, done, loop.call_soon)
        self.answers.worker = worker.number
        self.server = ConcurrentServer(worker, self._answer, place)
        self._decoder = decoder
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self.server.obey(frame)
        except Exception as error:
            self.server.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set_result(None)
        self.server.end(None)

    def _answer(self, frame: Frame) -> None:
        try:
            self.answers.send(frame)
        except BrokenPipeError:  # the parent is gone
            self.server.end(None)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)
