"""Requests: which envs are asked for what, on which terms, and what has come of it so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from aioenvs.engine.protocol import Opcode
from aioenvs.engine.waiting import TURNS, Deadline
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.errors import AioEnvsError, ClosedError, describe_envs

__all__ = [
    "Deliver",
    "FirstReady",
    "Lease",
    "PendingOutcome",
    "Selection",
    "Share",
    "StepTimes",
    "Timeouts",
    "closed_meanwhile",
    "wrong_loop",
]


@dataclass(frozen=True)
class Timeouts:
    """How long things may take, in seconds; None for as long as they like.

    Attributes:
        start: From ordering a process to its envs being built.
        step: Any other command that does not say otherwise.
        close: Closing all envs, before the processes are killed.
    """

    start: float | None = 60.0
    step: float | None = None
    close: float = 5.0


@dataclass
class StepTimes:
    """How long a host took, in seconds, for steps of all or some of its envs."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count commands that took so long each."""
        self.count += count
        self.total += seconds * count
        if seconds > self.longest:
            self.longest = seconds


class Selection(NamedTuple):
    """Some envs of a pool, and what has to be asked of which host to reach them.

    Attributes:
        indices: The envs, ascending.
        envs: The same as a set.
        parts: Per host: its number, the positions of its selected envs (empty for all), and their indices.
    """

    indices: tuple[int, ...]
    envs: frozenset[int]
    parts: tuple[tuple[int, tuple[int, ...], frozenset[int]], ...]


class Lease(NamedTuple):
    """Some envs, held for one request.

    Attributes:
        selection: Which.
        command: What for, in words.
        deadline: When it must be answered; None for whenever.
        replacing: Whether dead hosts of theirs are replaced.
        waits: Whether they have to be made ready first.
    """

    selection: Selection
    command: str
    deadline: Deadline | None = None
    replacing: bool = False
    waits: bool = False

    def renewed(self) -> Lease:
        """Return the lease with all its time, which begins now."""
        if self.deadline is None:
            return self
        return self._replace(deadline=Deadline.after(self.deadline.seconds, self.deadline.name))


class Asked(Protocol):
    """Someone who has asked hosts for something, each for its share."""

    def answered(self, envs: Collection[int], finished: int, waiting: float, outcome: Outcome | None) -> None:
        """Hear of the answer for these envs; the outcome is None where the numbers are all of it."""

    def failed(self, envs: Collection[int], error: BaseException) -> None:
        """Hear that there is no answer for these envs."""


class Share(NamedTuple):
    """The share of one host in a request, as long as the host owes an answer.

    Attributes:
        request: Who asked.
        envs: Those of which the answer will be one.
        began: When a step was sent; 0 for anything else.
        left: For envs that are answered for one by one: those that are not yet, by position.
    """

    request: Asked
    envs: frozenset[int]
    began: float = 0.0
    left: dict[int, int] | None = None


class Commander(Protocol):
    """What a request needs of its pool."""

    def plainly_awaited(self, request: PendingOutcome) -> bool:
        """Whether nothing but its future is to be waited for."""

    def abandon(self, request: PendingOutcome) -> None:
        """Have the hosts know that nobody waits any more."""

    async def awaited(self, request: PendingOutcome) -> Outcome:
        """Wait for it with all that may happen."""

    def advise(self, waiting: float) -> None:
        """Say that the envs wait."""


