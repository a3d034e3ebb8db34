"""Workers that die or hang are restarted of themselves: the loss is told once, and everything else goes on."""

import asyncio
import logging
import os
import pickle
import signal
import threading
from typing import Any

import cloudpickle
import failing_envs as faults
import pytest
import torch
from faces import Face, acting, call, in_thread, masked, observed
from failing_envs import CountingEnv, Gate, numbered
from tensordict import TensorDict, TensorDictBase
from test_death import family, host, kill_and_reap, mortal, rest

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv
from aioenvs.engine.pools import restart_policy as restarts
from aioenvs.engine.pools.restart_policy import derived_seed
from aioenvs.engine.worker.random_streams import seed_chain
from aioenvs.errors import ClosedError, WorkerDiedError, WorkerError, WorkerStartError, WorkerTimeoutError
from aioenvs.testing import CountingEnv as TorchCountingEnv
from aioenvs.testing import (
    DyingEnv,
    DynamicShapeEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    NonTensorEnv,
    SlowEnv,
    StateEnv,
)

RESTART: dict[str, Any] = {"on_worker_death": "restart"}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "LONGEST_DELAY", 0.0)


def column(td: TensorDictBase, key: Any) -> list[Any]:
    return list(td[key].reshape(td.batch_size[0], -1)[:, 0].tolist())


def check_lost(td: TensorDictBase, lost: list[int], known: list[Any]) -> None:
    """These envs, and no others, lost the step; they observed what was known of them."""
    following, count = td["next"], td.batch_size[0]
    assert column(following, "truncated") == [env in lost for env in range(count)]
    assert [env for env in lost if not column(following, "done")[env]] == []
    assert [env for env in lost if column(following, "terminated")[env]] == []
    assert [column(following, "reward")[env] for env in lost] == [0.0] * len(lost)
    assert [observed(td)[env] for env in lost] == [known[env] for env in lost]


async def kill_and_wait(env: AsyncParallelEnv, worker: int = 0) -> None:
    """Kill a worker, and wait until that was noticed."""
    ended = env._pool.hosts[worker].ended  # type: ignore[union-attr]
    await kill_and_reap(env.pids[worker])
    await ended


async def advance(face: Face, env: Any, actions: Any, only: Any = None) -> tuple[Any, Any]:
    result: tuple[Any, Any] = await face.call(env.step_and_maybe_reset, acting(actions, only=only))
    return result


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "busy"])
async def test_the_loop_goes_on(process_face: Face, idle: bool) -> None:
    face = process_face
    dead, alive = family(face, 1), rest(face, 1)
    kwargs = numbered(4) if idle else mortal()
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs, **RESTART) as env:
        pid, pids = host(face, env, 1), env.pids
        await face.call(env.reset)
        known, _ = await advance(face, env, [1, 2, 3, 4])
        if idle:
            await kill_and_reap(pid)
        td, root = await advance(face, env, [10, 20, 30, 40])
        check_lost(td, dead, observed(known))
        assert [observed(td)[i] for i in alive] == [[i, 1, 2, 11 * (i + 1)] for i in alive]
        assert [observed(root)[i] for i in dead] == [[i, 1, 0, 0] for i in dead]
        assert [observed(root)[i] for i in alive] == [[i, 1, 2, 11 * (i + 1)] for i in alive]
        assert not any(root[name].any() for name in ("done", "terminated", "truncated"))
        td, _ = await advance(face, env, [5, 6, 7, 8])
        check_lost(td, [], None)
        assert [observed(td)[i] for i in dead] == [[i, 1, 1, i + 5] for i in dead]
        assert [observed(td)[i] for i in alive] == [[i, 1, 3, 11 * (i + 1) + i + 5] for i in alive]
        assert set(pids) - set(env.pids) == {pid}


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
async def test_all_workers_die(process_face: Face, method: str) -> None:
    face = process_face
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2), mp_start_method=method, **RESTART) as env:
        known = await face.call(env.reset)
        pids = env.pids
        for pid in pids:
            await kill_and_reap(pid)
        td = await face.call(env.step, acting([1, 2]))
        check_lost(td, [0, 1], observed(known))
        assert set(pids).isdisjoint(env.pids)
        assert observed(await face.call(env.step, acting([1, 2]))) == [[0, 1, 1, 1], [1, 1, 1, 2]]


