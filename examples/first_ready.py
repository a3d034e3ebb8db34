"""Uneven envs, stepped all together and by whoever is ready first.

    python examples/first_ready.py --slow-share 0.1

A step of an env here takes 2 ms, and now and then 50 ms. A loop that steps all envs together waits for the slowest of
them each time. One that sends each env its next step as soon as there are some answers keeps all of them at work.
The ideal is what the envs could do if nobody ever waited.
"""

import argparse
import asyncio
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from aioenvs import AsyncParallelEnv


class UnevenEnv(gym.Env[Any, Any]):
    """Waits in each step, now and then for long.

    Args:
        seed: Says which steps are slow.
        options: The parsed arguments.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seed: int, options: argparse.Namespace) -> None:
        """Seed the generator."""
        self._rng = np.random.default_rng(seed)
        self._options = options

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin anew."""
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        """Wait."""
        slow = self._rng.random() < self._options.slow_share
        time.sleep((self._options.slow_ms if slow else self._options.ms) / 1000)
        return np.zeros(4, np.float32), 1.0, False, False, {}


def acting(td: Any) -> Any:
    """Do what a policy would."""
    return td.set("action", torch.zeros(len(td), dtype=torch.int64))


async def all_together(env: AsyncParallelEnv, seconds: float) -> float:
    """Step all envs at a time, and return env steps per second."""
    td, steps, began = await env.reset(), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        _, td = await env.step_and_maybe_reset(acting(td))
        steps += len(td)
    return steps / (time.perf_counter() - began)


async def first_ready(env: AsyncParallelEnv, min_get: int, seconds: float) -> float:
    """Step those again that have answered, and return env steps per second."""
    env.send(acting(await env.reset()))
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        _, td = await env.recv(min_get)
        env.send(acting(td))
        steps += len(td)
    elapsed = time.perf_counter() - began
    await env.recv(len(env))  # what is still on its way
    return steps / elapsed


async def measure(options: argparse.Namespace) -> Table:
    """Return both speeds beside the ideal."""
    count = options.num_envs
    kwargs = [{"seed": index, "options": options} for index in range(count)]
    async with AsyncParallelEnv(count, UnevenEnv, create_env_kwargs=kwargs, num_processes=count) as env:
        await all_together(env, 0.2)  # to warm up
        together = await all_together(env, options.seconds)
        ready = await first_ready(env, options.min_get, options.seconds)
    mean = max(0.001, (1 - options.slow_share) * options.ms + options.slow_share * options.slow_ms)
    ideal = count / mean * 1000
    table = Table(
        title=f"{count} envs in {count} processes; {options.ms:g} ms a step, {options.slow_ms:g} ms in "
        f"{options.slow_share:.0%} of them"
    )
    for column in ("loop", "env steps/s", "of the ideal"):
        table.add_column(column, justify="left" if column == "loop" else "right")
    first = f"send and recv(min_get={options.min_get})"
    for name, speed in (("step_and_maybe_reset", together), (first, ready), ("ideal", ideal)):
        table.add_row(name, f"{speed:,.0f}", f"{speed / ideal:.0%}")
    return table


def _between(kind: type[Any], low: float, high: float) -> Any:
    """Return a type of argparse: a number from low to high."""

    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected a number from {low:g} to {high:g}, found {text!r}")
        return value

    read.__name__ = kind.__name__
    return read


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description="Uneven envs: all together, and whoever is ready first.")
    count, milliseconds = _between(int, 1, 256), _between(float, 0, 10_000)
    parser.add_argument("--num-envs", type=count, default=16, help="how many, each in a process (default: 16)")
    parser.add_argument("--min-get", type=count, default=4, help="how many answers to wait for (default: 4)")
    parser.add_argument("--ms", type=milliseconds, default=2.0, help="length of a step (default: 2)")
    parser.add_argument("--slow-ms", type=milliseconds, default=50.0, help="length of a slow one (default: 50)")
    parser.add_argument("--slow-share", type=_between(float, 0, 1), default=0.05, help="of all steps (default: 0.05)")
    parser.add_argument("--seconds", type=_between(float, 0.1, 3600), default=4.0, help="for each loop (default: 4)")
    options = parser.parse_args()
    if options.min_get > options.num_envs:
        parser.error(f"--min-get {options.min_get} is more than --num-envs {options.num_envs}")
    Console().print(asyncio.run(measure(options)))


if __name__ == "__main__":
    main()
