"""What is compared: systems that step envs, and the small interface through which a turn is given to each."""

import abc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from workloads import Workload

__all__ = ["NUM_BATCHES", "Driver", "Job", "System", "Unsupported", "action_tensors", "sample_actions"]

NUM_BATCHES = 64  # of actions, used again and again
FIRST_READY = 4  # results that a system which need not wait for all takes at once


class Unsupported(Exception):
    """The system has no place for this work; the message says why."""


@dataclass(frozen=True)
class System:
    """One way of stepping envs.

    Attributes:
        name: As the table shows it.
        layout: "inline" in the calling process, "one" all in a process of their own, "packed" several envs to a
            process, "each" one process or thread each.
        start: Makes the driver of a job.
        kinds: What workloads it can run.
        first_ready: Whether it takes whoever is ready first; it is used where that matters only.
        headline: Whether the others are compared with it.
        for_waiting: Whether it is of interest only for envs that wait.
        native: Whether the envs are C++ rewrites and not the Python envs of the others.
        process_mb: What one of its processes needs, roughly.
        remark: Where its meaning of a step is another.
    """

    name: str
    layout: str
    start: "Callable[[Job], Driver]"
    kinds: Sequence[str] = ("gym",)
    first_ready: bool = False
    headline: bool = False
    for_waiting: bool = False
    native: bool = False
    process_mb: int = 40
    remark: str | None = None


@dataclass(frozen=True)
class Job:
    """What a system has to do."""

    workload: Workload
    num_envs: int
    num_processes: int


class Driver(abc.ABC):
    """Runs a system: envs that are started when it is made, stepped, and closed."""

    @abc.abstractmethod
    def step(self) -> int:
        """Let the system do one round, with results that are the caller's own; return how many env steps that was."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the system."""

    def turn(self, seconds: float) -> tuple[int, float]:
        """Step for some seconds; return env steps and the seconds they took."""
        began, steps = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            steps += self.step()
        return steps, elapsed


def sample_actions(job: Job) -> np.ndarray:
    """Return batches of random actions, of shape `(NUM_BATCHES, num_envs, ...)`; the same for every system."""
    if job.workload.make is None:
        return np.random.default_rng(0).standard_normal((NUM_BATCHES, job.num_envs, 1), np.float32)
    env = job.workload.make(1) if job.workload.kind == "vector" else job.workload.make()
    space = env.single_action_space if job.workload.kind == "vector" else env.action_space
    space.seed(0)
    batches = [[space.sample() for _ in range(job.num_envs)] for _ in range(NUM_BATCHES)]
    if hasattr(env, "close"):
        env.close()
    return np.array(batches)


def action_tensors(job: Job) -> list[Any]:
    """Return the same as tensors."""
    import torch  # not before a system needs it

    return [torch.from_numpy(batch) for batch in sample_actions(job)]
