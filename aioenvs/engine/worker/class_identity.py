"""Pickles of what a process says of itself to the one that started it. Free of torch.

A class that cannot be imported, such as one of a script, travels by value. cloudpickle knows it again where it came
from, but would write all of its attributes anew, with functions that have other globals; here it stays as it is.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import cloudpickle

__all__ = ["dumps"]

CLASS = 6  # how many parts cloudpickle's reduction of a class has, of which the last sets its attributes


def dumps(value: Any) -> bytes:
    """A pickle in which classes stay what they are where they are known.

    Args:
        value: Anything that cloudpickle takes.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == CLASS:
            return (*reduced[:-1], functools.partial(_completed, reduced[-1]))
        return reduced


def _completed(complete: Callable[[Any, Any], Any], cls: type, state: Any) -> Any:
    """Give a class its attributes, unless it has them: it was known then."""
    attributes, own = state[0], vars(cls)
    if own.get("__module__") == attributes.get("__module__") and own.keys() >= attributes.keys():
        return cls
    return complete(cls, state)
