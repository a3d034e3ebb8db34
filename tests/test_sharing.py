"""What a factory shares with the process that starts its envs, and with their siblings, stays shared."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from sharing_envs import BareEnv, SharingEnv
from tensordict import TensorDict
from test_death import kill_and_reap
from test_worker_process import linux
from torchrl.envs import EnvCreator as TheirCreator
from torchrl.envs import GymEnv, TrajCounter, TransformedEnv, VecNorm

from aioenvs import AsyncParallelEnv, AsyncSerialEnv
from aioenvs.engine.adapters.copying import arguments
from aioenvs.engine.pools import restart_policy as restarts
from aioenvs.envs import EnvCreator
from aioenvs.errors import WorkerStartError
from aioenvs.integrations.torchrl import ParallelEnv, SerialEnv
from aioenvs.integrations.torchrl.sharing import share_states

PLACES: list[Any] = [
    pytest.param({"mp_start_method": method, "num_processes": number}, id=f"{method}-{number}")
    for method, number in (("fork", 2), ("forkserver", 3), ("spawn", 2))
]
unwarned = pytest.mark.filterwarnings("ignore:VecNorm wasn't", "ignore::FutureWarning")  # it is shared, though


def normalized(**_: Any) -> TransformedEnv:
    return TransformedEnv(GymEnv("Pendulum-v1"), VecNorm(in_keys=["observation"]))


def counted() -> TransformedEnv:
    return TransformedEnv(GymEnv("Pendulum-v1"), TrajCounter())


class Shared:
    """Things for a `SharingEnv`, and what came of them here."""

    def __init__(self, method: str = "spawn", *, tensor: bool = False) -> None:
        context = multiprocessing.get_context(method)
        self.reading, writing = context.Pipe(duplex=False)
        self.kwargs: dict[str, Any] = {
            "count": context.Value("i", 0),
            "counts": context.Array("i", 2),
            "lock": context.Lock(),
            "queue": context.Queue(),
            "pipe": writing,
        }
        if tensor:
            self.kwargs["tensor"] = torch.zeros(3, dtype=torch.int64).share_memory_()

    def pids(self, number: int) -> list[int]:
        """What so many envs said where they were made, which is the same in the pipe and in the queue."""
        found = [self.kwargs["queue"].get(timeout=10) for _ in range(number)]
        assert sorted(found) == sorted(self.reading.recv() for _ in range(number))
        return found

    def steps(self) -> set[int]:
        """How many steps all envs have taken, as far as each of the things says."""
        tensors = [int(value) for value in self.kwargs.get("tensor", ())]
        return {self.kwargs["count"].value, self.kwargs["counts"][0], *tensors}


@contextmanager
def shared(method: str = "spawn", *, tensor: bool = False) -> Iterator[Shared]:
    things = Shared(method, tensor=tensor)
    try:
        yield things
    finally:
        for end in (things.reading, things.kwargs["pipe"]):
            end.close()
        things.kwargs["queue"].close()
        things.kwargs["queue"].join_thread()


def as_kwargs(things: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return SharingEnv, things


def as_closure(things: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return lambda: SharingEnv(**things), {}


def as_creator(things: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    queue = things.pop("queue")
    return EnvCreator(EnvCreator(lambda **others: SharingEnv(queue=queue, **others)), things), {}


def as_partial(things: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return functools.partial(SharingEnv, **things), {}


@pytest.mark.parametrize(
    ("method", "given", "tensor"),
    [
        ("forkserver", as_kwargs, False),
        ("forkserver", as_closure, True),
        ("forkserver", as_creator, True),
        ("forkserver", as_partial, False),
        ("spawn", as_creator, True),
        ("fork", as_creator, True),
    ],
)
async def test_what_multiprocessing_and_torch_share_also_with_workers_that_come_later(
    method: str, given: Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]], tensor: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(restarts, "LONGEST_DELAY", 0.0)
    with shared(tensor=tensor) as things:
        factory, kwargs = given(dict(things.kwargs))
        options: dict[str, Any] = {"create_env_kwargs": kwargs, "mp_start_method": method}
        async with AsyncParallelEnv(3, factory, num_processes=2, on_worker_death="restart", **options) as env:
            td = env.rand_action(await env.reset())
            assert set(things.pids(3)) == set(env.pids)
            await env.step(td)
            assert things.steps() == {3}
            await kill_and_reap(env.pids[0])
            while not (await env.step(td))["next", "truncated"].any():
                pass
            before = things.steps()
            await env.step(env.rand_action(await env.reset()))
            assert things.steps() == {count + 3 for count in before}
            assert things.pids(1) == [env.pids[0]]


@linux
async def test_nobody_keeps_descriptors_that_only_travelled() -> None:
    """There are more of them than fit into one message."""
    own, pairs = len(os.listdir("/proc/self/fd")), [multiprocessing.Pipe() for _ in range(150)]
    counts = []
    for ends in ([], pairs):
        async with AsyncParallelEnv(2, lambda ends: BareEnv(), create_env_kwargs={"ends": ends}) as env:
            counts.append((await env.call("descriptors"), len(os.listdir("/proc/self/fd")) - own))
    for end in (end for pair in pairs for end in pair):
        end.close()
    assert counts[0] == counts[1]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_a_lock_without_a_name_is_refused(method: str) -> None:
    lock = multiprocessing.get_context("fork").Lock()
    env = AsyncParallelEnv(2, SharingEnv, create_env_kwargs={"lock": lock}, mp_start_method=method)
    with pytest.raises(WorkerStartError, match=r"'lock'.*fork context.*get_context\('spawn'\).*'fork'"):
        await env.start()


async def test_memory_is_shared_by_the_envs_of_this_process_too() -> None:
    tensors = {"shared": torch.zeros(2).share_memory_(), "own": torch.zeros(2)}
    nested = {**tensors, "td": TensorDict(a=torch.zeros(2)).share_memory_(), "module": torch.nn.Linear(2, 2)}
    nested["module"].share_memory()
    found = arguments({"nested": [nested], "hook": lambda: None, **tensors})
    (inner,) = found["nested"]
    assert found["shared"] is inner["shared"] is tensors["shared"]
    assert inner["td"] is nested["td"]
    assert inner["module"] is not nested["module"]
    assert inner["module"].weight is nested["module"].weight
    assert found["own"] is inner["own"]
    assert found["own"] is not tensors["own"]


@pytest.mark.parametrize("backend", ["thread", "serial"])
async def test_envs_in_this_process(backend: str) -> None:
    with shared(tensor=True) as things:
        cls, options = (AsyncSerialEnv, {}) if backend == "serial" else (AsyncParallelEnv, {"backend": backend})
        async with cls(2, SharingEnv, create_env_kwargs=things.kwargs, **options) as env:
            await env.step(env.rand_action(await env.reset()))
            assert things.steps() == {2}
        things.pids(2)


# -- TorchRL's EnvCreator -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _first() -> None:
    """TorchRL keeps the tensors of the first of all creators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        share_states([TheirCreator(normalized)], with_kwargs=False)


