"""The classes that stand in for TorchRL's, and the asynchronous faces with TorchRL's specs and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioenvs.envs.spec_properties import INPUTS, SpecIndex
from aioenvs.errors import shown
from aioenvs.faces import async_envs as aio
from aioenvs.faces import sync_envs as sync
from aioenvs.faces.async_envs import is_single, without_hosts
from aioenvs.faces.lifecycle import AsyncBatchedEnv
from aioenvs.hints import signed_as
from aioenvs.integrations.torchrl.batch import BatchedEnv
from aioenvs.integrations.torchrl.batch_specs import TorchRLSpecs
from aioenvs.integrations.torchrl.options import WORKERS, translated


def _their_spec(kind: str, doc: str, *, leaf: bool = False) -> Any:
    """Return the property for a kind of TorchRL's specs: the Composite, or a leaf where it has no other."""
    side = "input_spec" if kind in INPUTS else "output_spec"

    def read(self: Any) -> Any:
        spec = getattr(self, side)[f"full_{kind}_spec"]
        keys = list(spec.keys(True, True)) if leaf else ()
        return spec[keys[0]] if len(keys) == 1 else spec

    return property(read, doc=doc)


class _WithTheirSpecs(AsyncBatchedEnv):
    """Shows the specs of its envs as TorchRL has them; all else is as for `aioenvs.AsyncParallelEnv`."""

    _shown: tuple[Any, TorchRLSpecs] | None = None

    @property
    def _theirs(self) -> TorchRLSpecs:
        signature = self._signature  # says so if nothing is known yet
        if self._shown is None or self._shown[0] is not signature:
            scope = self._running_scope
            if scope is not None:
                self._shown = (signature, TorchRLSpecs.of(scope))
            elif self._shown is not None and signature.device is not None:
                self._shown = (signature, self._shown[1].to(signature.device))
        assert self._shown is not None
        return self._shown[1]

    def _remember(self, running: Any) -> None:
        super()._remember(running)
        if self._shown is None or self._shown[0] is not self._known_signature:
            self._shown = (self._known_signature, TorchRLSpecs.of(running.everything))

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

    observation_spec = full_observation_spec = _their_spec("observation", "The observations.")
    full_reward_spec = _their_spec("reward", "The rewards.")
    reward_spec = _their_spec("reward", "The reward: a leaf if there is one only, else the Composite.", leaf=True)
    full_done_spec = _their_spec("done", "The done flags.")
    done_spec = _their_spec("done", "The done flags: a leaf if there is one only, else the Composite.", leaf=True)
    full_action_spec = _their_spec("action", "The actions.")
    action_spec = _their_spec("action", "The action: a leaf if there is one only, else the Composite.", leaf=True)
    state_spec = full_state_spec = _their_spec("state", "The inputs that are no actions.")


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


class SerialEnv(BatchedEnv):
    """Many envs in this process, one after the other; differentiable where they are.

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
