"""The pool without processes: envs live in the caller's, and commands run them right there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioenvs.engine.failure import locate, passable
from aioenvs.engine.host import EnvHost, Outcome
from aioenvs.engine.layout import Layout
from aioenvs.engine.metadata import agree
from aioenvs.engine.pool import Pool, Selection, first_failure
from aioenvs.engine.spaces import Objects
from aioenvs.errors import WorkerStartError

__all__ = ["InlinePool"]


class InlinePool(Pool):
    """Hosts the envs in this process; its coroutines never suspend."""

    def __init__(self, factories: Sequence[Any], kwargs: Sequence[Mapping[str, Any]]) -> None:
        super().__init__([range(len(factories))])
        self._factories = factories
        self._kwargs = kwargs
        self._host = EnvHost(fatal=(SystemExit, KeyboardInterrupt))

    async def start(self) -> None:
        try:
            for env, (factory, kwargs) in enumerate(zip(self._factories, self._kwargs, strict=True)):
                try:
                    self._host.build(env, factory, kwargs)
                except Exception as error:
                    raise WorkerStartError(f"the factory of env {env} failed", env_index=[env]) from error
            self.metadata = agree(self._host.metadata)
            self.layout = Layout.of(self.num_envs, self.metadata.leaves)
        except BaseException:
            self._host.close()
            raise
        self.arrays = self.layout.arrays(bytearray(max(1, self.layout.nbytes)))
        self._host.attach(self.arrays)

    async def seed(self, selection: Selection, seeds: Mapping[int, int]) -> Outcome:
        return self._check(self._host.seed(_positions(selection), seeds), "seed")

    async def reset(self, selection: Selection, kwargs: Mapping[int, Mapping[str, Any]]) -> Outcome:
        return self._check(self._host.reset(_positions(selection), kwargs), "reset")

    async def step(self, selection: Selection, actions: Mapping[int, Objects] | None, *, maybe_reset: bool) -> Outcome:
        outcome = self._host.step(_positions(selection), actions, maybe_reset=maybe_reset)
        return self._check(outcome, "step_and_maybe_reset" if maybe_reset else "step")

    def _check(self, outcome: Outcome, command: str) -> Outcome:
        errors: dict[int, Exception] = {}
        for env, error in outcome.failures.items():
            errors[env] = error = passable(error)
            error.add_note(locate(env, command))
        if errors:
            raise first_failure(errors)
        return outcome

    async def close(self) -> None:
        self.discard()

    def discard(self) -> None:
        self.slots.close()
        self._host.close()


def _positions(selection: Selection) -> tuple[int, ...]:
    return selection.parts[0][1] if selection.parts else ()
