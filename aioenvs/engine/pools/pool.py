"""The engine's interface to the faces: many envs behind coroutines, whatever hosts them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from aioenvs.engine.adapters.base import Call, ResetArguments
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.double_buffer import DoubleBuffer, Fence
from aioenvs.engine.env_states import EnvStates
from aioenvs.engine.layout import LATEST, STATUS, WRITE_HALF, Arrays, EnvMetadata, Family, form_families, interned
from aioenvs.engine.waiting import Deadline, FenceWaiter, done_within, drop
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.errors import AioEnvsError, ClosedError, WorkerTimeoutError, describe_envs

__all__ = [
    "Lease",
    "PendingOutcome",
    "Pool",
    "Selection",
    "StepTimes",
    "Timeouts",
    "closed_meanwhile",
    "wrong_loop",
]

MAX_SELECTIONS = 1024  # how many are remembered

PendingOutcome = Coroutine[Any, Any, Outcome]


@dataclass(frozen=True)
class Timeouts:
    """How long things may take, in seconds; None for as long as they like.

    Attributes:
        start: From ordering a process to its envs being built.
        step: Any other command that does not say otherwise.
        close: Closing all envs, before the processes are killed.
    """

    start: float | None = 60.0
    step: float | None = None
    close: float = 5.0


@dataclass
class StepTimes:
    """How long a worker took, in seconds, for steps of all or some of its envs."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one command."""
        self.count += 1
        self.total += seconds
        if seconds > self.longest:
            self.longest = seconds


class Selection(NamedTuple):
    """Some envs of a pool, and what has to be asked of which worker to reach them.

    Attributes:
        indices: The envs, ascending.
        envs: The same as a set.
        parts: Per worker: its number, the positions of its selected envs (empty for all), and their indices.
    """

    indices: tuple[int, ...]
    envs: frozenset[int]
    parts: tuple[tuple[int, tuple[int, ...], frozenset[int]], ...]


class Lease(NamedTuple):
    """Some envs, held for one request.

    Attributes:
        selection: Which.
        command: What for, in words.
        deadline: When it must be answered; None for whenever.
        replacing: Whether dead workers of theirs are replaced.
        waits: Whether they have to be made ready first.
    """

    selection: Selection
    command: str
    deadline: Deadline | None = None
    replacing: bool = False
    waits: bool = False

    def renewed(self) -> Lease:
        """Return the lease with all its time, which begins now."""
        if self.deadline is None:
            return self
        return self._replace(deadline=Deadline.after(self.deadline.seconds, self.deadline.name))


