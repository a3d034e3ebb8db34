"""Gymnasium envs as torch-native ones: an adapter drives the env, and TensorDicts are made of the adapter's rows."""

from __future__ import annotations

import copy
import functools
import inspect
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDict, TensorDictBase

from aioenvs.engine.adapters.agents import has_agents
from aioenvs.engine.adapters.base import ResetArguments
from aioenvs.engine.adapters.gymnasium import DONE_KEYS, REWARD_KEY, GymAdapter
from aioenvs.engine.adapters.spaces import conform
from aioenvs.engine.layout import INPUT, NEXT, ROOT, Arrays, EnvMetadata, Key, form_families
from aioenvs.engine.worker.random_streams import Generators
from aioenvs.envs.base import EnvBase
from aioenvs.envs.info import Info, ReadsInfo
from aioenvs.errors import SpecMismatchError, shown
from aioenvs.hints import OWN, hint_at, hints_at_keywords, keywords_of, not_for_transforms, passed_on
from aioenvs.registry import find_spec
from aioenvs.specs import Bounded, Categorical, Composite, NonTensor, TensorSpec, Unbounded
from aioenvs.specs.base import DeviceLike
from aioenvs.specs.inferred import leaf_spec
from aioenvs.tensors.storage import cast_exactly, is_convertible
from aioenvs.tensors.trees import nested_key, non_tensor


