"""Where one part meets another: what a creator's envs share, and workers that take the place of others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from test_death import kill_and_reap
from torchrl.envs import EnvCreator as TheirCreator
from torchrl.envs import GymEnv, TrajCounter, TransformedEnv

from aioenvs.engine.pools import restart_policy as restarts
from aioenvs.integrations.torchrl import ParallelEnv


def counted() -> TransformedEnv:
    return TransformedEnv(GymEnv("Pendulum-v1"), TrajCounter())


@pytest.mark.parametrize(("method", "number"), [("fork", 2), ("forkserver", 1)])
async def test_a_replaced_worker_leaves_a_shared_count_as_it_is(method: str, number: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(restarts, "LONGEST_DELAY", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        creator = TheirCreator(counted)
    env = ParallelEnv(2, creator, mp_start_method=method, num_processes=number, on_worker_death="restart")
    try:
        seen = [int(count) for _ in range(3) for count in env.reset()["traj_count"]]
        await kill_and_reap(env.pids[0])
        seen += [int(count) for _ in range(2) for count in env.reset()["traj_count"]]
        assert len(set(seen)) == len(seen)
    finally:
        env.close()
