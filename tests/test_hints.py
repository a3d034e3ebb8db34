"""The plain way taken for the asynchronous one, or the other way round: the message says what to use instead."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

import pytest
from faces import Face
from failing_envs import CountingEnv

from aioenvs import AsyncCollector, AsyncParallelEnv, AsyncSerialEnv, Collector, ParallelEnv, SerialEnv, step_mdp
from aioenvs.errors import WorkerStartError

UNAWAITED = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


def an_async_collector() -> AsyncCollector:
    return AsyncCollector(AsyncSerialEnv(2, CountingEnv), frames_per_batch=4)


def a_collector() -> Collector:
    return Collector(SerialEnv(2, CountingEnv), frames_per_batch=4)


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: AsyncParallelEnv(2, CountingEnv), "there are ParallelEnv and SerialEnv"),
        (lambda: AsyncSerialEnv(2, CountingEnv), "there are ParallelEnv and SerialEnv"),
        (an_async_collector, "there is Collector"),
    ],
)
def test_with_for_something_asynchronous(make: Callable[[], Any], instead: str) -> None:
    made = make()
    with pytest.raises(TypeError) as caught, made:
        pass
    told = f"{type(made).__name__} is entered by `async with`, within a coroutine; for `with` {instead}"
    assert str(caught.value) == told
    assert not hasattr(made, "__enter__")
    assert not isinstance(made, AbstractContextManager)
    assert isinstance(made, AbstractAsyncContextManager)


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: ParallelEnv(2, CountingEnv), "there are AsyncParallelEnv and AsyncSerialEnv"),
        (lambda: SerialEnv(2, CountingEnv), "there are AsyncParallelEnv and AsyncSerialEnv"),
        (a_collector, "there is AsyncCollector"),
    ],
)
async def test_async_with_for_something_plain(make: Callable[[], Any], instead: str) -> None:
    made = make()
    with pytest.raises(TypeError) as caught:
        async with made:
            pass
    assert str(caught.value) == f"{type(made).__name__} is entered by `with`; for `async with` {instead}"
    assert not hasattr(made, "__aenter__")
    assert not isinstance(made, AbstractAsyncContextManager)


def test_for_over_an_async_collector() -> None:
    with pytest.raises(TypeError, match=r"AsyncCollector is iterated by `async for`, within .* there is Collector"):
        list(an_async_collector())


async def test_async_for_over_a_plain_collector() -> None:
    with pytest.raises(TypeError, match=r"Collector is iterated by `for`; for `async for` there is AsyncCollector"):
        async for _ in a_collector():  # type: ignore[attr-defined]
            pass


@UNAWAITED
@pytest.mark.parametrize(
    "command", ["rand_action", "rand_step", "step", "step_and_maybe_reset", "maybe_reset", "reset", "send"]
)
async def test_a_reset_that_was_not_awaited(face: Face, command: str) -> None:
    async with AsyncSerialEnv(2, CountingEnv) as other, face.open(2, CountingEnv) as env:
        for each in (env, env[0:2]):
            with pytest.raises(TypeError, match=r"got the coroutine of AsyncEnvs\.reset, which has to be awaited"):
                await face.call(getattr(each, command), other.reset())


@UNAWAITED
@pytest.mark.parametrize(
    "use",
    [
        lambda env, td: step_mdp(env.step(td)),
        lambda env, td: env.rollout(2, tensordict=env.step(td), auto_reset=False),
        lambda env, td: env.load_state_dict(env.step(td)),
    ],
)
async def test_a_step_that_was_not_awaited(use: Callable[[Any, Any], Awaitable[Any]]) -> None:
    async with AsyncSerialEnv(2, CountingEnv) as env:
        td = env.rand_action(await env.reset())
        with pytest.raises(TypeError, match=r"got the coroutine of Async\w+\.step, which has to be awaited"):
            await use(env, td)


@UNAWAITED
def test_a_factory_that_is_a_coroutine_function() -> None:
    async def make() -> CountingEnv:
        return CountingEnv()

    with pytest.raises(WorkerStartError, match=r"methods reset and step, and so cannot be an `async def`"):
        SerialEnv(2, make).start()
