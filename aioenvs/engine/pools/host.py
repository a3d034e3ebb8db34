"""Hosts: those who run some envs of a pool, wherever that is; and how the ones that can die are started and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import cloudpickle

from aioenvs.engine.config import BatchConfig
from aioenvs.engine.failure import factory_error, rebuild
from aioenvs.engine.layout import EnvMetadata, Family
from aioenvs.engine.memory import own_memory
from aioenvs.engine.pools.factories import Shipment
from aioenvs.engine.pools.requests import Share
from aioenvs.engine.protocol import MAX_BODY, Frame, Opcode, next_sequence
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.errors import (
    AioEnvsError,
    ClosedError,
    ProtocolError,
    WorkerDiedError,
    WorkerStartError,
    describe_envs,
    describe_exit,
)

__all__ = ["Control", "Exit", "Host", "HostKind", "HostTraits", "Owner", "WorkerHost", "end_all"]

logger = logging.getLogger("aioenvs")

LAST_WORDS = 0.05  # seconds between the end of a worker's socket and the report of its exit, or the other way round
KILL_PATIENCE = 2.0  # seconds until a killed process has to be gone


@dataclass(frozen=True)
class HostTraits:
    """The differences between kinds of hosts, as far as they matter to a pool.

    Attributes:
        is_local: Whether they are on this machine, and so can share memory and locks with this process.
        ships: Whether arguments are sent to them, as bytes, rather than handed over.
        can_die: Whether one may be gone, and another come in its place.
        is_bound: Whether they belong to the event loop and process that start them; else anybody may command envs
            without coroutines, wherever he is, and is answered before a command returns.
        suspends: Whether commands may wait for something, and so want an event loop.
        yields: Whether each command lets other tasks, timeouts and interrupts have their turn first.
        outlasts: Whether a request that is cancelled, or late, waits until its envs have ended what they do.
        bulk: Whether a host takes the steps of several envs in one go, and answers for each by itself.
    """

    is_local: bool = True
    ships: bool = False
    can_die: bool = False
    is_bound: bool = True
    suspends: bool = True
    yields: bool = False
    outlasts: bool = False
    bulk: bool = False


class Owner(Protocol):
    """A pool, as far as a host reports to it."""

    def answered(
        self, host: Host, sequence: int, finished: int = 0, verdict: int = 0, outcome: Outcome | None = None
    ) -> None:
        """The answer to a request came in; nothing happens if none is owed under that number."""

    def answered_one(self, host: Host, sequence: int, position: int, outcome: Outcome) -> None:
        """The answer for one env of several came in."""

    def failed(self, host: Host, sequence: int, error: BaseException) -> None:
        """There is no answer to a request, and never will be."""

    def died(self, host: WorkerHost, how: Exit, cause: Exception | None) -> None:
        """A host is gone."""


class Host(ABC):
    """Runs some envs.

    Args:
        index: The number of the host.
        envs: Their indices.
        owner: The pool.
        generation: Which one in the history of its pool it is: an answer of another one is nobody's.

    Attributes:
        pending: What it owes an answer to, by sequence number.
        last_command: What it was told last.
        pid: Its process; None if it has none of its own, or not yet.
    """

    pid: int | None = None

    def __init__(self, index: int, envs: tuple[int, ...], owner: Owner, generation: int) -> None:
        self.index = index
        self.envs = envs
        self.generation = generation
        self.pending: dict[int, Share] = {}
        self.last_command = Opcode.START
        self._owner = owner
        self._sequence = 0

    def send(self, share: Share, opcode: Opcode, positions: Sequence[int] = (), enclosed: Any = None) -> None:
        """Give the host a command, to which it owes an answer from now on.

        Args:
            share: Who asked, and for which envs.
            opcode: What to do.
            positions: Which of its envs are to do it; none for all.
            enclosed: The values for it, as `enclose` returned them.
        """
        sequence = self._sequence = next_sequence(self._sequence)
        self.pending[sequence] = share
        before, self.last_command = self.last_command, opcode
        try:
            self.transmit(opcode, sequence, positions, enclosed)
        except BaseException:  # it is too large, or ends more than an env
            self.pending.pop(sequence, None)
            self.last_command = before
            raise

    @abstractmethod
    async def start(self, shipment: Shipment | None) -> list[EnvMetadata]:
        """Begin, and build the envs.

        Args:
            shipment: The configuration that a host elsewhere gets; None for one in this process.

        Raises:
            WorkerStartError: If that fails, or takes too long.
        """

    @abstractmethod
    async def attach(self, families: Sequence[Family], arrays: Any, buffer: Any) -> None:
        """Connect the envs to their rows of the block."""

    @abstractmethod
    def enclose(self, values: Mapping[int, Any], envs: Collection[int]) -> Any:
        """Return the values for these envs, where there are any, in the host's own form.

        Raises:
            ProtocolError: If they are too large; nothing was sent.
        """

    @abstractmethod
    def transmit(self, opcode: Opcode, sequence: int, positions: Sequence[int], enclosed: Any) -> None:
        """Get a command to the envs."""

    @abstractmethod
    def cancel(self, sequence: int) -> None:
        """Cancel what coroutines do for a request; it is answered all the same."""

    def fail_all(self, error: AioEnvsError) -> None:
        """Nothing that is pending will be answered."""
        for sequence in list(self.pending):
            self._owner.failed(self, sequence, error.again())


class HostKind(ABC):
    """The kind of a pool's hosts: how they are made and ended, and what all of them share.

    Args:
        config: What was asked for.

    Attributes:
        traits: What they are like.
    """

    traits = HostTraits()

    def __init__(self, config: BatchConfig) -> None:
        self.config = config

    def pack(
        self, groups: Mapping[int, tuple[int, ...]], descriptors: Any, *, replaces: bool
    ) -> Sequence[Shipment | None]:
        """Return what the host of each of these groups gets at its start."""
        return [None] * len(groups)

    async def prepare(self, owner: Any, hosts: Mapping[int, Any]) -> None:  # noqa: B027 - most have nothing to do
        """See to what it takes to start hosts, if it is not there."""

    @abstractmethod
    def make(self, index: int, envs: tuple[int, ...], owner: Owner, generation: int) -> Any:
        """Return a host, which is not started."""

    def check(self, hosts: Sequence[Any]) -> None:  # noqa: B027 - most have nothing to do
        """Refuse hosts that have built their envs, but cannot be together in a pool."""

    def allocate(self, nbytes: int) -> Any:
        """Return memory for the block."""
        return own_memory(nbytes)

    def notice(self) -> None:  # noqa: B027 - most have nothing to do
        """Let what is known of hosts that ended get to them."""

    def begin_close(self, close: Callable[[], None]) -> None:  # noqa: B027 - most have nothing to do
        """Close what says who may be asked first where envs cannot be ended elsewhere.

        Raises:
            ConcurrencyError: If envs are at work in a thread that cannot be told to end that; nothing has changed then.
        """

    async def end(self, hosts: Sequence[Any], *, polite: bool) -> None:
        """End hosts, within the time for closing: their envs are closed if this is polite, or else merely gone."""
        await end_all(hosts, self.config.timeouts.close, polite=polite)

    @abstractmethod
    def hurry(self, hosts: Sequence[Any]) -> None:
        """Have `end` end at once."""

    def let_go(self, hosts: Sequence[Any], loop: asyncio.AbstractEventLoop | None) -> None:
        """Tell hosts to end, and wait for nothing; the loop may be closed."""
        for host in hosts:
            host.dismiss()

    async def give_back(self) -> None:
        """Give back what all share, now that no host is left."""
        self.give_up()

    def give_up(self) -> None:  # noqa: B027 - most have nothing to do
        """Give it back at once, from any thread."""


class Control:
    """A request of the pool's own to one host, which nobody else hears of.

    Args:
        raw: Whether its answer is a frame, of which the body is no outcome.

    Attributes:
        reply: Its answer: a frame, or an outcome.
    """

    def __init__(self, *, raw: bool = False) -> None:
        self.raw = raw
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(self, envs: Collection[int], finished: int, verdict: int, outcome: Outcome | None) -> None:
        self.take(outcome or Outcome())

    def take(self, reply: Any) -> None:
        """Hear of the answer."""
        if not self.reply.done():
            self.reply.set_result(reply)

    def failed(self, envs: Collection[int], error: BaseException) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # the awaiting side may be gone as well: no complaint then


@dataclass(frozen=True)
class Exit:
    """How a worker ended.

    Attributes:
        returncode: As in `subprocess`; None if unknown.
        stderr: The tail of what it wrote to stderr.
        cause: What else is known of it, in words, where there is no code.
    """

    returncode: int | None
    stderr: str = ""
    cause: str = ""

    def __str__(self) -> str:
        words = self.cause or describe_exit(self.returncode)
        return f"{words}; the end of its stderr:\n{self.stderr.rstrip()}" if self.stderr.strip() else words


class WorkerHost(Host):
    """A host that is a process somewhere, which can die.

    Its end shows in two places, and is acted upon once: when both have said so, or a moment after the first. This is
    done by callbacks rather than a task, which somebody who cancels all tasks would take with him.

    Args:
        index: As for `Host`.
        envs: Likewise.
        owner: Likewise.
        generation: Likewise.
        limit: Seconds that its start may take; None for as long as it likes.

    Attributes:
        exited: Says how the process ended.
        lost: Done when nothing will ever come from it any more, with the reason if there is one.
        ended: Done when its end was acted upon.
        abandoned: Whether it was given up.
        closing: Whether it is being ended.
        killed_for: Why it was killed, if it was, in words.
    """

    def __init__(self, index: int, envs: tuple[int, ...], owner: Owner, generation: int, limit: float | None) -> None:
        super().__init__(index, envs, owner, generation)
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Exit] = self._loop.create_future()
        self.lost: asyncio.Future[Exception | None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.abandoned = self.closing = False
        self.killed_for = ""
        self._limit = limit
        self._failure: AioEnvsError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began = time.monotonic()
        self._lived: float | None = None
        self.exited.add_done_callback(self._sign)
        self.lost.add_done_callback(self._sign)

    # -- what differs -----------------------------------------------------------------------------------

    @abstractmethod
    async def spawn(self, descriptors: Sequence[int]) -> None:
        """Start the process; it takes requests when this returns.

        Args:
            descriptors: Those that it needs to build its envs.

        Raises:
            OSError: If it could not be started.
        """

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether requests can be sent."""

    @abstractmethod
    def disconnect(self) -> None:
        """Send and receive nothing any more."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """End it, by a signal where there are any."""

    @abstractmethod
    def kill(self) -> None:
        """End it where it can no longer be said to have."""

    @abstractmethod
    def abandon(self) -> None:
        """Give back what is held for it, without waiting."""

    @abstractmethod
    def attachment(self, families: Sequence[Family]) -> bytes:
        """Return the body of the ATTACH frame."""

    async def why_late(self) -> str:
        """Return the known reason why it has not started, to be added to the error."""
        return ""

    # -- start ------------------------------------------------------------------------------------------

    async def start(self, shipment: Shipment | None) -> list[EnvMetadata]:
        assert shipment is not None
        try:
            async with asyncio.timeout(self._limit):
                await self.spawn(shipment.descriptors)
                reply: Frame = await self.ask(Opcode.START, body=pickle.dumps(shipment.config))
        except TimeoutError:
            why = await self.why_late()
            raise self.start_error(f"did not build its envs within {self._limit} s (start_timeout){why}") from None
        except WorkerDiedError as error:
            raise self.start_error(f"ended before its envs were built: {error}") from None
        except OSError as error:
            raise self.start_error(f"could not be started: {error}") from error
        if reply.opcode is Opcode.FAILED:
            ((env, failure),) = pickle.loads(reply.body).items()
            raise factory_error(env, failure, envs=self.envs, pid=self.pid)
        descriptions: list[EnvMetadata] = cloudpickle.loads(reply.body)
        return descriptions

    async def attach(self, families: Sequence[Family], arrays: Any, buffer: Any) -> None:
        try:
            async with asyncio.timeout(self._limit):
                await self.ask(Opcode.ATTACH, body=self.attachment(families))
        except TimeoutError:
            raise self.start_error(f"did not answer within {self._limit} s (start_timeout)") from None

    def start_error(self, what: str) -> WorkerStartError:
        """Return the error of a start that failed."""
        message = f"the worker of {describe_envs(self.envs)} (pid {self.pid}) {what}"
        return WorkerStartError(message, env_index=self.envs, pid=self.pid)

    # -- requests ---------------------------------------------------------------------------------------

    def ask(self, opcode: Opcode, positions: Sequence[int] = (), body: bytes = b"") -> asyncio.Future[Any]:
        """Send a request of the pool's own; see `Control` for the answer."""
        control = Control(raw=opcode is Opcode.START)
        self.send(Share(control, frozenset()), opcode, positions, body)
        return control.reply

    def send(self, share: Share, opcode: Opcode, positions: Sequence[int] = (), enclosed: Any = None) -> None:
        super().send(share, opcode, positions, enclosed)
        if self._failure is not None:  # it is known to be gone; where that is not sure yet, its end will say so
            self._owner.failed(self, self._sequence, self._failure.again())

    def enclose(self, values: Mapping[int, Any], envs: Collection[int]) -> bytes:
        body: bytes = cloudpickle.dumps({env: values[env] for env in envs if env in values})
        if len(body) > MAX_BODY:
            raise ProtocolError(
                f"{describe_envs(tuple(envs))} would be sent {len(body)} bytes, more than {MAX_BODY}; nothing was sent"
            )
        return body

    def receive(self, frame: Frame) -> None:
        """Take an answer in; one of another generation, or one that nobody awaits, is dropped."""
        share = self.pending.get(frame.sequence)
        if share is None or frame.generation != self.generation:
            return
        if isinstance(share.request, Control) and share.request.raw:
            del self.pending[frame.sequence]
            share.request.take(frame)
            return
        outcome = decoded(frame.body) if frame.body else None
        number, value = frame.positions or (0, 0)
        if frame.opcode is Opcode.DONE_EACH:
            outcome = outcome or Outcome()
            outcome.finished, outcome.verdict = value & 1, value >> 1
            self._owner.answered_one(self, frame.sequence, number, outcome)
        else:
            if outcome is not None:
                outcome.finished, outcome.verdict = number, value
            self._owner.answered(self, frame.sequence, number, value, outcome)

    # -- the end ----------------------------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether one sign of its end was seen; the other, or the decision without it, comes within a moment."""
        return not self.ended.done() and (self.exited.done() or self.lost.done())

    @property
    def lived(self) -> float:
        """Seconds from its start to its end, or until now."""
        return time.monotonic() - self._began if self._lived is None else self._lived

    def _sign(self, _: asyncio.Future[Any]) -> None:
        if self.exited.done() and self.lost.done():
            self._end()
        elif self._timer is None:
            self._timer = self._loop.call_later(LAST_WORDS, self._end)

    def _end(self) -> None:
        if self.ended.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._lived = self.lived
        how = self.exited.result() if self.exited.done() else Exit(None, "its pipe was closed, but it did not exit")
        self._owner.died(self, how, self.lost.result() if self.lost.done() else None)
        self.ended.set_result(None)

    def bury(self, how: Exit, cause: Exception | None) -> WorkerDiedError | None:
        """Let go of what is gone, and return the error for whoever asks it for anything; None if it was to go."""
        self.disconnect()
        if how.returncode is None and not self.abandoned:
            self.kill()
        last = self.last_command.name.lower()
        if self.closing:
            self._failure = ClosedError(f"{describe_envs(self.envs)} were closed while {last} was pending")
            return None
        error = WorkerDiedError(
            f"the worker of {describe_envs(self.envs)} (pid {self.pid}) {self.killed_for or how} "
            f"(last command: {last})",
            env_index=self.envs,
            pid=self.pid,
        )
        error.__cause__ = cause
        self._failure = error
        return error

    def fail_pending(self) -> None:
        """Tell all who wait for it why they wait in vain."""
        if self._failure is not None:
            self.fail_all(self._failure)

    def dismiss(self) -> None:
        """Give it up, whatever it does."""
        self.closing = True
        self.disconnect()
        self.abandon()


