"""Gymnasium's vector envs, which restart finished episodes within the step and copy what they return."""

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from systems import NUM_BATCHES, Driver, Job, System, sample_actions

__all__ = ["SYSTEMS", "VectorDriver"]


class VectorDriver(Driver):
    """Steps a vector env."""

    def __init__(self, env: VectorEnv, actions: np.ndarray) -> None:
        self._env, self._actions, self._count = env, actions, 0
        env.reset()

    def step(self) -> int:
        """Step all envs."""
        self._env.step(self._actions[self._count % NUM_BATCHES])
        self._count += 1
        return self._actions.shape[1]

    def close(self) -> None:
        """Close the vector env."""
        self._env.close()


def _in_this_process(job: Job) -> Driver:
    makes = [job.workload.make] * job.num_envs
    return VectorDriver(SyncVectorEnv(makes, copy=True, autoreset_mode=AutoresetMode.SAME_STEP), sample_actions(job))


def _in_processes(job: Job) -> Driver:
    makes = [job.workload.make] * job.num_envs
    return VectorDriver(AsyncVectorEnv(makes, copy=True, autoreset_mode=AutoresetMode.SAME_STEP), sample_actions(job))


SYSTEMS = (
    System("Gymnasium SyncVectorEnv", "inline", _in_this_process),
    System("Gymnasium AsyncVectorEnv", "each", _in_processes),
)
