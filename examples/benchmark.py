"""Measures aioenvs beside Gymnasium's vector envs and beside the floor, in one run.

    python examples/benchmark.py --num-envs 32 --repeats 7

All systems step the same env, restart finished episodes, and hand out results that are copies. They take turns,
A B C A B C ..., so that a noisy machine is noisy for all; the table gives medians, and ratios within each turn.
The floor is a hand-written loop of bare socketpairs and shared numpy arrays, with neither checks nor errors.
"""

import argparse
import asyncio
import contextlib
import mmap
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import uvloop
from rich.console import Console
from rich.table import Table

import aioenvs

Stepper = Callable[[float], float]  # runs for some seconds, returns env steps per second
WARMUP_STEPS = 100


def actions_for(env_id: str, num_envs: int) -> np.ndarray:
    """Return 64 batches of random actions."""
    env = gym.make(env_id)
    env.action_space.seed(0)
    batches = [[env.action_space.sample() for _ in range(num_envs)] for _ in range(64)]
    env.close()
    return np.array(batches)


def timed(step: Callable[[int], Any], num_envs: int, seconds: float) -> float:
    """Call `step` for some seconds and return env steps per second."""
    for count in range(WARMUP_STEPS):
        step(count)
    began, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        step(count)
        count += 1
    return count * num_envs / elapsed


@contextlib.contextmanager
def gymnasium_vector(env_id: str, num_envs: int, kind: str) -> Iterator[Stepper]:
    """Step Gymnasium's own vector env."""
    env = gym.make_vec(env_id, num_envs=num_envs, vectorization_mode=kind)
    actions = actions_for(env_id, num_envs)
    env.reset(seed=0)
    yield lambda seconds: timed(lambda count: env.step(actions[count % 64]), num_envs, seconds)
    env.close()


@contextlib.contextmanager
def aioenvs_sync(env_id: str, num_envs: int, face: Any, **options: Any) -> Iterator[Stepper]:
    """Step a synchronous face."""
    actions = [torch.from_numpy(batch) for batch in actions_for(env_id, num_envs)]
    with face(num_envs, env_id, **options) as env:
        td = env.reset(seed=0)

        def step(count: int) -> None:
            nonlocal td
            td.set("action", actions[count % 64])
            _, td = env.step_and_maybe_reset(td)

        yield lambda seconds: timed(step, num_envs, seconds)


@contextlib.contextmanager
def aioenvs_async(env_id: str, num_envs: int, **options: Any) -> Iterator[Stepper]:
    """Step the asynchronous face on uvloop."""
    actions = [torch.from_numpy(batch) for batch in actions_for(env_id, num_envs)]
    env = aioenvs.AsyncParallelEnv(num_envs, env_id, **options)

    async def steps(seconds: float) -> float:
        td = await env.reset()
        for count in range(WARMUP_STEPS):
            td.set("action", actions[count % 64])
            _, td = await env.step_and_maybe_reset(td)
        began, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            td.set("action", actions[count % 64])
            _, td = await env.step_and_maybe_reset(td)
            count += 1
        return count * num_envs / elapsed

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(env.start())
        yield lambda seconds: runner.run(steps(seconds))
        runner.run(env.close())


