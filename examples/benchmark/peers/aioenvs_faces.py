"""The faces of aioenvs: coroutines on uvloop, plain calls, one process, processes or threads."""

import functools
from typing import Any

from drivers import LoopDriver, TensorDictDriver
from systems import FIRST_READY, NUM_BATCHES, Driver, Job, System, Unsupported, action_tensors

import aioenvs

__all__ = ["SYSTEMS"]


def factory_of(job: Job) -> Any:
    """Return what makes an env."""
    if job.workload.make is not None:
        return job.workload.make
    from peers.aioenvs_tensor import make_tensor_env  # imports torch

    return make_tensor_env


class CoroutineDriver(LoopDriver):
    """Steps the face that has coroutines."""

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__()
        self._actions, self._count = action_tensors(job), 0
        self._env = aioenvs.AsyncParallelEnv(job.num_envs, factory_of(job), **options)
        self._td = self._runner.run(self._env.reset())

    async def _step(self) -> int:
        self._td.set("action", self._next_actions())
        _, self._td = await self._env.step_and_maybe_reset(self._td)
        return len(self._td)

    def _next_actions(self) -> Any:
        self._count += 1
        return self._actions[self._count % NUM_BATCHES]

    def close(self) -> None:
        """Close the face and the loop."""
        self._runner.run(self._env.close())
        self._runner.close()


class FirstReadyDriver(CoroutineDriver):
    """Goes on with those envs that were ready first."""

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__(job, **options)
        self._td.set("action", self._next_actions())
        self._runner.run(self._send())

    async def _send(self) -> None:
        self._env.send(self._td)

    async def _step(self) -> int:
        _, td = await self._env.recv(min_get=FIRST_READY)
        td.set("action", self._next_actions()[: len(td)])
        self._env.send(td)
        return len(td)

    def close(self) -> None:
        """Receive what is outstanding first."""

        async def drain() -> None:
            await self._env.recv(min_get=len(self._env.outstanding))

        self._runner.run(drain())
        super().close()


class VectorEnvDriver(CoroutineDriver):
    """Steps vector envs that make up the number of envs together; each is one env of the batch.

    Those that cannot be told to reset single envs take plain steps, as by hand.
    """

    def __init__(self, job: Job, num_workers: int, face: Any = aioenvs.AsyncParallelEnv) -> None:
        LoopDriver.__init__(self)
        if job.num_envs % num_workers:
            raise Unsupported(f"{job.num_envs} envs do not divide into {num_workers} vector envs")
        size = job.num_envs // num_workers
        batch = (num_workers, size)
        self._actions = [actions.unflatten(0, batch) for actions in action_tensors(job)]
        self._count, self._num_envs = 0, job.num_envs
        self._is_told = job.workload.takes_masks
        self._env = face(num_workers, functools.partial(job.workload.make, size))
        self._td = self._runner.run(self._env.reset())

    async def _step(self) -> int:
        self._td.set("action", self._next_actions())
        if self._is_told:
            _, self._td = await self._env.step_and_maybe_reset(self._td)
        else:
            self._td = aioenvs.step_mdp(await self._env.step(self._td))
        return self._num_envs


class OneOfManyDriver(CoroutineDriver):
    """Steps one env at a time, through a view of it, with the same meaning of a step; all get their turn."""

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__(job, **options)
        self._views, self._tds = list(self._env), list(self._td.split(1))

    async def _step(self) -> int:
        index = self._count % len(self._views)
        td = self._tds[index].set("action", self._next_actions()[index : index + 1])
        _, self._tds[index] = await self._views[index].step_and_maybe_reset(td)
        return 1


def _coroutines(job: Job, driver: type[CoroutineDriver] = CoroutineDriver, **options: Any) -> Driver:
    return driver(job, num_processes=job.num_processes, **options)


def _parallel(job: Job) -> Driver:
    env = aioenvs.ParallelEnv(job.num_envs, factory_of(job), num_processes=job.num_processes)
    return TensorDictDriver(job, env)


def _serial(job: Job) -> Driver:
    return TensorDictDriver(job, aioenvs.SerialEnv(job.num_envs, factory_of(job)))


def _vector_here(job: Job) -> Driver:
    return VectorEnvDriver(job, 1, aioenvs.AsyncSerialEnv)


def _vector_beside(job: Job) -> Driver:
    return VectorEnvDriver(job, job.num_processes)


KINDS = ("gym", "torch")
_first_ready = functools.partial(_coroutines, driver=FirstReadyDriver)
_one_of_many = functools.partial(_coroutines, driver=OneOfManyDriver)
_threads = functools.partial(_coroutines, backend="thread")
SYSTEMS = (
    System("aioenvs AsyncParallelEnv", "packed", _coroutines, (*KINDS, "coroutine"), headline=True),
    System("aioenvs AsyncParallelEnv", "each", _coroutines, KINDS),
    System("aioenvs AsyncParallelEnv env[i]", "each", _one_of_many, ("one",), headline=True),
    System("aioenvs AsyncParallelEnv recv", "each", _first_ready, KINDS, first_ready=True, headline=True),
    System("aioenvs AsyncParallelEnv threads", "each", _threads, KINDS, for_waiting=True),
    System("aioenvs ParallelEnv", "packed", _parallel, KINDS),
    System("aioenvs ParallelEnv", "each", _parallel, KINDS),
    System("aioenvs SerialEnv", "inline", _serial, KINDS, headline=True),
    System("aioenvs AsyncSerialEnv", "inline", _vector_here, ("vector",), headline=True),
    System("aioenvs AsyncParallelEnv", "one", _vector_beside, ("vector",), headline=True),
    System("aioenvs AsyncParallelEnv", "packed", _vector_beside, ("vector",)),
)
