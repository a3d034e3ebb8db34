"""The asynchronous faces with TorchRL's specs and options."""

from __future__ import annotations

from typing import Any

from aioenvs.batched import aio
from aioenvs.batched.aio import is_single, without_hosts
from aioenvs.batched.owner import AsyncBatchedEnv
from aioenvs.envs.spec_index import SpecIndex
from aioenvs.integrations.torchrl.known import Known
from aioenvs.integrations.torchrl.options import WORKERS, translated
from aioenvs.keywords import signed_as

__all__ = ["AsyncParallelEnv", "AsyncSerialEnv"]


class _WithTheirSpecs(AsyncBatchedEnv):
    """Shows the specs of its envs as TorchRL has them; all else is as for `aioenvs.AsyncParallelEnv`."""

    _shown: tuple[Any, Known] | None = None

    @property
    def _theirs(self) -> Known:
        signature = self._signature  # says so if nothing is known yet
        if self._shown is None or self._shown[0] is not signature:
            scope = self._running_scope
            if scope is not None:
                self._shown = (signature, Known.of(scope))
            elif self._shown is not None and signature.device is not None:
                self._shown = (signature, self._shown[1].to(signature.device))
        assert self._shown is not None
        return self._shown[1]

    def _remember(self, running: Any) -> None:
        super()._remember(running)
        if self._shown is None or self._shown[0] is not self._known_signature:
            self._shown = (self._known_signature, Known.of(running.everything))

    @property
    def _index(self) -> SpecIndex:
        signature = self._signature
        known: SpecIndex | None = self.__dict__.get("_known_index")
        if known is None or known.output_spec is not signature.output_spec:
            known = self.__dict__["_known_index"] = SpecIndex(signature.output_spec, signature.input_spec)
        return known

    @property
    def output_spec(self) -> Any:
        """`full_observation_spec`, `full_reward_spec` and `full_done_spec`, TorchRL's."""
        return self._theirs.output_spec

    @property
    def input_spec(self) -> Any:
        """`full_action_spec` and `full_state_spec`, TorchRL's."""
        return self._theirs.input_spec

    @property
    def full_observation_spec(self) -> Any:
        """The observations."""
        return self.output_spec["full_observation_spec"]

    @property
    def full_reward_spec(self) -> Any:
        """The rewards."""
        return self.output_spec["full_reward_spec"]

    @property
    def full_done_spec(self) -> Any:
        """The done flags."""
        return self.output_spec["full_done_spec"]

    @property
    def full_action_spec(self) -> Any:
        """The actions."""
        return self.input_spec["full_action_spec"]

    @property
    def full_state_spec(self) -> Any:
        """The inputs that are no actions."""
        return self.input_spec["full_state_spec"]

    @property
    def observation_spec(self) -> Any:
        """The observations."""
        return self.full_observation_spec

    @property
    def state_spec(self) -> Any:
        """The inputs that are no actions."""
        return self.full_state_spec

    @property
    def done_spec(self) -> Any:
        """The done flags: a leaf if there is one only, else the Composite."""
        return _leaf(self.full_done_spec)

    @property
    def reward_spec(self) -> Any:
        """The reward: a leaf if there is one only, else the Composite."""
        return _leaf(self.full_reward_spec)

    @property
    def action_spec(self) -> Any:
        """The action: a leaf if there is one only, else the Composite."""
        return _leaf(self.full_action_spec)


def _leaf(spec: Any) -> Any:
    keys = list(spec.keys(True, True))
    return spec[keys[0]] if len(keys) == 1 else spec


class AsyncParallelEnv(_WithTheirSpecs, aio.AsyncParallelEnv):
    """`aioenvs.AsyncParallelEnv` with TorchRL's specs and the options of TorchRL's `ParallelEnv`.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env; see `ParallelEnv`.
        serial_for_single: Make an `AsyncSerialEnv` instead if there is one env only.
        **options: As for `ParallelEnv`.

    >>> import asyncio
    >>> from torchrl.envs import GymEnv
    >>> async def main():
    ...     async with AsyncParallelEnv(4, lambda: GymEnv("CartPole-v1"), num_processes=2) as env:
    ...         td = await env.reset()
    ...         td, following = await env.step_and_maybe_reset(td.update(env.full_action_spec.rand()))
    ...         return type(env.action_spec).__name__, following["observation"].shape
    >>> asyncio.run(main())
    ('OneHot', torch.Size([4, 4]))
    """

    def __init__(
        self, num_workers: int, create_env_fn: Any, *, serial_for_single: bool = False, **options: Any
    ) -> None:
        super().__init__(num_workers, create_env_fn, **translated(options))

    @signed_as(__init__)
    def __new__(cls, *args: Any, serial_for_single: bool = False, **options: Any) -> Any:
        """Make one, or an `AsyncSerialEnv` with the options that it has a use for."""
        if serial_for_single and is_single(args, options):
            return AsyncSerialEnv(*args, **{name: value for name, value in options.items() if name not in WORKERS})
        return super().__new__(cls)


class AsyncSerialEnv(_WithTheirSpecs, aio.AsyncSerialEnv):
    """`aioenvs.AsyncSerialEnv` with TorchRL's specs and options.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env; see `ParallelEnv`.
        **options: As for `SerialEnv`.
    """

    def __init__(self, num_workers: int, create_env_fn: Any, **options: Any) -> None:
        super().__init__(num_workers, create_env_fn, **without_hosts(translated(options)))
