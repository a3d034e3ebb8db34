"""Torch is imported once for all workers that need it, and not at all for those that do not."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from faces import in_thread
from failing_envs import ReportingEnv, loaded_modules
from processes import still_alive

import aioenvs
from aioenvs import AsyncParallelEnv, EnvCreator, ParallelEnv
from aioenvs.engine.pools import launching as process
from aioenvs.engine.preload import modules_to_preload
from aioenvs.testing import CountingEnv

MEGABYTE = 2**20
MAX_PRIVATE = 60 * MEGABYTE  # of a worker; with an import of torch it would be more than 150


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """Workers need not import this module, and torch with it."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def has_torch(pid: int | None) -> bool:
    """Whether a process has loaded torch's library."""
    assert pid is not None
    return any("libtorch" in mapped.path for mapped in psutil.Process(pid).memory_maps())


def launcher_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


def private(pid: int) -> int:
    return psutil.Process(pid).memory_full_info().uss


class Watched:
    """A factory that is rebuilt by a function that looks whether torch was there before."""

    def __init__(self, was_there: bool | None = None) -> None:
        self.was_there = was_there

    def __reduce__(self) -> Any:
        return rebuilt, (CountingEnv,) if self.was_there is None else ()

    def __call__(self) -> CountingEnv:
        return CountingEnv(custom_attr=self.was_there)


def rebuilt(*_: Any) -> Watched:
    return Watched("torch" in sys.modules)


def unsuspicious() -> Any:
    """A factory that does not look like torch at all."""
    import importlib

    was_there = "torch" in sys.modules
    found = importlib.import_module("aioenvs.testing")
    return getattr(found, "Counting" + "Env")(custom_attr=was_there)


# -- torch envs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.slow
async def test_workers_share_one_import(method: str) -> None:
    async with AsyncParallelEnv(4, CountingEnv, num_processes=4, mp_start_method=method) as env:
        assert (await env.rollout(3)).shape == (4, 3)
        assert has_torch(launcher_of(env.pids[0]))
        assert len({launcher_of(pid) for pid in env.pids}) == 1
        assert max(map(private, env.pids)) < MAX_PRIVATE


async def test_torch_is_there_before_the_factory() -> None:
    async with AsyncParallelEnv(2, Watched(), num_processes=2) as env:
        assert await env.get_attr("custom_attr") == [True, True]


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.slow
async def test_a_need_that_cannot_be_guessed(method: str) -> None:
    assert "torch" not in modules_to_preload([unsuspicious])
    async with AsyncParallelEnv(1, unsuspicious, mp_start_method=method) as env:
        assert await env.get_attr("custom_attr") == [method == "fork"]
        assert (await env.rollout(3)).shape == (1, 3)


@pytest.mark.slow
async def test_workers_have_the_threads_that_they_are_given() -> None:
    for options, expected in (({}, 1), ({"num_sub_threads": 2}, 2)):
        for factory in (threads_at_hand, unsuspicious_threads):
            async with AsyncParallelEnv(1, factory, **options) as env:
                assert await env.get_attr("custom_attr") == [expected]


def threads_at_hand() -> CountingEnv:
    return CountingEnv(custom_attr=torch.get_num_threads())


def unsuspicious_threads() -> Any:
    import importlib

    env = unsuspicious()
    env.custom_method = importlib.import_module("torch").get_num_threads
    return TellingLater(env)


class TellingLater:
    """Reads the attribute of an env when it is asked for, not when the env is made."""

    def __init__(self, env: Any) -> None:
        self.__dict__["env"] = env

    def __getattr__(self, name: str) -> Any:
        env = self.__dict__["env"]
        return env.custom_method() if name == "custom_attr" else getattr(env, name)


