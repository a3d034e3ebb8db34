"""Vector environments for stable-baselines3 on the engine of aioenvs, for its algorithms to train on.

    env = SubprocVecEnv([make_env] * 32)      # or DummyVecEnv
    env = AioVecEnv([make_env] * 32)
    PPO("MlpPolicy", env).learn(100_000)

Results are what `DummyVecEnv` returns.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from aioenvs.engine.adapters.base import Call
from aioenvs.engine.config import BatchConfig, Timeouts
from aioenvs.engine.worker.random_streams import integer_seed
from aioenvs.errors import ClosedError, ConcurrencyError, shown
from aioenvs.hints import hints_at_keywords, lacking
from aioenvs.integrations import explained
from aioenvs.integrations.vectors.core import Autoreset, Vector, VectorResets, VectorSteps, one_each
from aioenvs.integrations.vectors.inside import assign, is_wrapped

try:
    import gymnasium
    from stable_baselines3.common.vec_env import VecEnv
except ModuleNotFoundError as error:
    raise explained(error, "sb3") from error

__all__ = ["AioVecEnv"]

ELSEWHERE = "; they are where its workers are, which get_attr and env_method ask (backend='serial' has them here)"

Indices = int | Iterable[int] | None


class AioVecEnv(VecEnv):
    """Many envs in worker processes, or threads, with the interface of `SubprocVecEnv`.

    Results are what `DummyVecEnv` returns: a finished env is reset in the same step, and its info has
    `terminal_observation`; rewards are float32. What an env, or the death of its worker, raises comes out as the errors
    of aioenvs do. With `backend="serial"`, `envs` has the env objects, as that of `DummyVecEnv`.

    Args:
        env_fns: A callable for each env; or one, or a Gymnasium id, for all of `n_envs`.
        n_envs: How many envs; None for as many as there are callables. Of factories that return vector envs, how many
            of these: `num_envs` is all of their envs together, and what is asked of one is asked of its vector env.
        start_method: "forkserver", "spawn" or "fork"; None for the first.
        num_processes: How many processes, or threads, host the envs; None for as many as there are cores, or envs of
            threads.
        backend: "process", "thread", "serial" for one env after the other in this process, or "ray" for actors of a
            Ray cluster.
        on_worker_death: "raise", or "restart" to build the envs of a dead worker anew; the transition that was lost
            is then reported as truncated.
        max_restarts: How often each worker may be restarted.
        step_timeout: Seconds that a command may take; None for as long as it likes.
        start_timeout: Seconds that a worker may take to build its envs.
        close_timeout: Seconds that closing the envs may take before their processes are killed.

    Raises:
        WorkerStartError: If a factory raised, hung or ended its process.
        SpecMismatchError: If the spaces do not have one structure, shape and dtype.
        ValueError: If a number or a name is out of range.
        TypeError: If something else is given than makes envs.

    >>> env = AioVecEnv("CartPole-v1", 2, num_processes=1)
    >>> env.reset().shape
    (2, 4)
    >>> observations, rewards, dones, infos = env.step([0, 1])
    >>> rewards, dones, infos[0]
    (array([1., 1.], dtype=float32), array([False, False]), {'TimeLimit.truncated': False})
    >>> env.close()
    """

    @hints_at_keywords
    def __init__(
        self,
        env_fns: Any,
        n_envs: int | None = None,
        *,
        start_method: str | None = None,
        num_processes: int | None = None,
        backend: str = "process",
        on_worker_death: str = "raise",
        max_restarts: int = 10,
        step_timeout: float | None = None,
        start_timeout: float | None = 60.0,
        close_timeout: float = 5.0,
    ) -> None:
        factories = one_each(env_fns, n_envs, "n_envs")
        config = BatchConfig.of(
            len(factories),
            factories,
            create_env_kwargs=None,
            num_processes=num_processes,
            backend=backend,
            mp_start_method=start_method,
            on_worker_death=on_worker_death,
            max_restarts=max_restarts,
            timeouts=Timeouts(start_timeout, step_timeout, close_timeout),
            called={"num_workers": "n_envs", "create_env_fn": "env_fns", "mp_start_method": "start_method"},
        )
        self._vector: Vector | None = Vector(
            config, Autoreset.SAME_STEP, type(self).__name__, reward="<f4", by_env=True
        )
        if (hosted := self._vector.hosted) is not None:
            self.envs = hosted
        first = self._vector.envs.descriptions[0]
        try:
            super().__init__(self._vector.envs.num_envs, first.observation_space, first.action_space)
        except BaseException:
            self.close()
            raise

    # -- resets and steps -------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Begin new episodes in all envs, with the seeds and options that were set, which are used up then.

        A step that is under way is dropped.

        Returns:
            The observations, `(n_envs, *shape)`, in a dict or tuple if the space is one; `reset_infos` has the infos.

        Raises:
            ClosedError: After `close`.
            Exception: Whatever an env raised, with its worker's traceback as a note.
        """
        vector = self._running("reset")
        vector.abandon()
        arguments: dict[int, dict[str, Any]] = {}
        for env, (seed, options) in enumerate(zip(self._seeds, self._options, strict=True)):
            arguments[env] = {"seed": seed, "options": options} if options else {"seed": seed}
        resets: VectorResets = vector.run(vector.envs.reset(arguments))
        self.reset_infos = [resets.infos.get(env, {}) for env in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return resets.observations

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Set the seeds of the next reset: that of the first env, from which the others follow by ones.

        Args:
            seed: A number of Python, numpy or torch, of which the envs get Python's; None to draw one.

        Returns:
            The seed of each env.

        Raises:
            TypeError: If it is no integer.
            ValueError: If it is negative.
        """
        return super().seed(None if seed is None else integer_seed(seed))

    def step_async(self, actions: Any) -> None:
        """Begin a step, for `step_wait` to finish.

        Args:
            actions: One for each env, `(n_envs, *shape)`; for a Dict or Tuple a sequence of actions, or a dict or tuple
                of such arrays. Two pairs for two envs are an action for each.

        Raises:
            SpecMismatchError: A `ValueError`, and a `TypeError` if it is nothing with an action for each env; or they
                do not fit. No env was stepped then.
            ConcurrencyError: If a step is under way.
            ClosedError: After `close`.
        """
        vector = self._free("step_async")
        vector.begin(vector.envs.begin_step(actions))

    def step_wait(self) -> Any:
        """Finish a step.

        Returns:
            Observations; rewards, float32 `(n_envs,)`; dones, bool `(n_envs,)`; and a list with each env's info.

        Raises:
            ConcurrencyError: If none is under way.
            ResetNeededError: If an env was not reset since it failed, or was replaced.
            WorkerDiedError: If a worker died; `reset` starts another one.
            WorkerTimeoutError: If it takes longer than `step_timeout`.
            Exception: Whatever an env raised, with its worker's traceback as a note; it needs a reset.
        """
        vector = self._running("step_wait")
        if vector.pending is None:
            raise ConcurrencyError("step_wait: no step is under way; step_async(actions) begins one")
        return self._result(vector.finish())

    def step(self, actions: Any) -> Any:
        """Step all envs; args, results and errors are those of `step_async` and `step_wait`."""
        vector = self._free("step")
        return self._result(vector.run(vector.envs.step(actions)))

    def _result(self, steps: VectorSteps) -> tuple[Any, ...]:
        observations, rewards, terminated, truncated, infos, finals, final_infos = steps
        each = [infos.get(env, {}) for env in range(self.num_envs)]
        for env, final in finals.items():
            self.reset_infos[env] = each[env]
            each[env] = {**final_infos.get(env, {}), "terminal_observation": final}
        limited = (truncated & ~terminated).tolist()
        for info, flag in zip(each, limited, strict=True):
            info["TimeLimit.truncated"] = flag
        return observations, rewards, terminated | truncated, each

    # -- calls ------------------------------------------------------------------------------------------

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each env.

        Args:
            method_name: Of the method.
            *method_args: Its arguments.
            indices: Which envs; None for all.
            **method_kwargs: Its keyword arguments.

        Returns:
            What each returned, in the order of the indices.

        Raises:
            AttributeError: If an env has no such method.
            IndexError: If there is no such env.
            Exception: Whatever the method raised.
        """
        return self._perform("env_method", Call("call", method_name, method_args, method_kwargs), indices)

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """The value of an attribute of each env; for a method, what calls it there.

        Args:
            attr_name: Of the attribute.
            indices: Which envs; None for all.

        Raises:
            AttributeError: If an env has no such attribute.
            IndexError: If there is no such env.
            TypeError: If a value cannot leave its env, such as a lock.
        """
        envs = self._chosen(indices)
        values: list[Any] = []
        for env, found in zip(envs, self._perform("get_attr", Call("get", attr_name), envs), strict=True):
            if found.error is not None:
                raise found.error
            method = functools.partial(self._call_one, env, attr_name)
            values.append(method if found.is_callable else found.value)
        return values

    def _call_one(self, env: int, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one env."""
        return self.env_method(name, *args, indices=env, **kwargs)[0]

    def has_attr(self, attr_name: str) -> bool:
        """Whether all envs have an attribute, also one that cannot leave them."""
        try:
            self._perform("has_attr", Call("get", attr_name), None)
        except AttributeError:
            return False
        return True

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of each env, of the outermost wrapper that has it; of the outermost one, if none has.

        Args:
            attr_name: Of the attribute.
            value: For all of them.
            indices: Which envs; None for all.

        Raises:
            IndexError: If there is no such env.
        """
        self._perform("set_attr", Call("apply", "", (assign, attr_name, value)), indices)

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: Indices = None
    ) -> list[bool]:
        """Whether each env has a wrapper of this class, or of one derived from it, around it."""
        call = Call("apply", "", (is_wrapped, wrapper_class.__module__, wrapper_class.__qualname__))
        return self._perform("env_is_wrapped", call, indices)

    def _perform(self, command: str, call: Call, indices: Indices) -> list[Any]:
        """Ask the same of some envs; the list of what each answered."""
        vector = self._free(command)
        hosts = [vector.envs.parts.host_of(env) for env in self._chosen(indices)]
        calls = dict.fromkeys(hosts, call)
        answers = dict(zip(calls, vector.run(vector.envs.perform(calls, command)), strict=True)) if calls else {}
        return [answers[host] for host in hosts]

    def _chosen(self, indices: Indices) -> list[int]:
        """The envs that these indices mean, as those of a list would.

        Raises:
            IndexError: If there is no such env.
            TypeError: If one is no integer.
        """
        numbers = range(self.num_envs)
        if indices is None:
            return list(numbers)
        try:
            return [numbers[operator.index(index)] for index in ([indices] if isinstance(indices, int) else indices)]
        except (IndexError, TypeError) as error:
            raise type(error)(f"{error}: expected indices of {len(numbers)} envs, found {shown(indices)}") from None

    def get_images(self) -> Sequence[Any]:
        """The image that each env renders; None, and a warning, if `render_mode` is not "rgb_array"."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {shown(self.render_mode)}, but this method assumes it is `rgb_array` to obtain "
                "images.",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self.env_method("render")

    def __getattr__(self, name: str) -> Any:
        """Say who has what another library may ask for.

        Raises:
            AttributeError: Always.
        """
        raise lacking(self, name, ELSEWHERE if name == "envs" else "")

    # -- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all envs and end the workers, within `close_timeout`, whatever they do. Closing again does nothing.

        Raises:
            ConcurrencyError: If another thread is in the middle of a call; nothing is closed then.
        """
        vector = self._vector
        if vector is not None:
            vector.close()
            self._vector = None

    def _running(self, what: str) -> Vector:
        if self._vector is None or self._vector.closed:
            raise ClosedError(f"{what}: {type(self).__name__} was closed, so its envs are gone; make another one")
        return self._vector

    def _free(self, what: str) -> Vector:
        vector = self._running(what)
        if vector.pending is not None:
            raise ConcurrencyError(f"{what}: a step is still under way; step_wait() finishes it")
        return vector
