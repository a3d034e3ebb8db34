"""What a caller asks for, checked before anything is sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs.batched.exchange import Rows
from aioenvs.engine.seeding import seed_chain

__all__ = ["check_size", "check_writable", "reset_arguments", "rows_of"]


def check_size(td: Any, batch_size: torch.Size) -> None:
    """Refuse anything but a TensorDict of this batch size.

    Raises:
        TypeError: If it is no TensorDict.
        RuntimeError: If it has another batch size.
    """
    if type(td) is not TensorDict and not isinstance(td, TensorDictBase):
        raise TypeError(f"expected a TensorDict of shape {tuple(batch_size)}, got {type(td).__name__}")
    if td.batch_size != batch_size:
        raise RuntimeError(f"Expected a tensordict with shape==env.batch_size, got {td.batch_size} and {batch_size}")


def check_writable(td: TensorDictBase, entries: Mapping[str, Any]) -> None:
    """Refuse a TensorDict that a step's outcome could not be put into.

    Raises:
        RuntimeError: If it is locked.
        TypeError: If there is something else than a TensorDict under `next`.
    """
    if td.is_locked:
        raise RuntimeError("the TensorDict is locked, so `next` cannot be set in it; unlock_() or clone() it first")
    following = entries.get("next")
    if following is not None and not isinstance(following, TensorDictBase):
        raise TypeError(f"expected a TensorDict, or nothing, under 'next', found {type(following).__name__}")


def rows_of(entries: Mapping[str, Any] | TensorDictBase, name: str, batch_size: torch.Size) -> Rows:
    """The envs that the mask `name` selects, ascending; None if it selects all or there is none.

    Raises:
        ValueError: If it is not a bool tensor of shape `(N,)` or `(N, 1)`.
    """
    mask = entries.get(name, None)
    if mask is None:
        return None
    allowed = (batch_size, torch.Size([*batch_size, 1]))
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape not in allowed:
        tensor = isinstance(mask, torch.Tensor)
        found = f"{mask.dtype} of shape {tuple(mask.shape)}" if tensor else type(mask).__name__
        raise ValueError(
            f"{name!r} must be a bool tensor of shape {tuple(allowed[0])} or {tuple(allowed[1])}, got {found}"
        )
    flat = mask.reshape(-1).cpu().numpy()
    return None if flat.all() else np.flatnonzero(flat)


def reset_arguments(
    num_envs: int, each: Sequence[Mapping[str, Any]] | None, common: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """What each env's own `reset` gets: the common arguments, a seed of the chain, then its own.

    Raises:
        RuntimeError: If there are not as many dicts as envs.
    """
    if each is not None and len(each) != num_envs:
        raise RuntimeError(f"list_of_kwargs must have one dict for each of {num_envs} envs, but has {len(each)}")
    shared = dict(common)
    seed = shared.pop("seed", None)
    seeds = seed_chain(seed, num_envs)[0] if seed is not None else None
    arguments: dict[int, dict[str, Any]] = {}
    for env in range(num_envs):
        own = shared | ({} if seeds is None else {"seed": seeds[env]}) | dict(each[env] if each is not None else {})
        if own:
            arguments[env] = own
    return arguments
