"""Results on their way to a device that is made up: in which order, in how few copies, and what is left behind."""

import asyncio
import copy
import pickle
import warnings
from typing import Any

import gymnasium as gym
import pytest
import torch
from device_backends import FakeBackend, counting, waited_for, watchmen_gone
from faces import ASYNC_FACES, Face, acting, in_thread, masked, observed
from failing_envs import CountingEnv, failing_factory, numbered
from space_envs import EveryDtype
from tensordict import TensorDictBase
from test_death import kill_and_reap
from test_restarts import RESTART, kill_and_wait
from torch_batches import differing

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.engine.config import Timeouts
from aioenvs.engine.pools import restart_policy as restarts
from aioenvs.errors import (
    AioEnvsError,
    ClosedError,
    ConcurrencyError,
    PerformanceWarning,
    WorkerDiedError,
    WorkerTimeoutError,
)
from aioenvs.tensors.device import (
    MAX_TWINS,
    StagedBackend,
    Transfer,
    backend_of,
    bytes_of,
    checked_device,
    require_device,
)
from aioenvs.testing import CountingEnv as TorchCountingEnv
from aioenvs.testing import DynamicShapeEnv, HeterogeneousCountingEnv, NestedCountingEnv, NonTensorEnv

over_classes = pytest.mark.parametrize("cls", [AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv])
over_async_faces = pytest.mark.parametrize("face", ASYNC_FACES, ids=lambda face: face.name)


def steps(td: TensorDictBase) -> list[int]:
    return [row[2] for row in observed(td)]


# -- values ---------------------------------------------------------------------------------------------


async def test_values_are_those_of_the_host(face: Face) -> None:
    rows: dict[bool, list[Any]] = {}
    for crosses in (False, True):
        backend = FakeBackend() if crosses else None
        kwargs = numbered(4, {1: {"length": 3}, 2: {"length": 2}})
        async with face.open(4, CountingEnv, create_env_kwargs=kwargs, device=backend or "cpu") as env:
            own = rows[crosses] = [await face.call(env.reset)]
            for step in range(9):
                own += await face.call(env.step_and_maybe_reset, acting([step, 1, 2, 3]))
            own.append(await face.call(env.step, acting([1, 1, 1, 1])))
            own.append(await face.call(env.reset, masked("_reset", 4, [2])))
            own.append(await face.call(env.step, own[-1].clone().update(acting([1, 1, 1, 1], only=[0, 3]))))
            await face.call(env.send, acting([1, 1, 1, 1]))
            td, root = await face.call(env.recv, 4)
            order = td["env_index"].argsort()
            own += [td[order], root[order]]
            own += await face.call(env[1:3].step_and_maybe_reset, acting([1, 1]))
            own += await face.call(env[[3, 0]].step_and_maybe_reset, acting([1, 1]))
    for one, other in zip(rows[False], rows[True], strict=True):
        assert differing(one, other) == []


async def test_a_step_is_one_copy_to_the_device(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend, 3, {1: {"length": 2}}) as env:
        sizes = []
        for _ in range(4):
            before = len(backend.copies)
            await face.call(env.step_and_maybe_reset, acting([1, 1, 1]))
            sizes.append([each.nbytes for each in backend.copies[before:]])
            assert all(each.ordered for each in backend.copies)
        assert [len(own) for own in sizes] == [1] * 4
        assert sizes[0] == sizes[2] < sizes[1] == sizes[3]  # with the root where an episode ended
        for view in (env[:2], env[[2, 0]]):
            before = len(backend.copies)
            await face.call(view.step_and_maybe_reset, acting([1, 1]))
            assert len(backend.copies) == before + 1


@pytest.mark.parametrize(
    "make", [NestedCountingEnv, HeterogeneousCountingEnv, DynamicShapeEnv, NonTensorEnv, TorchCountingEnv]
)
@pytest.mark.parametrize("cls", [AsyncParallelEnv, AsyncSerialEnv])
@pytest.mark.slow
async def test_whatever_the_envs_are(cls: Any, make: Any) -> None:
    rows: dict[bool, list[Any]] = {}
    for crosses in (False, True):
        backend = FakeBackend()
        async with cls(3, make, device=backend if crosses else "cpu") as env:
            torch.manual_seed(0)
            root, rows[crosses] = await env.reset(), []
            for _ in range(5):
                before = len(backend.copies)
                td, root = await env.step_and_maybe_reset(env.rand_action(root))
                assert len(backend.copies) == before + crosses
                rows[crosses] += [td.clone(), root.clone()]
    for one, other in zip(rows[False], rows[True], strict=True):
        assert differing(one, other) == []