class PendingOutcome:
    """A command to some hosts, on its way when it is made; the last answer, or the first failure, settles it.

    It is awaited once. Cancelling that abandons it: answers that are still owed free their envs, and are dropped.

    Args:
        pool: Whose hosts were asked.
        lease: Which envs, and until when.
        opcode: For what.
        future: Set when it is settled; None if it is before anybody can wait.
        tolerant: Whether a failure does not settle it, since the others' answers are wanted all the same.

    Attributes:
        envs: All envs for which the caller wants the outcome, those that could not be asked included.
        errors: Why hosts did not answer.
        settled: Whether nothing is waited for any more.
    """

    __slots__ = (
        "_over",
        "_pool",
        "_tolerant",
        "envs",
        "errors",
        "future",
        "lease",
        "missing",
        "opcode",
        "outcome",
        "settled",
    )

    def __init__(
        self, pool: Commander, lease: Lease, opcode: Opcode, future: asyncio.Future[None] | None, tolerant: bool
    ) -> None:
        self._pool = pool
        self.lease = lease
        self.opcode = opcode
        self.future = future
        self._tolerant = tolerant
        self.envs = lease.selection.envs
        self.missing = len(lease.selection.parts)
        self.settled = not self.missing
        self.outcome = Outcome()
        self.errors: list[BaseException] = []
        self._over: asyncio.Future[None] | None = None

    def answered(self, envs: Collection[int], finished: int, waiting: float, outcome: Outcome | None) -> None:
        self.missing -= 1
        if self.settled:
            self._note_late()
            return
        if outcome is not None:
            self.outcome = outcome if len(self.lease.selection.parts) == 1 else Outcome.merged((self.outcome, outcome))
        elif finished or waiting:
            self.outcome.finished += finished
            self.outcome.waiting = max(waiting, self.outcome.waiting)
        if not self.missing:
            self._settle()

    def failed(self, envs: Collection[int], error: BaseException) -> None:
        self.missing -= 1
        if self.settled:
            self._note_late()
            return
        self.errors.append(error)
        if not self.missing or not self._tolerant:
            self._settle()

    def _settle(self) -> None:
        self.settled = True
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    def over(self) -> asyncio.Future[None]:
        """Return a future for when the last answer has come, of a request that was abandoned."""
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        return self._over

    def _note_late(self) -> None:
        if self._over is not None and not self.missing and not self._over.done():
            self._over.set_result(None)

    def __await__(self) -> Generator[Any, Any, Outcome]:
        if not self._pool.plainly_awaited(self):
            return (yield from self._pool.awaited(self).__await__())
        if not self.settled:
            assert self.future is not None
            try:
                yield from self.future
            except BaseException:
                self._pool.abandon(self)
                raise
        return self.result()

    def result(self) -> Outcome:
        """Return the outcome, or raise the first error."""
        if self.errors:
            raise self.errors[0]
        if self.outcome.waiting:
            self._pool.advise(self.outcome.waiting)
        return self.outcome


Deliver = Callable[[Sequence[int], Outcome | BaseException], None]


class FirstReady:
    """Steps of some envs, of which each is delivered when it is done.

    Args:
        lease: Which envs, and until when.
        deliver: Called in the event loop with envs that are done, and their outcome or the error instead.
        is_late: Called once the time is up, if any are left then.
        gives_up: Called when nobody waits for the rest any more.
        recovers: Called with envs whose host died, where those come back; None if that is the end of it.

    Attributes:
        left: The envs that are not done.
    """

    def __init__(
        self,
        lease: Lease,
        deliver: Deliver,
        is_late: Callable[[FirstReady], None],
        gives_up: Callable[[FirstReady], None],
        recovers: Callable[[FirstReady, Collection[int], BaseException], None] | None,
    ) -> None:
        self.lease = lease
        self.left = set(lease.selection.envs)
        self._deliver = deliver
        self._is_late = is_late
        self._gives_up = gives_up
        self._recovers = recovers
        self._timer: asyncio.Handle | None = None

    def begin(self) -> None:
        """Count the time from now on."""
        if self.left and self.lease.deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(self.lease.deadline.left, self._expire, TURNS)

    def answered(self, envs: Collection[int], finished: int, waiting: float, outcome: Outcome | None) -> None:
        self.deliver(envs, Outcome(finished=finished, waiting=waiting) if outcome is None else outcome)

    def failed(self, envs: Collection[int], error: BaseException) -> None:
        if self._recovers is not None and isinstance(error, AioEnvsError) and not isinstance(error, ClosedError):
            self._recovers(self, [env for env in envs if env in self.left], error)
        else:
            self.deliver(envs, error)

    def deliver(self, envs: Collection[int], outcome: Outcome | BaseException) -> None:
        """Hand over what came of these envs, as far as anybody still waits for them."""
        done = [env for env in envs if env in self.left]
        if not done:
            return
        self.left.difference_update(done)
        if not self.left and self._timer is not None:
            self._timer.cancel()
        self._deliver(done, outcome)

    def cancel(self) -> None:
        """Deliver nothing any more: late answers free their envs, and are dropped."""
        if self._timer is not None:
            self._timer.cancel()
        if self.left:
            self.left.clear()
            self._gives_up(self)

    def _expire(self, turns: int) -> None:
        """Let what has come while the loop was kept from running count as in time."""
        if turns and self.left:
            self._timer = asyncio.get_running_loop().call_soon(self._expire, turns - 1)
        elif self.left:
            self._is_late(self)


def closed_meanwhile(envs: Collection[int]) -> ClosedError:
    """Return the error of a request whose envs were closed before they were ready."""
    return ClosedError(f"{describe_envs(tuple(envs))} were closed while a request waited for them")


def wrong_loop(command: str) -> AioEnvsError:
    """Return the error of a request in an event loop other than that of its envs, or in a fork."""
    return AioEnvsError(
        f"{command}: these envs belong to the event loop and process that started them, and this is another one; make "
        "envs of its own for each, or close these there first"
    )
