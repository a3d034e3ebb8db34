"""Requests: which envs are asked for what, on which terms, and what has come of it so far."""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.env_states import EnvStates
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.waiting import TURNS, Deadline
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.engine.worker.wait_meter import SLOWEST, WAITING
from aioenvs.errors import (
    AioEnvsError,
    ClosedError,
    PerformanceWarning,
    WorkerDiedError,
    WorkerTimeoutError,
    describe_envs,
)

__all__ = [
    "Deliver",
    "Each",
    "FirstReady",
    "Lease",
    "PendingOutcome",
    "Selection",
    "Selections",
    "Share",
    "StepTimes",
    "closed_meanwhile",
    "hear_each",
    "late_copy",
    "warned_of",
    "wrong_loop",
]

MAX_SELECTIONS = 1024  # how many are remembered


@dataclass
class StepTimes:
    """How long a host took, in seconds, for steps of all or some of its envs."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    shortest: float = math.inf

    def add(self, seconds: float, count: int = 1) -> None:
        """Count commands that took so long each."""
        self.count += count
        self.total += seconds * count
        if seconds > self.longest:
            self.longest = seconds
        if seconds < self.shortest:
            self.shortest = seconds


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


class Selections:
    """The selections of a pool's envs, each worked out once.

    Args:
        groups: The envs of each host.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self._homes = {env: (index, position) for index, own in enumerate(groups) for position, env in enumerate(own)}
        self._known: dict[tuple[int, ...], Selection] = {}

    def of(self, indices: Iterable[int]) -> Selection:
        """Return the selection of these envs."""
        key = tuple(indices)
        selection = self._known.get(key)
        if selection is None:
            if len(self._known) > MAX_SELECTIONS:
                self._known.clear()
            selection = self._known[key] = self._worked_out(key)
        return selection

    def host_of(self, env: int) -> int:
        """Return the number of the host of an env."""
        return self._homes[env][0]

    def _worked_out(self, indices: tuple[int, ...]) -> Selection:
        chosen: dict[int, list[int]] = {}
        for env in indices:
            index, position = self._homes[env]
            chosen.setdefault(index, []).append(position)
        parts = []
        for index, positions in sorted(chosen.items()):
            group = self._groups[index]
            whole = len(positions) == len(group)
            envs = frozenset(group[position] for position in positions)
            parts.append((index, () if whole else tuple(positions), envs))
        return Selection(indices, frozenset(indices), tuple(parts))


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

    def answered(self, envs: Collection[int], finished: int, verdict: int, outcome: Outcome | None) -> None:
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
    """A pool, as far as a request asks it for something."""

    def plainly_awaited(self, request: PendingOutcome) -> bool:
        """Whether nothing but its future is to be waited for."""

    def abandon(self, request: PendingOutcome) -> None:
        """Have the hosts know that nobody waits any more."""

    async def awaited(self, request: PendingOutcome) -> Outcome:
        """Wait for it with all that may happen."""

    def advise(self, verdict: int) -> None:
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

    def answered(self, envs: Collection[int], finished: int, verdict: int, outcome: Outcome | None) -> None:
        self.missing -= 1
        if self.settled:
            self._note_late()
            return
        if outcome is not None:
            self.outcome = outcome if len(self.lease.selection.parts) == 1 else Outcome.merged((self.outcome, outcome))
        elif finished or verdict:
            self.outcome.finished += finished
            self.outcome.verdict = max(verdict, self.outcome.verdict)
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
        if self.outcome.verdict:
            self._pool.advise(self.outcome.verdict)
        return self.outcome


Deliver = Callable[[Sequence[int], Outcome | BaseException], None]
Each = Sequence[tuple[Any, Share, int, int, int]]  # a host, its share, the env, the finished episodes, the verdict


class Stepped(Protocol):
    """A pool, as far as steps of single envs ask it for something; see there."""

    groups: tuple[tuple[int, ...], ...]
    hosts: dict[int, Any]
    states: EnvStates
    policy: Any
    traits: Any
    has_coroutines: tuple[bool, ...]

    def host_of(self, env: int) -> int: ...
    def of_present(self, lease: Lease) -> Lease: ...
    def late_error(self, envs: Set[int], lease: Lease) -> WorkerTimeoutError: ...
    def cancel(self, request: Any, selection: Selection) -> None: ...