async def test_different_envs_are_one_copy_too() -> None:
    backend = FakeBackend()
    makes = [lambda: gym.make("CartPole-v1"), lambda: gym.make("Pendulum-v1")] * 2
    async with AsyncParallelEnv(4, makes, num_processes=2, device=backend) as env:
        root = await env.reset(seed=0)
        before = len(backend.copies)
        td, root = await env.step_and_maybe_reset(env.rand_action(root))
        assert len(backend.copies) == before + 1
        assert [part["observation"].shape for part in root.unbind(0)] == [(4,), (3,)] * 2
        assert (td[0]["next", "observation"] != 0).any()


@over_classes
async def test_every_dtype_both_ways(cls: Any) -> None:
    face = Face("async" if cls.__name__.startswith("Async") else "plain", cls, 0)
    backend = FakeBackend()
    env = cls(2, EveryDtype, device=backend)
    root = await face.call(env.reset)
    for _ in range(3):
        td = env.rand_action(root)
        for key in list(td["action"].keys()):
            backend.hold(td["action", key])
        before = len(backend.copies)
        actions = td["action"].clone()
        td, root = await face.call(env.step_and_maybe_reset, td)
        assert [each.kind for each in backend.copies[before:]] == ["out", "in"]
        expected = actions["flag"] + actions["size"].sum(-1) + actions["n"].sum(-1)
        torch.testing.assert_close(td["next", "reward"].flatten(), expected.float())
    assert {name: root[name].dtype for name in EveryDtype.DTYPES} == {
        name: getattr(torch, name) for name in EveryDtype.DTYPES
    }
    await face.call(env.close)


# -- order ----------------------------------------------------------------------------------------------


@over_async_faces
async def test_no_slot_is_written_while_a_copy_of_it_is_under_way(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend, 3) as env:
        backend.held = True
        first, _ = await env.step_and_maybe_reset(acting([1, 1, 1]))
        second, _ = await env.step_and_maybe_reset(acting([1, 1, 1]))  # the other slot
        copies = backend.under_way
        assert [each.ordered for each in copies] == [True, True]
        assert [each.waited for each in copies] == [0, 0]
        third = asyncio.ensure_future(env.step_and_maybe_reset(acting([1, 1, 1])))
        await waited_for(copies[0])
        assert not third.done()  # and this loop runs
        assert steps(first) == steps(second) == [0, 0, 0]  # nothing has arrived
        copies[0].release()
        td, _ = await third
        assert (steps(first), steps(second)) == ([1, 1, 1], [0, 0, 0])
        assert copies[1].waited == 0
        backend.release()
        assert (steps(second), steps(td)) == ([2, 2, 2], [3, 3, 3])


async def test_plain_calls_wait_as_well(face: Face, backend: FakeBackend) -> None:
    if face.is_async:
        pytest.skip("for the plain ones")
    async with counting(face, backend) as env:
        backend.held = True
        first = await face.call(env.step, acting([1, 1]))
        await face.call(env.step, acting([1, 1]))
        copy = backend.under_way[0]
        third = asyncio.ensure_future(face.call(env.step, acting([1, 1])))
        await waited_for(copy)
        assert not third.done()
        copy.release()
        await third
        backend.release()
        assert (steps(first), steps(await third)) == ([1, 1], [3, 3])


@over_async_faces
async def test_a_reset_and_a_view_wait_for_the_slot_too(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend, 3) as env:
        commands: list[Any] = [
            lambda: env.reset(masked("_reset", 3, [1])),
            lambda: env[1:2].step(acting([1])),
            lambda: _sent_and_received(env),
        ]
        for command in commands:
            before = await env.step_and_maybe_reset(acting([1, 1, 1]))
            backend.held = True
            first, _ = await env.step_and_maybe_reset(acting([1, 1, 1]))
            await env.step_and_maybe_reset(acting([1, 1, 1]))
            copy = backend.under_way[0]
            expected = [step + 1 for step in steps(before[0])]
            task = asyncio.ensure_future(command())
            await waited_for(copy)
            assert not task.done()
            copy.release()
            await task
            backend.release()
            assert steps(first) == expected


