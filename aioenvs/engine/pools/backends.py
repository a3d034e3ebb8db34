"""Backends: the pool that a configuration asks for. Free of torch."""

from __future__ import annotations

import importlib
import sys

from aioenvs.engine.config import BatchConfig
from aioenvs.engine.pools.host import HostKind
from aioenvs.engine.pools.inline_host import Inline
from aioenvs.engine.pools.pool import Pool
from aioenvs.engine.pools.thread_host import Threads

__all__ = ["make_pool", "share_states"]

PICKLING = ("forkserver", "spawn")  # start methods for which factories are pickled


def make_pool(config: BatchConfig, *, yields: bool) -> Pool:
    """The pool, which is not started.

    Args:
        config: What was asked for.
        yields: Whether commands to envs in this process let other tasks run, even if there is nothing to wait for.
    """
    kind: HostKind
    if config.backend == "serial":
        kind = Inline(config, yields=yields)
    elif config.backend == "thread":
        kind = Threads(config)
    elif config.backend == "ray":  # this and the next need what Windows does not have
        from aioenvs.engine.pools.ray.host import RayActors

        kind = RayActors(config)
    else:
        from aioenvs.engine.pools.process_host import Processes

        kind = Processes(config)
    return Pool(kind)


def share_states(config: BatchConfig) -> None:
    """Have factories that keep a state for all of their envs put it where every worker will find it.

    Those are TorchRL's `EnvCreator`s; ours have what they are given.
    """
    if "torchrl.envs.env_creator" in sys.modules:
        theirs = importlib.import_module("aioenvs.integrations.torchrl.sharing")
        theirs.share_states(config.factories, with_kwargs=config.start_method in PICKLING)
