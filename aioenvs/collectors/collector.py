"""The collector of the sync faces: each method runs the coroutine of the same name."""

from __future__ import annotations

from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from aioenvs.collectors.async_collector import AsyncCollector
from aioenvs.collectors.plan import Progressing
from aioenvs.engine.portal import Immediate, blocking, delegated, documented_by
from aioenvs.errors import shown
from aioenvs.faces.commands import AsyncEnvs
from aioenvs.faces.sync_envs import BatchedEnvBase
from aioenvs.hints import Instead, hints_at_keywords
from aioenvs.tensors.device import Device

__all__ = ["Collector"]


class Collector(Progressing):
    """Batches of steps that a policy takes, for a plain `for`; see `AsyncCollector`.

    Ctrl-C loses nothing, as cancelling does not: the next batch goes on with the steps that are under way. But the envs
    of a `SerialEnv`, unless they are coroutine envs, step in the calling thread: where Ctrl-C meets one in its step,
    that step is lost, and all envs that were to step with it begin new episodes. Where an event loop runs in the
    calling thread (a notebook), the policy is called in another one.

    Args:
        env: A sync face such as `ParallelEnv`, or a view of one.
        policy: As for `AsyncCollector`. A coroutine function is awaited in the loop of the envs, which a `SerialEnv`
            has only for coroutine envs.
        frames_per_batch: As for `AsyncCollector`, as are all others.
        total_frames: See `AsyncCollector`.
        min_get: See `AsyncCollector`.
        policy_device: See `AsyncCollector`.
        storing_device: See `AsyncCollector`.
        init_random_frames: See `AsyncCollector`.
        reset_at_each_iter: See `AsyncCollector`.
        exploration_type: See `AsyncCollector`.
        close_env: See `AsyncCollector`.

    Raises:
        TypeError: If `env` is no sync face, or `policy` cannot be called.
        ValueError: If the numbers do not fit.

    >>> from aioenvs import SerialEnv
    >>> with Collector(SerialEnv(4, "CartPole-v1"), frames_per_batch=40, total_frames=80) as collector:
    ...     [batch.batch_size for batch in collector]
    [torch.Size([4, 10]), torch.Size([4, 10])]
    """

    @hints_at_keywords
    def __init__(
        self,
        env: BatchedEnvBase,
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int | None = -1,
        min_get: int | None = None,
        policy_device: Device = None,
        storing_device: Device = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        exploration_type: InteractionType | str | None = InteractionType.RANDOM,
        close_env: bool = True,
    ) -> None:
        if isinstance(env, AsyncEnvs):
            raise TypeError(f"Collector needs a sync env, but {shown(env)} is async: use AsyncCollector for it")
        if not isinstance(env, BatchedEnvBase):
            raise TypeError(f"expected a ParallelEnv, a SerialEnv or a view of one, got {shown(env)}")
        self._env = env
        self._collector = AsyncCollector(
            env._env,
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            min_get=min_get,
            policy_device=policy_device,
            storing_device=storing_device,
            init_random_frames=init_random_frames,
            reset_at_each_iter=reset_at_each_iter,
            exploration_type=exploration_type,
            close_env=close_env,
        )
        self._collector._face = type(self).__name__
        self._progress = self._collector._progress

    @property
    def _twin(self) -> AsyncCollector:
        """The coroutines that the plain calls run."""
        return self._collector

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._env._run(coroutine)

    # -- description ------------------------------------------------------------------------------------

    @property
    def env(self) -> BatchedEnvBase:
        """The envs."""
        return self._env

    def __repr__(self) -> str:
        return repr(self._collector)

    # -- batches ----------------------------------------------------------------------------------------

    __aiter__ = Instead("is iterated by `for`; for `async for` there is AsyncCollector")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TensorDictBase:
        """The next batch; see `AsyncCollector.next`."""
        return self.next()

    def next(self) -> TensorDictBase:
        """The next batch.

        Ctrl-C loses nothing, except where it meets an env of a `SerialEnv`; see the class.

        Returns:
            A batch; see `AsyncCollector`.

        Raises:
            StopIteration: If there were all.
            ClosedError: If the collector was shut down.
            ConcurrencyError: If another thread waits for a batch, or somebody else uses the envs.
            ValueError: If a batch cannot be made of the frames that these envs have in a step.
            Exception: Whatever an env or the policy raised; what was collected is kept, and the next call goes on.
        """
        if self.is_finished:
            raise StopIteration
        # Ctrl-C may come when all is done but the return: what was not returned is still there.
        self._run(self._collector._prepare())
        return self._collector._claim()

    # -- changes ----------------------------------------------------------------------------------------

    reset = blocking(AsyncCollector.reset)
    set_seed = blocking(AsyncCollector.set_seed)
    update_policy_weights_ = delegated(AsyncCollector.update_policy_weights_)
    update_policy = delegated(AsyncCollector.update_policy)
    state_dict = blocking(AsyncCollector.state_dict)
    load_state_dict = blocking(AsyncCollector.load_state_dict)

    # -- the end ----------------------------------------------------------------------------------------

    @documented_by(AsyncCollector.shutdown)
    def shutdown(self, *, close_env: bool | None = None) -> None:
        if self._env.is_closed:  # nothing is left to be waited for, so no loop is made for it
            Immediate().run(self._collector.shutdown(close_env=False))
            return
        try:
            self._run(self._collector.shutdown(close_env=close_env))
        finally:
            if self._env.is_closed:
                self._env.close(raise_if_closed=False)  # the private loop goes with the envs

    __aenter__ = Instead("is entered by `with`; for `async with` there is AsyncCollector")

    def __enter__(self) -> Self:
        self._env.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
