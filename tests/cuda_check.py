"""Checks results on a CUDA device, then measures: `python tests/cuda_check.py`, in less than three minutes.

It runs the tests that are marked `cuda`, and prints

* how many bytes a second cross to the device: from a pinned block, from a pageable one, and leaf by leaf;
* how long a step takes with a policy on the device: with and without pinning, with results on the host that the caller
  moves, and with two halves of the envs, one of which steps while the results of the other cross.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from aioenvs import AsyncParallelEnv
from aioenvs.tensors.device import CudaBackend, Transfer, backend_of

FOLDER = Path(__file__).parent
TESTS_SECONDS = 100
NUM_ENVS = 32
STEPS = 200
SHAPE = (4, 84, 84)


class Frames(gym.Env[Any, Any]):
    """As an Atari game without the game."""

    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gym.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.frame = np.zeros(SHAPE, np.uint8)
        return self.frame, {}

    def step(self, action: Any) -> Any:
        end = time.perf_counter() + 2e-4
        while time.perf_counter() < end:
            pass
        self.frame[0, 0, 0] += 1
        return self.frame, 0.0, False, False, {}


def run_tests() -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", str(FOLDER / "test_cuda.py")]
    try:
        return subprocess.run(command, cwd=FOLDER.parent, timeout=TESTS_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"the tests took longer than {TESTS_SECONDS} s")
        return 1


def seconds(action: Callable[[], Any], repeat: int = 20) -> float:
    """The median time of an action on the device, from its call to its end."""
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_bandwidth() -> None:
    print(f"\n{'bytes':>12} {'pinned':>12} {'pageable':>12} {'leaf by leaf':>14}   GB/s")
    backend = backend_of("cuda")
    assert isinstance(backend, CudaBackend)
    for nbytes in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27):
        memory = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        leaves = TensorDict({str(n): part.clone() for n, part in enumerate(memory.chunk(8))}, [])
        pageable = seconds(partial(Transfer(memory, backend, pin_memory=False).bring, memory))
        crossing = Transfer(memory, backend)
        pinned = seconds(partial(crossing.bring, memory))
        crossing.close()
        found = [pinned, pageable, seconds(partial(leaves.to, "cuda"))]
        print(f"{nbytes:>12} " + " ".join(f"{nbytes / each / 1e9:>12.2f}" for each in found))


def make_policy() -> Callable[[torch.Tensor], torch.Tensor]:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(4, 32, 8, 4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 4, 2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 6),
    ).cuda()

    def act(pixels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            chosen: torch.Tensor = net(pixels.float() / 255).argmax(-1)
        return chosen

    return act


async def step_seconds(act: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> float:
    """How long a step of all envs takes, the policy included."""
    crosses = "device" in options
    async with AsyncParallelEnv(NUM_ENVS, Frames, **options) as env:
        root = await env.reset()
        began = 0.0
        for step in range(STEPS + 20):
            if step == 20:
                torch.cuda.synchronize()
                began = time.perf_counter()
            if crosses:
                root["action"] = act(root["observation"])
            else:
                root["action"] = act(root["observation"].to("cuda")).cpu()
            _, root = await env.step_and_maybe_reset(root)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS


async def halves_seconds(act: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The same with two halves of the envs that take turns: one steps while the other's frames cross and are judged."""
    async with AsyncParallelEnv(NUM_ENVS, Frames, device="cuda") as env:
        await env.reset()

        async def play(half: Any, count: int) -> None:
            root = await half.reset()
            for _ in range(count):
                _, root = await half.step_and_maybe_reset(root.set("action", act(root["observation"])))

        halves = [env[: NUM_ENVS // 2], env[NUM_ENVS // 2 :]]
        await asyncio.gather(*(play(half, 20) for half in halves))
        began = time.perf_counter()
        await asyncio.gather(*(play(half, STEPS) for half in halves))
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS


def measure_steps() -> None:
    act = make_policy()
    act(torch.zeros(NUM_ENVS, *SHAPE, dtype=torch.uint8, device="cuda"))
    rows = {
        'device="cuda"': asyncio.run(step_seconds(act, device="cuda")),
        'device="cuda", non_blocking=False': asyncio.run(step_seconds(act, device="cuda", non_blocking=False)),
        'device="cuda", pin_memory=False': asyncio.run(step_seconds(act, device="cuda", pin_memory=False)),
        "results on the host, moved by the caller": asyncio.run(step_seconds(act)),
        'device="cuda", two halves in turn': asyncio.run(halves_seconds(act)),
    }
    print(f"\n{NUM_ENVS} envs, frames of {SHAPE}, a small convolutional policy on the device: ms for a step of all")
    for name, taken in rows.items():
        print(f"{name:<44}{1000 * taken:>8.2f}")


def main() -> int:
    if not torch.cuda.is_available():
        print("there is no CUDA device here")
        return 1
    print(torch.cuda.get_device_name())
    failed = run_tests()
    measure_bandwidth()
    measure_steps()
    return failed


if __name__ == "__main__":
    sys.exit(main())
