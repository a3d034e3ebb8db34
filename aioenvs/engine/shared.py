"""Which things this process shares with others, as `multiprocessing` and torch have it. Free of torch."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

__all__ = ["is_shared", "reducer_of"]

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
