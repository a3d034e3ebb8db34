"""The specs of a batch in TorchRL's terms, worked out from the metadata of its envs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from tensordict.utils import unravel_key
from torchrl.data import Composite, Stacked, StackedComposite

from aioenvs.engine.layout import EnvMetadata
from aioenvs.faces.batch_specs import EnvSpecs
from aioenvs.faces.session import EnvSelection
from aioenvs.integrations.torchrl.specs import to_torchrl
from aioenvs.tensors.trees import nested_key

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TorchRLSpecs:
    """The description of a batch.

    Attributes:
        output_spec: TorchRL's, with the batch size as leading shape.
        input_spec: TorchRL's.
        device: Where results go.
        inputs: The keys of actions of which all envs have the same one tensor, and the dtype of each.
        actions: The keys of the actions.
        lasting: Those of them that stay at the root, as no observation takes their place; tensorclasses as wholes.
        states: The keys of the states.
        root: The keys of observations and done flags.
        carried: Those of states that the policy hands on under `next`.
        varies: Whether the size of something varies.
        is_lazy: Whether results are lazy stacks.
        is_dense: Whether no result is or holds a lazy stack, so that every entry can be had as one tensor.
        shows_root: Whether the envs are shown the whole root of a step.
        supports_set_state: Whether a reset takes `set_state`.
        name: What the first env calls itself.
    """

    output_spec: Any
    input_spec: Any
    device: torch.device | None
    inputs: tuple[tuple[Any, torch.dtype], ...]
    actions: tuple[Any, ...]
    lasting: tuple[Any, ...]
    states: tuple[Any, ...]
    root: tuple[Any, ...]
    carried: tuple[Any, ...]
    varies: bool
    is_lazy: bool
    is_dense: bool
    shows_root: bool
    supports_set_state: bool
    name: str

    @classmethod
    def of(cls, scope: EnvSelection) -> TorchRLSpecs:
        """The description of the envs of a running batch, or of a view of one."""
        metadata = [scope.pool.metadata[env] for env in scope.envs.tolist()]
        output_spec, input_spec = _stacked(metadata, scope.signature.device)
        first = metadata[0].specs.get("torchrl")
        natives = [each.specs.get("torchrl") for each in metadata]
        actions, states = (_keys(input_spec[f"full_{kind}_spec"]) for kind in ("action", "state"))
        lazy = scope.signature.is_lazy
        dense = not lazy and not _has_stacks(output_spec) and not _has_stacks(input_spec)
        outputs = [output_spec[f"full_{kind}_spec"] for kind in ("observation", "done")]
        observed = {key for spec in outputs for key in _values(spec)}
        root = tuple(key for spec in outputs for key in _keys(spec))
        return cls(
            output_spec=output_spec,
            input_spec=input_spec,
            device=scope.signature.device,
            inputs=_tensors(input_spec["full_action_spec"]) if dense else (),
            actions=actions,
            states=states,
            root=root,
            lasting=tuple(key for key in _values(input_spec["full_action_spec"]) if key not in observed),
            carried=() if first is None else tuple(nested_key(key) for key in first.carried),
            varies=scope.signature.varies,
            is_lazy=lazy,
            is_dense=dense,
            shows_root=any(each.shows_root for each in metadata),
            supports_set_state=all(native is not None and native.supports_set_state for native in natives),
            name=metadata[0].name if first is None else first.name,
        )

    def to(self, device: torch.device) -> TorchRLSpecs:
        """Return the specs on another device."""
        values = {**self.__dict__, "device": device}
        for name in ("output_spec", "input_spec"):
            values[name] = getattr(self, name).to(device).lock_(recurse=True)
        return type(self)(**values)

    # -- what goes in and out -------------------------------------------------------------------------------

    def castable(self, td: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict with actions of the right dtypes, cast as TorchRL's buffers do; a copy if need be."""
        casts = {
            key: value.to(dtype)
            for key, dtype in self.inputs
            if (value := td.get(key, None)) is not None and getattr(value, "dtype", dtype) is not dtype
        }
        if not casts:
            return td
        td = td.copy()
        for key, value in casts.items():
            td.set(key, value)
        return td

    def handed_on(self, td: TensorDictBase) -> dict[Any, Any]:
        """Return the entries that the policy hands on under `next`, with which an env only begins."""
        preset = td.get("next", None) if self.carried else None
        if preset is None:
            return {}
        return {key: value for key in self.carried if (value := preset.get(key, None)) is not None}

    def given(self, td: TensorDictBase, reset_keys: Sequence[Any]) -> TensorDictBase:
        """Return the part of a TensorDict that envs which are reset, or kept, are to know."""
        given: TensorDictBase = self.fitting(td).update(td.select(*reset_keys, *self.states, "_reset", strict=False))
        return given

    def fitting(self, td: TensorDictBase) -> TensorDictBase:
        """The observations and flags of a TensorDict that are the envs' own, not what a transform made of them."""
        if not self.is_dense:
            return td.select(*self.root, strict=False)
        parts = (self.output_spec[f"full_{kind}_spec"] for kind in ("observation", "done"))
        return td.select(*(key for part in parts for key in _keys(part) if _fits(td.get(key, None), part[key])))

    def unfit(self, td: TensorDictBase) -> list[Any]:
        """The keys of those that are not."""
        fitting = set(_keys(self.fitting(td)))
        return [key for key in self.root if key not in fitting]


