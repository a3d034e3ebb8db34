"""Gymnasium's vector environments, on the engine, and what makes them by an id, also for Gymnasium's `make_vec`."""

from __future__ import annotations

import copy
import functools
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from aioenvs.engine.adapters.base import Call
from aioenvs.engine.config import BatchConfig, Timeouts
from aioenvs.engine.worker.random_streams import as_python, integer_seed
from aioenvs.errors import AioEnvsError, ClosedError, ConcurrencyError, SpecMismatchError, WorkerTimeoutError, shown
from aioenvs.hints import OWN, hints_at_keywords, keywords_of, lacking, passed_on
from aioenvs.integrations.vectors.batches import batch_infos
from aioenvs.integrations.vectors.core import Autoreset, Vector, VectorResets, VectorSteps, one_each
from aioenvs.integrations.vectors.inside import ask, assign, make_wrapped
from aioenvs.registry import find_spec

try:
    from gymnasium.vector import AutoresetMode
    from gymnasium.vector.utils import batch_differing_spaces, batch_space
except ImportError as error:
    raise ImportError(
        f"aioenvs.integrations.gymnasium needs Gymnasium 1.1 or later, found {gymnasium.__version__}"
    ) from error

ELSEWHERE = "; they are where its workers are, which get_attr and call ask (backend='serial' has them here)"
COMMANDS = ("reset", "step", "close")  # which have methods of their own
StepResult = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]
FOR_ALL = "{given!r} was passed on to each env; for all of them together it is vector_kwargs={{{meant!r}: ...}}"
MASK = "`options['reset_mask']`"  # as Gymnasium calls it


def start_method(method: str | None, context: str | None) -> str | None:
    """The one start method that goes by two names; TypeError if they are not the same."""
    if None not in (method, context) and method != context:
        raise TypeError(f"context={shown(context)} and mp_start_method={shown(method)} mean the same; give one of them")
    return context if method is None else method


def check_concurrency(count: Any) -> None:
    """Refuse, by a ValueError, what is neither None nor an integer of at least 1."""
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {shown(count)}")
    if count < 1:
        raise ValueError(f"`max_concurrency` must be a positive integer or None, got {count}")


def seeds_of(seed: Any, num_envs: int) -> list[int | None]:
    """A seed for each env, or None: those that are given, or that of the first env and those that follow by ones.

    TypeError if one is no integer, ValueError if one is negative, or there is not one for each env.
    """
    if seed is None:
        return [None] * num_envs
    first = as_python(seed)
    if type(first) is int:
        return [integer_seed(first + env) for env in range(num_envs)]
    if (not isinstance(seed, Sequence) and getattr(seed, "shape", ()) == ()) or isinstance(seed, str | bytes):
        raise TypeError(f"a seed must be an integer, a list with one for each env, or None, got {shown(seed)}")
    if len(seed) != num_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got length={len(seed)}: "
            f"{shown(seed)}"
        )
    return [None if each is None else integer_seed(each) for each in seed]


