"""What the systems are given to do: envs that are the same for all, and what a perfect system would make of them."""

import asyncio
import functools
import importlib.util
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["GROUPS", "WORKLOADS", "Workload", "find_workload", "find_workloads"]

BUSY_SECONDS = 0.001
QUICK_SECONDS, SLOW_SECONDS, SLOW_SHARE = 0.002, 0.05, 0.05
AWAITED_SECONDS = 0.05
LONG_SECONDS = 0.25
FRAME = (4, 84, 84)
VECTOR_SIZES = (128, 1024)

Ideal = Callable[[int, int], float]  # of the number of envs and of cores: env steps per second


class _PlainEnv(gym.Env[np.ndarray, int]):
    """An env of two actions whose episodes are 200 steps long."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self._steps = 0
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return self._observation, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Work, then answer."""
        self.work()
        self._steps += 1
        return self._observation, 1.0, False, self._steps >= 200, {}

    def work(self) -> None:
        """Do what a step of this env consists of."""


class BusyEnv(_PlainEnv):
    """Computes for 1 ms of CPU time in each step."""

    def work(self) -> None:
        """Spend CPU time; time on a core that others have does not count."""
        until = time.thread_time() + BUSY_SECONDS
        while time.thread_time() < until:
            pass


class UnevenEnv(_PlainEnv):
    """Waits for 2 ms in a step, and for 50 ms in one of 20."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random()

    def work(self) -> None:
        """Wait."""
        time.sleep(SLOW_SECONDS if self._random.random() < SLOW_SHARE else QUICK_SECONDS)


class LongEnv(_PlainEnv):
    """Waits for 0.25 s in each step."""

    def work(self) -> None:
        """Wait."""
        time.sleep(LONG_SECONDS)


class FrameEnv(_PlainEnv):
    """Computes nothing, and observes 84x84x4 bytes of noise."""

    observation_space = gym.spaces.Box(0, 255, FRAME, np.uint8)

    def __init__(self) -> None:
        super().__init__()
        self._observation = np.random.default_rng(0).integers(0, 256, FRAME, np.uint8)


class CoroutineEnv:
    """Awaits 50 ms in each step, as an env behind a network does."""

    observation_space = _PlainEnv.observation_space
    action_space = _PlainEnv.action_space

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode."""
        return np.zeros(4, np.float32), {}

    async def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Wait without keeping others from it."""
        await asyncio.sleep(AWAITED_SECONDS)
        return np.zeros(4, np.float32), 1.0, False, False, {}


def make_gymnasium(env_id: str) -> gym.Env:
    """Make an env with Gymnasium's usual wrappers."""
    if env_id.startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
        env = gym.make(env_id, frameskip=1)
        return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env), 4)
    return gym.make(env_id)


def make_vector(env_id: str, num_envs: int) -> gym.vector.VectorEnv:
    """Make the vector env of Gymnasium's vector entry point."""
    return gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point")


def make_envpool(env_id: str, num_envs: int) -> gym.vector.VectorEnv:
    """Make a pool of EnvPool, with as many threads as there are cores."""
    import envpool

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bounds that are cast to float32
        return envpool.make_gymnasium(env_id, num_envs=num_envs)


@dataclass(frozen=True)
class Workload:
    """Some env, and who can be compared on it.

    Attributes:
        name: As on the command line.
        text: What a step is.
        make: Makes the env; None for the env on tensors, which each library makes from its own classes. For vector
            envs, it takes their number of envs.
        kind: "gym", "torch", "coroutine", "one" for envs that are stepped one at a time, or "vector" for vector envs.
        envpool_id: The C++ env of EnvPool that comes nearest.
        requires: Modules that it needs, besides Gymnasium.
        first_ready: Whether systems that can may go on with those envs that are ready first.
        waits: Whether envs wait instead of computing.
        takes_masks: Whether a vector env can be told to reset some of its envs.
        ideal: What a system without any costs would reach.
        num_envs, num_processes: What is sensible here, where the command line does not say; each number of envs is
            measured.
    """

    name: str
    text: str
    make: Callable[..., Any] | None
    kind: str = "gym"
    envpool_id: str | None = None
    requires: Sequence[str] = ()
    first_ready: bool = False
    waits: bool = False
    takes_masks: bool = True
    ideal: Ideal | None = None
    num_envs: Sequence[int] = (32,)
    num_processes: int | None = None

    def missing(self) -> str | None:
        """Why it cannot be run here, if so."""
        absent = [name for name in self.requires if importlib.util.find_spec(name) is None]
        return f"{', '.join(absent)} cannot be imported" if absent else None