async def _sent_and_received(env: Any) -> Any:
    env.send(acting([1, 1, 1]))
    return await env.recv(3)


@over_async_faces
async def test_whoever_gives_up_waiting_leaves_nothing_behind(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.held = True
        first, _ = await env.step_and_maybe_reset(acting([1, 1]))
        await env.step_and_maybe_reset(acting([1, 1]))
        copy = backend.under_way[0]
        task = asyncio.ensure_future(env.step_and_maybe_reset(acting([9, 9])))
        await waited_for(copy)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = asyncio.ensure_future(env.step_and_maybe_reset(acting([1, 1])))
        await asyncio.sleep(0)
        assert not again.done()
        backend.release()
        td, _ = await again
        assert steps(first) == [1, 1]
        assert [row[2:] for row in observed(td)] == [[3, 3], [3, 3]]  # the cancelled one never went out


async def test_whoever_waits_too_long_leaves_the_slot_alone(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.held = True
        first = await face.call(env.step, acting([1, 1]))
        await face.call(env.step, acting([1, 1]))
        commands: list[Any] = [
            lambda limit: face.call(env.step, acting([9, 9]), timeout=limit),
            lambda limit: face.call(env[1:2].step_and_maybe_reset, acting([9]), timeout=limit),
            lambda limit: face.call(env.reset, timeout=limit),
            lambda limit: face.call(env.call, "close", timeout=limit),
            lambda limit: face.call(env.set_seed, 1, timeout=limit),
        ]
        for command in commands:
            with pytest.raises(WorkerTimeoutError, match=r"waited for a copy .* within 0.01 s \(timeout\)"):
                await command(0.01)
            assert not backend.copies[-1].done()
        backend.release()
        assert steps(first) == [1, 1]
        assert [row[2:] for row in observed(await face.call(env.step, acting([1, 1])))] == [[3, 3], [3, 3]]


async def test_a_deadline_for_every_step_counts_the_wait_too(process_face: Face, backend: FakeBackend) -> None:
    face = process_face
    async with counting(face, backend, step_timeout=20) as env:
        backend.held = True
        for _ in range(2):
            await face.call(env.step, acting([1, 1]))
        with pytest.raises(WorkerTimeoutError, match=r"within 0.01 s \(timeout\)") as caught:
            await face.call(env.step, acting([1, 1]), timeout=0.01)
        assert caught.value.env_index == (0, 1)
        third = asyncio.ensure_future(face.call(env.step, acting([1, 1])))
        await waited_for(backend.copies[-2])
        backend.release()
        assert steps(await third) == [3, 3]


async def test_restarted_envs_are_not_killed_for_a_device(process_face: Face, backend: FakeBackend) -> None:
    face = process_face
    async with counting(face, backend, **RESTART) as env:
        backend.held = True
        for _ in range(2):
            await face.call(env.step, acting([1, 1]))
        pids = env.pids
        with pytest.raises(WorkerTimeoutError, match="waited for a copy"):
            await face.call(env.step, acting([1, 1]), timeout=0.01)
        backend.release()
        assert steps(await face.call(env.step, acting([1, 1]))) == [3, 3]
        assert env.pids == pids


async def test_nobody_receives_what_is_on_its_way_to_somebody_else(backend: FakeBackend) -> None:
    async with AsyncSerialEnv(2, CountingEnv, device=backend, non_blocking=False) as env:
        env.send(env.rand_action(await env.reset()))
        backend.held = True
        receiving = asyncio.ensure_future(env.recv(2))
        copy = await in_thread(backend.next_held)
        await waited_for(copy)
        with pytest.raises(ConcurrencyError, match="another recv for some of these envs waits"):
            await env.recv()
        backend.release()
        assert (await receiving)[0]["env_index"].tolist() == [0, 1]
        assert env.outstanding == ()


async def test_what_is_wanted_there_can_be_too_late(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend, non_blocking=False) as env:
        await face.call(env.send, acting([1, 1]))
        backend.held = True
        with pytest.raises(WorkerTimeoutError, match="recv: envs 0-1 waited for a copy"):
            await face.call(env.recv, 2, timeout=0.01)
        backend.release()
        td, _ = await face.call(env.recv, 2)
        assert steps(td) == [1, 1]
        backend.held = True
        with pytest.raises(WorkerTimeoutError, match="step: envs 0-1 waited for a copy"):
            await face.call(env.step, acting([1, 1]), timeout=0.01)
        backend.release()
        assert steps(await face.call(env.step, acting([1, 1]))) == [3, 3]


async def test_a_copy_outlives_the_worker(process_face: Face) -> None:
    face, backend = process_face, FakeBackend()
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1, device=backend) as env:
        await face.call(env.reset)
        backend.held = True
        first = await face.call(env.step, acting([1, 1]))
        await kill_and_reap(env.pids[0])
        with pytest.raises(WorkerDiedError):
            await face.call(env.step, acting([1, 1]))
        resetting = asyncio.ensure_future(face.call(env.reset))
        await asyncio.sleep(0)  # it waits for the copy, or writes to the other slot
        backend.release()
        assert (steps(first), steps(await resetting)) == ([1, 1], [0, 0])
        assert steps(await face.call(env.step, acting([1, 1]))) == [1, 1]


async def test_a_restart_waits_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "LONGEST_DELAY", 0.0)
    backend = FakeBackend()
    options: dict[str, Any] = {"num_processes": 1, "device": backend, **RESTART}
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), **options) as env:
        await env.reset()
        backend.held = True
        first = await env.step(acting([1, 1]))
        second = await env.step(acting([1, 1]))
        copy = backend.under_way[0]
        await kill_and_wait(env)
        third = asyncio.ensure_future(env.step_and_maybe_reset(acting([1, 1])))
        await waited_for(copy)
        assert not third.done()
        backend.release()
        lost, root = await third
        assert lost["next", "truncated"].all()
        assert (steps(first), steps(second), steps(lost), steps(root)) == ([1, 1], [2, 2], [2, 2], [0, 0])


