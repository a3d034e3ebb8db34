"""Coroutine envs that are cancelled, late, closed while they run, or whose process ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from coroutine_envs import AwaitingEnv, MeetingEnv, Never, WanderingEnv, door
from faces import ASYNC_FACES, FACES, PROCESS_FACES, Face, acting, in_thread, observed
from failing_envs import CountingEnv, Gate, Note, exit_3, kill_itself, numbered, raise_system_exit
from tensordict import TensorDict
from test_exit import Script

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.errors import ClosedError, ConcurrencyError, ResetNeededError, WorkerDiedError, WorkerTimeoutError

over_async_faces = pytest.mark.parametrize("face", ASYNC_FACES, ids=lambda face: face.name)
ASYNC_PROCESSES = [face for face in PROCESS_FACES if face.is_async]
PACKED = ASYNC_PROCESSES[0]


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def masked(count: int, *envs: int) -> TensorDict:
    return TensorDict({"_reset": torch.tensor([env in envs for env in range(count)])}, batch_size=[count])


# -- cancelled ------------------------------------------------------------------------------------------


@over_async_faces
@pytest.mark.usefixtures("any_loop")
@pytest.mark.parametrize("number", range(1, WanderingEnv.AWAITS + 1))
@pytest.mark.parametrize("command", ["reset", "step"])
@pytest.mark.every_combination
async def test_cancelled_at_every_await(face: Face, gate: Gate, tmp_path: Path, command: str, number: int) -> None:
    """Env 1 of 4 stays at an await until it is cancelled; others did so too, did what was asked, or had not begun."""
    stay = (2, 0, number) if command == "reset" else (1, 2, number)
    notes = tmp_path / "notes"
    common = {"arrivals": gate.names[0], "notes": str(notes)}
    kwargs = numbered(4, {1: {"stay": stay}}, **{"stay": (0, 0, 0), **common})
    async with face.open(4, WanderingEnv, create_env_kwargs=kwargs) as env:
        await env.reset()
        await env.step(acting([1] * 4))
        pending = asyncio.create_task(env.step(acting([2] * 4)) if command == "step" else env.reset())
        await gate.arrival()
        await cancelled(pending)
        with pytest.raises(ResetNeededError, match="env 1 cannot step"):
            await env[1].step(acting([4]))
        assert notes.read_text() == str(number)
        for index in (0, 2, 3):
            with contextlib.suppress(ResetNeededError):
                (found,) = observed(await env[index].step(acting([4])))
                assert found in ([index, 1, 2, 5], [index, 1, 3, 7] if command == "step" else [index, 2, 1, 4])
        begun = observed(await env.reset())
        assert begun[1] == [1, 2, 0, 0]
        assert observed(await env.step(acting([1] * 4))) == [[index, row[1], 1, 1] for index, row in enumerate(begun)]


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
async def test_ctrl_c_cancels_them(cls: Any, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a portal does with the signal is tested there; here what it cancels."""
    common = {"arrivals": gate.names[0], "notes": str(tmp_path / "n")}
    kwargs = numbered(2, {0: {"stay": (1, 1, 2)}}, **{"stay": (0, 0, 0), **common})
    env = cls(2, WanderingEnv, create_env_kwargs=kwargs)
    await in_thread(env.reset)
    stepping = asyncio.create_task(in_thread(env.step, acting([1, 1])))
    await gate.arrival()
    portal = env._portal
    loop = getattr(portal, "_portal", portal)._loop
    loop.call_soon_threadsafe(loop.taskless.cancel)
    with pytest.raises(asyncio.CancelledError):
        await stepping
    with pytest.raises(ResetNeededError, match="env 0 cannot step"):
        await in_thread(env.step, acting([1, 1]))
    assert (tmp_path / "n").read_text() == "2"
    await in_thread(env.close)


