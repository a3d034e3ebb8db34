"""Inside event loops, threads and tasks that somebody else owns: servers, notebooks, anyio, one loop per thread."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import httpx
import pytest
import torch
import uvloop
from faces import ASYNC_FACES, Face, acting, in_thread, observed
from failing_envs import CountingEnv, Gate, gated_factory, numbered
from servers import served
from tensordict import TensorDict
from test_starts import ENVS, EXECUTE, python

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.errors import AioEnvsError, ConcurrencyError

LOOPS = ("asyncio", "uvloop")


def counted(count: int, **options: Any) -> AsyncParallelEnv:
    options.setdefault("num_processes", min(count, 2))
    return AsyncParallelEnv(count, CountingEnv, create_env_kwargs=numbered(count), **options)


def rows(episode: int, step: int, *totals: int) -> list[list[int]]:
    return [[env, episode, step, total] for env, total in enumerate(totals)]


def sending(actions: list[int], envs: list[int]) -> TensorDict:
    return acting(actions).set("env_index", torch.tensor(envs))


async def used(env: Any, episode: int = 1) -> None:
    """Every kind of command, on some envs that nobody else uses; they are at the beginning of an episode afterwards."""
    count = len(env)
    assert [row[1:] for row in observed(await env.reset())] == [[episode, 0, 0]] * count
    assert [row[1:] for row in observed(await env.step(acting([3] * count)))] == [[episode, 1, 3]] * count
    env.send(acting([4] * count))
    received = [td for _ in range(count) for td in (await env.recv(max_get=1))[0].unbind(0)]
    assert [td["next", "observation"].tolist()[1:] for td in received] == [[episode, 2, 7]] * count
    assert await env.get_attr("steps") == [2] * count


# -- loops that somebody else runs ----------------------------------------------------------------------


async def whole_life(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await used(env)
        await used(env[1:], episode=2)


RUNNERS: dict[str, Callable[..., Any]] = {
    "asyncio.run": lambda main, *args: asyncio.run(main(*args)),
    "uvloop.run": lambda main, *args: uvloop.run(main(*args)),
    "anyio on asyncio": lambda main, *args: anyio.run(main, *args),
    "anyio on uvloop": lambda main, *args: anyio.run(main, *args, backend_options={"use_uvloop": True}),
}


@pytest.mark.parametrize("runner", RUNNERS)
def test_whoever_runs_the_loop(runner: str) -> None:
    faces = [Face("async-serial", AsyncSerialEnv, 0), Face("async", AsyncParallelEnv, 2)]
    for face in (*faces, Face("async-thread", AsyncParallelEnv, 0, threads=2)):
        RUNNERS[runner](whole_life, face)


class EnvApp:
    """A bare ASGI app: the envs live as long as the server, and `/N` steps env N until its 5th step."""

    def __init__(self, env: AsyncParallelEnv) -> None:
        self.env = env

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        view = self.env[int(scope["path"].strip("/"))]
        for _ in range(5):
            td = await view.step(acting([2]))
        body = json.dumps(observed(td)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        await self.env.reset()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.env.close()
        await send({"type": "lifespan.shutdown.complete"})


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.slow
async def test_inside_uvicorn(loop: str) -> None:
    env = counted(8)
    async with served(EnvApp(env), loop) as address, httpx.AsyncClient(base_url=f"http://{address}") as client:
        answers = await asyncio.gather(*(client.get(f"/{index}") for index in range(8)))
        assert [answer.json() for answer in answers] == [[[index, 1, 5, 10]] for index in range(8)]
        assert not env.is_closed
    assert env.is_closed
    assert env.pids == ()


NOTEBOOK = (
    ENVS,
    "env = aioenvs.AsyncParallelEnv(3, MainEnv)\ntd = await env.reset()",
    "env.send(env.rand_action(td))",  # each cell is a task of its own
    "asyncio.create_task(asyncio.sleep(0))\nprint(env.outstanding)",
    "td, after = await env.recv(3)\nprint(td['next', 'observation'].flatten().tolist())",
    "one = asyncio.create_task(env[0].step(env[0].rand_action()))\ntwo = env[1].step(env[1].rand_action())",
    "print(*(td['next', 'reward'].item() for td in await asyncio.gather(one, two)))",
    "sync = aioenvs.ParallelEnv(2, MainEnv)\nprint(stepped(sync))\nsync.send(sync.rand_action())",
    "print(len(sync.recv(2)[0]))\nsync.close()",
    "await env.close()\nprint(env.is_closed)",
)
OUTPUT = ["", "", "", "(0, 1, 2)", "[1.0, 1.0, 1.0]", "", "1.0 1.0", "[1.0, 1.0]", "2", "True"]


@pytest.mark.slow
def test_a_notebook_may_await_in_one_cell_what_another_began(tmp_path: Path) -> None:
    (tmp_path / "execute.py").write_text(EXECUTE)
    *_, line = python(tmp_path, "-W", "ignore", "execute.py", code=json.dumps([textwrap.dedent(c) for c in NOTEBOOK]))
    outputs = json.loads(line)
    assert ["".join(output["text"] for output in cell).strip() for cell in outputs] == OUTPUT


# -- anyio ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("any_loop")
async def test_a_cancel_scope_leaves_a_late_env_draining(gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
        await env.reset()
        async with anyio.create_task_group() as group:
            group.start_soon(env.step, acting([1, 2]))
            await gate.arrival()
            group.cancel_scope.cancel()
        assert env.statistics().states[1] == "draining"
        gate.open()
        assert observed(await env.step(acting([10, 20]))) == rows(1, 2, 11, 22)


@pytest.mark.usefixtures("any_loop")
async def test_a_cancel_scope_loses_nothing_that_was_sent(gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
        await env.reset()
        env.send(acting([1, 2]))
        await gate.arrival()
        with anyio.move_on_after(0) as scope:
            await env.recv(2)
        assert scope.cancelled_caught
        gate.open()
        assert sorted(observed((await env.recv(2))[0])) == rows(1, 1, 1, 2)


@pytest.mark.usefixtures("any_loop")
async def test_a_cancelled_scope_closes_what_was_opened_in_it() -> None:
    # anyio cancels again and again, until the task has left the scope.
    with anyio.CancelScope() as scope:
        async with counted(2) as env:
            await env.reset()
            scope.cancel()
            await env.step(acting([1, 1]))
    assert scope.cancelled_caught
    assert env.is_closed
    assert env.pids == ()


@pytest.mark.usefixtures("any_loop")
async def test_many_sessions_in_a_task_group() -> None:
    async def session(index: int) -> None:
        view = env[index]
        for episode in range(1, 3):
            await view.reset()
            for step in range(1, 5):
                assert observed(await view.step(acting([index]))) == [[index, episode, step, step * index]]
        ended.append(index)

    ended: list[int] = []
    async with counted(48) as env, anyio.create_task_group() as group:
        for index in range(48):
            group.start_soon(session, index)
    assert sorted(ended) == list(range(48))


async def test_a_thread_of_anyio_commands_the_envs_through_the_loop() -> None:
    async with counted(2) as env:

        def work() -> Any:
            anyio.from_thread.run(env.reset)
            return observed(anyio.from_thread.run(env.step, acting([1, 2])))

        assert await anyio.to_thread.run_sync(work) == rows(1, 1, 1, 2)


# -- several pools, several loops -----------------------------------------------------------------------


@pytest.mark.usefixtures("any_loop")
async def test_pools_in_one_loop_do_not_mind_each_other() -> None:
    pools = [counted(2), counted(3, num_processes=1), counted(2, backend="thread")]
    serial = AsyncSerialEnv(2, CountingEnv, create_env_kwargs=numbered(2))
    with ParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2)) as plain:
        await asyncio.gather(*(used(env) for env in (*pools, serial)))
        plain.reset()
        await pools[0].close()
        await asyncio.gather(*(used(env, episode=2) for env in (*pools[1:], serial)))
        assert observed(plain.step(acting([5, 6]))) == rows(1, 1, 5, 6)
    await asyncio.gather(*(env.close() for env in (*pools[1:], serial)))


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=LOOPS)
def test_each_thread_has_a_loop_and_a_pool_of_its_own(run: Callable[..., Any], backend: str) -> None:
    meeting = threading.Barrier(2, timeout=20)
    errors: list[BaseException] = []

    async def live() -> None:
        async with counted(3, backend=backend) as env:
            for episode in range(1, 8):
                meeting.wait()  # both are at it now
                await used(env, episode)

    def work() -> None:
        try:
            run(live())
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# -- tasks come and go ----------------------------------------------------------------------------------


async def test_the_task_that_started_them_may_end(async_face: Face) -> None:
    env = async_face.make(2, CountingEnv, create_env_kwargs=numbered(2))
    await asyncio.create_task(env.start())
    await asyncio.create_task(used(env))
    await asyncio.create_task(env.close())
    assert env.is_closed
    assert env.pids == ()


async def test_the_task_that_started_them_may_be_cancelled(async_face: Face) -> None:
    env = async_face.make(2, CountingEnv, create_env_kwargs=numbered(2))
    started = asyncio.Event()

    async def start() -> None:
        await env.reset()
        started.set()
        await asyncio.Event().wait()

    starting = asyncio.create_task(start())
    await started.wait()
    starting.cancel()
    await asyncio.wait([starting])
    await used(env, episode=2)
    await asyncio.create_task(env.close())
    assert env.is_closed


async def test_what_a_task_sent_before_it_failed_is_there_for_others(async_face: Face) -> None:
    async def send() -> None:
        env.send(acting([1, 2]))
        raise ZeroDivisionError

    async with async_face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await env.reset()
        with pytest.raises(ZeroDivisionError):
            await asyncio.create_task(send())
        assert sorted(observed((await env.recv(2))[0])) == rows(1, 1, 1, 2)


async def test_a_task_group_may_open_what_another_closes() -> None:
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(counted(2).__aenter__())
    env = opening.result()
    async with asyncio.TaskGroup() as group:
        for view in env:
            group.create_task(used(view))
    async with asyncio.TaskGroup() as group:
        group.create_task(env.__aexit__(None, None, None))
    assert env.is_closed


# -- from where they may not be used --------------------------------------------------------------------


def sent(env: Any) -> Callable[[], Awaitable[None]]:
    async def send() -> None:
        env.send(sending([9], [env.env_index[0] if hasattr(env, "env_index") else 0]))

    return send


COMMANDS: dict[str, Callable[[Any], Callable[[], Awaitable[Any]]]] = {
    "reset": lambda env: env.reset,
    "step": lambda env: lambda: env.step(acting([9] * len(env))),
    "step_and_maybe_reset": lambda env: lambda: env.step_and_maybe_reset(acting([9] * len(env))),
    "rand_step": lambda env: env.rand_step,
    "maybe_reset": lambda env: lambda: env.maybe_reset(over(len(env))),
    "rollout": lambda env: lambda: env.rollout(2),
    "set_seed": lambda env: lambda: env.set_seed(1),
    "call": lambda env: lambda: env.call("close"),
    "get_attr": lambda env: lambda: env.get_attr("steps"),
    "set_attr": lambda env: lambda: env.set_attr("steps", 7),
    "render": lambda env: env.render,
    "state_dict": lambda env: env.state_dict,
    "load_state_dict": lambda env: lambda: env.load_state_dict({}),
    "send": sent,
    "recv": lambda env: env.recv,
}


def over(count: int) -> TensorDict:
    flags = {name: torch.ones(count, 1, dtype=torch.bool) for name in ("done", "terminated")}
    return TensorDict(flags | {"truncated": torch.zeros(count, 1, dtype=torch.bool)}, [count])


def error_of(run: Callable[[], Any]) -> BaseException | None:
    try:
        run()
    except BaseException as error:
        return error
    return None


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("part", ["whole", "view"])
async def test_every_command_is_refused_in_another_loop(backend: str, part: str) -> None:
    async with counted(3, backend=backend) as whole:
        await whole.reset()
        env = whole if part == "whole" else whole[1:]
        for name, command in COMMANDS.items():
            error = await in_thread(error_of, lambda command=command: asyncio.run(asyncio.wait_for(command(env)(), 10)))
            assert type(error) is AioEnvsError, (name, error)
            assert "event loop and process that started them" in str(error), name
        assert whole.statistics().states == ("idle",) * 3
        assert observed(await whole.step(acting([1, 2, 3]))) == rows(1, 1, 1, 2, 3)


@pytest.mark.parametrize("name", ["async-serial", "async-packed", "async-thread"])
async def test_send_where_no_loop_runs(name: str) -> None:
    (face,) = [face for face in ASYNC_FACES if face.name == name]
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await env.reset()
        error = await in_thread(error_of, lambda: env.send(acting([9, 9])))
        assert type(error) is AioEnvsError
        assert "send: these envs belong to" in str(error)
        assert observed(await env.step(acting([1, 2]))) == rows(1, 1, 1, 2)


async def test_recv_elsewhere_takes_nothing_away() -> None:
    async with counted(2) as env:
        await env.reset()
        env.send(acting([1, 2]))
        error = await in_thread(error_of, lambda: asyncio.run(asyncio.wait_for(env.recv(2), 10)))
        assert type(error) is AioEnvsError
        assert "event loop" in str(error)
        assert env.outstanding == (0, 1)
        assert sorted(observed((await env.recv(2))[0])) == rows(1, 1, 1, 2)


@pytest.mark.parametrize("backend", ["process", "thread"])
async def test_a_start_elsewhere_is_not_joined(backend: str, gate: Gate) -> None:
    """Nobody waits in one loop for what another loop starts, nor ends it."""
    env = AsyncParallelEnv(1, gated_factory, create_env_kwargs={"wait": gate.wait}, backend=backend)
    starting = asyncio.create_task(env.start())
    await gate.arrival()
    for command in (env.reset, env.start, env.close, env[0].reset):
        error = await in_thread(error_of, lambda command=command: asyncio.run(asyncio.wait_for(command(), 10)))
        assert isinstance(error, AioEnvsError), (command, error)
        assert "event loop" in str(error) or "started already" in str(error)
    gate.open()
    await starting
    assert observed(await env.reset()) == [[0, 1, 0, 0]]
    await env.close()


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")  # asyncio's own, of a loop closed too early
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_close_elsewhere_while_steps_are_outstanding(backend: str, gate: Gate) -> None:
    """Their loop does not run any more, so nothing in it can be waited for."""
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    env = AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2, backend=backend)

    async def begin() -> None:
        await env.reset()
        env.send(acting([1, 2]))
        await gate.arrival()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    asyncio.run(asyncio.wait_for(env.close(), 10))
    gate.open()
    assert env.is_closed
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    asyncio.run(whole_life(Face("async", AsyncParallelEnv, 2)))


# -- sync faces -----------------------------------------------------------------------------------------


async def test_plain_calls_in_a_running_loop_send_and_receive() -> None:
    with ParallelEnv(3, CountingEnv, create_env_kwargs=numbered(3), num_processes=2) as env:
        env.reset()
        env.send(acting([1, 2, 3]))
        assert sorted(observed(env.recv(3)[0])) == rows(1, 1, 1, 2, 3)
        env[1].send(sending([5], [1]))
        assert await in_thread(lambda: observed(env[1].recv()[0])) == [[1, 1, 2, 7]]


async def test_threads_may_use_different_envs_of_a_plain_batch_at_once(gate: Gate) -> None:
    """Where its loop has a thread of its own; an env still does one thing at a time."""
    kwargs = numbered(2, {0: {"fault": gate.wait, "at": (1, 1)}})
    with ParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
        env.reset()
        waiting = asyncio.create_task(in_thread(lambda: observed(env[0].step(acting([1])))))
        await gate.arrival()
        assert await in_thread(lambda: observed(env[1].step(acting([2])))) == [[1, 1, 1, 2]]
        for step in (lambda: env[0].step(acting([3])), lambda: env.step(acting([3, 3])), env.reset):
            error = await in_thread(error_of, step)
            assert type(error) is ConcurrencyError
            assert "env 0" in str(error)
        gate.open()
        assert await waiting == [[0, 1, 1, 1]]


@pytest.mark.parametrize("make", [SerialEnv, ParallelEnv])
def test_threads_may_take_turns(make: Any) -> None:
    with make(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        env.reset()
        results: list[Any] = []
        for _ in range(3):
            thread = threading.Thread(target=lambda: results.append(observed(env.step(acting([1, 2])))))
            thread.start()
            thread.join()
        assert results == [rows(1, step, step, 2 * step) for step in (1, 2, 3)]
        assert observed(env.step(acting([1, 2]))) == rows(1, 4, 4, 8)


async def test_plain_calls_from_the_threads_of_a_server() -> None:
    with ParallelEnv(4, CountingEnv, create_env_kwargs=numbered(4), num_processes=2) as env:
        env.reset()

        def session(index: int) -> Any:
            return [observed(env[index].step(acting([index])))[0] for _ in range(10)]

        results = await asyncio.gather(*(anyio.to_thread.run_sync(session, index) for index in range(4)))
        assert results == [[[index, 1, step, index * step] for step in range(1, 11)] for index in range(4)]


SPAWNING = """
import multiprocessing
import sys

import gymnasium as gym
import numpy as np

from aioenvs import ParallelEnv


class OwnEnv(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


def make():
    return OwnEnv()


def train(method):
    with ParallelEnv(3, [OwnEnv, make, lambda: OwnEnv()], num_processes=1, mp_start_method=method) as env:
        print(tuple(env.rollout(2)["next", "observation"].shape))


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=train, args=sys.argv[1:])
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.slow
def test_what_the_script_defines_is_known_to_workers_of_a_process_that_it_spawned(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNING)
    done = subprocess.run([sys.executable, script, method], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(3, 2, 2)\n"
