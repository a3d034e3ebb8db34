"""How a worker drives a wrapper: it sees through to the wrapped env, and makes no TensorDict for a step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters.base import Call, Handling, ResetArguments
from aioenvs.engine.adapters.gymnasium import GymAdapter
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.layout import HALVES, INPUT, NEXT, ROOT, STATUS, WRITE_ROOT, Arrays, EnvMetadata, Key, Leaf
from aioenvs.envs.adapter import TensorDictAdapter
from aioenvs.envs.gym import EnvWrapper, GymEnv, GymWrapper, action_mismatch, metadata_of, take_pending_seed
from aioenvs.envs.pettingzoo import PettingZooEnv, PettingZooWrapper
from aioenvs.errors import shown
from aioenvs.specs import Bounded, Composite, MultiOneHot, NonTensor, OneHot, TensorSpec, Unbounded
from aioenvs.specs.onehot import MaskedSpec
from aioenvs.tensors.storage import storage_dtype, tensor_of
from aioenvs.tensors.trees import Tree, region_trees

WRAPPERS = (GymEnv, GymWrapper, PettingZooEnv, PettingZooWrapper)

Converter = Callable[[], None]  # of one value, on its way in or out
NO_NAMES: Mapping[Key, Key] = {}


def can_see_through(env: Any) -> bool:
    """Whether an env is a wrapper of this package whose values are those of its spaces, but for one-hot actions.

    One with info readers, specs of its own, another device, or values that are no tensors is not.
    """
    if type(env) not in WRAPPERS or (env.device and env.device.type != "cpu"):
        return False
    if isinstance(env, GymWrapper) and env.info_dict_reader:
        return False
    return has_values_of(metadata_of(env), env.output_spec, env.input_spec)


def has_values_of(
    inner: EnvMetadata,
    output_spec: Composite,
    input_spec: Composite,
    names: Mapping[Key, Key] = NO_NAMES,
    *,
    encodes: bool = False,
) -> bool:
    """Whether values of these specs are those of a wrapped env's spaces, but for integers that are one-hot.

    Actions may be in any case, and observations, of integers from 0 on, if `encodes`. `names` has what the specs call
    values of the spaces, where that is not the same.
    """
    trees = region_trees(output_spec, input_spec)
    spaces = {
        region: [replace(leaf, key=names.get(leaf.key, leaf.key)) for leaf in leaves]
        for region, leaves in inner.leaves.items()
    }
    specs, actions = trees[NEXT].leaves, trees[INPUT].leaves  # among the latter states, which no wrapped env has
    if specs.keys() != {leaf.key for leaf in spaces[NEXT]} or actions.keys() != {leaf.key for leaf in spaces[INPUT]}:
        return False
    observed = inner.specs["observation"].items() if encodes else ()
    counted = {names.get(key, key) for key, space in observed if _counts_from_0(space)}
    return all(
        _is_same(specs[leaf.key], leaf) or (leaf.key in counted and type(specs[leaf.key]) is OneHot)
        for leaf in spaces[NEXT]
    ) and all(_is_one_hot(actions[leaf.key]) or _is_same(actions[leaf.key], leaf) for leaf in spaces[INPUT])


def _counts_from_0(space: Any) -> bool:
    """Whether values of a Gymnasium space are single integers from 0 on."""
    return hasattr(space, "n") and bool(getattr(space, "start", None) == 0)


def _is_same(spec: TensorSpec, leaf: Leaf) -> bool:
    """Whether the values of a spec are those of a leaf, but perhaps for a dim of size 1."""
    if isinstance(spec, NonTensor) or _is_one_hot(spec) or storage_dtype(spec.dtype) != leaf.dtype:
        return False
    return tuple(spec.shape) == leaf.shape or (not leaf.shape and tuple(spec.shape) == (1,))


def _is_one_hot(spec: TensorSpec) -> bool:
    return isinstance(spec, OneHot | MultiOneHot)


class UnwrappingAdapter(TensorDictAdapter):
    """Drives the env inside a wrapper for whose specs `has_values_of` holds.

    `inner` drives the wrapped env; of `handling`, only what is said of random numbers matters, since values take the
    same way in any case. `names` has what the wrapper calls values of the spaces, where that is not the same.
    """

    def __init__(
        self,
        env: Any,
        env_index: int,
        handling: Handling,
        inner: GymAdapter,
        names: Mapping[Key, Key] = NO_NAMES,
    ) -> None:
        self._inner = inner
        super().__init__(env, env_index, handling._replace(by_reference=False))
        self._names = names
        self._decoders: list[Converter] = []
        self._encoders: dict[str, list[Converter]] = {}
        self._done_leaves = Tree.of(self._full("done")).leaves.keys()

    @property
    def needs_reset(self) -> bool:
        """Whether the env inside does; see `EnvAdapter`."""
        return self._inner.needs_reset

    @needs_reset.setter
    def needs_reset(self, needs_reset: bool) -> None:
        self._inner.needs_reset = needs_reset

    @property
    def generator(self) -> Any:
        """That of the env inside, which steps in its place."""
        return self._inner.generator

    def bind(self, arrays: Mapping[str, Arrays], row: int) -> None:
        self._decoders.clear()
        own: dict[str, Arrays] = {STATUS: {key: array[row : row + 1] for key, array in arrays[STATUS].items()}}
        regions = [(INPUT, INPUT), *(pair for half in HALVES for pair in half.items())]
        for region, place in regions:
            own[place] = {}
            self._encoders[place] = []
            for leaf in self._inner.metadata.leaves[region]:
                key, shape = leaf.key, leaf.shape
                name = self._names.get(key, key)
                values, spec = arrays[place][name][row : row + 1], self._trees[region].leaves[name]
                if region == INPUT and not isinstance(spec, Bounded | Unbounded):
                    own[place][key] = np.zeros((1, *shape), leaf.dtype)
                    self._decoders.append(self._decoder(key, spec, values[0, ...], own[place][key]))
                elif region != INPUT and _is_one_hot(spec):
                    own[place][key] = np.zeros((1, *shape), leaf.dtype)
                    self._encoders[place].append(self._encoder(key, values[0, ...], own[place][key]))
                else:
                    own[place][key] = values.reshape(1, *shape)
        self._root_flags = [
            [array for key, array in own[half[ROOT]].items() if self._names.get(key, key) in self._done_leaves]
            for half in HALVES
        ]
        self._inner.bind(own, 0)

    @property
    def core(self) -> Any:
        return self._inner.core

    def take_half(self, write_half: int) -> None:
        super().take_half(write_half)
        self._inner.take_half(write_half)

    def _decoder(self, key: Key, spec: TensorSpec, row: NDArray[Any], target: NDArray[Any]) -> Converter:
        """A function that brings the action of the next step from the env's row to where its adapter reads it.

        It raises SpecMismatchError if the value is none of the spec.
        """
        value = tensor_of(row, spec.dtype)

        def decode() -> None:
            if not spec.is_in(value):
                raise action_mismatch(self.env, spec, key, shown(value))
            target[0] = np.reshape(spec.to_numpy(value), target.shape[1:])

        def decode_one() -> None:
            choice = int(row.argmax())
            if row[choice] != 1 or np.count_nonzero(row) != 1:
                raise action_mismatch(self.env, spec, key, shown(value))
            target[0] = choice

        def decode_integers() -> None:
            if (row < low).any() or (row > high).any():
                raise action_mismatch(self.env, spec, key, shown(value))
            target[0] = row

        if isinstance(spec, MaskedSpec) and spec.mask is None and row.dtype.kind in "iu" and row.shape == spec.shape:
            low, high = spec.low.numpy(), spec.high.numpy()
            return decode_integers
        plain = type(spec) is OneHot and row.ndim == 1 and spec.mask is None and not spec.to_categorical_spec().start
        return decode_one if plain else decode

    def _encoder(self, key: Key, row: NDArray[Any], source: NDArray[Any]) -> Converter:
        """A function that brings the integer which was observed to the env's row, as a one-hot vector.

        It raises SpecMismatchError if it is out of range.
        """

        def encode() -> None:
            choice = int(source[0])
            if not 0 <= choice < len(row):
                raise self._mismatch(key, f"an integer below {len(row)}", str(choice))
            row[...] = 0
            row[choice] = 1

        return encode

    def seed(self, seed: int) -> None:
        self._inner.seed(seed)

    def reset(self, arguments: ResetArguments) -> None:
        try:
            self._inner.reset(ResetArguments(arguments.kwargs))
            self._encode(ROOT)
        finally:
            for flag in self._root_flags[
                self._write_half & 1
            ]:  # where the caller's are, which the inner env leaves there
                flag[...] = False

    def step(self, maybe_reset: bool) -> bool:
        for decode in self._decoders:
            decode()
        done = self._inner.step(maybe_reset)
        self._encode(NEXT)
        if (done and maybe_reset) or self._write_half & WRITE_ROOT:
            self._encode(ROOT)
        return done

    def _encode(self, region: str) -> None:
        for encode in self._encoders[HALVES[self._write_half & 1][region]]:
            encode()

    def close(self) -> None:
        self._decoders.clear()  # which refer to this, and to the block
        self._encoders.clear()
        super().close()

    def accept(self, objects: Objects) -> None:
        """Do nothing: all that goes in has its row."""

    def objects(self, region: str) -> Objects:
        return {}


class WrapperAdapter(UnwrappingAdapter):
    """Drives the env inside a wrapper of this package for which `can_see_through` holds."""

    def __init__(self, env: EnvWrapper, env_index: int, handling: Handling) -> None:
        super().__init__(env, env_index, handling, env.make_adapter(env_index, repr(env), handling.generators))

    def perform(self, call: Call) -> Any:
        try:
            return super().perform(call)
        finally:
            if (seed := take_pending_seed(self.env)) is not None:  # a call may have seeded the env
                self._inner.seed(seed)


def adapted(env: Any, env_index: int, handling: Handling) -> TensorDictAdapter:
    """The adapter for an env that deals in TensorDicts. The engine finds this function by its name."""
    if any(base.__module__.startswith("torchrl.") for base in type(env).__mro__):
        theirs = importlib.import_module("aioenvs.integrations.torchrl.worker")
        adapter: TensorDictAdapter = theirs.adapted(env, env_index, handling)
        return adapter
    return (WrapperAdapter if can_see_through(env) else TensorDictAdapter)(env, env_index, handling)
