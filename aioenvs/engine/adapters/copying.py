"""Copies of what envs are given and of what they answer, so that they share only what is meant to be.

Free of torch.
"""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, overload

import cloudpickle
import numpy as np

__all__ = [
    "UnsendableError",
    "Withheld",
    "arguments",
    "copied",
    "is_shared",
    "packed",
    "received",
    "received_dict",
    "reducer_of",
]


# Of these `multiprocessing` knows less than cloudpickle does, and nothing of them is shared.
PLAIN = (types.MethodType, type(list.append), type(int.__add__), functools.partial)


def reducer_of(thing: Any) -> Any:
    """How `multiprocessing`, or torch, pickles a thing for another process that is to share it.

    Returns:
        A function of the thing; None where nothing is shared, or the thing itself knows how.
    """
    reduction = sys.modules.get("multiprocessing.reduction")  # which those that share anything import
    reduce = None if reduction is None else reduction.ForkingPickler._extra_reducers.get(type(thing))
    if reduce is None or isinstance(thing, PLAIN):
        return None
    if reduce.__name__ == "reduce_ctype":  # of a type of which some are shared
        return reduce if hasattr(thing, "_wrapper") else None
    memory = getattr(thing, "_untyped_storage", thing)
    return reduce if _in_shared_memory(memory) or not hasattr(type(memory), "is_shared") else None


def is_shared(thing: Any) -> bool:
    """Whether a copy of a thing in the same process would be another thing, or one that nobody shares."""
    if any(base.__module__.startswith("multiprocessing.") for base in type(thing).__mro__):
        return True
    return _in_shared_memory(thing) or (not hasattr(type(thing), "is_shared") and reducer_of(thing) is not None)


def _in_shared_memory(thing: Any) -> bool:
    """Whether tensors, or their memory, are; what is on a device is shared by nobody who was not asked to."""
    if not hasattr(type(thing), "is_shared"):  # of the type, since some objects answer for others
        return False
    try:
        return bool(thing.is_shared()) and not getattr(thing, "is_cuda", False)
    except Exception:  # such as of a sparse tensor, which has no memory in one piece
        return False


OPAQUE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)  # what deepcopy does not look into
CONTAINERS = frozenset((dict, list, tuple))
OWN_TUPLES = frozenset(("aioenvs.engine.adapters.base", "aioenvs.serving.hosting.hosted"))  # where named ones are
IMMUTABLE = frozenset((bool, int, float, complex, str, bytes, type(None), np.bool_))


class UnsendableError(TypeError):
    """A value of an env's cannot be copied or pickled for the caller; notes say which env, and which value."""


def copied(value: Any, *, keeps_graph: bool = False) -> Any:
    """A copy that shares nothing with the value.

    Args:
        value: Anything.
        keeps_graph: Keep tensors that require grad in their graph: a clone of what an operation made; leaves, which
            are their own place in it, are shared. Else they are copied in whatever way works, without a graph.

    Raises:
        Exception: Whatever comes of copying an object that cannot be copied.
    """
    if keeps_graph:
        return copy.deepcopy(value, {id(tensor): _in_graph(tensor) for tensor in _recorded(value)})
    try:
        return copy.deepcopy(value)
    except Exception:  # such as a tensor that an operation made
        return cloudpickle.loads(cloudpickle.dumps(value))


def received(value: Any, *, keeps_graph: bool = False) -> Any:
    """Return a copy that shares only what cannot be copied, such as locks; not the containers around that.

    Args:
        value: Anything.
        keeps_graph: See `copied`.

    >>> import threading
    >>> lock, names = threading.Lock(), ["a"]
    >>> own = received({"lock": lock, "names": names})
    >>> own["lock"] is lock, own["names"] is names
    (True, False)
    """
    try:
        return _rebuilt(value, set())
    except _NotPlainError:
        pass

    def attempt(part: Any) -> Any:
        return copied(part, keeps_graph=keeps_graph)

    return _pieces(value, attempt, {})


def packed(value: Any) -> bytes:
    """Return a value as a pickle, by value whatever is defined in the main module; quickly where nothing can be.

    Raises:
        Exception: Whatever comes of pickling an object that cannot be pickled.
    """
    try:
        _rebuilt(value, set())
    except _NotPlainError:
        data: bytes = cloudpickle.dumps(value)
        return data
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


