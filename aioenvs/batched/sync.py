"""The synchronous faces: each method runs the coroutine of the same name."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from tensordict import TensorDictBase

from aioenvs.batched.aio import AsyncParallelEnv, AsyncSerialEnv
from aioenvs.batched.base import AsyncBatchedEnv
from aioenvs.batched.described import Described
from aioenvs.batched.signature import Signature
from aioenvs.engine.portal import Immediate, LoopPortal, Portal

__all__ = ["BatchedEnv", "ParallelEnv", "SerialEnv"]

P = ParamSpec("P")
Method = TypeVar("Method", bound=Callable[..., Any])


def documented_by(coroutine: Callable[..., Any]) -> Callable[[Method], Method]:
    """Give a method the docstring of the coroutine that it runs."""

    def document(method: Method) -> Method:
        method.__doc__ = coroutine.__doc__
        return method

    return document


def arguments_of(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the signature of the one to which it passes everything on."""

    def sign(own: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        return functools.wraps(init)(own)

    return sign


class BatchedEnv(Described):
    """Many envs behind plain calls; see `ParallelEnv` and `SerialEnv`.

    It works with or without an event loop around it; where one runs in the calling thread, a call blocks that loop,
    and the async faces serve better. Ctrl-C during a call cancels it, as cancelling the coroutine would, and raises
    `KeyboardInterrupt`; the envs remain usable.
    """

    def __init__(self, env: AsyncBatchedEnv) -> None:
        self._portal: Portal | None = None
        self._env = env
        env._yields = False  # there is nobody to yield to
        self._config = env._config
        self._batch_size = env._batch_size

    def _run(self, coroutine: Any) -> Any:
        if self._portal is None:
            self._portal = Immediate() if self._config.backend == "serial" else LoopPortal()
        return self._portal.run(coroutine)

    @property
    def device(self) -> torch.device | None:
        """Where results go."""
        return self._env.device

    @property
    def is_closed(self) -> bool:
        """Whether there are no envs now: not started yet, or closed."""
        return self._env.is_closed

    @property
    def pids(self) -> tuple[int, ...]:
        return self._env.pids

    @property
    def _signature(self) -> Signature:
        if self._env._known_signature is None:
            self.start()
        return self._env._signature

    def _random_objects(self) -> dict[Any, Any]:
        return self._env._random_objects()

    @documented_by(AsyncBatchedEnv.start)
    def start(self) -> None:
        self._run(self._env.start())

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

    @documented_by(AsyncBatchedEnv.set_seed)
    def set_seed(self, seed: int | None, static_seed: bool = False) -> int:
        following: int = self._run(self._env.set_seed(seed, static_seed))
        return following

    @documented_by(AsyncBatchedEnv.reset)
    def reset(
        self,
        td: TensorDictBase | None = None,
        *,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        result: TensorDictBase = self._run(self._env.reset(td, list_of_kwargs=list_of_kwargs, **kwargs))
        return result

    @documented_by(AsyncBatchedEnv.step)
    def step(self, td: TensorDictBase) -> TensorDictBase:
        result: TensorDictBase = self._run(self._env.step(td))
        return result

    @documented_by(AsyncBatchedEnv.step_and_maybe_reset)
    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        result: tuple[TensorDictBase, TensorDictBase] = self._run(self._env.step_and_maybe_reset(td))
        return result

    @documented_by(AsyncBatchedEnv.rand_step)
    def rand_step(self, td: TensorDictBase | None = None) -> TensorDictBase:
        result: TensorDictBase = self._run(self._env.rand_step(td))
        return result

    @documented_by(AsyncBatchedEnv.rollout)
    def rollout(
        self,
        max_steps: int,
        policy: Callable[..., Any] | None = None,
        callback: Callable[[Any, TensorDictBase], Any] | None = None,
        **options: Any,
    ) -> TensorDictBase:
        if self._env.is_closed:
            self.start()
        steps = self._env._rollout_steps(
            max_steps, policy, None if callback is None else lambda _, td: callback(self, td), **options
        )
        result = None
        try:
            while True:
                result = self._run(_awaited(steps.send(result)))
        except StopIteration as stop:
            stacked: TensorDictBase = stop.value
            return stacked

    def __enter__(self) -> Self:
        if self._env.is_closed:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(raise_if_closed=False)

    def __del__(self) -> None:
        portal = getattr(self, "_portal", None)
        if portal is not None:
            if not self._env.is_closed:
                warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
                self._env._discard()
            portal.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unstarted, (type(self), self._env)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._env._describe()}>"


def _unstarted(cls: type[BatchedEnv], env: AsyncBatchedEnv) -> BatchedEnv:
    """A copy, of a pickle or in memory: the same envs, not started."""
    copied = cls.__new__(cls)
    BatchedEnv.__init__(copied, copy.copy(env))
    return copied


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


class ParallelEnv(BatchedEnv):
    """Many envs in worker processes, behind plain calls.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env; see `AsyncParallelEnv`.
        **options: As for `AsyncParallelEnv`.

    >>> with ParallelEnv(4, "CartPole-v1", num_processes=2) as env:
    ...     rollout = env.rollout(10, break_when_any_done=False)
    >>> rollout.batch_size, rollout.names
    (torch.Size([4, 10]), [None, 'time'])
    """

    @arguments_of(AsyncParallelEnv.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(AsyncParallelEnv(*args, **options))


class SerialEnv(BatchedEnv):
    """The same envs in this process, one after the other.

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
