"""Worker processes, the first ones and those that replaced them: their groups, signals, descriptors and children."""

import os
import signal
from pathlib import Path
from typing import Any

import failing_envs as faults
import psutil
import pytest
from faces import acting, in_thread, masked, observed
from failing_envs import CountingEnv, numbered
from processes import still_alive
from test_death import kill_and_reap
from test_worker_process import linux, pipes, start_methods

from aioenvs import AsyncParallelEnv
from aioenvs.engine.pools import restart_policy as restarts
from aioenvs.errors import WorkerDiedError

POLICIES: list[dict[str, Any]] = [{"on_worker_death": "raise"}, {"on_worker_death": "restart"}]
policies = pytest.mark.parametrize("policy", POLICIES, ids=["reset", "restart"])


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "LONGEST_DELAY", 0.0)


async def replace_first(env: AsyncParallelEnv) -> None:
    """Kill the first worker, of two, and have it replaced by whatever the policy is."""
    old = env.pids[0]
    await kill_and_reap(old)
    try:
        while env.pids[0] == old or len(env.pids) < 2:
            await env.step(acting([0, 0]))
    except WorkerDiedError:
        await env.reset(masked("_reset", 2, [0]))
    assert old not in env.pids


@start_methods
async def test_ctrl_c_is_the_parents(method: str) -> None:
    """A terminal sends it to the parent's group, where they are not; and what comes all the same is not heeded."""
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), mp_start_method=method) as env:
        await env.reset()
        for _ in range(2):
            groups = [os.getpgid(pid) for pid in env.pids]
            assert groups == list(env.pids)
            assert os.getpgrp() not in groups
            for pid in env.pids:
                os.kill(pid, signal.SIGINT)
            pids = env.pids
            td = await env.step(acting([1, 1]))
            assert [row[0] for row in observed(td)] == [0, 1]
            assert env.pids == pids
            await replace_first(env)


@linux
@start_methods
async def test_those_that_come_later_have_no_ends_of_the_others_pipes(method: str) -> None:
    foreign = pipes(os.getpid())
    async with AsyncParallelEnv(2, CountingEnv, num_processes=2, mp_start_method=method) as env:
        await env.reset()
        await replace_first(env)
        foreign |= set.intersection(*(pipes(pid) for pid in env.pids))  # that in which all say that they are done
        owned = [pipes(pid) - foreign for pid in (*env.pids, os.getpid())]
        assert all(owned)
        everything = sorted(target for targets in owned for target in targets)
        assert everything == sorted(set(everything))


@start_methods
@policies
async def test_what_an_env_started_goes_when_its_worker_is_replaced(
    method: str, policy: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"create_env_kwargs": numbered(2, folder=str(tmp_path)), "mp_start_method": method}
    async with AsyncParallelEnv(2, faults.ChildfulEnv, num_processes=2, **options, **policy) as env:
        await env.reset()
        first, other = simulators(tmp_path)
        await replace_first(env)
        assert await in_thread(still_alive, [first]) == []
        second, same = simulators(tmp_path)
        assert second != first
        assert same == other
        assert second.is_running()
        assert other.is_running()
        assert os.getpgid(second.pid) == env.pids[0]
    assert await in_thread(still_alive, [second, other]) == []


def simulators(folder: Path) -> list[psutil.Process]:
    """What the two envs have started."""
    return [psutil.Process(int((folder / f"{index}.pid").read_text())) for index in range(2)]


@policies
@pytest.mark.slow
async def test_what_an_env_started_goes_when_its_worker_hangs(policy: dict[str, Any], tmp_path: Path) -> None:
    """It was stopped by a signal, so nothing of it can help."""
    kwargs = numbered(2, {0: {"fault": faults.stop_itself, "at": (1, 1)}}, folder=str(tmp_path))
    options: dict[str, Any] = {"create_env_kwargs": kwargs, "step_timeout": 0.5, "close_timeout": 0.5}
    async with AsyncParallelEnv(2, faults.ChildfulEnv, num_processes=2, **options, **policy) as env:
        await env.reset()
        started = simulators(tmp_path)
        if policy["on_worker_death"] == "restart":
            td = await env.step(acting([1, 1]))
            assert td["next", "truncated"].flatten().tolist() == [True, False]
            assert await in_thread(still_alive, started[:1]) == []
        else:
            with pytest.raises(TimeoutError):
                await env.step(acting([1, 1]))
    assert await in_thread(still_alive, [*started, *env_processes(tmp_path)]) == []


def env_processes(folder: Path) -> list[psutil.Process]:
    """Those of what the envs have started last that are still there."""
    pids = [int((folder / f"{index}.pid").read_text()) for index in range(2)]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
