"""What several callers, forks, copies and impatient users do to envs that are shared."""

import asyncio
import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from faces import Face, acting, masked, observed
from failing_envs import CountingEnv, FailingTwin, Scribbler, Sleeper, Unbuildable
from tensordict import NonTensorData, NonTensorStack, TensorDict

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.errors import AioEnvsError, ClosedError, SpecMismatchError, WorkerDiedError


async def test_callers_share_the_replacement_of_a_dead_worker() -> None:
    async with AsyncParallelEnv(4, CountingEnv, num_processes=1) as env:
        await env.reset()
        (old,) = env.pids
        os.kill(old, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            await env.step(acting([0] * 4))
        await asyncio.gather(*(env.reset(masked("_reset", 4, [index])) for index in range(4)))
        (new,) = env.pids
        assert new != old
        assert [row[2] for row in observed(await env.step(acting([0] * 4)))] == [1] * 4


async def test_close_tells_those_who_wait_for_a_draining_env() -> None:
    env = AsyncParallelEnv(2, Sleeper, num_processes=2, close_timeout=0.2)
    await env.reset()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.step(acting([0, 1])), 0.2)
    waiting = asyncio.create_task(env.step(acting([0, 0])))
    await asyncio.sleep(0)
    await env.close()
    with pytest.raises(ClosedError, match=r"env 1|envs 0-1"):
        await waiting


async def test_a_death_is_noticed_although_all_tasks_were_cancelled() -> None:
    async with AsyncParallelEnv(2, CountingEnv, num_processes=2) as env:
        await env.reset()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        os.kill(env.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await env.step(acting([0, 0]))


async def test_serial_envs_let_other_tasks_run() -> None:
    async def for_ever() -> None:
        td = await env.reset()
        while True:
            _, td = await env.step_and_maybe_reset(td.update(acting([0, 0])))

    async with AsyncSerialEnv(2, CountingEnv) as env:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(for_ever(), 0.1)
        assert not env.is_closed


def test_an_unfit_value_for_one_worker_kills_none(recwarn: pytest.WarningsRecorder) -> None:
    with ParallelEnv(2, CountingEnv, num_processes=2) as env:
        pids = env.pids
        with pytest.raises(ValueError, match="cannot be rebuilt"):
            env.reset(options={"x": Unbuildable()})
        env.reset()
        assert env.pids == pids


async def test_the_exception_names_all_envs_that_failed(face: Face) -> None:
    factories = [CountingEnv, FailingTwin, CountingEnv, FailingTwin]
    async with face.open(4, factories) as env:
        await face.call(env.reset)
        with pytest.raises(ZeroDivisionError) as caught:
            await face.call(env.step, acting([0] * 4))
        assert caught.value.env_index == (1, 3)


@pytest.mark.parametrize("processes", [0, 1, 2])
def test_envs_share_no_action_though_the_caller_gave_all_the_same(processes: int) -> None:
    env = ParallelEnv(2, Scribbler, num_processes=processes) if processes else SerialEnv(2, Scribbler)
    with env:
        env.reset()
        action = [1, 2]
        td = TensorDict({"action": NonTensorStack(NonTensorData(action), NonTensorData(action))}, [2])
        assert [row[0] for row in observed(env.step(td))] == [3, 3]
        assert action == [1, 2]


LATE = {
    "locked": (lambda td: td.lock_(), RuntimeError, "locked"),
    "next": (lambda td: td.set("next", torch.zeros(2)), TypeError, "under 'next'"),
    "root": (
        lambda td: td.update(masked("_step", 2, [0])).set("observation", torch.zeros(2, 7)),
        SpecMismatchError,
        "expected int64 of shape",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_cannot_be_filled_in_later_is_refused_before_a_step(name: str) -> None:
    spoil, error, words = LATE[name]
    with SerialEnv(2, CountingEnv) as env:
        env.reset()
        td = acting([0, 0])
        spoil(td)
        with pytest.raises(error, match=words):
            env.step(td)
        assert [row[2] for row in observed(env.step(acting([0, 0])))] == [1, 1]


def test_a_mask_of_nobody_gives_the_latest_values(recwarn: pytest.WarningsRecorder) -> None:
    with SerialEnv(2, CountingEnv) as env:
        env.reset()
        after = observed(env.step(acting([0, 0])))
        assert observed(env.reset(masked("_reset", 2, []))) == after


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda env: pickle.loads(cloudpickle.dumps(env))])
def test_a_copy_is_not_started_and_leaves_the_original_alone(copied: Any) -> None:
    with ParallelEnv(2, CountingEnv) as env:
        env.reset()
        twin = copied(env)
        assert twin.is_closed
        with twin:
            assert [row[1:3] for row in observed(twin.reset())] == [[1, 0]] * 2
        del twin
        assert [row[2] for row in observed(env.step(acting([0, 0])))] == [1, 1]


def test_specs_are_known_after_close() -> None:
    env = ParallelEnv(2, CountingEnv)
    shape = env.action_spec.shape
    env.close()
    assert env.action_spec.shape == shape
    assert env.is_closed


def test_many_masks_are_not_all_remembered() -> None:
    with SerialEnv(12, CountingEnv) as env:
        env.reset()
        generator = np.random.default_rng(0)
        for _ in range(1500):
            env.step(acting([0] * 12, only=np.flatnonzero(generator.random(12) < 0.5).tolist()))
        assert len(env._env._running.pool.select.__self__._known) <= 1100


@pytest.mark.parametrize("device", ["meta", "cuda:99"])
def test_a_device_that_is_not_there_starts_nothing(device: str) -> None:
    if device != "meta" and torch.cuda.is_available():
        pytest.skip("there are CUDA devices here")
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        ParallelEnv(2, CountingEnv, device=device).start()


def test_a_dtype_that_tensors_do_not_have_is_refused() -> None:
    class Long(CountingEnv):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.longdouble)

    with pytest.raises(AioEnvsError, match="float128"):
        SerialEnv(1, Long).start()


