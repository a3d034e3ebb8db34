"""What a factory raises is caught as what it is, wherever the factory ran."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from failing_starts import MADE, NeedsTwo, Once, Unspeakable, UnspeakableEnv, UnspeakableFactory, raising
from stable_baselines3.common.vec_env import DummyVecEnv

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.engine.failure import captured_start, factory_error
from aioenvs.errors import ClosedError, SpecMismatchError, WorkerError, WorkerStartError, WorkerTimeoutError
from aioenvs.integrations.gymnasium import AioVectorEnv
from aioenvs.integrations.sb3 import AioVecEnv
from aioenvs.integrations.torchrl import ParallelEnv as DressedParallelEnv

WORKERS: list[dict[str, Any]] = [
    {"backend": "thread"},
    {"num_processes": 1},
    {"num_processes": 2},
    {"num_processes": 1, "mp_start_method": "fork"},
    {"num_processes": 1, "mp_start_method": "spawn"},
]


READ = ("errno", "strerror", "filename", "object", "start", "reason", "name", "path", "code", "place", "message")


@pytest.mark.parametrize("make", MADE)
def test_a_start_error_is_an_instance_of_what_was_raised(make: Callable[[], Exception]) -> None:
    original = make()
    sent = factory_error(1, captured_start(original, 1), envs=(0, 1), pid=7)
    for error in (factory_error(1, original, envs=(0, 1), pid=7), sent):
        assert isinstance(error, WorkerStartError)
        assert isinstance(error, type(original))
        assert type(error) is type(sent)
        assert str(error).startswith("the factory of env 1 failed in process 7: ")
        assert (error.env_index, error.pid, error.__cause__ is not None) == ((0, 1), 7, True)
        assert repr(error.args) == repr(original.args)
        for name in READ:
            assert getattr(error, name, None) == getattr(original, name, None)
        error.add_note("a note")
        again = error.again()
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.__notes__ == ["a note"]
        assert again.__cause__ is error.__cause__
        assert {error}
        with pytest.raises(type(original)):
            raise error
    copies = [copy.copy(sent), pickle.loads(pickle.dumps(sent))]
    assert [(type(each), str(each), each.env_index, each.pid) for each in copies] == 2 * [
        (type(sent), str(sent), (0, 1), 7)
    ]


@pytest.mark.parametrize(
    ("original", "also"),
    [
        (StopIteration(1), None),
        (StopAsyncIteration(), None),
        (asyncio.CancelledError(), None),
        (GeneratorExit(), None),
        (KeyboardInterrupt(), None),
        (SystemExit(3), None),
        (ClosedError("another batch"), None),
        (WorkerTimeoutError("another batch", env_index=[9], pid=9), TimeoutError),
        (WorkerStartError.like(KeyError("deep"), "another batch", env_index=[9]), KeyError),
    ],
)
def test_what_would_act_on_the_caller_is_only_the_cause(original: BaseException, also: Any) -> None:
    for error in (
        factory_error(0, original, envs=[0]),
        factory_error(0, captured_start(original, 0), envs=[0]),
    ):
        assert isinstance(error, also) if also else type(error) is WorkerStartError
        assert not isinstance(error, type(original)) or also is KeyError
        assert error.env_index == (0,)


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_a_start_raises_what_the_factory_raised(options: dict[str, Any]) -> None:
    for make in (MADE[0], lambda: TimeoutError("its own"), lambda: NeedsTwo(3, reason="no")):
        with pytest.raises(type(make())) as caught:
            ParallelEnv(2, raising, create_env_kwargs={"make": make}, **options).reset()
        assert isinstance(caught.value, WorkerStartError)
        assert "the factory of env" in str(caught.value)


async def test_asynchronous_starts_raise_it_as_well() -> None:
    for env in (AsyncSerialEnv(2, raising, create_env_kwargs={"make": MADE[2]}), AsyncParallelEnv(2, raising)):
        env.update_kwargs({"make": MADE[2]})
        with pytest.raises(FileNotFoundError, match="the factory of env") as caught:
            await env.start()
        assert (caught.value.errno, caught.value.filename) == (2, "/nowhere")


@pytest.mark.parametrize("vector", [AioVectorEnv, AioVecEnv])
def test_constructors_raise_it_where_the_peers_do(vector: Any) -> None:
    def fail() -> Any:
        raise gymnasium.error.DeprecatedEnv("old")

    for peer in (gymnasium.vector.SyncVectorEnv, DummyVecEnv):
        with pytest.raises(gymnasium.error.DeprecatedEnv):
            peer([fail, fail])
    for backend in ("serial", "thread", "process"):
        with pytest.raises(gymnasium.error.DeprecatedEnv) as caught:
            vector([fail, fail], backend=backend)
        assert isinstance(caught.value, WorkerStartError)


@pytest.mark.parametrize("face", [SerialEnv, ParallelEnv, DressedParallelEnv])
def test_an_attribute_error_of_a_factory_does_not_hide_behind_an_attribute(face: Any) -> None:
    def make() -> Exception:
        return AttributeError("in the factory")

    for ask in ("batch_size", "action_spec"):
        with pytest.raises(WorkerStartError, match="in the factory") as caught:
            getattr(face(2, raising, create_env_kwargs={"make": make}), ask)
        assert not isinstance(caught.value, AttributeError)
    with pytest.raises(AttributeError, match="in the factory"):
        face(2, raising, create_env_kwargs={"make": make}).reset()


@pytest.mark.parametrize("options", [{}, {"on_worker_death": "restart", "max_restarts": 1}])
def test_a_restart_raises_it_as_well(tmp_path: Path, options: dict[str, Any]) -> None:
    with ParallelEnv(1, Once(tmp_path / "flag"), num_processes=1, **options) as env:
        env.reset()
        os.kill(env.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError):  # of the death, or of the restart
            env.reset()
        for _ in range(2):
            with pytest.raises(FileNotFoundError, match="the factory of env 0 failed") as caught:
                env.reset()
            assert isinstance(caught.value, WorkerStartError)
            assert caught.value.errno == 2


@pytest.mark.parametrize("face", [SerialEnv, ParallelEnv, DressedParallelEnv])
def test_errors_about_things_without_a_repr(face: Any) -> None:
    with pytest.raises(TypeError, match=r"returned <Unspeakable at \w+, whose repr raises ZeroDivisionError>"):
        face(2, Unspeakable).reset()
    with pytest.raises(TypeError, match="must be a callable"):
        face(2, Unspeakable())
    with pytest.raises(TypeError, match="create_env_kwargs must be"):
        face(2, UnspeakableEnv, create_env_kwargs=Unspeakable())
    with face(2, UnspeakableEnv) as env:
        with pytest.raises(SpecMismatchError, match="as reward, found <Unspeakable at"):
            env.rand_step(env.reset())
        with pytest.raises(IndexError, match=r"found <list at .* whose repr raises"):
            env[[Unspeakable()]]
    if face is not SerialEnv:
        with pytest.raises(WorkerStartError, match=r"<UnspeakableFactory at .* cannot be pickled"):
            face(2, UnspeakableFactory(), num_processes=1).reset()


@pytest.mark.parametrize("vector", [AioVectorEnv, AioVecEnv])
def test_errors_of_vectors_about_things_without_a_repr(vector: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"<Unspeakable at|one per env|integer"):
        vector([UnspeakableEnv] * 2, backend=Unspeakable())
    env = vector([UnspeakableEnv] * 2, backend="serial")
    env.reset()
    for actions in (Unspeakable(), [Unspeakable(), Unspeakable()]):
        with pytest.raises((SpecMismatchError, TypeError), match=r"no env was stepped|action"):
            env.step(actions)
    with pytest.raises(SpecMismatchError, match="as reward, found <Unspeakable at"):
        env.step([0, 0])
    env.close()
