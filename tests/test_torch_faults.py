"""What goes wrong in a torch env, in any command: the caller is told, the other envs go on, and a reset mends it."""

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from faces import in_thread, masked
from failing_envs import Gate
from processes import still_alive
from tensordict import TensorDictBase
from test_death import kill_and_reap
from torch_faces import PROCESS_TORCH_FACES, Driver, TorchFace, faces_called, over_own_torch_faces

from aioenvs import AsyncParallelEnv, ParallelEnv
from aioenvs.errors import (
    ClosedError,
    ConcurrencyError,
    RemoteEnvError,
    ResetNeededError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)
from aioenvs.testing import CountingEnv, DyingEnv, FailingEnv, PrintingEnv

COUNT = 3
COMMANDS = [
    "reset",
    "step",
    "step_and_maybe_reset",
    "set_seed",
    "call",
    "get_attr",
    "set_attr",
    "state_dict",
    "load_state_dict",
]

over_process_faces = pytest.mark.parametrize("face", PROCESS_TORCH_FACES)
over_commands = pytest.mark.parametrize("command", COMMANDS)


class OddError(Exception):
    """Has an attribute of its own, and can be rebuilt."""

    def __init__(self, words: str, code: int = 7) -> None:
        super().__init__(words, code)
        self.code = code


class OnlyHereError(Exception):
    """Cannot be rebuilt in another process."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("not me")


def raise_only_here() -> None:
    raise OnlyHereError("strange")


class TroubleEnv(CountingEnv):
    """Has trouble in one command, each time while it is armed.

    Args:
        where: In which command.
        act: What happens then.
        **options: As for `CountingEnv`.
    """

    def __init__(self, where: str = "", act: Any = None, **options: Any) -> None:
        super().__init__(adds_up=True, **options)
        self.where, self.act, self.armed, self.hidden = where, act, False, 0

    def arm(self, armed: bool = True) -> None:
        self.armed = armed

    def _meet(self, where: str) -> None:
        if where == self.where and self.armed:
            self.act()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._meet("reset")
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._meet("step")
        self._meet("step_and_maybe_reset")
        return super()._step(tensordict)

    def _set_seed(self, seed: int | None) -> None:
        self._meet("set_seed")
        super()._set_seed(seed)

    def method(self) -> int:
        self._meet("call")
        return int(self.steps)

    @property
    def knob(self) -> int:
        self._meet("get_attr")
        return self.hidden

    @knob.setter
    def knob(self, value: int) -> None:
        self._meet("set_attr")
        self.hidden = value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._meet("state_dict")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._meet("load_state_dict")
        return super().load_state_dict(*args, **kwargs)


class Raise:
    """Raises an error."""

    def __init__(self, error: type[Exception], words: str) -> None:
        self.error, self.words = error, words

    def __call__(self) -> None:
        raise self.error(self.words)


class Die:
    """Ends the process."""

    def __init__(self, exit_code: int | None = None) -> None:
        self.exit_code = exit_code

    def __call__(self) -> None:
        if self.exit_code is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            os._exit(self.exit_code)


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """Workers need not import this module, and all that it imports."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def troubled(where: str, act: Any, env_index: int = 1, count: int = COUNT) -> list[dict[str, Any]]:
    return [{"where": where, "act": act, "max_steps": None} if env == env_index else {} for env in range(count)]


async def ask(env: Driver, command: str, td: TensorDictBase) -> Any:
    """Do it, with whatever arguments it needs."""
    if command in ("step", "step_and_maybe_reset"):
        return await getattr(env, command)(td.clone().set("action", torch.ones(td.batch_size, dtype=torch.int64)))
    arguments: dict[str, Sequence[Any]] = {
        "set_seed": [3],
        "call": ["method"],
        "get_attr": ["knob"],
        "set_attr": ["knob", 3],
        "load_state_dict": [CountingEnv(adds_up=True).state_dict()],
    }
    return await getattr(env, command)(*arguments.get(command, []))


