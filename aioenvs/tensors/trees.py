"""The leaves of nested specs as flat keys, and TensorDicts made of flat values.

A worker and its parent exchange named arrays, while envs speak in nested TensorDicts. A `Tree` knows the nesting:
which TensorDict has which batch size, which is in a tensorclass, and where the members of a lazy stack are. The members
of a stack become steps of the path of their own, "[0]", "[1]", so that each has keys and shapes of its own; where it is
only the values that are stacked lazily, as chat histories are whose messages differ, a value is in `Parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
    lazy_stack,
)

from aioenvs.engine.adapters.copying import received
from aioenvs.engine.layout import INPUT, NEXT, ROOT
from aioenvs.engine.layout import Key as Key
from aioenvs.specs import Composite, NonTensor, StackedComposite, TensorSpec
from aioenvs.specs.mapping import NestedKey, dressed, is_structure, like, opened

Values = Mapping[Key, Any]


SIZE = "[size]"  # under which the batch size of a node is, where it does not follow from the spec


class ABSENT:
    """The mark, itself, of a field whose value is None, or that one element of a lazy stack lacks."""


class Parts(NamedTuple):
    """A value in a lazy stack along `dim` whose elements are no one tensor; ABSENT where one has none."""

    values: Sequence[Any]
    dim: int


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
        self._direct = {key: nested_key(key) for key in root.direct(())}

    @property
    def entries(self) -> list[Key]:
        """The leaves that a TensorDict has as entries, rather than a size."""
        return [key for key in self.leaves if key[-1] != SIZE]

    @classmethod
    def of(cls, *specs: Composite) -> Tree:
        """The nesting of what these Composites describe together; empty ones add nothing."""
        return cls(_merged([spec for spec in specs if len(spec.keys())] or list(specs[:1]), is_root=True))

    def is_direct(self, key: Key) -> bool:
        """Whether a TensorDict itself can be asked for a leaf: it is in no stack, tensorclass, or node that varies."""
        return key in self._direct

    def get(self, td: TensorDictBase, key: Key) -> Any:
        """Return a TensorDict's entry at this path, or None; ABSENT or Parts only where it `is_direct` not."""
        direct = self._direct.get(key)
        return td.get(direct, None) if direct is not None else self._root.get(td, key)

    def get_each(self, td: TensorDictBase, key: Key) -> list[Any] | None:
        """Return the entry of each row of a TensorDict at this path; None if one has none."""
        values = [self.get(part, key) for part in td.unbind(0)]
        return None if any(value is None for value in values) else values

    def read(self, td: TensorDictBase) -> dict[Key, Any]:
        """Return a TensorDict's values of the leaves."""
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

    def direct(self, path: Key) -> Iterator[Key]:
        """The leaves that a TensorDict itself can be asked for."""
        for name, child in self._children.items():
            if isinstance(child, TensorSpec):
                yield *path, name
            else:
                yield from child.direct((*path, name))

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
                if built is not None and (isinstance(child, _Structured) or _has_entries(built)):
                    entries[name] = built
                continue
            value = values.get(key)
            if isinstance(child, NonTensor) and key in values:
                value, is_plain = non_tensor(value, len(self.shape)), False
            if value is not None:
                entries[name] = value
        make: Callable[..., TensorDict] = TensorDict._new_unsafe if is_plain else TensorDict
        return make(entries, batch_size=self.shape)


