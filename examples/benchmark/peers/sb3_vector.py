"""The vector envs of Stable-Baselines3, which restart finished episodes within the step and copy what they return."""

from collections.abc import Callable
from typing import Any

from systems import NUM_BATCHES, Driver, Job, System, sample_actions

__all__ = ["SYSTEMS"]


class VecDriver(Driver):
    """Steps a `VecEnv`."""

    def __init__(self, job: Job, make: Callable[[list], Any]) -> None:
        self._actions, self._count = sample_actions(job), 0
        self._env = make([job.workload.make] * job.num_envs)
        self._env.reset()

    def step(self) -> int:
        """Step all envs."""
        self._env.step(self._actions[self._count % NUM_BATCHES])
        self._count += 1
        return self._actions.shape[1]

    def close(self) -> None:
        """Close the vector env."""
        self._env.close()


def _dummy(job: Job) -> Driver:
    from stable_baselines3.common.vec_env import DummyVecEnv

    return VecDriver(job, DummyVecEnv)


def _subproc(job: Job) -> Driver:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return VecDriver(job, SubprocVecEnv)


SYSTEMS = (
    System("SB3 DummyVecEnv", "inline", _dummy),
    System("SB3 SubprocVecEnv", "each", _subproc, process_mb=160),
)