# -- the life of the block ------------------------------------------------------------------------------


async def test_the_block_is_pinned_once_and_unpinned_at_close(face: Face) -> None:
    backend = FakeBackend()
    env = face.make(2, CountingEnv, create_env_kwargs=numbered(2), device=backend)
    for _ in range(2):
        await face.call(env.reset)
        for _ in range(3):
            await face.call(env.step, acting([1, 1]))
        assert backend.notes == ["pin"]
        await face.call(env.close)
        assert backend.notes == ["pin", "unpin"]
        assert backend.pinned == []
        backend.notes.clear()
    assert all(backend.staged)


@over_async_faces
async def test_close_waits_for_copies(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.held = True
        first = await env.step(acting([1, 1]))
        (copy,) = backend.under_way
        closing = asyncio.ensure_future(env.close())
        await waited_for(copy)
        assert not closing.done()
        assert backend.notes == ["pin"]
        with pytest.raises(ClosedError):
            await env.close()
        closing.cancel()  # which does not make it leave before
        await asyncio.sleep(0)
        assert not closing.done()
        backend.release()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert backend.notes == ["pin", "unpin"]
        assert steps(first) == [1, 1]


async def test_close_does_not_wait_for_ever(face: Face, backend: FakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    async with counting(face, backend) as env:
        own = env if face.is_async else env._env
        own._running.pool.timeouts = Timeouts(close=0.2)
        backend.held = True
        first = await face.call(env.step, acting([1, 1]))
        await face.call(env.close)
        assert "were not done within 0.2 s (close_timeout)" in caplog.text
        assert backend.notes == ["pin"]  # and the memory is there
        backend.release()
        await watchmen_gone()
        assert backend.notes == ["pin", "unpin"]
        assert steps(first) == [1, 1]


async def test_forgotten_envs_keep_what_is_under_way(backend: FakeBackend) -> None:
    env = ParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1, device=backend)
    await in_thread(env.reset)
    backend.held = True
    first = await in_thread(env.step, acting([1, 1]))
    holder = [env]
    del env
    with pytest.warns(ResourceWarning, match="was never closed"):
        holder.clear()
    assert backend.notes == ["pin"]
    backend.release()
    await watchmen_gone()
    assert backend.notes == ["pin", "unpin"]
    assert steps(first) == [1, 1]


async def test_close_after_a_copy_that_failed(
    face: Face, caplog: pytest.LogCaptureFixture, backend: FakeBackend
) -> None:
    async with counting(face, backend) as env:
        backend.held = True
        await face.call(env.step, acting([1, 1]))
        backend.copies[-1].error = RuntimeError("device-side assert")
        backend.release()
        await face.call(env.close)
    await watchmen_gone()  # who know the error, and so what it failed with
    assert backend.notes == ["pin", "unpin"]
    assert "failed: device-side assert" in caplog.text


async def test_forgotten_envs_unpin_the_block() -> None:
    backend = FakeBackend()
    env = ParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1, device=backend)
    await in_thread(env.reset)
    holder = [env]
    del env
    with pytest.warns(ResourceWarning, match="was never closed"):
        holder.clear()
    assert backend.notes == ["pin", "unpin"]


