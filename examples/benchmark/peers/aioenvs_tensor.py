"""The env on tensors, on the classes of aioenvs; in a module of its own, which imports torch."""

from typing import Any

from tensor_env import counting_env

import aioenvs

__all__ = ["make_tensor_env"]


def make_tensor_env() -> Any:
    """Make one env."""
    return counting_env(aioenvs.EnvBase, aioenvs.specs)
