"""Driving a coroutine by hand, which any event loop can do, or none. Pure: no I/O, no asyncio."""

from __future__ import annotations

import functools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

__all__ = ["awaited", "driven"]

T = TypeVar("T")


@types.coroutine
def driven(
    coroutine: Coroutine[Any, Any, T], context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Generator[Any, Any, T]:
    """Run a coroutine, also one that was begun elsewhere and so cannot be awaited.

    Args:
        coroutine: What is run.
        context: What makes a context to run it in, of which other tasks see nothing: it is left whenever the coroutine
            waits.
    """
    resume: Callable[[], Any] = functools.partial(coroutine.send, None)
    while True:
        try:
            with context():
                pending = resume()
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            answer = yield pending
        except GeneratorExit:
            with context():
                coroutine.close()
            raise
        except BaseException as error:
            resume = functools.partial(coroutine.throw, error)
        else:
            resume = functools.partial(coroutine.send, answer)


async def awaited(awaitable: Awaitable[T]) -> T:
    """A coroutine that has the result of anything that can be awaited."""
    return await awaitable
