"""TorchRL's batched envs and its pool; Gymnasium's envs go through `GymWrapper`, with integers for actions."""

import functools
import math
from collections.abc import Callable
from typing import Any

from drivers import TensorDictDriver
from systems import FIRST_READY, NUM_BATCHES, Driver, Job, System

__all__ = ["SYSTEMS"]


def make_env(make: Callable[[], Any] | None) -> Any:
    """Make one env."""
    if make is None:
        import torchrl.data
        from tensor_env import counting_env
        from torchrl.envs import EnvBase

        return counting_env(EnvBase, torchrl.data)
    from torchrl.envs import GymWrapper

    return GymWrapper(make(), categorical_action_encoding=True)


def makers(job: Job) -> list[Callable[[], Any]]:
    """Return what makes each env."""
    return [functools.partial(make_env, job.workload.make)] * job.num_envs


class FirstReadyDriver(TensorDictDriver):
    """Steps those envs of a pool that were ready first."""

    def __init__(self, job: Job, env: Any) -> None:
        super().__init__(job, env)
        self._td.set("action", self._actions[0])
        self._env.async_step_and_maybe_reset_send(self._td)

    def step(self) -> int:
        """Take what is ready and send these envs on."""
        _, td = self._env.async_step_and_maybe_reset_recv(min_get=FIRST_READY)
        td.set("action", self._actions[self._count % NUM_BATCHES][: len(td)])
        self._count += 1
        self._env.async_step_and_maybe_reset_send(td)
        return len(td)


def _serial(job: Job) -> Driver:
    from torchrl.envs import SerialEnv

    return TensorDictDriver(job, SerialEnv(job.num_envs, makers(job)))


def _parallel(job: Job) -> Driver:
    from torchrl.envs import ParallelEnv

    return TensorDictDriver(job, ParallelEnv(job.num_envs, makers(job)))


def _pool(job: Job, driver: type[TensorDictDriver] = TensorDictDriver) -> Driver:
    from torchrl.envs import AsyncEnvPool

    size = math.ceil(job.num_envs / job.num_processes)
    options: dict[str, Any] = {"backend": "multiprocessing", "exchange": "auto", "envs_per_worker": size}
    return driver(job, AsyncEnvPool(makers(job), **options))


KINDS = ("gym", "torch")
SYSTEMS = (
    System("TorchRL SerialEnv", "inline", _serial, KINDS),
    System("TorchRL ParallelEnv", "each", _parallel, KINDS, process_mb=280),
    System("TorchRL AsyncEnvPool", "packed", _pool, KINDS, process_mb=270),
    System("TorchRL AsyncEnvPool", "each", _pool, KINDS, process_mb=270),
    System(
        "TorchRL AsyncEnvPool recv",
        "each",
        functools.partial(_pool, driver=FirstReadyDriver),
        KINDS,
        first_ready=True,
        process_mb=270,
    ),
)
