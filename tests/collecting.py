"""Collecting in tests, and what must be true of the batches that come of it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from faces import call
from tensordict import TensorDictBase

from aioenvs import AsyncCollector, Collector
from aioenvs.faces.sync_envs import BatchedEnvBase

__all__ = [
    "NUM_ENVS",
    "by_step",
    "check_continuous",
    "check_ids",
    "check_steps",
    "collector",
    "every_batch",
    "persistently",
    "trajectories",
]

NUM_ENVS = 3


def collector(env: Any, policy: Any = None, **options: Any) -> Any:
    """A collector of the kind that the envs need."""
    kind = Collector if isinstance(env, BatchedEnvBase) else AsyncCollector
    return kind(env, policy, **options)


async def every_batch(source: Any) -> list[TensorDictBase]:
    """All batches of a collector of either kind."""
    if isinstance(source, AsyncCollector):
        return [batch async for batch in source]
    return await call(lambda: list(source))


async def persistently(source: Any, error: Any) -> tuple[list[TensorDictBase], list[Any]]:
    """All batches of a collector, and the errors of one type that came in between."""
    batches, errors = [], []
    while not source.is_finished:
        try:
            batches.append(await call(source.next))
        except error as found:
            errors.append(found)
    return batches, errors


def by_step(observation: torch.Tensor) -> torch.Tensor:
    """A policy: each step of an episode has an action of its own."""
    return observation[..., 2] * 3 % 7 + observation[..., 0]


def trajectories(batches: list[TensorDictBase]) -> list[TensorDictBase]:
    """What each env did in all of these batches, in order."""
    if batches[0].ndim == 2:
        return list(torch.cat(batches, 1).unbind(0))
    flat = torch.cat(batches)
    return [flat[flat["env_index"] == env] for env in range(NUM_ENVS)]


def check_steps(own: TensorDictBase) -> None:
    """Every step came of the root and the action that are with it."""
    for before, after, action in zip(
        own["observation"].tolist(), own["next", "observation"].tolist(), own["action"].tolist(), strict=True
    ):
        assert after == [before[0], before[1], before[2] + 1, before[3] + action]


def check_continuous(own: TensorDictBase) -> None:
    """Every step begins where the last one ended, or with a new episode, which has an id that no other has."""
    check_steps(own)
    ids, done = own["collector", "traj_ids"].tolist(), own["next", "done"][..., 0].tolist()
    roots, following = own["observation"].tolist(), own["next", "observation"].tolist()
    for now, then in itertools.pairwise(range(len(ids))):
        if done[now]:
            assert roots[then] == [roots[now][0], roots[now][1] + 1, 0, 0]
            assert ids[then] not in ids[: now + 1]
        else:
            assert roots[then] == following[now]
            assert ids[then] == ids[now]


def check_ids(envs: list[TensorDictBase]) -> None:
    """No two envs share an id."""
    ids = [set(own["collector", "traj_ids"].tolist()) for own in envs]
    assert len(set().union(*ids)) == sum(map(len, ids))
