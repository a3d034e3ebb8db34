"""The pool of actors of a Ray cluster, which Ray places and connects, and of which it says when one is gone."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from aioenvs.engine.layout import families_among
from aioenvs.engine.memory import own_memory
from aioenvs.engine.pools.channel import Answered, Channel
from aioenvs.engine.pools.pool import Timeouts
from aioenvs.engine.pools.process_host import Exit, WorkerHandle
from aioenvs.engine.pools.ray import cluster as ray_cluster
from aioenvs.engine.pools.ray.cluster import connected_ray
from aioenvs.engine.pools.ray.host import RayHost
from aioenvs.engine.pools.ray.rows import NOTHING, Bytes, RayRows
from aioenvs.engine.pools.replacing import ReplacingPool, WorkerOptions
from aioenvs.engine.pools.restart_policy import Restarting
from aioenvs.engine.protocol import MAX_BODY, Frame, Opcode
from aioenvs.errors import AioEnvsError, ProtocolError, shown

__all__ = ["RayActor", "RayChannel", "RayPool", "RestartingRayPool", "ray_words"]


CHATTER = " Some common causes include"


def ray_words(error: BaseException) -> str:
    """Return Ray's words about a death, without those that it always says."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return lines[-1].partition(CHATTER)[0] if lines else type(error).__name__


class RayActor:
    """The actor, as the process of a worker.

    Args:
        handle: Of the actor, which nobody else holds.
    """

    def __init__(self, handle: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self.handle = handle
        self.pid: int | None = None
        self.machine = ""
        self.abandoned = False
        self.cause: Exception | None = None
        self.exited: asyncio.Future[Exit] = self._loop.create_future()
        self.listen(handle.watch.remote(), self._seen)

    def listen(self, ref: Any, deliver: Callable[[Any, Exception | None], None]) -> None:
        """Have what comes of a call delivered in the loop: its result, or an exception."""

        def done(future: Any) -> None:
            with contextlib.suppress(RuntimeError):  # of a loop that is closed, where nobody waits for anything
                self._loop.call_soon_threadsafe(_deliver, future, deliver)

        ref.future().add_done_callback(done)

    def _seen(self, code: int | None, error: Exception | None) -> None:
        if error is not None:
            self.died(error)
            return
        self._kill()
        self._finish(Exit(code))

    def died(self, error: Exception) -> None:
        """It is gone, or as good as that."""
        if not self.exited.done():
            self.cause = error
            self._finish(Exit(None, cause=f"died; Ray says: {ray_words(error)}"))

    def _finish(self, how: Exit) -> None:
        if not self.exited.done() and not self._loop.is_closed():
            self.exited.set_result(how)

    def signal(self, number: int) -> None:
        if not self.exited.done():
            self._kill()

    def kill(self) -> None:
        self._kill()

    def abandon(self) -> None:
        self.abandoned = True
        self._kill()
        self._finish(Exit(None))

    def _kill(self) -> None:
        with contextlib.suppress(Exception):  # it is gone, or Ray is
            connected_ray().kill(self.handle, no_restart=True)


class RayChannel(Channel):
    """Frames to and from an actor: a call for each, which comes back with the reply.

    Args:
        generation: As for `Channel`.
        answered: Likewise.
        actor: Which.

    Attributes:
        cargo: Packs what goes along with commands; None until the envs have rows.
    """

    def __init__(self, generation: int, answered: Answered, actor: RayActor) -> None:
        super().__init__(generation, answered)
        self.cargo: RayRows | None = None
        self._actor = actor
        self._asked: dict[int, tuple[Opcode, Sequence[int]]] = {}
        actor.exited.add_done_callback(self._ended)

    @property
    def connected(self) -> bool:
        return not self._actor.exited.done()

    def _dispatch(self, frame: Frame) -> None:
        opcode, sequence, generation, positions, body = frame
        if len(body) > MAX_BODY:
            raise ProtocolError(f"a {opcode.name} frame may carry at most {MAX_BODY} bytes, got {len(body)}")
        try:
            connected_ray()
            if opcode is Opcode.CANCEL:
                self._actor.handle.cancel.remote(sequence)
                return
            rows = NOTHING if self.cargo is None else self.cargo.pack_command(opcode, positions)
            ref = self._actor.handle.answer.remote((int(opcode), sequence, generation, tuple(positions), body), rows)
        except Exception as error:  # Ray was shut down, or knows already that the actor is gone
            self._loop.call_soon(self._actor.died, error)
            return
        self._asked[sequence] = opcode, positions
        self._actor.listen(ref, self._arrived)

    def _arrived(self, answer: tuple[Any, Bytes] | None, error: Exception | None) -> None:
        if answer is None:
            assert error is not None
            self._actor.died(error)
            return
        (code, sequence, generation, counts, body), rows = answer
        asked = self._asked.pop(sequence, None)
        if asked is not None and sequence in self._pending and generation == self._generation:
            if self.cargo is not None:
                self.cargo.unpack_answer(*asked, rows)
            self._reply(Frame(Opcode(code), sequence, generation, counts, body))

    def _ended(self, _: asyncio.Future[Exit]) -> None:
        if not self.lost.done():
            self.lost.set_result(self._actor.cause)

    def close(self) -> None:
        self._asked.clear()


def _deliver(future: Any, deliver: Callable[[Any, Exception | None], None]) -> None:
    error = future.exception()
    deliver(None if error is not None else future.result(), error)


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
        """Return the resources to ask Ray for, for each host; in a cluster that is ours alone none are counted."""
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

    async def _spawn(self, index: int, descriptors: Sequence[int]) -> WorkerHandle:
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
        worker = self._workers[index] = WorkerHandle(self.groups[index], actor, channel, self._ended)
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
            channel.cargo = RayRows(self.groups[index], self.families, self.arrays)

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
    """A Ray pool that restarts hosts of itself."""
