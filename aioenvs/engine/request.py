"""A request: envs are held, their rows written, a command asked of them, its answer read, and they are let go again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from aioenvs.engine.adapters.base import Call, ResetArguments
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.double_buffer import Fence
from aioenvs.engine.pools.pool import Pool
from aioenvs.engine.pools.requests import Lease, PendingOutcome, Selection
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.waiting import Deadline
from aioenvs.engine.worker.env_host import Outcome

STEP, STEP_AND_MAYBE_RESET = Opcode.STEP, Opcode.STEP_AND_MAYBE_RESET


class Request:
    """The only way in which envs of a pool are asked for anything and awaited.

    Within `async with request`, the envs are held: their rows may be written, the command sent, and what came of it
    read. Nobody else can touch those rows meanwhile. A caller that leaves early (cancelled, timed out, interrupted)
    leaves the context, and what is still on its way is then dropped on arrival.

    Args:
        pool: The pool.
        selection: Which envs.
        command: What for, in words.
        timeout: Seconds that it may take, or when it must be answered; None for as long as requests may.
        replacing: Replace the workers that are dead, instead of raising.

    Attributes:
        lease: On the envs, once they are held.
    """

    __slots__ = ("_asked", "_command", "_pool", "_replacing", "_timeout", "lease", "selection")

    def __init__(
        self,
        pool: Pool,
        selection: Selection,
        command: str,
        *,
        timeout: float | Deadline | None = None,
        replacing: bool = False,
    ) -> None:
        self._pool = pool
        self.selection = selection
        self._command = command
        self._timeout = timeout
        self._replacing = replacing
        self.lease = self._asked = Lease(selection, command)

    async def arrived(self, fences: Sequence[Fence]) -> None:
        """Wait for copies of what is to be written, before the envs are held; that counts as time of the request.

        Raises:
            WorkerTimeoutError: If it takes too long; no env was asked anything then.
        """
        await self._pool.enter_loop(self._command)
        self._timeout = deadline = self._pool.deadline(self._timeout)
        await self._pool.passed(fences, self.lease._replace(deadline=deadline))

    async def __aenter__(self) -> Request:
        """Hold the envs, and wait until none of them owes a reply to an earlier caller; errors are those of `hold`."""
        lease = self._pool.hold(self.selection, self._command, replacing=self._replacing, timeout=self._timeout)
        self.lease = self._asked = await lease
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.states.release(self.lease.selection.envs)

    def narrow(self, selection: Selection) -> None:
        """Ask some of the envs only; all of them stay held."""
        self._asked = self.lease._replace(selection=selection)

    def step(self, inputs: Mapping[int, Objects] | None, *, maybe_reset: bool) -> PendingOutcome:
        """Step the envs with what was written, and with inputs that have no place there, by env.

        The command is on its way when this returns; its outcome is to be awaited.
        """
        return self._pool.ask(self._asked, STEP_AND_MAYBE_RESET if maybe_reset else STEP, inputs)

    async def reset(self, arguments: Mapping[int, ResetArguments]) -> Outcome:
        """Reset the envs with these arguments, by env; where there are none, with none."""
        return await self._pool.reset(self._asked, arguments)

    async def seed(self, seeds: Mapping[int, int]) -> Outcome:
        """Give each env its seed for its next reset."""
        return await self._pool.seed(self._asked, seeds)

    async def perform(self, calls: Mapping[int, Call]) -> Outcome:
        """Ask these envs for something beyond the commands; the outcome's `values` say what came of it."""
        if len(calls) < len(self._asked.selection.indices):
            self.narrow(self._pool.select(sorted(calls)))
        return await self._pool.perform(self._asked, calls)
