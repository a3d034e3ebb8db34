"""Closing succeeds in every state, and leaves nothing: the `no_leaks` fixture looks after each test here."""

import asyncio
import functools
import gc
import inspect
import os
import threading
import unittest.mock
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import failing_envs as faults
import psutil
import pytest
import torch
from faces import PROCESS_FACES, Face, acting, call, in_thread, masked, observed
from failing_envs import CountingEnv, Gate, numbered
from processes import still_alive

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.engine.config import START_METHODS
from aioenvs.engine.pools import launching as process
from aioenvs.errors import AioEnvsError, ClosedError, ConcurrencyError, WorkerDiedError

start_methods = pytest.mark.parametrize("method", START_METHODS)


def processes(env: Any) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in env.pids]


def gone(workers: list[psutil.Process], patience: float = 0) -> bool:
    return not still_alive(workers, patience)


async def test_closed_when_idle(face: Face) -> None:
    env = face.make(3, CountingEnv, create_env_kwargs=numbered(3))
    await call(env.reset)
    workers = processes(env)
    assert len(workers) == (0 if not face.in_processes else face.processes or 3)
    await call(env.close)
    assert env.is_closed
    assert env.pids == ()
    assert gone(workers)


async def test_closed_twice_or_never_started(face: Face) -> None:
    env = face.make(3, CountingEnv)
    with pytest.raises(ClosedError, match="closed already, or was never started"):
        await call(env.close)
    await call(env.close, raise_if_closed=False)
    await call(env.start)
    await call(env.close)
    with pytest.raises(ClosedError, match="closed already"):
        await call(env.close)
    await call(env.close, raise_if_closed=False)


def in_the_middle_of_a_step(env: Any, gate: Gate, close: Callable[[], object]) -> list[list[int]]:
    """What comes of a step in a thread that is at a gate while this one closes the envs."""

    async def run() -> Any:
        await call_here(env.reset)
        return await call_here(env.step, acting([1, 2]))

    with ThreadPoolExecutor(1) as threads:
        step = threads.submit(asyncio.run, run())
        gate.wait_for_arrival()
        try:
            close()
        finally:
            gate.open()
    return observed(step.result())


async def call_here(method: Callable[..., Any], *args: Any) -> Any:
    result = method(*args)
    return await result if inspect.isawaitable(result) else result


@pytest.mark.parametrize("make", [AsyncSerialEnv, SerialEnv, functools.partial(ParallelEnv, backend="serial")])
def test_envs_of_a_thread_are_not_closed_in_the_middle_of_its_step(make: Any, gate: Gate) -> None:
    note = unittest.mock.Mock()
    env = make(
        2, CountingEnv, create_env_kwargs=numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}}, on_close=lambda: note())
    )
    ended = asyncio.run if make is AsyncSerialEnv else bool

    def close() -> None:
        with pytest.raises(ConcurrencyError, match="in the middle of a call from another thread; let that end first"):
            ended(env.close())
        note.assert_not_called()
        assert not env.is_closed

    assert in_the_middle_of_a_step(env, gate, close) == [[0, 1, 1, 1], [1, 1, 1, 2]]
    ended(env.close())
    assert note.call_count == 2
    assert env.is_closed


@pytest.mark.parametrize("command", ["reset", "step", "call"])
def test_envs_that_close_their_own_batch(command: str) -> None:
    errors = []

    class ClosesAll(CountingEnv):
        def ask(self) -> None:
            try:
                env.close()
            except ConcurrencyError as error:
                errors.append(str(error))

        def reset(self, **_: Any) -> Any:  # type: ignore[override]
            self.ask()
            return super().reset()

        def step(self, action: Any) -> Any:
            self.ask()
            return super().step(action)

    with SerialEnv(2, ClosesAll) as env:
        td = env.reset()
        errors.clear()
        if command == "call":
            env.call("ask")
        else:
            getattr(env, command)(td.set("action", torch.zeros(2, dtype=torch.int64)))
        assert len(errors) == 2
        assert all("code that they run themselves" in error for error in errors)
    assert env.is_closed


def test_a_command_that_begins_after_all_were_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with SerialEnv(2, CountingEnv) as env:
        td = env.rand_action(env.reset())
        pool = env._env._pool
        monkeypatch.setattr(pool, "ask", functools.partial(_closed_before, pool, pool.ask))
        with pytest.raises(ClosedError, match="were closed while a request waited"):
            env.step(td)
        env.close()


