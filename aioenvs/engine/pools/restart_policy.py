"""The restart of hosts: how often and after which pause, and what becomes of the steps that were lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters.base import ResetArguments
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.config import Timeouts
from aioenvs.engine.double_buffer import Fence
from aioenvs.engine.env_states import EnvStates
from aioenvs.engine.failure import annotate, passable
from aioenvs.engine.layout import HALVES, IN_ROOT, LATEST, ROOT, STATUS, WRITE_HALF, Arrays, Family
from aioenvs.engine.pools.host import WorkerHost
from aioenvs.engine.pools.requests import Lease, PendingOutcome, Selection
from aioenvs.engine.protocol import STEPS, Opcode
from aioenvs.engine.waiting import Deadline, done_within
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.errors import WorkerDiedError, WorkerError, WorkerTimeoutError, describe_envs

__all__ = ["RestartBudget", "RestartPolicy", "derived_seed"]


SHORT_LIFE = 10.0  # seconds within which a death counts as one at the start
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # seconds before a worker that lived shortly is restarted


@dataclass
class RestartBudget:
    """How often one worker was restarted, and how often it still may be.

    Attributes:
        most: How many restarts it may have in all.
        used: How many it has had.
    """

    most: int
    used: int = 0
    _hasty: int = field(default=0, repr=False)

    def next_delay(self, lived: float) -> float | None:
        """Seconds to wait before the next restart, which is counted; None if there is none left.

        The first restart comes at once. Workers that die soon after their start wait twice as long each time.

        Args:
            lived: Seconds that the worker lived; 0 if it did not come up.
        """
        if self.used >= self.most:
            return None
        self.used += 1
        self._hasty = self._hasty + 1 if lived < SHORT_LIFE else 0
        return 0.0 if self._hasty < 2 else min(FIRST_DELAY * 2.0 ** min(self._hasty - 2, 64), LONGEST_DELAY)


def derived_seed(seed: int, restart: int) -> int:
    """A seed for an env that is built anew: not the one it began with, whose episodes it would play again."""
    return int(np.random.SeedSequence([seed % 2**64, restart]).generate_state(1)[0])


logger = logging.getLogger("aioenvs")

Rows = list[NDArray[Any]]


class Loss(NamedTuple):
    """The observations of a lost env's reset, which its rows do not show before its caller has heard of the loss.

    Attributes:
        rows: What belongs into its rows of the root.
        objects: What has no row.
    """

    rows: Rows
    objects: Objects


class Restarted(Protocol):
    """A pool, as far as its policy asks it for something; see there."""

    crew: Any
    groups: tuple[tuple[int, ...], ...]
    hosts: dict[int, Any]
    states: EnvStates
    timeouts: Timeouts
    families: tuple[Family, ...]
    arrays: tuple[dict[str, Arrays], ...]

    def select(self, indices: Any) -> Selection: ...
    def host_of(self, env: int) -> int: ...
    def late_error(self, envs: Set[int], lease: Lease) -> WorkerTimeoutError: ...
    def ask(self, lease: Lease, opcode: Opcode, values: Mapping[int, Any] | None) -> PendingOutcome: ...
    def abandon(self, request: PendingOutcome) -> None: ...
    def in_use(self, envs: Any) -> list[Fence]: ...
    async def passed(self, fences: Sequence[Fence], lease: Lease | None = None) -> None: ...


class Delivers(Protocol):
    """Steps of envs of which each is delivered when it is done; see `FirstReady`."""

    def deliver(self, envs: Collection[int], outcome: Outcome | BaseException) -> None: ...
    def fail(self, envs: Collection[int], error: BaseException) -> None: ...


class RestartPolicy:
    """Has the envs of a host that died, or that was late and therefore killed, built anew and reset.

    Its pool asks what to do when a host has died, when a request is late, and when a host was replaced.

    An env that was lost says so once: its next step, or the one on which it died, comes back in the outcome's `lost`
    without having been taken. A reset is repeated with its arguments. A call beyond the commands raises, since only its
    caller knows whether it may be repeated.

    Args:
        pool: Whose hosts.
        max_restarts: How often each may be restarted.
    """

    def __init__(self, pool: Restarted, max_restarts: int) -> None:
        self._pool = pool
        self.budgets = [RestartBudget(max_restarts) for _ in pool.groups]
        self._lost: dict[int, Loss] = {}
        self._settled = Counter[int]()  # how often the envs of each host were reset after its death
        self._seeds: dict[int, int] = {}  # the last seed that each env was given
        self._unused: dict[int, int] = {}  # those of the seeds for which there was no reset yet
        self._asked_for = Counter[int]()  # hosts that resets want back, whatever was spent on them
        self._recovering: set[asyncio.Task[None]] = set()  # tasks that no one else keeps

    # -- requests ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def wanted(self, selection: Selection) -> Iterator[None]:
        """A context in which hosts are replaced whatever was spent on them."""
        wanted = Counter(index for index, _, _ in selection.parts)
        self._asked_for += wanted
        try:
            yield
        finally:
            self._asked_for -= wanted

    def seed(self, seeds: Mapping[int, int]) -> None:
        """Keep seeds, for hosts that come later."""
        self._seeds.update(seeds)
        self._unused.update(seeds)  # from where a new host gets them, too

    async def reset(self, lease: Lease, arguments: Mapping[int, ResetArguments]) -> Outcome:
        """Reset envs, again if they are lost meanwhile."""
        envs = lease.selection.envs
        for env, own in arguments.items():
            if isinstance(seed := own.kwargs.get("seed"), int | np.integer):
                self._seeds[env] = int(seed)
        outcome = await self._pool.ask(lease, Opcode.RESET, arguments)
        await self._replacements(envs)
        while again := self.take_lost(envs):
            lease = lease.renewed()._replace(selection=self._pool.select(sorted(again)))
            more = await self._pool.ask(lease, Opcode.RESET, arguments)
            await self._replacements(envs)
            outcome.failures |= more.failures
            outcome.objects |= more.objects
        self.use_seeds(envs)
        return outcome

    def present(self, envs: frozenset[int]) -> frozenset[int]:
        """Return those of these envs that are to step, and were not lost before."""
        present = envs - self._lost.keys()
        self.use_seeds(present)
        return present

    async def outcome(self, request: PendingOutcome) -> Outcome:
        """Wait for a request, and for hosts that are restarted because of it."""
        try:
            outcome = await self._answers(request)
        finally:
            if not request.settled:
                self._pool.abandon(request)
        if request.opcode not in STEPS:
            return outcome
        await self._replacements(request.envs)
        return self.told(outcome, request.envs)

    def told(self, outcome: Outcome, envs: Collection[int]) -> Outcome:
        """Return the outcome of a step with those of its envs that were lost before or with it."""
        if lost := self.take_lost(envs):
            outcome.lost = frozenset(lost)
            outcome.objects |= {env: {ROOT: loss.objects} for env, loss in lost.items() if loss.objects}
            if outcome.failures:
                what = f"{describe_envs(tuple(lost))} lost this step with the worker, and began a new episode"
                outcome.failures = {env: annotate(passable(each), what) for env, each in outcome.failures.items()}
        return outcome

    async def _answers(self, request: PendingOutcome) -> Outcome:
        """Return what those said that lived; the others are restarted when this returns."""
        lease: Lease = request.lease
        late: Set[int] = frozenset()
        if not request.settled:
            assert request.future is not None
            await done_within([request.future], None if lease.deadline is None else lease.deadline.left)
        if not request.settled:
            assert request.future is not None
            late = self._pool.states.unanswered(lease.selection.envs)
            self.kill_late(self._hosts_of(late), request.opcode.name.lower(), lease)
            await request.future
        if late and request.opcode is Opcode.CALL:
            raise self._pool.late_error(late, lease)
        for error in request.errors:
            if request.opcode is Opcode.CALL or not isinstance(error, WorkerDiedError):
                raise error
        if request.errors:
            await self._pool.crew.revive(lease.selection)
        request.errors.clear()
        return request.result()

    def first_ready_late(self, envs: Collection[int], lease: Lease) -> None:
        """Kill hosts that have not answered in time, which are restarted then."""
        self.kill_late(self._hosts_of(envs), "step_and_maybe_reset", lease)

    def recover(self, steps: Delivers, envs: Collection[int], error: BaseException | None) -> None:
        """Deliver envs that were lost, once they are there again.

        Args:
            steps: What they were to do.
            envs: Which.
            error: Why they were lost just now; None if they were before.
        """
        task = asyncio.ensure_future(self._recover(steps, envs, error))
        self._recovering.add(task)
        task.add_done_callback(self._recovering.discard)

    async def _recover(self, steps: Delivers, envs: Collection[int], error: BaseException | None) -> None:
        try:
            if error is not None:
                await self._pool.crew.revive(self._pool.select(sorted(envs)))
            await self._replacements(envs)
        except BaseException as caught:
            steps.fail(envs, caught)
            if not isinstance(caught, Exception):
                raise
            return
        steps.deliver(envs, self.told(Outcome(), envs))

    def _hosts_of(self, envs: Collection[int]) -> list[int]:
        return sorted({self._pool.host_of(env) for env in envs})

    async def _replacements(self, envs: Collection[int]) -> None:
        """Wait for hosts that others replace meanwhile, whose envs write to rows that are about to be read."""
        if replaced := self._pool.crew.replacing:
            chosen = sorted(env for env in envs if self._pool.host_of(env) in replaced)
            await self._pool.crew.revive(self._pool.select(chosen))

    def take_lost(self, envs: Collection[int]) -> dict[int, Loss]:
        """Return those of these envs that were lost, of which their caller hears now."""
        if not self._lost:
            return {}
        lost = {env: self._lost.pop(env) for env in self._lost.keys() & envs}
        for env, loss in lost.items():  # to where the command that tells of it writes, wherever the reset was
            half, root, where = self._next_root(env)
            for row, value in zip(root, loss.rows, strict=False):
                row[...] = value
            where[...] = IN_ROOT + 2 * half
        return lost

    def use_seeds(self, envs: Collection[int]) -> None:
        """These envs do something with the seeds that they were given."""
        if self._unused:
            for env in self._unused.keys() & envs:
                del self._unused[env]

    # -- what does not come back ------------------------------------------------------------------------

    def kill_late(self, indices: Collection[int], command: str, lease: Lease) -> None:
        """Kill these hosts, which did not answer in time."""
        for index in indices:
            host: WorkerHost = self._pool.hosts[index]
            if not host.killed_for:
                host.killed_for = f"was killed, since it did not answer {command} within {lease.deadline}"
                who = f"{describe_envs(host.envs)} (pid {host.pid})"
                logger.warning("the worker of %s %s", who, host.killed_for)
                host.signal(signal.SIGKILL)

    def overdue(self, envs: Collection[int], lease: Lease) -> None:
        """Kill hosts that owe an answer to an earlier caller, for which this one waits no longer."""
        self.kill_late(self._hosts_of(envs), "an earlier command", lease)

    # -- restarts ---------------------------------------------------------------------------------------

    async def bring_back(self, index: int) -> None:
        """Replace a host, as often as it takes and its budget allows, and reset its envs."""
        envs = self._pool.groups[index]
        before = [(row, row.copy()) for env in envs for row in self._roots(env)]
        try:
            await self._retry(index)
        finally:  # what a caller has not heard of is not known
            for row, value in before:
                row[...] = value

    async def _retry(self, index: int) -> None:
        pool = self._pool
        budget, error = self.budgets[index], pool.states.error(pool.groups[index][0])
        while True:
            delay = budget.next_delay(pool.hosts[index].lived)
            if delay is None and self._asked_for[index]:
                await pool.crew.replace(index)
                return
            if delay is None:
                error.add_note(
                    f"it was restarted {budget.used} times before (max_restarts={budget.most}); a reset starts it anew"
                )
                raise error
            logger.warning("%s; restart %d of at most %d", str(error), budget.used, budget.most)
            await asyncio.sleep(delay)
            try:
                await pool.crew.replace(index)
                return
            except WorkerError as failure:
                error = failure

    async def settle(self, host: WorkerHost) -> None:
        """Reset the envs of a new host; they have lost what they were doing."""
        envs, limit = host.envs, self._pool.timeouts.start
        deadline = None if limit is None else Deadline.after(limit, "start_timeout")
        lease = Lease(self._pool.select(envs), "restart", deadline)
        await self._pool.passed(self._pool.in_use(frozenset(envs)), lease)
        self._settled[host.index] += 1
        seeds = {env: derived_seed(self._seeds[env], self._settled[host.index]) for env in envs if env in self._seeds}
        unused = {env: self._unused[env] for env in envs if env in self._unused}
        arguments = cloudpickle.dumps({env: ResetArguments({"seed": seed}) for env, seed in seeds.items()})
        try:
            async with asyncio.timeout(limit) as clock:
                outcome: Outcome = await host.ask(Opcode.RESET, body=arguments)
                outcome.raise_failure()
                if unused:
                    positions = tuple(envs.index(env) for env in unused)
                    seeded: Outcome = await host.ask(Opcode.SEED, positions, host.enclose(unused, unused))
                    seeded.raise_failure()
        except TimeoutError:
            if not clock.expired():  # an env's own
                raise
            raise host.start_error(f"did not reset its envs within {limit} s") from None
        for env in envs:
            rows = [row.copy() for row in self._next_root(env)[1]]
            self._lost[env] = Loss(rows, outcome.objects.get(env, {}).get(ROOT, {}))

    def _roots(self, env: int) -> Rows:
        """An env's rows of the root, and the one that says where its latest values are; none without a block."""
        found: Rows = []
        for arrays, row in self._place(env):
            roots = [array for half in HALVES for array in arrays[half[ROOT]].values()]
            found += [array[row : row + 1] for array in (*roots, arrays[STATUS][LATEST])]
        return found

    def _next_root(self, env: int) -> tuple[int, Rows, NDArray[Any]]:
        """The half in which an env writes next, its rows of the root there, and the row of LATEST."""
        for arrays, row in self._place(env):
            half = int(arrays[STATUS][WRITE_HALF][row]) & 1
            rows = [array[row : row + 1] for array in arrays[HALVES[half][ROOT]].values()]
            return half, rows, arrays[STATUS][LATEST][row : row + 1]
        return 0, [], np.zeros(1, np.uint8)

    def _place(self, env: int) -> list[tuple[Mapping[str, Arrays], int]]:
        """The arrays in which an env has its rows, and which ones; nothing without a block."""
        pairs = zip(self._pool.families, self._pool.arrays, strict=False)
        return [(arrays, family.envs.index(env)) for family, arrays in pairs if env in family.envs]
