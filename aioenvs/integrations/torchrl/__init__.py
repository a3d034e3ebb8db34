"""Batches of envs for TorchRL: its `EnvBase` in front, this library's workers behind.

    from aioenvs.integrations.torchrl import ParallelEnv  # in place of torchrl.envs.ParallelEnv

It needs the extra `torchrl`.
"""

from __future__ import annotations

from aioenvs.integrations import explained

try:
    from aioenvs.integrations.torchrl.envs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
    from aioenvs.integrations.torchrl.specs import from_torchrl, to_torchrl
except ModuleNotFoundError as error:
    raise explained(error, "torchrl") from error

__all__ = ["AsyncParallelEnv", "AsyncSerialEnv", "ParallelEnv", "SerialEnv", "from_torchrl", "to_torchrl"]
