"""The adapter for envs whose `reset` and `step` are coroutine functions. Any event loop can run what it makes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aioenvs.engine.adapters import PLAIN_RULES, Attribute, Call, GymRules, ResetArguments
from aioenvs.engine.copying import received
from aioenvs.engine.gym_adapter import METHODS, GymRows
from aioenvs.errors import SpecMismatchError, shown

__all__ = ["CoroutineAdapter", "has_coroutines", "refuse_coroutines"]


class CoroutineAdapter(GymRows):
    """Drives an env with Gymnasium's signatures whose methods may be coroutine functions, all or some of them.

    Others run while it waits, so it leaves the process's random generators alone. Where a command is cancelled at one
    of its awaits, the env needs a reset, as after any exception.

    Args:
        env: The env.
        env_index: Its index.
        rules: What is agreed about it.
    """

    def __init__(self, env: Any, env_index: int, *, rules: GymRules = PLAIN_RULES) -> None:
        super().__init__(env, env_index, rules=rules)
        self.metadata = replace(self.metadata, has_coroutines=True)

    async def reset(self, arguments: ResetArguments) -> None:
        self._after_reset(await self._begin(received(dict(arguments.kwargs))))

    async def _begin(self, kwargs: Mapping[str, Any]) -> Any:
        """What the env's own reset returns."""
        return await _outcome(self.env.reset(**self._before_reset(kwargs)))

    async def step(self, maybe_reset: bool) -> bool:
        if self._resets_now:
            self._after_renewal(await self._begin({}))
            return False
        result = self.env.step(self._before_step())
        if inspect.isawaitable(result):
            result = await result
        done = self._after_step(result)
        if done and maybe_reset:
            self._after_reset(await self._begin({}))
        return done

    async def perform(self, call: Call) -> Any:
        kind, found = self._find(call)
        if kind == "call":
            return await _outcome(found(*call.args, **call.kwargs))
        if kind == "get":
            return Attribute(True) if callable(found) else Attribute(False, await _outcome(found))
        await _outcome(self._set(call.name, *call.args))
        return None

    async def close(self) -> None:
        if hasattr(self.env, "close"):
            await _outcome(self.env.close())


async def _outcome(result: Any) -> Any:
    """What comes of a method that may be a coroutine function."""
    return await result if inspect.isawaitable(result) else result


def has_coroutines(env: Any) -> bool:
    """Whether the `reset` or `step` of an env is a coroutine function."""
    return any(_is_coroutine(env, name) for name in METHODS)


def refuse_coroutines(env: Any, env_index: int) -> None:
    """Refuse coroutine functions in an env that deals in TensorDicts.

    Raises:
        SpecMismatchError: If it has one.
    """
    for name in (*METHODS, "_reset", "_step"):
        if _is_coroutine(env, name):
            raise SpecMismatchError(
                f"{name} of env {env_index} ({shown(env)}), which deals in TensorDicts, is a coroutine function; "
                "those are for envs with Gymnasium's signatures and spaces"
            )


def _is_coroutine(env: Any, name: str) -> bool:
    method = getattr(env, name, None)
    return inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(type(method).__call__)