class _Structured(_Branch):
    """A node in a tensorclass, or one whose size varies from value to value; and all that is in such nodes."""

    def __init__(
        self, shape: torch.Size, children: dict[str, _Branch | _Stack | TensorSpec], data_cls: Any = None
    ) -> None:
        super().__init__(shape, children)
        self._data_cls = data_cls
        leaves = [child for child in children.values() if isinstance(child, TensorSpec)]
        self._is_open = -1 in shape or any(is_loose(leaf) and leaf.ndim > len(shape) for leaf in leaves)
        self._leaves: dict[Key, TensorSpec] = {}
        self.collect((), self._leaves)
        # A field of a tensorclass may be None, unless it has a place in a block.
        self._optional = [] if data_cls is None else [key for key, spec in self._leaves.items() if is_loose(spec)]

    def is_flat(self, shape: torch.Size) -> bool:
        return False

    def collect(self, path: Key, leaves: dict[Key, TensorSpec]) -> None:
        super().collect(path, leaves)
        if self._is_open:
            leaves[*path, SIZE] = NonTensor(())

    def direct(self, path: Key) -> Iterator[Key]:
        return iter(())

    def read(self, td: Any, path: Key, found: dict[Key, Any]) -> None:
        inner = opened(td)
        if isinstance(inner, LazyStackedTensorDict):
            each: list[dict[Key, Any]] = [{} for _ in inner.tensordicts]
            for part, own in zip(inner.tensordicts, each, strict=True):
                self.read(part, (), own)
            for key in dict.fromkeys(key for own in each for key in own):
                found[*path, *key] = _along([own.get(key, ABSENT) for own in each], inner.stack_dim)
        else:
            super().read(inner, path, found)
            if self._is_open:
                found[*path, SIZE] = tuple(inner.batch_size)
        for key in self._optional:
            found.setdefault((*path, *key), ABSENT)

    def get(self, td: Any, path: Key) -> Any:
        found: dict[Key, Any] = {}
        self.read(td, (), found)
        return found.get(path)

    def build(self, path: Key, values: Values) -> Any:
        own = {leaf: value for leaf in self._leaves if (value := values.get((*path, *leaf))) is not None}
        return self._made(own, self.shape) if any(value is not ABSENT for value in own.values()) else None

    def _made(self, own: Values, shape: torch.Size) -> Any:
        """The node with these values of its leaves, of this shape, or of the one that is among them."""
        values = {leaf: _divided(value, leaf[-1]) for leaf, value in own.items()}
        size = values.pop((SIZE,), ABSENT if self._is_open else shape)
        if size is ABSENT:  # of an env that has said nothing yet
            size = tuple(max(count, 0) for count in shape)
        ndim = size.dim + 1 if isinstance(size, Parts) else len(size)
        every = (size, *values.values())
        parts = next((each for each in every if isinstance(each, Parts) and each.dim < ndim), None)
        if parts is not None:
            rest = torch.Size([*shape[: parts.dim], *shape[parts.dim + 1 :]])
            if self._is_open:
                values[SIZE,] = size
            members = [
                self._made({leaf: _at(value, index, parts.dim) for leaf, value in values.items()}, rest)
                for index in range(len(parts.values))
            ]
            return lazy_stack(members, parts.dim)
        entries: dict[str, Any] = {}
        for name, child in self._children.items():
            if isinstance(child, TensorSpec):
                value = values.get((name,), ABSENT)
                if isinstance(child, NonTensor) and value is not ABSENT:
                    value = non_tensor(value, ndim)
            else:
                inner = {leaf[1:]: value for leaf, value in values.items() if leaf[0] == name and value is not ABSENT}
                value = ABSENT if not inner else self._child_of(child, inner, size)
            if value is not ABSENT and value is not None:
                entries[name] = value
        return dressed(TensorDict(entries, batch_size=size), self._data_cls)

    def _child_of(self, child: Any, inner: Values, size: Sequence[int]) -> Any:
        if isinstance(child, _Structured):
            return child._made(inner, torch.Size([*size, *child.shape[len(self.shape) :]]))
        return child.build((), inner)


class _Stack:
    """A lazy stack: members with children of their own."""

    def __init__(self, members: Sequence[_Branch | _Stack], dim: int) -> None:
        self._members = [(f"[{index}]", member) for index, member in enumerate(members)]
        self._dim = dim

    def collect(self, path: Key, leaves: dict[Key, TensorSpec]) -> None:
        for name, member in self._members:
            member.collect((*path, name), leaves)

    def direct(self, path: Key) -> Iterator[Key]:
        return iter(())

    def read(self, td: TensorDictBase, path: Key, found: dict[Key, Any]) -> None:
        for (name, member), part in zip(self._members, td.unbind(self._dim), strict=True):
            member.read(part, (*path, name), found)

    def get(self, td: TensorDictBase, path: Key) -> Any:
        index = next(i for i, (name, _) in enumerate(self._members) if name == path[0])
        return self._members[index][1].get(td.unbind(self._dim)[index], path[1:])

    def build(self, path: Key, values: Values) -> Any:
        return lazy_stack([member.build((*path, name), values) for name, member in self._members], self._dim)


def _merged(specs: Sequence[Composite], *, structured: bool = False, is_root: bool = False) -> _Branch | _Stack:
    """Return the node of these Composites together, inside of a structured node or not; a root is no tensorclass."""
    stacked = [spec for spec in specs if isinstance(spec, StackedComposite)]
    if stacked:
        dim = stacked[0].stack_dim
        members = zip(*(spec.unbind(dim) for spec in specs), strict=True)
        return _Stack([_merged(member, structured=structured, is_root=is_root) for member in members], dim)
    shape = min((spec.shape for spec in specs), key=len)
    classes = (spec.data_cls for spec in specs if not is_root and is_tensorclass(spec.data_cls))
    data_cls = next(classes, None)
    structured = structured or data_cls is not None or -1 in shape
    children: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        for name, child in spec.items():
            children.setdefault(name, []).append(child)
    merged: dict[str, _Branch | _Stack | TensorSpec] = {}
    for name, found in children.items():
        branches = [child for child in found if isinstance(child, Composite)]
        merged[name] = _merged(branches, structured=structured) if branches else found[0]
    return _Structured(shape, merged, data_cls) if structured else _Branch(shape, merged)


