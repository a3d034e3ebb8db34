"""The synchronous faces: each method runs the coroutine of the same name."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Self

import torch
from tensordict import TensorDictBase

from aioenvs.engine.portal import (
    Immediate,
    LoopPortal,
    Portal,
    awaited,
    blocking,
    delegated,
    documented_by,
    driven,
    mirrored,
)
from aioenvs.errors import ConcurrencyError, shown
from aioenvs.faces.async_envs import AsyncParallelEnv, AsyncSerialEnv, is_single, without_hosts
from aioenvs.faces.commands import AsyncEnvs
from aioenvs.faces.forwarding import Forwarding, started_for_attribute
from aioenvs.faces.lifecycle import AsyncBatchedEnv, AsyncView
from aioenvs.faces.steps import AsyncSteps
from aioenvs.hints import Instead, check_keywords, no_writeback
from aioenvs.specs import Composite
from aioenvs.tensors.device import DeviceBackend
from aioenvs.tensors.rollout import RolloutSteps

__all__ = ["BatchedEnv", "BatchedEnvBase", "ParallelEnv", "SerialEnv", "View"]


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

    is_closed = mirrored(AsyncEnvs.is_closed)
    num_workers = mirrored(AsyncEnvs.num_workers)
    num_processes = mirrored(AsyncEnvs.num_processes)
    pids = mirrored(AsyncEnvs.pids)
    outstanding = mirrored(AsyncEnvs.outstanding)

    @property
    def num_seeds(self) -> int:
        """How many seeds of a chain the envs use up together."""
        self._known()
        return self._env.num_seeds

    def __len__(self) -> int:
        return self.num_workers

    @documented_by(AsyncEnvs.rand_action)
    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        return self._known().rand_action(tensordict)

    def __repr__(self) -> str:
        return repr(self._env)

    update_kwargs = delegated(AsyncBatchedEnv.update_kwargs)

    # -- commands ---------------------------------------------------------------------------------------

    start = blocking(AsyncBatchedEnv.start)
    set_seed = blocking(AsyncEnvs.set_seed)
    reset = blocking(AsyncEnvs.reset)  # type: ignore[arg-type]
    step = blocking(AsyncEnvs.step)
    step_and_maybe_reset = blocking(AsyncEnvs.step_and_maybe_reset)
    maybe_reset = blocking(AsyncEnvs.maybe_reset)
    rand_step = blocking(AsyncEnvs.rand_step)
    on_host = blocking(AsyncEnvs.on_host)

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

    def _driven(self, steps: RolloutSteps) -> TensorDictBase:
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


RUNNING = frozenset(("_env", "_portal", "_callers_threads", "_known_index"))  # what a copy has anew


P = ParamSpec("P")


def arguments_of(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the signature of the one to which it passes everything on."""

    def sign(own: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        signature = inspect.signature(init)
        names = list(signature.parameters)[1:]

        @functools.wraps(init)
        def construct(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            check_keywords(type(self).__name__, kwargs, names)
            try:
                signature.bind(self, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}: {error}") from None
            own(self, *args, **kwargs)

        return construct

    return sign


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
        env._face = type(self).__name__

    def _run(self, coroutine: Any) -> Any:
        if self._portal is None:
            self._portal = Immediate() if self._env._config.backend == "serial" else LoopPortal()
        if self._portal.moves:
            coroutine = self._as_caller(coroutine)
        try:
            if self._env._config.num_threads is None:
                return self._portal.run(coroutine)
            threads = torch.get_num_threads()
            try:
                return self._portal.run(coroutine)
            finally:
                self._settle_threads(threads)
        except BaseException as error:
            # Of a start that failed nothing is left; another thread may be in the middle of one.
            if self._env.is_closed and self._env._starting is None and not isinstance(error, ConcurrencyError):
                self._close_portal()
            raise

    def _as_caller(self, coroutine: Any) -> Any:
        """A coroutine for another thread, with what the calling one has chosen on the device of the results."""
        running = self._env._running
        backend = None if running is None else running.transfer.backend
        context = None if backend is None else backend.callers()
        return coroutine if context is None else driven(coroutine, context)

    def _settle_threads(self, before: int) -> None:
        """Set torch's number of threads, which each thread has for itself, where the portal may not be: here."""
        number, former = self._env._config.num_threads, self._callers_threads
        if not self._env.is_closed and former is None and number is not None:
            self._callers_threads = before
            torch.set_num_threads(number)
        elif self._env.is_closed and former is not None:
            self._callers_threads = None
            torch.set_num_threads(former)

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
    def to(self, device: torch.device | str | int | DeviceBackend) -> Self:  # type: ignore[override]
        self._env.to(device)
        return self

    def __del__(self) -> None:
        portal = self.__dict__.get("_portal")
        if portal is not None:
            if not self._env.is_closed:
                warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
                self._env._discard()
            portal.close()

    def __reduce__(self) -> tuple[Any, ...]:
        own = {name: value for name, value in self.__dict__.items() if name not in RUNNING}
        return _unstarted, (type(self), self._env), own


def _unstarted(cls: type[BatchedEnv], env: AsyncBatchedEnv) -> BatchedEnv:
    """A copy, of a pickle or in memory: the same envs, not started."""
    copied = cls.__new__(cls)
    BatchedEnv.__init__(copied, copy.copy(env))
    return copied


class SerialEnv(BatchedEnv):
    """Many envs in this process, one after the other; differentiable where they are.

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
