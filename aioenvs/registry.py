"""Gymnasium ids, looked up where the user may have registered them: in this process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from aioenvs.errors import shown

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

__all__ = ["find_spec"]


def find_spec(env_id: str) -> EnvSpec:
    """Find what is registered under an id, so that a worker need not know it.

    Args:
        env_id: As `gymnasium.make` takes it: `name-vN`, `namespace/name-vN`, without the version for the latest, or
            with `module:` in front, which is imported first.

    Raises:
        ImportError: If Gymnasium or the module cannot be imported.
        gymnasium.error.Error: If the id is malformed or not registered; the message suggests what may be meant.
    """
    try:
        import gymnasium
        from gymnasium.envs import registration
    except ImportError as error:
        raise ImportError(
            f"the id {shown(env_id)} needs Gymnasium, which cannot be imported ({error}); "
            "to install it: pip install 'aioenvs[gym]'",
            name="gymnasium",
        ) from error
    module, colon, name = env_id.rpartition(":")
    if colon:
        _import(module)
    namespace, base, version = registration.parse_env_id(name)
    if version is None:
        version = registration.find_highest_version(namespace, base)
    try:
        return gymnasium.spec(registration.get_env_id(namespace, base, version))
    except gymnasium.error.NamespaceNotFound as error:
        error.add_note(f"To import the package that registers it, write package:{name}")
        raise


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # importing a module may raise anything
        raise ImportError(f"cannot import {module!r}: {type(error).__name__}: {error}", name=module) from error
