"""Hosts that are actors of a Ray cluster, which Ray places and connects, and of which it says when one is gone."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioenvs.engine.config import BatchConfig
from aioenvs.engine.layout import Family, families_among
from aioenvs.engine.pools.factories import Shipment, pickle_factories
from aioenvs.engine.pools.host import Exit, HostKind, HostTraits, Owner, WorkerHost
from aioenvs.engine.pools.ray import cluster as ray_cluster
from aioenvs.engine.pools.ray.actor import RayActor
from aioenvs.engine.pools.ray.cluster import connected_ray
from aioenvs.engine.pools.ray.rows import NOTHING, Bytes, RayRows
from aioenvs.engine.protocol import MAX_BODY, Frame, Opcode
from aioenvs.errors import AioEnvsError, ProtocolError, shown

__all__ = ["RayActors", "RayHost", "ray_words"]


CALLS = 1000  # that an actor takes at the same time, by Ray's default
CHATTER = " Some common causes include"


def ray_words(error: BaseException) -> str:
    """Return Ray's words about a death, without those that it always says."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return lines[-1].partition(CHATTER)[0] if lines else type(error).__name__


class RayHost(WorkerHost):
    """A host that is an actor: a call for each command, which comes back with the answer.

    What the envs and the caller exchange has a block of its own on either side; its rows go along with each call.

    Args:
        index: As for `Host`.
        envs: Likewise.
        owner: Likewise.
        generation: Likewise.
        kind: What all hosts of the pool share.
    """

    def __init__(self, index: int, envs: tuple[int, ...], owner: Owner, generation: int, kind: RayActors) -> None:
        super().__init__(index, envs, owner, generation, kind.config.timeouts.start)
        self._kind = kind
        self._handle: Any = None
        self._cause: Exception | None = None
        self._rows: RayRows | None = None  # until the envs have some
        self._asked: dict[int, tuple[Opcode, Sequence[int]]] = {}
        self.exited.add_done_callback(self._stopped)

    async def spawn(self, descriptors: Sequence[int]) -> None:
        ray = connected_ray()
        options = {
            "scheduling_strategy": "SPREAD",
            **self._kind.resources,
            "max_restarts": 0,  # a step that was lost is the pool's business
            "max_task_retries": 0,
            "max_concurrency": max(CALLS, 2 * len(self.envs) + 8),
        }
        group = options.pop("placement_group", None)
        if group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
        self._handle = ray.remote(RayActor).options(**options).remote()  # which nobody else holds
        self._listen(self._handle.watch.remote(), self._seen)
        placed: asyncio.Future[None] = self._loop.create_future()

        def greet(found: tuple[int, str] | None, error: Exception | None) -> None:
            if found is not None:
                self.pid = found[0]
            if not placed.done():
                placed.set_result(None)

        self._listen(self._handle.hello.remote(), greet)
        await placed

    async def why_late(self) -> str:
        if self._handle is None or self.pid is not None:
            return ""
        asked = ", ".join(f"{name}={shown(value)}" for name, value in self._kind.resources.items())
        found = await ray_cluster.aside(ray_cluster.resources)
        return (
            f": Ray has found no place for it. Each of {len(self._kind.config.groups)} hosts asks for {asked}; of the "
            f"cluster, {found}. Use fewer hosts (num_processes), ask for less (ray_options), or enlarge the cluster"
        )

    def attachment(self, families: Sequence[Family]) -> bytes:
        return pickle.dumps(families_among(families, self.envs))

    async def attach(self, families: Sequence[Family], arrays: Any, buffer: Any) -> None:
        await super().attach(families, arrays, buffer)
        self._rows = RayRows(self.envs, families, arrays)

    # -- requests ---------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._handle is not None and not self.exited.done()

    def transmit(self, opcode: Opcode, sequence: int, positions: Sequence[int], enclosed: Any) -> None:
        body = enclosed or b""
        if len(body) > MAX_BODY:
            raise ProtocolError(f"a {opcode.name} frame may carry at most {MAX_BODY} bytes, got {len(body)}")
        try:
            connected_ray()
            rows = NOTHING if self._rows is None else self._rows.pack_command(opcode, positions)
            message = int(opcode), sequence, self.generation, tuple(positions), body
            ref = self._handle.answer.remote(message, rows)
        except Exception as error:  # Ray was shut down, or knows already that the actor is gone
            self._loop.call_soon(self.died, error)
            return
        self._asked[sequence] = opcode, positions
        self._listen(ref, self._arrived)

    def cancel(self, sequence: int) -> None:
        try:
            connected_ray()
            self._handle.cancel.remote(sequence)
        except Exception as error:  # as above
            if not self._loop.is_closed():
                self._loop.call_soon(self.died, error)

    def _listen(self, ref: Any, deliver: Callable[[Any, Exception | None], None]) -> None:
        """Have what comes of a call delivered in the loop: its result, or an exception."""

        def done(future: Any) -> None:
            with contextlib.suppress(RuntimeError):  # of a loop that is closed, where nobody waits for anything
                self._loop.call_soon_threadsafe(_deliver, future, deliver)

        ref.future().add_done_callback(done)

    def _arrived(self, answer: tuple[Any, Bytes] | None, error: Exception | None) -> None:
        if answer is None:
            assert error is not None
            self.died(error)
            return
        (code, sequence, generation, counts, body), rows = answer
        asked = self._asked.pop(sequence, None)
        if asked is not None and sequence in self.pending and generation == self.generation:
            if self._rows is not None:
                self._rows.unpack_answer(*asked, rows)
            self.receive(Frame(Opcode(code), sequence, generation, counts, body))

    def disconnect(self) -> None:
        self._asked.clear()

    # -- the actor --------------------------------------------------------------------------------------

    def _seen(self, code: int | None, error: Exception | None) -> None:
        if error is not None:
            self.died(error)
            return
        self.kill()
        self._finish(Exit(code))

    def died(self, error: Exception) -> None:
        """Take note that it is gone, or as good as that."""
        if not self.exited.done():
            self._cause = error
            self._finish(Exit(None, cause=f"died; Ray says: {ray_words(error)}"))

    def _finish(self, how: Exit) -> None:
        if not self.exited.done() and not self._loop.is_closed():
            self.exited.set_result(how)

    def _stopped(self, _: asyncio.Future[Exit]) -> None:
        if not self.lost.done():
            self.lost.set_result(self._cause)

    def signal(self, number: int) -> None:
        if not self.exited.done():
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it is gone, or Ray is
            connected_ray().kill(self._handle, no_restart=True)

    def abandon(self) -> None:
        self.abandoned = True
        self.kill()
        self._finish(Exit(None))


