"""Arguments of `AioVectorEnv`, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.seeding import as_python, integer_seed
from aioenvs.errors import shown

__all__ = ["check_concurrency", "seeds_of", "split_options", "start_method"]

MASK = "`options['reset_mask']`"  # as Gymnasium calls it


def start_method(method: str | None, context: str | None) -> str | None:
    """The one start method that goes by two names.

    Raises:
        TypeError: If they are not the same.
    """
    if None not in (method, context) and method != context:
        raise TypeError(f"context={shown(context)} and mp_start_method={shown(method)} mean the same; give one of them")
    return context if method is None else method


def check_concurrency(count: Any) -> None:
    """Refuse what is no number of envs.

    Raises:
        ValueError: If it is neither None nor an integer of at least 1.
    """
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {shown(count)}")
    if count < 1:
        raise ValueError(f"`max_concurrency` must be a positive integer or None, got {count}")


def seeds_of(seed: Any, num_envs: int) -> list[int | None]:
    """A seed for each env, or None.

    Args:
        seed: That of the first env, from which the others follow by ones; or one for each; or None.
        num_envs: How many envs there are.

    Raises:
        TypeError: If a seed is no integer.
        ValueError: If it is negative, or there is not one for each env.
    """
    if seed is None:
        return [None] * num_envs
    first = as_python(seed)
    if type(first) is int:
        return [integer_seed(first + env) for env in range(num_envs)]
    if (not isinstance(seed, Sequence) and getattr(seed, "shape", ()) == ()) or isinstance(seed, str | bytes):
        raise TypeError(f"a seed must be an integer, a list with one for each env, or None, got {shown(seed)}")
    if len(seed) != num_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got length={len(seed)}: "
            f"{shown(seed)}"
        )
    return [None if each is None else integer_seed(each) for each in seed]


def split_options(
    options: dict[str, Any] | None, num_envs: int
) -> tuple[NDArray[np.bool_] | None, dict[str, Any] | None]:
    """The mask of a partial reset, and the options without it; the caller's stay as they are.

    Raises:
        TypeError: If the mask is no array of bools.
        ValueError: If it has the wrong shape, or selects nobody.
    """
    if not isinstance(options, Mapping) or "reset_mask" not in options:
        return None, options
    options = dict(options)
    mask = options.pop("reset_mask")
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{MASK} must be a numpy array, got {shown(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"{MASK} must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{MASK} must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"{MASK} must contain a boolean array with at least one True value, got reset_mask={shown(mask, str)}"
        )
    return mask, options
