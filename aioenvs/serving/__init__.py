"""Envs as sessions: to embed in a server of one's own, to run as one, and to step from elsewhere."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioenvs.serving.app import create_app
    from aioenvs.serving.remote import RemoteEnv, ServerError
    from aioenvs.serving.sessions import (
        CapacityError,
        EnvFailedError,
        Session,
        SessionEndedError,
        SessionLostError,
        Sessions,
    )

__all__ = [
    "CapacityError",
    "EnvFailedError",
    "RemoteEnv",
    "ServerError",
    "Session",
    "SessionEndedError",
    "SessionLostError",
    "Sessions",
    "create_app",
]

_HOMES = {
    **dict.fromkeys(__all__, "aioenvs.serving.sessions"),
    "RemoteEnv": "aioenvs.serving.remote",
    "ServerError": "aioenvs.serving.remote",
    "create_app": "aioenvs.serving.app",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'aioenvs.serving' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
