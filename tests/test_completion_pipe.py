"""The pipe in which all workers of a pool say that they are done: what is late, foreign or torn changes nothing."""

import asyncio
import logging
import os
import select
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from faces import acting, in_thread, observed
from failing_envs import CountingEnv, Gate, numbered
from test_death import kill_and_reap

from aioenvs import AsyncParallelEnv
from aioenvs.engine.config import BatchConfig
from aioenvs.engine.pools.backends import make_pool
from aioenvs.engine.pools.pool import Pool
from aioenvs.engine.protocol import RECORD, RECORD_MAGIC, Opcode
from aioenvs.errors import ClosedError, WorkerDiedError, WorkerTimeoutError

pytestmark = pytest.mark.usefixtures("any_loop")


def pipe_of(pool: Any) -> Any:
    return pool._kind.pipe


def record(host: Any, sequence: int, opcode: int = Opcode.DONE, number: int = 0, value: int = 0) -> bytes:
    return RECORD.pack(RECORD_MAGIC, opcode, host.index, host.generation, number, sequence, value)


@pytest.fixture
async def two() -> AsyncIterator[AsyncParallelEnv]:
    async with AsyncParallelEnv(4, CountingEnv, create_env_kwargs=numbered(4), num_processes=2) as env:
        await env.reset()
        yield env


async def check_steps(env: AsyncParallelEnv, steps: int) -> None:
    """All envs take a step, which is the one that comes next."""
    td = await env.step(acting([0] * 4))
    assert [seen[:3] for seen in observed(td)] == [[i, 1, steps] for i in range(4)]


@pytest.mark.parametrize("size", [1, 7, 16, 160, 5000])
async def test_nonsense_is_left_out_and_nothing_is_lost(
    two: AsyncParallelEnv, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 6):
        os.write(pipe_of(two._pool).writing, bytes([RECORD_MAGIC, 0, 255, 64][k % 4] for k in range(size)))
        await check_steps(two, step)
    assert [r.levelno for r in caplog.records if "descriptors" in r.getMessage()] == [logging.WARNING]


async def test_a_record_is_found_wherever_it_begins(two: AsyncParallelEnv) -> None:
    """Behind a piece of one, and cut in two."""
    pool: Any = two._pool
    host, pipe = pool.hosts[0], pipe_of(pool)
    for cut in (1, 5, 11):
        asked = host.ask(Opcode.ATTACH, body=host.attachment(pool.families))
        data = record(host, host._sequence)
        pipe._take(data[:2] + data[:cut])
        assert not asked.done()
        pipe._take(data[cut:])
        assert asked.done()
    await check_steps(two, 1)


async def test_what_nobody_owes_changes_nothing(two: AsyncParallelEnv) -> None:
    pool: Any = two._pool
    (host, *_) = pool.hosts.values()
    old = RECORD.pack(RECORD_MAGIC, Opcode.DONE, 0, host.generation + 1, 3, host._sequence + 1, 0)
    stray = RECORD.pack(RECORD_MAGIC, Opcode.DONE, 9, host.generation, 3, host._sequence + 1, 0)
    twice = record(host, host._sequence)
    single = record(host, host._sequence + 1, Opcode.DONE_EACH, 0, 1)
    for step in range(1, 4):
        os.write(pipe_of(pool).writing, old + stray + twice + single)
        await check_steps(two, step)


async def test_the_last_answer_of_a_worker_that_dies_counts() -> None:
    """It is in the pipe when the death shows, and nobody has read it yet."""
    async with AsyncParallelEnv(1, CountingEnv, num_processes=1) as env:
        await env.reset()
        pool: Any = env._pool
        host = pool.hosts[0]
        pid = env.pids[0]
        pipe = pipe_of(pool)
        asyncio.get_running_loop().remove_reader(pipe._reading)  # so that it stays there
        stepping = asyncio.ensure_future(env.step(acting([3])))
        await in_thread(select.select, [pipe._reading], [], [], 20)
        await kill_and_reap(pid)
        assert observed(await stepping) == [[0, 1, 1, 3]]
        await host.ended
        with pytest.raises(WorkerDiedError):
            await env.step(acting([3]))


