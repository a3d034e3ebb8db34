"""The hosts of a pool: how they come, how others come in their place, and how they go."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from aioenvs.engine.env_states import EnvStates
from aioenvs.engine.layout import Arrays, EnvMetadata, Family, check_unchanged
from aioenvs.engine.pools.factories import Descriptors, Shipment
from aioenvs.engine.pools.host import HostKind, Owner, WorkerHost
from aioenvs.engine.pools.requests import Selection, closed_meanwhile
from aioenvs.engine.pools.restart_policy import RestartPolicy
from aioenvs.engine.waiting import all_or_none, outlast
from aioenvs.errors import AioEnvsError

__all__ = ["Crew"]


class Employer(Owner, Protocol):
    """A pool, as far as its hosts ask it for something; see there."""

    groups: tuple[tuple[int, ...], ...]
    states: EnvStates
    policy: RestartPolicy | None
    metadata: tuple[EnvMetadata, ...]
    families: tuple[Family, ...]
    arrays: tuple[dict[str, Arrays], ...]

    def lay_out(self, metadata: Iterable[EnvMetadata], allocate: Callable[[int], Any]) -> Any: ...
    def drop_memory(self) -> None: ...


class Crew:
    """The hosts of a pool.

    Args:
        kind: What they are like, and how they are made.
        pool: Whose they are.

    Attributes:
        hosts: Those that there are, by number.
        replaced: How often each was replaced.
        replacing: Those that are being replaced.
    """

    def __init__(self, kind: HostKind, pool: Employer) -> None:
        self.hosts: dict[int, Any] = {}
        self.replaced = [0] * len(pool.groups)
        self.replacing: dict[int, asyncio.Task[None]] = {}
        self._kind = kind
        self._pool = pool
        self._generation = 0
        self._starts = asyncio.Semaphore(kind.config.starts_at_once)

    async def start(self) -> None:
        """Start all hosts, let them build their envs, and connect these to the block."""
        pool, kind = self._pool, self._kind
        with Descriptors() as descriptors:
            packed = self._pack(dict(enumerate(pool.groups)), descriptors)
            await kind.prepare(pool, self.hosts)
            starts = [self._start(index, shipment) for index, shipment in enumerate(packed)]
            # One alone needs no tasks, and so no loop where it is in this process.
            found = [await starts[0]] if len(starts) == 1 else await all_or_none(starts)
        hosts = [host for _, host in sorted(self.hosts.items())]
        kind.check(hosts)
        grouped = zip(pool.groups, found, strict=True)
        described = {env: own for group, each in grouped for env, own in zip(group, each, strict=True)}
        buffer = pool.lay_out([described[env] for env in range(len(described))], kind.allocate)
        attached = [host.attach(pool.families, pool.arrays, buffer) for host in hosts]
        if len(attached) == 1:
            await attached[0]
        else:
            await all_or_none(attached)

    def _pack(
        self, groups: Mapping[int, tuple[int, ...]], descriptors: Descriptors, *, replaces: bool = False
    ) -> Sequence[Shipment | None]:
        return self._kind.pack(groups, descriptors if self._kind.traits.is_local else None, replaces=replaces)

    async def _start(self, index: int, shipment: Shipment | None) -> list[EnvMetadata]:
        async with self._starts:
            self._generation = self._generation % 0xFFFF + 1
            host = self.hosts[index] = self._kind.make(index, self._pool.groups[index], self._pool, self._generation)
            found: list[EnvMetadata] = await host.start(shipment)
            return found

    async def catch_up(self) -> None:
        """Let the loop notice what happened while it did not run, as between two calls of a sync face."""
        self._kind.notice()
        for _ in range(2):  # a turn for the end of a socket and the report of an exit, one for what follows from them
            await asyncio.sleep(0)
        ending = [host.ended for host in self.hosts.values() if host.is_ending]
        if ending:
            await asyncio.wait(ending)

    # -- others in their place --------------------------------------------------------------------------

    async def revive(self, selection: Selection) -> None:
        """Replace the dead hosts of these envs; their other envs then need a reset of their own.

        Callers that want envs of the same host share one replacement, which outlives a caller that is cancelled.

        Raises:
            ClosedError: If the envs are closed meanwhile.
            WorkerError: If there is no replacement.
        """
        states, policy = self._pool.states, self._pool.policy
        while dead := [index for index, _, envs in selection.parts if states.broken(envs)]:
            if states.closed:  # and so might be what it takes to start a host
                raise closed_meanwhile(selection.envs)
            bring_back = self.replace if policy is None else policy.bring_back
            for index in dead:
                if index not in self.replacing:
                    task = self.replacing[index] = asyncio.ensure_future(bring_back(index))
                    task.add_done_callback(functools.partial(self._replaced, index))
            tasks = [self.replacing[index] for index in dead]
            await asyncio.wait(tasks)
            if states.closed or any(task.cancelled() for task in tasks):
                raise closed_meanwhile(selection.envs)
            for task in tasks:
                if (error := task.exception()) is not None:
                    raise error.again() if isinstance(error, AioEnvsError) else error

    def _replaced(self, index: int, task: asyncio.Task[None]) -> None:
        del self.replacing[index]
        if not task.cancelled():
            task.exception()  # those who wait for it have it; there may be nobody left

    async def replace(self, index: int) -> None:
        """Put a new host in the place of a dead one."""
        pool, kind = self._pool, self._kind
        group = pool.groups[index]
        await kind.prepare(pool, self.hosts)
        with Descriptors() as descriptors:
            (shipment,) = self._pack({index: group}, descriptors, replaces=True)
            try:
                for env, found in zip(group, await self._start(index, shipment), strict=True):
                    check_unchanged(env, pool.metadata[env], found)
                host: WorkerHost = self.hosts[index]
                await host.attach(pool.families, pool.arrays, None)
                if pool.policy is not None:
                    await pool.policy.settle(host)
                if host.ended.done():
                    raise host.start_error("ended as soon as its envs were built")
            except BaseException:
                await asyncio.shield(kind.end([self.hosts[index]], polite=False))
                raise
        self.replaced[index] += 1
        pool.states.repair(group)

    # -- the end ----------------------------------------------------------------------------------------

    async def end(self, *, polite: bool) -> None:
        """End all there is; cancelling it makes it quicker, but it ends all the same.

        Args:
            polite: Whether the envs are to be closed, rather than merely gone.
        """
        ending = asyncio.ensure_future(self._end(polite=polite))
        await outlast(ending, lambda: self._kind.hurry(list(self.hosts.values())))
        ending.result()

    async def _end(self, *, polite: bool) -> None:
        if self.replacing:
            await asyncio.wait(list(self.replacing.values()))
        await self.end_hosts(polite=polite)
        self.hosts.clear()
        self._pool.drop_memory()
        await self._kind.give_back()

    async def end_hosts(self, *, polite: bool) -> None:
        """End the hosts alone."""
        await self._kind.end(list(self.hosts.values()), polite=polite)

    def let_go(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Have everything end, and wait for nothing; the loop may be closed."""
        hosts = list(self.hosts.values())
        if self._kind.traits.is_bound:
            self.hosts.clear()
        self._kind.let_go(hosts, loop)
        self._kind.give_up()

    def stop_replacing(self) -> None:
        """Have nobody come any more."""
        for task in self.replacing.values():
            task.cancel()
