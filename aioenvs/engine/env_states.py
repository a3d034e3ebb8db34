"""Who may be asked: the state of each env. Pure: no I/O, no asyncio.

An env is *held* by a caller from the moment its request is admitted until its results are copied out, and
*unanswered* from the moment a request went to its worker until the worker replied. The states follow:

    closed     the pool is closed
    broken     its worker is dead
    busy       held
    draining   not held, but unanswered: its caller gave up, its late reply will be dropped
    idle       neither
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from enum import StrEnum

from aioenvs.errors import ClosedError, ConcurrencyError, WorkerError, describe_envs

__all__ = ["EnvState", "EnvStates"]


class EnvState(StrEnum):
    """The state of an env, as the parent knows it."""

    IDLE = "idle"
    BUSY = "busy"
    DRAINING = "draining"
    BROKEN = "broken"
    CLOSED = "closed"


class EnvStates:
    """The bookkeeping of all envs of a pool; sets, so that a batch costs the same as one env."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.closed = False
        self._held: dict[int, str] = {}
        self._unanswered: set[int] = set()
        self._broken: dict[int, WorkerError] = {}

    def state(self, env: int) -> EnvState:
        """The state of one env."""
        if self.closed:
            return EnvState.CLOSED
        if env in self._broken:
            return EnvState.BROKEN
        if env in self._held:
            return EnvState.BUSY
        return EnvState.DRAINING if env in self._unanswered else EnvState.IDLE

    def acquire(self, envs: Set[int], command: str, *, replacing: bool = False) -> bool:
        """Hold some envs for one command, all or none.

        Args:
            envs: Which envs.
            command: What for, in words.
            replacing: Take broken ones too, since the command replaces their worker.

        Returns:
            True if none of them is draining; else the caller waits until `drained` before it sends.

        Raises:
            ClosedError: After `close`.
            ConcurrencyError: If one is held already; the message names the pending command.
            WorkerDiedError: If the worker of one is dead.
        """
        if self.closed:
            raise ClosedError(f"{command}: the envs are closed")
        if self._broken and not replacing and not self._broken.keys().isdisjoint(envs):
            raise self.error(min(self._broken.keys() & envs))
        if self._held and not self._held.keys().isdisjoint(envs):
            raise self._busy(envs, command)
        self._held.update(dict.fromkeys(envs, command))
        return not self._unanswered or self._unanswered.isdisjoint(envs)

    def sent(self, envs: Iterable[int]) -> None:
        """A request for these envs went out."""
        self._unanswered.update(envs)

    def answered(self, envs: Iterable[int]) -> None:
        """A reply for these envs came in, whoever awaits it."""
        self._unanswered.difference_update(envs)

    def unanswered(self, envs: Set[int]) -> Set[int]:
        """Return those of these envs whose worker still owes a reply."""
        return self._unanswered & envs

    def drained(self, envs: Set[int]) -> bool:
        """Whether none of these envs owes a reply."""
        return self._unanswered.isdisjoint(envs)

    def release(self, envs: Set[int]) -> None:
        """The caller is done with these envs, or gave up on them."""
        if self._held.keys() == envs:
            self._held.clear()
        else:
            for env in envs:
                self._held.pop(env, None)

    def break_(self, envs: Iterable[int], error: WorkerError) -> None:
        """The worker of these envs is gone: they owe nothing any more, and raise `error` when asked."""
        for env in envs:
            self._broken.setdefault(env, error)
            self._unanswered.discard(env)

    def repair(self, envs: Iterable[int]) -> None:
        """These envs have a new worker."""
        for env in envs:
            self._broken.pop(env, None)

    def broken(self, envs: Set[int]) -> Set[int]:
        """Return those of these envs whose worker is dead."""
        return self._broken.keys() & envs

    def error(self, env: int) -> WorkerError:
        """Why this env is broken, ready to be raised."""
        return self._broken[env].again()

    def close(self) -> None:
        """Nothing may be asked any more."""
        self.closed = True
        self._unanswered.clear()

    def _busy(self, envs: Set[int], command: str) -> ConcurrencyError:
        held = self._held.keys() & envs
        pending = sorted({self._held[env] for env in held})
        return ConcurrencyError(
            f"{command} was asked of {describe_envs(tuple(held))} while {' and '.join(pending)} is still pending "
            "there; await that first, or address other envs"
        )
