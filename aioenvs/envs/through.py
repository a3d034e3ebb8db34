"""How a worker drives a wrapper: it sees through to the wrapped env, and makes no TensorDict for a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters import Call, Handling, ResetArguments
from aioenvs.engine.layout import Arrays
from aioenvs.engine.metadata import INPUT, NEXT, ROOT, SLOTS, STATUS
from aioenvs.engine.spaces import Objects
from aioenvs.envs.adapter import TensorDictAdapter
from aioenvs.envs.gym import GymEnv, GymWrapper
from aioenvs.envs.pettingzoo import PettingZooEnv, PettingZooWrapper
from aioenvs.envs.wrapper import EnvWrapper
from aioenvs.specs import Bounded, MultiOneHot, NonTensor, OneHot, TensorSpec, Unbounded
from aioenvs.specs.masks import MaskedSpec
from aioenvs.storage import storage_dtype, tensor_of
from aioenvs.trees import Key, Tree, region_trees

__all__ = ["WrapperAdapter", "adapted", "can_see_through"]

WRAPPERS = (GymEnv, GymWrapper, PettingZooEnv, PettingZooWrapper)

Decoder = Callable[[], None]


def can_see_through(env: Any) -> bool:
    """Whether an env is a wrapper of this package whose values are those of its spaces, but for one-hot actions.

    One with info readers, specs of its own, another device, or values that are no tensors is not.
    """
    if type(env) not in WRAPPERS or (env.device and env.device.type != "cpu"):
        return False
    if isinstance(env, GymWrapper) and env.info_dict_reader:
        return False
    spaces, trees = env._adapter.metadata.leaves, region_trees(env.output_spec, env.input_spec)
    specs, actions = trees[NEXT].leaves, trees[INPUT].leaves  # among the latter states, which no wrapped env has
    if specs.keys() != {leaf.key for leaf in spaces[NEXT]} or actions.keys() != {leaf.key for leaf in spaces[INPUT]}:
        return False
    return all(_is_same(specs[leaf.key], leaf) for leaf in spaces[NEXT]) and all(
        _is_one_hot(actions[leaf.key]) or _is_same(actions[leaf.key], leaf) for leaf in spaces[INPUT]
    )


def _is_same(spec: TensorSpec, leaf: Any) -> bool:
    """Whether the values of a spec are those of a leaf, but perhaps for a dim of size 1."""
    if isinstance(spec, NonTensor) or _is_one_hot(spec) or storage_dtype(spec.dtype) != leaf.dtype:
        return False
    return tuple(spec.shape) == leaf.shape or (not leaf.shape and tuple(spec.shape) == (1,))


def _is_one_hot(spec: TensorSpec) -> bool:
    return isinstance(spec, OneHot | MultiOneHot)


class WrapperAdapter(TensorDictAdapter):
    """Drives the env inside a wrapper for which `can_see_through` holds.

    Args:
        env: The env.
        env_index: Its index, for messages.
        handling: What is done about its random numbers; its values take the same way in any case.
    """

    def __init__(self, env: EnvWrapper, env_index: int, handling: Handling) -> None:
        super().__init__(env, env_index, handling._replace(by_reference=False))
        self._inner = env.make_adapter(env_index, env._who, handling.generators)
        self._decoders: list[Decoder] = []
        self._done_leaves = Tree.of(env.full_done_spec).leaves.keys()

    def bind(self, arrays: Mapping[str, Arrays], row: int) -> None:
        self._decoders.clear()
        own: dict[str, Arrays] = {STATUS: {key: array[row : row + 1] for key, array in arrays[STATUS].items()}}
        names = [(INPUT, INPUT), *(pair for slot in SLOTS for pair in slot.items())]
        for region, name in names:
            own[name] = {}
            for leaf in self._inner.metadata.leaves[region]:
                key, shape = leaf.key, leaf.shape
                values, spec = arrays[name][key][row : row + 1], self._trees[region].leaves[key]
                if region == INPUT and not isinstance(spec, Bounded | Unbounded):
                    own[name][key] = np.zeros((1, *shape), leaf.dtype)
                    self._decoders.append(self._decoder(key, spec, values[0, ...], own[name][key]))
                else:
                    own[name][key] = values.reshape(1, *shape)
        self._root_flags = [
            [array for key, array in own[slot[ROOT]].items() if key in self._done_leaves] for slot in SLOTS
        ]
        self._inner.bind(own, 0)

    def take_turn(self, turn: int) -> None:
        super().take_turn(turn)
        self._inner.take_turn(turn)

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

        def decode_integers() -> None:
            if (row < low).any() or (row > high).any():
                raise self.env._mismatch(spec, key, repr(value))
            target[0] = row

        if isinstance(spec, MaskedSpec) and spec._mask is None and row.dtype.kind in "iu" and row.shape == spec.shape:
            low, high = spec.low.numpy(), spec.high.numpy()
            return decode_integers
        plain = type(spec) is OneHot and row.ndim == 1 and spec.mask is None and not any(spec._start)
        return decode_one if plain else decode

    def seed(self, seed: int) -> None:
        self._inner.seed(seed)

    def reset(self, arguments: ResetArguments) -> None:
        try:
            self._inner.reset(ResetArguments(arguments.kwargs))
        finally:
            for flag in self._root_flags[
                self._turn & 1
            ]:  # where the caller's are, which the wrapped env does not replace
                flag[...] = False

    def step(self, maybe_reset: bool) -> bool:
        for decode in self._decoders:
            decode()
        return self._inner.step(maybe_reset)

    def accept(self, objects: Objects) -> None:
        """Do nothing: all that goes in has its row."""

    def objects(self, region: str) -> Objects:
        return {}

    def perform(self, call: Call) -> Any:
        try:
            return super().perform(call)
        finally:
            if self.env._pending_seed is not None:  # a call may have seeded the env
                self._inner.seed(self.env._pending_seed)
                self.env._pending_seed = None


def adapted(env: Any, env_index: int, handling: Handling) -> TensorDictAdapter:
    """The adapter for an env that deals in TensorDicts. The engine finds this function by its name.

    Args:
        env: The env.
        env_index: Its index, for messages.
        handling: How it is driven.
    """
    return (WrapperAdapter if can_see_through(env) else TensorDictAdapter)(env, env_index, handling)