async def taken(env: Driver, td: TensorDictBase, count: int = COUNT) -> TensorDictBase:
    """The root after a step with the actions 10, 20, 30."""
    actions = torch.tensor([10 * (index + 1) for index in range(count)])
    return (await env.step(td.clone().set("action", actions)))["next"].exclude("reward")


def totals(td: TensorDictBase) -> list[int]:
    return [int(value) for value in td["total"].flatten()]


def notes_of(error: BaseException) -> str:
    return "\n".join(error.__notes__)


# -- an env raises --------------------------------------------------------------------------------------


@over_own_torch_faces
@over_commands
async def test_it_raises_in_a_command(face: TorchFace, command: str) -> None:
    kwargs = troubled(command, Raise(OddError, "out of cheese"))
    async with face.open(COUNT, TroubleEnv, kwargs) as env:
        td = await taken(env, await env.reset())
        await env.call("arm")
        with pytest.raises(OddError, match="out of cheese") as caught:
            await ask(env, command, td)
        assert caught.value.code == 7
        assert caught.value.env_index == (1,)
        notes = notes_of(caught.value)
        name = command if command in COMMANDS[:4] else "call"
        assert f"raised by env 1 in {'seed' if name == 'set_seed' else name}" in notes
        assert not face.in_processes or "in _meet" in notes
        await env.call("arm", False)

        steps, needs_reset = await env.ask("method"), command in COMMANDS[:3]
        stepped = 2 if command.startswith("step") else 0 if command in ("reset", "load_state_dict") else 1
        assert steps == [stepped, 1, stepped]
        if command == "set_attr":
            assert await env.get_attr("knob") == [3, 0, 3]
        if command == "set_seed":
            seeds = await env.get_attr("seed")
            assert seeds[0] == 3
            assert seeds[1] is None
            assert seeds[2] is not None
        if needs_reset:
            with pytest.raises(ResetNeededError, match="env 1"):
                await taken(env, td)
            td = await env.reset(masked("_reset", COUNT, [1]))
            assert totals(td)[1] == 0
        td = await taken(env, td)
        assert (await env.ask("method"))[1] == (1 if needs_reset else 2)


@over_own_torch_faces
async def test_the_others_have_stepped(face: TorchFace) -> None:
    async with face.open(COUNT, TroubleEnv, troubled("step", Raise(ValueError, "no"))) as env:
        td = await env.reset()
        await env.call("arm")
        with pytest.raises(ValueError, match="no"):
            await taken(env, td)
        await env.call("arm", False)
        td = await env.reset(masked("_reset", COUNT, [1]))
        assert totals(td) == [10, 0, 30]
        assert td["observation"].flatten().tolist() == [1, 0, 1]
        assert totals(await taken(env, td)) == [20, 20, 60]


@over_own_torch_faces
async def test_several_raise(face: TorchFace) -> None:
    kwargs = [{"where": "step", "act": Raise(ValueError, f"no {env}")} for env in range(COUNT)]
    async with face.open(COUNT, TroubleEnv, kwargs) as env:
        td = await env.reset()
        await env.call("arm")
        with pytest.raises(ValueError, match="no 0") as caught:
            await taken(env, td)
        assert caught.value.env_index == (0, 1, 2)
        assert "env 1 failed as well: ValueError: no 1" in notes_of(caught.value)
        assert "env 2 failed as well: ValueError: no 2" in notes_of(caught.value)
        await env.call("arm", False)
        assert totals(await taken(env, await env.reset())) == [10, 20, 30]


@over_own_torch_faces
async def test_what_cannot_be_rebuilt_is_told(face: TorchFace) -> None:
    async with face.open(COUNT, TroubleEnv, troubled("step", raise_only_here)) as env:
        td = await env.reset()
        await env.call("arm")
        with pytest.raises(RemoteEnvError if face.in_processes else OnlyHereError, match="strange") as caught:
            await taken(env, td)
        assert caught.value.env_index == (1,)
        assert "raised by env 1 in step" in notes_of(caught.value)


