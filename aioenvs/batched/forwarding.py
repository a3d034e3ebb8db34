"""What plain calls can ask of envs besides resets and steps: their methods, attributes and states."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from aioenvs.batched.base import AsyncEnvs
from aioenvs.batched.calls import AsyncCalls
from aioenvs.batched.statistics import Statistics
from aioenvs.engine.copying import Withheld
from aioenvs.envs.base import EnvBase
from aioenvs.errors import AioEnvsError, ConcurrencyError
from aioenvs.peers import hint_at, not_for_transforms

__all__ = ["Forwarding", "documented_by"]

Method = TypeVar("Method", bound=Callable[..., Any])
REGISTERED = ("_parameters", "_buffers", "_modules")  # where a torch.nn.Module has attributes besides its __dict__


def documented_by(coroutine: Callable[..., Any]) -> Callable[[Method], Method]:
    """Give a method the docstring of the coroutine that it runs."""

    def document(method: Method) -> Method:
        method.__doc__ = coroutine.__doc__
        return method

    return document


class Forwarding(EnvBase):
    """Forwards what it does not have itself to the envs of a batch."""

    _env: AsyncEnvs
    _inplace_update = not_for_transforms

    @abstractmethod
    def _run(self, coroutine: Any) -> Any:
        """Run a coroutine to its end."""

    @documented_by(AsyncCalls.call)
    def call(self, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        values: list[Any] = self._run(self._env.call(name, *args, timeout=timeout, **kwargs))
        return values

    @documented_by(AsyncCalls.get_attr)
    def get_attr(self, name: str, *, timeout: float | None = None) -> list[Any]:
        values: list[Any] = self._run(self._env.get_attr(name, timeout=timeout))
        return values

    @documented_by(AsyncCalls.set_attr)
    def set_attr(self, name: str, values: Any, *, timeout: float | None = None) -> None:
        self._run(self._env.set_attr(name, values, timeout=timeout))

    @documented_by(AsyncCalls.statistics)
    def statistics(self) -> Statistics:
        return self._env.statistics()

    @documented_by(AsyncCalls.render)
    def render(self, *, timeout: float | None = None) -> list[Any]:
        values: list[Any] = self._run(self._env.render(timeout=timeout))
        return values

    @documented_by(AsyncCalls.state_dict)
    def state_dict(  # type: ignore[override]
        self, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> OrderedDict[str, Any]:
        states: OrderedDict[str, Any] = self._run(self._env.state_dict(timeout=timeout))
        return states

    @documented_by(AsyncCalls.load_state_dict)
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        timeout: float | None = None,
    ) -> None:
        self._run(self._env.load_state_dict(state_dict, strict, assign, timeout=timeout))

    def __getattr__(self, name: str) -> Any:
        """What the envs have under this name: a list of values, or a method that calls theirs.

        Values that cannot leave their env (locks, generators, ...) are there, for `hasattr`, but any use of the list
        raises `TypeError`.

        Raises:
            AttributeError: If one of them has no such attribute, or they are not running.
        """
        if name.startswith("_") or "_env" not in self.__dict__ or self._has_registered(name):
            return super().__getattr__(name)
        if self._env._running_scope is None:
            raise AttributeError(
                f"{self!r} has no {name!r} itself, and its envs are closed or not started; start() comes first"
                f"{hint_at(name)}",
                name=name,
                obj=self,
            )
        try:
            found = self._run(self._env._look_up(name, withheld=True))
        except AttributeError as error:
            raise AttributeError(
                f"neither {self!r} nor its envs have the attribute {name!r}: {error}{hint_at(name)}",
                name=name,
                obj=self,
            ) from error
        except ConcurrencyError as error:
            raise AttributeError(
                f"{self!r} has no {name!r} itself, and its envs cannot be asked now: {error}", name=name, obj=self
            ) from error
        callable_in = [index for index, each in enumerate(found) if each.is_callable]
        if len(callable_in) == len(found):
            return functools.partial(self._call_each, name)
        if callable_in:
            raise AttributeError(f"{name!r} is a method in some of the envs of {self!r} only, such as {callable_in[0]}")
        for each in found:
            if each.error is not None:
                return Withheld(each.error, len(found))
        return [each.value for each in found]

    def _call_each(self, name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every env with just these arguments."""
        values: list[Any] = self._run(self._env._call(name, args, kwargs))
        return values

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the batch itself.

        Raises:
            AttributeError: If the batch has none of this name, but the running envs have one, which it would hide.
        """
        if not name.startswith("_") and "_env" in self.__dict__ and self._would_hide(name):
            raise AttributeError(
                f"{name!r} is an attribute of the envs of {self!r}, which one of the batch would hide; "
                f"set_attr({name!r}, value) sets it in the envs",
                name=name,
                obj=self,
            )
        super().__setattr__(name, value)

    def _would_hide(self, name: str) -> bool:
        """Whether the envs have an attribute that the batch does not have."""
        if name in self.__dict__ or hasattr(type(self), name) or self._has_registered(name):
            return False
        if self._env._running_scope is None:
            return False
        try:
            self._run(self._env._look_up(name, withheld=True))
        except (AttributeError, AioEnvsError):
            return False
        return True

    def _has_registered(self, name: str) -> bool:
        """Whether it is a parameter, buffer or module of the batch itself."""
        return any(name in self.__dict__.get(kind, ()) for kind in REGISTERED)
