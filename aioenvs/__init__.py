"""Steps many reinforcement-learning environments at once from one asyncio event loop.

Names are loaded when they are first used, so that a worker which needs only the engine never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioenvs import errors, specs
    from aioenvs.batched.aio import AsyncParallelEnv, AsyncSerialEnv
    from aioenvs.batched.sync import ParallelEnv, SerialEnv
    from aioenvs.mdp import step_mdp

__version__ = "0.1.0"

__all__ = [
    "AsyncParallelEnv",
    "AsyncSerialEnv",
    "ParallelEnv",
    "SerialEnv",
    "__version__",
    "errors",
    "specs",
    "step_mdp",
]

_HOMES = {
    "AsyncParallelEnv": "aioenvs.batched.aio",
    "AsyncSerialEnv": "aioenvs.batched.aio",
    "ParallelEnv": "aioenvs.batched.sync",
    "SerialEnv": "aioenvs.batched.sync",
    "step_mdp": "aioenvs.mdp",
}
_MODULES = ("errors", "specs")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"aioenvs.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'aioenvs' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