async def test_a_late_answer_is_dropped_and_frees_its_envs(gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
        await env.reset()
        with pytest.raises(WorkerTimeoutError, match="env 1 "):
            await env.step(acting([1, 1]), timeout=0.2)
        gate.open()
        assert observed(await env.step(acting([5, 5]))) == [[0, 1, 2, 6], [1, 1, 2, 6]]


async def test_a_fork_of_the_parent_has_no_end_of_it(two: AsyncParallelEnv) -> None:
    pipe = pipe_of(two._pool)
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        os.write(writing, bytes([pipe._reading == pipe.writing == -1]))
        os._exit(0)
    assert os.read(reading, 1) == b"\1"
    await in_thread(os.waitpid, pid, 0)
    os.close(reading)
    os.close(writing)
    await check_steps(two, 1)


async def test_a_worker_that_writes_to_a_parent_who_is_gone_ends(two: AsyncParallelEnv) -> None:
    pool: Any = two._pool
    pipe_of(pool).close()
    with pytest.raises(WorkerDiedError, match="exit"):
        await two.step(acting([0] * 4))


async def test_close_and_discard_close_both_ends() -> None:
    env = AsyncParallelEnv(2, CountingEnv, num_processes=2)
    await env.start()
    pipe = pipe_of(env._pool)
    assert pipe.writing >= 0
    await env.close()
    assert (pipe._reading, pipe.writing) == (-1, -1)


# -- steps that are answered one by one -----------------------------------------------------------------


@pytest.fixture(params=["process", "thread", "serial"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


async def opened(backend: str, count: int, each: Any = None, **options: Any) -> Pool:
    packed = {} if backend == "serial" else {"num_processes": 2}
    config = BatchConfig.of(
        count, CountingEnv, create_env_kwargs=numbered(count, each), backend=backend, **packed, **options
    )
    pool = make_pool(config, yields=True)
    await pool.start()
    pool.release(lease := await pool.hold(pool.everything, "reset"))
    await pool.reset(lease, {})
    for arrays in pool.arrays:
        for array in arrays["input"].values():
            array[...] = 0
    return pool


class Delivered:
    """What was delivered, env by env."""

    def __init__(self, count: int) -> None:
        self.outcomes: dict[int, Any] = {}
        self._count = count
        self._all = asyncio.Event()

    def __call__(self, envs: Any, outcome: Any) -> None:
        for env in envs:
            assert env not in self.outcomes
            self.outcomes[env] = outcome
        if len(self.outcomes) >= self._count:
            self._all.set()

    async def everything(self) -> dict[int, Any]:
        await asyncio.wait_for(self._all.wait(), 20)
        return self.outcomes


async def test_all_envs_are_delivered_once(backend: str) -> None:
    pool = await opened(backend, 6)
    try:
        for steps in (1, 2):
            delivered = Delivered(6)
            lease = await pool.hold(pool.everything, "send")
            pool.step_first_ready(lease, None, delivered)
            found = await delivered.everything()
            pool.release(lease)
            assert sorted(found) == list(range(6))
            assert not any(outcome.failures for outcome in found.values())
            assert pool.states.unanswered(pool.everything.envs) == set()
            each = 1 if backend == "serial" else len(pool.groups[0])
            assert [times.count for times in pool.times] == [steps * each] * len(pool.groups)
    finally:
        await pool.close()


async def test_an_env_that_takes_its_time_holds_up_no_other_answer(gate: Gate) -> None:
    """Not even that of one which its process stepped before it."""
    pool = await opened("process", 4, {1: {"fault": gate.wait, "at": (1, 1)}})
    try:
        delivered = Delivered(3)  # 0, which shares a process with 1, and 2 and 3
        lease = await pool.hold(pool.everything, "send")
        pool.step_first_ready(lease, None, delivered)
        assert sorted(await delivered.everything()) == [0, 2, 3]
        gate.open()
        await pool.within(pool._drain(pool.everything.envs), lease)
        assert 1 in delivered.outcomes
    finally:
        await pool.close()


async def test_a_death_is_delivered_to_those_it_concerns(gate: Gate) -> None:
    pool = await opened("process", 4, {1: {"fault": gate.wait, "at": (1, 1)}})
    try:
        delivered = Delivered(4)
        lease = await pool.hold(pool.everything, "send")
        pool.step_first_ready(lease, None, delivered)
        await gate.arrival()
        os.kill(pool.hosts[0].pid, signal.SIGKILL)
        found = await delivered.everything()
        assert [isinstance(found[env], WorkerDiedError) for env in range(4)][1:] == [True, False, False]
    finally:
        await pool.close()


async def test_a_step_that_was_lost_is_delivered_as_that(gate: Gate) -> None:
    pool = await opened("process", 4, {1: {"fault": gate.wait, "at": (1, 1)}}, on_worker_death="restart")
    try:
        delivered = Delivered(4)
        lease = await pool.hold(pool.everything, "send")
        pool.step_first_ready(lease, None, delivered)
        await gate.arrival()
        os.kill(pool.hosts[0].pid, signal.SIGKILL)
        found = await delivered.everything()
        assert 1 in found[1].lost
        assert not found[2].lost
    finally:
        await pool.close()


async def test_the_late_are_told_apart_and_the_closed(gate: Gate) -> None:
    pool = await opened("process", 4, {1: {"fault": gate.wait, "at": (1, 1)}})
    try:
        delivered = Delivered(4)
        lease = await pool.hold(pool.everything, "send", timeout=0.3)
        pool.step_first_ready(lease, None, delivered)
        found = await delivered.everything()
        assert isinstance(found[1], WorkerTimeoutError)
        assert found[1].env_index == (1,)
        assert not isinstance(found[2], BaseException)
        pool.release(lease)
        others = Delivered(2)
        lease = await pool.hold(pool.select((0, 2)), "send")
        handle = pool.step_first_ready(lease, None, others)
        handle.cancel()
        third = Delivered(1)
        lease = await pool.hold(pool.select((3,)), "send")
        pool.step_first_ready(lease, None, third)
    finally:
        closing = asyncio.ensure_future(pool.close())
        gate.open()
        await closing
    assert others.outcomes == {}
    assert all(isinstance(found, ClosedError) or not found.failures for found in third.outcomes.values())
