"""What is said to somebody who took the plain way for the asynchronous one, or the other way round. Pure."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NoReturn, cast

from aioenvs.errors import shown

__all__ = ["Instead", "describe", "no_writeback"]

CALLED = ("__iter__", "__aiter__")  # of these, the interpreter drops an error of the look-up, but not one of the call


class WrongStatementError(TypeError, AttributeError):
    """What the interpreter says where a method is missing; `hasattr` says so, too, but for those in `CALLED`."""


class Instead:
    """A method that a class does not have, and what to use instead of the statement that looks for it.

    Type checkers refuse the statement, since this can not be called.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> None:
        if instance is None:
            return cast(None, self)
        if self._name in CALLED:
            return cast(None, functools.partial(self._refuse, instance))
        self._refuse(instance)

    def _refuse(self, instance: Any) -> NoReturn:
        raise WrongStatementError(f"{type(instance).__name__} {self._advice}")


def describe(value: Any) -> str:
    """What was found in place of something else, with a hint where it was not awaited."""
    found = f"the coroutine of {value.__qualname__}" if inspect.iscoroutine(value) else type(value).__name__
    return f"{found}, which has to be awaited" if inspect.isawaitable(value) else found


def no_writeback(env: Any, index: Any, value: Any) -> NoReturn:
    """The `__setitem__` of a batch: its envs keep their places.

    Raises:
        NotImplementedError: Always, as TorchRL's do for envs that cannot take over the state of another one.
    """
    raise NotImplementedError(
        f"{type(env).__name__}[{shown(index)}] = ...: batches do not support snapshot writeback, since envs have no "
        "state that all of them could take over; set_attr and load_state_dict change what they have"
    )
