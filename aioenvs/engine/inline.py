"""The pool without processes: envs live in the caller's, and commands run them right there."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from aioenvs.engine.failure import annotate, locate, passable, summary
from aioenvs.engine.host import EnvHost, Outcome
from aioenvs.engine.layout import Layout
from aioenvs.engine.metadata import agree
from aioenvs.engine.pool import Pool, Selection
from aioenvs.engine.spaces import Objects
from aioenvs.errors import WorkerStartError

__all__ = ["InlinePool"]


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
        self._yields = yields
        self._factories = factories
        self._kwargs = kwargs
        self._host = EnvHost(fatal=(SystemExit, KeyboardInterrupt))

    async def start(self) -> None:
        try:
            for env, (factory, kwargs) in enumerate(zip(self._factories, self._kwargs, strict=True)):
                try:
                    self._host.build(env, factory, copy.deepcopy(kwargs))
                except Exception as error:
                    raise WorkerStartError(
                        f"the factory of env {env} failed: {summary(error)}", env_index=[env]
                    ) from error
            self.metadata = self._host.metadata[0]
            agree(self._host.metadata, range(self.num_envs), self.metadata)
            self.layout = Layout.of(self.num_envs, self.metadata.leaves)
            self.arrays = self.layout.arrays(bytearray(max(1, self.layout.nbytes)))
            self._host.attach(self.arrays)
        except BaseException:
            self._host.close()
            raise

    async def hold(self, selection: Selection, command: str, *, replacing: bool = False) -> None:
        self.slots.acquire(selection.envs, command)
        if self._yields:
            try:
                await asyncio.sleep(0)
            except BaseException:
                self.release(selection)
                raise

    async def seed(self, selection: Selection, seeds: Mapping[int, int]) -> Outcome:
        return self._located(self._host.seed(_positions(selection), seeds), "seed")

    async def reset(self, selection: Selection, kwargs: Mapping[int, Mapping[str, Any]]) -> Outcome:
        return self._located(self._host.reset(_positions(selection), kwargs), "reset")

    async def step(self, selection: Selection, actions: Mapping[int, Objects] | None, *, maybe_reset: bool) -> Outcome:
        outcome = self._host.step(_positions(selection), actions, maybe_reset=maybe_reset)
        return self._located(outcome, "step_and_maybe_reset" if maybe_reset else "step")

    def _located(self, outcome: Outcome, command: str) -> Outcome:
        for env, error in outcome.failures.items():
            outcome.failures[env] = annotate(passable(error), locate(env, command))
        return outcome

    async def close(self) -> None:
        self.discard()

    def discard(self) -> None:
        self.slots.close()
        self._host.close()


def _positions(selection: Selection) -> tuple[int, ...]:
    return selection.parts[0][1] if selection.parts else ()