@over_own_torch_faces
@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, StopIteration, GeneratorExit])
async def test_what_would_act_on_the_caller_does_not(face: TorchFace, error: type[BaseException]) -> None:
    if error is KeyboardInterrupt and not face.in_processes and "thread" not in face.name:
        pytest.skip("a KeyboardInterrupt in this process is the caller's")
    async with face.open(COUNT, FailingEnv, {"where": "step", "error": error, "message": "boo"}) as env:
        td = await env.reset()
        with pytest.raises(RuntimeError, match="boo") as caught:
            await env.step(td.set("action", torch.zeros(COUNT, dtype=torch.int64)))
        assert caught.value.env_index == (0, 1, 2)
        td = await env.step((await env.reset()).set("action", torch.zeros(COUNT, dtype=torch.int64)))
        assert td["next", "observation"].flatten().tolist() == [1, 1, 1]


@over_own_torch_faces
async def test_a_rollout_ends_with_the_exception(face: TorchFace) -> None:
    kwargs = [{"where": "step", "at": 3 if env == 1 else 99} for env in range(COUNT)]
    async with face.open(COUNT, FailingEnv, kwargs) as env:
        with pytest.raises(RuntimeError, match="told to fail") as caught:
            await env.rollout(5)
        assert caught.value.env_index == (1,)
        assert (await env.rollout(4)).shape == (COUNT, 4)


@over_own_torch_faces
async def test_it_raises_in_an_automatic_reset(face: TorchFace) -> None:
    kwargs = [{"where": "reset", "at": 2 if env == 1 else 99, "max_steps": 2} for env in range(COUNT)]
    async with face.open(COUNT, FailingEnv, kwargs) as env:
        td = await env.reset()
        td, root = await env.step_and_maybe_reset(td.set("action", torch.zeros(COUNT, dtype=torch.int64)))
        with pytest.raises(RuntimeError, match="told to fail"):
            await env.step_and_maybe_reset(root.set("action", torch.zeros(COUNT, dtype=torch.int64)))
        with pytest.raises(ResetNeededError, match="env 1"):
            await env.step(root)
        td = await env.reset(masked("_reset", COUNT, [1]))
        assert td["observation"].flatten().tolist()[1] == 0


@over_own_torch_faces
async def test_an_env_that_breaks_its_word(face: TorchFace) -> None:
    async with face.open(COUNT, [CountingEnv, LyingEnv, CountingEnv]) as env:
        td = await env.reset()
        with pytest.raises(ValueError, match=r"'observation'") as caught:
            await env.step(td.set("action", torch.zeros(COUNT, dtype=torch.int64)))
        assert caught.value.env_index == (1,)
        with pytest.raises(ResetNeededError, match="env 1"):
            await env.step(td)