def is_loose(spec: TensorSpec) -> bool:
    """Whether values of a leaf have no fixed shape, so that they travel as objects."""
    return isinstance(spec, NonTensor) or -1 in spec.shape


def _has_entries(node: Any) -> bool:
    """Whether there is anything in a node; tensordict does not count objects in tensorclasses."""
    if isinstance(node, LazyStackedTensorDict):
        return any(map(_has_entries, node.tensordicts))
    return any(True for _ in opened(node).keys())  # noqa: SIM118


def _along(values: Sequence[Any], dim: int) -> Any:
    """Return the values of one leaf in the elements of a lazy stack, as one value."""
    if all(value is ABSENT for value in values):
        return ABSENT
    first = values[0]
    if isinstance(first, torch.Tensor) and all(
        isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (first.shape, first.dtype) for value in values
    ):
        return torch.stack(list(values), dim)
    return Parts([plain(value) for value in values], dim)


def _divided(value: Any, name: str) -> Any:
    """The values of each env, in a list, as Parts where they are no part of one value; anything else as it is."""
    if not isinstance(value, list):
        return value
    if name == SIZE:
        value = [ABSENT if part is None else part for part in value]
        if type(value[0]) is tuple and all(part == value[0] for part in value):
            return (len(value), *value[0])
    if name != SIZE and not any(part is ABSENT or isinstance(part, Parts) for part in value):
        return value
    return ABSENT if all(part is ABSENT for part in value) else Parts(value, 0)


def _at(value: Any, index: int, dim: int) -> Any:
    """Return the part of a value at an index along a dim of the node."""
    if value is ABSENT or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.select(dim, index)
    if type(value) is tuple:  # a size
        return (*value[:dim], *value[dim + 1 :])
    if not isinstance(value, Parts):
        return value[index] if dim == 0 else [_at(part, index, dim - 1) for part in value]
    if value.dim == dim:
        return value.values[index]
    inner, outer = (dim - 1, value.dim) if value.dim < dim else (dim, value.dim - 1)
    return Parts([_at(part, index, inner) for part in value.values], outer)


def non_tensor(value: Any, depth: int) -> Any:
    """Objects, in lists that are nested as deep as there are batch dims, as one entry of a TensorDict."""
    if depth == 0:
        return NonTensorData(value)
    if len(value) == 0:
        return NonTensorData(None, batch_size=[0] + [0] * (depth - 1))
    return NonTensorStack(*[non_tensor(item, depth - 1) for item in value])


def copied(value: Any) -> Any:
    """A copy, of a tensor one that keeps its place in a graph of gradients; what cannot be copied is shared."""
    return value.clone() if isinstance(value, torch.Tensor) else received(value, keeps_graph=True)


def owned(value: Any) -> Any:
    """A copy of a TensorDict, or of what one has at a key, with copies of the objects in it; see `copied`."""
    if isinstance(value, NonTensorData):
        return NonTensorData(copied(value.data), batch_size=value.batch_size, device=value.device)
    if is_structure(value):
        return like(value, owned(opened(value)))
    if isinstance(value, LazyStackedTensorDict):  # as are stacks of objects
        return type(value)(*map(owned, value.tensordicts), stack_dim=value.stack_dim)
    if not isinstance(value, TensorDict) or all(type(entry) is torch.Tensor for entry in value.values()):
        return value.clone()
    td = value.empty()
    for key, entry in value.items():
        td.set(key, owned(entry))
    return td


def plain(value: Any) -> Any:
    """An entry of a TensorDict as the objects in it, in lists as deep as there are batch dims; others as they are."""
    if isinstance(value, torch.Tensor):
        return value
    return value.tolist() if isinstance(value, NonTensorData | NonTensorStack) else value


def objects_of(tree: Tree, td: TensorDictBase, key: Key) -> Any:
    """Return a batch's values of a leaf that is no tensor, a list with one for each row; None if a row has none."""
    if tree.is_direct(key):
        return plain(tree.get(td, key))
    values = tree.get_each(td, key)
    return None if values is None else [plain(value) for value in values]


def tensors_of(td: TensorDictBase) -> list[torch.Tensor]:
    """All tensors of a TensorDict; those of lazy stacks are new ones each time."""
    return [value for value in td.values(True, True) if isinstance(value, torch.Tensor)]


def exchanged(
    td: TensorDictBase, tensors: Mapping[int, torch.Tensor], device: torch.device | None, otherwise: torch.device
) -> TensorDictBase:
    """Return the TensorDict, on a device, with other tensors, given by the ids of those in their place.

    Tensors that are not exchanged, as those of lazy stacks, go to `otherwise` one by one.
    """

    def replace(value: Any) -> Any:
        found = tensors.get(id(value))
        return value.to(otherwise) if found is None else found

    apply: Callable[..., Any] = td.apply
    replaced: TensorDictBase = apply(replace, device=device)
    return replaced
