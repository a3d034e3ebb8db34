"""Steps that envs were sent, from the sending until their caller receives the results."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import operator
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.engine.failure import attributed
from aioenvs.engine.pools.pool import Pool
from aioenvs.engine.pools.requests import Lease, Selection, closed_meanwhile
from aioenvs.engine.rows import Rows, Values
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
from aioenvs.tensors.device import Fence
from aioenvs.tensors.trees import owned

__all__ = ["PendingCopy", "PendingSteps", "SentInputs", "gathered"]


PLAIN = frozenset((torch.Tensor,))


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

    def __len__(self) -> int:
        """How many rows it has."""
        return int(self.td.batch_size[0])


def gathered(parts: Sequence[tuple[SentInputs, int]]) -> TensorDictBase:
    """Some rows of what was sent, as one batch; a dense one if they are alike.

    Args:
        parts: For each row of the result in what it was sent, and in which row of that.
    """
    first = parts[0][0]
    distinct = list({id(sent): sent for sent, _ in parts}.values())
    td: TensorDictBase
    if first.form and all(sent.form == first.form and sent.td.device == first.td.device for sent in distinct):
        begins = dict(zip(map(id, distinct), itertools.accumulate([0, *map(len, distinct)]), strict=False))
        rows = torch.tensor([begins[id(sent)] + row for sent, row in parts])
        whole = first.entries
        if len(distinct) > 1:
            whole = {name: torch.cat([sent.entries[name] for sent in distinct]) for name in whole}
        entries = {name: value[rows] for name, value in whole.items()}
        batch_size = torch.Size([len(parts), *first.td.batch_size[1:]])
        td = TensorDict._new_unsafe(entries, batch_size=batch_size, device=first.td.device)
    elif len(distinct) == 1:
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


class SelectedEnvs(Protocol):
    """Some envs of a pool."""

    @property
    def rows(self) -> Rows:
        """Their rows."""

    @property
    def everything(self) -> Selection:
        """All of them, as the pool is asked for them."""

    def read_step(self, rows: None, outcome: Outcome, known: Any, *, maybe_reset: bool) -> tuple[Any, Any]:
        """Return the outcome of their step, and the root for the next one."""


class Envs(Protocol):
    """All envs of a pool, some of which are sent steps."""

    @property
    def pool(self) -> Pool:
        """The pool."""

    def scope(self, envs: tuple[int, ...]) -> SelectedEnvs:
        """Return the selection of some envs."""

    def rows_of(self, envs: Sequence[int]) -> tuple[Rows, Any]:
        """Return the rows of some envs, and what makes tensors of theirs."""

    def last_step(self, envs: Sequence[int]) -> tuple[Any, Any]:
        """Return the outcome of the last step of some envs, and the root for the next one."""

    def joined(self, envs: Sequence[int], values: Sequence[Any]) -> Any:
        """Return the values of envs each of which was read alone, as those of a batch."""


class _Send(NamedTuple):
    """Envs that were sent a step together.

    Attributes:
        scope: They.
        lease: On them.
        sent: What their caller sent, to them and perhaps to others.
        row: The row of each in that.
        known: What was known of them before, where they may be lost.
    """

    scope: SelectedEnvs
    lease: Lease
    sent: SentInputs
    row: dict[int, int]
    known: Sequence[Values] | None = None


class _Read(NamedTuple):
    """A row of the outcome of a step that was read when it came, and of the root for the next one."""

    following: Any
    root: Any
    row: int

    def alone(self) -> tuple[Any, Any]:
        """Return that row as a batch of one."""
        row = slice(self.row, self.row + 1)
        return tuple(
            each[row] if isinstance(each, list) else {key: value[row] for key, value in each.items()}
            for each in (self.following, self.root)
        )  # type: ignore[return-value]


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

    What an env answered stays in its rows until it is sent the next step, and is read when it is received, together
    with what others did; where it may be lost before, or is no row, it is read when it comes.

    Args:
        envs: The envs.
    """

    def __init__(self, envs: Envs) -> None:
        self._envs = envs
        self._pool = pool = envs.pool
        self._reads_at_once = pool.restarts
        self._sent: dict[int, _Send] = {}
        self._settled: dict[int, _Read | None] = {}  # those of them that are done, in the order in which they were
        self._errors: dict[int, BaseException] = {}  # of those of these that failed
        self._tasks: dict[asyncio.Task[None], Sequence[int]] = {}  # steps that have to wait before they are sent
        self._waiters: list[Waiter] = []
        self._closed = False

    def outstanding(self, envs: Set[int]) -> tuple[int, ...]:
        """Return those of these envs that were sent a step which nobody has received, in the order of sending."""
        return tuple([env for env in self._sent if env in envs])

    # -- out --------------------------------------------------------------------------------------------

    def send(
        self,
        lease: Lease,
        scope: SelectedEnvs,
        sent: SentInputs,
        inputs: Sequence[Values],
        arrival: PendingCopy | None = None,
    ) -> None:
        """Let some envs take their steps.

        Args:
            lease: On all of them.
            scope: They, in the order of the rows.
            sent: What they were sent.
            inputs: What of it is for their rows, checked.
            arrival: What has to come before it can be stored; None if it is here.

        Raises:
            Exception: If an input cannot be sent; nothing was sent then, and the lease has ended.
        """
        envs = scope.rows.envs
        try:
            send = _Send(scope, lease._replace(command="send"), sent, {env: row for row, env in enumerate(envs)})
            self._sent.update(dict.fromkeys(envs, send))
            if lease.waits or arrival is not None:
                self._send_later(send, inputs, arrival)
            else:
                self._begin(send, inputs)
        except BaseException:  # an interrupt, too
            waiting = {env for own in self._tasks.values() for env in own}
            for env in lease.selection.envs - waiting - self._settled.keys():
                self._sent.pop(env, None)
                self._pool.states.release({env})
            raise

    def _begin(self, send: _Send, inputs: Sequence[Values]) -> None:
        """Send a step to envs that are ready."""
        rows = send.scope.rows
        rows.decide(None)
        if self._reads_at_once:
            send = send._replace(known=rows.latest())
        objects = rows.write(inputs, None)
        self._pool.step_first_ready(send.lease, objects, functools.partial(self._deliver, send))

    def _send_later(self, send: _Send, inputs: Sequence[Values], arrival: PendingCopy | None) -> None:
        """Send a step to each env as soon as it is ready: to those that are, at once."""
        loop, pool, envs = asyncio.get_running_loop(), self._pool, send.scope.rows.envs
        late = [env for env in envs if not self._is_ready(env)]
        groups: list[tuple[int, ...]] = [(env,) for env in late]
        if present := tuple([env for env in envs if env not in late]):
            groups.append(present)
        for group in groups:
            scope, values = send.scope, inputs
            if len(group) < len(envs):
                scope = self._envs.scope(group)
                values = _shares(send.scope.rows, scope.rows, inputs)
            lease = send.lease._replace(selection=pool.select(sorted(group)))
            own = send._replace(scope=scope, lease=lease)
            self._sent.update(dict.fromkeys(group, own))
            task = loop.create_task(self._begin_later(own, values, arrival))
            self._tasks[task] = group
            task.add_done_callback(self._has_begun)

    def _is_ready(self, env: int) -> bool:
        pool, alone = self._pool, {env}
        if not pool.states.drained(alone) or pool.states.broken(alone):
            return False
        return not (pool.fenced and pool.in_use(alone))

    async def _begin_later(self, send: _Send, inputs: Sequence[Values], arrival: PendingCopy | None) -> None:
        """Send a step to envs once they are ready, and what they are given has arrived."""
        if arrival is not None:
            await arrival.wait(send.lease)
        lease = await self._pool.ready(send.lease)
        self._begin(send._replace(lease=lease), inputs)

    def _has_begun(self, task: asyncio.Task[None]) -> None:
        envs = self._tasks.pop(task)
        if not task.cancelled():
            if (error := task.exception()) is not None:
                self._fail(envs, error)
        elif self._pool.states.closed:
            self._fail(envs, closed_meanwhile(envs))
        else:
            self._fail(
                envs, AioEnvsError(f"the step of {describe_envs(tuple(envs))} was cancelled with all tasks around it")
            )

    def _deliver(self, send: _Send, envs: Sequence[int], outcome: Outcome | BaseException) -> None:
        """Take in what came of the step of some envs."""
        if self._closed:
            return
        if isinstance(outcome, BaseException):
            if isinstance(outcome, Exception) or self._pool.suspends:  # else it is raised where they are sent the step
                self._fail(envs, outcome)
            return
        if not (self._reads_at_once or outcome.objects or outcome.failures):
            self._envs.rows_of(envs)[0].count(outcome)
            self._settle(dict.fromkeys(envs))
            return
        try:
            self._read(send, envs, outcome)
        except Exception as error:  # of values that do not fit
            self._fail(envs, error)

    def _read(self, send: _Send, envs: Sequence[int], outcome: Outcome) -> None:
        """Read what some envs answered, before anything else happens to it."""
        present = tuple([env for env in envs if env not in outcome.lost])
        for group in ([present] if present else []) + [(env,) for env in envs if env in outcome.lost]:
            own = Outcome(
                outcome.finished,
                {env: error for env, error in outcome.failures.items() if env in group},
                {env: objects for env, objects in outcome.objects.items() if env in group},
                lost=outcome.lost.intersection(group),
            )
            known = None
            if own.lost:
                assert send.known is not None
                known = send.scope.rows.share(send.known, group[0])
            following, root = self._envs.scope(group).read_step(None, own, known, maybe_reset=True)
            for env, failure in own.failures.items():
                try:
                    Outcome(failures={env: failure}).raise_failure()
                except Exception as error:
                    self._errors[env] = error
            self._settle({env: _Read(following, root, row) for row, env in enumerate(group)})

    def _fail(self, envs: Sequence[int], error: BaseException) -> None:
        self._errors.update(dict.fromkeys(envs, error))
        self._settle(dict.fromkeys(envs))

    def _settle(self, settled: Mapping[int, _Read | None]) -> None:
        self._settled.update(settled)
        for waiter in self._waiters:
            own = settled.keys() & waiter.envs
            waiter.missing -= len(own)
            ready = waiter.missing <= 0 or not own.isdisjoint(self._errors)
            if ready and waiter.woken is not None and not waiter.woken.done():
                waiter.woken.set_result(None)

    # -- in ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def receiving(
        self, envs: Set[int], least: int, most: int | None, deadline: Deadline | None
    ) -> AsyncIterator[list[int]]:
        """Yield the envs whose steps have settled, in that order, for the caller to `take` before anything else.

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
        settled = self._settled.keys() & envs
        waiter = Waiter(envs, least - len(settled))
        self._waiters.append(waiter)
        try:
            if waiter.missing > 0 and settled.isdisjoint(self._errors):
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

    def _chosen(self, envs: Set[int], most: int | None) -> list[int]:
        if self._errors and (failed := {env: self._errors[env] for env in self._errors.keys() & envs}):
            self.take(list(failed))
            _raise(failed)
        return [env for env in self._settled if env in envs][:most]

    def sent(self, envs: Sequence[int]) -> list[tuple[SentInputs, int]]:
        """For each of these envs in what it was sent its step, and in which row of that."""
        return [((send := self._sent[env]).sent, send.row[env]) for env in envs]

    def results(self, envs: Sequence[int]) -> tuple[Any, Any]:
        """Return the outcome of the settled steps of some envs, and the root for the next one."""
        read = [self._settled[env] for env in envs]
        if not any(read):
            return self._envs.last_step(envs)
        alone = [
            self._envs.last_step((env,)) if each is None else each.alone() for env, each in zip(envs, read, strict=True)
        ]
        following, root = (self._envs.joined(envs, [own[index] for own in alone]) for index in range(2))
        return following, root

    def take(self, envs: Sequence[int]) -> None:
        """Note that the steps of these envs were received; the envs are free again."""
        for env in envs:
            del self._settled[env], self._sent[env]
            self._errors.pop(env, None)
        self._pool.states.release(frozenset(envs))

    async def close(self) -> None:
        """Wait for the tasks, which end when the pool is closed; those of another loop are that one's own."""
        self.discard()
        here = asyncio._get_running_loop()
        tasks = [task for task in self._tasks if task.get_loop() is here]
        for task in tasks:
            task.cancel()  # it may wait for a device, which need not end at all
        if tasks:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)
        self._closed = True
        self._forget()

    def _forget(self) -> None:
        """Once closed, let go of the steps, which refer to the memory; who still waits is told of the end first."""
        if self._closed and not self._waiters:
            self._sent.clear()
            self._settled.clear()
            self._errors.clear()

    def discard(self) -> None:
        """Say goodbye to the tasks of a loop that was closed over them, where they can never end."""
        for task in list(self._tasks):
            if task.get_loop().is_closed():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(RuntimeError):  # what they wait for wants to tell the loop
                    task.get_coro().close()


