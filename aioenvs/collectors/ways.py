"""What the two ways of collecting have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import torch
from tensordict import TensorDictBase

from aioenvs.batched.base import AsyncEnvs
from aioenvs.collectors.acting import places_of
from aioenvs.collectors.errand import Errand
from aioenvs.collectors.trajectories import TrajectoryIds
from aioenvs.device import Device, backend_of, checked_device
from aioenvs.errors import WorkerError
from aioenvs.mdp import done_mask
from aioenvs.step_storage import StepStorage
from aioenvs.transfer import Transfer

__all__ = ["Act", "Way", "failed_envs"]

Act = Callable[[TensorDictBase], Awaitable[TensorDictBase]]  # the policy: from a root to the same with the actions


class Way(ABC):
    """Collects batch after batch, and goes on where an exception, or being cancelled, made it stop.

    Args:
        env: The envs, which run.
        steps: How many steps make a batch.
        device: Where batches are kept.
        ids: Numbers the trajectories.
    """

    flat: bool

    def __init__(self, env: AsyncEnvs, steps: int, device: Device, ids: TrajectoryIds) -> None:
        self._env = env
        self._steps = steps
        self._device = checked_device(device)
        backend = backend_of(device)
        self._crossing = None if backend is None else Transfer(None, backend)
        self._ids = ids
        self._done_keys = tuple(env._index.every_key("done"))
        self._errand = Errand()
        self._storage: StepStorage | None = None
        scope = env._running_scope
        assert scope is not None
        self._whole = scope.whole
        # Batches on the host of results that come from there need not be brought back.
        self._returns = self._device == torch.device("cpu") and backend is None and scope.whole.crossing is not None
        if self._returns:
            scope.whole.transfer.remember()
        self._places = places_of(env)
        self._replaced = list(self._whole.pool.replaced)

    def _rebuilt(self) -> set[int]:
        """Envs that were built anew, for whatever reason, since this was asked last, and so have no episode."""
        pool = self._whole.pool
        former, self._replaced = self._replaced, list(pool.replaced)
        if former == self._replaced or pool.restarts:  # such a pool resets them
            return set()
        hosts = {env: pool.host_of(env) for env in self._places}
        return {env for env, host in hosts.items() if former[host] != self._replaced[host]}

    async def _kept(self, td: TensorDictBase) -> TensorDictBase:
        """A step as it is stored: where batches are, if they are on the host and it is not."""
        scope = self._env._running_scope
        return await scope.at_home(td) if self._returns and scope is not None else td

    def is_of(self, env: AsyncEnvs) -> bool:
        """Whether the envs are still those that it began with, rather than closed and perhaps started again."""
        scope = env._running_scope
        return scope is not None and scope.whole is self._whole

    def inherit(self, former: Way) -> None:
        """Go on with what another one has collected."""
        self._storage = former._storage

    @property
    def is_between(self) -> bool:
        """Whether no batch was begun."""
        return self._storage is None

    async def batch(self, act: Act, batches: int | None) -> TensorDictBase:
        """The next batch.

        Args:
            act: The policy.
            batches: How many are to come, with this one; None for any number.
        """
        if self._storage is None:
            self._storage = StepStorage(self._steps, self._device, flat=self.flat, crossing=self._crossing)
        await self._fill(self._storage, act, None if batches is None else (batches - 1) * self._steps)
        storage, self._storage = self._storage, None
        return storage.finish()

    @abstractmethod
    async def _fill(self, storage: StepStorage, act: Act, more: int | None) -> None:
        """Write until the storage is full.

        Args:
            storage: Perhaps partly full.
            act: The policy.
            more: How many steps are wanted after it; None for any number.
        """

    @abstractmethod
    async def settle(self) -> None:
        """Wait until no env is at work, and keep what came of it."""

    @abstractmethod
    def restart(self) -> None:
        """Begin new episodes in all envs with the next step; no env may be at work."""

    async def abandon(self, *, drains: bool) -> None:
        """Have nothing to do with the envs any more; what they are at work on is dropped.

        Args:
            drains: Whether to see to it that others can use them.
        """
        await self._errand.cancel()

    async def _surely(self, command: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result of a command that goes on when whoever waits for it is cancelled."""
        pool = self._whole.pool
        if not pool.suspends:  # there may be no loop, and there is nothing to wait for
            return await command()
        await pool.enter_loop("collecting")
        return await self._errand.result(command)

    def _ended(self, td: TensorDictBase) -> torch.Tensor:
        """In which elements of the batch a step ended the episode."""
        return done_mask(td.get("next"), self._done_keys)


def failed_envs(error: BaseException) -> tuple[int, ...] | None:
    """The envs that need a reset after an error that a command to several envs ended with.

    Returns:
        Their indices in the whole; none of them where nobody was asked anything; None where it may be any, since not
        all have answered.
    """
    if isinstance(error, WorkerError) or not isinstance(error, Exception):
        return None
    found = getattr(error, "env_index", ())
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)
