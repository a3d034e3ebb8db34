"""A worker dies: its envs raise a typed error until they are reset, which starts a new one; the others go on."""

import os
import signal
from typing import Any

import failing_envs as faults
import psutil
import pytest
from faces import Face, acting, call, in_thread, masked, observed
from failing_envs import CountingEnv, Gate, numbered
from processes import still_alive

from aioenvs import AsyncParallelEnv, ParallelEnv
from aioenvs.engine.pools import launching as process
from aioenvs.errors import ResetNeededError, WorkerDiedError

DEATHS: list[tuple[Any, str]] = [
    (faults.exit_3, "exited with code 3"),
    (faults.raise_system_exit, "exited with code 5"),
    (faults.kill_itself, "killed by SIGKILL, perhaps out of memory"),
    (faults.segfault, "killed by SIGSEGV"),
    (faults.abort_with_words, "killed by SIGABRT"),
    (faults.close_all_descriptors, "pipe was closed"),
]


def mortal(fault: Any = faults.kill_itself, at: tuple[int, int] = (1, 2)) -> Any:
    """Four envs, of which env 1 ends its process."""
    return numbered(4, {1: {"fault": fault, "at": at}})


def family(face: Face, env_index: int) -> list[int]:
    """The envs that share a process with this one, of four."""
    return [env_index] if face.processes is None else [0, 1] if env_index < 2 else [2, 3]


def rest(face: Face, env_index: int) -> list[int]:
    return [env for env in range(4) if env not in family(face, env_index)]


def host(face: Face, env: Any, env_index: int) -> int:
    """The pid of the worker that hosts this env, of four."""
    return env.pids[env_index if face.processes is None else env_index // 2]


async def kill_and_reap(pid: int) -> None:
    worker = psutil.Process(pid)
    worker.kill()
    assert (await in_thread(psutil.wait_procs, [worker], 10))[1] == []


@pytest.mark.parametrize(("fault", "words"), DEATHS, ids=lambda value: getattr(value, "__name__", ""))
async def test_the_error_says_how_it_died(process_face: Face, fault: Any, words: str) -> None:
    face = process_face
    async with face.open(4, CountingEnv, create_env_kwargs=mortal(fault)) as env:
        pid = host(face, env, 1)
        await face.call(env.reset)
        await face.call(env.step, acting([0] * 4))
        with pytest.raises(WorkerDiedError) as caught:
            await face.call(env.step, acting([0] * 4))
    assert words in str(caught.value)
    assert "last command: step" in str(caught.value)
    assert str(pid) in str(caught.value)
    assert caught.value.pid == pid
    assert list(caught.value.env_index) == family(face, 1)


async def test_its_last_words_are_told_and_passed_on(process_face: Face, capfd: pytest.CaptureFixture[str]) -> None:
    kwargs = mortal(faults.abort_with_words)
    async with process_face.open(4, CountingEnv, create_env_kwargs=kwargs) as env:
        await process_face.call(env.reset)
        await process_face.call(env.step, acting([0] * 4))
        with pytest.raises(WorkerDiedError, match=r"malloc\(\): corrupted top size"):
            await process_face.call(env.step, acting([0] * 4))
    assert "malloc(): corrupted top size" in capfd.readouterr().err


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "busy"])
async def test_the_others_go_on_and_a_reset_brings_it_back(process_face: Face, idle: bool) -> None:
    face = process_face
    dead, alive = family(face, 1), rest(face, 1)
    async with face.open(4, CountingEnv, create_env_kwargs=mortal() if not idle else numbered(4)) as env:
        pids, pid = env.pids, host(face, env, 1)
        await face.call(env.reset)
        await face.call(env.step, acting([1, 2, 3, 4]))
        if idle:
            await kill_and_reap(pid)
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                await face.call(env.step, acting([0] * 4, only=dead))
            await face.call(env.step, acting([10, 20, 30, 40], only=alive))
        else:
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                await face.call(env.step, acting([10, 20, 30, 40]))

        td = await face.call(env.step, acting([100, 200, 300, 400], only=alive))
        assert [observed(td)[i] for i in alive] == [[i, 1, 3, 111 * (i + 1)] for i in alive]
        errors = []
        for _ in range(2):
            with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
                await face.call(env.step, acting([0] * 4))
            errors.append(caught.value)
        assert errors[0] is not errors[1]

        td = await face.call(env.reset, masked("_reset", 4, dead))
        assert [observed(td)[i] for i in dead] == [[i, 1, 0, 0] for i in dead]
        assert [observed(td)[i] for i in alive] == [[i, 1, 3, 111 * (i + 1)] for i in alive]
        assert len(env.pids) == len(pids)
        assert set(pids) - set(env.pids) == {pid}
        td = await face.call(env.step, acting([5, 6, 7, 8]))
        assert [observed(td)[i] for i in dead] == [[i, 1, 1, 5 + i] for i in dead]
        assert [observed(td)[i] for i in alive] == [[i, 1, 4, 111 * (i + 1) + 5 + i] for i in alive]