@over_async_faces
async def test_an_env_that_goes_on_is_waited_for(face: Face, gate: Gate, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    each = {0: {"fault": door(gate, stubborn=True, notes=str(notes)), "at": (1, 1)}}
    async with face.open(2, AwaitingEnv, create_env_kwargs=numbered(2, each)) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([10, 20], only=[0])))
        await gate.arrival()
        stepping.cancel()
        await gate.arrival()  # it was cancelled, and goes on
        following = None
        if face.name == "async-serial":
            with pytest.raises(ConcurrencyError, match="step is still pending"):
                await env.step(acting([1, 2]))
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await stepping
        else:
            await cancelled(stepping)
            following = asyncio.create_task(env.step(acting([1, 2])))
            await asyncio.sleep(0)
            assert not following.done()
            gate.open()
        td = await (following or env.step(acting([1, 2])))
        assert observed(td) == [[0, 1, 2, 11], [1, 1, 1, 2]]
        assert notes.read_text() == "c"


@over_async_faces
async def test_cancelled_before_it_began(face: Face) -> None:
    """A command that is cancelled at once either reached an env or did not; nobody is left half way."""
    async with face.open(4, AwaitingEnv, create_env_kwargs=numbered(4)) as env:
        for turns in range(8):
            await env.reset()
            task = asyncio.create_task(env.step(acting([100] * 4)))
            for _ in range(turns):
                await asyncio.sleep(0)
            if not task.done():
                task.cancel()
            await asyncio.wait([task])
            for index in range(4):
                try:
                    found = observed(await env[index].step(acting([1])))
                except ResetNeededError:
                    continue
                assert found[0][2:] in ([1, 1], [2, 101])


@over_async_faces
async def test_one_of_several_requests_is_cancelled(face: Face, gate: Gate) -> None:
    each = {0: {"fault": Never(gate.names[0]), "at": (1, 1)}, 1: {"fault": door(gate), "at": (1, 1)}}
    async with face.open(4, AwaitingEnv, create_env_kwargs=numbered(4, each)) as env:
        await env.reset()
        first, second = (asyncio.create_task(env[index].step(acting([5]))) for index in (0, 1))
        await gate.arrival()
        await gate.arrival()
        await cancelled(first)
        with pytest.raises(ResetNeededError):
            await env[0].step(acting([1]))
        assert not second.done()
        gate.open()
        assert observed(await second) == [[1, 1, 1, 5]]


@pytest.mark.parametrize("face", ASYNC_FACES, ids=lambda face: face.name)
async def test_cancelled_while_it_waits_for_its_turn(face: Face, gate: Gate) -> None:
    """With one turn for both: env 1, which had not begun, is as it was."""
    each = {0: {"fault": Never(gate.names[0]), "at": (1, 1)}}
    async with face.open(4, AwaitingEnv, create_env_kwargs=numbered(4, each), max_concurrency=1) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([5] * 4, only=[0, 1])))
        await gate.arrival()
        await cancelled(stepping)
        assert observed(await env[1].step(acting([1]))) == [[1, 1, 1, 1]]
        with pytest.raises(ResetNeededError):
            await env[0].step(acting([1]))


@over_async_faces
async def test_a_cancelled_call(face: Face, gate: Gate, tmp_path: Path) -> None:
    class Asking(AwaitingEnv):
        async def ask(self, fault: Any) -> None:
            await fault()

    async with face.open(2, Asking, create_env_kwargs=numbered(2)) as env:
        await env.reset()
        asking = asyncio.create_task(env[0].call("ask", door(gate, notes=str(tmp_path / "notes"))))
        await gate.arrival()
        await cancelled(asking)
        assert observed(await env.step(acting([1, 1]))) == [[0, 1, 1, 1], [1, 1, 1, 1]]  # no episode was touched
        assert (tmp_path / "notes").read_text() == "c"


# -- late -----------------------------------------------------------------------------------------------


