"""Whether anything grows: envs that are started and closed, killed and restarted, stepped, again and again.

    python tests/leaks.py --cycles 300 --batches 1000

What a process holds is counted before and after: its descriptors, threads and children, the objects that Python's
garbage collector knows, and the memory that is its own; of the parent, of the launchers behind the workers, and of
workers that live as long. The beginning of each run is not counted: whoever does a thing for the first time imports and
caches.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
import psutil
from chaos import impatient

from aioenvs import AsyncParallelEnv, AsyncSerialEnv
from aioenvs.engine.pools import launching as process
from aioenvs.errors import WorkerDiedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each worker would import torch for it

__all__ = ["SCENARIOS", "WordEnv", "growth_of_restarts", "growth_of_starts", "growth_of_steps"]

WARM_UP = 10
LENGTH = 4000  # of what is observed, in characters
LETTERS = "ab"
Growth = Counter[str]


class WordEnv(gym.Env[Any, Any]):
    """Observes a long text, and is told a short one: both travel as objects."""

    observation_space = gym.spaces.Text(LENGTH, charset=LETTERS)
    action_space = gym.spaces.Text(10, charset=LETTERS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return "a" * LENGTH, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return LETTERS[len(action) % 2] * LENGTH, 0.0, self.steps == 20, False, {}

    def objects(self) -> int:
        tidy()
        return len(gc.get_objects())


# -- what is held ---------------------------------------------------------------------------------------


def holdings() -> Growth:
    """What this process and its launchers hold."""
    tidy()
    own = psutil.Process()
    held = _of("own", [own])
    held["own objects"] = len(gc.get_objects())
    held["own processes"] = len(own.children(recursive=True))
    return held + _of("launchers'", [psutil.Process(launcher.pid) for launcher in process._launchers.values()])


async def workers_holdings(env: Any) -> Growth:
    """What the workers of some envs hold."""
    objects = max(await env.call("objects"))
    held = _of("workers'", [psutil.Process(pid) for pid in env.pids])
    held["workers' objects"] = objects
    return held


def tidy() -> None:
    """Give back what is not needed, also to the system: else glibc does so now and then, many megabytes at a time."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _of(whose: str, processes: Sequence[psutil.Process]) -> Growth:
    held = Growth()
    for one in processes:
        held[f"{whose} descriptors"] += one.num_fds()
        held[f"{whose} threads"] += one.num_threads()
        held[f"{whose} memory"] += one.memory_full_info().uss
    return held


def grown(before: Growth, after: Growth) -> Growth:
    after.subtract(before)
    return after


async def over_cycles(cycle: Callable[[], Awaitable[None]], cycles: int) -> Growth:
    """By how much the holdings grow over so many cycles."""
    for _ in range(WARM_UP):
        await cycle()
    before = holdings()
    for _ in range(cycles):
        await cycle()
    return grown(before, holdings())


# -- what is done again and again -----------------------------------------------------------------------


async def growth_of_starts(cycles: int, **options: Any) -> Growth:
    """Envs that are made, started, used and closed."""
    serial = options == {"backend": "serial"}

    async def cycle() -> None:
        async with AsyncSerialEnv(2, WordEnv) if serial else AsyncParallelEnv(2, WordEnv, **options) as env:
            await env.rand_step(await env.reset())

    return await over_cycles(cycle, cycles)


async def growth_of_restarts(cycles: int, policy: str) -> Growth:
    """A worker that is killed, and replaced by itself or by a reset."""
    options: dict[str, Any] = {"on_worker_death": "restart", "max_restarts": 2 * WARM_UP + cycles}
    with impatient():
        async with AsyncParallelEnv(2, WordEnv, num_processes=2, **(options if policy == "restart" else {})) as env:
            td = await env.reset()

            async def cycle() -> None:
                nonlocal td
                os.kill(env.pids[0], signal.SIGKILL)
                lost = False
                while not lost:
                    try:
                        td = (await env.step(env.rand_action(td)))["next"]
                        lost = bool(td["truncated"].any())
                    except WorkerDiedError:
                        td, lost = await env.reset(), True

            growth = await over_cycles(cycle, cycles)
            if policy == "restart" and env.statistics().restarts[0] < cycles:
                raise AssertionError(f"{env.statistics().restarts[0]} restarts instead of {cycles}")
            return growth


async def growth_of_steps(batches: int, num_envs: int = 100) -> Growth:
    """Steps, with a reset now and then, whose observations and actions travel as objects."""
    async with AsyncParallelEnv(num_envs, WordEnv, num_processes=2) as env:
        td = await env.reset()

        async def batch() -> None:
            nonlocal td
            _, td = await env.step_and_maybe_reset(env.rand_action(td))

        for _ in range(10 * WARM_UP):
            await batch()
        before = holdings() + await workers_holdings(env)
        for _ in range(batches):
            await batch()
        return grown(before, holdings() + await workers_holdings(env))


SCENARIOS: dict[str, Callable[[int, int], Awaitable[Growth]]] = {
    "starts, forkserver": lambda cycles, _: growth_of_starts(cycles, num_processes=1),
    "starts, fork": lambda cycles, _: growth_of_starts(cycles // 3, num_processes=1, mp_start_method="fork"),
    "starts, spawn": lambda cycles, _: growth_of_starts(cycles // 10, num_processes=1, mp_start_method="spawn"),
    "starts, thread": lambda cycles, _: growth_of_starts(cycles, backend="thread"),
    "starts, serial": lambda cycles, _: growth_of_starts(cycles, backend="serial"),
    "deaths and resets": lambda cycles, _: growth_of_restarts(cycles, "raise"),
    "deaths and restarts": lambda cycles, _: growth_of_restarts(cycles, "restart"),
    "steps": lambda _, batches: growth_of_steps(batches),
}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cycles", type=int, default=300)
    parser.add_argument("--batches", type=int, default=1000, help="of 100 envs")
    parser.add_argument("--only", default="", help="the scenarios whose names begin so")
    given = parser.parse_args(arguments)
    warnings.simplefilter("error")
    for name, scenario in SCENARIOS.items():
        if name.startswith(given.only):
            began = time.monotonic()
            growth = asyncio.run(scenario(given.cycles, given.batches))
            each = ", ".join(f"{what} {amount:+}" for what, amount in growth.items() if amount)
            say(f"{name}: {time.monotonic() - began:.1f} s; {each or 'nothing has grown'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
