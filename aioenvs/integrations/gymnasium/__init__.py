"""Gymnasium's vector environments on the engine of aioenvs, for code that is written for Gymnasium's own.

    envs = gymnasium.vector.AsyncVectorEnv([make_env] * 32)      # or SyncVectorEnv
    envs = aioenvs.integrations.gymnasium.AioVectorEnv([make_env] * 32)

Neither this process nor a worker imports torch for it.
"""

from aioenvs.integrations import explained

try:
    from aioenvs.integrations.gymnasium.env import (
        AioVectorEnv,
        CallTimeoutError,
        PendingCallError,
        VectorClosedError,
        make_vec,
        register,
        vector_spec,
    )
except ModuleNotFoundError as error:
    raise explained(error, "gym") from error

__all__ = [
    "AioVectorEnv",
    "CallTimeoutError",
    "PendingCallError",
    "VectorClosedError",
    "make_vec",
    "register",
    "vector_spec",
]