def _deliver(future: Any, deliver: Callable[[Any, Exception | None], None]) -> None:
    error = future.exception()
    deliver(None if error is not None else future.result(), error)


class RayActors(HostKind):
    """The kind of hosts that are actors of a Ray cluster.

    Args:
        config: What was asked for.
    """

    traits = HostTraits(is_local=False, ships=True, can_die=True)

    def __init__(self, config: BatchConfig) -> None:
        super().__init__(config)
        self._membership: ray_cluster.Membership | None = None
        self._joining = asyncio.Lock()
        self._hosts: Mapping[int, RayHost] = {}

    @property
    def resources(self) -> dict[str, Any]:
        """The resources to ask Ray for, for each host; in a cluster that is ours alone none are counted."""
        is_ours = self._membership is not None and self._membership.is_local
        return {"num_cpus": 1, **self.config.ray_options, **({"num_cpus": 0} if is_ours else {})}

    def pack(self, groups: Mapping[int, tuple[int, ...]], descriptors: Any, *, replaces: bool) -> list[Shipment]:
        return pickle_factories(self.config, groups, inherited=False, descriptors=None, replaces=replaces)

    async def prepare(self, owner: Owner, hosts: Mapping[int, RayHost]) -> None:
        self._hosts = hosts
        async with self._joining:
            if self._membership is not None and not self._membership.is_valid:
                await self.give_back()
            if self._membership is None:
                num_cpus = self.config.ray_options.get("num_cpus", 1)
                self._membership = await ray_cluster.join(math.ceil(len(self.config.groups) * num_cpus))

    def make(self, index: int, envs: tuple[int, ...], owner: Owner, generation: int) -> RayHost:
        return RayHost(index, envs, owner, generation, self)

    def notice(self) -> None:
        if self._membership is not None and not self._membership.is_valid:  # nobody else says so before they are asked
            for host in self._hosts.values():
                host.died(AioEnvsError(ray_cluster.SHUT_DOWN))

    def hurry(self, hosts: Sequence[RayHost]) -> None:
        for host in hosts:
            host.kill()

    async def give_back(self) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            await ray_cluster.aside(membership.leave)

    def give_up(self) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave()
