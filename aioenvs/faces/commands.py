"""Commands of the asynchronous faces: many envs, every command a coroutine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDictBase

from aioenvs.engine.adapters.base import Call
from aioenvs.engine.request import Request
from aioenvs.errors import AioEnvsError
from aioenvs.faces.batch_specs import Signature
from aioenvs.faces.requests import (
    check_size,
    check_tensordict,
    merge_arguments,
    named_envs,
    read_masks,
    reset_arguments,
    rows_of,
    seeds_of,
)
from aioenvs.faces.steps import AsyncSteps
from aioenvs.hints import hints_at_keywords, no_writeback
from aioenvs.specs import Composite
from aioenvs.tensors.done import done_mask, terminated_or_truncated
from aioenvs.tensors.rollout import RolloutOptions, rollout
from aioenvs.tensors.trees import nested_key

__all__ = ["AsyncEnvs"]


class AsyncEnvs(AsyncSteps):
    """Commands for many envs, all of a pool or those of a view, as coroutines.

    An env does one thing at a time: a second request while one is pending raises `ConcurrencyError`.
    """

    _known_signature: Signature | None = None
    _ends_when_closed = True  # whether `close` ends the envs

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether there are no envs now: not started yet, or closed."""

    @abstractmethod
    def __getitem__(self, index: Any) -> Any:
        """A live view of some envs, with the same methods."""

    __setitem__ = no_writeback

    @abstractmethod
    async def start(self) -> None:
        """Start the workers and build the envs."""

    @property
    @abstractmethod
    def num_processes(self) -> int:
        """How many processes host them; 0 where they live in this one, in threads or not."""

    @property
    @abstractmethod
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers that host them, in order; empty where envs live in this process."""

    @abstractmethod
    def update_kwargs(self, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Change the keyword arguments of the factories, before the envs are started."""

    # -- description ------------------------------------------------------------------------------------

    def _last_signature(self) -> Signature | None:
        """Return the specs of the envs, also of when they ran last; None if they did not run yet."""
        scope = self._running_scope
        if scope is not None:
            self._known_signature = scope.signature
        return self._known_signature

    @property
    def _signature(self) -> Signature:
        signature = self._last_signature()
        if signature is None:
            raise AioEnvsError(f"what {self!r} looks like is known once it was started: await start() first")
        return signature

    @property
    def output_spec(self) -> Composite:
        return self._signature.output_spec

    @property
    def input_spec(self) -> Composite:
        return self._signature.input_spec

    @property
    def batch_size(self) -> torch.Size:
        """`(num_workers, *bs)`, where `bs` is the batch size of each env; known once they were started."""
        return self._signature.batch_size

    @property
    def num_seeds(self) -> int:
        """How many seeds of a chain the envs use up together."""
        scope = self._running_scope
        if scope is None:
            return self.num_workers
        return sum(scope.num_seeds.values())

    def __len__(self) -> int:
        return self.num_workers

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Fill in random actions, drawn from torch's generator.

        Args:
            tensordict: Where to put them, of shape `batch_size`, or as `recv` returned it, for the envs that its
                `env_index` names; None for a new TensorDict.

        Returns:
            The same TensorDict, with an action for every env.

        Raises:
            TypeError: If this is no TensorDict.
        """
        scope = self._running_scope
        if tensordict is not None:
            check_tensordict(tensordict, self.batch_size)
            if scope is not None and tensordict.get("env_index", None) is not None:
                places = {env: place for place, env in enumerate(scope.envs.tolist())}
                named = named_envs(tensordict, tuple(places), scope.whole.read)
                if named != tuple(places):
                    return self[[places[env] for env in named]].rand_action(tensordict)
        td = super().rand_action(tensordict)
        samples = scope.inputs.random_objects() if scope is not None else []
        if samples and all(own.keys() == samples[0].keys() for own in samples):
            for key in samples[0]:
                td.set(nested_key(key), NonTensorStack(*[own[key] for own in samples]))
        else:
            for part, own in zip(td.unbind(0), samples, strict=bool(samples)):
                for key, value in own.items():
                    part.set(nested_key(key), value)
        return td

    # -- commands ---------------------------------------------------------------------------------------

    async def set_seed(
        self, seed: int | None = None, static_seed: bool = False, *, timeout: float | None = None
    ) -> int:
        """Seed all envs; each uses its seed at its next reset.

        For coroutine envs that is all: the random generators that all of a process share are left alone.

        Cancelling it leaves open which envs have got their seed.

        Args:
            seed: The first env's seed, from which the others follow (`aioenvs.engine.worker.random_streams`); None to
                draw one.
            static_seed: Give the same seed to all.
            timeout: Seconds that it may take; None for `step_timeout`.

        Returns:
            The next seed of the chain; `seed` itself if static.

        Raises:
            ConcurrencyError: If an env is busy with another request.
            WorkerDiedError: If a worker died; the others' envs remain usable.
            Exception: Whatever the `set_seed` of an env raised.
        """
        scope = await self._scope()
        seeds, following = seeds_of(seed, scope.num_seeds, static=static_seed)
        batched = [env for env, count in scope.num_seeds.items() if static_seed and count > 1]

        async with Request(scope.pool, scope.everything, "set_seed", timeout=timeout) as request:
            outcome = await request.seed(seeds)
            if batched and not outcome.failures:
                outcome = await request.perform({env: Call("call", "set_seed", (seeds[env], True)) for env in batched})
        outcome.raise_failure()
        return following

    async def reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
        select_reset_only: bool = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Begin new episodes, in all envs or in those that a mask names.

        Cancelling it leaves open which envs were reset; those that still work on it are waited for by the next
        request, and what they answer is dropped. Coroutine envs are cancelled at the await where they are.

        Args:
            tensordict: Of shape `batch_size`. If it holds `_reset` (bool, shaped like `done`, beside it), only the envs
                with a True in it are reset, and the others keep their values: those in `tensordict`, else the latest
                known. An env that has a batch size of its own gets its part of the mask.
            list_of_kwargs: For each env, what its own `reset` gets besides `kwargs`.
            select_reset_only: Show the envs nothing of `tensordict` but the masks.
            timeout: Seconds that it may take, besides the time to build envs anew; None for `step_timeout`.
            **kwargs: What each env's `reset` gets. `seed` is the first env's seed, from which the others follow.

        Returns:
            Observations, `done`, `terminated`, `truncated`, and the other entries of `tensordict`.

        Raises:
            RuntimeError: If `tensordict` or `list_of_kwargs` has the wrong size, or an episode is over when it begins.
            ValueError: If the mask has the wrong shape or dtype, or some of nested masks are there but not all.
            SpecMismatchError: If an entry that envs which are not reset shall keep does not fit its spec, in which case
                no env was asked; or if an env returned something else than its specs say.
            ConcurrencyError: If an env is busy with another request.
            WorkerDiedError: If a worker died; the others' envs remain usable.
            WorkerTimeoutError: If it takes too long; late answers will be dropped, and the next request waits for them.
            Exception: Whatever an env raised, with the worker's traceback as a note, and with the indices of all envs
                that failed as `env_index`. The others are reset.
        """
        scope = await self._scope()
        rows, masks = None, {}
        if tensordict is not None:
            check_size(tensordict, scope.signature.batch_size)
            masks = read_masks(tensordict, scope.mask_shapes)
            rows = rows_of(tensordict, masks, [*scope.mask_shapes])
            if rows is not None or scope.rows.takes_root:
                scope.inputs.check_root(tensordict)
            if rows is not None and not len(rows):
                return scope.results.after_reset(tensordict, rows, *scope.placed(scope.latest()))
        arguments = reset_arguments(scope.num_seeds, list_of_kwargs, kwargs)
        chosen = scope.select(rows)
        async with Request(scope.pool, chosen, "reset", replacing=True, timeout=timeout) as request:
            scope.rows.decide(rows)
            given = {}
            if tensordict is not None:
                shown = tensordict.empty() if select_reset_only else tensordict
                given = scope.inputs.store(shown, rows, masks, lambda number: scope.rows.parts[number].latest())
            outcome = await request.reset(merge_arguments(chosen.envs, arguments, given))
            scope.rows.note_reset(outcome)
            values = scope.latest()
        outcome.raise_failure()
        (values,) = scope.placed(values)
        await scope.whole.arrived(request.lease)
        return scope.results.after_reset(tensordict, rows, values)

    async def maybe_reset(self, tensordict: TensorDictBase, *, timeout: float | None = None) -> TensorDictBase:
        """Begin new episodes where the done flags say that they are over.

        Cancelling it leaves open which envs were reset, as for `reset`.

        Args:
            tensordict: Of shape `batch_size`, with the done flags, such as what `step_mdp` makes of a step's result.
            timeout: As for `reset`.

        Returns:
            The same TensorDict if no episode is over; else what `reset` returns for a mask of those that are.
        """
        scope = await self._scope()
        check_size(tensordict, scope.signature.batch_size)
        marked = tensordict.copy()
        if not terminated_or_truncated(marked, self.full_done_spec):
            return tensordict
        if not scope.mask_shapes:  # the envs have no flag in common
            marked.set("_reset", done_mask(tensordict, self._index.every_key("done")))
        return await self.reset(marked, select_reset_only=True, timeout=timeout)

    async def rand_step(
        self, tensordict: TensorDictBase | None = None, *, timeout: float | None = None
    ) -> TensorDictBase:
        """Take one step with random actions; see `step`, also for what cancelling it does."""
        await self._scope()
        return await self.step(self.rand_action(tensordict), timeout=timeout)

    @hints_at_keywords
    async def rollout(
        self,
        max_steps: int,
        policy: Callable[..., Any] | None = None,
        callback: Callable[[Any, TensorDictBase], Any] | None = None,
        *,
        auto_reset: bool = True,
        auto_cast_to_device: bool = False,
        break_when_any_done: bool | None = None,
        break_when_all_done: bool | None = None,
        return_contiguous: bool | None = None,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        out: TensorDictBase | None = None,
        trust_policy: bool = False,
        storing_device: torch.device | str | int | None = None,
    ) -> TensorDictBase:
        """Step the envs with a policy and stack what came of it.

        Cancelling it leaves the envs as cancelling `step` does.

        Args:
            max_steps: At most so many steps; exactly so many if neither break flag is set, since finished envs then
                begin anew.
            policy: What chooses the actions, None for random ones; see `aioenvs.tensors.rollout.as_policy`. It may be a
                coroutine function.
            callback: Called after each step with the env and the step's TensorDict.
            auto_reset: Reset first; else `tensordict` is the beginning.
            auto_cast_to_device: Bring the data to the policy's device, and the actions back.
            break_when_any_done: Stop when the first episode ends, as by default.
            break_when_all_done: Stop when every env has finished; the finished ones repeat their last row.
            return_contiguous: Stack into one tensor per key, or lazily; None for the former where it is possible.
            tensordict: The beginning, or the argument of the reset.
            set_truncated: Mark the last step as truncated where it is not done.
            out: Where to stack into.
            trust_policy: Accepted and without effect: whether a policy takes a TensorDict is told from its signature.
            storing_device: Where to keep the steps, and the result; None for where they are.

        Returns:
            A TensorDict of shape `(*batch_size, T)` whose last dim is named "time".

        Raises:
            TypeError: If both break flags are set.
        """
        await self._scope()
        options = RolloutOptions(
            max_steps,
            auto_reset=auto_reset,
            auto_cast_to_device=auto_cast_to_device,
            break_when_any_done=break_when_any_done,
            break_when_all_done=break_when_all_done,
            return_contiguous=return_contiguous,
            set_truncated=set_truncated,
            storing_device=storing_device,
        )
        steps = rollout(self, options, policy, callback, tensordict, out)
        result = None
        try:
            while True:
                result = await steps.send(result)
        except StopIteration as stop:
            stacked: TensorDictBase = stop.value
            return stacked
