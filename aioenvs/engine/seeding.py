"""The chain of seeds that one number gives to many envs. Pure."""

from __future__ import annotations

import secrets

import numpy as np

from aioenvs.errors import shown

__all__ = ["next_seed", "seed_chain"]

LIMIT = 2**32 - 1


def next_seed(seed: int) -> int:
    """The seed that follows in the chain; the rule is TorchRL's `seed_generator`."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % LIMIT


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
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"a seed must be an integer or None, got {shown(seed)}")
    if seed < 0:
        raise ValueError(f"a seed must not be negative, got {seed}")
    current = int(seed)
    if static:
        return [current] * count, current
    seeds = []
    for _ in range(count):
        seeds.append(current)
        current = next_seed(current)
    return seeds, current
