"""Backends: the pool that a configuration asks for. Free of torch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from aioenvs.engine.config import BatchConfig
from aioenvs.engine.pools.inline_host import InlinePool
from aioenvs.engine.pools.pool import Pool
from aioenvs.engine.pools.thread_host import ThreadPool

__all__ = ["make_pool", "share_states"]

PICKLING = ("forkserver", "spawn")  # start methods for which factories are pickled


def make_pool(config: BatchConfig, *, yields: bool) -> Pool:
    """The pool, which is not started.

    Args:
        config: What was asked for.
        yields: Whether commands to envs in this process let other tasks run, even if there is nothing to wait for.
    """
    if config.backend == "serial":
        return InlinePool(
            config.factories,
            config.kwargs,
            yields=yields,
            max_concurrency=config.max_concurrency,
            rules=config.rules,
        )
    if config.backend == "thread":
        return ThreadPool(
            config.groups,
            config.factories,
            config.kwargs,
            timeouts=config.timeouts,
            max_concurrency=config.max_concurrency,
            rules=config.rules,
        )
    hosts = config.groups, config.factories, config.kwargs
    options: dict[str, Any] = {"timeouts": config.timeouts, "options": config.worker_options()}
    if config.max_restarts is not None:
        options["max_restarts"] = config.max_restarts
    # All of these need what Windows does not have.
    if config.backend == "ray":
        from aioenvs.engine.pools.ray.pool import RayPool, RestartingRayPool

        make_hosts = RayPool if config.max_restarts is None else RestartingRayPool
        return make_hosts(*hosts, ray_options=config.ray_options, **options)
    from aioenvs.engine.pools.restart_policy import RestartingPool
    from aioenvs.engine.pools.worker_pool import WorkerPool

    make = WorkerPool if config.max_restarts is None else RestartingPool
    return make(*hosts, start_method=config.start_method, **options)


def share_states(config: BatchConfig) -> None:
    """Have factories that keep a state for all of their envs put it where every worker will find it.

    Those are TorchRL's `EnvCreator`s; ours have what they are given.
    """
    if "torchrl.envs.env_creator" in sys.modules:
        theirs = importlib.import_module("aioenvs.integrations.torchrl.sharing")
        theirs.share_states(config.factories, with_kwargs=config.start_method in PICKLING)
