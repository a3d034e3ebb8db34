"""Envs at work on one command, and the loop that they work on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from coroutine_envs import AwaitingEnv
from faces import in_thread
from failing_envs import CountingEnv

from aioenvs.engine.adapters.base import Call, Handling
from aioenvs.engine.layout import form_families
from aioenvs.engine.portal import LoopPortal, run_to_end
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.worker.concurrent import ConcurrentHost
from aioenvs.engine.worker.env_host import EnvHost
from aioenvs.errors import ResetNeededError


def built(*factories: Any, fatal: tuple[type[BaseException], ...] = (SystemExit,)) -> EnvHost:
    host = EnvHost(fatal, Handling())
    for env, factory in enumerate(factories):
        host.build(env, factory, {"env_id": env} if isinstance(factory, type) else {})
    families = form_families(host.metadata)
    host.attach([(family.envs, family.layout) for family in families], bytearray(families[-1].layout.end))
    return host


class Waiting(AwaitingEnv):
    async def step(self, action: Any) -> Any:
        await asyncio.Event().wait()


class Leaving(AwaitingEnv):
    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        raise SystemExit(3)


async def test_a_host_says_whether_it_has_coroutines() -> None:
    assert built(CountingEnv, AwaitingEnv).has_coroutines
    assert not built(CountingEnv, CountingEnv).has_coroutines
    assert [each.has_coroutines for each in built(CountingEnv, AwaitingEnv).metadata] == [False, True]


async def test_a_batch_that_is_cancelled_before_it_began_has_touched_nobody() -> None:
    host = ConcurrentHost(built(AwaitingEnv, CountingEnv))
    await host.execute(Opcode.RESET, (), None)
    batch = host.begin(Opcode.STEP, (), None)
    batch.cancel()
    await batch.ended
    outcome = batch.outcome()
    assert outcome.failures.keys() == {0, 1}
    assert all(isinstance(error, asyncio.CancelledError) for error in outcome.failures.values())
    assert (await host.execute(Opcode.STEP, (), None)).failures == {}
    await host.close()


async def test_cancelling_a_command_waits_for_the_coroutines() -> None:
    host = ConcurrentHost(built(Waiting, CountingEnv))
    await host.execute(Opcode.RESET, (), None)
    stepping = asyncio.create_task(host.execute(Opcode.STEP, (), None))
    for _ in range(3):
        await asyncio.sleep(0)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    outcome = await host.execute(Opcode.STEP, (0,), None)
    assert isinstance(outcome.failures[0], ResetNeededError)
    await host.close()


async def test_what_is_fatal_is_told_at_once_and_cancels_the_others() -> None:
    told: list[BaseException] = []
    host = ConcurrentHost(built(Leaving, Waiting), on_fatal=told.append)
    await host.execute(Opcode.RESET, (), None)
    with pytest.raises(SystemExit) as caught:
        await host.execute(Opcode.STEP, (), None)
    assert told == [caught.value]
    await host.close()


async def test_what_is_fatal_nowhere_is_a_failure() -> None:
    host = ConcurrentHost(built(Leaving, AwaitingEnv, fatal=()))
    await host.execute(Opcode.RESET, (), None)
    assert isinstance((await host.execute(Opcode.STEP, (), None)).failures[0], SystemExit)
    await host.close()


async def test_values_that_do_not_fit_begin_nothing() -> None:
    host = ConcurrentHost(built(AwaitingEnv))
    with pytest.raises(KeyError):
        host.begin(Opcode.STEP, (), {7: {}})
    outcome = await host.execute(Opcode.CALL, (), {0: Call("get", "seeds")})
    assert outcome.values[0].value == []
    await host.close()


async def test_a_close_that_takes_too_long_is_left() -> None:
    class Stubborn(AwaitingEnv):
        async def close(self) -> None:
            await released.wait()

    released = asyncio.Event()
    host = ConcurrentHost(built(Stubborn))
    await host.close(patience=0.05)
    released.set()


async def test_a_host_that_is_closed_by_a_plain_call() -> None:
    """Coroutines get as far as they do without a loop."""
    closed = []

    class Quick(AwaitingEnv):
        async def close(self) -> None:
            closed.append("quick")

    class Slow(AwaitingEnv):
        async def close(self) -> None:
            try:
                await asyncio.sleep(0)
            finally:
                closed.append("slow")

    built(Quick, Slow, CountingEnv).close()
    assert closed == ["slow", "quick"]


class Lingering:
    """Leaves a task that never ends of itself, and says when it has."""

    ended = False

    async def begin(self) -> int:
        self.task = asyncio.create_task(self._linger())
        await asyncio.sleep(0)
        return 3

    async def _linger(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


def test_tasks_that_are_left_are_ended() -> None:
    left = Lingering()
    assert run_to_end(left.begin()) == 3
    assert left.ended


@pytest.mark.parametrize("inside", [False, True])
async def test_tasks_that_are_left_in_a_portal_are_ended(inside: bool) -> None:
    """Inside of a running loop the portal has a thread of its own, and else it has none."""
    left = Lingering()

    def use() -> None:
        portal = LoopPortal()
        portal.run(left.begin())
        portal.close()

    use() if inside else await in_thread(use)
    assert left.ended


async def test_a_close_that_exits_is_told_when_all_are_closed() -> None:
    closed = []

    class Exiting(AwaitingEnv):
        async def close(self) -> None:
            raise SystemExit(2)

    class Quiet(AwaitingEnv):
        async def close(self) -> None:
            await asyncio.sleep(0)
            closed.append(True)

    host = ConcurrentHost(built(Exiting, Quiet))
    with pytest.raises(SystemExit):
        await host.close()
    assert closed == [True]


@pytest.mark.parametrize("whatever", [False, True])
def test_a_task_of_an_envs_own_that_exits(whatever: bool, capfd: Any) -> None:
    async def leave() -> None:
        raise SystemExit(9)

    async def main() -> int:
        main.task = asyncio.create_task(leave())  # type: ignore[attr-defined]
        for _ in range(3):
            await asyncio.sleep(0)
        return 3

    found: list[Any] = []

    def run() -> None:
        try:
            found.append(run_to_end(main(), whatever=whatever))
        except SystemExit as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [getattr(each, "code", each) for each in found] == ([3] if whatever else [9])
    assert ("SystemExit: 9" in capfd.readouterr().err) is whatever
