"""The exceptions that aioenvs raises, and how a child's exit reads in words. Standard library only."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, Self

__all__ = [
    "AioEnvsError",
    "ClosedError",
    "ConcurrencyError",
    "NotRunningError",
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


LONGEST = 1000  # characters of a value in a message


class AioEnvsError(RuntimeError):
    """Base class of the errors that only aioenvs can raise; bad arguments are ValueError, TypeError or RuntimeError."""

    def again(self) -> Self:
        """Return a copy of the error to raise once more, so that no two callers share a traceback."""
        copy = self._copy()
        copy.__cause__ = self.__cause__
        for note in getattr(self, "__notes__", ()):
            copy.add_note(note)
        return copy

    def _copy(self) -> Self:
        return type(self)(*self.args)


class ClosedError(AioEnvsError):
    """The envs were used after `close`."""


class NotRunningError(AioEnvsError, AttributeError):
    """An attribute that only the envs could have was asked for while they do not run: not started yet, or closed.

    It is an `AttributeError` for `hasattr`, and a `RuntimeError` for those who expect TorchRL's.
    """

    def __init__(self, message: str, *, name: str = "", obj: object = None) -> None:
        super().__init__(message)
        self.name = name
        self.obj = obj


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
    """A worker did not come up: a factory raised, hung or exited. The factory's exception is the cause.

    Where the factory raised, the error can also be caught as what that was, and has its `args` and attributes:

    >>> try:
    ...     raise WorkerStartError.like(ValueError("no such level"), "the factory of env 0 failed", env_index=[0])
    ... except ValueError as error:
    ...     print(type(error).__name__, error.args, error)
    WorkerStartError+ValueError ('no such level',) the factory of env 0 failed
    """

    def __init_subclass__(cls, **_: Any) -> None:
        """Leave out what the class of a factory's exception does for classes that are derived from it."""

    @classmethod
    def like(
        cls, original: BaseException | Likeness, message: str, *, env_index: Sequence[int], pid: int | None = None
    ) -> WorkerStartError:
        """An error that is an instance of another exception's class as well, where such a class can be made.

        Args:
            original: The other exception, or what is known of it.
            message: See `WorkerError`.
            env_index: Likewise.
            pid: Likewise.
        """
        likeness = Likeness.of(original) if isinstance(original, BaseException) else original
        if likeness is not None:
            with contextlib.suppress(Exception):  # of a class that cannot be derived from, or made without arguments
                return _related(likeness, message, tuple(env_index), pid)
        return WorkerStartError(message, env_index=env_index, pid=pid)

    def alone(self) -> WorkerStartError:
        """Return the error as nothing but a `WorkerStartError`."""
        plain = WorkerStartError(str(self), env_index=self.env_index, pid=self.pid)
        plain.__cause__ = self.__cause__
        for note in getattr(self, "__notes__", ()):
            plain.add_note(note)
        return plain


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


@dataclass(frozen=True)
class Likeness:
    """The class, arguments and attributes of an exception, by which another one is caught, and read, as this one.

    Attributes:
        kind: Its class.
        args: Its `args`.
        attributes: All else that it holds, by name.
    """

    kind: type[Exception]
    args: tuple[Any, ...]
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> Likeness | None:
        """The likeness of an exception; None if it has none of use, or must not reach a caller as what it is."""
        with contextlib.suppress(Exception):  # of whatever its class does when it is looked at
            kind = _foreign(type(error))
            return None if kind is None else cls(kind, error.args, _attributes(error))
        return None


def _foreign(kind: type[BaseException]) -> type[Exception] | None:
    """Of an exception's class what a `WorkerStartError` is not; of ours, which tell of other envs, the rest."""
    if not issubclass(kind, Exception) or issubclass(kind, StopIteration | StopAsyncIteration):
        return None
    if issubclass(WorkerStartError, kind):
        return None
    if not issubclass(kind, AioEnvsError) or kind is SpecMismatchError:
        return kind
    rest = (each for each in kind.__mro__ if not issubclass(each, AioEnvsError) and issubclass(each, Exception))
    return next((each for each in rest if not issubclass(AioEnvsError, each)), None)


