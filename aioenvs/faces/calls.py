"""Methods, attributes, states and statistics of envs, asked for by coroutines."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioenvs.engine.adapters.base import Attribute, Call
from aioenvs.engine.request import Request
from aioenvs.envs.spec_properties import Described
from aioenvs.errors import AioEnvsError, shown
from aioenvs.faces.requests import each_of
from aioenvs.faces.session import EnvSelection
from aioenvs.hints import describe, lacking, not_for_transforms

__all__ = ["AsyncCalls", "Statistics"]


@dataclass(frozen=True)
class Statistics:
    """The work of the envs since they were started; one entry per env, in the order of the batch.

    Attributes:
        steps: Steps that came back.
        episodes: Steps that ended an episode, lost ones included.
        restarts: How often the worker of the env was replaced after its death.
        mean_step_seconds: How long a step took on average, from asking its worker to the answer. Envs that share a
            worker have its time in common.
        max_step_seconds: The longest of these.
        states: "idle", "busy", "draining" (it still works on something that nobody waits for) or "broken" (its worker
            is dead).
    """

    steps: tuple[int, ...]
    episodes: tuple[int, ...]
    restarts: tuple[int, ...]
    mean_step_seconds: tuple[float, ...]
    max_step_seconds: tuple[float, ...]
    states: tuple[str, ...]


COMMANDS = {"get": "get_attr", "set": "set_attr"}  # what those kinds of calls are called by who makes them


class AsyncCalls(Described):
    """Calls of what the envs have besides resets and steps, as coroutines."""

    _inplace_update = not_for_transforms

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """How many envs there are."""

    @abstractmethod
    async def _scope(self) -> EnvSelection:
        """Return the selection of the envs, which are started if need be."""

    @property
    @abstractmethod
    def _running_scope(self) -> EnvSelection | None:
        """The selection of the envs if they run, else None."""

    def __getattr__(self, name: str) -> Any:
        """Say where attributes of the envs are to be had; a coroutine cannot be waited for here.

        Raises:
            AttributeError: Always.
        """
        hint = "" if name.startswith("_") else f"; for the envs' own use await get_attr({name!r}) or call({name!r})"
        raise lacking(self, name, hint)

    async def call(self, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of every env.

        Cancelling it leaves open which envs were called.

        Args:
            name: Of the method.
            *args: Its arguments, the same for all.
            timeout: Seconds that all of it may take; None for `step_timeout`. A method whose own argument has this name
                gets it by position.
            **kwargs: Its keyword arguments.

        Returns:
            What each env's method returned.

        Raises:
            AttributeError: If an env has no such method.
            WorkerTimeoutError: If an env takes too long; its late answer will be dropped.
            Exception: Whatever a method raised.
        """
        return await self._call(name, args, kwargs, timeout)

    async def _call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float | None = None
    ) -> list[Any]:
        return await self._perform([Call("call", name, args, kwargs)] * self.num_workers, timeout)

    async def get_attr(self, name: str, *, timeout: float | None = None) -> list[Any]:
        """The value of an attribute in every env.

        Cancelling it drops the answer.

        Args:
            name: Of the attribute.
            timeout: Seconds that it may take; None for `step_timeout`.

        Raises:
            AttributeError: If an env has no such attribute, or it is a method.
            TypeError: If a value cannot leave its env, such as a lock.
        """
        found = await self._look_up(name, timeout=timeout)
        if any(each.is_callable for each in found):
            raise AttributeError(f"{name!r} is a method of the envs, which stays with them; use call({name!r}, ...)")
        return [each.value for each in found]

    async def _look_up(self, name: str, *, withheld: bool = False, timeout: float | None = None) -> list[Attribute]:
        """An attribute of every env.

        Raises:
            TypeError: If a value cannot leave its env, unless `withheld` values are welcome.
        """
        found: list[Attribute] = await self._perform([Call("get", name)] * self.num_workers, timeout)
        for each in found:
            if each.error is not None and not withheld:
                raise each.error
        return found

    async def set_attr(self, name: str, values: Any, *, timeout: float | None = None) -> None:
        """Set an attribute in every env.

        Cancelling it leaves open in which envs it was set.

        Args:
            name: Of the attribute, which the envs must have.
            values: A list or tuple with one value for each env, or one value for all.
            timeout: Seconds that it may take; None for `step_timeout`.

        Raises:
            AttributeError: If an env has no such attribute.
            RuntimeError: If there are not as many values as envs.
        """
        each = each_of(values, self.num_workers, "values")
        await self._perform([Call("set", name, (value,)) for value in each], timeout)

    def statistics(self) -> Statistics:
        """Return the work of the envs since they were started.

        Raises:
            AioEnvsError: If they are not running.
        """
        scope = self._running_scope
        if scope is None:
            raise AioEnvsError(f"{self!r} has no statistics while it is not running")
        pool, envs = scope.pool, scope.envs.tolist()
        steps, episodes = scope.rows.counts()
        times = [pool.times[pool.host_of(env)] for env in envs]
        return Statistics(
            steps=steps,
            episodes=episodes,
            restarts=tuple(pool.replaced[pool.host_of(env)] for env in envs),
            mean_step_seconds=tuple(each.total / each.count if each.count else 0.0 for each in times),
            max_step_seconds=tuple(each.longest for each in times),
            states=tuple(pool.states.state(env).value for env in envs),
        )

    async def render(self, *, timeout: float | None = None) -> list[Any]:
        """Return the result of every env's `render`.

        Cancelling it drops the answer; the envs that still render are waited for by the next request.

        Args:
            timeout: Seconds that it may take; None for `step_timeout`.
        """
        return await self.call("render", timeout=timeout)

    async def state_dict(self, *, timeout: float | None = None) -> OrderedDict[str, Any]:
        """The state of every env, under `worker0`, `worker1`, ...; empty ones for envs that keep none.

        Cancelling it drops the answer.

        Args:
            timeout: Seconds that it may take; None for `step_timeout`.
        """
        states = await self._perform([Call("state_dict")] * self.num_workers, timeout)
        return OrderedDict((f"worker{index}", state) for index, state in enumerate(states))

    async def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        timeout: float | None = None,
    ) -> None:
        """Give every env its state.

        Cancelling it leaves open which envs have got theirs.

        Args:
            state_dict: What `state_dict` returned; or the state of one env, which all get.
            strict: Whether a state must have the keys that the env has, as for `torch.nn.Module`, and there must be no
                states of more envs.
            assign: Whether the tensors of a state take the place of the env's, as for `torch.nn.Module`.
            timeout: Seconds that it may take; None for `step_timeout`.

        Raises:
            TypeError: If it is no dict.
            KeyError: If it has states for some of the envs only; or if `strict`, for more envs than there are.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"expected a dict that state_dict returned, got {describe(state_dict)}")
        names = [f"worker{index}" for index in range(self.num_workers)]
        missing = [name for name in names if name not in state_dict]
        surplus = [name for name in state_dict if name not in names]
        if strict and surplus and len(missing) < len(names):
            raise KeyError(
                f"expected the states of {len(names)} envs, but found {shown(surplus)} besides; pass strict=False to "
                "leave them out"
            )
        if not missing:
            states = [state_dict[name] for name in names]
        elif len(missing) < len(names):
            raise KeyError(f"expected the states of {len(names)} envs, but {shown(missing)} are missing")
        else:
            states = [state_dict] * len(names)
        options = {} if strict and not assign else {"strict": strict, "assign": assign}
        await self._perform([Call("load_state_dict", "", (state,), options) for state in states], timeout)

    async def _perform(self, calls: Sequence[Call], timeout: float | None = None) -> list[Any]:
        scope = await self._scope()
        envs = scope.envs.tolist()
        asked = dict(zip(envs, calls, strict=True))
        command = COMMANDS.get(calls[0].kind, calls[0].kind)
        async with Request(scope.pool, scope.everything, command, timeout=timeout) as request:
            outcome = await request.perform(asked)
        outcome.raise_failure()
        return [outcome.values[env] for env in envs]
