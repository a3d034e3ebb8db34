"""The collector of the async faces, which is all there is to collecting, and its synchronous twin."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from aioenvs.collectors.plan import Plan, Progress, Progressing
from aioenvs.collectors.policy import PolicyRunner
from aioenvs.collectors.strategy import CollectStrategy, FirstReady, Lockstep, TrajectoryIds, apart
from aioenvs.engine.portal import Immediate, blocking, delegated, documented_by, driven
from aioenvs.errors import ClosedError, ConcurrencyError, shown
from aioenvs.faces.commands import AsyncEnvs
from aioenvs.faces.sync_envs import BatchedEnvBase
from aioenvs.hints import Instead, hints_at_keywords
from aioenvs.tensors.device import Device, checked_device


@dataclass(frozen=True)
class Saved:
    """All that is part of a state: envs, none of which is at work, the policy, how far the run is, and the numbers."""

    env: AsyncEnvs
    actor: PolicyRunner
    progress: Progress
    ids: TrajectoryIds

    async def take(self) -> OrderedDict[str, Any]:
        """The state as it is."""
        state: OrderedDict[str, Any] = OrderedDict()
        if self.actor.module is not None:
            state["policy_state_dict"] = self.actor.module.state_dict()
        state["env_state_dict"] = await self.env.state_dict()
        progress = self.progress
        state |= {"frames": progress.frames, "iter": progress.iterations, "traj_ids": self.ids.following}
        return state

    async def restore(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Make it what it was when `take` returned the state.

        If `strict`, it must have the states of envs and policy, with just the keys that these have. What is missing
        is a KeyError, the state of a policy where the policy has none a TypeError.
        """
        frames, iterations, following = (state[name] for name in ("frames", "iter", "traj_ids"))
        if strict and self.actor.module is not None and "policy_state_dict" not in state:
            raise KeyError("policy_state_dict")
        if strict or "env_state_dict" in state:
            await self.env.load_state_dict(state["env_state_dict"], strict)
        if "policy_state_dict" in state:
            self.actor.load(state["policy_state_dict"])
        self.progress.frames, self.progress.iterations, self.ids.following = frames, iterations, following


