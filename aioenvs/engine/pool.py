"""The engine's interface to the faces: many envs behind coroutines, whatever hosts them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from aioenvs.engine.adapters import Call, ResetArguments
from aioenvs.engine.host import Outcome
from aioenvs.engine.layout import Arrays
from aioenvs.engine.metadata import EnvMetadata, Family, form_families, interned
from aioenvs.engine.slots import Slots
from aioenvs.engine.spaces import Objects
from aioenvs.errors import AioEnvsError, ClosedError, describe_envs

__all__ = ["Pool", "Selection", "StepTimes", "Timeouts", "closed_meanwhile", "outlast", "wrong_loop"]

MAX_SELECTIONS = 1024  # how many are remembered


@dataclass(frozen=True)
class Timeouts:
    """How long things may take, in seconds; None for as long as they like.

    Attributes:
        start: From ordering a process to its envs being built.
        step: Any other command.
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


class Pool(ABC):
    """Hosts envs. Values of fixed shape are exchanged through `arrays`, the rest as arguments and outcomes.

    The order of a request: `hold` the selection, write its inputs, call the command, read its rows, `release`.
    Nobody else can touch those rows in between, and a caller that leaves early (cancelled, timed out, interrupted)
    only has to `release`: what is still on its way is then dropped on arrival.

    Attributes:
        metadata: What each env says of itself; known once started.
        families: Envs of one structure each, and where their values lie; known once started.
        arrays: For each family its arrays `(envs of the family, *shape)` by region and key; known once started.
        has_coroutines: Whether some envs of each worker do, so that cancelling a request cancels these; known once
            started.
        restarts: Whether envs whose worker died are built anew and reset of themselves.
        replaced: How often each worker was replaced.
        times: How long each worker took to step its envs.
    """

    restarts: bool = False

    metadata: tuple[EnvMetadata, ...]
    families: tuple[Family, ...]
    arrays: tuple[dict[str, Arrays], ...]
    has_coroutines: tuple[bool, ...]

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = tuple(tuple(group) for group in groups)
        self.num_envs = sum(map(len, self.groups))
        self.slots = Slots(self.num_envs)
        self.replaced = [0] * len(self.groups)
        self.times = [StepTimes() for _ in self.groups]
        self._home = {env: (worker, position) for worker, g in enumerate(self.groups) for position, env in enumerate(g)}
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
        return buffer

    @property
    def _places(self) -> list[tuple[tuple[int, ...], Any]]:
        """What a host has to know of the layout."""
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

    @abstractmethod
    async def hold(self, selection: Selection, command: str, *, replacing: bool = False) -> None:
        """Reserve the envs for one command, and wait until none of them owes a reply to an earlier caller.

        Cancelling it gives them up again.

        Args:
            selection: Which envs.
            command: What for, in words.
            replacing: Replace the workers that are dead, instead of raising.

        Raises:
            ClosedError: After `close`, also if that came while this waited.
            ConcurrencyError: If one of them is held already.
            WorkerDiedError: If the worker of one is dead.
        """

    def release(self, selection: Selection) -> None:
        """End `hold`."""
        self.slots.release(selection.envs)

    @abstractmethod
    async def seed(self, selection: Selection, seeds: Mapping[int, int]) -> Outcome:
        """Give each env its seed, by index, for its next reset."""

    @abstractmethod
    async def reset(self, selection: Selection, arguments: Mapping[int, ResetArguments]) -> Outcome:
        """Reset the envs with these arguments, by index; where there are none, with none."""

    @abstractmethod
    async def step(self, selection: Selection, inputs: Mapping[int, Objects] | None, *, maybe_reset: bool) -> Outcome:
        """Step the envs with the stored input; `inputs` is what of it has no fixed shape, by index."""

    @abstractmethod
    async def perform(self, selection: Selection, calls: Mapping[int, Call]) -> Outcome:
        """Ask each env for something beyond the commands, by index; the outcome's `values` say what came of it."""

    @abstractmethod
    async def close(self) -> None:
        """Close all envs and give everything back. Always succeeds, also twice."""

    @abstractmethod
    def discard(self) -> None:
        """Give everything back at once, without waiting and from any thread; for pools that were forgotten."""


def closed_meanwhile(envs: Collection[int]) -> ClosedError:
    """What a request gets for which its envs were not ready before they were closed."""
    return ClosedError(f"{describe_envs(tuple(envs))} were closed while a request waited for them")


def wrong_loop(command: str) -> AioEnvsError:
    """What a request gets in an event loop other than that of its envs, or in a fork."""
    return AioEnvsError(
        f"{command}: these envs belong to the event loop and process that started them, and this is another one; make "
        "envs of its own for each, or close these there first"
    )


async def outlast(task: asyncio.Future[Any], hurry: Callable[[], None] | None = None) -> None:
    """Wait for the end of a task, or another future, and only then be cancelled.

    Args:
        task: Whose result or exception stays with it.
        hurry: Called at each cancelling.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            if hurry is not None:
                hurry()
    if cancelled is not None:
        raise cancelled