async def test_what_was_known_is_not_what_a_new_env_begins_with(process_face: Face) -> None:
    face = process_face
    async with face.open(2, "CartPole-v1", **RESTART) as env:
        td = await face.call(env.reset, seed=0)
        for pid in env.pids:
            await kill_and_reap(pid)
        td, root = await face.call(env.step_and_maybe_reset, td.update(acting([0, 1])))
        assert torch.equal(td["next", "observation"], td["observation"])
        assert not torch.isclose(root["observation"], td["observation"]).any()


async def test_each_env_of_a_worker_tells_its_own_loss_once() -> None:
    async with AsyncParallelEnv(4, CountingEnv, create_env_kwargs=numbered(4), num_processes=1, **RESTART) as env:
        await env.reset()
        known = await env.step(acting([1, 2, 3, 4]))
        await kill_and_reap(env.pids[0])
        td, _ = await env.step_and_maybe_reset(acting([0] * 4, only=[2]))
        check_lost(td, [2], observed(known))
        assert [observed(td)[i] for i in (0, 1, 3)] == [observed(known)[i] for i in (0, 1, 3)]
        td, root = await env[[3, 2]].step_and_maybe_reset(acting([7, 8]))
        assert column(td["next"], "truncated") == [True, False]
        assert observed(td) == [observed(known)[3], [2, 1, 1, 8]]
        assert observed(root) == [[3, 1, 0, 0], [2, 1, 1, 8]]
        td = await env.reset(masked("_reset", 4, [0]))
        assert observed(td) == [[0, 2, 0, 0], observed(known)[1], [2, 1, 1, 8], [3, 1, 0, 0]]
        td, root = await env.step_and_maybe_reset(acting([5, 6, 7, 8]))
        check_lost(td, [1], observed(known))
        assert observed(root) == [[0, 2, 1, 5], [1, 1, 0, 0], [2, 1, 2, 15], [3, 1, 1, 8]]
        td = await env.step(acting([0] * 4))
        check_lost(td, [], None)


async def test_views_that_step_at_once_share_a_restart() -> None:
    kwargs = mortal()
    async with AsyncParallelEnv(4, CountingEnv, create_env_kwargs=kwargs, num_processes=1, **RESTART) as env:
        await env.reset()
        await env.step(acting([1, 2, 3, 4]))
        results = await asyncio.gather(*(env[i].step_and_maybe_reset(acting([0])) for i in range(4)))
        lost = {i for i, (td, _) in enumerate(results) if td["next", "truncated"].item()}
        assert 1 in lost
        assert env.statistics().restarts == (1,) * 4
        td, _ = await env.step_and_maybe_reset(acting([0] * 4))
        assert set(range(4)) - lost == {i for i, each in enumerate(column(td["next"], "truncated")) if each}
        assert [observed(td)[i] for i in lost] == [[i, 1, 1, 0] for i in lost]


@pytest.mark.parametrize("was_lost", [True, False])
async def test_a_step_waits_for_a_worker_that_is_replaced_meanwhile(gate: Gate, tmp_path: Any, was_lost: bool) -> None:
    """The worker of env 2 dies after that has answered, or has nothing to answer, as it is yet to tell of its loss."""
    folder = tmp_path / "other"
    folder.mkdir()
    with Gate(folder) as entrance:
        each = {0: {"fault": gate.wait}, 2: {"fault": entrance.wait, "at": (1, 0)}}
        entrance.open(1 + was_lost)  # to the first reset, and to that of the first restart
        options = {"create_env_kwargs": numbered(4, each), "num_processes": 2, **RESTART}
        async with AsyncParallelEnv(4, CountingEnv, **options) as env:
            await env.reset()
            known = await env.step(acting([1, 2, 3, 4]))
            if was_lost:
                await kill_and_wait(env, 1)
                assert column((await env[3].step(acting([5])))["next"], "truncated") == [True]
            step = asyncio.ensure_future(env[[0, 2]].step_and_maybe_reset(acting([10, 30])))
            await gate.arrival()
            await env[3].get_attr("steps")  # after which env 2 has answered, if it was asked
            await kill_and_wait(env, 1)
            other = asyncio.ensure_future(env[3].step(acting([6])))
            for _ in range(2 + was_lost):
                await entrance.arrival()
            gate.open()  # so that env 0 steps
            await env[1].get_attr("steps")  # after which env 0 has stepped
            await asyncio.wait([step, other], timeout=0)
            entrance.open()
            td, root = await step
            check_lost(td, [1], [None, observed(known)[2]])
            assert observed(root) == [[0, 1, 2, 11], [2, 1, 0, 0]]
            assert column((await other)["next"], "truncated") == [True]
            td = await env.step(acting([1, 2, 3, 4]))
            check_lost(td, [], None)
            assert observed(td)[2:] == [[2, 1, 1, 3], [3, 1, 1, 4]]


