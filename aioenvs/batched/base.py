"""What the asynchronous faces can do: many envs, every command a coroutine."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from aioenvs.batched.config import BatchConfig
from aioenvs.batched.described import Described
from aioenvs.batched.exchange import Exchange
from aioenvs.batched.requests import check_size, check_writable, reset_arguments, rows_of
from aioenvs.batched.results import Results, keep_others
from aioenvs.batched.signature import Signature
from aioenvs.engine.host import Outcome
from aioenvs.engine.inline import InlinePool
from aioenvs.engine.pool import Pool, outlast
from aioenvs.engine.seeding import seed_chain
from aioenvs.errors import AioEnvsError, ClosedError
from aioenvs.rollout import RolloutOptions, Steps, rollout

__all__ = ["AsyncBatchedEnv"]


@dataclass(frozen=True)
class _Running:
    """What there is between start and close."""

    pool: Pool
    signature: Signature
    exchange: Exchange
    results: Results


def _unstarted(cls: type[AsyncBatchedEnv], config: BatchConfig, device: torch.device | None) -> AsyncBatchedEnv:
    """A copy, of a pickle or in memory: the same envs, not started."""
    env = cls.__new__(cls)
    AsyncBatchedEnv.__init__(env, config, device)
    return env


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, also while being cancelled."""
    task.cancel()
    await outlast(task)


