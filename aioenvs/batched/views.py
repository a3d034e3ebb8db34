"""Live views: some envs of a batch, as a batch of their own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch

from aioenvs.batched.base import AsyncEnvs
from aioenvs.batched.scope import Running, Scope
from aioenvs.batched.signature import Signature
from aioenvs.errors import AioEnvsError, ClosedError, shown

if TYPE_CHECKING:
    from aioenvs.batched.owner import AsyncBatchedEnv

__all__ = ["AsyncView", "chosen_envs"]


def chosen_envs(index: Any, count: int) -> tuple[int, ...]:
    """The envs that an index selects, in its order.

    Raises:
        IndexError: If it selects nothing, one env twice, or one that does not exist.
        NotImplementedError: If it is a bool mask.
    """
    if isinstance(index, slice):
        chosen: Sequence[int] = range(count)[index]
    else:
        array = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index)
        if array.dtype == np.bool_:
            raise NotImplementedError("Boolean masks are not supported for batched envs; use their nonzero() indices")
        if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
            raise IndexError(
                f"Batched env indices must be scalar or 1D: an int, a slice or a list of ints; found {shown(index)}"
            )
        chosen = [operator.index(item) for item in array.reshape(-1).tolist()]
    if not len(chosen):
        raise IndexError(
            f"Empty batched env indexing is not supported: the index {shown(index)} selects none of {count} envs"
        )
    for env in chosen:
        if not -count <= env < count:
            raise IndexError(f"index {env} is out of bounds for {count} envs")
    envs = tuple(env % count for env in chosen)
    if len(set(envs)) < len(envs):
        raise IndexError(f"the index {shown(index)} selects an env twice, which can only be asked once at a time")
    return envs


class AsyncView(AsyncEnvs):
    """Some envs of a batch; what `env[index]` returns.

    It has the methods of the whole. Views that share no env may be awaited at the same time. It keeps the whole alive,
    starts it when it is used first, and leaves it open when it is closed. Once the whole was closed, using the view
    raises `ClosedError`, until somebody starts the whole again. What `copy.copy` makes of it is a view of the
    same whole; `copy.deepcopy` and a pickle make a view of a copy of the whole, which is not started, and is closed
    as `view.whole`.

    >>> import asyncio
    >>> from aioenvs import AsyncSerialEnv
    >>> async def main():
    ...     async with AsyncSerialEnv(4, "CartPole-v1") as env:
    ...         td = await env[1:3].reset(seed=0)
    ...         return td.batch_size
    >>> asyncio.run(main())
    torch.Size([2])
    """

    _ends_when_closed = False

    def __init__(self, owner: AsyncBatchedEnv, envs: tuple[int, ...]) -> None:
        self._owner = owner
        self._envs = envs
        self._known_of: Signature | None = None  # the whole's, when this one's became known

    async def _scope(self) -> Scope:
        return (self._owner._running or await self._started()).scope(self._envs)

    async def _started(self) -> Running:
        """What runs, started if need be, but not anew."""
        if self._was_closed:
            raise ClosedError(
                f"Cannot use {self!r} after its parent environment has been closed: views do not start that again"
            )
        return await self._owner._started()

    @property
    def _was_closed(self) -> bool:
        return self._owner._was_closed

    def _last_signature(self) -> Signature | None:
        whole = self._owner._last_signature()
        if whole is not self._known_of:  # the whole was started, moved or changed since
            self._known_signature, self._known_of = None, whole
        return super()._last_signature()

    @property
    def _running_scope(self) -> Scope | None:
        running = self._owner._running
        return None if running is None else running.scope(self._envs)

    async def start(self) -> None:
        """Start the whole, if it is not started.

        Cancelling it is as cancelling the start of the whole; but a start for which another task waits too goes on.

        Raises:
            ClosedError: If the whole was closed.
        """
        await self._started()

    async def close(self, *, raise_if_closed: bool = True) -> None:
        """Do nothing: the envs belong to the whole, and close with it. There is nothing in it to be cancelled."""

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @property
    def is_closed(self) -> bool:
        """Whether the whole is closed."""
        return self._owner.is_closed

    @property
    def whole(self) -> AsyncBatchedEnv:
        """The envs of which this is a view."""
        return self._owner

    @property
    def env_index(self) -> tuple[int, ...]:
        """The indices of these envs in the whole."""
        return self._envs

    @property
    def num_workers(self) -> int:
        return len(self._envs)

    @property
    def num_processes(self) -> int:
        """How many processes host them; 0 where they live in this one, in threads or not."""
        return len(self._hosts()) if self._owner.num_processes else 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers that host them, in order; empty where envs live in this process."""
        pids = self._owner.pids
        return tuple(pids[host] for host in self._hosts()) if pids else ()

    def _hosts(self) -> list[int]:
        groups = self._owner._config.groups
        return [host for host, group in enumerate(groups) if not set(self._envs).isdisjoint(group)]

    def update_kwargs(self, kwargs: Any) -> NoReturn:
        """Not possible: the arguments of the factories are the whole's."""
        raise AioEnvsError(
            f"{self!r} cannot change arguments; use update_kwargs of the envs that it is a view of, with a list that "
            "has {} for all others"
        )

    @property
    def device(self) -> torch.device | None:
        """Where results go, as for the whole."""
        return self._owner.device

    def __getitem__(self, index: Any) -> AsyncView:
        """A view of some of these envs; see `AsyncBatchedEnv.__getitem__`."""
        return AsyncView(self._owner, tuple(self._envs[place] for place in chosen_envs(index, len(self._envs))))

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self._owner, list(self._envs))

    def __repr__(self) -> str:
        return f"<envs {list(self._envs)} of {self._owner!r}>"
