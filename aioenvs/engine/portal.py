"""The way from plain calls to coroutines: driving one by hand, a private loop, a thread with a loop."""

from __future__ import annotations

import _signal  # whose functions do not make enum members of handlers, which costs as much as a turn of the loop
import asyncio
import contextlib
import contextvars
import functools
import os
import signal
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

from aioenvs.errors import AioEnvsError, ConcurrencyError

Method = TypeVar("Method", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


_taskless: set[types.CodeType] = set()


def taskless(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Say of a coroutine function that it does not ask for the task in which it runs, as `asyncio.timeout` does.

    Plain calls then run it without one.
    """
    _taskless.add(function.__code__)
    return function


BEGUN = object()  # for a coroutine that waits for nothing now


@types.coroutine
def driven(
    coroutine: Coroutine[Any, Any, T],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    pending: Any = BEGUN,
) -> Generator[Any, Any, T]:
    """Run a coroutine, also one that was begun elsewhere and so cannot be awaited.

    Args:
        coroutine: What is run.
        context: What makes a context to run it in, of which other tasks see nothing: it is left whenever the coroutine
            waits.
        pending: What it waits for already, where somebody else has run it until then.
    """
    resume: Callable[[], Any] = functools.partial(coroutine.send, None)
    while True:
        try:
            if pending is BEGUN:
                with context():
                    pending = resume()
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            answer = yield pending
        except GeneratorExit:
            with context():
                coroutine.close()
            raise
        except BaseException as error:
            resume = functools.partial(coroutine.throw, error)
        else:
            resume = functools.partial(coroutine.send, answer)
        pending = BEGUN


async def awaited(awaitable: Awaitable[T]) -> T:
    """A coroutine that has the result of anything that can be awaited."""
    return await awaitable


SIGINT = int(signal.SIGINT)
PATIENCE = 1.0  # seconds that cancelled coroutines get to end where nobody else sees to it that they do
LOOP = object()  # what `loop_wanted` yields


class Portal(Protocol):
    """Runs one coroutine at a time to its end."""

    @property
    def foreign(self) -> bool:
        """Whether the portal belongs to another process, of which this is a fork."""

    @property
    def moves(self) -> bool:
        """Whether what it runs now would be run in another thread than the calling one."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it and return its result, or raise what it raises."""

    def close(self) -> None:
        """Give back what the portal holds."""


@types.coroutine
def loop_wanted() -> Generator[Any, None, None]:
    """Have the rest of a coroutine, which an `Immediate` has begun, run on a loop."""
    yield LOOP


class Immediate:
    """For coroutines that never suspend, since nothing they do can wait: no loop is needed.

    The first that asks for one (`loop_wanted`) gets it nevertheless, and so do all that come later.
    """

    def __init__(self) -> None:
        self._portal: LoopPortal | None = None

    @property
    def foreign(self) -> bool:
        """Whether the portal has a loop that belongs to another process, of which this is a fork."""
        return self._portal is not None and self._portal.foreign

    @property
    def moves(self) -> bool:
        """Whether what it runs now would be run in another thread than the calling one."""
        return self._portal is not None and self._portal.moves

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._portal is not None:
            return self._portal.run(coroutine)
        try:
            wanted = coroutine.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if wanted is LOOP:
            self._portal = LoopPortal()
            return self._portal.run(_rest(coroutine))
        coroutine.close()
        raise TypeError(
            "these envs run without an event loop, so nothing that they are given may wait for one, such as a policy "
            "that awaits; use AsyncSerialEnv"
        )

    def close(self) -> None:
        if self._portal is not None:
            self._portal.close()


async def _rest(coroutine: Coroutine[Any, Any, T], pending: asyncio.Future[Any] | None = None) -> T:
    """Return the rest of a coroutine that was begun elsewhere, where it cannot be awaited."""
    if pending is not None:
        await asyncio.wait([pending])
    return await driven(coroutine)


class _Taskless:
    """The run of a coroutine without a task.

    Attributes:
        pending: What it waits for.
    """

    pending: asyncio.Future[Any] | None = None
    _cancelled = False

    def cancel(self) -> None:
        """Cancel it where it waits."""
        self._cancelled = True
        if self.pending is not None:
            self.pending.cancel()

    def resumed(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any] | None:
        """Run the coroutine until it waits, and return what for."""
        if self._cancelled and (self.pending is None or not self.pending.cancelled()):
            pending = coroutine.throw(asyncio.CancelledError())
        else:
            pending = coroutine.send(None)
        self._cancelled = False
        if pending is not None:
            pending._asyncio_future_blocking = False  # which says that it was handed to whoever waits for it
        future: asyncio.Future[Any] | None = pending
        return future


def _nothing() -> None:
    """Be called in the next turn of a loop, which therefore does not wait."""


class _PausedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still while nobody runs it, so that no time is up before it could be seen to.

    It interrupts itself for what must not be run inside of a running loop (`outside`).

    Attributes:
        taskless: What was run last without a task.
    """

    taskless: _Taskless | None = None

    def __init__(self) -> None:
        self._paused = 0.0  # for how long it was
        self._stopped = super().time()
        self._told = False
        self._jobs: deque[Callable[[], None]] = deque()
        super().__init__()

    def time(self) -> float:
        return super().time() - self._paused

    def run_forever(self) -> None:
        self._paused += super().time() - self._stopped
        try:
            self._work_off()
            while True:
                super().run_forever()
                self._work_off()
                if self._told:
                    return
        finally:
            self._told = False
            self._stopped = super().time()

    def stop(self) -> None:
        self._told = True
        super().stop()

    def outside(self, job: Callable[[], None]) -> None:
        """Have something run by the thread of the loop at the end of this turn, while the loop does not run."""
        self._jobs.append(job)
        super().stop()

    def run_taskless(self, coroutine: Coroutine[Any, Any, T], interrupts: _Interrupts) -> T:
        """Run a coroutine without a task around it, which saves a turn of the loop at its begin and one at its end.

        What else is ready runs as well while it waits.

        Raises:
            BaseException: What the coroutine raises; or what a signal handler raises, once the coroutine has ended.
        """
        run = self.taskless = _Taskless()
        interrupts.arm(functools.partial(self.call_soon_threadsafe, run.cancel))
        self._paused += super().time() - self._stopped
        self._thread_id = threading.get_ident()
        asyncio._set_running_loop(self)
        try:
            while True:
                run.pending = run.resumed(coroutine)
                try:
                    self._run_turns(run.pending)
                except BaseException:
                    self._end(coroutine, run.pending)
                    raise
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            asyncio._set_running_loop(None)
            self._thread_id = None  # type: ignore[assignment]
            self._stopping = self._told = False
            self._stopped = super().time()

    def _run_turns(self, pending: asyncio.Future[Any] | None) -> None:
        """Run until a future is done; one turn if there is none."""
        if pending is None:
            self.call_soon(_nothing)
        elif pending.done():
            return
        while True:
            self._run_once()  # type: ignore[attr-defined]
            if self._jobs:
                asyncio._set_running_loop(None)
                self._work_off()
                asyncio._set_running_loop(self)
            if pending is None or pending.done():
                return

    def _end(self, coroutine: Coroutine[Any, Any, Any], pending: asyncio.Future[Any] | None) -> None:
        """Cancel a coroutine, and let it end."""
        asyncio._set_running_loop(None)
        self._thread_id, self._stopping = None, False  # type: ignore[assignment]
        if pending is not None:
            pending.cancel()
        task = self.create_task(_rest(coroutine, pending))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            self.run_until_complete(task)

    def _work_off(self) -> None:
        while self._jobs:
            self._jobs[0]()  # a signal handler that raises in here leaves it to the next run
            self._jobs.popleft()


def outside_of(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], None]], None] | None:
    """Return the call by which the thread of a private loop runs a job outside of it; None for any other loop."""
    return loop.outside if isinstance(loop, _PausedLoop) else None


class LoopPortal:
    """A private event loop.

    It is driven in the calling thread, which saves a thread hop per call, unless that thread runs a loop already
    (a notebook, a server): from then on the private loop lives in a thread of its own.
    """

    def __init__(self) -> None:
        self._loop = _PausedLoop()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._driver = 0  # the thread that is, or was last, in `_drive`

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it and return its result, or raise what it raises.

        Raises:
            AioEnvsError: In a fork of the process that made the portal.
            ConcurrencyError: If another thread, or code that runs inside the loop, is in the middle of a call.
            KeyboardInterrupt: On Ctrl-C; the coroutine is cancelled first and has ended.
        """
        if self.foreign:
            coroutine.close()
            raise AioEnvsError("these envs belong to the process that started them, and this is a fork of it")
        with _Interrupts() as interrupts:
            if self._thread is None:
                if not self._busy.acquire(blocking=False):
                    coroutine.close()
                    own = self._driver == threading.get_ident()
                    whom = "code that they run themselves" if own else "another thread"
                    raise ConcurrencyError(f"these envs are in the middle of a call from {whom}; let that end first")
                try:
                    self._driver = threading.get_ident()
                    if asyncio._get_running_loop() is None:
                        if getattr(coroutine, "cr_code", None) in _taskless:
                            return self._loop.run_taskless(coroutine, interrupts)
                        return self._drive(coroutine, interrupts)
                    self._move_to_thread()
                finally:
                    self._busy.release()
            return self._submit(coroutine, interrupts)

    @property
    def foreign(self) -> bool:
        """Whether this is a fork of the process that made it, whose loop is not to be touched."""
        return os.getpid() != self._owner

    @property
    def moves(self) -> bool:
        """Whether what it runs now would be run in another thread than the calling one."""
        return self._thread is not None or asyncio._get_running_loop() is not None

    def _drive(self, coroutine: Coroutine[Any, Any, T], interrupts: _Interrupts) -> T:
        task = self._loop.create_task(self._and_stop(coroutine))
        task.add_done_callback(self._stop)
        interrupts.arm(functools.partial(self._loop.call_soon_threadsafe, task.cancel))
        try:
            while not task.done():
                self._loop.run_forever()
            return task.result()
        except BaseException:
            self._settle(task)
            raise
        finally:
            coroutine.close()  # where it was cancelled before its first turn

    async def _and_stop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it and stop the loop at once, rather than in the turn after that, as `run_until_complete` does."""
        try:
            return await coroutine
        finally:
            task = asyncio.current_task(self._loop)
            if task is not None:
                task.remove_done_callback(self._stop)  # which is for a task that never had a turn
            self._loop.stop()

    def _stop(self, _: asyncio.Task[Any]) -> None:
        self._loop.stop()

    def _settle(self, task: asyncio.Task[Any]) -> None:
        """After an exception that a signal handler of the user's raised inside the loop, let the task end."""
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)

    def _move_to_thread(self) -> None:
        self._thread = threading.Thread(target=self._live, name="aioenvs-portal", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(wind_up())
        finally:
            self._loop.close()

    def _submit(self, coroutine: Coroutine[Any, Any, T], interrupts: _Interrupts) -> T:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ConcurrencyError("a synchronous method was called from inside the envs' own event loop")
        errand = _PortalCall(self._loop, coroutine)
        try:
            self._loop.call_soon_threadsafe(errand.begin)
            interrupts.arm(functools.partial(self._loop.call_soon_threadsafe, errand.cancel))
            errand.ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(errand.cancel)
            errand.ended.wait()
            raise
        return errand.result()

    def close(self) -> None:
        """Close the loop, and end its thread if it has one. Closing it again does nothing."""
        if self._loop.is_closed() or self.foreign:
            return
        if self._thread is None and asyncio._get_running_loop() is not None:
            self._move_to_thread()
        if self._thread is None:
            self._loop.run_until_complete(wind_up())
            self._loop.close()
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # garbage is collected wherever it happens
            self._thread.join()


class _PortalCall(Generic[T]):
    """A coroutine that another thread has run in the portal's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.ended = threading.Event()
        self._loop = loop
        self._coroutine = coroutine
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T | None] | None = None
        self._exit: BaseException | None = None

    def begin(self) -> None:
        self._task = self._loop.create_task(self._contained(), context=self._context)
        self._task.add_done_callback(self._end)

    def _end(self, _: asyncio.Task[T | None]) -> None:
        self._coroutine.close()  # where it was cancelled before its first turn
        self.ended.set()

    async def _contained(self) -> T | None:
        try:
            return await self._coroutine
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop
            self._exit = error
            return None

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._coroutine.close()
            self.ended.set()

    def result(self) -> T:
        assert self._task is not None
        result = self._task.result()
        if self._exit is not None:
            raise self._exit
        return result  # type: ignore[return-value]


class _Interrupts:
    """Turns Ctrl-C, where it would raise at a random place in the loop, into cancelling what is run."""

    def __init__(self) -> None:
        self._act: Callable[[], Any] | None = None
        self._pressed = False
        self._acted = False
        self._installed = False

    def __enter__(self) -> Self:
        if (
            threading.current_thread() is threading.main_thread()
            and _signal.getsignal(SIGINT) is signal.default_int_handler
        ):
            self._installed = True
            _signal.signal(SIGINT, self._on_interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._installed:
            _signal.signal(SIGINT, signal.default_int_handler)
        if self._pressed:  # also if the task was quicker: the user did press the key
            cancelled = isinstance(error, asyncio.CancelledError)
            raise KeyboardInterrupt from (None if cancelled else error)

    def arm(self, act: Callable[[], Any]) -> None:
        """Say what cancels it, now that there is something to cancel; at once if the key was pressed already."""
        self._act = act
        if self._pressed and not self._acted:
            act()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        if self._act is not None:
            self._acted = True
            self._act()


def run_to_end(main: Coroutine[Any, Any, T], *, whatever: bool = False) -> T:
    """Run a coroutine on a new event loop, and then end the tasks that envs have left there.

    Args:
        main: What.
        whatever: Go on also where a task of an env's own raises what ends a loop, such as SystemExit.
    """
    loop = asyncio.new_event_loop()
    try:
        task = loop.create_task(main)
        while True:
            try:
                return loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt):
                if task.done() or not whatever:
                    raise
                traceback.print_exc(file=sys.stderr)
    finally:
        try:
            loop.run_until_complete(wind_up())
        finally:
            loop.close()


async def wind_up() -> None:
    """End the tasks that are left in a loop, and let closed transports say goodbye."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=PATIENCE)
    await asyncio.sleep(0)
    await asyncio.get_running_loop().shutdown_asyncgens()


def blocking(coroutine: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """Return the method of a plain object that runs this coroutine of the async object behind it.

    It has the coroutine's signature and docstring. The plain object has the async one as `_twin`, and `_run`.
    """
    name = coroutine.__name__

    @functools.wraps(coroutine, updated=())  # else it would be as abstract as that is declared
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._run(getattr(self._twin, name)(*args, **kwargs))
        return result

    return run


def delegated(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return the method of a plain object that calls this one, which is no coroutine, of the async object behind it."""
    name = method.__name__

    @functools.wraps(method, updated=())
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(self._twin, name)(*args, **kwargs)
        return result

    return call


def documented_by(coroutine: Callable[..., Any]) -> Callable[[Method], Method]:
    """Give a method that does more than to run a coroutine the docstring of that."""

    def document(method: Method) -> Method:
        method.__doc__ = coroutine.__doc__
        return method

    return document


def mirrored(described: Callable[[Any], R]) -> R:
    """Return the read-only property of a plain object that shows this one of the async object behind it."""
    shows: Any = described  # the property itself, which type checkers take for its getter
    name = shows.fget.__name__
    return cast(R, property(lambda self: getattr(self._twin, name), doc=shows.__doc__))
