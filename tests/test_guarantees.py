"""Whatever befalls an env or its worker in any command: the right error, the others go on, and a reset mends it."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import failing_envs as faults
import psutil
import pytest
from faces import FACES, Face, acting, observed
from failing_envs import CountingEnv, Gate
from test_death import family, kill_and_reap, rest

from aioenvs.errors import ResetNeededError, WorkerDiedError, WorkerTimeoutError

COUNT = 4
OPCODES = {  # what each command is called on its way
    "reset": "reset",
    "step": "step",
    "step_and_maybe_reset": "step_and_maybe_reset",
    "set_seed": "seed",
    "call": "call",
    "get_attr": "call",
    "set_attr": "call",
    "render": "call",
    "state_dict": "call",
    "load_state_dict": "call",
}
IN_ENV = [command for command in OPCODES if command != "set_seed"]  # a Gymnasium env only hears of it at its reset

over_waiting_faces = pytest.mark.parametrize(
    "face", [face for face in FACES if "serial" not in face.name], ids=lambda face: face.name
)


class TroubledEnv(CountingEnv):
    """Has trouble in the command that `armed` names, once.

    Args:
        env_id: As for `CountingEnv`.
        trouble: What happens.
    """

    def __init__(self, env_id: int, trouble: Any = None) -> None:
        super().__init__(env_id)
        self.trouble, self.armed, self.hidden = trouble, "", 0

    def _meet(self, *commands: str) -> None:
        if self.armed in commands:
            self.armed = ""
            self.trouble()

    def reset(self, **kwargs: Any) -> Any:
        self._meet("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._meet("step", "step_and_maybe_reset")
        return super().step(action)

    def method(self) -> int:
        self._meet("call")
        return self.env_id

    @property
    def knob(self) -> int:
        self._meet("get_attr")
        return self.hidden

    @knob.setter
    def knob(self, value: int) -> None:
        self._meet("set_attr")
        self.hidden = value

    def render(self) -> Any:
        self._meet("render")
        return self.env_id

    def state_dict(self) -> Any:
        self._meet("state_dict")
        return {"hidden": self.hidden}

    def load_state_dict(self, state: Any) -> None:
        self._meet("load_state_dict")
        self.hidden = state["hidden"]


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """Workers need not import this module, and all that it imports."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def troubled(trouble: Any = None) -> list[dict[str, Any]]:
    """Four envs, of which env 1 has trouble."""
    return [{"env_id": env, "trouble": trouble if env == 1 else None} for env in range(COUNT)]


async def ask(face: Face, env: Any, command: str) -> Any:
    """Do it, with whatever arguments it needs."""
    arguments: dict[str, list[Any]] = {
        "step": [acting([1] * COUNT)],
        "step_and_maybe_reset": [acting([1] * COUNT)],
        "set_seed": [5],
        "call": ["method"],
        "get_attr": ["knob"],
        "set_attr": ["knob", 3],
        "load_state_dict": [{"hidden": 4}],
    }
    return await face.call(getattr(env, command), *arguments.get(command, []))


async def arm(face: Face, env: Any, command: str) -> None:
    await face.call(env.set_attr, "armed", [command if each == 1 else "" for each in range(COUNT)])


async def check_mended(face: Face, env: Any, alive: list[int]) -> None:
    """The others can be stepped; then all are reset, and step once."""
    if alive:
        td = await face.call(env.step, acting([7] * COUNT, only=alive))
        assert [observed(td)[each][0] for each in alive] == alive
    td = await face.call(env.reset)
    assert [(row[0], *row[2:]) for row in observed(td)] == [(each, 0, 0) for each in range(COUNT)]
    td = await face.call(env.step, acting([1, 2, 3, 4]))
    assert [(row[0], *row[2:]) for row in observed(td)] == [(each, 1, each + 1) for each in range(COUNT)]


