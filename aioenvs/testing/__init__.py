"""Small envs for the tests of whatever runs envs, and `check_env_specs` for the envs themselves.

They are written as any env class is, on `aioenvs.EnvBase` and `aioenvs.specs` alone, and are examples of that too.
"""

from __future__ import annotations

from aioenvs.envs import check_env_specs
from aioenvs.testing.counting import (
    CountingEnv,
    DyingEnv,
    FailingEnv,
    ParameterEnv,
    PrintingEnv,
    SlowEnv,
    StateEnv,
    UnlockedStateEnv,
)
from aioenvs.testing.nested import HeterogeneousCountingEnv, MultiKeyCountingEnv, NestedCountingEnv
from aioenvs.testing.payloads import DifferentiableEnv, DynamicShapeEnv, NonTensorEnv, RandomEnv

__all__ = [
    "CountingEnv",
    "DifferentiableEnv",
    "DyingEnv",
    "DynamicShapeEnv",
    "FailingEnv",
    "HeterogeneousCountingEnv",
    "MultiKeyCountingEnv",
    "NestedCountingEnv",
    "NonTensorEnv",
    "ParameterEnv",
    "PrintingEnv",
    "RandomEnv",
    "SlowEnv",
    "StateEnv",
    "UnlockedStateEnv",
    "check_env_specs",
]
