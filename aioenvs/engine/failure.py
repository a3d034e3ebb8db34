"""An env's exception on its way from the worker to the caller, however badly it behaves."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import cloudpickle

from aioenvs.errors import Likeness, RemoteEnvError, WorkerStartError

__all__ = [
    "Failure",
    "advised",
    "annotate",
    "attributed",
    "capture",
    "captured_start",
    "factory_error",
    "locate",
    "passable",
    "rebuild",
    "summary",
]

# How asyncio, uvloop, anyio, asgiref and Playwright say that they cannot run a loop inside of another one.
LOOP_RUNS = re.compile(
    r"(?<!no )running event loop|loop is (already )?running|running asyncio|(inside the asyncio|async event) loop",
    re.IGNORECASE,
)
USE_ANOTHER = (
    "the env is no coroutine env, runs an event loop of its own, and was called inside of a running one, where that is "
    'impossible; use AsyncParallelEnv, with processes or backend="thread", or SerialEnv outside of the loop'
)


@dataclass(frozen=True)
class Failure:
    """An exception as data.

    Attributes:
        where: Which env, command and process raised it.
        summary: `Type: message`, also if the exception's own `__str__` raises.
        trace: The worker's formatted traceback.
        pickled: The exception, or None where a round trip does not give it back.
        likeness: What a start error can be caught as because of it, pickled; None if that is not known here.
    """

    where: str
    summary: str
    trace: str
    pickled: bytes | None
    likeness: bytes | None = None


def locate(env_index: int, command: str) -> str:
    """Where an exception came from, in words."""
    return f"raised by env {env_index} in {command}, process {os.getpid()}"


def summary(error: BaseException) -> str:
    """`Type: message`, whatever the exception does. Never raises."""
    try:
        message = str(error)
    except Exception:
        message = "<exception str() failed>"
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"
    return f"{name}: {message}" if message else name


def annotate(error: Exception, note: str) -> Exception:
    """Add a note to an error, or to a stand-in if it takes none."""
    try:
        error.add_note(note)
    except Exception:  # its attributes are frozen, or it uses __notes__ for something else
        error = _stand_in(error)
        error.add_note(note)
    return error


def advised(error: Exception) -> Exception:
    """Say what to use instead in the error of an env that could not run an event loop of its own here."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return error
    return annotate(error, USE_ANOTHER) if any(LOOP_RUNS.search(summary(each)) for each in _chain(error)) else error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it comes from."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def attributed(error: Exception, envs: Sequence[int]) -> Exception:
    """Say in the `env_index` of an error which envs failed; in that of a stand-in, if it means something else by it."""
    wanted = tuple(sorted(envs))
    try:
        error.env_index = wanted  # type: ignore[attr-defined]
        if error.env_index == wanted:  # type: ignore[attr-defined]
            return error
    except Exception:  # it takes no attributes, or not this one
        pass
    substitute = _stand_in(error)
    for note in getattr(error, "__notes__", ()):
        substitute.add_note(note)
    substitute.env_index = wanted  # type: ignore[attr-defined]
    return substitute


def _stand_in(error: BaseException) -> RemoteEnvError:
    substitute = RemoteEnvError(summary(error))
    substitute.__cause__ = error
    return substitute


def _is_passable(error: BaseException) -> TypeGuard[Exception]:
    """Whether an env's exception may reach the caller as it is.

    StopIteration cannot leave a coroutine, StopAsyncIteration would end the loop of an iterator; KeyboardInterrupt,
    CancelledError and the like would act on the caller.
    """
    return isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration)


def passable(error: BaseException) -> Exception:
    """The error, or a stand-in for one that must not reach the caller as it is."""
    return error if _is_passable(error) else _stand_in(error)


def factory_error(
    env: int, original: BaseException | Failure, *, envs: Sequence[int], pid: int | None = None
) -> WorkerStartError:
    """Return the error of a start, from the exception of a factory.

    Args:
        env: Whose factory.
        original: The exception, which becomes the cause; or what a worker sent of it.
        envs: All envs that are not started because of it.
        pid: In which process, if it was another one.
    """
    where = "" if pid is None else f" in process {pid}"
    if isinstance(original, BaseException):
        what, cause, likeness = summary(original), passable(original), Likeness.of(original)
    else:
        what, cause, likeness = original.summary, rebuild(original), _loaded(original.likeness)
    message = f"the factory of env {env} failed{where}: {what}"
    if likeness is None:
        error = WorkerStartError(message, env_index=envs, pid=pid)
    else:
        error = WorkerStartError.like(likeness, message, env_index=envs, pid=pid)
    error.__cause__ = cause
    return error


def capture(error: BaseException, env_index: int, command: str) -> Failure:
    """Turn an exception into data that any process can read. Never raises."""
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:
        trace = "".join(traceback.format_tb(error.__traceback__)) + summary(error)
    return Failure(locate(env_index, command), summary(error), trace, _pickle(error))


def captured_start(error: BaseException, env_index: int) -> Failure:
    """Turn the exception of a factory into data that any process can read. Never raises."""
    return dataclasses.replace(capture(error, env_index, "start"), likeness=_portable(Likeness.of(error)))


def _portable(likeness: Likeness | None) -> bytes | None:
    """The pickle of a likeness, with as much of it as can be pickled."""
    if likeness is None:
        return None
    attributes = {name: value for name, value in likeness.attributes.items() if _travels(value)}
    args = likeness.args if _travels(likeness.args) else ()
    try:
        data: bytes = cloudpickle.dumps(Likeness(likeness.kind, args, attributes))
    except Exception:
        return None
    return data


def _travels(value: Any) -> bool:
    try:
        cloudpickle.loads(cloudpickle.dumps(value))
    except BaseException:  # whatever its methods do
        return False
    return True


def _loaded(likeness: bytes | None) -> Likeness | None:
    """A likeness that came from another process, of a class of this one."""
    if likeness is None:
        return None
    try:
        found: Likeness = cloudpickle.loads(likeness)
    except Exception:
        return None
    return dataclasses.replace(found, kind=_here(found.kind))


def _here(kind: type[Any]) -> type[Any]:
    """The class that this process knows by the name of one that came by value, as those of a fork's script do."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else kind


def _pickle(error: BaseException) -> bytes | None:
    if not _is_passable(error):
        return None
    try:
        data: bytes = cloudpickle.dumps(error)
        copy = cloudpickle.loads(data)
    except BaseException:  # whatever its __reduce__ or its constructor does
        return None
    return data if type(copy) is type(error) and summary(copy) == summary(error) else None


def rebuild(failure: Failure) -> Exception:
    """The exception itself, or a `RemoteEnvError` in its place, with the worker's traceback as a note."""
    error: Exception | None = None
    if failure.pickled is not None:
        with contextlib.suppress(Exception):
            error = cloudpickle.loads(failure.pickled)
    if not isinstance(error, Exception):
        error = RemoteEnvError(failure.summary)
    if (kind := _here(type(error))) is not type(error):
        with contextlib.suppress(Exception):
            error.__class__ = kind
    return annotate(error, f"{failure.where}:\n{failure.trace.rstrip()}")