class AsyncBatchedEnv(Described):
    """Many envs behind coroutines; see `AsyncParallelEnv` and `AsyncSerialEnv`.

    It belongs to the event loop in which it is started. An env does one thing at a time: a second request while one
    is pending raises `ConcurrencyError`.
    """

    def __init__(self, config: BatchConfig, device: torch.device | str | int | None) -> None:
        self._pool: Pool | None = None  # also while it starts
        self._running: _Running | None = None
        self._starting: asyncio.Task[_Running] | None = None
        self._waiting = 0  # how many tasks wait for the start
        self._known_signature: Signature | None = None
        self._yields = True  # whether commands let other tasks run, even if they have nothing to wait for
        self._config = config
        self._batch_size = torch.Size([len(config.factories)])
        self.device = None if device is None else torch.device(device)
        if self.device is not None and self.device.type == "meta":
            raise ValueError("results cannot go to the device 'meta', which holds no data")

    # -- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers and build the envs. Any other command does so when it is the first.

        Cancelling it ends the workers that were started, unless another task waits for them too; it can then be
        started again.

        Raises:
            RuntimeError: If it is started already.
            WorkerStartError: If a factory raised, hung (`start_timeout`) or ended its process.
            SpecMismatchError: If the envs do not have the same spaces.
        """
        if self._running is not None or self._starting is not None:
            raise AioEnvsError(f"{self!r} is started already")
        await self._started()

    async def _started(self) -> _Running:
        """What runs, started if need be; tasks that come here at the same time share one start."""
        if self._running is not None:
            return self._running
        if self._config.backend == "serial":  # nothing in it waits, so nobody can come in between
            self._running = await self._start()
            return self._running
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
            self._starting.add_done_callback(self._start_ended)
        starting = self._starting
        self._waiting += 1
        try:
            await asyncio.wait([starting])
        except asyncio.CancelledError:
            if self._waiting == 1:
                await _cancelled(starting)
                await self.close(raise_if_closed=False)  # it may have been quicker
            raise
        finally:
            self._waiting -= 1
        if starting.cancelled():
            raise ClosedError(f"{self!r} was closed by another task while it started")
        return starting.result()

    def _start_ended(self, starting: asyncio.Task[_Running]) -> None:
        self._starting = None
        if not starting.cancelled() and starting.exception() is None:
            self._running = starting.result()

    async def _start(self) -> _Running:
        if self.device is not None:
            torch.empty(0, device=self.device)  # says so now if there is no such device
        pool = self._pool = self._make_pool()
        try:
            await pool.start()
            signature = self._known_signature = Signature.of(pool.metadata, pool.num_envs, self.device)
            return _Running(pool, signature, Exchange(pool, self.device), Results(self._batch_size, self.device))
        except BaseException:
            await pool.close()
            self._pool = None
            raise

    def _make_pool(self) -> Pool:
        config = self._config
        if config.backend == "serial":
            return InlinePool(config.factories, config.kwargs, yields=self._yields)
        from aioenvs.engine.workers import WorkerPool  # needs what Windows does not have

        return WorkerPool(
            config.groups,
            config.factories,
            config.kwargs,
            start_method=config.start_method,
            timeouts=config.timeouts,
        )

    async def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all envs and end the workers, within `close_timeout`, whatever state they are in.

        Cancelling it kills the workers at once; they are gone when it returns. The next command starts new ones.

        Raises:
            ClosedError: If it is closed already, unless `raise_if_closed` is False.
        """
        running, self._running = self._running, None
        if running is not None:
            self._pool = None
            await running.pool.close()
        elif self._starting is not None:
            await _cancelled(self._starting)
        elif raise_if_closed:
            raise ClosedError(f"{self!r} is closed already, or was never started")

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(raise_if_closed=False)

    def __del__(self) -> None:
        if getattr(self, "_running", None) is not None:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            self._discard()

    def _discard(self) -> None:
        """Give everything back at once, without waiting; for envs that were forgotten."""
        running, self._running, self._pool = self._running, None, None
        if running is not None:
            running.pool.discard()

    @property
    def is_closed(self) -> bool:
        """Whether there are no envs now: not started yet, or closed."""
        return self._running is None

    @property
    def pids(self) -> tuple[int, ...]:
        return self._pool.pids if self._pool is not None else ()

    @property
    def _signature(self) -> Signature:
        if self._known_signature is None:
            raise AioEnvsError(f"the specs of {self!r} are known once it was started: await start() first")
        return self._known_signature

    def __reduce__(self) -> tuple[Any, ...]:
        return _unstarted, (type(self), self._config, self.device)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._describe()}>"

    def _describe(self) -> str:
        state = "closed" if self._running is None else "open"
        hosts = f"num_processes={self.num_processes}, " if self.num_processes else ""
        return f"num_workers={self.num_workers}, {hosts}{state}"

    # -- commands ---------------------------------------------------------------------------------------

    async def set_seed(self, seed: int | None, static_seed: bool = False) -> int:
        """Seed all envs; each uses its seed at its next reset.

        Cancelling it leaves open which envs have got their seed.

        Args:
            seed: The first env's seed, from which the others follow (`aioenvs.engine.seeding`); None to draw one.
            static_seed: Give the same seed to all.

        Returns:
            The next seed of the chain; `seed` itself if static.
        """
        pool = (await self._started()).pool
        seeds, following = seed_chain(seed, self.num_workers, static=static_seed)
        chosen = pool.everything
        await pool.hold(chosen, "set_seed")
        try:
            outcome = await pool.seed(chosen, dict(enumerate(seeds)))
        finally:
            pool.release(chosen)
        outcome.raise_failure()
        return following

    async def reset(
        self,
        td: TensorDictBase | None = None,
        *,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Begin new episodes, in all envs or in those that a mask names.

        Cancelling it leaves open which envs were reset; those that still work on it are waited for by the next
        request, and what they answer is dropped.

        Args:
            td: Of shape `batch_size`. If it holds `_reset` (bool, `(N, 1)` or `(N,)`), only those envs are reset, and
                the others keep their values: those in `td`, else the latest known.
            list_of_kwargs: For each env, what its own `reset` gets besides `kwargs`.
            **kwargs: What each env's `reset` gets. `seed` is the first env's seed, from which the others follow.

        Returns:
            Observations, `done`, `terminated`, `truncated`, and the other entries of `td`.

        Raises:
            RuntimeError: If `td` or `list_of_kwargs` has the wrong size.
            ValueError: If the mask has the wrong shape.
        """
        rows = None
        if td is not None:
            check_size(td, self.batch_size)
            rows = rows_of(td, "_reset", self.batch_size)
        if td is not None and rows is not None and not len(rows):
            return await self._unreset(td, rows)
        arguments = reset_arguments(self.num_workers, list_of_kwargs, kwargs)
        running = await self._started()
        pool, exchange = running.pool, running.exchange
        chosen = pool.everything if rows is None else pool.select(rows.tolist())
        arguments = {env: own for env, own in arguments.items() if env in chosen.envs}
        if td is not None and rows is not None:
            exchange.check_root(td)
        await pool.hold(chosen, "reset", replacing=True)
        try:
            outcome = await pool.reset(chosen, arguments)
            exchange.after_reset(rows, outcome)
            values = exchange.latest()
        finally:
            pool.release(chosen)
        outcome.raise_failure()
        return running.results.after_reset(td, rows, values)

    async def _unreset(self, td: TensorDictBase, rows: NDArray[np.intp]) -> TensorDictBase:
        """A reset of nobody: what `td` has, and the latest known values of what it lacks."""
        running = await self._started()
        return running.results.after_reset(td, rows, running.exchange.latest())

    async def step(self, td: TensorDictBase) -> TensorDictBase:
        """Take one step in all envs, or in those that a mask names.

        Cancelling it, or running into `step_timeout`, leaves the envs that still work on it *draining*: the next
        request for them waits until they have answered, and that answer is dropped.

        Args:
            td: Of shape `batch_size`, with the actions. If it holds `_step` (bool, `(N,)` or `(N, 1)`), only those
                envs step; in the others `next` repeats the root's observations and flags, and the reward is 0.

        Returns:
            The same `td`, with `next`: observations, `reward` `(N, 1)` float32, `done`, `terminated` and `truncated`
            `(N, 1)` bool.

        Raises:
            RuntimeError: If `td` has the wrong size.
            SpecMismatchError: If an action is missing or does not fit its spec. No env was stepped then.
            ConcurrencyError: If an env is busy with another request.
            WorkerDiedError: If a worker died; the others' envs remain usable.
            Exception: Whatever an env raised, with the worker's traceback as a note, and with the indices of all envs
                that failed as `env_index`. The others have stepped; those that failed need a reset.
        """
        await self._advance(td, maybe_reset=False)
        return td

    async def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Take one step, and reset the envs whose episode ended, in the same round trip.

        Args, errors and cancelling are those of `step`.

        Returns:
            `td` with `next`, which holds the true final observations, and the root for the next step.
        """
        root = await self._advance(td, maybe_reset=True)
        assert root is not None
        return td, root

    async def _advance(self, td: TensorDictBase, *, maybe_reset: bool) -> TensorDict | None:
        """Step, put the outcome under `next`, and return the root for the next step."""
        check_size(td, self._batch_size)
        entries = dict(td.items())
        check_writable(td, entries)
        rows = rows_of(entries, "_step", self._batch_size)
        running = self._running or await self._started()
        pool, exchange = running.pool, running.exchange
        chosen = pool.everything if rows is None else pool.select(rows.tolist())
        actions = exchange.check_actions(td, entries) if chosen.indices else {}
        if rows is not None:
            exchange.check_root(td)
        await pool.hold(chosen, "step_and_maybe_reset" if maybe_reset else "step")
        try:
            outcome = Outcome()
            if chosen.indices:
                loose = exchange.write_actions(actions, rows)
                exchange.before_step(rows, maybe_reset=maybe_reset)
                outcome = await pool.step(chosen, loose, maybe_reset=maybe_reset)
            following = exchange.step_result(rows, outcome)
            root = exchange.root_result(following, outcome) if maybe_reset else None
        finally:
            pool.release(chosen)
        outcome.raise_failure()
        if rows is not None:
            following = keep_others(td, rows, following)
            root = keep_others(td, rows, root) if root is not None else None
        return running.results.after_step(td, entries, following, root)

    async def rand_step(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Take one step with random actions; see `step`."""
        await self._started()
        return await self.step(self.rand_action(td))

    async def rollout(
        self,
        max_steps: int,
        policy: Callable[..., Any] | None = None,
        callback: Callable[[Any, TensorDictBase], Any] | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        break_when_all_done: bool = False,
        return_contiguous: bool = True,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        out: TensorDictBase | None = None,
        auto_cast_to_device: bool = False,
    ) -> TensorDictBase:
        """Step the envs with a policy and stack what came of it.

        Cancelling it leaves the envs as cancelling `step` does.

        Args:
            max_steps: At most so many steps; exactly so many if neither break flag is set, since finished envs then
                begin anew.
            policy: What chooses the actions, None for random ones; see `aioenvs.rollout.as_policy`. It may be a
                coroutine function.
            callback: Called after each step with the env and the step's TensorDict.
            auto_reset: Reset first; else `tensordict` is the beginning.
            break_when_any_done: Stop when the first episode ends.
            break_when_all_done: Stop when every env has finished; the finished ones repeat their last row.
            return_contiguous: Stack into one tensor per key, else lazily.
            tensordict: The beginning, or the argument of the reset.
            set_truncated: Mark the last step as truncated where it is not done.
            out: Where to stack into.
            auto_cast_to_device: Bring the data to the policy's device, and the actions back.

        Returns:
            A TensorDict of shape `(N, T)` whose last dim is named "time".

        Raises:
            TypeError: If both break flags are set.
        """
        await self._started()
        steps = self._rollout_steps(
            max_steps,
            policy,
            callback,
            auto_reset=auto_reset,
            break_when_any_done=break_when_any_done,
            break_when_all_done=break_when_all_done,
            return_contiguous=return_contiguous,
            tensordict=tensordict,
            set_truncated=set_truncated,
            out=out,
            auto_cast_to_device=auto_cast_to_device,
        )
        result = None
        try:
            while True:
                result = await steps.send(result)
        except StopIteration as stop:
            stacked: TensorDictBase = stop.value
            return stacked

    def _rollout_steps(
        self,
        max_steps: int,
        policy: Callable[..., Any] | None,
        callback: Callable[[Any, TensorDictBase], Any] | None,
        *,
        tensordict: TensorDictBase | None = None,
        out: TensorDictBase | None = None,
        **options: Any,
    ) -> Steps:
        return rollout(self, RolloutOptions(max_steps, **options), policy, callback, tensordict, out)

    def _random_objects(self) -> dict[Any, Any]:
        return self._running.exchange.random_objects() if self._running is not None else {}
