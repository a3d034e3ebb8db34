"""An env's exception on its way from the worker to the caller, however badly it behaves."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass

import cloudpickle

from aioenvs.errors import RemoteEnvError

__all__ = ["Failure", "capture", "locate", "passable", "rebuild", "summary"]


@dataclass(frozen=True)
class Failure:
    """An exception as data.

    Attributes:
        where: Which env, command and process raised it.
        summary: `Type: message`, also if the exception's own `__str__` raises.
        trace: The worker's formatted traceback.
        pickled: The exception, or None where a round trip does not give it back.
    """

    where: str
    summary: str
    trace: str
    pickled: bytes | None


def locate(env_index: int, command: str) -> str:
    """Where an exception came from, in words."""
    return f"raised by env {env_index} in {command}, process {os.getpid()}"


def summary(error: BaseException) -> str:
    """`Type: message`, also where `__str__` raises."""
    return "".join(traceback.TracebackException.from_exception(error).format_exception_only()).strip()


def _is_passable(error: BaseException) -> bool:
    """Whether an env's exception may reach the caller as it is.

    StopIteration cannot leave a coroutine; KeyboardInterrupt, CancelledError and the like would act on the caller.
    """
    return isinstance(error, Exception) and not isinstance(error, StopIteration)


def passable(error: BaseException) -> Exception:
    """The error, or a stand-in for one that must not reach the caller as it is."""
    if isinstance(error, Exception) and _is_passable(error):
        return error
    stand_in = RemoteEnvError(summary(error))
    stand_in.__cause__ = error
    return stand_in


def capture(error: BaseException, env_index: int, command: str) -> Failure:
    """Turn an exception into data that any process can read. Never raises."""
    trace = "".join(traceback.TracebackException.from_exception(error).format())
    return Failure(locate(env_index, command), summary(error), trace, _pickle(error))


def _pickle(error: BaseException) -> bytes | None:
    if not _is_passable(error):
        return None
    try:
        data: bytes = cloudpickle.dumps(error)
        same = type(cloudpickle.loads(data)) is type(error)
    except Exception:
        return None
    return data if same else None


def rebuild(failure: Failure) -> Exception:
    """The exception itself, or a `RemoteEnvError` in its place, with the worker's traceback as a note."""
    error: Exception | None = None
    if failure.pickled is not None:
        try:
            error = cloudpickle.loads(failure.pickled)
        except Exception:
            error = None
    if not isinstance(error, Exception):
        error = RemoteEnvError(failure.summary)
    error.add_note(f"{failure.where}:\n{failure.trace.rstrip()}")
    return error
