"""The dict-like side of the specs of a TensorDict, and the tensorclasses in which its values may be."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from abc import abstractmethod
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Self

import cloudpickle
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensorclass
from tensordict.utils import _TENSORCLASS_MEMO

from aioenvs.errors import shown
from aioenvs.specs.base import TensorSpec

_named: weakref.WeakSet[type] = weakref.WeakSet()


def is_structure(value: Any) -> bool:
    """Whether a value is a tensorclass with entries of its own; non-tensor data is one by name only."""
    return not isinstance(value, TensorDictBase) and is_tensorclass(value) and not is_non_tensor(value)


def opened(value: Any) -> Any:
    """The TensorDict in a tensorclass, which lacks the fields that are None; anything else as it is."""
    return value._tensordict if is_structure(value) else value


def dressed(td: Any, data_cls: Any) -> Any:
    """A TensorDict in a tensorclass, whose fields without an entry are None; as it is without a class.

    An entry that is no field of the class is a ValueError.
    """
    if data_cls is None or not is_tensorclass(data_cls):
        return td
    if unknown := set(td.keys()).difference(fields := [field.name for field in dataclasses.fields(data_cls)]):
        raise ValueError(
            f"expected entries for the fields {fields!r} of {data_cls.__name__}, found {sorted(unknown)!r}"
        )
    return data_cls._from_tensordict(td)


def like(model: Any, td: Any) -> Any:
    """A TensorDict in the tensorclass of the model, if it is one."""
    return type(model)._from_tensordict(td) if is_structure(model) else td


def same_class(one: Any, other: Any) -> bool:
    """Whether two classes are one, or copies of one that several processes made, each for itself; None is no class."""
    one, other = (each if is_tensorclass(each) else None for each in (one, other))
    return one is other or (one is not None and other is not None and _words(one) == _words(other))


def name_classes() -> None:
    """Give the tensorclasses that travel by value names by which they are known again in what forks send back."""
    for data_cls in set(_TENSORCLASS_MEMO).difference(_named):
        if _travels_by_value(data_cls):
            with contextlib.suppress(Exception):  # it has its name by the time something in it cannot be pickled
                cloudpickle.dumps(data_cls)
        _named.add(data_cls)


def _travels_by_value(data_cls: type) -> bool:
    module = data_cls.__module__
    by_value = {"__main__", "__mp_main__", *cloudpickle.list_registry_pickle_by_value()}
    return "<locals>" in data_cls.__qualname__ or any(
        module == name or module.startswith(f"{name}.") for name in by_value
    )


def _words(data_cls: Any) -> Any:
    fields = getattr(data_cls, "__dataclass_fields__", {}).values()
    return data_cls.__module__, data_cls.__qualname__, [(field.name, str(field.type)) for field in fields]


NestedKey = str | tuple[str, ...]
IsLeaf = Callable[[type], bool]


def as_path(key: Any) -> tuple[str, ...] | None:
    """Return a key as a tuple of names, None if it is no key."""
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple) and key and all(isinstance(name, str) for name in key):
        return key
    return None


class SpecMapping(TensorSpec):
    """Specs by key, some of which are such mappings too."""

    _locked: bool
    step_mdp_static: bool = False

    # The ways to the entries at the top level; all else is built on them.

    @abstractmethod
    def _names(self) -> list[str]: ...

    @abstractmethod
    def _child(self, name: str) -> Any: ...

    @abstractmethod
    def _put(self, name: str, spec: TensorSpec | None) -> None: ...

    @abstractmethod
    def _drop(self, name: str) -> None: ...

    @abstractmethod
    def _fit(self, key: tuple[str, ...], spec: Any, shape: torch.Size) -> TensorSpec | None:
        """Return an entry as it is stored in a composite of this shape."""

    @abstractmethod
    def _branch(self) -> SpecMapping:
        """Return a composite without entries, to be put into this one."""

    # Reading

    @property
    def is_locked(self) -> bool:
        """Whether changes raise RuntimeError."""
        return self._locked

    @is_locked.setter
    def is_locked(self, locked: bool) -> None:
        self._set_lock(locked)

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
            if not isinstance(spec, SpecMapping) or name not in spec._names():
                found = list(spec.keys()) if isinstance(spec, SpecMapping) else spec
                raise KeyError(f"{shown(index)}: expected {name!r} at {path[:depth]!r}, found {shown(found)}")
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

    def is_empty(self, recurse: bool = False) -> bool:
        """Whether there are no entries; with `recurse`, whether there are none but composites that are empty too."""
        children = (self._child(name) for name in self._names())
        return all(recurse and isinstance(spec, SpecMapping) and spec.is_empty(True) for spec in children)

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: IsLeaf | None = None,
        step_mdp_static_only: bool = False,
    ) -> KeysView[Any]:
        """Return the keys; a nested one is a tuple.

        Args:
            include_nested: whether to list the entries of nested composites too.
            leaves_only: whether to leave out the composites themselves.
            is_leaf: tells from the class of a composite whether it counts as a leaf.
            step_mdp_static_only: whether to leave out entries that are not in a composite made with
                `step_mdp_static=True`.
        """
        return self._listed(include_nested, leaves_only, is_leaf, step_mdp_static_only).keys()

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: IsLeaf | None = None,
        step_mdp_static_only: bool = False,
    ) -> ValuesView[Any]:
        """Return the specs, see `keys`."""
        return self._listed(include_nested, leaves_only, is_leaf, step_mdp_static_only).values()

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: IsLeaf | None = None,
        step_mdp_static_only: bool = False,
    ) -> ItemsView[Any, Any]:
        """Return the keys with their specs, see `keys`."""
        return self._listed(include_nested, leaves_only, is_leaf, step_mdp_static_only).items()

    def _listed(
        self, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf | None, static_only: bool
    ) -> dict[NestedKey, Any]:
        found = self._flat(include_nested, leaves_only, is_leaf)
        if not static_only or self.step_mdp_static:
            return found
        return {key: spec for key, spec in found.items() if self._is_static(key)}

    def _is_static(self, key: NestedKey) -> bool:
        path = as_path(key) or ()
        above = (self[path[:depth]] for depth in range(1, len(path) + 1))
        return any(isinstance(spec, SpecMapping) and spec.step_mdp_static for spec in above)

    def _flat(self, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf | None) -> dict[NestedKey, Any]:
        found: dict[NestedKey, Any] = {}
        for name in self._names():
            spec = self._child(name)
            nested = isinstance(spec, SpecMapping) and not (is_leaf is not None and is_leaf(type(spec)))
            if not (leaves_only and nested):
                found[name] = spec
            if include_nested and nested:
                for key, leaf in spec._flat(True, leaves_only, is_leaf).items():
                    found[(name, key) if isinstance(key, str) else (name, *key)] = leaf
        return found

    # Changing

    def lock_(self, recurse: bool | None = None) -> Self:
        """Make changes raise RuntimeError, here and in nested composites unless `recurse` is False."""
        return self._set_lock(True, recurse is not False)

    def unlock_(self, recurse: bool | None = None) -> Self:
        """Allow changes again, also in nested composites unless `recurse` is False."""
        return self._set_lock(False, recurse is not False)

    def _set_lock(self, locked: bool, recurse: bool = True) -> Self:
        self._locked = locked
        for name in self._names() if recurse else ():
            spec = self._child(name)
            if isinstance(spec, SpecMapping):
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
        if not isinstance(inner, SpecMapping):
            inner = self._branch()
        inner.set(rest, spec)
        self._put(name, inner)
        return self

    def __setitem__(self, key: NestedKey, spec: Any) -> None:
        """Set the entry at a key, see `set`."""
        self.set(key, spec)

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

    def separates(self, *keys: NestedKey, default: Any = None) -> Any:
        """Delete entries and return them in a composite of their own.

        Args:
            *keys: the keys; one that is missing stands for `default`.
            default: a spec, or None for no entry.

        Returns:
            The composite, or None if it has no entries.
        """
        apart = self._branch()
        for key in keys:
            spec = self.pop(key, default)
            if spec is not None:
                apart.set(key, spec)
        return None if apart.is_empty() else apart

    def update(self, other: Mapping[Any, Any] | SpecMapping) -> Self:
        """Set all entries of another composite, on this one's device, merging nested ones; returns self."""
        self._require_unlocked()
        for key, spec in other.items():
            mine = self.get(key)
            if isinstance(mine, SpecMapping) and isinstance(spec, SpecMapping | Mapping):
                mine.update(spec)
            else:
                self.set(key, spec.to(self.device) if isinstance(spec, TensorSpec) else spec)
        return self
