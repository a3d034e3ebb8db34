"""Values as they cross the network: JSON or msgpack, arrays as lists or as bytes, never pickles. Free of torch."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["ARRAY", "FORMS", "MessageError", "check_depth", "dumps", "loads", "portable", "restored"]

ARRAY = "$array"  # the key of an array's dtype, beside "shape" and "data"
FORMS = ("json", "base64", "msgpack")
KINDS = "biufc"  # of dtypes that are nothing but numbers
MAX_DEPTH = 32


class MessageError(ValueError):
    """A message that makes no sense; it changes nothing. Its text is for whoever sent it."""


def loads(message: str | bytes, *, binary: bool = False) -> Any:
    """Return what a message says.

    Args:
        message: The text, or the bytes.
        binary: Whether it is msgpack.

    Raises:
        MessageError: If it is malformed, or deeper than anybody needs.
    """
    try:
        if binary:
            import msgpack

            value = msgpack.unpackb(message, max_ext_len=0)
        else:
            value = json.loads(message)
    except (ValueError, RecursionError, TypeError) as error:
        what = "msgpack" if binary else "JSON"
        why = "it is nested too deep" if isinstance(error, RecursionError) else type(error).__name__
        raise MessageError(f"expected a message in {what}, found something else ({why})") from None
    except Exception as error:  # msgpack's own errors, which are of no common class
        raise MessageError(f"expected a message in msgpack, found something else ({type(error).__name__})") from None
    check_depth(value)
    return value


def check_depth(value: Any, allowed: int = MAX_DEPTH) -> None:
    """Refuse what is nested deeper than allowed.

    Raises:
        MessageError: If it is.
    """
    if type(value) in (dict, list):
        if allowed == 0:
            raise MessageError(f"expected at most {MAX_DEPTH} levels in a message, found more")
        for each in value.values() if type(value) is dict else value:
            if type(each) in (dict, list):
                check_depth(each, allowed - 1)


def dumps(value: Any, form: str) -> bytes:
    """Return a value, which may have arrays in it, as bytes in a form.

    JSON knows no numbers that are not finite; these become null there, except in the bytes of arrays.
    """
    if form == "msgpack":
        import msgpack

        packed: bytes = msgpack.packb(portable(value, form))
        return packed
    value = portable(value, form)
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()


def portable(value: Any, form: str) -> Any:
    """Return a value as a form can say it; what none can say becomes the name of its class."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray):
        return _portable_array(value, form)
    if isinstance(value, np.generic):
        return portable(value.item(), form)
    if isinstance(value, Mapping):
        return {str(key): portable(each, form) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [portable(each, form) for each in value]
    if isinstance(value, bytes | bytearray):
        return bytes(value) if form == "msgpack" else base64.b64encode(value).decode()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return portable(value.detach().cpu().numpy(), form)
    return f"<{type(value).__name__}>"


def _portable_array(array: np.ndarray[Any, Any], form: str) -> Any:
    if array.dtype.kind not in KINDS:
        return [portable(each, form) for each in array.tolist()] if array.ndim else portable(array.item(), form)
    if form == "json":
        return array.tolist()
    array = np.ascontiguousarray(array).reshape(array.shape)
    data: Any = array.tobytes()
    if form == "base64":
        data = base64.b64encode(data).decode()
    return {ARRAY: array.dtype.str, "shape": list(array.shape), "data": data}


def restored(value: Any) -> Any:
    """Return a value with its arrays made of their bytes again.

    Raises:
        MessageError: If one is not what it says.
    """
    if type(value) is list:
        return [restored(each) for each in value]
    if type(value) is not dict:
        return value
    if ARRAY not in value:
        return {key: restored(each) for key, each in value.items()}
    try:
        dtype, shape, data = np.dtype(str(value[ARRAY])), tuple(map(int, value["shape"])), value["data"]
        if isinstance(data, str):
            data = base64.b64decode(data, validate=True)
        size = math.prod(shape) * dtype.itemsize
        if dtype.kind not in KINDS or any(dim < 0 for dim in shape) or size != len(data):
            raise ValueError
        return np.frombuffer(data, dtype).reshape(shape).copy()
    except (ValueError, TypeError, KeyError) as error:
        expected = f'{{"{ARRAY}": dtype, "shape": [...], "data": base64 or bytes}} with as many bytes as these say'
        raise MessageError(f"expected an array as {expected}, found {sorted(map(str, value))}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value