def _gymnasium(name: str, env_id: str, text: str, **options: Any) -> Workload:
    return Workload(name, text, functools.partial(make_gymnasium, env_id), **options)


MEAN_UNEVEN = SLOW_SHARE * SLOW_SECONDS + (1 - SLOW_SHARE) * QUICK_SECONDS

WORKLOADS = {
    workload.name: workload
    for workload in (
        _gymnasium("cartpole", "CartPole-v1", "CartPole-v1: 5 us of Python, 16 bytes", envpool_id="CartPole-v1"),
        _gymnasium(
            "halfcheetah",
            "HalfCheetah-v5",
            "HalfCheetah-v5: MuJoCo, 136 bytes",
            envpool_id="HalfCheetah-v5",
            requires=("mujoco",),
        ),
        _gymnasium(
            "pong",
            "ALE/Pong-v5",
            "ALE/Pong-v5: AtariPreprocessing and a stack of 4, 28 kB",
            envpool_id="Pong-v5",
            requires=("ale_py", "cv2"),
        ),
        Workload("frames", "no computing, 84x84x4 bytes", FrameEnv),
        Workload(
            "busy",
            "1 ms of computing",
            BusyEnv,
            ideal=lambda envs, cores: min(envs, cores) / BUSY_SECONDS,
            num_envs=(16,),
        ),
        Workload(
            "uneven",
            "waits 2 ms, in 5 % of the steps 50 ms",
            UnevenEnv,
            first_ready=True,
            waits=True,
            ideal=lambda envs, cores: envs / MEAN_UNEVEN,
            num_envs=(16,),
        ),
        Workload(
            "waiting",
            "waits 0.25 s: look at the parent's CPU",
            LongEnv,
            waits=True,
            ideal=lambda envs, cores: envs / LONG_SECONDS,
            num_envs=(4,),
        ),
        Workload(
            "coroutine",
            "a coroutine env that awaits 50 ms",
            CoroutineEnv,
            kind="coroutine",
            waits=True,
            ideal=lambda envs, cores: envs / AWAITED_SECONDS,
            num_envs=(1000,),
            num_processes=2,
        ),
        _gymnasium(
            "one",
            "CartPole-v1",
            "CartPole-v1: one env at a time, as `await env[i].step_and_maybe_reset(td)`",
            kind="one",
            num_envs=(8,),
        ),
        Workload(
            "vector-cartpole",
            "Gymnasium's own vector CartPole",
            functools.partial(make_vector, "CartPole-v1"),
            kind="vector",
            takes_masks=False,
            num_envs=VECTOR_SIZES,
        ),
        Workload(
            "vector-envpool",
            "EnvPool's CartPole; finished episodes are reset by one more call, but not by hand",
            functools.partial(make_envpool, "CartPole-v1"),
            kind="vector",
            requires=("envpool",),
            num_envs=VECTOR_SIZES,
        ),
        Workload(
            "vector-pong",
            "EnvPool's Pong, 28 kB",
            functools.partial(make_envpool, "Pong-v5"),
            kind="vector",
            requires=("envpool",),
            num_envs=VECTOR_SIZES,
        ),
        Workload("torch", "a counting env on tensors, the same source for each library", None, kind="torch"),
    )
}

GROUPS = {"vector": ("vector-cartpole", "vector-envpool", "vector-pong")}


def find_workloads(name: str) -> list[Workload]:
    """Find the workloads of a group, or the one of a name or a Gymnasium id.

    Raises:
        LookupError: If there is none.
    """
    return [find_workload(each) for each in GROUPS.get(name, (name,))]


def find_workload(name: str) -> Workload:
    """Find a workload by its name, or make one of a Gymnasium id.

    Raises:
        LookupError: If there is neither.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    try:
        env_id = gym.spec(name).id
    except (gym.error.Error, ImportError) as error:
        known = ", ".join([*WORKLOADS, *GROUPS])
        raise LookupError(f"{name!r} is neither one of {known} nor a Gymnasium id ({error})") from error
    return _gymnasium(name, name, env_id)
