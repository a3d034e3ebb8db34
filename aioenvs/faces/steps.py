"""Steps of many envs: of all at once, or of whoever is ready first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from aioenvs.engine.pools.requests import Lease
from aioenvs.engine.portal import taskless
from aioenvs.engine.request import Request
from aioenvs.engine.waiting import Deadline
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.errors import AioEnvsError
from aioenvs.faces.batch_specs import Signature
from aioenvs.faces.calls import AsyncCalls
from aioenvs.faces.first_ready import PendingCopy, SentInputs, gathered
from aioenvs.faces.requests import check_next, check_size, index_of, named_envs, step_rows
from aioenvs.faces.session import EnvSelection

__all__ = ["AsyncSteps", "SendRequest", "entries_of"]


COMMAND = "send (until it is received)"


def entries_of(td: TensorDictBase, signature: Signature) -> dict[str, Any]:
    """Return the entries that a step has to know; of a lazy stack not every entry can be had as a whole."""
    if not signature.is_lazy and not isinstance(td, LazyStackedTensorDict):
        return dict(td.items())
    return {name: value for name in ("next", "_step") if (value := td.get(name, None)) is not None}


class SendRequest:
    """A step for some envs of a running pool, checked as far as it is here.

    Args:
        scope: The envs of a batch, or of a view.
        td: With `env_index`, if not all of them are meant.
        timeout: Seconds that each env may take.

    Raises:
        TypeError: If this is no TensorDict, or `env_index` does not hold integers.
        RuntimeError: If it has another size than envs are named.
        ValueError: If `env_index` names an env twice, or one that is not there; or if there is a `_step`.
        SpecMismatchError: If an action is missing, or does not fit.
    """

    def __init__(self, scope: EnvSelection, td: TensorDictBase, timeout: float | None) -> None:
        self._timeout: float | Deadline | None = timeout
        envs = named_envs(td, scope.envs.tolist(), scope.whole.read)
        self._scope = scope.whole.scope(envs)
        self._refuse(td)
        self._sent = SentInputs(td)
        td = self._sent.td
        entries = entries_of(td, self._scope.signature)
        check_next(td, entries)
        # What is fetched is the copy, since the caller may write to his own as soon as `send` returns.
        fetched, fence = self._scope.fetch(td, entries) or ({}, None)
        arrived = fence is None or fence.done()
        self._inputs = self._scope.inputs.check(td, entries, None, fetched, arrived=arrived)
        self._arrival: PendingCopy | None = None
        if fence is not None and not arrived:
            check = functools.partial(self._scope.inputs.check_arrived, self._inputs)
            self._arrival = PendingCopy(scope.pool, fence, check)

    def _refuse(self, td: TensorDictBase) -> None:
        expected = self._scope.signature.batch_size
        if td.batch_size != expected:
            raise RuntimeError(
                f"expected a row for each of {len(self._scope.envs)} envs, as 'env_index' names them (all, without "
                f"it), so the batch size {tuple(expected)}, found {tuple(td.batch_size)}"
            )
        if td.get("_step", None) is not None:
            raise ValueError(
                "send() steps the envs that 'env_index' names; found a mask at '_step' besides, take it out"
            )

    async def clear(self) -> None:
        """Wait here for all copies that stand before it, so that the envs are at work as soon as it went.

        Cancelling it leaves everything as it is.

        Raises:
            SpecMismatchError: If an action that was on a device does not fit.
            WorkerTimeoutError: If it takes too long; no env was sent anything.
        """
        pool, envs = self._scope.pool, self._scope.everything
        if not pool.fenced:
            return
        self._timeout = pool.deadline(self._timeout)
        lease = Lease(envs, "send", self._timeout)
        if self._arrival is not None:
            await self._arrival.wait(lease)
            self._arrival = None
        await pool.passed(pool.in_use(envs.envs), lease)

    def go(self) -> None:
        """Send it, or have it sent once that is possible; the envs are busy from now on.

        Raises:
            ConcurrencyError: If an env is busy.
            WorkerDiedError: If the worker of one is dead, unless envs are restarted.
            Exception: If an input cannot be sent. No env was sent anything then, as in all cases before.
        """
        lease = self._scope.pool.acquire(self._scope.everything, COMMAND, timeout=self._timeout)
        self._scope.whole.outbox.send(lease, self._scope, self._sent, self._inputs, self._arrival)


class AsyncSteps(AsyncCalls):
    """Steps of the envs, as coroutines."""

    step_dims = 1  # a mask of a step tells whole envs apart
    copies_results = True

    @taskless
    async def step(
        self, tensordict: TensorDictBase, *, copy: bool = True, timeout: float | None = None
    ) -> TensorDictBase:
        """Take one step in all envs, or in those that a mask names.

        Cancelling it, or running into its time, leaves the envs that still work on it *draining*: the next request for
        them waits until they have answered, and that answer is dropped. Coroutine envs are cancelled at the await where
        they are, and need a reset then.

        Args:
            tensordict: Of shape `batch_size`, with the actions, and with the states if the envs have any. If it holds
                `_step` (bool, `(N,)`, or of the batch size, or shaped like `done`), only those envs step; in the others
                `next` repeats the root's observations and flags, and the reward is 0. The mask stays where it is,
                unless it selects nobody.
            copy: False to *lend* what the envs answered, where it is. Its tensors are views of the memory into which
                the envs write, where each has two halves that it takes in turn: the values stand while the next step or
                reset of the same env is under way, and until the second next one is asked for, whatever comes of those.
                Then the env writes over them, so clone what is to be kept, also for a graph of gradients; and never
                write into them. They can be looked at in any case, also after `close` or the death of a worker.
                Some are copies all the same: of a step with a mask, of a view of envs that do not follow each other, of
                values without a fixed shape, of torch envs in the caller's thread, of lost steps, and, once, after
                steps of views that left envs of the batch in different halves; so is what goes to another device.
            timeout: Seconds that it may take, besides the time to build envs anew; None for `step_timeout`.

        Returns:
            The same `tensordict`, with `next`: observations, `reward` `(*batch_size, 1)` float32, `done`, `terminated`
            and `truncated` `(*batch_size, 1)` bool, or whatever the specs say.

        Raises:
            RuntimeError: If `tensordict` has the wrong size.
            SpecMismatchError: If an action is missing, or its shape, dtype or device does not fit its spec, or an
                integer for a Gymnasium space is out of range. No env was stepped then.
            ConcurrencyError: If an env is busy with another request.
            WorkerDiedError: If a worker died; the others' envs remain usable.
            WorkerTimeoutError: If it takes too long. The others have stepped.
            Exception: Whatever an env raised, with the worker's traceback as a note, and with the indices of all envs
                that failed as `env_index`. The others have stepped; those that failed need a reset.
        """
        await self._advance(tensordict, maybe_reset=False, copy=copy, timeout=timeout)
        return tensordict

    @taskless
    async def step_and_maybe_reset(
        self, tensordict: TensorDictBase, *, copy: bool = True, timeout: float | None = None
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Take one step, and reset the envs whose episode ended, in the same round trip.

        Args, errors and cancelling are those of `step`.

        Returns:
            `tensordict` with `next`, which holds the true final observations, and the root for the next step.
        """
        root = await self._advance(tensordict, maybe_reset=True, copy=copy, timeout=timeout)
        assert root is not None
        return tensordict, root

    async def on_host(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Results on the host: those of a `device` come back as one copy, without keeping the event loop waiting.

        Cancelling it changes nothing.

        Args:
            tensordict: Of any shape, such as `step` returned it.

        Returns:
            The same TensorDict if no results of these envs go to a device, else another one, of the caller's own.

        Raises:
            Exception: Whatever the device says of a copy that failed.
        """
        scope = self._running_scope
        if scope is None:
            return tensordict.to("cpu")
        if scope.whole.crossing is None:
            return tensordict
        return (await scope.at_home(tensordict)).clone()

    async def _advance(
        self,
        td: TensorDictBase,
        *,
        maybe_reset: bool,
        copy: bool = True,
        timeout: float | None = None,
        apart: bool = False,
    ) -> TensorDictBase | None:
        """Step, put the outcome under `next`, and return the root for the next step; `apart` see `Rows.step`."""
        scope = self._running_scope or await self._scope()
        check_size(td, scope.signature.batch_size)
        entries = entries_of(td, scope.signature)
        check_next(td, entries)
        mask = entries.get("_step")
        rows = None if mask is None else step_rows(mask, td.batch_size)
        chosen = scope.everything if rows is None else scope.select(rows)
        crossing = scope.whole.crossing
        command = "step_and_maybe_reset" if maybe_reset else "step"
        request = Request(scope.pool, chosen, command, timeout=timeout)
        fetched: dict[Any, torch.Tensor] = {}
        if crossing is not None and (fetching := scope.fetch(td, entries)) is not None:
            fetched, fence = fetching
            await request.arrived([fence])
        inputs = scope.inputs.check(td, entries, rows, fetched) if chosen.indices else []
        lends = rows is None and (not copy or crossing is not None)
        if rows is not None:
            scope.inputs.check_root(td)
        async with request:
            known = scope.rows.latest() if scope.pool.restarts else None
            outcome = Outcome()
            if chosen.indices:
                scope.rows.decide(rows, lends, maybe_reset)
                outcome = await request.step(scope.rows.write(inputs, rows), maybe_reset=maybe_reset)
            following, root = scope.read_step(rows, outcome, known, maybe_reset=maybe_reset, lends=lends, apart=apart)
            if crossing is not None and not outcome.failures:
                following, root = scope.tensors.place(crossing, following, root)
        if outcome.failures:
            outcome.raise_failure()
        if crossing is not None:
            await scope.whole.arrived(request.lease)
        if not chosen.indices:
            td.pop("_step")
        if rows is not None:
            following = scope.results.keep_others(td, rows, following)
            root = scope.results.keep_others(td, rows, root) if root is not None else None
        return scope.results.after_step(td, entries, following, root)

    # -- first ready ------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> tuple[int, ...]:
        """The envs that were sent a step which was not received yet, in the order in which they were sent."""
        scope = self._running_scope
        return () if scope is None else scope.whole.outbox.outstanding(scope.everything.envs)

    def send(self, tensordict: TensorDictBase, *, timeout: float | None = None) -> None:
        """Let some envs take a step, and begin a new episode where one ends; `recv` has what comes of it.

        The envs are at work when it returns, each for itself: of envs that share a process, each is answered for as
        soon as it is done. Until what came of its step was received, an env is busy. Actions that are on a device are
        on their way when it returns, and the envs begin when they have come; a plain call waits for that.

        Args:
            tensordict: Of shape `(k, *bs)`, as for `step`, with `env_index` (integers, `(k,)`, counted within the whole
                batch, also for a view): which envs are meant. Without it, all are, in order. A copy is kept.
            timeout: Seconds that each env may take, None for `step_timeout`; `recv` then raises for it. Where there are
                plain calls, only the time counts that is spent in them.

        Raises:
            AioEnvsError: If the envs were not started yet.
            TypeError: If this is no TensorDict, `env_index` does not hold integers, or there is something else than a
                TensorDict under `next`.
            RuntimeError: If `tensordict` has another size than envs are named.
            ValueError: If `env_index` names an env twice, or one that is not there; or if there is a `_step`.
            SpecMismatchError: If an action is missing, or does not fit. If that shows only when it has come from a
                device, no env is sent its step, and `recv` raises it.
            ConcurrencyError: If an env is busy.
            WorkerDiedError: If the worker of one is dead, unless envs are restarted. No env was sent anything then, as
                in all cases before.
        """
        scope = self._sending_scope()
        scope.pool.check_home("send")
        SendRequest(scope, tensordict, timeout).go()

    def _sending_scope(self) -> EnvSelection:
        scope = self._running_scope
        if scope is None:
            raise AioEnvsError(f"{self!r} is not running, so no env can be sent a step: reset() comes first")
        return scope

    async def _send(self, td: TensorDictBase, timeout: float | None) -> None:
        """Send steps for plain calls, where nobody else sees to waiting: the envs are at work when it returns."""
        scope = self._sending_scope()
        await scope.pool.enter_loop("send")
        outgoing = SendRequest(scope, td, timeout)
        await outgoing.clear()
        outgoing.go()

    async def recv(
        self, min_get: int = 1, max_get: int | None = None, timeout: float | None = None
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Receive the results of steps that envs were sent, of whoever is ready first.

        Cancelling it, or running into its time, loses nothing: all that has come, and what will, can still be received.

        Args:
            min_get: Wait until there are so many.
            max_get: Take at most so many, those that came first; None for all there are.
            timeout: Seconds that it may take; None for as long as it likes.

        Returns:
            As for `step_and_maybe_reset`, one row for each env, in the order in which they answered; both have
            `env_index`, int64 of the batch size. The second is what the policy goes on with, and then `send`.

        Raises:
            AioEnvsError: If the envs are not running.
            ValueError: If fewer than `min_get` steps are outstanding.
            ConcurrencyError: If another `recv` waits for some of the same envs.
            WorkerTimeoutError: If there are not enough in time; or if an env exceeded the time of its step: it is
                *draining* then, and can be sent the next one, but a coroutine env needs a reset. With restarts its
                worker is killed instead, and the step comes back as truncated.
            WorkerDiedError: If the worker of an env died.
            Exception: Whatever an env raised; it needs a reset. Of a step that failed this is all that there is to be
                received; what came of the others can be received afterwards.
        """
        td, following, taken = await self._assembled(min_get, max_get, timeout)
        taken()
        return td, following

    async def _assembled(
        self, min_get: int, max_get: int | None, timeout: float | None
    ) -> tuple[TensorDictBase, TensorDictBase, Callable[[], None]]:
        """Return the results of `recv`, and the call that says they were received; until then they still can be."""
        scope = self._running_scope
        if scope is None:
            raise AioEnvsError(f"{self!r} is not running, so there is nothing to receive")
        whole, deadline = scope.whole, None if timeout is None else Deadline.after(timeout, "timeout")
        async with whole.outbox.receiving(scope.everything.envs, min_get, max_get, deadline) as envs:
            td, after = await self._gathered(envs, scope, deadline)
        return td, after, functools.partial(whole.outbox.take, envs)

    async def _gathered(
        self, envs: Sequence[int], scope: EnvSelection, deadline: Deadline | None
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Return the results of the steps of some envs, where results go, and the root for the next one."""
        whole = scope.whole
        spec = whole.spec_of(envs)
        td = gathered(whole.outbox.sent(envs))
        following, root = whole.outbox.results(envs)
        index = index_of(envs, spec.signature.batch_size)
        following, root, there = scope.placed(following, root, {"env_index": index})
        whole.transfer.know(there["env_index"], index)
        td.set("env_index", there["env_index"] if td.device in (None, whole.device) else index)
        if whole.crossing is not None:
            await whole.arrived(Lease(whole.pool.select(sorted(envs)), "recv", deadline))
        after = spec.results.after_step(td, entries_of(td, spec.signature), following, root)
        assert after is not None
        return td, after


async def step_apart(envs: AsyncSteps, tensordict: TensorDictBase) -> TensorDictBase:
    """Take a step as `step_and_maybe_reset` does, and return the root for the next one, with memory of its own.

    What a policy does to that root leaves `tensordict` as it is, which can so be kept for a while.
    """
    root = await envs._advance(tensordict, maybe_reset=True, apart=True)
    assert root is not None
    return root