def decoded(body: bytes) -> Outcome:
    """Return the outcome of a command from the body of a worker's answer."""
    failures, objects, values = cloudpickle.loads(body)
    return Outcome(
        failures={env: rebuild(failure) for env, failure in failures.items()},
        objects=objects,
        values={env: cloudpickle.loads(value) for env, value in values.items()},
    )


async def end_all(hosts: Sequence[WorkerHost], budget: float, *, polite: bool) -> None:
    """End hosts: ask them to close their envs, then terminate, then kill; and give back what is held for them here.

    Args:
        hosts: All of them, whatever state they are in.
        budget: Seconds for asking and terminating together.
        polite: Whether to ask first, or to kill at once.
    """
    ladder: list[tuple[float, Callable[[WorkerHost], None]]] = [(KILL_PATIENCE, _kill)]
    if polite:
        ladder = [(0.8 * budget, _ask_to_close), (0.2 * budget, _terminate), *ladder]
    for host in hosts:
        host.closing = True
    for patience, act in ladder:
        alive = [host for host in hosts if not host.exited.done()]
        if not alive:
            break
        for host in alive:
            act(host)
        await asyncio.wait([host.exited for host in alive], timeout=patience)
    for host in hosts:
        host.dismiss()
    if hosts:
        await asyncio.wait([host.ended for host in hosts])


def _ask_to_close(host: WorkerHost) -> None:
    if not host.connected:
        _kill(host)
        return
    with contextlib.suppress(Exception):
        last = host.last_command
        host.ask(Opcode.CLOSE)
        host.last_command = last


def _terminate(host: WorkerHost) -> None:
    host.signal(signal.SIGTERM)


def _kill(host: WorkerHost) -> None:
    host.signal(signal.SIGKILL)