class LyingEnv(CountingEnv):
    """Observes something of another shape than it said."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        following = super()._step(tensordict)
        return following.set("observation", following["observation"].expand(2).clone())


# -- a worker dies --------------------------------------------------------------------------------------


def family(face: TorchFace, env_index: int) -> list[int]:
    """The envs that share a process with this one, of three; packed ones are 0, and 1 and 2."""
    if face.processes is None:
        return [env_index]
    return list(range(COUNT)) if face.processes == 1 else [0] if env_index == 0 else [1, 2]


@over_process_faces
@over_commands
async def test_it_dies_in_a_command(face: TorchFace, command: str) -> None:
    dead = family(face, 1)
    alive = [env for env in range(COUNT) if env not in dead]
    async with face.open(COUNT, TroubleEnv, troubled(command, Die())) as env:
        specs, pids = env.specs, env.pids
        td = await taken(env, await env.reset())
        await env.call("arm")
        with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
            await ask(env, command, td)
        assert list(caught.value.env_index) == dead
        assert caught.value.pid in pids
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await taken(env, td)
        if alive:
            before = await env[alive].ask("method")
            await env[alive].step(td[alive].clone().set("action", torch.ones(len(alive), dtype=torch.int64)))
            assert await env[alive].ask("method") == [steps + 1 for steps in before]

        td = await env.reset(masked("_reset", COUNT, dead))
        assert [totals(td)[index] for index in dead] == [0] * len(dead)
        assert env.specs == specs
        assert len(env.pids) == len(pids)
        assert set(env.pids) & set(pids) == set(pids) - {caught.value.pid}
        await taken(env, td)
        assert [(await env.ask("method"))[index] for index in dead] == [1] * len(dead)


@over_process_faces
@pytest.mark.parametrize(
    ("options", "words"),
    [({"exit_code": 3}, "exited with code 3"), ({"signum": signal.SIGSEGV}, "SIGSEGV"), ({}, "SIGKILL")],
)
async def test_the_error_says_how_it_died(face: TorchFace, options: Any, words: str) -> None:
    kwargs = [{"at": 1 if env == 1 else 99, **options} for env in range(COUNT)]
    async with face.open(COUNT, DyingEnv, kwargs) as env:
        with pytest.raises(WorkerDiedError, match=words) as caught:
            await env.rollout(2)
        assert "last command: step" in str(caught.value)


@over_process_faces
async def test_an_idle_worker_is_killed(face: TorchFace) -> None:
    async with face.open(COUNT, CountingEnv, {"adds_up": True}) as env:
        td = await env.reset()
        await kill_and_reap(env.pids[0])
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await taken(env, td)
        assert totals(await env.reset())[0] == 0
        assert totals(await taken(env, await env.reset())) == [10, 20, 30]


def two_in_processes() -> ParallelEnv:
    return ParallelEnv(2, CountingEnv, num_processes=2, mp_start_method="fork")


async def test_a_worker_dies_that_has_workers() -> None:
    async with AsyncParallelEnv(2, two_in_processes, num_processes=2) as env:
        await env.reset()
        nested = [psutil.Process(pid) for pid in (await env.get_attr("pids"))[0]]
        await kill_and_reap(env.pids[0])
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await env.rand_step()
        assert await in_thread(still_alive, nested) == []
        td = await env.rand_step(await env.reset())
        assert td["next", "observation"].flatten().tolist() == [1, 1, 1, 1]


@over_own_torch_faces
async def test_one_of_several_kinds_raises(face: TorchFace) -> None:
    factories = [
        lambda: CountingEnv(batch_size=(1,)),
        lambda: FailingEnv(batch_size=(1,), start=5),
        lambda: CountingEnv(batch_size=(1,), dtype=torch.float64),
    ]
    async with face.open(COUNT, factories) as env:
        td = env.rand_action(await env.reset())
        with pytest.raises(RuntimeError, match="told to fail") as caught:
            await env.step(td)
        assert caught.value.env_index == (1,)
        masks = torch.tensor([False, True, False]).reshape(3, 1, 1)
        td = await env.reset(td.set("_reset", masks))
        assert [own["observation"].item() for own in td.unbind(0)] == [0, 5, 0]
        td = await env.step(env.rand_action(td))
        assert [own["next", "observation"].item() for own in td.unbind(0)] == [2, 6, 2]


# -- it takes too long, or is given up ------------------------------------------------------------------


class GatedEnv(CountingEnv):
    """Waits at a gate in one step."""

    def __init__(self, wait: Any = None, at: int = 2) -> None:
        super().__init__(None, adds_up=True)
        self.wait, self.at = wait, at

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.wait is not None and self.steps == self.at - 1:
            wait, self.wait = self.wait, None
            wait()
        return super()._step(tensordict)


def gated(gate: Gate, env_index: int = 1) -> list[dict[str, Any]]:
    return [{"wait": gate.wait} if env == env_index else {} for env in range(COUNT)]


over_waiting_async_faces = pytest.mark.parametrize("face", faces_called("async-packed", "async-thread"))


@over_process_faces
async def test_a_timeout_names_the_envs(face: TorchFace, gate: Gate) -> None:
    async with face.open(COUNT, GatedEnv, gated(gate), step_timeout=0.5) as env:
        td = await taken(env, await env.reset())
        with pytest.raises(WorkerTimeoutError) as caught:
            await taken(env, td)
        assert list(caught.value.env_index) == family(face, 1)
        await gate.arrival()
        gate.open()
        td = await env.reset(masked("_reset", COUNT, [1]))
        assert totals(td)[1] == 0
        assert totals(await taken(env, td))[1] == 20


@over_waiting_async_faces
async def test_a_second_request_is_refused(face: TorchFace, gate: Gate) -> None:
    async with face.open(COUNT, GatedEnv, gated(gate)) as env:
        td = await taken(env, await env.reset())
        stepping = asyncio.create_task(taken(env, td))
        await gate.arrival()
        for command in COMMANDS:
            if command not in ("call", "get_attr", "set_attr"):
                with pytest.raises(ConcurrencyError, match="step"):
                    await ask(env, command, td)
        with pytest.raises(ConcurrencyError, match="step"):
            await env.call("custom_method")
        with pytest.raises(ConcurrencyError, match="step"):
            await env.get_attr("custom_attr")
        with pytest.raises(ConcurrencyError, match="step"):
            await env.set_attr("custom_attr", 3)
        gate.open()
        assert totals(await stepping) == [20, 40, 60]
        assert totals(await taken(env, td)) == [30, 60, 90]


@over_waiting_async_faces
async def test_the_late_answer_of_a_cancelled_step_is_dropped(face: TorchFace, gate: Gate) -> None:
    async with face.open(COUNT, GatedEnv, gated(gate)) as env:
        td = await taken(env, await env.reset())
        stepping = asyncio.create_task(taken(env, td))
        await gate.arrival()
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        gate.open()
        following = await taken(env, td)
        assert totals(following) == [30, 60, 90]
        assert following["observation"].flatten().tolist() == [3, 3, 3]


@over_waiting_async_faces
async def test_a_cancelled_rollout(face: TorchFace, gate: Gate) -> None:
    async with face.open(COUNT, GatedEnv, gated(gate)) as env:
        rolling = asyncio.create_task(env.rollout(5))
        await gate.arrival()
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling
        gate.open()
        rollout = await env.rollout(3)
        assert rollout["next", "observation"].flatten().tolist() == [1, 2, 3] * COUNT


# -- it cannot be made ----------------------------------------------------------------------------------


@over_own_torch_faces
async def test_a_constructor_raises(face: TorchFace) -> None:
    kwargs = [{"where": "init" if env == 1 else "step"} for env in range(COUNT)]
    env = Driver(face.make(COUNT, FailingEnv, kwargs))
    for _ in range(2):
        with pytest.raises(WorkerStartError, match=r"env 1 failed.*told to fail") as caught:
            await env.start()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert env.is_closed
    with pytest.raises(ClosedError):
        await env.close()


@over_process_faces
@pytest.mark.parametrize("exit_code", [None, 4])
async def test_a_constructor_dies(face: TorchFace, exit_code: int | None) -> None:
    kwargs = [{"where": "init" if env == 1 else "step", "exit_code": exit_code} for env in range(COUNT)]
    env = Driver(face.make(COUNT, DyingEnv, kwargs))
    with pytest.raises(WorkerStartError, match="SIGKILL" if exit_code is None else "code 4"):
        await env.start()
    assert env.is_closed


@over_process_faces
async def test_a_constructor_hangs(face: TorchFace, gate: Gate) -> None:
    env = Driver(
        face.make(
            COUNT, WaitingToBe, [{"wait": gate.wait if i == 1 else None} for i in range(COUNT)], start_timeout=0.5
        )
    )
    with pytest.raises(WorkerStartError, match="start_timeout"):
        await env.start()
    assert env.is_closed


class WaitingToBe(CountingEnv):
    def __init__(self, wait: Any = None) -> None:
        super().__init__()
        if wait is not None:
            wait()


@over_waiting_async_faces
async def test_a_start_is_cancelled(face: TorchFace, gate: Gate) -> None:
    env = Driver(face.make(COUNT, WaitingToBe, [{"wait": gate.wait if i == 1 else None} for i in range(COUNT)]))
    starting = asyncio.create_task(env.start())
    await gate.arrival()
    starting.cancel()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert env.is_closed


# -- it talks -------------------------------------------------------------------------------------------


@over_own_torch_faces
@pytest.mark.parametrize("where", ["init", "reset", "step"])
async def test_what_it_prints_disturbs_nobody(face: TorchFace, where: Any, capfd: pytest.CaptureFixture[str]) -> None:
    async with face.open(2, PrintingEnv, {"size": 200_000, "where": where, "at": 1}) as env:
        rollout = await env.rollout(3)
    assert rollout["next", "observation"].flatten().tolist() == [1, 2, 3] * 2
    out, err = capfd.readouterr()
    assert len(out) >= 2 * 200_000
    assert len(err) >= 2 * 200_000
    assert set(out + err) == {"x", "\n"}


# -- it uses the same tensors again and again ------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [(), (2,)])
def test_the_last_observation_of_one_env_that_reuses_its_tensors(batch_size: tuple[int, ...]) -> None:
    env = CountingEnv(3, in_place=True, batch_size=batch_size)
    td, last = env.reset(), []
    for _ in range(6):
        td, following = env.step_and_maybe_reset(env.rand_action(td))
        if td["next", "done"].all():
            last.append((td["next", "observation"], following["observation"].clone()))
        td = following
    assert [final.flatten().unique().tolist() for final, _ in last] == [[3], [3]]
    assert [first.flatten().unique().tolist() for _, first in last] == [[0], [0]]
    following = env.rollout(7, break_when_any_done=False)["next"]
    assert following["observation"][following["done"]].unique().tolist() == [3]


@over_own_torch_faces
async def test_results_of_envs_that_reuse_their_tensors(face: TorchFace) -> None:
    kwargs = [{"max_steps": steps, "in_place": True} for steps in (2, 3, None)]
    async with face.open(COUNT, CountingEnv, kwargs) as env:
        td, kept = await env.reset(), []
        for _ in range(6):
            td, following = await env.step_and_maybe_reset(td.set("action", torch.zeros(COUNT, dtype=torch.int64)))
            kept.append((td["observation"], td["next", "observation"]))
            td = following
        rollout = await env.rollout(6, break_when_any_done=False)
    roots = [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    nexts = [[value + 1 for value in values] for values in roots]
    for index, expected in enumerate((roots, nexts)):
        assert torch.cat([pair[index] for pair in kept], -1).tolist() == expected
    assert rollout["observation"].squeeze(-1).tolist() == roots
    assert rollout["next", "observation"].squeeze(-1).tolist() == nexts


# -- afterwards it can be closed ------------------------------------------------------------------------


@over_own_torch_faces
@over_commands
async def test_it_can_be_closed_after_any_failure(face: TorchFace, command: str) -> None:
    env = Driver(face.make(COUNT, TroubleEnv, troubled(command, Raise(ValueError, "no"))))
    td = await env.reset()
    await env.call("arm")
    with pytest.raises(ValueError, match="no"):
        await ask(env, command, td)
    await env.close()
    assert env.is_closed
    assert totals(await taken(env, await env.reset())) == [10, 20, 30]  # opens again
    await env.close()


async def test_it_can_be_closed_while_it_works(gate: Gate) -> None:
    async with AsyncParallelEnv(
        COUNT, GatedEnv, create_env_kwargs=gated(gate), num_processes=2, close_timeout=0.5
    ) as env:
        td = await taken(Driver(env), await env.reset())
        stepping = asyncio.create_task(env.step(td.set("action", torch.zeros(COUNT, dtype=torch.int64))))
        await gate.arrival()
        await env.close()
        with pytest.raises(ClosedError, match="step"):
            await stepping
