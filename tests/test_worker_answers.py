"""Workers by themselves: how much they answer and are sent, when they build, and what torch does in them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict

from aioenvs import AsyncParallelEnv
from aioenvs.engine import config
from aioenvs.engine.pools import host as replacing
from aioenvs.engine.worker import commands
from aioenvs.envs import EnvBase
from aioenvs.specs import Composite, Unbounded


class Env(gym.Env[Any, Any]):
    observation_space = action_space = gym.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        return 0, {}

    def word(self, length: int) -> str:
        return "a" * length


class BuiltSlowly(Env):
    """Notes when it began to be built, and when it had been."""

    def __init__(self, notes: Path) -> None:
        began = time.monotonic()
        time.sleep(0.1)
        notes.write_text(f"{began} {time.monotonic()}")


class Threaded(Env):
    """Brings torch along, and uses it while it is built."""

    def __init__(self) -> None:
        self.threads = torch.get_num_threads(), torch.rand(2).tolist()


class LengthEnv(EnvBase):
    """Observes the length of its action, which may be any."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(length=Unbounded((1,), dtype=torch.int64))
        self.action_spec = Unbounded((-1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, td: Any) -> TensorDict:
        return TensorDict(length=torch.zeros(1, dtype=torch.int64))

    def _step(self, td: Any) -> TensorDict:
        length = torch.tensor([len(td["action"])])
        return TensorDict(length=length, reward=torch.zeros(1), done=torch.zeros(1, dtype=torch.bool))

    def _set_seed(self, seed: int | None) -> None:
        pass


async def test_an_answer_that_is_too_long_is_the_error_of_its_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_BODY", 100_000)  # in forks of this process, too
    async with AsyncParallelEnv(3, Env, num_processes=2, mp_start_method="fork") as env:
        with pytest.raises(ValueError, match=r"answered with \d{6} bytes, more than 100000"):
            await env.call("word", 200_000)
        assert await env.call("word", 2) == ["aa"] * 3


async def test_interpreters_are_not_started_all_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With "spawn" each takes a core while it imports."""
    monkeypatch.setattr(config, "available_cores", lambda: 1)
    monkeypatch.setattr(config, "STARTS_PER_CORE", 1)
    kwargs = [{"notes": tmp_path / str(index)} for index in range(2)]
    async with AsyncParallelEnv(2, BuiltSlowly, create_env_kwargs=kwargs, num_processes=2, mp_start_method="spawn"):
        first, second = sorted(map(times, kwargs))
    assert first[1] <= second[0]


def times(kwargs: dict[str, Path]) -> list[float]:
    return [float(each) for each in kwargs["notes"].read_text().split()]


@pytest.mark.slow  # it is imported twice
async def test_torch_that_comes_with_a_factory_is_set_up_before_it_is_called() -> None:
    options: dict[str, Any] = {"num_processes": 2, "mp_start_method": "spawn", "num_sub_threads": 3}
    async with AsyncParallelEnv(2, Threaded, **options) as env:
        (threads, first), (others, second) = await env.get_attr("threads")
    assert threads == others == 3
    assert first != second


async def test_an_action_is_sent_without_those_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length, so it has no row; it is pickled with all the memory that it is a view of."""
    monkeypatch.setattr(replacing, "MAX_BODY", 60_000)
    async with AsyncParallelEnv(3, LengthEnv, num_processes=3) as env:
        td = await env.step((await env.reset()).set("action", torch.zeros(3, 10_000)))
    assert td["next", "length"].flatten().tolist() == [10_000] * 3


KILLED = """
import os, pathlib, signal, sys
import gymnasium as gym
from aioenvs.integrations.gymnasium import AioVectorEnv

class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
    def __init__(self, index): self.index = index
    def reset(self, **_): return 0, {}
    def close(self): pathlib.Path(sys.argv[1], str(self.index)).touch()

envs = AioVectorEnv([lambda i=i: Env(i) for i in range(3)], num_processes=2)
envs.reset()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_envs_are_closed_though_their_parent_was_killed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, timeout=50)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 3:
        assert time.monotonic() < deadline, list(tmp_path.iterdir())
        time.sleep(0.01)
