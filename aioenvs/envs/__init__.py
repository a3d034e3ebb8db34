"""Single envs: torch-native ones, Gymnasium's as TensorDict envs, and what goes with them.

Names are loaded when they are first used; Gymnasium only by what wraps its envs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioenvs.envs.base import EnvBase
    from aioenvs.envs.check import check_async_env_specs, check_env_specs
    from aioenvs.envs.creator import EnvCreator
    from aioenvs.envs.gym import GymEnv, GymWrapper
    from aioenvs.envs.info import default_info_dict_reader
    from aioenvs.envs.pettingzoo import MarlGroupMapType, PettingZooEnv, PettingZooWrapper, check_marl_grouping
    from aioenvs.envs.spec_properties import Described
    from aioenvs.specs import make_composite_from_td
    from aioenvs.tensors.step_mdp import step_mdp

__all__ = [
    "Described",
    "EnvBase",
    "EnvCreator",
    "GymEnv",
    "GymWrapper",
    "MarlGroupMapType",
    "PettingZooEnv",
    "PettingZooWrapper",
    "check_async_env_specs",
    "check_env_specs",
    "check_marl_grouping",
    "default_info_dict_reader",
    "make_composite_from_td",
    "step_mdp",
]

_HOMES = {
    "Described": "aioenvs.envs.spec_properties",
    "EnvBase": "aioenvs.envs.base",
    "EnvCreator": "aioenvs.envs.creator",
    "GymEnv": "aioenvs.envs.gym",
    "GymWrapper": "aioenvs.envs.gym",
    "MarlGroupMapType": "aioenvs.envs.pettingzoo",
    "PettingZooEnv": "aioenvs.envs.pettingzoo",
    "PettingZooWrapper": "aioenvs.envs.pettingzoo",
    "check_async_env_specs": "aioenvs.envs.check",
    "check_env_specs": "aioenvs.envs.check",
    "check_marl_grouping": "aioenvs.envs.pettingzoo",
    "default_info_dict_reader": "aioenvs.envs.info",
    "make_composite_from_td": "aioenvs.specs",
    "step_mdp": "aioenvs.tensors.step_mdp",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aioenvs.envs' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