# -- others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", ["CartPole-v1", functools.partial(ReportingEnv, loaded_modules)])
async def test_gymnasium_workers_know_no_torch(factory: Any) -> None:
    assert "torch" in sys.modules
    async with AsyncParallelEnv(2, factory, num_processes=2) as env:
        td = await env.reset()
        assert not any(has_torch(pid) or has_torch(launcher_of(pid)) for pid in env.pids)
        if not isinstance(factory, str):
            assert td["observation"].tolist() == [[1, 0, 0, 0]] * 2


async def test_a_pool_of_both_kinds() -> None:
    def either(torchy: bool) -> Any:
        return CountingEnv() if torchy else unsuspicious()

    kwargs = [{"torchy": True}, {"torchy": False}]
    async with AsyncParallelEnv(2, either, create_env_kwargs=kwargs, num_processes=2) as env:
        assert await env.get_attr("custom_attr") == ["counting", True]


# -- launchers ------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_pools_share_a_launcher() -> None:
    async with (
        AsyncParallelEnv(1, CountingEnv) as first,
        AsyncParallelEnv(2, [CountingEnv, lambda: CountingEnv(7)], num_processes=2) as second,
        AsyncParallelEnv(1, "CartPole-v1") as third,
    ):
        torchy = {launcher_of(pid) for pid in (*first.pids, *second.pids)}
        assert len(torchy) == 1
        assert launcher_of(third.pids[0]) not in torchy
        assert torchy < {launcher.pid for launcher in process._launchers.values()}
    async with AsyncParallelEnv(1, CountingEnv) as again:
        assert {launcher_of(again.pids[0])} == torchy


SCRIPT = """
import os, signal, sys
import psutil
from aioenvs import ParallelEnv
from aioenvs.testing import CountingEnv

env = ParallelEnv(2, CountingEnv, num_processes=2)
env.reset()
print(psutil.Process(env.pids[0]).ppid(), *env.pids, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "raising":
    raise ValueError("enough")
"""


@pytest.mark.parametrize(("how", "code"), [("returning", 0), ("raising", 1), ("killed", -signal.SIGKILL)])
@pytest.mark.slow
async def test_a_launcher_ends_with_its_parent(how: str, code: int) -> None:
    def run() -> Any:
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, how]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    ended = await in_thread(run)
    assert ended.returncode == code, ended.stderr
    pids = [int(word) for word in ended.stdout.split()]
    assert len(pids) == 3
    assert await in_thread(still_alive, [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]) == []


# -- the guess ------------------------------------------------------------------------------------------


def calls_another() -> Any:
    return indirectly()


def indirectly() -> Any:
    return CountingEnv()


def has_it_in_its_closure(cls: Any) -> Callable[[], Any]:
    return lambda: cls()


class Maker:
    """A factory with a state."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def __call__(self) -> Any:
        return self.what()


@pytest.mark.parametrize(
    "factory",
    [
        CountingEnv,
        lambda: CountingEnv(),
        lambda: aioenvs.testing.CountingEnv(),
        lambda: torch.zeros(3),
        functools.partial(CountingEnv, 3),
        functools.partial(Maker(int), torch.zeros(1)),
        calls_another,
        has_it_in_its_closure(CountingEnv),
        Maker(CountingEnv),
        Maker(lambda: next(CountingEnv() for _ in range(1))),
        EnvCreator(CountingEnv),
        lambda: ParallelEnv(2, CountingEnv),
        CountingEnv(3).custom_method,
    ],
    ids=range(13),
)
def test_a_need_for_torch_is_seen(factory: Any) -> None:
    assert {"torch", "tensordict"} <= set(modules_to_preload([lambda: None, factory]))


@pytest.mark.parametrize(
    "factory",
    ["CartPole-v1", ReportingEnv, lambda: ReportingEnv(loaded_modules), functools.partial(ReportingEnv, os.getpid)],
    ids=range(4),
)
def test_there_is_no_need_where_none_is_seen(factory: Any) -> None:
    assert "torch" not in modules_to_preload([factory])
