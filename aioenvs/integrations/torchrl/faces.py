"""The classes that stand in for TorchRL's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioenvs.batched import sync
from aioenvs.batched.aio import is_single, without_hosts
from aioenvs.errors import shown
from aioenvs.integrations.torchrl.batch import BatchedEnv
from aioenvs.integrations.torchrl.options import WORKERS
from aioenvs.keywords import signed_as

__all__ = ["ParallelEnv", "SerialEnv"]


class SerialEnv(BatchedEnv):
    """The same envs in this process, one after the other; differentiable where they are.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env; see `ParallelEnv`.
        **options: As for `ParallelEnv`; those about workers have no effect.

    >>> from torchrl.envs import GymEnv
    >>> with SerialEnv(2, lambda: GymEnv("CartPole-v1")) as env:
    ...     td = env.rand_step(env.reset())
    >>> td["next", "reward"].shape
    torch.Size([2, 1])
    """

    def __init__(self, num_workers: int, create_env_fn: Any, **options: Any) -> None:
        super().__init__(sync.SerialEnv, num_workers, create_env_fn, options)

    @classmethod
    def _translated(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        if options.get("mp_start_method") is not None:
            raise TypeError(
                f"Cannot use mp_start_method={shown(options['mp_start_method'], str)} with envs of type "
                f"{cls.__name__}, which are in this process"
            )
        if options.get("metadata_from_workers"):
            raise TypeError("metadata_from_workers=True is only supported by ParallelEnv.")
        return without_hosts(super()._translated(options))


class ParallelEnv(BatchedEnv):
    """Many envs in worker processes, or threads, as one env of TorchRL: the argument list is TorchRL's, and ours.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env: a callable that returns one of TorchRL's, or anything else that
            `aioenvs.ParallelEnv` takes; or a list with one for each env.
        serial_for_single: Make a `SerialEnv` instead if there is one env only.
        **options: As for `aioenvs.ParallelEnv` (`num_processes`, `backend`, `on_worker_death`, `step_timeout`, ...) and
            for TorchRL's (`create_env_kwargs`, `device`, `share_individual_td`, `use_buffers`, `mp_start_method`,
            `shutdown_timeout`, ...). Of the latter, `metadata_from_workers` starts the envs at once, so that what their
            start raises comes from here; specs come from the workers in any case, and no env is built in this
            process. `auto_wrap_envs`, `policy_proof`, `consolidate` and `daemon` are accepted and change nothing.

    >>> from torchrl.envs import GymEnv, StepCounter, TransformedEnv
    >>> env = TransformedEnv(ParallelEnv(4, lambda: GymEnv("CartPole-v1"), num_processes=2), StepCounter())
    >>> rollout = env.rollout(10, break_when_any_done=False)
    >>> env.close()
    >>> rollout.batch_size
    torch.Size([4, 10])
    """

    def __init__(
        self, num_workers: int, create_env_fn: Any, *, serial_for_single: bool = False, **options: Any
    ) -> None:
        super().__init__(sync.ParallelEnv, num_workers, create_env_fn, options)
        if options.get("metadata_from_workers"):
            self._look()

    @signed_as(__init__)
    def __new__(cls, *args: Any, serial_for_single: bool = False, **options: Any) -> Any:
        """Make one, or a `SerialEnv` with the options that it has a use for."""
        if serial_for_single and is_single(args, options):
            return SerialEnv(*args, **{name: value for name, value in options.items() if name not in WORKERS})
        return super().__new__(cls)

    @classmethod
    def make_parallel(cls, *args: Any, num_envs: int = 1, **options: Any) -> Any:
        """Make one of a factory and `num_envs`, or of the constructor's arguments."""
        if args and isinstance(args[0], int):
            return cls(*args, **options)
        return cls(num_envs, *args, **options)
