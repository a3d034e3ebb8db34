"""What wraps an env that deals in arrays: an adapter drives it, and TensorDicts are made of the adapter's rows."""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from aioenvs.engine.adapters import ResetArguments
from aioenvs.engine.gym_adapter import GymAdapter
from aioenvs.engine.layout import Arrays, Key
from aioenvs.engine.metadata import INPUT, NEXT, ROOT, form_families
from aioenvs.engine.spaces import conform
from aioenvs.engine.streams import Generators
from aioenvs.envs.base import EnvBase
from aioenvs.errors import SpecMismatchError, shown
from aioenvs.peers import hint_at, not_for_transforms
from aioenvs.specs import Bounded, NonTensor, TensorSpec, Unbounded
from aioenvs.storage import cast_exactly, is_convertible
from aioenvs.trees import nested_key, non_tensor

__all__ = ["EnvWrapper"]


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
        """What the adapter wrote, as a new TensorDict."""

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
                raise self._mismatch(spec, key, f"nothing among the keys {list(tensordict.keys(True))!r}")
            if isinstance(spec, NonTensor):
                objects[key] = spec.to_numpy(value)
            else:
                self._store(spec, value, key, self._arrays[INPUT][key])
        self._adapter.accept(objects)

    def _store(self, spec: TensorSpec, value: Any, key: Key, array: NDArray[Any]) -> None:
        """Store a tensor that fits; whether a number is within the bounds of a Box is the env's affair."""
        if not isinstance(value, torch.Tensor) or value.shape != spec.shape:
            raise self._mismatch(spec, key, shown(value))
        shape = array.shape[1:]
        if isinstance(spec, Bounded | Unbounded):
            given = spec.to_numpy(value).reshape(shape)
            array[0] = conform(given, array.dtype, shape, key, self._who, whole=True)
            return
        dtype: Any = spec.dtype
        exact = is_convertible(value, dtype) or not torch.can_cast(value.dtype, dtype)
        whole = cast_exactly(value, dtype) if exact else value.to(dtype)
        if whole is None or not spec.is_in(whole):
            raise self._mismatch(spec, key, shown(value))
        array[0] = np.reshape(spec.to_numpy(whole), shape)

    def _mismatch(self, spec: TensorSpec, key: Key, found: str) -> SpecMismatchError:
        return SpecMismatchError(f"{self!r}: expected {shown(spec)} at {key!r}, found {found}")

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