@over_async_faces
async def test_a_timeout_of_the_callers_cancels_them(face: Face, gate: Gate) -> None:
    each = {1: {"fault": Never(gate.names[0]), "at": (1, 1)}}
    async with face.open(2, AwaitingEnv, create_env_kwargs=numbered(2, each)) as env:
        await env.reset()

        async def step() -> None:
            async with asyncio.timeout(50) as scope:
                scopes.append(scope)
                await env.step(acting([1, 1], only=[1]))

        scopes: list[asyncio.Timeout] = []
        stepping = asyncio.create_task(step())
        await gate.arrival()
        scopes[0].reschedule(0)
        with pytest.raises(TimeoutError):
            await stepping
        assert observed(await env.step(acting([1, 1], only=[0])))[0] == [0, 1, 1, 1]
        with pytest.raises(ResetNeededError, match="env 1"):
            await env.step(acting([1, 1]))


@pytest.mark.parametrize("face", [f for f in FACES if "serial" not in f.name], ids=lambda face: face.name)
@pytest.mark.slow
async def test_step_timeout_cancels_them(face: Face, gate: Gate) -> None:
    each = {1: {"fault": Never(gate.names[0]), "at": (1, 1)}}
    async with face.open(2, AwaitingEnv, create_env_kwargs=numbered(2, each), step_timeout=2.0) as env:
        await face.call(env.reset)
        with pytest.raises(WorkerTimeoutError, match="did not answer step"):
            await face.call(env.step, acting([1, 1], only=[1]))
        with pytest.raises(ResetNeededError, match="env 1"):
            await face.call(env.step, acting([1, 1]))
        assert observed(await face.call(env.reset)) == [[0, 2, 0, 0], [1, 2, 0, 0]]


@pytest.mark.parametrize("cls", [AsyncParallelEnv, ParallelEnv])
@pytest.mark.slow
async def test_a_late_worker_is_restarted_where_that_was_asked_for(cls: Any, gate: Gate) -> None:
    face = Face("async" if cls is AsyncParallelEnv else "sync", cls, 1)
    each = {1: {"fault": Never(gate.names[0]), "at": (1, 1)}}
    options = {"step_timeout": 3.0, "on_worker_death": "restart"}
    async with face.open(2, AwaitingEnv, create_env_kwargs=numbered(2, each), **options) as env:
        await face.call(env.reset)
        td = await face.call(env.step, acting([1, 1]))
        assert td["next", "truncated"].tolist() == [[True], [True]]
        assert env.statistics().restarts == (1, 1)


async def test_cancelling_a_restarting_pool_cancels_them_too(gate: Gate) -> None:
    each = {1: {"fault": Never(gate.names[0]), "at": (1, 1)}}
    env = AsyncParallelEnv(
        2, AwaitingEnv, create_env_kwargs=numbered(2, each), num_processes=1, on_worker_death="restart"
    )
    await env.reset()
    stepping = asyncio.create_task(env.step(acting([1, 1])))
    await gate.arrival()
    await cancelled(stepping)
    with pytest.raises(ResetNeededError, match="env 1"):
        await env.step(acting([1, 1]))
    assert env.statistics().restarts == (0, 0)
    await env.close()


# -- closed ---------------------------------------------------------------------------------------------


async def test_close_is_awaited(face: Face, tmp_path: Path) -> None:
    async def leave() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        Note(str(tmp_path / "closed"))()

    async with face.open(4, AwaitingEnv, create_env_kwargs=numbered(4, on_close=leave)) as env:
        await face.call(env.reset)
    assert (tmp_path / "closed").read_text() == "xxxx"


async def test_they_close_at_the_same_time(gate: Gate) -> None:
    """Each waits for the test, which lets them through only when all are there."""
    env = AsyncParallelEnv(6, AwaitingEnv, create_env_kwargs={"on_close": door(gate)}, num_processes=2)
    await env.reset()
    closing = asyncio.create_task(env.close())
    for _ in range(6):
        await gate.arrival()
    gate.open(6)
    await closing


async def test_a_close_that_fails_is_no_reason_for_the_others(face: Face, tmp_path: Path, capfd: Any) -> None:
    async def fail() -> None:
        raise ValueError("stuck valve")

    kwargs = numbered(3, {1: {"on_close": fail}}, on_close=Note(str(tmp_path / "closed")))
    async with face.open(3, AwaitingEnv, create_env_kwargs=kwargs) as env:
        await face.call(env.reset)
    assert (tmp_path / "closed").read_text() == "xx"
    assert "ValueError: stuck valve" in capfd.readouterr().err


