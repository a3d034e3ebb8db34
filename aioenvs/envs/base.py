"""The torch-native env: its author writes `_reset`, `_step` and `_set_seed`, and sets the specs."""

from __future__ import annotations

import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch
from tensordict import TensorDictBase

from aioenvs.engine.worker.random_streams import seed_chain
from aioenvs.envs.check import check_env_specs
from aioenvs.envs.spec_properties import INPUTS, OUTPUTS
from aioenvs.envs.stepping import Transitions
from aioenvs.errors import ClosedError, shown
from aioenvs.hints import hint_at, hints_at_keywords
from aioenvs.specs import Composite
from aioenvs.specs.base import as_device
from aioenvs.tensors.rollout import RolloutOptions, RolloutSteps, drive, rollout

Env = TypeVar("Env", bound="EnvBase")


class _EnvMeta(ABCMeta):
    """Completes and locks an env's specs when the last of its constructors is through."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor of the class, for those who ask for the signature of the class."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty)

    def __call__(  # type: ignore[misc]  # the classes are those of envs
        cls: type[Env], *args: Any, spec_locked: bool | None = None, auto_reset: bool = False, **kwargs: Any
    ) -> Env:
        if auto_reset:
            raise _no_auto_reset(cls)
        env: Env = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if spec_locked is not None:
            env.__dict__["_locks_specs"] = spec_locked
        env._set_up()
        return env


def _no_auto_reset(cls: type) -> NotImplementedError:
    return NotImplementedError(
        f"{cls.__name__}: auto_reset=True is for envs that reset themselves within a step, which are not supported; "
        "let the env report done, and its _reset begin the next episode"
    )


class EnvBase(Transitions, torch.nn.Module, metaclass=_EnvMeta):
    """An env on tensors, of any batch size.

    A subclass sets `observation_spec`, `action_spec`, `reward_spec` and, where they are not the default, `done_spec`
    and `state_spec`, and writes `_reset`, `_step` and `_set_seed`. Everything is differentiable if they are.

    `_reset(tensordict, **kwargs)` returns a new TensorDict with the observations; `tensordict` may be None, and may
    have a mask `_reset` of what is to be reset. `_step(tensordict)` gets the actions and returns a TensorDict with
    observations, rewards and done flags; of `done` and `terminated` one may be left out, or both if nothing ends.

    Args:
        device: Where results go; None if the specs may be on different devices.
        batch_size: The leading shape of all specs.
        run_type_checks: Whether to check the dtypes of what `_reset` and `_step` return.
        allow_done_after_reset: Whether an episode may be over when it begins.
        spec_locked: Whether the specs are locked after construction, so that they can be set but not changed.
        auto_reset: Must be False.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from aioenvs.specs import Bounded, Composite, Unbounded
    >>> class Walk(EnvBase):
    ...     def __init__(self):
    ...         super().__init__(batch_size=[2])
    ...         self.observation_spec = Composite(position=Unbounded((2, 1)), shape=[2])
    ...         self.action_spec = Bounded(-1, 1, shape=(2, 1))
    ...         self.reward_spec = Unbounded((2, 1))
    ...     def _reset(self, tensordict):
    ...         return TensorDict(position=torch.zeros(2, 1), batch_size=[2])
    ...     def _step(self, tensordict):
    ...         position = tensordict["position"] + tensordict["action"]
    ...         return TensorDict(position=position, reward=-position.abs(), done=position > 3, batch_size=[2])
    ...     def _set_seed(self, seed):
    ...         torch.manual_seed(seed)
    >>> env = Walk()
    >>> td = env.rollout(5)
    >>> td.batch_size, sorted(td["next"].keys())
    (torch.Size([2, 5]), ['done', 'position', 'reward', 'terminated'])
    """

    is_closed: bool
    copies_results = False  # whether what a step returned is never written to again

    def __new__(cls, *args: Any, _inplace_update: bool = False, _batch_locked: bool = True, **kwargs: Any) -> Self:
        """Make an env whose specs can be set before and after the constructor of this class.

        Specs that a class has as `_output_spec` or `_input_spec` are where its instances start.
        """
        env = super().__new__(cls)
        state = env.__dict__
        state.update(_batch_size=torch.Size([]), _device=None, _batch_locked=_batch_locked, _is_spec_locked=False)
        state.update(_run_type_checks=False, _allow_done_after_reset=False, is_closed=False)
        for name, kinds in (("_output_spec", OUTPUTS), ("_input_spec", INPUTS)):
            spec: Composite | None = getattr(cls, name, None)
            state[name] = Composite() if spec is None else spec.clone()
            for kind in kinds:
                if f"full_{kind}_spec" not in state[name]:
                    state[name][f"full_{kind}_spec"] = Composite(shape=state[name].shape)
        return env

    @hints_at_keywords
    def __init__(
        self,
        *,
        device: torch.device | str | int | None = None,
        batch_size: Iterable[int] | None = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
        spec_locked: bool = True,
        auto_reset: bool = False,
    ) -> None:
        super().__init__()
        if auto_reset:
            raise _no_auto_reset(type(self))
        self.__dict__["_locks_specs"] = spec_locked
        if batch_size is not None:
            self.batch_size = torch.Size(batch_size)
        if device is not None:
            self._move(as_device(device))
        self._run_type_checks = run_type_checks
        self._allow_done_after_reset = allow_done_after_reset

    def _set_up(self) -> None:
        self._set_spec("done", self._index.full("done"))
        self._check_collisions()
        self.__dict__["_is_set_up"] = True
        self.set_spec_lock_(self.__dict__.get("_locks_specs", True))

    @abstractmethod
    def _set_seed(self, seed: int | None) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """A parameter, buffer or module.

        Raises:
            AttributeError: If there is none of this name.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if hint := hint_at(name):
                raise AttributeError(f"{error}{hint}", name=name, obj=self) from None
            raise

    # Sizes and devices

    @property
    def batch_locked(self) -> bool:
        """Whether TensorDicts must have the env's own batch size; else any will do, if `batch_size` is empty."""
        locked: bool = self.__dict__["_batch_locked"]
        return locked

    @batch_locked.setter
    def batch_locked(self, value: bool) -> NoReturn:
        raise RuntimeError(f"batch_locked is read-only; have it as an attribute of the class {type(self).__name__}")

    @property
    def batch_size(self) -> torch.Size:
        """The leading shape of all specs; can be set to what they start with."""
        size: torch.Size = self.__dict__["_batch_size"]
        return size

    @batch_size.setter
    def batch_size(self, batch_size: Iterable[int]) -> None:
        size = torch.Size(batch_size)
        with self._unlocked():
            for spec in (self.output_spec, self.input_spec):
                if spec.shape != size:
                    spec.shape = size
        self.__dict__["_batch_size"] = size

    @property
    def device(self) -> torch.device | None:
        """Where results go; see `to`."""
        device: torch.device | None = self.__dict__["_device"]
        return device

    @device.setter
    def device(self, value: Any) -> None:
        if self.device is not None:
            raise RuntimeError(f"device cannot be set; use env.to({shown(value)})")
        self._move(as_device(value))

    def _move(self, device: torch.device) -> None:
        with self._unlocked():
            for name in ("_output_spec", "_input_spec"):
                self.__dict__[name] = self.__dict__[name].to(device)
        self.__dict__["_device"] = device

    def to(self, device: torch.device | str | int) -> Self:  # type: ignore[override]
        """Move specs, parameters and buffers, and all results from now on; returns the env.

        Args:
            device: Where to.
        """
        target = as_device(device)
        if target != self.device:
            self._move(target)
            super().to(target)
        return self

    @property
    def run_type_checks(self) -> bool:
        """Whether the dtypes of what `_reset` and `_step` return are checked; can be set."""
        checks: bool = self.__dict__["_run_type_checks"]
        return checks

    @run_type_checks.setter
    def run_type_checks(self, run_type_checks: bool) -> None:
        self.__dict__["_run_type_checks"] = run_type_checks

    @hints_at_keywords
    def rollout(
        self,
        max_steps: int,
        policy: Callable[..., Any] | None = None,
        callback: Callable[[Any, TensorDictBase], Any] | None = None,
        *,
        auto_reset: bool = True,
        auto_cast_to_device: bool = False,
        break_when_any_done: bool | None = None,
        break_when_all_done: bool | None = None,
        return_contiguous: bool | None = None,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        out: TensorDictBase | None = None,
        trust_policy: bool = False,
        storing_device: torch.device | str | int | None = None,
    ) -> TensorDictBase:
        """Step until an episode is over or `max_steps` are done, and stack what came of it.

        Args:
            max_steps: The most steps to take.
            policy: Fills in the actions; None for random ones. See `aioenvs.tensors.rollout.as_policy`.
            callback: Is called with the env and each step's TensorDict.
            auto_reset: Reset first; else the rollout begins with `tensordict`.
            auto_cast_to_device: Bring the data to the policy's device, and the actions back.
            break_when_any_done: End with the first episode that ends, as by default; else finished ones begin anew.
            break_when_all_done: End with the last of the episodes; finished ones repeat their last step.
            return_contiguous: Whether to stack densely; None for wherever keys and shapes allow it.
            tensordict: What to begin with, or to reset.
            set_truncated: Set `truncated` in the last step where it is not done.
            out: Where to put the result.
            trust_policy: Accepted and without effect: whether a policy takes a TensorDict is told from its signature.
            storing_device: Where to keep the steps, and the result; None for where they are.

        Returns:
            TensorDict of shape `(*batch_size, T)`, the last dim named "time".
        """
        options = RolloutOptions(
            max_steps,
            auto_reset=auto_reset,
            break_when_any_done=break_when_any_done,
            break_when_all_done=break_when_all_done,
            return_contiguous=return_contiguous,
            set_truncated=set_truncated,
            auto_cast_to_device=auto_cast_to_device,
            storing_device=storing_device,
        )
        return self._driven(rollout(self, options, policy, callback, tensordict, out))

    def _driven(self, steps: RolloutSteps) -> TensorDictBase:
        """Run a rollout to its end."""
        return drive(steps)

    # The rest

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int:
        """Seed the env.

        Args:
            seed: Is given to `_set_seed`; None to draw one.
            static_seed: Return the same seed.

        Returns:
            The seed for another env: the next one in the chain of `aioenvs.engine.worker.random_streams`.
        """
        seeds, following = seed_chain(seed, 1, static=static_seed)
        self._set_seed(seeds[0])
        return following

    def check_env_specs(self, *args: Any, **kwargs: Any) -> None:
        """Compare a short random rollout with the specs; see `aioenvs.envs.check_env_specs`, also for the arguments.

        Raises:
            SpecMismatchError: If the rollout differs from the specs.
        """
        check_env_specs(self, *args, **kwargs)

    def empty_cache(self) -> None:
        """Forget what was worked out from the specs."""
        self.__dict__.pop("_known_index", None)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not possible: an env is not called."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be called; use reset and step. A batched env needs a function that makes an "
            f"env, such as `lambda: {type(self).__name__}(...)`, instead of an env; TorchRL's classes take the batches "
            "of aioenvs.integrations.torchrl"
        )

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the env.

        Args:
            raise_if_closed: Whether closing it again is an error.

        Raises:
            ClosedError: If it is closed already.
        """
        if self.is_closed and raise_if_closed:
            raise ClosedError(
                f"trying to close a closed environment: {self!r} is closed already; pass raise_if_closed=False if that "
                "does not matter"
            )
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_closed:
            self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={tuple(self.batch_size)}, device={self.device})"
