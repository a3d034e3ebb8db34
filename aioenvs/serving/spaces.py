"""Gymnasium's spaces for the network: values checked against them, and they themselves as JSON. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from aioenvs.anything import Anything
from aioenvs.errors import shown
from aioenvs.serving.codec import MessageError, restored

__all__ = ["described", "json_schema", "payload_of", "rebuilt", "received", "unwrapped"]


def payload_of(space: Space[Any] | None, value: Any, key: str) -> Any:
    """Return the dict in which a value travels: itself in a Dict space, else under a key."""
    return value if isinstance(space, spaces.Dict) else {key: value}


def unwrapped(space: Space[Any] | None, payload: Any, key: str) -> Any:
    """Return the value that a payload has in it.

    Raises:
        MessageError: If it is no such dict.
    """
    if isinstance(space, spaces.Dict):
        return payload
    names = payload.keys() - {"metadata"} if isinstance(payload, Mapping) else ()
    if not isinstance(payload, Mapping) or set(names) != {key}:
        found = sorted(map(str, payload)) if isinstance(payload, Mapping) else shown(payload)
        raise MessageError(f'expected {{"{key}": ...}}, found {found}')
    return payload[key]


def received(space: Space[Any] | None, value: Any, where: str = "the action") -> Any:
    """Return a value that came as JSON, as an element of a space.

    Bounds of a Box are the env's own business, as in Gymnasium's batches.

    Raises:
        MessageError: If it is none.
    """
    if isinstance(space, spaces.Discrete):
        if isinstance(value, np.ndarray | np.integer) and value.ndim == 0:
            value = value.item()
        if type(value) is int and space.start <= value < space.start + space.n:
            return space.dtype.type(value)
        last = space.start + space.n - 1
        raise MessageError(f"expected an integer from {space.start} to {last} as {where}, found {_short(value)}")
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return _array(space, value, where)
    if isinstance(space, spaces.Text):
        if isinstance(value, str) and value in space:
            return value
        raise MessageError(f"expected {space} as {where}, found {_short(value)}")
    if isinstance(space, spaces.Dict):
        names = set(space.spaces)
        if isinstance(value, dict) and "metadata" not in names:
            value = {name: each for name, each in value.items() if name != "metadata"}
        if not isinstance(value, dict) or value.keys() != names:
            found = sorted(value) if isinstance(value, dict) else _short(value)
            raise MessageError(f"expected a dict with the keys {sorted(names)} as {where}, found {found}")
        return {name: received(each, value[name], f"{name!r} of {where}") for name, each in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, list | tuple) or len(value) != len(space.spaces):
            raise MessageError(f"expected a list of {len(space.spaces)} as {where}, found {_short(value)}")
        parts = enumerate(zip(space.spaces, value, strict=True))
        return tuple(received(each, part, f"part {index} of {where}") for index, (each, part) in parts)
    if isinstance(space, spaces.Sequence) and not space.stack:
        if not isinstance(value, list | tuple):
            raise MessageError(f"expected a list as {where}, found {_short(value)}")
        return tuple(received(space.feature_space, part, f"a part of {where}") for part in value)
    value = restored(value)
    if space is None or isinstance(space, Anything) or space.contains(value):
        return value
    raise MessageError(f"expected {space} as {where}, found {_short(value)}")


def _array(space: Any, value: Any, where: str) -> Any:
    expected = f"numbers of shape {space.shape} and dtype {space.dtype}"
    if isinstance(value, dict):
        value = restored(value)
    try:
        found = np.asarray(value)
        if found.dtype.kind not in "biuf" or found.shape != space.shape:
            raise ValueError
        if found.dtype.kind == "f" and space.dtype.kind in "biu":
            raise ValueError
        array = found.astype(space.dtype)
    except (ValueError, TypeError, OverflowError):
        raise MessageError(f"expected {expected} as {where}, found {_short(value)}") from None
    if not isinstance(space, spaces.Box) and not space.contains(array):
        raise MessageError(f"expected an element of {space} as {where}, found {_short(value)}")
    return array


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


# -- spaces as JSON ---------------------------------------------------------------------------------------


def described(space: Space[Any] | None) -> dict[str, Any]:
    """Return a description of which `rebuilt` makes the same space; arrays in it are numpy's."""
    match space:
        case spaces.Box():
            return {"type": "Box", "low": space.low, "high": space.high, "dtype": space.dtype.str}
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": space.dtype.str}
        case spaces.MultiDiscrete():
            return {"type": "MultiDiscrete", "nvec": space.nvec, "start": space.start, "dtype": space.dtype.str}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": list(space.shape)}
        case spaces.Text():
            letters = "".join(sorted(space.character_set))
            return {"type": "Text", "min": space.min_length, "max": space.max_length, "charset": letters}
        case spaces.Dict():
            return {"type": "Dict", "spaces": {name: described(each) for name, each in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [described(each) for each in space.spaces]}
        case spaces.Sequence() if not space.stack:
            return {"type": "Sequence", "of": described(space.feature_space)}
    return {"type": "Anything"}


def rebuilt(description: Any) -> Space[Any]:
    """Return the space of a description, whose arrays were `restored`; `Anything` for what is not known."""
    try:
        return _rebuilt(description)
    except (KeyError, ValueError, TypeError, AssertionError, AttributeError):
        return Anything()


def _rebuilt(given: Any) -> Space[Any]:
    match given["type"]:
        case "Box":
            low, high = (np.asarray(given[name]) for name in ("low", "high"))
            return spaces.Box(low, high, low.shape, np.dtype(given["dtype"]).type)
        case "Discrete":
            return spaces.Discrete(given["n"], start=given["start"], dtype=np.dtype(given["dtype"]).type)
        case "MultiDiscrete":
            dtype = np.dtype(given["dtype"]).type
            return spaces.MultiDiscrete(np.asarray(given["nvec"]), dtype, start=np.asarray(given["start"]))
        case "MultiBinary":
            return spaces.MultiBinary(given["n"])
        case "Text":
            return spaces.Text(given["max"], min_length=given["min"], charset=given["charset"])
        case "Dict":
            return spaces.Dict({name: rebuilt(each) for name, each in given["spaces"].items()})
        case "Tuple":
            return spaces.Tuple([rebuilt(each) for each in given["spaces"]])
        case "Sequence":
            return spaces.Sequence(rebuilt(given["of"]))
    return Anything()


def json_schema(space: Space[Any] | None) -> dict[str, Any]:
    """Return the JSON schema of a space's elements as they travel; that of everything, if there is none."""
    match space:
        case spaces.Discrete():
            low = int(space.start)
            return {"type": "integer", "minimum": low, "maximum": low + int(space.n) - 1}
        case spaces.Box():
            number: dict[str, Any] = {"type": "number" if space.dtype.kind == "f" else "integer"}
            for name, bound in (("minimum", space.low), ("maximum", space.high)):
                if bound.size and np.isfinite(bound.flat[0]) and (bound == bound.flat[0]).all():
                    number[name] = bound.flat[0].item()
            return _arrays(space.shape, number)
        case spaces.MultiDiscrete():
            return _arrays(space.shape, {"type": "integer", "minimum": int(space.start.min())})
        case spaces.MultiBinary():
            return _arrays(space.shape, {"type": "integer", "minimum": 0, "maximum": 1})
        case spaces.Text():
            return {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
        case spaces.Dict():
            properties = {name: json_schema(each) for name, each in space.spaces.items()}
            return {"type": "object", "properties": properties, "required": list(properties)}
        case spaces.Tuple():
            parts = [json_schema(each) for each in space.spaces]
            return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
        case spaces.Sequence():
            return {"type": "array", "items": json_schema(space.feature_space)}
    return {}


def _arrays(shape: tuple[int, ...], schema: dict[str, Any]) -> dict[str, Any]:
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema
