"""The synchronous faces, and what they can be told to be."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Self

import torch

from aioenvs.batched.aio import AsyncParallelEnv, AsyncSerialEnv, is_single, without_hosts
from aioenvs.batched.forwarding import documented_by
from aioenvs.batched.owner import AsyncBatchedEnv
from aioenvs.batched.plain import BatchedEnvBase
from aioenvs.device import DeviceBackend
from aioenvs.engine.driving import driven
from aioenvs.engine.portal import Immediate, LoopPortal, Portal
from aioenvs.errors import ConcurrencyError
from aioenvs.keywords import check_keywords

RUNNING = frozenset(("_env", "_portal", "_callers_threads", "_known_index"))  # what a copy has anew

__all__ = ["BatchedEnv", "BatchedEnvBase", "ParallelEnv", "SerialEnv"]

P = ParamSpec("P")


def arguments_of(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the signature of the one to which it passes everything on."""

    def sign(own: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        signature = inspect.signature(init)
        names = list(signature.parameters)[1:]

        @functools.wraps(init)
        def construct(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            check_keywords(type(self).__name__, kwargs, names)
            try:
                signature.bind(self, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}: {error}") from None
            own(self, *args, **kwargs)

        return construct

    return sign


class BatchedEnv(BatchedEnvBase):
    """Many envs behind plain calls; see `ParallelEnv` and `SerialEnv`.

    It works with or without an event loop around it; where one runs in the calling thread, a call blocks that loop,
    and the async faces serve better. Ctrl-C during a call cancels it, as cancelling the coroutine would, and raises
    `KeyboardInterrupt`; the envs remain usable.
    """

    _env: AsyncBatchedEnv

    def __init__(self, env: AsyncBatchedEnv) -> None:
        super().__init__(env)
        self._portal: Portal | None = None
        self._callers_threads: int | None = None  # torch's, of the caller, before the start
        env._yields = False  # there is nobody to yield to
        env._face = type(self).__name__

    def _run(self, coroutine: Any) -> Any:
        if self._portal is None:
            self._portal = Immediate() if self._env._config.backend == "serial" else LoopPortal()
        if self._portal.moves:
            coroutine = self._as_caller(coroutine)
        try:
            if self._env._config.num_threads is None:
                return self._portal.run(coroutine)
            threads = torch.get_num_threads()
            try:
                return self._portal.run(coroutine)
            finally:
                self._settle_threads(threads)
        except BaseException as error:
            # Of a start that failed nothing is left; another thread may be in the middle of one.
            if self._env.is_closed and self._env._starting is None and not isinstance(error, ConcurrencyError):
                self._close_portal()
            raise

    def _as_caller(self, coroutine: Any) -> Any:
        """A coroutine for another thread, with what the calling one has chosen on the device of the results."""
        running = self._env._running
        backend = None if running is None else running.transfer.backend
        context = None if backend is None else backend.callers()
        return coroutine if context is None else driven(coroutine, context)

    def _settle_threads(self, before: int) -> None:
        """Set torch's number of threads, which each thread has for itself, where the portal may not be: here."""
        number, former = self._env._config.num_threads, self._callers_threads
        if not self._env.is_closed and former is None and number is not None:
            self._callers_threads = before
            torch.set_num_threads(number)
        elif self._env.is_closed and former is not None:
            self._callers_threads = None
            torch.set_num_threads(former)

    @documented_by(AsyncBatchedEnv.close)
    def close(self, *, raise_if_closed: bool = True) -> None:
        if self._portal is not None and self._portal.foreign:
            return  # a fork leaves a `with` block that is its parent's to close
        try:
            self._run(self._env.close(raise_if_closed=raise_if_closed))
        finally:
            if self._env.is_closed:
                self._close_portal()

    def _close_portal(self) -> None:
        portal, self._portal = self._portal, None
        if portal is not None:
            portal.close()

    @documented_by(AsyncBatchedEnv.to)
    def to(self, device: torch.device | str | int | DeviceBackend) -> Self:  # type: ignore[override]
        self._env.to(device)
        return self

    def __del__(self) -> None:
        portal = self.__dict__.get("_portal")
        if portal is not None:
            if not self._env.is_closed:
                warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
                self._env._discard()
            portal.close()

    def __reduce__(self) -> tuple[Any, ...]:
        own = {name: value for name, value in self.__dict__.items() if name not in RUNNING}
        return _unstarted, (type(self), self._env), own


def _unstarted(cls: type[BatchedEnv], env: AsyncBatchedEnv) -> BatchedEnv:
    """A copy, of a pickle or in memory: the same envs, not started."""
    copied = cls.__new__(cls)
    BatchedEnv.__init__(copied, copy.copy(env))
    return copied


class SerialEnv(BatchedEnv):
    """The same envs in this process, one after the other; differentiable where they are.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env; see `AsyncParallelEnv`.
        **options: As for `AsyncSerialEnv`.

    >>> with SerialEnv(2, "CartPole-v1") as env:
    ...     td = env.rand_step(env.reset(seed=0))
    >>> td["next", "reward"].shape
    torch.Size([2, 1])
    """

    @arguments_of(AsyncSerialEnv.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(AsyncSerialEnv(*args, **options))


class ParallelEnv(BatchedEnv):
    """Many envs in worker processes, or threads, behind plain calls.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env; see `AsyncParallelEnv`.
        serial_for_single: Make a `SerialEnv` instead if there is one env only.
        **options: As for `AsyncParallelEnv`.

    >>> with ParallelEnv(4, "CartPole-v1", num_processes=2) as env:
    ...     rollout = env.rollout(10, break_when_any_done=False)
    >>> rollout.batch_size, rollout.names
    (torch.Size([4, 10]), [None, 'time'])
    """

    def __new__(cls, *args: Any, serial_for_single: bool = False, **options: Any) -> Any:
        """Make one, or a `SerialEnv` with the options that it has a use for."""
        if serial_for_single and is_single(args, options):
            return SerialEnv(*args, **without_hosts(options))
        return super().__new__(cls)

    @arguments_of(AsyncParallelEnv.__init__)
    def __init__(self, *args: Any, serial_for_single: bool = False, **options: Any) -> None:
        super().__init__(AsyncParallelEnv(*args, **options))