def _attributes(error: BaseException) -> dict[str, Any]:
    """Return the attributes of an exception besides its `args`, in slots or not."""
    found: dict[str, Any] = {}
    for cls in type(error).__mro__:
        if cls in (BaseException, object):
            continue
        for name, slot in vars(cls).items():
            if isinstance(slot, MemberDescriptorType | GetSetDescriptorType) and not name.startswith("__"):
                with contextlib.suppress(Exception):
                    found.setdefault(name, slot.__get__(error, cls))
    if isinstance(error, AttributeError):
        found.pop("obj", None)  # an env, perhaps
    found |= BaseException.__getattribute__(error, "__dict__")
    return {name: value for name, value in found.items() if name not in _OWN}


def _related(likeness: Likeness, message: str, env_index: tuple[int, ...], pid: int | None) -> WorkerStartError:
    """An instance of a class that is derived from `WorkerStartError` and another one; no constructor of theirs runs."""
    cls = _derived(likeness.kind)
    error: WorkerStartError = _blank(cls, likeness.args)
    error.args = likeness.args
    own = error.__dict__
    own.update(_message=message, _likeness=likeness, env_index=env_index, pid=pid)
    for name, value in likeness.attributes.items():
        slot = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
        if isinstance(slot, MemberDescriptorType | GetSetDescriptorType):
            with contextlib.suppress(Exception):
                slot.__set__(error, value)
        else:
            own[name] = value
    return error


def _derived(kind: type[Exception]) -> Any:
    """The class of start errors that are of this kind as well; there is one for each as long as it is in use."""
    for cls in type.__subclasses__(kind):
        if vars(cls).get("_kind") is kind:
            return cls
    name = f"{WorkerStartError.__name__}+{kind.__name__}"
    return type(name, (WorkerStartError, kind), {"_kind": kind, **_KIN})


def _blank(cls: Any, args: tuple[Any, ...]) -> Any:
    """An instance of which no constructor that is written in Python has run.

    Raises:
        TypeError: If there is none to be had.
    """
    for base in cls.__mro__:
        new = vars(base).get("__new__")
        if isinstance(new, BuiltinFunctionType):
            with contextlib.suppress(TypeError):  # of another layout
                return new(cls, *args)
    raise TypeError(f"{cls.__name__} cannot be made")


def _reduced(error: Any, _: int = 0) -> tuple[object, ...]:
    return _related, (error._likeness, error._message, error.env_index, error.pid)


# What a derived class has in front of its parents' own, which may mean something else, or not work without their parts.
_KIN: dict[str, Any] = {
    "__module__": __name__,
    "__doc__": WorkerStartError.__doc__,
    "__str__": lambda error: error._message,
    "__repr__": lambda error: f"{type(error).__name__}({error._message!r})",
    "__reduce__": _reduced,
    "__reduce_ex__": _reduced,
    "__eq__": object.__eq__,
    "__hash__": object.__hash__,
    "__setattr__": BaseException.__setattr__,
    "__delattr__": BaseException.__delattr__,
    "_copy": lambda error: _related(error._likeness, error._message, error.env_index, error.pid),
    "env_index": (),
    "pid": None,
}
_OWN = frozenset(("__notes__", "_message", "_likeness", "env_index", "pid"))


def shown(value: object, text: Callable[[Any], str] = repr) -> str:
    """A value that somebody else made, for an error: its `repr`, cut if it is long. Never raises.

    Args:
        value: Anything.
        text: `repr` or `str`.

    >>> shown("level-1"), len(shown(list(range(10_000))))
    ("'level-1'", 1003)
    """
    try:
        found = text(value)
        return found if len(found) <= LONGEST else found[:LONGEST] + "..."
    except Exception as error:
        return f"<{type(value).__qualname__} at {id(value):#x}, whose {text.__name__} raises {type(error).__name__}>"


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
