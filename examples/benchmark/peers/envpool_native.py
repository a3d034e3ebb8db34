"""EnvPool: envs that were written anew in C++ and run in threads; no Python is stepped, so the work is another."""

from typing import Any

from systems import Driver, Job, System, Unsupported, sample_actions

from peers.gymnasium_vector import VectorDriver

__all__ = ["SYSTEMS"]


def _make(job: Job) -> Any:
    import envpool

    if job.workload.envpool_id is None:
        raise Unsupported("EnvPool has only its own C++ envs, and none of this kind")
    return envpool.make(
        job.workload.envpool_id, env_type="gymnasium", num_envs=job.num_envs, num_threads=job.num_processes
    )


def _sync(job: Job) -> Driver:
    return VectorDriver(_make(job), sample_actions(job))


REMARK = "the step after the end of an episode is its reset, and counts as a step"
SYSTEMS = (System("EnvPool (C++ envs)", "packed", _sync, native=True, remark=REMARK),)
