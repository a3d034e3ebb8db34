"""Batches behind plain calls: each method runs the coroutine of the same name."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from tensordict import TensorDictBase

from aioenvs.batched.base import AsyncEnvs
from aioenvs.batched.forwarding import Forwarding, documented_by, started_for_attribute
from aioenvs.batched.owner import AsyncBatchedEnv
from aioenvs.batched.steps import AsyncSteps
from aioenvs.batched.views import AsyncView
from aioenvs.engine.driving import awaited
from aioenvs.errors import shown
from aioenvs.hints import Instead, no_writeback
from aioenvs.rollout import Steps
from aioenvs.specs import Composite

__all__ = ["BatchedEnvBase", "View"]


class BatchedEnvBase(Forwarding):
    """Many envs behind plain calls, as one env: all of a batch, or those of a view.

    While they run, any other attribute or method that the envs have can be reached as if it were one of the batch: a
    value comes as a list with one for each env, and a method is called in every env. Such an attribute is set by
    `set_attr`.
    """

    step_dims = 1
    is_batch = True
    copies_results = True

    def __init__(self, env: AsyncEnvs) -> None:
        torch.nn.Module.__init__(self)
        self._env = env

    def _set_up(self) -> None:
        """Do nothing: the specs come from the envs, complete and locked."""

    def _run(self, coroutine: Any) -> Any:
        raise NotImplementedError

    def _reset(self, tensordict: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self!r} has no reset but the public one")

    def _step(self, tensordict: Any) -> NoReturn:
        raise NotImplementedError(f"{self!r} has no step but the public one")

    def _set_seed(self, seed: Any) -> NoReturn:
        raise NotImplementedError(f"{self!r} has no set_seed but the public one")

    # -- description ------------------------------------------------------------------------------------

    def _known(self) -> AsyncEnvs:
        """The envs, of which it is known what they look like."""
        if self._env._last_signature() is None:
            started_for_attribute(self.start)
        return self._env

    @property
    def output_spec(self) -> Composite:
        """`full_observation_spec`, `full_reward_spec` and `full_done_spec`."""
        return self._known().output_spec

    @output_spec.setter
    def output_spec(self, spec: Any) -> NoReturn:
        raise self._read_only("output_spec")

    @property
    def input_spec(self) -> Composite:
        """`full_action_spec` and `full_state_spec`."""
        return self._known().input_spec

    @input_spec.setter
    def input_spec(self, spec: Any) -> NoReturn:
        raise self._read_only("input_spec")

    def _set_spec(self, kind: str, spec: Any) -> NoReturn:
        raise self._read_only(f"{kind}_spec")

    def _read_only(self, name: str) -> AttributeError:
        return AttributeError(f"the {name} of {self!r} follows from its envs and cannot be set; set it in the envs")

    @property
    def is_spec_locked(self) -> bool:
        """True: the specs follow from those of the envs."""
        return True

    @is_spec_locked.setter
    def is_spec_locked(self, locked: bool) -> None:
        self.set_spec_lock_(locked)

    def set_spec_lock_(self, mode: bool = True) -> Self:
        """Only lock the specs, as they are."""
        if not mode:
            raise self._read_only("specs")
        return self

    @property
    def batch_size(self) -> torch.Size:
        """`(num_workers, *bs)`, where `bs` is the batch size of each env."""
        return self._known().batch_size

    @batch_size.setter
    def batch_size(self, batch_size: Any) -> NoReturn:
        raise self._read_only("batch_size")

    @property
    def device(self) -> torch.device | None:
        """Where results go."""
        return self._env.device

    @device.setter
    def device(self, value: Any) -> NoReturn:
        raise RuntimeError(f"device cannot be set; use env.to({shown(value)})")

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        """Whether there are no envs now: not started yet, or closed."""
        return self._env.is_closed

    @property
    def num_workers(self) -> int:
        """How many envs there are."""
        return self._env.num_workers

    @property
    def num_processes(self) -> int:
        """How many processes host them; 0 where they live in this one."""
        return self._env.num_processes

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers that host them, in order; empty where envs live in this process."""
        return self._env.pids

    @property
    def num_seeds(self) -> int:
        """How many seeds of a chain the envs use up together."""
        self._known()
        return self._env.num_seeds

    def __len__(self) -> int:
        return self.num_workers

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        return self._known().rand_action(tensordict)

    rand_action.__doc__ = AsyncEnvs.rand_action.__doc__

    def __repr__(self) -> str:
        return repr(self._env)

    @documented_by(AsyncBatchedEnv.update_kwargs)
    def update_kwargs(self, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self._env.update_kwargs(kwargs)

    # -- commands ---------------------------------------------------------------------------------------

    @documented_by(AsyncBatchedEnv.start)
    def start(self) -> None:
        self._run(self._env.start())

    @documented_by(AsyncEnvs.set_seed)
    def set_seed(self, seed: int | None = None, static_seed: bool = False, *, timeout: float | None = None) -> int:
        following: int = self._run(self._env.set_seed(seed, static_seed, timeout=timeout))
        return following

    @documented_by(AsyncEnvs.reset)
    def reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
        select_reset_only: bool = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        kwargs |= {"list_of_kwargs": list_of_kwargs, "select_reset_only": select_reset_only, "timeout": timeout}
        result: TensorDictBase = self._run(self._env.reset(tensordict, **kwargs))
        return result

    @documented_by(AsyncEnvs.step)
    def step(self, tensordict: TensorDictBase, *, copy: bool = True, timeout: float | None = None) -> TensorDictBase:
        result: TensorDictBase = self._run(self._env.step(tensordict, copy=copy, timeout=timeout))
        return result

    @documented_by(AsyncEnvs.step_and_maybe_reset)
    def step_and_maybe_reset(
        self, tensordict: TensorDictBase, *, copy: bool = True, timeout: float | None = None
    ) -> tuple[TensorDictBase, TensorDictBase]:
        steps = self._env.step_and_maybe_reset(tensordict, copy=copy, timeout=timeout)
        result: tuple[TensorDictBase, TensorDictBase] = self._run(steps)
        return result

    @documented_by(AsyncSteps.on_host)
    def on_host(self, tensordict: TensorDictBase) -> TensorDictBase:
        result: TensorDictBase = self._run(self._env.on_host(tensordict))
        return result

    @property
    def outstanding(self) -> tuple[int, ...]:
        """The envs that were sent a step which was not received yet, in the order in which they were sent."""
        return self._env.outstanding

    @documented_by(AsyncSteps.send)
    def send(self, tensordict: TensorDictBase, *, timeout: float | None = None) -> None:
        self._run(self._env._send(tensordict, timeout))

    @documented_by(AsyncSteps.recv)
    def recv(
        self, min_get: int = 1, max_get: int | None = None, timeout: float | None = None
    ) -> tuple[TensorDictBase, TensorDictBase]:
        # Ctrl-C may come when all is done but the return: what was not returned was not received.
        td, following, taken = self._run(self._env._assembled(min_get, max_get, timeout))
        taken()
        return td, following

    @documented_by(AsyncEnvs.maybe_reset)
    def maybe_reset(self, tensordict: TensorDictBase, *, timeout: float | None = None) -> TensorDictBase:
        result: TensorDictBase = self._run(self._env.maybe_reset(tensordict, timeout=timeout))
        return result

    @documented_by(AsyncEnvs.rand_step)
    def rand_step(self, tensordict: TensorDictBase | None = None, *, timeout: float | None = None) -> TensorDictBase:
        result: TensorDictBase = self._run(self._env.rand_step(tensordict, timeout=timeout))
        return result

    def _driven(self, steps: Steps) -> TensorDictBase:
        """Run a rollout; what a policy or callback leaves to be awaited is awaited in the loop of the envs."""
        result = None
        try:
            while True:
                result = self._run(awaited(steps.send(result)))
        except StopIteration as stop:
            stacked: TensorDictBase = stop.value
            return stacked

    @documented_by(AsyncBatchedEnv.__getitem__)
    def __getitem__(self, index: Any) -> View:
        return View(self, self._env[index])

    __setitem__ = no_writeback

    __aenter__ = Instead("is entered by `with`; for `async with` there are AsyncParallelEnv and AsyncSerialEnv")

    def __enter__(self) -> Self:
        if self.is_closed:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(raise_if_closed=False)


class View(BatchedEnvBase):
    """Some envs of a batch behind plain calls; what `env[index]` returns. See `AsyncView`."""

    _env: AsyncView

    def __init__(self, whole: BatchedEnvBase, env: AsyncView) -> None:
        super().__init__(env)
        self.__dict__["_whole"] = whole  # not a submodule

    def _run(self, coroutine: Any) -> Any:
        return self.whole._run(coroutine)

    @property
    def whole(self) -> BatchedEnvBase:
        """The envs of which this is a view."""
        whole: BatchedEnvBase = self.__dict__["_whole"]
        return whole

    def __getitem__(self, index: Any) -> View:
        """A view of some of these envs; see `AsyncView.__getitem__`."""
        return View(self.whole, self._env[index])

    @property
    def env_index(self) -> tuple[int, ...]:
        """The indices of these envs in the whole."""
        return self._env.env_index

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self.whole, list(self.env_index))

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Do nothing: the envs belong to the whole, and close with it."""

    def to(self, device: torch.device | str | int) -> NoReturn:  # type: ignore[override]
        """Not possible: results of a view go where those of the whole go."""
        raise RuntimeError("a view has no device of its own; use to() of the envs that it is a view of")