class Floor:
    """Bare processes, one byte each way per step, results copied out of shared arrays."""

    def __init__(self, env_id: str, num_envs: int, num_processes: int) -> None:
        """Fork the processes."""
        env = gym.make(env_id)
        space, action_space = env.observation_space, env.action_space
        self.observation = self._shared((num_envs, *space.shape), space.dtype)
        self.reward = self._shared((num_envs,), np.float32)
        self.ends = self._shared((2, num_envs), np.bool_)
        self.action = self._shared((num_envs, *action_space.shape), action_space.dtype)
        self._pipes: list[socket.socket] = []
        for index in range(num_processes):
            first, last = (num_envs * edge // num_processes for edge in (index, index + 1))
            self._pipes.append(self._fork([gym.make(env_id) for _ in range(first, last)], first))

    @staticmethod
    def _shared(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)

    def _fork(self, envs: list[gym.Env], first: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            for pipe in (ours, *self._pipes):
                pipe.close()
            with contextlib.suppress(BaseException):
                self._serve(theirs, envs, first)
            os._exit(0)
        theirs.close()
        return ours

    def _serve(self, pipe: socket.socket, envs: list[gym.Env], first: int) -> None:
        for env in envs:
            env.reset()
        while pipe.recv(1):
            for row, env in enumerate(envs, first):
                observation, self.reward[row], *ends, _ = env.step(self.action[row])
                self.ends[:, row] = ends
                self.observation[row] = env.reset()[0] if any(ends) else observation
            pipe.send(b"d")

    async def _run(self, actions: np.ndarray, seconds: float) -> float:
        loop = asyncio.get_running_loop()
        replies = [await loop.create_unix_connection(_Reply, sock=pipe.dup()) for pipe in self._pipes]
        count, began = -WARMUP_STEPS, 0.0
        while count <= 0 or time.perf_counter() - began < seconds:
            if count == 0:
                began = time.perf_counter()
            self.action[:] = actions[count % 64]
            for transport, reply in replies:
                reply.waiter = loop.create_future()
                transport.write(b"s")
            await asyncio.gather(*(reply.waiter for _, reply in replies))
            _ = [part.copy() for part in (self.observation, self.reward, self.ends)]
            count += 1
        elapsed = time.perf_counter() - began
        for transport, _ in replies:
            transport.close()
        return count * len(self.reward) / elapsed

    @classmethod
    @contextlib.contextmanager
    def stepper(cls, env_id: str, num_envs: int, num_processes: int) -> Iterator[Stepper]:
        """Step them from an event loop."""
        floor, actions = cls(env_id, num_envs, num_processes), actions_for(env_id, num_envs)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            yield lambda seconds: runner.run(floor._run(actions, seconds))
        for pipe in floor._pipes:
            pipe.close()
            os.wait()


class _Reply(asyncio.Protocol):
    waiter: "asyncio.Future[None]"

    def data_received(self, data: bytes) -> None:
        """Wake whoever waits."""
        self.waiter.set_result(None)


def start_up(env_id: str, num_envs: int) -> dict[str, float]:
    """Return the seconds from construction to the first step, with one process per env."""
    seconds = {}
    began = time.perf_counter()
    with aioenvs.ParallelEnv(num_envs, env_id, num_processes=num_envs) as env:
        env.step_and_maybe_reset(env.rand_action(env.reset()))
        seconds["aioenvs"] = time.perf_counter() - began
    began = time.perf_counter()
    vector = gym.make_vec(env_id, num_envs=num_envs, vectorization_mode="async", vector_kwargs={"context": "spawn"})
    vector.reset()
    vector.step(vector.action_space.sample())
    seconds["gymnasium async (spawn)"] = time.perf_counter() - began
    vector.close()
    return seconds


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Let all systems take turns, and return env steps per second of each turn."""
    env_id, count = options.env, options.num_envs
    processes = options.num_processes or min(count, len(os.sched_getaffinity(0)))
    hosts = {"num_processes": processes}
    with contextlib.ExitStack() as stack:
        systems = {
            "floor": stack.enter_context(Floor.stepper(env_id, count, processes)),
            "aioenvs async": stack.enter_context(aioenvs_async(env_id, count, **hosts)),
            "aioenvs sync": stack.enter_context(aioenvs_sync(env_id, count, aioenvs.ParallelEnv, **hosts)),
            "gymnasium async": stack.enter_context(gymnasium_vector(env_id, count, "async")),
            "aioenvs serial": stack.enter_context(aioenvs_sync(env_id, count, aioenvs.SerialEnv)),
            "gymnasium sync": stack.enter_context(gymnasium_vector(env_id, count, "sync")),
        }
        turns: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(options.repeats):
            for name, run in systems.items():
                turns[name].append(run(options.seconds))
        return turns


def report(turns: dict[str, list[float]], options: argparse.Namespace) -> Table:
    """Return medians, and the medians of the ratios within each turn."""
    table = Table(title=f"{options.env}, {options.num_envs} envs, {options.repeats} turns of {options.seconds} s each")
    for column in ("system", "env steps/s", "us a step", "min - max", "x gymnasium async", "x floor"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, speeds in turns.items():
        ratios = [
            statistics.median(mine / theirs for mine, theirs in zip(speeds, turns[other], strict=True))
            for other in ("gymnasium async", "floor")
        ]
        median = statistics.median(speeds)
        table.add_row(
            name,
            f"{median:,.0f}",
            f"{1e6 * options.num_envs / median:,.0f}",
            f"{min(speeds):,.0f} - {max(speeds):,.0f}",
            *(f"{ratio:.2f}" for ratio in ratios),
        )
    return table


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description="aioenvs beside Gymnasium's vector envs and the floor.")
    parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id (default: CartPole-v1)")
    parser.add_argument("--num-envs", type=int, default=32, help="how many envs (default: 32)")
    parser.add_argument("--num-processes", type=int, help="processes of aioenvs and the floor (default: one a core)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each system (default: 3)")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn (default: 0.5)")
    parser.add_argument("--start-up", type=int, default=0, metavar="N", help="also start N processes of each")
    options = parser.parse_args()
    if options.env not in gym.registry:
        parser.error(f"Gymnasium does not know the id {options.env!r}")
    console = Console()
    console.print(
        f"Python {platform.python_version()}, gymnasium {gym.__version__}, torch {torch.__version__}, "
        f"{len(os.sched_getaffinity(0))} cores"
    )
    console.print(report(measure(options), options))
    if options.start_up:
        for name, seconds in start_up(options.env, options.start_up).items():
            console.print(f"{options.start_up} processes of {name}, to the first step: {seconds:.2f} s")


if __name__ == "__main__":
    main()