@pytest.mark.parametrize("face", PROCESS_FACES, ids=lambda face: face.name)
async def test_close_is_bounded(face: Face, gate: Gate) -> None:
    kwargs = numbered(2, on_close=Never(gate.names[0]))
    async with face.open(2, AwaitingEnv, create_env_kwargs=kwargs, close_timeout=0.5) as env:
        await face.call(env.reset)
    assert env.is_closed


async def test_cancelling_a_close_in_this_process_cancels_the_envs(gate: Gate) -> None:
    env = AsyncSerialEnv(2, AwaitingEnv, create_env_kwargs={"on_close": Never(gate.names[0])})
    await env.reset()
    closing = asyncio.create_task(env.close())
    for _ in range(2):
        await gate.arrival()
    await cancelled(closing)
    assert env.is_closed


@over_async_faces
async def test_closed_while_they_run(face: Face, gate: Gate, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    each = {2: {"fault": door(gate, notes=str(notes)), "at": (1, 1)}}
    kwargs = numbered(4, each, on_close=Note(str(notes)))
    async with face.open(4, AwaitingEnv, create_env_kwargs=kwargs) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([1] * 4)))
        await gate.arrival()
        await env.close()
        with pytest.raises(ClosedError, match="were closed while step"):
            await stepping
        assert sorted(notes.read_text()) == ["c", "x", "x", "x", "x"]
        await env.reset()


async def test_tasks_that_envs_leave_are_ended(face: Face, tmp_path: Path) -> None:
    """Those of another loop than the test's own end with it."""

    class Leaving(AwaitingEnv):
        async def reset(self, **kwargs: Any) -> Any:
            self.task = asyncio.create_task(self.live())
            await asyncio.sleep(0)
            return await super().reset(**kwargs)

        async def live(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                Note(str(tmp_path / "ended"))()

        async def close(self) -> None:
            if face.name == "async-serial":
                self.task.cancel()
                await asyncio.wait([self.task])

    async with face.open(2, Leaving, create_env_kwargs=numbered(2)) as env:
        await face.call(env.reset)
    assert (tmp_path / "ended").read_text() == "xx"


# -- ends of processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [(raise_system_exit, "exited with code 5"), (exit_3, "exited with code 3"), (kill_itself, "SIGKILL")],
)
@pytest.mark.parametrize("face", PROCESS_FACES, ids=lambda face: face.name)
async def test_a_worker_ends_while_others_run(face: Face, gate: Gate, fault: Any, words: str) -> None:
    each: Any = {0: {"fault": fault, "at": (1, 1)}, 1: {"fault": Never(gate.names[0]), "at": (1, 1)}}
    async with face.open(4, AwaitingEnv, create_env_kwargs=numbered(4, each)) as env:
        await face.call(env.reset)
        only = [0, 1] if face.processes == 2 else [0]
        with pytest.raises(WorkerDiedError, match=words):
            await face.call(env.step, acting([1] * 4, only=only))
        assert observed(await face.call(env.step, acting([1] * 4, only=[2, 3])))[2:] == [[2, 1, 1, 1], [3, 1, 1, 1]]
        assert observed(await face.call(env.reset))[2:] == [[2, 2, 0, 0], [3, 2, 0, 0]]