async def test_a_reset_is_repeated_with_its_arguments(process_face: Face, gate: Gate) -> None:
    face = process_face
    kwargs = numbered(4, {1: {"fault": gate.wait, "at": (2, 0)}})
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs, **RESTART) as env:
        await face.call(env.reset)
        resetting = asyncio.create_task(face.call(env.reset, seed=7))
        await gate.arrival()
        os.kill(host(face, env, 1), signal.SIGKILL)
        await gate.arrival()  # the env that was built anew is reset once more
        gate.open()
        assert observed(await resetting) == [[i, 2, 0, 0] for i in range(4)]
        seeds = await (call(lambda: env.np_random_seed) if not face.is_async else env.get_attr("np_random_seed"))
        assert seeds == list(seed_chain(7, 4)[0])
        check_lost(await face.call(env.step, acting([0] * 4)), [], None)


@pytest.mark.parametrize("reset", [True, False])
async def test_seeds(reset: bool) -> None:
    """A new env neither repeats the episodes of the old one, nor forgets a seed that was not used yet."""
    async with AsyncParallelEnv(1, CountingEnv, **RESTART) as env:
        await env.reset()
        await env.set_seed(5)
        if reset:
            await env.reset()
        await kill_and_wait(env)
        assert await env.get_attr("np_random_seed") == [derived_seed(5, 1)]
        await env.reset()
        assert await env.get_attr("np_random_seed") == [derived_seed(5, 1) if reset else 5]
        await kill_and_wait(env)
        assert await env.get_attr("np_random_seed") == [derived_seed(5, 2)]
        await env.reset()
        assert await env.get_attr("np_random_seed") == [derived_seed(5, 2)]


async def test_seeds_that_are_none() -> None:
    async with AsyncParallelEnv(1, CountingEnv, **RESTART) as env:
        await env.reset(list_of_kwargs=[{"seed": None}])
        await kill_and_reap(env.pids[0])
        assert column((await env.step(acting([0])))["next"], "truncated") == [True]


async def test_a_call_raises_and_the_rest_goes_on(process_face: Face) -> None:
    face = process_face
    async with face.open(4, CountingEnv, create_env_kwargs=mortal(), **RESTART) as env:
        known = await face.call(env.reset)
        with pytest.raises(WorkerDiedError, match="last command: call"):
            await face.call(env.call, "_maybe_fail", 1, 2)
        td = await face.call(env.step, acting([1, 2, 3, 4]))
        check_lost(td, family(face, 1), observed(known))
        assert [observed(td)[i] for i in rest(face, 1)] == [[i, 1, 1, i + 1] for i in rest(face, 1)]


async def test_states_and_attributes_of_an_env_that_died_meanwhile(process_face: Face) -> None:
    """They are the new env's; that it is a new one is told by the next step all the same."""
    face = process_face
    async with face.open(1, TorchCountingEnv, **RESTART) as env:
        td = await face.call(env.reset)
        td = await face.call(env.step, td.update(acting([0])))
        await kill_and_reap(env.pids[0])
        try:
            states = await face.call(env.state_dict)
        except WorkerDiedError:  # it noticed the death
            states = await face.call(env.state_dict)
        assert states["worker0"]["steps"].item() == 0
        td = await face.call(env.step, acting([0]))
        assert td["next", "done"].item()
        assert td["next", "observation"].item() == 1