async def test_a_partial_reset_brings_packed_siblings_back_unreset() -> None:
    async with AsyncParallelEnv(4, CountingEnv, create_env_kwargs=mortal(), num_processes=2) as env:
        await env.reset()
        await env.step(acting([0] * 4))
        with pytest.raises(WorkerDiedError):
            await env.step(acting([0] * 4))
        td = await env.reset(masked("_reset", 4, [1]))
        assert observed(td)[1] == [1, 1, 0, 0]
        with pytest.raises(ResetNeededError, match="env 0"):
            await env.step(acting([0] * 4))
        td = await env.reset(masked("_reset", 4, [0]))
        assert observed(td)[0] == [0, 1, 0, 0]


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
async def test_a_reset_of_all_replaces_all_that_are_dead(process_face: Face, method: str) -> None:
    face = process_face
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4), mp_start_method=method) as env:
        pids = env.pids
        await face.call(env.reset)
        for pid in pids:
            await kill_and_reap(pid)
        with pytest.raises(WorkerDiedError):
            await face.call(env.step, acting([0] * 4))
        assert observed(await face.call(env.reset)) == [[i, 1, 0, 0] for i in range(4)]
        assert set(env.pids).isdisjoint(pids)
        assert observed(await face.call(env.step, acting([1, 2, 3, 4]))) == [[i, 1, 1, i + 1] for i in range(4)]


@pytest.mark.parametrize("command", ["reset", "set_seed", "step_and_maybe_reset", "rollout"])
async def test_every_command_notices_an_idle_death(process_face: Face, command: str) -> None:
    face = process_face
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4)) as env:
        td = (await face.call(env.reset)).update(acting([0] * 4))
        await kill_and_reap(host(face, env, 1))
        with pytest.raises(WorkerDiedError):
            await face.call(env.step, acting([0] * 4))
        argument = {"reset": None, "set_seed": 3, "rollout": 2}.get(command, td)
        if command in ("reset", "rollout"):  # which begins with a reset, and that replaces the dead
            await face.call(getattr(env, command), argument)
        else:
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                await face.call(getattr(env, command), argument)


async def test_a_death_within_a_reset(process_face: Face) -> None:
    face = process_face
    async with face.open(4, CountingEnv, create_env_kwargs=mortal(at=(2, 0))) as env:
        await face.call(env.reset)
        with pytest.raises(WorkerDiedError, match="last command: reset"):
            await face.call(env.reset)
        assert [row[1] for row in observed(await face.call(env.reset))] == [
            3 if i in rest(face, 1) else 1 for i in range(4)
        ]


async def test_a_death_while_its_late_reply_is_awaited(async_face: Face, gate: Gate) -> None:
    face = async_face
    kwargs = numbered(4, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs, step_timeout=0.3) as env:
        await env.reset()
        with pytest.raises(TimeoutError):
            await env.step(acting([0] * 4))
        await gate.arrival()
        os.kill(host(face, env, 1), signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await env.step(acting([0] * 4))
        alive = rest(face, 1)
        td = await env.step(acting([7] * 4, only=alive))
        assert [observed(td)[i] for i in alive] == [[i, 1, 2, 7] for i in alive]


async def test_a_new_worker_that_cannot_start(process_face: Face, tmp_path: Any) -> None:
    face, licence = process_face, tmp_path / "licence"
    licence.touch()
    kwargs = {"licence": str(licence)}
    async with face.open(4, faults.licensed_factory, create_env_kwargs=kwargs) as env:
        await face.call(env.reset)
        await kill_and_reap(host(face, env, 1))
        licence.unlink()
        with pytest.raises(WorkerDiedError):
            await face.call(env.step, acting([0] * 4))
        with pytest.raises(RuntimeError, match="licence"):
            await face.call(env.reset)
        alive = rest(face, 1)
        td = await face.call(env.reset, masked("_reset", 4, alive))
        assert [observed(td)[i][1:] for i in alive] == [[2, 0, 0]] * len(alive)
        licence.touch()
        assert observed(await face.call(env.reset))[1] == [0, 1, 0, 0]


async def test_dead_workers_leave_closable_envs(process_face: Face) -> None:
    env = process_face.make(4, CountingEnv, create_env_kwargs=mortal(at=(1, 1)))
    await call(env.reset)
    with pytest.raises(WorkerDiedError):
        await call(env.step, acting([0] * 4))
    await call(env.close)
    assert env.is_closed


async def step_until_it_fails(face: Face, env: Any) -> None:
    for _ in range(1000):
        await face.call(env.step, acting([0] * 4))


async def test_the_death_of_the_launcher(process_face: Face) -> None:
    face = process_face
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4)) as env:
        await face.call(env.reset)
        workers = [psutil.Process(pid) for pid in env.pids]
        for launcher in list(process._launchers.values()):
            if launcher.alive:
                await kill_and_reap(launcher.pid)
        with pytest.raises(WorkerDiedError, match="launcher"):
            await step_until_it_fails(face, env)
        assert observed(await face.call(env.reset)) == [[i, 1, 0, 0] for i in range(4)]
        assert await in_thread(still_alive, workers) == []


def test_a_reset_replaces_a_worker_that_died_between_two_calls() -> None:
    with ParallelEnv(2, CountingEnv, num_processes=2) as env:
        env.reset()
        pid, other = env.pids
        worker = psutil.Process(pid)
        os.kill(pid, signal.SIGKILL)
        assert still_alive([worker], 5) == []
        assert env.reset().batch_size == (2,)
        assert env.pids[1] == other
        assert env.pids[0] != pid
