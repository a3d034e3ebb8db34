"""The spec of a TensorDict."""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase

from .base import DeviceLike, Rearrange, TensorSpec, as_device, as_shape, concrete
from .leaf import key_prefix

NestedKey = str | tuple[str, ...]
MISSING = object()


def as_path(key: Any) -> tuple[str, ...] | None:
    """Return a key as a tuple of names, None if it is no key."""
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple) and key and all(isinstance(name, str) for name in key):
        return key
    return None


class Composite(TensorSpec):
    """The specs of a TensorDict's entries, by key.

    An entry may be another Composite, or None where there is a key without a spec. All entries start
    with the composite's shape, which is the batch size of its values.

    Args:
        specs: the entries; nested keys are tuples, and a mapping becomes a Composite.
        shape: the batch size of a value.
        device: the device of all entries; None if they may differ.
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

    def __init__(
        self,
        specs: Mapping[Any, Any] | Composite | None = None,
        /,
        *,
        shape: Iterable[int] | int = (),
        device: DeviceLike | None = None,
        **entries: Any,
    ) -> None:
        self._specs: dict[str, TensorSpec | None] = {}
        self._shape = as_shape(shape)
        self._device = None if device is None else as_device(device)
        self._locked = False
        for key, spec in {**dict((specs or {}).items()), **entries}.items():
            self.set(key, spec)

    # The three ways to the entries at the top level; all else is built on them.

    def _names(self) -> list[str]:
        return list(self._specs)

    def _child(self, name: str) -> Any:
        return self._specs[name]

    def _put(self, name: str, spec: TensorSpec | None) -> None:
        self._specs[name] = spec

    def _drop(self, name: str) -> None:
        del self._specs[name]

    # Reading

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
        """The same as `shape`."""
        return self.shape

    @property
    def is_locked(self) -> bool:
        """Whether changes raise RuntimeError."""
        return self._locked

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """Return the entry at a key, or the default."""
        try:
            return self[key]
        except KeyError:
            return default

    def __getitem__(self, index: Any) -> Any:
        """Return the entry at a key, or the spec of a part of the batch.

        Raises:
            KeyError: there is no such key.
            IndexError: the index does not fit the batch dims.
        """
        path = as_path(index)
        if path is None:
            return super().__getitem__(index)
        spec: Any = self
        for depth, name in enumerate(path):
            if not isinstance(spec, Composite) or name not in spec._names():
                found = list(spec.keys()) if isinstance(spec, Composite) else spec
                raise KeyError(f"{index!r}: expected {name!r} at {path[:depth]!r}, found {found!r}")
            spec = spec._child(name)
        return spec

    def __contains__(self, key: object) -> bool:
        """Whether there is an entry at a key, which may be nested."""
        path = as_path(key)
        return path is not None and self.get(path, self) is not self

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys at the top level."""
        return iter(self._names())

    def __len__(self) -> int:
        """Return the number of entries at the top level."""
        return len(self._names())

    def is_empty(self) -> bool:
        """Whether there are no entries."""
        return not self._names()

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> KeysView[Any]:
        """Return the keys; a nested one is a tuple."""
        return self._flat(include_nested, leaves_only).keys()

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> ValuesView[Any]:
        """Return the specs."""
        return self._flat(include_nested, leaves_only).values()

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> ItemsView[Any, Any]:
        """Return the keys with their specs."""
        return self._flat(include_nested, leaves_only).items()

    def _flat(self, include_nested: bool, leaves_only: bool) -> dict[NestedKey, Any]:
        found: dict[NestedKey, Any] = {}
        for name in self._names():
            spec = self._child(name)
            nested = isinstance(spec, Composite)
            if not (leaves_only and nested):
                found[name] = spec
            if include_nested and nested:
                for key, leaf in spec._flat(True, leaves_only).items():
                    found[(name, key) if isinstance(key, str) else (name, *key)] = leaf
        return found

    # Changing

    def lock_(self) -> Self:
        """Make changes raise RuntimeError, here and in nested composites."""
        return self._set_lock(True)

    def unlock_(self) -> Self:
        """Allow changes again."""
        return self._set_lock(False)

    def _set_lock(self, locked: bool) -> Self:
        self._locked = locked
        for spec in self._specs.values():
            if isinstance(spec, Composite):
                spec._set_lock(locked)
        return self

    def _require_unlocked(self) -> None:
        if self.is_locked:
            raise RuntimeError("Cannot modify a locked Composite; call unlock_() first.")

    def set(self, key: NestedKey, spec: Any) -> Self:
        """Set the entry at a key, with the composites on the way; returns self.

        Raises:
            ValueError: the spec does not start with the composite's shape.
            RuntimeError: the composite is locked, or the spec is on another device.
        """
        self._require_unlocked()
        path = as_path(key)
        if path is None:
            raise TypeError(f"expected a str or a tuple of str as key, found {key!r}")
        name, rest = path[0], path[1:]
        if not rest:
            self._put(name, self._fit(path, spec, self.shape))
            return self
        inner = self._child(name) if name in self._names() else None
        if not isinstance(inner, Composite):
            inner = Composite(shape=self.shape, device=self.device)
        inner.set(rest, spec)
        self._put(name, inner)
        return self

    def __setitem__(self, key: NestedKey, spec: Any) -> None:
        """Set the entry at a key, see `set`."""
        self.set(key, spec)

    def _fit(self, key: tuple[str, ...], spec: Any, shape: torch.Size) -> TensorSpec | None:
        """Return an entry as it is stored in a composite of this shape."""
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=shape, device=self.device)
        if spec is None:
            return None
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{key_prefix(key)}expected a spec, a mapping or None, found {spec!r}")
        if spec.shape[: len(shape)] != shape:
            if not isinstance(spec, Composite) or spec.shape != shape[: spec.ndim]:
                raise ValueError(
                    f"{key_prefix(key)}expected a spec whose shape starts with {tuple(shape)}, "
                    f"found {tuple(spec.shape)} in {spec!r}"
                )
            spec = spec.clone()
            spec.shape = shape
        if self.device is not None and spec.device not in (None, self.device):
            where = key_prefix(key)
            raise RuntimeError(f"{where}expected a spec on {self.device}, found one on {spec.device}")
        fitted: TensorSpec = spec
        return fitted

    def __delitem__(self, key: NestedKey) -> None:
        """Delete the entry at a key.

        Raises:
            KeyError: there is no such key.
            RuntimeError: the composite is locked.
        """
        self._require_unlocked()
        path = as_path(key)
        if path is None or path not in self:
            raise KeyError(f"expected one of {list(self.keys(True))!r}, found {key!r}")
        if len(path) == 1:
            self._drop(path[0])
            return
        inner = self._child(path[0])
        del inner[path[1:]]
        self._put(path[0], inner)

    def pop(self, key: NestedKey, *default: Any) -> Any:
        """Delete the entry at a key and return it, or the default if there is none."""
        if default and key not in self:
            return default[0]
        spec = self[key]
        del self[key]
        return spec

    def update(self, other: Mapping[Any, Any] | Composite) -> Self:
        """Set all entries of another composite, merging nested ones; returns self."""
        self._require_unlocked()
        for key, spec in other.items():
            mine = self.get(key)
            if isinstance(mine, Composite) and isinstance(spec, Composite | Mapping):
                mine.update(spec)
            else:
                self.set(key, spec)
        return self

    # New composites

    def _with(self, specs: dict[str, TensorSpec | None], shape: torch.Size | None = None) -> Self:
        new = copy.copy(self)
        new._specs, new._locked = specs, False
        if shape is not None:
            new._shape = shape
        return new

    def _rearranged(self, shape: torch.Size, op: Rearrange) -> Self:
        return self._with({k: None if s is None else op(s) for k, s in self._specs.items()}, shape)

    def clone(self) -> Self:
        """Return an unlocked copy, also of nested composites."""
        return self._rearranged(self.shape, lambda spec: spec.clone())

    def to(self, dest: DeviceLike | torch.dtype) -> Self:
        """Return the spec with all entries on another device.

        Raises:
            TypeError: a dtype, which only a leaf can change to.
        """
        if isinstance(dest, torch.dtype):
            raise TypeError(f"expected a device for a Composite, found {dest}; a leaf can change its dtype")
        new = self._rearranged(self.shape, lambda spec: spec.to(dest))
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
                new.set(key, self[key])
        return new

    def exclude(self, *keys: NestedKey) -> Composite:
        """Return a composite without these entries; keys that are missing do not matter."""
        new = self.clone()
        for key in keys:
            new.pop(key, None)
        return new

    # Values

    def _built(self, method: str, shape: Sequence[int]) -> Any:
        present = ((name, spec) for name, spec in self._specs.items() if spec is not None)
        values = {name: getattr(spec, method)(shape) for name, spec in present}
        return TensorDict(values, batch_size=(*shape, *concrete(self._shape)), device=self._device)

    def rand(self, shape: Sequence[int] = ()) -> Any:
        """Return a TensorDict of random values, with batch size `(*shape, *self.shape)`."""
        return self._built("rand", shape)

    def zero(self, shape: Sequence[int] = ()) -> Any:
        """Return a TensorDict of zeros, with batch size `(*shape, *self.shape)`."""
        return self._built("zero", shape)

    def one(self, shape: Sequence[int] = ()) -> Any:
        """Return a TensorDict of ones, with batch size `(*shape, *self.shape)`."""
        return self._built("one", shape)

    def is_in(self, value: Any) -> bool:
        """Whether all entries are there and in their specs; more entries do not matter."""
        if not isinstance(value, TensorDictBase | Mapping):
            return False
        for name, spec in self._specs.items():
            if spec is not None:
                entry = value.get(name, MISSING)
                if entry is MISSING or not spec.is_in(entry):
                    return False
        return True

    def _differences(self, value: Any, key: tuple[str, ...]) -> list[str]:
        if not isinstance(value, TensorDictBase | Mapping):
            return [f"{key_prefix(key)}expected a TensorDict, found {type(value).__name__} {value!r}"]
        found = []
        for name, spec in self._specs.items():
            if spec is None:
                continue
            entry = value.get(name, MISSING)
            path = (*key, name)
            if entry is MISSING:
                keys = list(value.keys())
                found.append(f"{key_prefix(path)}expected {spec!r}, found nothing among the keys {keys!r}")
            else:
                found += spec._differences(entry, path)
        return found

    def project(self, value: Any) -> Any:
        """Return the TensorDict with each entry projected; entries without a spec stay."""
        return self._mapped("project", value, value.copy())

    def encode(self, value: Mapping[str, Any]) -> Any:
        """Return a mapping of numpy or Python values as a TensorDict, see `TensorSpec.encode`.

        Raises:
            KeyError: an entry is missing.
        """
        return self._mapped("encode", value, TensorDict({}, concrete(self._shape), device=self._device))

    def to_numpy(self, value: Any) -> Any:
        """Return a dict of what the entries' specs make of theirs."""
        return self._mapped("to_numpy", value, {})

    def _mapped(self, method: str, value: Any, into: Any) -> Any:
        for name, spec in self._specs.items():
            if spec is not None:
                entry = value.get(name, MISSING)
                if entry is MISSING:
                    raise KeyError(f"expected the key {name!r}, found {list(value.keys())!r}")
                into[name] = getattr(spec, method)(entry)
        return into

    def __eq__(self, other: object) -> bool:
        """Whether the other composite has the same shape, device and entries."""
        return (
            type(self) is type(other)
            and isinstance(other, Composite)
            and (self.shape, self.device) == (other.shape, other.device)
            and self._specs == other._specs
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return one line per entry."""
        lines = [f"{name!r}: {spec!r},".replace("\n", "\n    ") for name, spec in self.items()]
        body = "".join(f"\n    {line}" for line in lines)
        return f"{type(self).__name__}({body}{chr(10) * bool(lines)}{self._footer()})"

    def _footer(self) -> str:
        return f"shape={tuple(self.shape)}, device={self.device}"
