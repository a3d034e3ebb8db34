"""The engine's interface to the faces: many envs behind coroutines, whatever hosts them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from aioenvs.engine.adapters.base import Call, ResetArguments
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.config import Timeouts, available_cores
from aioenvs.engine.double_buffer import DoubleBuffer, Fence
from aioenvs.engine.env_states import EnvStates
from aioenvs.engine.layout import LATEST, STATUS, WRITE_HALF, Arrays, EnvMetadata, Family, form_families, interned
from aioenvs.engine.pools.crew import Crew
from aioenvs.engine.pools.host import Exit, Host, HostKind, WorkerHost
from aioenvs.engine.pools.requests import (
    Deliver,
    Each,
    FirstReady,
    Lease,
    PendingOutcome,
    Selection,
    Selections,
    Share,
    StepTimes,
    closed_meanwhile,
    hear_each,
    late_copy,
    warned_of,
    wrong_loop,
)
from aioenvs.engine.pools.restart_policy import RestartPolicy
from aioenvs.engine.protocol import STEPS, Opcode
from aioenvs.engine.waiting import Deadline, FenceWaiter, done_within, drop, outlast
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.errors import AioEnvsError, WorkerTimeoutError, describe_envs

__all__ = ["Lease", "Pool", "Selection", "StepTimes", "closed_meanwhile", "wrong_loop"]

logger = logging.getLogger("aioenvs")


class Pool:
    """Hosts envs. Values of fixed shape are exchanged through `arrays`, the rest as arguments and outcomes.

    The order of a request: `hold` the selection, write its inputs, call the command with the lease, read its rows,
    `release`. Nobody else can touch those rows in between, and a caller that leaves early (cancelled, timed out,
    interrupted) only has to `release`: what is still on its way is then dropped on arrival.

    Args:
        kind: What hosts are like, how they are made, and what was asked for.

    Attributes:
        metadata: What each env says of itself; known once started.
        families: Envs of one structure each, and where their values lie; known once started.
        arrays: For each family its arrays `(envs of the family, *shape)` by region and key; known once started.
        buffers: For each family in which half its envs have and write their values; known once started.
        has_coroutines: Whether some envs of each host do, so that cancelling a request cancels these; known once
            started.
        crew: The hosts, and what becomes of them.
        hosts: Those that there are, by number.
        traits: What they are like.
        select: Returns the `Selection` of some envs.
        host_of: Returns the number of the host of an env.
        restarts: Whether envs whose host died are built anew and reset of themselves.
        policy: What is done about hosts that die; None if that is for the next reset to see to.
        suspends: Whether commands may wait for something, and so want an event loop.
        shares_loop: Whether the event loop has others to run while a request waits for a fence.
        fenced: Whether there may be fences at all (`DoubleBuffer.guard`).
        ships: Whether arguments are sent to another process, as bytes, rather than handed over.
        fence_waiter: Waits for fences.
        timeouts: How long things may take.
        replaced: How often each host was replaced.
        times: How long each host took to step its envs.
    """

    def __init__(self, kind: HostKind) -> None:
        config, self._kind = kind.config, kind
        self.traits = kind.traits
        self.timeouts = config.timeouts if self.traits.is_bound else Timeouts()
        self.groups = config.groups if self.traits.is_bound else (tuple(range(len(config.factories))),)
        self.num_envs = sum(map(len, self.groups))
        self.states = EnvStates(self.num_envs)
        self.times = [StepTimes() for _ in self.groups]
        self.suspends, self.ships = self.traits.suspends, self.traits.ships
        self.shares_loop, self.fenced = True, False
        self.fence_waiter = FenceWaiter()
        self.crew = Crew(kind, self)
        self.hosts, self.replaced = self.crew.hosts, self.crew.replaced
        self.metadata: tuple[EnvMetadata, ...] = ()
        self.families: tuple[Family, ...] = ()
        self.arrays: tuple[dict[str, Arrays], ...] = ()
        self.buffers: tuple[DoubleBuffer, ...] = ()
        self.has_coroutines: tuple[bool, ...] = ()
        self.restarts = config.max_restarts is not None
        self.policy = None if config.max_restarts is None else RestartPolicy(self, config.max_restarts)
        selections = Selections(self.groups)
        self.select, self.host_of = selections.of, selections.host_of
        self.everything = self.select(range(self.num_envs))
        self._owner = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drained: list[tuple[frozenset[int], asyncio.Future[None]]] = []
        self._advised = False

    # -- which envs -------------------------------------------------------------------------------------

    @property
    def envs(self) -> list[Any] | None:
        """The envs themselves, once started, where they live in this process and thread; None elsewhere."""
        return None if self.traits.is_bound else [env for host in self.hosts.values() for env in host.objects]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the hosts that run now."""
        if not self.traits.can_die:
            return ()
        return tuple(
            host.pid for _, host in sorted(self.hosts.items()) if not host.exited.done() and host.pid is not None
        )

    # -- start ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Build all envs, learn their metadata, and lay out the block."""
        if self.traits.is_bound:
            self._loop = asyncio.get_running_loop()
        try:
            await self.crew.start()
        except BaseException:
            if self.traits.is_bound:
                await self.crew.end(polite=False)
            else:
                self.discard()
            raise

    def lay_out(self, metadata: Iterable[EnvMetadata], allocate: Callable[[int], Any]) -> Any:
        """Work out where everything lies, in a buffer of the size that it takes."""
        self.metadata = tuple(interned(metadata))
        self.has_coroutines = tuple(any(self.metadata[env].has_coroutines for env in group) for group in self.groups)
        self.families = form_families(self.metadata)
        buffer = allocate(self.families[-1].layout.end)
        self.arrays = tuple(family.layout.arrays(buffer) for family in self.families)
        self.buffers = tuple(DoubleBuffer(own[STATUS][LATEST], own[STATUS][WRITE_HALF]) for own in self.arrays)
        if not self.traits.is_bound and any(self.has_coroutines):
            self.suspends = True
        return buffer

    # -- who may ask, and when --------------------------------------------------------------------------

    async def hold(
        self, selection: Selection, command: str, *, replacing: bool = False, timeout: float | Deadline | None = None
    ) -> Lease:
        """Reserve the envs for one request, and wait until none of them owes a reply to an earlier caller.

        Cancelling it gives them up again. Args and errors are those of `acquire` and `ready`.
        """
        if not self.traits.is_bound:
            await self.enter_loop(command)
        elif replacing and self.traits.can_die:
            self.check_home(command)
            await self.crew.catch_up()
        lease = self.acquire(selection, command, replacing=replacing, timeout=timeout)
        if not lease.waits:
            return lease
        try:
            with self.policy.wanted(selection) if self.policy and replacing else contextlib.nullcontext():
                return await self.ready(lease)
        except BaseException:
            self.release(lease)
            raise

    def acquire(
        self, selection: Selection, command: str, *, replacing: bool = False, timeout: float | Deadline | None = None
    ) -> Lease:
        """Reserve the envs for one request, all or none; if the lease `waits`, they are not `ready` for it yet.

        Args:
            selection: Which envs.
            command: What for, in words.
            replacing: Replace the hosts that are dead, instead of raising.
            timeout: Seconds that the request may take, or when it must be answered; None for as long as requests may.

        Raises:
            ClosedError: After `close`.
            ConcurrencyError: If one of them is held already.
            WorkerDiedError: If the host of one is dead.
            ValueError: If the timeout is none.
        """
        self.check_home(command)
        deadline = None if timeout is None and self.timeouts.step is None else self.deadline(timeout)
        replacing = replacing or self.policy is not None
        states = self.states
        waits = not states.acquire(selection.envs, command, replacing=replacing) or self.traits.yields
        if replacing and not waits:
            waits = bool(states.broken(selection.envs))
        lease = Lease(selection, command, deadline, replacing, waits)
        if not self.fenced or waits:
            return lease
        try:
            if not self.traits.is_bound:
                self.wait(self.in_use(selection.envs), lease)
                return lease
            return lease._replace(waits=bool(self.in_use(selection.envs)))
        except BaseException:  # of a device that is broken
            self.release(lease)
            raise

    def check_home(self, command: str) -> None:
        """Refuse a command from where it cannot be given.

        Raises:
            AioEnvsError: In another event loop or process than that which started the envs.
        """
        here = asyncio._get_running_loop()
        if here is self._loop and here is not None and os.getpid() == self._owner:
            return
        if self.states.closed or not self.suspends:
            return
        if self.traits.is_bound or (self._loop is not None and here is not self._loop):
            raise wrong_loop(command)
        if here is None:
            raise AioEnvsError(
                f"{command}: these envs belong to an event loop, and none runs here; use SerialEnv there"
            )

    async def enter_loop(self, command: str) -> None:
        """See to it that the rest of a coroutine runs in the event loop of the envs, if they have one.

        Raises:
            AioEnvsError: In another event loop than that.
        """
        if self.traits.is_bound or self.states.closed or not any(self.has_coroutines):
            return
        self._loop = await self.hosts[0].enter_loop(not self.traits.yields)
        self.check_home(command)

    async def ready(self, lease: Lease) -> Lease:
        """Wait until none of the envs owes a reply to an earlier caller, and replace their hosts if need be.

        The time that replacing takes is not part of the request's.

        Raises:
            ClosedError: If the envs were closed meanwhile.
            WorkerTimeoutError: If they did not reply in time.
            WorkerError: If a host is dead and not to be, or cannot be, replaced.
        """
        envs = lease.selection.envs
        if self.traits.yields:
            await asyncio.sleep(0)
        if not self.states.drained(envs):
            await self.within(self._drain(envs), lease)
        if self.fenced:
            await self.passed(self.in_use(envs), lease)
        if self.states.closed:
            raise closed_meanwhile(envs)
        broken = self.states.broken(envs)
        if not broken:
            return lease
        if not lease.replacing:
            raise self.states.error(min(broken))
        await self.crew.revive(lease.selection)
        return lease.renewed()

    async def _drain(self, envs: frozenset[int]) -> None:
        while not self.states.drained(envs):
            waiter = asyncio.get_running_loop().create_future()
            self._drained.append((envs, waiter))
            await waiter
        if self.states.closed:
            raise closed_meanwhile(envs)

    def _wake(self) -> None:
        for envs, waiter in self._drained:
            if self.states.drained(envs) and not waiter.done():
                waiter.set_result(None)
        self._drained = [(envs, waiter) for envs, waiter in self._drained if not waiter.done()]

    def release(self, lease: Lease) -> None:
        """End a lease."""
        self.states.release(lease.selection.envs)

    # -- fences and deadlines ---------------------------------------------------------------------------

    def in_use(self, envs: Set[int]) -> list[Fence]:
        """Return the fences before memory into which these envs would write next."""
        fences: list[Fence] = []
        pairs = zip(self.families, self.buffers, strict=False) if self.fenced else ()  # no buffers once closed
        for family, buffers in pairs:
            if buffers.guarded:
                fences += buffers.in_use([row for row, env in enumerate(family.envs) if env in envs])
        return fences

    async def passed(self, fences: Sequence[Fence], lease: Lease | None = None) -> None:
        """Wait for fences; in the event loop's thread where there is nobody else to run, and no deadline.

        Cancelling it, or running into its time, leaves them alone. Without a lease it may take as long as it likes.

        Raises:
            WorkerTimeoutError: If it takes longer.
            Exception: That of a fence which failed.
        """
        deadline = None if lease is None else lease.deadline
        if not self.suspends or (deadline is None and not self.shares_loop):
            self.wait(fences, lease)
        elif not await self.fence_waiter.passed(fences, None if deadline is None else deadline.left):
            raise late_copy(lease)

    def wait(self, fences: Sequence[Fence], lease: Lease | None = None) -> None:
        """Wait for fences in the calling thread, whatever else could run there."""
        deadline = None if lease is None else lease.deadline
        if not self.fence_waiter.wait(fences, None if deadline is None else deadline.left):
            raise late_copy(lease)

    def deadline(self, timeout: float | Deadline | None) -> Deadline | None:
        """Of a request that says how long it may take, or does not, or when it began.

        Raises:
            ValueError: If the timeout is none.
        """
        if isinstance(timeout, Deadline):
            return timeout
        if timeout is not None:
            return Deadline.after(timeout, "timeout")
        return None if self.timeouts.step is None else Deadline.after(self.timeouts.step, "step_timeout")

    async def within(self, awaitable: Any, lease: Lease) -> Any:
        """Wait for what comes of a lease until its deadline.

        Raises:
            WorkerTimeoutError: If it takes longer, and hosts that are late are not replaced.
        """
        if lease.deadline is None:
            return await awaitable
        future = asyncio.ensure_future(awaitable)
        try:
            if not await done_within([future], lease.deadline.left):
                if self.policy is None:
                    raise self.late_error(lease.selection.envs, lease)
                self.policy.overdue(self.states.unanswered(lease.selection.envs), lease)
            return await future
        finally:
            drop(future)
            if self.traits.outlasts:  # envs that are late have ended, too: no other request finds them at work
                await outlast(future)

    def late_error(self, envs: Set[int], lease: Lease) -> WorkerTimeoutError:
        """Return the error of a request that those of these envs which have not answered have not in time."""
        owing = self.states.unanswered(envs)
        if not self.traits.is_bound:  # where a host says more precisely who is not done
            owing = self.hosts[0].at_work & envs
        late = tuple(sorted(owing or envs))
        pids = [host.pid for host in self.hosts.values() if host.pid and not set(host.envs).isdisjoint(late)]
        where = f" (pid {', '.join(map(str, pids))})" if pids else ""
        if self.policy is not None:
            fate = "the worker was killed, and the envs that it hosted begin anew with the next request"
        elif all(self.metadata[env].has_coroutines for env in late):
            fate = "coroutines that are at work for it are cancelled, and their envs need a reset"
        else:
            fate = "the late reply will be dropped, and the next request for it waits until it has come"
        return WorkerTimeoutError(
            f"{describe_envs(late)}{where} did not answer {lease.command} within {lease.deadline}; {fate}",
            env_index=late,
            pid=pids[0] if pids else None,
        )

    # -- requests ---------------------------------------------------------------------------------------

    async def seed(self, lease: Lease, seeds: Mapping[int, int]) -> Outcome:
        """Give each env its seed, by index, for its next reset."""
        if self.policy is not None:
            self.policy.seed(seeds)
        return await self.ask(lease, Opcode.SEED, seeds)

    async def reset(self, lease: Lease, arguments: Mapping[int, ResetArguments]) -> Outcome:
        """Reset the envs with these arguments, by index; where there are none, with none."""
        if self.policy is not None:
            return await self.policy.reset(lease, arguments)
        return await self.ask(lease, Opcode.RESET, arguments)

    async def perform(self, lease: Lease, calls: Mapping[int, Call]) -> Outcome:
        """Ask each env for something beyond the commands, by index; the outcome's `values` say what came of it."""
        return await self.ask(lease, Opcode.CALL, calls)

    def ask(self, lease: Lease, opcode: Opcode, values: Mapping[int, Any] | None) -> PendingOutcome:
        """Send a command to every host concerned; its outcome is to be awaited.

        Cancelling that abandons the answers, which are dropped when they come.

        Raises:
            ClosedError: If the envs were closed since they were held.
            ProtocolError: If there are too many values; nothing was sent.
        """
        if self.states.closed:
            raise closed_meanwhile(lease.selection.envs)
        enclosed = self._enclosed(lease, values) if values else None
        wanted = lease.selection.envs
        if self.policy is not None and opcode in STEPS:
            lease = self.of_present(lease)
        elif self.policy is not None and opcode is Opcode.RESET:  # which needs to be told of nothing that was before
            self.policy.take_lost(wanted)
        selection, hosts = lease.selection, self.hosts
        loop = self._loop
        future = loop.create_future() if loop is not None else None
        request = PendingOutcome(self, lease, opcode, future, self.policy is not None)
        request.envs = wanted
        began = time.perf_counter() if opcode in STEPS else 0.0
        self.states.sent(selection.envs)
        for index, positions, envs in selection.parts:
            body = None if enclosed is None else enclosed[index]
            hosts[index].send(Share(request, envs, began), opcode, positions, body)
        return request

    def of_present(self, lease: Lease) -> Lease:
        """Return the lease for those envs that do not have to tell first of a step that was lost before."""
        assert self.policy is not None
        envs = lease.selection.envs
        present = self.policy.present(envs)
        return lease if len(present) == len(envs) else lease._replace(selection=self.select(sorted(present)))

    def _enclosed(self, lease: Lease, values: Mapping[int, Any]) -> dict[int, Any]:
        """Return the share of these values for each host, by its number."""
        return {index: self.hosts[index].enclose(values, envs) for index, _, envs in lease.selection.parts}

    def plainly_awaited(self, request: PendingOutcome) -> bool:
        """Whether nothing but its future is to be waited for."""
        return self.policy is None and (request.settled or (request.lease.deadline is None and self.traits.is_bound))

    async def awaited(self, request: PendingOutcome) -> Outcome:
        """Wait for a request with all that may happen."""
        if self.policy is not None:
            return await self.policy.outcome(request)
        lease = request.lease
        assert request.future is not None
        try:
            if not await done_within([request.future], None if lease.deadline is None else lease.deadline.left):
                raise self.late_error(lease.selection.envs, lease)
        finally:
            if not request.settled:
                self.abandon(request)
                if self.traits.outlasts and request.missing:
                    await outlast(request.over(), functools.partial(self.abandon, request))
        return request.result()

    def abandon(self, request: PendingOutcome) -> None:
        """Wait no longer for a request: what coroutines do for it is cancelled, and its answers are dropped."""
        request.settled = True
        self.cancel(request, request.lease.selection)

    def cancel(self, request: PendingOutcome | FirstReady, selection: Selection) -> None:
        """Cancel what coroutines do for a request."""
        for index, _, _ in selection.parts:
            if self.has_coroutines[index] and index in self.hosts:
                host = self.hosts[index]
                for sequence in [number for number, share in host.pending.items() if share.request is request]:
                    host.cancel(sequence)

    def step_first_ready(self, lease: Lease, inputs: Mapping[int, Objects] | None, deliver: Deliver) -> FirstReady:
        """Step the envs, and reset those that finish, each answered for by itself; see `FirstReady`."""
        if self.states.closed:
            raise closed_meanwhile(lease.selection.envs)
        return FirstReady(self, lease, deliver).send(inputs)

    # -- answers ----------------------------------------------------------------------------------------

    def answered(
        self, host: Host, sequence: int, finished: int = 0, verdict: int = 0, outcome: Outcome | None = None
    ) -> None:
        """Take in the answer to a request, whoever awaits it; nothing if none is owed under that number."""
        share = host.pending.pop(sequence, None)
        if share is None:
            return
        request, envs, began, _ = share
        self.states.answered(envs)
        if began:
            self.times[host.index].add(time.perf_counter() - began)
        if self._drained:
            self._wake()
        request.answered(envs, finished, verdict, outcome)

    def answered_one(self, host: Host, sequence: int, position: int, outcome: Outcome) -> None:
        """Take in the answer for one env of several."""
        share = host.pending.get(sequence)
        env = None if share is None or share.left is None else share.left.pop(position, None)
        if share is None or env is None:
            return
        if not share.left:
            del host.pending[sequence]
        self._free([(host, share, env, outcome.finished, 0)])
        share.request.answered((env,), outcome.finished, outcome.verdict, outcome)

    def answered_each(self, answers: Each) -> None:
        """Take in answers for single envs, which were taken out of their shares."""
        self._free(answers)
        if verdict := hear_each(answers):
            self.advise(verdict)

    def _free(self, answers: Each) -> None:
        """Take note that these envs have stepped, each by itself."""
        self.states.answered([env for _, _, env, _, _ in answers])
        now = time.perf_counter()
        for (index, began), count in Counter([(host.index, share.began) for host, share, *_ in answers]).items():
            self.times[index].add(now - began, count)
        if self._drained:
            self._wake()

    def failed(self, host: Host, sequence: int, error: BaseException) -> None:
        """Take note that a request is not answered, and never will be."""
        share = host.pending.pop(sequence, None)
        if share is None:
            return
        envs = share.envs if share.left is None else list(share.left.values())
        self.states.answered(envs)
        share.request.failed(envs, error)

    def advise(self, verdict: int) -> None:
        """Say, once, that the envs would gain by more processes, or by none."""
        if not self._advised and self.traits.is_local:
            self._advised = warned_of(verdict, self.num_envs, self.times, available_cores())

    # -- the end of hosts, and others in their place ----------------------------------------------------

    def died(self, host: WorkerHost, how: Exit, cause: Exception | None) -> None:
        """Act upon a host's end, whichever sign of it comes first; this is called once."""
        self._kind.notice()  # what it has answered before counts
        error = host.bury(how, cause)
        if error is not None:
            logger.info("%s", error)
            self.states.break_(host.envs, error)
        host.fail_pending()
        self._wake()

    # -- the end ----------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """Say that `close` comes next; errors are those of `HostKind.begin_close`."""
        self._kind.begin_close(self.states.close)

    async def close(self) -> None:
        """Close all envs and give everything back. Always succeeds, also twice."""
        self.begin_close()
        if not self.traits.is_bound:
            await self.crew.end_hosts(polite=True)
            self.drop_memory()
        elif asyncio.get_running_loop() is not self._loop or os.getpid() != self._owner:
            self.discard()
        else:
            self._shut()
            await self.crew.end(polite=True)

    def _shut(self) -> None:
        """Let nobody in any more, and nobody wait."""
        self.states.close()
        self._wake()
        self.crew.stop_replacing()

    def drop_memory(self) -> None:
        """Let go of the buffer, which belongs to the results that look into it from now on."""
        self.arrays, self.buffers = (), ()

    def discard(self) -> None:
        """Give everything back at once, without waiting and from any thread; for pools that were forgotten."""
        if not self.traits.is_bound:
            self.states.close()
            self.crew.let_go(self._loop)
            self.drop_memory()
            return
        if os.getpid() != self._owner:
            return  # a fork of the parent: the hosts, and what the loop watches, are not ours
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if loop.is_running():
            loop.call_soon_threadsafe(self._abandon_all, loop)
        else:
            self._abandon_all(loop)

    def _abandon_all(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop.is_closed():
            self.states.close()
        else:
            self._shut()
        self.crew.let_go(loop)
        self.drop_memory()