class _NotPlainError(Exception):
    """A value is not made of numbers, texts and arrays alone."""


def _rebuilt(value: Any, seen: set[int]) -> Any:
    """A copy of a value that is made of numbers, texts and arrays, in containers of which none is there twice.

    Raises:
        _NotPlainError: If it is not.
    """
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if id(value) in seen or not (kind in CONTAINERS or (issubclass(kind, tuple) and kind.__module__ in OWN_TUPLES)):
        raise _NotPlainError
    if value:
        seen.add(id(value))
    if kind is dict:
        return {_rebuilt(key, seen): _rebuilt(each, seen) for key, each in value.items()}
    if kind is list:
        return [_rebuilt(each, seen) for each in value]
    each = [_rebuilt(part, seen) for part in value]
    return tuple(each) if kind is tuple else kind(*each)


def arguments(kwargs: Mapping[str, Any], *, keeps_graph: bool = False) -> dict[str, Any]:
    """Keyword arguments for one of the envs of this process: as `received`, but what is shared with others stays so.

    Args:
        kwargs: Those of the factory.
        keeps_graph: See `copied`.
    """
    given = dict(kwargs)
    kept = {id(part): part for part in _shared(given)}
    if not kept:
        return received(given, keeps_graph=keeps_graph)  # type: ignore[no-any-return]

    def attempt(part: Any) -> Any:
        recorded = {id(tensor): _in_graph(tensor) for tensor in _recorded(part)} if keeps_graph else {}
        try:
            return copy.deepcopy(part, recorded | kept)
        except Exception:
            if isinstance(part, dict | list | tuple):
                raise
            return copied(part, keeps_graph=keeps_graph)

    return _pieces(given, attempt, {})  # type: ignore[no-any-return]


def _shared(value: Any) -> Iterator[Any]:
    """The parts of a value that are shared with other processes."""
    left, seen = [value], set()
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, OPAQUE):
            continue
        seen.add(id(part))
        if is_shared(part):
            yield part
        elif isinstance(part, Mapping | list | tuple):
            left.extend(part.values() if isinstance(part, Mapping) else part)
        else:
            left.extend(getattr(part, "__dict__", {}).values())


def received_dict(given: dict[Any, Any]) -> dict[Any, Any]:
    """Return a `received` copy of a dict, quickly where it has numbers, texts and arrays."""
    own = {}
    for key, value in given.items():
        if type(value) in IMMUTABLE or isinstance(value, np.number):
            own[key] = value
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            own[key] = value.copy()
        else:
            return received(dict(given))  # type: ignore[no-any-return]
    return own


def _pieces(value: Any, attempt: Callable[[Any], Any], seen: dict[int, Any]) -> Any:
    """A copy in one go, or of the parts of a container, where `seen` are those that are being copied."""
    if id(value) in seen:
        return seen[id(value)]
    try:
        return attempt(value)
    except Exception:
        if not isinstance(value, dict | list | tuple):
            return value
    if isinstance(value, tuple):
        items = [_pieces(item, attempt, seen) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    fresh = seen[id(value)] = copy.copy(value)
    for place, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        fresh[place] = _pieces(item, attempt, seen)
    return fresh


def _recorded(value: Any) -> Iterator[Any]:
    """The tensors that require grad in lists, tuples and dicts, however nested."""
    left, seen = [value], set()
    while left:
        part = left.pop()
        if hasattr(type(part), "requires_grad"):  # of the type, since some objects answer for others
            if part.requires_grad:
                yield part
        elif isinstance(part, Mapping | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            left.extend(part.values() if isinstance(part, Mapping) else part)


def _in_graph(tensor: Any) -> Any:
    return tensor if getattr(tensor, "is_leaf", False) else tensor.clone()


class Withheld(Sequence[Any]):
    """The values of an attribute that envs have but cannot send: they are there, and any use of them raises.

    Args:
        error: What it raises.
        count: How many envs there are.
    """

    def __init__(self, error: Exception, count: int) -> None:
        self.error = error
        self._count = count

    @overload
    def __getitem__(self, index: int) -> NoReturn: ...

    @overload
    def __getitem__(self, index: slice) -> NoReturn: ...

    def __getitem__(self, index: Any) -> NoReturn:
        raise self.error.with_traceback(None)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<values of {self._count} envs, withheld: {self.error}>"
