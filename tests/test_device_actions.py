"""Actions that are on a device which is made up: fetched without anybody being blocked, and before anybody is asked."""

import asyncio
import functools
import gc
import warnings
from typing import Any

import gymnasium as gym
import pytest
import torch
from device_backends import Copy, FakeBackend, are_actions, counting, waited_for, watchmen_gone
from faces import ASYNC_FACES, FACES, Face, acting, in_thread, observed
from failing_envs import CountingEnv, numbered
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from test_death import kill_and_reap
from test_restarts import RESTART

from aioenvs import AsyncParallelEnv, EnvBase
from aioenvs.engine.config import Timeouts
from aioenvs.engine.pools import restart_policy as restarts
from aioenvs.errors import ClosedError, ConcurrencyError, SpecMismatchError, WorkerDiedError, WorkerTimeoutError
from aioenvs.specs import Composite, Unbounded

over_async_faces = pytest.mark.parametrize("face", ASYNC_FACES, ids=lambda face: face.name)


def totals(td: TensorDictBase) -> list[list[int]]:
    """How many steps each env took, and the sum of its actions."""
    return [row[2:] for row in observed(td)]


def stepping(env: Any, backend: FakeBackend) -> asyncio.Task[TensorDictBase]:
    """A step under way whose actions, 3 and 4, are still to come from the device."""
    backend.held = True
    td = acting([3, 4])
    backend.hold(td["action"])
    return asyncio.ensure_future(env.step(td))


# -- steps ----------------------------------------------------------------------------------------------


