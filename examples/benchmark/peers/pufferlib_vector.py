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


def make_vector_env(make: Callable[[int], Any], num_envs: int, buf: Any = None, seed: int = 0) -> Any:
    """Make a native env of PufferLib from a vector env, whose arrays are written to PufferLib's."""
    import pufferlib

    class VectorPufferEnv(pufferlib.PufferEnv):
        def __init__(self) -> None:
            self.env = make(num_envs)
            self.num_agents = num_envs
            self.single_observation_space = self.env.single_observation_space
            self.single_action_space = self.env.single_action_space
            super().__init__(buf)

        def reset(self, seed: Any = None) -> Any:
            self.observations[:] = self.env.reset()[0]
            return self.observations, []

        def step(self, actions: Any) -> Any:
            results = self.env.step(actions)
            arrays = (self.observations, self.rewards, self.terminals, self.truncations)
            for array, result in zip(arrays, results[:4], strict=True):
                array[:] = result
            return *arrays, []

        def close(self) -> None:
            self.env.close()

    return VectorPufferEnv()


class PufferDriver(Driver):
    """Steps a vector env of PufferLib, or the part of it that is ready."""

    def __init__(self, job: Job, backend: str, **options: Any) -> None:
        import pufferlib.vector

        if options.get("num_workers", 1) and job.num_envs % options.get("num_workers", 1):
            raise Unsupported(f"{job.num_envs} envs do not divide into {options['num_workers']} processes")
        self._actions, self._count = sample_actions(job), 0
        count = job.num_envs
        make = functools.partial(make_env, job.workload.make)
        if job.workload.kind == "vector":
            count = options.get("num_workers", 1)
            make = functools.partial(make_vector_env, job.workload.make, job.num_envs // count)
        self._env = pufferlib.vector.make(make, num_envs=count, backend=backend, **options)
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
    System("PufferLib Serial", "inline", _serial, ("gym", "vector"), remark=REMARK),
    System("PufferLib Multiprocessing", "packed", _processes, ("gym", "vector"), remark=REMARK),
    System("PufferLib Multiprocessing", "each", _processes, remark=REMARK),
    System("PufferLib Multiprocessing recv", "each", _first_ready, first_ready=True, remark=REMARK),
)