class Pool(ABC):
    """Hosts envs. Values of fixed shape are exchanged through `arrays`, the rest as arguments and outcomes.

    The order of a request: `hold` the selection, write its inputs, call the command with the lease, read its rows,
    `release`. Nobody else can touch those rows in between, and a caller that leaves early (cancelled, timed out,
    interrupted) only has to `release`: what is still on its way is then dropped on arrival.

    Attributes:
        metadata: What each env says of itself; known once started.
        families: Envs of one structure each, and where their values lie; known once started.
        arrays: For each family its arrays `(envs of the family, *shape)` by region and key; known once started.
        buffers: For each family in which half its envs have and write their values; known once started.
        has_coroutines: Whether some envs of each worker do, so that cancelling a request cancels these; known once
            started.
        restarts: Whether envs whose worker died are built anew and reset of themselves.
        suspends: Whether commands may wait for something, and so want an event loop.
        shares_loop: Whether the event loop has others to run while a request waits for a fence.
        fenced: Whether there may be fences at all (`DoubleBuffer.guard`).
        ships: Whether arguments are sent to another process, as bytes, rather than handed over.
        fence_waiter: Waits for fences.
        timeouts: How long things may take.
        replaced: How often each worker was replaced.
        times: How long each worker took to step its envs.
    """

    restarts: bool = False
    suspends: bool = True
    shares_loop: bool = True
    fenced: bool = False
    ships: bool = False

    metadata: tuple[EnvMetadata, ...]
    families: tuple[Family, ...]
    arrays: tuple[dict[str, Arrays], ...]
    buffers: tuple[DoubleBuffer, ...] = ()
    has_coroutines: tuple[bool, ...]

    def __init__(self, groups: Sequence[Sequence[int]], timeouts: Timeouts = Timeouts()) -> None:
        self.timeouts = timeouts
        self.groups = tuple(tuple(group) for group in groups)
        self.num_envs = sum(map(len, self.groups))
        self.states = EnvStates(self.num_envs)
        self.replaced = [0] * len(self.groups)
        self.times = [StepTimes() for _ in self.groups]
        self._home = {env: (worker, position) for worker, g in enumerate(self.groups) for position, env in enumerate(g)}
        self.fence_waiter = FenceWaiter()
        self._selections: dict[tuple[int, ...], Selection] = {}
        self.everything = self.select(range(self.num_envs))

    def select(self, indices: Iterable[int]) -> Selection:
        """Work out, once, how to reach these envs."""
        key = tuple(indices)
        selection = self._selections.get(key)
        if selection is None:
            if len(self._selections) > MAX_SELECTIONS:
                self._selections.clear()
            selection = self._selections[key] = self._select(key)
        return selection

    def _select(self, indices: tuple[int, ...]) -> Selection:
        chosen: dict[int, list[int]] = {}
        for env in indices:
            worker, position = self._home[env]
            chosen.setdefault(worker, []).append(position)
        parts = []
        for worker, positions in sorted(chosen.items()):
            group = self.groups[worker]
            whole = len(positions) == len(group)
            envs = frozenset(group[position] for position in positions)
            parts.append((worker, () if whole else tuple(positions), envs))
        return Selection(indices, frozenset(indices), tuple(parts))

    def _lay_out(self, metadata: Iterable[EnvMetadata], allocate: Callable[[int], Any]) -> Any:
        """Work out where everything lies, in a buffer of the size that it takes."""
        self.metadata = tuple(interned(metadata))
        self.has_coroutines = tuple(any(self.metadata[env].has_coroutines for env in group) for group in self.groups)
        self.families = form_families(self.metadata)
        buffer = allocate(self.families[-1].layout.end)
        self.arrays = tuple(family.layout.arrays(buffer) for family in self.families)
        self.buffers = tuple(DoubleBuffer(own[STATUS][LATEST], own[STATUS][WRITE_HALF]) for own in self.arrays)
        return buffer

    def _drop_memory(self) -> None:
        """Let go of the buffer, which belongs to the results that look into it from now on."""
        self.arrays, self.buffers = (), ()

    @property
    def _places(self) -> list[tuple[tuple[int, ...], Any]]:
        """The envs of each family and their layout, for a host."""
        return [(family.envs, family.layout) for family in self.families]

    def host_of(self, env: int) -> int:
        """The worker that hosts an env."""
        return self._home[env][0]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that run now."""
        return ()

    @abstractmethod
    async def start(self) -> None:
        """Build all envs, learn their metadata, and lay out the block."""

    async def hold(
        self, selection: Selection, command: str, *, replacing: bool = False, timeout: float | Deadline | None = None
    ) -> Lease:
        """Reserve the envs for one request, and wait until none of them owes a reply to an earlier caller.

        Cancelling it gives them up again. Args and errors are those of `acquire` and `ready`.
        """
        lease = self.acquire(selection, command, replacing=replacing, timeout=timeout)
        if not lease.waits:
            return lease
        try:
            return await self.ready(lease)
        except BaseException:
            self.release(lease)
            raise

    @abstractmethod
    def acquire(
        self, selection: Selection, command: str, *, replacing: bool = False, timeout: float | Deadline | None = None
    ) -> Lease:
        """Reserve the envs for one request, all or none; if the lease `waits`, they are not `ready` for it yet.

        Args:
            selection: Which envs.
            command: What for, in words.
            replacing: Replace the workers that are dead, instead of raising.
            timeout: Seconds that the request may take, or when it must be answered; None for as long as requests may.

        Raises:
            ClosedError: After `close`.
            ConcurrencyError: If one of them is held already.
            WorkerDiedError: If the worker of one is dead.
            ValueError: If the timeout is none.
        """

    def check_home(self, command: str) -> None:  # noqa: B027 - where anybody may command them
        """Refuse a command from where it cannot be given.

        Raises:
            AioEnvsError: In another event loop or process than that which started the envs.
        """

    async def enter_loop(self, command: str) -> None:  # noqa: B027 - where coroutines are always begun in one
        """See to it that the rest of a coroutine runs in the event loop of the envs, if they have one.

        Raises:
            AioEnvsError: In another event loop than that.
        """

    @abstractmethod
    async def ready(self, lease: Lease) -> Lease:
        """Wait until none of the envs owes a reply to an earlier caller, and replace their workers if need be.

        The time that replacing takes is not part of the request's.

        Raises:
            ClosedError: If the envs were closed meanwhile.
            WorkerTimeoutError: If they did not reply in time.
            WorkerError: If a worker is dead and not to be, or cannot be, replaced.
        """

    def in_use(self, envs: Set[int]) -> list[Fence]:
        """Return the fences before memory into which these envs would write next."""
        fences: list[Fence] = []
        for family, buffers in (
            zip(self.families, self.buffers, strict=False) if self.fenced else ()
        ):  # none once closed
            if buffers.guarded:
                fences += buffers.in_use([row for row, env in enumerate(family.envs) if env in envs])
        return fences

    async def passed(self, fences: Sequence[Fence], lease: Lease | None = None) -> None:
        """Wait for fences; in the event loop's thread where there is nobody else to run, and no deadline.

        Cancelling it, or running into its time, leaves them alone.

        Args:
            fences: For which.
            lease: What for; None if that may take as long as it likes.

        Raises:
            WorkerTimeoutError: If it takes longer.
            Exception: That of a fence which failed.
        """
        deadline = None if lease is None else lease.deadline
        if not self.suspends or (deadline is None and not self.shares_loop):
            self.wait(fences, lease)
        elif not await self.fence_waiter.passed(fences, None if deadline is None else deadline.left):
            raise _late_copy(lease)

    def wait(self, fences: Sequence[Fence], lease: Lease | None = None) -> None:
        """Wait for fences in the calling thread, whatever else could run there."""
        deadline = None if lease is None else lease.deadline
        if not self.fence_waiter.wait(fences, None if deadline is None else deadline.left):
            raise _late_copy(lease)

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
            WorkerTimeoutError: If it takes longer, and workers that are late are not replaced.
        """
        if lease.deadline is None:
            return await awaitable
        future = asyncio.ensure_future(awaitable)
        try:
            if not await done_within([future], lease.deadline.left):
                self._overdue(lease)
            return await future
        finally:
            drop(future)

    def _overdue(self, lease: Lease) -> None:
        """Do what is done about envs that are late.

        Raises:
            WorkerTimeoutError: If that is the end of it.
        """
        raise self._late(self._unanswered(lease.selection.envs) or lease.selection.envs, lease)

    def _unanswered(self, envs: Set[int]) -> Set[int]:
        """Return those of these envs that have not answered."""
        return self.states.unanswered(envs)

    def _late(self, envs: Collection[int], lease: Lease) -> WorkerTimeoutError:
        late, pids = tuple(sorted(envs)), self._pids_of(envs)
        where = f" (pid {', '.join(map(str, pids))})" if pids else ""
        return WorkerTimeoutError(
            f"{describe_envs(late)}{where} did not answer {lease.command} within {lease.deadline}; {self._fate(late)}",
            env_index=late,
            pid=pids[0] if pids else None,
        )

    def _fate(self, late: Sequence[int]) -> str:
        """Return the fate of late envs, in words."""
        if all(self.metadata[env].has_coroutines for env in late):
            return "coroutines that are at work for it are cancelled, and their envs need a reset"
        return "the late reply will be dropped, and the next request for it waits until it has come"

    def _pids_of(self, envs: Collection[int]) -> list[int | None]:
        """Process ids of the workers of these envs, where they have any."""
        return []

    def release(self, lease: Lease) -> None:
        """End a lease."""
        self.states.release(lease.selection.envs)

    @abstractmethod
    async def seed(self, lease: Lease, seeds: Mapping[int, int]) -> Outcome:
        """Give each env its seed, by index, for its next reset."""

    @abstractmethod
    async def reset(self, lease: Lease, arguments: Mapping[int, ResetArguments]) -> Outcome:
        """Reset the envs with these arguments, by index; where there are none, with none."""

    def step(self, lease: Lease, inputs: Mapping[int, Objects] | None, *, maybe_reset: bool) -> PendingOutcome:
        """Step the envs with the stored input; `inputs` is what of it has no fixed shape, by index.

        The command is on its way when this returns; what came of it is to be awaited.
        """
        return self.step_each([lease], inputs, maybe_reset=maybe_reset)[0]

    @abstractmethod
    def step_each(
        self, leases: Sequence[Lease], inputs: Mapping[int, Objects] | None, *, maybe_reset: bool
    ) -> list[PendingOutcome]:
        """Step the envs of several leases, each answered for itself; no command is sent unless all can be."""

    def step_first_ready(
        self,
        lease: Lease,
        inputs: Mapping[int, Objects] | None,
        deliver: Callable[[Sequence[int], Outcome | BaseException], None],
    ) -> None:
        """TEMPORARY."""
        envs = lease.selection.indices
        leases = [lease._replace(selection=self.select((env,))) for env in envs]
        pending = self.step_each(leases, inputs, maybe_reset=True)
        if not self.suspends:
            from aioenvs.engine.portal import Immediate

            try:
                for env, steps in zip(envs, pending, strict=True):
                    try:
                        outcome: Any = Immediate().run(steps)
                    except Exception as error:
                        outcome = error
                    deliver((env,), outcome)
            finally:
                for steps in pending:
                    steps.close()
            return
        for env, steps in zip(envs, pending, strict=True):

            def done(task: Any, env: int = env) -> None:
                if task.cancelled():
                    deliver((env,), closed_meanwhile({env}))
                else:
                    deliver((env,), task.exception() or task.result())

            asyncio.get_running_loop().create_task(steps).add_done_callback(done)

    @abstractmethod
    async def perform(self, lease: Lease, calls: Mapping[int, Call]) -> Outcome:
        """Ask each env for something beyond the commands, by index; the outcome's `values` say what came of it."""

    def begin_close(self) -> None:  # noqa: B027 - where envs are at work elsewhere, they can be ended there
        """Say that `close` comes next.

        Raises:
            ConcurrencyError: If envs are at work in a thread that cannot be told to end that; nothing has changed then.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close all envs and give everything back. Always succeeds, also twice."""

    @abstractmethod
    def discard(self) -> None:
        """Give everything back at once, without waiting and from any thread; for pools that were forgotten."""


def _late_copy(lease: Lease | None) -> WorkerTimeoutError:
    """Return the error of a request that waited too long for a copy."""
    assert lease is not None
    envs = lease.selection.indices
    return WorkerTimeoutError(
        f"{lease.command}: {describe_envs(envs)} waited for a copy to or from a device, which was not done within "
        f"{lease.deadline}; what it needs stays as it is until then, so the next request may wait for it as well",
        env_index=envs,
        pid=None,
    )


def closed_meanwhile(envs: Collection[int]) -> ClosedError:
    """Return the error of a request whose envs were closed before they were ready."""
    return ClosedError(f"{describe_envs(tuple(envs))} were closed while a request waited for them")


def wrong_loop(command: str) -> AioEnvsError:
    """Return the error of a request in an event loop other than that of its envs, or in a fork."""
    return AioEnvsError(
        f"{command}: these envs belong to the event loop and process that started them, and this is another one; make "
        "envs of its own for each, or close these there first"
    )
