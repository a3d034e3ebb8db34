"""PufferLib's vector envs; they restart a finished episode with the step after, and what they return is copied here."""

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from systems import FIRST_READY, NUM_BATCHES, Driver, Job, System, Unsupported, sample_actions

__all__ = ["SYSTEMS"]


def make_env(make: Callable[[], Any], buf: Any = None, seed: int = 0) -> Any:
    """Make one env."""
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(env_creator=make, buf=buf, seed=seed)


class PufferDriver(Driver):
    """Steps a vector env of PufferLib, or the part of it that is ready."""

    def __init__(self, job: Job, backend: str, **options: Any) -> None:
        import pufferlib.vector

        if options.get("num_workers", 1) and job.num_envs % options.get("num_workers", 1):
            raise Unsupported(f"{job.num_envs} envs do not divide into {options['num_workers']} processes")
        self._actions, self._count = sample_actions(job), 0
        make = functools.partial(make_env, job.workload.make)
        self._env = pufferlib.vector.make(make, num_envs=job.num_envs, backend=backend, **options)
        self._env.async_reset(0)
        self._size = len(self._receive()[0])

    def _receive(self) -> list[np.ndarray]:
        observation, reward, terminated, truncated, *_ = self._env.recv()
        return [np.array(part) for part in (observation, reward, terminated, truncated)]

    def step(self) -> int:
        """Send actions and take a batch."""
        self._env.send(self._actions[self._count % NUM_BATCHES][: self._size])
        self._count += 1
        return len(self._receive()[0])

    def close(self) -> None:
        """Close the vector env."""
        self._env.close()


def _serial(job: Job) -> Driver:
    return PufferDriver(job, "Serial")


def _processes(job: Job, **options: Any) -> Driver:
    overwork = job.num_processes > (os.cpu_count() or 1) // 2
    return PufferDriver(job, "Multiprocessing", num_workers=job.num_processes, overwork=overwork, **options)


_first_ready = functools.partial(_processes, batch_size=FIRST_READY, zero_copy=False, sync_traj=False)
REMARK = "the step after the end of an episode is its reset, and counts as a step; while they wait, processes spin"
SYSTEMS = (
    System("PufferLib Serial", "inline", _serial, remark=REMARK),
    System("PufferLib Multiprocessing", "packed", _processes, remark=REMARK),
    System("PufferLib Multiprocessing", "each", _processes, remark=REMARK),
    System("PufferLib Multiprocessing recv", "each", _first_ready, first_ready=True, remark=REMARK),
)
