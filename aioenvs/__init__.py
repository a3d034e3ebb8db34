"""Steps many reinforcement-learning environments at once from one asyncio event loop.

Names are loaded when they are first used, so that a worker which needs only the engine never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioenvs import envs, errors, specs, testing
    from aioenvs.anything import Anything
    from aioenvs.collectors.collector import AsyncCollector, Collector
    from aioenvs.envs.base import EnvBase
    from aioenvs.envs.check import check_env_specs
    from aioenvs.envs.creator import EnvCreator
    from aioenvs.envs.gym import GymEnv, GymWrapper
    from aioenvs.envs.info import default_info_dict_reader
    from aioenvs.envs.pettingzoo import MarlGroupMapType, PettingZooEnv, PettingZooWrapper, check_marl_grouping
    from aioenvs.faces.async_envs import AsyncParallelEnv, AsyncSerialEnv
    from aioenvs.faces.sync_envs import ParallelEnv, SerialEnv
    from aioenvs.specs.inferred import make_composite_from_td
    from aioenvs.tensors.step_mdp import step_mdp

__version__ = "0.1.0"

__all__ = [
    "Anything",
    "AsyncCollector",
    "AsyncParallelEnv",
    "AsyncSerialEnv",
    "Collector",
    "EnvBase",
    "EnvCreator",
    "GymEnv",
    "GymWrapper",
    "MarlGroupMapType",
    "ParallelEnv",
    "PettingZooEnv",
    "PettingZooWrapper",
    "SerialEnv",
    "__version__",
    "check_env_specs",
    "check_marl_grouping",
    "default_info_dict_reader",
    "envs",
    "errors",
    "make_composite_from_td",
    "specs",
    "step_mdp",
    "testing",
]

_HOMES = {
    "Anything": "aioenvs.anything",
    "AsyncCollector": "aioenvs.collectors.collector",
    "AsyncParallelEnv": "aioenvs.faces.async_envs",
    "AsyncSerialEnv": "aioenvs.faces.async_envs",
    "Collector": "aioenvs.collectors.collector",
    "EnvBase": "aioenvs.envs.base",
    "EnvCreator": "aioenvs.envs.creator",
    "GymEnv": "aioenvs.envs.gym",
    "GymWrapper": "aioenvs.envs.gym",
    "MarlGroupMapType": "aioenvs.envs.pettingzoo",
    "ParallelEnv": "aioenvs.faces.sync_envs",
    "PettingZooEnv": "aioenvs.envs.pettingzoo",
    "PettingZooWrapper": "aioenvs.envs.pettingzoo",
    "SerialEnv": "aioenvs.faces.sync_envs",
    "check_env_specs": "aioenvs.envs.check",
    "check_marl_grouping": "aioenvs.envs.pettingzoo",
    "default_info_dict_reader": "aioenvs.envs.info",
    "make_composite_from_td": "aioenvs.specs.inferred",
    "step_mdp": "aioenvs.tensors.step_mdp",
}
_MODULES = ("envs", "errors", "specs", "testing")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"aioenvs.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'aioenvs' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def home_of(name: str) -> str:
    """The module that a public name comes from; this one, if there is no such name."""
    return _HOMES.get(name, __name__)


def __dir__() -> list[str]:
    return sorted(__all__)
