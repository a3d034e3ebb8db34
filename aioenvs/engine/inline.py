"""The pool without processes: envs live in the caller's, and commands run them right there."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aioenvs.engine.adapters import Call, Handling, ResetArguments
from aioenvs.engine.copying import received
from aioenvs.engine.failure import factory_error, summary
from aioenvs.engine.host import EnvHost, Outcome
from aioenvs.engine.pool import Lease, Pool, Selection, Steps, check_seconds, closed_meanwhile
from aioenvs.engine.spaces import Objects
from aioenvs.engine.streams import here

__all__ = ["InlinePool"]


OWN = functools.partial(received, keeps_graph=True)


class InlinePool(Pool):
    """Hosts the envs in this process.

    Args:
        factories: One per env.
        kwargs: Keyword arguments for each.
        yields: Whether each command lets other tasks, timeouts and interrupts have their turn first; else its
            coroutines never suspend.
    """

    def __init__(self, factories: Sequence[Any], kwargs: Sequence[Mapping[str, Any]], *, yields: bool) -> None:
        super().__init__([range(len(factories))])
        self.suspends = yields
        self._factories = factories
        self._kwargs = kwargs
        handling = Handling(by_reference=True, keeps_grad=True, generators=here(), answer=OWN)
        self._host = EnvHost((SystemExit, KeyboardInterrupt), handling)

    async def start(self) -> None:
        try:
            for env, (factory, kwargs) in enumerate(zip(self._factories, self._kwargs, strict=True)):
                try:
                    self._host.build(env, factory, OWN(dict(kwargs)))
                except Exception as error:
                    raise factory_error(env, summary(error), envs=[env]) from error
            buffer = self._lay_out(self._host.metadata, lambda nbytes: bytearray(max(1, nbytes)))
            self._host.attach(self._places, buffer)
        except BaseException:
            self._host.close()
            raise

    def acquire(
        self, selection: Selection, command: str, *, replacing: bool = False, timeout: float | None = None
    ) -> Lease:
        check_seconds(timeout, "timeout")
        self.slots.acquire(selection.envs, command)
        return Lease(selection, command, waits=self.suspends)

    async def ready(self, lease: Lease) -> Lease:
        await asyncio.sleep(0)
        if self.slots.closed:
            raise closed_meanwhile(lease.selection.envs)
        return lease

    async def seed(self, lease: Lease, seeds: Mapping[int, int]) -> Outcome:
        return self._host.seed(_positions(lease), seeds).located("seed")

    async def reset(self, lease: Lease, arguments: Mapping[int, ResetArguments]) -> Outcome:
        return self._host.reset(_positions(lease), arguments).located("reset")

    def step_each(
        self, leases: Sequence[Lease], inputs: Mapping[int, Objects] | None, *, maybe_reset: bool
    ) -> list[Steps]:
        return [self._step(lease, inputs, maybe_reset=maybe_reset) for lease in leases]

    async def _step(self, lease: Lease, inputs: Mapping[int, Objects] | None, *, maybe_reset: bool) -> Outcome:
        began = time.perf_counter()
        outcome = self._host.step(_positions(lease), inputs, maybe_reset=maybe_reset)
        self.times[0].add(time.perf_counter() - began)
        return outcome.located("step_and_maybe_reset" if maybe_reset else "step")

    async def perform(self, lease: Lease, calls: Mapping[int, Call]) -> Outcome:
        return self._host.perform(_positions(lease), calls).located("call")

    async def close(self) -> None:
        self.discard()

    def discard(self) -> None:
        self.slots.close()
        self._host.close()


def _positions(lease: Lease) -> tuple[int, ...]:
    return lease.selection.parts[0][1] if lease.selection.parts else ()
