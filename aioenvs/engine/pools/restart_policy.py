"""The restart of workers: how often and after which pause, and what becomes of the steps that were lost."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters.base import ResetArguments
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.failure import annotate, passable
from aioenvs.engine.layout import HALVES, IN_ROOT, LATEST, ROOT, STATUS, WRITE_HALF, Arrays
from aioenvs.engine.pools.pool import Lease, PendingOutcome, Selection
from aioenvs.engine.pools.replacing import ReplacingPool
from aioenvs.engine.pools.worker_pool import WorkerPool
from aioenvs.engine.protocol import STEPS, Opcode
from aioenvs.engine.waiting import Deadline, done_within
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.errors import WorkerDiedError, WorkerError, describe_envs

__all__ = ["RestartBudget", "Restarting", "RestartingPool", "derived_seed"]


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


class Restarting(ReplacingPool):
    """Rebuilds and resets the envs of a worker that died, or that was late and therefore killed.

    An env that was lost says so once: its next step, or the one on which it died, comes back in the outcome's `lost`
    without having been taken. A reset is repeated with its arguments. A call beyond the commands raises, since only its
    caller knows whether it may be repeated.

    Args:
        *args: As for the class of pool that this one is mixed into.
        max_restarts: How often each worker may be restarted.
        **options: Likewise.
    """

    restarts = True

    def __init__(self, *args: Any, max_restarts: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.budgets = [RestartBudget(max_restarts) for _ in self.groups]
        self._lost: dict[int, Loss] = {}
        self._settled = Counter[int]()  # how often the envs of each worker were reset after its death
        self._seeds: dict[int, int] = {}  # the last seed that each env was given
        self._unused: dict[int, int] = {}  # those of the seeds for which there was no reset yet
        self._asked_for = Counter[int]()  # workers that resets want back, whatever was spent on them

    # -- requests ---------------------------------------------------------------------------------------

    async def hold(
        self, selection: Selection, command: str, *, replacing: bool = False, timeout: float | Deadline | None = None
    ) -> Lease:
        wanted = Counter(index for index, _, _ in selection.parts) if replacing else Counter[int]()
        self._asked_for += wanted
        try:
            return await super().hold(selection, command, replacing=replacing, timeout=timeout)
        finally:
            self._asked_for -= wanted

    async def seed(self, lease: Lease, seeds: Mapping[int, int]) -> Outcome:
        self._seeds.update(seeds)
        self._unused.update(seeds)  # from where a new worker gets them, too
        return await super().seed(lease, seeds)

    async def reset(self, lease: Lease, arguments: Mapping[int, ResetArguments]) -> Outcome:
        envs = lease.selection.envs
        for env, own in arguments.items():
            if isinstance(seed := own.kwargs.get("seed"), int | np.integer):
                self._seeds[env] = int(seed)
        outcome = await super().reset(lease, arguments)
        await self._replacements(envs)
        while again := self._take_lost(envs):
            lease = lease.renewed()._replace(selection=self.select(sorted(again)))
            more = await super().reset(lease, arguments)
            await self._replacements(envs)
            outcome.failures |= more.failures
            outcome.objects |= more.objects
        self._use_seeds(envs)
        return outcome

    def _ask(self, lease: Lease, opcode: Opcode, enclosed: Mapping[int, Any]) -> PendingOutcome:
        envs = lease.selection.envs
        if opcode is Opcode.RESET:  # which needs to be told of nothing that was before
            self._take_lost(envs)
        if opcode not in STEPS:
            return super()._ask(lease, opcode, enclosed)
        present = envs - self._lost.keys()
        self._use_seeds(present)
        if len(present) < len(envs):
            lease = lease._replace(selection=self.select(sorted(present)))
        return self._with_lost(super()._ask(lease, opcode, enclosed), envs)

    async def _with_lost(self, steps: PendingOutcome, envs: Collection[int]) -> Outcome:
        """Return the outcome of a step with those of its envs that were lost before or with it."""
        outcome = await steps
        await self._replacements(envs)
        if lost := self._take_lost(envs):
            outcome.lost = frozenset(lost)
            outcome.objects |= {env: {ROOT: loss.objects} for env, loss in lost.items() if loss.objects}
            if outcome.failures:
                what = f"{describe_envs(tuple(lost))} lost this step with the worker, and began a new episode"
                outcome.failures = {env: annotate(passable(each), what) for env, each in outcome.failures.items()}
        return outcome

    async def _replacements(self, envs: Collection[int]) -> None:
        """Wait for workers that others replace meanwhile, whose envs write to rows that are about to be read."""
        if self._replacing:
            await self._revive(self.select(sorted(env for env in envs if self.host_of(env) in self._replacing)))

    def _take_lost(self, envs: Collection[int]) -> dict[int, Loss]:
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

    def _use_seeds(self, envs: Collection[int]) -> None:
        """These envs do something with the seeds that they were given."""
        if self._unused:
            for env in self._unused.keys() & envs:
                del self._unused[env]

    # -- what comes back, or does not -------------------------------------------------------------------

    async def _replies(self, asked: Sequence[asyncio.Future[Any]], lease: Lease, opcode: Opcode) -> list[Any]:
        """The replies of those that lived; the others are restarted when this returns."""
        if not asked:
            return []
        try:
            await done_within(asked, None if lease.deadline is None else lease.deadline.left)
        except asyncio.CancelledError:
            for reply in asked:
                reply.cancel()
            raise
        late = [part for part, reply in zip(lease.selection.parts, asked, strict=True) if not reply.done()]
        self._kill_late([index for index, _, _ in late], opcode.name.lower(), lease)
        replies = await asyncio.gather(*asked, return_exceptions=True)
        if late and opcode is Opcode.CALL:
            raise self._late(frozenset().union(*(envs for _, _, envs in late)), lease)
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        for error in errors:
            if opcode is Opcode.CALL or not isinstance(error, WorkerDiedError):
                raise error
        if errors:
            await self._revive(lease.selection)
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    def _overdue(self, lease: Lease) -> None:
        late = self._unanswered(lease.selection.envs)
        self._kill_late(sorted({self.host_of(env) for env in late}), "an earlier command", lease)

    def _kill_late(self, indices: Collection[int], command: str, lease: Lease) -> None:
        """Kill these workers, which did not answer in time."""
        for index in indices:
            worker = self._workers[index]
            if not worker.killed_for:
                worker.killed_for = f"was killed, since it did not answer {command} within {lease.deadline}"
                who = f"{describe_envs(worker.envs)} (pid {worker.process.pid})"
                logger.warning("the worker of %s %s", who, worker.killed_for)
                worker.process.signal(signal.SIGKILL)

    def _fate(self, late: Sequence[int]) -> str:
        return "the worker was killed, and the envs that it hosted begin anew with the next request"

    # -- restarts ---------------------------------------------------------------------------------------

    async def _bring_back(self, index: int) -> None:
        """Replace a worker, as often as it takes and its budget allows, and reset its envs."""
        envs = self.groups[index]
        before = [(row, row.copy()) for env in envs for row in self._roots(env)]
        try:
            await self._retry(index)
        finally:  # what a caller has not heard of is not known
            for row, value in before:
                row[...] = value

    async def _retry(self, index: int) -> None:
        budget, error = self.budgets[index], self.states.error(self.groups[index][0])
        while True:
            delay = budget.next_delay(self._workers[index].lived)
            if delay is None and self._asked_for[index]:
                return await self._replace(index)
            if delay is None:
                error.add_note(
                    f"it was restarted {budget.used} times before (max_restarts={budget.most}); a reset starts it anew"
                )
                raise error
            logger.warning("%s; restart %d of at most %d", str(error), budget.used, budget.most)
            await asyncio.sleep(delay)
            try:
                return await self._replace(index)
            except WorkerError as failure:
                error = failure

    async def _settle(self, index: int) -> None:
        """Reset the envs of a new worker; they have lost what they were doing."""
        envs = self.groups[index]
        limit = self.timeouts.start
        deadline = None if limit is None else Deadline.after(limit, "start_timeout")
        await self.passed(self.in_use(frozenset(envs)), Lease(self.select(envs), "restart", deadline))
        self._settled[index] += 1
        seeds = {env: derived_seed(self._seeds[env], self._settled[index]) for env in envs if env in self._seeds}
        unused = {env: self._unused[env] for env in envs if env in self._unused}
        arguments = cloudpickle.dumps({env: ResetArguments({"seed": seed}) for env, seed in seeds.items()})
        worker = self._workers[index]
        worker.last_command, channel = Opcode.RESET, worker.channel
        try:
            async with asyncio.timeout(self.timeouts.start) as clock:
                outcome = self._merge([await channel.request(Opcode.RESET, (), (), arguments)])
                outcome.raise_failure()
                if unused:
                    positions = tuple(envs.index(env) for env in unused)
                    body = self._enclose(unused, unused)
                    self._merge([await channel.request(Opcode.SEED, (), positions, body)]).raise_failure()
        except TimeoutError:
            if not clock.expired():  # an env's own
                raise
            raise self._start_error(index, f"did not reset its envs within {self.timeouts.start} s") from None
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
        pairs = zip(self.families, self.arrays, strict=False)
        return [(arrays, family.envs.index(env)) for family, arrays in pairs if env in family.envs]


class RestartingPool(Restarting, WorkerPool):
    """The pool of worker processes that does so."""