async def test_an_exception_and_a_loss_at_once() -> None:
    kwargs = numbered(
        2, {0: {"fault": faults.raise_value_error, "at": (1, 1)}, 1: {"fault": faults.kill_itself, "at": (1, 1)}}
    )
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2, **RESTART) as env:
        await env.reset()
        with pytest.raises(ValueError, match="reactor") as caught:
            await env.step(acting([0, 0]))
        assert any("env 1 lost this step" in note for note in caught.value.__notes__)
        assert observed(await env.reset(masked("_reset", 2, [0]))) == [[0, 2, 0, 0], [1, 1, 0, 0]]


async def test_what_is_known_of_an_env_that_failed_at_once(face: Face) -> None:
    """It is what its reset said, and not what it observed before."""
    kwargs = numbered(2, {1: {"fault": faults.raise_value_error, "at": (2, 1)}})
    async with face.open(2, CountingEnv, create_env_kwargs=kwargs) as env:
        await face.call(env.reset)
        await face.call(env.step, acting([1, 2]))
        await face.call(env.reset)
        with pytest.raises(ValueError, match="reactor"):
            await face.call(env.step, acting([1, 2]))
        td = await face.call(env.step, acting([1, 2], only=[0]))
        assert observed(td) == [[0, 2, 2, 2], [1, 2, 0, 0]]


async def test_a_cancelled_step_and_a_death(gate: Gate) -> None:
    """The step after the reset was never taken: the last thing known is the reset."""
    kwargs = numbered(1, {0: {"fault": gate.wait, "at": (2, 1)}})
    async with AsyncParallelEnv(1, CountingEnv, create_env_kwargs=kwargs, **RESTART) as env:
        await env.reset()
        await env.step(acting([5]))
        await env.reset()
        stepping = asyncio.create_task(env.step_and_maybe_reset(acting([6])))
        await gate.arrival()
        stepping.cancel()
        await asyncio.wait([stepping])
        await kill_and_reap(env.pids[0])
        td, root = await env.step_and_maybe_reset(acting([7]))
        check_lost(td, [0], [[0, 2, 0, 0]])
        assert observed(root) == [[0, 1, 0, 0]]


# -- hanging ones ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [faults.hang, faults.stop_itself, faults.hang_deaf])
@pytest.mark.slow
async def test_a_worker_that_hangs_is_killed(process_face: Face, fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    face = process_face
    async with face.open(4, CountingEnv, create_env_kwargs=mortal(fault), step_timeout=1.0, **RESTART) as env:
        await face.call(env.reset)
        known = await face.call(env.step, acting([1, 2, 3, 4]))
        with caplog.at_level(logging.WARNING, "aioenvs"):
            td, root = await advance(face, env, [10, 20, 30, 40])
        dead, alive = family(face, 1), rest(face, 1)
        check_lost(td, dead, observed(known))
        assert [observed(td)[i] for i in alive] == [[i, 1, 2, 11 * (i + 1)] for i in alive]
        assert [observed(root)[i] for i in dead] == [[i, 1, 0, 0] for i in dead]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "did not answer step_and_maybe_reset within 1.0 s" in caplog.text
    assert "restart 1 of at most 10" in caplog.text


async def test_one_that_hangs_after_its_caller_left(gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with AsyncParallelEnv(
        2, CountingEnv, create_env_kwargs=kwargs, num_processes=2, step_timeout=1.0, **RESTART
    ) as env:
        known = await env.reset()
        stepping = asyncio.create_task(env.step(acting([1, 2])))
        await gate.arrival()
        stepping.cancel()
        await asyncio.wait([stepping])
        td = await env.step(acting([1, 2]))
        check_lost(td, [1], observed(known))
        assert observed(td)[0] == [0, 1, 2, 2]


@pytest.mark.slow
async def test_a_slow_torch_env() -> None:
    fast, slow = TorchCountingEnv, lambda: SlowEnv(3600, at=2, truncates=True)
    async with AsyncParallelEnv(
        2, [lambda: fast(truncates=True), slow], num_processes=2, step_timeout=2.0, **RESTART
    ) as env:
        td = await env.reset()
        _, td = await env.step_and_maybe_reset(td.update(acting([0, 0])))
        td, root = await env.step_and_maybe_reset(td.update(acting([0, 0])))
        assert column(td["next"], "truncated") == [False, True]
        assert column(td["next"], "observation") == [2, 1]
        assert column(root, "observation") == [2, 0]


# -- the budget -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1])
async def test_after_so_many_restarts_a_death_raises(process_face: Face, most: int) -> None:
    face = process_face
    dead, alive = family(face, 1), rest(face, 1)
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4), max_restarts=most, **RESTART) as env:
        await face.call(env.reset)
        for _ in range(most):
            await kill_and_reap(host(face, env, 1))
            check_lost(await face.call(env.step, acting([0] * 4)), dead, [[i, 1, 0, 0] for i in range(4)])
        await kill_and_reap(host(face, env, 1))
        for _ in range(2):
            with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
                await face.call(env.step, acting([0] * 4))
            (note,) = caught.value.__notes__
            assert note.startswith(f"it was restarted {most} times before (max_restarts={most})")
        td = await face.call(env.step, acting([0] * 4, only=alive))
        steps = [observed(td)[i][2] for i in alive]  # one more if the death was noticed by a step only
        assert steps in ([most + 1] * len(alive), [most + 2] * len(alive))
        td = await face.call(env.reset, masked("_reset", 4, dead))
        assert [observed(td)[i][2] for i in dead] == [0] * len(dead)
        check_lost(await face.call(env.step, acting([0] * 4)), [], None)
        assert env.statistics().restarts == tuple(most + 1 if i in dead else 0 for i in range(4))


