"""The pool whose workers are actors of a Ray cluster: Ray places them, connects to them, and says when one is gone."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aioenvs.engine import ray_cluster
from aioenvs.engine.cargo import Cargo
from aioenvs.engine.memory import own_memory
from aioenvs.engine.metadata import families_among
from aioenvs.engine.pool import Timeouts
from aioenvs.engine.ray_host import RayHost
from aioenvs.engine.ray_workers import RayActor, RayChannel
from aioenvs.engine.replacing import ReplacingPool, WorkerOptions
from aioenvs.engine.restarting import Restarting
from aioenvs.engine.supervision import Worker
from aioenvs.errors import AioEnvsError, shown

__all__ = ["RayPool", "RestartingRayPool"]

CALLS = 1000  # that an actor takes at the same time, by Ray's default


class RayPool(ReplacingPool):
    """Hosts the envs in actors of a Ray cluster, one group each; what they exchange is sent along with each call.

    Args:
        groups: The envs of each actor.
        factories: One per env: a callable, or something `gymnasium.make` takes.
        kwargs: Keyword arguments for each factory.
        timeouts: How long things may take.
        options: What else is to be done differently.
        ray_options: What Ray is asked for, for each actor.
    """

    is_local = False

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        factories: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        timeouts: Timeouts,
        options: WorkerOptions,
        ray_options: Mapping[str, Any],
    ) -> None:
        super().__init__(groups, factories, kwargs, timeouts=timeouts, options=options)
        self._ray_options = ray_options
        self._membership: ray_cluster.Membership | None = None
        self._joining = asyncio.Lock()

    @property
    def _asked(self) -> dict[str, Any]:
        """What Ray is asked for, for each host; of a cluster that is ours alone, what is needed need not be counted."""
        is_ours = self._membership is not None and self._membership.is_local
        return {"num_cpus": 1, **self._ray_options, **({"num_cpus": 0} if is_ours else {})}

    async def _prepare(self) -> None:
        async with self._joining:
            if self._membership is not None and not self._membership.is_valid:
                await self._give_back()
            if self._membership is None:
                num_cpus = self._ray_options.get("num_cpus", 1)
                self._membership = await ray_cluster.join(math.ceil(len(self.groups) * num_cpus))

    def _allocate(self, nbytes: int) -> Any:
        return own_memory(nbytes)

    async def _spawn(self, index: int, descriptors: Sequence[int]) -> Worker:
        ray = ray_cluster.connected_ray()
        options = {
            "scheduling_strategy": "SPREAD",
            **self._asked,
            "max_restarts": 0,  # a step that was lost is the pool's business
            "max_task_retries": 0,
            "max_concurrency": max(CALLS, 2 * len(self.groups[index]) + 8),
        }
        group = options.pop("placement_group", None)
        if group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
        actor = RayActor(ray.remote(RayHost).options(**options).remote())
        channel = RayChannel(self._next_generation(), self._answered, actor)
        worker = self._workers[index] = Worker(self.groups[index], actor, channel, self._ended)
        placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def greet(found: tuple[int, str] | None, error: Exception | None) -> None:
            if found is not None:
                actor.pid, actor.machine = found
            if not placed.done():
                placed.set_result(None)

        actor.listen(actor.handle.hello.remote(), greet)
        await placed
        return worker

    async def _why_late(self, index: int) -> str:
        worker = self._workers.get(index)
        if worker is None or worker.process.pid is not None:
            return ""
        asked = ", ".join(f"{name}={shown(value)}" for name, value in self._asked.items())
        found = await ray_cluster.aside(ray_cluster.resources)
        return (
            f": Ray has found no place for it. Each of {len(self.groups)} hosts asks for {asked}; of the cluster, "
            f"{found}. Use fewer hosts (num_processes), ask for less (ray_options), or enlarge the cluster"
        )

    def _attachments(self, indices: Collection[int]) -> list[bytes]:
        return [pickle.dumps(families_among(self.families, self.groups[index])) for index in indices]

    async def _attach(self, indices: Collection[int]) -> None:
        await super()._attach(indices)
        for index in indices:
            channel = self._workers[index].channel
            assert isinstance(channel, RayChannel)
            channel.cargo = Cargo(self.groups[index], self.families, self.arrays)

    async def _caught_up(self) -> None:
        if self._membership is not None and not self._membership.is_valid:  # nobody else says so before they are asked
            for worker in self._workers.values():
                assert isinstance(worker.process, RayActor)
                worker.process.died(AioEnvsError(ray_cluster.SHUT_DOWN))
        await super()._caught_up()

    async def _give_back(self) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            await ray_cluster.aside(membership.leave)

    def _give_up(self) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave()


class RestartingRayPool(Restarting, RayPool):
    """The same, which restarts hosts of itself."""
