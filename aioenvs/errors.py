"""The exceptions that aioenvs raises, and how a child's exit reads in words. Standard library only."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Self

__all__ = [
    "AioEnvsError",
    "ClosedError",
    "ConcurrencyError",
    "PerformanceWarning",
    "ProtocolError",
    "RemoteEnvError",
    "ResetNeededError",
    "SpecMismatchError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStartError",
    "WorkerTimeoutError",
]


class AioEnvsError(RuntimeError):
    """Base class of the errors that only aioenvs can raise; bad arguments are ValueError, TypeError or RuntimeError."""

    def again(self) -> Self:
        """The same error to raise once more, so that no two callers share a traceback."""
        copy = self._copy()
        copy.__cause__ = self.__cause__
        for note in getattr(self, "__notes__", ()):
            copy.add_note(note)
        return copy

    def _copy(self) -> Self:
        return type(self)(*self.args)


class ClosedError(AioEnvsError):
    """The envs were used after `close`."""


class ConcurrencyError(AioEnvsError):
    """A second request was made for an env that is still busy with the one the message names."""


class ResetNeededError(AioEnvsError):
    """An env was asked to step that failed, was cancelled or was replaced since its last reset.

    One that was never reset steps: whether it may is its own business.
    """


class SpecMismatchError(AioEnvsError, ValueError):
    """A value does not fit its spec: the message says which env and key, what was expected and found."""


class ProtocolError(AioEnvsError):
    """Bytes that no aioenvs peer would have sent: a bug in aioenvs, or a foreign writer on its pipe."""


class RemoteEnvError(AioEnvsError):
    """An env raised an exception that cannot be rebuilt in this process; the message repeats it."""


class WorkerError(AioEnvsError):
    """Something happened to a worker as a whole.

    Attributes:
        env_index: Indices of all envs that the worker hosted.
        pid: Process id of the worker, None where it has none.
    """

    def __init__(self, message: str, *, env_index: Sequence[int] = (), pid: int | None = None) -> None:
        super().__init__(message)
        self.env_index = tuple(env_index)
        self.pid = pid

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), self.env_index, self.pid)

    def _copy(self) -> Self:
        return type(self)(str(self), env_index=self.env_index, pid=self.pid)


class WorkerStartError(WorkerError):
    """A worker did not come up: a factory raised, hung or exited. The factory's exception is the cause."""


class WorkerDiedError(WorkerError):
    """A worker ended on its own: exit code or signal, last command, and the tail of its stderr."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker did not answer in time. Its late reply will be dropped; other envs are not affected."""


class PerformanceWarning(UserWarning):
    """Something works, but another setting would make it much faster; the message names the setting."""


def _rebuild(cls: type[WorkerError], message: str, env_index: tuple[int, ...], pid: int | None) -> WorkerError:
    return cls(message, env_index=env_index, pid=pid)


def reset_needed(who: str) -> ResetNeededError:
    """Return the error for an env that is asked to step in place of a reset.

    Args:
        who: What it is called in messages.
    """
    return ResetNeededError(
        f"{who} cannot step: it failed, was cancelled or was replaced since its last reset; reset it first"
    )


def describe_exit(returncode: int | None) -> str:
    """Say in words how a process ended.

    Args:
        returncode: As in `subprocess`: the exit code, minus the signal's number, or None if unknown.
    """
    if returncode is None:
        return "ended in an unknown way"
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"killed by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")


def describe_envs(env_index: Sequence[int]) -> str:
    """Name envs by index, with runs shortened: `env 3`, `envs 0-15`, `envs 0, 2, 5-7`."""
    indices = sorted(env_index)
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    spans = (str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return ("env " if len(indices) == 1 else "envs ") + ", ".join(spans)
