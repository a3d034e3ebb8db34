"""Collecting with all envs stepping together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs.collectors.strategy import TRAJ_IDS, Act, CollectStrategy, failed_envs
from aioenvs.tensors.storage import StepStorage

__all__ = ["Lockstep"]


class Lockstep(CollectStrategy):
    """Every env takes each step, so that a batch is `(*batch_size, T)`."""

    flat = False
    _root: TensorDictBase | None = None  # of the next step
    _sent: TensorDictBase | None = None  # what the envs were given for the one under way
    _row: TensorDictBase | None = None  # a step that came and is not written yet
    _is_followed = False  # whether it says to which trajectories it belongs
    _marks: TensorDict  # the ids of the trajectories under way, as each step gets them
    _failed: frozenset[int] = frozenset()  # envs that need a reset, by row, where others go on

    async def _fill(self, storage: StepStorage, act: Act, more: int | None) -> None:
        while storage.left > (self._row is not None):
            if self._sent is None:
                self._sent = await act(await self._begun())
            await self._finish_step(storage)
        if storage.left:
            await self._write(storage)

    async def _begun(self) -> TensorDictBase:
        """The root of the next step."""
        if self._root is not None:
            self._lose(self._rebuilt())
        while self._root is None:
            self._follow()
            fresh = {env for env, place in self._places.items() if not self._failed or place in self._failed}
            self._root = await self._attempt(self._reset)
            self._failed = frozenset()
            self._mark(self._ids.take(self._env.batch_size))
            self._lose(self._rebuilt() - fresh)
        return self._root

    def _lose(self, envs: Collection[int]) -> None:
        """Have some envs reset, while the others go on from what they show."""
        if envs:
            self._root = None
            self._failed = frozenset(self._places[env] for env in envs)
            if len(self._failed) == len(self._places):
                self._failed = frozenset()

    async def _reset(self) -> TensorDictBase:
        """Begin new episodes where they are needed, which is everywhere at the beginning."""
        if not self._failed:
            return await self._env.reset()
        mask = torch.zeros(self._env.batch_size, dtype=torch.bool)
        mask[list(self._failed)] = True
        return await self._env.reset(TensorDict({"_reset": mask}, mask.shape))

    async def _finish_step(self, storage: StepStorage) -> None:
        """Wait for the step that is under way; the one before is written while the envs are at work."""
        if self._returns:
            await self._write(storage)
        root = await self._attempt(self._step, lambda: self._write_row(storage))
        self._row, self._is_followed = self._sent, False
        self._root, self._sent = root, None

    async def _write(self, storage: StepStorage) -> None:
        """Write the step that came last, if it is not written; where this ends too early, it is still there."""
        if self._row is not None:
            self._follow()
            self._row = await self._kept(self._row)
            self._write_row(storage)

    def _write_row(self, storage: StepStorage) -> None:
        if self._row is not None:
            self._follow()
            row, self._row = self._row, None
            storage.write(row)

    def _follow(self) -> None:
        """Say to which trajectories the step that came last belongs, and which of them it ended."""
        if self._row is None or self._is_followed:
            return
        self._is_followed = True
        self._row.set(TRAJ_IDS[0], self._marks)
        former = self._marks.get(TRAJ_IDS[1])
        ids = self._ids.renewed(former, self._ended(self._row))
        if ids is not former:
            self._mark(ids)

    def inherit(self, former: CollectStrategy) -> None:
        super().inherit(former)
        if isinstance(former, Lockstep):
            former._follow()
            self._row, self._is_followed = former._row, True

    def _mark(self, ids: torch.Tensor) -> None:
        self._marks = TensorDict({TRAJ_IDS[1]: ids}, ids.shape, device=self._env.device)

    async def _step(self) -> TensorDictBase:
        assert self._sent is not None
        return await self._env.step_apart(self._sent)

    async def _attempt(
        self, command: Callable[[], Coroutine[Any, Any, Any]], meanwhile: Callable[[], object] = lambda: None
    ) -> Any:
        try:
            return await self._surely(command, meanwhile)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Note what has to be reset. The step is lost, for envs that took it, too: the next root is what they show."""
        self._sent = None
        failed = failed_envs(error)
        if failed == ():  # nobody was asked
            return
        self._root, self._failed = None, frozenset()
        self._lose(self._places.keys() & set(failed or ()))

    async def settle(self) -> None:
        if not self._errand.pending:
            return
        if self._sent is None:
            await self._begun()
        else:
            assert self._storage is not None
            await self._finish_step(self._storage)

    def restart(self) -> None:
        self._root, self._sent, self._failed = None, None, frozenset()