class AsyncCollector(Progressing):
    """Batches of steps that a policy takes, for `async for`.

    The envs go on from batch to batch; those whose episode ends are reset on the way. All runs under `no_grad`. Without
    `min_get`, all envs step together, and a batch is `(*batch_size, T)`, its last dim named "time", as of `rollout`.
    With `min_get`, each env steps for itself: as soon as so many have answered the policy chooses for those, while the
    others work; a batch is then `(frames_per_batch,)`, in the order in which they answered, with `env_index`. (Envs
    with a batch size `bs` of their own have `prod(bs)` frames each; such a batch is `(frames_per_batch / prod(bs),
    *bs)`.) Steps that are under way when a batch is full go into the next one. No more steps are taken than the run
    has frames.

    In either case `("collector", "traj_ids")`, int64 of the batch size, numbers the trajectories, each number used once
    in the run. What was returned never changes: every batch has memory of its own, taken at once for all that has a
    fixed shape; in `torch.inference_mode` the policy infers, and batches are ordinary tensors.

    When an env raises, the exception comes out of the iteration, and asking for the next batch goes on. What was
    collected of the batch is kept, and the envs that failed begin new episodes. With `min_get` nothing else happens;
    without, the step that failed is missing in all envs, so that all begin new trajectories (and new episodes, if a
    worker died or was late). An exception of the policy costs nothing.

    Between batches the envs may be used for something else once `reset` was awaited; the next batch then begins with
    new episodes.

    Differences to TorchRL's collectors: the envs are given, not made; the policy is called in this process;
    `("collector", "traj_ids")` is always there; there are no `split_trajs`, `max_frames_per_traj` (use a time limit in
    the env), `postproc` and replay buffers; the end of the iteration leaves the envs open; and a number of frames that
    cannot be shared out is an error.

    Args:
        env: An async face such as `AsyncParallelEnv`, or a view of one. It is started when need be.
        policy: What chooses the actions, None for random ones; see `aioenvs.tensors.rollout.as_policy`. It may be a
            coroutine function, which is awaited while envs work.
        frames_per_batch: How many frames make a batch: without `min_get`, a multiple of the number of envs.
        total_frames: Of the run; rounded up to full batches, with a warning. -1 or None for an endless one.
        min_get: From how many envs on the policy is called, None for all. 1 suits envs whose steps differ much in
            time; more suit a policy for which larger batches pay.
        policy_device: Where the policy is called; the data is brought there, and the actions back. A module that is
            elsewhere is copied, see `update_policy_weights_`. None calls it as it is, on the data as it is.
        storing_device: Where batches are; None for where the envs' results are.
        init_random_frames: So many frames are taken at random first, rounded up to full batches. (With `min_get`, so
            are the steps that are under way then.)
        reset_at_each_iter: Begin each batch with new episodes; not together with `min_get`.
        exploration_type: How modules with distributions choose, as for `tensordict.nn.set_interaction_type`; None for
            as they are told outside.
        close_env: Whether `shutdown`, and leaving `async with`, close the envs.

    Raises:
        TypeError: If `env` is no async face, or `policy` cannot be called.
        ValueError: If the numbers do not fit.

    >>> import asyncio
    >>> from aioenvs import AsyncSerialEnv
    >>> async def main():
    ...     env = AsyncSerialEnv(4, "CartPole-v1")
    ...     async with AsyncCollector(env, frames_per_batch=40, total_frames=80) as collector:
    ...         return [batch.batch_size async for batch in collector]
    >>> asyncio.run(main())
    [torch.Size([4, 10]), torch.Size([4, 10])]
    """

    @hints_at_keywords
    def __init__(
        self,
        env: AsyncEnvs,
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
        if isinstance(env, BatchedEnvBase):
            raise TypeError(f"AsyncCollector needs an async env, but {shown(env)} is none: use Collector for it")
        if not isinstance(env, AsyncEnvs):
            raise TypeError(f"expected an AsyncParallelEnv, an AsyncSerialEnv or a view of one, got {shown(env)}")
        plan = Plan(
            num_workers=env.num_workers,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            min_get=min_get,
            init_random_frames=init_random_frames,
            reset_at_each_iter=reset_at_each_iter,
        )
        self._progress = Progress(plan)
        self._face = type(self).__name__  # what messages call it: the sync one puts its own name here
        self._env = env
        self._actor = PolicyRunner(policy, policy_device, exploration_type)
        self._storing_device = storing_device
        checked_device(storing_device)
        self._close_env = close_env
        self._ids = TrajectoryIds()
        self._saved = Saved(env, self._actor, self._progress, self._ids)
        self._way: CollectStrategy | None = None
        self._batch: TensorDictBase | None = None  # one that nobody has claimed yet
        self._is_closed = self._is_busy = False

    # -- description ------------------------------------------------------------------------------------

    @property
    def env(self) -> AsyncEnvs:
        """The envs."""
        return self._env

    def __repr__(self) -> str:
        frames = f"{self.frames} frames" if self.total_frames < 0 else f"{self.frames} of {self.total_frames} frames"
        return f"<{self._face} of {self._env!r}, {frames}{', closed' if self._is_closed else ''}>"

    # -- batches ----------------------------------------------------------------------------------------

    __iter__ = Instead("is iterated by `async for`, within a coroutine; for `for` there is Collector")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TensorDictBase:
        """The next batch; see `next`."""
        return await self.next()

    async def next(self) -> TensorDictBase:
        """The next batch.

        Cancelling it loses nothing: no new step is begun, and the next call goes on with those that are under way.

        Returns:
            A batch; see the class.

        Raises:
            StopAsyncIteration: If there were all.
            ClosedError: If the collector was shut down.
            ConcurrencyError: If another call waits for a batch, or somebody else uses the envs.
            ValueError: If a batch cannot be made of the frames that these envs have in a step.
            Exception: Whatever an env or the policy raised; what was collected is kept, and the next call goes on.
        """
        if self.is_finished:
            raise StopAsyncIteration
        await self._prepare()
        return self._claim()

    async def _prepare(self) -> None:
        """See to it that there is a batch; it waits for whoever claims it, also if this is cancelled as it succeeds."""
        await self._alone(self._collect)

    def _claim(self) -> TensorDictBase:
        """The batch that there is, which counts from now on."""
        batch, self._batch = self._batch, None
        assert batch is not None, "a batch is claimed once, and after it was prepared"
        self._progress.count()
        return batch

    async def _collect(self) -> None:
        if self._batch is not None:
            return
        way = await self._find_way()
        progress = self._progress
        if progress.plan.reset_at_each_iter and way.is_between:
            way.restart()
        act = partial(self._actor.act, self._env, at_random=progress.at_random)
        self._batch = await way.batch(act, progress.batches_left)

    async def _find_way(self) -> CollectStrategy:
        """How the batches are collected from the envs as they run now."""
        scope = await self._env._scope()
        if self._way is None or not self._way.is_of(self._env):
            plan, former = self._progress.plan, self._way
            steps = plan.steps_per_batch(scope.signature.batch_size)
            common = (self._env, steps, self._storing_device, self._ids)
            self._way = Lockstep(*common) if plan.min_get is None else FirstReady(*common, plan.min_get)
            if former is not None:
                self._way.inherit(former)
        return self._way

    async def _alone(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine function without gradients, and no other one meanwhile.

        What envs return, and batches, are no inference tensors; only the policy is called as the caller would.
        """
        if self._is_closed:
            raise ClosedError(f"{self!r} was shut down")
        if self._is_busy:
            raise ConcurrencyError(f"{self!r} is busy with another call; await that first")
        self._is_busy = True
        try:
            self._actor.infers = torch.is_inference_mode_enabled()
            return await driven(function(), apart)
        finally:
            self._is_busy = False

    # -- changes ----------------------------------------------------------------------------------------

    async def reset(self) -> None:
        """Begin new episodes, and new trajectories, in all envs with the next step.

        What was collected of the next batch stays; steps that are under way are waited for. Cancelling it leaves
        everything as it is.

        Raises:
            ConcurrencyError: If another call waits for a batch.
            Exception: Whatever an env raised that was at work.
        """
        await self._alone(self._restart)

    async def _restart(self) -> None:
        if self._way is not None and self._way.is_of(self._env):
            await self._way.settle()
            self._way.restart()

    async def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int:
        """Seed the envs; each uses its seed at its next reset, so before the first batch is the time for it.

        The policy, and random actions, draw from torch's generator, which `torch.manual_seed` seeds. For the same seeds
        the batches are the same, except with `min_get`, where they depend on who is ready first.

        Args:
            seed: The first env's; see `AsyncEnvs.set_seed`.
            static_seed: Give the same to all.

        Returns:
            The next seed of the chain.

        Raises:
            ConcurrencyError: If another call waits for a batch.
        """
        following: int = await self._alone(partial(self._seed, seed, static_seed))
        return following

    async def _seed(self, seed: int | None, static_seed: bool) -> int:
        await self._settle()
        return await self._env.set_seed(seed, static_seed)

    async def _settle(self) -> None:
        if self._way is not None and self._way.is_of(self._env):
            await self._way.settle()

    def update_policy_weights_(self, policy_or_weights: Any = None) -> None:
        """Give the policy other weights, from the next step on.

        Args:
            policy_or_weights: A module, a state dict, or a TensorDict of parameters. None copies those of the policy
                that was given where `policy_device` made a copy of it, and does nothing otherwise: a policy that is
                called as it was given always has its latest weights, if it has any.

        Raises:
            TypeError: If weights are given, and the policy has none.
        """
        self._actor.load(policy_or_weights)

    def update_policy(self, policy: Any) -> None:
        """Call another policy from the next step on.

        Args:
            policy: As for the constructor; or a state dict, or a TensorDict of parameters, for the policy as it is.

        Raises:
            TypeError: If it cannot be called; or if it holds weights and the policy has none.
        """
        if isinstance(policy, Mapping | TensorDictBase):
            self._actor.load(policy)
        else:
            self._actor.replace(policy)

    async def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state for `load_state_dict`: frames, iterations, numbers of trajectories, policy and envs.

        Steps that are under way are waited for, and stay for the next batch. What was collected of a batch that was not
        returned is not in it. Cancelling it changes nothing.

        Returns:
            `frames`, `iter`, `traj_ids` (the next number), `env_state_dict` (see `AsyncEnvs.state_dict`; empty for envs
            that keep no state) and, if the policy is a module, `policy_state_dict`.

        Raises:
            ConcurrencyError: If another call waits for a batch.
            Exception: Whatever an env raised that was at work.
        """
        state: OrderedDict[str, Any] = await self._alone(self._state)
        return state

    async def _state(self) -> OrderedDict[str, Any]:
        await self._settle()
        return await self._saved.take()

    async def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from there: with the next batch, by new episodes, which have new numbers.

        What was collected of a batch that was not returned is dropped. Cancelling it leaves open which envs have got
        their state.

        Args:
            state_dict: What `state_dict` returned.
            strict: Whether it must have the states of envs and policy, with just the keys that these have.

        Raises:
            KeyError: If something is missing.
            TypeError: If it has the state of a policy, and the policy has none.
            ConcurrencyError: If another call waits for a batch.
        """
        await self._alone(partial(self._load, state_dict, strict))

    async def _load(self, state: Mapping[str, Any], strict: bool) -> None:
        await self._settle()
        await self._saved.restore(state, strict=strict)
        self._way = None

    # -- the end ----------------------------------------------------------------------------------------

    async def shutdown(self, *, close_env: bool | None = None) -> None:
        """End collecting, and close the envs. Doing so again does nothing.

        Envs that stay open are free for other uses: steps that are under way are waited for, and dropped. Cancelling
        it ends the waiting; closing goes on as for `close` of the envs. A call that waits for a batch while the envs
        are closed raises `ClosedError`.

        Args:
            close_env: Whether to close the envs (views never do); None for what the constructor was told.

        Raises:
            ConcurrencyError: If the envs are to stay open, as those of a view always do, and another call waits for a
                batch.
        """
        if self._is_closed:
            return
        closes = self._env._ends_when_closed and (self._close_env if close_env is None else close_env)
        if self._is_busy and not closes:
            raise ConcurrencyError(f"{self!r} is busy with another call; await or cancel that first")
        self._is_closed = True
        way, self._way = self._way, None
        try:
            if way is not None and way.is_of(self._env):
                await way.abandon(drains=not closes)
        finally:
            if closes:
                await self._env.close(raise_if_closed=False)

    __enter__ = Instead("is entered by `async with`, within a coroutine; for `with` there is Collector")

    async def __aenter__(self) -> Self:
        await self._env._scope()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()


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

    The other arguments are those of `AsyncCollector`.

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
