"""Tensorclasses: what is in one, and one made of that."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import Any

import cloudpickle
from tensordict import TensorDictBase, is_non_tensor, is_tensorclass
from tensordict.utils import _TENSORCLASS_MEMO

__all__ = ["dressed", "is_structure", "like", "name_classes", "opened", "same_class"]

_named: weakref.WeakSet[type] = weakref.WeakSet()


def is_structure(value: Any) -> bool:
    """Whether it is a tensorclass with entries of its own, rather than non-tensor data, which is one by name only."""
    return not isinstance(value, TensorDictBase) and is_tensorclass(value) and not is_non_tensor(value)


def opened(value: Any) -> Any:
    """The TensorDict in a tensorclass, which lacks the fields that are None; anything else as it is."""
    return value._tensordict if is_structure(value) else value


def dressed(td: Any, data_cls: Any) -> Any:
    """A TensorDict in a tensorclass, whose fields without an entry are None; as it is without a class.

    Raises:
        ValueError: an entry is no field of the class.
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
