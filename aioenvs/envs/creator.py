"""A function that makes envs, with its arguments, as one object that travels between processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Self

import cloudpickle

from aioenvs.errors import shown


class EnvCreator:
    """Makes an env when it is called; lambdas and local functions travel in it to other processes.

    No env is made before. (In TorchRL one is, to learn its specs and state: `share_memory` and `meta_data` have no
    place here.)

    Args:
        create_env_fn: Makes an env from keyword arguments.
        create_env_kwargs: Keyword arguments for it.
        **kwargs: More of them; those in `create_env_kwargs` prevail.

    Raises:
        TypeError: `create_env_fn` is no function, or is an env.

    >>> creator = EnvCreator(dict, size=3)
    >>> creator(color="red")
    {'size': 3, 'color': 'red'}
    >>> creator.make_variant(size=4)
    EnvCreator(dict, size=4)
    """

    def __init__(
        self,
        create_env_fn: Callable[..., Any],
        create_env_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if _is_env(create_env_fn):
            raise TypeError(
                f"expected a function that makes an env, found the env {shown(create_env_fn)}; "
                "pass a function that makes it, such as lambda: MyEnv()"
            )
        if not callable(create_env_fn):
            raise TypeError(f"expected a function that makes an env, found {shown(create_env_fn)}")
        if create_env_kwargs is not None and not isinstance(create_env_kwargs, Mapping):
            raise TypeError(f"expected a mapping as create_env_kwargs, found {shown(create_env_kwargs)}")
        if "share_memory" in kwargs:
            raise TypeError(
                "EnvCreator takes no share_memory: it makes no env whose memory could be shared; leave it out"
            )
        self.create_env_fn = create_env_fn
        self.create_env_kwargs = {**kwargs, **(create_env_kwargs or {})}

    def __call__(self, **kwargs: Any) -> Any:
        """Make an env.

        Args:
            **kwargs: Used for this env only; they prevail over those that are stored.
        """
        return self.create_env_fn(**{**self.create_env_kwargs, **kwargs})

    def make_variant(self, **kwargs: Any) -> Self:
        """Return a creator with some keyword arguments changed or added; this one stays as it is."""
        return type(self)(self.create_env_fn, {**self.create_env_kwargs, **kwargs})

    # A batch pickles what is in it for its workers together with the rest, so that what is shared stays shared.
    _pickles_apart = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (cloudpickle.dumps((type(self), self.create_env_fn, self.create_env_kwargs)),)

    def __repr__(self) -> str:
        name = getattr(self.create_env_fn, "__qualname__", None) or shown(self.create_env_fn)
        arguments = (f"{key}={shown(value)}" for key, value in self.create_env_kwargs.items())
        return f"{type(self).__name__}({', '.join([name, *arguments])})"


def _is_env(value: Any) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("reset", "step"))


def _rebuild(data: bytes) -> EnvCreator:
    cls, create_env_fn, create_env_kwargs = pickle.loads(data)
    creator: EnvCreator = cls(create_env_fn, create_env_kwargs)
    return creator