def _shares(whole: Rows, rows: Rows, inputs: Sequence[Values]) -> list[Values]:
    """Return the share that some envs have of the inputs of a batch."""
    if len(rows.envs) == 1:
        return whole.share(inputs, rows.envs[0])
    shares = []
    for part in rows.parts:
        place = next(place for place, each in enumerate(whole.parts) if each.own is part.own)
        own = whole.parts[place].envs
        chosen = [own.index(env) for env in part.envs]
        shares.append({key: _chosen_of(value, chosen) for key, value in inputs[place].items()})
    return shares


def _chosen_of(value: Any, rows: list[int]) -> Any:
    return [value[row] for row in rows] if isinstance(value, list) else None if value is None else value[rows]


def _raise(failed: Mapping[int, BaseException]) -> None:
    """Raise the error of the lowest env; it mentions the others. One that several envs share is one error for them."""
    distinct: dict[str, tuple[int, Any]] = {}
    for env, error in sorted(failed.items()):
        name = str(error) if isinstance(error, WorkerError) else str(id(error))
        distinct.setdefault(name, (env, error))
    if len(distinct) == 1:
        raise next(iter(distinct.values()))[1]
    named = {*failed}.union(*(getattr(error, "env_index", ()) for error in failed.values()))
    try:
        Outcome(failures=dict(distinct.values())).raise_failure()
    except Exception as error:
        raised = attributed(error, sorted(named))
        raise raised from raised.__cause__