async def test_a_start_that_fails_pins_nothing(process_face: Face) -> None:
    backend = FakeBackend()
    env = process_face.make(2, failing_factory, device=backend)
    with pytest.raises(AioEnvsError):
        await process_face.call(env.start)
    assert backend.notes == []


@pytest.mark.parametrize("error", [OSError("not permitted"), RuntimeError("out of memory")], ids=["os", "runtime"])
async def test_what_cannot_be_pinned_is_copied_without(face: Face, error: Exception) -> None:
    backend = FakeBackend(fails=error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with face.open(2, CountingEnv, create_env_kwargs=numbered(2), device=backend) as env:
            await face.call(env.reset)
            td = await face.call(env.step, acting([1, 1]))
            assert steps(td) == [1, 1]
            if not face.is_async:
                env.to(backend)
            await face.call(env.step, acting([1, 1]))
    told = [str(each.message) for each in caught if each.category is PerformanceWarning]
    assert len(told) == 1
    assert str(error) in told[0]
    assert "could not be pinned" in told[0]
    assert not any(backend.staged)
    assert backend.notes == []


async def test_pinning_can_be_declined(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend, pin_memory=False) as env:
        assert steps(await face.call(env.step, acting([1, 1]))) == [1, 1]
    assert backend.notes == []
    assert not any(backend.staged)


async def test_a_device_that_has_no_use_for_it_is_not_pinned_for() -> None:
    backend = FakeBackend(pins=False)
    async with AsyncSerialEnv(2, CountingEnv, device=backend) as env:
        await env.reset()
    assert backend.notes == []
    with pytest.warns(PerformanceWarning, match="nothing to pin it for on cpu"):
        async with AsyncSerialEnv(2, CountingEnv, device=backend, pin_memory=True):
            pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
async def test_pinning_for_its_own_sake_needs_cuda() -> None:
    with pytest.warns(PerformanceWarning, match="there is no CUDA device"):
        async with AsyncSerialEnv(2, CountingEnv, pin_memory=True) as env:
            await env.reset()


async def test_they_can_move_while_they_run(face: Face) -> None:
    one, other = FakeBackend(), FakeBackend()
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2), device=one) as env:
        await face.call(env.reset)
        one.held = True
        first = await face.call(env.step, acting([1, 1]))
        env.to(other)
        before = len(one.copies)
        second = await face.call(env.step, acting([1, 1]))
        one.release()
        env.to("cpu")
        third = await face.call(env.step, acting([1, 1]))
        fourth = await face.call(env.step, acting([1, 1]))
        assert [steps(td) for td in (first, second, third, fourth)] == [[1, 1], [2, 2], [3, 3], [4, 4]]
        assert (len(one.copies), len(other.copies)) == (before, 1)
        assert (one.notes, other.notes) == (["pin"], [])
    assert (one.notes, other.notes) == (["pin", "unpin"], [])


