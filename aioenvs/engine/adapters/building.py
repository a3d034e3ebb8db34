"""From a factory to an env behind its adapter."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from aioenvs.engine.adapters.agents import has_agents, refuse_turns
from aioenvs.engine.adapters.base import EnvAdapter, Handling
from aioenvs.engine.adapters.gymnasium import CoroutineAdapter, GymAdapter, has_coroutines, refuse_coroutines
from aioenvs.engine.adapters.pettingzoo import PettingZooAdapter
from aioenvs.engine.adapters.vector import VectorAdapter, is_vector_env
from aioenvs.errors import SpecMismatchError, describe_envs, shown

__all__ = ["adapt", "build", "refuse_shared"]


def build(factory: Any, kwargs: Mapping[str, Any], env_index: int, handling: Handling) -> EnvAdapter:
    """Call a factory, or make a registered Gymnasium env, and adapt what comes out.

    Args:
        factory: A callable, or what `gymnasium.make` takes.
        kwargs: Its keyword arguments.
        env_index: The env's index, for messages.
        handling: How it is driven.

    Raises:
        Exception: Whatever the factory raises.
        TypeError: If it returns something that is not an env.
    """
    if callable(factory):
        return adapt(factory(**kwargs), env_index, handling)
    import gymnasium

    return adapt(gymnasium.make(factory, **kwargs), env_index, handling)


def refuse_shared(cores: Iterable[tuple[int, Any]]) -> None:
    """Refuse envs of one process that are one object, since each row of a batch needs an env of its own.

    Args:
        cores: The index of each env, and its core; see `EnvAdapter`.

    Raises:
        ValueError: If two have the same; the message names all that have.
    """
    sharing: dict[int, tuple[Any, list[int]]] = {}
    for env, core in cores:
        if core is not None:
            sharing.setdefault(id(core), (core, []))[1].append(env)
    for core, envs in sharing.values():
        if len(envs) > 1:
            raise ValueError(
                "You tried to create multiple environments, but the function to create them returned the same instance "
                f"instead of creating different objects: {describe_envs(envs)} are one and the same instance of "
                f"{type(core).__name__}; a factory must make another env each time it is called, as `lambda: make()` "
                "does, and `lambda: env` does not"
            )


def adapt(env: Any, env_index: int, handling: Handling) -> EnvAdapter:
    """Find the adapter for what a factory returned; the one for tensors is loaded by name, where torch is allowed.

    Raises:
        TypeError: If there is none; the message says what was found.
    """
    if isinstance(env, type) or not callable(getattr(env, "reset", None)) or not callable(getattr(env, "step", None)):
        found = f"the class {env.__name__}" if isinstance(env, type) else shown(env)
        raise TypeError(
            f"the factory of env {env_index} returned {found}; it must return an env, with methods reset and step"
            f"{', and so cannot be an `async def`' if inspect.iscoroutine(env) else ''}"
        )
    if hasattr(env, "output_spec") and hasattr(env, "input_spec"):
        refuse_coroutines(env, env_index)
        adapter: EnvAdapter = importlib.import_module("aioenvs.envs.unwrapping").adapted(env, env_index, handling)
        return adapter
    if is_vector_env(env):
        return VectorAdapter(env, env_index, generators=handling.generators, rules=handling.rules)
    if has_agents(env):
        refuse_turns(env, f"env {env_index}")
        if has_coroutines(env):
            raise SpecMismatchError(
                f"env {env_index} ({shown(env, str)}) has PettingZoo's signatures and coroutine functions; "
                "those are for envs with Gymnasium's signatures"
            )
        return PettingZooAdapter(env, env_index, generators=handling.generators)
    if has_coroutines(env):
        return CoroutineAdapter(env, env_index, rules=handling.rules)
    return GymAdapter(env, env_index, generators=handling.generators, rules=handling.rules)
