"""What can be asked of envs besides resets and steps: their methods, attributes and states."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioenvs.batched.requests import each_of
from aioenvs.batched.scope import Scope
from aioenvs.batched.statistics import Statistics
from aioenvs.engine.adapters import Attribute, Call
from aioenvs.engine.host import Outcome
from aioenvs.envs.described import Described
from aioenvs.errors import AioEnvsError

__all__ = ["AsyncCalls"]


class AsyncCalls(Described):
    """Calls of what the envs have besides resets and steps, as coroutines."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """How many envs there are."""

    @abstractmethod
    async def _scope(self) -> Scope:
        """What it takes to command the envs, which are started if need be."""

    @property
    @abstractmethod
    def _running_scope(self) -> Scope | None:
        """The same if they run, else None."""

    def __getattr__(self, name: str) -> Any:
        """Say where attributes of the envs are to be had; a coroutine cannot be waited for here.

        Raises:
            AttributeError: Always.
        """
        hint = "" if name.startswith("_") else f"; for the envs' own use await get_attr({name!r}) or call({name!r})"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

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

        Cancelling it drops the answer.

        Raises:
            AttributeError: If an env has no such attribute, or it is a method.
            TypeError: If a value cannot leave its env, such as a lock.
        """
        found = await self._look_up(name)
        if any(each.is_callable for each in found):
            raise AttributeError(f"{name!r} is a method of the envs, which stays with them; use call({name!r}, ...)")
        return [each.value for each in found]

    async def _look_up(self, name: str, *, withheld: bool = False) -> list[Attribute]:
        """An attribute of every env.

        Raises:
            TypeError: If a value cannot leave its env, unless `withheld` values are welcome.
        """
        found: list[Attribute] = await self._perform([Call("get", name)] * self.num_workers)
        for each in found:
            if each.error is not None and not withheld:
                raise each.error
        return found

    async def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute in every env.

        Cancelling it leaves open in which envs it was set.

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
        """What the `render` of every env returns.

        Cancelling it drops the answer; the envs that still render are waited for by the next request.
        """
        return await self.call("render")

    async def state_dict(self) -> OrderedDict[str, Any]:
        """The state of every env, under `worker0`, `worker1`, ...; empty ones for envs that keep none.

        Cancelling it drops the answer.
        """
        states = await self._perform([Call("state_dict")] * self.num_workers)
        return OrderedDict((f"worker{index}", state) for index, state in enumerate(states))

    async def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Give every env its state.

        Cancelling it leaves open which envs have got theirs.

        Args:
            state_dict: What `state_dict` returned; or the state of one env, which all get.
            strict: Whether a state must have the keys that the env has, as for `torch.nn.Module`, and there must be no
                states of more envs.
            assign: Whether the tensors of a state take the place of the env's, as for `torch.nn.Module`.

        Raises:
            KeyError: If it has states for some of the envs only; or if `strict`, for more envs than there are.
        """
        names = [f"worker{index}" for index in range(self.num_workers)]
        missing = [name for name in names if name not in state_dict]
        surplus = [name for name in state_dict if name not in names]
        if strict and surplus and len(missing) < len(names):
            raise KeyError(
                f"expected the states of {len(names)} envs, but found {surplus!r} besides; pass strict=False to leave "
                "them out"
            )
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

    async def _asked(self, scope: Scope, command: str, ask: Callable[[Any, Any], Any]) -> Outcome:
        """What comes of a command that all envs get."""
        pool, chosen = scope.pool, scope.everything
        await pool.hold(chosen, command)
        try:
            outcome: Outcome = await ask(pool, chosen)
        finally:
            pool.release(chosen)
        return outcome
