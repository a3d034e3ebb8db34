"""The leaves of nested specs as flat keys, and TensorDicts made of flat values.

A worker and its parent exchange named arrays, while envs speak in nested TensorDicts. A `Tree` knows the nesting:
which TensorDict has which batch size, and where the members of a lazy stack are. The members of a stack become steps
of the path of their own, "[0]", "[1]", so that each has keys and shapes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from aioenvs.engine.copying import received
from aioenvs.engine.layout import Key
from aioenvs.engine.metadata import INPUT, NEXT, ROOT
from aioenvs.mdp import NestedKey
from aioenvs.specs import Composite, NonTensor, StackedComposite, TensorSpec

__all__ = [
    "Key",
    "Tree",
    "copied",
    "exchanged",
    "nested_key",
    "non_tensor",
    "owned",
    "plain",
    "region_trees",
    "tensors_of",
]

Values = Mapping[Key, Any]


def nested_key(key: Key) -> NestedKey:
    """A path as users write keys."""
    return key[0] if len(key) == 1 else key


class Tree:
    """The nesting of some Composites, merged.

    Attributes:
        leaves: The leaf specs, by path.
        is_flat: Whether every TensorDict in it has the batch size of the root, and none is a stack.

    >>> from aioenvs.specs import Unbounded
    >>> spec = Composite(agents=Composite(position=Unbounded((3, 2)), shape=(3,)))
    >>> tree = Tree.of(spec)
    >>> tree.build({("agents", "position"): torch.zeros(3, 2)})["agents"].batch_size
    torch.Size([3])
    """

    def __init__(self, root: _Branch | _Stack) -> None:
        self._root = root
        self.leaves: dict[Key, TensorSpec] = {}
        root.collect((), self.leaves)
        self.is_flat = isinstance(root, _Branch) and root.is_flat(root.shape)
        self._direct = {key: nested_key(key) for key in self.leaves if not any(name[0] == "[" for name in key)}

    @classmethod
    def of(cls, *specs: Composite) -> Tree:
        """The nesting of what these Composites describe together; empty ones add nothing."""
        return cls(_merged([spec for spec in specs if len(spec.keys())] or list(specs[:1])))

    def get(self, td: TensorDictBase, key: Key) -> Any:
        """What a TensorDict has at this path; None if nothing."""
        direct = self._direct.get(key)
        return td.get(direct, None) if direct is not None else self._root.get(td, key)

    def read(self, td: TensorDictBase) -> dict[Key, Any]:
        """What a TensorDict has of the leaves."""
        found: dict[Key, Any] = {}
        self._root.read(td, (), found)
        return found

    def build(self, values: Values) -> TensorDictBase:
        """A TensorDict of these values, without what is missing."""
        built: TensorDictBase = self._root.build((), values)
        return built


def region_trees(output_spec: Composite, input_spec: Composite) -> dict[str, Tree]:
    """Where the leaves of each region are in TensorDicts of these specs."""
    observation, done = output_spec["full_observation_spec"], output_spec["full_done_spec"]
    return {
        INPUT: Tree.of(input_spec["full_action_spec"], input_spec["full_state_spec"]),
        NEXT: Tree.of(observation, output_spec["full_reward_spec"], done),
        ROOT: Tree.of(observation, done),
    }


class _Branch:
    """A TensorDict with named children."""

    def __init__(self, shape: torch.Size, children: dict[str, _Branch | _Stack | TensorSpec]) -> None:
        self.shape = shape
        self._children = children

    def is_flat(self, shape: torch.Size) -> bool:
        branches = [child for child in self._children.values() if not isinstance(child, TensorSpec)]
        return self.shape == shape and all(isinstance(branch, _Branch) and branch.is_flat(shape) for branch in branches)

    def collect(self, path: Key, leaves: dict[Key, TensorSpec]) -> None:
        for name, child in self._children.items():
            if isinstance(child, TensorSpec):
                leaves[*path, name] = child
            else:
                child.collect((*path, name), leaves)

    def read(self, td: TensorDictBase, path: Key, found: dict[Key, Any]) -> None:
        # All entries at once are cheaper than one after the other, but of a lazy stack they may not be had.
        entries = dict(td.items()) if type(td) is TensorDict else None
        for name, child in self._children.items():
            value = td.get(name, None) if entries is None else entries.get(name)
            if value is None:
                continue
            if isinstance(child, TensorSpec):
                found[*path, name] = value
            else:
                child.read(value, (*path, name), found)

    def get(self, td: TensorDictBase, path: Key) -> Any:
        child, value = self._children[path[0]], td.get(path[0], None)
        return value if value is None or isinstance(child, TensorSpec) else child.get(value, path[1:])

    def build(self, path: Key, values: Values) -> TensorDictBase:
        entries: dict[str, Any] = {}
        is_plain = True
        for name, child in self._children.items():
            key = (*path, name)
            if not isinstance(child, TensorSpec):
                built = child.build(key, values)
                if not built.is_empty():
                    entries[name] = built
                continue
            value = values.get(key)
            if isinstance(child, NonTensor) and key in values:
                value, is_plain = non_tensor(value, len(self.shape)), False
            if value is not None:
                entries[name] = value
        make: Callable[..., TensorDict] = TensorDict._new_unsafe if is_plain else TensorDict
        return make(entries, batch_size=self.shape)


class _Stack:
    """A lazy stack: members with children of their own."""

    def __init__(self, members: Sequence[_Branch | _Stack], dim: int) -> None:
        self._members = [(f"[{index}]", member) for index, member in enumerate(members)]
        self._dim = dim

    def collect(self, path: Key, leaves: dict[Key, TensorSpec]) -> None:
        for name, member in self._members:
            member.collect((*path, name), leaves)

    def read(self, td: TensorDictBase, path: Key, found: dict[Key, Any]) -> None:
        for (name, member), part in zip(self._members, td.unbind(self._dim), strict=True):
            member.read(part, (*path, name), found)

    def get(self, td: TensorDictBase, path: Key) -> Any:
        index = next(i for i, (name, _) in enumerate(self._members) if name == path[0])
        return self._members[index][1].get(td.unbind(self._dim)[index], path[1:])

    def build(self, path: Key, values: Values) -> TensorDictBase:
        members = [member.build((*path, name), values) for name, member in self._members]
        return LazyStackedTensorDict(*members, stack_dim=self._dim)


def _merged(specs: Sequence[Composite]) -> _Branch | _Stack:
    stacked = [spec for spec in specs if isinstance(spec, StackedComposite)]
    if stacked:
        dim = stacked[0].stack_dim
        members = zip(*(spec.unbind(dim) for spec in specs), strict=True)
        return _Stack([_merged(member) for member in members], dim)
    children: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        for name, child in spec.items():
            children.setdefault(name, []).append(child)
    merged: dict[str, _Branch | _Stack | TensorSpec] = {}
    for name, found in children.items():
        branches = [child for child in found if isinstance(child, Composite)]
        merged[name] = _merged(branches) if branches else found[0]
    return _Branch(min((spec.shape for spec in specs), key=len), merged)


def non_tensor(value: Any, depth: int) -> Any:
    """Objects, in lists that are nested as deep as there are batch dims, as one entry of a TensorDict."""
    if depth == 0:
        return NonTensorData(value)
    return NonTensorStack(*[non_tensor(item, depth - 1) for item in value])


def copied(value: Any) -> Any:
    """A copy, of a tensor one that keeps its place in a graph of gradients; what cannot be copied is shared."""
    return value.clone() if isinstance(value, torch.Tensor) else received(value, keeps_graph=True)


def owned(value: Any) -> Any:
    """A copy of a TensorDict, or of what one has at a key, with copies of the objects in it; see `copied`."""
    if isinstance(value, NonTensorData):
        return NonTensorData(copied(value.data), batch_size=value.batch_size, device=value.device)
    if isinstance(value, LazyStackedTensorDict):  # as are stacks of objects
        return type(value)(*map(owned, value.tensordicts), stack_dim=value.stack_dim)
    if not isinstance(value, TensorDict) or all(type(entry) is torch.Tensor for entry in value.values()):
        return value.clone()
    td = value.empty()
    for key, entry in value.items():
        td.set(key, owned(entry))
    return td


def plain(value: Any) -> Any:
    """An entry of a TensorDict as the objects in it, in lists as deep as there are batch dims; a tensor as it is."""
    if isinstance(value, torch.Tensor):
        return value
    return value.tolist() if isinstance(value, NonTensorData | NonTensorStack) else value


def tensors_of(td: TensorDictBase) -> list[torch.Tensor]:
    """All tensors of a TensorDict; those of lazy stacks are new ones each time."""
    return [value for value in td.values(True, True) if isinstance(value, torch.Tensor)]


def exchanged(
    td: TensorDictBase, tensors: Mapping[int, torch.Tensor], device: torch.device | None, otherwise: torch.device
) -> TensorDictBase:
    """The same TensorDict with other tensors.

    Args:
        td: The TensorDict.
        tensors: These, by the ids of those in their place.
        device: Of the new TensorDict.
        otherwise: Where those go that are not exchanged, one by one, as those of lazy stacks.
    """

    def replace(value: Any) -> Any:
        found = tensors.get(id(value))
        return value.to(otherwise) if found is None else found

    apply: Callable[..., Any] = td.apply
    replaced: TensorDictBase = apply(replace, device=device)
    return replaced
