"""Starting: from whatever a user writes, and what happens when a factory fails, hangs or exits."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import failing_envs as faults
import psutil
import pytest
from faces import Face, acting, observed
from failing_envs import CountingEnv, Gate, numbered
from processes import still_alive
from tensordict import LazyStackedTensorDict

from aioenvs import AsyncParallelEnv, ParallelEnv, SerialEnv
from aioenvs.engine.config import START_METHODS
from aioenvs.errors import AioEnvsError, WorkerStartError

start_methods = pytest.mark.parametrize("method", START_METHODS)


def one_fails(factory: Any, count: int = 4) -> list[Any]:
    """Factories of which that of env 1 is this one."""
    return [factory if env == 1 else CountingEnv for env in range(count)]


async def start_error(env: AsyncParallelEnv) -> WorkerStartError:
    with pytest.raises(WorkerStartError) as caught:
        await env.start()
    assert env.is_closed
    assert env.pids == ()
    return caught.value


@start_methods
async def test_functions_and_classes_defined_on_the_spot(method: str) -> None:
    class Local(CountingEnv):
        pass

    factories = [lambda: Local(0), lambda env_id: CountingEnv(env_id)]
    kwargs: list[dict[str, Any]] = [{}, {"env_id": 1}]
    async with AsyncParallelEnv(2, factories, create_env_kwargs=kwargs, mp_start_method=method) as env:
        await env.reset()
        assert observed(await env.step(acting([3, 4]))) == [[0, 1, 1, 3], [1, 1, 1, 4]]


@start_methods
def test_every_start_method_serves_the_sync_face(method: str) -> None:
    kwargs = numbered(3)
    with ParallelEnv(3, CountingEnv, create_env_kwargs=kwargs, num_processes=2, mp_start_method=method) as env:
        env.reset()
        assert observed(env.step(acting([3, 4, 5]))) == [[0, 1, 1, 3], [1, 1, 1, 4], [2, 1, 1, 5]]


@start_methods
async def test_a_failing_factory(method: str) -> None:
    env = AsyncParallelEnv(4, one_fails(faults.failing_factory), num_processes=2, mp_start_method=method)
    error = await start_error(env)
    assert isinstance(error.__cause__, FileNotFoundError)
    assert error.__cause__.filename == "/licences/0"
    assert "in failing_factory" in "\n".join(error.__cause__.__notes__)
    assert "env 1" in str(error)
    assert "no licence file" in str(error)
    assert 1 in error.env_index
    assert str(error.pid) in str(error)


async def test_a_failing_factory_in_this_process(face: Face) -> None:
    env = face.make(4, one_fails(faults.failing_factory))
    with pytest.raises(WorkerStartError, match="env 1") as caught:
        await face.call(env.reset)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert 1 in caught.value.env_index
    assert env.is_closed


@start_methods
async def test_a_factory_that_ends_its_process(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    env = AsyncParallelEnv(4, one_fails(faults.exiting_factory), num_processes=4, mp_start_method=method)
    error = await start_error(env)
    assert "exited with code 4" in str(error)
    assert "licence server says no" in str(error)
    assert error.env_index == (1,)
    assert "licence server says no" in capfd.readouterr().err


async def test_a_factory_that_calls_sys_exit() -> None:
    error = await start_error(AsyncParallelEnv(4, one_fails(faults.sys_exiting_factory), num_processes=2))
    assert "exited with code 1" in str(error)
    assert "the licence has expired" in str(error)
    assert error.env_index == (0, 1)


@start_methods
@pytest.mark.slow
async def test_a_factory_that_hangs(method: str) -> None:
    factories = one_fails(faults.hanging_factory, 2)
    env = AsyncParallelEnv(2, factories, num_processes=2, mp_start_method=method, start_timeout=1.5)
    error = await start_error(env)
    assert "env 1" in str(error)
    assert "start_timeout" in str(error)
    assert error.env_index == (1,)


async def test_starting_again_after_a_failure(face: Face, tmp_path: Path) -> None:
    env = face.make(3, faults.licensed_factory, create_env_kwargs={"licence": str(tmp_path / "licence")})
    with pytest.raises(WorkerStartError):
        await face.call(env.start)
    (tmp_path / "licence").touch()
    await face.call(env.start)
    assert observed(await face.call(env.reset)) == [[0, 1, 0, 0]] * 3
    await face.call(env.close)


@start_methods
@pytest.mark.slow
async def test_a_cancelled_start_leaves_nothing(method: str, gate: Gate) -> None:
    kwargs: list[dict[str, Any]] = [{}, {"wait": gate.wait}, {}, {}]
    factories = one_fails(faults.gated_factory)
    env = AsyncParallelEnv(4, factories, create_env_kwargs=kwargs, num_processes=4, mp_start_method=method)
    starting = asyncio.create_task(env.start())
    await gate.arrival()
    workers = [p for p in psutil.Process().children(recursive=True) if p.pid in env.pids]
    assert workers
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert still_alive(workers, 0) == []
    assert env.is_closed
    gate.open()
    async with env:
        assert observed(await env.reset()) == [[0, 1, 0, 0]] * 4


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda: None, "returned None; it must return an env"),
        (lambda: CountingEnv, "returned the class CountingEnv; it must return an env"),
    ],
)
async def test_a_factory_that_makes_something_else(face: Face, factory: Any, words: str) -> None:
    with pytest.raises(WorkerStartError) as caught:
        await face.call(face.make(2, factory).start)
    assert isinstance(caught.value.__cause__, TypeError)
    assert words in str(caught.value.__cause__)


async def test_a_factory_that_cannot_be_pickled(async_face: Face) -> None:
    lock = threading.Lock()
    with pytest.raises(AioEnvsError, match=r"env 0.*cannot be pickled.*mp_start_method='fork'"):
        await async_face.make(2, lambda: CountingEnv(int(lock.locked()))).start()
    lock.acquire()
    async with async_face.open(2, lambda: CountingEnv(int(lock.locked())), mp_start_method="fork") as env:
        assert observed(await env.reset()) == [[1, 1, 0, 0]] * 2


async def test_envs_that_differ_make_lazy_stacks(face: Face) -> None:
    async with face.open(3, ["CartPole-v1", "MountainCar-v0", "CartPole-v1"]) as env:
        td = await face.call(env.reset)
        assert isinstance(td, LazyStackedTensorDict)
        assert td[0]["observation"].shape != td[1]["observation"].shape
        assert td[0]["observation"].shape == td[2]["observation"].shape


async def test_envs_that_differ_can_be_refused(face: Face) -> None:
    env = face.make(3, one_fails(faults.OtherSpaceEnv, 3), share_individual_td=False)
    with pytest.raises(ValueError, match=r"envs 0, 2 and env 1 differ in keys, shapes or dtypes"):
        await face.call(env.start)
    assert env.is_closed


async def test_a_second_start_is_refused(face: Face) -> None:
    async with face.open(2, CountingEnv) as env:
        pids = env.pids
        with pytest.raises(RuntimeError, match="started already"):
            await face.call(env.start)
        assert env.pids == pids
        assert observed(await face.call(env.reset)) == [[0, 1, 0, 0]] * 2


async def test_commands_during_a_start_wait_for_it(async_face: Face, gate: Gate) -> None:
    env = async_face.make(2, faults.gated_factory, create_env_kwargs={"wait": gate.wait})
    starting = asyncio.create_task(env.set_seed(1))
    await gate.arrival()
    with pytest.raises(AioEnvsError, match="started already"):
        await env.start()
    resetting = asyncio.create_task(env.reset())
    await asyncio.sleep(0)
    starting.cancel()  # somebody else still waits for the start
    with pytest.raises(asyncio.CancelledError):
        await starting
    gate.open(2)
    assert observed(await resetting) == [[0, 1, 0, 0]] * 2
    await env.close()


async def test_close_during_a_start(async_face: Face, gate: Gate) -> None:
    env = async_face.make(2, faults.gated_factory, create_env_kwargs={"wait": gate.wait}, close_timeout=0.5)
    starting = asyncio.create_task(env.start())
    await gate.arrival()
    await env.close()
    with pytest.raises(AioEnvsError):
        await starting
    assert env.is_closed
    assert re.search("closed>$", repr(env))


async def test_the_first_command_starts(face: Face) -> None:
    env = face.make(2, CountingEnv, create_env_kwargs=numbered(2))
    assert env.is_closed
    assert observed(await face.call(env.reset)) == [[0, 1, 0, 0], [1, 1, 0, 0]]
    assert not env.is_closed
    await face.call(env.close)
    assert env.is_closed
    assert observed(await face.call(env.reset)) == [[0, 1, 0, 0], [1, 1, 0, 0]]
    await face.call(env.close)


@pytest.mark.parametrize("cls", [ParallelEnv, SerialEnv])
def test_plain_envs_that_cannot_start_keep_no_loop(cls: Any) -> None:
    env = cls(2, lambda: 1)
    env.itself = env  # so that only the garbage collector would come to it
    for _ in range(2):
        with pytest.raises(WorkerStartError), env:
            pass
        with pytest.raises(WorkerStartError):
            env.reset()
    assert env._portal is None
