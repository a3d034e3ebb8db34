"""Envs without coroutines in a worker with coroutine envs: never inside of an event loop, always in one thread."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coroutine_envs import AwaitingEnv, LeavingEnv, LoopingEnv, door, leave
from drawing_envs import SharedDiceEnv
from faces import Face, acting, observed
from failing_envs import CountingEnv, Gate, Note, numbered
from tensordict import TensorDictBase

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.errors import WorkerDiedError, WorkerStartError
from aioenvs.testing import CountingEnv as TensorCountingEnv

PACKED = Face("packed", ParallelEnv, 1)
ASYNC_PACKED = Face("async-packed", AsyncParallelEnv, 1)
ASYNC_THREAD = Face("async-thread", AsyncParallelEnv, 0, threads=1)
MIXED = [LoopingEnv, AwaitingEnv, LoopingEnv]

over_workers = pytest.mark.parametrize("face", [ASYNC_PACKED, ASYNC_THREAD], ids=lambda face: face.name)


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("face", [PACKED, ASYNC_THREAD], ids=lambda face: face.name)
async def test_a_plain_env_may_run_a_loop_of_its_own(face: Face, limit: int | None, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    kwargs = numbered(3, {env: {"closed": str(closed)} for env in (0, 2)}, length=2)
    async with face.open(3, MIXED, create_env_kwargs=kwargs, max_concurrency=limit) as env:
        for method, args, value in life(env):
            assert found_in(await face.call(method, *args)) == value
    name = "MainThread" if face is PACKED else "aioenvs envs 0-2"
    assert sorted(closed.read_text().splitlines()) == [f"0: {name}", f"2: {name}"]


@pytest.mark.parametrize("limit", [None, 1])
def test_so_it_may_in_the_callers_thread(limit: int | None, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    kwargs = numbered(3, {env: {"closed": str(closed)} for env in (0, 2)}, length=2)
    with SerialEnv(3, MIXED, create_env_kwargs=kwargs, max_concurrency=limit) as env:
        for method, args, value in life(env):
            assert found_in(method(*args)) == value
    assert sorted(closed.read_text().splitlines()) == ["0: MainThread", "2: MainThread"]


def life(env: Any) -> list[Any]:
    """Methods, their arguments, and what comes of them."""
    return [
        (env.reset, (), [[0, 1, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0]]),
        (env.step, (acting([1, 2, 3]),), [[0, 1, 1, 1], [1, 1, 1, 2], [2, 1, 1, 3]]),
        (env.step_and_maybe_reset, (acting([1, 2, 3]),), [[0, 1, 2, 2], [1, 1, 2, 4], [2, 1, 2, 6]]),
        (env[2:].call, ("count",), [1]),
        (env[:1].get_attr, ("counted",), [1]),
        (env[0].state_dict, (), [1]),
    ]


def found_in(result: Any) -> Any:
    if isinstance(result, tuple):
        result = result[0]
    if isinstance(result, TensorDictBase):
        return observed(result)
    return [state["threads"] for state in result.values()] if isinstance(result, dict) else result


class LoopingTensorEnv(TensorCountingEnv):
    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        asyncio.run(asyncio.sleep(0))
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict: Any) -> Any:
        asyncio.run(asyncio.sleep(0))
        return super()._step(tensordict)

    def _set_seed(self, seed: int | None) -> None:
        asyncio.run(asyncio.sleep(0))
        super()._set_seed(seed)


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
def test_so_may_one_that_deals_in_tensordicts(cls: Any) -> None:
    options = {} if cls is SerialEnv else {"num_processes": 1}
    with cls(2, [LoopingTensorEnv, AwaitingEnv], **options) as env:
        env.set_seed(3)
        env.reset()
        td = env[0].rand_step()
        assert td["next", "observation"].flatten().tolist() == [1]


# -- at the same time -----------------------------------------------------------------------------------


@over_workers
async def test_coroutines_go_on_while_a_plain_env_computes(face: Face, gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with face.open(2, [AwaitingEnv, CountingEnv], create_env_kwargs=kwargs) as env:
        await env.reset()
        computing = asyncio.create_task(env[1].step(acting([7])))
        await gate.arrival()
        for number in range(1, 4):
            assert observed(await env[0].step(acting([1]))) == [[0, 1, number, number]]
        assert not computing.done()
        gate.open()
        assert observed(await computing) == [[1, 1, 1, 7]]


@over_workers
async def test_cancelled_while_a_plain_env_computes(face: Face, gate: Gate) -> None:
    """It does what it was asked, and the next plain env has not begun."""
    each = {0: {"fault": door(gate, stubborn=True), "at": (1, 1)}, 1: {"fault": gate.wait, "at": (1, 1)}}
    kinds = [AwaitingEnv, CountingEnv, CountingEnv]
    async with face.open(3, kinds, create_env_kwargs=numbered(3, each)) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([1, 2, 3])))
        await gate.arrival()
        await gate.arrival()
        stepping.cancel()
        await gate.arrival()  # the coroutine knows that it is cancelled
        with pytest.raises(asyncio.CancelledError):
            await stepping
        following = asyncio.create_task(env.step(acting([4, 5, 6])))
        gate.open(2)
        assert observed(await following) == [[0, 1, 2, 5], [1, 1, 2, 7], [2, 1, 1, 6]]


def test_what_is_drawn_from_the_generators_of_the_process() -> None:
    """The same as by hand, whoever else is in the process."""

    def by_hand(seed: int) -> list[float]:
        random.seed(seed)
        np.random.seed(seed)
        env = SharedDiceEnv()
        return [env.reset(seed=seed)[0].tolist(), *(env.step(0)[0].tolist() for _ in range(3))]

    kept = random.getstate(), np.random.get_state()
    try:
        expected = [by_hand(seed) for seed in (11, 12)]
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
    with ParallelEnv(3, [SharedDiceEnv, AwaitingEnv, SharedDiceEnv], num_processes=1) as env:
        views = [env[0], env[2]]
        found = [[view.reset(seed=seed)["observation"][0].tolist()] for view, seed in zip(views, (11, 12), strict=True)]
        for _ in range(3):
            env[1].reset()
            for view, rows in zip(views, found, strict=True):
                rows.append(view.rand_step()["next", "observation"][0].tolist())
    assert found == expected


# -- ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exit", "signal"])
async def test_a_worker_that_ends_by_a_plain_env(how: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    fault = leave if how == "exit" else None
    kwargs = numbered(3, {0: {"fault": fault, "at": (1, 1)}}, on_close=Note(str(closed)))
    env = AsyncParallelEnv(3, [LeavingEnv, AwaitingEnv, CountingEnv], create_env_kwargs=kwargs, num_processes=1)
    await env.reset()
    if how == "signal":
        os.kill(env.pids[0], signal.SIGUSR1)
    with pytest.raises(WorkerDiedError, match="exited with code 7"):
        await env.step(acting([1, 1, 1]))
    await env.close()
    assert closed.read_text() == "xxx"


class OldStyleEnv(CountingEnv):
    """Runs the event loop that it finds."""

    def step(self, action: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            loop = asyncio.get_event_loop()
        loop.run_until_complete(asyncio.sleep(0))
        assert sys.get_asyncgen_hooks().firstiter is None
        return super().step(action)


async def test_a_fork_of_a_running_loop_knows_nothing_of_it() -> None:
    async with AsyncParallelEnv(2, OldStyleEnv, create_env_kwargs=numbered(2), mp_start_method="fork") as env:
        await env.reset()
        assert observed(await env.step(acting([1, 2]))) == [[0, 1, 1, 1], [1, 1, 1, 2]]


# -- in the caller's loop -------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [CountingEnv, AwaitingEnv])
async def test_the_callers_loop_is_no_place_for_one(other: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def opened(method: str) -> AsyncSerialEnv:
        return AsyncSerialEnv(2, [other, LoopingEnv], create_env_kwargs=numbered(2, {1: {"only": method}}))

    with pytest.raises(WorkerStartError, match=r"factory of env 1 failed: RuntimeError: asyncio\.run\(\)") as refused:
        await opened("init").reset()
    async with opened("step") as env:
        await env.reset()
        with pytest.raises(RuntimeError, match=r"asyncio\.run\(\) cannot be called") as caught:
            await env.step(acting([1, 2]))
        await env.reset()
        assert observed(await env[0].step(acting([3]))) == [[0, 2, 1, 3]]
    await (env := opened("close")).reset()
    await env.close()
    for error in (refused.value, caught.value):
        assert error.env_index == (1,)
        assert any(ADVICE in note for note in error.__notes__)
    assert capfd.readouterr().err.count(ADVICE) == 1


ADVICE = 'use AsyncParallelEnv, with processes or backend="thread", or SerialEnv'