def _closed_before(pool: Any, command: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    asyncio.run(pool.close())
    return command(*args, **kwargs)


async def test_used_after_close_they_open_again(face: Face) -> None:
    env = face.make(3, CountingEnv, create_env_kwargs=numbered(3))
    await call(env.reset)
    await call(env.close)
    assert observed(await call(env.reset)) == [[env_id, 1, 0, 0] for env_id in range(3)]
    await call(env.close)


async def test_every_env_is_closed_once(face: Face, tmp_path: Path) -> None:
    kwargs = [{"env_id": env, "on_close": faults.Note(str(tmp_path / f"{env}"))} for env in range(3)]
    async with face.open(3, CountingEnv, create_env_kwargs=kwargs):
        pass
    assert [(tmp_path / f"{env}").read_text() for env in range(3)] == ["x"] * 3


async def test_an_error_in_the_block_is_the_one_that_is_seen(face: Face) -> None:
    env = face.make(3, CountingEnv, create_env_kwargs=numbered(3, {1: {"fault": faults.raise_value_error}}))

    def in_block() -> None:
        with env:
            env.reset()
            for _ in range(3):
                env.step(acting([0] * 3))

    async def in_async_block() -> None:
        async with env:
            await env.reset()
            for _ in range(3):
                await env.step(acting([0] * 3))

    with pytest.raises(ValueError, match="the reactor is hot"):
        await call(in_async_block if face.is_async else in_block)
    assert env.is_closed


async def test_leaving_the_block_of_closed_envs(face: Face) -> None:
    async with face.open(2, CountingEnv) as env:
        await call(env.close)
    if face.is_async:
        async with env:
            await env.close()
    assert env.is_closed


@start_methods
async def test_closed_when_busy(async_face: Face, gate: Gate, method: str) -> None:
    kwargs = numbered(3, {1: {"fault": gate.wait, "at": (1, 1)}})
    env = async_face.make(3, CountingEnv, create_env_kwargs=kwargs, mp_start_method=method, close_timeout=0.5)
    await env.reset()
    workers = processes(env)
    stepping = asyncio.create_task(env.step(acting([0] * 3)))
    await gate.arrival()
    await env.close()
    assert gone(workers)
    with pytest.raises(AioEnvsError, match="close"):
        await stepping


@pytest.mark.parametrize("hang", [faults.hang, faults.hang_deaf, faults.stop_itself])
async def test_closed_when_an_env_hangs(process_face: Face, hang: Any) -> None:
    face = process_face
    kwargs = numbered(3, {1: {"fault": hang, "at": (1, 1)}})
    env = face.make(3, CountingEnv, create_env_kwargs=kwargs, step_timeout=0.2, close_timeout=0.3)
    await call(env.reset)
    workers = processes(env)
    with pytest.raises(TimeoutError):
        await call(env.step, acting([0] * 3))
    await call(env.close)
    assert env.is_closed
    assert gone(workers)


@pytest.mark.parametrize(
    "on_close",
    [faults.raise_value_error, faults.raise_keyboard_interrupt, faults.exit_3, faults.kill_itself, faults.hang],
)
async def test_an_env_that_cannot_close(process_face: Face, on_close: Any, tmp_path: Path) -> None:
    """The others are closed all the same."""
    face = process_face
    kwargs = numbered(4, {3: {"on_close": on_close}, 0: {"on_close": faults.Note(str(tmp_path / "0"))}})
    env = face.make(4, CountingEnv, create_env_kwargs=kwargs, close_timeout=0.5)
    await call(env.reset)
    workers = processes(env)
    await call(env.close)
    assert gone(workers)
    assert (tmp_path / "0").read_text() == "x"


async def test_what_close_raises_is_told(process_face: Face, capfd: pytest.CaptureFixture[str]) -> None:
    kwargs = numbered(2, {1: {"on_close": faults.raise_value_error}})
    async with process_face.open(2, CountingEnv, create_env_kwargs=kwargs):
        pass
    assert "ValueError: the reactor is hot" in capfd.readouterr().err


@start_methods
async def test_a_cancelled_close_still_closes(async_face: Face, gate: Gate, method: str) -> None:
    kwargs = numbered(3, {1: {"on_close": gate.wait}})
    env = async_face.make(3, CountingEnv, create_env_kwargs=kwargs, mp_start_method=method)
    await env.reset()
    workers = processes(env)
    closing = asyncio.create_task(env.close())
    await gate.arrival()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert env.is_closed
    assert gone(workers)
    async with env:
        assert observed(await env.reset())[2] == [2, 1, 0, 0]
        gate.open()


async def test_two_tasks_close_at_once(async_face: Face) -> None:
    env = async_face.make(3, CountingEnv)
    await env.reset()
    workers = processes(env)
    await asyncio.gather(env.close(), env.close(raise_if_closed=False))
    assert gone(workers)


async def test_closed_with_an_unread_reply(async_face: Face, gate: Gate) -> None:
    kwargs = numbered(3, {1: {"fault": gate.wait, "at": (1, 1)}})
    env = async_face.make(3, CountingEnv, create_env_kwargs=kwargs)
    await env.reset()
    stepping = asyncio.create_task(env.step(acting([0] * 3)))
    await gate.arrival()
    stepping.cancel()
    closing = asyncio.create_task(env.close())
    gate.open()
    await closing
    assert stepping.cancelled()


def drop(owner: list[Any]) -> None:
    owner.clear()
    gc.collect()


@start_methods
async def test_forgotten_envs_are_told_and_ended(face: Face, method: str) -> None:
    owner = [face.make(3, CountingEnv, mp_start_method=method)]
    await call(owner[0].reset)
    workers = processes(owner[0])
    with pytest.warns(ResourceWarning, match=r"num_workers=3.*was never closed"):
        drop(owner)
    assert await in_thread(gone, workers, 5)


async def test_a_closed_env_that_is_kept_holds_nothing(face: Face) -> None:
    before = descriptors()
    env = face.make(3, CountingEnv, create_env_kwargs=numbered(3))
    td = await call(env.reset)
    await call(env.close)
    gc.collect()
    assert descriptors() == before
    assert observed(td)[2] == [2, 1, 0, 0]


def descriptors() -> dict[int, str]:
    warm = {launcher._control.fileno() for launcher in process._launchers.values()}
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return {fd: target for fd, target in found.items() if fd not in warm and "eventpoll" not in target}


@pytest.mark.parametrize(
    ("face", "method"), list(zip(PROCESS_FACES, ["forkserver", "fork"], strict=True)), ids=["forkserver", "fork"]
)
@pytest.mark.slow
async def test_many_starts_and_closes_cost_nothing(face: Face, method: str) -> None:
    env = face.make(2, CountingEnv, create_env_kwargs=numbered(2), mp_start_method=method)

    async def cycle() -> None:
        await call(env.reset)
        await call(env.step, acting([1, 1]))
        await call(env.close)

    def holdings() -> tuple[int, int]:
        gc.collect()
        return psutil.Process().num_fds(), threading.active_count()

    def launchers_descriptors() -> int:
        return sum(psutil.Process(launcher.pid).num_fds() for launcher in process._launchers.values())

    for _ in range(3):
        await cycle()
    before, memory, theirs = holdings(), psutil.Process().memory_info().rss, launchers_descriptors()
    for _ in range(30):
        await cycle()
    assert holdings() == before
    assert launchers_descriptors() < theirs + 10  # it may still be closing those of the last workers
    assert psutil.Process().memory_info().rss - memory < 10 * 2**20


async def test_close_after_each_kind_of_failure(process_face: Face) -> None:
    each = {0: {"fault": faults.raise_value_error, "at": (1, 1)}, 2: {"fault": faults.exit_3, "at": (1, 1)}}
    env = process_face.make(3, CountingEnv, create_env_kwargs=numbered(3, each))
    await call(env.reset)
    with pytest.raises((ValueError, WorkerDiedError)):
        await call(env.step, acting([0] * 3))
    workers = [psutil.Process(pid) for pid in env.pids if psutil.pid_exists(pid)]
    with pytest.raises(AioEnvsError):
        await call(env.step, acting([0] * 3))
    with pytest.raises(WorkerDiedError, match="exited with code 3"):
        await call(env.step, masked("_step", 3, [2]).update(acting([0] * 3)))
    await call(env.close)
    assert gone(workers)


@pytest.mark.parametrize("restarts", [False, True], ids=["asked for", "restarts"])
async def test_closed_while_a_worker_is_replaced(restarts: bool) -> None:
    """Whoever waits for the replacement hears that the envs were closed, and is not cancelled himself."""
    options: dict[str, Any] = {"on_worker_death": "restart"} if restarts else {}
    env = AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1, **options)
    await env.reset()
    (worker,) = processes(env)
    pool = env._pool
    replacing = asyncio.Event()
    replace = pool.crew.replace

    async def announced(index: int) -> None:
        replacing.set()
        await replace(index)

    pool.crew.replace = announced
    worker.kill()
    asking = asyncio.ensure_future(env.step(acting([0, 0])))
    if not restarts:
        with pytest.raises(WorkerDiedError):
            await asking
        asking = asyncio.ensure_future(env.reset())
    await replacing.wait()
    await env.close()
    with pytest.raises(ClosedError, match="were closed while a request waited for them"):
        await asking
    assert not asking.cancelled()
    assert gone([worker], 10)
