"""`send` and `recv`: whoever is ready first is served first."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faces import ASYNC_FACES, FACES, PROCESS_FACES, THREAD_FACES, Face, acting, in_thread, masked, observed
from failing_envs import CountingEnv, Gate, Scribbler, abort_with_words, kill_itself, numbered, raise_value_error
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, SerialEnv
from aioenvs.engine.pools import host as hosts
from aioenvs.errors import (
    AioEnvsError,
    ClosedError,
    ConcurrencyError,
    ProtocolError,
    ResetNeededError,
    SpecMismatchError,
    WorkerDiedError,
    WorkerTimeoutError,
)

WAITING = [*PROCESS_FACES, *THREAD_FACES]  # whose envs work while their caller does something else


def over(faces: Sequence[Face]) -> Any:
    return pytest.mark.parametrize("face", faces, ids=lambda face: face.name)


over_waiting = over(WAITING)
over_waiting_async = over([face for face in WAITING if face.is_async])
over_async = over(ASYNC_FACES)


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[list[Gate]]:
    with contextlib.ExitStack() as stack:
        folders = [tmp_path / str(number) for number in range(3)]
        for folder in folders:
            folder.mkdir()
        yield [stack.enter_context(Gate(folder)) for folder in folders]


def sending(actions: dict[int, int], **entries: Any) -> TensorDict:
    """Actions for some envs, which are named."""
    entries = {"action": torch.tensor([*actions.values()]), "env_index": torch.tensor([*actions]), **entries}
    return TensorDict(entries, [len(actions)])


async def send(env: Any, td: TensorDictBase, **options: Any) -> None:
    """Send with either kind of face."""
    if asyncio.iscoroutinefunction(env.step):
        env.send(td, **options)
    else:
        await in_thread(env.send, td, **options)


async def recv(env: Any, *args: Any, **kwargs: Any) -> tuple[TensorDictBase, TensorDictBase]:
    """Receive with either kind of face."""
    if asyncio.iscoroutinefunction(env.recv):
        result = await env.recv(*args, **kwargs)
    else:
        result = await in_thread(env.recv, *args, **kwargs)
    return result  # type: ignore[no-any-return]


async def reset(env: Any, *args: Any) -> TensorDictBase:
    if asyncio.iscoroutinefunction(env.reset):
        return await env.reset(*args)  # type: ignore[no-any-return]
    return await in_thread(env.reset, *args)  # type: ignore[no-any-return]


def by_env(received: tuple[TensorDictBase, TensorDictBase]) -> dict[int, list[int]]:
    """What each env observed, in the order in which they answered."""
    td, following = received
    assert following["env_index"].tolist() == td["env_index"].tolist()
    return dict(zip(td["env_index"].tolist(), observed(td), strict=True))


async def envs_of(env: Any, *args: Any, **kwargs: Any) -> list[int]:
    return list(by_env(await recv(env, *args, **kwargs)))


async def everything(env: Any) -> None:
    """Receive until nothing is outstanding, or something has failed."""
    while env.outstanding:
        await recv(env, len(env.outstanding))


async def sent_and_received(env: Any, td: TensorDictBase) -> None:
    await send(env, td)
    await everything(env)


async def steps_taken(env: Any) -> list[int]:
    """How many steps of its episode each env has taken."""
    method = env.get_attr
    steps = await method("steps") if asyncio.iscoroutinefunction(method) else await in_thread(method, "steps")
    return list(steps)


# -- who comes first --------------------------------------------------------------------------------------


@over([face for face in WAITING if face.processes != 2])
async def test_results_come_in_the_order_in_which_envs_are_done(face: Face, gates: list[Gate]) -> None:
    each = {env: {"fault": gates[env].wait, "at": (1, 1)} for env in (0, 1)}
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3, each), num_processes=3) as env:
        await reset(env)
        await send(env, acting([5, 6, 7]))
        assert env.outstanding == (0, 1, 2)
        for first in (2, 1, 0):
            if first < 2:
                gates[first].open()
            td, following = await recv(env)
            assert by_env((td, following)) == {first: [first, 1, 1, 5 + first]}
            assert td.batch_size == following.batch_size == (1,)
            assert td["action"].tolist() == [5 + first]
            assert td["env_index"].dtype is torch.int64
            assert following["observation"].tolist() == observed(td)
            assert "next" not in following
        assert env.outstanding == ()


@over([face for face in WAITING if face.processes == 2])
async def test_a_slow_env_holds_back_those_behind_it_in_its_process(face: Face, gate: Gate) -> None:
    kwargs = numbered(4, {0: {"fault": gate.wait, "at": (1, 1)}, 3: {"fault": gate.wait, "at": (1, 2)}})
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs) as env:
        await reset(env)
        await send(env, acting([1, 2, 3, 4]))
        assert sorted(await envs_of(env, 2)) == [2, 3]
        assert env.outstanding == (0, 1)
        gate.open()
        assert await envs_of(env, 2) == [0, 1]
        await send(env, acting([1, 2, 3, 4]))
        assert sorted(await envs_of(env, 3)) == [0, 1, 2]
        gate.open()
        assert await envs_of(env) == [3]


async def test_it_goes_on_for_many_steps(face: Face) -> None:
    """Every action comes once, in its episode, whoever is first."""
    count, length = 4, 5
    async with face.open(count, CountingEnv, create_env_kwargs=numbered(count, length=length)) as env:
        await send(env, (await reset(env)).set("action", torch.ones(count, dtype=torch.int64)))
        steps, episodes, totals = [0] * count, [1] * count, [0] * count
        for _ in range(40):
            td, following = await recv(env)
            for row, number in enumerate(td["env_index"].tolist()):
                steps[number] += 1
                totals[number] += int(td["action"][row])
                assert observed(td)[row] == [number, episodes[number], steps[number], totals[number]]
                over = steps[number] == length
                assert bool(td["next", "done"][row]) == bool(td["next", "terminated"][row]) == over
                if over:
                    steps[number], totals[number], episodes[number] = 0, 0, episodes[number] + 1
                expected = [number, episodes[number], steps[number], totals[number]]
                assert following["observation"][row].tolist() == expected
                assert not following["done"][row]
            await send(env, following.set("action", following["observation"][:, 2] + 1))


# -- which envs -------------------------------------------------------------------------------------------


async def test_indices_count_within_the_whole(face: Face) -> None:
    async with face.open(6, CountingEnv, create_env_kwargs=numbered(6)) as env:
        await reset(env)
        view, single = env[2:5], env[5]
        await send(view, acting([12, 13, 14]))
        assert view.outstanding == env.outstanding == (2, 3, 4)
        assert by_env(await recv(env, 3)) == {number: [number, 1, 1, 10 + number] for number in (2, 3, 4)}
        await send(view, sending({4: 24, 2: 22}))
        assert env.outstanding == (4, 2)
        await send(single, acting([25]))
        await send(env, sending({1: 21, 0: 20}))
        assert (view.outstanding, single.outstanding) == ((4, 2), (5,))
        assert by_env(await recv(single)) == {5: [5, 1, 1, 25]}
        assert by_env(await recv(view, 2)) == {2: [2, 1, 2, 34], 4: [4, 1, 2, 38]}
        assert by_env(await recv(env, 2)) == {0: [0, 1, 1, 20], 1: [1, 1, 1, 21]}
        backwards = env[[3, 0]]
        await send(backwards, acting([33, 30]))
        assert backwards.outstanding == (3, 0)
        assert by_env(await recv(backwards, 2)) == {3: [3, 1, 2, 46], 0: [0, 1, 2, 50]}


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
async def test_any_integers_name_envs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    async with AsyncSerialEnv(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await env.reset()
        env.send(sending({0: 1, 2: 3}, env_index=torch.tensor([0, 2], dtype=dtype).reshape(shape)))
        assert by_env(await env.recv(2)) == {0: [0, 1, 1, 1], 2: [2, 1, 1, 3]}


BAD: list[tuple[Any, type[Exception], str]] = [
    (sending({0: 1, 4: 1}), ValueError, "names env 4, but there are only envs 0-3"),
    (sending({0: 1, -1: 1}), ValueError, "names env -1"),
    (sending({0: 1, 1: 1}, env_index=torch.tensor([1, 1])), ValueError, "names an env twice"),
    (sending({0: 1, 1: 1}, env_index=torch.tensor([0.0, 1.0])), TypeError, "tensor of integers"),
    (sending({0: 1, 1: 1}, env_index=torch.tensor([True, False])), TypeError, "tensor of integers"),
    (sending({0: 1, 1: 1}, env_index=torch.tensor([[0, 1], [0, 1]])), ValueError, "one env per row"),
    (
        sending({0: 1}, env_index=torch.tensor([[[0]], [[1]]])[:1]).set("_step", torch.tensor([True])),
        ValueError,
        "_step",
    ),
    (TensorDict({"action": torch.ones(2, dtype=torch.int64)}, [2]), RuntimeError, "batch.size"),
    (sending({0: 1, 1: 1}, _step=torch.tensor([True, True])), ValueError, "found a mask at '_step'"),
    (sending({0: 1, 1: 1}, _step=torch.tensor([False, True])), ValueError, "found a mask at '_step'"),
    (sending({0: 1, 1: 1}).exclude("action"), SpecMismatchError, "a value for every env"),
    (sending({0: 1, 1: 1}, action=torch.full((2,), 0.5)), SpecMismatchError, "dtype"),
    (sending({0: 1, 1: 1}, action=torch.ones(2, 1, dtype=torch.int64)), SpecMismatchError, "shape"),
    (sending({0: 1, 1: 1000}), SpecMismatchError, "integers from 0 to 999"),
    (sending({0: 1, 1: 1}, next=torch.ones(2)), TypeError, "'next'"),
    ({"action": torch.ones(4)}, TypeError, "expected a TensorDict"),
    (None, TypeError, "expected a TensorDict"),
]


@over(FACES)
async def test_what_cannot_be_sent_is_not_sent_at_all(face: Face) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4)) as env:
        await reset(env)
        for td, error, words in BAD:
            with pytest.raises(error, match=words):
                await send(env, td)
            assert env.outstanding == ()
        with pytest.raises(ValueError, match="names env 0, but there are only envs 1-2"):
            await send(env[1:3], sending({0: 1}))
        assert await steps_taken(env) == [0] * 4


async def test_before_the_start() -> None:
    for env in (AsyncSerialEnv(2, CountingEnv), SerialEnv(2, CountingEnv), AsyncParallelEnv(2, CountingEnv)):
        assert env.outstanding == ()
        with pytest.raises(AioEnvsError, match="reset\\(\\) comes first"):
            await send(env, acting([1, 1]))
        with pytest.raises(AioEnvsError, match="is not running"):
            await recv(env)


async def test_before_the_first_reset(face: Face) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await send(env, acting([1, 1]))
        assert by_env(await recv(env, 2)) == {0: [0, 0, 1, 1], 1: [1, 0, 1, 1]}


# -- how many, and how long -------------------------------------------------------------------------------


@over_waiting
async def test_how_many_come(face: Face, gate: Gate) -> None:
    kwargs = numbered(5, {4: {"fault": gate.wait, "at": (1, 1)}})
    async with face.open(5, CountingEnv, create_env_kwargs=kwargs, num_processes=5) as env:
        await reset(env)
        await send(env, acting([1] * 5))
        first = await envs_of(env, 2, 2)
        second = await envs_of(env, 2)
        assert len(first) == 2
        assert sorted(first + second) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="min_get=2 steps can never come, since only 1, of env 4, are outstanding"):
            await recv(env, 2)
        gate.open()
        assert await envs_of(env, min_get=1, max_get=5) == [4]
        with pytest.raises(ValueError, match="min_get=1 steps can never come, since none is outstanding"):
            await recv(env)


@pytest.mark.parametrize("numbers", [(0,), (-1,), (1.0,), ("1",), (2, 1), (1, 0), (1, 1.5)])
async def test_numbers_that_make_no_sense(face: Face, numbers: Any) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await reset(env)
        await send(env, acting([1, 1]))
        with pytest.raises(ValueError, match="expected 1 <= min_get <= max_get, found min_get="):
            await recv(env, *numbers)
        assert sorted(await envs_of(env, 2)) == [0, 1]


@over_waiting
async def test_a_timeout_bounds_the_whole_call_and_loses_nothing(face: Face, gate: Gate) -> None:
    kwargs = numbered(3, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with face.open(3, CountingEnv, create_env_kwargs=kwargs, num_processes=3) as env:
        await reset(env)
        await send(env, acting([1, 2, 3]))
        await gate.arrival()
        with pytest.raises(WorkerTimeoutError, match=r"recv: .* within 0\.2 s \(timeout\).* can still be") as caught:
            await recv(env, 3, timeout=0.2)
        assert caught.value.env_index == (1,)
        assert caught.value.pid is None
        assert env.outstanding == (0, 1, 2)
        with pytest.raises(WorkerTimeoutError):
            await recv(env, 3, timeout=0)
        assert sorted(await envs_of(env, 1, timeout=0)) == [0, 2]
        with pytest.raises(WorkerTimeoutError, match="1 more of env 1"):
            await recv(env, timeout=0)
        gate.open()
        assert by_env(await recv(env, timeout=60)) == {1: [1, 1, 1, 2]}


@over([face for face in PROCESS_FACES if not face.is_async])
async def test_a_poll_sees_what_has_come_while_nobody_looked(face: Face, gate: Gate) -> None:
    """Where no loop runs between two calls, an answer waits in the pipe."""
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1) as env:
        await reset(env)
        await send(env, sending({0: 1}))
        pid = env.pids[0]
        await asleep(pid)
        assert await envs_of(env, timeout=0) == [0]


async def asleep(pid: int) -> None:
    """Wait until a worker waits for its next command."""
    import psutil

    process, quiet = psutil.Process(pid), 0
    while quiet < 20:
        quiet = quiet + 1 if process.status() == "sleeping" else 0
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
async def test_a_timeout_that_is_none(face: Face, timeout: Any) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await reset(env)
        with pytest.raises(ValueError, match="expected timeout to be a number of seconds"):
            await send(env, acting([1, 1]), timeout=timeout)
        await send(env, acting([1, 1]))
        with pytest.raises(ValueError, match="expected timeout to be a number of seconds"):
            await recv(env, timeout=timeout)
        assert by_env(await recv(env, 2)) == {0: [0, 1, 1, 1], 1: [1, 1, 1, 1]}


# -- busy -------------------------------------------------------------------------------------------------


async def test_a_busy_env_is_refused_and_nobody_steps(face: Face) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4)) as env:
        await reset(env)
        await send(env, sending({1: 5}))
        with pytest.raises(ConcurrencyError, match=r"asked of env 1 while send .* is still pending there"):
            await send(env, acting([7] * 4))
        with pytest.raises(ConcurrencyError, match="env 1"):
            await send(env, sending({0: 7, 1: 7}))
        await send(env, sending({0: 1, 2: 1, 3: 1}))
        results = by_env(await recv(env, 4))
        assert results == {0: [0, 1, 1, 1], 1: [1, 1, 1, 5], 2: [2, 1, 1, 1], 3: [3, 1, 1, 1]}


@pytest.mark.parametrize("command", ["step", "step_and_maybe_reset", "reset", "set_seed", "call", "get_attr"])
async def test_commands_are_refused_until_it_was_received(face: Face, command: str) -> None:
    arguments: Any = {"reset": (), "set_seed": (1,), "call": ("render",), "get_attr": ("steps",)}
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await reset(env)
        await send(env, sending({1: 5}))
        with pytest.raises(ConcurrencyError, match=f"{command.replace('_attr', '')}.* env 1 while send"):
            await face.call(getattr(env, command), *arguments.get(command, (acting([1] * 3),)))
        assert env.outstanding == (1,)
        td = await face.call(env.step, acting([3] * 3, only=[0, 2]))
        assert [observed(td)[number] for number in (0, 2)] == [[0, 1, 1, 3], [2, 1, 1, 3]]
        assert observed(await face.call(env[0:1].step, acting([4]))) == [[0, 1, 2, 7]]
        assert by_env(await recv(env)) == {1: [1, 1, 1, 5]}
        assert observed(await face.call(env.step, acting([0] * 3))) == [[0, 1, 3, 7], [1, 1, 2, 5], [2, 1, 2, 3]]


@over_waiting_async
async def test_two_receive_at_once(face: Face, gate: Gate) -> None:
    kwargs = numbered(4, {env: {"fault": gate.wait, "at": (1, 1)} for env in (0, 3)})
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs, num_processes=4) as env:
        await env.reset()
        env.send(acting([1] * 4))
        low, high = env[:2], env[2:]
        first, second = (asyncio.create_task(view.recv(2)) for view in (low, high))
        await gate.arrival()
        await gate.arrival()
        for busy in (env, low, env[[1, 2]], env[3]):
            with pytest.raises(ConcurrencyError, match="another recv"):
                await busy.recv()
        gate.open(2)
        assert sorted(by_env(await first)) == [0, 1]
        assert sorted(by_env(await second)) == [2, 3]
        assert env.outstanding == ()


# -- what belongs to whom ---------------------------------------------------------------------------------


async def test_nothing_is_shared(face: Face) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        given = (await reset(env)).set("action", torch.tensor([1, 2])).set("note", torch.tensor([[5], [6]]))
        await send(env, given)
        assert "next" not in given
        given["action"].fill_(9)
        given["note"].fill_(9)
        given["observation"].fill_(9)
        td, following = await recv(env, 2)
        td, following = (each[each["env_index"].argsort()] for each in (td, following))
        kept = td.clone(), following.clone()
        assert td["action"].tolist() == [1, 2]
        assert td["note"].tolist() == following["note"].tolist() == [[5], [6]]
        assert td["observation"].tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]
        assert observed(td) == [[0, 1, 1, 1], [1, 1, 1, 2]]
        await send(env, following.set("action", torch.tensor([3, 4])))
        again, _ = await recv(env, 2)
        assert sorted(observed(again)) == [[0, 1, 2, 4], [1, 1, 2, 6]]
        assert (td == kept[0]).all()
        assert (following.exclude("action") == kept[1].exclude("action")).all()
        td["next", "observation"].fill_(8)
        assert sorted(observed(again)) == [[0, 1, 2, 4], [1, 1, 2, 6]]


@over_waiting_async
async def test_what_is_sent_to_a_draining_env_may_be_changed_at_once(face: Face, gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with face.open(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([1, 2])))
        await gate.arrival()
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        td = acting([10, 20])
        env.send(td)
        td["action"].fill_(999)
        with pytest.raises(WorkerTimeoutError):
            await env.recv(2, timeout=0)
        gate.open()
        assert by_env(await env.recv(2)) == {0: [0, 1, 2, 11], 1: [1, 1, 2, 22]}


async def test_statistics(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3, length=2)) as env:
        await reset(env)
        for _ in range(3):
            await send(env, sending({0: 1, 2: 1}))
            assert env.statistics().states == ("busy", "idle", "busy")
            await recv(env, 2)
        statistics = env.statistics()
        assert statistics.states == ("idle",) * 3
        assert statistics.steps == (3, 0, 3)
        assert statistics.episodes == (1, 0, 1)
        assert max(statistics.max_step_seconds) > 0


# -- failures ---------------------------------------------------------------------------------------------


async def test_an_env_that_raises(face: Face) -> None:
    kwargs = numbered(4, {env: {"fault": raise_value_error, "at": (1, 1)} for env in (1, 2)})
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs) as env:
        await reset(env)
        await send(env, acting([1] * 4))
        failed: list[int] = []
        while len(failed) < 2:
            with pytest.raises(ValueError, match="the reactor is hot") as caught:
                await recv(env, len(env.outstanding))
            failed += caught.value.env_index  # type: ignore[attr-defined]
        assert sorted(failed) == [1, 2]
        assert sorted(env.outstanding) == [0, 3]
        assert by_env(await recv(env, 2)) == {0: [0, 1, 1, 1], 3: [3, 1, 1, 1]}
        await send(env, sending({1: 5}))
        with pytest.raises(ResetNeededError) as needed:
            await recv(env)
        assert needed.value.env_index == (1,)  # type: ignore[attr-defined]
        await reset(env[1])
        await send(env, sending({0: 2, 1: 3}))
        assert by_env(await recv(env, 2)) == {0: [0, 1, 2, 3], 1: [1, 2, 1, 3]}
        await reset(env, masked("_reset", 4, [2]))
        await send(env[2], acting([6]))
        assert by_env(await recv(env[2])) == {2: [2, 2, 1, 6]}


@over(PROCESS_FACES)
@pytest.mark.parametrize("fault", [kill_itself, abort_with_words])
async def test_a_worker_that_dies(face: Face, fault: Any) -> None:
    kwargs = numbered(4, {1: {"fault": fault, "at": (1, 2)}})
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs) as env:
        await reset(env)
        await send(env, acting([1] * 4))
        assert len(await envs_of(env, 4)) == 4
        await send(env, acting([1] * 4))
        with pytest.raises(WorkerDiedError) as caught:
            await everything(env)
        family = [0, 1] if face.processes == 2 else [1]
        assert list(caught.value.env_index) == family
        assert 1 not in env.outstanding
        rest = await envs_of(env, len(env.outstanding))
        assert set(rest) >= {2, 3}
        with pytest.raises(WorkerDiedError):
            await send(env, sending({1: 1, 2: 1}))
        assert env.outstanding == ()
        await reset(env[family])
        await send(env, acting([1] * 4))
        results = by_env(await recv(env, 4))
        assert [results[number][2] for number in (2, 3)] == [3, 3]
        assert results[1] == [1, 1, 1, 1]


@over(PROCESS_FACES)
async def test_an_idle_worker_that_dies(face: Face) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4)) as env:
        await reset(env)
        os.kill(env.pids[-1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
            await sent_and_received(env, acting([1] * 4))
        assert 3 in caught.value.env_index
        if env.outstanding:
            await recv(env, len(env.outstanding))
        await reset(env)
        await send(env, acting([1] * 4))
        assert len(await envs_of(env, 4)) == 4


@over([face for face in PROCESS_FACES if face.processes == 2])
async def test_what_is_too_large_for_one_env_is_sent_to_none(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    async with face.open(4, Scribbler, num_processes=4) as env:
        await reset(env)
        monkeypatch.setattr(hosts, "MAX_BODY", 1000)
        actions = [[1], [2], [3] * 2000, [4]]
        td = TensorDict({"action": NonTensorStack(*map(NonTensorData, actions))}, [4])
        with pytest.raises(ProtocolError, match=r"env 2 would be sent .* bytes, more than 1000; nothing was sent"):
            await send(env, td)
        assert env.outstanding == ()
        with pytest.raises(ProtocolError, match="nothing was sent"):
            await face.call(env.step, td)
        assert await steps_taken(env) == [0] * 4


@over([face for face in PROCESS_FACES if face.processes == 2])
async def test_each_failure_names_its_own_envs(face: Face) -> None:
    """Also where one failed restart is that of several envs."""
    kwargs = numbered(4, {1: {"fault": kill_itself, "at": (1, 1)}, 2: {"fault": raise_value_error, "at": (1, 1)}})
    options = {"on_worker_death": "restart", "max_restarts": 0}
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs, **options) as env:
        await reset(env)
        await send(env, acting([1] * 4))
        left, failures = set(env.outstanding), []
        while env.outstanding:
            try:
                received = await envs_of(env, len(env.outstanding))
            except (WorkerDiedError, ValueError) as error:
                failures.append((left - set(env.outstanding), set(error.env_index)))  # type: ignore[union-attr]
            else:
                assert 3 in received
            left = set(env.outstanding)
        assert all(gone <= named for gone, named in failures)
        assert set[int]().union(*(gone for gone, _ in failures)) >= {1, 2}


async def test_no_two_callers_share_the_error_of_a_restart() -> None:
    options: Any = {"on_worker_death": "restart", "max_restarts": 0, "num_processes": 1}
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), **options) as env:
        await env.reset()
        os.kill(env.pids[0], signal.SIGKILL)
        steps = (env[number].step(acting([1])) for number in range(2))
        one, other = await asyncio.gather(*steps, return_exceptions=True)
        assert isinstance(one, WorkerDiedError)
        assert one is not other
        assert str(one) == str(other)
        assert one.__notes__ == other.__notes__  # type: ignore[union-attr]
        assert "max_restarts=0" in one.__notes__[0]


@over(PROCESS_FACES)
async def test_a_worker_that_is_restarted(face: Face) -> None:
    kwargs = numbered(4, {1: {"fault": kill_itself, "at": (1, 2)}})
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs, on_worker_death="restart") as env:
        await reset(env)
        await send(env, acting([1] * 4))
        td, following = await recv(env, 4)
        await send(env, following.set("action", following["env_index"]))
        rows: dict[int, tuple[Any, Any]] = {}
        while env.outstanding:
            td, following = await recv(env)
            rows |= {int(number): (td[row], following[row]) for row, number in enumerate(td["env_index"])}
        lost, root = rows[1]
        assert lost["next", "observation"].tolist() == [1, 1, 1, 1]  # what was known
        flags = [bool(lost["next", name]) for name in ("done", "terminated", "truncated")]
        assert flags == [True, False, True]
        assert float(lost["next", "reward"]) == 0
        assert root["observation"].tolist() == [1, 1, 0, 0]
        for number in (2, 3):
            assert rows[number][0]["next", "observation"].tolist() == [number, 1, 2, 1 + number]
        await send(env, acting([5] * 4))
        assert by_env(await recv(env, 4))[1] == [1, 1, 1, 5]


@over_waiting
@pytest.mark.parametrize("by", ["step_timeout", "timeout"])
async def test_an_env_that_is_late(face: Face, gate: Gate, by: str) -> None:
    kwargs = numbered(3, {1: {"fault": gate.wait, "at": (1, 1)}})
    limits = {"step_timeout": 0.3} if by == "step_timeout" else {"step_timeout": 60}
    async with face.open(3, CountingEnv, create_env_kwargs=kwargs, num_processes=3, **limits) as env:
        await reset(env)
        await send(env, acting([1, 2, 3]), **({"timeout": 0.3} if by == "timeout" else {}))
        with pytest.raises(WorkerTimeoutError, match=rf"env 1.* did not answer send within 0\.3 s \({by}\)") as caught:
            await recv(env, 3)
        assert caught.value.env_index == (1,)
        assert sorted(await envs_of(env, 2)) == [0, 2]
        assert env.outstanding == ()
        assert env.statistics().states == ("idle", "draining", "idle")
        await send(env, sending({1: 20}), timeout=60)  # waits for the late answer, which is dropped
        with pytest.raises(WorkerTimeoutError, match="recv"):
            await recv(env, timeout=0)
        gate.open()
        assert by_env(await recv(env)) == {1: [1, 1, 2, 22]}


@over([face for face in WAITING if not face.is_async])
async def test_time_stands_still_between_calls(face: Face) -> None:
    """An env that answers while nobody looks is not late."""
    kwargs = numbered(2)
    async with face.open(2, CountingEnv, create_env_kwargs=kwargs, step_timeout=0.2) as env:
        await reset(env)
        await send(env, acting([1, 2]))
        await asyncio.sleep(0.4)  # a learner's step: longer than that of an env may be
        assert by_env(await recv(env, 2)) == {0: [0, 1, 1, 1], 1: [1, 1, 1, 2]}


@over_waiting_async
@pytest.mark.parametrize("command", ["send", "step", "reset"])
async def test_an_answer_that_came_while_the_loop_was_blocked_is_in_time(face: Face, command: str) -> None:
    import time

    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2), step_timeout=0.2) as env:
        await env.reset()
        if command == "send":
            env.send(acting([1, 2]))
            task = asyncio.create_task(env.recv(2))
        else:
            task = asyncio.create_task(env.step(acting([1, 2])) if command == "step" else env.reset())
        for _ in range(3):
            await asyncio.sleep(0)
        time.sleep(0.4)  # noqa: ASYNC251 - as a policy does
        result = await task
        rows = observed(result[0] if command == "send" else result)
        assert sorted(rows) == ([[0, 2, 0, 0], [1, 2, 0, 0]] if command == "reset" else [[0, 1, 1, 1], [1, 1, 1, 2]])


@over_waiting_async
async def test_an_interrupted_step_drains_before_what_is_sent(face: Face, gate: Gate) -> None:
    kwargs = numbered(2, {0: {"fault": gate.wait, "at": (1, 1)}})
    async with face.open(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([1, 2])))
        await gate.arrival()
        stepping.cancel()
        await asyncio.wait([stepping])
        env.send(acting([10, 20]))
        assert env.outstanding == (0, 1)
        with pytest.raises(ConcurrencyError):
            env.send(sending({0: 1}))
        gate.open()
        assert by_env(await env.recv(2)) == {0: [0, 1, 2, 11], 1: [1, 1, 2, 22]}


# -- given up ---------------------------------------------------------------------------------------------


@over_async
async def test_a_recv_that_is_cancelled_at_any_turn_loses_nothing(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await env.reset()
        for turns in range(60):
            env.send(acting([1, 2, 3]))
            task = asyncio.create_task(env.recv(2))
            for _ in range(turns):
                await asyncio.sleep(0)
            in_time = task.cancel()
            await asyncio.wait([task])
            received = {} if task.cancelled() else by_env(task.result())
            while env.outstanding:
                received |= by_env(await env.recv(len(env.outstanding)))
            step = turns + 1
            assert received == {number: [number, 1, step, step * (number + 1)] for number in range(3)}
            if not in_time:
                break


@over_waiting_async
@pytest.mark.parametrize("end", ["close", "cancelled close", "discard"])
async def test_closed_while_envs_work(face: Face, gate: Gate, end: str, caplog: pytest.LogCaptureFixture) -> None:
    kwargs = numbered(3, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with face.open(3, CountingEnv, create_env_kwargs=kwargs, num_processes=3, close_timeout=0.3) as env:
        await env.reset()
        env.send(acting([1] * 3))
        await gate.arrival()
        receiving = asyncio.create_task(env.recv(3))
        await asyncio.sleep(0)
        if end == "discard":
            env._discard()
        else:
            closing = asyncio.create_task(env.close())
            await asyncio.sleep(0)
            if end == "cancelled close":
                closing.cancel()
            await asyncio.wait([closing])
        with pytest.raises(ClosedError):
            await receiving
        assert env.outstanding == ()
        gate.open()
        with pytest.raises(AioEnvsError, match="not running"):
            await env.recv()
        with pytest.raises(AioEnvsError, match="not running"):
            env.send(acting([1] * 3))
        await env.reset()
        env.send(acting([4] * 3))
        gate.open()
        assert by_env(await env.recv(3)) == {number: [number, 1, 1, 4] for number in range(3)}
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_closed_with_results_that_nobody_received(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await reset(env)
        await send(env, acting([1] * 3))
        await recv(env, 1, 1)
        await face.call(env.close)
        assert env.outstanding == ()
        assert observed(await reset(env)) == [[number, 1, 0, 0] for number in range(3)]
        await send(env, acting([2] * 3))
        assert by_env(await recv(env, 3)) == {number: [number, 1, 1, 2] for number in range(3)}


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize(
    "options", [{"num_processes": 2}, {"backend": "thread"}, None], ids=["process", "thread", "serial"]
)
def test_a_loop_that_is_closed_over_them(options: Any, turns: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is told of tasks that were not his own."""

    def envs() -> Any:
        kwargs = numbered(2)
        if options is None:
            return AsyncSerialEnv(2, CountingEnv, create_env_kwargs=kwargs)
        return AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, **options)

    async def begin(env: Any) -> None:
        await env.reset()
        env.send(acting([1, 2]))
        for _ in range(turns):
            await asyncio.sleep(0)

    async def end(env: Any) -> list[list[int]]:
        await env.close(raise_if_closed=False)
        rows = observed(await env.reset())
        await env.close()
        return rows

    for cancels in (False, True):
        env, loop = envs(), asyncio.new_event_loop()
        loop.run_until_complete(begin(env))
        if cancels:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert asyncio.run(end(env)) == [[0, 1, 0, 0], [1, 1, 0, 0]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of the pipes, which the loop was closed over as well
            del env, loop
            gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@over_async
async def test_forgotten_while_envs_work(face: Face, caplog: pytest.LogCaptureFixture) -> None:
    env = face.make(2, CountingEnv, create_env_kwargs=numbered(2))
    await env.reset()
    env.send(acting([1, 2]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del env
        gc.collect()
        for _ in range(3):
            await asyncio.sleep(0)
    assert any("was never closed" in str(each.message) for each in caught)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# -- patterns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_processes": 4}, {"backend": "thread", "num_processes": 8}], ids=str)
async def test_a_loop_for_each_env(options: Any) -> None:
    count, steps = 256, 6

    async def drive(view: Any, number: int) -> list[list[int]]:
        rows = []
        td = await view.reset()
        for _ in range(steps):
            td, following = await view.step_and_maybe_reset(td.set("action", torch.tensor([number])))
            rows += observed(td)
            td = following
        return rows

    kwargs = numbered(count, length=4)
    async with AsyncParallelEnv(count, CountingEnv, create_env_kwargs=kwargs, **options) as env:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(drive(env[number], number)) for number in range(count)]
        course = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)]
        for number, task in enumerate(tasks):
            assert task.result() == [[number, episode, step, step * number] for episode, step in course]
        assert env.statistics().steps == (steps,) * count


@over_waiting_async
async def test_waiting_for_whichever_view_is_first(face: Face, gates: list[Gate]) -> None:
    each = {env: {"fault": gates[env].wait, "at": (1, 1)} for env in (0, 1, 2)}
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3, each), num_processes=3) as env:
        await env.reset()
        env.send(acting([1, 2, 3]))
        waiting = {asyncio.create_task(env[number].recv()) for number in range(3)}
        for number in (1, 0, 2):
            gates[number].open()
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            (task,) = done
            assert by_env(task.result()) == {number: [number, 1, 1, number + 1]}