async def test_one_can_ask_for_what_is_there(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend, non_blocking=False) as env:
        backend.held = True
        task = asyncio.ensure_future(face.call(env.step, acting([1, 1])))
        copy = await in_thread(backend.next_held)
        await waited_for(copy)
        assert not task.done()
        backend.release()
        assert steps(await task) == [1, 1]


async def test_loans_have_no_effect_on_what_crosses(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        rows = [await face.call(env.step, acting([1, 1]), copy=False) for _ in range(4)]
        assert [steps(td) for td in rows] == [[step, step] for step in (1, 2, 3, 4)]


def test_a_copy_of_the_envs_has_the_device() -> None:
    env = AsyncParallelEnv(2, CountingEnv, device="cpu")
    assert pickle.loads(pickle.dumps(env)).device == torch.device("cpu")


class Noting(StagedBackend):
    """Knows a name, by which it can be told apart, and on the CPU which tensors it has brought."""

    def __init__(self, name: str) -> None:
        super().__init__(torch.device("cpu"))
        self.name = name
        self.brought = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return False

    def copy_in(self, source: torch.Tensor) -> Any:
        self.brought += 1
        return super().copy_in(source)


@over_classes
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize(
    "copies", [lambda env: pickle.loads(pickle.dumps(env)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deep"]
)
async def test_a_copy_of_the_envs_has_the_backend(cls: Any, moves: bool, copies: Any) -> None:
    face = Face("async" if cls.__name__.startswith("Async") else "plain", cls, 0)
    backend = Noting("one")
    env = cls(2, CountingEnv).to(backend) if moves else cls(2, CountingEnv, device=backend)
    other = copies(env)
    own = (other if face.is_async else other._env)._backend
    assert isinstance(own, Noting)
    assert own.name == "one"
    await face.call(other.reset)
    assert (own.brought, backend.brought) == (1, 1 if own is backend else 0)
    await face.call(other.close)
    other.to("cpu")
    assert (other if face.is_async else other._env)._backend is None


def test_what_cannot_be_pickled_says_so() -> None:
    with pytest.raises(TypeError, match=r"cannot pickle '_queue\.SimpleQueue' object"):
        pickle.dumps(AsyncParallelEnv(2, CountingEnv).to(FakeBackend()))


# -- arguments ------------------------------------------------------------------------------------------


@over_classes
@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("meta", ValueError, "holds no data"),
        ("nonsense", ValueError, "found 'nonsense'"),
        ("cuda:x", ValueError, "found 'cuda:x'"),
        (True, TypeError, "found True"),
        (1.5, TypeError, "found 1.5"),
    ],
)
def test_what_names_no_device(cls: Any, device: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        cls(2, CountingEnv, device=device)
    with pytest.raises(error, match=words):
        cls(2, CountingEnv).to(device)


@over_classes
def test_they_cannot_be_sent_nowhere(cls: Any) -> None:
    with pytest.raises(TypeError, match="found None"):
        cls(2, CountingEnv).to(None)


@over_classes
@pytest.mark.parametrize("name", ["pin_memory", "non_blocking"])
def test_yes_no_or_nothing(cls: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True, False or None, got 'yes'"):
        cls(2, CountingEnv, **{name: "yes"})


def test_which_backend_a_device_gets() -> None:
    assert backend_of(None) is None
    assert backend_of(torch.device("cpu")) is None
    assert isinstance(backend_of(torch.device("mps")), StagedBackend)
    assert checked_device(torch.device("cpu")) == checked_device("cpu")
    assert checked_device(FakeBackend()) == torch.device("cpu")


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(AioEnvsError, match="expected a device of this machine, found 'cuda:99'"):
        require_device(torch.device("cuda:99"))


# -- the parts ------------------------------------------------------------------------------------------


def transfer() -> tuple[Transfer, FakeBackend]:
    backend = FakeBackend()
    return Transfer(torch.zeros(8, dtype=torch.uint8), backend), backend


DTYPES = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.complex64)


def test_tensors_of_all_kinds_are_packed_into_one_copy() -> None:
    crossing, backend = transfer()
    tensors = [torch.randn(3, 2).to(dtype) for dtype in DTYPES] + [torch.tensor(2.5), torch.zeros(0, 4)]
    tensors += [torch.randn(4, 6).t(), torch.randn(5)[::2], tensors[0]]
    moved = crossing.place(tensors)
    assert len(backend.copies) == 1
    assert moved[-1] is moved[0]
    for old, new in zip(tensors, moved, strict=True):
        assert new is not old
        torch.testing.assert_close(new, old)


def test_gradients_flow_through() -> None:
    crossing, backend = transfer()
    weight = torch.ones(2, requires_grad=True)
    (moved,) = crossing.place([weight * 2])
    moved.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2]
    assert backend.copies == []


def test_tensors_come_back_in_one_copy() -> None:
    crossing, backend = transfer()
    tensors = [torch.randn(3, 1).to(dtype) for dtype in DTYPES] + [torch.tensor(True), torch.randn(2, 3).t()]
    for tensor in tensors[::2]:
        backend.hold(tensor)
    fetched, fence = crossing.fetch(tensors)
    assert fence.done()
    assert [each.kind for each in backend.copies] == ["out"]
    assert all(new is old for new, old in zip(fetched[1::2], tensors[1::2], strict=True))  # which were here
    assert crossing.fetch(tensors[1::2])[1].done()
    assert len(backend.copies) == 1
    for old, new in zip(tensors, fetched, strict=True):
        torch.testing.assert_close(new, old)


def test_a_copy_that_failed_does_not_keep_envs_from_closing(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeBackend):
        def unpin(self, memory: torch.Tensor) -> None:
            raise RuntimeError("device-side assert")

    with SerialEnv(1, CountingEnv, device=Failing()) as env:
        env.reset()
    assert "could not be unpinned: device-side assert" in caplog.text


def test_staged_copies_are_done_at_once() -> None:
    backend = StagedBackend(torch.device("cpu"))
    source = torch.arange(8, dtype=torch.uint8)
    copy, fence = backend.copy_in(source)
    backend.order(copy, fence)
    source.zero_()
    assert fence.done()
    fence.wait()
    assert copy.tolist() == list(range(8))
    target = torch.zeros(8, dtype=torch.uint8)
    assert backend.copy_out([copy[:4], copy[4:]], target).done()
    assert target.tolist() == list(range(8))


def test_whatever_the_strides_are() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    tensors = [table[:1, 1], table[1:2, ::4], table[:, 2], table.t(), table[0, 0], table[:0], table[1:, 1:3].bool()]
    assert bytes_of(tensors).numpy().tobytes() == b"".join(each.numpy().tobytes() for each in tensors)
    for each in tensors:
        assert bytes_of([each]).numpy().tobytes() == each.numpy().tobytes()


def test_what_the_host_has_had_before_is_known_as_long_as_it_is_there_as_it_came() -> None:
    crossing, backend = transfer()
    crossing.remember()
    sources = [torch.arange(6).reshape(2, 3), torch.ones(3, dtype=torch.bool)]
    moved = crossing.place(sources)
    for view, expected in ((moved[0], sources[0]), (moved[0][1, ::2], sources[0][1, ::2]), (moved[1], sources[1])):
        (here,), fence = crossing.home([view])
        assert fence.done()
        assert torch.equal(here, expected)
        assert not backend.holds(here)
    assert [each.kind for each in backend.copies] == ["in"]
    moved[1][0] = False
    (here,), _ = crossing.home([moved[0]])  # for all that came together
    assert torch.equal(here, sources[0])
    assert [each.kind for each in backend.copies] == ["in", "out"]


def test_values_that_are_not_those_of_the_memory_are_fetched() -> None:
    crossing, backend = transfer()
    crossing.remember()
    (moved,) = crossing.place([torch.tensor([1 + 2j])])
    for view, expected in ((moved, 1 + 2j), (moved.conj(), 1 - 2j), (moved.conj().imag, -2)):
        assert crossing.home([backend.hold(view)])[0][0].item() == expected


def test_not_everything_is_remembered() -> None:
    crossing, backend = transfer()
    crossing.remember()
    first, *others = (crossing.place([torch.arange(3)])[0] for _ in range(MAX_TWINS + 2))
    for tensor, count in ((others[-1], 0), (first, 1)):
        assert crossing.home([tensor])[0][0].tolist() == [0, 1, 2]
        assert [each.kind for each in backend.copies].count("out") == count
