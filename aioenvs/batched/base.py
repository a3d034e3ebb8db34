"""What the asynchronous faces can do: many envs, every command a coroutine."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from aioenvs.batched.requests import (
    check_size,
    check_writable,
    each_of,
    merge_arguments,
    read_masks,
    reset_arguments,
    rows_of,
    seeds_of,
    step_rows,
)
from aioenvs.batched.scope import Scope
from aioenvs.batched.signature import Signature
from aioenvs.batched.statistics import Statistics
from aioenvs.engine.adapters import Attribute, Call
from aioenvs.engine.host import Outcome
from aioenvs.engine.pool import Pool, Selection
from aioenvs.envs.described import Described
from aioenvs.errors import AioEnvsError
from aioenvs.rollout import RolloutOptions, rollout
from aioenvs.specs import Composite

__all__ = ["AsyncEnvs"]


class AsyncEnvs(Described):
    """Commands for many envs, all of a pool or those of a view, as coroutines.

    An env does one thing at a time: a second request while one is pending raises `ConcurrencyError`.
    """

    step_dims = 1  # a mask of a step tells whole envs apart
    _known_signature: Signature | None = None

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether there are no envs now: not started yet, or closed."""

    @abstractmethod
    async def start(self) -> None:
        """Start the workers and build the envs."""

    @abstractmethod
    async def _scope(self) -> Scope:
        """What it takes to command the envs, which are started if need be."""

    @property
    @abstractmethod
    def _running_scope(self) -> Scope | None:
        """The same if they run, else None."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """How many envs there are."""

    # -- description ------------------------------------------------------------------------------------

    def _last_signature(self) -> Signature | None:
        """What the envs look like, or did when they ran last; None if they did not run yet."""
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
            tensordict: Where to put them, of shape `batch_size`; None for a new TensorDict.

        Returns:
            The same TensorDict, with an action for every env.
        """
        td = super().rand_action(tensordict)
        scope = self._running_scope
        for key, value in (scope.exchange.random_objects() if scope is not None else {}).items():
            td.set(key, value)
        return td

    # -- commands ---------------------------------------------------------------------------------------

    async def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int:
        """Seed all envs; each uses its seed at its next reset.

        Cancelling it leaves open which envs have got their seed.

        Args:
            seed: The first env's seed, from which the others follow (`aioenvs.engine.seeding`); None to draw one.
            static_seed: Give the same seed to all.

        Returns:
            The next seed of the chain; `seed` itself if static.
        """
        scope = await self._scope()
        seeds, following = seeds_of(seed, scope.num_seeds, static=static_seed)
        batched = [env for env, count in scope.num_seeds.items() if static_seed and count > 1]

        async def ask(pool: Pool, chosen: Selection) -> Outcome:
            outcome = await pool.seed(chosen, seeds)
            if outcome.failures or not batched:
                return outcome
            calls = {env: Call("call", "set_seed", (seeds[env], True)) for env in batched}
            return await pool.perform(pool.select(sorted(batched)), calls)

        outcome = await self._asked(scope, "set_seed", ask)
        outcome.raise_failure()
        return following

    async def _asked(self, scope: Scope, command: str, ask: Callable[[Any, Any], Any]) -> Outcome:
        """What comes of a command that all envs get."""
        pool, chosen = scope.pool, scope.everything
        await pool.hold(chosen, command)
        try:
            outcome: Outcome = await ask(pool, chosen)
        finally:
            pool.release(chosen)
        return outcome

    async def reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Begin new episodes, in all envs or in those that a mask names.

        Cancelling it leaves open which envs were reset; those that still work on it are waited for by the next
        request, and what they answer is dropped.

        Args:
            tensordict: Of shape `batch_size`. If it holds `_reset` (bool, shaped like `done`, beside it), only the envs
                with a True in it are reset, and the others keep their values: those in `tensordict`, else the latest
                known. An env that has a batch size of its own gets its part of the mask.
            list_of_kwargs: For each env, what its own `reset` gets besides `kwargs`.
            **kwargs: What each env's `reset` gets. `seed` is the first env's seed, from which the others follow.

        Returns:
            Observations, `done`, `terminated`, `truncated`, and the other entries of `tensordict`.

        Raises:
            RuntimeError: If `tensordict` or `list_of_kwargs` has the wrong size.
            ValueError: If the mask has the wrong shape.
        """
        scope = await self._scope()
        pool, exchange = scope.pool, scope.exchange
        rows, masks = None, {}
        if tensordict is not None:
            check_size(tensordict, scope.signature.batch_size)
            masks = read_masks(tensordict, scope.mask_shapes)
            rows = rows_of(tensordict, masks, [*scope.mask_shapes])
            if rows is not None:
                exchange.check_root(tensordict)
                if not len(rows):
                    return scope.results.after_reset(tensordict, rows, exchange.latest())
        arguments = reset_arguments(scope.num_seeds, list_of_kwargs, kwargs)
        chosen = scope.select(rows)
        await pool.hold(chosen, "reset", replacing=True)
        try:
            given = exchange.given(tensordict, rows, masks) if tensordict is not None else {}
            outcome = await pool.reset(chosen, merge_arguments(chosen.envs, arguments, given))
            exchange.after_reset(rows, outcome)
            values = exchange.latest()
        finally:
            pool.release(chosen)
        outcome.raise_failure()
        return scope.results.after_reset(tensordict, rows, values)

    async def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take one step in all envs, or in those that a mask names.

        Cancelling it, or running into `step_timeout`, leaves the envs that still work on it *draining*: the next
        request for them waits until they have answered, and that answer is dropped.

        Args:
            tensordict: Of shape `batch_size`, with the actions, and with the states if the envs have any. If it holds
                `_step` (bool, `(N,)`, or of the batch size, or shaped like `done`), only those envs step; in the others
                `next` repeats the root's observations and flags, and the reward is 0.

        Returns:
            The same `tensordict`, with `next`: observations, `reward` `(*batch_size, 1)` float32, `done`, `terminated`
            and `truncated` `(*batch_size, 1)` bool, or whatever the specs say.

        Raises:
            RuntimeError: If `tensordict` has the wrong size.
            SpecMismatchError: If an action is missing or does not fit its spec. No env was stepped then.
            ConcurrencyError: If an env is busy with another request.
            WorkerDiedError: If a worker died; the others' envs remain usable.
            Exception: Whatever an env raised, with the worker's traceback as a note, and with the indices of all envs
                that failed as `env_index`. The others have stepped; those that failed need a reset.
        """
        await self._advance(tensordict, maybe_reset=False)
        return tensordict

    async def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Take one step, and reset the envs whose episode ended, in the same round trip.

        Args, errors and cancelling are those of `step`.

        Returns:
            `tensordict` with `next`, which holds the true final observations, and the root for the next step.
        """
        root = await self._advance(tensordict, maybe_reset=True)
        assert root is not None
        return tensordict, root

    async def _advance(self, td: TensorDictBase, *, maybe_reset: bool) -> TensorDictBase | None:
        """Step, put the outcome under `next`, and return the root for the next step."""
        scope = self._running_scope or await self._scope()
        pool, exchange = scope.pool, scope.exchange
        check_size(td, scope.signature.batch_size)
        entries = self._entries(td, scope)
        check_writable(td, entries)
        rows = step_rows(entries.get("_step"), td.batch_size)
        chosen = scope.select(rows)
        inputs = exchange.check_inputs(td, entries) if chosen.indices else {}
        if rows is not None:
            exchange.check_root(td)
        await pool.hold(chosen, "step_and_maybe_reset" if maybe_reset else "step")
        try:
            outcome = Outcome()
            known = exchange.latest() if pool.restarts else None
            if chosen.indices:
                loose = exchange.write_inputs(inputs, rows)  # type: ignore[arg-type]
                exchange.before_step(rows, maybe_reset=maybe_reset)
                outcome = await pool.step(chosen, loose, maybe_reset=maybe_reset)
            following: Any = exchange.step_result(rows, outcome)
            if outcome.lost:
                following = exchange.with_losses(following, known, scope.rows(outcome.lost), outcome)
            root = exchange.root_result(following, outcome) if maybe_reset else None
        finally:
            pool.release(chosen)
        outcome.raise_failure()
        if rows is not None:
            following = scope.results.keep_others(td, rows, following)
            root = scope.results.keep_others(td, rows, root) if root is not None else None
        return scope.results.after_step(td, entries, following, root)

    @staticmethod
    def _entries(td: TensorDictBase, scope: Scope) -> dict[str, Any]:
        """What a step has to know of what it was given; of a lazy stack not every entry can be had as a whole."""
        if not scope.signature.is_lazy:
            return dict(td.items())
        return {name: value for name in ("next", "_step") if (value := td.get(name, None)) is not None}

    async def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Take one step with random actions; see `step`."""
        await self._scope()
        return await self.step(self.rand_action(tensordict))

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
            auto_cast_to_device: Bring the data to the policy's device, and the actions back.
            break_when_any_done: Stop when the first episode ends, as by default.
            break_when_all_done: Stop when every env has finished; the finished ones repeat their last row.
            return_contiguous: Stack into one tensor per key, or lazily; None for the former where it is possible.
            tensordict: The beginning, or the argument of the reset.
            set_truncated: Mark the last step as truncated where it is not done.
            out: Where to stack into.

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
        )
        steps = rollout(self, options, policy, callback, tensordict, out)
        result = None
        try:
            while True:
                result = await steps.send(result)
        except StopIteration as stop:
            stacked: TensorDictBase = stop.value
            return stacked

    # -- beyond the commands ----------------------------------------------------------------------------

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every env.

        Cancelling it leaves open which envs were called.

        Args:
            name: Of the method.
            *args: Its arguments, the same for all.
            **kwargs: Its keyword arguments.

        Returns:
            What each env's method returned.

        Raises:
            AttributeError: If an env has no such method.
            Exception: Whatever a method raised.
        """
        return await self._perform([Call("call", name, args, kwargs)] * self.num_workers)

    async def get_attr(self, name: str) -> list[Any]:
        """The value of an attribute in every env.

        Raises:
            AttributeError: If an env has no such attribute, or it is a method.
        """
        found = await self._look_up(name)
        if any(each.is_callable for each in found):
            raise AttributeError(f"{name!r} is a method of the envs, which stays with them; use call({name!r}, ...)")
        return [each.value for each in found]

    async def _look_up(self, name: str) -> list[Attribute]:
        return await self._perform([Call("get", name)] * self.num_workers)

    async def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute in every env.

        Args:
            name: Of the attribute, which the envs must have.
            values: A list or tuple with one value for each env, or one value for all.

        Raises:
            AttributeError: If an env has no such attribute.
            RuntimeError: If there are not as many values as envs.
        """
        each = each_of(values, self.num_workers, "values")
        await self._perform([Call("set", name, (value,)) for value in each])

    def statistics(self) -> Statistics:
        """What the envs have done since they were started.

        Raises:
            AioEnvsError: If they are not running.
        """
        scope = self._running_scope
        if scope is None:
            raise AioEnvsError(f"{self!r} has no statistics while it is not running")
        pool, envs = scope.pool, scope.envs.tolist()
        steps, episodes = scope.exchange.counts()
        times = [pool.times[pool.host_of(env)] for env in envs]
        return Statistics(
            steps=steps,
            episodes=episodes,
            restarts=tuple(pool.replaced[pool.host_of(env)] for env in envs),
            mean_step_seconds=tuple(each.total / each.count if each.count else 0.0 for each in times),
            max_step_seconds=tuple(each.longest for each in times),
            states=tuple(pool.slots.state(env).value for env in envs),
        )

    async def render(self) -> list[Any]:
        """What the `render` of every env returns."""
        return await self.call("render")

    async def state_dict(self) -> OrderedDict[str, Any]:
        """The state of every env, under `worker0`, `worker1`, ...; empty ones for envs that keep none."""
        states = await self._perform([Call("state_dict")] * self.num_workers)
        return OrderedDict((f"worker{index}", state) for index, state in enumerate(states))

    async def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Give every env its state.

        Args:
            state_dict: What `state_dict` returned; or the state of one env, which all get.
            strict: Whether a state must have the keys that the env has, as for `torch.nn.Module`.
            assign: Whether the tensors of a state take the place of the env's, as for `torch.nn.Module`.

        Raises:
            KeyError: If it has states for some of the envs only.
        """
        names = [f"worker{index}" for index in range(self.num_workers)]
        missing = [name for name in names if name not in state_dict]
        if not missing:
            states = [state_dict[name] for name in names]
        elif len(missing) < len(names):
            raise KeyError(f"expected the states of {len(names)} envs, but {missing!r} are missing")
        else:
            states = [state_dict] * len(names)
        options = {} if strict and not assign else {"strict": strict, "assign": assign}
        await self._perform([Call("load_state_dict", "", (state,), options) for state in states])

    async def _perform(self, calls: Sequence[Call]) -> list[Any]:
        scope = await self._scope()
        envs = scope.envs.tolist()
        asked = dict(zip(envs, calls, strict=True))
        outcome = await self._asked(scope, calls[0].kind, lambda pool, chosen: pool.perform(chosen, asked))
        outcome.raise_failure()
        return [outcome.values[env] for env in envs]