def _fits(value: Any, leaf: Any) -> bool:
    """Whether there is a value, of the leaf's dtype and shape if it has a dtype."""
    if value is None or leaf.dtype is None:
        return value is not None
    return bool((value.dtype, value.shape) == (leaf.dtype, leaf.shape))


def _stacked(metadata: Sequence[EnvMetadata], device: torch.device | None) -> tuple[Any, Any]:
    """The output and the input spec of the batch."""
    made: dict[int, tuple[Any, Any]] = {}
    pairs = [made.setdefault(id(each), _own(each)) if id(each) not in made else made[id(each)] for each in metadata]
    sides = []
    for own in zip(*pairs, strict=True):
        first = own[0]
        alike = all(spec is first for spec in own)
        spec = first.expand(len(own), *first.shape).clone() if alike else _joined([each.clone() for each in own])
        sides.append((_settled(spec) if device is None else spec.to(device)).lock_(recurse=True))
    return sides[0], sides[1]


def _joined(specs: Sequence[Any]) -> Any:
    """The specs of envs that differ: of each kind a stack."""
    stacked = torch.stack(list(specs), 0)
    return Composite({kind: stacked[kind] for kind in specs[0].keys()}, shape=stacked.shape, device=specs[0].device)  # noqa: SIM118


def _settled(spec: Any) -> Any:
    """Return specs of which each kind is on the CPU if all in it are, as in TorchRL's batches."""
    for kind in list(spec.keys()):
        part = spec[kind]
        if part.device is None and all(leaf.device in (None, CPU) for leaf in part.values(True, True)):
            spec[kind] = part.to(CPU)
    return spec


def _own(metadata: EnvMetadata) -> tuple[Any, Any]:
    """The specs of one env, as it said them, or converted."""
    native = metadata.specs.get("torchrl")
    if native is not None:
        return native.output_spec, native.input_spec
    specs = EnvSpecs.of(metadata)
    return to_torchrl(specs.output_spec), to_torchrl(specs.input_spec)


def _has_stacks(spec: Any) -> bool:
    """Whether there is a lazy stack in a Composite."""
    parts = [spec, *spec.values(True, False)]
    return any(isinstance(part, StackedComposite | Stacked) for part in parts)


def _keys(spec: Any) -> tuple[Any, ...]:
    return tuple(unravel_key(key) for key in spec.keys(True, True))


def _values(spec: Any) -> list[Any]:
    """The keys of what is one value each: leaves, and tensorclasses as wholes."""
    found: list[Any] = []
    for key, child in spec.items():
        if isinstance(child, Composite) and not is_tensorclass(getattr(child, "data_cls", None)):
            found += [unravel_key((key, inner)) for inner in _values(child)]
        else:
            found.append(key)
    return found


def _tensors(action_spec: Any) -> tuple[tuple[Any, torch.dtype], ...]:
    """The actions that are tensors, with their dtypes."""
    return tuple((key, action_spec[key].dtype) for key in _keys(action_spec) if action_spec[key].dtype is not None)
