"""Exceptions that travel from worker to caller, however badly they behave."""

import asyncio
import os
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest

from aioenvs.engine.failure import Failure, capture, locate, passable, rebuild, summary
from aioenvs.errors import RemoteEnvError, WorkerDiedError


class ManyArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class MessageFromCode(Exception):
    """The constructor takes one argument and makes a message of it: pickle gives it that message as the code."""

    def __init__(self, code: object) -> None:
        super().__init__(f"status {code}")


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)


class WithLock(Exception):
    """Holds what no pickle can."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.generator = (number for number in ())


class RaisingStr(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("in __str__")


class RaisingReduce(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        raise ZeroDivisionError("in __reduce__")


class ExitingReduce(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        raise SystemExit(3)


class OtherType(Exception):
    """Comes back from its pickle as something else."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def odd_notes() -> Exception:
    error = ValueError("odd")
    error.__notes__ = ("a tuple",)
    return error


def with_cause() -> BaseException:
    try:
        try:
            raise KeyError("deep")
        except KeyError as cause:
            raise ValueError("shallow") from cause
    except ValueError as error:
        return error


def circular() -> Exception:
    error, other = ValueError("a"), ValueError("b")
    error.__cause__, other.__cause__ = other, error
    return error


REBUILT = [
    ValueError("plain"),
    KeyError("a"),
    OSError(2, "No such file or directory", "model.xml"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    RecursionError("too deep"),
    ExceptionGroup("many", [ValueError("one"), TypeError("two")]),
    WorkerDiedError("inner", env_index=(3,), pid=4),
    NotImplementedError(),
    TimeoutError("slow"),
    with_cause(),
    circular(),
]
REPLACED = [
    ManyArguments(3, "no"),
    KeywordOnly(code=3),
    WithLock("held"),
    RaisingReduce("r"),
    OtherType("o"),
    StopIteration(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    SystemExit(2),
    GeneratorExit(),
    BaseExceptionGroup("worse", [KeyboardInterrupt(), ValueError()]),
]
NASTY = [
    RaisingStr("s"),
    ExitingReduce("e"),
    MessageFromCode(404),
    Frozen(3),
    odd_notes(),
    SyntaxError("bad", ("file.py", 1, "no offset", "text")),
    ValueError("\udce4 lone surrogate"),
    ValueError(object()),
]


def travelled(error: BaseException) -> Exception:
    """What arrives on the other side."""
    failure = capture(raised(error), 3, "step")
    return rebuild(pickle.loads(pickle.dumps(failure)))


def names(error: BaseException) -> str:
    return type(error).__name__


@pytest.mark.parametrize("error", REBUILT, ids=names)
def test_an_ordinary_exception_arrives_as_itself(error: Exception) -> None:
    arrived = travelled(error)
    assert type(arrived) is type(error)
    assert arrived is not error
    assert str(arrived) == str(error)
    if not isinstance(error, ExceptionGroup):
        assert arrived.args == error.args


@pytest.mark.parametrize("error", REPLACED, ids=names)
def test_what_cannot_be_rebuilt_arrives_as_a_remote_error(error: BaseException) -> None:
    arrived = travelled(error)
    assert type(arrived) is RemoteEnvError
    assert str(arrived) == summary(error)
    assert str(arrived).partition(":")[0].endswith(type(error).__name__)


@pytest.mark.parametrize("error", NASTY, ids=names)
def test_capture_and_rebuild_never_raise(error: BaseException) -> None:
    arrived = travelled(error)
    assert isinstance(arrived, Exception)
    notes = "\n".join(arrived.__notes__)
    assert "raised by env 3 in step" in notes


@pytest.mark.parametrize("error", [*REBUILT, *REPLACED], ids=names)
def test_a_note_tells_the_env_the_command_and_the_traceback(error: BaseException) -> None:
    note = travelled(error).__notes__[-1]
    assert note.startswith(f"raised by env 3 in step, process {os.getpid()}:\n")
    assert f'File "{__file__}", line' in note
    assert "in raised" in note
    assert type(error).__name__ in note


def test_the_notes_of_the_exception_itself_come_first() -> None:
    error = ValueError("x")
    error.add_note("its own")
    arrived = travelled(error)
    assert arrived.__notes__[0] == "its own"
    assert len(arrived.__notes__) == 2


def test_the_traceback_shows_the_cause() -> None:
    note = travelled(with_cause()).__notes__[-1]
    assert "KeyError: 'deep'" in note
    assert "direct cause" in note
    assert note.endswith("ValueError: shallow")


def test_a_message_is_not_changed_by_the_journey() -> None:
    arrived = travelled(MessageFromCode(404))
    assert "status 404" in str(arrived)
    assert "status status" not in str(arrived)


def test_attributes_arrive_too() -> None:
    error = ValueError("x")
    error.details = {"joint": 3}
    assert travelled(error).details == {"joint": 3}


def test_a_class_that_exists_only_there_arrives() -> None:
    class Local(Exception):
        pass

    arrived = travelled(Local("here"))
    assert type(arrived).__name__ == "Local"
    assert str(arrived) == "here"


@pytest.mark.parametrize(
    "data", [b"no pickle", cloudpickle.dumps("no exception"), cloudpickle.dumps(KeyboardInterrupt())]
)
def test_a_pickle_that_gives_no_exception_here(data: bytes) -> None:
    arrived = rebuild(Failure("raised by env 0 in reset, process 1", "ValueError: x", "Traceback ...\n", data))
    assert type(arrived) is RemoteEnvError
    assert str(arrived) == "ValueError: x"
    assert arrived.__notes__ == ["raised by env 0 in reset, process 1:\nTraceback ..."]


def test_each_rebuild_gives_an_exception_of_its_own() -> None:
    failure = capture(raised(ValueError("x")), 0, "step")
    assert rebuild(failure) is not rebuild(failure)
    assert len(rebuild(failure).__notes__) == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("x"), "ValueError: x"),
        (ValueError(), "ValueError"),
        (ValueError("two\nlines"), "ValueError: two\nlines"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RaisingStr("s"), f"{__name__}.RaisingStr: <exception str() failed>"),
        (ManyArguments(3, "no"), f"{__name__}.ManyArguments: 3: no"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_summary_is_type_and_message(error: BaseException, text: str) -> None:
    assert summary(error) == text


def test_a_summary_leaves_notes_out() -> None:
    error = ValueError("x")
    error.add_note("a long traceback")
    assert summary(error) == "ValueError: x"


@pytest.mark.parametrize("error", [*REBUILT, *REPLACED, *NASTY], ids=names)
def test_a_summary_never_raises(error: BaseException) -> None:
    assert type(error).__name__ in summary(raised(error))


def test_where_an_exception_came_from() -> None:
    assert locate(12, "step_and_maybe_reset") == f"raised by env 12 in step_and_maybe_reset, process {os.getpid()}"


def test_only_stop_iteration_cannot_leave_a_coroutine() -> None:
    error = ValueError("x")
    assert passable(error) is error
    stop = StopIteration(3)
    stand_in = passable(stop)
    assert type(stand_in) is RemoteEnvError
    assert str(stand_in) == "StopIteration: 3"
    assert stand_in.__cause__ is stop