async def test_a_worker_that_dies_at_each_start_ends_in_an_error(process_face: Face, tmp_path: Any) -> None:
    face, licence = process_face, tmp_path / "licence"
    licence.touch()
    async with face.open(
        2, faults.licensed_factory, create_env_kwargs={"licence": str(licence)}, max_restarts=3, **RESTART
    ) as env:
        await face.call(env.reset)
        licence.unlink()
        await kill_and_reap(env.pids[0])
        with pytest.raises(WorkerStartError, match="licence") as caught:
            await face.call(env.step, acting([0, 0]))
        assert "max_restarts=3" in caught.value.__notes__[0]
        with pytest.raises(WorkerError, match="licence"):
            await face.call(env.reset)
        licence.touch()
        assert len(observed(await face.call(env.reset))) == 2
        check_lost(await face.call(env.step, acting([0, 0])), [], None)


async def test_a_death_in_the_reset_of_each_restart_ends_in_an_error() -> None:
    kwargs = numbered(1, {0: {"fault": faults.kill_itself, "at": (1, 0)}})
    async with AsyncParallelEnv(1, CountingEnv, create_env_kwargs=kwargs, max_restarts=3, **RESTART) as env:
        with pytest.raises(WorkerError, match="SIGKILL") as caught:
            await env.reset()
        assert "max_restarts=3" in caught.value.__notes__[0]
    async with AsyncParallelEnv(1, lambda: DyingEnv("reset", at=2), max_restarts=3, **RESTART) as env:
        await env.reset()
        with pytest.raises(WorkerDiedError, match="last command: reset") as caught:
            await env.reset()
        assert "max_restarts=3" in caught.value.__notes__[0]


async def test_an_env_that_is_another_one_now() -> None:
    kinds: list[Any] = [CountingEnv]
    async with AsyncParallelEnv(1, lambda: kinds[-1](), **RESTART) as env:
        await env.reset()
        kinds.append(faults.OtherSpaceEnv)
        await kill_and_wait(env)
        with pytest.raises(ValueError, match="built anew and differs"):
            await env.step(acting([0]))


# -- cancelled, closed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 100, 1000])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.slow
def test_a_restart_whose_caller_is_cancelled(turns: int, loop: str) -> None:
    """The loss is told once, by the step that is cancelled too late or by the next one."""

    async def main() -> None:
        async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=2, **RESTART) as env:
            known = await env.reset()
            os.kill(env.pids[1], signal.SIGKILL)
            task = asyncio.create_task(env.step_and_maybe_reset(acting([1, 2])))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                check_lost(task.result()[0], [1], observed(known))
            td, root = await env.step_and_maybe_reset(acting([1, 2]))
            lost = [1] if task.cancelled() else []
            check_lost(td, lost, observed(known))
            assert observed(root)[1] == ([1, 1, 0, 0] if lost else [1, 1, 1, 2])
            check_lost(await env.step(acting([1, 2])), [], None)
            assert env.statistics().restarts == (0, 1)

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(main())


