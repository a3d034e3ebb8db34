"""What a worker process is like: its streams, environment, descriptors and modules, and what it may start."""

import asyncio
import functools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import failing_envs as faults
import psutil
import pytest
import torch
from faces import Face, acting, call, in_thread, observed
from failing_envs import CountingEnv, numbered
from processes import still_alive
from tensordict import TensorDict

from aioenvs import AsyncParallelEnv, ParallelEnv
from aioenvs.engine.config import START_METHODS

start_methods = pytest.mark.parametrize("method", START_METHODS)
linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_a_gymnasium_worker_has_no_torch(method: str) -> None:
    assert "torch" in sys.modules
    kwargs = {"report": faults.loaded_modules}
    async with AsyncParallelEnv(2, faults.ReportingEnv, create_env_kwargs=kwargs, mp_start_method=method) as env:
        assert observed(await env.reset()) == [[1, 0, 0, 0]] * 2  # gymnasium, torch, tensordict, a face


async def test_a_registered_env_has_no_torch_either() -> None:
    async with AsyncParallelEnv(2, "CartPole-v1", num_processes=2) as env:
        await env.step(env.rand_action(await env.reset()))
        assert all("libtorch" not in mapped_files(pid) for pid in env.pids)


def mapped_files(pid: int) -> str:
    maps = Path(f"/proc/{pid}/maps")
    return maps.read_text() if maps.exists() else ""


@start_methods
async def test_stdin_environment_and_directory(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("AIOENVS_TEST", "42")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    kwargs = {"report": faults.surroundings}
    async with AsyncParallelEnv(2, faults.ReportingEnv, create_env_kwargs=kwargs, mp_start_method=method) as env:
        assert observed(await env.reset()) == [[0, 0, 42, 1]] * 2  # stdin, MPI variables, AIOENVS_TEST, the file
    assert os.environ["SLURM_PROCID"] == "1"


@start_methods
async def test_what_envs_print_reaches_the_parents_streams(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    kwargs = numbered(2, {1: {"fault": faults.write_a_lot, "at": (1, 1)}})
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, mp_start_method=method) as env:
        await env.reset()
        assert observed(await env.step(acting([3, 4]))) == [[0, 1, 1, 3], [1, 1, 1, 4]]
    out, err = capfd.readouterr()
    assert out.count("x" * 1023 + "\n") == 1024
    assert err.count("x" * 1023 + "\n") == 1024


async def test_prints_of_python(process_face: Face, capfd: pytest.CaptureFixture[str]) -> None:
    kwargs = numbered(2, {1: {"fault": faults.print_a_lot, "at": (1, 1)}})
    async with process_face.open(2, CountingEnv, create_env_kwargs=kwargs) as env:
        await call(env.reset)
        assert observed(await call(env.step, acting([3, 4]))) == [[0, 1, 1, 3], [1, 1, 1, 4]]
    out, err = capfd.readouterr()
    assert out.count("x" * 1023 + "\n") == 1024
    assert err.count("x" * 1023 + "\n") == 1024


@linux
@start_methods
async def test_workers_have_no_ends_of_each_others_pipes(method: str) -> None:
    """Else a worker would not see the end of its own pipe while a sibling lives."""
    options: dict[str, Any] = {"num_processes": 3, "mp_start_method": method}
    foreign = pipes(os.getpid())  # what a fork inherits that is not the engine's
    async with AsyncParallelEnv(3, CountingEnv, **options) as one, AsyncParallelEnv(3, CountingEnv, **options) as two:
        await one.reset()
        await two.reset()
        shared = [functools.reduce(set.intersection, (pipes(pid) for pid in env.pids)) - foreign for env in (one, two)]
        assert [len(pipe) for pipe in shared] == [1, 1]  # that of its pool, in which all say that they are done
        assert shared[0] != shared[1]
        foreign |= shared[0] | shared[1]
        owned = [pipes(pid) - foreign for pid in (*one.pids, *two.pids, os.getpid())]
        assert all(owned)
        everything = sorted(target for targets in owned for target in targets)
        assert everything == sorted(set(everything))


def pipes(pid: int) -> set[str]:
    """The pipes and sockets that a process has open, apart from its standard streams."""
    folder = Path(f"/proc/{pid}/fd")
    targets = {fd.name: os.readlink(fd) for fd in folder.iterdir() if fd.exists() or fd.is_symlink()}
    return {t for name, t in targets.items() if int(name) > 2 and t.startswith(("socket:", "pipe:"))}


@start_methods
@pytest.mark.parametrize("end", ["close", "kill"])
async def test_what_an_env_started_goes_with_it(method: str, end: str, tmp_path: Path) -> None:
    kwargs = numbered(2, folder=str(tmp_path))
    options: dict[str, Any] = {"num_processes": 2, "mp_start_method": method}
    async with AsyncParallelEnv(2, faults.ChildfulEnv, create_env_kwargs=kwargs, **options) as env:
        await env.reset()
        simulators = [psutil.Process(int((tmp_path / f"{index}.pid").read_text())) for index in range(2)]
        assert all(simulator.is_running() for simulator in simulators)
        if end == "kill":
            for pid in env.pids:
                os.kill(pid, signal.SIGKILL)
            assert await in_thread(still_alive, simulators) == []
    assert await in_thread(still_alive, simulators) == []


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_sync_faces_within_a_running_loop(method: str) -> None:
    """As in a notebook: the private loop then lives in a thread, which ends with close."""

    async def cell() -> list[list[int]]:
        kwargs = numbered(4, {1: {"fault": faults.raise_timeout, "at": (1, 2)}})
        with ParallelEnv(4, CountingEnv, create_env_kwargs=kwargs, mp_start_method=method) as env:
            env.reset()
            env.step(acting([1, 2, 3, 4]))
            with pytest.raises(TimeoutError, match="the reactor is hot") as caught:
                env.step(acting([10, 20, 30, 40]))
            assert "env 1 in step" in "\n".join(getattr(caught.value, "__notes__", []))
            env.reset(TensorDict({"_reset": torch.tensor([False, True, False, False])}, batch_size=[4]))
            return observed(env.step(acting([100, 200, 300, 400])))

    assert asyncio.run(cell()) == [[0, 1, 3, 111], [1, 2, 1, 200], [2, 1, 3, 333], [3, 1, 3, 444]]