class EnvWrapper(EnvBase):
    """An env around one that its adapter drives.

    A subclass calls `_wrap` once, and sets `_action_leaves` and the specs then. What the wrapped env has and this one
    has not can be read and set here too.
    """

    _action_leaves: dict[Key, TensorSpec]
    _inplace_update = not_for_transforms

    @abstractmethod
    def make_adapter(self, env_index: int, who: str, generators: Generators = Generators.LEFT) -> GymAdapter:
        """An adapter for what is wrapped.

        Args:
            env_index: The env's index.
            who: What it is called in messages.
            generators: What becomes of the process's random generators when it is seeded.
        """

    @abstractmethod
    def _outcome(self, region: str) -> TensorDictBase:
        """Return the rows that the adapter wrote as a new TensorDict."""

    def _wrap(self, env: Any) -> None:
        self._env = env
        self._pending_seed: int | None = None
        self._bind()

    def _bind(self) -> None:
        """Connect the env to arrays of its own."""
        self._who = repr(self)
        self._adapter = self.make_adapter(0, self._who)
        (family,) = form_families([self._adapter.metadata])
        self._arrays: dict[str, Arrays] = family.layout.arrays(bytearray(family.layout.end))
        self._adapter.bind(self._arrays, 0)

    # Stepping

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        if self._pending_seed is not None:
            kwargs.setdefault("seed", self._pending_seed)
        self._adapter.reset(ResetArguments(kwargs))
        self._pending_seed = None
        return self._outcome(ROOT)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._store_action(tensordict)
        self._adapter.step(maybe_reset=False)
        return self._outcome(NEXT)

    def _set_seed(self, seed: int | None) -> None:
        self._pending_seed = seed

    def _store_action(self, tensordict: TensorDictBase) -> None:
        objects: dict[Key, Any] = {}
        for key, spec in self._action_leaves.items():
            value = tensordict.get(key, None)
            if value is None:
                raise action_mismatch(self, spec, key, f"nothing among the keys {list(tensordict.keys(True))!r}")
            if isinstance(spec, NonTensor):
                objects[key] = spec.to_numpy(value)
            else:
                self._store(spec, value, key, self._arrays[INPUT][key])
        self._adapter.accept(objects)

    def _store(self, spec: TensorSpec, value: Any, key: Key, array: NDArray[Any]) -> None:
        """Store a tensor that fits; whether a number is within the bounds of a Box is the env's affair."""
        if not isinstance(value, torch.Tensor) or value.shape != spec.shape:
            raise action_mismatch(self, spec, key, shown(value))
        shape = array.shape[1:]
        if isinstance(spec, Bounded | Unbounded):
            given = spec.to_numpy(value).reshape(shape)
            array[0] = conform(given, array.dtype, shape, key, self._who, whole=True)
            return
        dtype: Any = spec.dtype
        exact = is_convertible(value, dtype) or not torch.can_cast(value.dtype, dtype)
        whole = cast_exactly(value, dtype) if exact else value.to(dtype)
        if whole is None or not spec.is_in(whole):
            raise action_mismatch(self, spec, key, shown(value))
        array[0] = np.reshape(spec.to_numpy(whole), shape)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Fill in random actions, drawn from torch's generator, and samples of the spaces that are `NonTensor`.

        Args:
            tensordict: Where to put them, of shape (); None for a new TensorDict.

        Returns:
            The same TensorDict, with a value for every action key.
        """
        result = super().rand_action(tensordict)
        for key, space in self.object_action_spaces.items():
            space.seed(int(torch.randint(2**31, ())))
            result.set(nested_key(key), non_tensor(space.sample(), self._action_leaves[key].ndim))
        return result

    @property
    def object_action_spaces(self) -> dict[Key, Any]:
        """Copies of the action spaces whose values are no tensors, by key; sampling them leaves the env's own alone."""
        spaces = self._adapter.metadata.specs["action"]
        loose = (key for key, spec in self._action_leaves.items() if isinstance(spec, NonTensor))
        return {key: copy.deepcopy(spaces[key]) for key in loose}

    # The wrapped env

    @property
    def env(self) -> Any:
        """The wrapped env."""
        return self._env

    def render(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the env's own `render` returns."""
        return self._env.render(*args, **kwargs)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the env, see `EnvBase.close`."""
        was_open = not self.is_closed
        super().close(raise_if_closed=raise_if_closed)
        if was_open:
            self._adapter.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            env = self.__dict__.get("_env")
            if env is None or name.startswith("__"):
                raise
        # a wrapper's attributes do not include those of what it wraps
        look_up = getattr(env, "get_wrapper_attr", functools.partial(getattr, env))
        try:
            return look_up(name)
        except AttributeError as error:
            if hint := hint_at(name):
                raise AttributeError(f"{error}{hint}", name=name, obj=self) from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        env = self.__dict__.get("_env")
        own = env is None or name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if own or not hasattr(self, name):
            super().__setattr__(name, value)
        else:  # what is read from the wrapped env is written to it
            getattr(env, "set_wrapper_attr", functools.partial(setattr, env))(name, value)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name not in ("_adapter", "_arrays")}
        return {**own, "_needs_reset": self._adapter.needs_reset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        needs_reset = state.pop("_needs_reset")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._bind()
        self._adapter.needs_reset = needs_reset

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env={self._env}, batch_size={self.batch_size}, device={self.device})"


def metadata_of(env: EnvWrapper) -> EnvMetadata:
    """The description of the env in a wrapper, as its adapter gives it."""
    return env._adapter.metadata


def take_pending_seed(env: EnvWrapper) -> int | None:
    """Return the seed that the next reset would use, which does not use it any more; None if there is none."""
    seed, env._pending_seed = env._pending_seed, None
    return seed


def action_mismatch(env: EnvWrapper, spec: TensorSpec, key: Key, found: str) -> SpecMismatchError:
    """Return the error for an action that is none of its spec."""
    return SpecMismatchError(f"{env!r}: expected {shown(spec)} at {key!r}, found {found}")


class GymWrapper(ReadsInfo, EnvWrapper):
    """A Gymnasium env as an `EnvBase`.

    A Dict observation puts its keys at the root, a Tuple puts "0", "1", ... under `observation`, anything else is
    `observation`; a Dict or Tuple action nests the same way under `action`. Discrete and MultiDiscrete are one-hot
    (int64) unless `categorical_action_encoding`; a number without dims has shape (1,). Text, Sequence, Graph, OneOf
    and unknown spaces are `NonTensor`. What a wrapped env has and this one has not, such as
    `env.spec.max_episode_steps`, can be read and set here too.

    Args:
        env: A single env with Gymnasium's signatures.
        categorical_action_encoding: Keep the integers of Discrete and MultiDiscrete, in observations too.
        frame_skip: How often each action is repeated, until the episode ends; rewards are summed.
        device: Where results go; None for CPU tensors in TensorDicts without a device.
        batch_size: Must be empty: `SerialEnv` and `ParallelEnv` batch envs.
        allow_done_after_reset: See `EnvBase`.

    Raises:
        TypeError: This is no env, or a vector env.
        SpecMismatchError: It has no spaces, an observation whose key is taken, or a dtype that tensors do not have.

    >>> import gymnasium
    >>> env = GymWrapper(gymnasium.make("Pendulum-v1"), frame_skip=2)
    >>> td = env.rand_step(env.reset(seed=0))
    >>> td["action"].shape, td["next", "reward"].shape, env.spec.max_episode_steps
    (torch.Size([1]), torch.Size([1]), 200)
    """

    @hints_at_keywords
    def __init__(
        self,
        env: Any,
        categorical_action_encoding: bool = False,
        *,
        frame_skip: int | None = None,
        device: DeviceLike | None = None,
        batch_size: Iterable[int] = (),
        allow_done_after_reset: bool = False,
    ) -> None:
        _require_single(env, type(self).__name__)
        if tuple(batch_size):
            raise ValueError(
                f"expected an empty batch_size, found {shown(batch_size)}; SerialEnv and ParallelEnv batch envs"
            )
        super().__init__(device=device, allow_done_after_reset=allow_done_after_reset)
        self._played = _Played(env, frame_skip)
        self._wrap(env)
        self._observation_leaves = self._leaves("observation", one_hot=not categorical_action_encoding)
        self._action_leaves = self._leaves("action", one_hot=not categorical_action_encoding)
        self.observation_spec = Composite(self._observation_leaves)
        self.full_action_spec = Composite(self._action_leaves)
        self.reward_spec = Unbounded((1,), dtype=torch.float32, device="cpu")
        self.done_spec = Composite({key[0]: Categorical(2, (1,), dtype=torch.bool, device="cpu") for key in DONE_KEYS})

    def make_adapter(self, env_index: int, who: str, generators: Generators = Generators.LEFT) -> GymAdapter:
        """An adapter for what is wrapped, see `EnvWrapper.make_adapter`."""
        return GymAdapter(self._played, env_index, generators=generators, who=who)

    def _leaves(self, kind: str, *, one_hot: bool) -> dict[Key, TensorSpec]:
        spaces = self._adapter.metadata.specs[kind]
        return {key: _value_spec(space, one_hot=one_hot) for key, space in spaces.items()}

    def _outcome(self, region: str) -> TensorDictBase:
        values = self._observations(region)
        if region == NEXT:
            values.update(
                {key: torch.from_numpy(self._arrays[region][key][0].copy()) for key in (REWARD_KEY, *DONE_KEYS)}
            )
        return self._with_info(TensorDict(values, batch_size=(), device=self.device), self._played.info)

    def _observations(self, region: str) -> dict[Key, Any]:
        arrays, objects = self._arrays[region], self._adapter.objects(region)
        values: dict[Key, Any] = {}
        for key, spec in self._observation_leaves.items():
            try:
                values[key] = NonTensorData(objects[key]) if key in objects else spec.encode(arrays[key][0])
            except ValueError as error:
                raise SpecMismatchError(f"{self!r}: at {key!r}: {error}") from None
        return values

    def _probe(self) -> list[Info]:
        self._played.reset()
        first = dict(self._played.info)
        self._played.step(copy.deepcopy(self._env.action_space).sample())
        return [first, dict(self._played.info)]


class GymEnv(GymWrapper):
    """A registered Gymnasium env as an `EnvBase`.

    Args:
        env_name: As `gymnasium.make` takes it.
        categorical_action_encoding: See `GymWrapper`.
        frame_skip: See `GymWrapper`; it multiplies what the env does by itself.
        device: See `GymWrapper`.
        batch_size: Must be empty.
        allow_done_after_reset: See `EnvBase`.
        **kwargs: For `gymnasium.make`, whose passive checker is off unless `disable_env_checker=False`.

    Raises:
        ImportError: Gymnasium is not installed.
        gymnasium.error.Error: The name is not registered.

    >>> env = GymEnv("CartPole-v1")
    >>> env.action_spec
    OneHot(n=2, shape=(2,), dtype=int64, device=cpu)
    >>> GymEnv("CartPole-v1", categorical_action_encoding=True).action_spec
    Categorical(n=2, shape=(), dtype=int64, device=cpu)
    """

    def __init__(
        self,
        env_name: str,
        categorical_action_encoding: bool = False,
        *,
        frame_skip: int | None = None,
        device: DeviceLike | None = None,
        batch_size: Iterable[int] = (),
        allow_done_after_reset: bool = False,
        **kwargs: Any,
    ) -> None:
        spec = find_spec(env_name)
        import gymnasium

        with passed_on(kwargs, keywords_of(GymEnv.__init__), OWN):
            env = gymnasium.make(spec, **{"disable_env_checker": True, **kwargs})
        self._env_name = env_name
        super().__init__(
            env,
            categorical_action_encoding,
            frame_skip=frame_skip,
            device=device,
            batch_size=batch_size,
            allow_done_after_reset=allow_done_after_reset,
        )

    @property
    def env_name(self) -> str:
        """The name of the env from which this one was made."""
        return self._env_name

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env={self._env_name}, batch_size={self.batch_size}, device={self.device})"


class _Played:
    """An env that repeats each action, and keeps the last info."""

    def __init__(self, env: Any, frame_skip: int | None) -> None:
        if frame_skip is not None and (not isinstance(frame_skip, int) or frame_skip < 1):
            raise ValueError(f"expected a frame_skip of at least 1, or None, found {shown(frame_skip)}")
        self._env = env
        self._repeats = frame_skip or 1
        self.info: Info = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def __str__(self) -> str:
        return shown(self._env, str)

    def reset(self, **kwargs: Any) -> Any:
        result = self._env.reset(**kwargs)
        self._keep(result)
        return result

    def step(self, action: Any) -> Any:
        result = self._env.step(action) if self._repeats == 1 else self._repeated(action)
        self._keep(result)
        return result

    def _repeated(self, action: Any) -> Any:
        total: Any = 0.0
        for _ in range(self._repeats):
            result = self._env.step(copy.deepcopy(action))  # the env may change it
            if not isinstance(result, tuple) or len(result) != 5:
                return result  # the adapter says what is wrong
            total = total + result[1]
            if result[2] or result[3]:
                break
        return (result[0], total, *result[2:])

    def _keep(self, result: Any) -> None:
        info = result[-1] if isinstance(result, tuple) else None
        self.info = info if isinstance(info, Mapping) else {}


def _require_single(env: Any, wrapper: str) -> None:
    if isinstance(env, str):
        raise TypeError(f"{wrapper} wraps an env, found {shown(env)}; GymEnv({shown(env)}) makes one")
    if isinstance(env, type) or not all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        raise TypeError(f"{wrapper} wraps an env, with methods reset and step, found {shown(env)}")
    if has_agents(env):
        raise TypeError(f"{wrapper} wraps an env of one agent, found {shown(env)}; PettingZooWrapper wraps it")
    if inspect.iscoroutinefunction(env.step) or inspect.iscoroutinefunction(env.reset):
        raise TypeError(f"{wrapper} wraps an env whose methods return results, found coroutine methods in {shown(env)}")
    if hasattr(env, "num_envs") and hasattr(env, "single_observation_space"):
        raise TypeError(
            f"{wrapper} wraps a single env, found the vector env {shown(env)}; "
            "give SerialEnv or ParallelEnv a function that makes one of its envs"
        )


def _value_spec(space: Any, *, one_hot: bool) -> TensorSpec:
    """The spec of a leaf's values; a Box without dims gets one, as in TorchRL."""
    spec = leaf_spec(space, "cpu", one_hot=one_hot)
    if isinstance(spec, NonTensor):
        return NonTensor(())
    return spec.unsqueeze(0) if isinstance(spec, Bounded | Unbounded) and not spec.ndim else spec
