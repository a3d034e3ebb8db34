"""The chain of seeds that one number gives to many envs. Pure."""

from __future__ import annotations

import operator
import secrets
from typing import Any

import numpy as np

from aioenvs.errors import shown

__all__ = ["as_python", "integer_seed", "next_seed", "seed_chain"]

LIMIT = 2**32 - 1


def next_seed(seed: int) -> int:
    """The seed that follows in the chain; the rule is TorchRL's `seed_generator`."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % LIMIT


def as_python(seed: Any) -> Any:
    """An integer of numpy or torch, also in an array without dims, as one of Python; anything else as it is.

    >>> as_python(np.int64(3)), as_python(np.array(3)), as_python("three")
    (3, 3, 'three')
    """
    if isinstance(seed, bool | np.bool_) or getattr(seed, "shape", ()) != ():
        return seed
    try:
        return operator.index(seed)
    except TypeError:
        return seed


def integer_seed(seed: Any) -> int:
    """A seed as an integer of Python, which is what Gymnasium's envs take.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is negative.
    """
    number = as_python(seed)
    if type(number) is not int:
        raise TypeError(f"a seed must be an integer or None, got {shown(seed)}")
    if number < 0:
        raise ValueError(f"a seed must not be negative, got {number}")
    return number


def seed_chain(seed: int | None, count: int, *, static: bool = False) -> tuple[list[int], int]:
    """Seeds for `count` envs, and the next one in the chain.

    Args:
        seed: The first env's seed, None to draw one.
        count: How many envs.
        static: Give the same seed to all, and return it.

    Raises:
        TypeError: If the seed is not an integer.
        ValueError: If it is negative.
    """
    if seed is None:
        seed = secrets.randbelow(LIMIT)
    current = integer_seed(seed)
    if static:
        return [current] * count, current
    seeds = []
    for _ in range(count):
        seeds.append(current)
        current = next_seed(current)
    return seeds, current