def count_of(state: Any) -> float:
    (extra,) = (value for key, value in state.items() if key.endswith("_extra_state"))
    return float(extra["observation_count"])


@unwarned
@pytest.mark.parametrize(
    "options",
    [
        *PLACES[:2],
        pytest.param(*PLACES[2].values, marks=pytest.mark.slow, id=PLACES[2].id),  # each worker imports TorchRL
        pytest.param({"backend": "thread"}, id="thread"),
        None,
    ],
)
def test_statistics_are_one_for_all_workers_and_the_parent(options: Any) -> None:
    """As in TorchRL's tutorial `torchrl_envs`: 1 + 2 for the creator's own env, then three resets and 15 steps."""
    creator = TheirCreator(normalized)
    env = SerialEnv(3, creator) if options is None else ParallelEnv(3, creator, **options)
    before = count_of(creator.state_dict())
    env.rollout(5, break_when_any_done=False)
    counts = [count_of(state) for state in env.state_dict().values()]
    env.close()
    assert counts == [count_of(creator.state_dict())] * 3
    assert counts[0] == pytest.approx(before + 18, abs=0.1)  # older ones count a little less


@pytest.mark.parametrize("options", PLACES[:2])
def test_trajectories_are_counted_over_all_workers(options: Any) -> None:
    env = ParallelEnv(3, TheirCreator(counted), **options)
    found = sorted(number for _ in range(2) for number in env.reset()["traj_count"].flatten().tolist())
    env.close()
    assert found == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_tensors_of_a_creator(method: str) -> None:
    """Those that were in no shared memory are moved there to be pickled, as TorchRL has it, and copied by a fork."""
    tensors = {"shared": torch.zeros(1).share_memory_(), "plain": torch.zeros(1)}

    def make(**given: torch.Tensor) -> GymEnv:
        for tensor in given.values():
            tensor += 1
        return GymEnv("CartPole-v1")

    with ParallelEnv(2, _unmade(make, tensors), num_processes=2, mp_start_method=method) as env:
        env.reset()
    assert tensors == {"shared": 3, "plain": 1 if method == "fork" else 3}


def _unmade(make: Any, tensors: dict[str, torch.Tensor]) -> Any:
    return TheirCreator(make, tensors)  # which calls it once itself


# -- what is tidied up --------------------------------------------------------------------------------------

BY_NAME = """
import os, signal, sys, torch, torch.multiprocessing as mp
from aioenvs import ParallelEnv
import gymnasium as gym
mp.set_sharing_strategy("file_system")
tensor = torch.zeros(2, dtype=torch.int64).share_memory_()
lock, count = mp.get_context("spawn").Lock(), mp.get_context("spawn").Value("i", 0)

class Env(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        with lock, count.get_lock():
            tensor.add_(1)
            count.value += 1

with ParallelEnv(3, Env, num_processes=2) as env:
    env.reset()
    print(tensor.tolist(), count.value, flush=True)
    if sys.argv[1:] == ["worker"]:
        os.kill(env.pids[0], signal.SIGKILL)
    elif sys.argv[1:] == ["parent"]:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@linux
@pytest.mark.slow
@pytest.mark.timeout(150)
def test_names_are_gone_whoever_was_killed() -> None:
    """Torch's memory and locks have names here, of which those who know them take care, each in its own time."""
    before = set(os.listdir("/dev/shm"))
    code = [sys.executable, "-c", BY_NAME]
    programs = [subprocess.Popen([*code, whom], stdout=subprocess.PIPE, text=True) for whom in ("worker", "parent")]
    assert [program.communicate(timeout=120)[0] for program in programs] == ["[3, 3] 3\n"] * 2
    deadline = time.monotonic() + 20
    left = set(os.listdir("/dev/shm")) - before  # maybe with names of other programs, which go with them
    while left:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
        left &= set(os.listdir("/dev/shm"))


@pytest.mark.ray
async def test_memory_is_not_shared_with_other_machines() -> None:
    tensor, lock = torch.ones(1).share_memory_(), multiprocessing.get_context("spawn").Lock()
    for factory in (lambda: tensor.sum() and BareEnv(), lambda: lock and BareEnv()):
        env = AsyncParallelEnv(2, factory, backend="ray")
        with pytest.raises(WorkerStartError, match=r"shares a Tensor .*clone\(\)|Lock objects should only be shared"):
            await env.start()