@over_async_faces
async def test_actions_are_awaited(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        task = stepping(env, backend)
        copy = await in_thread(backend.next_held)
        assert copy.kind == "out"
        await waited_for(copy)
        assert not task.done()
        backend.release()
        assert [row[3] for row in observed(await task)] == [3, 4]


@over_async_faces
async def test_who_is_cancelled_while_actions_come_has_asked_nobody(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        task = stepping(env, backend)
        await waited_for(await in_thread(backend.next_held))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        backend.release()
        assert [row[2:] for row in observed(await env.step(acting([5, 6])))] == [[1, 5], [1, 6]]


@over_async_faces
async def test_actions_that_do_not_fit_ask_nobody(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        for wrong in (torch.tensor([1, 5000]), torch.tensor([1.5, 2.0]), torch.tensor([1])):
            td = TensorDict({"action": torch.zeros(2)}, [2])
            td._tensordict["action"] = backend.hold(wrong)
            with pytest.raises(SpecMismatchError):
                await env.step(td)
        assert totals(await env.step(acting([0, 0]))) == [[1, 0], [1, 0]]


@over_async_faces
async def test_a_deadline_counts_the_wait_for_actions(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.claims, backend.held = are_actions, True
        for _ in range(2):
            with pytest.raises(WorkerTimeoutError, match=r"step: envs 0-1 waited for a copy .* within 0.01 s"):
                await env.step(acting([7, 7]), timeout=0.01)
        backend.release()
        assert totals(await env.step(acting([3, 4]))) == [[1, 3], [1, 4]]


async def test_plain_calls_have_a_deadline_for_actions_too(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.claims, backend.held = are_actions, True
        with pytest.raises(WorkerTimeoutError, match=r"step: envs 0-1 waited for a copy .* within 0.01 s"):
            await face.call(env.step, acting([7, 7]), timeout=0.01)
        backend.release()
        assert totals(await face.call(env.step, acting([3, 4]))) == [[1, 3], [1, 4]]


class Spoken(gym.Env[Any, Any]):
    """Has another number of actions than others, so that those of a batch are no tensor."""

    observation_space = gym.spaces.Box(-10, 10, (1,))

    def __init__(self, size: int) -> None:
        self.action_space = gym.spaces.Box(-1, 1, (size,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return torch.zeros(1).numpy(), {}

    def step(self, action: Any) -> Any:
        return torch.full((1,), float(action.sum())).numpy(), 0.0, False, False, {}


def saying(*sizes: int) -> LazyStackedTensorDict:
    tds = [TensorDict({"action": torch.full((size,), 0.25)}) for size in sizes]
    return LazyStackedTensorDict(*tds, stack_dim=0)


SIZES = (1, 2, 1, 3)
SAID = [[0.25], [0.5], [0.25], [0.75]]


@pytest.mark.parametrize("steps", ["step", "send"])
async def test_those_of_a_lazy_batch_are_one_copy(face: Face, steps: str) -> None:
    backend = FakeBackend(claims=lambda tensor: bool((tensor == 0.25).all()))
    factories = [lambda size=size: Spoken(size) for size in SIZES]
    async with face.open(4, factories, device=backend) as env:
        await face.call(env.reset)
        before = len(backend.copies)
        if steps == "step":
            td = await face.call(env.step, saying(*SIZES))
        else:
            await face.call(env.send, saying(*SIZES))
            td, _ = await face.call(env.recv, 4)
            td = td[td["env_index"].argsort()]
        kinds = [(copy.kind, copy.nbytes) for copy in backend.copies[before:]]
        assert kinds[0] == ("out", 4 * sum(SIZES))
        assert [kind for kind, _ in kinds] == ["out", "in"]
        assert td["next", "observation"].tolist() == SAID
    backend.end()


class Summing(EnvBase):
    """Observes the sum of its action, which may have any size."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__(batch_size=())
        self.observation_spec = Composite(observation=Unbounded(shape=(1,)))
        self.action_spec = Unbounded(shape=(2,) if fixed else (-1,))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        return TensorDict({"observation": torch.zeros(1), "done": torch.zeros(1, dtype=torch.bool)}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        observation = tensordict["action"].sum().reshape(1)
        return self._reset().update({"observation": observation, "reward": torch.zeros(1)})

    def _set_seed(self, seed: int | None) -> None:
        pass


@pytest.mark.parametrize("steps", ["step", "send"])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
async def test_what_travels_as_an_object_is_fetched_for_another_process(
    process_face: Face, sizes: tuple[int, int], steps: str
) -> None:
    """Or the worker would have to open the device."""
    face, fixed = process_face, sizes == (2, 2)
    backend = FakeBackend(claims=lambda tensor: bool((tensor == 0.25).all()))
    make = functools.partial(Summing, fixed=fixed)
    async with face.open(2, make, device=backend, use_buffers=False if fixed else None) as env:
        await face.call(env.reset)
        before = len(backend.copies)
        td = saying(*sizes) if not fixed else saying(*sizes).contiguous()
        if steps == "step":
            await face.call(env.step, td)
        else:
            await face.call(env.send, td)
            td, _ = await face.call(env.recv, 2)
            td = td[td["env_index"].argsort()]
        assert [copy.kind for copy in backend.copies[before:]] == ["out", "in"]
        assert td["next", "observation"].flatten().tolist() == [0.25 * size for size in sizes]
    backend.end()


# -- send -----------------------------------------------------------------------------------------------


async def sent(face: Face, env: Any, backend: FakeBackend, actions: list[int], **options: Any) -> Copy:
    """Send actions that are on the device; their copy, for which somebody waits."""
    await face.call(env.send, acting(actions), **options)
    copy = backend.copies[-1]
    assert copy.kind == "out"
    await waited_for(copy)
    return copy


@over_async_faces
async def test_send_returns_before_the_actions_have_come(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend, 3) as env:
        backend.claims, backend.held = are_actions, True
        td = acting([3, 4, 5])
        env.send(td)
        td["action"].fill_(9)  # the caller's own again
        (copy,) = backend.under_way
        assert (copy.kind, copy.waited) == ("out", 0)
        assert env.outstanding == (0, 1, 2)
        with pytest.raises(ConcurrencyError, match="while send"):
            await env[1].reset()
        await waited_for(copy)
        receiving = asyncio.ensure_future(env.recv(3))
        await asyncio.sleep(0)
        assert not receiving.done()
        assert not any(times.count for times in env._running.pool.times)  # nobody was asked
        backend.release()
        td, _ = await receiving
        assert sorted(totals(td)) == [[1, 3], [1, 4], [1, 5]]
        assert copy.waited == 1  # for all of them together
        assert sorted(td["action"].tolist()) == [3, 4, 5]


async def test_the_envs_of_a_plain_send_are_at_work_when_it_returns(face: Face, backend: FakeBackend) -> None:
    if face.is_async:
        pytest.skip("for the plain ones")
    async with counting(face, backend) as env:
        backend.claims, backend.held = are_actions, True
        sending = asyncio.ensure_future(in_thread(env.send, acting([3, 4])))
        copy = await in_thread(backend.next_held)
        await waited_for(copy)
        assert not sending.done()
        assert env.outstanding == ()
        copy.release()
        await sending
        assert env.outstanding == (0, 1)
        assert not env._env._running.outbox._tasks
        backend.release()
        assert sorted(totals((await face.call(env.recv, 2))[0])) == [[1, 3], [1, 4]]


@over_async_faces
async def test_views_send_apart(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend, 3) as env:
        backend.claims, backend.held = are_actions, True
        first = await sent(face, env[[2, 0]], backend, [3, 4])
        second = await sent(face, env[1], backend, [5])
        second.release()
        backend.held = False
        td, _ = await env.recv()
        assert (td["env_index"].tolist(), totals(td)) == ([1], [[1, 5]])
        first.release()
        td, _ = await env.recv(2)
        assert sorted(zip(td["env_index"].tolist(), totals(td), strict=True)) == [(0, [1, 4]), (2, [1, 3])]


@over_async_faces
async def test_steps_of_an_env_keep_their_order(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.claims, found = are_actions, []
        for action in range(1, 5):
            backend.held = True
            await sent(face, env, backend, [action, 10 * action])
            receiving = asyncio.ensure_future(env.recv(2))
            backend.release()
            found.append(sorted(totals((await receiving)[0])))
        assert found == [[[1, 1], [1, 10]], [[2, 3], [2, 30]], [[3, 6], [3, 60]], [[4, 10], [4, 100]]]


@over_async_faces
async def test_actions_that_turn_out_not_to_fit(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.claims, backend.held = are_actions, True
        for wrong in (torch.ones(2, dtype=torch.complex64), torch.tensor([[1], [2]])):  # which shows at once
            with pytest.raises(SpecMismatchError):
                env.send(TensorDict({"action": wrong}, [2]))
        await sent(face, env, backend, [1, 500000])
        backend.release()
        with pytest.raises(SpecMismatchError, match="found 500000 for env 1; no env was stepped"):
            await env.recv(2)
        assert env.outstanding == ()
        with pytest.raises(SpecMismatchError, match="found 50000 for env 1"):  # which has come already
            env.send(acting([1, 50000]))
        assert totals(await env.step(acting([3, 4]))) == [[1, 3], [1, 4]]


async def test_plain_calls_say_at_once_what_does_not_fit(face: Face, backend: FakeBackend) -> None:
    if face.is_async:
        pytest.skip("for the plain ones")
    async with counting(face, backend) as env:
        backend.claims = are_actions
        with pytest.raises(SpecMismatchError, match="found 500000 for env 1"):
            await face.call(env.send, acting([1, 500000]))
        assert env.outstanding == ()


async def test_a_copy_that_fails_is_the_error_of_all(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.claims, backend.held = are_actions, True
        sending = asyncio.ensure_future(face.call(env.send, acting([1, 2]))) if not face.is_async else None
        if sending is None:
            env.send(acting([1, 2]))
        copy = await in_thread(backend.next_held)
        copy.error = RuntimeError("device-side assert")
        backend.release()
        with pytest.raises(RuntimeError, match="device-side assert"):
            await (face.call(env.recv, 2) if sending is None else sending)
        assert env.outstanding == ()
        assert totals(await face.call(env.step, acting([3, 4]))) == [[1, 3], [1, 4]]
    await watchmen_gone()  # who know the error, and so what it failed with
    assert backend.notes == ["pin", "unpin"]


async def test_a_deadline_counts_the_wait_of_what_was_sent(face: Face, backend: FakeBackend) -> None:
    async def send_and_receive() -> Any:
        await face.call(env.send, acting([7, 7]), timeout=0.01)
        return await face.call(env.recv, 2)

    async with counting(face, backend) as env:
        backend.claims, backend.held = are_actions, True
        with pytest.raises(WorkerTimeoutError, match=r"send.*: env.* waited for a copy .* within 0.01 s \(timeout\)"):
            await send_and_receive()
        for _ in env.outstanding:  # the other one's time is up as well
            with pytest.raises(WorkerTimeoutError):
                await face.call(env.recv)
        backend.release()
        assert totals(await face.call(env.step, acting([3, 4]))) == [[1, 3], [1, 4]]


@over_async_faces
async def test_receiving_can_be_given_up_while_actions_come(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.claims, backend.held = are_actions, True
        copy = await sent(face, env, backend, [3, 4])
        with pytest.raises(WorkerTimeoutError, match="2 more of envs 0-1 should have answered"):
            await env.recv(2, timeout=0.01)
        receiving = asyncio.ensure_future(env.recv(2))
        await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        copy.release()
        backend.release()
        assert sorted(totals((await env.recv(2))[0])) == [[1, 3], [1, 4]]


@over_async_faces
async def test_closed_while_actions_come(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.claims, backend.held = are_actions, True
        copy = await sent(face, env, backend, [3, 4])
        receiving = asyncio.ensure_future(env.recv(2))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(env.close())
        with pytest.raises(ClosedError, match="were closed while a request waited for them"):
            await receiving
        assert not closing.done()  # the memory is kept until the copy is done
        copy.release()
        await closing
        assert backend.notes == ["pin", "unpin"]
        backend.release()
        assert totals(await env.step((await env.reset()).update(acting([3, 4])))) == [[1, 3], [1, 4]]


@over_async_faces
async def test_a_device_that_hangs_does_not_keep_envs_from_closing(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        env._running.pool.timeouts = Timeouts(close=0.2)
        backend.claims, backend.held = are_actions, True
        await sent(face, env, backend, [3, 4])
        await env.close()
        assert backend.notes == ["pin"]
    backend.release()
    await watchmen_gone()
    assert backend.notes == ["pin", "unpin"]


async def test_forgotten_while_actions_come(backend: FakeBackend) -> None:
    env = AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1, device=backend)
    await env.reset()
    backend.claims, backend.held = are_actions, True
    env.send(acting([1, 2]))
    await waited_for(backend.copies[-1])
    holder = [env]
    del env
    with pytest.warns(ResourceWarning, match="was never closed"):
        holder.clear()
    backend.release()
    await watchmen_gone()
    for _ in range(5):  # turns of the loop for what was waiting
        await asyncio.sleep(0)
    assert backend.notes == ["pin", "unpin"]


async def test_a_worker_that_dies_while_actions_come(async_face: Face, backend: FakeBackend) -> None:
    face = async_face
    async with counting(face, backend, num_processes=1) as env:
        backend.claims, backend.held = are_actions, True
        copy = await sent(face, env, backend, [3, 4])
        await kill_and_reap(env.pids[0])
        copy.release()
        with pytest.raises(WorkerDiedError):
            await env.recv(2)
        assert env.outstanding == ()
        backend.release()
        assert totals(await env.step((await env.reset()).update(acting([3, 4])))) == [[1, 3], [1, 4]]


async def test_a_worker_that_is_restarted_while_actions_come(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "LONGEST_DELAY", 0.0)
    face = FACES[2]
    async with counting(face, backend, num_processes=1, **RESTART) as env:
        backend.claims, backend.held = are_actions, True
        copy = await sent(face, env, backend, [3, 4])
        await kill_and_reap(env.pids[0])
        backend.held = False
        copy.release()
        td, _ = await env.recv(2)
        assert td["next", "truncated"].all()
        assert env.outstanding == ()


@pytest.mark.slow
async def test_a_loop_that_is_closed_while_actions_come(backend: FakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    def leave() -> None:
        loop = asyncio.new_event_loop()
        env = AsyncParallelEnv(2, CountingEnv, num_processes=1, device=backend)
        loop.run_until_complete(env.reset())
        backend.claims, backend.held = are_actions, True
        loop.run_until_complete(_begun(env))
        loop.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of the pipes, which the loop was closed over as well
            asyncio.run(env.close())
            del env
            gc.collect()

    await in_thread(leave)
    assert "never retrieved" not in caplog.text
    assert "pending" not in caplog.text
    backend.release()
    await watchmen_gone()
    assert backend.notes == ["pin", "unpin"]


async def _begun(env: Any) -> None:
    env.send(acting([1, 2]))
    await asyncio.sleep(0)


READING = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


@over_async_faces
async def test_rounds_of_send_and_recv_read_nothing_on_the_device(
    face: Face, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real one each of these calls would wait for all that it has to do."""
    async with counting(face, backend, 3, {1: {"length": 2}}) as env:
        root = (await env.reset()).set("env_index", env._running.index(range(3), torch.Size([3])))
        found: list[Any] = []
        with monkeypatch.context() as patch:
            for name in READING:
                patch.setattr(
                    torch.Tensor, name, functools.partialmethod(refusing, getattr(torch.Tensor, name), backend)
                )
            for step in range(1, 6):
                action = backend.hold(torch.full((len(root),), step))
                env.send(root.set("action", action))
                td, root = await env.recv(3)
                found.append((td, root))
        for step, (td, root) in enumerate(found, start=1):
            assert sorted(td["env_index"].tolist()) == [0, 1, 2]
            assert root["env_index"].tolist() == td["env_index"].tolist() == td["next", "observation"][:, 0].tolist()
            assert td["action"].tolist() == [step] * 3


def refusing(tensor: torch.Tensor, method: Any, backend: FakeBackend, *args: Any) -> Any:
    assert not backend.holds(tensor), "this waits for the device"
    return method(tensor, *args)
