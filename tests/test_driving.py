"""Driving coroutines by hand: the context they run in, and how they end."""

import asyncio
import contextlib
import types
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from aioenvs.engine.portal import awaited, driven

inside: list[str] = []  # the contexts that are entered now


@contextlib.contextmanager
def context() -> Iterator[None]:
    inside.append("here")
    try:
        yield
    finally:
        inside.pop()


@types.coroutine
def pause(value: int) -> Generator[int, str, str]:
    return (yield value)


async def test_a_context_is_left_whenever_the_coroutine_waits() -> None:
    seen = []

    async def work() -> int:
        seen.append(list(inside))
        await asyncio.sleep(0)
        seen.append(list(inside))
        return 7

    async def bystander() -> None:
        await asyncio.sleep(0)
        seen.append(list(inside))

    watch = asyncio.create_task(bystander())
    await asyncio.sleep(0)
    assert await driven(work(), context) == 7
    await watch
    assert seen == [["here"], [], ["here"]]


def test_a_coroutine_that_was_begun_elsewhere_goes_on() -> None:
    async def work() -> list[str]:
        return [await pause(1), await pause(2)]

    async def rest(coroutine: Any) -> Any:
        return await driven(coroutine)

    coroutine = work()
    assert coroutine.send(None) == 1
    other = rest(coroutine)
    # what it was begun with is answered by None, since nobody else can do so
    assert other.send(None) == 2
    with pytest.raises(StopIteration) as stop:
        other.send("two")
    assert stop.value.value == [None, "two"]


async def test_exceptions_reach_the_coroutine_inside_the_context() -> None:
    caught: list[Any] = []

    async def work() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            caught.append(list(inside))
        await asyncio.sleep(0)
        raise LookupError("nothing there")

    task = asyncio.create_task(awaited(driven(work(), context)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(LookupError):
        await task
    assert caught == [["here"]]
    assert inside == []


def test_closing_it_closes_the_coroutine_inside_the_context() -> None:
    ended = []

    async def work() -> None:
        try:
            await pause(1)
        finally:
            ended.append(list(inside))

    async def outer() -> None:
        await driven(work(), context)

    coroutine = outer()
    assert coroutine.send(None) == 1
    coroutine.close()
    assert ended == [["here"]]
    assert inside == []


def test_a_coroutine_that_waits_although_it_is_closed_is_reported() -> None:
    async def work() -> None:
        try:
            await pause(1)
        finally:
            await pause(2)

    async def outer() -> None:
        await driven(work(), context)

    coroutine = outer()
    coroutine.send(None)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        coroutine.close()
    assert inside == []
