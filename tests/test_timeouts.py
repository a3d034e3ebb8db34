"""`timeout=`: how long one command may take, whatever `step_timeout` says."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import coroutine_envs
import pytest
from faces import PROCESS_FACES, Face, acting, observed
from failing_envs import CountingEnv as GymCountingEnv
from failing_envs import Gate, kill_itself, numbered
from talking_envs import TalkingEnv
from tensordict import TensorDictBase
from torch_batches import faces
from torch_faces import Driver, TorchFace

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.errors import WorkerTimeoutError
from aioenvs.testing import CountingEnv

COUNT = 3
FOREVER = 60.0
COMMANDS = (
    *("reset", "step", "step_and_maybe_reset", "maybe_reset", "rand_step", "send", "set_seed"),
    *("call", "get_attr", "set_attr", "render", "state_dict", "load_state_dict"),
)
WHERE = {"step_and_maybe_reset": "step", "rand_step": "step", "send": "step", "maybe_reset": "reset"}

over_faces = pytest.mark.parametrize(
    "face", faces("thread", "async-thread", "packed", "async-one-each", "one-each", torchrl=False)
)
over_process_faces = pytest.mark.parametrize("face", faces("packed", "async-one-each", torchrl=False))


class WaitingEnv(CountingEnv):
    """Waits at a gate in one of its methods, once, when it is told which."""

    def __init__(self, wait: Any = None) -> None:
        super().__init__(None, adds_up=True)
        self.wait = wait
        self.where = ""
        self.value = 0

    def _pause(self, where: str) -> None:
        if self.where == where:
            self.where = ""
            self.wait()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._pause("reset")
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._pause("step")
        return super()._step(tensordict)

    def _set_seed(self, seed: int | None) -> None:
        self._pause("set_seed")
        super()._set_seed(seed)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._pause("state_dict")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._pause("load_state_dict")
        return super().load_state_dict(*args, **kwargs)

    def render(self) -> str:
        self._pause("render")
        return "a picture"

    def work(self, timeout: float | None = None) -> Any:
        self._pause("call")
        return timeout

    @property
    def slow(self) -> int:
        self._pause("get_attr")
        return self.value

    @slow.setter
    def slow(self, value: int) -> None:
        self._pause("set_attr")
        self.value = value


def gated(gate: Gate) -> list[dict[str, Any]]:
    """So many envs, of which env 1 waits."""
    return [{"wait": gate.wait} if env == 1 else {} for env in range(COUNT)]


async def prepared(env: Driver, command: str) -> Any:
    """Have env 1 wait at its next such command; returns what that needs."""
    td = env.rand_action(await env.reset(timeout=FOREVER))
    state = await env.state_dict(timeout=FOREVER)
    if command == "maybe_reset":
        td["done"][1] = td["terminated"][1] = True
    await env[1].set_attr("where", WHERE.get(command, command), timeout=FOREVER)
    return state if command == "load_state_dict" else td


async def ask(env: Driver, command: str, given: Any, **options: Any) -> Any:
    if command == "send":
        env.send(given, **options)
        while env.outstanding:
            result = await env.recv(len(env.outstanding), timeout=FOREVER)
        return result
    arguments: dict[str, tuple[Any, ...]] = {
        "reset": (),
        "set_seed": (3,),
        "call": ("work",),
        "get_attr": ("slow",),
        "set_attr": ("slow", 7),
        "render": (),
        "state_dict": (),
    }
    return await getattr(env, command)(*arguments.get(command, (given,)), **options)


@over_faces
@pytest.mark.slow
async def test_shorter_than_others_may_take(face: TorchFace, gate: Gate) -> None:
    async with face.but(step_timeout=FOREVER).open(COUNT, WaitingEnv, gated(gate)) as env:
        for command in COMMANDS:
            given = await prepared(env, command)
            with pytest.raises(WorkerTimeoutError, match=r"within 0\.1 s \(timeout\)") as caught:
                await ask(env, command, given, timeout=0.1)
            assert 1 in caught.value.env_index
            assert isinstance(caught.value, TimeoutError)
            await gate.arrival()
            gate.open()
            if env.outstanding:
                await env.recv(len(env.outstanding))
            assert (await env.reset())["observation"].flatten().tolist() == [0] * COUNT
        td = await env.step(env.rand_action(await env.reset()))
        assert td["next", "observation"].flatten().tolist() == [1] * COUNT


@over_faces
@pytest.mark.slow
async def test_longer_than_others_may_take(face: TorchFace, gate: Gate) -> None:
    async with face.but(step_timeout=0.1).open(COUNT, WaitingEnv, gated(gate)) as env:
        for command in COMMANDS:
            given = await prepared(env, command)
            asking = asyncio.create_task(ask(env, command, given, timeout=FOREVER))
            await gate.arrival()
            await asyncio.sleep(0.15)  # longer than `step_timeout`
            assert not asking.done()
            gate.open()
            await asking
        given = await prepared(env, "step")
        with pytest.raises(WorkerTimeoutError, match=r"within 0\.1 s \(step_timeout\)"):
            await env.step(given)
        gate.open()


@pytest.mark.parametrize("timeout", [-1, -0.5, float("nan"), "1", True, [1]])
@pytest.mark.parametrize("face", faces("serial", "async-serial", "thread", "async-packed", torchrl=False))
async def test_what_is_no_timeout(face: TorchFace, timeout: Any) -> None:
    async with face.open(COUNT, WaitingEnv) as env:
        for command in COMMANDS:
            given = await prepared(env, command)
            before = await env.get_attr("custom_property")
            with pytest.raises(ValueError, match=r"expected timeout to be a number of seconds, at least 0, or None"):
                await ask(env, command, given, timeout=timeout)
            await env.set_attr("where", "")
            assert await env.get_attr("custom_property") == before
            await ask(env, command, given, timeout=None)


@pytest.mark.parametrize("timeout", [float("inf"), 10**9, 60])
async def test_long_times(face: Face, timeout: Any) -> None:
    async with face.open(2, GymCountingEnv, create_env_kwargs=numbered(2)) as env:
        await face.call(env.reset, timeout=timeout)
        td = await face.call(env.step, acting([1, 2]), timeout=timeout)
        assert observed(td) == [[0, 1, 1, 1], [1, 1, 1, 2]]


async def test_the_time_of_envs_that_wait_for_nobody_is_not_measured() -> None:
    with SerialEnv(2, GymCountingEnv, create_env_kwargs=numbered(2)) as env:
        env.reset(timeout=0)
        assert observed(env.step(acting([1, 2]), timeout=0)) == [[0, 1, 1, 1], [1, 1, 1, 2]]
    async with AsyncSerialEnv(2, GymCountingEnv, create_env_kwargs=numbered(2)) as other:
        await other.reset(timeout=0)
        assert observed(await other.step(acting([1, 2]), timeout=0)) == [[0, 1, 1, 1], [1, 1, 1, 2]]


# -- restarts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", PROCESS_FACES, ids=lambda face: face.name)
async def test_a_worker_that_hangs_is_killed_after_it(face: Face, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    kwargs = numbered(3, {1: {"fault": gate.wait, "at": (1, 2)}})
    options = {"on_worker_death": "restart", "num_processes": 3}
    async with face.open(3, GymCountingEnv, create_env_kwargs=kwargs, **options) as env:
        await face.call(env.reset)
        await face.call(env.step, acting([1, 2, 3]))
        pids = env.pids
        with caplog.at_level(logging.WARNING):
            td = await face.call(env.step, acting([1, 2, 3]), timeout=0.3)
        assert "was killed, since it did not answer step within 0.3 s (timeout)" in caplog.text
        assert observed(td) == [[0, 1, 2, 2], [1, 1, 1, 2], [2, 1, 2, 6]]
        assert td["next", "truncated"].flatten().tolist() == [False, True, False]
        assert env.pids[0] == pids[0]
        assert env.pids[1] != pids[1]
        assert observed(await face.call(env.step, acting([5] * 3)))[1] == [1, 1, 1, 5]


@over_process_faces
async def test_a_call_that_hangs_ends_its_worker(face: TorchFace, gate: Gate) -> None:
    face = face.but(on_worker_death="restart")
    async with face.open(COUNT, WaitingEnv, gated(gate), num_processes=COUNT) as env:
        await prepared(env, "call")
        with pytest.raises(WorkerTimeoutError, match="the worker was killed") as caught:
            await env.call("work", timeout=0.2)
        assert caught.value.env_index == (1,)
        assert await env.call("work") == [None] * COUNT


def built_slowly(env_id: int, mark: str, wait: Any) -> GymCountingEnv:
    """At first one that dies when it is reset again; later one that needs a pass to be built."""
    if Path(mark).exists():
        wait()
        return GymCountingEnv(env_id)
    Path(mark).touch()
    return GymCountingEnv(env_id, fault=kill_itself, at=(2, 0))


@pytest.mark.parametrize("face", PROCESS_FACES[1::2], ids=lambda face: face.name)
async def test_what_it_takes_to_build_an_env_anew_is_not_its_time(
    face: Face, gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = [{"env_id": 0}, {"env_id": 1, "mark": str(tmp_path / "mark"), "wait": gate.wait}]
    factories = [GymCountingEnv, built_slowly]
    async with face.open(2, factories, create_env_kwargs=kwargs, on_worker_death="restart") as env:
        await face.call(env.reset)
        resetting = asyncio.create_task(face.call(env.reset, timeout=1))
        await gate.arrival()
        await asyncio.sleep(1.1)
        gate.open(9)
        assert observed(await resetting) == [[0, 2, 0, 0], [1, 2, 0, 0]]
        td = await face.call(env.step, acting([1, 2]))
        assert observed(td) == [[0, 2, 1, 1], [1, 2, 1, 2]]
        assert env.statistics().restarts == (0, 1)
    assert "did not answer" not in caplog.text


# -- whose it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
def test_a_method_of_the_envs_may_have_a_timeout_of_its_own(cls: Any) -> None:
    options = {} if cls is SerialEnv else {"backend": "thread"}
    with cls(2, WaitingEnv, **options) as env:
        assert env.work(timeout=3) == [3, 3]
        assert env.call("work", timeout=3) == [None, None]
        assert env.call("work", 3, timeout=30) == [3, 3]
        assert env[0].work(timeout=4) == [4]


async def test_a_call_has_one_and_its_method_another() -> None:
    async with AsyncParallelEnv(2, TalkingEnv, backend="thread") as env:
        assert await env.call("echo", timeout=30, limit=3) == [{"limit": 3}] * 2


# -- who is to blame --------------------------------------------------------------------------------------


async def test_what_a_blocked_loop_kept_from_being_read_is_in_time() -> None:
    """Nor is a worker killed for it."""
    kwargs = numbered(2)
    async with AsyncParallelEnv(
        2, GymCountingEnv, create_env_kwargs=kwargs, num_processes=2, on_worker_death="restart"
    ) as env:
        await env.reset()
        pids = env.pids
        for kind in ("step", "reset"):
            asking = asyncio.create_task(
                env.step(acting([1, 2]), timeout=0.2) if kind == "step" else env.reset(timeout=0.2)
            )
            for _ in range(3):
                await asyncio.sleep(0)
            time.sleep(0.4)  # noqa: ASYNC251 - as a policy does
            await asking
        assert env.pids == pids
        assert await env.get_attr("episode") == [2, 2]


async def test_a_late_call_with_restarts_is_a_timeout_that_says_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    class Napper(GymCountingEnv):
        def nap(self) -> None:
            time.sleep(FOREVER)

    async with AsyncParallelEnv(3, Napper, on_worker_death="restart", num_processes=1) as env:
        await env.reset()
        with pytest.raises(
            WorkerTimeoutError, match=r"did not answer call within 0.3 s \(timeout\); the worker was killed"
        ):
            await env.call("nap", timeout=0.3)
        td = await env.step(acting([0, 0, 0]))
        assert td["next", "truncated"].all()
    assert sum("was killed, since it did not answer call" in record.message for record in caplog.records) >= 1


async def test_late_coroutine_envs_in_the_callers_loop_are_named_alone(gate: Gate) -> None:
    kwargs = numbered(3, {1: {"fault": coroutine_envs.door(gate), "at": (1, 1)}})
    async with AsyncSerialEnv(3, coroutine_envs.AwaitingEnv, create_env_kwargs=kwargs) as env:
        await env.reset()
        with pytest.raises(WorkerTimeoutError, match=r"env 1 did not answer step .* their envs need a reset") as caught:
            await env.step(acting([1, 2, 3]), timeout=0.3)
        assert caught.value.env_index == (1,)
        td = await env.step(acting([1, 1, 1], only=[0, 2]))
        assert [row[-1] for row in observed(td)][::2] == [2, 4]


def test_a_send_before_the_first_reset_of_coroutine_envs() -> None:
    with SerialEnv(2, coroutine_envs.AwaitingEnv) as env:
        env.send(acting([1, 1]))
        assert [row[-2:] for row in observed(env.recv(2)[0])] == [[1, 1], [1, 1]]
