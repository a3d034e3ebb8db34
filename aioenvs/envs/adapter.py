"""How a worker drives an env that deals in TensorDicts. The engine finds this module by its name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.engine.adapters.base import CALLERS, Attribute, Call, Handling, ResetArguments, at_path
from aioenvs.engine.adapters.copying import received
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.layout import (
    HALVES,
    IN_NEXT,
    IN_ROOT,
    INPUT,
    LATEST,
    NEXT,
    ROOT,
    STATUS,
    WRITE_ROOT,
    Arrays,
    EnvMetadata,
    Key,
    Leaf,
)
from aioenvs.engine.worker.random_streams import Streams, TrialStreams, torch_generator
from aioenvs.envs.base import EnvBase
from aioenvs.errors import SpecMismatchError, reset_needed
from aioenvs.specs import Composite, NonTensor, TensorSpec
from aioenvs.tensors.done import ruling_keys
from aioenvs.tensors.step_mdp import flat_key
from aioenvs.tensors.storage import storage_dtype, tensor_of
from aioenvs.tensors.trees import ABSENT, Parts, Tree, copied, is_loose, nested_key, owned, plain, region_trees

TORCH = torch_generator(torch)


class TensorDictAdapter:
    """Drives an `aioenvs.EnvBase`, or anything that has its specs, `reset`, `step` and `step_and_maybe_reset`.

    `handling` says what is done about its tensors, their gradients, and its random numbers. An env with the specs of
    another library is a TypeError.
    """

    def __init__(self, env: Any, env_index: int, handling: Handling) -> None:
        self.output_spec, self.input_spec = self._specs_of(env, env_index)
        self.env = env
        self.env_index = env_index
        self._by_reference = handling.by_reference
        self._is_batch = getattr(type(env), "is_batch", False)
        self._keeps_grad = handling.keeps_grad
        self._grads = contextlib.nullcontext() if handling.keeps_grad else torch.no_grad()
        self._trees = region_trees(self.output_spec, self.input_spec)
        parts = [self._full(kind) for kind in ("observation", "done", "state", "action")]
        self._known = Tree.of(*parts[:3])
        whole = Tree.of(*parts)
        # Leaves of stacks that are not those of all parts are called otherwise in the whole.
        self._whole = (
            whole if whole.leaves.keys() == self._trees[ROOT].leaves.keys() | self._trees[INPUT].leaves.keys() else None
        )
        self._shape = parts[0].shape
        self._root_names = {key[0] for key in self._trees[ROOT].leaves}
        self._is_flat = all(len(key) == 1 and not isinstance(spec, NonTensor) for key, spec in whole.leaves.items())
        self.metadata = self._describe()
        self._inputs: dict[Key, torch.Tensor] = {}
        self._halves: list[dict[str, dict[Key, torch.Tensor]]] = []
        self._write_half = 0
        self._objects: dict[str, Objects] = {INPUT: {}, NEXT: {}, ROOT: {}}
        # Of each region, what has a row: what it must be, and where it comes; and what has none.
        self._fixed: dict[str, list[tuple[Key, torch.Size, torch.dtype | None]]] = {}
        self._targets: list[dict[str, list[torch.Tensor]]] = []  # by half
        self._latest_rows: list[list[tuple[Key, torch.Tensor]]] = []  # by what WHERE says
        self._callers: Any = None  # the root that the caller has, if that is shown: a TensorDict, or a dict of tensors
        self._loose: dict[str, dict[Key, TensorSpec]] = {}
        self._trial = TrialStreams(TORCH, use=handling.generators)
        self._streams: Streams = self._trial
        self.needs_reset = False
        # The next root is needed only where an episode ended, so it is made only there, except by envs that step and
        # reset in a way of their own.
        self._in_one = getattr(type(env), "step_and_maybe_reset", None) is not EnvBase.step_and_maybe_reset

    @property
    def generator(self) -> Any:
        """See `EnvAdapter`; these exchange theirs by themselves."""
        return None

    @property
    def core(self) -> Any:
        """See `EnvAdapter`; one that takes any batch has all of its state in TensorDicts."""
        return self.env if self.env.batch_locked else None

    def _specs_of(self, env: Any, env_index: int) -> tuple[Composite, Composite]:
        """The output and the input spec of an env; TypeError if they are those of another library."""
        _require_own_specs(env, env_index)
        return env.output_spec, env.input_spec

    def _full(self, kind: str) -> Composite:
        """The Composite of one kind: observation, reward, done, action or state."""
        side = self.input_spec if kind in ("action", "state") else self.output_spec
        spec: Composite = side[f"full_{kind}_spec"]
        return spec

    def _describe(self) -> EnvMetadata:
        env = self.env
        following, root = self._trees[NEXT].entries, self._trees[ROOT].entries
        if ("env_index",) in {*root, *self._trees[INPUT].leaves}:
            raise SpecMismatchError(
                f"env {self.env_index} ({type(env).__name__}) has an entry 'env_index', a key that is taken: it says "
                "which env of a batch a row belongs to; rename it in the env"
            )
        without_done = Tree.of(self._full("observation"), self._full("reward")).leaves
        fixed: dict[str, tuple[Leaf, ...]] = {}
        loose: dict[str, dict[Key, Any]] = {}
        for region, tree in self._trees.items():
            leaves = tree.leaves.items()
            fixed[region] = tuple(
                Leaf(key, storage_dtype(spec.dtype), tuple(spec.shape)) for key, spec in leaves if self._is_fixed(spec)
            )
            loose[region] = {
                key: (str(spec.dtype), tuple(spec.shape)) for key, spec in leaves if not self._is_fixed(spec)
            }
        return EnvMetadata(
            name=type(env).__name__,
            leaves=fixed,
            objects=loose,
            reward_keys=tuple(key for key in following if key not in root),
            done_keys=tuple(map(flat_key, ruling_keys(key for key in root if key not in without_done))),
            specs={
                "output_spec": self.output_spec.clone(),
                "input_spec": self.input_spec.clone(),
                "device": env.device,
                "action": env.object_action_spaces if hasattr(type(env), "object_action_spaces") else {},
            },
            takes_root=True,
            shows_root=self._by_reference and self._keeps_grad,  # in the caller's own process
            kinds=tuple(str(spec.dtype) for tree in self._trees.values() for spec in tree.leaves.values()),
            num_seeds=self._num_seeds(),
        )

    def _num_seeds(self) -> int:
        """How many seeds of a chain the env uses up."""
        return getattr(self.env, "num_seeds", 1)

    def _is_fixed(self, spec: TensorSpec) -> bool:
        return not (self._by_reference or is_loose(spec))

    def bind(self, arrays: Mapping[str, Arrays], row: int) -> None:
        self._where = arrays[STATUS][LATEST][row : row + 1]
        self._inputs = self._rows(INPUT, arrays[INPUT], row)
        self._halves = [
            {region: self._rows(region, arrays[name], row) for region, name in half.items()} for half in HALVES
        ]
        self._targets = [{region: list(rows.values()) for region, rows in half.items()} for half in self._halves]
        for region, rows in self._halves[0].items():
            leaves = self._trees[region].leaves
            self._fixed[region] = [(key, leaves[key].shape, leaves[key].dtype) for key in rows]
            self._loose[region] = {key: spec for key, spec in leaves.items() if key not in rows}
        self._latest_rows = [
            [(key, half[region][key]) for key in half[ROOT]] for half in self._halves for region in (ROOT, NEXT)
        ]
        if not self.metadata.shows_root:  # rows say zeros as well until the env has said anything
            self._objects[ROOT] = {
                key: spec.zero()
                for key, spec in self._loose[ROOT].items()
                if not isinstance(spec, NonTensor) and -1 not in spec.shape
            }

    def take_half(self, write_half: int) -> None:
        self._write_half = write_half

    def _rows(self, region: str, arrays: Arrays, row: int) -> dict[Key, torch.Tensor]:
        leaves = self._trees[region].leaves
        return {
            key: tensor_of(array[row : row + 1].reshape(array.shape[1:]), leaves[key].dtype)
            for key, array in arrays.items()
        }

    def seed(self, seed: int) -> None:
        self._begin_streams(seed)
        with self._streams:
            self.env.set_seed(seed)

    def _begin_streams(self, seed: int) -> None:
        self._trial.seed(seed)
        self._streams = self._trial

    def reset(self, arguments: ResetArguments) -> None:
        kwargs = received(dict(arguments.kwargs), keeps_graph=self._keeps_grad)
        if "seed" in kwargs and self._is_batch:  # which replaces dead workers before it seeds their envs
            self._begin_streams(kwargs["seed"])
        elif "seed" in kwargs:
            self.seed(kwargs.pop("seed"))
        self.needs_reset = True
        with self._streams, self._grads:
            self._write(ROOT, self.env.reset(self._given(arguments), **kwargs))
        self.needs_reset = False

    def _given(self, arguments: ResetArguments) -> TensorDictBase | None:
        """Return the caller's knowledge of the env, as the argument of its reset."""
        if not arguments.given and not arguments.objects:
            return None
        # where a state is an observation as well, it is in the latter
        rows = self._halves[self._write_half & 1][ROOT] | self._inputs
        values = {key: rows[key].clone() for key in arguments.given} | {
            key: copied(value) for key, value in arguments.objects.items()
        }
        td = self._known.build(values)
        for key, value in values.items():
            if key not in self._known.leaves:  # a mask
                td.set(nested_key(key), torch.as_tensor(value))
        return self._placed(td)

    def step(self, maybe_reset: bool) -> bool:
        self._begin_step()
        with self._streams, self._grads:
            td = self._placed(self._root_of_step())
            following = None
            if maybe_reset and self._in_one:
                td, following = self.env.step_and_maybe_reset(td)
            else:
                td = self.env.step(td)
            values = self._write(NEXT, td.get("next"))
            done = any(bool(values[key].any()) for key in self.metadata.done_keys)
            if done and maybe_reset:
                self._write(ROOT, self.env.maybe_reset(self.env.step_mdp(td)) if following is None else following)
            else:
                self._keep_root(values)
        self._settle_streams()
        self.needs_reset = False
        return done

    def _begin_step(self) -> None:
        """Need a reset until the outcome of the step has come; ResetNeededError if one is needed already."""
        if self.needs_reset:
            raise reset_needed(f"env {self.env_index}")
        self.needs_reset = True

    def _root_of_step(self) -> TensorDictBase:
        """Return the root of the next step: what the env said last, or what the caller has where that is shown."""
        inputs = {key: row.clone() for key, row in self._inputs.items()} | self._objects[INPUT]
        callers, self._callers = self._callers, None
        if callers is None:
            return self._joined(self._latest(), inputs)
        if type(callers) is not dict:
            return self._completed(callers, inputs)
        if not self._is_flat:
            return self._completed(TensorDict(callers, batch_size=self._shape), inputs)
        entries = {name: value.clone() for name, value in callers.items() if (name,) not in inputs}
        if not self._root_names <= callers.keys():
            entries = {key[0]: value for key, value in self._latest().items()} | entries
        entries.update((key[0], value) for key, value in inputs.items())
        make: Callable[..., TensorDict] = TensorDict._new_unsafe
        return make(entries, batch_size=self._shape)

    def _completed(self, td: TensorDictBase, inputs: Mapping[Key, Any]) -> TensorDictBase:
        """Return a copy of the root that the caller has, completed by what the env said last, with these inputs."""
        known = self._trees[ROOT].read(td)
        latest = self._latest() if len(known) < len(self._trees[ROOT].leaves) else {}
        missing = {key: value for key, value in latest.items() if key not in known}
        root: TensorDictBase = owned(td).update(self._joined(missing, inputs))
        return root

    def _joined(self, root: Mapping[Key, Any], inputs: Mapping[Key, Any]) -> TensorDictBase:
        """Return a TensorDict of values of the root and of the input, where the latter prevail."""
        if self._whole is not None:
            return self._whole.build({**root, **inputs})
        joined, own = self._trees[ROOT].build(root), self._trees[INPUT].build(inputs)
        if isinstance(own, LazyStackedTensorDict) and not isinstance(joined, LazyStackedTensorDict):
            joined = LazyStackedTensorDict(*joined.unbind(own.stack_dim), stack_dim=own.stack_dim)
        return joined.update(own)

    def _latest(self) -> dict[Key, Any]:
        """Return copies of the observations and flags that the env said last; before it said any, they are zeros."""
        # Copies, since what an env hands over it may change in place.
        where = int(self._where[0])
        values: dict[Key, Any] = {key: row.clone() for key, row in self._latest_rows[where]}
        if self._loose[ROOT]:
            objects = self._objects[ROOT if where & 1 == IN_ROOT else NEXT]
            values |= {key: copied(objects[key]) for key in self._loose[ROOT] if key in objects}
        return values

    def _keep_root(self, values: Mapping[Key, Any]) -> None:
        """Write what came of a step to the root as well, where it is wanted there."""
        if self._write_half & WRITE_ROOT and (targets := self._targets[self._write_half & 1][ROOT]):
            torch._foreach_copy_(targets, [values[key] for key, _, _ in self._fixed[ROOT]])

    def _settle_streams(self) -> None:
        if self._streams is self._trial and isinstance(settled := self._trial.settled(), Streams):
            self._streams = settled

    def _placed(self, td: TensorDictBase) -> TensorDictBase:
        device = self.env.device
        return td if device is None else td.to(device)

    def _write(self, region: str, td: TensorDictBase) -> dict[Key, Any]:
        """Hand over the values of a region; returns them as they are."""
        values = self._trees[region].read(td)
        written: list[Any] = []
        for key, shape, dtype in self._fixed[region]:
            value = values.get(key)
            if type(value) is not torch.Tensor or value.shape != shape or value.dtype is not dtype:
                value = self._checked(region, key, td, value)
            written.append(value)
        for key, spec in self._loose[region].items():
            value = values.get(key)
            value = self._checked(region, key, td, value)
            self._objects[region][key] = copied(plain(value) if isinstance(spec, NonTensor) else value)
        half = self._write_half & 1
        if written:
            torch._foreach_copy_(self._targets[half][region], written)
        self._where[0] = 2 * half + (IN_ROOT if region == ROOT else IN_NEXT)
        return values

    def _checked(self, region: str, key: Key, td: TensorDictBase, value: Any) -> Any:
        """A value that fits its spec; SpecMismatchError if it does not."""
        spec = self._trees[region].leaves[key]
        if value is None:
            raise self._mismatch(key, f"a value by the env's {region} spec", f"the keys {_keys(td)!r}")
        if isinstance(spec, NonTensor) or (value is ABSENT and is_loose(spec)):
            return value
        if isinstance(value, Parts) and -1 in spec.shape:
            for part in value.values:
                if part is not ABSENT and getattr(part, "dtype", spec.dtype) is not spec.dtype:
                    raise self._mismatch(key, f"tensors of {spec.dtype}", f"one of {part.dtype}")
            return value
        if not isinstance(value, torch.Tensor):
            raise self._mismatch(key, f"a tensor of {spec.dtype}", type(value).__name__)
        fits = value.shape == spec.shape or (
            value.ndim == len(spec.shape)
            and all(size in (found, -1) for size, found in zip(spec.shape, value.shape, strict=True))
        )
        if not fits or value.dtype is not spec.dtype:
            raise self._mismatch(
                key, f"{spec.dtype} of shape {tuple(spec.shape)}", f"{value.dtype} of shape {tuple(value.shape)}"
            )
        return value

    def _mismatch(self, key: Key, expected: str, found: str) -> SpecMismatchError:
        return SpecMismatchError(
            f"env {self.env_index} ({self.metadata.name}): expected {expected} at {nested_key(key)!r}, found {found}"
        )

    def accept(self, objects: Objects) -> None:
        self._callers = objects.get(CALLERS)  # copied as the step begins, which is next
        self._objects[INPUT] = {key: copied(value) for key, value in objects.items() if key}

    def objects(self, region: str) -> Objects:
        return self._objects[region]

    def perform(self, call: Call) -> Any:
        kind, name, args, kwargs = call
        with self._streams, self._grads:
            if kind == "get":
                found = at_path(functools.partial(getattr, self.env), name)
                return Attribute(True) if callable(found) else Attribute(False, found)
            if kind == "set":
                if self._is_batch:  # its envs have the attribute
                    return self.env.set_attr(name, *args)
                getattr(self.env, name)
                return setattr(self.env, name, *args)
            if kind == "state_dict":
                return self.env.state_dict()
            if kind == "load_state_dict":
                self.env.load_state_dict(*args, **kwargs)
                return None
            return at_path(functools.partial(getattr, self.env), name)(*args, **kwargs)

    def close(self) -> None:
        if not getattr(self.env, "is_closed", False):
            self.env.close()


def _require_own_specs(env: Any, env_index: int) -> None:
    if not isinstance(env.output_spec, Composite):
        cls, spec = type(env), type(env.output_spec)
        raise TypeError(
            f"the factory of env {env_index} returned a {cls.__module__}.{cls.__qualname__}, whose specs are "
            f"{spec.__module__}.{spec.__qualname__}; expected an aioenvs.EnvBase or a Gymnasium env, or "
            "one of TorchRL's"
        )


def _keys(td: TensorDictBase) -> list[Any]:
    return sorted(td.keys(True, True), key=lambda key: (len(flat_key(key)), str(key)))