async def test_an_env_raises(face: Face) -> None:
    async with face.open(COUNT, TroubledEnv, create_env_kwargs=troubled(faults.raise_value_error)) as env:
        await face.call(env.reset)
        for command in IN_ENV:
            await arm(face, env, command)
            with pytest.raises(ValueError, match="the reactor is hot") as caught:
                await ask(face, env, command)
            assert caught.value.env_index == (1,)
            assert f"raised by env 1 in {OPCODES[command]}" in "\n".join(caught.value.__notes__)
            if command in IN_ENV[:3]:
                with pytest.raises(ResetNeededError, match="env 1"):
                    await face.call(env.step, acting([1] * COUNT, only=[1]))
            await check_mended(face, env, [0, 2, 3])


async def test_a_worker_dies_busy(process_face: Face, capfd: pytest.CaptureFixture[str]) -> None:
    face, dead = process_face, family(process_face, 1)
    async with face.open(COUNT, TroubledEnv, create_env_kwargs=troubled(faults.abort_with_words)) as env:
        await face.call(env.reset)
        for command in IN_ENV:
            pid = env.pids[1 if face.processes is None else 0]
            await arm(face, env, command)
            with pytest.raises(WorkerDiedError) as caught:
                await ask(face, env, command)
            check_death(caught.value, dead, pid, "killed by SIGABRT", OPCODES[command])
            assert "malloc(): corrupted top size" in str(caught.value)
            await check_mended(face, env, rest(face, 1))
    assert capfd.readouterr().err.count("malloc(): corrupted top size") == len(IN_ENV)


async def test_a_worker_dies_idle(process_face: Face) -> None:
    face, dead = process_face, family(process_face, 1)
    async with face.open(COUNT, TroubledEnv, create_env_kwargs=troubled()) as env:
        await face.call(env.reset)
        for command in OPCODES:
            pid = env.pids[1 if face.processes is None else 0]
            await kill_and_reap(pid)
            if command == "reset":  # which replaces it
                await check_mended(face, env, [])
                continue
            with pytest.raises(WorkerDiedError) as caught:
                await ask(face, env, command)
            check_death(caught.value, dead, pid, "killed by SIGKILL", "")
            await check_mended(face, env, rest(face, 1))
        workers = [psutil.Process(pid) for pid in env.pids]
        os.kill(env.pids[-1], signal.SIGKILL)
        await face.call(env.close)
        assert env.is_closed
        assert not any(worker.is_running() for worker in workers)


def check_death(error: WorkerDiedError, envs: list[int], pid: int, how: str, command: str) -> None:
    assert list(error.env_index) == envs
    assert error.pid == pid
    told = str(error)
    assert told.startswith(f"the worker of {'env' if len(envs) == 1 else 'envs'} ")
    assert [word for word in (f"(pid {pid})", how, f"last command: {command}") if word not in told] == []


@over_waiting_faces
@pytest.mark.slow
async def test_an_env_is_late(face: Face, gate: Gate) -> None:
    late = [1] if face.processes is None else [0, 1]  # two threads have two envs each, as two processes
    late = [1] if face.threads is None else late
    options: dict[str, Any] = {"create_env_kwargs": troubled(gate.wait), "step_timeout": 0.3}
    async with face.open(COUNT, TroubledEnv, **options) as env:
        await face.call(env.reset)
        for command in IN_ENV:
            await arm(face, env, command)
            with pytest.raises(WorkerTimeoutError) as caught:
                await ask(face, env, command)
            assert list(caught.value.env_index) == late
            assert caught.value.pid == (env.pids[late[0] if len(late) == 1 else 0] if face.in_processes else None)
            called = "call" if command == "render" else command
            assert f"did not answer {called} within 0.3 s (step_timeout)" in str(caught.value)
            await gate.arrival()
            await face.call(env.step, acting([7] * COUNT, only=[2, 3]))
            gate.open()
            await face.call(env.get_attr, "steps")  # waits for the late answer
            await check_mended(face, env, [0, 2, 3])