async def test_closed_during_a_restart(gate: Gate) -> None:
    env = AsyncParallelEnv(1, faults.gated_factory, create_env_kwargs={"wait": gate.wait}, **RESTART)
    gate.open()
    await env.reset()
    await gate.arrival()
    await kill_and_reap(env.pids[0])
    stepping = asyncio.create_task(env.step(acting([0])))
    await gate.arrival()
    await env.close()
    with pytest.raises(ClosedError, match=r"env 0 were closed while"):
        await stepping
    assert env.is_closed


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 10, 20, 50])
async def test_closed_so_many_turns_after_a_death(turns: int) -> None:
    env = AsyncParallelEnv(2, CountingEnv, num_processes=2, **RESTART)
    await env.reset()
    os.kill(env.pids[0], signal.SIGKILL)
    stepping = asyncio.create_task(env.step(acting([0, 0])))
    for _ in range(turns):
        await asyncio.sleep(0)
    await env.close()
    (outcome,) = await asyncio.gather(stepping, return_exceptions=True)
    assert isinstance(outcome, ClosedError | TensorDict)
    assert env.is_closed


# -- torch envs, and what they may look like ------------------------------------------------------------


def sync_or_async(is_async: bool) -> Any:
    return AsyncParallelEnv if is_async else ParallelEnv


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("processes", [1, 2])
async def test_a_rollout_over_deaths(is_async: bool, processes: int) -> None:
    env = sync_or_async(is_async)(
        2, lambda: DyingEnv(at=3, max_steps=None, truncates=True), num_processes=processes, **RESTART
    )
    try:
        td = await call(env.rollout, 8, break_when_any_done=False)
        assert td.shape == (2, 8)
        assert td["next", "truncated"].squeeze(-1).tolist() == [[step in (2, 5) for step in range(8)]] * 2
        assert not td["next", "terminated"].any()
        assert td["observation"].squeeze(-1).tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]] * 2
        assert td["next", "observation"].squeeze(-1).tolist() == [[1, 2, 2, 1, 2, 2, 1, 2]] * 2
        assert td["next", "reward"].squeeze(-1).tolist() == [[1, 1, 0, 1, 1, 0, 1, 1]] * 2
        assert (await call(env.rollout, 8)).shape == (2, 1)  # they have stepped twice since
    finally:
        await call(env.close)


async def test_a_rollout_until_all_are_done() -> None:
    factories = [lambda: DyingEnv(at=2, max_steps=None), lambda: DyingEnv(at=4, max_steps=None)]
    async with AsyncParallelEnv(2, factories, num_processes=2, **RESTART) as env:
        td = await env.rollout(10, break_when_any_done=False, break_when_all_done=True)
        assert td["next", "done"].squeeze(-1).tolist() == [[False, True, True, True], [False, False, False, True]]
        assert not td["next", "terminated"].any()


async def test_nested_flags_without_truncated() -> None:
    async with AsyncParallelEnv(
        2, lambda: NestedCountingEnv(nested_dim=3, nest=("observation", "reward", "done")), num_processes=2, **RESTART
    ) as env:
        td = await env.reset()
        _, td = await env.step_and_maybe_reset(env.rand_action(td))
        await kill_and_wait(env)
        td, root = await env.step_and_maybe_reset(env.rand_action(td))
        (done,) = env.done_keys[:1]
        assert td["next"][done].flatten(1).tolist() == [[True] * 3, [False] * 3]
        assert not td["next", done[0], "terminated"].any()
        assert td["next"][env.reward_key].flatten(1).tolist() == [[0.0] * 3, [1.0] * 3]
        (observation,) = env.observation_keys
        assert torch.equal(td["next"][observation][0], td[observation][0])
        assert not root[observation][0].any()
        assert root[observation][1].any()


