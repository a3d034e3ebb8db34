"""A step that is about to be sent to some envs, and what it may have to wait for before it can go."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensordict import LazyStackedTensorDict, TensorDictBase

from aioenvs.batched.requests import check_next, named_envs
from aioenvs.batched.sent import Sent
from aioenvs.batched.signature import Signature
from aioenvs.device import Fence
from aioenvs.engine.deadlines import Deadline
from aioenvs.engine.pool import Lease, Pool

if TYPE_CHECKING:
    from aioenvs.batched.scope import Scope

__all__ = ["Arrival", "Outgoing", "entries_of"]

COMMAND = "send (until it is received)"


def entries_of(td: TensorDictBase, signature: Signature) -> dict[str, Any]:
    """What a step has to know of what it was given; of a lazy stack not every entry can be had as a whole."""
    if not signature.is_lazy and not isinstance(td, LazyStackedTensorDict):
        return dict(td.items())
    return {name: value for name in ("next", "_step") if (value := td.get(name, None)) is not None}


class Arrival:
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


class Outgoing:
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

    def __init__(self, scope: Scope, td: TensorDictBase, timeout: float | None) -> None:
        self._whole = scope.whole
        self._timeout: float | Deadline | None = timeout
        self._envs = named_envs(td, scope.envs.tolist(), scope.whole.read)
        self._scope = self._whole.scope(self._envs)
        self._refuse(td)
        self._sent = Sent(td)
        td = self._sent.td
        exchange: Any = self._scope.exchange
        entries = entries_of(td, self._scope.signature)
        check_next(entries)
        # What is fetched is the copy, since the caller may write to his own as soon as `send` returns.
        fetched, fence = self._scope.fetch(td, entries) or ({}, None)
        self._inputs: Any = exchange.check_inputs(td, entries, None, fetched, arrived=fence is None or fence.done())
        self._arrival: Arrival | None = None
        if fence is not None and not fence.done():
            self._arrival = Arrival(scope.pool, fence, functools.partial(exchange.check_arrived, self._inputs))

    def _refuse(self, td: TensorDictBase) -> None:
        expected = self._scope.signature.batch_size
        if td.batch_size != expected:
            raise RuntimeError(
                f"expected a row for each of {len(self._envs)} envs, as 'env_index' names them (all, without it), so "
                f"the batch size {tuple(expected)}, found {tuple(td.batch_size)}"
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
        scopes = [self._whole.scope((env,)) for env in self._envs]
        lease = self._whole.pool.acquire(self._scope.everything, COMMAND, timeout=self._timeout)
        self._whole.outbox.send(lease, scopes, self._sent, self._scope.exchange, self._inputs, self._arrival)