@pytest.mark.parametrize("cls", [SerialEnv, AsyncSerialEnv])
async def test_system_exit_in_this_process_is_the_callers(cls: Any, gate: Gate, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    each: Any = {
        0: {"fault": door(gate, notes=str(notes)), "at": (1, 1)},
        1: {"fault": _exit_soon, "at": (1, 1)},
    }
    env = cls(2, AwaitingEnv, create_env_kwargs=numbered(2, each))
    found: list[Any] = []

    async def run() -> None:
        try:
            await env.reset() if cls is AsyncSerialEnv else env.reset()
            await env.step(acting([1, 1])) if cls is AsyncSerialEnv else env.step(acting([1, 1]))
        except SystemExit as error:
            found.append(error.code)
        await env.close() if cls is AsyncSerialEnv else env.close()

    await in_thread(lambda: asyncio.run(run()))
    assert found == [5]
    assert notes.read_text() == "c"


async def _exit_soon() -> None:
    await asyncio.sleep(0)
    raise SystemExit(5)


async def test_system_exit_in_a_thread_is_an_exception(gate: Gate) -> None:
    env = AsyncParallelEnv(
        2, AwaitingEnv, create_env_kwargs=numbered(2, {0: {"fault": _exit_soon, "at": (1, 1)}}), backend="thread"
    )
    await env.reset()
    with pytest.raises(RuntimeError, match="SystemExit: 5"):
        await env.step(acting([1, 1]))
    assert observed(await env[1].step(acting([1]))) == [[1, 1, 2, 2]]
    await env.close()


async def test_a_killed_worker_is_restarted(gate: Gate) -> None:
    each = {1: {"fault": Never(gate.names[0]), "at": (1, 1)}}
    env = AsyncParallelEnv(
        4, AwaitingEnv, create_env_kwargs=numbered(4, each), num_processes=2, on_worker_death="restart"
    )
    await env.reset()
    stepping = asyncio.create_task(env.step(acting([1] * 4)))
    await gate.arrival()
    os.kill(env.pids[0], signal.SIGKILL)
    td = await stepping
    assert td["next", "truncated"].tolist() == [[True], [True], [False], [False]]
    assert observed(td)[2:] == [[2, 1, 1, 1], [3, 1, 1, 1]]
    await env.close()


@pytest.fixture
def script(tmp_path: Path, gate: Gate) -> Any:
    script = Script(tmp_path, gate)
    yield script
    script.clean_up()


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.slow
def test_the_parent_is_killed_while_they_run(script: Script, gate: Gate, tmp_path: Path, stubborn: bool) -> None:
    notes = tmp_path / "notes"
    script.start(f"""
        from coroutine_envs import AwaitingEnv, Door
        fault = Door({gate.names[0]!r}, {gate.names[1]!r}, stubborn={stubborn}, notes={str(notes)!r})
        kwargs = numbered(4, fault=fault, at=(1, 1), on_close=faults.Note({str(notes)!r}))
        env = ParallelEnv(4, AwaitingEnv, create_env_kwargs=kwargs, num_processes=2)
        env.reset()
        env.step(acting([0] * 4))
    """)
    for _ in range(4):
        gate.wait_for_arrival()
    family = script.family()
    assert len(family) == 4
    script.kill()
    assert script.wait() == -signal.SIGKILL
    assert script.survivors(family) == []
    assert "Traceback" not in script.err
    if not stubborn:
        assert sorted(notes.read_text()) == ["c"] * 4 + ["x"] * 4


@pytest.mark.slow
def test_a_script_that_ends_while_they_run(script: Script, gate: Gate) -> None:
    script.start(f"""
        from coroutine_envs import AwaitingEnv, Never
        async def main():
            global envs
            kwargs = {{"fault": Never({gate.names[0]!r}), "at": (1, 1)}}
            envs = [
                AsyncParallelEnv(2, AwaitingEnv, create_env_kwargs=kwargs, **o)
                for o in ({{"num_processes": 1}}, {{"backend": "thread"}})
            ]
            for env in envs:
                await env.reset()
                asyncio.create_task(env.step(acting([0, 0])))
            await asyncio.sleep(0.2)
            raise LookupError("the learner diverged")
        asyncio.run(main())
    """)
    assert script.wait() == 1
    assert script.err.count("Traceback") == 1
    assert "LookupError: the learner diverged" in script.err
    assert script.survivors(script.family()) == []


async def test_many_starts_and_ends() -> None:
    for _ in range(5):
        for options in ({"num_processes": 1}, {"num_processes": 1, "backend": "thread"}):
            async with AsyncParallelEnv(3, [MeetingEnv, MeetingEnv, CountingEnv], **options) as env:
                await env.reset()
                await env.step(acting([1, 1, 1]))
        assert env.is_closed
