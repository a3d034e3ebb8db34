"""Functions on single envs where they live. Workers import this module, so it is light."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Description", "ask", "assign", "describe", "is_wrapped", "make_wrapped"]


class Description(NamedTuple):
    """The description of an env for its batch."""

    observation_space: Any
    action_space: Any
    metadata: Mapping[str, Any]
    render_mode: str | None


def make_wrapped(spec: Any, wrappers: Sequence[Callable[[Any], Any]], **kwargs: Any) -> Any:
    """Make a registered Gymnasium env, with wrappers around it.

    Args:
        spec: What `gymnasium.make` takes.
        wrappers: From the innermost to the outermost.
        **kwargs: For `gymnasium.make`.
    """
    import gymnasium

    env = gymnasium.make(spec, **kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def describe(env: Any) -> Description:
    """Return the description of the env, or of one of those that a vector env consists of."""
    metadata, mode = getattr(env, "metadata", None), getattr(env, "render_mode", None)
    observation, action = (
        getattr(env, f"single_{kind}_space", None) or getattr(env, f"{kind}_space")
        for kind in ("observation", "action")
    )
    return Description(observation, action, dict(metadata or {}), mode)


def ask(env: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the result of calling an attribute if that is possible, else its value.

    Raises:
        AttributeError: If neither the env nor one that it wraps has it.
    """
    found = env.get_wrapper_attr(name) if hasattr(env, "get_wrapper_attr") else getattr(env, name)
    return found(*args, **kwargs) if callable(found) else found


def assign(env: Any, name: str, value: Any) -> None:
    """Set an attribute of the outermost wrapper that has it; of the outermost one, if none has."""
    if hasattr(env, "set_wrapper_attr"):
        env.set_wrapper_attr(name, value)
    else:
        setattr(env, name, value)


def is_wrapped(env: Any, module: str, name: str) -> bool:
    """Whether there is a wrapper of a class, or of one derived from it, around the env.

    Args:
        env: The env.
        module: Where the class was defined, so that it need not be imported here.
        name: Its qualified name.
    """
    while env is not None:
        if any((cls.__module__, cls.__qualname__) == (module, name) for cls in type(env).__mro__):
            return True
        env = getattr(env, "__dict__", {}).get("env")
    return False