class FirstReady:
    """Steps of some envs, of which each is delivered when it is done.

    Args:
        pool: Whose envs.
        lease: Which envs, and until when.
        deliver: Called in the event loop with envs that are done, as many as are at a time, and their outcome; or with
            the exception that an env has instead: that of a host which died and is not restarted, of a deadline that
            has passed, of being closed. Before the steps were sent where envs run here, one after the other.

    Attributes:
        left: The envs that are not done.
    """

    def __init__(self, pool: Stepped, lease: Lease, deliver: Deliver) -> None:
        self.lease = lease
        self.left = set(lease.selection.envs)
        self._pool = pool
        self._deliver = deliver
        self._timer: asyncio.Handle | None = None

    def send(self, inputs: Mapping[int, Objects] | None) -> FirstReady:
        """Have the envs step; returns the steps.

        Raises:
            ProtocolError: If there are too many inputs; nothing was sent.
        """
        pool, lease = self._pool, self.lease
        # Without a host that takes several at once, each env has a command to itself; but where they run right here,
        # one after the other, there is nothing in between to be heard of.
        singly = not pool.traits.bulk and (pool.traits.is_bound or any(pool.has_coroutines))
        bodies: dict[int, Any] = {}
        if inputs:
            parts = [(env, pool.host_of(env), (env,)) for env in lease.selection.indices] if singly else []
            parts = parts or [(index, index, envs) for index, _, envs in lease.selection.parts]  # type: ignore[misc]
            bodies = {key: pool.hosts[index].enclose(inputs, envs) for key, index, envs in parts}
        selection = lease.selection if pool.policy is None else pool.of_present(lease).selection
        pool.states.sent(selection.envs)
        began = time.perf_counter()
        for index, positions, envs in selection.parts:
            host, group = pool.hosts[index], pool.groups[index]
            everyone = {position: group[position] for position in positions or range(len(group))}
            if singly:
                for position, env in everyone.items():
                    share = Share(self, frozenset((env,)), began)
                    host.send(share, Opcode.STEP_AND_MAYBE_RESET, (position,), bodies.get(env))
            elif pool.traits.bulk:
                host.send(Share(self, envs, began, everyone), Opcode.STEP_EACH, positions, bodies.get(index))
            else:
                host.send(Share(self, envs, began), Opcode.STEP_AND_MAYBE_RESET, positions, bodies.get(index))
        if self.left and lease.deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(lease.deadline.left, self._expire, TURNS)
        if pool.policy is not None and len(selection.envs) < len(lease.selection.envs):
            pool.policy.recover(self, lease.selection.envs - selection.envs, None)
        return self

    def answered(self, envs: Collection[int], finished: int, verdict: int, outcome: Outcome | None) -> None:
        self.deliver(envs, Outcome(finished=finished, verdict=verdict) if outcome is None else outcome)

    def failed(self, envs: Collection[int], error: BaseException) -> None:
        left = [env for env in envs if env in self.left]
        if left and self._pool.policy is not None and isinstance(error, WorkerDiedError):
            self._pool.policy.recover(self, left, error)
        else:
            self.fail(left, error)

    def fail(self, envs: Collection[int], error: BaseException) -> None:
        """Hand over an error to each of these envs: one of its own, since each may be raised somewhere else."""
        for env in envs:
            self.deliver((env,), error.again() if isinstance(error, AioEnvsError) else error)

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
            self._pool.cancel(self, self.lease.selection)

    def _expire(self, turns: int) -> None:
        """Let what has come while the loop was kept from running count as in time."""
        if turns and self.left:
            self._timer = asyncio.get_running_loop().call_soon(self._expire, turns - 1)
        elif self.left and self._pool.policy is not None:
            self._pool.policy.first_ready_late(self.left, self.lease)
        elif self.left:
            late = {env: self._pool.late_error({env}, self.lease) for env in sorted(self.left)}
            self._pool.cancel(self, self.lease.selection)
            for env, error in late.items():
                self.deliver((env,), error)


def hear_each(answers: Each) -> int:
    """Have each of these steps hear at once of all answers that are its own; returns the highest verdict."""
    together: dict[int, tuple[Any, list[int], int]] = {}
    highest = 0
    for _, share, env, finished, verdict in answers:
        request, envs, before = together.get(id(share.request), (share.request, [], 0))
        envs.append(env)
        together[id(request)] = request, envs, before + finished
        highest = max(highest, verdict)
    for request, envs, finished in together.values():
        request.answered(envs, finished, 0, None)
    return highest


def closed_meanwhile(envs: Collection[int]) -> ClosedError:
    """Return the error of a request whose envs were closed before they were ready."""
    return ClosedError(f"{describe_envs(tuple(envs))} were closed while a request waited for them")


def wrong_loop(command: str) -> AioEnvsError:
    """Return the error of a request in an event loop other than that of its envs, or in a fork."""
    return AioEnvsError(
        f"{command}: these envs belong to the event loop and process that started them, and this is another one; make "
        "envs of its own for each, or close these there first"
    )


def late_copy(lease: Lease | None) -> WorkerTimeoutError:
    """Return the error of a request that waited too long for a copy."""
    assert lease is not None
    envs = lease.selection.indices
    return WorkerTimeoutError(
        f"{lease.command}: {describe_envs(envs)} waited for a copy to or from a device, which was not done within "
        f"{lease.deadline}; what it needs stays as it is until then, so the next request may wait for it as well",
        env_index=envs,
        pid=None,
    )


def warned_of(verdict: int, num_envs: int, times: Sequence[StepTimes], cores: int) -> bool:
    """Warn where what a worker has measured shows that the envs would be quicker otherwise; return whether they would.

    Args:
        verdict: See `Outcome`.
        num_envs: How many envs there are.
        times: How long each worker took, as seen from here.
        cores: How many cores they may use.
    """
    if verdict <= WAITING:
        words = (
            f"{num_envs} envs in {len(times)} processes spend {verdict}% of their steps waiting rather than computing, "
            f"one after the other; num_processes={num_envs} would let them wait at the same time"
        )
    else:
        # The shortest time, since others use the machine as well; workers that share cores take it one after the other.
        own = (verdict - WAITING) * 1e-6 * num_envs
        taken = min(each.shortest for each in times) * math.ceil(len(times) / cores)
        if verdict >= WAITING + SLOWEST or own >= taken:
            return False
        words = (
            f"{num_envs} envs take about {verdict - WAITING} us a step each, all together less than the "
            f"{1e6 * taken:.0f} us that it takes at least until the processes that host them have answered: without "
            "processes they would be quicker, in a SerialEnv, an AsyncSerialEnv, or with backend='serial'"
        )
    words += " (the command 'aioenvs bench' compares such settings)"
    warnings.warn(words, PerformanceWarning, stacklevel=2)
    return True
