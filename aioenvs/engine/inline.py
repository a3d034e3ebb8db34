"""The pool without processes: envs live in the caller's, and commands run them right there."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aioenvs.engine.adapters import Call, Handling, ResetArguments
from aioenvs.engine.concurrency import ConcurrentHost
from aioenvs.engine.copying import received
from aioenvs.engine.failure import factory_error, summary
from aioenvs.engine.host import EnvHost, Outcome
from aioenvs.engine.pool import Pool, Selection, closed_meanwhile, wrong_loop
from aioenvs.engine.portal import loop_wanted
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.spaces import Objects
from aioenvs.engine.streams import here
from aioenvs.errors import ClosedError, describe_envs

__all__ = ["InlinePool"]


OWN = functools.partial(received, keeps_graph=True)


class InlinePool(Pool):
    """Hosts the envs in this process.

    Args:
        factories: One per env.
        kwargs: Keyword arguments for each.
        yields: Whether each command lets other tasks, timeouts and interrupts have their turn first; else its
            coroutines never suspend, unless envs have coroutines, which then ask for a loop (`aioenvs.engine.portal`).
        max_concurrency: How many envs may be inside a reset or step at once, if they have coroutines; None for all.
    """

    def __init__(
        self,
        factories: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        yields: bool,
        max_concurrency: int | None = None,
    ) -> None:
        super().__init__([range(len(factories))])
        self._yields = yields
        self._factories = factories
        self._kwargs = kwargs
        handling = Handling(by_reference=True, keeps_grad=True, generators=here(), answer=OWN)
        self._host = EnvHost((SystemExit, KeyboardInterrupt), handling)
        self._max_concurrency = max_concurrency
        self._concurrent: ConcurrentHost | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the coroutines

    async def start(self) -> None:
        try:
            for env, (factory, kwargs) in enumerate(zip(self._factories, self._kwargs, strict=True)):
                try:
                    self._host.build(env, factory, OWN(dict(kwargs)))
                except Exception as error:
                    raise factory_error(env, summary(error), envs=[env]) from error
            buffer = self._lay_out(self._host.metadata, lambda nbytes: bytearray(max(1, nbytes)))
            self._host.attach(self._places, buffer)
            if self._host.has_coroutines:
                self._concurrent = ConcurrentHost(self._host, self._max_concurrency)
        except BaseException:
            self._host.close()
            raise

    async def hold(self, selection: Selection, command: str, *, replacing: bool = False) -> None:
        if self._concurrent is not None and not self.slots.closed:
            await self._enter_loop(command)
        self.slots.acquire(selection.envs, command)
        if self._yields:
            try:
                await asyncio.sleep(0)
                if self.slots.closed:
                    raise closed_meanwhile(selection.envs)
            except BaseException:
                self.release(selection)
                raise

    async def _enter_loop(self, command: str) -> None:
        """See to it that this runs in the loop of the coroutines."""
        if self._loop is None:
            if not self._yields:
                await loop_wanted()
            self._loop = asyncio.get_running_loop()
        elif asyncio.get_running_loop() is not self._loop:
            raise wrong_loop(command)

    async def seed(self, selection: Selection, seeds: Mapping[int, int]) -> Outcome:
        return await self._execute(selection, Opcode.SEED, seeds)

    async def reset(self, selection: Selection, arguments: Mapping[int, ResetArguments]) -> Outcome:
        return await self._execute(selection, Opcode.RESET, arguments)

    async def step(self, selection: Selection, inputs: Mapping[int, Objects] | None, *, maybe_reset: bool) -> Outcome:
        began = time.perf_counter()
        opcode = Opcode.STEP_AND_MAYBE_RESET if maybe_reset else Opcode.STEP
        outcome = await self._execute(selection, opcode, inputs)
        self.times[0].add(time.perf_counter() - began)
        return outcome

    async def perform(self, selection: Selection, calls: Mapping[int, Call]) -> Outcome:
        return await self._execute(selection, Opcode.CALL, calls)

    async def _execute(self, selection: Selection, opcode: Opcode, values: Mapping[int, Any] | None) -> Outcome:
        positions = selection.parts[0][1] if selection.parts else ()
        if self._concurrent is None:
            outcome = self._host.execute(opcode, positions, values)
        else:
            outcome = await self._concurrent.execute(opcode, positions, values)
            if self.slots.closed:
                command = opcode.name.lower()
                raise ClosedError(f"{describe_envs(selection.indices)} were closed while {command} was pending")
        return outcome.located(opcode.name.lower())

    async def close(self) -> None:
        self.slots.close()
        if self._concurrent is None or (self._loop is not None and self._loop is not asyncio.get_running_loop()):
            self.discard()
        else:
            await self._enter_loop("close")
            await self._concurrent.close()

    def discard(self) -> None:
        self.slots.close()
        if self._concurrent is not None and self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(_close_soon, self._concurrent)
        else:
            self._host.close()


_closing: set[asyncio.Task[None]] = set()  # tasks that no one else keeps


def _close_soon(host: ConcurrentHost) -> None:
    task = asyncio.ensure_future(host.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