def split_options(
    options: dict[str, Any] | None, num_envs: int
) -> tuple[NDArray[np.bool_] | None, dict[str, Any] | None]:
    """The mask of a partial reset, and the options without it; the caller's stay as they are.

    TypeError if the mask is no array of bools, ValueError if it has the wrong shape, or selects nobody.
    """
    if not isinstance(options, Mapping) or "reset_mask" not in options:
        return None, options
    options = dict(options)
    mask = options.pop("reset_mask")
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{MASK} must be a numpy array, got {shown(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"{MASK} must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{MASK} must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"{MASK} must contain a boolean array with at least one True value, got reset_mask={shown(mask, str)}"
        )
    return mask, options


class PendingCallError(ConcurrencyError, AlreadyPendingCallError):
    """A command was given while another, which the message names, waits to be finished."""

    def __init__(self, message: str, name: str) -> None:
        AlreadyPendingCallError.__init__(self, message, name)


class CallTimeoutError(WorkerTimeoutError, multiprocessing.TimeoutError):
    """Envs did not answer in time: what Gymnasium raises then, which is no `TimeoutError`, as well."""


class VectorClosedError(ClosedError, ClosedEnvironmentError):
    """The envs were used after `close`."""


class AioVectorEnv(VectorEnv[Any, Any, Any]):
    """Many envs in worker processes, or threads, with the interface of `gymnasium.vector.AsyncVectorEnv`.

    Results are what `gymnasium.vector.SyncVectorEnv` returns: observations and flags of the same dtypes and shapes,
    float64 rewards, and infos batched as Gymnasium documents it, but without changing a value on the way. Actions of
    another dtype than the space's are converted where that keeps their values. What an env, or the death of its worker,
    raises comes out as the errors of aioenvs do. With `backend="serial"`, `envs` has the env objects, as that of
    `SyncVectorEnv`.

    Args:
        env_fns: A callable for each env; or one, a Gymnasium id or an `EnvSpec` for all of `num_envs`.
        num_envs: How many envs; None for as many as there are callables. Of factories that return vector envs, how many
            of these: the attribute `num_envs` is all of their envs together, which are counted through.
        shared_memory: Accepted and without effect: what has a fixed shape always travels that way.
        copy: Whether observations have arrays of their own; else those that were returned before are used again.
        context: The same as `mp_start_method`, by Gymnasium's name.
        daemon: Accepted and without effect: workers always end with this process, and may have children.
        observation_mode: "same" if all observation spaces are equal; "different" if they have the same shapes and
            dtypes; or a tuple of the batched and the single space to go by.
        autoreset_mode: What becomes of envs whose episode is over; also its value, such as "NextStep".
        max_concurrency: How many envs may be inside a reset or step at once: with this, there are so many processes
            unless `num_processes` says otherwise.
        num_processes: How many processes, or threads, host the envs; None for as many as there are cores, or envs of
            threads.
        backend: "process", "thread", "serial" for one env after the other in this process, or "ray" for actors of a
            Ray cluster.
        mp_start_method: "forkserver", "spawn" or "fork"; None for the first.
        on_worker_death: "raise", or "restart" to build the envs of a dead worker anew; the transition that was lost
            is then reported as truncated.
        max_restarts: How often each worker may be restarted.
        step_timeout: Seconds that a command may take; None for as long as it likes.
        start_timeout: Seconds that a worker may take to build its envs.
        close_timeout: Seconds that closing the envs may take before their processes are killed.

    Raises:
        WorkerStartError: If a factory raised, hung or ended its process.
        SpecMismatchError: If the spaces do not go together.
        ValueError: If a number or a name is out of range.
        TypeError: If something else is given than makes envs.

    >>> envs = AioVectorEnv("CartPole-v1", num_envs=3, num_processes=1)
    >>> observations, infos = envs.reset(seed=42)
    >>> observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
    >>> observations.shape, rewards
    ((3, 4), array([1., 1., 1.]))
    >>> envs.close()
    """

    @hints_at_keywords
    def __init__(
        self,
        env_fns: Any,
        num_envs: int | None = None,
        *,
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        observation_mode: str | tuple[gymnasium.Space[Any], gymnasium.Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        num_processes: int | None = None,
        backend: str = "process",
        mp_start_method: str | None = None,
        on_worker_death: str = "raise",
        max_restarts: int = 10,
        step_timeout: float | None = None,
        start_timeout: float | None = 60.0,
        close_timeout: float = 5.0,
    ) -> None:
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.observation_mode = observation_mode
        self.copy = copy
        factories = one_each(env_fns, num_envs, "num_envs")
        check_concurrency(max_concurrency)
        if max_concurrency is not None and num_processes is None and backend != "serial":
            num_processes = min(len(factories), max_concurrency)
        config = BatchConfig.of(
            len(factories),
            factories,
            create_env_kwargs=None,
            num_processes=num_processes,
            backend=backend,
            mp_start_method=start_method(mp_start_method, context),
            on_worker_death=on_worker_death,
            max_restarts=max_restarts,
            max_concurrency=None if max_concurrency is None else 1,
            timeouts=Timeouts(start_timeout, step_timeout, close_timeout),
            called={
                "num_workers": "num_envs",
                "create_env_fn": "env_fns",
                "mp_start_method": "mp_start_method" if context is None else "context",
            },
        )
        self._vector: Vector | None = Vector(
            config,
            Autoreset[self.autoreset_mode.name],
            type(self).__name__,
            CallTimeoutError,
            copy=copy,
            batches_infos=True,
        )
        self.num_envs = self._vector.envs.num_envs
        if (hosted := self._vector.hosted) is not None:
            self.envs = hosted
        try:
            self._describe()
        except BaseException:
            self.close()
            raise

    def _describe(self) -> None:
        """Take over what the envs say of themselves."""
        found = self._running().envs.descriptions
        first = found[0]
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.single_action_space = first.action_space
        for env, each in enumerate(found):
            if each.action_space != first.action_space:
                raise SpecMismatchError(
                    f"Some environments have an action space different from `{shown(first.action_space)}`: that of env "
                    f"{env} is {shown(each.action_space)}. In order to batch actions, the action spaces from all "
                    "environments must be equal."
                )
        self.action_space = batch_space(first.action_space, self.num_envs)
        self.single_observation_space = first.observation_space
        spaces = [each.observation_space for each in found]
        mode = self.observation_mode
        if isinstance(mode, tuple) and len(mode) == 2:
            if not all(isinstance(each, gymnasium.Space) for each in mode):
                raise TypeError(f"Expected both elements of observation_mode to be Spaces, got {shown(mode)}")
            self.observation_space, self.single_observation_space = mode
        elif mode == "different":
            self.observation_space = batch_differing_spaces(spaces)
        elif mode == "same":
            for env, space in enumerate(spaces):
                if space != spaces[0]:
                    raise SpecMismatchError(
                        f"{type(self).__name__}(..., observation_mode='same') however some of the sub-environments "
                        f"observation spaces are not equivalent. Env 0 has {shown(spaces[0])}, env {env} has "
                        f"{shown(space)}. If this is intentional, use `observation_mode='different'` instead."
                    )
            self.observation_space = batch_space(spaces[0], self.num_envs)
        else:
            raise ValueError(
                "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
                f"space, actual got {shown(mode, str)}; in a tuple, the batched space comes first"
            )

    # -- resets -----------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes, in all envs or in those of a mask.

        Args:
            seed: For env i, `seed + i`; or a list with one for each env, of which some may be None.
            options: What each env's `reset` gets as such, without `reset_mask`: if that is there (bool, `(n,)`), only
                the envs with a True in it are reset, and the others keep their latest observation.

        Returns:
            The observations of all envs, and the infos of those that were reset.

        Raises:
            ValueError: If there is not one seed for each env, a seed is negative, or the mask has the wrong shape or
                selects nobody.
            TypeError: If a seed is no integer, or the mask no array of bools.
            PendingCallError: If another command is under way.
            VectorClosedError: After `close`.
            Exception: Whatever an env raised, with its worker's traceback as a note.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin a reset, for `reset_wait` to finish; args and errors are those of `reset`."""
        vector = self._free("reset_async")
        seeds, (mask, options) = seeds_of(seed, self.num_envs), split_options(options, self.num_envs)
        envs = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        arguments = {env: {"seed": seeds[env], "options": options} for env in envs}
        vector.begin(vector.envs.begin_reset(arguments, None if mask is None else envs))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Finish a reset.

        Args:
            timeout: Seconds that it may take; None for `step_timeout`. If that is too short, the reset is over all the
                same: late answers are dropped, and the next command waits for them.

        Raises:
            NoAsyncCallError: If none is under way.
            CallTimeoutError: A `TimeoutError` and a `multiprocessing.TimeoutError`, if it takes longer.
        """
        resets: VectorResets = self._pending("reset").finish(timeout)
        return resets.observations, batch_infos(resets.infos, self.num_envs)

    # -- steps ------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> StepResult:
        """Step all envs, or reset those whose turn that is.

        Args:
            actions: One for each env, in the structure of `action_space`.

        Returns:
            Observations, rewards (float64, `(n,)`), terminations and truncations (bool, `(n,)`), and infos.

        Raises:
            SpecMismatchError: A `ValueError`, and a `TypeError` if it is nothing with an action for each env; or they
                do not fit. No env was stepped then.
            ResetNeededError: If an env was not reset since it failed, or since its episode ended and nobody else
                resets it.
            PendingCallError: If another command is under way.
            VectorClosedError: After `close`.
            WorkerDiedError: If a worker died; `reset` starts another one.
            WorkerTimeoutError: If it takes longer than `step_timeout`.
            Exception: Whatever an env raised, with its worker's traceback as a note; it needs a reset.
        """
        vector = self._free("step_async")
        return self._result(vector.run(vector.envs.step(actions)))

    def step_async(self, actions: Any) -> None:
        """Begin a step, for `step_wait` to finish; args and errors are those of `step`."""
        vector = self._free("step_async")
        vector.begin(vector.envs.begin_step(actions))

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Finish a step; as `reset_wait` finishes a reset."""
        return self._result(self._pending("step").finish(timeout))

    def _result(self, steps: VectorSteps) -> StepResult:
        observations, rewards, terminated, truncated, infos, finals, final_infos = steps
        if finals:
            infos = {
                **infos,
                **{
                    env: {"final_obs": final, "final_info": final_infos.get(env, {}), **infos.get(env, {})}
                    for env, final in finals.items()
                },
            }
        return observations, rewards, terminated, truncated, batch_infos(infos, self.num_envs) if infos else {}

    # -- calls ------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the attribute of each env: the result of calling it if that is possible, else its value.

        Args:
            name: Of the attribute; not `reset`, `step` or `close`, which have methods of their own.
            *args: Arguments of the call.
            **kwargs: Its keyword arguments.

        Raises:
            AttributeError: If an env has no such attribute.
            PendingCallError: If another command is under way.
            Exception: Whatever a method raised.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call, for `call_wait` to finish; args and errors are those of `call`."""
        vector = self._free("call_async")
        if name in COMMANDS:
            raise ValueError(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead: it would reach the envs "
                "behind the back of what steps them"
            )
        calls = dict.fromkeys(range(vector.envs.parts.num_hosted), Call("apply", "", (ask, name, *args), kwargs))
        vector.begin(vector.envs.begin_calls(calls, "call"))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Finish a call; as `reset_wait` finishes a reset."""
        return tuple(self._pending("call").finish(timeout))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return the attribute of each env, as `call` does."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute in every env, of the outermost wrapper that has it; of the outermost one, if none has.

        Args:
            name: Of the attribute.
            values: A list or tuple with one value for each env, or one value for all.

        Raises:
            ValueError: If there are not as many values as envs.
            PendingCallError: If another command is under way.
        """
        vector = self._free("set_attr")
        count = vector.envs.parts.num_hosted
        each = values if isinstance(values, list | tuple) else [values] * count
        if len(each) != count:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. Got "
                f"`{len(each)}` values for {count} environments, to set {name!r} in."
            )
        calls = {env: Call("apply", "", (assign, name, value)) for env, value in enumerate(each)}
        vector.run(vector.envs.perform(calls, "set_attr"))

    def render(self) -> tuple[Any, ...]:
        """Return the result of every env's `render`."""
        return self.call("render")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of the envs' own random generators."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The seeds of the envs' own random generators."""
        return self.get_attr("np_random_seed")

    def __getattr__(self, name: str) -> Any:
        """Say who has what another library may ask for.

        Raises:
            AttributeError: Always.
        """
        raise lacking(self, name, ELSEWHERE if name == "envs" else "")

    # -- the end ----------------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close all envs and end the workers, whatever they do. `close` comes here.

        What is under way is dropped, with Gymnasium's warning.

        Args:
            timeout: Seconds after which the workers are killed; None for `close_timeout`.
            terminate: Kill them at once.

        Raises:
            ConcurrencyError: If another thread is in the middle of a call; nothing is closed then.
        """
        vector = self._vector
        if vector is None:
            return
        try:
            if vector.pending is not None:
                logger.warn(
                    f"Calling `close` while waiting for a pending call to `{vector.pending.command}` to complete."
                )
        finally:
            vector.close(0 if terminate else timeout)
            self._vector = None

    def __del__(self) -> None:
        """Leave it to what runs the envs to say that they were not closed."""

    # -- what may be asked when -------------------------------------------------------------------------

    def _running(self) -> Vector:
        vector = self._vector
        if vector is None or vector.closed:
            raise VectorClosedError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`: its envs are gone; make "
                "another one"
            )
        return vector

    def _free(self, what: str) -> Vector:
        """Return the running envs, if no command is under way."""
        vector = self._running()
        if vector.pending is not None:
            name = vector.pending.command
            raise PendingCallError(
                f"Calling `{what}` while waiting for a pending call to `{name}` to complete; finish it by "
                f"{name}_wait() first",
                name,
            )
        return vector

    def _pending(self, command: str) -> Vector:
        """Return the running envs, if this command is under way."""
        vector = self._running()
        if vector.pending is None or vector.pending.command != command:
            found = "nothing" if vector.pending is None else f"a call to `{vector.pending.command}`"
            raise NoAsyncCallError(
                f"Calling `{command}_wait` without any prior call to `{command}_async`; {found} is pending", command
            )
        return vector


class _Maker:
    """The entry point that `gymnasium.make_vec` calls to make the envs of an id; `settings` are for `AioVectorEnv`."""

    def __init__(self, spec: EnvSpec, wrappers: Sequence[Callable[[Any], Any]], settings: Mapping[str, Any]) -> None:
        self._spec = spec
        self._wrappers = tuple(wrappers)
        self._settings = dict(settings)

    def __call__(self, num_envs: int = 1, **kwargs: Any) -> AioVectorEnv:
        make = functools.partial(make_wrapped, self._spec, self._wrappers, **kwargs)
        return AioVectorEnv(make, num_envs, **self._settings)


@hints_at_keywords
def vector_spec(
    id: str | EnvSpec,
    *,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
) -> EnvSpec:
    """A spec with which `gymnasium.make_vec(spec, num_envs)` makes an `AioVectorEnv`.

    Args:
        id: Of the single env, or its spec.
        vector_kwargs: Arguments of `AioVectorEnv`.
        wrappers: What to put around each env, from the innermost to the outermost.

    >>> envs = gymnasium.make_vec(vector_spec("CartPole-v1"), num_envs=2)
    >>> envs
    AioVectorEnv(CartPole-v1, num_envs=2)
    >>> envs.close()
    """
    spec = find_spec(id) if isinstance(id, str) else id
    maker: Any = _Maker(spec, wrappers, vector_kwargs or {})
    return replace(copy.deepcopy(spec), vector_entry_point=maker, additional_wrappers=())


@hints_at_keywords
def register(
    id: str | EnvSpec,
    *,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
) -> str:
    """Register an id, `aioenvs/` before the given one, which `gymnasium.make_vec` makes an `AioVectorEnv` of.

    Args:
        id: Of the single env, or its spec.
        vector_kwargs: Arguments of `AioVectorEnv`.
        wrappers: What to put around each env.

    Returns:
        The new id.
    """
    spec = vector_spec(id, vector_kwargs=vector_kwargs, wrappers=wrappers)
    new = f"aioenvs/{spec.id.rpartition('/')[2]}"
    gymnasium.registry[new] = replace(spec, id=new)
    return new


def make_vec(
    id: str | EnvSpec,
    num_envs: int = 1,
    *,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] | None = None,
    **kwargs: Any,
) -> AioVectorEnv:
    """Make an `AioVectorEnv` of an id, as `gymnasium.make_vec` makes its own.

    Args:
        id: Of the single env, or its spec.
        num_envs: How many.
        vector_kwargs: Arguments of `AioVectorEnv`.
        wrappers: What to put around each env, from the innermost to the outermost.
        **kwargs: Arguments of each env, for `gymnasium.make`.
    """
    spec = vector_spec(id, vector_kwargs=vector_kwargs, wrappers=wrappers or ())
    with passed_on(kwargs, keywords_of(AioVectorEnv.__init__), FOR_ALL), passed_on(kwargs, keywords_of(make_vec), OWN):
        envs: Any = gymnasium.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    if not isinstance(envs, AioVectorEnv):
        raise AioEnvsError(f"gymnasium.make_vec made {shown(envs)} of the spec {shown(spec)}")
    return envs
