"""The spec of a TensorDict."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensorclass

from aioenvs.errors import shown
from aioenvs.specs.base import DeviceLike, Lead, Rearrange, TensorSpec, as_device, as_shape, concrete
from aioenvs.specs.leaf import key_prefix
from aioenvs.specs.mapping import NestedKey, SpecMapping, as_path, dressed, is_structure, like, opened, same_class

MISSING = object()


class Composite(SpecMapping):
    """The specs of a TensorDict's entries, by key.

    An entry may be another Composite, or None where there is a key without a spec. All entries start
    with the composite's shape, which is the batch size of its values.

    Args:
        specs: the entries; nested keys are tuples, and a mapping becomes a Composite.
        shape: the batch size of a value; () by default.
        device: the device of all entries; None if they may differ.
        data_cls: a tensorclass, in which values are returned instead of in a TensorDict.
        step_mdp_static: a label that copies keep.
        names: the names of the batch dims, which values of `rand`, `zero` and `one` get.
        batch_size: the same as `shape`.
        **entries: more entries.

    Raises:
        ValueError: an entry does not start with `shape`.
        RuntimeError: an entry is on another device.

    >>> from aioenvs.specs import Bounded, Categorical, Composite
    >>> spec = Composite(observation=Bounded(-1, 1, shape=(4,)), action=Categorical(3)).expand(2)
    >>> td = spec.rand()
    >>> td.batch_size, spec.is_in(td), spec["observation"].shape
    (torch.Size([2]), True, torch.Size([2, 4]))
    """

    data_cls: Any = None

    def __init__(
        self,
        specs: Mapping[Any, Any] | Composite | None = None,
        /,
        *,
        shape: Iterable[int] | int | None = None,
        device: DeviceLike | None = None,
        data_cls: Any = None,
        step_mdp_static: bool = False,
        names: Sequence[str | None] | None = None,
        batch_size: Iterable[int] | int | None = None,
        **entries: Any,
    ) -> None:
        if not isinstance(specs, Mapping | Composite | None):
            raise TypeError(f"expected a mapping of specs for Composite, found {shown(specs)}")
        if shape is not None and batch_size is not None:
            raise TypeError(f"expected shape or batch_size, found both: {shown(shape)} and {shown(batch_size)}")
        self._specs: dict[str, TensorSpec | None] = {}
        self._shape = as_shape(next((size for size in (shape, batch_size) if size is not None), ()))
        self._device = None if device is None else as_device(device)
        self._locked = False
        self._dim_names: tuple[str | None, ...] | None = None
        self.data_cls, self.step_mdp_static = data_cls, step_mdp_static
        for key, spec in {**dict(() if specs is None else specs.items()), **entries}.items():
            self.set(key, spec)
        self.names = names

    def _names(self) -> list[str]:
        return list(self._specs)

    def _child(self, name: str) -> Any:
        return self._specs[name]

    def _put(self, name: str, spec: TensorSpec | None) -> None:
        self._specs[name] = spec

    def _drop(self, name: str) -> None:
        del self._specs[name]

    def _branch(self) -> Composite:
        return Composite(shape=self.shape, device=self.device)

    def _fit(self, key: tuple[str, ...], spec: Any, shape: torch.Size) -> TensorSpec | None:
        """Return an entry as it is stored in a composite of this shape."""
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=shape, device=self.device)
        if spec is None:
            return None
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{key_prefix(key)}expected a spec, a mapping or None, found {shown(spec)}")
        if spec.shape[: len(shape)] != shape:
            if not isinstance(spec, Composite) or spec.shape != shape[: spec.ndim]:
                raise ValueError(
                    f"{key_prefix(key)}expected a spec whose shape starts with {tuple(shape)}, "
                    f"found {tuple(spec.shape)} in {shown(spec)}"
                )
            spec = spec.clone()
            spec.shape = shape
        if self.device is not None and spec.device not in (None, self.device):
            where = key_prefix(key)
            raise RuntimeError(f"{where}expected a spec on {self.device}, found one on {spec.device}")
        fitted: TensorSpec = spec
        return fitted

    @property
    def shape(self) -> torch.Size:
        """The batch size of a value; setting it checks the leaves and changes nested composites."""
        return self._shape

    @shape.setter
    def shape(self, shape: Iterable[int] | int) -> None:
        self._require_unlocked()
        new = as_shape(shape)
        fitted = {name: self._fit((name,), self._child(name), new) for name in self._names()}
        self._shape = new
        for name, spec in fitted.items():
            self._put(name, spec)

    @property
    def batch_size(self) -> torch.Size:
        """The leading shape, as TensorDicts call it."""
        return self.shape

    @batch_size.setter
    def batch_size(self, shape: Iterable[int] | int) -> None:
        self.shape = shape

    @property
    def device(self) -> torch.device | None:
        """The device of all entries; None if they may differ. Setting it moves them."""
        return self._device

    @device.setter
    def device(self, device: DeviceLike | None) -> None:
        self._require_unlocked()
        if device is None:
            self.clear_device_()
            return
        there = self.to(device)
        self._specs, self._device = there._specs, there._device

    def clear_device_(self) -> Self:
        """Have no device, here and in nested composites; the leaves keep theirs. Returns self.

        Raises:
            RuntimeError: the composite is locked.
        """
        self._require_unlocked()
        self._device = None
        for spec in self._specs.values():
            if isinstance(spec, Composite):
                spec.clear_device_()
        return self

    @property
    def space(self) -> None:
        """None: a Composite has no bounds."""
        return None

    @property
    def domain(self) -> str | None:
        """The string "composite"."""
        return "composite"

    @property
    def names(self) -> list[str | None]:
        """The names of the batch dims, None for those without one."""
        return [None] * self.ndim if self._dim_names is None else list(self._dim_names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        self._require_unlocked()
        if names is not None and len(names) != self.ndim:
            raise ValueError(f"expected {self.ndim} names, found {shown(names)}")
        self._dim_names = None if names is None else tuple(names)
        for spec in self._specs.values():
            if names is not None and isinstance(spec, Composite):
                spec.names = [*names, *spec.names[self.ndim :]]

    def refine_names(self, *names: Any) -> Self:
        """Name batch dims that have no name yet; an Ellipsis stands for dims that stay as they are. Returns self.

        Raises:
            RuntimeError: a dim has another name, or the composite is locked.
            ValueError: there are too few or too many names.
        """
        old, new = self.names, list(names)
        if Ellipsis in new:
            at = new.index(Ellipsis)
            end = at + self.ndim - len(new) + 1
            new[at : at + 1] = old[at:end]
        if len(new) == self.ndim and any(a not in (None, b) for a, b in zip(old, new, strict=True)):
            raise RuntimeError(f"cannot refine the names {shown(old)} to {shown(names)}: a dim has another name")
        self.names = new
        return self

    # New composites

    def _with(self, specs: dict[str, TensorSpec | None], shape: torch.Size | None = None) -> Self:
        new = copy.copy(self)
        new._specs, new._locked = specs, False
        if shape is not None and shape != self._shape:
            new._shape, new._dim_names = shape, None
        return new

    def expand(self, *shape: Any) -> Self:
        """Return the spec of a larger shape, see `TensorSpec.expand`; the names of the dims stay."""
        new = super().expand(*shape)
        if self._dim_names is not None:
            new.names = [*[None] * (new.ndim - self.ndim), *self._dim_names]
        return new

    def _rearranged(self, shape: torch.Size, op: Rearrange) -> Self:
        return self._with({k: None if s is None else op(s) for k, s in self._specs.items()}, shape)

    def clone(self) -> Self:
        """Return an unlocked copy, also of nested composites."""
        return self._rearranged(self.shape, lambda spec: spec.clone())

    def unsqueeze(self, dim: int) -> Self:
        """Return the spec with a new dim of size 1 at `dim`, which has no name; the names of the others stay."""
        new = super().unsqueeze(dim)
        if self._dim_names is not None:
            at = self._insertion(dim)
            new.names = [*self._dim_names[:at], None, *self._dim_names[at:]]
        return new

    def to(self, dest: DeviceLike | torch.dtype | None) -> Self:
        """Return the spec with all entries on another device or of another dtype; None changes nothing."""
        new = self._rearranged(self.shape, lambda spec: spec.to(dest))
        if dest is not None and not isinstance(dest, torch.dtype):
            new._device = as_device(dest)
        return new

    def empty(self) -> Self:
        """Return a composite of the same shape and device without entries."""
        return self._with({})

    def select(self, *keys: NestedKey, strict: bool = True) -> Composite:
        """Return a composite with only these entries.

        Raises:
            KeyError: with `strict`, a key is missing.
        """
        new = self.empty()
        for key in keys:
            if strict or key in self:
                spec, path = self[key], as_path(key) or ()
                for node in (path[:depth] for depth in range(1, len(path))):
                    if node not in new:
                        new.set(node, self[node].empty())
                new.set(key, spec)
        return new

    def exclude(self, *keys: NestedKey) -> Composite:
        """Return a composite without these entries; keys that are missing do not matter."""
        new = self.clone()
        for key in keys:
            new.pop(key, None)
        return new

    # Values

    def _built(self, method: str, shape: Lead) -> Any:
        lead = tuple(shape or ())
        present = ((name, spec) for name, spec in self._specs.items() if spec is not None)
        values = {name: getattr(spec, method)(lead) for name, spec in present}
        names = None if self._dim_names is None else [*[None] * len(lead), *self._dim_names]
        built = TensorDict(values, batch_size=(*lead, *concrete(self._shape)), device=self._device, names=names)
        return dressed(built, self.data_cls)

    def cardinality(self) -> int | float:
        """Return the product of the entries' cardinalities, see `TensorSpec.cardinality`."""
        return math.prod(spec.cardinality() for spec in self._specs.values() if spec is not None)

    def enumerate(self, use_mask: bool = False) -> Any:
        """Return a TensorDict of all combinations of the entries' values, of shape `(cardinality, *self.shape)`."""
        present = {name: spec for name, spec in self._specs.items() if spec is not None}
        values = {name: spec.enumerate(use_mask) for name, spec in present.items()}
        counts = [len(value) for value in values.values()]
        total = math.prod(counts)
        where = torch.unravel_index(torch.arange(total), counts) if counts else ()
        chosen = {k: v[i.to(v.device)] for (k, v), i in zip(values.items(), where, strict=True)}
        combined = TensorDict(chosen, batch_size=(total, *concrete(self._shape)), device=self._device)
        return dressed(combined, self.data_cls)

    def type_check(self, value: Any, key: Any = None) -> None:
        """Do nothing if the entries have the dtypes of their specs, see `TensorSpec.type_check`.

        Args:
            value: a TensorDict or mapping, or the value of one entry if `key` is its name.
            key: the name or names of the entries to check; all by default.

        Raises:
            KeyError: an entry is missing.
        """
        if isinstance(value, torch.Tensor) and isinstance(key, str):
            self[key].type_check(value, key)
            return
        chosen = self._specs if key is None else {name: self[name] for name in ([key] if isinstance(key, str) else key)}
        for name, spec in chosen.items():
            if spec is not None and isinstance(spec, Composite):
                spec.type_check(self._required(value, name))
            elif spec is not None:
                spec.type_check(self._required(value, name), name)

    def rand(self, shape: Lead = ()) -> Any:
        """Return a TensorDict of random values, with batch size `(*shape, *self.shape)`."""
        return self._built("rand", shape)

    def zero(self, shape: Lead = ()) -> Any:
        """Return a TensorDict of zeros, with batch size `(*shape, *self.shape)`."""
        return self._built("zero", shape)

    def one(self, shape: Lead = ()) -> Any:
        """Return a TensorDict of ones, with batch size `(*shape, *self.shape)`."""
        return self._built("one", shape)

    def rand_update(self, val: TensorDictBase) -> TensorDictBase:
        """Set random values in a TensorDict of batch size `(*, *self.shape)`; returns it."""
        return self._updated("rand", val)

    def zeros_update(self, val: TensorDictBase) -> TensorDictBase:
        """Set zeros in a TensorDict of batch size `(*, *self.shape)`; returns it."""
        return self._updated("zero", val)

    def ones_update(self, val: TensorDictBase) -> TensorDictBase:
        """Set ones in a TensorDict of batch size `(*, *self.shape)`; returns it."""
        return self._updated("one", val)

    def _updated(self, method: str, val: TensorDictBase) -> TensorDictBase:
        lead = val.batch_size[: max(val.ndim - self.ndim, 0)]
        return val.update(getattr(self, method)(lead))

    def is_in(self, value: Any) -> bool:
        """Whether all entries are there and in their specs, and it is of the class; more entries do not matter."""
        if not self._is_kind(value):
            return False
        if (parts := self._parts(value)) is not None:
            return all(spec.is_in(part) for spec, part in parts)
        for name, spec in self._specs.items():
            if spec is not None:
                entry = _entry(value, name)
                if entry is MISSING or not spec.is_in(entry):
                    return False
        return True

    def _parts(self, value: Any) -> list[tuple[Any, Any]] | None:
        """The parts of a lazy stack, which may be no one tensor for each key, and what each must be; else None."""
        inner = opened(value)
        if not isinstance(inner, LazyStackedTensorDict):
            return None
        dim = inner.stack_dim - max(inner.ndim - self.ndim, 0)
        parts = value.unbind(inner.stack_dim)
        if dim < 0:
            return [(self, part) for part in parts]
        if dim >= self.ndim or -1 in self.shape[: dim + 1] or len(parts) != self.shape[dim]:
            return None
        return list(zip(self.unbind(dim), parts, strict=True))

    def _is_kind(self, value: Any) -> bool:
        """Whether a value has entries, and the class that it should have."""
        if is_structure(value):
            return self.data_cls is None or same_class(type(value), self.data_cls)
        return isinstance(value, TensorDictBase | Mapping) and not is_tensorclass(self.data_cls)

    def _differences(self, value: Any, key: tuple[str, ...]) -> list[str]:
        if not self._is_kind(value):
            expected = "a TensorDict" if self.data_cls is None else f"a {self.data_cls.__name__}"
            return [f"{key_prefix(key)}expected {expected}, found {type(value).__name__} {shown(value)}"]
        found = []
        if (parts := self._parts(value)) is not None:
            texts = (spec._differences(part, key) for spec, part in parts)
            return [f"[{i}] {text}" for i, own in enumerate(texts) for text in own]
        for name, spec in self._specs.items():
            if spec is None:
                continue
            entry = _entry(value, name)
            path = (*key, name)
            if entry is MISSING:
                keys = list(value.keys())
                found.append(f"{key_prefix(path)}expected {shown(spec)}, found nothing among the keys {keys!r}")
            else:
                found += spec._differences(entry, path)
        return found

    def project(self, value: Any) -> Any:
        """Return the TensorDict with each entry projected; entries without a spec stay."""
        return like(value, self._mapped("project", value, opened(value).copy()))

    def encode(self, value: Mapping[str, Any], *, ignore_device: bool = False) -> Any:
        """Return a mapping of numpy or Python values as a TensorDict, see `TensorSpec.encode`.

        Raises:
            KeyError: an entry is missing.
        """
        into = TensorDict({}, concrete(self._shape), device=None if ignore_device else self._device)
        return dressed(self._mapped("encode", value, into, ignore_device=ignore_device), self.data_cls)

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return a dict of what the entries' specs make of theirs."""
        if safe:
            self.assert_is_in(value)
        return self._mapped("to_numpy", value, {})

    def _mapped(self, method: str, value: Any, into: Any, **arguments: Any) -> Any:
        for name, spec in self._specs.items():
            if spec is not None:
                entry = self._required(value, name)
                if entry is not None or not is_structure(value):
                    into[name] = getattr(spec, method)(entry, **arguments)
        return into

    @staticmethod
    def _required(value: Any, name: str) -> Any:
        entry = _entry(value, name)
        if entry is MISSING:
            raise KeyError(f"expected the key {name!r}, found {list(value.keys())!r}")
        return entry

    def __eq__(self, other: object) -> bool:
        """Whether the other composite has the same shape, device, class and entries."""
        return (
            type(self) is type(other)
            and isinstance(other, Composite)
            and (self.shape, self.device) == (other.shape, other.device)
            and same_class(self.data_cls, other.data_cls)
            and self._specs == other._specs
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return one line per entry."""
        lines = [f"{name!r}: {spec!r},".replace("\n", "\n    ") for name, spec in self.items()]
        body = "".join(f"\n    {line}" for line in lines)
        return f"{type(self).__name__}({body}{chr(10) * bool(lines)}{self._footer()})"

    def _footer(self) -> str:
        data_cls = "" if self.data_cls is None else f", data_cls={self.data_cls.__name__}"
        return f"shape={tuple(self.shape)}, device={self.device}{data_cls}"


def _entry(value: Any, name: str) -> Any:
    """Return the entry under a name: MISSING if there is none, None for such a field of a tensorclass."""
    inner = opened(value)
    entry = inner.get(name, MISSING)
    if entry is not MISSING and entry is not None:
        return entry
    return MISSING if inner is value and entry is MISSING else None
