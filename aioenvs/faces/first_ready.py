"""Steps that envs were sent, from the sending until their caller receives the results."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.failure import attributed
from aioenvs.engine.pools.pool import Lease, Pool, Selection, closed_meanwhile
from aioenvs.engine.portal import Immediate
from aioenvs.engine.waiting import Deadline, done_within
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.errors import (
    AioEnvsError,
    ConcurrencyError,
    SpecMismatchError,
    WorkerError,
    WorkerTimeoutError,
    describe_envs,
    shown,
)
from aioenvs.faces.rows.exchange import Exchange, Rows
from aioenvs.faces.rows.inputs import Inputs
from aioenvs.faces.rows.tensordicts import LazyExchange
from aioenvs.tensors.device import Fence
from aioenvs.tensors.trees import owned

__all__ = ["PendingCopy", "PendingStep", "PendingSteps", "SentInputs", "gathered"]


PLAIN = frozenset((torch.Tensor,))
PendingOutcome = Coroutine[Any, Any, Outcome]


class SentInputs:
    """A copy of what a caller sent.

    Attributes:
        td: The copy.
        entries: Its entries, if all of them are tensors.
        form: The shape of a row of each of these, its dtype and its device.

    Args:
        td: What it is.

    Raises:
        SpecMismatchError: If an object in it contains itself, of which TensorDicts can have no copy for `recv`.
    """

    def __init__(self, td: TensorDictBase) -> None:
        self.td: TensorDictBase
        self.entries: dict[str, torch.Tensor] = {}
        self.form: dict[str, tuple[Any, ...]] = {}
        entries = dict(td.items()) if type(td) is TensorDict and td._maybe_names() is None else {}
        if entries and PLAIN.issuperset(map(type, entries.values())):
            self.entries = {name: value.clone() for name, value in entries.items()}
            self.form = {name: (value.shape[1:], value.dtype, value.device) for name, value in entries.items()}
            self.td = TensorDict._new_unsafe(dict(self.entries), batch_size=td.batch_size, device=td.device)
        else:
            self.td = owned(td)
            try:
                self.td.copy()
            except RecursionError as error:
                raise SpecMismatchError(
                    "send: expected entries of which a TensorDict can be copied, found an object that contains itself, "
                    "or does not end soon; leave it out, or put it into an object that is no dict, list or tuple"
                ) from error


def gathered(parts: Sequence[tuple[SentInputs, int]]) -> TensorDictBase:
    """Some rows of what was sent, as one batch; a dense one if they are alike.

    Args:
        parts: For each row of the result in what it was sent, and in which row of that.
    """
    first = parts[0][0]
    td: TensorDictBase
    if first.form and all(sent.form == first.form and sent.td.device == first.td.device for sent, _ in parts):
        rows = [(sent.entries, slice(row, row + 1)) for sent, row in parts]
        entries = {name: torch.cat([own[name][row] for own, row in rows]) for name in first.entries}
        batch_size = torch.Size([len(parts), *first.td.batch_size[1:]])
        td = TensorDict._new_unsafe(entries, batch_size=batch_size, device=first.td.device)
    elif all(sent is first for sent, _ in parts):
        td = first.td[torch.tensor([row for _, row in parts])]
    else:
        tds = [sent.td[row] for sent, row in parts]
        if len({own.device for own in tds}) > 1:
            tds = [own.clear_device_() for own in tds]
        td = LazyStackedTensorDict.maybe_dense_stack(tds)
    return td


class PendingCopy:
    """Inputs of several envs that are on their way from a device, and are looked at when they are here.

    Args:
        pool: The pool of the envs.
        fence: Passes when they are here.
        check: Looks at them, once, and raises if they do not fit.
    """

    def __init__(self, pool: Pool, fence: Fence, check: Callable[[], None]) -> None:
        self._pool = pool
        self._fence = fence
        self._check: Callable[[], None] | None = check
        self._error: Exception | None = None

    async def wait(self, lease: Lease) -> None:
        """Wait until they are here. Cancelling it leaves them on their way.

        Args:
            lease: For what.

        Raises:
            SpecMismatchError: If they do not fit.
            WorkerTimeoutError: If it takes too long.
            Exception: Whatever the device says about a copy that failed.
        """
        await self._pool.passed([self._fence], lease)
        check, self._check = self._check, None
        if check is not None:
            try:
                check()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error


class SelectedEnv(Protocol):
    """An env of a batch that is sent a step by itself."""

    @property
    def envs(self) -> NDArray[np.intp]:
        """Its index."""

    @property
    def everything(self) -> Selection:
        """It, as the pool is asked for it."""

    @property
    def exchange(self) -> Exchange | LazyExchange:
        """Where its inputs are written and its outcomes read."""

    def read_step(self, rows: Rows, outcome: Outcome, known: Any, *, maybe_reset: bool) -> tuple[Any, Any]:
        """Return the outcome of its step, and the root for the next one."""


@dataclass(eq=False)
class PendingStep:
    """One step of one env, from when it is sent until it is received.

    Attributes:
        env: Its index.
        scope: It alone.
        lease: On it.
        sent: What its caller sent, to it and perhaps to others.
        row: Its row in that.
        known: What was known of it before, where it may be lost.
        following: The outcome of the step, once it is settled; None if it is still to be read.
        root: The root for the next step.
        error: Why there is neither.
        task: What awaits the answer.
        waits: Whether it was not sent yet, since something has to be waited for first.
    """

    env: int
    scope: SelectedEnv
    lease: Lease
    sent: SentInputs
    row: int
    known: Any = None
    following: Any = None
    root: Any = None
    error: BaseException | None = None
    task: asyncio.Task[Outcome] | None = None
    waits: bool = False


@dataclass(eq=False)
class Waiter:
    """Somebody who receives.

    Attributes:
        envs: From which envs.
        missing: How many more of them must have settled.
        woken: Done when they have; None if that is not waited for.
    """

    envs: Set[int]
    missing: int
    woken: asyncio.Future[None] | None = None


class PendingSteps:
    """The steps that envs of a pool were sent and nobody has received yet; they belong to the pool's event loop.

    Args:
        pool: The pool.
        reads_at_once: Whether what an env answered must be read when it comes, rather than when it is received,
            together with what others did.
    """

    def __init__(self, pool: Pool, *, reads_at_once: bool) -> None:
        self._pool = pool
        self._reads_at_once = reads_at_once
        self._sent: dict[int, PendingStep] = {}
        self._settled: dict[int, PendingStep] = {}  # those of them that are done, in the order in which they were
        self._waiters: list[Waiter] = []
        self._closed = False

    def outstanding(self, envs: Set[int]) -> tuple[int, ...]:
        """Return those of these envs that were sent a step which nobody has received, in the order of sending."""
        return tuple(env for env in self._sent if env in envs)

    # -- out --------------------------------------------------------------------------------------------

    def send(
        self,
        lease: Lease,
        scopes: Sequence[SelectedEnv],
        sent: SentInputs,
        exchange: Exchange | LazyExchange,
        inputs: Any,
        arrival: PendingCopy | None = None,
    ) -> None:
        """Let some envs take their steps.

        Args:
            lease: On all of them together.
            scopes: Each of them alone, in the order of the rows.
            sent: What they were sent.
            exchange: Stores what all of them are given.
            inputs: That, checked.
            arrival: What has to come before it can be stored; None if it is here.

        Raises:
            Exception: If an input cannot be sent; nothing was sent then, and the lease has ended.
        """
        tickets: list[PendingStep] = []
        steps: list[PendingOutcome] = []
        waits = lease.waits or arrival is not None
        try:
            for row, scope in enumerate(scopes):
                own = lease._replace(selection=scope.everything, command="send")
                tickets.append(PendingStep(int(scope.envs[0]), scope, own, sent, row, waits=waits))
            if waits:
                shares = [exchange.share(inputs, row) for row in range(len(tickets))]
                steps = [self._begin_later(*own, arrival) for own in zip(tickets, shares, strict=True)]
            else:
                exchange.decide(None)
                steps = self._begin(tickets, exchange.write_inputs(inputs, None))
            for ticket, step in zip(tickets, steps, strict=True):
                self._sent[ticket.env] = ticket
                self._follow(ticket, step)
        except BaseException:  # an interrupt, too
            under_way = {ticket.env for ticket in tickets if ticket.task is not None} | self._settled.keys()
            for env in lease.selection.envs - under_way:
                self._sent.pop(env, None)
                self._pool.states.release({env})
            for ticket, step in zip(tickets, steps, strict=False):
                if ticket.env not in under_way:
                    step.close()
            raise

    def _begin(self, tickets: Sequence[PendingStep], objects: Mapping[int, Objects] | None) -> list[PendingOutcome]:
        """Send the steps of envs that are ready, and whose inputs are stored but for the objects."""
        if self._pool.restarts:
            for ticket in tickets:
                ticket.known = ticket.scope.exchange.latest()
        lease = tickets[0].lease
        if len(tickets) > 1:
            lease = lease._replace(selection=self._pool.select(sorted(ticket.env for ticket in tickets)))
        answers: dict[int, Outcome | BaseException] = {}
        waiting: dict[int, asyncio.Future[None]] = {}

        def deliver(envs: Sequence[int], outcome: Outcome | BaseException) -> None:
            for env in envs:
                answers[env] = outcome if isinstance(outcome, BaseException) else outcome.of_env(env)
                if env in waiting and not waiting[env].done():
                    waiting[env].set_result(None)

        steps = self._pool.step_first_ready(lease, objects, deliver)

        async def answer(env: int) -> Outcome:
            if env not in answers:
                waiting[env] = asyncio.get_running_loop().create_future()
                try:
                    await waiting[env]
                except asyncio.CancelledError:
                    steps.cancel()
                    raise
            found = answers.pop(env)
            if isinstance(found, BaseException):
                raise found
            return found

        return [answer(ticket.env) for ticket in tickets]

    async def _begin_later(self, ticket: PendingStep, share: Inputs, arrival: PendingCopy | None) -> Outcome:
        """Send the step of an env once it is ready, and what it is given has arrived."""
        if arrival is not None:
            await arrival.wait(ticket.lease)
        ticket.lease = await self._pool.ready(ticket.lease)
        ticket.scope.exchange.decide(None)
        (steps,) = self._begin([ticket], ticket.scope.exchange.write_share(share))
        ticket.waits = False
        return await steps

    def _follow(self, ticket: PendingStep, steps: PendingOutcome) -> None:
        """See to it that the answer is taken in when it comes."""
        if self._pool.suspends:
            ticket.task = asyncio.get_running_loop().create_task(steps)
            ticket.task.add_done_callback(functools.partial(self._done, ticket))
            return
        try:
            self._take_in(ticket, Immediate().run(steps))
        except Exception as error:
            ticket.error = error
        self._settle(ticket)

    def _done(self, ticket: PendingStep, task: asyncio.Task[Outcome]) -> None:
        ticket.task = None
        if task.cancelled() and self._pool.states.closed:
            ticket.error = closed_meanwhile({ticket.env})
        elif task.cancelled():
            ticket.error = AioEnvsError(f"the step of env {ticket.env} was cancelled together with all tasks around it")
        elif (error := task.exception()) is not None:
            ticket.error = error
        else:
            try:
                self._take_in(ticket, task.result())
            except Exception as error:
                ticket.error = error
        self._settle(ticket)

    def _take_in(self, ticket: PendingStep, outcome: Outcome) -> None:
        exchange = ticket.scope.exchange
        if self._reads_at_once or outcome.objects or outcome.failures or not isinstance(exchange, Exchange):
            read = ticket.scope.read_step(None, outcome, ticket.known, maybe_reset=True)
            outcome.raise_failure()
            ticket.following, ticket.root = read
        else:  # its rows stay as they are until it is sent the next step
            exchange.count(None, outcome)

    def _settle(self, ticket: PendingStep) -> None:
        self._settled[ticket.env] = ticket
        for waiter in self._waiters:
            if ticket.env in waiter.envs:
                waiter.missing -= 1
                if (waiter.missing <= 0 or ticket.error is not None) and waiter.woken and not waiter.woken.done():
                    waiter.woken.set_result(None)

    # -- in ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def receiving(
        self, envs: Set[int], least: int, most: int | None, deadline: Deadline | None
    ) -> AsyncIterator[list[PendingStep]]:
        """Yield the settled steps of some envs, in that order, for the caller to `take` before anything else happens.

        Nobody else receives from these envs until the context ends. Cancelling it, like every failure, takes nothing
        away but the error that it raises.

        Args:
            envs: Which envs.
            least: Wait for so many.
            most: Take no more than so many; None for all there are.
            deadline: When this must be over.

        Raises:
            ValueError: If these numbers make no sense, or less than `least` steps are outstanding.
            ConcurrencyError: If somebody else is receiving from one of the envs.
            WorkerTimeoutError: If there are not enough in time.
            Exception: That of a step which failed.
        """
        self._pool.check_home("recv")
        least, most = self._checked_numbers(envs, least, most)
        if any(not waiter.envs.isdisjoint(envs) for waiter in self._waiters):
            raise ConcurrencyError("recv was asked while another recv for some of these envs waits; await that first")
        settled = [ticket for ticket in self._settled.values() if ticket.env in envs]
        waiter = Waiter(envs, least - len(settled))
        self._waiters.append(waiter)
        try:
            if waiter.missing > 0 and all(ticket.error is None for ticket in settled):
                await self._wait(waiter, deadline)
            yield self._chosen(envs, most)
        finally:
            self._waiters.remove(waiter)
            self._forget()

    def _checked_numbers(self, envs: Set[int], least: Any, most: Any) -> tuple[int, int | None]:
        try:
            numbers = operator.index(least), None if most is None else operator.index(most)
            valid = not isinstance(least, bool) and numbers[0] >= 1 and (numbers[1] is None or numbers[1] >= numbers[0])
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(
                f"expected 1 <= min_get <= max_get, found min_get={shown(least)} and max_get={shown(most)}"
            )
        sent = self._sent.keys() & envs
        if least > len(sent):
            what = f"only {len(sent)}, of {describe_envs(tuple(sent))}, are" if sent else "none is"
            raise ValueError(f"min_get={least} steps can never come, since {what} outstanding; send() more first")
        return numbers

    async def _wait(self, waiter: Waiter, deadline: Deadline | None) -> None:
        waiter.woken = asyncio.get_running_loop().create_future()
        if await done_within([waiter.woken], None if deadline is None else deadline.left):
            return
        late = tuple(sorted(env for env in self.outstanding(waiter.envs) if env not in self._settled))
        raise WorkerTimeoutError(
            f"recv: {waiter.missing} more of {describe_envs(late)} should have answered within {deadline}; "
            "what has come, and what will, can still be received",
            env_index=late,
            pid=None,
        )

    def _chosen(self, envs: Set[int], most: int | None) -> list[PendingStep]:
        settled = [ticket for ticket in self._settled.values() if ticket.env in envs]
        if failed := [ticket for ticket in settled if ticket.error is not None]:
            self.take(failed)
            _raise(failed)
        return settled[:most]

    def take(self, tickets: Sequence[PendingStep]) -> None:
        """Note that these steps were received; their envs are free again."""
        for ticket in tickets:
            del self._settled[ticket.env], self._sent[ticket.env]
            self._pool.release(ticket.lease)

    async def close(self) -> None:
        """Wait for the tasks, which end when the pool is closed; those of another loop are that one's own."""
        self.discard()
        here = asyncio._get_running_loop()
        tickets = [(ticket, task) for ticket, task in self._under_way if task.get_loop() is here]
        for ticket, task in tickets:
            if ticket.waits:  # perhaps for a device, which need not end at all
                task.cancel()
        if tickets:
            await asyncio.wait([task for _, task in tickets])
        self._closed = True
        self._forget()

    def _forget(self) -> None:
        """Once closed, let go of the tickets, which refer to the memory; who still waits is told of the end first."""
        if self._closed and not self._waiters:
            self._sent.clear()
            self._settled.clear()

    def discard(self) -> None:
        """Say goodbye to the tasks of a loop that was closed over them, where they can never end."""
        for _, task in self._under_way:
            if task.get_loop().is_closed():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(RuntimeError):  # what they wait for wants to tell the loop
                    task.get_coro().close()

    @property
    def _under_way(self) -> list[tuple[PendingStep, asyncio.Task[Outcome]]]:
        return [(ticket, ticket.task) for ticket in self._sent.values() if ticket.task is not None]


def _raise(failed: Sequence[PendingStep]) -> None:
    """Raise the error of the lowest env; it mentions the others. One that several envs share is one error for them."""
    distinct: dict[str, tuple[int, Any]] = {}
    for ticket in sorted(failed, key=lambda ticket: ticket.env):
        error = ticket.error
        name = str(error) if isinstance(error, WorkerError) else str(id(error))
        distinct.setdefault(name, (ticket.env, error))
    if len(distinct) == 1:
        raise next(iter(distinct.values()))[1]
    named = {ticket.env for ticket in failed}.union(*(getattr(ticket.error, "env_index", ()) for ticket in failed))
    try:
        Outcome(failures=dict(distinct.values())).raise_failure()
    except Exception as error:
        raised = attributed(error, sorted(named))
        raise raised from raised.__cause__
