"""The pool that restarts workers of itself, so that a loop over its envs goes on when one dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import cloudpickle

from aioenvs.engine.adapters import ResetArguments
from aioenvs.engine.host import Outcome
from aioenvs.engine.metadata import ROOT
from aioenvs.engine.pool import Selection
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.restarts import RestartBudget, derived_seed
from aioenvs.engine.spaces import Objects
from aioenvs.engine.workers import WorkerPool
from aioenvs.errors import WorkerDiedError, WorkerError

__all__ = ["RestartingPool"]

logger = logging.getLogger("aioenvs")


class RestartingPool(WorkerPool):
    """Rebuilds and resets the envs of a worker that died, or that was late and therefore killed.

    An env that was lost says so once: its next step, or the one on which it died, comes back in the outcome's `lost`
    without having been taken. A reset is repeated with its arguments. A call beyond the commands raises, since only its
    caller knows whether it may be repeated.

    Args:
        *args: As for `WorkerPool`.
        max_restarts: How often each worker may be restarted.
        **options: As for `WorkerPool`.
    """

    restarts = True

    def __init__(self, *args: Any, max_restarts: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.budgets = [RestartBudget(max_restarts) for _ in self.groups]
        self._lost: dict[int, Objects] = {}  # what lost envs observed when they were reset, where it has no row
        self._seeds: dict[int, int] = {}  # the last seed that each env was given
        self._asked_for: set[int] = set()  # workers that a reset wants back, whatever was spent on them

    async def hold(self, selection: Selection, command: str, *, replacing: bool = False) -> None:
        wanted = {index for index, _, _ in selection.parts} if replacing else set()
        self._asked_for |= wanted
        try:
            await super().hold(selection, command, replacing=replacing)
        finally:
            self._asked_for -= wanted

    async def seed(self, selection: Selection, seeds: Mapping[int, int]) -> Outcome:
        self._seeds.update(seeds)
        return await super().seed(selection, seeds)

    async def reset(self, selection: Selection, arguments: Mapping[int, ResetArguments]) -> Outcome:
        self._seeds.update({env: own.kwargs["seed"] for env, own in arguments.items() if "seed" in own.kwargs})
        self._take_lost(selection.envs)
        outcome = await super().reset(selection, arguments)
        while again := self._take_lost(selection.envs):
            more = await super().reset(self.select(sorted(again)), arguments)
            outcome.failures |= more.failures
            outcome.objects |= more.objects
        return outcome

    async def step(self, selection: Selection, inputs: Mapping[int, Objects] | None, *, maybe_reset: bool) -> Outcome:
        present = selection.envs - self._lost.keys()
        chosen = selection if len(present) == len(selection.envs) else self.select(sorted(present))
        outcome = await super().step(chosen, inputs, maybe_reset=maybe_reset) if present else Outcome()
        if lost := self._take_lost(selection.envs):
            outcome.lost = frozenset(lost)
            outcome.objects |= {env: {ROOT: objects} for env, objects in lost.items() if objects}
        return outcome

    def _take_lost(self, envs: Collection[int]) -> dict[int, Objects]:
        """Those of these envs that were lost, which their caller hears of now."""
        if not self._lost:
            return {}
        return {env: self._lost.pop(env) for env in self._lost.keys() & envs}

    async def _replies(self, asked: Sequence[asyncio.Future[Any]], selection: Selection, opcode: Opcode) -> list[Any]:
        """The replies of those that lived; the others are restarted when this returns."""
        await asyncio.wait(asked, timeout=self._timeouts.step)
        for (index, _, envs), reply in zip(selection.parts, asked, strict=True):
            if not reply.done():
                logger.warning("%s; its worker is killed", self._late(tuple(sorted(envs)), opcode.name.lower()))
                self._workers[index].process.signal(signal.SIGKILL)
        replies = await asyncio.gather(*asked, return_exceptions=True)
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        for error in errors:
            if opcode is Opcode.CALL or not isinstance(error, WorkerDiedError):
                raise error
        if errors:
            await self._revive(selection)
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    async def _bring_back(self, index: int) -> None:
        """Replace a worker, as often as it takes and its budget allows, and reset its envs."""
        budget, error = self.budgets[index], self.slots.error(self.groups[index][0])
        while True:
            delay = budget.next_delay(self._workers[index].lived)
            if delay is None and index in self._asked_for:
                return await self._replace(index)
            if delay is None:
                error.add_note(
                    f"it was restarted {budget.used} times before (max_restarts={budget.most}); a reset starts it anew"
                )
                raise error
            logger.warning("%s; restart %d of at most %d", error, budget.used, budget.most)
            await asyncio.sleep(delay)
            try:
                return await self._replace(index)
            except WorkerError as failure:
                error = failure

    async def _settle(self, index: int) -> None:
        """Reset the envs of a new worker; they have lost what they were doing."""
        envs, restart = self.groups[index], self.budgets[index].used
        seeds = {env: derived_seed(self._seeds[env], restart) for env in envs if env in self._seeds}
        body = cloudpickle.dumps({env: ResetArguments({"seed": seed}) for env, seed in seeds.items()})
        try:
            async with asyncio.timeout(self._timeouts.start):
                outcome = self._merge([await self._workers[index].channel.request(Opcode.RESET, (), (), body)])
        except TimeoutError:
            raise self._start_error(index, f"did not reset its envs within {self._timeouts.start} s") from None
        outcome.raise_failure()
        self._lost.update({env: outcome.objects.get(env, {}).get(ROOT, {}) for env in envs})
