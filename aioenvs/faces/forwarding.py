"""Methods, attributes and states of envs, asked for by plain calls."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from aioenvs.engine.adapters.copying import Withheld
from aioenvs.engine.portal import blocking, delegated, documented_by
from aioenvs.envs.base import EnvBase
from aioenvs.errors import AioEnvsError, ConcurrencyError, NotRunningError, WorkerStartError
from aioenvs.faces.calls import AsyncCalls
from aioenvs.faces.commands import AsyncEnvs
from aioenvs.hints import hint_at, not_for_transforms

__all__ = ["Forwarding", "looked_up", "started_for_attribute"]

REGISTERED = ("_parameters", "_buffers", "_modules")  # where a torch.nn.Module has attributes besides its __dict__


class Forwarding(EnvBase):
    """Forwards what it does not have itself to the envs of a batch."""

    _env: AsyncEnvs
    _inplace_update = not_for_transforms

    @abstractmethod
    def _run(self, coroutine: Any) -> Any:
        """Run a coroutine to its end."""

    @property
    def _twin(self) -> AsyncEnvs:
        """The coroutines that the plain calls run."""
        return self._env

    call = blocking(AsyncCalls.call)
    get_attr = blocking(AsyncCalls.get_attr)
    set_attr = blocking(AsyncCalls.set_attr)
    statistics = delegated(AsyncCalls.statistics)
    render = blocking(AsyncCalls.render)
    load_state_dict = blocking(AsyncCalls.load_state_dict)

    @documented_by(AsyncCalls.state_dict)
    def state_dict(  # type: ignore[override]
        self, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> OrderedDict[str, Any]:
        states: OrderedDict[str, Any] = self._run(self._env.state_dict(timeout=timeout))
        return states

    def __getattr__(self, name: str) -> Any:
        """Return the envs' attribute of this name: a list of values, or a method that calls theirs.

        Values that cannot leave their env (locks, generators, ...) are there, for `hasattr`, but any use of the list
        raises `TypeError`.

        Raises:
            AttributeError: If one of them has no such attribute.
            NotRunningError: If they are not running, which is an AttributeError as well.
        """
        if name.startswith("_") or "_env" not in self.__dict__ or self._has_registered(name):
            return super().__getattr__(name)
        found = looked_up(self, name)
        if found is None:
            return functools.partial(self._call_each, name)
        return found

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
        """Whether a value is a parameter, buffer or module of the batch itself."""
        return any(name in self.__dict__.get(kind, ()) for kind in REGISTERED)


def looked_up(face: Forwarding, path: str) -> Sequence[Any] | None:
    """The values that the envs of a face have at the end of a path of names, such as `gauge.level`; None for a method.

    Raises:
        AttributeError: If one of them has no such attribute, or cannot be asked now.
        NotRunningError: If they are not running.
    """
    if face._env._running_scope is None:
        raise NotRunningError(
            f"Trying to access attributes of closed/non started environments: {face!r} has no {path!r} itself; "
            f"start() comes first{hint_at(path)}",
            name=path,
            obj=face,
        )
    try:
        found = face._run(face._env._look_up(path, withheld=True))
    except AttributeError as error:
        raise AttributeError(
            f"attribute {path} not found in {face!r} or its envs: {error}{hint_at(path)}",
            name=path,
            obj=face,
        ) from error
    except ConcurrencyError as error:
        raise AttributeError(
            f"{face!r} has no {path!r} itself, and its envs cannot be asked now: {error}", name=path, obj=face
        ) from error
    callable_in = [index for index, each in enumerate(found) if each.is_callable]
    if len(callable_in) == len(found):
        return None
    if callable_in:
        raise AttributeError(f"{path!r} is a method in some of the envs of {face!r} only, such as {callable_in[0]}")
    for each in found:
        if each.error is not None:
            return Withheld(each.error, len(found))
    return [each.value for each in found]


def started_for_attribute(start: Callable[[], object]) -> None:
    """Start envs because of an attribute that depends on them.

    Raises:
        WorkerStartError: If they do not start; never one that would pass for the lack of the attribute.
    """
    try:
        start()
    except WorkerStartError as error:
        if isinstance(error, AttributeError):
            raise error.alone() from error.__cause__
        raise
