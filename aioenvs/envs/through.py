"""How a worker drives a `GymEnv`: it sees through to the Gymnasium env, and makes no TensorDict for a step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters import Call, Handling, ResetArguments
from aioenvs.engine.gym_adapter import GymAdapter
from aioenvs.engine.layout import Arrays
from aioenvs.engine.metadata import INPUT, NEXT, ROOT, STATUS, EnvMetadata
from aioenvs.engine.spaces import Objects
from aioenvs.envs.adapter import TensorDictAdapter
from aioenvs.envs.gym import GymEnv, GymWrapper
from aioenvs.specs import Bounded, Composite, MultiOneHot, NonTensor, OneHot, TensorSpec, Unbounded
from aioenvs.storage import storage_dtype, tensor_of
from aioenvs.trees import Key, region_trees

__all__ = ["GymEnvAdapter", "SeenThrough", "adapted", "can_see_through", "has_values_of"]

Decoder = Callable[[], None]  # converts one value, on its way in or out
NO_NAMES: Mapping[Key, Key] = {}


def can_see_through(env: Any) -> bool:
    """Whether an env is a `GymEnv` or `GymWrapper` whose values are those of its spaces, but for one-hot actions.

    One with info readers, specs of its own, another device, or values that are no tensors is not.
    """
    if type(env) not in (GymEnv, GymWrapper) or env.info_dict_reader or (env.device and env.device.type != "cpu"):
        return False
    return has_values_of(env._adapter.metadata, env.output_spec, env.input_spec)


def has_values_of(
    gym: EnvMetadata,
    output_spec: Composite,
    input_spec: Composite,
    names: Mapping[Key, Key] = NO_NAMES,
    *,
    encodes: bool = False,
) -> bool:
    """Whether values of these specs are those of a Gymnasium env's spaces, but for one-hot actions.

    Args:
        gym: What the Gymnasium env says of itself.
        output_spec: Of `full_observation_spec`, `full_reward_spec` and `full_done_spec`.
        input_spec: Of `full_action_spec` and `full_state_spec`.
        names: What the specs call values of the spaces, where that is not the same.
        encodes: Whether observed integers from 0 on may be one-hot as well.
    """
    trees = region_trees(output_spec, input_spec)
    spaces = {
        region: [replace(leaf, key=names.get(leaf.key, leaf.key)) for leaf in leaves]
        for region, leaves in gym.leaves.items()
    }
    specs, actions = trees[NEXT].leaves, trees[INPUT].leaves  # among the latter states, which no Gymnasium env has
    if specs.keys() != {leaf.key for leaf in spaces[NEXT]} or actions.keys() != {leaf.key for leaf in spaces[INPUT]}:
        return False
    counted = {names.get(key, key) for key, space in gym.specs["observation"].items() if _counts_from_0(space)}
    return all(
        _is_same(specs[leaf.key], leaf) or (encodes and leaf.key in counted and type(specs[leaf.key]) is OneHot)
        for leaf in spaces[NEXT]
    ) and all(_is_one_hot(actions[leaf.key]) or _is_same(actions[leaf.key], leaf) for leaf in spaces[INPUT])


def _counts_from_0(space: Any) -> bool:
    """Whether values of a Gymnasium space are single integers from 0 on."""
    return hasattr(space, "n") and bool(getattr(space, "start", None) == 0)


def _is_same(spec: TensorSpec, leaf: Any) -> bool:
    """Whether the values of a spec are those of a leaf, but perhaps for a dim of size 1."""
    if isinstance(spec, NonTensor) or _is_one_hot(spec) or storage_dtype(spec.dtype) != leaf.dtype:
        return False
    return tuple(spec.shape) == leaf.shape or (not leaf.shape and tuple(spec.shape) == (1,))


def _is_one_hot(spec: TensorSpec) -> bool:
    return isinstance(spec, OneHot | MultiOneHot)


class SeenThrough(TensorDictAdapter):
    """Drives the Gymnasium env inside an env whose values are those of its spaces, but for one-hot actions.

    Args:
        env: The env.
        env_index: Its index, for messages.
        handling: What is done about its random numbers; its values take the same way in any case.
        gym: Drives the Gymnasium env.
        names: What the env calls values of the spaces, where that is not the same.
    """

    def __init__(
        self,
        env: Any,
        env_index: int,
        handling: Handling,
        gym: GymAdapter,
        names: Mapping[Key, Key] = NO_NAMES,
    ) -> None:
        super().__init__(env, env_index, handling._replace(by_reference=False))
        self._gym = gym
        self._names = names
        self._decoders: list[Decoder] = []
        self._encoders: dict[str, list[Decoder]] = {NEXT: [], ROOT: []}

    def bind(self, arrays: Mapping[str, Arrays], row: int) -> None:
        for converters in (self._decoders, *self._encoders.values()):
            converters.clear()
        own: dict[str, Arrays] = {STATUS: {key: array[row : row + 1] for key, array in arrays[STATUS].items()}}
        for region, leaves in self._gym.metadata.leaves.items():
            own[region] = {}
            for leaf in leaves:
                key, shape = leaf.key, leaf.shape
                name = self._names.get(key, key)
                values, spec = arrays[region][name][row : row + 1], self._trees[region].leaves[name]
                if region == INPUT and not isinstance(spec, Bounded | Unbounded):
                    own[region][key] = np.zeros((1, *shape), leaf.dtype)
                    self._decoders.append(self._decoder(key, spec, values[0, ...], own[region][key]))
                elif region != INPUT and _is_one_hot(spec):
                    own[region][key] = np.zeros((1, *shape), leaf.dtype)
                    self._encoders[region].append(self._encoder(key, values[0, ...], own[region][key]))
                else:
                    own[region][key] = values.reshape(1, *shape)
        self._gym.bind(own, 0)

    def _decoder(self, key: Key, spec: TensorSpec, row: NDArray[Any], target: NDArray[Any]) -> Decoder:
        """A function that brings the action of the next step from the env's row to where its adapter reads it.

        Raises:
            SpecMismatchError: From that function, if the value is none of the spec.
        """
        value = tensor_of(row, spec.dtype)

        def decode() -> None:
            if not spec.is_in(value):
                raise self.env._mismatch(spec, key, repr(value))
            target[0] = np.reshape(spec.to_numpy(value), target.shape[1:])

        def decode_one() -> None:
            choice = int(row.argmax())
            if row[choice] != 1 or np.count_nonzero(row) != 1:
                raise self.env._mismatch(spec, key, repr(value))
            target[0] = choice

        plain = type(spec) is OneHot and row.ndim == 1 and spec.mask is None and not any(spec._start)
        return decode_one if plain else decode

    def _encoder(self, key: Key, row: NDArray[Any], source: NDArray[Any]) -> Decoder:
        """A function that brings the integer which was observed to the env's row, as a one-hot vector.

        Raises:
            SpecMismatchError: From that function, if it is out of range.
        """

        def encode() -> None:
            choice = int(source[0])
            if not 0 <= choice < len(row):
                raise self._mismatch(key, f"an integer below {len(row)}", str(choice))
            row[...] = 0
            row[choice] = 1

        return encode

    def seed(self, seed: int) -> None:
        self._gym.seed(seed)

    def reset(self, arguments: ResetArguments) -> None:
        self._gym.reset(ResetArguments(arguments.kwargs))
        for encode in self._encoders[ROOT]:
            encode()

    def step(self, maybe_reset: bool) -> bool:
        for decode in self._decoders:
            decode()
        done = self._gym.step(maybe_reset)
        for encode in self._encoders[NEXT]:
            encode()
        if done and maybe_reset:
            for encode in self._encoders[ROOT]:
                encode()
        return done

    def accept(self, objects: Objects) -> None:
        """Do nothing: all that goes in has its row."""

    def objects(self, region: str) -> Objects:
        return {}


class GymEnvAdapter(SeenThrough):
    """Drives the Gymnasium env inside a `GymEnv` for which `can_see_through` holds.

    Args:
        env: The env.
        env_index: Its index, for messages.
        handling: What is done about its random numbers; its values take the same way in any case.
    """

    def __init__(self, env: GymWrapper, env_index: int, handling: Handling) -> None:
        gym = GymAdapter(env._played, env_index, generators=handling.generators, who=env._who)
        super().__init__(env, env_index, handling, gym)

    def perform(self, call: Call) -> Any:
        try:
            return super().perform(call)
        finally:
            if self.env._pending_seed is not None:  # a call may have seeded the env
                self._gym.seed(self.env._pending_seed)
                self.env._pending_seed = None


def adapted(env: Any, env_index: int, handling: Handling) -> TensorDictAdapter:
    """The adapter for an env that deals in TensorDicts. The engine finds this function by its name.

    Args:
        env: The env.
        env_index: Its index, for messages.
        handling: How it is driven.
    """
    if any(base.__module__.startswith("torchrl.") for base in type(env).__mro__):
        theirs = importlib.import_module("aioenvs.integrations.torchrl.worker")
        adapter: TensorDictAdapter = theirs.adapted(env, env_index, handling)
        return adapter
    return (GymEnvAdapter if can_see_through(env) else TensorDictAdapter)(env, env_index, handling)