@pytest.mark.slow
def test_a_fork_of_the_user_leaves_the_parent_alone() -> None:
    acts = ["env.close()", "del env", "sys.exit()", "env.step(td)"]
    script = f"""
        import os, sys, torch
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from faces import acting
        from failing_envs import CountingEnv
        from aioenvs import ParallelEnv
        for act in {acts!r}:
            env = ParallelEnv(2, CountingEnv, num_processes=2)
            env.reset()
            td = acting([0, 0])
            pid = os.fork()
            if pid == 0:
                try:
                    exec(act)
                except RuntimeError as error:
                    assert "fork" in str(error), error
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            print(act, [row[2] for row in env.step(td)["next", "observation"].tolist()])
            env.close()
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=50)
    assert (run.stdout, run.stderr, run.returncode) == ("".join(f"{act} [1, 1]\n" for act in acts), "", 0)


@pytest.mark.slow
def test_a_storm_of_interrupts_leaves_the_envs_usable() -> None:
    script = f"""
        import os, signal, sys, threading
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from faces import acting
        from failing_envs import CountingEnv
        from aioenvs import ParallelEnv
        env = ParallelEnv(2, CountingEnv, num_processes=2)
        env.reset()

        over = threading.Event()

        def storm():
            while not over.wait(0.002):
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=storm, daemon=True).start()
        caught = 0
        while caught < 100:
            try:
                while True:
                    env.step(acting([0, 0]))
            except KeyboardInterrupt:
                caught += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        over.set()
        env.reset()
        print([row[2] for row in env.step(acting([0, 0]))["next", "observation"].tolist()])
        env.close()
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=50)
    assert (run.stdout, run.returncode) == ("[1, 1]\n", 0), run.stderr


def test_td_of_another_kind_is_refused() -> None:
    with SerialEnv(2, CountingEnv) as env:
        with pytest.raises(TypeError, match="expected a TensorDict"):
            env.step({"action": torch.zeros(2)})
        with pytest.raises(RuntimeError, match="Expected a tensordict"):
            env.step(TensorDict({"action": torch.zeros(3)}, [3]))
