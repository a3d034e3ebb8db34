"""Collecting from whoever is ready first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.collectors.strategy import TRAJ_IDS, Act, CollectStrategy, TrajectoryIds, failed_envs
from aioenvs.errors import WorkerError
from aioenvs.faces.commands import AsyncEnvs
from aioenvs.faces.requests import envs_of, index_of
from aioenvs.tensors.device import Device
from aioenvs.tensors.storage import StepStorage

__all__ = ["FirstReady"]


class FirstReady(CollectStrategy):
    """The envs step apart, so that a batch is `(steps, *bs)`, in the order in which they answered.

    Each env is at work, or ready: its root is here and waits for an action. While the policy chooses for those that are
    ready, the others work. An env that is neither begins a new episode, whatever the reason: at the beginning, since it
    failed, or since somebody else received its step.

    Args:
        env: The envs, which run.
        steps: How many steps of single envs make a batch.
        device: Where batches are kept.
        ids: Numbers the trajectories.
        min_get: How many envs to wait for, where so many are at work and a batch has room for them.
    """

    flat = True

    def __init__(self, env: AsyncEnvs, steps: int, device: Device, ids: TrajectoryIds, min_get: int) -> None:
        super().__init__(env, steps, device, ids)
        self._min_get = min_get
        self._ready: list[TensorDictBase] = []
        self._failed: set[int] = set(self._places)  # who needs a reset: at the beginning, everybody
        self._beginning: list[int] = []  # who is being reset
        self._bereft: set[int] = set()  # who was built anew while a step of it was still to be received
        self._own_ids: dict[int, torch.Tensor] = {}
        self._early: list[TensorDictBase] = []  # steps that were received before there was a place for them

    async def _fill(self, storage: StepStorage, act: Act, more: int | None) -> None:
        while True:
            await self._write_early(storage)
            if not storage.left:
                return
            await self._renew()
            await self._send(act, None if more is None else storage.left + more - len(self._env.outstanding))
            await self._receive(storage.left)

    async def _write_early(self, storage: StepStorage) -> None:
        while self._early and storage.left:
            td = self._early[0] = await self._kept(self._early[0])
            self._early.pop(0)
            if len(td) > storage.left:
                self._early.insert(0, td[storage.left :])
                td = td[: storage.left]
            storage.write(td)

    # -- out --------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Begin new episodes in the envs that need it."""
        while self._errand.pending or await self._find_needy():
            envs = self._beginning
            td = await self._surely(self._view(envs).reset)
            self._failed.difference_update(envs)
            self._note_rebuilt(envs)
            shape = td.batch_size
            self._ready.append(td.set("env_index", self._whole.index(envs, shape)))
            for env in envs:
                self._own_ids[env] = self._ids.take(shape[1:])

    async def _find_needy(self) -> bool:
        """Note down who has to be reset now; whether there is anybody."""
        ready = [env for td in self._ready for env in self._envs_of(td)]
        outstanding = self._env.outstanding
        self._failed |= self._places.keys() - {*ready, *outstanding}
        self._note_rebuilt()
        for env in self._failed.intersection(outstanding):  # of a worker that died: each says so itself
            with contextlib.suppress(Exception):
                await self._receive(1, [env])
        self._drop(self._failed)
        free = self._failed.difference(self._env.outstanding)
        self._beginning = [env for env in self._places if env in free]
        return bool(free)

    def _note_rebuilt(self, begun: Collection[int] = ()) -> None:
        """Note down who was built anew and has no episode, but for those that have just begun one."""
        rebuilt = self._rebuilt().difference(begun)
        self._bereft |= rebuilt.intersection(self._env.outstanding)
        self._failed |= rebuilt - self._bereft

    def _view(self, envs: Collection[int]) -> AsyncEnvs:
        """These envs alone."""
        if len(envs) == len(self._places):
            return self._env
        view: AsyncEnvs = self._env[[self._places[env] for env in envs]]
        return view

    async def _send(self, act: Act, most: int | None) -> None:
        """Let those that are ready step, as many as steps are wanted."""
        if not self._ready or (most is not None and most < 1):
            return
        td, rest = self._joined(self._ready), []
        self._ready = [td]
        if most is not None and most < len(td):
            td, rest = td[:most], [td[most:]]
        acted = await act(td)
        try:
            self._env.send(acted)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):  # an interrupt: some may be in the middle of a step
                self._failed.update(self._envs_of(td))
            raise
        self._ready = rest

    # -- in ---------------------------------------------------------------------------------------------

    async def _receive(self, most: int, envs: Sequence[int] | None = None) -> None:
        """Take in what some of those that are at work have done."""
        chosen = self._env if envs is None else self._view(envs)
        outstanding = len(chosen.outstanding)
        if not outstanding:
            return
        try:
            td, root = await chosen.recv(min(self._min_get, outstanding, most), most)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(error)
            raise
        index = self._envs_of(td)
        self._early.append(td.set(TRAJ_IDS, torch.stack([self._own_ids[env] for env in index])))
        for env, ended in zip(index, self._ended(td), strict=True):
            self._own_ids[env] = self._ids.renewed(self._own_ids[env], ended)
        self._ready.append(root)
        self._failed |= self._bereft.intersection(index)
        self._bereft.difference_update(index)
        self._drop(self._failed)

    def _fail(self, error: BaseException) -> None:
        """Note who needs a reset."""
        failed = error.env_index if isinstance(error, WorkerError) else failed_envs(error) or ()
        self._failed.update(self._places.keys() & set(failed))
        self._bereft -= self._failed
        self._drop(self._failed)

    def _drop(self, envs: Collection[int]) -> None:
        """Forget the roots of these envs."""
        kept = []
        for td in self._ready:
            rows = [row for row, env in enumerate(self._envs_of(td)) if env not in envs]
            if rows:
                kept.append(td if len(rows) == len(td) else td[torch.tensor(rows)])
        self._ready = kept

    async def settle(self) -> None:
        if self._errand.pending:
            await self._renew()
        while self._env.outstanding:
            await self._receive(len(self._env.outstanding))

    def inherit(self, former: CollectStrategy) -> None:
        super().inherit(former)
        if isinstance(former, FirstReady):
            self._early = former._early

    def restart(self) -> None:
        self._failed.update(self._places)

    async def abandon(self, *, drains: bool) -> None:
        await super().abandon(drains=drains)
        while drains and (outstanding := self._env.outstanding):
            try:
                await self._receive(len(outstanding))
            except Exception:  # it is dropped like all the rest
                if self._env.outstanding == outstanding:  # but nothing was received: not here, or by somebody else
                    raise

    def _envs_of(self, td: TensorDictBase) -> list[int]:
        return envs_of(td, self._whole.read)

    def _joined(self, tds: Sequence[TensorDictBase]) -> TensorDictBase:
        if len(tds) == 1:
            return tds[0]
        envs = [env for td in tds for env in self._envs_of(td)]
        joined: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack([row for td in tds for row in td.unbind(0)])
        if isinstance(joined, TensorDict):
            self._whole.transfer.know(joined.get("env_index"), index_of(envs, joined.batch_size))
        return joined
