"""What an info must be for it to be taken apart key by key: a tree of dicts. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioenvs.errors import SpecMismatchError

__all__ = ["MAX_DEPTH", "check_ends", "endless_info"]

MAX_DEPTH = 100  # of dicts within dicts
SHOWN = 8  # how many keys of a path


def check_ends(info: Mapping[Any, Any], who: str) -> None:
    """Refuse an info in which a dict contains itself.

    Args:
        info: What an env returned.
        who: The env, in messages.

    Raises:
        SpecMismatchError: If one does, or they are nested deeper than `MAX_DEPTH`.
    """
    left: list[tuple[Mapping[Any, Any], tuple[Any, ...], tuple[int, ...]]] = [(info, (), ())]
    while left:
        part, path, around = left.pop()
        if id(part) in around or len(path) > MAX_DEPTH:
            raise endless_info(who, path)
        around = (*around, id(part))
        left += [(value, (*path, key), around) for key, value in part.items() if isinstance(value, Mapping)]


def endless_info(who: str, path: Sequence[Any]) -> SpecMismatchError:
    """What comes of an info in which the keys of this path lead to a dict around itself."""
    shown = ", ".join(map(repr, path[:SHOWN])) + (", ..." if len(path) > SHOWN else "")
    return SpecMismatchError(
        f"{who}: expected an info of dicts that end, found one that contains itself, or more than {MAX_DEPTH} others, "
        f"at ({shown}); leave that entry out, or make it an object that is no dict"
    )