async def test_several_groups_of_flags() -> None:
    async with AsyncParallelEnv(2, lambda: MultiKeyCountingEnv(root_done=False), num_processes=2, **RESTART) as env:
        td = await env.reset()
        _, td = await env.step_and_maybe_reset(env.rand_action(td))
        await kill_and_wait(env)
        td, root = await env.step_and_maybe_reset(env.rand_action(td))
        for key in env.done_keys:
            assert bool(td["next"][key][0].all()) == ("terminated" not in key)
            assert not td["next"][key][1].any()
            assert not root[key].any()
        for key in env.reward_keys:
            assert not td["next"][key][0].any()
        for key in env.observation_keys:
            assert torch.equal(td["next"][key][0], td[key][0])


async def test_envs_that_differ() -> None:
    factories = [TorchCountingEnv, NestedCountingEnv, lambda: TorchCountingEnv(start=10)]
    async with AsyncParallelEnv(3, factories, num_processes=3, **RESTART) as env:
        td = await env.reset()
        _, td = await env.step_and_maybe_reset(env.rand_action(td))
        await kill_and_wait(env)
        td, root = await env.step_and_maybe_reset(env.rand_action(td))
        first, second, third = td["next"].unbind(0)
        assert (first["done"].item(), first["terminated"].item(), first["reward"].item()) == (True, False, 0)
        assert first["observation"].item() == 1
        assert not second["data", "done"].any()
        assert (third["done"].item(), third["observation"].item()) == (False, 12)
        assert [each["observation"].flatten().tolist() for each in (root[0], root[2])] == [[0], [12]]


@pytest.mark.parametrize("use_buffers", [None, False])
async def test_values_that_travel_as_objects(use_buffers: bool | None) -> None:
    async with AsyncParallelEnv(2, NonTensorEnv, num_processes=2, use_buffers=use_buffers, **RESTART) as env:
        td = await env.reset()
        _, td = await env.step_and_maybe_reset(env.rand_action(td))
        await kill_and_wait(env)
        td, root = await env.step_and_maybe_reset(env.rand_action(td))
        assert td["next", "text"] == ["step 1", "step 2"]
        assert column(td["next"], "observation") == [1, 2]
        assert column(td["next"], "done") == [True, False]
        assert column(td["next"], "reward") == [0, 1]
        assert root["text"] == ["step 0", "step 2"]
        assert column(root, "observation") == [0, 2]
        td, _ = await env.step_and_maybe_reset(env.rand_action(root))
        assert td["next", "text"] == ["step 1", "step 3"]


async def test_shapes_that_vary() -> None:
    async with AsyncParallelEnv(2, DynamicShapeEnv, num_processes=2, **RESTART) as env:
        td = await env.reset()
        _, td = await env.step_and_maybe_reset(env.rand_action(td))
        await kill_and_wait(env)
        td, root = await env.step_and_maybe_reset(env.rand_action(td))
        assert [tuple(each["next", "observation"].shape) for each in td.unbind(0)] == [(2, 2), (3, 2)]
        assert [each["next", "done"].item() for each in td.unbind(0)] == [True, False]
        assert [tuple(each["observation"].shape) for each in root.unbind(0)] == [(1, 2), (3, 2)]


async def test_states_that_travel_with_the_steps() -> None:
    async with AsyncParallelEnv(2, StateEnv, num_processes=2, **RESTART) as env:
        td = await env.reset()
        _, td = await env.step_and_maybe_reset(td.update(acting([1, 1])))
        await kill_and_wait(env)
        td, root = await env.step_and_maybe_reset(td.update(acting([1, 1])))
        assert column(td["next"], "count") == [1, 2]
        assert column(td["next"], "done") == [True, False]
        assert column(root, "count") == [0, 2]
        td = await env.step(root.update(acting([1, 1])))
        assert column(td["next"], "count") == [1, 3]


