"""Vector environments by id, and what Gymnasium's own `make_vec` needs to make them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from aioenvs.errors import AioEnvsError, shown
from aioenvs.hints import OWN, hints_at_keywords, keywords_of, passed_on
from aioenvs.integrations.gymnasium.env import AioVectorEnv
from aioenvs.integrations.vectors.inside import make_wrapped
from aioenvs.registry import find_spec

FOR_ALL = "{given!r} was passed on to each env; for all of them together it is vector_kwargs={{{meant!r}: ...}}"


class _Maker:
    """The entry point that `gymnasium.make_vec` calls to make the envs of an id; `settings` are for `AioVectorEnv`."""

    def __init__(self, spec: EnvSpec, wrappers: Sequence[Callable[[Any], Any]], settings: Mapping[str, Any]) -> None:
        self._spec = spec
        self._wrappers = tuple(wrappers)
        self._settings = dict(settings)

    def __call__(self, num_envs: int = 1, **kwargs: Any) -> AioVectorEnv:
        make = functools.partial(make_wrapped, self._spec, self._wrappers, **kwargs)
        return AioVectorEnv(make, num_envs, **self._settings)


@hints_at_keywords
def vector_spec(
    id: str | EnvSpec,
    *,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
) -> EnvSpec:
    """A spec with which `gymnasium.make_vec(spec, num_envs)` makes an `AioVectorEnv`.

    Args:
        id: Of the single env, or its spec.
        vector_kwargs: Arguments of `AioVectorEnv`.
        wrappers: What to put around each env, from the innermost to the outermost.

    >>> envs = gymnasium.make_vec(vector_spec("CartPole-v1"), num_envs=2)
    >>> envs
    AioVectorEnv(CartPole-v1, num_envs=2)
    >>> envs.close()
    """
    spec = find_spec(id) if isinstance(id, str) else id
    maker: Any = _Maker(spec, wrappers, vector_kwargs or {})
    return replace(copy.deepcopy(spec), vector_entry_point=maker, additional_wrappers=())


@hints_at_keywords
def register(
    id: str | EnvSpec,
    *,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
) -> str:
    """Register an id, `aioenvs/` before the given one, which `gymnasium.make_vec` makes an `AioVectorEnv` of.

    Args:
        id: Of the single env, or its spec.
        vector_kwargs: Arguments of `AioVectorEnv`.
        wrappers: What to put around each env.

    Returns:
        The new id.
    """
    spec = vector_spec(id, vector_kwargs=vector_kwargs, wrappers=wrappers)
    new = f"aioenvs/{spec.id.rpartition('/')[2]}"
    gymnasium.registry[new] = replace(spec, id=new)
    return new


def make_vec(
    id: str | EnvSpec,
    num_envs: int = 1,
    *,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] | None = None,
    **kwargs: Any,
) -> AioVectorEnv:
    """Make an `AioVectorEnv` of an id, as `gymnasium.make_vec` makes its own.

    Args:
        id: Of the single env, or its spec.
        num_envs: How many.
        vector_kwargs: Arguments of `AioVectorEnv`.
        wrappers: What to put around each env, from the innermost to the outermost.
        **kwargs: Arguments of each env, for `gymnasium.make`.
    """
    spec = vector_spec(id, vector_kwargs=vector_kwargs, wrappers=wrappers or ())
    with passed_on(kwargs, keywords_of(AioVectorEnv.__init__), FOR_ALL), passed_on(kwargs, keywords_of(make_vec), OWN):
        envs: Any = gymnasium.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    if not isinstance(envs, AioVectorEnv):
        raise AioEnvsError(f"gymnasium.make_vec made {shown(envs)} of the spec {shown(spec)}")
    return envs
