"""The synchronous faces: each method runs the coroutine of the same name."""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar

import torch
from tensordict import TensorDictBase

from aioenvs.batched.aio import AsyncParallelEnv, AsyncSerialEnv, is_single, without_hosts
from aioenvs.batched.base import AsyncEnvs
from aioenvs.batched.owner import AsyncBatchedEnv
from aioenvs.batched.statistics import Statistics
from aioenvs.batched.views import AsyncView
from aioenvs.engine.portal import Immediate, LoopPortal, Portal
from aioenvs.envs.base import EnvBase
from aioenvs.rollout import Steps
from aioenvs.specs import Composite

__all__ = ["BatchedEnv", "BatchedEnvBase", "ParallelEnv", "SerialEnv"]

P = ParamSpec("P")
Method = TypeVar("Method", bound=Callable[..., Any])


def documented_by(coroutine: Callable[..., Any]) -> Callable[[Method], Method]:
    """Give a method the docstring of the coroutine that it runs."""

    def document(method: Method) -> Method:
        method.__doc__ = coroutine.__doc__
        return method

    return document


def arguments_of(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the signature of the one to which it passes everything on."""

    def sign(own: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        return functools.wraps(init)(own)

    return sign


class BatchedEnvBase(EnvBase):
    """Many envs behind plain calls, as one env: all of a batch, or those of a view.

    Any other attribute or method that the envs have can be reached as if it were one of the batch: a value comes as a
    list with one for each env, and a method is called in every env.
    """

    step_dims = 1
    _env: AsyncEnvs

    def __init__(self, env: AsyncEnvs) -> None:
        torch.nn.Module.__init__(self)
        self._env = env

    def _set_up(self, spec_locked: bool) -> None:
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
            self.start()
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
        raise RuntimeError(f"device cannot be set; use env.to({value!r})")

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        """Whether there are no envs now: not started yet, or closed."""
        return self._env.is_closed

    @property
    def num_workers(self) -> int:
        """How many envs there are."""
        return self._env.num_workers

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
        return repr(self._env).replace("<Async", "<", 1)

    # -- commands ---------------------------------------------------------------------------------------

    @documented_by(AsyncBatchedEnv.start)
    def start(self) -> None:
        self._run(self._env.start())

    @documented_by(AsyncEnvs.set_seed)
    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int:
        following: int = self._run(self._env.set_seed(seed, static_seed))
        return following

    @documented_by(AsyncEnvs.reset)
    def reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        result: TensorDictBase = self._run(self._env.reset(tensordict, list_of_kwargs=list_of_kwargs, **kwargs))
        return result

    @documented_by(AsyncEnvs.step)
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        result: TensorDictBase = self._run(self._env.step(tensordict))
        return result

    @documented_by(AsyncEnvs.step_and_maybe_reset)
    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        result: tuple[TensorDictBase, TensorDictBase] = self._run(self._env.step_and_maybe_reset(tensordict))
        return result

    @documented_by(AsyncEnvs.rand_step)
    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        result: TensorDictBase = self._run(self._env.rand_step(tensordict))
        return result

    def _driven(self, steps: Steps) -> TensorDictBase:
        """Run a rollout; what a policy or callback leaves to be awaited is awaited in the loop of the envs."""
        result = None
        try:
            while True:
                result = self._run(_awaited(steps.send(result)))
        except StopIteration as stop:
            stacked: TensorDictBase = stop.value
            return stacked

    @documented_by(AsyncEnvs.call)
    def call(self, name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        values: list[Any] = self._run(self._env.call(name, *args, **kwargs))
        return values

    @documented_by(AsyncEnvs.get_attr)
    def get_attr(self, name: str) -> list[Any]:
        values: list[Any] = self._run(self._env.get_attr(name))
        return values

    @documented_by(AsyncEnvs.set_attr)
    def set_attr(self, name: str, values: Any) -> None:
        self._run(self._env.set_attr(name, values))

    def statistics(self) -> Statistics:
        """What the envs have done since they were started.

        Raises:
            AioEnvsError: If they are not running.
        """
        return self._env.statistics()

    @documented_by(AsyncEnvs.render)
    def render(self) -> list[Any]:
        values: list[Any] = self._run(self._env.render())
        return values

    @documented_by(AsyncEnvs.state_dict)
    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:  # type: ignore[override]
        states: OrderedDict[str, Any] = self._run(self._env.state_dict())
        return states

    @documented_by(AsyncEnvs.load_state_dict)
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        self._run(self._env.load_state_dict(state_dict, strict, assign))

    def __getattr__(self, name: str) -> Any:
        """What the envs have under this name: a list of values, or a method that calls theirs.

        Raises:
            AttributeError: If one of them has no such attribute.
        """
        if name.startswith("_") or "_env" not in self.__dict__:
            return super().__getattr__(name)
        found = self._run(self._env._look_up(name))
        callable_in = [index for index, each in enumerate(found) if each.is_callable]
        if len(callable_in) == len(found):
            return functools.partial(self.call, name)
        if callable_in:
            raise AttributeError(f"{name!r} is a method in some of the envs of {self!r} only, such as {callable_in[0]}")
        return [each.value for each in found]

    @documented_by(AsyncBatchedEnv.__getitem__)
    def __getitem__(self, index: Any) -> View:
        return View(self, self._env[index])  # type: ignore[index]

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
        return self.__dict__["_whole"]._run(coroutine)

    @property
    def env_index(self) -> tuple[int, ...]:
        """The indices of these envs in the whole."""
        return self._env.env_index

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self.__dict__["_whole"], list(self.env_index))

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Do nothing: the envs belong to the whole, and close with it."""

    def to(self, device: torch.device | str | int) -> NoReturn:  # type: ignore[override]
        """Not possible: results of a view go where those of the whole go."""
        raise RuntimeError("a view has no device of its own; use to() of the envs that it is a view of")


class BatchedEnv(BatchedEnvBase):
    """Many envs behind plain calls; see `ParallelEnv` and `SerialEnv`.

    It works with or without an event loop around it; where one runs in the calling thread, a call blocks that loop,
    and the async faces serve better. Ctrl-C during a call cancels it, as cancelling the coroutine would, and raises
    `KeyboardInterrupt`; the envs remain usable.
    """

    _env: AsyncBatchedEnv

    def __init__(self, env: AsyncBatchedEnv) -> None:
        super().__init__(env)
        self._portal: Portal | None = None
        self._callers_threads: int | None = None  # torch's, of the caller, before the start
        env._yields = False  # there is nobody to yield to

    def _run(self, coroutine: Any) -> Any:
        if self._portal is None:
            self._portal = Immediate() if self._env._config.backend == "serial" else LoopPortal()
        if self._env._config.num_threads is None:
            return self._portal.run(coroutine)
        threads = torch.get_num_threads()
        try:
            return self._portal.run(coroutine)
        finally:
            self._settle_threads(threads)

    def _settle_threads(self, before: int) -> None:
        """Set torch's number of threads, which each thread has for itself, where the portal may not be: here."""
        number, former = self._env._config.num_threads, self._callers_threads
        if not self._env.is_closed and former is None and number is not None:
            self._callers_threads = before
            torch.set_num_threads(number)
        elif self._env.is_closed and former is not None:
            self._callers_threads = None
            torch.set_num_threads(former)

    @property
    def num_processes(self) -> int:
        """How many processes host them; 0 where they live in this one."""
        return self._env.num_processes

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers, in order; empty where envs live in this process."""
        return self._env.pids

    @documented_by(AsyncBatchedEnv.close)
    def close(self, *, raise_if_closed: bool = True) -> None:
        if self._portal is not None and self._portal.foreign:
            return  # a fork leaves a `with` block that is its parent's to close
        try:
            self._run(self._env.close(raise_if_closed=raise_if_closed))
        finally:
            if self._env.is_closed:
                self._close_portal()

    def _close_portal(self) -> None:
        portal, self._portal = self._portal, None
        if portal is not None:
            portal.close()

    @documented_by(AsyncBatchedEnv.to)
    def to(self, device: torch.device | str | int) -> Self:  # type: ignore[override]
        self._env.to(device)
        return self

    @documented_by(AsyncBatchedEnv.update_kwargs)
    def update_kwargs(self, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self._env.update_kwargs(kwargs)

    def __del__(self) -> None:
        portal = self.__dict__.get("_portal")
        if portal is not None:
            if not self._env.is_closed:
                warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
                self._env._discard()
            portal.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unstarted, (type(self), self._env)


def _unstarted(cls: type[BatchedEnv], env: AsyncBatchedEnv) -> BatchedEnv:
    """A copy, of a pickle or in memory: the same envs, not started."""
    copied = cls.__new__(cls)
    BatchedEnv.__init__(copied, copy.copy(env))
    return copied


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


class SerialEnv(BatchedEnv):
    """The same envs in this process, one after the other; differentiable where they are.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env; see `AsyncParallelEnv`.
        **options: As for `AsyncSerialEnv`.

    >>> with SerialEnv(2, "CartPole-v1") as env:
    ...     td = env.rand_step(env.reset(seed=0))
    >>> td["next", "reward"].shape
    torch.Size([2, 1])
    """

    @arguments_of(AsyncSerialEnv.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(AsyncSerialEnv(*args, **options))


class ParallelEnv(BatchedEnv):
    """Many envs in worker processes, or threads, behind plain calls.

    Args:
        num_workers: How many envs.
        create_env_fn: What makes an env; see `AsyncParallelEnv`.
        serial_for_single: Make a `SerialEnv` instead if there is one env only.
        **options: As for `AsyncParallelEnv`.

    >>> with ParallelEnv(4, "CartPole-v1", num_processes=2) as env:
    ...     rollout = env.rollout(10, break_when_any_done=False)
    >>> rollout.batch_size, rollout.names
    (torch.Size([4, 10]), [None, 'time'])
    """

    def __new__(cls, *args: Any, serial_for_single: bool = False, **options: Any) -> Any:
        """Make one, or a `SerialEnv` with the options that it has a use for."""
        if serial_for_single and is_single(args, options):
            return SerialEnv(*args, **without_hosts(options))
        return super().__new__(cls)

    @arguments_of(AsyncParallelEnv.__init__)
    def __init__(self, *args: Any, serial_for_single: bool = False, **options: Any) -> None:
        super().__init__(AsyncParallelEnv(*args, **options))