# -- arguments, copies, the log -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"on_worker_death": "ignore"}, ValueError, "'raise', 'restart', got 'ignore'"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be an integer of at least 0, got -1"),
        ({"max_restarts": 1.5}, ValueError, r"got 1\.5"),
        ({"max_restarts": True}, ValueError, "got True"),
        ({**RESTART, "backend": "thread"}, TypeError, "has no meaning"),
        ({**RESTART, "backend": "serial"}, TypeError, "has no meaning"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        AsyncParallelEnv(2, CountingEnv, **options)


def test_a_serial_env_has_no_workers() -> None:
    with pytest.raises(TypeError, match="on_worker_death"):
        AsyncSerialEnv(2, CountingEnv, **RESTART)


async def test_by_default_nothing_is_restarted(process_face: Face) -> None:
    async with process_face.open(2, CountingEnv) as env:
        await process_face.call(env.reset)
        await kill_and_reap(env.pids[0])
        with pytest.raises(WorkerDiedError):
            await process_face.call(env.step, acting([0, 0]))
        assert env.statistics().restarts == (0, 0)


async def test_by_default_a_late_worker_is_not_killed(gate: Gate) -> None:
    kwargs = numbered(1, {0: {"fault": gate.wait, "at": (1, 1)}})
    async with AsyncParallelEnv(1, CountingEnv, create_env_kwargs=kwargs, step_timeout=0.3) as env:
        pids = env.pids
        await env.reset()
        with pytest.raises(WorkerTimeoutError):
            await env.step(acting([0]))
        gate.open()
        await env.step(acting([0]))
        assert env.pids == pids


@pytest.mark.parametrize("cls", [AsyncParallelEnv, ParallelEnv])
async def test_copies_keep_the_policy(cls: Any) -> None:
    original = cls(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=2, max_restarts=1, **RESTART)
    env = pickle.loads(cloudpickle.dumps(original))
    try:
        known = await call(env.reset)
        await kill_and_reap(env.pids[0])
        check_lost(await call(env.step, acting([0, 0])), [0], observed(known))
        await kill_and_reap(env.pids[0])
        with pytest.raises(WorkerDiedError):
            await call(env.step, acting([0, 0]))
    finally:
        await call(env.close)


async def test_a_reset_that_cannot_be_sent_takes_no_loss_away() -> None:
    kwargs = numbered(2)
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=1, **RESTART) as env:
        await env.reset()
        await env.step(acting([1, 2]))
        await kill_and_wait(env)
        with pytest.raises(TypeError, match="pickle"):
            await env.reset(options={"lock": threading.Lock()})
        td = await env.step(acting([1, 2]))
        check_lost(td, [0, 1], [[0, 1, 1, 1], [1, 1, 1, 2]])


async def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncParallelEnv(1, CountingEnv, max_restarts=5, **RESTART) as env:
        await env.reset()
        (pid,) = env.pids
        with caplog.at_level(logging.WARNING, "aioenvs"):
            await kill_and_reap(pid)
            await env.step(acting([0]))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("aioenvs", "WARNING")
    assert str(pid) in record.getMessage()
    assert "SIGKILL" in record.getMessage()
    assert record.getMessage().endswith("restart 1 of at most 5")


async def test_reopened_envs_begin_with_a_new_budget() -> None:
    env = AsyncParallelEnv(1, CountingEnv, max_restarts=1, **RESTART)
    for _ in range(2):
        await env.reset()
        await kill_and_reap(env.pids[0])
        assert (await env.step(acting([0])))["next", "truncated"].item()
        await env.close()


def test_it_is_the_same_without_an_event_loop() -> None:
    with ParallelEnv(1, lambda: DyingEnv(at=2, truncates=True), **RESTART) as env:
        td = env.rollout(5, break_when_any_done=False)
    assert td["next", "truncated"].flatten().tolist() == [False, True, False, True, False]


async def test_in_a_thread_it_is_the_same() -> None:
    def main() -> Any:
        with ParallelEnv(1, lambda: DyingEnv(at=2), **RESTART) as env:
            return env.rollout(2)["next", "done"].flatten().tolist()

    assert await in_thread(main) == [False, True]


async def test_the_seed_of_a_reset_is_where_new_envs_go_on_from() -> None:
    async with AsyncParallelEnv(1, CountingEnv, **RESTART) as env:
        await env.reset(list_of_kwargs=[{"seed": 5}])
        await kill_and_wait(env)
        assert await env.get_attr("np_random_seed") == [derived_seed(5, 1)]
